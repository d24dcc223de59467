"""The cell plan against a page-by-page model, and the inheritance of cell grids."""

from __future__ import annotations

from random import Random

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from icecore.dumper.memory.cells import EXTENT, CellPlan, inherit_origins, plan_cells
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.manifest import Region

_PAGES = CELL_BYTES // PAGE


@st.composite
def layouts(draw: st.DrawFn) -> tuple[list[Region], list[tuple[int, int]]]:
    """Generate disjoint regions with arbitrary grids, and disjoint extents over them and the holes
    between them, in pages.
    """
    position, regions = draw(st.integers(1, 300)), []
    for _ in range(draw(st.integers(0, 5))):
        length = draw(st.integers(1, 3 * _PAGES))
        origin = position - draw(st.integers(0, min(position, 2 * _PAGES)))
        regions.append(Region(position * PAGE, length * PAGE, origin * PAGE))
        position += length + draw(st.sampled_from([0, 0, 1, 700]))
    extents, at = [], draw(st.integers(0, 50))
    while at < position + 10 and len(extents) < 40:
        length = draw(st.integers(1, 400))
        extents.append((at * PAGE, length))
        at += length + draw(st.integers(0, 60))
    return regions, extents


@settings(max_examples=150, deadline=None)
@given(layouts())
def test_plan_covers_exactly_the_pages_of_the_regions(
    layout: tuple[list[Region], list[tuple[int, int]]],
) -> None:
    regions, extents = layout
    plan = plan_cells(regions, np.array(extents, EXTENT))
    present = {address + i * PAGE for address, pages in extents for i in range(pages)}
    expected: dict[tuple[int, int], set[int]] = {}
    for number, region in enumerate(regions):
        for page in range(region.start, region.start + region.length, PAGE):
            if page in present:
                cell = (page - region.origin) // CELL_BYTES
                expected.setdefault((number, cell), set()).add(page)
    assert [(int(r), int(c)) for r, c in zip(plan.region, plan.cell, strict=True)] == sorted(
        expected
    )
    for row, key in enumerate(sorted(expected)):
        pages = expected[key]
        region = regions[key[0]]
        base = region.origin + key[1] * CELL_BYTES
        bits = np.flatnonzero(np.unpackbits(plan.bitmap[row], bitorder="little"))
        assert {base + int(b) * PAGE for b in bits} == pages
        runs = plan.runs[plan.first_run[row] : plan.first_run[row + 1]]
        assert {
            int(r["address"]) + i * PAGE for r in runs for i in range(int(r["length"]) // PAGE)
        } == pages
        assert int(plan.length[row]) == len(pages) * PAGE
        assert int(plan.key[row]) == max(base, region.start)
    assert len(np.unique(plan.key)) == len(plan)


@settings(max_examples=100, deadline=None)
@given(layouts(), st.randoms(use_true_random=False))
def test_some_cells_of_a_plan_are_a_plan(
    layout: tuple[list[Region], list[tuple[int, int]]], random: Random
) -> None:
    regions, extents = layout
    plan = plan_cells(regions, np.array(extents, EXTENT))
    rows = np.array([row for row in range(len(plan)) if random.random() < 0.5], np.int64)
    some = plan.take(rows)
    assert len(some) == len(rows) and some.bytes == int(plan.length[rows].sum())
    for name in ("region", "cell", "key", "bitmap", "length"):
        assert (getattr(some, name) == getattr(plan, name)[rows]).all()
    for at, row in enumerate(rows.tolist()):
        runs = some.runs[some.first_run[at] : some.first_run[at + 1]]
        assert (runs == plan.runs[plan.first_run[row] : plan.first_run[row + 1]]).all()
    here, there = plan.same(some)
    assert here.tolist() == rows.tolist() and there.tolist() == list(range(len(rows)))


def pages_of(plan: CellPlan, row: int) -> set[int]:
    """Return the addresses of a cell's pages, whatever runs they lie in."""
    runs = plan.runs[plan.first_run[row] : plan.first_run[row + 1]]
    return {
        int(run["address"]) + page * PAGE
        for run in runs
        for page in range(int(run["length"]) // PAGE)
    }


@settings(max_examples=100, deadline=None)
@given(layouts(), layouts())
def test_cells_are_the_same_if_their_pages_are(
    layout: tuple[list[Region], list[tuple[int, int]]],
    other: tuple[list[Region], list[tuple[int, int]]],
) -> None:
    """In two plans of one space, with any regions, cells that count as the same have the same
    pages. In equal plans all cells do.
    """
    plan = plan_cells(layout[0], np.array(layout[1], EXTENT))
    for regions in (layout[0], other[0]):
        second = plan_cells(regions, np.array(other[1], EXTENT))
        here, there = plan.same(second)
        mine, theirs = plan.take(here), second.take(there)
        assert (mine.key == theirs.key).all() and (mine.bitmap == theirs.bitmap).all()
        for row in range(len(mine)):
            assert pages_of(mine, row) == pages_of(theirs, row)
    assert plan.same(plan)[0].tolist() == list(range(len(plan)))


def test_a_region_that_grows_downwards_keeps_its_cells() -> None:
    parent = Region(0x7F0000123000, 40 << 20, 0x7F0000123000)
    grown = Region(
        0x7F0000123000 - (5 << 20) - PAGE, (45 << 20) + PAGE, 0x7F0000123000 - (5 << 20) - PAGE
    )
    (child,) = inherit_origins([grown], [parent])
    assert child.origin <= child.start
    assert (parent.origin - child.origin) % (64 << 20) == 0
    everything = np.array([(parent.start, parent.length // PAGE)], EXTENT)
    before, after = plan_cells([parent], everything), plan_cells([child], everything)
    assert before.key.tolist() == after.key.tolist()
    assert before.bitmap.tolist() == after.bitmap.tolist()


def test_a_region_without_a_predecessor_begins_its_own_grid() -> None:
    fresh = Region(0x10000, 1 << 20, 0x10000)
    assert inherit_origins([fresh], [Region(0x900000, 1 << 20, 0x900000)]) == [fresh]
