"""CPU time: what processes and threads have used, and how many cores are idle."""

from __future__ import annotations

import os
import time
from collections.abc import Collection
from pathlib import Path

import msgspec

_STAT = Path("/proc/stat")
_GROUPS = Path("/sys/fs/cgroup")
#: Clock ids of other processes and threads (linux/posix-timers.h): the scheduler's clock, of one
#: thread.
_SCHED, _PER_THREAD = 2, 4
#: Columns of a line of /proc/stat (proc_stat(5)): idle, iowait.
_IDLE = slice(4, 6)
#: A process that runs for a larger share of the time is busy.
_BUSY_SHARE = 0.02
#: /proc/stat counts in hundredths of a second.
_LOOK_SECONDS = 0.1


def process_seconds(pid: int) -> float | None:
    """Return the CPU time of a process, all threads together, in seconds (clock_getcpuclockid(3));
    None: it has ended.
    """
    return _read(~pid << 3 | _SCHED)


def thread_seconds(thread: int) -> float | None:
    """Return the CPU time of a thread by its id, in seconds; None: it has ended."""
    return _read(~thread << 3 | _PER_THREAD | _SCHED)


def _read(clock: int) -> float | None:
    try:
        return time.clock_gettime(clock)
    except OSError:
        return None


def usable_cores() -> float:
    """Return how many cores this process may use: the number in its affinity or the limit of its
    own cgroup (version 2), whichever is less.
    """
    cores, limit = float(len(os.sched_getaffinity(0))), group_limit()
    return min(cores, limit[1]) if limit else cores


def group_limit(pid: int = 0) -> tuple[str, float] | None:
    """Return the cgroup (version 2) of a process, and the cores that its own limit allows to all its
    processes together. Return None if there is no limit, no such group or no such process.

    Args:
        pid: The host pid; 0: this process.
    """
    try:
        group = _group(pid)
        quota, period = (_GROUPS / group.lstrip("/") / "cpu.max").read_text().split()
        return None if quota == "max" else (group, int(quota) / int(period))
    except (OSError, IndexError, ValueError):
        return None


def _group(pid: int) -> str:
    text = Path(f"/proc/{pid or 'self'}/cgroup").read_text(errors="surrogateescape")
    return text.rsplit("::", 1)[1].strip()


def idle_seconds() -> float:
    """Return how long the cores of this process's affinity have been idle in total since the
    machine started.
    """
    own = os.sched_getaffinity(0)
    ticks = 0
    for line in _STAT.read_text().splitlines():
        words = line.split()
        if words and words[0][:3] == "cpu" and words[0][3:].isdigit() and int(words[0][3:]) in own:
            ticks += sum(map(int, words[_IDLE]))
    return ticks / os.sysconf("SC_CLK_TCK")


class Activity(msgspec.Struct, frozen=True):
    """What ran while this process slept.

    Attributes:
        busy: Pids of the processes that ran for a noticeable share of the time.
        idle: How many of the cores that this process may use were idle, on average.
    """

    busy: frozenset[int]
    idle: float


def look_at(pids: Collection[int]) -> Activity:
    """Sleep for a moment, and return what ran meanwhile.

    Args:
        pids: The processes among which to find the busy ones.
    """
    before = {pid: process_seconds(pid) for pid in pids}
    idle, began = idle_seconds(), time.monotonic()
    time.sleep(_LOOK_SECONDS)
    seconds = time.monotonic() - began
    cores = min(usable_cores(), (idle_seconds() - idle) / seconds)
    busy = set()
    for pid, first in before.items():
        now = process_seconds(pid)
        if first is not None and now is not None and now - first > _BUSY_SHARE * seconds:
            busy.add(pid)
    return Activity(frozenset(busy), cores)
