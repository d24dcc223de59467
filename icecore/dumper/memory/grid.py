"""Cut a process's memory into cells in the window. Every scan of the process in this window gets the
same cells. Pure except for the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.allocations import Reader, allocations, cut
from icecore.dumper.memory.cells import inherit_origins
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.memory.spaces import ParentSpace
from icecore.store.format.manifest import Region


def grid(
    regions: list[Region],
    extents: npt.NDArray[np.void],
    device: Sequence[tuple[int, int]],
    reader: Reader,
    parent: ParentSpace | None,
    copied: PreCopied | None,
) -> list[Region]:
    """Cut the regions of a frozen process and give them the grids that they take over.

    Args:
        regions: The process's VMAs in address order.
        extents: EXTENT records of the pages that hold something, ascending.
        device: Where device memory lies in them, (start, end), ascending.
        reader: Reads the process.
        parent: The parent's space.
        copied: What pre-copy learnt.
    """
    regions = device_regions(regions, device)
    before = parent.space.regions if parent else []
    if copied is None:
        return inherit_origins(cut(regions, allocations(reader, regions, extents)), before)
    # Pre-copy has already found the allocations.
    regions = cut(regions, [region.start for region in copied.regions])
    return inherit_origins(inherit_origins(regions, before), copied.regions)


def device_regions(regions: list[Region], device: Sequence[tuple[int, int]]) -> list[Region]:
    """Cut off the regions of device memory and mark them as such (kind "device")."""
    if not device:
        return regions
    parts = cut(regions, sorted({point for bounds in device for point in bounds}))
    return [
        msgspec.structs.replace(part, kind="device")
        if part.lazy
        and any(start <= part.start and part.start + part.length <= end for start, end in device)
        else part
        for part in parts
    ]
