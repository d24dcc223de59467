"""Lays stored chunks out in new shards, for code that moves chunks. One piece is stored while the
next one is filled; nothing more is in flight.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Coroutine, Sequence
from types import TracebackType
from typing import Any, Self

import numpy as np

from icecore.store.format import codec
from icecore.store.format.cell import Records
from icecore.store.format.cipher import overhead
from icecore.store.format.names import random_id
from icecore.store.format.rows import Place
from icecore.store.format.shard import EncodedChunk, ShardBuilder, ShardTable, place_chunk
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session
from icecore.store.log.tables import index_entries
from icecore.store.runtime.pool import huge_buffer

#: Pieces of this many bytes are appended to a draft.
_APPENDED_BYTES = 4 << 20


class _Filling(ABC):
    """A shard being filled."""

    table: ShardTable

    @abstractmethod
    def add(self, one: EncodedChunk, stored: int) -> int:
        """Add a chunk that takes ``stored`` bytes, encrypted or not; return its offset."""

    def due(self) -> Coroutine[Any, Any, object] | None:
        """Return work that is due before the shard is full, if any."""
        return None

    @abstractmethod
    async def store(self) -> None:
        """Publish it."""

    def discard(self) -> None:
        """Discard what is not published. May be called more than once."""
        return None


class _Buffered(_Filling):
    """A shard in memory, created in one call."""

    def __init__(self, repository: StoredRepository, session: Session, room: memoryview) -> None:
        self.room = room
        self.table = self._builder = ShardBuilder(random_id(), room)
        self._keys = repository.keys
        self._session = session

    def add(self, one: EncodedChunk, stored: int) -> int:
        offset, room = self._builder.reserve(one.chunk, one.bitmap, one.base, one.number, stored)
        place_chunk(self._keys.chunk, self._builder.name, offset, one.chunk, one.parts, room)
        return offset

    async def store(self) -> None:
        await self._session.put_named(
            "shard", self._builder.name, self._builder.finish(self._keys.shard)
        )


class _Drafted(_Filling):
    """A shard in a draft, to which pieces are appended as they come: their bytes are not copied
    before, and no shard is in memory.
    """

    def __init__(self, repository: StoredRepository, session: Session, limit: int) -> None:
        self.table = ShardTable(random_id(), limit)
        self._keys = repository.keys
        self._draft = session.draft("shard", self.table.name)
        self._pieces: list[tuple[int, EncodedChunk, int]] = []
        self._held = 0

    def add(self, one: EncodedChunk, stored: int) -> int:
        offset = self.table.add(one.chunk, one.bitmap, one.base, one.number, stored)
        self._pieces.append((offset, one, stored))
        self._held += stored
        return offset

    def due(self) -> Coroutine[Any, Any, object] | None:
        return self._write() if self._held >= _APPENDED_BYTES else None

    async def _write(self, footer: bytes = b"") -> None:
        pieces, self._pieces, self._held = self._pieces, [], 0
        await asyncio.to_thread(self._append, pieces, footer)

    def _append(self, pieces: Sequence[tuple[int, EncodedChunk, int]], footer: bytes) -> None:
        key, written = self._keys.chunk, list[codec.Buffer]()
        for offset, one, stored in pieces:
            if overhead(key):
                room = memoryview(bytearray(stored))
                place_chunk(key, self.table.name, offset, one.chunk, one.parts, room)
                written.append(room)
            else:
                written += one.parts
        self._draft.append([*written, footer])

    async def store(self) -> None:
        await self._write(self.table.footer(self._keys.shard))
        await self._draft.publish()

    def discard(self) -> None:
        self._draft.discard()


class ShardWriter:
    """Lays stored chunks out in new shards of one session.

    An async context manager: on exit nothing is in flight any more, so that the session can delete
    what it stored.

    Attributes:
        bytes: Stored bytes so far.
    """

    def __init__(self, repository: StoredRepository, session: Session) -> None:
        self.bytes = 0
        self._repository = repository
        self._session = session
        self._filling: _Filling | None = None
        #: The shard of which a piece is being stored, and the task that does so.
        self._storing: tuple[_Filling, asyncio.Task[object]] | None = None
        #: Reused: the first touch of memory takes longer than copying.
        self._spare: list[memoryview] = []
        self._tables: list[tuple[bytes, Records]] = []

    async def put(
        self, chunk: bytes, bitmap: bytes, base: bytes, number: int, parts: Sequence[codec.Buffer]
    ) -> Place:
        """Store a chunk's stored form, decrypted, as its ciphertext differs in its new place.

        Args:
            chunk: Its id.
            bitmap: Its data bitmap.
            base: Its base's id, if ``number`` is a delta's codec.
            parts: Its bytes; they must not change before ``flush``.
        """
        plain = sum(len(part) for part in parts)
        length = plain + overhead(self._repository.keys.chunk)
        if self._filling is None or not self._filling.table.fits(length):
            await self._close()
            self._filling = await self._begin(
                max(self._repository.config.parameters.shard_bytes, length)
            )
        filling = self._filling
        offset = filling.add(EncodedChunk(chunk, bitmap, base, number, parts, plain), length)
        work = filling.due()
        if work is not None:
            await self._start(filling, work)
        self.bytes += length
        return Place(filling.table.name, offset, length, number)

    async def flush(self) -> None:
        """Store the shard being filled, and wait until all shards are stored."""
        await self._close()
        await self._settle()

    def entries(self) -> Records | None:
        """Return index entries of the full chunks that were stored."""
        made = [index_entries(shard, table) for shard, table in self._tables]
        return np.concatenate(made) if made else None

    async def _begin(self, room: int) -> _Filling:
        if self._repository.backend.drafts:
            return await asyncio.to_thread(_Drafted, self._repository, self._session, room)
        buffer = self._spare.pop() if self._spare else memoryview(b"")
        return _Buffered(
            self._repository,
            self._session,
            (buffer if len(buffer) >= room else huge_buffer(room))[:room],
        )

    async def _close(self) -> None:
        """Start storing the shard being filled."""
        filling = self._filling
        if filling is not None:
            await self._start(filling, filling.store())
            self._filling = None
            self._tables.append((filling.table.name, filling.table.entries()))

    async def _start(self, filling: _Filling, work: Coroutine[Any, Any, object]) -> None:
        """Start ``work`` once the previous work has finished."""
        try:
            await self._settle()
        except BaseException:
            work.close()
            raise
        self._storing = filling, asyncio.create_task(work)

    async def _settle(self) -> None:
        """Wait for the work in flight; raise its error."""
        if self._storing is not None:
            filling, task = self._storing
            await task
            self._storing = None
            if isinstance(filling, _Buffered):
                self._spare.append(filling.room)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._storing is not None:
            filling, task = self._storing
            await asyncio.gather(task, return_exceptions=True)
            filling.discard()
        if self._filling is not None:
            self._filling.discard()
