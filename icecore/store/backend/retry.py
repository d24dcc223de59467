"""A back end that retries transient failures, with exponential backoff and full jitter (Brooker,
"Exponential Backoff And Jitter", AWS Architecture Blog, 2015).

Creating stays idempotent, even when a reply is lost.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import TypeVar

import msgspec

from icecore.errors import Damaged, ObjectExists, ObjectMissing, StoreDenied, StoreError, StoreFull
from icecore.events import Event, Sink, discard
from icecore.store.backend.base import Backend, Buffer, ObjectInfo, length_of
from icecore.store.backend.wrapper import Wrapper

T = TypeVar("T")

_COMPARED_AT_ONCE = 8 << 20
_FINAL = (ObjectExists, ObjectMissing, StoreFull, StoreDenied)


class Patience(msgspec.Struct, frozen=True):
    """How often a request is sent, and the pauses in between.

    Attributes:
        attempts: Most requests, including the first.
        first: Upper bound in seconds of the first pause; it doubles for each further pause.
        longest: Upper bound in seconds of any pause.
    """

    attempts: int = 10
    first: float = 0.1
    longest: float = 5.0

    def pauses(self, draw: Callable[[float, float], float] = random.uniform) -> Iterator[float]:
        """Yield the pauses in seconds after the first failure, the second, …: each between 0 and
        its bound.
        """
        for number in range(self.attempts - 1):
            yield draw(0.0, min(self.longest, self.first * 2.0**number))


def may_pass(error: BaseException) -> bool:
    """Return whether the same request may succeed later: the store failed and did not refuse."""
    return isinstance(error, StoreError) and not isinstance(error, _FINAL)


class Retrying(Wrapper):
    """Retries failures that `may_pass`. Drafts are passed on as they are: a failed draft is gone.

    A create whose reply was lost may have taken effect. If the name then is taken, the object is
    read and compared: if it has these very bytes, it counts as created here. Two writers of the
    same bytes under one name would both be told that they won; all objects of a repository that
    writers can race for hold random identities.

    Args:
        emit: Gets a ``store.retry`` event for each failure that is not the last.
    """

    def __init__(
        self, inner: Backend, patience: Patience | None = None, emit: Sink = discard
    ) -> None:
        super().__init__(inner)
        self._patience = patience or Patience()
        self._emit = emit

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        pauses = self._patience.pauses()
        in_doubt: StoreError | None = None
        while True:
            try:
                return await self.inner.create(name, parts)
            except ObjectExists:
                if in_doubt is not None and await self._holds(name, parts):
                    return
                raise
            except (StoreFull, StoreDenied) as error:
                if in_doubt is None:
                    raise
                raise StoreError(
                    f"whether object {name} was created is unknown: {error.message}",
                    cure=error.cure,
                ) from error
            except StoreError as error:
                in_doubt = error
                await asyncio.sleep(self._pause("create", name, error, pauses))

    async def _holds(self, name: str, parts: Sequence[Buffer]) -> bool:
        """Return whether the object has exactly these bytes."""
        try:
            if await self.size(name) != length_of(parts):
                return False
            offset = 0
            for part in parts:
                view = memoryview(part).cast("B")
                for start in range(0, view.nbytes, _COMPARED_AT_ONCE):
                    ours = view[start : start + _COMPARED_AT_ONCE]
                    theirs = memoryview(bytearray(ours.nbytes))
                    await self.get_into(name, offset + start, theirs)
                    if theirs != ours:
                        return False
                offset += view.nbytes
        except (ObjectMissing, Damaged):
            return False  # another writer created it, and has deleted it again
        return True

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        return await self._again("get", name, lambda: self.inner.get(name, limit=limit))

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        await self._again("get_into", name, lambda: self.inner.get_into(name, offset, out))

    async def size(self, name: str) -> int:
        return await self._again("size", name, lambda: self.inner.size(name))

    async def delete(self, name: str) -> None:
        await self._again("delete", name, lambda: self.inner.delete(name))

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._again(
            "delete_many", names[0] if names else "", lambda: self.inner.delete_many(names)
        )

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        pauses = self._patience.pauses()
        last = ""
        while True:
            try:
                async for info in self.inner.list(prefix):
                    if (
                        info.name > last
                    ):  # names ascend, so a new listing resumes where the failed one ended
                        last = info.name
                        yield info
                return
            except StoreError as error:
                await asyncio.sleep(self._pause("list", prefix, error, pauses))

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        pauses = self._patience.pauses()
        while True:
            try:
                return self.inner.read_into(name, offset, out)
            except StoreError as error:
                time.sleep(self._pause("read_into", name, error, pauses))

    async def sweep(self, age_seconds: float) -> int:
        return await self._again("sweep", "", lambda: self.inner.sweep(age_seconds))

    async def _again(self, operation: str, name: str, call: Callable[[], Awaitable[T]]) -> T:
        pauses = self._patience.pauses()
        while True:
            try:
                return await call()
            except StoreError as error:
                await asyncio.sleep(self._pause(operation, name, error, pauses))

    def _pause(
        self, operation: str, name: str, error: StoreError, pauses: Iterator[float]
    ) -> float:
        """Return the seconds to wait before the next attempt; raise ``error`` if there is none."""
        pause = next(pauses, None) if may_pass(error) else None
        if pause is None:
            raise error
        self._emit(
            Event(
                "store.retry",
                {"operation": operation, "object": name, "error": str(error), "pause": pause},
            )
        )
        return pause
