"""The handlers of the routes about operations."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Any

import msgspec
from aiohttp import web

from icecore.errors import UsageError
from icecore.service.api import models
from icecore.service.api.listing import paginate
from icecore.service.api.routing import BEAT_SECONDS, Call


async def list_operations(call: Call) -> Any:
    """List the operations that the caller may see, oldest first."""
    found = [
        one
        for one in call.service.operations.all()
        if may_see(call, one) and call.query.state in (None, one.state)
    ]
    shown, following = paginate(found, call.query, lambda one: one.id)
    return models.Items(items=shown, next=following)


def may_see(call: Call, operation: models.Operation) -> bool:
    """Return whether the caller may see an operation: of one of its jobs, or begun by it."""
    return call.known.may_touch(operation.job, operation.owner) or (
        operation.caller == call.known.name and not operation.job
    )


async def show_operation(call: Call) -> Any:
    """Show one operation."""
    return call.subject


async def cancel_operation(call: Call) -> Any:
    """Cancel an operation, as Ctrl-C cancels a command."""
    call.audit = {"signal": call.body.signal}
    name = call.body.signal.upper().removeprefix("SIG")
    return call.service.operations.cancel(call.subject.id, name)


async def operation_events(call: Call) -> Any:
    """Send an operation's events as server-sent events; Last-Event-ID resumes."""
    response = web.StreamResponse(headers={"Cache-Control": "no-store"})
    response.content_type = "text/event-stream"
    last = call.request.headers.get("Last-Event-ID", "")
    after = call.query.after
    if last:
        if not last.isdecimal() or len(last) > 18:
            raise UsageError(f"Last-Event-ID {last!r} is not the id of an event")
        after = int(last)
    await response.prepare(call.request)
    with suppress(ConnectionResetError):  # the client hangs up; the operation goes on
        await _send_events(call, response, after)
        await response.write_eof()
    return response


async def _send_events(call: Call, response: web.StreamResponse, after: int) -> None:
    """Send an operation's events after an offset until it has ended, and then ``end``."""
    loop = asyncio.get_running_loop()
    beat = loop.time()
    async for record in call.service.operations.records(call.subject.id, after):
        if call.revoked():
            return
        if record is None:
            if call.service.stopping or call.gone:
                return
            if loop.time() - beat > BEAT_SECONDS:
                beat = loop.time()
                await response.write(b": beat\n\n")
            continue
        beat = loop.time()
        data = _as_event(*record, text=call.query.text)
        if data:
            await response.write(data)
    ended = msgspec.json.encode(call.service.operations.get(call.subject.id))
    await response.write(b"event: end\ndata: " + ended + b"\n\n")


def _as_event(id: int, line: bytes, *, text: bool) -> bytes:
    """Return a record as a server-sent event; empty: a text that was not requested."""
    if text:
        return b"id: %d\nevent: record\ndata: %b\n\n" % (id, line)
    record = msgspec.json.decode(line)
    event = record.get("event")
    if not isinstance(event, dict):
        return b""
    name = str(event.get("event", "event")).encode()
    return b"id: %d\nevent: %b\ndata: %b\n\n" % (id, name, msgspec.json.encode(event))
