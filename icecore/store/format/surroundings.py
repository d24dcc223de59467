"""What surrounds a job's open files, sockets and working directories, as a manifest records it:
directories, FIFOs, names of unix sockets, small files, and build ids of programs. Pure.

It is JSON in ``Manifest.extra["surroundings"]``; docs/reference/format.md specifies it. Snapshots
of earlier versions lack it.
"""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Sequence
from typing import Annotated, Any

import msgspec

from icecore.errors import Damaged
from icecore.store.format.manifest import Manifest
from icecore.store.format.manifest_rules import MAX_FILES, is_path

KEY = "surroundings"
#: Most bytes of a small file.
MAX_SMALL = 4096

Id = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
Mode = Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
Time = Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
Many = msgspec.Meta(max_length=MAX_FILES)


class Named(msgspec.Struct, frozen=True, array_like=True):
    """Something that has a path and an owner."""

    path: str
    mode: Mode
    user: Id
    group: Id


class Folder(Named, frozen=True, array_like=True):
    """A directory. ``opened``: it is open or the working directory of a process, so CRIU opens it and
    compares its mode. ``mtime_ns`` is ns since the epoch.
    """

    mtime_ns: Time = 0
    opened: bool = False


class Fifo(Named, frozen=True, array_like=True):
    """A FIFO that a process has open."""


class SocketName(Named, frozen=True, array_like=True):
    """A name that CRIU gives to a unix socket. ``folder`` is its directory if the name leads
    through symbolic links, else empty.
    """

    folder: str = ""

    @property
    def place(self) -> str:
        """Return the path without symbolic links."""
        folder, _, name = self.path.rpartition("/")
        return f"{self.folder or folder}/{name}"


class SmallFile(Named, frozen=True, array_like=True):
    """A pid or lock file that no process has open, with its content in base64."""

    mtime_ns: Time = 0
    content: Annotated[str, msgspec.Meta(max_length=2 * MAX_SMALL)] = ""

    @property
    def data(self) -> bytes:
        """Return the content.

        Raises:
            ValueError: It is not base64.
        """
        return base64.b64decode(self.content, validate=True)


class Surroundings(msgspec.Struct, frozen=True):
    """The surroundings of one job. ``folders`` are ordered: parents precede their content.
    ``programs`` maps the path of each mapped program or library to its build id in hexadecimal,
    empty if it has none.
    """

    folders: Annotated[list[Folder], Many] = []
    fifos: Annotated[list[Fifo], Many] = []
    sockets: Annotated[list[SocketName], Many] = []
    small: Annotated[list[SmallFile], Many] = []
    programs: Annotated[dict[str, str], Many] = {}


def encode_surroundings(found: Surroundings) -> str:
    """Return the text for the manifest. Paths may hold surrogate escapes (PEP 383)."""
    return json.dumps(msgspec.to_builtins(found), separators=(",", ":"))


def read_surroundings(manifest: Manifest) -> Surroundings | None:
    """Return the surroundings that a snapshot records; None: an earlier version wrote it.

    Raises:
        Damaged: The record makes no sense.
    """
    text = manifest.extra.get(KEY)
    if text is None:
        return None
    try:
        found = msgspec.convert(_loaded(text), Surroundings)
        for why in _faults(found):
            raise ValueError(why)
    except (ValueError, RecursionError, binascii.Error) as error:
        raise Damaged("manifest", manifest.snapshot, f"its surroundings: {error}") from error
    return found


def _loaded(text: str) -> Any:
    value = json.loads(text)
    if not isinstance(value, dict):
        raise ValueError("they are no object")
    return value


def _faults(found: Surroundings) -> list[str]:
    """Return each broken rule as a message."""
    every: tuple[Sequence[Named], ...] = (found.folders, found.fifos, found.sockets, found.small)
    paths = [one.path for some in every for one in some] + list(found.programs)
    paths += [one.folder for one in found.sockets if one.folder]
    out = [f"{path!a} is not a path" for path in paths if not is_path(path)]
    out += [
        f"{one.path!a} holds more than {MAX_SMALL} bytes"
        for one in found.small
        if len(one.data) > MAX_SMALL
    ]
    return out
