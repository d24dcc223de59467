"""A back end that counts calls, failures, bytes and seconds of each operation. Counting changes
nothing, and a refusal is not a failure.
"""

from __future__ import annotations

import threading
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager

import msgspec
from msgspec.structs import replace

from icecore.errors import ObjectExists, ObjectMissing
from icecore.events import Event, Sink, discard
from icecore.store.backend.base import Backend, Buffer, ObjectInfo, length_of
from icecore.store.backend.wrapper import Wrapper


class Counts(msgspec.Struct):
    """The outcome of the calls of one operation.

    Attributes:
        calls: Calls that have ended.
        failures: Calls that failed; that an object is missing or exists is an answer.
        bytes: Bytes of the successful calls.
        seconds: Total time of all calls; ``longest`` is that of the slowest.
        busiest: Most calls in flight at once.
    """

    calls: int = 0
    failures: int = 0
    bytes: int = 0
    seconds: float = 0.0
    longest: float = 0.0
    busiest: int = 0


class Metered(Wrapper):
    """Counts calls and passes them on; drafts count as ``create`` in wrappers further inside.

    Args:
        emit: Gets a ``store.requests`` event for each operation that was used, on close.
    """

    def __init__(self, inner: Backend, emit: Sink = discard) -> None:
        super().__init__(inner)
        self._emit = emit
        self._lock = threading.Lock()
        self._counts: dict[str, Counts] = {}
        self._running: dict[str, int] = {}

    def counts(self) -> dict[str, Counts]:
        """Return a copy of the counts so far, by operation."""
        with self._lock:
            return {operation: replace(counts) for operation, counts in self._counts.items()}

    @contextmanager
    def _counting(self, operation: str, size: int = 0) -> Iterator[list[int]]:
        """Count around a call; the call may correct its number of bytes, the list's element."""
        with self._lock:
            counts = self._counts.setdefault(operation, Counts())
            running = self._running[operation] = self._running.get(operation, 0) + 1
            counts.busiest = max(counts.busiest, running)
        moved, failed = [size], True
        began = time.perf_counter()
        try:
            yield moved
            failed = False
        except (ObjectExists, ObjectMissing):
            moved[0], failed = 0, False
            raise
        except GeneratorExit:
            failed = False  # the reader of a listing stopped early
            raise
        finally:
            seconds = time.perf_counter() - began
            with self._lock:
                self._running[operation] -= 1
                counts.calls += 1
                counts.failures += failed
                counts.bytes += 0 if failed else moved[0]
                counts.seconds += seconds
                counts.longest = max(counts.longest, seconds)

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        with self._counting("create", length_of(parts)):
            await self.inner.create(name, parts)

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        with self._counting("get") as moved:
            data = await self.inner.get(name, limit=limit)
            moved[0] = len(data)
        return data

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        with self._counting("get_into", out.nbytes):
            await self.inner.get_into(name, offset, out)

    async def size(self, name: str) -> int:
        with self._counting("size"):
            return await self.inner.size(name)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        with self._counting("list"):
            async for info in self.inner.list(prefix):
                yield info

    async def delete(self, name: str) -> None:
        with self._counting("delete"):
            await self.inner.delete(name)

    async def delete_many(self, names: Sequence[str]) -> None:
        with self._counting("delete_many"):
            await self.inner.delete_many(names)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        with self._counting("read_into", out.nbytes):
            self.inner.read_into(name, offset, out)

    async def close(self) -> None:
        await self.inner.close()
        for operation, counts in self.counts().items():
            self._emit(
                Event(
                    "store.requests",
                    {
                        "operation": operation,
                        "calls": counts.calls,
                        "failures": counts.failures,
                        "bytes": counts.bytes,
                        "seconds": counts.seconds,
                        "longest": counts.longest,
                        "busiest": counts.busiest,
                    },
                )
            )


def meters_of(backend: Backend) -> list[Metered]:
    """Return the counters within a back end, those of its replicas too; each once."""
    found: dict[int, Metered] = {}
    todo, seen = [backend], set[int]()
    while todo:
        one = todo.pop()
        if id(one) in seen:
            continue
        seen.add(id(one))
        if isinstance(one, Metered):
            found[id(one)] = one
        if isinstance(one, Wrapper):
            todo.append(one.inner)
        todo += one.replicas
    return list(found.values())
