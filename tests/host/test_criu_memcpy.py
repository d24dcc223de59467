"""The memcpy that CRIU gets: the same bytes as any other, and pages that nobody touched stay so."""

from __future__ import annotations

import ctypes
import mmap
import os
import random
from collections.abc import Callable
from pathlib import Path

import pytest

import icecore.host.criu

LIBRARY = Path(icecore.host.criu.__path__[0]) / "libicecore-criu.so"
MIB, PAGE = 1 << 20, 4096

Copy = Callable[[int, int, int], int]


@pytest.fixture(scope="module")
def copy() -> Copy:
    made = ctypes.CDLL(str(LIBRARY)).memcpy
    made.argtypes, made.restype = (
        [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t],
        ctypes.c_void_p,
    )
    return made  # type: ignore[no-any-return]


class Mapping:
    """Memory that nobody has touched; ``shared``: as CRIU shares it with a process."""

    def __init__(self, size: int, *, shared: bool) -> None:
        self.size = size
        self._file = os.memfd_create("test", os.MFD_CLOEXEC) if shared else -1
        if shared:
            os.ftruncate(self._file, size)
        self.bytes = mmap.mmap(
            self._file, size, mmap.MAP_SHARED if shared else mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        self.bytes.madvise(mmap.MADV_NOHUGEPAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.bytes))

    @property
    def held(self) -> int:
        """Bytes of a shared one that there are."""
        return os.fstat(self._file).st_blocks * 512


@pytest.mark.parametrize("seed", range(12))
def test_the_same_bytes(seed: int, copy: Copy) -> None:
    chosen = random.Random(seed)
    source, target = Mapping(24 * MIB, shared=False), Mapping(24 * MIB, shared=True)
    for mapping, pages in (
        (source, chosen.choice([0, 3, 40])),
        (target, chosen.choice([0, 3, 40])),
    ):
        for _ in range(pages):
            at, some = chosen.randrange(mapping.size - 3 * PAGE), chosen.randrange(1, 3 * PAGE)
            mapping.bytes[at : at + some] = chosen.randbytes(some)
    size = chosen.choice([0, 1, 5000, 8 * MIB, chosen.randrange(8 * MIB, 20 * MIB)])
    into, out_of = (
        chosen.choice([0, 16, 992, PAGE, 70001]),
        chosen.choice([0, 16, 992, PAGE, 70001]),
    )
    wanted = (
        target.bytes[:into] + source.bytes[out_of : out_of + size] + target.bytes[into + size :]
    )
    held = target.held
    assert copy(target.address + into, source.address + out_of, size) == target.address + into
    assert target.bytes[:] == wanted
    if size < MIB:
        assert target.held <= held + 3 * PAGE


def test_what_was_never_touched_stays_so(copy: Copy) -> None:
    source, target = Mapping(1 << 33, shared=False), Mapping(1 << 33, shared=True)
    source.bytes[5 * PAGE] = 7
    source.bytes[1 << 32] = 9
    copy(target.address + 32, source.address + 16, source.size - MIB)
    assert (target.bytes[5 * PAGE + 16], target.bytes[(1 << 32) + 16]) == (7, 9)
    assert target.held <= 4 * PAGE
