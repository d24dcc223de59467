"""Find where the processes of CRIU's images reach each shared memory object: shared anonymous
memory, memfds and System V segments.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from icecore.host.criu.images import (
    FDINFO,
    FILES,
    MAP_HUGETLB,
    VMA_ANON_SHARED,
    load_mm,
    read_image,
)
from icecore.host.kernel import limits

_IDS, _MEMFD_INODE = 0x54432030, 0x48453499
_VMA_MEMFD = 1 << 14
#: Seals after which nothing can be written: F_SEAL_WRITE and F_SEAL_FUTURE_WRITE.
_SEALED = 0x8 | 0x10
_FILES_ID = 2
_FILE_ID, _FILE_TYPE, _FILE_DESCRIPTOR = 1, 3, 4
_MEMFD, _ENTRY_TYPE, _ENTRY_ID, _ENTRY_MEMFD = 18, 1, 2, 20
_MEMFD_OF = 5  # memfd_file_entry.inode_id
_SHMID, _SEALS, _INODE, _HUGETLB = 5, 6, 7, 8


@dataclass(frozen=True)
class Reach:
    """Where a process reaches an object. ``process`` is its id in the images.

    Attributes:
        address: An address at which it maps the object; None: it does not.
        descriptor: A descriptor of it; None: it has none.
    """

    process: int
    address: int | None
    descriptor: int | None


def can_fill_shared() -> bool:
    """Return whether this process may open the memory that others map (/proc/PID/map_files)."""
    return bool(limits.capabilities() & {"CAP_SYS_ADMIN", "CAP_CHECKPOINT_RESTORE"})


def writable_shared(folder: Path, processes: Iterable[int]) -> dict[int, Reach]:
    """Return where a process reaches each object that can be written to once CRIU has made it:
    neither sealed nor on huge pages.

    Args:
        folder: CRIU's images.
        processes: Image ids of processes. Those that had ended reach nothing.

    Returns:
        CRIU's number of the object → the first process that reaches it.

    Raises:
        Damaged: An image is malformed.
    """
    memfds = _memfds(folder)
    found: dict[int, Reach] = {}
    fixed: set[int] = set()
    for process in processes:
        try:
            vmas = load_mm(folder, process).vmas
        except FileNotFoundError:
            continue
        shared = vmas[vmas["status"] & (VMA_ANON_SHARED | _VMA_MEMFD) != 0]
        for vma in shared:
            number = int(vma["shmid"])
            if int(vma["status"]) & _VMA_MEMFD:
                if number not in memfds:
                    continue
                number = memfds[number]
            elif int(vma["flags"]) & MAP_HUGETLB:
                fixed.add(number)
            found.setdefault(number, Reach(process, int(vma["start"]), None))
        for descriptor, file in _descriptors(folder, process) if memfds else ():
            if file in memfds:
                found.setdefault(memfds[file], Reach(process, None, descriptor))
    return {number: reach for number, reach in found.items() if number not in fixed}


def _memfds(folder: Path) -> dict[int, int]:
    """Map the file ids of memfds that can be written to the numbers of their objects."""
    try:
        inodes = read_image(folder / "memfd.img", _MEMFD_INODE)
    except FileNotFoundError:
        return {}
    numbers = {
        inode.integer(_INODE): inode.integer(_SHMID)
        for inode in inodes
        if not inode.integer(_SEALS) & _SEALED and not inode.has(_HUGETLB)
    }
    entries = read_image(folder / "files.img", FILES)
    files = {
        entry.integer(_ENTRY_ID): entry.message(_ENTRY_MEMFD).integer(_MEMFD_OF)
        for entry in entries
        if entry.integer(_ENTRY_TYPE) == _MEMFD
    }
    return {file: numbers[inode] for file, inode in files.items() if inode in numbers}


def _descriptors(folder: Path, process: int) -> list[tuple[int, int]]:
    """Return number and file id of each memfd that a process has open."""
    try:
        (ids,) = read_image(folder / f"ids-{process}.img", _IDS)
        entries = read_image(folder / f"fdinfo-{ids.integer(_FILES_ID)}.img", FDINFO)
    except FileNotFoundError:
        return []
    return [
        (entry.integer(_FILE_DESCRIPTOR), entry.integer(_FILE_ID))
        for entry in entries
        if entry.integer(_FILE_TYPE) == _MEMFD
    ]
