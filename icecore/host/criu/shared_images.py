"""Which shared memory of CRIU's images another process can fill once CRIU has made it: shared
anonymous memory, memfds and System V segments.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path

from icecore.host.criu.images import (
    FILES,
    MAP_HUGETLB,
    VMA_ANON_SHARED,
    VMA_FILE_PRIVATE,
    VMA_SYSVIPC,
    load_mm,
    read_image,
)
from icecore.host.criu.libraries import RESTORE_LIBRARY
from icecore.host.kernel import limits

_MEMFD_INODE, _SEGMENTS = 0x48453499, 0x46283044
#: Seals after which nothing can be written: F_SEAL_WRITE and F_SEAL_FUTURE_WRITE.
_SEALED = 0x8 | 0x10
_MEMFD, _ENTRY_TYPE, _ENTRY_ID, _ENTRY_MEMFD = 18, 1, 2, 20
_MEMFD_OF = 5  # memfd_file_entry.inode_id
_SHMID, _SEALS, _INODE, _HUGETLB = 5, 6, 7, 8
_DESCRIPTION, _IN_PAGEMAPS, _SEGMENT_HUGETLB = 1, 3, 4
_SEGMENT_ID = 7


def can_fill_shared() -> bool:
    """Return whether this process learns of the memory that CRIU makes
    (icecore/host/criu/placed.c), and may open it (/proc/PID/map_files).
    """
    may = limits.capabilities() & {"CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"}
    return bool(may) and RESTORE_LIBRARY.exists()


def fillable_shared(folder: Path, processes: Iterable[int]) -> set[int]:
    """Return CRIU's numbers of the objects that can be filled.

    CRIU itself must fill four kinds: memory on huge pages, which write(2) does not reach; memfds
    that are sealed against writes, which must be complete when CRIU seals them; memfds that a
    process executes, which nobody may have open for writing meanwhile; and memfds that a process
    maps privately, with which CRIU compares pages that a child has inherited.

    Args:
        folder: CRIU's images.
        processes: Image ids of processes. Those that had ended have no memory.

    Raises:
        Damaged: An image is malformed.
    """
    anonymous: set[int] = set()
    huge: set[int] = set()
    executed: set[int] = set()
    for process in processes:
        try:
            mm = load_mm(folder, process)
        except FileNotFoundError:
            continue
        executed.add(mm.executable)
        private = mm.vmas[mm.vmas["status"] & VMA_FILE_PRIVATE != 0]
        executed |= set(private["shmid"].tolist())
        kind = mm.vmas["status"] & (VMA_ANON_SHARED | VMA_SYSVIPC)
        vmas = mm.vmas[kind == VMA_ANON_SHARED]
        anonymous |= set(vmas["shmid"].tolist())
        huge |= set(vmas["shmid"][vmas["flags"] & MAP_HUGETLB != 0].tolist())
    every = [*anonymous, *_memfds(folder, executed, huge), *_segments(folder, huge)]
    # Two objects of one number, of different kinds, would have one image.
    return {number for number, count in Counter(every).items() if count == 1} - huge


def _memfds(folder: Path, executed: set[int], refused: set[int]) -> Iterator[int]:
    """Yield the numbers of memfds, and add those that cannot be filled to ``refused``."""
    try:
        inodes = read_image(folder / "memfd.img", _MEMFD_INODE)
    except FileNotFoundError:
        return
    programs = {
        entry.message(_ENTRY_MEMFD).integer(_MEMFD_OF)
        for entry in read_image(folder / "files.img", FILES)
        if entry.integer(_ENTRY_TYPE) == _MEMFD and entry.integer(_ENTRY_ID) in executed
    }
    for inode in inodes:
        number = inode.integer(_SHMID)
        if (
            inode.integer(_SEALS) & _SEALED
            or inode.has(_HUGETLB)
            or inode.integer(_INODE) in programs
        ):
            refused.add(number)
        yield number


def _segments(folder: Path, refused: set[int]) -> Iterator[int]:
    """Yield the numbers of System V segments, and add those that cannot be filled to ``refused``."""
    for path in folder.glob("ipcns-shm-*.img"):
        for segment in read_image(path, _SEGMENTS):
            number = segment.message(_DESCRIPTION).integer(_SEGMENT_ID)
            if segment.has(_SEGMENT_HUGETLB) or not segment.integer(_IN_PAGEMAPS):
                refused.add(number)
            yield number
