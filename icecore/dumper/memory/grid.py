"""The cells that a process's memory is cut into in the window; the rule: whoever looks at a process
meanwhile gets the same ones. Pure but for the reader.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from icecore.dumper.memory.allocations import Reader, allocations, cut
from icecore.dumper.memory.cells import inherit_origins
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.memory.spaces import ParentSpace
from icecore.store.format.manifest import Region


def grid(
    regions: list[Region],
    device: Sequence[tuple[int, int]],
    reader: Reader,
    parent: ParentSpace | None,
    copied: PreCopied | None,
) -> list[Region]:
    """The regions of a process that stands still, cut and with the grids that they take over.

    Args:
        regions: Its VMAs in address order.
        device: Where device memory lies in them, (start, end), ascending.
        reader: Reads the process.
        parent: The parent's space.
        copied: What pre-copy learnt.
    """
    regions = device_regions(regions, device)
    before = parent.space.regions if parent else []
    if copied is None:
        return inherit_origins(cut(regions, allocations(reader, regions)), before)
    # What pre-copy has looked at needs no second look.
    regions = cut(regions, [region.start for region in copied.regions])
    return inherit_origins(inherit_origins(regions, before), copied.regions)


def device_regions(regions: list[Region], device: Sequence[tuple[int, int]]) -> list[Region]:
    """The regions, those of device memory apart and marked as such (kind "device")."""
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
