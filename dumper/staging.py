"""Staging: the bounded memory in which cells wait between being read and being stored; its rule: a slot has one owner at a time."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType

from icecore.host.memory import HugeBuffer
from icecore.store.cell import BITMAP_BYTES, CELL_BYTES, PAGE

#: A slot is a page that ends in the cell's bitmap, then the cell's bytes: one contiguous piece to fingerprint.
SLOT_BYTES = PAGE + CELL_BYTES
_ARENA_SLOTS = 32


class Slot:
    """Room for one cell and its bitmap.

    Attributes:
        address: Address of the data (page-aligned); the 32 bytes before it are the bitmap.
        iovec: Address of a C ``struct iovec`` that describes the data.
        size: Bytes of room for data.
    """

    __slots__ = ("_iovec", "_whole", "address", "iovec", "size")

    def __init__(self, arena: HugeBuffer, offset: int) -> None:
        self._whole = arena.view(offset, offset + SLOT_BYTES)
        self.address = arena.address + offset + PAGE
        self.size = CELL_BYTES
        self._iovec = (ctypes.c_uint64 * 2)(self.address, CELL_BYTES)
        self.iovec = ctypes.addressof(self._iovec)

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """The data from ``start`` to ``stop``."""
        return self._whole[PAGE + start : SLOT_BYTES if stop is None else PAGE + stop]

    def set_bitmap(self, bitmap: memoryview) -> None:
        """Put the cell's page bitmap before its data."""
        self._whole[PAGE - BITMAP_BYTES : PAGE] = bitmap

    def hashed(self, size: int) -> memoryview:
        """The bitmap and the first ``size`` bytes of data, contiguous: what is fingerprinted."""
        return self._whole[PAGE - BITMAP_BYTES : PAGE + size]


class Staging:
    """At most ``limit`` bytes of slots; whoever finds none waits.

    Args:
        limit: Bytes.
        threads: How many threads scan: each holds a slot while it waits for another, so that there must be more slots than threads, whatever the limit.

    Memory is taken in arenas of 32 slots, when first needed, and kept for reuse until ``close``.
    """

    def __init__(self, limit: int, threads: int = 1) -> None:
        self._least = 2 * threads + 6
        self.capacity = max(self._least, limit // SLOT_BYTES)
        self._free: list[Slot] = []
        self._made = 0
        self._abandoned: BaseException | None = None
        self._change = threading.Condition()

    @property
    def available(self) -> int:
        """Slots that can be had without waiting."""
        return len(self._free) + self.capacity - self._made

    @property
    def bytes(self) -> int:
        """Bytes of memory taken so far."""
        return self._made * SLOT_BYTES

    def reserve(self, slots: int) -> None:
        """Fault in memory for ``slots`` free slots (as far as the limit goes), so that the window does not pay for it."""
        while len(self._free) < slots and self._made < self.capacity:
            with self._change:
                self._grow()

    def _grow(self) -> None:
        count = min(_ARENA_SLOTS, self.capacity - self._made)
        arena = HugeBuffer(count * SLOT_BYTES)
        self._made += count
        self._free.extend(Slot(arena, i * SLOT_BYTES) for i in range(count))
        self._change.notify_all()

    def acquire(self) -> Slot:
        """A slot with arbitrary bytes in it; waits until one is free.

        Raises:
            The reason for which the dump was abandoned meanwhile.
        """
        try:
            return self._free.pop()  # list.pop is atomic: no lock on the way that every cell takes
        except IndexError:
            pass
        with self._change:
            while True:
                if self._abandoned is not None:
                    raise self._abandoned
                if self._free:
                    return self._free.pop()
                if self._made < self.capacity:
                    self._grow()
                    continue
                self._change.wait(1.0)

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        self._free.append(slot)
        if self._made >= self.capacity and len(self._free) <= self._least:
            with self._change:
                self._change.notify()

    @contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        """Take no more than ``limit`` bytes of memory meanwhile: while the job runs, waiting costs nobody anything."""
        whole, self.capacity = self.capacity, min(self.capacity, max(self._least, limit // SLOT_BYTES))
        try:
            yield
        finally:
            self.capacity = whole

    def abandon(self, why: BaseException) -> None:
        """Wake everyone who waits for a slot, with an error."""
        with self._change:
            self._abandoned = why
            self._change.notify_all()

    def __enter__(self) -> Staging:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._free.clear()
