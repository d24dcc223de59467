"""What CRIU's images say of memory that is restored."""

from __future__ import annotations

import mmap

import numpy as np

from icecore.host.images import MAP_ANONYMOUS, MAP_PRIVATE, MAP_SHARED, VMA
from icecore.restorer import images
from icecore.restorer.cells import SpaceCells
from icecore.store.cell import CELL
from icecore.store.manifest import Region, Space

_MIB = 1 << 20


def space(*regions: tuple[int, int, str]) -> Space:
    made = [Region(start * _MIB, length * _MIB, start * _MIB, kind=kind) for start, length, kind in regions]
    return Space("process", "1", 0, made)


def test_device_memory_that_was_cut() -> None:
    found = images.device_ranges(
        space((0, 4, "anonymous"), (4, 64, "device"), (68, 100, "device"), (168, 2, "anonymous"), (170, 3, "device"), (180, 70, "device"))
    )
    assert found == [(4 * _MIB, 168 * _MIB), (170 * _MIB, 173 * _MIB), (180 * _MIB, 250 * _MIB)]


def test_which_mappings_can_be_of_huge_pages() -> None:
    own, write = MAP_PRIVATE | MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    rows = [
        (0, 64, own, write),
        (64, 164, own, write),
        (164, 300, own, write),  # not all of it is device memory
        (300, 400, MAP_SHARED | MAP_ANONYMOUS, write),
        (400, 500, own, mmap.PROT_READ),
        (500, 563, own, write),  # too small
        (600, 700, own, write),  # no device memory
    ]
    vmas = np.zeros(len(rows), VMA)
    for at, row in enumerate(rows):
        vmas[at]["start"], vmas[at]["end"], vmas[at]["flags"], vmas[at]["protection"] = row[0] * _MIB, row[1] * _MIB, *row[2:]
    devices = [(0, 200 * _MIB), (300 * _MIB, 600 * _MIB)]
    assert images.large_vmas(vmas, devices).tolist() == vmas[:2].tolist()


def test_the_first_part_divides_no_cell() -> None:
    bounds = np.arange(9, dtype=np.uint64) * np.uint64(_MIB) + np.uint64(_MIB // 2)
    cells = SpaceCells(np.empty(8, CELL), bounds[:-1], bounds[:-1], bounds[1:])
    start, end = int(bounds[0]), int(bounds[-1])
    after = (end + _MIB, end + 5 * _MIB)
    assert images.first_part(cells, [(start, end)], 8 * _MIB) == [(start, end)]
    assert images.first_part(cells, [(start, end)], 5 * _MIB) == [(start, start + 4 * _MIB)]
    assert images.first_part(cells, [(start, end), after], 5 * _MIB) == [(start, start + 4 * _MIB)]
    assert images.first_part(cells, [(start, end), after], 11 * _MIB) == [(start, end), (after[0], after[0] + 2 * _MIB)]
    assert images.first_part(cells, [(start, end), after], 9 * _MIB) == [(start, end)]
    shifted = SpaceCells(cells.records, *(column + np.uint64(4096) for column in (cells.base, cells.low, cells.high)))
    assert images.first_part(shifted, [(start, end)], 5 * _MIB) == [(start, start + 3 * _MIB + 4096)]
    assert images.first_part(cells, [(start, end)], _MIB) == []
    few = SpaceCells(cells.records[:1], cells.base[:1], cells.low[:1], cells.high[:1])  # what is empty has no cells
    assert images.first_part(few, [(start, end)], 5 * _MIB) == [(start, start + 4 * _MIB)]
