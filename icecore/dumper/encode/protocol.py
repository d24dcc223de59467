"""The protocol between a dump and its encoders (`icecore.dumper.encode.encoder_process`).

Each message (`icecore.host.rpc.packets`) is msgpack. An encoder reads a cell from the dumper's
memory and says which chunk it is (`Load`, `Loaded`). If that chunk has to be stored, it puts the
chunk's form into memory that it shares with the dumper (`Encode`, `Encoded`), which writes it.
"""

from __future__ import annotations

from typing import Any

import msgspec

from icecore.store.snapshot.bases import Candidate


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
    """Read a cell.

    Attributes:
        address, size: The present pages in the dumper's memory.
        bitmap: Which they are.
        sparse: Drop pages of zeros.
    """

    address: int
    size: int
    bitmap: bytes
    sparse: bool


class Encode(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Encode the cell that was read last; see `icecore.store.snapshot.forms.Chunk.form`."""

    stream: int
    region: int
    base: Candidate | None


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The encoder has begun; its process."""

    pid: int


class Loaded(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What was read.

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
