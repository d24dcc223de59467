"""The routes of the page. The service checks them like those of the API."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Annotated, Any, Literal

import msgspec
from aiohttp import web

from icecore.errors import Denied, IcecoreError
from icecore.service.api import models, problems, requests
from icecore.service.api.caller import Role
from icecore.service.api.problems import Unauthenticated
from icecore.service.api.routing import Handler, Method, Route, Scope
from icecore.service.page import actions, render, views
from icecore.service.page.sessions import PATH, SESSIONS, Sessions, caller_of

_HTML = "text/html"
_READ, _OPERATE, _ADMIN = Role.READ, Role.OPERATE, Role.ADMIN
Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


class Filter(requests.Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of lists that can be filtered."""

    q: Annotated[str, msgspec.Meta(max_length=256)] = ""


class OfState(requests.Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of the list of operations."""

    state: models.State | Literal[""] = ""


class LinkQuery(requests.Request, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Parameters of a link that signs in."""

    link: Annotated[str, msgspec.Meta(max_length=128)] = ""


def routes() -> list[Route]:
    """Return the routes of the page."""
    job, snapshot = f"{PATH}/jobs/{{name}}", f"{PATH}/snapshots/{{snapshot}}"
    operation = f"{PATH}/operations/{{operation}}"
    own = requests.SnapshotQuery
    return [
        *_public(),
        _page("", "own", views.show_jobs, Filter),
        _page("/jobs", "own", views.show_jobs, Filter),
        Route(
            "GET", job, _READ, "own", "Show a job.", views.show_job_page, _HTML, identify=caller_of
        ),
        _at("GET", snapshot, "snapshot", views.show_snapshot_page, query=own),
        _page("/operations", "own", views.show_operations, OfState),
        _at("GET", operation, "operation", views.show_operation_page),
        _at("GET", f"{operation}/live", "operation", views.live_operation),
        _page("/repository", "own", views.show_repository_page),
        _page("/repository/statistics", "repository", views.show_statistics),
        _page("/repository/replicas", "repository", views.show_replicas),
        _page("/nodes", "own", views.show_nodes),
        _at("GET", f"{PATH}/audit", "node", views.show_audit, _ADMIN, query=Filter),
        _at("POST", f"{PATH}/sign-out", "none", actions.sign_out),
        _at("POST", f"{PATH}/jobs/{{job}}/dump", "job", actions.dump, _OPERATE),
        _at("POST", f"{snapshot}/restore", "snapshot", actions.restore, _OPERATE, query=own),
        _at("POST", f"{snapshot}/diff", "snapshot", actions.compare, _READ, query=own),
        _at("POST", f"{snapshot}/mark", "snapshot", actions.mark, _OPERATE, query=own),
        _at("POST", f"{PATH}/repository/gc", "repository", actions.collect, _OPERATE),
        _at("POST", f"{PATH}/repository/check", "repository", actions.check, _OPERATE),
        _at("POST", f"{PATH}/nodes/doctor", "node", actions.examine, _ADMIN),
        _at("POST", f"{operation}/cancel", "operation", actions.cancel, _OPERATE),
    ]


def _public() -> list[Route]:
    """Return the routes that require no session; a link is made by a caller of the API."""
    return [
        Route(
            "POST", f"{PATH}/links", _READ, "none", "Make a link.", actions.make_link, actions.Link
        ),
        _open("GET", "/enter", actions.enter, LinkQuery),
        _open("GET", "/sign-in", actions.show_sign_in),
        _open("POST", "/sign-in", actions.sign_in),
        _open("GET", "/static/{version}/{name:.+}", views.show_file),
    ]


def _open(method: Method, path: str, handle: Handler, query: Any = None) -> Route:
    return Route(
        method, f"{PATH}{path}", Role.PUBLIC, "none", _about(handle), handle, _HTML, query=query
    )


def _page(path: str, scope: Scope, handle: Handler, query: Any = None) -> Route:
    return _at("GET", f"{PATH}{path}", scope, handle, query=query)


def _at(
    method: Method,
    path: str,
    scope: Scope,
    handle: Handler,
    role: Role = _READ,
    query: Any = None,
) -> Route:
    return Route(
        method, path, role, scope, _about(handle), handle, _HTML, query=query, identify=caller_of
    )


def _about(handle: Handler) -> str:
    return (handle.__doc__ or "").partition("\n")[0]


def prepare(app: web.Application) -> None:
    """Add the state of the page to an application."""
    app[SESSIONS] = Sessions()
    app.router.add_get("/", _to_page)


async def _to_page(request: web.Request) -> web.StreamResponse:
    return web.Response(status=303, headers={"Location": PATH})


@web.middleware
async def errors_as_pages(request: web.Request, handler: Handle) -> web.StreamResponse:
    """Show errors of the page's routes as pages; show the sign-in form without a session."""
    if not request.path.startswith(PATH) or request.path == f"{PATH}/links":
        return await handler(request)
    try:
        return await handler(request)
    except Unauthenticated as error:
        return _unknown(request, error)
    except IcecoreError as error:
        return render.page(
            "error.html",
            status=problems.status_of(error),
            title="Refused" if isinstance(error, Denied) else "Error",
            message=error.message,
            cure=error.cure,
        )


def _unknown(request: web.Request, error: Unauthenticated) -> web.StreamResponse:
    if request.headers.get("HX-Request"):  # a part of a page that was signed out meanwhile
        return web.Response(
            status=204, headers={**render.HEADERS, "HX-Redirect": f"{PATH}/sign-in"}
        )
    if request.method == "GET" and request.path != f"{PATH}/enter":
        return web.Response(status=303, headers={**render.HEADERS, "Location": f"{PATH}/sign-in"})
    return render.page("sign_in.html", status=401, title="Sign in", error=error.message)
