"""Shared memory: shared anonymous memory, memfds and System V segments. Each object is found once,
whoever maps it, and read in place through a descriptor of this process. `open_files` does the same
with files.

The descriptor keeps the object alive, so its inode number stays its own.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from typing import Self

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import replace

from icecore.dumper.memory.cells import EXTENT, inherit_origins, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.precopy import PreCopied, copy_space
from icecore.dumper.memory.sources import FileSource, read_some
from icecore.dumper.memory.spaces import ScanContext, Scanned
from icecore.dumper.memory.staging import Slot
from icecore.dumper.observe.inspection import SHARED_MEMORY, ProcessInspection
from icecore.events import Advance, unwatched
from icecore.host.criu.hidden import SHARED
from icecore.host.kernel.mapped import MappedFile
from icecore.host.kernel.memory import shared_memory_device
from icecore.host.kernel.pagemap import Pagemap, scan_supported
from icecore.host.kernel.scanning import data_ranges
from icecore.sizes import PAGE
from icecore.store.format.manifest import Region, SpaceKind

Extents = npt.NDArray[np.void]
#: u8[n, 2]: start and end of each, in bytes.
Ranges = npt.NDArray[np.uint64]

#: Smaller objects are left to CRIU, and so are all but the largest: each takes a descriptor.
LEAST_BYTES = 1 << 20
_MOST = 256
_SYSTEM_V = "/SYSV"
#: Minimum bytes that a thread searches for data at a time, and maximum number of pieces into which
#: an object is cut for that.
_PIECE, _MOST_PIECES = 256 << 20, 128


class SharedObject(msgspec.Struct, frozen=True):
    """A shared memory object that is open for reading.

    Attributes:
        key: The key of its space: the number that CRIU gives it, or a file's path.
        size: Bytes when it was opened.
        used: Bytes of memory that it had then.
        system_v: Whether it is a System V segment. Then ``inode`` is its identifier, which an
            object of another kind may have, too.
        on_tmpfs: Whether it is on a tmpfs, not on a disk or another machine.
        mapped: See `icecore.dumper.memory.scan.Source`.
    """

    descriptor: int
    key: str
    device: int
    inode: int
    system_v: bool
    size: int
    used: int
    on_tmpfs: bool = True
    mapped: MappedFile | None = None

    process = None

    @property
    def file(self) -> int:
        """The descriptor: its offsets are the addresses."""
        return self.descriptor

    def read_into(self, iovecs: int, count: int, buffer: Slot, size: int) -> None:
        """See `icecore.dumper.memory.scan.Source`. What lies behind the end reads as zeros."""
        read_some(self.descriptor, iovecs, count, buffer)

    def extents(self, threads: int, size: int | None = None) -> Extents:
        """Return the pages that hold something, as EXTENT records, neighbours merged.

        Args:
            size: Up to where; None: up to the end.
        """
        if size is None:
            size = os.fstat(self.descriptor).st_size
        there = self._mapped_pages(size)
        pieces = _pieces(_gaps(there, size), max(_PIECE, size // _MOST_PIECES))
        if len(pieces) < 2 or threads < 2:
            found = [data_ranges(self.descriptor, piece) for piece in pieces]
        else:
            with ThreadPoolExecutor(min(threads, len(pieces))) as pool:
                found = list(pool.map(lambda piece: data_ranges(self.descriptor, piece), pieces))
        ranges = [part for part in found if part is not None]
        if len(ranges) < len(found):
            return FileSource(self.descriptor, size, f"shared memory {self.inode}").extents()
        all_ = np.concatenate([there, *ranges])
        return _merged(all_[np.argsort(all_[:, 0])])

    def _mapped_pages(self, size: int) -> npt.NDArray[np.uint64]:
        """Return the pages up to ``size`` that are in this process's page table, as u8[n, 2]: start
        and end. They exist, because a page that the file loses leaves the page table, too. The page
        table answers faster than the file.
        """
        end = min(size, self.mapped.size) if self.mapped is not None else 0
        if self.mapped is None or not end or not scan_supported():
            return np.empty((0, 2), np.uint64)
        first = self.mapped.address
        with Pagemap("self") as pagemap:
            runs = pagemap.runs(first, first + end // PAGE * PAGE, wanted=0)
        return np.column_stack([runs["start"], runs["end"]]) - np.uint64(first)


class SharedMemory(msgspec.Struct, frozen=True):
    """The shared memory that is read in place.

    Attributes:
        objects: By key.
        copied: What pre-copy learnt, by key.
        pages: Which pages it read (EXTENT records), by key.
        kind: Of the objects' spaces: shared, or file.
    """

    objects: Mapping[str, SharedObject] = msgspec.field(default_factory=dict)
    copied: dict[str, PreCopied] = msgspec.field(default_factory=dict)
    pages: dict[str, Extents] = msgspec.field(default_factory=dict)
    kind: SpaceKind = "shared"

    def map(self, stack: ExitStack) -> Self:
        """Map the objects that are in memory, so that scans hash them in place, without a copy.
        This is three times as fast for pages that were read through the mapping before. Files on a
        disk have larger pages, which are copied just as fast.

        Args:
            stack: Unmaps them.

        Returns:
            The same objects, with their mappings.
        """
        objects = {}
        for key, one in self.objects.items():
            if one.on_tmpfs and one.size >= PAGE:
                with suppress(OSError):  # not enough address space: read the descriptor
                    mapped = MappedFile(one.descriptor, one.size)
                    stack.callback(mapped.close)
                    one = replace(one, mapped=mapped)
            objects[key] = one
        return replace(self, objects=objects)

    def unmap(self) -> None:
        """Unmap all objects."""
        for one in self.objects.values():
            if one.mapped is not None:
                one.mapped.close()

    @property
    def used(self) -> int:
        """Bytes of memory that the objects had when they were opened."""
        return sum(one.used for one in self.objects.values())

    def rows(self) -> npt.NDArray[np.void]:
        """Return the objects as SHARED records, for the library in CRIU."""
        rows = [(one.device, one.inode, one.system_v, 0) for one in self.objects.values()]
        return np.array(rows, SHARED)

    def pre_copy(
        self,
        first_stream: int,
        parent: Parent | None,
        context: ScanContext,
        advance: Advance = unwatched,
        busy: bool = False,
    ) -> None:
        """Store what the parent snapshot does not have, while the job writes
        (`icecore.dumper.memory.precopy`).

        Args:
            busy: Whether any process of the tree runs all the time.
        """
        for number, (key, one) in enumerate(self.objects.items()):
            before = parent.space(self.kind, key) if parent else None
            extents = self.pages[key] = one.extents(context.threads)
            stream = (first_stream + number) % context.streams
            regions = inherit_origins(
                shared_regions(key, extents, self.kind), before.space.regions if before else []
            )
            self.copied[key] = copy_space(
                stream,
                regions,
                extents,
                one,
                before,
                context,
                advance,
                busy and self.is_restless(key),
            )

    def is_restless(self, key: str) -> bool:
        """Return whether a busy process of the tree may write to an object all the time."""
        return True

    def must_be_read(self, key: str) -> bool:
        """Return whether an object may have changed since pre-copy read it."""
        return True

    @property
    def expected(self) -> list[PreCopied]:
        """What pre-copy learnt of the objects that may change again before the window."""
        return [*self.copied.values()]

    def scan_early(
        self,
        key: str,
        extents: Extents,
        parent: Parent | None,
        stream: int,
        context: ScanContext,
        threads: int,
    ) -> Scanned:
        """Scan an object whose processes stand still, with ``threads`` threads."""
        known = self.known(key, parent)
        before = parent.space(self.kind, key) if parent else None
        regions = inherit_origins(
            shared_regions(key, extents, self.kind), before.space.regions if before else []
        )
        plan = plan_cells(regions, extents)
        return context.scan(self.objects[key], stream, plan, regions, known, threads=threads)

    def known(self, key: str, parent: Parent | None) -> KnownCells:
        """Return what is known of an object's cells."""
        if key in self.copied:
            return self.copied[key].known
        before = parent.space(self.kind, key) if parent else None
        return before.known if before else KnownCells.none()


def shared_regions(key: str, extents: Extents, kind: SpaceKind = "shared") -> list[Region]:
    """Return the region of an object: from its beginning to its last page."""
    if not len(extents):
        return []
    end = int(extents["address"][-1]) + int(extents["pages"][-1]) * PAGE
    return [Region(0, end, 0, kind=kind, name=key)]


def open_shared(processes: Iterable[ProcessInspection], stack: ExitStack) -> SharedMemory:
    """Open the shared memory of a tree. What cannot be opened is left to CRIU.

    Args:
        stack: Closes the descriptors.
    """
    device = shared_memory_device()
    opened: dict[tuple[int, bool], SharedObject] = {}
    spaces: dict[int, set[int]] = {}
    for process in processes:
        for inode, system_v, path in _reached(process, device):
            if system_v and process.namespaces:
                spaces.setdefault(inode, set()).add(process.namespaces.get("ipc", 0))
            if (inode, system_v) not in opened:
                one = _open(path, device, inode, system_v)
                if one is not None:
                    opened[inode, system_v] = one
    kept: dict[str, SharedObject] = {}
    for one in sorted(opened.values(), key=lambda one: -one.used):
        # An identifier means another segment in another namespace, and CRIU numbers memfds with 32
        # bits.
        clear = (
            one.inode >> 32 == 0
            and len(spaces.get(one.inode, ())) < 2
            and (one.inode, not one.system_v) not in opened
        )
        if clear and len(kept) < _MOST:
            stack.callback(os.close, one.descriptor)
            kept[one.key] = one
        else:
            os.close(one.descriptor)
    return SharedMemory(kept)


def _reached(process: ProcessInspection, device: int) -> Iterator[tuple[int, bool, str]]:
    """Yield inode, whether it is a System V segment, and a path, for each mapping and descriptor."""
    for mapping in process.mappings:
        if mapping.path.startswith(SHARED_MEMORY) and os.makedev(*mapping.device) == device:
            path = f"/proc/{process.pid}/map_files/{mapping.start:x}-{mapping.end:x}"
            yield mapping.inode, mapping.path.startswith(_SYSTEM_V), path
    for descriptor in process.descriptors:
        if descriptor.device == device:
            yield descriptor.inode, False, f"/proc/{process.pid}/fd/{descriptor.number}"


def _open(path: str, device: int, inode: int, system_v: bool) -> SharedObject | None:
    """Open an object if it is large enough and still the one that was seen."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError:
        return None  # closed or unmapped since, or this process may not
    about = os.fstat(descriptor)
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    same = (about.st_dev, about.st_ino, name.startswith(_SYSTEM_V)) == (device, inode, system_v)
    if not same or about.st_blocks * 512 < LEAST_BYTES:
        os.close(descriptor)
        return None
    used = about.st_blocks * 512
    return SharedObject(descriptor, str(inode), device, inode, system_v, about.st_size, used)


def _gaps(ranges: Ranges, size: int) -> Ranges:
    """Return the gaps between ranges (start, end; ascending, disjoint) from 0 to ``size``."""
    low = np.concatenate((np.zeros(1, np.uint64), ranges[:, 1]))
    high = np.concatenate((ranges[:, 0], np.array([size], np.uint64)))
    return np.column_stack([low, high])[high > low]


def _pieces(ranges: Ranges, size: int) -> list[Ranges]:
    """Cut ranges into parts, and return the parts in groups of about ``size`` bytes."""
    counts = -(-(ranges[:, 1] - ranges[:, 0]).astype(np.int64) // size)
    number = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
    cut = np.repeat(ranges, counts, axis=0)
    cut[:, 0] += (number * size).astype(np.uint64)
    cut[:, 1] = np.minimum(cut[:, 1], cut[:, 0] + np.uint64(size))
    group = np.cumsum((cut[:, 1] - cut[:, 0]).astype(np.int64) - 1) // size
    return np.split(cut, np.flatnonzero(np.diff(group)) + 1) if len(cut) else []


def _merged(ranges: Ranges) -> Extents:
    """Return ranges (start, end; ascending) as EXTENT records, with neighbours joined. Two ranges
    of a file that changed while they were looked up may have a page in common.
    """
    low = ranges[:, 0] // np.uint64(PAGE)
    high = -(-ranges[:, 1].astype(np.int64) // PAGE).astype(np.uint64)
    if not len(low):
        return np.empty(0, EXTENT)
    head = np.flatnonzero(np.concatenate(([True], low[1:] > high[:-1])))
    out = np.empty(len(head), EXTENT)
    out["address"] = low[head] * np.uint64(PAGE)
    out["pages"] = high[np.append(head[1:], len(low)) - 1] - low[head]
    return out
