"""Checks memory for the tree, and room for CRIU's images."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np

from icecore.host.criu.shared_images import can_fill_shared
from icecore.host.kernel import limits
from icecore.restorer.requirements.outcome import Requirement
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.cell import NODE_CELLS, Records, data_pages
from icecore.store.format.contract import resident_bytes
from icecore.store.format.data import is_data
from icecore.store.format.manifest import NODE_REF, Manifest, Space

#: The CELL records of a space, by region.
Maps = Callable[[Space], Sequence[Records]]
_NODE_BYTES = NODE_CELLS * CELL_BYTES


def check_room(manifest: Manifest, workdir: str, records: Maps | None) -> Iterator[Requirement]:
    """Check memory for the tree. For a while CRIU's images lie in memory too, with all pages that
    cannot come later, which then exist twice.
    """
    data = sum(_data_bytes(space, records) for space in manifest.spaces if is_data(space))
    memory = max(0, manifest.sizes.logical - resident_bytes(manifest) - data)
    images = sum(space.size for space in manifest.spaces if space.kind == "image")
    pages = min(memory, sum(_most_pages(space) for space in manifest.spaces))
    available, space = limits.memory_available(), limits.free_space(workdir)
    if (
        pages
        and records is not None
        and (available < memory + images + pages or space < images + pages)
    ):
        pages = sum(_pages(space, records) for space in manifest.spaces if _most_pages(space))
    images += pages
    needed = memory + images
    yield Requirement(
        "memory",
        available >= needed,
        f"the job needs {needed >> 20} MiB of memory, {available >> 20} MiB are available",
        "free memory, or restore on a larger machine",
    )
    yield Requirement(
        "space",
        space >= images,
        f"CRIU's image files take {images >> 20} MiB in {workdir} ({pages >> 20} of them shared and other memory that CRIU copies), "
        f"where {space >> 20} MiB are free",
        "name another directory on tmpfs as workdir",
    )


def _data_bytes(space: Space, records: Maps | None) -> int:
    """Return the bytes of a space of a data directory that count in ``sizes.logical``."""
    if records is None:
        return 0
    return sum(int(data_pages(part).sum()) for part in records(space)) * PAGE


def _in_images(space: Space) -> list[bool]:
    """Return for each region of a space whether its pages go into CRIU's page images
    (`icecore.restorer.files.images`). Sealed shared memory does, too, but the manifest does not tell
    which is sealed; the restore compares its pages with the room before it starts CRIU.
    """
    if space.kind == "process":
        return [not region.lazy and region.kind != "device" for region in space.regions]
    return [space.kind == "shared" and not can_fill_shared()] * len(space.regions)


def _most_pages(space: Space) -> int:
    """Return an upper bound of the bytes in page images: everything that has a node in the map."""
    nodes, wanted = np.frombuffer(space.nodes, NODE_REF), np.array(_in_images(space), np.bool_)
    nodes = nodes[wanted[nodes["region"]]]
    origin, start, length = (
        np.array([(r.origin, r.start, r.length) for r in space.regions], np.int64)
        .reshape(-1, 3)[nodes["region"]]
        .T
    )
    first = origin + nodes["group"].astype(np.int64) * _NODE_BYTES
    return int(
        np.maximum(
            0, np.minimum(first + _NODE_BYTES, start + length) - np.maximum(first, start)
        ).sum()
    )


def _pages(space: Space, records: Maps) -> int:
    """Return the bytes in page images; pages of zeros take no room."""
    return (
        sum(
            int(data_pages(part).sum())
            for part, wanted in zip(records(space), _in_images(space), strict=True)
            if wanted
        )
        * PAGE
    )
