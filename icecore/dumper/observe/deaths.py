"""Explain a failed dump by processes that ended during it: the error names their end as the cause,
not what failed because of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress

from icecore.dumper.hooks import BeforeFailed
from icecore.errors import (
    DumpFailed,
    HookFailed,
    IcecoreError,
    NotFound,
    StoreError,
    UsageError,
    WindowExceeded,
)
from icecore.host.kernel import procfs

#: Failures that the end of a process does not cause.
_OTHERS = (BeforeFailed, HookFailed, StoreError, UsageError)


class ProcessEnded(DumpFailed):
    """A process without device memory ended during the dump. Another dump may succeed."""


class DeathWatch:
    """The processes without which a dump fails.

    Args:
        root: Host pid of the job's first process.
        job: The job's name.
    """

    def __init__(self, root: int, job: str) -> None:
        self._root = root
        self._job = job
        self._began: dict[int, int] = {}
        self._brief: set[int] = set()

    def watch(self, pids: Iterable[int], brief: Iterable[int] = ()) -> None:
        """Watch processes of the tree from now on.

        Args:
            brief: Those of them whose end costs the job nothing.
        """
        self._brief.update(brief)
        for pid in pids:
            with suppress(NotFound):
                self._began.setdefault(pid, procfs.start_time(pid))

    def forget(self) -> None:
        """Stop watching: from now on the dump itself ends the processes."""
        self._began.clear()

    @contextmanager
    def explaining(self) -> Iterator[None]:
        """Turn a failure into a `DumpFailed` that names the process whose end caused it."""
        try:
            yield
        except (IcecoreError, OSError) as error:  # OSError: its files in /proc are missing
            ended = [pid for pid, began in self._began.items() if _ended(pid, began)]
            if not ended or isinstance(error, _OTHERS):
                raise
            if self._root in ended:
                raise DumpFailed(
                    f"job {self._job} (process {self._root}) ended during the dump",
                    cure="'icecore ps -a' shows how it ended",
                ) from error
            # A window that was too long would be too long again.
            again = self._brief.issuperset(ended) and not isinstance(error, WindowExceeded)
            raise (ProcessEnded if again else DumpFailed)(
                f"process {ended[0]} of job {self._job} ended during the dump",
                cure="dump it again",
            ) from error


def _ended(pid: int, began: int) -> bool:
    try:
        return procfs.start_time(pid) != began or procfs.is_over(pid)
    except NotFound:
        return True
