"""The pipes of another process, opened here too, so that their contents live until this process
closes them.

CRIU takes the private memory of a tree that it sees into pipes, and closes them before it lets the
tree go: freeing page after page takes 7 to 18 ms a GiB, in which the tree stands still.
"""

from __future__ import annotations

import fcntl
import os
import stat
from contextlib import suppress

from icecore.host.kernel import libc

_PIDFD_GETFD = 438
#: Descriptors that are kept free for whatever else this process does.
_SPARE = 16
_ROOM = 1 << 15


def make_room() -> None:
    """Grow the descriptor table now: in a process with threads each growth takes milliseconds."""
    with suppress(OSError, ValueError):  # as many are not allowed
        os.close(fcntl.fcntl(0, fcntl.F_DUPFD_CLOEXEC, _ROOM))


class HeldPipes:
    """Those that a process has open now, but for those that this one has open already. Where the
    right to it (pidfd_getfd(2)) or descriptors are missing, fewer are held, or none.

    Args:
        pid: A child of this process.
    """

    def __init__(self, pid: int) -> None:
        self._held: list[int] = []
        with suppress(OSError):  # it has ended
            self._take(pid, _own_pipes())

    def _take(self, pid: int, seen: set[int]) -> None:
        process = os.pidfd_open(pid)
        try:
            for number in sorted(int(name) for name in os.listdir(f"/proc/{pid}/fd")):
                descriptor = int(libc.syscall(_PIDFD_GETFD, process, number, 0))
                if descriptor < 0:
                    self._close(self._held[-_SPARE:])
                    del self._held[-_SPARE:]
                    return
                about = os.fstat(descriptor)
                if stat.S_ISFIFO(about.st_mode) and about.st_ino not in seen:
                    seen.add(about.st_ino)
                    self._held.append(descriptor)
                else:
                    os.close(descriptor)
        finally:
            os.close(process)

    def __len__(self) -> int:
        return len(self._held)

    def release(self) -> None:
        """Close all of them. May be called twice."""
        held, self._held = self._held, []
        self._close(held)

    @staticmethod
    def _close(descriptors: list[int]) -> None:
        for descriptor in descriptors:
            os.close(descriptor)


def _own_pipes() -> set[int]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # the listing's own
            about = os.fstat(int(name))
            if stat.S_ISFIFO(about.st_mode):
                found.add(about.st_ino)
    return found
