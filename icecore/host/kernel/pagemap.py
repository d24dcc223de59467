"""Which pages of a process exist, for millions of pages at once: /proc/PID/pagemap and its
PAGEMAP_SCAN. Results are numpy arrays, never a Python object per page.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Collection, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Literal

import numpy as np
import numpy.typing as npt

from icecore.errors import NotFound
from icecore.host.kernel import libc, procfs
from icecore.host.kernel.scanning import find_runs
from icecore.sizes import PAGE

PRESENT = np.uint64(1 << 63)
SWAPPED = np.uint64(1 << 62)
#: Of a file, or of shared memory.
FILE = np.uint64(1 << 61)
#: Mapped by one process only.
EXCLUSIVE = np.uint64(1 << 56)

#: Categories of PAGEMAP_SCAN (linux/fs.h).
SCAN_FILE = 1 << 2
SCAN_PRESENT = 1 << 3
SCAN_SWAPPED = 1 << 4
SCAN_ZERO_FRAME = 1 << 5
#: From Linux 6.15 on; what madvise(MADV_GUARD_INSTALL) made counts as swapped, too.
SCAN_GUARD = 1 << 8

#: struct page_region: a run of pages with the same categories.
PAGE_RUN = np.dtype([("start", "<u8"), ("end", "<u8"), ("categories", "<u8")])

#: A range, and the categories of which its pages may have none: start, end, SCAN_ bits.
Wanted = tuple[int, int, int]

_PAGEMAP_SCAN = 0xC0606610
#: Least bytes of a piece, and about the most pieces into which all small ranges, and all large
#: ones, are divided.
_PIECE, _PIECES = 16 << 20, 512
#: A range of more bytes counts as large.
_RESERVED = 8 << 30
#: Resident bytes for each thread: with fewer, starting the thread takes longer than it saves.
_SHARE = 128 << 20
_BATCH = 1 << 16  # entries a read (512 KiB) or regions a scan


class _ScanArgument(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_uint64)
        for name in (
            "size",
            "flags",
            "start",
            "end",
            "walk_end",
            "regions",
            "capacity",
            "maximum",
            "inverted",
            "mask",
            "any_of",
            "wanted",
        )
    ]


class Pagemap:
    """The page map of a process ("self": this one), kept open. Several threads may ask at once."""

    def __init__(self, pid: int | Literal["self"]) -> None:
        self.pid = pid
        try:
            self._file = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY | os.O_CLOEXEC)
        except (FileNotFoundError, ProcessLookupError) as error:
            raise NotFound(f"there is no process {pid}") from error

    def __enter__(self) -> Pagemap:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the file."""
        os.close(self._file)

    def entries(self, start: int, end: int) -> npt.NDArray[np.uint64]:
        """Return the 64-bit pagemap entry (proc_pid_pagemap(5)) of each page from ``start`` to
        ``end``; without CAP_SYS_ADMIN frame numbers are 0.
        """
        first, pages = start // PAGE, (end - start) // PAGE
        out = np.empty(pages, np.uint64)
        if pages == 0:
            return out
        view = out.data.cast("B")
        done = 0
        while done < pages * 8:
            got = os.preadv(self._file, [view[done : done + _BATCH * 8]], first * 8 + done)
            if got == 0:
                # Past the top of the address space, or of a process that has ended: nothing is
                # there.
                out[done // 8 :] = 0
                break
            done += got
        return out

    def runs(
        self,
        start: int,
        end: int,
        *,
        any_of: int = SCAN_PRESENT | SCAN_SWAPPED,
        wanted: int = SCAN_FILE | SCAN_ZERO_FRAME,
    ) -> npt.NDArray[np.void]:
        """Return the runs of pages in any of some categories, by PAGEMAP_SCAN (Linux 6.7), which
        skips what is not mapped and merges equal neighbours.

        Args:
            start: First address, page-aligned.
            end: Address after the last.
            any_of: SCAN_ bits of which a page needs one.
            wanted: SCAN_ bits that the answer tells apart (each run is uniform in them).

        Returns:
            PAGE_RUN records in address order.

        Raises:
            NotFound: The process has ended.
            OSError: ENOTTY on an older kernel.
        """
        batches = []
        out = np.empty(4096, PAGE_RUN)
        while start < end:
            argument = _ScanArgument(
                ctypes.sizeof(_ScanArgument),
                0,
                start,
                end,
                0,
                out.ctypes.data,
                len(out),
                0,
                0,
                0,
                any_of,
                wanted,
            )
            count = libc.ioctl(self._file, _PAGEMAP_SCAN, ctypes.addressof(argument))
            if count < 0:
                if ctypes.get_errno() == errno.EINTR:
                    continue
                if ctypes.get_errno() == errno.ESRCH:
                    raise NotFound(f"there is no process {self.pid}")
                raise libc.last_error(f"PAGEMAP_SCAN of process {self.pid}")
            if count == 0:
                break
            batches.append(out[:count].copy())
            # Linux 6.18 leaves an old walk_end behind when the walk came to its end: going on there
            # would tell runs twice.
            start = max(argument.walk_end, int(out["end"][count - 1]))
            if count == len(out) and len(out) < _BATCH:
                out = np.empty(_BATCH, PAGE_RUN)
        return np.concatenate(batches) if batches else np.empty(0, PAGE_RUN)

    def contents(
        self, ranges: Sequence[tuple[int, int]], *, anonymous: Collection[int] = ()
    ) -> npt.NDArray[np.void]:
        """The runs of private pages that hold something: neither absent, nor a file's, nor the
        kernel's shared page of zeros, nor guard pages. (Before Linux 6.7 nothing tells that page from
        others, and all that are there count.)

        Args:
            ranges: (start, end), ascending, disjoint.
            anonymous: Starts of ranges of memory that maps no file. There the kernel need not tell
                the pages of files, which takes it five times as long.

        Returns:
            PAGE_RUN records in address order.

        Raises:
            NotFound: The process has ended.
        """
        return self._contents(_wanted(ranges, anonymous))

    def _contents(self, wanted: Sequence[Wanted]) -> npt.NDArray[np.void]:
        if not scan_supported():
            found = [self._entry_runs(start, end) for start, end, _ in wanted]
            return np.concatenate([np.empty(0, PAGE_RUN), *found])
        try:
            native = find_runs(self._file, np.array(wanted, np.uint64).reshape(-1, 3))
        except ProcessLookupError as error:
            raise NotFound(f"there is no process {self.pid}") from error
        if native is not None:
            return native.reshape(-1).view(PAGE_RUN)
        found = []
        for start, end, excluded in wanted:
            runs = self.runs(start, end, wanted=excluded)
            found.append(runs[(runs["categories"] & np.uint64(excluded)) == 0])
        return np.concatenate([np.empty(0, PAGE_RUN), *found])

    def _entry_runs(self, start: int, end: int) -> npt.NDArray[np.void]:
        """Return the pages with content by their entries, one by one: only for mapped addresses."""
        found = [np.empty(0, PAGE_RUN)]
        step = _BATCH * PAGE
        for first in range(start, end, step):
            entries = self.entries(first, min(end, first + step))
            there = ((entries & (PRESENT | SWAPPED)) != 0) & ((entries & FILE) == 0)
            edges = np.flatnonzero(np.diff(there, prepend=False, append=False))
            runs = np.zeros(len(edges) // 2, PAGE_RUN)
            runs["start"], runs["end"] = first + edges[::2] * PAGE, first + edges[1::2] * PAGE
            found.append(runs)
        return np.concatenate(found)

    def guards(self, start: int, end: int) -> npt.NDArray[np.void]:
        """Return the runs of guard pages (madvise(2), MADV_GUARD_INSTALL) as PAGE_RUN records; none
        if the kernel does not distinguish them (`guards_told`).
        """
        return (
            self.runs(start, end, any_of=SCAN_GUARD, wanted=SCAN_GUARD)
            if guards_told()
            else np.empty(0, PAGE_RUN)
        )

    def present(self, start: int, end: int) -> npt.NDArray[np.bool_]:
        """Return, for each page from ``start`` to ``end``, whether it has content: in memory or
        swapped out.
        """
        try:
            runs = self.runs(start, end, wanted=0)
        except OSError as error:
            if error.errno not in (errno.ENOTTY, errno.EINVAL):
                raise
            here: npt.NDArray[np.bool_] = (self.entries(start, end) & (PRESENT | SWAPPED)).astype(
                np.bool_
            )
            return here
        edges = np.zeros((end - start) // PAGE + 1, np.int8)
        np.add.at(edges, ((runs["start"] - start) // PAGE).astype(np.int64), 1)
        np.add.at(edges, ((runs["end"] - start) // PAGE).astype(np.int64), -1)
        return np.greater(np.cumsum(edges[:-1], dtype=np.int8), 0)


def contents_of(
    pid: int,
    ranges: Sequence[tuple[int, int]],
    threads: int,
    *,
    anonymous: Collection[int] = frozenset(),
) -> npt.NDArray[np.void]:
    """Return `Pagemap.contents` of a process, by several threads if it is large: a walk takes 3 ms
    for each GiB of small pages, or 16 ms where it may map a file, and starting threads half a
    millisecond.

    Args:
        ranges: (start, end), ascending, disjoint.
        threads: How many ask at once.
        anonymous: Starts of ranges of memory that maps no file.

    Returns:
        PAGE_RUN records in address order; neighbours are joined.

    Raises:
        NotFound: There is no such process.
    """
    wanted = _wanted(ranges, anonymous)
    shares = _shares(wanted, min(threads, procfs.resident_bytes(pid) // _SHARE))
    with Pagemap(pid) as pagemap:
        if len(shares) < 2:
            return _joined(pagemap._contents(wanted))
        with ThreadPoolExecutor(len(shares), thread_name_prefix="pages") as pool:
            found = np.concatenate(list(pool.map(pagemap._contents, shares)))
    order = np.argsort(found["start"])
    # As one field, because records are gathered field by field.
    return _joined(np.take(found.view(f"V{PAGE_RUN.itemsize}"), order).view(PAGE_RUN))


def _wanted(ranges: Iterable[tuple[int, int]], anonymous: Collection[int]) -> list[Wanted]:
    least = SCAN_ZERO_FRAME | (SCAN_GUARD if guards_told() else 0)
    return [
        (start, end, least if start in anonymous else least | SCAN_FILE) for start, end in ranges
    ]


def _shares(ranges: Sequence[Wanted], count: int) -> list[list[Wanted]]:
    """Divide ranges into ``count`` shares that take about the same time, each ascending.

    The ranges are cut into pieces, which are dealt out in turn. The pieces are small, because the
    pages of some ranges lie close together. Large ranges get larger pieces: they are mostly
    reserved addresses, which take almost no time to walk. (CUDA reserves as many addresses as the
    machine and the GPUs have memory.)
    """
    if count < 2:
        return [list(ranges)]
    sizes = [end - start for start, end, _ in ranges]
    small = sum(size for size in sizes if size <= _RESERVED)
    large = sum(size > _RESERVED for size in sizes)
    pieces = []
    for (start, end, excluded), size in zip(ranges, sizes, strict=True):
        part = small // _PIECES if size <= _RESERVED else size // max(1, _PIECES // large)
        step = max(_PIECE, part // PAGE * PAGE)
        pieces += [(first, min(end, first + step), excluded) for first in range(start, end, step)]
    return [share for number in range(count) if (share := pieces[number::count])]


def _joined(runs: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    if not len(runs):
        return runs
    alike = (runs["start"][1:] == runs["end"][:-1]) & (
        runs["categories"][1:] == runs["categories"][:-1]
    )
    first = np.flatnonzero(np.concatenate(([True], ~alike)))
    out = runs[first].copy()
    out["end"] = runs["end"][np.append(first[1:], len(runs)) - 1]
    return out


@functools.cache
def scan_supported() -> bool:
    """Return whether this kernel has PAGEMAP_SCAN."""
    return _scans(SCAN_PRESENT)


@functools.cache
def guards_told() -> bool:
    """Return whether this kernel's PAGEMAP_SCAN distinguishes guard pages from others."""
    return _scans(SCAN_GUARD)


def _scans(category: int) -> bool:
    with Pagemap(os.getpid()) as pagemap:
        try:
            pagemap.runs(PAGE, 2 * PAGE, any_of=category, wanted=category)
        except OSError as error:
            if error.errno in (errno.ENOTTY, errno.EINVAL):
                return False
            raise
        return True
