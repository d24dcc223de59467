"""A back end that counts calls and makes chosen ones fail: before they take effect, after it (a
lost reply), or for good (a crash).
"""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from enum import Enum

import msgspec

from icecore.errors import StoreError
from icecore.store.backend.base import Backend, Buffer, Draft, ObjectInfo, length_of
from icecore.store.backend.wrapper import Wrapper


class Crashed(BaseException):
    """The process "died". Not an Exception, so that no error handler can carry on after it."""


class Outcome(Enum):
    """The outcome of a call."""

    PASS = "pass"
    #: Fails without effect (or with part of its effect, where many objects are deleted at once; so
    #: does ``STOP_BEFORE``).
    FAIL = "fail"
    #: Takes effect, and fails.
    LOSE = "lose"
    #: The process ends before the call, or after it; every later call ends the same way.
    STOP_BEFORE = "stop before"
    STOP_AFTER = "stop after"


class Call(msgspec.Struct, frozen=True):
    """One call of the back end: its number from 1 on, the operation, the object or prefix, and the
    bytes written or read.
    """

    number: int
    operation: str
    name: str
    bytes: int = 0


#: Decides the outcome of each call; it may also raise an error of its own.
Plan = Callable[[Call], Outcome]


def stop_at(number: int, *, effect: bool) -> Plan:
    """Crash at call ``number``, with or without its effect."""
    return lambda call: (
        (Outcome.STOP_AFTER if effect else Outcome.STOP_BEFORE)
        if call.number == number
        else Outcome.PASS
    )


def at_random(seed: int, *, fail: float, lose: float = 0.0) -> Plan:
    """Return a plan by which each call fails without effect, or loses its reply, with these
    probabilities; deterministic for one seed and order of calls.
    """
    draw = random.Random(seed)

    def plan(call: Call) -> Outcome:
        at = draw.random()
        return Outcome.FAIL if at < fail else Outcome.LOSE if at < fail + lose else Outcome.PASS

    return plan


def far_away(round_trip: float, bytes_per_second: float = math.inf) -> Callable[[Call], float]:
    """Return delays of a store ``round_trip`` seconds away that gives each call this rate."""
    return lambda call: round_trip + call.bytes / bytes_per_second


def always(call: Call) -> Outcome:
    """Let every call pass."""
    return Outcome.PASS


class FaultyBackend(Wrapper):
    """Passes calls on to ``inner`` as ``plan`` says.

    Args:
        delay: Seconds that a call waits before it is passed on.

    Attributes:
        calls: All calls so far.
        plan: May be exchanged at any time.
    """

    def __init__(
        self, inner: Backend, plan: Plan = always, *, delay: Callable[[Call], float] | None = None
    ) -> None:
        super().__init__(inner)
        self.plan = plan
        self.calls: list[Call] = []
        self._delay = delay
        self._dead = False

    def enter(self, operation: str, name: str, size: int = 0) -> tuple[Call, Outcome]:
        """Count a call that begins; fail or stop before it if the plan says so."""
        if self._dead:
            raise Crashed(f"{operation} {name} after the end")
        call = Call(len(self.calls) + 1, operation, name, size)
        self.calls.append(call)
        outcome = self.plan(call)
        if outcome is Outcome.STOP_BEFORE:
            self._dead = True
            raise Crashed(f"{operation} {name}")
        if outcome is Outcome.FAIL:
            raise StoreError(f"injected failure of {operation} {name}")
        return call, outcome

    @contextmanager
    def reply(self, call: Call, outcome: Outcome) -> Iterator[None]:
        """Wrap the call itself: whether it succeeds or fails, its reply may be lost, or the process
        may die before the reply.
        """
        try:
            yield
        finally:
            if outcome is Outcome.STOP_AFTER:
                self._dead = True
                raise Crashed(f"{call.operation} {call.name}")
            if outcome is Outcome.LOSE:
                raise StoreError(f"injected loss of the reply to {call.operation} {call.name}")

    async def pause(self, call: Call) -> None:
        """Wait before a call is passed on."""
        if self._delay is not None:
            await asyncio.sleep(self._delay(call))

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        call, outcome = self.enter("create", name, length_of(parts))
        await self.pause(call)
        with self.reply(call, outcome):
            await self.inner.create(name, parts)

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        call, outcome = self.enter("get", name)
        await self.pause(call)
        with self.reply(call, outcome):
            data = await self.inner.get(name, limit=limit)
            self.calls[call.number - 1] = Call(call.number, "get", name, len(data))
        return data

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        call, outcome = self.enter("get_into", name, out.nbytes)
        await self.pause(call)
        with self.reply(call, outcome):
            await self.inner.get_into(name, offset, out)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        call, outcome = self.enter("read_into", name, out.nbytes)
        with self.reply(call, outcome):
            self.inner.read_into(name, offset, out)

    async def size(self, name: str) -> int:
        call, outcome = self.enter("size", name)
        await self.pause(call)
        with self.reply(call, outcome):
            size = await self.inner.size(name)
        return size

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        call, outcome = self.enter("list", prefix)
        await self.pause(call)
        with self.reply(call, outcome):
            rows = [info async for info in self.inner.list(prefix)]
        for info in rows:
            yield info

    async def delete(self, name: str) -> None:
        call, outcome = self.enter("delete", name)
        await self.pause(call)
        with self.reply(call, outcome):
            await self.inner.delete(name)

    async def delete_many(self, names: Sequence[str]) -> None:
        ended = self._dead
        try:
            call, outcome = self.enter("delete_many", names[0] if names else "")
        except (StoreError, Crashed):
            if not ended:
                await self.inner.delete_many(
                    names[1::2]
                )  # storage may have done part of it, in any order
            raise
        await self.pause(call)
        with self.reply(call, outcome):
            await self.inner.delete_many(names)

    def draft(self, name: str) -> Draft:
        return FaultyDraft(self, name)

    async def sweep(self, age_seconds: float) -> int:
        call, outcome = self.enter("sweep", "")
        with self.reply(call, outcome):
            removed = await self.inner.sweep(age_seconds)
        return removed


class FaultyDraft(Draft):
    """Appending counts as ``append``, publishing as the ``create`` that it stands for."""

    def __init__(self, backend: FaultyBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._inner = backend.inner.draft(name)
        self.descriptor = self._inner.descriptor

    def append(self, parts: Sequence[Buffer]) -> None:
        call, outcome = self._backend.enter("append", self._name, length_of(parts))
        with self._backend.reply(call, outcome):
            self._inner.append(parts)
            self.length = self._inner.length

    def grow(self, count: int) -> None:
        call, outcome = self._backend.enter("append", self._name, count)
        with self._backend.reply(call, outcome):
            self._inner.grow(count)
            self.length = self._inner.length

    def cut(self) -> None:
        self._inner.cut()

    async def publish(self) -> None:
        try:
            call, outcome = self._backend.enter("create", self._name, self.length)
            await self._backend.pause(call)
        except Exception:
            self._inner.discard()
            raise
        with self._backend.reply(call, outcome):
            await self._inner.publish()

    def discard(self) -> None:
        self._inner.discard()
