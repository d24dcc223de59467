"""What a fetcher may use, and what it has used."""

from __future__ import annotations

import msgspec

from icecore.host.kernel.memory import HugeBuffer
from icecore.sizes import CELL_BYTES
from icecore.store.runtime.pool import Scratch


class Spent(msgspec.Struct):
    """What workers have done.

    Attributes:
        stored: Bytes that were read.
        produced: Bytes that were delivered.
        cells: Cells that were delivered.
        read, decode, sink: Seconds of all threads in each stage; all that placers do is ``sink``.
        redone: Cells that a placer could not deliver, and that this process therefore read itself.
    """

    stored: int = 0
    produced: int = 0
    cells: int = 0
    read: float = 0.0
    decode: float = 0.0
    sink: float = 0.0
    redone: int = 0

    def add(self, other: Spent) -> None:
        """Add another worker's share."""
        for name in ("stored", "produced", "cells", "read", "decode", "sink", "redone"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def thread_seconds(self) -> dict[str, float]:
        """Return the seconds of each stage as fields of an event."""
        return {
            f"{name}_thread_seconds": getattr(self, name) for name in ("read", "decode", "sink")
        }


class Limits(msgspec.Struct, frozen=True):
    """What a fetcher may use.

    Attributes:
        threads: That decode.
        budget: Bytes of ranges that were fetched and not yet used.
        attempts: How often a read is tried.
        stall: Seconds without an answer after which a read has failed.
        shelf: Buffers of fetchers that follow each other.
    """

    threads: int
    budget: int
    attempts: int
    stall: float
    shelf: Shelf = msgspec.field(default_factory=lambda: Shelf())


class Buffers:
    """The buffers of one worker."""

    def __init__(self, room: int) -> None:
        self.stored = HugeBuffer(room, prefault=False)
        self.out = HugeBuffer(CELL_BYTES, prefault=False)
        self.scratch = Scratch()


class Shelf:
    """Keeps the buffers of workers that have ended for the next fetcher: their first touch costs
    more than reading a small file. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: list[Buffers] = []

    def take(self, room: int) -> Buffers:
        """Return buffers for at least ``room`` stored bytes."""
        try:
            buffers = self._free.pop()
        except IndexError:
            return Buffers(room)
        return buffers if buffers.stored.size >= room else Buffers(room)

    def give(self, buffers: Buffers) -> None:
        """Put buffers back."""
        self._free.append(buffers)
