"""How placers read the ranges of a batch; rule: what is read is what is needed next, so that it is decoded while it is in the processor's cache."""

from __future__ import annotations

from collections.abc import Sequence

from icecore.restorer.plan import Read
from icecore.store.local import LocalBackend
from icecore.store.names import object_name


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
        """The buffer, read up to ``position`` at least.

        Raises:
            StoreError, Damaged: It cannot be read.
        """
        while self._read is not None and self._there < position:
            stop = min(position, self._read.at + self._read.length)
            self._next(self._stored[self._there : stop])
        return self._stored

    def straight(self, start: int, to: memoryview) -> bool:
        """Read what comes next to where it belongs instead; it is missing in the buffer then.

        Returns:
            Whether that was possible: it begins at ``start``, and lies in one range.

        Raises:
            As `until`.
        """
        if self._read is None or start != self._there or start + len(to) > self._read.at + self._read.length:
            return False
        self._next(to)
        return True

    def _next(self, to: memoryview) -> None:
        assert self._read is not None
        shard, offset, length, at = self._read
        self._backend.read_into(object_name("shard", shard), offset + self._there - at, to)
        self._there += len(to)
        if self._there == at + length:
            self._read = next(self._left, None)
