"""One data directory of a dump. Files that the parent does not have are read while the job runs; in
the window the directory is listed again, and only what changed since is read there.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Callable, Iterable, Mapping

import msgspec
import numpy as np

from icecore.dumper.data.layout import Layout
from icecore.dumper.data.reading import Clone, Reader, ReadFile, same
from icecore.dumper.memory.cells import EXTENT, RUN, CellPlan
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.scan import ScanResult
from icecore.dumper.memory.sources import FileSource
from icecore.dumper.memory.spaces import ParentSpace, ScanContext, Scanned, SpaceCapture
from icecore.errors import DumpFailed
from icecore.host.kernel.limits import soft_descriptor_limit
from icecore.host.kernel.listing import (
    Attributes,
    Listing,
    TooMany,
    most_entries,
    walk,
)
from icecore.host.kernel.timestamps import shows_later_writes
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.data import (
    MAX_ENTRIES,
    MAX_TABLE,
    OPEN,
    DataDirectory,
    Entry,
    content_key,
    data_spaces,
    decode_entries,
    encode_entries,
    entries_key,
    read_data,
)
from icecore.store.format.manifest import Region

#: With fewer bytes than this left for the window, looking again gains nothing.
_ENOUGH = 8 << 20
_MOST_ROUNDS = 4
#: Smaller files are read in the window: to clone one takes about as long.
_LEAST_CLONE = 1 << 20
_FICLONE = 0x40049409
#: (device, inode) of a file.
Identity = tuple[int, int]


class OpenHere(msgspec.Struct, frozen=True):
    """What the window knows of files that the tree has open.

    Attributes:
        stored: (device, inode) → path, of files whose content is stored as an open file's.
        mapped: Those that are mapped shared and writable: their times prove nothing.
    """

    stored: Mapping[Identity, str]
    mapped: frozenset[Identity]


class DataCapture:
    """Captures one directory. All calls come from one thread, which may act as the job's user.

    Args:
        top: Descriptor of the directory; it is closed by `close`.
        path: As the job sees it.
        parent: The parent snapshot.
        budget: Bytes of files that may be read in the window.
        privileged: As in `icecore.host.kernel.listing.attributes_of`.
    """

    def __init__(
        self,
        top: int,
        path: str,
        parent: Parent | None,
        context: ScanContext,
        budget: int,
        *,
        privileged: bool,
    ) -> None:
        self.path = path
        self._top = top
        self._context = context
        self._budget = budget
        self._most = min(MAX_ENTRIES, most_entries())
        self._before: dict[str, Entry] = {}
        self._known_ns = 0
        self._mapped: set[int] = set()
        self._parent = parent
        self._space: ParentSpace | None = None
        self._load(parent)
        placed = {
            path: (entry.location // CELL_BYTES, entry.cells)
            for path, entry in self._before.items()
            if entry.cells
        }
        region = Region(0, CELL_BYTES << 32, 0, kind="file", name=path)
        known = self._space.known if self._space else KnownCells.none()
        self._layout = Layout(placed)
        self._reader = Reader(top, path, self._layout, known, context, region, privileged)
        self._read: dict[str, ReadFile] = {}
        self._listing = Listing()
        self._attributes: dict[str, Attributes] = {}
        self._folders: dict[str, os.stat_result] = {}
        self._clones: dict[str, Clone] = {}
        self._open = OpenHere({}, frozenset())
        self._open_attributes: dict[Identity, Attributes] = {}
        self._targets: dict[str, bytes] = {}
        self._captured: list[SpaceCapture] = []
        self.summary: DataDirectory | None = None

    def close(self) -> None:
        """Close the descriptors."""
        for clone in self._clones.values():
            os.close(clone.descriptor)
        self._clones.clear()
        os.close(self._top)

    def _load(self, parent: Parent | None) -> None:
        """Read the parent's table, if it has the directory."""
        if parent is None or self.path not in {one.path for one in read_data(parent.manifest)}:
            return
        table, content = data_spaces(parent.manifest, self.path)
        data = parent.content(table, MAX_TABLE)
        self._space = parent.space("file", content.key)
        if data is None or self._space is None:
            self._space = None
            return
        entries = decode_entries(data, self.path, content.size)
        self._before = {os.fsdecode(entry.path): entry for entry in entries}
        self._known_ns = parent.manifest.created_ns
        # Stores through such a mapping after the snapshot left no trace.
        self._mapped = {file.inode for file in parent.manifest.files if file.mapped}

    # -- while the job runs

    def look_ahead(
        self, look: Callable[[], frozenset[Identity]], rounds: int = _MOST_ROUNDS
    ) -> int:
        """Read the files that the parent does not have, until little changes meanwhile; return the
        bytes read.

        Args:
            look: Returns the files that the job has open for writing, or mapped so, now. They are
                left for the window: stores through a mapping need not leave a trace.
        """
        total, last = 0, 0
        for number in range(rounds):
            looked_ns = time.time_ns()
            open_now = look()
            listing = self._list()
            if not self._read and not number:
                self._layout.release(listing.found)
                # The room of the others may be given to other files.
                self._before = {
                    path: entry for path, entry in self._before.items() if path in listing.found
                }
            wanted = [
                path
                for path, about in self._primaries(listing)
                if (about.st_dev, about.st_ino) not in open_now and not self._has(path, about)
            ]
            size = sum(listing.found[path].st_size for path in wanted)
            if number and (size < _ENOUGH or size > last // 2):
                break
            if not wanted:
                break
            for path, read in self._reader.read(wanted, since_ns=looked_ns):
                self._read[path] = read
            total, last = total + size, size
        return total

    def _list(self) -> Listing:
        looked_ns = time.time_ns()
        try:
            listing = walk(self._top, self._folders, self._most, privileged=self._reader.privileged)
        except OSError as error:
            raise DumpFailed(
                f"cannot list the data directory {self.path}/{error.filename}: {error.strerror}",
                cure="let the job's user read it, or start the job with another --data",
            ) from error
        except TooMany as error:
            raise DumpFailed(
                f"the data directory {self.path} has more than {error.most} entries, the most for"
                " which the available memory suffices",
                cure="remove some, free memory, or start the job with a smaller --data directory",
            ) from None
        for path, found in listing.attributes.items():
            about = listing.found[path]
            self._attributes[path] = found
            if shows_later_writes(about.st_ctime_ns, looked_ns):
                self._folders[path] = about
            else:
                self._folders.pop(path, None)
        self._listing = listing
        return listing

    def _primaries(self, listing: Listing) -> Iterable[tuple[str, os.stat_result]]:
        """Return the regular files, each under one of its names."""
        linked: set[Identity] = set()
        for path, about in listing.found.items():
            if not stat.S_ISREG(about.st_mode) or path in listing.mounts:
                continue
            if about.st_nlink > 1:
                if (about.st_dev, about.st_ino) in linked:
                    continue
                linked.add((about.st_dev, about.st_ino))
            yield path, about

    def _has(self, path: str, about: os.stat_result) -> bool:
        """Return whether the content of a file is stored, or on its way there."""
        read = self._read.get(path)
        if read is not None and read.settled and same(read.about, about):
            return True
        return self._unchanged(path, about) is not None

    def _unchanged(self, path: str, about: os.stat_result) -> Entry | None:
        """Return the parent's entry of a file that did not change since."""
        before = self._before.get(path)
        if (
            before is None
            or before.kind != "file"
            or before.location == OPEN
            or (before.ctime_ns, before.mtime_ns, before.size, before.inode)
            != (about.st_ctime_ns, about.st_mtime_ns, about.st_size, about.st_ino)
            or not shows_later_writes(before.ctime_ns, self._known_ns)
            or before.inode in self._mapped
        ):
            return None
        return before

    # -- in the window

    def in_window(self, opened: OpenHere) -> int:
        """List the directory, and read or clone what changed; return the bytes read. After the
        window, no name is looked up: the job may have replaced or removed it.

        Raises:
            DumpFailed: More changed than the budget permits, or something outside of the job
                writes to it.
        """
        self._open = opened
        listing = self._list()
        self._read_links()
        wanted: list[str] = []
        size = 0
        for path, about in self._primaries(listing):
            identity = about.st_dev, about.st_ino
            if self._is_stored(path, identity):
                self._open_attributes[identity] = self._attributes_of(path)
                continue
            if identity not in opened.mapped and self._has(path, about):
                continue
            wanted.append(path)
            if not (about.st_size >= _LEAST_CLONE and self._clone(path)):
                size += about.st_size
        if size > self._budget:
            raise DumpFailed(
                f"{size >> 20} MiB of files in {self.path} changed between the last look and the"
                f" window, more than the {self._budget >> 20} MiB that --data-budget permits",
                cure="raise --data-budget, which makes the window longer, or keep the directory on a"
                " file system with reflinks (btrfs, XFS)",
            )
        now = [path for path in wanted if path not in self._clones]
        for path in wanted:
            self._read.pop(path, None)
        self._read.update(self._reader.read(now))
        for path in now:
            read = self._read.get(path)
            if read is None or not same(read.about, listing.found[path]):
                raise self._changed(path)
        return size

    def _changed(self, path: str) -> DumpFailed:
        return DumpFailed(
            f"{self.path}/{path} changed in the window: something outside of the job writes to it",
            cure="keep other programs from writing to the job's --data, and snapshot again",
        )

    def _read_links(self) -> None:
        """Read the targets of all symbolic links.

        Raises:
            DumpFailed: One is gone.
        """
        for path, about in self._listing.found.items():
            if stat.S_ISLNK(about.st_mode):
                try:
                    self._targets[path] = os.readlink(os.fsencode(path), dir_fd=self._top)
                except OSError as error:
                    raise self._changed(path) from error

    def _attributes_of(self, path: str) -> Attributes:
        """Return the extended attributes of a file.

        Raises:
            DumpFailed: It is gone, or cannot be read.
        """
        descriptor = self._reader.open(path)
        if descriptor < 0:
            raise self._changed(path)
        try:
            return self._reader.attributes(descriptor)
        finally:
            os.close(descriptor)

    def _is_stored(self, path: str, identity: Identity) -> bool:
        """Return whether the content of a file is stored as that of an open file of this path."""
        name = self._open.stored.get(identity)
        return (
            name is not None and name.startswith(f"{self.path}/") and self._is_named(name, identity)
        )

    def _is_named(self, name: str, identity: Identity) -> bool:
        about = self._listing.found.get(name[len(self.path) + 1 :])
        return about is not None and (about.st_dev, about.st_ino) == identity

    def _clone(self, path: str) -> bool:
        """Copy a file without copying its blocks, into a file without a name; return whether the
        file system can.
        """
        if len(self._clones) >= soft_descriptor_limit() // 4:  # others need descriptors, too
            return False
        source = self._reader.open(path)
        if source < 0:
            return False
        try:
            copy = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=self._top)
            try:
                fcntl.ioctl(copy, _FICLONE, source)
            except OSError:
                os.close(copy)
                raise
            self._clones[path] = Clone(copy, os.fstat(source), self._reader.attributes(source))
            return True
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO):
                raise DumpFailed(
                    f"cannot copy {self.path}/{path} aside: {error.strerror}",
                    cure="free space there",
                ) from error
            return False
        finally:
            os.close(source)

    # -- after the window

    def after_window(self) -> list[SpaceCapture]:
        """Read the clones, and return the two spaces of the directory."""
        if self._clones:
            self._read.update(self._reader.read(list(self._clones), self._clones))
        entries = self._entries()
        content = self._content(entries)
        table = self._table(encode_entries(entries))
        files = [entry for entry in entries if entry.kind == "file"]
        self.summary = DataDirectory(
            self.path, len(entries) - 1, len(files), sum(entry.size for entry in files)
        )
        return [table, content]

    def _entries(self) -> list[Entry]:
        found = self._listing.found
        first: dict[Identity, str] = {}
        for identity, name in self._open.stored.items():
            if name.startswith(f"{self.path}/") and self._is_named(name, identity):
                first[identity] = name[len(self.path) + 1 :]
        for path, about in self._primaries(self._listing):
            first.setdefault((about.st_dev, about.st_ino), path)
        return [self._entry(path, about, first) for path, about in found.items()]

    def _entry(self, path: str, about: os.stat_result, first: Mapping[Identity, str]) -> Entry:
        name, mode = os.fsencode(path), about.st_mode
        if path in self._listing.mounts:
            return Entry("skipped", name)
        common = (stat.S_IMODE(mode), about.st_uid, about.st_gid)
        times = (about.st_mtime_ns, about.st_ctime_ns, about.st_ino)
        if stat.S_ISREG(mode):
            primary = first[about.st_dev, about.st_ino]
            if primary != path:
                return Entry("link", name, *common, target=os.fsencode(primary))
            location, attributes = self._placed(path, about)
            return Entry(
                "file", name, *common, about.st_size, *times, location, attributes=attributes
            )
        if stat.S_ISDIR(mode):
            attributes = self._attributes.get(path, {})
            return Entry("directory", name, *common, 0, *times, attributes=attributes)
        if stat.S_ISLNK(mode):
            return Entry("symlink", name, *common, 0, *times, target=self._targets[path])
        if stat.S_ISFIFO(mode):
            return Entry("fifo", name, *common, 0, *times)
        return Entry("skipped", name)

    def _placed(self, path: str, about: os.stat_result) -> tuple[int, Attributes]:
        """Return where the content of a file is, and its attributes."""
        identity = about.st_dev, about.st_ino
        if self._is_stored(path, identity):
            return OPEN, self._open_attributes[identity]
        read = self._read.get(path)
        if read is not None and same(read.about, about):
            return read.location, read.attributes
        before = self._unchanged(path, about)
        if before is None:
            raise DumpFailed(f"{self.path}/{path} could not be read")
        return before.location, before.attributes

    def _content(self, entries: list[Entry]) -> SpaceCapture:
        """Return the space of all contents: cells that were read, and the parent's of files that
        did not change.
        """
        ends = [entry.location + entry.cells * CELL_BYTES for entry in entries if entry.cells]
        size = max(ends, default=0)
        key = content_key(self.path)
        regions = [Region(0, size, 0, kind="file", name=self.path)] if size else []
        capture = SpaceCapture.make("file", key, size, regions, self._space)
        kept: list[np.ndarray[tuple[int], np.dtype[np.int64]]] = []
        for entry in entries:
            if not entry.cells:
                continue
            read = self._read.get(os.fsdecode(entry.path))
            if read is not None and read.location == entry.location and _is_of(read, entry):
                if read.scanned is not None and len(rows := read.rows()):
                    capture.add(read.scanned, rows)
            elif self._space is not None:
                bounds = (entry.location, entry.location + entry.cells * CELL_BYTES)
                low, high = np.searchsorted(
                    self._space.known.key, np.array(bounds, np.uint64)
                ).tolist()
                kept.append(np.arange(low, high))
        if kept and self._space is not None:
            carried = self._carried(np.sort(np.concatenate(kept)), self._space.known)
            if carried is not None:
                capture.add(carried)
        return capture

    def _carried(
        self, rows: np.ndarray[tuple[int], np.dtype[np.int64]], known: KnownCells
    ) -> Scanned | None:
        """Return cells of the parent as if they had been scanned."""
        if not len(rows):
            return None
        bitmap = known.record["data"][rows] | known.record["zero"][rows]
        key = known.key[rows]
        plan = CellPlan(
            np.zeros(len(rows), np.uint32),
            (key // np.uint64(CELL_BYTES)).astype(np.uint32),
            key,
            bitmap,
            np.bitwise_count(bitmap).sum(axis=1).astype(np.uint64) * np.uint64(PAGE),
            np.zeros(len(rows) + 1, np.uint32),
            np.empty(0, RUN),
        )
        sink = self._context.pipeline.space(0, plan, [self._reader.region], known)
        sink.unchanged(rows)
        return Scanned(plan, sink, ScanResult(known.fingerprint[rows], rows))

    def _table(self, data: bytes) -> SpaceCapture:
        size, key = len(data), entries_key(self.path)
        before = self._parent.space("file", key) if self._parent else None
        length = -(-size // PAGE) * PAGE
        regions = [Region(0, length, 0, kind="file", name=self.path)]
        capture = SpaceCapture.make("file", key, size, regions, before)
        descriptor = os.memfd_create("icecore-entries")
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            extents = np.array([(0, length // PAGE)], EXTENT)
            capture.scan(FileSource(descriptor, size, key), extents, self._context)
        finally:
            os.close(descriptor)
        return capture


def _is_of(read: ReadFile, entry: Entry) -> bool:
    about = read.about
    return (entry.ctime_ns, entry.mtime_ns, entry.size, entry.inode) == (
        about.st_ctime_ns,
        about.st_mtime_ns,
        about.st_size,
        about.st_ino,
    )
