"""The cells of a snapshot as columns: which pages of which cell come through userfaultfd, and which
go into CRIU's page images. CRIU's pagemap decides, and the records must agree with it. Pure numpy.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged
from icecore.sizes import BITMAP_BYTES, CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.format.cell import CELL, Bytes, Records
from icecore.store.format.manifest import Region

#: A page extent of a pagemap: first address in bytes, length in pages.
EXTENT = np.dtype([("address", "<u8"), ("pages", "<u8")])

Extents = npt.NDArray[np.void]
Addresses = npt.NDArray[np.uint64]
_BATCH = 8192


class SpaceCells(msgspec.Struct, frozen=True):
    """The cells of one space in address order; n rows.

    Attributes:
        records: CELL[n].
        base: u8[n], address of the first byte of each cell's window.
        low: u8[n], first address of the window that lies in the cell's region.
        high: u8[n], the address after the last one that does.
    """

    records: Records
    base: Addresses
    low: Addresses
    high: Addresses

    def __len__(self) -> int:
        return len(self.base)


def space_cells(regions: Sequence[Region], records: Sequence[Records]) -> SpaceCells:
    """Join the records of a space's regions.

    Args:
        regions: In address order.
        records: CELL records of each region, ascending by cell.

    Raises:
        Damaged: A record lies outside its region.
    """
    # Through bytes: numpy compares the field lists of structured arrays one by one before it joins
    # them.
    together = np.frombuffer(b"".join([part.tobytes() for part in records]), CELL)
    index = np.repeat(np.arange(len(regions)), [len(r) for r in records])
    origin = np.array([r.origin for r in regions], np.uint64)[index]
    start = np.array([r.start for r in regions], np.uint64)[index]
    end = np.array([r.start + r.length for r in regions], np.uint64)[index]
    base = origin + together["cell"].astype(np.uint64) * np.uint64(CELL_BYTES)
    low, high = np.maximum(base, start), np.minimum(base + np.uint64(CELL_BYTES), end)
    if (low >= high).any() or (low[1:] < high[:-1]).any():
        raise Damaged("map", "of a space", "its cells do not lie in its regions")
    return SpaceCells(together, base, low, high)


def covered(bitmaps: Bytes, base: Addresses, extents: Extents) -> Bytes:
    """Return those of each row's pages that lie in the extents.

    Args:
        bitmaps: u1[n, 32], pages of cells.
        base: u8[n], where each cell's window begins.
        extents: Sorted, disjoint.
    """
    if not len(extents):
        return np.zeros_like(bitmaps)
    starts = extents["address"].astype(np.uint64)
    ends = starts + extents["pages"].astype(np.uint64) * np.uint64(PAGE)
    at = np.searchsorted(starts, base, side="right") - 1
    whole = (at >= 0) & (base + np.uint64(CELL_BYTES) <= ends[np.maximum(at, 0)])
    last = np.searchsorted(starts, base + np.uint64(CELL_BYTES), side="left") - 1
    touched = (last >= 0) & (ends[np.maximum(last, 0)] > base)
    out = np.where(whole[:, None], bitmaps, np.uint8(0))
    partial = np.flatnonzero(touched & ~whole)
    for first in range(0, len(partial), _BATCH):
        rows = partial[first : first + _BATCH]
        out[rows] = _covered_pages(bitmaps[rows], base[rows], starts, ends)
    return out


def _covered_pages(bitmaps: Bytes, base: Addresses, starts: Addresses, ends: Addresses) -> Bytes:
    bits = np.unpackbits(bitmaps, axis=1, bitorder="little")
    row, page = np.nonzero(bits)
    address = base[row] + page.astype(np.uint64) * np.uint64(PAGE)
    at = np.searchsorted(starts, address, side="right") - 1
    bits[row, page] = (at >= 0) & (address < ends[np.maximum(at, 0)])
    return np.packbits(bits, axis=1, bitorder="little")


def check_complete(cells: SpaceCells, extents: Extents, name: str) -> None:
    """Check that the records have every page of a pagemap, as bytes or as zeros.

    Raises:
        Damaged: One is missing: a restore would invent its content.
    """
    there = cells.records["data"] | cells.records["zero"]
    held = int(np.bitwise_count(covered(there, cells.base, extents)).sum(dtype=np.int64))
    wanted = int(extents["pages"].sum(dtype=np.int64)) if len(extents) else 0
    if held != wanted:
        raise Damaged(
            "map", name, f"CRIU's pagemap has {wanted} pages, the cells hold {held} of them"
        )


class FileLayout:
    """The layout of a pages-*.img: the pages lie one after the other in the pagemap's order.

    Args:
        extents: The pagemap's entries whose pages are in the image, sorted by address.
        offset: Of the first page in the file, in bytes.
    """

    def __init__(self, extents: Extents, offset: int = 0) -> None:
        self.extents = extents
        self._start = extents["address"].astype(np.int64)
        length = extents["pages"].astype(np.int64) * PAGE
        self._offset = offset + np.cumsum(length) - length
        #: The end of the last page in the file.
        self.end = offset + int(length.sum())

    def runs(self, base: int, bitmap: Bytes, within: Bytes) -> list[tuple[int, int, int]]:
        """Return where the bytes of one cell go in the file.

        Args:
            base: Address of the cell's window.
            bitmap: Its data pages, whose bytes are written in order.
            within: Those of them that the layout covers.

        Returns:
            ``(position in the cell's bytes, position in the file, length)`` of each run.
        """
        data = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
        wanted = np.unpackbits(within, bitorder="little")[data].view(np.bool_)
        source = np.flatnonzero(wanted) * PAGE
        address = base + data[wanted] * PAGE
        at = np.searchsorted(self._start, address, side="right") - 1
        target = self._offset[at] + address - self._start[at]
        if not len(source):
            return []
        new = np.ones(len(source), np.bool_)
        new[1:] = (np.diff(source) != PAGE) | (np.diff(target) != PAGE)
        first = np.flatnonzero(new)
        count = np.diff(first, append=len(source))
        return list(
            zip(
                source[first].tolist(), target[first].tolist(), (count * PAGE).tolist(), strict=True
            )
        )


FULL_CELL = bytes([255]) * BITMAP_BYTES
_WHOLE = [(0, 0, CELL_PAGES * PAGE)]


def page_pieces(bitmap: bytes, wanted: bytes) -> list[tuple[int, int, int]]:
    """Return the runs of a cell's wanted pages.

    Args:
        bitmap: Its data pages; their bytes lie one after the other.
        wanted: A subset of them.

    Returns:
        ``(offset in the window, position in the bytes, length)`` of each run, in bytes.
    """
    if wanted == FULL_CELL:
        return _WHOLE
    # Integers as bit sets: a cell has few runs, and numpy's calls would cost more than placing a
    # small cell.
    data, left, page = int.from_bytes(bitmap, "little"), int.from_bytes(wanted, "little"), 0
    pieces = []
    while left:
        skip = (left & -left).bit_length() - 1
        left >>= skip
        page += skip
        count = (~left & (left + 1)).bit_length() - 1
        rank = (data & ((1 << page) - 1)).bit_count()
        pieces.append((page * PAGE, rank * PAGE, count * PAGE))
        left >>= count
        page += count
    return pieces
