"""Cells of a process read and fingerprinted without the interpreter (scan_cells.c); rule: the fingerprints are xxhash's own, or this is not used."""

from __future__ import annotations

import ctypes
import functools
import importlib.util
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

LIBRARY = Path(__file__).with_name("libicecore-scan.so")

#: Why a scan stopped (enum why).
ALL_KNOWN, CHANGED, NOT_READ = range(3)

#: XXH3's 128-bit hash with a seed: one that chooses the processor's instructions first.
_NAMES = ("XXH3_128bits_withSeed_dispatch", "XXH3_128bits_withSeed")
_PROBE = bytes(range(256)) * 5


class _Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


class _Cells(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in ("runs", "first_run", "length", "bitmap", "candidate", "known", "fingerprint", "row", "hash")),
        ("seed", ctypes.c_uint64),
        ("pid", ctypes.c_int64),
    ]


@dataclass(frozen=True)
class Columns:
    """What is scanned, as scan_cells.c wants it: arrays without gaps, of n cells.

    Attributes:
        runs: iovecs, (base, length).
        first_run: u4[n + 1].
        length: u8[n].
        bitmap: u1[n, 32].
        candidate: i8[n]: the row of ``known`` that may be true still, or -1.
        known: V16 fingerprints.
        fingerprint: V16[n], written.
        row: i8[n], the candidate is written to it where it is true.
    """

    runs: npt.NDArray[np.void]
    first_run: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint64]
    bitmap: npt.NDArray[np.uint8]
    candidate: npt.NDArray[np.int64]
    known: npt.NDArray[np.void]
    fingerprint: npt.NDArray[np.void]
    row: npt.NDArray[np.int64]


class NativeScan:
    """One scan of one process. Several threads may use it at once.

    Args:
        pid: The process.
        seed: Of the fingerprints, 64 bits.
    """

    def __init__(self, pid: int, columns: Columns, seed: int) -> None:
        library, hashed = _loaded() or _missing()
        self._columns = columns
        arrays = [getattr(columns, name) for name in Columns.__dataclass_fields__]
        types = ("V16", "<u4", "<u8", "u1", "<i8", "V16", "V16", "<i8")
        for array, wanted in zip(arrays, types, strict=True):
            if not array.flags.c_contiguous or array.dtype.itemsize != np.dtype(wanted).itemsize:
                raise ValueError(f"an array of {array.dtype} is not what {wanted} looks like in C")
        self._cells = _Cells(*(array.ctypes.data for array in arrays), hashed, seed, pid)
        self._address = ctypes.addressof(self._cells)
        self._call = library.scan_cells

    def until(self, start: int, stop: int, slot: int) -> tuple[int, int]:
        """Scan cells from ``start`` to ``stop``, up to one that is not known or cannot be read at once.

        Args:
            slot: Address of room for a cell, and for its bitmap before that.

        Returns:
            That cell, or ``stop``; and why: CHANGED (its bytes are in the slot, its fingerprint is written), NOT_READ, or ALL_KNOWN.
        """
        why = ctypes.c_int64()
        return self._call(self._address, start, stop, slot, ctypes.addressof(why)), why.value


def native_scan_lacks() -> str:
    """What keeps this from being used here; "" if nothing does."""
    if not LIBRARY.exists():
        return "icecore was built without a C compiler"
    return "" if _loaded() else "no XXH3 to be called from C: neither in the Python package xxhash nor in libxxhash.so.0"


@functools.cache
def _loaded() -> tuple[ctypes.CDLL, int] | None:
    """The library, and the address of the hash function."""
    if not LIBRARY.exists():
        return None
    package = importlib.util.find_spec("xxhash._xxhash")
    for name in (package.origin if package else None, "libxxhash.so.0"):
        with suppress(OSError):
            hashed = _hash(ctypes.CDLL(name)) if name else 0
            if hashed:
                library = ctypes.CDLL(str(LIBRARY))
                library.scan_cells.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
                library.scan_cells.restype = ctypes.c_int64
                return library, hashed
    return None


def _hash(library: ctypes.CDLL) -> int:
    """The address of a function that computes what the package does; 0: it has none."""
    for name in _NAMES:
        with suppress(AttributeError):
            function = getattr(library, name)
            function.restype, function.argtypes = _Hash, [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64]
            found: Any = function(_PROBE, len(_PROBE), 7)
            if found.high.to_bytes(8, "big") + found.low.to_bytes(8, "big") == xxhash.xxh3_128_digest(_PROBE, 7):
                return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0


def _missing() -> tuple[ctypes.CDLL, int]:
    raise RuntimeError(native_scan_lacks())
