"""A job that changes all the time what it has mapped, or which processes it has. It appends a line for
each step to a file, and the lines of two runs are the same.

python churn.py OUT maps
python churn.py OUT fork|spawn|forkserver PREFIX

PREFIX: of the names of its semaphores ("/name").
"""

from __future__ import annotations

import ctypes
import hashlib
import mmap
import multiprocessing
import os
import random
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

_BASE, _SLOTS, _APART = 0x700000000000, 12, 1 << 16
_FIXED = 0x10
_KINDS = (
    *("read", "written", "protected", "private", "private read", "removed"),
    *("memfd", "memfd read", "anonymous", "shared", "none"),
)
_PAUSE = 0.02

_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Slots:
    """Memory of all kinds, at the same few addresses again and again.

    Args:
        folder: For its files.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._random = random.Random(5)
        self._made = 0
        self._kinds: dict[int, tuple[str, int]] = {}

    def replace(self) -> None:
        """Map something else in one slot."""
        self._made += 1
        slot = self._random.randrange(_SLOTS)
        at, kind = _BASE + slot * _APART, self._random.choice(_KINDS)
        size = self._random.choice([1, 1, 1, 3]) * mmap.PAGESIZE
        content = self._random.randbytes(size)
        _libc.munmap(at, _APART)
        self._kinds.pop(slot, None)
        if kind == "none":
            return
        file = self._open(kind, content)
        private = kind.startswith(("private", "anonymous"))
        flags = _FIXED | (mmap.MAP_PRIVATE if private else mmap.MAP_SHARED)
        protection = mmap.PROT_READ
        if not kind.endswith("read"):
            protection |= mmap.PROT_WRITE
        if file < 0:
            flags |= mmap.MAP_ANONYMOUS
        assert _libc.mmap(at, size, protection, flags, file, 0) == at, os.strerror(
            ctypes.get_errno()
        )
        if file >= 0:
            os.close(file)
        else:
            ctypes.memmove(at, content, size)
        self._kinds[slot] = kind, size

    def _open(self, kind: str, content: bytes) -> int:
        """Return a descriptor with this content; -1: the kind has none."""
        if kind in ("anonymous", "shared"):
            return -1
        if kind.startswith("memfd"):
            file = os.memfd_create("churn")
            os.write(file, content)
            if kind == "memfd":
                return file
            path = f"/proc/self/fd/{file}"
            read = os.open(path, os.O_RDONLY)
            os.close(file)
            return read
        name = self._folder / str(self._made % 40)
        name.unlink(missing_ok=True)
        name.write_bytes(content)
        file = os.open(name, os.O_RDONLY if kind.endswith("read") else os.O_RDWR)
        if kind == "removed":
            name.unlink()
        return file

    def write(self, number: int) -> None:
        """Store a number in every slot that can be written."""
        for slot, (kind, size) in self._kinds.items():
            if kind.endswith("read"):
                continue
            at = _BASE + slot * _APART
            if kind == "protected":
                _libc.mprotect(at, size, mmap.PROT_READ | mmap.PROT_WRITE)
            ctypes.memmove(at, number.to_bytes(8, "little"), 8)
            if kind == "protected":
                _libc.mprotect(at, size, mmap.PROT_READ)

    def digest(self) -> str:
        """Return a digest of all memory."""
        hasher = hashlib.sha256()
        for slot, (kind, size) in sorted(self._kinds.items()):
            hasher.update(kind.encode() + ctypes.string_at(_BASE + slot * _APART, size))
        return hasher.hexdigest()


def mappings(folder: Path) -> Iterator[str]:
    """Yield a digest for each step, in which three slots change."""
    slots, number = Slots(folder), 0
    while True:
        number += 1
        for _ in range(3):
            slots.replace()
        slots.write(number)
        yield slots.digest()
        time.sleep(_PAUSE)


def work(number: int) -> str:
    """Return a digest, through a file that is mapped."""
    with tempfile.NamedTemporaryFile() as file:
        file.truncate(mmap.PAGESIZE)
        with mmap.mmap(file.fileno(), mmap.PAGESIZE) as memory:
            memory[:8] = number.to_bytes(8, "little")
            return hashlib.sha256(memory[:8]).hexdigest()


def processes(method: str) -> Iterator[str]:
    """Yield the results of pools of processes, which live for a few tasks each."""
    context, number = multiprocessing.get_context(method), 0
    while True:
        with context.Pool(2, maxtasksperchild=3) as pool:
            for found in pool.imap(work, range(number, number + 12)):
                yield found
                time.sleep(_PAUSE / 2)
        number += 12


def main() -> None:
    out, what = Path(sys.argv[1]), sys.argv[2]
    if what != "maps":
        multiprocessing.current_process()._config["semprefix"] = sys.argv[3]  # type: ignore[attr-defined]
    steps = mappings(out.parent) if what == "maps" else processes(what)
    with open(out, "a") as file:
        for number, step in enumerate(steps):
            print(number, step, file=file, flush=True)


if __name__ == "__main__":
    main()
