"""The CPU time that icecore's own work may take while the job runs. The threads that do the work
pause once they have used it up.

The kernel's own means are not enough. A nice value counts only within a cgroup or an autogroup
(sched(7)), and job and dump are rarely in the same one. A cgroup with a limit contains whole
processes, so it would slow down CRIU, the window, and a program that calls the library.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection

from icecore.host.kernel.cpu import process_seconds, thread_seconds

#: Unused time that is kept at most, in seconds at the bound's rate; pauses are about as long.
_SAVED_SECONDS = 0.05
#: Excess use that is made up for at most, in the same unit: the longest pause. The rest may be that
#: of threads that a program which calls the library started during the dump.
_OWED_SECONDS = 1.0


class OwnSeconds:
    """A clock of icecore's own CPU time in seconds: that of this process and of ``processes``, less
    that of the threads ``others``, which belong to the program that calls the library.

    Args:
        others: Native thread ids.
        processes: Pids.
    """

    def __init__(self, others: Collection[int] = (), processes: Collection[int] = ()) -> None:
        self._last_other = dict.fromkeys(others, 0.0)
        self._last_process = dict.fromkeys(processes, 0.0)

    def add(self, pid: int) -> None:
        """Count a process, too, from its beginning on."""
        self._last_process = {**self._last_process, pid: 0.0}

    def __call__(self) -> float:
        other, process = self._last_other, self._last_process
        for thread in other:
            other[thread] = thread_seconds(thread) or other[thread]
        for pid in process:
            process[pid] = process_seconds(pid) or process[pid]
        return time.process_time() + sum(process.values()) - sum(other.values())


class CpuBudget:
    """A bound on CPU time, shared by all threads of a dump: a token bucket. There is none before
    `bound` is called.

    Work that does not pause by itself (uploads) counts too, and makes the other threads pause for
    longer, up to 1 s after each piece of work. Excess use beyond that is forgotten.

    Args:
        used: Clock of the CPU time that counts, in seconds.
        now: Clock of elapsed time, in seconds.
    """

    def __init__(
        self,
        used: Callable[[], float] = time.process_time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._used, self._now = used, now
        self._cores = 0.0
        self._left = 0.0
        self._at = self._spent = 0.0
        self._lock = threading.Lock()
        self._lifted = threading.Event()
        self._lifted.set()
        self._for_good = False

    @property
    def cores(self) -> float | None:
        """CPU seconds that are allowed per second; None: no bound."""
        return None if self._lifted.is_set() else self._cores

    def bound(self, cores: float) -> None:
        """Allow at most ``cores`` CPU seconds per second from now on."""
        with self._lock:
            if self._for_good:
                return
            self._cores, self._left = cores, 0.0
            self._at, self._spent = self._now(), self._used()
            self._lifted.clear()

    def lift(self) -> None:
        """Remove the bound, and wake the threads that pause."""
        self._lifted.set()

    def lift_for_good(self) -> None:
        """Remove the bound; no later `bound` or `resume` sets one again."""
        with self._lock:
            self._for_good = True
            self._lifted.set()

    def resume(self) -> None:
        """Apply the last bound again, if there was one. What was used in between does not count."""
        if self._cores:
            self.bound(self._cores)

    @property
    def small(self) -> bool:
        """Whether work has to come in small pieces: several threads would otherwise use more in one
        piece than is made up for.
        """
        return self._cores < 1 and not self._lifted.is_set()

    def pause(self) -> None:
        """Wait until the CPU time used so far is allowed. Call it after each piece of work."""
        if self._lifted.is_set():
            return
        with self._lock:
            now, spent = self._now(), self._used()
            saved = self._left + (now - self._at) * self._cores
            left = min(saved, _SAVED_SECONDS * self._cores) - (spent - self._spent)
            self._left = max(left, -_OWED_SECONDS * self._cores)
            self._at, self._spent = now, spent
            seconds = -self._left / self._cores
        if seconds > 0:
            self._lifted.wait(min(seconds, _OWED_SECONDS))
