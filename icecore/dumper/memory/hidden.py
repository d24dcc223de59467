"""Pages that CRIU was kept from seeing: find them in the frozen process or in shared memory, and
write them into CRIU's pagemap, where a restore looks for them.

Either all pages of every hidden range are found, or the snapshot fails.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from icecore.dumper.memory.cells import EXTENT
from icecore.dumper.memory.images import Pagemap
from icecore.dumper.memory.present import Present, present_extents
from icecore.dumper.memory.shared import SharedObject, shared_regions
from icecore.errors import DumpFailed
from icecore.host.criu.hidden import RANGE, Ranges
from icecore.host.criu.pagemap_image import ENTRY, PE_LAZY, PE_PRESENT, load_pagemap, write_pagemap
from icecore.host.kernel.procfs import MAP_PRIVATE
from icecore.sizes import PAGE
from icecore.store.format.manifest import Region

Extents = npt.NDArray[np.void]

_ANONYMOUS, _DROPPABLE = 0x20, 0x08  # MAP_ANONYMOUS, MAP_DROPPABLE


def find_hidden(
    pid: int, regions: list[Region], hidden: Ranges, known: Present | None, threads: int
) -> Extents:
    """Find the pages in hidden ranges of a frozen process that hold something.

    Args:
        regions: The VMAs of the process's mm image.
        hidden: RANGE records, ascending.
        known: What was looked up since the process stands still, if anything.
        threads: Number of threads that look up the rest.

    Returns:
        EXTENT records, ascending. None crosses the end of a hidden range or of a region.

    Raises:
        DumpFailed: Part of a hidden range is not private memory of the process.
    """
    hidden = _private_parts(pid, regions, hidden)
    if known is None:
        return _find_present(pid, hidden, threads)
    there = _regions_of(hidden, known[0]) >= 0
    found = np.concatenate(
        [clip(known[1], hidden[there]), _find_present(pid, hidden[~there], threads)]
    )
    return found[np.argsort(found["address"], kind="stable")]


def find_shared(
    pagemap: Pagemap, one: SharedObject, size: int, known: Extents | None, threads: int
) -> Pagemap:
    """Add the pages of shared memory that CRIU was kept from seeing to its empty pagemap.

    Args:
        size: Bytes that CRIU would have written.
        known: Its pages, if they were looked up since the tree stands still.

    Raises:
        DumpFailed: CRIU has seen some of it.
    """
    if len(pagemap.extents):
        raise DumpFailed(f"CRIU saw shared memory {pagemap.number}, which was hidden from it")
    end = -(-size // PAGE) * PAGE
    found = one.extents(threads, end) if known is None else known
    within = np.array([(0, end)], RANGE)
    found = clip(found, within)
    return replace(pagemap, regions=shared_regions(one.key, found), extents=found, hidden=found)


def complete(directory: Path, pagemaps: list[Pagemap], version: tuple[int, ...]) -> None:
    """Write the hidden pages into the pagemap images. Call it once CRIU no longer writes."""
    for pagemap in pagemaps:
        if not len(pagemap.hidden):
            continue
        path = directory / pagemap.image
        number, written = load_pagemap(path)
        lazy = np.array([region.lazy for region in pagemap.regions], np.bool_)
        own = np.empty(len(pagemap.hidden), ENTRY)
        own["address"], own["pages"] = pagemap.hidden["address"], pagemap.hidden["pages"]
        starts = np.array([region.start for region in pagemap.regions], np.uint64)
        own["flags"] = np.where(
            lazy[np.searchsorted(starts, own["address"], side="right") - 1], PE_LAZY, PE_PRESENT
        )
        entries = np.concatenate([written, own])
        write_pagemap(path, number, entries[np.argsort(entries["address"], kind="stable")], version)


def clip(extents: Extents, ranges: Ranges) -> Extents:
    """Return the parts of ``extents`` (ascending, disjoint) that lie within ``ranges`` (RANGE
    records, ascending, disjoint), cut at their ends.
    """
    low = extents["address"].astype(np.uint64)
    high = low + extents["pages"].astype(np.uint64) * np.uint64(PAGE)
    first = np.searchsorted(ranges["end"], low, side="right")
    count = np.maximum(np.searchsorted(ranges["start"], high, side="left") - first, 0)
    source = np.repeat(np.arange(len(extents)), count)
    at = first[source] + np.arange(len(source)) - np.repeat(np.cumsum(count) - count, count)
    out = np.empty(len(source), EXTENT)
    out["address"] = np.maximum(low[source], ranges["start"][at])
    out["pages"] = (np.minimum(high[source], ranges["end"][at]) - out["address"]) // np.uint64(PAGE)
    return out


def _private_parts(pid: int, regions: list[Region], hidden: Ranges) -> Ranges:
    """Return the hidden ranges, cut where regions end. A hidden range can span several regions:
    CRIU makes mappings readable for a while, so that neighbours become one mapping.

    Memory that CRIU does not dump page by page is left out: the vDSO, which CRIU writes whole or
    not at all, and droppable memory (Linux 6.11), which looks private.

    Raises:
        DumpFailed: A part lies outside of private memory, anonymous or of files.
    """
    private, others = [], []
    for region in regions:
        bounds = region.start, region.start + region.length
        if region.kind == "vdso" or region.flags & (_DROPPABLE | MAP_PRIVATE) == _DROPPABLE:
            others.append(bounds)
        elif region.flags & MAP_PRIVATE and (region.flags & _ANONYMOUS or region.kind == "file"):
            private.append(bounds)
    ranges = np.empty(len(hidden), EXTENT)
    ranges["address"] = hidden["start"]
    ranges["pages"] = (hidden["end"] - hidden["start"]) // np.uint64(PAGE)
    parts, rest = (clip(ranges, np.array(some, RANGE)) for some in (private, others))
    if int(parts["pages"].sum()) + int(rest["pages"].sum()) != int(ranges["pages"].sum()):
        raise DumpFailed(
            f"memory of process {pid} was hidden from CRIU, but part of it is not private"
        )
    out = np.empty(len(parts), RANGE)
    out["start"] = parts["address"]
    out["end"] = parts["address"] + parts["pages"] * np.uint64(PAGE)
    return out


def _regions_of(ranges: Ranges, regions: list[Region]) -> npt.NDArray[np.int64]:
    """Return i8[n]: for each range the region in which it lies, or -1."""
    if not regions:
        return np.full(len(ranges), -1, np.int64)
    starts = np.array([region.start for region in regions], np.uint64)
    ends = np.array([region.start + region.length for region in regions], np.uint64)
    at = np.searchsorted(starts, ranges["start"], side="right") - 1
    return np.where((at >= 0) & (ranges["end"] <= ends[at]), at, -1)


def _find_present(pid: int, ranges: Ranges, threads: int) -> Extents:
    return clip(present_extents(pid, ranges.tolist(), threads), ranges)
