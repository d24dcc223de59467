"""Pages of cells against plain loops over single pages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icecore.errors import Damaged
from icecore.restorer.plan.cells import (
    EXTENT,
    Extents,
    FileLayout,
    SpaceCells,
    check_complete,
    covered,
    page_pieces,
    space_cells,
)
from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.format.cell import CELL, Bytes
from icecore.store.format.manifest import Region

runs = st.lists(st.tuples(st.integers(0, 255), st.integers(1, 256)), max_size=6)


def mask_of(pieces: list[tuple[int, int]]) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    mask = np.zeros(CELL_PAGES, np.bool_)
    for first, count in pieces:
        mask[first : first + count] = True
    return mask


def bitmap(mask: np.ndarray[tuple[int], np.dtype[np.bool_]]) -> Bytes:
    return np.packbits(mask, bitorder="little")


@given(runs, runs)
def test_pieces_of_a_cell(
    data_runs: list[tuple[int, int]], wanted_runs: list[tuple[int, int]]
) -> None:
    data = mask_of(data_runs)
    wanted = data & mask_of(wanted_runs)
    positions = {int(page): rank for rank, page in enumerate(np.flatnonzero(data))}
    found = {}
    pieces = page_pieces(bitmap(data).tobytes(), bitmap(wanted).tobytes())
    for offset, position, length in pieces:
        for k in range(0, length, PAGE):
            found[(offset + k) // PAGE] = (position + k) // PAGE
    assert found == {int(page): positions[int(page)] for page in np.flatnonzero(wanted)}
    assert len(pieces) == np.count_nonzero(
        np.diff(np.concatenate(([0], wanted.astype(np.int8)))) == 1
    )


extents = st.lists(st.tuples(st.integers(0, 700), st.integers(1, 300)), max_size=8)


def make_extents(drawn: list[tuple[int, int]]) -> Extents:
    pages = np.zeros(1100, np.bool_)
    for first, count in drawn:
        pages[first : first + count] = True
    edges = np.flatnonzero(np.diff(np.concatenate(([0], pages.astype(np.int8), [0]))))
    out = np.empty(len(edges) // 2, EXTENT)
    out["address"] = edges[::2] * PAGE
    out["pages"] = edges[1::2] - edges[::2]
    return out


@settings(deadline=None)
@given(st.lists(st.tuples(runs, st.integers(0, 800)), min_size=1, max_size=4), extents)
def test_pages_that_extents_cover(
    rows: list[tuple[list[tuple[int, int]], int]], drawn: list[tuple[int, int]]
) -> None:
    found = make_extents(drawn)
    bitmaps = np.array([bitmap(mask_of(r)) for r, _ in rows])
    base = np.array([first * PAGE for _, first in rows], np.uint64)
    inside = {int(e["address"]) // PAGE + k for e in found for k in range(int(e["pages"]))}
    result = covered(bitmaps, base, found)
    for (r, first), row in zip(rows, result, strict=True):
        expected = [bool(bit) and first + page in inside for page, bit in enumerate(mask_of(r))]
        assert np.unpackbits(row, bitorder="little").view(np.bool_).tolist() == expected


@settings(deadline=None)
@given(runs, extents, st.integers(0, 500))
def test_layout_of_a_page_image(
    data_runs: list[tuple[int, int]], drawn: list[tuple[int, int]], first: int
) -> None:
    """The file offset of a page is the number of the layout's pages before it."""
    layout = FileLayout(make_extents(drawn), offset=8 * PAGE)
    pages = [int(e["address"]) // PAGE + k for e in layout.extents for k in range(int(e["pages"]))]
    data = mask_of(data_runs)
    base = np.array([first * PAGE], np.uint64)
    within = covered(bitmap(data)[None], base, layout.extents)[0]
    ranks = {int(page): rank for rank, page in enumerate(np.flatnonzero(data))}
    expected = {
        ranks[page]: 8 + pages.index(first + page)
        for page in np.flatnonzero(np.unpackbits(within, bitorder="little")).tolist()
    }
    found = {}
    for position, offset, length in layout.runs(first * PAGE, bitmap(data), within):
        for k in range(0, length, PAGE):
            found[(position + k) // PAGE] = (offset + k) // PAGE
    assert found == expected
    assert layout.end == (8 + len(pages)) * PAGE


def cells_at(*cells: int) -> SpaceCells:
    records = np.zeros(len(cells), CELL)
    records["cell"] = cells
    records["data"] = 255
    return space_cells([Region(0, 8 * CELL_BYTES, 0)], [records])


def test_a_pagemap_with_pages_that_no_cell_has_is_damage() -> None:
    pages = np.array([(0, 256), (CELL_BYTES, 1)], EXTENT)
    check_complete(cells_at(0, 1), pages, "x")
    with pytest.raises(Damaged, match="257 pages"):
        check_complete(cells_at(0), pages, "x")


def test_cells_outside_their_region_are_damage() -> None:
    records = np.zeros(1, CELL)
    records["cell"] = 9
    with pytest.raises(Damaged):
        space_cells([Region(0, 8 * CELL_BYTES, 0)], [records])


def test_windows_are_cut_at_the_region() -> None:
    records = np.zeros(2, CELL)
    records["cell"] = [0, 1]
    cells = space_cells([Region(5 * PAGE, CELL_BYTES, 0)], [records])
    assert cells.low.tolist() == [5 * PAGE, CELL_BYTES] and cells.high.tolist() == [
        CELL_BYTES,
        CELL_BYTES + 5 * PAGE,
    ]
