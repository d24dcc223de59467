"""Read what CRIU wrote of a tree: its processes and shared memory, their regions, and where their
pages lie.
"""

from __future__ import annotations

import functools
import re
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from icecore.dumper.memory.cells import EXTENT
from icecore.errors import Damaged, DumpFailed
from icecore.host.criu.images import (
    VMA_ANON_SHARED,
    VMA_FILE_PRIVATE,
    VMA_FILE_SHARED,
    VMA_GUARD,
    VMA_HEAP,
    VMA_STACK,
    VMA_VDSO,
    VMA_VSYSCALL,
    VMA_VVAR,
    load_mm,
    pagemaps,
)
from icecore.host.criu.pagemap_image import PE_PARENT, PE_PRESENT, load_pagemap
from icecore.sizes import PAGE
from icecore.store.format.manifest import Region

#: Not part of a snapshot: pages are stored by address, and a restore needs no logs or statistics.
_LEFT_OUT = re.compile(r"(pages-\d+\.img|stats-.*|.*\.log|.*\.stderr|.*\.pid|.*\.tmp\..*)\Z")

_GROWS_DOWN = 0x100
#: The meaning of CRIU's status bits of a VMA; the first bit that is set counts.
_KINDS = (
    (VMA_HEAP, "heap"),
    (VMA_VDSO | VMA_VVAR, "vdso"),
    (VMA_FILE_PRIVATE, "file"),
    (VMA_FILE_SHARED, "file-shared"),
    (VMA_ANON_SHARED, "shared"),
)


class Pagemap(msgspec.Struct, frozen=True):
    """The memory of one process or shared object.

    Attributes:
        image: Name of the pagemap image.
        number: Image id of the process, or shmem id.
        pages: The N of the ``pages-N.img`` that holds the written pages.
        regions: VMAs in address order; for shared memory one region that starts at 0.
        extents: EXTENT records of all pages, ascending, neighbours merged.
        written: EXTENT records of the pages in the pages image, in the image's order.
        hidden: EXTENT records of pages that CRIU was kept from seeing and that are not in its
            pagemap yet.
    """

    image: str
    number: int
    pages: int
    regions: list[Region]
    extents: npt.NDArray[np.void]
    written: npt.NDArray[np.void]
    hidden: npt.NDArray[np.void] = msgspec.field(default_factory=lambda: np.empty(0, EXTENT))

    def with_hidden(self, extents: npt.NDArray[np.void]) -> Pagemap:
        """Return a copy with pages that CRIU was kept from seeing.

        Raises:
            DumpFailed: CRIU has seen one of them.
        """
        everything = np.concatenate([self.extents, extents])
        everything = everything[np.argsort(everything["address"], kind="stable")]
        end = everything["address"] + everything["pages"] * np.uint64(PAGE)
        if (everything["address"][1:] < end[:-1]).any():
            raise DumpFailed(f"CRIU saw pages of process {self.number} that were hidden from it")
        return replace(self, extents=_merged(everything), hidden=extents)


class ImageSet(msgspec.Struct, frozen=True):
    """Everything in an image directory that describes memory, by number."""

    processes: list[Pagemap]
    shared: list[Pagemap]


def read_images(directory: Path) -> ImageSet:
    """Read the pagemaps and VMAs of an image directory.

    Raises:
        Damaged: An image is missing or malformed.
    """
    processes, shared = pagemaps(directory)
    return ImageSet(
        [
            _pagemap(directory / f"pagemap-{n}.img", n, read_regions(directory, n))
            for n in processes
        ],
        [_pagemap(directory / f"pagemap-shmem-{n}.img", n, None) for n in shared],
    )


def image_files(directory: Path) -> list[Path]:
    """Return the image files to store as files: all except pages, logs and statistics."""
    return sorted(
        path for path in directory.iterdir() if path.is_file() and not _LEFT_OUT.match(path.name)
    )


def _pagemap(path: Path, number: int, regions: list[Region] | None) -> Pagemap:
    pages, entries = load_pagemap(path)
    if (entries["flags"] & PE_PARENT).any():
        raise Damaged(
            "image", path.name, "it refers to a parent image; a complete dump is required"
        )
    written = entries[(entries["flags"] & PE_PRESENT) != 0]
    everything = entries[np.argsort(entries["address"], kind="stable")]
    if regions is None:
        end = (
            int((everything["address"] + everything["pages"] * np.uint64(PAGE)).max())
            if len(everything)
            else 0
        )
        regions = [Region(0, end, 0, kind="shared", name=str(number))] if end else []
    return Pagemap(path.name, number, pages, regions, _merged(everything), _extents(written))


def _extents(entries: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    out = np.empty(len(entries), EXTENT)
    out["address"], out["pages"] = entries["address"], entries["pages"]
    return out


def _merged(entries: npt.NDArray[np.void]) -> npt.NDArray[np.void]:
    """Return the extents with neighbours joined, whatever their flags."""
    if not len(entries):
        return np.empty(0, EXTENT)
    end = entries["address"] + entries["pages"] * np.uint64(PAGE)
    head = np.flatnonzero(np.concatenate(([True], entries["address"][1:] != end[:-1])))
    out = np.empty(len(head), EXTENT)
    out["address"] = entries["address"][head]
    out["pages"] = np.add.reduceat(entries["pages"], head)
    return out


def read_regions(directory: Path, number: int) -> list[Region]:
    """Read the VMAs of a process from its ``mm-N.img``, in address order.

    Raises:
        Damaged: The image is missing or malformed.
    """
    try:
        space = load_mm(directory, number)
    except OSError as error:
        raise Damaged("image", f"mm-{number}.img", str(error)) from error
    vmas, lazy = space.vmas, space.lazy()
    kept = (vmas["status"] & (VMA_VSYSCALL | VMA_GUARD)) == 0
    vmas, lazy = vmas[kept], lazy[kept]
    order = np.argsort(vmas["start"], kind="stable")
    columns = (
        vmas[name][order].tolist() for name in ("start", "end", "protection", "flags", "status")
    )
    return [
        Region(start, end - start, start, protection, flags, _kind(flags, status), "", can_be_lazy)
        for start, end, protection, flags, status, can_be_lazy in zip(
            *columns, lazy[order].tolist(), strict=True
        )
    ]


@functools.lru_cache(64)
def _kind(flags: int, status: int) -> str:
    if status & VMA_STACK or flags & _GROWS_DOWN:
        return "stack"
    return next((kind for bit, kind in _KINDS if status & bit), "anonymous")
