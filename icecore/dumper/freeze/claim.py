"""Allow one window of a process at a time: a dump without the claim stops nothing.

Two dumps of one job whose windows overlap would undo each other's work: if one fails, it maps again
what the other has unmapped. The claim is a lock (flock(2)) on the process's own directory in /proc,
so it leaves nothing to clean up.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Collection

from icecore.errors import DumpFailed

_POLL_SECONDS = 0.05


class Claim:
    """Hold the windows of some processes until `release`.

    Args:
        pids: Host pids. Processes that have ended are left out.
        seconds: How long to wait for another dump.
        stop: Stop waiting for another dump once this is set.

    Raises:
        DumpFailed: Another dump holds one of them for longer.
    """

    def __init__(
        self, pids: Collection[int], seconds: float, stop: threading.Event | None = None
    ) -> None:
        self._held: list[int] = []
        self._stop = stop or threading.Event()
        end = time.monotonic() + seconds
        try:
            for pid in sorted(pids):  # always in the same order, against deadlocks
                self._take(pid, end)
        except BaseException:
            self.release()
            raise

    def _take(self, pid: int, end: float) -> None:
        try:
            self._held.append(os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        except (FileNotFoundError, ProcessLookupError):
            return
        while True:
            try:
                fcntl.flock(self._held[-1], fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                if time.monotonic() > end:
                    raise DumpFailed(
                        f"another dump holds process {pid}",
                        cure="try again after that dump",
                    ) from None
                if self._stop.wait(_POLL_SECONDS):
                    raise DumpFailed("the dump was abandoned") from None

    def release(self) -> None:
        """Let other dumps stop the processes. May be called twice."""
        while self._held:
            os.close(self._held.pop())
