"""The shard, one immutable object of many chunks: stored chunks back to back, then a footer that
locates and identifies each of them.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from icecore.sizes import BITMAP_BYTES, CELL_BYTES, PAGE
from icecore.store.format import codec
from icecore.store.format.cell import Records
from icecore.store.format.chunk import NO_CHUNK
from icecore.store.format.cipher import overhead, seal_piece
from icecore.store.format.codec import Buffer
from icecore.store.format.container import NAME_BYTES, Container
from icecore.store.format.names import object_name

#: One stored chunk: its id, data bitmap, base (a delta's, else zero), and where its bytes are. 109
#: bytes, little-endian, unpadded.
ENTRY = np.dtype(
    [
        ("chunk", "u1", 32),
        ("data", "u1", BITMAP_BYTES),
        ("base", "u1", 32),
        ("offset", "<u8"),
        ("length", "<u4"),
        ("codec", "u1"),
    ]
)
_ENTRY = struct.Struct("<32s32s32sQIB")

SHARD = Container("shard", b"icshard\n", 1, ENTRY, 1 << 22)


class EncodedChunk(NamedTuple):
    """A chunk in its stored form, not encrypted.

    Attributes:
        chunk: Its id.
        bitmap: Its data bitmap.
        base: The id of its base if ``number`` is a delta's, else `NO_CHUNK`.
        number: Its codec.
        parts: Its bytes.
        length: The sum of their lengths.
    """

    chunk: bytes
    bitmap: Buffer
    base: bytes
    number: int
    parts: Sequence[Buffer]
    length: int


class ShardTable:
    """The chunks of a shard that is being laid out, and its footer. Not thread-safe.

    Args:
        name: 16 random bytes.
        limit: Most stored bytes that it takes (without the footer).
    """

    def __init__(self, name: bytes, limit: int) -> None:
        if len(name) != NAME_BYTES:
            raise ValueError("a shard's name has 16 bytes")
        self.name = name
        self.limit = limit
        self.used = 0
        self._entries: list[bytes] = []

    def __len__(self) -> int:
        return len(self._entries)

    def fits(self, length: int, count: int = 1) -> bool:
        """Return whether ``count`` more chunks, ``length`` stored bytes in total, fit."""
        return self.used + length <= self.limit and len(self._entries) + count <= SHARD.max_entries

    def add(self, chunk: bytes, data: Buffer, base: bytes, number: int, length: int) -> int:
        """Append one stored chunk.

        Args:
            chunk, data, base, number: As in `EncodedChunk`; ``data`` is its bitmap.
            length: Stored bytes; check `fits` first.

        Returns:
            Its offset in the shard.
        """
        if not self.fits(length):
            raise ValueError(f"{length} bytes do not fit")
        offset = self.used
        self._entries.append(_ENTRY.pack(chunk, data, base, offset, length, number))
        self.used += length
        return offset

    def footer(self, key: bytes) -> bytes:
        """Return the footer, which follows the chunks; ``key`` is the repository's shard key."""
        return SHARD.footer(key, self.name, b"".join(self._entries), self.used)

    def entries(self) -> Records:
        """Return the table so far."""
        return np.frombuffer(b"".join(self._entries), ENTRY)


class ShardBuilder(ShardTable):
    """Lays stored chunks out in one caller-owned buffer, whose length is the shard's limit.

    Not thread-safe: whoever shares it locks around :meth:`reserve`; filling the room that it
    returns needs no lock.
    """

    def __init__(self, name: bytes, buffer: memoryview) -> None:
        super().__init__(name, len(buffer))
        self.buffer = buffer

    def reserve(
        self, chunk: bytes, data: Buffer, base: bytes, number: int, length: int
    ) -> tuple[int, memoryview]:
        """Do as :meth:`add`; return also the room for the chunk, to fill before :meth:`finish`."""
        offset = self.add(chunk, data, base, number, length)
        return offset, self.buffer[offset : offset + length]

    def finish(self, key: bytes) -> list[Buffer]:
        """Return the whole shard as buffers to write one after the other; ``key`` is the
        repository's shard key.
        """
        return [self.buffer[: self.used], self.footer(key)]


def place_chunk(
    key: bytes, shard: bytes, offset: int, chunk: bytes, parts: Sequence[Buffer], room: memoryview
) -> None:
    """Copy a chunk's stored form into ``room``, encrypted for its place where ``key``, the
    repository's chunk key, encrypts.
    """
    if overhead(key):
        seal_piece(key, object_name("shard", shard), offset, chunk, parts, room)
    else:
        fill(room, parts)


def fill(room: memoryview, parts: Sequence[Buffer]) -> None:
    """Copy ``parts`` into ``room`` one after the other; numpy's copy, which releases the GIL."""
    target = np.frombuffer(room, np.uint8)
    at = 0
    for part in parts:
        length = len(part)
        np.copyto(target[at : at + length], np.frombuffer(part, np.uint8))
        at += length


def parse_footer(key: bytes, name: bytes, size: int, footer: Buffer) -> Records:
    """Return the chunks of shard ``name`` of ``size`` bytes from its footer
    (:meth:`Container.parse_tail` says how long that is).

    Returns:
        ENTRY records in shard order.

    Raises:
        Damaged: A byte of the footer is not what was written, or an entry cannot be.
        FormatTooNew: A later version wrote it.
    """
    entries = SHARD.parse_footer(key, name, size, footer)
    tag = overhead(key)
    pages = np.bitwise_count(entries["data"]).sum(axis=1, dtype=np.int64)
    lengths, codecs = entries["length"].astype(np.int64), entries["codec"]
    raw = codecs == codec.RAW
    if (
        (pages == 0).any()
        or (lengths <= tag).any()
        or (lengths > CELL_BYTES + tag).any()
        or (lengths[raw] != pages[raw] * PAGE + tag).any()
    ):
        raise SHARD.damaged(name, "a chunk's length does not fit its pages")
    for number in np.unique(codecs).tolist():
        if number == codec.ZERO or not codec.known(number):
            raise SHARD.damaged(name, f"a chunk has the unknown codec {number}")
    based = (entries["base"] != np.frombuffer(NO_CHUNK, np.uint8)).any(axis=1)
    if (based != (codecs & codec.DELTA != 0)).any():
        raise SHARD.damaged(name, "a chunk's base does not fit its codec")
    return entries
