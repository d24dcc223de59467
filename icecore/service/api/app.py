"""The application. It authenticates each request, applies rate limits, checks it against its route,
finds its subject, records it in the audit log, and only then handles it.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import msgspec
from aiohttp import web

from icecore.errors import Denied, IcecoreError, UsageError
from icecore.host.kernel.peer import Peer
from icecore.service.api import models, problems, requests, snapshot_handlers
from icecore.service.api.caller import Caller, Role, of_peer
from icecore.service.api.connections import guard_of
from icecore.service.api.operation_handlers import may_see
from icecore.service.api.operation_table import unknown
from icecore.service.api.problems import Busy, TooLarge, Unauthenticated
from icecore.service.api.route_table import ROUTES
from icecore.service.api.routing import TABLE, Call, Route
from icecore.service.api.service import CALLER, SERVICE, Service
from icecore.service.api.starting import answer
from icecore.service.api.tokens import Token

if TYPE_CHECKING:
    from aiohttp.typedefs import Middleware

#: A job's command and environment (ARG_MAX is 2 MiB), and what JSON adds.
MOST_BODY = 8 << 20
_BODY_SECONDS = 30.0
_JSON = "application/json"
#: Characters of a part of the path in the audit log.
_MOST_MATCH = 256


def build(
    service: Service, more: Iterable[Route] = (), inner: Sequence[Middleware] = ()
) -> web.Application:
    """Return the application of a service.

    Args:
        more: Further routes, checked like those of the table.
        inner: Middlewares that see errors before they become problems.
    """
    middlewares: list[Middleware] = [_guarded, _problems, *inner]
    app = web.Application(client_max_size=MOST_BODY, middlewares=middlewares)
    app[SERVICE] = service
    app[TABLE] = (*ROUTES, *more)
    for route in app[TABLE]:
        app.router.add_route(route.method, route.path, _dispatching(route), name=None)
    return app


Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


@web.middleware
async def _guarded(request: web.Request, handler: Handle) -> web.StreamResponse:
    """Tell the connection's guard when a request begins and ends."""
    guard = guard_of(request)
    if guard is None:
        return await handler(request)
    guard.begins()
    try:
        return await handler(request)
    finally:
        guard.ends()


@web.middleware
async def _problems(request: web.Request, handler: Handle) -> web.StreamResponse:
    """Turn errors into problems."""
    try:
        return await handler(request)
    except IcecoreError as error:
        return _refusal(error)
    except web.HTTPException as error:
        if error.status < 400:
            raise
        headers = {"Allow": error.headers["Allow"]} if "Allow" in error.headers else {}
        return _as_response(problems.plain(error.status, error.text or ""), headers)
    except (ConnectionError, asyncio.CancelledError):
        raise
    except Exception as error:
        request.app.logger.exception("internal error in %s %s", request.method, request.path)
        return _refusal(IcecoreError(f"internal error: {type(error).__name__}: {error}"))


def _refusal(error: IcecoreError) -> web.Response:
    headers = {}
    if isinstance(error, Unauthenticated):
        headers["WWW-Authenticate"] = 'Bearer realm="icecore"'
    if isinstance(error, Busy):
        headers["Retry-After"] = str(max(1, round(error.after)))
    return _as_response(problems.problem(error), headers)


def _as_response(problem: models.Error, headers: dict[str, str]) -> web.Response:
    return web.Response(
        body=msgspec.json.encode(problem),
        status=problem.status,
        content_type=problems.CONTENT_TYPE,
        headers=headers,
    )


# -- who calls


def caller_of(service: Service, request: web.Request) -> Caller:
    """Return the caller of a request.

    Raises:
        Unauthenticated: The request has no valid token.
        Denied: The user may not use the service.
    """
    guard = guard_of(request)
    if guard is not None and guard.peer is not None:
        return of_socket(service, guard.peer, guard.refusal)
    kind, _, secret = request.headers.get("Authorization", "").partition(" ")
    token = service.tokens.find(secret.strip()) if kind.lower() == "bearer" else None
    if token is None:
        raise Unauthenticated(
            "the request has no valid token", cure="make one on the node: icecore token add NAME"
        )
    return of_token(token, request)


def of_socket(service: Service, peer: Peer, refusal: str) -> Caller:
    """Return the process at the other end of a unix socket.

    Args:
        refusal: Why the service refuses the process; empty: it does not.

    Raises:
        Denied: The user may not use the service.
    """
    if refusal:
        raise Denied(refusal, cure="call the service from outside the container or sandbox")
    found = of_peer(peer, admin_gid=service.admin_gid, others=service.others)
    if found.role == Role.PUBLIC:
        raise Denied("only administrators may use this service", cure="ask an administrator")
    return found


def of_token(token: Token, request: web.Request) -> Caller:
    """Return the holder of a token."""
    return Caller(
        name=f"token {token.name}",
        kind="token",
        role=Role[token.role.upper()],
        uid=token.uid,
        sees_all=token.uid is None,
        jobs=tuple(token.jobs),
        where=request.remote or "",
    )


# -- one request


def _dispatching(route: Route) -> Handle:
    async def dispatch(request: web.Request) -> web.StreamResponse:
        service = request.app[SERVICE]
        call = Call(service, request, None)
        try:
            await _authorise(route, call)
            await _parse(route, call)
            await _with_subject(route, call)
        except IcecoreError as error:
            known = call.caller is not None or route.role > Role.PUBLIC
            if known and not isinstance(error, Busy):
                _record_refusal(route, call, error)
            raise
        if not route.changes:
            return await _handled(route, call)
        if route.role == Role.PUBLIC:
            return await _signed_in(route, call)
        return await _recorded(route, call)

    return dispatch


async def _authorise(route: Route, call: Call) -> None:
    """Identify the caller, apply its rate limit, and require the role of the route."""
    service, request = call.service, call.request
    guard = guard_of(request)
    if route.role == Role.PUBLIC:
        _count(service, guard.who if guard is not None else request.remote or "")
        return
    try:
        call.identify = partial(route.identify or caller_of, service, request)
        call.caller = call.identify()
    except Denied:
        _count(service, guard.who if guard is not None else request.remote or "")
        raise
    CALLER.set(call.caller.name)
    _count(service, call.caller.name)
    if call.caller.role < route.role:
        raise Denied(
            f"this requires the role {route.role.name.lower()};"
            f" the caller has {call.caller.role.name.lower()}",
            cure="ask an administrator",
        )


def _count(service: Service, who: str) -> None:
    wait = service.rate.take(who)
    if wait:
        raise Busy("too many requests", cure="send fewer requests per second", after=wait)


async def _parse(route: Route, call: Call) -> None:
    """Read parameters and body as the route declares them."""
    request = call.request
    given = dict(request.query)
    if len(given) < len(request.query):
        raise UsageError("a parameter is given twice", cure="give each parameter once")
    query = route.query or requests.Nothing
    try:
        call.query = msgspec.convert(given, query, strict=False)
    except msgspec.ValidationError as error:
        raise UsageError(f"parameters: {error}", cure="see /v1/openapi.json") from None
    if route.body is None:
        return
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            call.raw = await request.read()
    except TimeoutError:
        raise UsageError("the body did not arrive in time") from None
    except web.HTTPRequestEntityTooLarge:
        raise TooLarge(f"the body is larger than {MOST_BODY} bytes") from None
    if call.raw and request.content_type != _JSON:
        raise UsageError(f"the body has the type {request.content_type}", cure=f"send {_JSON}")
    try:
        call.body = msgspec.json.decode(call.raw or b"{}", type=route.body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"body: {error}", cure="see /v1/openapi.json") from None


async def _with_subject(route: Route, call: Call) -> None:
    """Find the subject of the request among what the caller may access."""
    service, about = call.service, call.request.match_info
    match route.scope:
        case "job":
            call.subject = await service.locally(service.job, call.known, about["job"])
        case "snapshot":
            call.subject = await service.stored(snapshot_handlers.find, call, about["snapshot"])
        case "operation":
            found = service.operations.get(about["operation"])
            if not may_see(call, found):
                raise unknown(about["operation"])
            call.subject = found
        case "repository":
            call.subject = await service.stored(service.own_repository, call.known)
        case "node":
            if not call.known.whole_node:
                raise Denied(
                    "only callers that may see all jobs may do this", cure="ask an administrator"
                )


async def _handled(route: Route, call: Call) -> web.StreamResponse:
    made = await route.handle(call)
    if isinstance(made, web.StreamResponse):
        return made
    return answer(made, status=route.status)


async def _recorded(route: Route, call: Call) -> web.StreamResponse:
    """Record a request that changes something in the audit log, then handle it."""
    id = secrets.token_hex(8)
    who = _who(call)["who"]
    _audit(call.service, id=id, state="begun", **_who(call), **_what(route, call))
    try:
        response = await _handled(route, call)
    except IcecoreError as error:
        status, name = problems.status_of(error), type(error).__name__
        _audit(call.service, id=id, state="failed", who=who, status=status, error=name)
        raise
    except BaseException as error:
        name = type(error).__name__
        _audit(call.service, id=id, state="failed", who=who, status=500, error=name)
        raise
    about = {"who": who, "status": response.status, **(call.audit or {})}
    _audit(call.service, id=id, state="done", **about)
    return response


async def _signed_in(route: Route, call: Call) -> web.StreamResponse:
    """Handle a request of somebody whom nobody knows yet; a failure counts as a refusal."""
    try:
        response = await _handled(route, call)
    except IcecoreError as error:
        _record_refusal(route, call, error)
        raise
    if response.status < 400:
        _audit(call.service, state="done", status=response.status, **_about(route, call))
    else:
        _refuse(call.service, status=response.status, **_about(route, call))
    return response


def _record_refusal(route: Route, call: Call, error: IcecoreError) -> None:
    status, name = problems.status_of(error), type(error).__name__
    _refuse(call.service, status=status, error=name, **_about(route, call))


def _about(route: Route, call: Call) -> dict[str, Any]:
    return {**_who(call), **_what(route, call)}


def _who(call: Call) -> dict[str, Any]:
    if call.caller is not None:
        return {"who": call.caller.name, "from": call.caller.where}
    return {"who": "", "from": call.request.remote or ""}


def _what(route: Route, call: Call) -> dict[str, Any]:
    about = {key: value[:_MOST_MATCH] for key, value in call.request.match_info.items()}
    return {"what": route.name, "subject": about}


def _audit(service: Service, **fields: Any) -> None:
    """Write to the audit log.

    Raises:
        IcecoreError: The entry cannot be written, so the request must not be carried out.
    """
    with _written():
        service.audit.write(**fields)


def _refuse(service: Service, **fields: Any) -> None:
    with _written():
        service.audit.refuse(**fields)


@contextmanager
def _written() -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise IcecoreError(
            f"the audit log cannot be written: {error.strerror}", cure="free space on the node"
        ) from error
