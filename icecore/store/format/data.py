"""Data directories of a job: directories whose content belongs to a snapshot although no process
has the files open (`icecore run --data`). Pure.

Each directory is two spaces of kind ``file``. No open file has such keys, because the kernel shows
no path with a part ``.``:

- ``DIR/./entries`` (`entries_key`): the table, a MessagePack array of `Entry`;
- ``DIR/./content`` (`content_key`): the content of its regular files, one after the other, each at
  its ``location``, a multiple of 1 MiB.

``Manifest.extra["data"]`` (`DataDirectory`) lists the directories. A job that was started with
some has them in its record of the run, too, so that a version that does not know them refuses the
restore. Everything that follows references of spaces (gc, check, copy, repair) treats them as any
other space.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterator, Sequence
from typing import Annotated, Literal

import msgspec
import numpy as np

from icecore.errors import Damaged
from icecore.sizes import CELL_BYTES
from icecore.store.format.manifest import Few, Manifest, Space
from icecore.store.format.manifest_rules import is_path

KEY = "data"
#: Most entries of one directory, and bytes of its table.
MAX_ENTRIES = 1 << 22
MAX_TABLE = 1 << 30
#: The content of a file that is stored as an open file of the job: as the space of its path.
OPEN = -1
#: Extended attributes that owners of files can set (access control lists: acl(5)), and that only
#: root can: the capabilities of a program, and what programs of root keep in ``trusted.``.
_LISTS = (b"system.posix_acl_access", b"system.posix_acl_default")
CAPABILITY = b"security.capability"
OF_ROOT = (CAPABILITY, b"trusted.")
#: Most bytes of the extended attributes of one entry (Linux: 64 KiB for each value).
MAX_ATTRIBUTES = 1 << 20
_TOP = CELL_BYTES << 32

Kind = Literal["file", "directory", "symlink", "link", "fifo", "skipped"]
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


class Entry(msgspec.Struct, frozen=True, array_like=True):
    """One name below a data directory. Names are bytes, as the kernel has them.

    Attributes:
        kind: ``link`` is a further name of the file ``target``; ``skipped`` is a socket, a device
            or a mount point, which is not stored.
        path: Relative to the directory; empty: the directory itself.
        size: Bytes of a regular file.
        mtime_ns, ctime_ns: ns since the epoch, like ``inode`` as on the machine of the snapshot.
        location: Where the content of a file begins, or `OPEN`.
        target: What a symbolic link contains; the path of the file that a ``link`` names.
        attributes: Extended attributes.
    """

    kind: Kind
    path: bytes
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)] = 0
    user: Id = 0
    group: Id = 0
    size: Number = 0
    mtime_ns: Time = 0
    ctime_ns: Time = 0
    inode: Annotated[int, msgspec.Meta(ge=0)] = 0
    location: Annotated[int, msgspec.Meta(ge=-1, le=(1 << 63) - 1)] = 0
    target: bytes = b""
    attributes: dict[bytes, bytes] = {}

    @property
    def cells(self) -> int:
        """Cells that its content may occupy."""
        return -(-self.size // CELL_BYTES) if self.kind == "file" and self.location >= 0 else 0

    def attributes_for(self, owner: int) -> dict[bytes, bytes]:
        """Return the attributes that a restore gives back.

        Those of root alone (`OF_ROOT`) are restored only from a snapshot of root's. The
        capabilities of a program also require that it belongs to root: another owner could have it
        open for writing, or mapped, before it gets the capabilities.

        Args:
            owner: The user whose snapshot it is.
        """
        kept = {}
        for name, value in self.attributes.items():
            of_root = name.startswith(OF_ROOT)
            if of_root and (owner or (name == CAPABILITY and self.user)):
                continue
            kept[name] = value
        return kept


class DataDirectory(msgspec.Struct, frozen=True):
    """One data directory: its absolute path, the number of its entries, of these the regular files,
    and the bytes of all files.
    """

    path: str
    entries: Number
    files: Number
    bytes: Number


def entries_key(path: str) -> str:
    """Return the key of the space that holds a directory's table."""
    return f"{path}/./entries"


def content_key(path: str) -> str:
    """Return the key of the space that holds the content of a directory's files."""
    return f"{path}/./content"


def is_data(space: Space) -> bool:
    """Return whether a space belongs to a data directory."""
    return space.kind == "file" and "/./" in space.key


def is_directory(path: str) -> bool:
    """Return whether a path may be that of a data directory: absolute, normalised, not the root."""
    return is_path(path) and posixpath.normpath(path) == path and not path.startswith("//")


def overlap(one: str, other: str) -> bool:
    """Return whether two directories are the same, or one lies in the other."""
    return one == other or one.startswith(f"{other}/") or other.startswith(f"{one}/")


def encode_data(found: Sequence[DataDirectory]) -> dict[str, str]:
    """Return the record for the ``extra`` of a manifest. Paths may hold surrogate escapes."""
    return {KEY: json.dumps(msgspec.to_builtins(found), separators=(",", ":"))} if found else {}


def read_data(manifest: Manifest) -> list[DataDirectory]:
    """Return the data directories of a snapshot.

    Raises:
        Damaged: The record makes no sense, or spaces are missing.
    """
    text = manifest.extra.get(KEY)
    if text is None:
        return []
    found: list[DataDirectory] = []
    try:
        found = msgspec.convert(json.loads(text), Annotated[list[DataDirectory], Few])
        why = next(_faults(found, manifest), "")
    except (ValueError, RecursionError) as error:
        why = str(error)
    if why:
        raise Damaged("manifest", manifest.snapshot, f"its record of data directories: {why}")
    return found


def data_bytes(manifest: Manifest) -> int:
    """Return the bytes of all files in a snapshot's data directories; 0: it has none, or their
    record is damaged, which a restore refuses.
    """
    try:
        return sum(one.bytes for one in read_data(manifest))
    except Damaged:
        return 0


def _faults(found: list[DataDirectory], manifest: Manifest) -> Iterator[str]:
    files = {space.key for space in manifest.spaces if space.kind == "file"}
    for number, one in enumerate(found):
        if not is_directory(one.path):
            yield f"{one.path!a} is not a path"
        if not {entries_key(one.path), content_key(one.path)} <= files:
            yield f"the spaces of {one.path!a} are missing"
        if any(overlap(one.path, other.path) for other in found[:number]):
            yield f"{one.path!a} overlaps another directory"


def data_spaces(manifest: Manifest, path: str) -> tuple[Space, Space]:
    """Return the spaces of a directory of `read_data`: its table and its content."""
    by_key = {space.key: space for space in manifest.spaces if space.kind == "file"}
    return by_key[entries_key(path)], by_key[content_key(path)]


_DECODER = msgspec.msgpack.Decoder(
    Annotated[list[Entry], msgspec.Meta(min_length=1, max_length=MAX_ENTRIES)]
)


def encode_entries(entries: Sequence[Entry]) -> bytes:
    """Return the table. The first entry is the directory itself; parents precede their content."""
    return msgspec.msgpack.encode(entries)


def decode_entries(data: bytes | bytearray | memoryview, path: str, size: int) -> list[Entry]:
    """Return the entries of a table.

    Args:
        path: The directory, for messages.
        size: Bytes of the space with the content.

    Raises:
        Damaged: The table breaks a rule. Later code does not check again.
    """
    try:
        entries: list[Entry] = _DECODER.decode(data)
        why = next(_broken(entries, size), "")
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        why = str(error)
    if why:
        raise Damaged("table", f"of data directory {path!a}", why)
    return entries


def _broken(entries: list[Entry], size: int) -> Iterator[str]:
    """Yield each broken rule of a table, in words."""
    if entries[0].kind != "directory" or entries[0].path:
        yield "its first entry is not the directory"
    seen: dict[bytes, Kind] = {}
    for entry in entries:
        if entry.path in seen:
            yield f"it has two entries {entry.path!r}"
        parent, _, name = entry.path.rpartition(b"/")
        if entry.path and (
            entry.path.startswith(b"/")
            or name in (b"", b".", b"..")
            or len(name) > 255
            or b"\0" in name
            or not _inside(parent)
        ):
            yield f"{entry.path!r} is no name in it"
        if entry.path and seen.get(parent) != "directory":
            yield f"{entry.path!r} precedes its directory"
        seen[entry.path] = entry.kind
        if entry.kind == "symlink" and not (0 < len(entry.target) < 4096 and _plain(entry.target)):
            yield f"the symbolic link {entry.path!r} leads nowhere"
        if sum(len(name) + len(value) for name, value in entry.attributes.items()) > MAX_ATTRIBUTES:
            yield f"the attributes of {entry.path!r} are too long"
        for name in entry.attributes:
            if not name.startswith((b"user.", b"trusted.")) and name not in (*_LISTS, CAPABILITY):
                yield f"{entry.path!r} has an attribute {name!r}, which no restore sets"
    for entry in entries:
        if entry.kind == "link" and seen.get(entry.target) != "file":
            yield f"{entry.path!r} names a file that is not in the table"
    yield from _misplaced(entries, size)


def _misplaced(entries: list[Entry], size: int) -> Iterator[str]:
    placed = [(entry.location, entry.cells) for entry in entries if entry.cells]
    if not placed:
        return
    if max(location + cells * CELL_BYTES for location, cells in placed) > min(size, _TOP):
        yield "the content of a file lies beyond the end"
        return
    table = np.array(sorted(placed), np.int64)
    ends = table[:, 0] + table[:, 1] * CELL_BYTES
    if (table[:, 0] % CELL_BYTES).any() or (table[1:, 0] < ends[:-1]).any():
        yield "the contents of two files overlap, or do not begin at whole cells"


def _plain(text: bytes) -> bool:
    return b"\0" not in text


def _inside(parent: bytes) -> bool:
    return not parent or all(part not in (b"", b".", b"..") for part in parent.split(b"/"))
