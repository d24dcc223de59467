"""Start operations for routes."""

from __future__ import annotations

import os
import resource
import time
from typing import Any

import msgspec
from aiohttp import web

from icecore.errors import Denied, UsageError
from icecore.host.jobs.identity import Identity
from icecore.host.kernel.peer import Peer
from icecore.service.api import models, operations
from icecore.service.api.caller import Caller
from icecore.service.api.operation_files import Stored
from icecore.service.api.responses import Response
from icecore.service.api.routing import Call
from icecore.service.api.service import Where

_MOST_KEY = 255


def start(
    call: Call,
    kind: models.Kind,
    words: list[str],
    *,
    owner: int,
    where: Where | None,
    job: str = "",
    snapshot: str = "",
    **more: Any,
) -> web.Response:
    """Start an operation; return the response that describes it.

    Args:
        words: The command and its options.
        owner: The uid whose job or repository it works on.
        where: The repository; None: none is required.
        more: Further fields of `Stored`.

    Raises:
        Conflict, Busy: As `Operations.create`.
        UsageError: The Idempotency-Key is too long.
    """
    key = call.request.headers.get("Idempotency-Key", "")
    if len(key) > _MOST_KEY or not key.isascii():
        raise UsageError(f"the Idempotency-Key has {len(key)} characters", cure="use at most 255")
    place = [f"--repository={where.location}"] if where is not None and where.location else []
    wanted = Stored(
        id=operations.new_id(),
        kind=kind,
        caller=call.known.name,
        caller_key=key_of(call.known),
        owner=owner,
        created=time.time(),
        words=[*call.service.words, *place, *words],
        job=job,
        snapshot=snapshot,
        key=key,
        digest=operations.digest_of(
            call.request.method.encode(), call.request.rel_url.raw_path_qs.encode(), call.raw
        ),
        **more,
    )
    made, new = call.service.operations.create(wanted)
    call.audit = {"operation": made.id, **({} if new else {"repeated": True})}
    return answer(made, status=202, headers={"Location": f"/v1/operations/{made.id}"})


def key_of(caller: Caller) -> str:
    """Return the key of a caller: its user or its token, the same for all its connections."""
    return f"uid:{caller.uid}" if caller.kind == "socket" else caller.name


def answer(value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> web.Response:
    """Return a struct as a response."""
    return Response(
        body=msgspec.json.encode(value),
        status=status,
        content_type="application/json",
        headers=headers,
    )


def owner_or_none(uid: int) -> int | None:
    """Return the uid for `Backing.where`: root's jobs are the administrators'."""
    return uid or None


async def identity_of(call: Call) -> Identity:
    """Return the identity of the jobs that the caller starts.

    Raises:
        Denied: It may not start jobs.
        NotFound, UsageError: Its process has ended, or has changed its credentials.
    """
    caller = call.known
    peer = caller.peer
    if peer is not None:
        # Its connection may be closed, and the descriptor's number reused, while the thread reads.
        held = msgspec.structs.replace(peer, pidfd=os.dup(peer.pidfd) if peer.pidfd >= 0 else -1)
        found = await call.service.locally(_of_peer, held)
        if found.group != peer.gid or set(found.groups) != set(peer.gids):
            raise Denied("the caller has changed its groups since it connected")
        return found
    if caller.uid is None and not caller.is_as_root:
        raise Denied(
            "this token cannot start jobs, because it has no user",
            cure="make one with a user: icecore token add NAME --user USER",
        )
    found = Identity.of_user(str(caller.uid or 0))  # with this process's limits
    own = call.service.operations
    if own.priority is not None:
        found = msgspec.structs.replace(found, nice=own.priority)
    if own.descriptors is not None:
        limits = {**found.limits, resource.RLIMIT_NOFILE: own.descriptors}
        found = msgspec.structs.replace(found, limits=limits)
    return found


def _of_peer(peer: Peer) -> Identity:
    """Return the identity of a process; closes its pidfd."""
    try:
        return Identity.of_peer(peer)
    finally:
        peer.close()


def as_json(identity: Identity) -> dict[str, Any]:
    """Return an identity for JSON; `msgspec.convert` converts it back to `Identity`."""
    found: dict[str, Any] = msgspec.to_builtins(identity, str_keys=True)
    return found
