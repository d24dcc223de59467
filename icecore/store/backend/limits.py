"""A back end that bounds the requests and bytes in flight; first come, first served."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from icecore.errors import UsageError
from icecore.store.backend.base import Backend, Buffer, length_of
from icecore.store.backend.wrapper import Wrapper

#: What a read of an object of unknown size counts as; whole reads are of small objects.
_WHOLE_BYTES = 1 << 20


class Limited(Wrapper):
    """Bounds what is in flight. A request of more bytes than the budget is sent when nothing else
    is in flight. Listings do not count: their reader may send requests before the end. Only whole
    objects and reads on the event loop are bounded, as nothing bounds threads.

    Args:
        requests: Most requests at once.
        budget: Most bytes at once.
    """

    def __init__(self, inner: Backend, *, requests: int, budget: int) -> None:
        super().__init__(inner)
        if requests < 1 or budget < 1:
            raise UsageError(
                f"{requests} requests and {budget} bytes at once allow no request",
                cure="give at least 1 of each",
            )
        self.direct = False
        self.drafts = False
        self._free_requests = requests
        self._free_bytes = self._budget = budget
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    @asynccontextmanager
    async def _sending(self, size: int) -> AsyncIterator[None]:
        cost = min(size, self._budget)
        await self._enter(cost)
        try:
            yield
        finally:
            self._leave(cost)

    async def _enter(self, cost: int) -> None:
        if not self._waiting and self._fits(cost):
            self._take(cost)
            return
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.append((cost, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if turn.cancelled():
                self._waiting.remove((cost, turn))
                self._admit()  # those behind it may fit
            else:
                self._leave(cost)
            raise

    def _fits(self, cost: int) -> bool:
        return self._free_requests > 0 and cost <= self._free_bytes

    def _take(self, cost: int) -> None:
        self._free_requests -= 1
        self._free_bytes -= cost

    def _leave(self, cost: int) -> None:
        self._free_requests += 1
        self._free_bytes += cost
        self._admit()

    def _admit(self) -> None:
        while self._waiting and self._fits(self._waiting[0][0]):
            cost, turn = self._waiting.popleft()
            if turn.cancelled():
                self._waiting.appendleft((cost, turn))  # its own task removes it
                return
            self._take(cost)
            turn.set_result(None)

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        async with self._sending(length_of(parts)):
            await self.inner.create(name, parts)

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        async with self._sending(min(limit, _WHOLE_BYTES)):
            return await self.inner.get(name, limit=limit)

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        async with self._sending(out.nbytes):
            await self.inner.get_into(name, offset, out)

    async def size(self, name: str) -> int:
        async with self._sending(0):
            return await self.inner.size(name)

    async def delete(self, name: str) -> None:
        async with self._sending(0):
            await self.inner.delete(name)

    async def delete_many(self, names: Sequence[str]) -> None:
        async with self._sending(0):
            await self.inner.delete_many(names)
