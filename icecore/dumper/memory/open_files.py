"""Files that a tree has open for writing, as spaces that are stored before the window. The window
does not read files on disk whose times show that they have not changed since.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from contextlib import ExitStack

import msgspec

from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.precopy import PreCopied
from icecore.dumper.memory.shared import LEAST_BYTES, Extents, SharedMemory, SharedObject
from icecore.dumper.observe.files import FoundFile, unchanged_since
from icecore.host.kernel.filesystem import may_be_in_memory
from icecore.host.kernel.libc import TMPFS, file_system
from icecore.host.kernel.timestamps import shows_later_writes
from icecore.store.format.manifest import SpaceKind

#: File systems whose times another machine or a program sets: NFS, CIFS (both types), FUSE, 9p,
#: Ceph, Lustre, AFS.
_ELSEWHERE = frozenset(
    {
        *(0x6969, 0xFF534D42, 0xFE534D42, 0x65735546, 0x01021997),
        *(0x00C36400, 0x0BD00BD0, 0x5346414F),
    }
)
#: Maximum number of files that are stored before the window, largest first: each takes a
#: descriptor.
_MOST = 256


class _Times(msgspec.Struct, frozen=True):
    """A file before it was read: its size in bytes and its times in ns since the epoch. At
    ``looked_ns`` no process had it mapped; a store through a later mapping changes the times.
    """

    size: int
    mtime_ns: int
    ctime_ns: int
    looked_ns: int

    @property
    def tell(self) -> bool:
        """Return whether every later change shows in the times."""
        return shows_later_writes(self.ctime_ns, self.looked_ns)

    def same(self, size: int, mtime_ns: int, ctime_ns: int) -> bool:
        return (self.size, self.mtime_ns, self.ctime_ns) == (size, mtime_ns, ctime_ns)


class OpenFiles(SharedMemory, frozen=True):
    """The files that are stored before the window; the keys are their paths.

    Attributes:
        times: Times of the files whose times show every change, by key.
    """

    kind: SpaceKind = "file"
    times: Mapping[str, _Times] = msgspec.field(default_factory=dict)

    def is_restless(self, key: str) -> bool:
        """See `SharedMemory.is_restless`."""
        return key not in self.times

    def must_be_read(self, key: str) -> bool:
        """See `SharedMemory.must_be_read`."""
        about = os.fstat(self.objects[key].descriptor)
        return not self._is_unchanged(key, about.st_size, about.st_mtime_ns, about.st_ctime_ns)

    @property
    def expected(self) -> list[PreCopied]:
        """See `SharedMemory.expected`."""
        return [one for key, one in self.copied.items() if key not in self.times]

    @property
    def volatile(self) -> int:
        """Bytes of the files whose times do not show every change."""
        return sum(one.used for key, one in self.objects.items() if key not in self.times)

    def unchanged(self, file: FoundFile) -> Extents | None:
        """Return the pages of a file that has not changed since before pre-copy read it.

        Args:
            file: As it is in the window.

        Returns:
            EXTENT records; None: it may have changed.
        """
        about, one = file.about, self.objects.get(file.about.path)
        # Another file may have lost the same name.
        if file.mapped_writable or one is None or (one.device, one.inode) != file.identity:
            return None
        if self._is_unchanged(about.path, about.size, about.mtime_ns, file.changed_ns):
            return self.pages[about.path]
        return None

    def to_read(self, files: Iterable[FoundFile], parent: Parent | None) -> list[FoundFile]:
        """Return the files that the window would have to read if it began now."""
        return [
            file for file in files if self.unchanged(file) is None and not is_stored(file, parent)
        ]

    def _is_unchanged(self, key: str, *now: int) -> bool:
        times = self.times.get(key)
        return times is not None and key in self.copied and times.tell and times.same(*now)


def is_stored(file: FoundFile, parent: Parent | None) -> bool:
    """Return whether the parent snapshot certainly has the file's content."""
    if parent is None or parent.space("file", file.about.path) is None:
        return False
    before = parent.file(file.about.path)
    return unchanged_since(file, before, parent.manifest.created_ns)


def open_files(files: Iterable[FoundFile], parent: Parent | None, stack: ExitStack) -> OpenFiles:
    """Open the files that the window would have to read. Those that cannot be opened now are read
    only in the window.

    Args:
        files: The files that the tree has open or mapped.
        stack: Closes the descriptors.
    """
    opened: dict[str, SharedObject] = {}
    times: dict[str, _Times] = {}
    for file in sorted(files, key=lambda one: -one.about.size):
        about = file.about
        if len(opened) == _MOST or about.size < LEAST_BYTES:
            break
        # Several may have lost the same name.
        if about.policy != "content" or about.path in opened or is_stored(file, parent):
            continue
        try:
            system = file_system(file.reach)
            volatile = may_be_in_memory(file.reach) or system in _ELSEWHERE
            descriptor = os.open(file.reach, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError:
            continue  # closed or unmapped since, or this process may not open it
        stack.callback(os.close, descriptor)
        now = os.fstat(descriptor)
        if (now.st_dev, now.st_ino) != (about.device, about.inode):
            continue
        opened[about.path] = SharedObject(
            descriptor,
            about.path,
            now.st_dev,
            now.st_ino,
            False,
            now.st_size,
            now.st_blocks * 512,
            system == TMPFS,
        )
        # A write that is under way now shows in the times, and `SharedObject.extents` waits for it:
        # SEEK_DATA takes the inode's lock. A direct write need not hold it.
        if not volatile and not file.mapped_writable and not file.direct:
            times[about.path] = _Times(
                now.st_size, now.st_mtime_ns, now.st_ctime_ns, file.looked_ns
            )
    return OpenFiles(opened, times=times)
