"""Warm memory for what is measured: a process that holds memory which the machine really has, and
lets go of it as the measured step takes it.

Virtual machines hand free memory back to their host within two seconds; touching it again runs at
0.4–1 GB/s instead of 20 (measured, Linux 6.18), which would be most of what a benchmark sees. The
rule: nothing but the kernel's free list passes from the reserve to the measured programs, so
neither side of a comparison is helped more than the other.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

_PIECE = 64 << 20
#: Warm free memory that is kept ahead of the measured step: more would be handed to the host
#: unused.
_CUSHION = 384 << 20
_POLL_SECONDS = 0.004
#: Pages for what is taken one by one (page tables, copies on write, tmpfs): without them, what
#: starts a process was up to twice as slow as with, in every other round.
_SINGLE = 64 << 20
_MADV_POPULATE_WRITE = 23
_MADV_DONTNEED = 4
_SECONDS = 300.0


class Reserve:
    """Holds up to ``size`` bytes of touched memory in a process of its own, and some in single
    pages; a context manager.
    """

    def __init__(self, size: int) -> None:
        self._size = size
        self._process = subprocess.Popen(
            [sys.executable, "-S", __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def hold(self) -> None:
        """Take everything back; slow where the memory has gone cold."""
        self._say(f"hold {self._size}")

    @contextmanager
    def lent(self) -> Iterator[None]:
        """Let go of memory as it is taken by others meanwhile."""
        self.hold()
        self._say("lend")
        try:
            yield
        finally:
            self._say("keep")

    def _say(self, word: str) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(word + "\n")
        self._process.stdin.flush()
        if not self._process.stdout.readline():
            raise RuntimeError(
                f"the memory reserve ended ({self._process.wait(10)}); is there memory enough?"
            )

    def __enter__(self) -> Reserve:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.wait(_SECONDS)
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()


def _map(size: int, pages: int) -> mmap.mmap:
    piece = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):  # no huge pages: slower to take
        piece.madvise(pages)
    return piece


def _populate(piece: mmap.mmap) -> None:
    address = ctypes.addressof(ctypes.c_char.from_buffer(piece))
    if ctypes.CDLL(None, use_errno=True).madvise(
        ctypes.c_void_p(address), ctypes.c_size_t(len(piece)), _MADV_POPULATE_WRITE
    ):
        raise MemoryError(f"cannot take memory: errno {ctypes.get_errno()}")


def _piece() -> mmap.mmap:
    piece = _map(_PIECE, mmap.MADV_HUGEPAGE)
    _populate(piece)
    return piece


def _let_go_singly(single: mmap.mmap) -> None:
    """Free every second page: the kernel cannot join them to larger ones, so they are what it gives
    out next.
    """
    for at in range(0, len(single), 2 * mmap.PAGESIZE):
        single.madvise(_MADV_DONTNEED, at, mmap.PAGESIZE)


def _free() -> int:
    with open("/proc/meminfo") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("MemFree:"))


def _serve() -> None:
    import select

    with contextlib.suppress(PermissionError):
        os.nice(-10)  # late, it would leave the measured step to memory that has gone cold
    held: list[mmap.mmap] = []
    single = _map(_SINGLE, mmap.MADV_NOHUGEPAGE)
    lending = False
    level = 0
    while True:
        readable, _, _ = select.select([sys.stdin], [], [], _POLL_SECONDS if lending else None)
        if readable:
            words = sys.stdin.readline().split()
            if not words:
                return
            if words[0] == "hold":
                lending = False
                while len(held) * _PIECE < int(words[1]):
                    held.append(_piece())
                _populate(single)
            elif words[0] == "lend":
                level, lending = _free(), True
                while held and _free() < level + _CUSHION:
                    held.pop()
                _let_go_singly(single)
            elif words[0] == "keep":
                lending = False
            print("done", flush=True)
        if lending:
            while held and _free() < level + _CUSHION:
                held.pop()


if __name__ == "__main__":
    with contextlib.suppress(KeyboardInterrupt):
        _serve()
