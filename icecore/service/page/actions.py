"""Handlers that sign in and out, and handlers of forms that start an operation; each of these acts
like a route of the API.
"""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
from aiohttp import web

from icecore.errors import UsageError
from icecore.host.jobs.registry import require_name
from icecore.service.api import (
    job_handlers,
    models,
    node_handlers,
    operation_handlers,
    requests,
    snapshot_handlers,
)
from icecore.service.api.problems import Unauthenticated
from icecore.service.api.routing import Call, Handler
from icecore.service.api.tokens import Token
from icecore.service.page import render
from icecore.service.page.sessions import (
    COOKIE,
    FORM_TOKEN,
    PATH,
    SESSIONS,
    holder_of,
    require_own_form,
    session_of,
    set_cookie,
)

#: Time for a form to arrive.
BODY_SECONDS = 30.0
_FORM = "application/x-www-form-urlencoded"


class Link(msgspec.Struct, frozen=True):
    """A link that signs in, once; ``path`` is below the address of the service."""

    path: str


async def make_link(call: Call) -> Any:
    """Return a link that signs the caller in to the page."""
    secret = call.request.app[SESSIONS].link(holder_of(call.request, _token_of(call)))
    return Link(f"{PATH}/enter?link={secret}")


def _token_of(call: Call) -> Token | None:
    """Return the token of a caller; None: a process on the unix socket.

    Raises:
        Unauthenticated: It was removed, or has expired.
    """
    if call.known.kind != "token":
        return None
    _, _, secret = call.request.headers.get("Authorization", "").partition(" ")
    token = call.service.tokens.find(secret.strip())
    if token is None:
        raise Unauthenticated("the token is no longer valid")
    return token


async def enter(call: Call) -> web.StreamResponse:
    """Sign in with a link."""
    cookie = call.request.app[SESSIONS].enter(call.query.link, holder_of(call.request, None))
    if cookie is None:
        raise Unauthenticated(
            "this link was already used or has expired", cure="get another: icecore page"
        )
    return _signed_in(call, cookie)


async def show_sign_in(call: Call) -> web.StreamResponse:
    """Show the form that asks for a token."""
    if session_of(call.request) is not None:
        return _see_other(PATH)
    return render.page("sign_in.html", title="Sign in", error="")


async def sign_in(call: Call) -> web.StreamResponse:
    """Sign in with a token."""
    if call.request.headers.get("Sec-Fetch-Site", "same-origin") not in ("same-origin", "none"):
        raise Unauthenticated("this form does not come from this page", cure="load the page again")
    given = await _form(call)
    token = call.service.tokens.find(given.get("token", "").strip())
    if token is None:
        return render.page(
            "sign_in.html", status=401, title="Sign in", error="This token is not valid."
        )
    return _signed_in(call, call.request.app[SESSIONS].begin(holder_of(call.request, token)))


async def sign_out(call: Call) -> web.StreamResponse:
    """Sign out."""
    await _own_form(call)
    call.request.app[SESSIONS].end(call.request.cookies.get(COOKIE, ""))
    response = _see_other(f"{PATH}/sign-in")
    response.del_cookie(COOKIE, path=PATH)
    return response


def _signed_in(call: Call, cookie: str) -> web.StreamResponse:
    response = _see_other(PATH)
    set_cookie(response, call.request, cookie)
    return response


# -- operations


async def dump(call: Call) -> web.StreamResponse:
    """Take a snapshot of a job."""
    given = await _own_form(call)
    return await _started(call, job_handlers.dump_job, requests.DumpRequest(stop="stop" in given))


async def restore(call: Call) -> web.StreamResponse:
    """Restore a snapshot, or only preview the restore on this machine."""
    given = await _own_form(call)
    name = given.get("name", "").strip()
    if name:
        require_name(name)
    body = requests.RestoreRequest(dry_run="check" in given, name=name)
    return await _started(call, snapshot_handlers.restore_snapshot, body)


async def compare(call: Call) -> web.StreamResponse:
    """Compare a snapshot with its parent, or with another one."""
    given = await _own_form(call)
    older = given.get("older", "").strip()
    if older:
        found = await call.service.stored(snapshot_handlers.find, call, older)
        older = found.snapshot.snapshot
    body = requests.DiffRequest(older=older)
    return await _started(call, snapshot_handlers.compare_snapshot, body)


async def mark(call: Call) -> web.StreamResponse:
    """Pin or unpin a snapshot."""
    given = await _own_form(call)
    body = requests.MarkRequest(pin=given.get("pin") == "yes")
    return await _started(call, snapshot_handlers.mark_snapshot, body)


async def collect(call: Call) -> web.StreamResponse:
    """Plan a garbage collection, or carry it out."""
    given = await _own_form(call)
    body = requests.GcRequest(dry_run="apply" not in given)
    return await _started(call, snapshot_handlers.collect_repository, body)


async def check(call: Call) -> web.StreamResponse:
    """Verify the objects that snapshots need."""
    await _own_form(call)
    return await _started(call, snapshot_handlers.check_repository, requests.CheckRequest())


async def examine(call: Call) -> web.StreamResponse:
    """Examine this machine."""
    await _own_form(call)
    return await _started(call, node_handlers.examine_node, requests.Nothing())


async def cancel(call: Call) -> web.StreamResponse:
    """Cancel an operation."""
    await _own_form(call)
    call.body = requests.CancelRequest()
    await operation_handlers.cancel_operation(call)
    return _see_other(f"{PATH}/operations/{call.subject.id}")


async def _started(call: Call, handle: Handler, body: Any) -> web.StreamResponse:
    """Start an operation as the API does, and show it."""
    call.body = body
    if call.query is None or not hasattr(call.query, "user"):
        call.query = requests.SnapshotQuery()
    response = await handle(call)
    made = msgspec.json.decode(response.body, type=models.Operation)
    return _see_other(f"{PATH}/operations/{made.id}")


async def _own_form(call: Call) -> dict[str, str]:
    """Return the fields of a form of this page.

    Raises:
        Denied: The form comes from another site.
    """
    given = await _form(call)
    require_own_form(call.request, given.get(FORM_TOKEN, ""))
    return given


async def _form(call: Call) -> dict[str, str]:
    if call.request.content_type != _FORM:
        raise UsageError(f"the body has the type {call.request.content_type}", cure=f"send {_FORM}")
    try:
        async with asyncio.timeout(BODY_SECONDS):
            data = await call.request.post()
    except TimeoutError:
        raise UsageError("the form did not arrive in time") from None
    return {name: value for name, value in data.items() if isinstance(value, str)}


def _see_other(where: str) -> web.Response:
    return web.Response(status=303, headers={**render.HEADERS, "Location": where})
