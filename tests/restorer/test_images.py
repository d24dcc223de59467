"""What CRIU's images say of memory that is restored."""

from __future__ import annotations

import mmap
from typing import Any

import numpy as np

from icecore.host.criu.images import (
    MAP_ANONYMOUS,
    MAP_LOCKED,
    MAP_PRIVATE,
    MAP_SHARED,
    VMA,
    VMA_ANON_PRIVATE,
    VMA_ANON_SHARED,
    VMA_FILE_PRIVATE,
    VMA_HEAP,
    VMA_REGULAR,
    VMA_STACK,
)
from icecore.host.criu.pagemap_image import ENTRY, PE_LAZY, PE_PRESENT
from icecore.restorer.files import images
from icecore.sizes import PAGE
from icecore.store.format.manifest import Region, Space

_MIB, _GIB = 1 << 20, 1 << 30


def space(*regions: tuple[int, int, str]) -> Space:
    made = [
        Region(start * _MIB, length * _MIB, start * _MIB, kind=kind)
        for start, length, kind in regions
    ]
    return Space("process", "1", 0, made)


def test_device_memory_that_was_cut() -> None:
    found = images.device_ranges(
        space(
            (0, 4, "anonymous"),
            (4, 64, "device"),
            (68, 100, "device"),
            (168, 2, "anonymous"),
            (170, 3, "device"),
            (180, 70, "device"),
        )
    )
    assert found == [(4 * _MIB, 168 * _MIB), (170 * _MIB, 173 * _MIB), (180 * _MIB, 250 * _MIB)]


def entries(*rows: tuple[int, int, int]) -> np.ndarray[Any, np.dtype[np.void]]:
    """Pagemap entries: first page, pages, flags."""
    return np.array([(first * PAGE, pages, flags) for first, pages, flags in rows], ENTRY)


def test_which_mappings_can_be_of_a_file() -> None:
    own, write = MAP_PRIVATE | MAP_ANONYMOUS, mmap.PROT_READ | mmap.PROT_WRITE
    rows = [
        (0, 64, own, write, 0),
        (64, 164, own, write, 0),
        (164, 300, own, write, 0),  # its first part is temporary, which is too small
        (300, 400, MAP_SHARED | MAP_ANONYMOUS, write, 0),
        (400, 500, own, mmap.PROT_READ, 0),
        (500, 563, own, write, 0),  # too small
        (600, 700, own, write, 0),  # not temporary
        (700, 800, own, write, 1 << 18),  # a file's mapping cannot be wiped in children
        (800, 900, own, write, 0),  # CRIU restores a page of it by itself
        (900, 1200, own, write, 0),  # what lies in the middle is temporary
        (1200, 1300, own, write, 0),
    ]
    vmas = np.zeros(len(rows), VMA)
    for at, row in enumerate(rows):
        (
            vmas[at]["start"],
            vmas[at]["end"],
            vmas[at]["flags"],
            vmas[at]["protection"],
            vmas[at]["madvise"],
        ) = row[0] * _MIB, row[1] * _MIB, *row[2:]
    temporary = [
        (0, 200 * _MIB),
        (300 * _MIB, 600 * _MIB),
        (700 * _MIB, 900 * _MIB),
        (910 * _MIB, 990 * _MIB),
        (1100 * _MIB, 1300 * _MIB),
    ]
    pages = entries((0, 100 << 8, PE_LAZY | PE_PRESENT), (850 << 8, 1, PE_PRESENT))
    assert images.mappable(vmas, temporary, pages) == [
        (start * _MIB, end * _MIB)
        for start, end in ((0, 64), (64, 164), (910, 990), (1100, 1200), (1200, 1300))
    ]


def test_which_mappings_are_only_reserved() -> None:
    own, plain = MAP_PRIVATE | MAP_ANONYMOUS, VMA_REGULAR | VMA_ANON_PRIVATE
    rows = [
        (0, 1, own, plain),
        (1, 3, own, plain),  # its last page is in the snapshot
        (3, 4, own | 0x4000, plain | VMA_HEAP),
        (4, 6, own, plain),  # its first page is
        (6, 7, own | MAP_LOCKED, plain),
        (7, 8, MAP_SHARED | MAP_ANONYMOUS, VMA_REGULAR | VMA_ANON_SHARED),
        (8, 9, MAP_PRIVATE, VMA_REGULAR | VMA_FILE_PRIVATE),
        (9, 10, own, plain | VMA_STACK),
        (10, 10.5, own, plain),  # small
        (11, 15, own, plain),
    ]
    vmas = np.zeros(len(rows), VMA)
    for vma, (start, end, flags, status) in zip(vmas, rows, strict=True):
        vma["start"], vma["end"], vma["flags"], vma["status"] = (
            start * _GIB,
            end * _GIB,
            flags,
            status,
        )
    pages = entries(
        ((3 * _GIB >> 12) - 1, 1, PE_PRESENT), (4 * _GIB >> 12, 5, PE_PRESENT | PE_LAZY)
    )
    assert images.reservations(vmas, pages) == {0, 3 * _GIB, 11 * _GIB}
    assert images.reservations(vmas, pages[:0]) == {0, _GIB, 3 * _GIB, 4 * _GIB, 11 * _GIB}


def test_entries_are_cut_where_a_file_begins_and_ends() -> None:
    pages = entries((0, 10, 1), (10, 5, 2), (20, 10, 2), (40, 1, 2))
    ranges = [(3 * PAGE, 12 * PAGE), (25 * PAGE, 27 * PAGE), (30 * PAGE, 40 * PAGE)]
    assert (
        images.clipped(pages, ranges).tolist()
        == entries((3, 7, 1), (10, 2, 2), (25, 2, 2)).tolist()
    )
    rest = entries((0, 3, 1), (12, 3, 2), (20, 5, 2), (27, 3, 2), (40, 1, 2))
    assert images.clipped(pages, images.gaps(ranges)).tolist() == rest.tolist()
    assert images.gaps([(0, 5), (5, 7)]) == [(7, 1 << 63)]
    assert len(images.clipped(pages, [])) == 0


def test_huge_pages_of_cells() -> None:
    low = np.array([3, 4, 5, 9, 20], np.uint64) * np.uint64(_MIB) + np.uint64(PAGE)
    high = np.array([4, 5, 6, 10, 21], np.uint64) * np.uint64(_MIB)
    assert images.huge_pages(low, high) == [
        (2 * _MIB, 6 * _MIB),
        (8 * _MIB, 10 * _MIB),
        (20 * _MIB, 22 * _MIB),
    ]
    assert images.huge_pages(low[:0], high[:0]) == []


def test_mappings_lie_in_the_file_as_they_are_to_huge_pages() -> None:
    far = 1 << 40
    ranges = [
        (3 * _MIB, 70 * _MIB),
        (70 * _MIB, 200 * _MIB),
        (201 * _MIB + PAGE, 300 * _MIB),
        (far + PAGE, far + 64 * _MIB),
    ]
    found, end = images.lay_out(ranges, 2 * _MIB)
    assert list(found) == [start for start, _ in ranges]
    assert all(
        (position - start) % (2 * _MIB) == 0 and position >= 2 * _MIB
        for start, position in found.items()
    )
    first, second, third, fourth = found.values()
    assert (second - first, third - first) == (
        67 * _MIB,
        198 * _MIB + PAGE,
    )  # no cell is in two places
    assert (
        third + 99 * _MIB < fourth < third + 110 * _MIB
        and fourth + 64 * _MIB - PAGE < end < fourth + 70 * _MIB
    )
    again, _ = images.lay_out(ranges[:1], end)
    assert again[3 * _MIB] >= end
