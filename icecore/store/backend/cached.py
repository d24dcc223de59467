"""A back end that caches reads on local disk, for all processes of the node. Only objects that
never change are cached, and only data that verifies is used.

It reads through: what is missing is read from the storage in as few ranges as possible, returned,
and kept in whole blocks of 1 MiB.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import TypeVar

from blake3 import blake3

from icecore.errors import Damaged
from icecore.events import Event, Sink, discard
from icecore.store.backend.base import Backend, check_name
from icecore.store.backend.blocks import Blocks
from icecore.store.backend.wrapper import Wrapper
from icecore.store.format.names import FILTERS, HINTS, parse_name
from icecore.store.runtime.parallel import each

T = TypeVar("T")

_BLOCK = 1 << 20
#: Larger objects that are read whole are not cached: they are read once.
_WHOLE_LIMIT = 64 << 20
_SIZES = 10_000
_THREADS = 4


def never_changes(name: str) -> bool:
    """Return whether the object's name is drawn at random for one content and never reused."""
    return parse_name(name) is not None or name.startswith((HINTS, FILTERS))


class Cached(Wrapper):
    """Reads objects that never change through ``blocks``. An object that another node deleted may
    still be found here.

    Args:
        keep: Decides by its name whether an object never changes.
        emit: Gets one ``store.cache`` event on close.
    """

    def __init__(
        self,
        inner: Backend,
        blocks: Blocks,
        *,
        keep: Callable[[str], bool] = never_changes,
        emit: Sink = discard,
    ) -> None:
        super().__init__(inner)
        self.direct = False
        self.hits = self.misses = 0
        self._blocks = blocks
        self._keep = keep
        self._emit = emit
        self._sizes: dict[str, int] = {}
        self._arriving: dict[tuple[str, int], asyncio.Future[memoryview | None]] = {}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="icecore-cache")

    @property
    def source(self) -> Backend:
        return self.inner.source

    def _key(self, name: str) -> str:
        return blake3(
            f"{self.where}\0{check_name(name)}".encode("utf-8", "surrogateescape")
        ).hexdigest()[:40]

    async def _run(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if not view.nbytes or not self._keep(name):
            await self.inner.get_into(name, offset, out)
            return
        key, end = self._key(name), offset + view.nbytes
        missing, size = await self._run(partial(self._from_disk, key, offset, view))
        if size is None:
            size = self._sizes.get(key)
        if size is None:
            size = await self.inner.size(name)
            if len(self._sizes) >= _SIZES:
                self._sizes.clear()
            self._sizes[key] = size
        if end > size:
            raise Damaged(
                "object", name, f"it ends {end - max(size, offset)} bytes before offset {end}"
            )
        absent = (
            (max(offset, number * _BLOCK), min(end, (number + 1) * _BLOCK)) for number in missing
        )
        self.hits += view.nbytes - sum(last - first for first, last in absent)
        while missing:
            missing = await self._fetch(name, key, missing, size, offset, view)

    async def _fetch(
        self, name: str, key: str, missing: list[int], size: int, offset: int, out: memoryview
    ) -> list[int]:
        """Fill ``missing`` blocks into ``out``: wait for those that another task is reading, and
        read the others, including those that the other task failed to read.
        """
        others = {
            number: self._arriving[key, number]
            for number in missing
            if (key, number) in self._arriving
        }
        own = [number for number in missing if number not in others]
        futures = {number: asyncio.get_running_loop().create_future() for number in own}
        self._arriving |= {(key, number): future for number, future in futures.items()}
        failed: list[int] = []

        async def read(run: tuple[int, int]) -> None:
            first, count = run
            data = memoryview(bytearray(min(size, (first + count) * _BLOCK) - first * _BLOCK))
            self.misses += data.nbytes
            await self.inner.get_into(name, first * _BLOCK, data)
            pieces = {
                number: data[(number - first) * _BLOCK :][:_BLOCK]
                for number in range(first, first + count)
            }
            for number, piece in pieces.items():
                _place(piece, number, offset, out)
                futures[number].set_result(piece)
            await self._run(partial(self._to_disk, key, pieces, size))

        try:
            runs = list(self._runs(own))
            await each(runs, read, at_once=max(1, len(runs)))
        finally:
            for number, future in futures.items():
                del self._arriving[key, number]
                if not future.done():
                    future.set_result(None)  # whoever waits for it reads it itself
        for number, arriving in others.items():
            piece = await asyncio.shield(arriving)
            if piece is None:
                failed.append(number)
            else:
                _place(piece, number, offset, out)
        return failed

    def _from_disk(self, key: str, offset: int, out: memoryview) -> tuple[list[int], int | None]:
        """Fill cached blocks into ``out``; return the missing blocks, and the object's size if a
        block told it.
        """
        missing, whole = [], None
        room = memoryview(bytearray(_BLOCK))
        for number in range(offset // _BLOCK, -(-(offset + out.nbytes) // _BLOCK)):
            found = self._blocks.read(key, number, room)
            if found is None:
                missing.append(number)
                continue
            length, whole = found
            _place(room[:length], number, offset, out)
        return missing, whole

    def _runs(self, numbers: list[int]) -> Iterator[tuple[int, int]]:
        """Yield adjacent blocks as first and count, each run no longer than one efficient read."""
        most = max(1, self.read_size // _BLOCK + 1)
        first, count = -1, 0
        for number in numbers:
            if count and number == first + count and count < most:
                count += 1
                continue
            if count:
                yield first, count
            first, count = number, 1
        if count:
            yield first, count

    def _to_disk(self, key: str, pieces: dict[int, memoryview], size: int) -> None:
        for number, piece in pieces.items():
            self._blocks.write(key, number, piece, size)

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        if not self._keep(name):
            return await self.inner.get(name, limit=limit)
        key = self._key(name)
        data = await self._run(partial(self._whole, key, name, limit))
        if data is None:
            data = await self.inner.get(name, limit=limit)
            self.misses += len(data)
            if len(data) <= _WHOLE_LIMIT:
                view = memoryview(data)
                pieces = {
                    number: view[number * _BLOCK :][:_BLOCK]
                    for number in range(max(1, -(-len(data) // _BLOCK)))
                }
                await self._run(partial(self._to_disk, key, pieces, len(data)))
        else:
            self.hits += len(data)
        return data

    def _whole(self, key: str, name: str, limit: int) -> bytes | None:
        """Return the object if all of it is cached."""
        room = memoryview(bytearray(_BLOCK))
        pieces: list[bytes] = []
        have, size = 0, 1
        while have < size or not pieces:
            found = self._blocks.read(key, len(pieces), room)
            if found is None:
                return None
            length, size = found
            if size > limit:
                raise Damaged(
                    "object", name, f"it has {size} bytes, more than the {limit} that it can have"
                )
            pieces.append(bytes(room[:length]))
            have += length
        return b"".join(pieces)

    async def delete(self, name: str) -> None:
        await self.inner.delete(name)
        await self._forget(name)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self.inner.delete_many(names)
        for name in names:
            await self._forget(name)

    async def _forget(self, name: str) -> None:
        if self._keep(name):
            key = self._key(name)
            self._sizes.pop(key, None)
            await self._run(partial(self._blocks.forget, key))

    async def close(self) -> None:
        await asyncio.to_thread(self._pool.shutdown)
        await self.inner.close()
        self._emit(Event("store.cache", {"hit_bytes": self.hits, "missed_bytes": self.misses}))


def _place(piece: memoryview, number: int, offset: int, out: memoryview) -> None:
    """Copy a block's part of ``out``, which begins at ``offset`` of the object."""
    start = number * _BLOCK
    begin, end = max(start, offset), min(start + piece.nbytes, offset + out.nbytes)
    if begin < end:
        out[begin - offset : end - offset] = piece[begin - start : end - start]
