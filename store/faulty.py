"""A back end around a back end that counts calls and makes chosen ones fail: before they take effect, after it (a lost reply), or for good (a crash)."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from enum import Enum

from icecore.errors import StoreError
from icecore.store.backend import Backend, Buffer, ObjectInfo, length_of


class Crashed(BaseException):
    """The process "died": not an Exception, so that nothing can carry on after it by handling errors."""


class Outcome(Enum):
    """What becomes of a call."""

    PASS = "pass"
    #: Fails and has no effect.
    FAIL = "fail"
    #: Takes effect, and fails.
    LOSE = "lose"
    #: The process ends before the call, or after it; every later call ends the same way.
    STOP_BEFORE = "stop before"
    STOP_AFTER = "stop after"


@dataclass(frozen=True)
class Call:
    """One call of the back end: its number from 1 on, the operation, the object or prefix, and the bytes written or read."""

    number: int
    operation: str
    name: str
    bytes: int = 0


#: Decides about each call; it may also raise an error of its own.
Plan = Callable[[Call], Outcome]


def stop_at(number: int, *, effect: bool) -> Plan:
    """Crash at call ``number``, with or without its effect."""
    return lambda call: (
        (Outcome.STOP_AFTER if effect else Outcome.STOP_BEFORE) if call.number == number else Outcome.PASS
    )


def always(call: Call) -> Outcome:
    """Every call passes."""
    return Outcome.PASS


class FaultyBackend(Backend):
    """Passes calls on to ``inner`` as ``plan`` says.

    Args:
        delay: Seconds that a call waits before it is passed on.

    Attributes:
        calls: All calls so far.
        plan: May be exchanged at any time.
    """

    def __init__(self, inner: Backend, plan: Plan = always, *, delay: Callable[[Call], float] | None = None) -> None:
        self.inner = inner
        self.plan = plan
        self.calls: list[Call] = []
        self.direct = inner.direct
        self.where = inner.where
        self._delay = delay
        self._dead = False

    def _enter(self, operation: str, name: str, size: int = 0) -> tuple[Call, Outcome]:
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

    def _leave(self, call: Call, outcome: Outcome) -> None:
        if outcome is Outcome.STOP_AFTER:
            self._dead = True
            raise Crashed(f"{call.operation} {call.name}")
        if outcome is Outcome.LOSE:
            raise StoreError(f"injected loss of the reply to {call.operation} {call.name}")

    async def _pause(self, call: Call) -> None:
        if self._delay is not None:
            await asyncio.sleep(self._delay(call))

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        call, outcome = self._enter("create", name, length_of(parts))
        await self._pause(call)
        await self.inner.create(name, parts)
        self._leave(call, outcome)

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        call, outcome = self._enter("get", name)
        await self._pause(call)
        data = await self.inner.get(name, limit=limit)
        self.calls[call.number - 1] = Call(call.number, "get", name, len(data))
        self._leave(call, outcome)
        return data

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        call, outcome = self._enter("get_into", name, out.nbytes)
        await self._pause(call)
        await self.inner.get_into(name, offset, out)
        self._leave(call, outcome)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        call, outcome = self._enter("read_into", name, out.nbytes)
        self.inner.read_into(name, offset, out)
        self._leave(call, outcome)

    async def size(self, name: str) -> int:
        call, outcome = self._enter("size", name)
        await self._pause(call)
        size = await self.inner.size(name)
        self._leave(call, outcome)
        return size

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        call, outcome = self._enter("list", prefix)
        await self._pause(call)
        async for info in self.inner.list(prefix):
            yield info
        self._leave(call, outcome)

    async def delete(self, name: str) -> None:
        call, outcome = self._enter("delete", name)
        await self._pause(call)
        await self.inner.delete(name)
        self._leave(call, outcome)

    async def sweep(self, age_seconds: float) -> int:
        call, outcome = self._enter("sweep", "")
        removed = await self.inner.sweep(age_seconds)
        self._leave(call, outcome)
        return removed

    async def close(self) -> None:
        await self.inner.close()
