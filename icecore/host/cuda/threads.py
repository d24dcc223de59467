"""Find the driver's threads in a process, which show that it has CUDA state. Only /proc is read: no
process is stopped.
"""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

from icecore.host.kernel import procfs

#: How drivers 570 and 580 call their threads; the preload has the same list
#: (icecore/host/resident/threads.c).
_NAMES = re.compile(r"cuda-EvtHandlr|cuda[0-9a-fA-F]{11}")


#: COPIES_NAME of icecore/host/resident/copies.h.
_COPYING = "icecore-copy"


def copying_threads(pid: int) -> list[int]:
    """Return the threads of a process, by their numbers here, that make the driver's copies. They
    have to run whenever the driver works in it.

    Raises:
        NotFound: The process has ended.
    """
    return [thread for thread in procfs.threads(pid) if _name(pid, thread) == _COPYING]


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
