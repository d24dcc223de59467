"""What each wrapper adds: lost replies are resolved, jitter is full, limits hold, counts are right."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Sequence

import pytest

from icecore.errors import (
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
    UsageError,
)
from icecore.events import Event
from icecore.store.backend.base import Buffer, ObjectInfo
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome, at_random
from icecore.store.backend.limits import Limited
from icecore.store.backend.memory import MemoryBackend
from icecore.store.backend.metrics import Metered
from icecore.store.backend.retry import Patience, Retrying
from icecore.store.backend.wrapper import Wrapper

QUICK = Patience(attempts=4, first=1e-4, longest=1e-4)


def outcomes(*script: Outcome | Exception) -> tuple[FaultyBackend, MemoryBackend]:
    """Return a store whose creates end according to ``script``; all other calls succeed."""
    left = list(script)

    def plan(call: Call) -> Outcome:
        if call.operation != "create" or not left:
            return Outcome.PASS
        outcome = left.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    inner = MemoryBackend()
    return FaultyBackend(inner, plan), inner


FAIL, LOSE, PASS = Outcome.FAIL, Outcome.LOSE, Outcome.PASS


@pytest.mark.parametrize(
    ("script", "before", "error"),
    [
        ([LOSE], None, None),
        ([LOSE, FAIL, LOSE], None, None),
        ([FAIL, FAIL, FAIL, FAIL], None, StoreError),
        ([LOSE, LOSE, LOSE, LOSE], None, StoreError),
        ([LOSE], b"another's", ObjectExists),
        ([LOSE], b"the same length.", ObjectExists),
        ([FAIL], b"", ObjectExists),
        ([PASS], b"our bytes, whole", ObjectExists),
        ([StoreFull("full")], None, StoreFull),
        ([StoreDenied("no")], None, StoreDenied),
        ([LOSE, StoreFull("full")], None, StoreError),
        ([LOSE, StoreDenied("no")], None, StoreError),
    ],
)
def test_creates_end_as_they_did(
    script: Sequence[Outcome | Exception], before: bytes | None, error: type[Exception] | None
) -> None:
    store, inner = outcomes(*script)
    if before is not None:
        inner.objects["a"] = before
    creating = Retrying(store, QUICK).create("a", [b"our bytes,", memoryview(b" whole")])
    if error is None:
        asyncio.run(creating)
        assert inner.objects == {"a": b"our bytes, whole"}
        return
    with pytest.raises(error) as caught:
        asyncio.run(creating)
    assert type(caught.value) is error
    assert inner.objects.get("a") in (before, b"our bytes, whole" if before is None else before)


def test_an_object_that_is_deleted_while_it_is_looked_into_was_anothers() -> None:
    store, inner = outcomes(LOSE)

    class Vanishing(Wrapper):
        async def size(self, name: str) -> int:
            inner.objects.clear()
            return await self.inner.size(name)

    with pytest.raises(ObjectExists):
        asyncio.run(Retrying(Vanishing(store), QUICK).create("a", [b"bytes"]))


@pytest.mark.parametrize("error", [ObjectMissing("gone"), StoreDenied("no"), StoreFull("full")])
def test_what_cannot_pass_is_not_tried_again(error: StoreError) -> None:
    def plan(call: Call) -> Outcome:
        raise error

    store = FaultyBackend(MemoryBackend(), plan)
    with pytest.raises(type(error)):
        asyncio.run(Retrying(store, QUICK).get("a"))
    assert len(store.calls) == 1


def test_a_listing_that_breaks_off_goes_on_where_it_was() -> None:
    inner = MemoryBackend({f"n/{number:02d}": b"x" for number in range(10)})
    breaks = iter([3, 0, 7, 99])

    class Breaking(Wrapper):
        async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
            limit = next(breaks)
            at = 0
            async for info in self.inner.list(prefix):
                if at == limit:
                    raise StoreError("broken off")
                at += 1
                yield info

    async def names() -> list[str]:
        return [info.name async for info in Retrying(Breaking(inner), QUICK).list("n/")]

    assert asyncio.run(names()) == sorted(inner.objects)


def test_jitter_is_full_and_bounded() -> None:
    draw = random.Random(1)
    patience = Patience(attempts=9, first=0.1, longest=2.0)
    runs = [list(patience.pauses(draw.uniform)) for _ in range(2000)]
    assert {len(run) for run in runs} == {8}
    for number, bound in enumerate([0.1, 0.2, 0.4, 0.8, 1.6, 2.0, 2.0, 2.0]):
        drawn = [run[number] for run in runs]
        assert min(drawn) < 0.02 * bound and 0.98 * bound < max(drawn) <= bound
        assert abs(sum(drawn) / len(drawn) - bound / 2) < 0.05 * bound


class Watching(Wrapper):
    """Records the most that was in flight."""

    def __init__(self) -> None:
        super().__init__(MemoryBackend())
        self.requests = self.bytes = self.most_requests = self.most_bytes = 0

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        size = sum(len(part) for part in parts)
        self.requests, self.bytes = self.requests + 1, self.bytes + size
        self.most_requests, self.most_bytes = (
            max(self.most_requests, self.requests),
            max(self.most_bytes, self.bytes),
        )
        try:
            await asyncio.sleep(0.001)
            await self.inner.create(name, parts)
        finally:
            self.requests, self.bytes = self.requests - 1, self.bytes - size


def test_limits_hold_and_are_used() -> None:
    async def body() -> None:
        store = Watching()
        limited = Limited(store, requests=5, budget=1000)
        draw = random.Random(2)
        sizes = [draw.choice([1, 10, 150, 400, 3000]) for _ in range(200)]
        tasks = [
            asyncio.create_task(limited.create(f"o/{n}", [bytes(size)]))
            for n, size in enumerate(sizes)
        ]
        await asyncio.sleep(0.01)
        for task in draw.sample(tasks, 60):  # those that wait and those that run
            task.cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert store.most_requests == 5
        assert 900 <= store.most_bytes <= 3000  # one that is larger than the budget goes alone
        await asyncio.gather(*(limited.create(f"p/{n}", [b"x"]) for n in range(20)))
        assert store.most_requests == 5

    asyncio.run(body())
    for requests, budget in ((0, 1), (1, 0)):
        with pytest.raises(UsageError):
            Limited(MemoryBackend(), requests=requests, budget=budget)


def test_counts() -> None:
    events: list[Event] = []

    async def body() -> None:
        inner = MemoryBackend()
        metered = Metered(
            FaultyBackend(inner, lambda call: FAIL if call.name == "bad" else PASS), events.append
        )
        await asyncio.gather(*(metered.create(f"a/{n}", [bytes(100)]) for n in range(3)))
        with pytest.raises(ObjectExists):
            await metered.create("a/0", [bytes(100)])
        with pytest.raises(StoreError):
            await metered.create("bad", [bytes(100)])
        assert len(await metered.get("a/1")) == 100
        with pytest.raises(ObjectMissing):
            await metered.get("a/9")
        await metered.get_into("a/1", 0, memoryview(bytearray(10)))
        counts = metered.counts()
        assert (
            counts["create"].calls,
            counts["create"].failures,
            counts["create"].bytes,
            counts["create"].busiest,
        ) == (5, 1, 300, 3)
        assert (counts["get"].calls, counts["get"].failures, counts["get"].bytes) == (2, 0, 100)
        assert counts["get_into"].bytes == 10
        assert counts["create"].seconds >= counts["create"].longest > 0
        await metered.close()

    asyncio.run(body())
    assert {event.fields["operation"]: event.fields["calls"] for event in events} == {
        "create": 5,
        "get": 2,
        "get_into": 1,
    }


def test_random_faults_repeat_and_have_their_share() -> None:
    calls = [Call(number, "get", "a") for number in range(4000)]
    one, again = (list(map(at_random(7, fail=0.2, lose=0.3), calls)) for _ in range(2))
    assert one == again
    assert 0.17 < one.count(FAIL) / 4000 < 0.23 and 0.27 < one.count(LOSE) / 4000 < 0.33
