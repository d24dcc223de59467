"""Decodes a chunk's stored bytes into a cell's data pages. Nothing unverified is handed out, except
to a caller that verifies it. Reads no storage.
"""

from __future__ import annotations

import numpy as np

from icecore.errors import Damaged
from icecore.sizes import PAGE
from icecore.store.format import codec, delta
from icecore.store.format.chunk import chunk_id, pages_of
from icecore.store.format.cipher import encryption_of, open_piece
from icecore.store.format.names import object_name
from icecore.store.format.rows import Place, Row, unpack
from icecore.store.runtime.pool import Scratch


class ChunkDecoder:
    """Decodes stored bytes into a cell's verified data pages. Thread-safe; each thread brings its
    own buffers.

    Args:
        key: The repository's chunk key.

    Attributes:
        encrypted: Whether stored bytes are encrypted.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self.encrypted = encryption_of(key) is not None

    def decode(
        self,
        record: np.void | Row,
        stored: memoryview,
        base_stored: memoryview | None,
        out: memoryview,
        scratch: Scratch,
        *,
        verified: bool = True,
    ) -> memoryview:
        """Return the data pages' bytes of one cell, in address order. Releases the GIL while bytes
        move.

        Args:
            record: Its CELL record.
            stored: The bytes at its ``place``; empty for a zero chunk.
            base_stored: The bytes at its ``base_place``, if its codec is a delta's.
            out: Room for a cell; must not overlap ``stored``.
            scratch: The thread's scratch.
            verified: Compare the bytes with the chunk's id. Otherwise, the caller must do so.

        Returns:
            The bytes, verified unless that was declined: the beginning of ``out``, or ``stored``
            itself if it is raw and not encrypted (then ``out`` is unchanged).

        Raises:
            Damaged: Names the chunk (the cell's or the base's) and its shard.
        """
        row = record if isinstance(record, Row) else unpack(record)
        size = pages_of(row.data) * PAGE
        number = row.stored.place.codec
        if not size:
            return out[:0]
        if self.encrypted and number != codec.ZERO:
            # Raw bytes are decrypted directly into place.
            stored = self._open(
                row.chunk,
                row.stored.place,
                stored,
                out[:size] if number == codec.RAW else scratch.plain,
            )
        if number & codec.DELTA:
            if self.encrypted and base_stored is not None:
                base_stored = self._open(
                    row.stored.base, row.stored.base_place, base_stored, scratch.own
                )
            return self._decode_delta(
                row, size, stored, base_stored, out, scratch, verified=verified
            )
        if number == codec.RAW:
            if len(stored) != size:
                raise damaged_chunk(
                    row.chunk, row.stored.place, f"{len(stored)} raw bytes where {size} belong"
                )
            content = stored
        else:
            content = out[:size]
            _decode_full(row.chunk, row.stored.place, stored, content)
        if verified and chunk_id(self._key, row.data, content) != row.chunk:
            raise damaged_chunk(row.chunk, row.stored.place, "its bytes do not match its id")
        return content

    def _open(self, chunk: bytes, place: Place, stored: memoryview, out: memoryview) -> memoryview:
        try:
            return open_piece(
                self._key, object_name("shard", place.shard), place.offset, chunk, stored, out
            )
        except ValueError as error:
            raise damaged_chunk(chunk, place, str(error)) from error

    def _decode_delta(
        self,
        row: Row,
        size: int,
        stored: memoryview,
        base_stored: memoryview | None,
        out: memoryview,
        scratch: Scratch,
        *,
        verified: bool,
    ) -> memoryview:
        place, base, base_place = row.stored
        if base_stored is None:
            raise ValueError("a delta needs its base's stored bytes")
        try:
            theirs = delta.base_bitmap(stored)
        except ValueError as error:
            raise damaged_chunk(row.chunk, place, str(error)) from error
        # If base and chunk have the same pages, the base is decoded directly into the chunk's
        # place.
        content = out[:size]
        room = content if theirs == row.data else scratch.base[: pages_of(theirs) * PAGE]
        try:
            codec.unseal(stored)
        except ValueError as error:
            raise damaged_chunk(row.chunk, place, str(error)) from error
        _decode_full(base, base_place, base_stored, room)
        try:
            delta.decode(place.codec, stored, row.data, room, content, scratch.residual)
        except ValueError as error:
            raise damaged_chunk(row.chunk, place, str(error)) from error
        if verified and chunk_id(self._key, row.data, content) != row.chunk:
            # Find out which is damaged: the base has an id of its own.
            room = scratch.base[: pages_of(theirs) * PAGE]
            _decode_full(base, base_place, base_stored, room)
            if chunk_id(self._key, theirs, room) != base:
                raise damaged_chunk(base, base_place, "its bytes do not match its id")
            raise damaged_chunk(row.chunk, place, "its bytes do not match its id")
        return content


def _decode_full(chunk: bytes, place: Place, stored: memoryview, out: memoryview) -> None:
    try:
        codec.decode(place.codec, stored, out)
    except ValueError as error:
        raise damaged_chunk(chunk, place, str(error)) from error


def damaged_chunk(chunk: bytes, place: Place, why: str) -> Damaged:
    """Return the error for a chunk, with its place."""
    where = (
        ""
        if place.codec == codec.ZERO
        else f" (at {place.offset} of {object_name('shard', place.shard)})"
    )
    return Damaged("chunk", chunk.hex(), f"{why}{where}")
