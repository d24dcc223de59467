"""CRIU's image directory rebuilt from a snapshot: the image files as they were, the page images from memory cells.

The rule: what CRIU would copy itself is in a page image, what comes through userfaultfd is not, and every page of every
pagemap is in exactly one of the two.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged
from icecore.host.images import load_mm
from icecore.host.pagemap_image import PE_LAZY, PE_PARENT, PE_PRESENT, Entries, load_pagemap, write_pagemap
from icecore.restorer.cells import (
    EXTENT,
    Extents,
    FileLayout,
    SpaceCells,
    check_complete,
    covered,
    space_cells,
)
from icecore.restorer.filewriter import FileTarget
from icecore.store.cell import PAGE, Bytes
from icecore.store.manifest import Manifest, Space
from icecore.store.reader import SnapshotReader

_NAME = re.compile(r"[A-Za-z0-9_.+:-]{1,200}\Z")
_READERS = 16
_MADV_WIPEONFORK = 18


@dataclass(frozen=True)
class LazyMemory:
    """The pages of one process that come through userfaultfd.

    Attributes:
        process: CRIU's id of the process.
        cells: Its cells that have such pages with bytes.
        wanted: u1[n, 32], those pages.
        wiped: Ranges (start, end) that a forked child finds empty (MADV_WIPEONFORK).
        device: bool[n], which cells are device memory.
    """

    process: int
    cells: SpaceCells
    wanted: Bytes
    wiped: list[tuple[int, int]]
    device: npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Memory:
    """How the snapshot's memory is brought back: ``page_images`` to be written, and the rest lazily."""

    page_images: list[FileTarget]
    lazy: list[LazyMemory]


def read_spaces(reader: SnapshotReader, spaces: Sequence[Space], *, parallel: bool) -> list[SpaceCells]:
    """The cells of many spaces.

    Args:
        parallel: Whether a read has to wait for something far away, so that several should wait at once.
    """

    def read(space: Space) -> SpaceCells:
        return space_cells(space.regions, reader.records(space))

    if not parallel or len(spaces) < 2:
        return [read(space) for space in spaces]
    with ThreadPoolExecutor(min(_READERS, len(spaces)), thread_name_prefix="maps") as pool:
        return list(pool.map(read, spaces))


def image_targets(folder: Path, spaces: Sequence[Space], cells: Sequence[SpaceCells]) -> list[FileTarget]:
    """The image files of a snapshot, to be written into ``folder``.

    Raises:
        Damaged: A name that is no image's.
    """
    targets = []
    for space, own in zip(spaces, cells, strict=True):
        if not _NAME.match(space.key) or space.key.startswith("."):
            raise Damaged("manifest", "of the snapshot", f"it has an image file named {space.key!r}")
        targets.append(FileTarget(str(folder / space.key), space.size, own))
    return targets


def _extents(entries: Entries) -> Extents:
    """The entries as extents, neighbours joined."""
    if not len(entries):
        return np.empty(0, EXTENT)
    head = np.ones(len(entries), np.bool_)
    head[1:] = entries["address"][1:] != entries["address"][:-1] + entries["pages"][:-1] * np.uint64(PAGE)
    first = np.flatnonzero(head)
    out = np.empty(len(first), EXTENT)
    out["address"] = entries["address"][first]
    out["pages"] = np.add.reduceat(entries["pages"], first)
    return out


def _check_order(entries: Entries, name: str) -> None:
    ends = entries["address"] + entries["pages"] * np.uint64(PAGE)
    if (entries["address"][1:] < ends[:-1]).any():
        raise Damaged("image", name, "its entries are not in address order")
    if (entries["flags"] & PE_PARENT).any():
        raise Damaged("image", name, "it refers to a parent image")


def _kept(cells: SpaceCells, pages: Bytes) -> tuple[SpaceCells, Bytes]:
    """The rows that have any of ``pages``."""
    rows = np.flatnonzero(pages.any(axis=1)) if len(pages) else np.empty(0, np.int64)
    return SpaceCells(cells.records[rows], cells.base[rows], cells.low[rows], cells.high[rows]), pages[rows]


def plan_memory(
    folder: Path,
    memory: Sequence[tuple[Space, SpaceCells]],
    version: tuple[int, ...],
    *,
    lazily: bool,
) -> Memory:
    """Divide the snapshot's memory, and make the pagemaps say so.

    Args:
        folder: Holds the pagemap images; they are rewritten where they say something else.
        memory: The process and shared spaces with their cells.
        version: Of the CRIU that will read the pagemaps.
        lazily: Whether pages that can come through userfaultfd do; else all go into the page images.

    Raises:
        Damaged: A pagemap is missing or names pages that the snapshot does not hold.
    """
    images: list[FileTarget] = []
    lazy: list[LazyMemory] = []
    taken: set[int] = set()
    for space, cells in memory:
        name = f"pagemap-{space.key}.img" if space.kind == "process" else f"pagemap-shmem-{space.key}.img"
        path = folder / name
        try:
            pages_id, entries = load_pagemap(path)
        except FileNotFoundError:
            raise Damaged("manifest", "of the snapshot", f"there is no {name}") from None
        _check_order(entries, name)
        check_complete(cells, _extents(entries), f"of {space.kind} {space.key}")
        can_wait = (entries["flags"] & PE_LAZY) != 0
        if space.kind != "process":
            can_wait[:] = False
        wanted = entries.copy()
        if lazily:
            wanted["flags"] = np.where(can_wait, PE_LAZY, PE_PRESENT)
        else:
            wanted["flags"] = np.where(can_wait, PE_LAZY | PE_PRESENT, PE_PRESENT)
            can_wait[:] = False
        if (wanted["flags"] != entries["flags"]).any():
            os.unlink(path)
            write_pagemap(path, pages_id, wanted, version)
        written = wanted[~can_wait]
        if len(written):
            if pages_id in taken:
                raise Damaged("image", name, f"pages-{pages_id}.img belongs to another pagemap")
            taken.add(pages_id)
            layout = FileLayout(_extents(written))
            own, pages = _kept(cells, covered(cells.records["data"], cells.base, layout.extents))
            images.append(FileTarget(str(folder / f"pages-{pages_id}.img"), layout.end, own, layout, pages))
        elif not (folder / f"pages-{pages_id}.img").exists() and pages_id not in taken:
            # CRIU opens it all the same.
            taken.add(pages_id)
            images.append(FileTarget(str(folder / f"pages-{pages_id}.img"), 0, *_nothing(cells)))
        if can_wait.any():
            own, pages = _kept(cells, covered(cells.records["data"], cells.base, _extents(entries[can_wait])))
            wiped = wiped_ranges(folder, int(space.key))
            lazy.append(LazyMemory(int(space.key), own, pages, wiped, _in_device_regions(space, own)))
    return Memory(images, lazy)


def _in_device_regions(space: Space, cells: SpaceCells) -> npt.NDArray[np.bool_]:
    """bool[n]: which cells lie in regions of device memory."""
    regions = [region for region in space.regions if region.kind == "device"]
    starts = np.array([region.start for region in regions], np.uint64)
    ends = np.array([region.start + region.length for region in regions], np.uint64)
    if not regions:
        return np.zeros(len(cells), np.bool_)
    at = np.searchsorted(starts, cells.low, side="right") - 1
    inside: npt.NDArray[np.bool_] = (at >= 0) & (cells.low < ends[np.maximum(at, 0)])
    return inside


def wiped_ranges(folder: Path, process: int) -> list[tuple[int, int]]:
    """The VMAs of a process that its children find empty.

    Raises:
        Damaged: Its mm image is missing or makes no sense.
    """
    try:
        vmas = load_mm(folder, process).vmas
    except OSError as error:
        raise Damaged("image", f"mm-{process}.img", str(error)) from error
    wiped = vmas[(vmas["madvise"] >> np.uint64(_MADV_WIPEONFORK) & np.uint64(1)) != 0]
    return list(zip(wiped["start"].tolist(), wiped["end"].tolist(), strict=True))


def _nothing(cells: SpaceCells) -> tuple[SpaceCells, FileLayout, Bytes]:
    none, pages = _kept(cells, np.zeros_like(cells.records["data"]))
    return none, FileLayout(np.empty(0, EXTENT)), pages


def spaces_of(manifest: Manifest, *kinds: str) -> list[Space]:
    """The spaces of some kinds, in the manifest's order."""
    return [space for space in manifest.spaces if space.kind in kinds]
