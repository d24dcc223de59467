"""One window of a process at a time; rule: who does not have the claim does not begin to stop
anything.

Two dumps of one job whose windows overlap would undo each other's work: what one has unmapped, the
other, which fails, maps again. The claim is a lock (flock(2)) of the process's own directory in
/proc, so that there is nothing to be cleaned up after whoever had it.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Collection

from icecore.errors import DumpFailed

_POLL_SECONDS = 0.05


class Claim:
    """The windows of these processes are this object's until `release`.

    Args:
        pids: As this machine sees them. Those that have ended are left out.
        seconds: How long another dump is waited for.

    Raises:
        DumpFailed: Another dump has one of them for longer.
    """

    def __init__(self, pids: Collection[int], seconds: float) -> None:
        self._held: list[int] = []
        end = time.monotonic() + seconds
        try:
            for pid in sorted(pids):  # in one order: nobody waits for somebody who waits
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
                        f"process {pid} is being dumped by somebody else",
                        cure="try again when that is done",
                    ) from None
                time.sleep(_POLL_SECONDS)

    def release(self) -> None:
        """May be called twice."""
        while self._held:
            os.close(self._held.pop())
