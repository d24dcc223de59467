"""Reused memory: a bounded pool of shard buffers, and the scratch of each worker thread. Nothing
large is allocated while bytes move.

The first touch of new 4 KiB pages costs more than a codec, hence huge pages and reused buffers.
"""

from __future__ import annotations

import mmap
import threading
from collections.abc import Callable

from icecore.errors import StoreError
from icecore.sizes import CELL_BYTES, HUGE_PAGE
from icecore.store.format.codec import MAX_OVERHEAD, Encoder

_STORED_ROOM = CELL_BYTES + mmap.PAGESIZE
_STORED_BYTES = CELL_BYTES + MAX_OVERHEAD

#: The longest sample of a trial.
SAMPLE_BYTES = 64 << 10


def huge_buffer(length: int) -> memoryview:
    """Return anonymous memory of at least ``length`` bytes, advised to use huge pages; zeroed, and
    allocated on first touch.
    """
    rounded = -(-length // HUGE_PAGE) * HUGE_PAGE
    region = mmap.mmap(-1, rounded, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    try:
        region.madvise(mmap.MADV_HUGEPAGE)
    except OSError:
        pass  # a kernel without transparent huge pages: slower, not wrong
    return memoryview(region)[:length]


class BufferPool:
    """At most ``count`` buffers of ``length`` bytes, created when first needed and reused.
    Thread-safe.
    """

    def __init__(self, length: int, count: int) -> None:
        self.length = length
        self.count = count
        self._free: list[memoryview] = []
        self._made = 0
        self._change = threading.Condition()

    def acquire(self, check: Callable[[], None], timeout: float) -> memoryview:
        """Return a buffer; wait while all are in use.

        Args:
            check: Called now and then while waiting; raises when waiting has become pointless.
            timeout: Seconds after which to give up.

        Raises:
            StoreError: No buffer was released in time.
        """
        waited = 0.0
        with self._change:
            while True:
                check()
                if self._free:
                    return self._free.pop()
                if self._made < self.count:
                    self._made += 1
                    return huge_buffer(self.length)
                if waited >= timeout:
                    raise StoreError(
                        f"no upload finished for {timeout:.0f} s",
                        cure="check that the storage still answers",
                    )
                self._change.wait(0.5)
                waited += 0.5

    def release(self, buffer: memoryview) -> None:
        """Release a buffer; its bytes may be overwritten at once."""
        with self._change:
            self._free.append(buffer)
            self._change.notify()


class Scratch:
    """What one thread needs to decode or encode one cell at a time: about 7 MiB, and 2 MiB more for
    an encrypted repository. Not thread-safe.

    Attributes:
        stored, base_stored: Stored bytes of one chunk, and of its base.
        plain: One of them decrypted.
        base: A base's decoded bytes.
        aligned: The base's bytes for the chunk's pages.
        own: The changed pages' own bytes.
        residual: Their xor with the base's.
        sample: Room for decoding a trial's sample.
        encoder: Encoders, which are expensive to create.
    """

    def __init__(self) -> None:
        rooms = 3 * _STORED_ROOM
        memory = huge_buffer(rooms + 4 * CELL_BYTES + SAMPLE_BYTES)
        self.stored, self.base_stored, self.plain = (
            memory[at : at + _STORED_BYTES] for at in range(0, rooms, _STORED_ROOM)
        )
        self.base, self.aligned, self.own, self.residual = (
            memory[at : at + CELL_BYTES] for at in range(rooms, rooms + 4 * CELL_BYTES, CELL_BYTES)
        )
        self.sample = memory[rooms + 4 * CELL_BYTES :]
        self.encoder = Encoder()


class ScratchPerThread:
    """Gives each thread a :class:`Scratch` of its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self) -> Scratch:
        scratch: Scratch | None = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = Scratch()
        return scratch
