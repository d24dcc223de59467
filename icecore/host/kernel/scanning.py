"""Work in C, without the interpreter: read and fingerprint cells of a process or a file
(scan_cells.c; in_place.c for mapped files), and read files of /proc (proc_files.c).

The library is used only if its fingerprints are those of xxhash.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import importlib.util
import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from icecore.host.kernel.mapped import MappedFile

LIBRARY = Path(__file__).with_name("libicecore-scan.so")

#: Why a scan stopped (enum why).
ALL_KNOWN, CHANGED, NOT_READ = range(3)

#: XXH3's 128-bit hash with a seed: one that chooses the processor's instructions first.
_NAMES = ("XXH3_128bits_withSeed_dispatch", "XXH3_128bits_withSeed")
#: Functions for the same hash of data in pieces, in the order of `_Streaming`.
_STREAMING = (
    ("XXH3_createState",),
    ("XXH3_128bits_reset_withSeed",),
    ("XXH3_128bits_update_dispatch", "XXH3_128bits_update"),
    ("XXH3_128bits_digest",),
    ("XXH3_freeState",),
)
_PROBE = bytes(range(256)) * 5
#: Most ranges or runs that the first call returns, and that each further call returns.
_RANGES, _MORE_RANGES = 4096, 1 << 16


_GUARDING = threading.Lock()  # guard_reads must not be called by several threads at once
#: What the library exports besides `scan_cells`.
_CALLS = ("find_data", "find_runs", "copy_file", "guard_reads")


class _Hash(ctypes.Structure):
    _fields_ = [("low", ctypes.c_uint64), ("high", ctypes.c_uint64)]


class Columns(NamedTuple):
    """The cells to scan, as scan_cells.c expects them: contiguous arrays of n cells.

    Attributes:
        runs: iovecs, (base, length).
        first_run: u4[n + 1].
        length: u8[n].
        bitmap: u1[n, 32].
        candidate: i8[n]: the row of ``known`` that may be true still, or -1.
        known: V16 fingerprints.
        fingerprint: V16[n], written.
        row: i8[n], the candidate is written to it where it is true. A cell that has one already is
            not read.
    """

    runs: npt.NDArray[np.void]
    first_run: npt.NDArray[np.uint32]
    length: npt.NDArray[np.uint64]
    bitmap: npt.NDArray[np.uint8]
    candidate: npt.NDArray[np.int64]
    known: npt.NDArray[np.void]
    fingerprint: npt.NDArray[np.void]
    row: npt.NDArray[np.int64]

    def check(self) -> None:
        """Raise ValueError if C would misread any of them."""
        n = len(self.length)
        kinds = ("V16", "u4", "u8", "u1", "i8", "V16", "V16", "i8")
        sizes = (None, n + 1, n, 32 * n, n, None, n, n)
        for name, kind, size in zip(self._fields, kinds, sizes, strict=True):
            array: npt.NDArray[Any] = getattr(self, name)
            fits = array.flags.c_contiguous and f"{array.dtype.kind}{array.dtype.itemsize}" == kind
            if (
                not fits
                or size not in (None, array.size)
                or (name in ("fingerprint", "row") and not array.flags.writeable)
            ):
                raise ValueError(
                    f"{name}: {array.size} of {array.dtype} are not what the scan takes"
                )


class _Streaming(ctypes.Structure):
    """Addresses of functions (in_place.h)."""

    _fields_ = [
        (name, ctypes.c_void_p) for name in ("create", "reset", "update", "digest", "destroy")
    ]


class _Cells(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_void_p) for name in (*Columns._fields, "hash")),
        ("seed", ctypes.c_uint64),
        ("pid", ctypes.c_int64),
        ("file", ctypes.c_int64),
        ("by_file", ctypes.c_void_p),
        ("map", ctypes.c_void_p),
        ("mapped", ctypes.c_uint64),
        ("streaming", _Streaming),
    ]


class NativeScan:
    """One scan of one process or file. Several threads may use it at once.

    Args:
        pid: The process; None: ``file`` is read.
        seed: Of the fingerprints, 64 bits.
        file: A descriptor that is open for reading, whose offsets are the addresses.
        by_file: u1[n], not 0 for the cells that are read from the file; None: those of a process are
            read from the process.
        mapped: The file's mapping in this process. Cells in it are hashed in place, and copied only
            if they are not known. It must not be closed before the scan ends.
    """

    def __init__(
        self,
        pid: int | None,
        columns: Columns,
        seed: int,
        *,
        file: int | None = None,
        by_file: npt.NDArray[np.uint8] | None = None,
        mapped: MappedFile | None = None,
    ) -> None:
        lacks = native_scan_lacks()
        if lacks:
            raise RuntimeError(lacks)
        columns.check()
        if by_file is not None and (
            by_file.dtype != np.uint8
            or by_file.shape != columns.length.shape
            or not by_file.flags.c_contiguous
        ):
            raise ValueError("by_file is not what the scan takes")
        streaming = _streaming() if mapped is not None else None
        with _GUARDING:
            if streaming is not None and _library().guard_reads():
                streaming = None
        self._columns = columns
        self._cells = _Cells(
            *(getattr(columns, name).ctypes.data for name in Columns._fields),
            _hash_address(),
            seed,
            -1 if pid is None else pid,
            -1 if file is None else file,
            None if by_file is None else by_file.ctypes.data,
            None if mapped is None or streaming is None else mapped.address,
            0 if mapped is None else mapped.size,
            streaming or _Streaming(),
        )
        self._by_file = by_file
        self._address = ctypes.addressof(self._cells)
        self._call = _library().scan_cells

    def until(self, start: int, stop: int, slot: int) -> tuple[int, int]:
        """Scan cells from ``start`` to ``stop``, up to one that is not known or cannot be read at
        once.

        Args:
            slot: Address of room for a cell, and for its bitmap before that.

        Returns:
            That cell, or ``stop``; and why: CHANGED (its bytes are in the slot, its fingerprint is
            written), NOT_READ, or ALL_KNOWN.
        """
        why = ctypes.c_int64()
        return self._call(self._address, start, stop, slot, ctypes.addressof(why)), why.value


def data_ranges(file: int, ranges: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64] | None:
    """Find where a file has data, by SEEK_DATA and SEEK_HOLE.

    Args:
        file: Descriptor whose position nothing else uses.
        ranges: u8[n, 2], start and end of each range to search. The call changes it.

    Returns:
        u8[m, 2]: start and end of each run of data, in the order of the ranges. None: the native
        library cannot be used (`native_scan_lacks`).

    Raises:
        OSError: The search failed.
    """
    if native_scan_lacks():
        return None
    # Not in `_library`, which also loads those of other versions, to tell them apart.
    word, place = ctypes.c_int64, ctypes.c_void_p
    call = ctypes.CFUNCTYPE(word, word, place, word, place, word, place)(("find_data", _library()))
    found, room, done = [], _RANGES, word()
    while len(ranges):
        out = np.empty((room, 2), np.uint64)
        count = call(
            file, ranges.ctypes.data, len(ranges), out.ctypes.data, room, ctypes.addressof(done)
        )
        if count < 0:
            raise OSError(errno.EINVAL, "cannot find the holes of a file")
        found.append(out[:count])
        ranges, room = ranges[done.value :], _MORE_RANGES
    return np.concatenate([*found, np.empty((0, 2), np.uint64)])


def find_runs(pagemap: int, ranges: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64] | None:
    """Find the runs of pages in ranges that are present or swapped out, by PAGEMAP_SCAN.

    Args:
        pagemap: Descriptor of /proc/PID/pagemap.
        ranges: u8[n, 3], of each range start, end, and excluded categories (PAGE_IS_ bits): pages in
            any of them are left out. The call changes it.

    Returns:
        u8[m, 3]: start and end of each run, and 0, in the order of the ranges. None: the native
        library cannot be used (`native_scan_lacks`).

    Raises:
        OSError: The kernel refused the request.
    """
    if native_scan_lacks():
        return None
    word, place = ctypes.c_int64, ctypes.c_void_p
    call = ctypes.CFUNCTYPE(word, word, place, word, place, word, place)(("find_runs", _library()))
    found, room, done = [], _RANGES, word()
    while len(ranges):
        out = np.empty((room, 3), np.uint64)
        count = call(
            pagemap,
            ranges.ctypes.data,
            len(ranges),
            out.ctypes.data,
            room,
            ctypes.addressof(done),
        )
        if count < 0:
            raise OSError(-count, os.strerror(-count))
        found.append(out[:count])
        ranges, room = ranges[done.value :], _MORE_RANGES
    return np.concatenate([*found, np.empty((0, 3), np.uint64)])


def copy_file(source: int, target: int) -> None:
    """Copy the rest of a file without the interpreter. This is for files of /proc, of which each
    read returns only a small piece. Requires the native library (`native_scan_lacks`).

    Args:
        source, target: Descriptors, open for reading and for writing.

    Raises:
        OSError: Reading or writing failed.
    """
    word = ctypes.c_int64
    call = ctypes.CFUNCTYPE(word, word, word)(("copy_file", _library()))
    if failed := call(source, target):
        raise OSError(failed, os.strerror(failed))


@functools.cache
def native_scan_lacks() -> str:
    """Return what prevents its use here; "" if nothing does."""
    if not LIBRARY.exists():
        return "icecore was built without a C compiler"
    try:
        size = ctypes.c_uint64.in_dll(_library(), "scan_cells_size").value
    except (OSError, ValueError, AttributeError) as error:
        return f"{LIBRARY.name} cannot be used: {error}"
    there = all(hasattr(_library(), name) for name in _CALLS)
    if size != ctypes.sizeof(_Cells) or not there:
        return f"{LIBRARY.name} is another version's"
    return (
        ""
        if _hash_address()
        else "no XXH3 to be called from C: neither in the Python package xxhash nor in libxxhash.so.0"
    )


@functools.cache
def _library() -> ctypes.CDLL:
    library = ctypes.CDLL(str(LIBRARY))
    library.scan_cells.argtypes = [
        ctypes.c_void_p,
        ctypes.c_int64,
        ctypes.c_int64,
        ctypes.c_void_p,
        ctypes.c_void_p,
    ]
    library.scan_cells.restype = ctypes.c_int64
    return library


@functools.cache
def _hash_address() -> int:
    """Return the address of the hash function; 0 if there is none."""
    return next(filter(None, map(_hash, _hash_libraries())), 0)


@functools.cache
def _streaming() -> _Streaming | None:
    """Return the streaming functions; None if no library has any that agree with the package."""
    return next(filter(None, map(_streaming_of, _hash_libraries())), None)


def _hash_libraries() -> Iterator[ctypes.CDLL]:
    """Yield the libraries that may have XXH3."""
    package = importlib.util.find_spec("xxhash._xxhash")
    for name in (package.origin if package else None, "libxxhash.so.0"):
        with suppress(OSError):
            if name:
                yield ctypes.CDLL(name)


def _streaming_of(library: ctypes.CDLL) -> _Streaming | None:
    """Return a library's streaming functions; None if it lacks any, or they hash differently."""
    functions: list[Any] = []
    for names in _STREAMING:
        there = [name for name in names if hasattr(library, name)]
        if not there:
            return None
        functions.append(getattr(library, there[0]))
    create, reset, update, digest, destroy = functions
    create.restype, create.argtypes = ctypes.c_void_p, []
    reset.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    update.argtypes = [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t]
    digest.restype, digest.argtypes = _Hash, [ctypes.c_void_p]
    destroy.argtypes = [ctypes.c_void_p]
    state = create()
    try:
        reset(state, 7)
        for piece in (_PROBE[:32], _PROBE[32:]):
            update(state, piece, len(piece))
        same = _digest(digest(state)) == xxhash.xxh3_128_digest(_PROBE, 7)
    finally:
        destroy(state)
    if not same:
        return None
    return _Streaming(*(ctypes.cast(one, ctypes.c_void_p).value for one in functions))


def _digest(found: Any) -> bytes:
    """Return a hash in xxhash's canonical form."""
    return bytes(found.high.to_bytes(8, "big") + found.low.to_bytes(8, "big"))


def _hash(library: ctypes.CDLL) -> int:
    """Return the address of a function that computes what the package does; 0 if it has none."""
    for name in _NAMES:
        with suppress(AttributeError):
            function = getattr(library, name)
            function.restype, function.argtypes = (
                _Hash,
                [ctypes.c_char_p, ctypes.c_size_t, ctypes.c_uint64],
            )
            found: Any = function(_PROBE, len(_PROBE), 7)
            if _digest(found) == xxhash.xxh3_128_digest(_PROBE, 7):
                return ctypes.cast(function, ctypes.c_void_p).value or 0
    return 0
