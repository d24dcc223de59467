"""Staging: bounded memory in which cells wait between being read and being stored. A slot has one
owner at a time.

A slot has room for a whole cell. Many mappings are smaller than that, so small cells share a slot
(`Packer`). Staging then takes about as many bytes as it holds, and a tree of thousands of small
mappings neither spills nor waits for memory to be faulted in.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

from icecore.host.kernel.memory import HugeBuffer
from icecore.sizes import BITMAP_BYTES, CELL_BYTES, PAGE

#: A slot is a page that ends in the cell's bitmap, followed by the cell's bytes, so that both are
#: contiguous for fingerprinting.
SLOT_BYTES = PAGE + CELL_BYTES
_ARENA_SLOTS = 32
#: Cells up to this many bytes share slots: copying them costs less than the memory that they would
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
        """Return the arguments of a slot within this one's data. It has no bitmap of its own."""
        return self._whole[start : start + PAGE + size], self.address + start, size

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the data from ``start`` to ``stop``."""
        return self._whole[PAGE + start : SLOT_BYTES if stop is None else PAGE + stop]

    def set_bitmap(self, bitmap: memoryview) -> None:
        """Put the cell's page bitmap before its data."""
        self._whole[PAGE - BITMAP_BYTES : PAGE] = bitmap

    def hashed(self, size: int) -> memoryview:
        """Return the bitmap and the first ``size`` bytes of data, which are fingerprinted together."""
        return self._whole[PAGE - BITMAP_BYTES : PAGE + size]


class PackedSlot(Slot):
    """A small cell in a slot that it shares with others; it is released like any slot."""

    __slots__ = ("pack",)

    def __init__(self, pack: Pack, start: int, size: int) -> None:
        super().__init__(*pack.slot.part(start, size))
        self.pack = pack


class ForeignSlot(Slot):
    """A cell that waits to be stored outside staging, elsewhere in this process's memory.

    Args:
        memory: The cell's bytes.
        address: Their address.
        over: Called when the slot is released.
    """

    __slots__ = ("over",)

    def __init__(self, memory: memoryview, address: int, over: Callable[[], None]) -> None:
        super().__init__(memory, address, len(memory))
        self.over = over

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the data from ``start`` to ``stop``."""
        return self._whole[start:stop]


class Pack:
    """A slot full of small cells, free again once it is closed and all of them are released."""

    def __init__(self, slot: Slot) -> None:
        self.slot = slot
        self.used = 0
        self._held = 1  # by the packer
        self._lock = threading.Lock()

    def add(self, data: memoryview) -> PackedSlot:
        """Copy a cell into the slot."""
        piece = PackedSlot(self, self.used, len(data))
        piece.view()[:] = data
        self.used += len(data)
        with self._lock:
            self._held += 1
        return piece

    def drop(self) -> bool:
        """Release one hold and return whether it was the last."""
        with self._lock:
            self._held -= 1
            return self._held == 0


class Packer:
    """Puts small cells together; each scan thread has one."""

    def __init__(self, staging: Staging) -> None:
        self._staging = staging
        self._pack: Pack | None = None

    def take(self, slot: Slot, size: int) -> PackedSlot:
        """Return a packed copy of the first ``size`` bytes of ``slot``; the caller keeps ``slot``."""
        if self._pack is None or self._pack.used + size > CELL_BYTES:
            self.close()
            self._pack = Pack(self._staging.acquire())
        return self._pack.add(slot.view(0, size))

    def close(self) -> None:
        """Close the current pack."""
        pack, self._pack = self._pack, None
        if pack is not None and pack.drop():
            self._staging.release(pack.slot)


class Staging:
    """At most ``limit`` bytes of slots; a thread that finds none waits.

    Memory is allocated in arenas of 32 slots, when first needed, and kept for reuse until the end.

    Args:
        limit: Bytes.
        threads: Number of scan threads. Each holds two slots (one to read into, one to pack) while
            it waits for another, so there are always more slots than these, whatever the limit.
    """

    def __init__(self, limit: int, threads: int = 1) -> None:
        self._least = 3 * threads + 5
        self.capacity = max(self._least, limit // SLOT_BYTES)
        self._free: list[Slot] = []
        self._made = 0
        self._abandoned: BaseException | None = None
        self._change = threading.Condition()
        #: Called before a thread waits for a slot, so that slots that are held back are released.
        self.when_empty: Callable[[], None] = lambda: None

    @property
    def available(self) -> int:
        """Slots that are available without waiting."""
        return len(self._free) + self.capacity - self._made

    @property
    def bytes(self) -> int:
        """Bytes of memory allocated so far."""
        return self._made * SLOT_BYTES

    def reserve(self, slots: int, pause: Callable[[], None] = lambda: None) -> None:
        """Fault in memory for ``slots`` free slots, within the limit, so that the window does not pay
        for it.

        Args:
            pause: Called after each arena (`CpuBudget.pause`). In a virtual machine that returns
                free memory to its host, the first touch of a page costs as much as storing it.
        """
        while len(self._free) < slots and self._made < self.capacity:
            with self._change:
                self._grow()
            pause()

    @contextmanager
    def growing(self, slots: int) -> Iterator[None]:
        """Reserve up to ``slots`` free slots in the background until the context is left."""
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
        """Wait for a free slot and return it. It holds arbitrary bytes.

        Raises:
            The reason for which the dump was abandoned.
        """
        try:
            return self._free.pop()  # list.pop is atomic, so the common path needs no lock
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
        if isinstance(slot, ForeignSlot):
            slot.over()
            return
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
        """Allocate no more than ``limit`` bytes until the context is left. While the job runs, waiting
        for slots does it no harm.
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
        """Fail every thread that waits for a slot, with ``why``."""
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
