"""A process's private memory and the pages of it that hold something, read from the kernel whether the
process runs or stands still.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.cells import EXTENT
from icecore.host.kernel import procfs
from icecore.host.kernel.pagemap import EXCLUSIVE, PRESENT, SWAPPED, Pagemap, contents_of
from icecore.sizes import PAGE
from icecore.store.format.manifest import Region

#: So many pages are looked at in so many places.
_SAMPLE, _SAMPLES = 64, 32

#: Private anonymous mappings of a process, and the pages of them that hold something (EXTENT
#: records).
Present = tuple[list[Region], npt.NDArray[np.void]]


def private_regions(mappings: Iterable[procfs.Mapping]) -> list[Region]:
    """Return the private mappings of a process except its stacks and code of files: the memory that
    CRIU leaves to be read in place.
    """
    out = []
    for mapping in mappings:
        of_file = mapping.holds_private_data
        if mapping.anonymous or of_file:
            kind = "file" if of_file else "heap" if mapping.path == "[heap]" else "anonymous"
            out.append(
                Region(
                    mapping.start,
                    mapping.length,
                    mapping.start,
                    mapping.protection,
                    mapping.flags,
                    kind,
                    "",
                    not of_file,
                )
            )
    return out


def ranges_of(regions: Sequence[Region]) -> list[tuple[int, int]]:
    """Return start and end of each region."""
    return [(region.start, region.start + region.length) for region in regions]


def pages_of(pid: int, regions: Sequence[Region], threads: int) -> npt.NDArray[np.void]:
    """Return the pages of ``regions`` that hold something, as EXTENT records
    (`icecore.host.kernel.pagemap.contents_of`).
    """
    anonymous = {region.start for region in regions if region.kind != "file"}
    return present_extents(pid, ranges_of(regions), threads, anonymous)


def present_extents(
    pid: int,
    ranges: Sequence[tuple[int, int]],
    threads: int,
    anonymous: Collection[int] = frozenset(),
) -> npt.NDArray[np.void]:
    """Return the pages in ``ranges`` that hold something, as EXTENT records.

    Args:
        anonymous: Starts of ranges of memory that maps no file, which is faster.
    """
    runs = contents_of(pid, ranges, threads, anonymous=anonymous)
    out = np.empty(len(runs), EXTENT)
    out["address"] = runs["start"]
    out["pages"] = (runs["end"] - runs["start"]) // np.uint64(PAGE)
    return out


def has_shared_pages(pid: int, extents: npt.NDArray[np.void]) -> bool:
    """Return whether any of some sampled pages is mapped elsewhere, too: by a process that was forked
    from this one, or from which it was forked, and that has not written to it since.

    Args:
        extents: EXTENT records of the process's pages.

    Raises:
        NotFound: There is no such process.
    """
    pages = extents["pages"].astype(np.int64)
    after = np.cumsum(pages)
    if not len(pages):
        return False
    with Pagemap(pid) as pagemap:
        for number in range(0, int(after[-1]), max(_SAMPLE, int(after[-1]) // _SAMPLES)):
            at = int(np.searchsorted(after, number, side="right"))
            first = number - int(after[at] - pages[at])
            start = int(extents["address"][at]) + first * PAGE
            some = min(_SAMPLE, int(pages[at]) - first)
            entries = pagemap.entries(start, start + some * PAGE)
            if (((entries & (PRESENT | SWAPPED)) != 0) & ((entries & EXCLUSIVE) == 0)).any():
                return True
    return False
