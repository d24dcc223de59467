"""The handlers of the routes about jobs, operations and the node."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import msgspec
from aiohttp import web

from icecore.errors import Denied, NotFound, UsageError
from icecore.host.jobs.job import Job, LogPiece, Stream
from icecore.host.jobs.registry import require_name
from icecore.service.api import command_lines, models
from icecore.service.api.caller import Role
from icecore.service.api.listing import page
from icecore.service.api.problems import Conflict
from icecore.service.api.routing import Call
from icecore.service.api.service import owner_of
from icecore.service.api.starting import as_json, identity_of, owner_or_none, start
from icecore.service.record import read as read_schedule
from icecore.text import host_name, jsonable

_POLL_SECONDS = 0.1
_PIECE = 256 << 10
_BEAT_SECONDS = 15.0
_KILL_SECONDS = 30.0
_STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


# -- jobs


def as_job(call: Call, job: Job, supervising: Mapping[str, str]) -> models.Job:
    """Return an instance as a resource.

    Args:
        supervising: The operations that supervise jobs, by the jobs' names.
    """
    known, status = job.description, job.status()
    measured = read_schedule(call.service.registry.state, job.name)
    schedule = models.Schedule(
        snapshots=len(measured.taken),
        last_snapshot=measured.taken[-1].at if measured.taken else None,
        window_seconds=measured.window_seconds,
        background_seconds=measured.background_seconds,
        commit_seconds=measured.commit_seconds,
        stop_seconds=measured.stop_seconds,
        failures=measured.failures,
        ran_seconds=measured.ran_seconds,
    )
    operation = supervising.get(job.name, "")
    return models.Job(
        name=job.name,
        instance=job.instance,
        owner=owner_of(job),
        user=job.description.user_name,
        state=job.state,
        pid=job.pid,
        created=known.created,
        command=jsonable(known.command),
        cwd=jsonable(known.cwd),
        isolation={
            name: bool(getattr(known.isolation, name)) for name in ("pid", "ipc", "network", "root")
        },
        restored_from=known.restored_from,
        snapshot=known.snapshot,
        lineage=known.lineage,
        how="" if status is None else str(status),
        code=None if status is None else status.code,
        signal=None if status is None else status.signal,
        exit_status=None if status is None else status.exit_code,
        kept_bytes=call.service.registry.kept(job),
        log_bytes={str(k): v for k, v in job.log_sizes().items()} if job.directory.exists() else {},
        operation=operation,
        schedule=schedule if measured.taken or operation else None,
    )


async def list_jobs(call: Call) -> Any:
    """List the jobs that the caller may see."""

    supervising = call.service.operations.supervising()

    def look() -> models.Items[models.Job]:
        jobs = call.service.jobs(call.known)
        if not call.query.all:
            jobs = [job for job in jobs if job.state in ("running", "starting")]
        shown, following = page(jobs, call.query, lambda job: job.instance)
        return models.Items(items=[as_job(call, job, supervising) for job in shown], next=following)

    return await call.service.locally(look)


async def show_job(call: Call) -> Any:
    """Show one job."""
    return await call.service.locally(
        as_job, call, call.subject, call.service.operations.supervising()
    )


async def run_job(call: Call) -> Any:
    """Start a command as a job."""
    wanted: models.RunRequest = call.body
    caller = call.known
    own = wanted.supervise
    if own is not None:
        commands = (own.requeue_command, own.notice_command, own.notice_url)
        if caller.role < Role.ADMIN and any(commands):
            raise Denied(
                "root would use the commands and URLs of a supervised job",
                cure="ask an administrator to configure them in [schedule]",
            )
        if not wanted.name:
            raise UsageError("a supervised job requires a name", cure="give 'name'")
    if wanted.name:
        require_name(wanted.name)
    if not caller.may_touch(wanted.name or os.path.basename(wanted.command[0]), caller.uid):
        raise Denied(f"the caller may not touch a job of the name {wanted.name!r}")
    identity = await identity_of(call)
    if wanted.umask is not None:
        identity = replace(identity, umask=wanted.umask)
    environment = dict(wanted.environment)
    if caller.kind == "token":
        environment = {"PATH": os.defpath, **identity.environment(), **environment}
    where = call.service.where(caller) if own is not None else None
    if own is not None and where is not None:
        if where.shared and own.keep is not None:
            _require_admin_of_shared(call)
        await call.service.stored(call.service.backing.prepare, where)
    return start(
        call,
        "run",
        command_lines.of_run(wanted),
        owner=identity.user,
        where=where,
        job=wanted.name,
        command=wanted.command,
        environment=environment,
        identity=as_json(identity),
        supervised=own is not None,
    )


def _require_admin_of_shared(call: Call) -> None:
    """Require an administrator for a policy in a shared repository: users share job names there."""
    if not call.known.whole_node:
        raise Denied(
            "users share this repository, and a policy applies to all snapshots of a name",
            cure="name the snapshots to forget, or ask an administrator",
        )


async def dump_job(call: Call) -> Any:
    """Take a snapshot of a job; with ``stop``, end it once the snapshot is committed."""
    job: Job = call.subject
    if not job.alive:
        raise NotFound(
            f"job {job.name} is not running: {job.status() or job.state}",
            cure="'icecore ps' lists the running jobs",
        )
    owner = owner_of(job)
    where = call.service.backing.where(owner_or_none(owner))
    await call.service.stored(call.service.backing.prepare, where)
    return start(
        call,
        "dump",
        command_lines.of_dump(call.body, job.instance),
        owner=owner,
        where=where,
        job=job.name,
    )


async def signal_job(call: Call) -> Any:
    """Send a signal to a job; KILL ends all its processes."""
    job: Job = call.subject
    number = _signal(call.body.signal)
    await call.service.locally(job.kill, number)
    if number == signal.SIGKILL:
        await call.service.locally(job.wait, _KILL_SECONDS)
    call.audit = {"signal": signal.Signals(number).name, "instance": job.instance}
    return await call.service.locally(as_job, call, job, call.service.operations.supervising())


def _signal(text: str) -> int:
    word = text.upper().removeprefix("SIG")
    named = {one.name.removeprefix("SIG"): int(one) for one in signal.Signals}
    number = named.get(word, int(word) if word.isdecimal() and len(word) < 4 else 0)
    if number not in named.values():
        raise UsageError(
            f"there is no signal {text!r}",
            cure="use a name such as TERM, KILL, USR1, or its number",
        )
    return number


async def remove_job(call: Call) -> Any:
    """Forget a job that has ended, and its logs."""
    job: Job = call.subject
    if job.state in ("running", "starting"):
        raise Conflict(f"job {job.name} ({job.instance}) runs", cure="end it first")
    await call.service.locally(call.service.registry.remove, job)
    call.audit = {"instance": job.instance}
    return web.Response(status=204)


async def job_logs(call: Call) -> Any:
    """Return a job's output: the bytes of one stream, or JSON lines for both."""
    job: Job = call.subject
    query: models.LogsQuery = call.query
    both = query.stream == "both"
    response = web.StreamResponse()
    response.content_type = "application/x-ndjson" if both else "application/octet-stream"
    response.headers["Cache-Control"] = "no-store"
    await response.prepare(call.request)
    offsets: dict[Stream, int] = {"stdout": query.stdout, "stderr": query.stderr}
    with suppress(ConnectionResetError):  # the client hangs up
        async for piece in _pieces(call, job, offsets):
            if not both:
                if piece is not None and piece.stream == query.stream:
                    await response.write(piece.data)
                continue
            # An empty line shows that the service is alive while the job writes nothing.
            line = b"" if piece is None else _as_line(piece)
            await response.write(line + b"\n")
        if query.follow and both and not job.alive:
            status = await call.service.locally(job.wait)
            ended = {"how": str(status), "code": status.code, "signal": status.signal}
            await response.write(msgspec.json.encode({"ended": ended}) + b"\n")
        await response.write_eof()
    return response


def _as_line(piece: LogPiece) -> bytes:
    data = base64.b64encode(piece.data).decode()
    return msgspec.json.encode({"stream": piece.stream, "data": data})


async def _pieces(call: Call, job: Job, offsets: dict[Stream, int]) -> Any:
    """Yield a job's output after some offsets until the job ends; None: nothing new, keep alive."""
    loop = asyncio.get_running_loop()
    beat = loop.time()
    while True:
        ended = not call.query.follow or not job.alive
        for stream in _STREAMS:
            while data := await call.service.locally(_read_log, job, stream, offsets[stream]):
                offsets[stream] += len(data)
                beat = loop.time()
                yield LogPiece(stream, data)
        if ended or call.service.stopping or call.gone:
            return
        if loop.time() - beat > _BEAT_SECONDS:
            beat = loop.time()
            yield None
        await asyncio.sleep(_POLL_SECONDS)


def _read_log(job: Job, stream: Stream, at: int) -> bytes:
    try:
        with open(job.log_path(stream), "rb") as file:
            file.seek(at)
            return file.read(_PIECE)
    except FileNotFoundError:  # it was removed meanwhile
        return b""


# -- operations


async def list_operations(call: Call) -> Any:
    """List the operations that the caller may see, oldest first."""
    found = [
        one
        for one in call.service.operations.all()
        if may_see(call, one) and call.query.state in (None, one.state)
    ]
    shown, following = page(found, call.query, lambda one: one.id)
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
        if record is None:
            if call.service.stopping or call.gone:
                return
            if loop.time() - beat > _BEAT_SECONDS:
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


# -- the node


async def show_node(call: Call) -> Any:
    """Show this node: its jobs, operations, and room for staging."""

    operations = dict(Counter(str(one.state) for one in call.service.operations.all()))

    def look() -> models.Node:
        service = call.service
        return models.Node(
            host=host_name(),
            version=service.version,
            started=service.started,
            jobs_running=sum(job.state == "running" for job in service.registry.instances()),
            operations=operations,
            staging=service.backing.staging(),
        )

    return await call.service.locally(look)


async def examine_node(call: Call) -> Any:
    """Examine this machine, as ``icecore doctor`` does."""
    return start(
        call,
        "doctor",
        ["doctor"],
        owner=0,
        where=await call.service.stored(call.service.backing.where, None),
    )


async def show_self(call: Call) -> Any:
    """Show the caller as the service knows it."""
    caller = call.known
    where = await call.service.stored(call.service.where, caller)
    return models.Self(
        name=caller.name,
        kind="socket" if caller.kind == "socket" else "token",
        role=caller.role.name.lower(),
        uid=caller.uid,
        jobs=list(caller.jobs),
        repository=where.location,
    )


async def health(call: Call) -> Any:
    """Return the state of the service."""
    return models.Health(status="stopping" if call.service.stopping else "ok")
