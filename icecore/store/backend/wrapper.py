"""The base of wrappers: back ends around back ends. Each adds one property and leaves the rest to
what it wraps; the contract of Backend holds for any nesting.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence

from icecore.store.backend.base import Backend, Buffer, Draft, Foreign, ObjectInfo


class Wrapper(Backend):
    """Passes every call on to ``inner``; subclasses override what they change."""

    def __init__(self, inner: Backend) -> None:
        self.inner = inner
        self.read_size = inner.read_size
        self.direct = inner.direct
        self.drafts = inner.drafts
        self.where = inner.where
        self.known_as = inner.known_as
        self.replicas = inner.replicas

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        await self.inner.create(name, parts)

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        return await self.inner.get(name, limit=limit)

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        await self.inner.get_into(name, offset, out)

    async def size(self, name: str) -> int:
        return await self.inner.size(name)

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        async for info in self.inner.list(prefix):
            yield info

    async def foreign(self) -> Sequence[Foreign]:
        return await self.inner.foreign()

    async def delete(self, name: str) -> None:
        await self.inner.delete(name)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self.inner.delete_many(names)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        if not self.direct:
            super().read_into(name, offset, out)
        self.inner.read_into(name, offset, out)

    def suspect(self, error: Exception) -> None:
        self.inner.suspect(error)

    def draft(self, name: str) -> Draft:
        return self.inner.draft(name) if self.drafts else super().draft(name)

    async def keep_reserve(self) -> bool:
        return await self.inner.keep_reserve()

    async def give_up_reserve(self, leave: int) -> bool:
        return await self.inner.give_up_reserve(leave)

    async def sweep(self, age_seconds: float) -> int:
        return await self.inner.sweep(age_seconds)

    async def close(self) -> None:
        await self.inner.close()
