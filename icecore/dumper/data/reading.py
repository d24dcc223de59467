"""Reads files of a data directory into the pipeline, many with one scan. What was read counts only
if the file did not change meanwhile.
"""

from __future__ import annotations

import bisect
import ctypes
import os
import stat
from collections.abc import Iterator, Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.data.layout import Layout
from icecore.dumper.memory.cells import EXTENT, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.sources import Buffer, FileSource
from icecore.dumper.memory.spaces import ScanContext, Scanned
from icecore.errors import DumpFailed
from icecore.host.kernel.filesystem import open_confined
from icecore.host.kernel.listing import Attributes, attributes_of
from icecore.host.kernel.timestamps import shows_later_writes
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.manifest import Region

#: Files that are open together.
_AT_ONCE = 256
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK


class ReadFile(msgspec.Struct, frozen=True):
    """The content of a file, in the pipeline.

    Attributes:
        about: Its status when it was read.
        location: Where its content lies in the space.
        scanned: The scan that read it.
        settled: Its ctime shows every write after it was read.
    """

    about: os.stat_result
    location: int
    scanned: Scanned | None
    settled: bool
    attributes: Attributes

    def rows(self) -> npt.NDArray[np.int64]:
        """Return the rows of the scan that are its cells."""
        if self.scanned is None:
            return np.empty(0, np.int64)
        end = self.location + -(-self.about.st_size // CELL_BYTES) * CELL_BYTES
        low, high = np.searchsorted(
            self.scanned.plan.key, np.array([self.location, end], np.uint64)
        )
        return np.arange(low, high)


class Clone(msgspec.Struct, frozen=True):
    """A copy of a file that shares its blocks: the file may change meanwhile.

    ``about`` and ``attributes`` are the file's.
    """

    descriptor: int
    about: os.stat_result
    attributes: Attributes


def same(one: os.stat_result, other: os.stat_result) -> bool:
    """Return whether two looks at a name saw the same file, unchanged."""
    return (
        one.st_ctime_ns == other.st_ctime_ns
        and one.st_mtime_ns == other.st_mtime_ns
        and one.st_size == other.st_size
        and one.st_ino == other.st_ino
    )


class _Files:
    """Open files as one space. Thread-safe. A file that shrinks is read as zeros: its status will
    differ.
    """

    process = file = mapped = None

    def __init__(self, opened: Sequence[tuple[int, int, int]]) -> None:
        self._opened = opened  # (location, descriptor, size), ascending
        self._starts = [location for location, _, _ in opened]

    def read_into(self, iovecs: int, count: int, buffer: Buffer, size: int) -> None:
        """See `icecore.dumper.memory.scan.Source`."""
        words = (ctypes.c_uint64 * (2 * count)).from_address(iovecs)
        at = 0
        for address, length in zip(words[::2], words[1::2], strict=True):
            location, descriptor, whole = self._opened[
                bisect.bisect_right(self._starts, address) - 1
            ]
            offset, done = address - location, 0
            wanted = max(0, min(length, whole - offset))
            while done < wanted:
                got = os.preadv(descriptor, [buffer.view(at + done, at + wanted)], offset + done)
                if not got:
                    break
                done += got
            if done < length:
                buffer.view(at + done, at + length)[:] = bytes(length - done)
            at += length


class Reader(msgspec.Struct, frozen=True):
    """Reads files below a directory into the space of their content.

    Attributes:
        top: Descriptor of the directory.
        name: Its path, for messages.
        known: What the parent knows of the space.
        region: All of the space.
        privileged: As in `icecore.host.kernel.listing.attributes_of`.
    """

    top: int
    name: str
    layout: Layout
    known: KnownCells
    context: ScanContext
    region: Region
    privileged: bool = False

    def attributes(self, descriptor: int) -> Attributes:
        """Return the extended attributes of an open file."""
        return attributes_of(descriptor, privileged=self.privileged)

    def read(
        self,
        paths: Sequence[str],
        clones: Mapping[str, Clone] | None = None,
        since_ns: int = 0,
    ) -> Iterator[tuple[str, ReadFile]]:
        """Yield what was read of each file that is still there and did not change meanwhile.

        Args:
            clones: Copies to read instead of files, by path.
            since_ns: When it was known that no process has the files mapped, ns since the epoch: of
                a later mapping, the first store shows.

        Raises:
            DumpFailed: A file cannot be read.
        """
        for first in range(0, len(paths), _AT_ONCE):
            yield from self._batch(paths[first : first + _AT_ONCE], clones or {}, since_ns)

    def open(self, path: str) -> int:
        """Open a file; -1: it is gone, no regular file any more, or on another mount.

        Raises:
            DumpFailed: It cannot be read.
        """
        try:
            descriptor = open_confined(self.top, path, _READ, cross=False)
        except PermissionError as error:
            raise DumpFailed(
                f"cannot read {self.name}/{path}: {error.strerror}",
                cure="let the job's user read it, or start the job with another --data",
            ) from error
        except OSError:
            return -1
        if stat.S_ISREG(os.fstat(descriptor).st_mode):
            return descriptor
        os.close(descriptor)
        return -1

    def _batch(
        self, paths: Sequence[str], clones: Mapping[str, Clone], since_ns: int
    ) -> Iterator[tuple[str, ReadFile]]:
        opened: list[tuple[int, int, str, os.stat_result, Attributes]] = []
        try:
            for path in paths:
                clone = clones.get(path)
                descriptor = self.open(path) if clone is None else os.dup(clone.descriptor)
                if descriptor < 0:
                    continue
                about = os.fstat(descriptor) if clone is None else clone.about
                found = self.attributes(descriptor) if clone is None else clone.attributes
                location = self.layout.place(path, about.st_size)
                opened.append((location, descriptor, path, about, found))
            opened.sort(key=lambda one: one[0])
            scanned = self._scan([(at, fd, about.st_size) for at, fd, _, about, _ in opened])
            for location, descriptor, path, about, attributes in opened:
                if path in clones or same(about, os.fstat(descriptor)):
                    settled = shows_later_writes(about.st_ctime_ns, since_ns)
                    yield path, ReadFile(about, location, scanned, settled, attributes)
        finally:
            for _, descriptor, *_ in opened:
                os.close(descriptor)

    def _scan(self, files: Sequence[tuple[int, int, int]]) -> Scanned | None:
        extents = [_extents(*one) for one in files if one[2]]
        if not extents:
            return None
        plan = plan_cells([self.region], np.concatenate(extents))
        if not len(plan):
            return None
        source = _Files([one for one in files if one[2]])
        return self.context.scan(source, 0, plan, [self.region], self.known)


def _extents(location: int, descriptor: int, size: int) -> npt.NDArray[np.void]:
    """Return the pages of a file that hold data, as EXTENT records of the space."""
    if os.fstat(descriptor).st_blocks * 512 >= size:
        return np.array([(location, -(-size // PAGE))], EXTENT)
    found = FileSource(descriptor, size, "").extents()
    found["address"] += np.uint64(location)
    return found
