"""A back end over the replicas of one repository: objects that they share are read from the nearest
replica that has them, all others from the repository itself.

Shards, node packs, manifests and hints have the same names and bytes in all replicas;
configuration, keys, log, pages, sessions and index belong to one replica each. All writes go to the
repository itself. If a replica fails, is slow or lacks an object, the next one is asked; a replica
that failed comes last for a while. The reader verifies the bytes, and can ask the other places
(``replicas``) for an object that proves damaged.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import TypeVar

from icecore.errors import Damaged, IcecoreError, ObjectMissing, StoreError
from icecore.events import Event, Sink, discard
from icecore.store.backend.base import Backend, Buffer, Draft, Foreign, ObjectInfo
from icecore.store.format.names import HINTS, PREFIX

T = TypeVar("T")

#: Objects that are the same in all replicas.
COMMON = (PREFIX["shard"], PREFIX["nodes"], PREFIX["manifest"], HINTS)
#: A read that takes this many times as long as others of its size, and at least this many seconds,
#: is also sent to the next replica.
_SLOW_TIMES = 4.0
_SLOW_LEAST_SECONDS = 0.25
_SLOW_FIRST_SECONDS = 2.0
_AVOID_SECONDS = 30.0


class ReplicaBackend(Backend):
    """One repository and its replicas.

    Args:
        own: The repository's own place: objects that are not shared are read here, and all writes
            go here.
        nearest: All places in the order in which to ask them, including ``own``.
        emit: Gets a ``store.failover`` event for each read that another place had to serve.
        hedge: Seconds after which a read is also sent to the next place; None: learned from
            earlier reads.
    """

    def __init__(
        self,
        own: Backend,
        nearest: Sequence[Backend],
        *,
        emit: Sink = discard,
        hedge: float | None = None,
    ) -> None:
        if own not in nearest:
            raise ValueError("the repository itself is one of the places")
        self.own = own
        self.replicas = tuple(nearest)
        self.where = own.where
        self.known_as = own.known_as
        self.direct = all(place.direct for place in nearest)
        self.folder = nearest[0].folder if self.direct else ""
        self.drafts = own.drafts
        self.read_size = max(place.read_size for place in nearest)
        self._emit = emit
        self._hedge = hedge
        #: Recent seconds per byte of a read, and the time until which each failed place is asked
        #: last.
        self._usual: float | None = None
        self._avoided: dict[int, float] = {}

    @property
    def source(self) -> Backend:
        """The repository's own place: a copy elsewhere does not make up for what it lacks."""
        return self.own.source

    def _order(self, name: str) -> list[Backend]:
        if not name.startswith(COMMON):
            return [self.own]
        now = time.monotonic()
        return sorted(self.replicas, key=lambda place: self._avoided.get(id(place), 0.0) > now)

    def _failed(self, place: Backend, name: str, error: Exception) -> None:
        if not isinstance(error, ObjectMissing):
            self._avoided[id(place)] = time.monotonic() + _AVOID_SECONDS
        self._emit(
            Event("store.failover", {"object": name, "place": place.where, "error": str(error)})
        )

    def suspect(self, error: Exception) -> None:
        name = error.name if isinstance(error, Damaged) else ""
        self._emit(
            Event("store.failover", {"object": name, "place": self.where, "error": str(error)})
        )

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        return await self._first(name, lambda place: place.get(name, limit=limit), None)

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        order = self._order(name)
        if len(order) == 1:
            await order[0].get_into(name, offset, out)
            return

        async def read(place: Backend) -> bytearray:
            # Into separate memory: an abandoned read may go on writing.
            room = bytearray(out.nbytes)
            await place.get_into(name, offset, memoryview(room))
            return room

        out.cast("B")[:] = await self._first(name, read, out.nbytes)

    async def size(self, name: str) -> int:
        return await self._first(name, lambda place: place.size(name), None)

    async def _first(
        self, name: str, read: Callable[[Backend], Awaitable[T]], size: int | None
    ) -> T:
        """Return the first answer from a place; ask the next one when a place fails or is slow."""
        waiting = self._order(name)
        if len(waiting) == 1:
            return await read(waiting[0])
        running: dict[asyncio.Future[T], Backend] = {}
        errors: list[Exception] = []
        began = time.monotonic()
        try:
            while True:
                if waiting:
                    place = waiting.pop(0)
                    running[asyncio.ensure_future(read(place))] = place
                if not running:
                    raise _worst(errors)
                patience = self._patience(size) if waiting else None
                done, _ = await asyncio.wait(
                    running, timeout=patience, return_when=asyncio.FIRST_COMPLETED
                )
                for task in done:
                    place = running.pop(task)
                    error = task.exception()
                    if error is None:
                        if size is not None:
                            self._learn((time.monotonic() - began) / max(size, 1 << 16))
                        return task.result()
                    if not isinstance(error, (StoreError, Damaged, OSError)):
                        raise error
                    self._failed(place, name, error)
                    errors.append(error)
        finally:
            for task in running:
                task.cancel()
            await asyncio.gather(*running, return_exceptions=True)

    def _patience(self, size: int | None) -> float:
        if self._hedge is not None:
            return self._hedge
        if self._usual is None or size is None:
            return _SLOW_FIRST_SECONDS
        return max(_SLOW_LEAST_SECONDS, _SLOW_TIMES * self._usual * max(size, 1 << 16))

    def _learn(self, seconds: float) -> None:
        self._usual = seconds if self._usual is None else 0.9 * self._usual + 0.1 * seconds

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        errors: list[Exception] = []
        for place in self._order(name):
            try:
                place.read_into(name, offset, out)
                return
            except (StoreError, Damaged) as error:
                self._failed(place, name, error)
                errors.append(error)
        raise _worst(errors)

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        await self.own.create(name, parts)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in self.own.list(prefix):
            yield info

    async def foreign(self) -> Sequence[Foreign]:
        return await self.own.foreign()

    async def delete(self, name: str) -> None:
        await self.own.delete(name)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self.own.delete_many(names)

    def draft(self, name: str) -> Draft:
        return self.own.draft(name)

    async def keep_reserve(self) -> bool:
        return await self.own.keep_reserve()

    async def give_up_reserve(self, leave: int) -> bool:
        return await self.own.give_up_reserve(leave)

    async def sweep(self, age_seconds: float) -> int:
        return await self.own.sweep(age_seconds)

    async def close(self) -> None:
        for place in self.replicas:
            await place.close()


def _worst(errors: Sequence[Exception]) -> Exception:
    """Return the most telling of the places' errors: first that one was unreachable (so a retry may
    help), then that one is damaged, then that it is missing everywhere.
    """
    for kind in (IcecoreError, Damaged):
        for error in errors:
            if (
                isinstance(error, kind)
                and not isinstance(error, ObjectMissing)
                and (kind is Damaged or not isinstance(error, Damaged))
            ):
                return error
    return errors[0]
