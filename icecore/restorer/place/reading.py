"""Reads the ranges of a batch for a placer, each part just before it is needed, so that it is
decoded while it is in the processor's cache.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Protocol, TypeVar

import numpy as np

from icecore.host.kernel.memory import address_of
from icecore.restorer.plan.memory import Read
from icecore.sizes import CELL_BYTES
from icecore.store.backend.local import LocalBackend
from icecore.store.format import codec
from icecore.store.format.names import object_name
from icecore.store.runtime.pool import Scratch
from icecore.store.snapshot.decoder import ChunkDecoder


class _Stored(Protocol):
    @property
    def start(self) -> int: ...
    @property
    def base_start(self) -> int: ...
    @property
    def base_stop(self) -> int: ...


_Cell = TypeVar("_Cell", bound=_Stored)


def in_order(cells: Sequence[_Cell]) -> Iterator[tuple[int, _Cell, bool]]:
    """Yield (number, cell, whether no other cell needs its stored bytes) in the order of their
    stored bytes.
    """
    needed = Counter(cell.start for cell in cells)
    needed.update(cell.base_start for cell in cells if cell.base_stop > cell.base_start)
    for number, cell in sorted(enumerate(cells), key=lambda item: item[1].start):
        yield number, cell, needed[cell.start] == 1


class Reading:
    """Reads ranges as they are needed.

    Args:
        reads: Ascending by where they go in the buffer.
        stored: The buffer.
    """

    def __init__(self, backend: LocalBackend, reads: Sequence[Read], stored: memoryview) -> None:
        self._backend = backend
        self._left = iter(reads)
        self._stored = stored
        self._read: Read | None = next(self._left, None)
        self._there = 0

    def until(self, position: int) -> memoryview:
        """Read up to ``position`` at least; return the buffer.

        Raises:
            StoreError, Damaged: It cannot be read.
        """
        while self._read is not None and self._there < position:
            stop = min(position, self._read.at + self._read.length)
            self._next(self._stored[self._there : stop])
        return self._stored

    def straight(self, start: int, to: memoryview) -> bool:
        """Read what comes next to ``to`` and not to the buffer.

        Returns:
            Whether that was possible: it begins at ``start`` and lies in one range.

        Raises:
            As `until`.
        """
        if (
            self._read is None
            or start != self._there
            or start + len(to) > self._read.at + self._read.length
        ):
            return False
        self._next(to)
        return True

    def whole_cell(
        self,
        bounds: tuple[int, int, int, int],
        record: np.void,
        decoder: ChunkDecoder,
        to: memoryview,
        room: memoryview,
        scratch: Scratch,
        *,
        alone: bool,
        verified: bool = True,
    ) -> None:
        """Decode a complete cell to ``to``, without a copy where possible.

        Args:
            bounds: Of its stored bytes, and of its base's, in the buffer.
            to, room: `CELL_BYTES` each.
            alone: No other cell needs its stored bytes.
            verified: Whether to verify its bytes.

        Raises:
            As `until`; Damaged: It is not what was written.
        """
        start, stop, base_start, base_stop = bounds
        raw = int(record["place"]["codec"]) == codec.RAW and not decoder.encrypted
        if raw and alone and stop - start == CELL_BYTES and self.straight(start, to):
            if verified:
                decoder.decode(record, to, None, room, scratch)
            return
        stored = self.until(max(stop, base_stop))
        base = stored[base_start:base_stop] if base_stop > base_start else None
        data = decoder.decode(record, stored[start:stop], base, to, scratch, verified=verified)
        if address_of(data) != address_of(to):  # it was stored raw
            to[:] = data

    def _next(self, to: memoryview) -> None:
        assert self._read is not None
        shard, offset, length, at = self._read
        self._backend.read_into(object_name("shard", shard), offset + self._there - at, to)
        self._there += len(to)
        if self._there == at + length:
            self._read = next(self._left, None)
