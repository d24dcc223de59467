"""The protocol between a dump and its encoders (`icecore.dumper.encode.encoder_process`).

Each message (`icecore.host.rpc.packets`) is msgpack. An encoder reads a cell from the dumper's
memory, a few at once, and says which chunks they are (`Load`, `Loaded`). If a chunk has to be
stored, it puts the chunk's form into memory that it shares with the dumper (`Encode`, `Encoded`),
which writes it.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from icecore.store.snapshot.bases import Candidate

#: Cells that an encoder has room for.
ROOM_CELLS = 4


class Cell(NamedTuple):
    """A cell in the dumper's memory.

    Attributes:
        address, size: Its present pages.
        bitmap: Which they are.
        sparse: Drop pages of zeros.
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
        length: Bytes of the data pages.
        zeros: Whether they are zero nevertheless.
    """

    chunk: bytes
    data: bytes
    zero: bytes
    length: int
    zeros: bool


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message, with a memfd for forms.

    Attributes:
        folder: Where the objects are.
        key, encryption: The repository's chunk key.
        pid: The process that has the cells.
        streams: Number of shard streams.
        link, cores: The objective.
    """

    folder: str
    key: bytes
    encryption: bytes | None
    pid: int
    streams: int
    link: float
    cores: int


class Load(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read cells, at most `ROOM_CELLS`, in place of those before."""

    cells: list[Cell]


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encode a cell, by its number in `Load`; see `icecore.store.snapshot.forms.Chunk.form`."""

    number: int
    stream: int
    region: int
    base: Candidate | None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoder has begun; its process."""

    pid: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What was read, in the order of `Load`."""

    cells: list[Named]


class Encoded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A form.

    Attributes:
        number: Its codec.
        lengths: Of its parts, one after the other in the shared memory. None: it is the cell as it
            is in the dumper's memory.
        base: Of a delta.
        damaged: Fields of ``store.base_damaged`` events.
    """

    number: int
    lengths: list[int] | None
    base: Candidate | None
    damaged: list[dict[str, Any]]


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The request could not be carried out; the dumper does it itself."""

    why: str


Request = Open | Load | Encode
Answer = Ready | Loaded | Encoded | Failed
