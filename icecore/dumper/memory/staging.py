"""Staging: the bounded memory in which cells wait between being read and being stored; its rule: a
slot has one owner at a time.

A slot has room for a whole cell. Many mappings are smaller than that, so small cells move together
into one slot (`Packer`): staging then holds about as many bytes as it takes, and a tree of
thousands of small mappings does not spill, nor wait for memory to be faulted in.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from icecore.host.kernel.memory import HugeBuffer
from icecore.store.format.cell import BITMAP_BYTES, CELL_BYTES, PAGE

#: A slot is a page that ends in the cell's bitmap, then the cell's bytes: one contiguous piece to
#: fingerprint.
SLOT_BYTES = PAGE + CELL_BYTES
_ARENA_SLOTS = 32
#: Cells up to this many bytes share slots; copying them costs less than the memory that they would
#: waste.
SMALL_BYTES = CELL_BYTES // 4


class Slot:
    """Room for one cell and its bitmap.

    Attributes:
        address: Address of the data (page-aligned); the 32 bytes before it are the bitmap.
        iovec: Address of a C ``struct iovec`` that describes the data.
        size: Bytes of room for data.
    """

    __slots__ = ("_iovec", "_whole", "address", "iovec", "size")

    def __init__(self, whole: memoryview, address: int, size: int) -> None:
        self._whole = whole
        self.address = address
        self.size = size
        self._iovec = (ctypes.c_uint64 * 2)(address, size)
        self.iovec = ctypes.addressof(self._iovec)

    def part(self, start: int, size: int) -> tuple[memoryview, int, int]:
        """The arguments of a slot within this one's data; its bitmap is not its own."""
        return self._whole[start : start + PAGE + size], self.address + start, size

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """The data from ``start`` to ``stop``."""
        return self._whole[PAGE + start : SLOT_BYTES if stop is None else PAGE + stop]

    def set_bitmap(self, bitmap: memoryview) -> None:
        """Put the cell's page bitmap before its data."""
        self._whole[PAGE - BITMAP_BYTES : PAGE] = bitmap

    def hashed(self, size: int) -> memoryview:
        """The bitmap and the first ``size`` bytes of data, contiguous: what is fingerprinted."""
        return self._whole[PAGE - BITMAP_BYTES : PAGE + size]


class PackedSlot(Slot):
    """A small cell in a slot that others share; it is given back like any other."""

    __slots__ = ("pack",)

    def __init__(self, pack: Pack, start: int, size: int) -> None:
        super().__init__(*pack.slot.part(start, size))
        self.pack = pack


class Pack:
    """A slot full of pieces: free again once it is closed and all of them were given back."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.used = 0
        self._held = 1  # by who fills it
        self._lock = threading.Lock()

    def add(self, data: memoryview) -> PackedSlot:
        """Copy a cell into it."""
        piece = PackedSlot(self, self.used, len(data))
        piece.view()[:] = data
        self.used += len(data)
        with self._lock:
            self._held += 1
        return piece

    def drop(self) -> bool:
        """Give one hold up; whether it was the last."""
        with self._lock:
            self._held -= 1
            return self._held == 0


class Packer:
    """Puts small cells together; one for each thread that scans."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._pack: Pack | None = None

    def take(self, slot: Slot, size: int) -> PackedSlot:
        """A piece that holds the first ``size`` bytes of ``slot``, which stays the caller's."""
        if self._pack is None or self._pack.used + size > CELL_BYTES:
            self.close()
            self._pack = Pack(self._staging.acquire())
        return self._pack.add(slot.view(0, size))

    def close(self) -> None:
        """No more pieces."""
        pack, self._pack = self._pack, None
        if pack is not None and pack.drop():
            self._staging.release(pack.slot)


class Staging:
    """At most ``limit`` bytes of slots; whoever finds none waits.

    Args:
        limit: Bytes.
        threads: How many threads scan: each holds two slots (one it reads into, one that it packs)
            while it waits for another, so that there must be more than these, whatever the limit.

    Memory is taken in arenas of 32 slots, when first needed, and kept for reuse until ``close``.
    """

    def __init__(self, limit: int, threads: int = 1) -> None:
        self._least = 3 * threads + 5
        self.capacity = max(self._least, limit // SLOT_BYTES)
        self._free: list[Slot] = []
        self._made = 0
        self._abandoned: BaseException | None = None
        self._change = threading.Condition()
        #: Called before anybody waits for a slot: whoever holds slots back should let them go.
        self.when_empty: Callable[[], None] = lambda: None

    @property
    def available(self) -> int:
        """Slots that can be had without waiting."""
        return len(self._free) + self.capacity - self._made

    @property
    def bytes(self) -> int:
        """Bytes of memory taken so far."""
        return self._made * SLOT_BYTES

    def reserve(self, slots: int) -> None:
        """Fault in memory for ``slots`` free slots (as far as the limit goes), so that the window
        does not pay for it.
        """
        while len(self._free) < slots and self._made < self.capacity:
            with self._change:
                self._grow()

    @contextmanager
    def growing(self, slots: int) -> Iterator[None]:
        """Go on reserving up to ``slots`` while something else is waited for."""
        over = threading.Event()

        def grow() -> None:
            while (
                not over.is_set()
                and len(self._free) < min(slots, self.capacity)
                and self._made < self.capacity
            ):
                with self._change:
                    self._grow()

        thread = threading.Thread(target=grow, name="staging", daemon=True)
        thread.start()
        try:
            yield
        finally:
            over.set()
            thread.join()

    def _grow(self) -> None:
        count = min(_ARENA_SLOTS, self.capacity - self._made)
        arena = HugeBuffer(count * SLOT_BYTES)
        self._made += count
        starts = range(0, count * SLOT_BYTES, SLOT_BYTES)
        self._free.extend(
            Slot(arena.view(at, at + SLOT_BYTES), arena.address + at + PAGE, CELL_BYTES)
            for at in starts
        )
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
                self.when_empty()
                self._change.wait(1.0)

    def release(self, slot: Slot) -> None:
        """Give a slot back."""
        if isinstance(slot, PackedSlot):
            if not slot.pack.drop():
                return
            slot = slot.pack.slot
        self._free.append(slot)
        if self._made >= self.capacity and len(self._free) <= self._least:
            with self._change:
                self._change.notify()

    @contextmanager
    def limited(self, limit: int) -> Iterator[None]:
        """Take no more than ``limit`` bytes of memory meanwhile: while the job runs, waiting costs
        nobody anything.
        """
        whole, self.capacity = (
            self.capacity,
            min(self.capacity, max(self._least, limit // SLOT_BYTES)),
        )
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
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._free.clear()
