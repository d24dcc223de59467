"""The OpenAPI 3.1 document, made from the table of routes."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import msgspec

from icecore.service.api import models
from icecore.service.api.caller import Role
from icecore.service.api.responses import Response
from icecore.service.api.routing import TABLE, Call, Route

_REFERENCE = "#/components/schemas/{name}"
_ABOUT = {
    "job": "a job's name, its instance id, or the pid of one of its processes",
    "snapshot": "an id or the beginning of one, JOB, JOB~1, JOB@1 or latest",
    "operation": "an operation's id",
}
_PARAMETER = re.compile(r"{(\w+)}")
_PROBLEMS = {
    400: "The request is malformed.",
    401: "The request has no valid token.",
    403: "The caller lacks the role, or may not do this.",
    404: "There is no such thing that the caller may touch.",
    409: "The request contradicts an earlier one, or the state of its subject.",
    413: "The body is too large.",
    429: "The caller sends too many requests, or has too many operations.",
    500: "Something failed.",
    502: "The storage failed.",
    503: "The service stops or is too busy.",
    507: "The storage is full.",
}


async def openapi_document(call: Call) -> Any:
    """Return the OpenAPI document of this service."""
    found = document(call.request.app[TABLE], call.service.version)
    return Response(body=msgspec.json.encode(found), content_type="application/json")


def document(table: Iterable[Route], version: str) -> dict[str, Any]:
    """Return the document of some routes."""
    routes = [route for route in table if route.path.startswith("/v1/")]
    kinds: dict[Any, None] = {models.Error: None}
    for route in routes:
        for kind in (route.answer, route.body, route.query):
            if kind is not None and not isinstance(kind, str):
                kinds[kind] = None
    listed = list(kinds)
    schemas, components = msgspec.json.schema_components(listed, ref_template=_REFERENCE)
    schema_of = dict(zip(listed, schemas, strict=True))
    paths: dict[str, Any] = {}
    for route in routes:
        paths.setdefault(route.path, {})[route.method.lower()] = _operation(
            route, schema_of, components
        )
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "icecore",
            "version": version,
            "description": "The node service of icecore.",
            "license": {"name": "Apache-2.0", "identifier": "Apache-2.0"},
        },
        "paths": paths,
        "components": {
            "schemas": components,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
    }


def _operation(route: Route, schema_of: dict[Any, Any], components: dict[str, Any]) -> Any:
    found: dict[str, Any] = {
        "operationId": route.name,
        "summary": route.what,
        "tags": [route.path.split("/")[2]],
        "x-icecore-role": route.role.name.lower(),
        "x-icecore-scope": route.scope,
        "parameters": [*_path_parameters(route), *_query_parameters(route, schema_of, components)],
        "responses": _responses(route, schema_of),
        "security": [] if route.role == Role.PUBLIC else [{"token": []}],
    }
    if route.starts:
        found["parameters"].append(
            {
                "name": "Idempotency-Key",
                "in": "header",
                "description": "the same key and request give the same operation for 24 hours",
                "schema": {"type": "string", "maxLength": 255, "pattern": "^[!-~]*$"},
            }
        )
    if route.body is not None:
        found["requestBody"] = {"content": {"application/json": {"schema": schema_of[route.body]}}}
    return found


def _path_parameters(route: Route) -> list[dict[str, Any]]:
    return [
        {
            "name": name,
            "in": "path",
            "required": True,
            "description": _ABOUT[name],
            "schema": {"type": "string", "minLength": 1},
        }
        for name in _PARAMETER.findall(route.path)
    ]


def _query_parameters(
    route: Route, schema_of: dict[Any, Any], components: dict[str, Any]
) -> list[dict[str, Any]]:
    if route.query is None:
        return []
    schema = schema_of[route.query]
    schema = components[schema["$ref"].rsplit("/", 1)[1]]
    return [
        {"name": name, "in": "query", "required": False, "schema": _flat(inner)}
        for name, inner in schema.get("properties", {}).items()
    ]


def _flat(schema: dict[str, Any]) -> dict[str, Any]:
    """Return the schema of a parameter, without null."""
    options = [one for one in schema.get("anyOf", []) if one != {"type": "null"}]
    if len(options) == 1:
        return {**options[0]}
    return {key: value for key, value in schema.items() if value is not None or key != "default"}


def _responses(route: Route, schema_of: dict[Any, Any]) -> dict[str, Any]:
    done: dict[str, Any] = {"description": route.what}
    if isinstance(route.answer, str):
        done["content"] = {route.answer: {}}
        if route.name == "job_logs":
            done["content"]["application/octet-stream"] = {}
    elif route.answer is not None:
        done["content"] = {"application/json": {"schema": schema_of[route.answer]}}
    if route.starts:
        done["headers"] = {"Location": {"schema": {"type": "string"}}}
    problem = {"application/problem+json": {"schema": schema_of[models.Error]}}
    return {
        str(route.status): done,
        **{
            str(status): {"description": text, "content": problem}
            for status, text in _PROBLEMS.items()
        },
    }
