"""Find the driver's threads in a process, which show that it has CUDA state. Only /proc is read: no
process is stopped.
"""

from __future__ import annotations

import re
import time
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from icecore.host.kernel import procfs

#: How drivers 570 and 580 call their threads; the preload has the same list
#: (icecore/host/resident/threads.c).
_NAMES = re.compile(r"cuda-EvtHandlr|cuda[0-9a-fA-F]{11}")


#: The most seconds to wait for threads that end by themselves after 3 ms without work
#: (``copies.c``). The driver works for longer than that after its last copy.
_END_SECONDS = 2.0
_POLL_SECONDS = 0.0005


def wait_ended(pid: int, before: Collection[int]) -> list[int]:
    """Wait until a process has only the threads that it had before: the threads that made the
    driver's copies have ended. Return the threads that do not end in time.

    Args:
        before: The ids of the threads that the process had, in this process's pid namespace.

    Raises:
        NotFound: The process has ended.
    """
    end = time.monotonic() + _END_SECONDS
    known = frozenset(before)
    while others := [one for one in procfs.threads(pid) if one not in known]:
        if time.monotonic() > end:
            break
        time.sleep(_POLL_SECONDS)
    return others


def has_drivers_threads(pid: int) -> bool:
    """Return whether the driver has a thread in a process. A forked child has none, because fork(2)
    copies no threads.

    If the program itself has the name of a driver's thread, its threads do not count.

    Raises:
        NotFound: The process has ended.
    """
    leader = _name(pid, pid)
    return any(
        _NAMES.fullmatch(name) and name != leader
        for name in (_name(pid, thread) for thread in procfs.threads(pid) if thread != pid)
    )


def _name(pid: int, thread: int) -> str:
    with suppress(OSError):  # it has ended
        return (
            Path(f"/proc/{pid}/task/{thread}/comm")
            .read_text(encoding="utf-8", errors="replace")
            .rstrip("\n")
        )
    return ""
