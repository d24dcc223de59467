"""What a snapshot records about a container's checkpoint archive besides its memory: the container,
and the position of each member in the tar. Pure.

An archive contains an image directory of CRIU and other files. Its members are spaces of the
snapshot, and all bytes between their contents (headers, padding) are one more, so an export can
write the tar again byte for byte.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from hashlib import blake2b
from typing import Annotated, Literal

import msgspec

from icecore.errors import Damaged
from icecore.store.format.manifest import Manifest

#: Key of the manifest's ``extra`` that holds `Archive`, as JSON.
ARCHIVE = "archive"
#: Images that hold the bytes between members, and the list of members.
HEADERS, MEMBERS = "archive:headers", "archive:members"
MAX_MEMBERS = 1 << 16
#: Bytes between the contents of all members.
MAX_HEADERS = 64 << 20
MAX_TAR = 1 << 50
_MAX_TEXT = 4096
#: Directory of the images in an archive.
FOLDER = "checkpoint/"

_IMAGE = re.compile(r"[A-Za-z0-9_+-][A-Za-z0-9_.+-]{0,199}\Z")
_PAGES = re.compile(r"pages-\d+\.img\Z")

Text = Annotated[str, msgspec.Meta(max_length=_MAX_TEXT)]
Offset = Annotated[int, msgspec.Meta(ge=0, le=MAX_TAR)]
Compression = Literal["none", "gzip", "zstd"]
MemoryKind = Literal["process", "shared"]


class Archive(msgspec.Struct, frozen=True):
    """A container's checkpoint archive.

    ``size`` is that of the uncompressed tar, in bytes. ``engine`` is the engine that managed the
    container ("libpod", "cri-o", …), ``runtime`` the OCI runtime. Texts that the archive lacks are
    empty.
    """

    size: Offset
    compression: Compression
    engine: Text = ""
    name: Text = ""
    id: Text = ""
    image: Text = ""
    runtime: Text = ""
    pod: Text = ""

    @property
    def title(self) -> str:
        """A title for the container: its name, image and runtime."""
        about = ", ".join(text for text in (self.image, self.runtime, self.engine) if text)
        name = f"{self.pod}/{self.name}" if self.pod else self.name
        return f"{name or 'without a name'} ({about})" if about else name or "without a name"


class Member(msgspec.Struct, frozen=True, array_like=True):
    """The content of a regular file in the tar: ``size`` bytes from ``offset`` on, stored as the space
    (``kind``, ``key``). The content of memory is the pages of that space's pagemap, in the pagemap's order.
    """

    path: Text
    offset: Offset
    size: Offset
    kind: Literal["image"] | MemoryKind
    key: Annotated[str, msgspec.Meta(max_length=200)]


_MEMBERS = msgspec.msgpack.Decoder(Annotated[list[Member], msgspec.Meta(max_length=MAX_MEMBERS)])


def image_key(path: str) -> str:
    """Return the key of the image that holds a member. An image of CRIU keeps its name, so that it is
    found as in a directory. The key of any other member depends only on its path.
    """
    name = path.removeprefix(FOLDER)
    if path.startswith(FOLDER) and _IMAGE.match(name) and not _PAGES.match(name):
        return name
    return f"member:{blake2b(path.encode(errors='surrogateescape'), digest_size=16).hexdigest()}"


def encode_archive(archive: Archive) -> str:
    """Return the value of ``extra["archive"]``."""
    return msgspec.json.encode(archive).decode()


def decode_archive(text: str) -> Archive:
    """Return the archive that ``extra["archive"]`` describes.

    Raises:
        Damaged: It is invalid.
    """
    try:
        return msgspec.json.decode(text, type=Archive)
    except (msgspec.DecodeError, RecursionError) as error:
        raise Damaged("manifest", "of the snapshot", f"its archive: {error}") from error


def container_title(manifest: Manifest) -> str:
    """Return the container from which a snapshot was imported; empty if none.

    Raises:
        Damaged: The record of the archive is invalid.
    """
    text = manifest.extra.get(ARCHIVE)
    return decode_archive(text).title if text is not None else ""


def encode_members(members: Sequence[Member]) -> bytes:
    """Return the content of the image `MEMBERS`."""
    return msgspec.msgpack.encode(members)


def decode_members(data: bytes, size: int) -> list[Member]:
    """Return the members of a tar of ``size`` bytes, ascending.

    Raises:
        Damaged: They overlap, or lie outside of it.
    """
    try:
        members: list[Member] = _MEMBERS.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged("image", MEMBERS, str(error)) from error
    end = 0
    for member in members:
        if member.offset < end or member.offset + member.size > size:
            raise Damaged("image", MEMBERS, "its members overlap, or lie beyond the archive")
        end = member.offset + member.size
    return members


def gaps(members: Sequence[Member], size: int) -> list[tuple[int, int]]:
    """Return the non-empty gaps between the contents of members: (offset, length)."""
    found, at = [], 0
    for member in members:
        found.append((at, member.offset - at))
        at = member.offset + member.size
    found.append((at, size - at))
    return [(offset, length) for offset, length in found if length]
