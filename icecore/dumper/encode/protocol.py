"""The protocol between a dump and its encoders (`icecore.dumper.encode.encoder_process`).

Each message (`icecore.host.rpc.packets`) is msgpack. An encoder reads a few cells at once from the
dumper's memory, and returns the ids of their chunks (`Load`, `Loaded`). If a chunk has to be
stored, the encoder puts its form, the bytes to store, into memory that it shares with the dumper
(`Encode`, `Encoded`). The dumper writes the form.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from icecore.store.snapshot.bases import Candidate

#: Number of cells that an encoder has room for.
ROOM_CELLS = 4


class Cell(NamedTuple):
    """A cell in the dumper's memory.

    Attributes:
        address, size: Where its present pages are, one after the other.
        bitmap: Which pages of the cell are present.
        sparse: Whether to drop pages of zeros.
    """

    address: int
    size: int
    bitmap: bytes
    sparse: bool


class Named(NamedTuple):
    """A cell that was read.

    Attributes:
        chunk: The chunk's id; empty if there are no data pages.
        data, zero: The cell's bitmaps of data pages and of pages of zeros.
        length: Bytes in the data pages.
        zeros: Whether all bytes of the data pages are zero, which is possible if pages of zeros are
            kept. Also true if there are no data pages.
    """

    chunk: bytes
    data: bytes
    zero: bytes
    length: int
    zeros: bool


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message. A memfd for forms comes with it.

    Attributes:
        folder: The repository's directory, which holds the objects.
        key, encryption: The repository's chunk key, and the encryption key, if any.
        pid: The process whose memory holds the cells.
        streams: Number of shard streams.
        link, cores: The fields of `icecore.store.snapshot.trial.Objective`.
    """

    folder: str
    key: bytes
    encryption: bytes | None
    pid: int
    streams: int
    link: float
    cores: int


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read cells, at most `ROOM_CELLS`. They replace those of the previous request."""

    cells: list[Cell]


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encode the cell with this number (its index in the last `Load`); for the other fields, see
    `icecore.store.snapshot.forms.Chunk.form`.
    """

    number: int
    stream: int
    region: int
    base: Candidate | None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoder has begun. ``pid`` is its process."""

    pid: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The cells that were read, in the order of `Load`."""

    cells: list[Named]


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The form of a chunk.

    Attributes:
        number: The number of its codec.
        lengths: Lengths of its parts, which lie one after the other in the shared memory. None: the
            form is the cell as it is in the dumper's memory.
        base: The base, if the form is a delta.
        damaged: Fields of the ``store.base_damaged`` events to emit.
    """

    number: int
    lengths: list[int] | None
    base: Candidate | None
    damaged: list[dict[str, Any]]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoder could not carry out the request; the dumper does the work itself."""

    why: str


Request = Open | Load | Encode
Answer = Ready | Loaded | Encoded | Failed
