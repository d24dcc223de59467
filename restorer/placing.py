"""What a restore says to its placers (`icecore.restorer.placer_process`), and they to it; its rule: whoever asks holds the locks.

One message a packet, in msgpack.
A placer reads, decodes and verifies cells into its own memory (`Prepare`), and puts them where it is told (`Place`). In between the restorer looks up, under
the lock of the address map, where that is: a placer knows nothing of processes, only numbers for the userfaultfds that it was handed.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec

from icecore.restorer.plan import Read

#: Cells that a placer has room for.
ROOM_CELLS = 8
#: Bytes of a message at most.
MESSAGE = 1 << 17


class Move(NamedTuple):
    """``length`` bytes at ``source``, an address of whoever places, belong to ``destination`` of a process."""

    destination: int
    source: int
    length: int


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message. ``folder``: where the objects are; ``key``, ``encryption``: the repository's chunk key; ``room``: stored bytes of a batch at most."""

    folder: str
    key: bytes
    encryption: bytes | None
    room: int


class Prepare(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read ranges (shard, offset, length, where in the buffer), then decode cells.

    ``cells``: the bounds of each one's stored bytes, and of its base's, in the buffer; ``records``: their CELL records.
    """

    reads: list[Read]
    cells: list[tuple[int, int, int, int]]
    records: bytes
    size: int


class Prepared(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Where each cell's verified bytes lie in the placer's memory; 0: it could not be had, and ``why`` tells of one of these."""

    addresses: list[int]
    why: str = ""


class Target(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The userfaultfd that comes with this message has that number from now on; no answer."""

    number: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close that userfaultfd; no answer."""

    number: int


class Place(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Put bytes into the process behind a userfaultfd."""

    target: int
    moves: list[Move]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """What became of each move: a `icecore.host.userfaultfd.Stop`, and bytes that are not registered. ``error``: an errno; then it is over."""

    outcomes: list[tuple[str, int]]
    error: int = 0
    why: str = ""


Request = Open | Prepare | Target | Forget | Place
Answer = Prepared | Done
