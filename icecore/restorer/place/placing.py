"""What a restore says to its placers (`icecore.restorer.place.placer_process`), and they to it; its
rule: nothing is placed but under the lock that both share.

One message a packet, in msgpack. A placer reads, decodes and verifies cells into its own memory and
places them where they were in the snapshot (`Deliver`), as long as their process is not known to
have changed its address space. Otherwise it says where it holds them, and the restorer, which knows
and keeps its own locks meanwhile, tells it where they belong now (`Place`). Between the two, and
among the placers, `icecore.restorer.place.locks.SharedLock` stands: whoever places holds it for
reading, whoever reads a process's events for writing.

Device memory goes other ways. What the driver moves on goes into a file, which processes map where
they had that memory (`File`, `Store`); of resident memory a placer puts cells into its own part of
pinned memory, and has the GPU worker copy them (`PinnedRegion`, `Stage`).
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
#: other half. So few that the parts of 16 placers stay in a large processor's cache: 21 instead of
#: 18 GB/s with 8 (16 cores, H200 machine).
STAGED_CELLS = 4
#: Parts of one `Stage` at most.
STAGED_PARTS = 16
#: Bytes of a message at most.
MESSAGE = 1 << 17


class Move(NamedTuple):
    """``length`` bytes at ``source``, an address of whoever places, belong to ``destination`` of a
    process.
    """

    destination: int
    source: int
    length: int


class Open(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The first message. ``folder``: where the objects are; ``key``, ``encryption``: the
    repository's chunk key; ``room``: stored bytes of a batch at most; ``lock``: the directory of
    the shared lock, or empty: nothing is to be placed in a process.
    """

    folder: str
    key: bytes
    encryption: bytes | None
    room: int
    lock: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """A placer's first message, unasked: it has begun."""


class WantedCell(NamedTuple):
    """A cell to deliver: the bounds of its stored bytes, and of its base's, in the buffer; the
    address of its window; its family; that one's userfaultfd.
    """

    start: int
    stop: int
    base_start: int
    base_stop: int
    window: int
    family: int
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

    #: It could not be had.
    MISSING = 0
    PLACED = 1
    #: The placer holds it: its process has changed, or it could not be placed just like that.
    HELD = 2
    #: Its process is gone.
    DEAD = 3


class Delivered(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """For each cell its state, and of one that is held where its verified bytes lie in the placer's
    memory until the next `Deliver`; ``why``: of one that could not be had.
    """

    states: list[CellState]
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
    """What became of each move: a `icecore.host.kernel.userfaultfd.Stop`, and bytes that are not
    registered. ``error``: an errno; then it is over.
    """

    outcomes: list[tuple[str, int]]
    error: int = 0
    why: str = ""


class PinnedRegion(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The memfd that comes with this message, of ``size`` bytes, is where `Stage` puts cells, from
    ``at`` on, and the sockets that come with it lead to the GPUs' threads of the worker
    (`icecore.host.resident.gpu_thread`), which has the memfd mapped too. No answer.
    """

    size: int
    at: int


class Bounds(NamedTuple):
    """A cell to stage: the bounds of its stored bytes, and of its base's, in the buffer; the number
    of its GPU's socket, the worker's for its allocation, the offset in that.
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
    GPUs. ``digested``: who asks verifies by digest, on the GPUs, the cells all of whose pages are
    there.
    """

    parts: list[Part]
    digested: bool = False


class Staged(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """For each cell of each part whether it is on its GPU, verified or to be; ``why``: of one that
    could not be had. ``broken``: why the worker could not copy; then it is over.
    """

    there: list[bool]
    why: str = ""
    broken: str = ""


class File(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The file that comes with this message, of ``size`` bytes, is where `Store` puts cells; what
    comes with it, too, is the `icecore.restorer.place.file_table` of them, of so many rows. No
    answer.
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
    """``there``: a byte for each cell, 1: its pages are in the file; ``size``: bytes that were
    read; ``seconds``: that it took; ``why``: of one that could not be had.
    """

    there: bytes
    size: int
    seconds: float
    why: str = ""


Request = Open | Deliver | Target | Forget | Place | PinnedRegion | Stage | File | Store
Answer = Ready | Delivered | Done | Staged | Stored
