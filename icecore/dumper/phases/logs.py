"""The job's own logs: trimmed to their bound before a dump, and kept as they are in its window."""

from __future__ import annotations

from contextlib import ExitStack, suppress
from pathlib import Path

from icecore.dumper.phases.request import Request
from icecore.dumper.target import Target
from icecore.errors import DumpFailed, IcecoreError
from icecore.host.jobs.job import Job
from icecore.host.jobs.log_bound import HeldLogs


def trim_logs(request: Request) -> None:
    """Remove the oldest output beyond the bound of the job's logs, before anything looks at their
    sizes and times. Dumps are the only ones who do that for a job which nobody follows.
    """
    target = request.target
    if target.record is not None and target.record.log_bytes and target.directory:
        with suppress(IcecoreError):  # nothing can be known of the instance: nothing is removed
            Job.load(Path(target.directory)).trim_logs(request.emit)


def hold_logs(target: Target, stack: ExitStack) -> HeldLogs:
    """Keep the output in the job's logs until the window is over: what is removed while the window
    reads it would be a hole in the middle.

    Args:
        stack: Lets go of the logs if no window does.

    Raises:
        DumpFailed: The logs cannot be opened.
    """
    bounded = target.record is not None and target.record.log_bytes and target.directory
    try:
        held = HeldLogs(Path(target.directory) if bounded else None)
    except OSError as error:
        raise DumpFailed(
            f"cannot find out what is missing in the logs of job {target.job}: {error.strerror}",
            cure=f"see the files in {target.directory}",
        ) from error
    stack.callback(held.release)
    return held
