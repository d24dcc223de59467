"""The protocol between a restore and its placers (`icecore.restorer.place.placer_process`). Bytes
are placed only under the lock that both share.

Each message (`icecore.host.rpc.packets`) is msgpack. A placer reads, decodes and verifies cells into its own
memory and places them where they were in the snapshot (`Deliver`), unless their process has changed
the memory there. Then it answers where it holds them, and the restorer, which knows the address
map and holds its own locks meanwhile, tells it where they belong now (`Place`). Who places holds
`icecore.restorer.place.locks.SharedLock` for reading; who reads a process's events holds it for
writing.

Device memory takes other ways. What the driver moves on goes into a file, which processes map where
they had that memory (`File`, `Store`). Cells of resident memory go into the placer's own part of
pinned memory, from which the GPU worker copies them (`PinnedRegion`, `Stage`).
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import msgspec

from icecore.restorer.plan.memory import Read

#: Stored bytes of a batch that a placer reads at once.
PLACER_BYTES = 16 << 20
#: Cells that a placer has room for.
ROOM_CELLS = 16
#: Cells that are staged at once: half of a placer's part of the region, while the worker copies the
#: other half. Few enough for the parts of 16 placers to stay in a large processor's cache: 21 GB/s
#: instead of 18 GB/s with 8 cells (16 cores, H200 machine).
STAGED_CELLS = 4
#: Parts of one `Stage` at most.
STAGED_PARTS = 16


class Move(NamedTuple):
    """``length`` bytes at ``source``, an address in the process that places, belong at
    ``destination`` in a process of the tree.
    """

    destination: int
    source: int
    length: int


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message.

    Attributes:
        folder: Where the objects are.
        key, encryption: The repository's chunk key.
        room: Stored bytes of a batch at most.
        lock: The directory of the shared lock; empty: nothing is placed in a process.
    """

    folder: str
    key: bytes
    encryption: bytes | None
    room: int
    lock: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A placer's first message, without a request: it has begun."""


class WantedCell(NamedTuple):
    """A cell to deliver: the bounds of its stored bytes, and of its base's, in the buffer; the
    address of its window; the number of its flag (`SharedLock.changed`) and of its process's
    userfaultfd.
    """

    start: int
    stop: int
    base_start: int
    base_stop: int
    window: int
    flag: int
    target: int


class Deliver(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read ranges into the buffer of ``size`` bytes; decode and place cells. ``records``: their
    CELL records; ``pages``: 32 bytes each, the pages to place.
    """

    reads: list[Read]
    cells: list[WantedCell]
    records: bytes
    pages: bytes
    size: int


class CellState(enum.IntEnum):
    """What became of a cell."""

    #: It could not be read or decoded.
    MISSING = 0
    PLACED = 1
    #: The placer holds it: its process has changed the memory there, or the kernel refused a page.
    HELD = 2
    #: Its process has ended.
    DEAD = 3


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Deliver`.

    Attributes:
        states: Of each cell.
        addresses: Where the verified bytes of a cell that is held lie in the placer's memory, until
            the next `Deliver`.
        why: Why one is missing.
    """

    states: list[CellState]
    addresses: list[int]
    why: str = ""


class Target(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Give the userfaultfd that comes with this message a number; no answer."""

    number: int


class Forget(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Close that userfaultfd; no answer."""

    number: int


class Place(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Put bytes into the process behind a userfaultfd."""

    target: int
    moves: list[Move]


class Done(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Place`.

    Attributes:
        outcomes: For each move an `icecore.host.kernel.userfaultfd.Stop`, and the bytes that are
            not registered.
        error: The errno that ended it; 0: none.
    """

    outcomes: list[tuple[str, int]]
    error: int = 0
    why: str = ""


class PinnedRegion(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hand over where `Stage` puts cells: a memfd of ``size`` bytes, from ``at`` on. The sockets
    that come with it lead to the GPUs' threads of the worker (`icecore.host.resident.gpu_thread`),
    which has mapped the memfd too. No answer.
    """

    size: int
    at: int


class Bounds(NamedTuple):
    """A cell to stage: the bounds of its stored bytes, and of its base's, in the buffer; the number
    of its GPU's socket; the worker's number for its allocation; the offset in the allocation.
    """

    start: int
    stop: int
    base_start: int
    base_stop: int
    device: int
    handle: int
    offset: int


class Part(msgspec.Struct, frozen=True, array_like=True):
    """Ranges to read into a buffer of ``size`` bytes, and `STAGED_CELLS` cells at most.
    ``records``: their CELL records.
    """

    reads: list[Read]
    cells: list[Bounds]
    records: bytes
    size: int


class Stage(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read, decode and verify whole cells, zeros included, and have the worker copy them to their
    GPUs. ``digested``: the restorer verifies complete cells by digest, on the GPUs.
    """

    parts: list[Part]
    digested: bool = False


class Staged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Stage`.

    Attributes:
        there: For each cell of each part whether it is on its GPU, verified or to be verified.
        why: Why one is not.
        broken: Why the worker could not copy, which ended it; empty: it could.
    """

    there: list[bool]
    why: str = ""
    broken: str = ""


class File(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Hand over the file of ``size`` bytes in which `Store` puts cells, and their table
    (`icecore.restorer.place.file_table`) of ``rows`` rows. No answer.
    """

    size: int
    rows: int


class Store(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Read, decode and verify the cells in rows ``first`` to ``stop`` of the table, and put them
    into the file.
    """

    first: int
    stop: int


class Stored(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The answer to `Store`.

    Attributes:
        there: A byte for each cell; 1: its pages are in the file.
        size: Bytes that were read.
        seconds: How long it took.
        why: Why one is missing.
    """

    there: bytes
    size: int
    seconds: float
    why: str = ""


Request = Open | Deliver | Target | Forget | Place | PinnedRegion | Stage | File | Store
Answer = Ready | Delivered | Done | Staged | Stored
