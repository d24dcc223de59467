"""The process of an operation of the node service: ``python -m icecore.worker DIR FD ATTEMPT``.

It runs one command of icecore and records the command's output and events. FD is a descriptor that
holds the operation's lock for as long as this process lives.
"""

from __future__ import annotations

import fcntl
import io
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import msgspec

from icecore.cli import main as run_command
from icecore.commands.context import Origin
from icecore.commands.output import Output
from icecore.config.loading import load
from icecore.errors import (
    IcecoreError,
    JobHeld,
    PreflightRefused,
    ResumeFailed,
    StoreDenied,
    StoreError,
)
from icecore.events import Event, Value
from icecore.host.jobs.description import boot_id
from icecore.host.jobs.identity import Identity
from icecore.host.jobs.job import Job, stopped_with
from icecore.host.kernel import procfs
from icecore.service.api import operation_files as files
from icecore.service.api.journal import Writer
from icecore.service.api.operation_files import Process, Result, Stored
from icecore.text import jsonable

#: Events that carry the result of an operation; the last one counts.
_RESULTS = frozenset({"run.started", "run.resumed", "dump.done", "restore.running"})
#: Events that name the instance that is supervised from then on.
_BEGUN = frozenset({"run.started", "run.resumed", "run.adopted"})
#: Failures in a row, other than of the repository, after which a supervisor is not replaced.
_MOST_FAILURES = 10
#: A supervisor that ran for so many seconds could do its work.
_LONG_SECONDS = 600.0
#: Errors after which a supervisor is not replaced: the job runs elsewhere, or cannot be restored.
_FINAL = (JobHeld.exit_code, ResumeFailed.exit_code)


class Recorder(Output):
    """An output that records each call, so that `icecore.commands.replay` can print it elsewhere.

    Args:
        writer: Gets the records.
        directory: Of the operation; gets the instance that is supervised.
        brief: Leave out progress and the job's output, which are unbounded.
    """

    def __init__(self, writer: Writer, directory: Path, *, brief: bool) -> None:
        super().__init__(quiet=True, stdout=_Nowhere(), stderr=_Nowhere())
        self._writer = writer
        self._directory = directory
        self._brief = brief
        self.last: dict[str, Any] = {}
        self.failure: dict[str, Any] | None = None

    def result(self, name: str, fields: Mapping[str, Value], text: str = "") -> None:
        """Record a result."""
        event = Event(name, dict(fields)).as_json()
        self.last = event
        self._record("result", event=event, text=text)

    def line(self, text: str) -> None:
        """Record a line."""
        self._record("line", text=text)

    def table(
        self,
        columns: Sequence[str],
        rows: Sequence[Sequence[str]],
        *,
        title: str = "",
        right: Sequence[str] = (),
    ) -> None:
        """Record a table."""
        rows = [list(row) for row in rows]
        self._record("table", columns=list(columns), rows=rows, title=title, right=list(right))

    def raw(
        self,
        data: bytes,
        *,
        error: bool = False,
        again: Callable[[OSError], bool] = lambda error: False,
    ) -> None:
        """Leave out a job's output: it is in the job's logs, where the client reads it."""

    def event(self, event: Event) -> None:
        """Record an event."""
        if self._brief and event.fields.get("state") == "progress":
            return
        found = event.as_json()
        if event.name in _BEGUN and self._brief:
            with suppress(OSError):
                files.write_instance(self._directory, str(event.fields["instance"]))
        if event.name in _RESULTS:
            self.last = found
        self._record("event", event=found)

    def note(self, text: str) -> None:
        """Record a remark."""
        self._record("note", text=text)

    def trace(self, text: str) -> None:
        """Write a traceback to the log of the operation; callers see only the error."""
        sys.stderr.write(text)

    def error(self, error: IcecoreError) -> None:
        """Record an error."""
        reasons = error.reasons if isinstance(error, PreflightRefused) else []
        fields = {
            "class": type(error).__name__,
            "message": error.message,
            "cure": error.cure,
            "exit_code": error.exit_code,
            "reasons": [
                {"name": name, "message": message, "cure": cure} for name, message, cure in reasons
            ],
        }
        self.failure = jsonable(fields)
        self._record("error", error=fields)

    def _record(self, do: str, **fields: Any) -> None:
        with suppress(OSError):  # a full disk ends no snapshot
            self._writer.write(msgspec.json.encode({"do": do, **jsonable(fields)}))


class _Nowhere(io.StringIO):
    """A stream that is not a terminal and discards its input."""

    def write(self, text: str) -> int:
        return len(text)


def main() -> int:
    """Entry point of the process."""
    directory, descriptor, attempt = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    os.set_inheritable(descriptor, False)
    fcntl.flock(
        descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB
    )  # already held through the same open file
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
        signal.signal(number, _not_now)
    pid = os.getpid()
    process = Process(pid, procfs.start_time(pid), boot_id(), time.time(), attempt)
    files.write(directory, "process.json", process)
    wanted = files.read_stored(directory)
    if wanted is None:
        return 1
    asked = files.cancelled_by(directory)
    before = _supervised_before(wanted, directory) if attempt > 1 else None
    over, stopped = None, ""
    if before is not None:
        over = _ended_for_good(wanted, before)
        stopped = stopped_with(before)
    if over is None and not stopped and asked and (before is None or not before.alive):
        over = 128 + asked
    if over is not None:
        files.write(directory, "result.json", Result(exit_status=over, ended=time.time()))
        return 0
    writer = Writer(directory)
    recorder = Recorder(writer, directory, brief=wanted.supervised)
    lineage = "" if before is None else Job.load(before.directory).description.lineage
    began = time.monotonic()
    status = run_command(
        _words(wanted, resume=bool(lineage)),
        output=recorder,
        origin=_origin(wanted, lineage, asked, stopped),
    )
    writer.close()
    if wanted.supervised and attempt > 1:
        lasted = time.monotonic() - began > _LONG_SECONDS
        if _is_to_try_again(directory, recorder.failure, lasted=lasted):
            return status  # without a result: the service starts the next attempt
        if recorder.failure is None and before is not None and before.alive:
            return status  # a signal came before it had taken the job over
    result = Result(
        exit_status=status,
        ended=time.time(),
        error=recorder.failure if status else None,
        result=recorder.last,
    )
    files.write(directory, "result.json", result)
    return 0


def _not_now(number: int, frame: FrameType | None) -> None:
    """Ignore a signal before the command begins, which then checks for it, or after it has ended."""


def _words(wanted: Stored, *, resume: bool) -> list[str]:
    """Return the command line.

    Args:
        resume: Bring the job back, whether the user asked for it or not.
    """
    words = list(wanted.words)
    if resume and "--resume" not in words:
        words.append("--resume")
    return [*words, "--", *wanted.command] if wanted.command else words


def _origin(wanted: Stored, lineage: str, stop: int, stopped: str) -> Origin:
    identity = (
        None
        if wanted.identity is None
        else msgspec.convert(wanted.identity, Identity, strict=False)
    )
    return Origin(identity, wanted.environment or {}, wanted.supervised, lineage, stop, stopped)


def _supervised_before(wanted: Stored, directory: Path) -> Job | None:
    """Return the instance that the worker before this one supervised last; None: there is none, or
    the operation supervises no job.
    """
    from icecore.api import registry

    if not wanted.supervised:
        return None
    known = registry(load(_option(wanted, "config")))

    def find(which: str) -> Job | None:
        with suppress(IcecoreError):
            job = known.find(which)
            return job if job.description.user == wanted.owner else None
        return None

    noted = files.read_instance(directory)
    named = find(noted) if noted else None
    newest = find(wanted.job)
    if newest is None or newest.alive:
        return newest or named
    # A worker may have been killed before it noted what it restored, and one of an earlier version
    # notes nothing.
    since = wanted.created if named is None else named.description.created
    return newest if newest.description.created >= since else named


def _is_to_try_again(directory: Path, failure: dict[str, Any] | None, *, lasted: bool) -> bool:
    """Return whether a supervisor that failed is to be replaced: the repository may be reachable
    later. Other failures are tried a few times.

    Args:
        lasted: It worked for long before it failed.
    """
    if failure is None or failure["exit_code"] in _FINAL:
        return False
    if failure["exit_code"] == StoreError.exit_code and failure["class"] != StoreDenied.__name__:
        return True
    count = 1 if lasted else files.read_failures(directory) + 1
    with suppress(OSError):
        files.write_failures(directory, count)
    return count < _MOST_FAILURES


def _ended_for_good(wanted: Stored, job: Job) -> int | None:
    """Return the exit status of a job that ended while it had no supervisor, and is not to be
    restored; None: it runs, or is to be restored, for example because it was killed.
    """
    status = job.status()
    if status is None or stopped_with(job):
        return None
    if job.end_requested() or status.code == 0:
        return status.exit_code
    if status.code is None or _option(wanted, "restart"):
        return None
    return status.exit_code


def _option(wanted: Stored, name: str) -> str:
    """Return the value of an option of the command; empty: it is not there."""
    start = f"--{name}="
    return next((word[len(start) :] for word in wanted.words if word.startswith(start)), "")


if __name__ == "__main__":
    sys.exit(main())
