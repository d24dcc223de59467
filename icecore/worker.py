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
from icecore.errors import IcecoreError, NotFound, PreflightRefused
from icecore.events import Event, Value
from icecore.host.jobs.description import boot_id
from icecore.host.jobs.identity import Identity
from icecore.host.kernel import procfs
from icecore.service.api import operation_files as files
from icecore.service.api.journal import Writer
from icecore.service.api.operation_files import Process, Result, Stored
from icecore.text import jsonable

#: Events that carry the result of an operation; the last one counts.
_RESULTS = frozenset({"run.started", "run.resumed", "dump.done", "restore.running"})


class Recorder(Output):
    """An output that records each call, so that `icecore.commands.replay` can print it elsewhere.

    Args:
        writer: Gets the records.
        brief: Leave out progress and the job's output, which are unbounded.
    """

    def __init__(self, writer: Writer, *, brief: bool) -> None:
        super().__init__(quiet=True, stdout=_Nowhere(), stderr=_Nowhere())
        self._writer = writer
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
    if asked := files.cancelled_by(directory):
        files.write(directory, "result.json", Result(exit_status=128 + asked, ended=time.time()))
        return 0
    with suppress(NotFound):
        if attempt > 1 and (status := _ended_by_itself(wanted)) is not None:
            files.write(directory, "result.json", Result(exit_status=status, ended=time.time()))
            return 0
    writer = Writer(directory)
    recorder = Recorder(writer, brief=wanted.supervised)
    status = run_command(_words(wanted, attempt), output=recorder, origin=_origin(wanted))
    result = Result(
        exit_status=status,
        ended=time.time(),
        error=recorder.failure if status else None,
        result=recorder.last,
    )
    files.write(directory, "result.json", result)
    writer.close()
    return 0


def _not_now(number: int, frame: FrameType | None) -> None:
    """Ignore a signal before the command begins, which then checks for it, or after it has ended."""


def _words(wanted: Stored, attempt: int) -> list[str]:
    """Return the command line. A supervisor that replaces a killed one resumes the job."""
    words = list(wanted.words)
    if attempt > 1 and "--resume" not in words:
        words.append("--resume")
    return [*words, "--", *wanted.command] if wanted.command else words


def _origin(wanted: Stored) -> Origin:
    identity = (
        None
        if wanted.identity is None
        else msgspec.convert(wanted.identity, Identity, strict=False)
    )
    return Origin(identity, wanted.environment or {}, wanted.supervised)


def _ended_by_itself(wanted: Stored) -> int | None:
    """Return the exit status of a job that ended while it had no supervisor; None: it runs, or was
    killed.

    Raises:
        NotFound: There is no such job.
    """
    from icecore.api import registry

    config = next((word[9:] for word in wanted.words if word.startswith("--config=")), "")
    job = registry(load(config)).find(wanted.job)
    status = job.status()
    if job.description.user != wanted.owner:
        return None
    if status is None or job.description.created < wanted.created or status.code is None:
        return None
    return status.exit_code


if __name__ == "__main__":
    sys.exit(main())
