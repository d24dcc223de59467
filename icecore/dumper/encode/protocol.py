"""The protocol between a dump and its encoders (`icecore.dumper.encode.encoder_process`).

Each message (`icecore.host.rpc.packets`) is msgpack. An encoder reads a few cells at once from the
dumper's memory, and returns the ids of their chunks (`Load`, `Loaded`). The encoder then encodes the
chunks that the dumper has to store, and writes their *forms* (the bytes to store) to a file that the
dumper has open, for instance a shard (`Append`, `Appended`). Meanwhile, if the repository is not a
directory, the encoder asks the dumper for the bases of deltas (`Fetch`, `Fetched`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from icecore.store.snapshot.forms import Wanted, Written

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
    """The first message.

    Attributes:
        folder: The repository's directory, which holds the objects; empty: the encoder asks
            the dumper for bases.
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


class Append(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encode cells, and write their forms one after the other. The message carries the descriptor
    of the file, if the previous one was for another file.

    Attributes:
        stream: As in `icecore.store.snapshot.forms.Appender.append`.
        name, offset, sealed, spare: As in `icecore.store.snapshot.forms.Room`.
        cells: The cells; `Wanted.number` is a cell's index in the last `Load`.
    """

    stream: int
    name: bytes
    offset: int
    sealed: bool
    spare: int
    cells: list[Wanted]


class Fetched(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Fetch`: the bytes are at `Append.spare` in the file.

    Attributes:
        error: Why they cannot be read (damaged or missing); empty: no error.
    """

    error: str = ""


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoder has begun. ``pid`` is its process."""

    pid: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The cells that were read, in the order of `Load`."""

    cells: list[Named]


class Appended(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Append`.

    Attributes:
        chunks: What was written, in the order of `Append.cells`.
        damaged: Fields of the ``store.base_damaged`` events to emit.
    """

    chunks: list[Written]
    damaged: list[dict[str, Any]]


class Fetch(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Ask for ``length`` bytes of a shard from ``offset`` on, while an `Append` is carried out."""

    shard: bytes
    offset: int
    length: int


class Failed(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoder could not carry out the request, or carried out only part of it; the dumper does
    the work itself.
    """

    why: str


Request = Open | Load | Append | Fetched
Answer = Ready | Loaded | Appended | Fetch | Failed
