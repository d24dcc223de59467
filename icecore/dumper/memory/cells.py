"""Plan which cells a scan visits: page extents cut at region and cell boundaries, as columns that a
scan thread can simply walk. Pure numpy.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from operator import attrgetter

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.sizes import BITMAP_BYTES, CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.format.cell import NODE_CELLS
from icecore.store.format.manifest import Region

#: One contiguous run of remote memory, laid out as a C ``struct iovec``.
RUN = np.dtype([("address", "<u8"), ("length", "<u8")])

#: A page extent: ``address`` in bytes, ``pages`` in pages.
EXTENT = np.dtype([("address", "<u8"), ("pages", "<u8")])

_NODE_BYTES = NODE_CELLS * CELL_BYTES
#: u8[4, 257]: column k holds the words of the bitmap of a cell whose first k pages are present.
_FIRST_PAGES = np.ascontiguousarray(
    np.packbits(np.tri(CELL_PAGES + 1, CELL_PAGES, -1, np.bool_), axis=1, bitorder="little")
    .view("<u8")
    .T
)
#: Take the place of a known cell's row. UNKNOWN: the cell changed, or nothing is known of it. ZERO:
#: it holds only zeros, which are not read again.
UNKNOWN, ZERO = -1, -2


class CellPlan(msgspec.Struct, frozen=True):
    """The cells of one address space that hold pages, in address order; ``n`` cells, ``m`` runs.

    Attributes:
        region: u4[n], index into the regions given.
        cell: u4[n], cell number counted from the region's origin.
        key: u8[n], address of the cell's first byte that lies in its region: names the cell among
            all snapshots of the process.
        bitmap: u1[n, 32], which pages are present.
        length: u8[n], bytes of the present pages.
        first_run: u4[n + 1], the runs of cell i are ``runs[first_run[i]:first_run[i + 1]]``.
        runs: RUN[m], never crossing a cell boundary.
    """

    region: npt.NDArray[np.uint32]
    cell: npt.NDArray[np.uint32]
    key: npt.NDArray[np.uint64]
    bitmap: npt.NDArray[np.uint8]
    length: npt.NDArray[np.uint64]
    first_run: npt.NDArray[np.uint32]
    runs: npt.NDArray[np.void]

    def __len__(self) -> int:
        return len(self.cell)

    @property
    def bytes(self) -> int:
        """Bytes of all present pages."""
        return int(self.length.sum())

    def take(self, rows: npt.NDArray[np.int64]) -> CellPlan:
        """Return the plan of some of its cells; ``rows`` i8[k], ascending."""
        if len(rows) == len(self):
            return self
        source, ordinal = _split(
            self.first_run[1:].astype(np.int64)[rows] - self.first_run[:-1][rows]
        )
        first = np.searchsorted(source, np.arange(len(rows) + 1)).astype(np.uint32)
        return CellPlan(
            self.region[rows],
            self.cell[rows],
            self.key[rows],
            self.bitmap[rows],
            self.length[rows],
            first,
            self.runs[self.first_run[rows].astype(np.int64)[source] + ordinal],
        )

    def same(self, other: CellPlan) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Find the cells that another plan of the same space has with the same pages.

        Returns:
            Their rows here and there, ascending.
        """
        nothing = np.empty(0, np.int64)
        if not len(self) or not len(other):
            return nothing, nothing
        there = np.minimum(np.searchsorted(other.key, self.key), len(other) - 1)
        start, start_there = (
            self.runs["address"][self.first_run[:-1]],
            other.runs["address"][other.first_run[:-1]],
        )
        # The same first page and the same bitmap: the same window.
        equal = (other.key[there] == self.key) & (start_there[there] == start)
        equal &= (other.bitmap[there] == self.bitmap).all(axis=1)
        here = np.flatnonzero(equal)
        return here, there[here]


def _split(counts: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """Split source i into ``counts[i]`` parts; return for each part the index of its source and its
    ordinal within it.
    """
    source = np.repeat(np.arange(len(counts)), counts)
    ordinal = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    return source, ordinal


def plan_cells(regions: Sequence[Region], extents: npt.NDArray[np.void]) -> CellPlan:
    """Cut ``extents`` (EXTENT records, sorted, disjoint) at the boundaries of ``regions`` (sorted,
    disjoint) and of their cells.

    Pages outside every region are ignored: a mapping that appeared after the regions were read
    belongs to the next scan.
    """
    starts = np.array([r.start for r in regions], np.uint64)
    ends = np.array([r.start + r.length for r in regions], np.uint64)
    origins = np.array([r.origin for r in regions], np.int64)
    low = extents["address"].astype(np.uint64)
    high = low + extents["pages"].astype(np.uint64) * np.uint64(PAGE)

    first = np.searchsorted(ends, low, side="right")
    after = np.searchsorted(starts, high, side="left")
    source, ordinal = _split(np.maximum(after - first, 0))
    region = first[source] + ordinal
    low = np.maximum(low[source], starts[region])
    high = np.minimum(high[source], ends[region])

    offset_low = low.astype(np.int64) - origins[region]
    offset_high = high.astype(np.int64) - origins[region]
    cell_first = offset_low // CELL_BYTES
    source, ordinal = _split((offset_high - 1) // CELL_BYTES - cell_first + 1)
    region = region[source]
    cell = cell_first[source] + ordinal
    base = (origins[region] + cell * CELL_BYTES).astype(np.int64)
    run_low = np.maximum(low[source].astype(np.int64), base)
    run_high = np.minimum(high[source].astype(np.int64), base + CELL_BYTES)

    runs = np.empty(len(run_low), RUN)
    runs["address"] = run_low
    runs["length"] = run_high - run_low
    if not len(runs):
        empty = np.empty(0, np.uint32)
        return CellPlan(
            empty,
            empty,
            np.empty(0, np.uint64),
            np.empty((0, BITMAP_BYTES), np.uint8),
            np.empty(0, np.uint64),
            np.zeros(1, np.uint32),
            runs,
        )

    new = np.empty(len(runs), np.bool_)
    new[0] = True
    new[1:] = (np.diff(region) != 0) | (np.diff(cell) != 0)
    head = np.flatnonzero(new)
    return CellPlan(
        region=region[head].astype(np.uint32),
        cell=cell[head].astype(np.uint32),
        key=np.maximum(base[head].astype(np.uint64), starts[region[head]]),
        bitmap=_bitmaps(head, (run_low - base) // PAGE, (run_high - base) // PAGE),
        length=np.add.reduceat(runs["length"], head).astype(np.uint64),
        first_run=np.append(head, len(runs)).astype(np.uint32),
        runs=runs,
    )


def _bitmaps(
    head: npt.NDArray[np.intp], low: npt.NDArray[np.int64], high: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint8]:
    """Return the page bitmaps of cells, u1[n, 32], from their page runs [low, high). ``head`` holds
    the index of each cell's first run, ascending; every cell has a run.
    """
    out = np.empty((len(head), _FIRST_PAGES.shape[0]), _FIRST_PAGES.dtype)
    for number, first in enumerate(_FIRST_PAGES):
        out[:, number] = np.bitwise_or.reduceat(first[high] ^ first[low], head)
    return out.view(np.uint8)


_bounds = attrgetter("start", "length", "origin")


def inherit_origins(regions: Sequence[Region], parent: Sequence[Region]) -> list[Region]:
    """Give each region the cell grid of the parent's region that it overlaps most, so that a region
    which grew or merged keeps its cells.

    An origin moves only by whole nodes (64 cells), so nodes of unchanged cells stay equal too.
    """
    if not parent:
        return list(regions)
    starts = [before.start for before in parent]
    ends = [before.start + before.length for before in parent]
    origins = {bounds[:2]: bounds[2] for bounds in map(_bounds, parent)}
    out = []
    for region in regions:
        low, length, own = _bounds(region)
        known = origins.get((low, length), -1)
        if 0 <= known <= low < known + _NODE_BYTES:  # as nearly always: it has not changed
            out.append(region if known == own else msgspec.structs.replace(region, origin=known))
            continue
        high = low + length
        over = range(bisect_right(ends, low), bisect_left(starts, high))
        if not over:
            out.append(region)
            continue
        most = max(over, key=lambda at: min(ends[at], high) - max(starts[at], low))
        origin = parent[most].origin
        if origin > low:
            origin -= -((low - origin) // _NODE_BYTES) * _NODE_BYTES
        else:
            origin += (low - origin) // _NODE_BYTES * _NODE_BYTES
        if origin == region.origin or origin < 0:
            out.append(region)
        else:
            out.append(msgspec.structs.replace(region, origin=origin))
    return out
