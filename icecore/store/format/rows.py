"""CELL records as plain tuples, for code that handles one record at a time: packing or unpacking a
whole record takes one step.
"""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from icecore.store.format import codec
from icecore.store.format.cell import CELL
from icecore.store.format.chunk import NO_CHUNK

_PLACE = "16sQIB"
_ROW = struct.Struct(f"<I32s32s32s{_PLACE}32s{_PLACE}")


class Place(NamedTuple):
    """Where a chunk's stored bytes lie; the fields of PLACE."""

    shard: bytes
    offset: int
    length: int
    codec: int


NOWHERE = Place(bytes(16), 0, 0, codec.ZERO)


class Stored(NamedTuple):
    """How a chunk is stored: its place, and for a delta the base's id and place."""

    place: Place
    base: bytes = NO_CHUNK
    base_place: Place = NOWHERE


class Row(NamedTuple):
    """A CELL record."""

    cell: int
    data: bytes
    zero: bytes
    chunk: bytes
    stored: Stored


def pack(row: Row) -> np.void:
    """Return the CELL record of ``row``."""
    place, base, base_place = row.stored
    packed = _ROW.pack(row.cell, row.data, row.zero, row.chunk, *place, base, *base_place)
    record: np.void = np.frombuffer(packed, CELL)[0]
    return record


def unpack(record: np.void) -> Row:
    """Return the fields of a CELL record."""
    cell, data, zero, chunk, *place = _ROW.unpack(record.tobytes())
    return Row(cell, data, zero, chunk, Stored(Place(*place[:4]), place[4], Place(*place[5:])))
