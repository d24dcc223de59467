"""The job's own logs: trimmed before a dump. Other processes may trim them during its window."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from icecore.dumper.phases.request import Request
from icecore.dumper.target import Target
from icecore.errors import IcecoreError
from icecore.host.jobs.job import Job
from icecore.host.jobs.logs import Stream

#: Storing what is not removed takes longer than removing it.
_TRIM_BYTES = 16 << 30


def trim_logs(request: Request) -> None:
    """Trim the job's logs to their limit, before anything looks at their sizes and times."""
    if directory := _limited(request.target):
        with suppress(IcecoreError, OSError):  # the snapshot does not depend on it
            Job.load(directory).trim_logs(request.emit, _TRIM_BYTES)


def log_starts(target: Target) -> dict[Stream, int]:
    """Return the offset of each log before which output was removed."""
    if not (directory := _limited(target)):
        return {}
    from icecore.host.jobs import log_trimming  # few jobs have a limit

    return log_trimming.read_starts(directory)


def _limited(target: Target) -> Path | None:
    """Return the directory of an instance whose logs have a limit; None: there is none."""
    if target.record is None or not target.record.log_limit or not target.directory:
        return None
    return Path(target.directory)
