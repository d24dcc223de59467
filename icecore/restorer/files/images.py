"""Rebuilds CRIU's image directory from a snapshot: the image files as they were, the page images
from memory cells.

Every page of every pagemap is in exactly one of four places: in a page image, from which CRIU
copies it, behind userfaultfd, in a file that CRIU maps, or in shared memory that is filled once CRIU
has made it.
"""

from __future__ import annotations

import mmap
import os
import re
from collections.abc import Container, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged
from icecore.host.criu.image_changes import add_file, map_file, map_in_place
from icecore.host.criu.images import (
    MAP_ANONYMOUS,
    MAP_GROWSDOWN,
    MAP_HUGETLB,
    MAP_LOCKED,
    MAP_PRIVATE,
    MAP_SHARED,
    VMA_ANON_PRIVATE,
    VMA_GUARD,
    VMA_HEAP,
    VMA_REGULAR,
    VMA_STACK,
    Vmas,
    load_mm,
)
from icecore.host.criu.pagemap_image import (
    PE_LAZY,
    PE_PARENT,
    PE_PRESENT,
    Entries,
    load_pagemap,
    write_pagemap,
)
from icecore.host.cuda.populate import SMALLEST
from icecore.restorer.files.filewriter import FileTarget
from icecore.restorer.plan.cells import (
    EXTENT,
    Extents,
    FileLayout,
    SpaceCells,
    check_complete,
    covered,
    space_cells,
)
from icecore.sizes import HUGE_PAGE, PAGE
from icecore.store.format.cell import Bytes
from icecore.store.format.manifest import Manifest, Space
from icecore.store.snapshot.reader import SnapshotReader

_NAME = re.compile(r"[A-Za-z0-9_.+:-]{1,200}\Z")
#: Page images are made from cells, never stored; CRIU is told the name of the file of device
#: memory.
_MADE_HERE = re.compile(r"pages-\d+\.img\Z|icecore-device-memory\Z")
_READERS = 16
_MADV_WIPEONFORK = 18
#: Mappings that are closer than this keep their distance in the file, so that no cell is in two
#: places of it.
_NEAR = 1 << 30
_TOP = 1 << 57
#: Bytes: memory of at least this size without any page is a reservation.
_RESERVATION = 1 << 30
#: By how much a mapping's huge pages may exceed its bytes.
SPARE = 0.125
#: The name under which CRIU gets the file (`Memory.filed`).
FILE_NAME = "icecore-device-memory"


class LazyMemory(msgspec.Struct, frozen=True):
    """The pages of one process that come through userfaultfd.

    Attributes:
        process: CRIU's id of the process.
        cells: Its cells that have such pages with bytes.
        wanted: u1[n, 32], those pages.
        wiped: Ranges (start, end) that a forked child finds empty (MADV_WIPEONFORK).
        device: bool[n], which cells are device memory.
        driver: Ranges (start, end) of device memory that do not come from a file, in address order.
            The driver reads all of them, also where there are no pages to place.
        filed: Ranges (start, end) that come from a file (`FiledMemory`).
    """

    process: int
    cells: SpaceCells
    wanted: Bytes
    wiped: list[tuple[int, int]]
    device: npt.NDArray[np.bool_]
    driver: list[tuple[int, int]]
    filed: list[tuple[int, int]]


class FiledMemory(msgspec.Struct, frozen=True):
    """The device memory of one process that goes into a file, which CRIU maps.

    Attributes:
        process: CRIU's id of the process.
        cells: Its cells that have such pages with bytes.
        wanted: u1[n, 32], those pages.
        position: i8[n], where in the file each cell's window begins.
        ranges: The mappings, (start, end) in address order.
    """

    process: int
    cells: SpaceCells
    wanted: Bytes
    position: npt.NDArray[np.int64]
    ranges: list[tuple[int, int]]


class PlacedMemory(msgspec.Struct, frozen=True):
    """Shared memory that CRIU makes empty.

    Attributes:
        number: CRIU's number of the object.
        cells: Its cells.
    """

    number: int
    cells: SpaceCells


class Memory(msgspec.Struct, frozen=True):
    """How the snapshot's memory comes back.

    Attributes:
        page_images: To be written.
        lazy: What comes through userfaultfd, by process.
        filed: What CRIU maps from the file `FILE_NAME`.
        size: Bytes of that file.
        placed: Shared memory to be filled once CRIU has made it.
    """

    page_images: list[FileTarget]
    lazy: list[LazyMemory]
    filed: list[FiledMemory]
    size: int
    placed: list[PlacedMemory]


def read_spaces(
    reader: SnapshotReader, spaces: Sequence[Space], *, parallel: bool
) -> list[SpaceCells]:
    """Read the cells of many spaces.

    Args:
        parallel: The storage is distant: let several reads wait at once.
    """

    def read(space: Space) -> SpaceCells:
        return space_cells(space.regions, reader.records(space))

    if not parallel or len(spaces) < 2:
        return [read(space) for space in spaces]
    with ThreadPoolExecutor(min(_READERS, len(spaces)), thread_name_prefix="maps") as pool:
        return list(pool.map(read, spaces))


def image_targets(
    folder: Path, spaces: Sequence[Space], cells: Sequence[SpaceCells]
) -> list[FileTarget]:
    """Return the image files of a snapshot, to be written into ``folder``.

    Raises:
        Damaged: A name is not that of an image.
    """
    targets = []
    for space, own in zip(spaces, cells, strict=True):
        if not _NAME.match(space.key) or space.key.startswith(".") or _MADE_HERE.match(space.key):
            raise Damaged(
                "manifest", "of the snapshot", f"it has an image file named {space.key!r}"
            )
        targets.append(FileTarget(str(folder / space.key), space.size, own))
    return targets


def _extents(entries: Entries) -> Extents:
    """Return the entries as extents, with neighbours joined."""
    if not len(entries):
        return np.empty(0, EXTENT)
    head = np.ones(len(entries), np.bool_)
    head[1:] = entries["address"][1:] != entries["address"][:-1] + entries["pages"][
        :-1
    ] * np.uint64(PAGE)
    first = np.flatnonzero(head)
    out = np.empty(len(first), EXTENT)
    out["address"] = entries["address"][first]
    out["pages"] = np.add.reduceat(entries["pages"], first)
    return out


def _check_order(entries: Entries, name: str) -> None:
    if (entries["address"] > _TOP).any() or (entries["pages"] > _TOP // PAGE).any():
        raise Damaged("image", name, "an entry lies beyond all addresses")
    ends = entries["address"] + entries["pages"] * np.uint64(PAGE)
    if (entries["address"][1:] < ends[:-1]).any():
        raise Damaged("image", name, "its entries are not in address order")
    if (entries["flags"] & PE_PARENT).any():
        raise Damaged("image", name, "it refers to a parent image")


def _kept(cells: SpaceCells, pages: Bytes) -> tuple[SpaceCells, Bytes]:
    """Return the rows that have any of ``pages``."""
    rows = np.flatnonzero(pages.any(axis=1)) if len(pages) else np.empty(0, np.int64)
    return SpaceCells(
        cells.records[rows], cells.base[rows], cells.low[rows], cells.high[rows]
    ), pages[rows]


def plan_memory(
    folder: Path,
    memory: Sequence[tuple[Space, SpaceCells]],
    version: tuple[int, ...],
    *,
    lazily: bool,
    temporary: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    fillable: Container[int] = (),
) -> Memory:
    """Divide the snapshot's memory among page images, userfaultfd, a file and shared memory, and
    rewrite the pagemaps accordingly.

    Args:
        folder: Holds the pagemap images; those that say something else are rewritten.
        memory: The process and shared spaces with their cells.
        version: Of the CRIU that will read the pagemaps.
        lazily: Pages that can come through userfaultfd do; False: all go into the page images.
        temporary: Image id of a process → where its device memory lies, (start, end) in address
            order, which the driver unmaps again. Large mappings of it come from a file; the mm
            images are changed accordingly.
        fillable: CRIU's numbers of shared memory objects. These are not in the page images, and
            their pagemaps get other names (icecore/host/criu/placed.c).

    Raises:
        Damaged: A pagemap is missing or names pages that the snapshot does not hold.
    """
    images: list[FileTarget] = []
    lazy: list[LazyMemory] = []
    filed: list[FiledMemory] = []
    mapped: list[tuple[Vmas, list[tuple[int, int, int]]]] = []
    taken: set[int] = set()
    placed: list[PlacedMemory] = []
    position = HUGE_PAGE
    for space, cells in memory:
        name = (
            f"pagemap-{space.key}.img"
            if space.kind == "process"
            else f"pagemap-shmem-{space.key}.img"
        )
        path = folder / name
        try:
            pages_id, entries = load_pagemap(path)
        except FileNotFoundError:
            raise Damaged("manifest", "of the snapshot", f"there is no {name}") from None
        _check_order(entries, name)
        check_complete(cells, _extents(entries), f"of {space.kind} {space.key}")
        if space.kind == "shared" and int(space.key) in fillable:
            placed.append(PlacedMemory(int(space.key), cells))
            entries = entries[:0]
            os.unlink(path)
            write_pagemap(folder / f"placed-shmem-{space.key}.img", pages_id, entries, version)
        ranges: list[tuple[int, int]] = []
        wanted_vmas = space.kind == "process" and (lazily or temporary)
        vmas = _vmas(folder, int(space.key)) if wanted_vmas else None
        if vmas is not None:
            if lazily and (reserved := reservations(vmas, entries)):  # not what is exported
                map_in_place(folder, int(space.key), reserved)
            given = temporary.get(int(space.key), ()) if temporary else ()
            ranges = [bounds for bounds in mappable(vmas, given, entries) if _dense(cells, bounds)]
        if ranges and vmas is not None:
            offsets, position = lay_out(ranges, position)
            filed.append(
                _filed(int(space.key), cells, offsets, ranges, _extents(clipped(entries, ranges)))
            )
            mapped.append((vmas, [(start, end, offsets[start]) for start, end in ranges]))
            entries = clipped(entries, gaps(ranges))
        can_wait = (entries["flags"] & PE_LAZY) != 0
        if space.kind != "process":
            can_wait[:] = False
        wanted = entries.copy()
        if lazily:
            wanted["flags"] = np.where(can_wait, PE_LAZY, PE_PRESENT)
        else:
            wanted["flags"] = np.where(can_wait, PE_LAZY | PE_PRESENT, PE_PRESENT)
            can_wait[:] = False
        if ranges or (wanted["flags"] != entries["flags"]).any():
            os.unlink(path)
            write_pagemap(path, pages_id, wanted, version)
        written = wanted[~can_wait]
        if len(written):
            if pages_id in taken:
                raise Damaged("image", name, f"pages-{pages_id}.img belongs to another pagemap")
            taken.add(pages_id)
            layout = FileLayout(_extents(written))
            own, pages = _kept(cells, covered(cells.records["data"], cells.base, layout.extents))
            images.append(
                FileTarget(str(folder / f"pages-{pages_id}.img"), layout.end, own, layout, pages)
            )
        elif not (folder / f"pages-{pages_id}.img").exists() and pages_id not in taken:
            # CRIU opens the file even if it has no pages.
            taken.add(pages_id)
            images.append(FileTarget(str(folder / f"pages-{pages_id}.img"), 0, *_nothing(cells)))
        if can_wait.any() or ranges:
            own, pages = _kept(
                cells, covered(cells.records["data"], cells.base, _extents(entries[can_wait]))
            )
            assert vmas is not None, "only memory of processes waits"
            wiped, device = wiped_ranges(vmas), device_ranges(space)
            driver = [
                (max(start, low), min(end, high))
                for start, end in device
                for low, high in gaps(ranges)
                if max(start, low) < min(end, high)
            ]
            inside = within(own, device)
            lazy.append(LazyMemory(int(space.key), own, pages, wiped, inside, driver, ranges))
    for part, (vmas, pieces) in zip(filed, mapped, strict=True):
        # A file entry for each process: if two processes map one file at the same address, CRIU
        # lets the child inherit the parent's mapping, whatever part of the file it maps.
        map_file(folder, part.process, vmas, pieces, add_file(folder, FILE_NAME))
    return Memory(images, lazy, filed, position, placed)


def device_ranges(space: Space) -> list[tuple[int, int]]:
    """Return where device memory is, (start, end) in address order; a VMA of it may be cut into
    many regions.
    """
    found: list[tuple[int, int]] = []
    for region in space.regions:
        if region.kind == "device" and found and found[-1][1] == region.start:
            found[-1] = (found[-1][0], region.start + region.length)
        elif region.kind == "device":
            found.append((region.start, region.start + region.length))
    return found


def within(cells: SpaceCells, ranges: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Return bool[n]: which cells lie in one of the ranges (start, end) in address order."""
    if not ranges:
        return np.zeros(len(cells), np.bool_)
    starts, ends = np.array(ranges, np.uint64).T
    at = np.searchsorted(starts, cells.low, side="right") - 1
    inside: npt.NDArray[np.bool_] = (at >= 0) & (cells.low < ends[np.maximum(at, 0)])
    return inside


def lay_out(ranges: Sequence[tuple[int, int]], position: int) -> tuple[dict[int, int], int]:
    """Place mappings in a file at offsets that equal their addresses modulo 2 MiB, so that they can
    consist of huge pages.

    Args:
        ranges: (start, end) in address order.
        position: The first free offset; a cell's window may begin before it.

    Returns:
        Start → offset in the file, and the next free offset.
    """
    found: dict[int, int] = {}
    last, moved = -_NEAR, 0
    for start, end in ranges:
        if start - last >= _NEAR:
            moved = position + (start - position) % HUGE_PAGE - start
        found[start] = start + moved
        last, position = end, -(-(end + moved) // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE
    return found, position


def _filed(
    process: int,
    cells: SpaceCells,
    offsets: Mapping[int, int],
    ranges: list[tuple[int, int]],
    extents: Extents,
) -> FiledMemory:
    """Return the part of a process's cells that goes into the file."""
    own, pages = _kept(cells, covered(cells.records["data"], cells.base, extents))
    starts = np.array([start for start, _ in ranges], np.uint64)
    at = np.searchsorted(starts, own.high, side="left") - 1
    moved = np.array([offsets[start] - start for start, _ in ranges], np.int64)
    return FiledMemory(process, own, pages, own.base.astype(np.int64) + moved[at], ranges)


def huge_pages(low: npt.NDArray[np.uint64], high: npt.NDArray[np.uint64]) -> list[tuple[int, int]]:
    """Return the ranges (start, end) of whole huge pages that cells (u8[n], u8[n], ascending)
    touch, in address order.
    """
    found: list[tuple[int, int]] = []
    starts, ends = (
        low // np.uint64(HUGE_PAGE) * np.uint64(HUGE_PAGE),
        -(-high.astype(np.int64) // HUGE_PAGE) * HUGE_PAGE,
    )
    for start, end in zip(starts.tolist(), ends.tolist(), strict=True):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], end)
        else:
            found.append((start, end))
    return found


def _dense(cells: SpaceCells, bounds: tuple[int, int]) -> bool:
    """Return whether a mapping takes little more memory in huge pages than it has bytes."""
    extent = np.array([(bounds[0], (bounds[1] - bounds[0]) // PAGE)], EXTENT)
    own, pages = _kept(cells, covered(cells.records["data"], cells.base, extent))
    taken = sum(end - start for start, end in huge_pages(own.low, own.high))
    return (
        taken
        <= int(np.bitwise_count(pages).sum(dtype=np.int64)) * PAGE * (1 + SPARE) + 2 * HUGE_PAGE
    )


def clipped(entries: Entries, ranges: Sequence[tuple[int, int]]) -> Entries:
    """Return the parts of entries that lie in ranges (start, end); both are in address order."""
    found = []
    ends = entries["address"] + entries["pages"] * np.uint64(PAGE)
    for start, end in np.array(ranges, np.uint64).reshape(-1, 2):
        first, last = (
            np.searchsorted(ends, start, side="right"),
            np.searchsorted(entries["address"], end, side="left"),
        )
        part = entries[first:last].copy()
        part["address"] = np.maximum(part["address"], start)
        part["pages"] = (np.minimum(ends[first:last], end) - part["address"]) // np.uint64(PAGE)
        found.append(part)
    return np.concatenate(found) if found else entries[:0]


def gaps(ranges: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Return what lies between ranges (start, end) in address order, before the first, and after
    the last.
    """
    bounds = [0, *(bound for both in ranges for bound in both), 1 << 63]
    return [
        (start, end) for start, end in zip(bounds[::2], bounds[1::2], strict=True) if start < end
    ]


def _vmas(folder: Path, process: int) -> Vmas:
    """Return the VMAs that CRIU will make.

    Raises:
        Damaged: The process's mm image is missing or makes no sense.
    """
    try:
        return load_mm(folder, process).vmas
    except OSError as error:
        raise Damaged("image", f"mm-{process}.img", str(error)) from error


def wiped_ranges(vmas: Vmas) -> list[tuple[int, int]]:
    """Return the VMAs of a process that its children find empty."""
    wiped = vmas[(vmas["madvise"] >> np.uint64(_MADV_WIPEONFORK) & np.uint64(1)) != 0]
    return list(zip(wiped["start"].tolist(), wiped["end"].tolist(), strict=True))


def reservations(vmas: Vmas, entries: Entries) -> set[int]:
    """Return the starts of private anonymous memory of at least `_RESERVATION` bytes without pages:
    address space that is only reserved.
    """
    kind = MAP_PRIVATE | MAP_ANONYMOUS
    fit = vmas["flags"] & (kind | MAP_SHARED | MAP_LOCKED | MAP_HUGETLB | MAP_GROWSDOWN) == kind
    fit &= vmas["status"] & ~np.uint32(VMA_HEAP) == VMA_REGULAR | VMA_ANON_PRIVATE
    fit &= vmas["end"] - vmas["start"] >= np.uint64(_RESERVATION)
    starts, ends = vmas["start"][fit], vmas["end"][fit]
    # Entries are in address order and do not overlap.
    first = np.searchsorted(
        entries["address"] + entries["pages"] * np.uint64(PAGE), starts, "right"
    )
    empty = first == np.searchsorted(entries["address"], ends, "left")
    return set(starts[empty].tolist())


def mappable(
    vmas: Vmas, temporary: Sequence[tuple[int, int]], entries: Entries
) -> list[tuple[int, int]]:
    """Return the parts of ``temporary``, (start, end) in address order, that can be private
    mappings of a file, in pieces of `SMALLEST` bytes at least.

    A piece ends where its VMA does, but may be a part of it: the kernel merges the driver's mapping
    with what lies beside it.
    """
    kind = MAP_PRIVATE | MAP_ANONYMOUS
    fit = (vmas["flags"] & (kind | MAP_SHARED | MAP_LOCKED | MAP_HUGETLB) == kind) & (
        vmas["protection"] & mmap.PROT_WRITE != 0
    )
    fit &= vmas["status"] & (VMA_STACK | VMA_HEAP | VMA_GUARD) == 0
    fit &= (vmas["madvise"] >> np.uint64(_MADV_WIPEONFORK) & np.uint64(1)) == 0
    fit &= vmas["end"] - vmas["start"] >= np.uint64(SMALLEST)
    found = [
        (max(start, first), min(end, last))
        for start, end in zip(vmas["start"][fit].tolist(), vmas["end"][fit].tolist(), strict=True)
        for first, last in temporary
        if min(end, last) - max(start, first) >= SMALLEST
    ]
    fixed = entries[(entries["flags"] & PE_LAZY) == 0]
    return [bounds for bounds in found if not len(clipped(fixed, [bounds]))]


def _nothing(cells: SpaceCells) -> tuple[SpaceCells, FileLayout, Bytes]:
    none, pages = _kept(cells, np.zeros_like(cells.records["data"]))
    return none, FileLayout(np.empty(0, EXTENT)), pages


def spaces_of(manifest: Manifest, *kinds: str) -> list[Space]:
    """Return the spaces of some kinds, in the manifest's order."""
    return [space for space in manifest.spaces if space.kind in kinds]
