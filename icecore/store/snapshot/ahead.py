"""Reads ahead: chunks that are requested one by one (bases of deltas, a check) mostly lie in shards
in that order.

For remote storage and for threads that need one chunk at a time. What is read ahead is bounded and
optional: whatever is wrong with it, the chunk is read separately.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from collections import OrderedDict
from collections.abc import Coroutine
from typing import Any, TypeVar

from icecore.errors import IcecoreError
from icecore.store.backend.base import Backend

T = TypeVar("T")

_WINDOW = 4 << 20
#: Windows in flight or waiting ahead of the last read, and bytes kept behind it, as the reads of
#: several threads are not in order.
_AHEAD = 4
_BEHIND = 4 << 20
#: A read that begins within this many bytes of the furthest end follows it; this many in a row are
#: a sequence, until a read is far from it.
_NEAR = 2 << 20
_FAR = 16 << 20
_IN_A_ROW = 2
_OBJECTS = 4


class _Sequence:
    """Reads of one object: where the last one ended, how many followed each other, and the windows
    read ahead, by offset.
    """

    def __init__(self) -> None:
        self.end = 0
        self.count = 0
        self.next = 0
        self.size: int | None = None
        self.sizing: asyncio.Future[int] | None = None
        self.windows: OrderedDict[int, concurrent.futures.Future[memoryview]] = OrderedDict()

    def drop(self) -> None:
        for window in self.windows.values():
            window.cancel()
        self.windows.clear()


class ReadAhead:
    """Thread-safe; holds at most 80 MiB.

    Args:
        backend: The storage to read.
        loop: Its event loop, in another thread than the callers'.
    """

    def __init__(self, backend: Backend, loop: asyncio.AbstractEventLoop) -> None:
        self._backend = backend
        self._loop = loop
        self._lock = threading.Lock()
        self._sequences: OrderedDict[str, _Sequence] = OrderedDict()

    def fetch(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from an object; raise as ``Backend.get_into`` does."""
        with self._lock:
            sequence = self._sequences.pop(name, None) or _Sequence()
            self._sequences[name] = sequence
            while len(self._sequences) > _OBJECTS:
                self._sequences.popitem(last=False)[1].drop()
            windows = self._follow(name, sequence, offset, out.nbytes)
        if not windows or not self._filled(windows, offset, out):
            self._submit(self._backend.get_into(name, offset, out)).result()

    def _follow(
        self, name: str, sequence: _Sequence, offset: int, length: int
    ) -> list[tuple[int, concurrent.futures.Future[memoryview]]]:
        """Record a read and read ahead behind it; return the windows in which it lies."""
        if sequence.end and -_BEHIND <= offset - sequence.end <= _NEAR:
            sequence.count += 1
        elif not sequence.end or abs(offset - sequence.end) > _FAR:
            sequence.count = 0
            sequence.drop()
            sequence.end = 0
        found = [
            (start, window)
            for start, window in sequence.windows.items()
            if start < offset + length and offset < start + _WINDOW
        ]
        if sequence.count >= _IN_A_ROW:
            if not sequence.windows:
                sequence.next = max(sequence.end, offset + length)
            for start in [
                start for start in sequence.windows if start + _WINDOW + _BEHIND < offset
            ]:
                sequence.windows.pop(start).cancel()
            while sequence.next < offset + _AHEAD * _WINDOW and len(sequence.windows) <= _AHEAD:
                if sequence.size is not None and sequence.next >= sequence.size:
                    break
                sequence.windows[sequence.next] = self._submit(
                    self._window(name, sequence, sequence.next)
                )
                sequence.next += _WINDOW
        sequence.end = max(sequence.end, offset + length)
        return found

    async def _window(self, name: str, sequence: _Sequence, start: int) -> memoryview:
        if sequence.size is None:
            if sequence.sizing is None:
                sequence.sizing = asyncio.ensure_future(self._backend.size(name))
            sequence.size = await asyncio.shield(sequence.sizing)
        data = memoryview(bytearray(max(0, min(_WINDOW, sequence.size - start))))
        if data:
            await self._backend.get_into(name, start, data)
        return data

    def _filled(
        self,
        windows: list[tuple[int, concurrent.futures.Future[memoryview]]],
        offset: int,
        out: memoryview,
    ) -> bool:
        """Copy what lies in ``windows``; return whether that was everything."""
        filled = 0
        for start, window in windows:
            try:
                data = window.result()
            except (IcecoreError, concurrent.futures.CancelledError):
                return False
            begin, end = max(start, offset), min(start + data.nbytes, offset + out.nbytes)
            if begin < end:
                out[begin - offset : end - offset] = data[begin - start : end - start]
                filled += end - begin
        return filled == out.nbytes

    def _submit(self, work: Coroutine[Any, Any, T]) -> concurrent.futures.Future[T]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def close(self) -> None:
        """Cancel what is still being read."""
        with self._lock:
            for sequence in self._sequences.values():
                sequence.drop()
            self._sequences.clear()
