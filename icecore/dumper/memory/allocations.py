"""Find where large allocations begin, so that equal ones get equal cells. A wrong guess costs only
deduplication.

Cells are counted from the start of a mapping. The kernel, however, joins and splits mappings by what
happens to lie beside them (and by MADV_HUGEPAGE), not by what the program asked for: the same
weights begin at page 0 of a mapping in one run and at page 1 or 513 in the next. glibc's malloc gives
every large allocation pages of its own, with a header in the first (malloc/malloc.c, "mmapped
chunks"): a word that is 0, then the size in whole pages with bit 1 set. Regions are cut behind that
page, and the size in one header leads to the next. Other allocators leave no such trace, so their
regions stay whole.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol

import numpy as np
import numpy.typing as npt

from icecore.errors import DumpFailed
from icecore.host.kernel.procfs import PROT_READ
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.manifest import Region

_HEADER = struct.Struct("<QQ")
_FLAGS, _IS_MMAPPED = 7, 2
#: Least size to which malloc gives pages of its own (M_MMAP_THRESHOLD).
_LEAST = 128 << 10
_MOST = 1 << 46
#: Upper bound on the headers to read; each takes some 5 µs.
_MOST_READS = 1 << 14


class Reader(Protocol):
    """Reads the memory of a process."""

    def read(self, start: int, length: int) -> bytearray:
        """Return ``length`` bytes at ``start``."""


def allocations(
    reader: Reader, regions: Sequence[Region], extents: npt.NDArray[np.void]
) -> list[int]:
    """Return the addresses right behind the header pages of allocations of at least a cell,
    ascending.

    Args:
        regions: Sorted and disjoint; only readable private anonymous ones are searched.
        extents: EXTENT records of the pages that hold something, ascending. Others have no header,
            and reading them would fill a process's page tables.

    Raises:
        NotFound: The process has ended.
    """
    wanted = [
        r
        for r in regions
        if r.lazy and r.protection & PROT_READ and r.kind in ("anonymous", "heap")
    ]
    readable = np.array([(r.start, r.start + r.length) for r in wanted], np.uint64).reshape(-1, 2)
    ends = extents["address"] + extents["pages"] * np.uint64(PAGE)
    touched = np.stack([extents["address"], ends], axis=1)
    starts = [region.start for region in wanted if region.length >= CELL_BYTES]
    # If MADV_HUGEPAGE split the header off, it lies before the region.
    first = np.array(starts + [start - PAGE for start in starts], np.uint64)
    found: set[int] = set()
    seen: set[int] = set()
    left = first[_within(first, readable) & _within(first, touched)].tolist()
    while left and len(seen) < _MOST_READS:
        address = left.pop()
        if address in seen:
            continue
        seen.add(address)
        size = _chunk_size(reader, address)
        if size >= CELL_BYTES:
            found.add(address + PAGE)
        after = np.array([address + size], np.uint64)
        if size and _within(after, readable)[0] and _within(after, touched)[0]:
            left.append(address + size)
    return sorted(found)


def _within(
    addresses: npt.NDArray[np.uint64], bounds: npt.NDArray[np.uint64]
) -> npt.NDArray[np.bool_]:
    """Return for each address whether it lies in one of ``bounds``, ascending and disjoint."""
    row = np.searchsorted(bounds[:, 1], addresses, side="right")
    inside = row < len(bounds)
    inside[inside] = bounds[row[inside], 0] <= addresses[inside]
    return inside


def _chunk_size(reader: Reader, address: int) -> int:
    """Return the size of the chunk whose header is at ``address``, or 0 if there is no header."""
    try:
        before, size = _HEADER.unpack(reader.read(address, _HEADER.size))
    except DumpFailed:
        return 0  # unmapped since, which happens only before the window
    size, flags = size & ~_FLAGS, size & _FLAGS
    return (
        size
        if before == 0 and flags == _IS_MMAPPED and size % PAGE == 0 and _LEAST <= size < _MOST
        else 0
    )


def cut(regions: Sequence[Region], addresses: Sequence[int]) -> list[Region]:
    """Cut regions at the addresses that lie within them. Each part counts its cells from its own
    start.
    """
    points = np.array(addresses, np.uint64)
    starts = np.array([r.start for r in regions], np.uint64)
    ends = np.array([r.start + r.length for r in regions], np.uint64)
    first, after = np.searchsorted(points, starts, "right"), np.searchsorted(points, ends, "left")
    out: list[Region] = []
    done = 0
    for number in np.flatnonzero(after > first).tolist():
        region = regions[number]
        if not region.lazy:
            continue
        out += regions[done:number]
        done = number + 1
        bounds = [
            region.start,
            *points[first[number] : after[number]].tolist(),
            region.start + region.length,
        ]
        for low, high in pairwise(bounds):
            origin = region.origin if low == region.start else low
            out.append(
                Region(
                    low,
                    high - low,
                    origin,
                    region.protection,
                    region.flags,
                    region.kind,
                    region.name,
                    region.lazy,
                )
            )
    return [*out, *regions[done:]]
