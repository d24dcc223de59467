"""The handlers of the routes about jobs."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import cache
from typing import Any

import msgspec
from aiohttp import web
from msgspec.structs import replace

from icecore.errors import Denied, NotFound, UsageError
from icecore.host.jobs.job import ExitStatus, Job
from icecore.host.jobs.logs import STREAMS, LogPiece, LogReader, Stream
from icecore.host.jobs.registry import require_name
from icecore.service.api import command_lines, models, requests
from icecore.service.api.listing import paginate
from icecore.service.api.problems import Conflict
from icecore.service.api.routing import BEAT_SECONDS, Call
from icecore.service.api.service import owner_of
from icecore.service.api.starting import as_json, identity_of, owner_or_none, start
from icecore.service.api.workers import readable
from icecore.service.explained import Explained, explain
from icecore.service.record import Measured
from icecore.text import jsonable

_POLL_SECONDS = 0.1
_PIECE = 256 << 10
_KILL_SECONDS = 30.0


def as_job(
    call: Call,
    job: Job,
    supervising: Mapping[str, str],
    schedule_of: Callable[[str], Measured] | None = None,
) -> models.Job:
    """Return an instance as a resource.

    Args:
        supervising: The operations that supervise jobs, by the jobs' names.
        schedule_of: Returns the schedule record of the job with a given name. Default: that of the
            service.
    """
    state = job.state  # asked once: each time is a look at /proc
    ended = state in ("ended", "failed")
    found = call.service.ended.get(job.instance)
    # What has ended stays as it is, and the registry returns the same object again.
    if found is not None and ended and found[0]() is job:
        shown = found[1]
    else:
        shown = _instance(job, state, job.status() if ended else None)
        if ended:
            call.service.remember(job, shown)
    measured = (schedule_of or call.service.schedules.of)(job.name)
    operation = supervising.get(job.name, "")
    schedule = None
    if measured.taken or operation:
        schedule = models.Schedule(
            snapshots=measured.snapshots,
            last_snapshot=measured.taken[-1].at if measured.taken else None,
            window_seconds=measured.window_seconds,
            background_seconds=measured.background_seconds,
            commit_seconds=measured.commit_seconds,
            stop_seconds=measured.stop_seconds,
            failures=measured.failures,
            ran_seconds=measured.ran_seconds,
        )
    kept = call.service.registry.kept(job) if ended else 0
    return msgspec.structs.replace(shown, kept_bytes=kept, operation=operation, schedule=schedule)


def _instance(job: Job, state: models.JobState, status: ExitStatus | None) -> models.Job:
    """Return what the instance's own files tell of it.

    Args:
        status: How it ended; None: it has not.
    """
    known = job.description
    return models.Job(
        name=job.name,
        instance=job.instance,
        owner=owner_of(job),
        user=known.user_name,
        state=state,
        pid=job.pid,
        created=known.created,
        command=jsonable(known.command),
        cwd=jsonable(known.cwd),
        isolation={
            name: bool(getattr(known.isolation, name))
            for name in ("pid", "ipc", "network", "root", "tmp")
            # A client of an earlier version does not know "tmp".
            if name != "tmp" or known.isolation.tmp
        },
        restored_from=known.restored_from,
        snapshot=known.snapshot,
        lineage=known.lineage,
        how="" if status is None else str(status),
        code=None if status is None else status.code,
        signal=None if status is None else status.signal,
        exit_status=None if status is None else status.exit_code,
        data=jsonable(known.data),
        kept_bytes=0,
        log_bytes={str(k): v for k, v in job.log_sizes().items()},
        log_limit=known.log_limit,
        operation="",
        schedule=None,
    )


async def list_jobs(call: Call) -> Any:
    """List the jobs that the caller may see."""

    supervising = call.service.operations.supervising()

    def look() -> models.Items[models.Job]:
        jobs = call.service.jobs(call.known)
        if not call.query.all:
            jobs = [job for job in jobs if job.state in ("running", "starting")]
        shown, following = paginate(jobs, call.query, lambda job: job.instance)
        # A supervised job may have hundreds of instances.
        schedule_of = cache(call.service.schedules.of)
        items = [as_job(call, job, supervising, schedule_of) for job in shown]
        return models.Items(items=items, next=following)

    return await call.service.locally(look)


async def show_job(call: Call) -> Any:
    """Show one job."""
    return await call.service.locally(
        as_job, call, call.subject, call.service.operations.supervising()
    )


async def explain_schedule(call: Call) -> Any:
    """Explain how often icecore takes snapshots of a job."""
    name = call.subject.name

    def look() -> Explained:
        return explain(name, call.service.schedules.of(name), call.service.config.schedule)

    return await call.service.locally(look)


async def run_job(call: Call) -> Any:
    """Start a command as a job."""
    wanted: requests.RunRequest = call.body
    caller = call.known
    own = wanted.supervise
    if own is not None:
        commands = (own.requeue_command, own.notice_command, own.notice_url)
        if any(commands) and not caller.is_as_root:
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
    await call.service.locally(job.end, number)
    if number == signal.SIGKILL and await _ends(job, _KILL_SECONDS):
        await call.service.removing(job.tidy)
    call.audit = {"signal": signal.Signals(number).name, "instance": job.instance}
    return await call.service.locally(as_job, call, job, call.service.operations.supervising())


async def _ends(job: Job, seconds: float) -> bool:
    """Wait, without a thread, until a job has ended. Return False if it still runs after
    ``seconds``.
    """
    init = job.open_init()
    if init is None:
        return True
    try:
        async with asyncio.timeout(seconds):
            await readable(init)
        return True
    except TimeoutError:
        return False
    finally:
        os.close(init)


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
    await call.service.removing(call.service.registry.remove, job)
    call.audit = {"instance": job.instance}
    return web.Response(status=204)


async def job_logs(call: Call) -> Any:
    """Return a job's output: the bytes of one stream, or JSON lines for both."""
    job: Job = call.subject
    query: requests.LogsQuery = call.query
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
        if query.follow and both and not call.revoked():
            await _send_end(call, response, job)
        await response.write_eof()
    return response


async def _send_end(call: Call, response: web.StreamResponse, job: Job) -> None:
    """If a job has ended, remove what it leaves and send how it ended."""
    with suppress(NotFound):  # it was removed meanwhile
        job = await call.service.locally(Job.load, job.directory)
    status = job.status()
    if status is None:
        return
    await call.service.removing(job.tidy)
    ended = {"how": str(status), "code": status.code, "signal": status.signal}
    await response.write(msgspec.json.encode({"ended": ended}) + b"\n")


def _as_line(piece: LogPiece) -> bytes:
    data = base64.b64encode(piece.data).decode()
    line: dict[str, str | int] = {"stream": piece.stream, "data": data}
    if piece.removed:
        line["removed"] = piece.removed
    return msgspec.json.encode(line)


async def _pieces(call: Call, job: Job, offsets: dict[Stream, int]) -> Any:
    """Yield a job's output after some offsets until the job ends; None: nothing new, keep alive."""
    loop = asyncio.get_running_loop()
    beat = loop.time()
    while True:
        if job.state == "starting":
            try:
                job = await call.service.locally(Job.load, job.directory)
            except NotFound:  # it failed to start
                return
        ended = not call.query.follow or job.state not in ("starting", "running")
        for stream in STREAMS:
            while piece := await call.service.locally(_read_log, job, stream, offsets[stream]):
                offsets[stream] += piece.removed + len(piece.data)
                beat = loop.time()
                yield piece
                if call.revoked():
                    return
        if ended or call.revoked() or call.service.stopping or call.gone:
            return
        if loop.time() - beat > BEAT_SECONDS:
            beat = loop.time()
            yield None
        await asyncio.sleep(_POLL_SECONDS)


def _read_log(job: Job, stream: Stream, at: int) -> LogPiece | None:
    """Return the output after an offset; None at the end of the log."""
    try:
        with LogReader(job.directory, stream, at) as reader:
            return reader.read(_PIECE)
    except FileNotFoundError:  # it was removed meanwhile
        return None
