"""What CRIU is to the guard, without CRIU: a process that hands its userfaultfd over, and then does
what it is told.

Run as ``lazy_process.py ADDRESS MIB SCRIPT OUTPUT`` in the guard's working directory. SCRIPT is
Python; `Memory` helps it. What it says goes to OUTPUT, one line a time.
"""

from __future__ import annotations

import array
import ctypes
import os
import signal
import socket
import struct
import sys
import time
from typing import Any

from icecore.host.kernel import userfaultfd

PAGE = 4096
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
libc.mremap.restype = ctypes.c_void_p
libc.mremap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
]
libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


def word_of(page: int) -> int:
    """The first word of a page of the snapshot's memory; every page's is another."""
    return 0x1CEC0DE000000000 + page


class Memory:
    """The process's own memory, by pages of the snapshot's region."""

    def __init__(self, start: int, mib: int, output: str) -> None:
        self.start = start
        self.pages = mib * 256
        self.output = output

    def word(self, address: int) -> int:
        return ctypes.c_uint64.from_address(address).value

    def at(self, page: int) -> int:
        return self.start + page * PAGE

    def check(self, first: int, count: int, at: int | None = None) -> int:
        """How many of the pages differ from the snapshot's; ``at``: where they are now."""
        base = self.at(first) if at is None else at
        return sum(self.word(base + i * PAGE) != word_of(first + i) for i in range(count))

    def zeros(self, first: int, count: int) -> int:
        """How many of the pages do not begin with zeros."""
        return sum(self.word(self.at(first + i)) != 0 for i in range(count))

    def wait_for_go(self) -> None:
        """Until the test says so."""
        while not os.path.exists(f"{self.output}.go"):
            time.sleep(0.005)

    def say(self, *words: Any) -> None:
        with open(self.output, "a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    def discard(self, first: int, count: int) -> None:
        assert libc.madvise(self.at(first), count * PAGE, 4) == 0

    def unmap(self, first: int, count: int) -> None:
        assert libc.munmap(self.at(first), count * PAGE) == 0

    def move(self, first: int, count: int, target: int = 0) -> int:
        """mremap to ``target``, or to somewhere else; the new address."""
        target = target or libc.mmap(None, count * PAGE, 0, 0x22, -1, 0)
        moved = libc.mremap(self.at(first), count * PAGE, count * PAGE, 3, target)
        assert moved == target, os.strerror(ctypes.get_errno())
        return int(moved)


def main() -> None:
    start, mib, script, output = int(sys.argv[1], 16), int(sys.argv[2]), sys.argv[3], sys.argv[4]
    assert libc.mmap(start, mib << 20, 3, 0x100022, -1, 0) == start
    uffd = userfaultfd.create()
    userfaultfd.register(uffd, start, mib << 20)
    with socket.socket(socket.AF_UNIX) as channel:
        channel.connect("lazy-pages.socket")
        channel.sendall(struct.pack("<i", os.getpid()))
        channel.sendmsg([b"\0"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [uffd]))])
        os.close(uffd)
        channel.sendall(struct.pack("<I", 0x52535446))
    memory = Memory(start, mib, output)
    names = {"m": memory, "libc": libc, "os": os, "time": time, "signal": signal, "PAGE": PAGE}
    exec(compile(script, "script", "exec"), names)


if __name__ == "__main__":
    main()
