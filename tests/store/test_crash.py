"""A crash at every single store call of every operation, before or after it took effect: nothing committed is lost, nothing is left over after a collection."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from icecore.errors import IcecoreError, StoreError, StoreFull
from icecore.store.faulty import Call, Crashed, FaultyBackend, Outcome, stop_at
from icecore.store.keys import Parameters
from icecore.store.memory import MemoryBackend
from icecore.store.repository import Repository
from tests.store.miniature import collect, listed, read, reopened, sound, take

A = {cell: cell for cell in range(12)}
B = {**A, **{cell: 100 + cell for cell in range(10)}}
C = {cell: 50 + cell for cell in range(5)}


class Scene:
    """A repository with some history: a sparse shard, a forgotten snapshot, two that stay."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.contents: dict[str, dict[int, int]] = {}
        self.forgettable = ""

    async def build(self) -> None:
        backend = MemoryBackend(self.objects)
        repository = await Repository.create(backend, Parameters(shard_bytes=1 << 18))
        old = await take(repository, A)
        self.contents[await take(repository, B, old)] = dict(B)
        self.contents[await take(repository, C)] = dict(C)
        self.forgettable = await take(repository, {1: 240, 2: 241, **C})
        await repository.forget([old])

    @property
    def parent(self) -> str:
        return next(iter(self.contents))


Operation = Callable[[Repository, Scene], Awaitable[object]]

OPERATIONS: dict[str, Operation] = {
    "commit": lambda repository, scene: take(repository, {**B, 20: 60, 21: 61}, scene.parent),
    "forget": lambda repository, scene: repository.forget([scene.forgettable]),
    "pin": lambda repository, scene: repository.update(scene.parent, pinned=True),
    "gc": lambda repository, scene: collect(repository),
    "gc without compaction": lambda repository, scene: collect(repository, compact_below=0),
}


async def aftermath(backend: MemoryBackend, scene: Scene) -> None:
    """Another process comes and cleans up; all that was committed reads back, and nothing is left over."""
    repository = await Repository.open(backend)
    assert set(scene.contents) <= set(await listed(repository))
    await sound(repository)
    for snapshot, content in scene.contents.items():
        assert await read(repository, snapshot) == content
    await collect(repository, fence_seconds=0)
    report = await sound(repository, unreached=0)
    assert report.snapshots >= 2
    for snapshot in await listed(repository):
        content = await read(repository, snapshot)
        assert content == scene.contents.get(snapshot, content)
    # And it can be worked with.
    await take(repository, {1: 1}, scene.parent)


@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_crash_at_every_call(name: str, effect: bool) -> None:
    async def body() -> None:
        scene = Scene()
        await scene.build()
        number = 0
        while True:
            number += 1
            backend = MemoryBackend(dict(scene.objects))
            opened, faulty = await reopened(backend)
            offset = len(faulty.calls)
            faulty.plan = stop_at(offset + number, effect=effect)
            try:
                await OPERATIONS[name](opened, scene)
            except Crashed:
                await aftermath(backend, scene)
                continue
            await aftermath(backend, scene)
            break
        assert number > 4

    asyncio.run(asyncio.wait_for(body(), 100))


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.LOSE])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_call_fails_once(name: str, outcome: Outcome) -> None:
    """Not a crash but an error, or a lost reply, at one call: the operation succeeds or says so, and the same process cleans up."""

    async def body() -> None:
        scene = Scene()
        await scene.build()
        number = 1
        while True:
            number += 3 if name.startswith("gc") else 1  # a collection has many calls of few kinds
            backend = MemoryBackend(dict(scene.objects))
            opened, faulty = await reopened(backend)
            offset = len(faulty.calls)
            failed: list[Call] = []

            def plan(call: Call, bad: int = offset + number, failed: list[Call] = failed) -> Outcome:
                if call.number == bad:
                    failed.append(call)
                    return outcome
                return Outcome.PASS

            faulty.plan = plan
            before = set(await listed(await Repository.open(backend)))
            try:
                result = await OPERATIONS[name](opened, scene)
            except IcecoreError as error:
                assert isinstance(error, StoreError)
                if name == "commit":
                    assert set(await listed(await Repository.open(backend))) == before
            else:
                if name == "commit":
                    assert set(await listed(await Repository.open(backend))) == before | {result}
            await aftermath(backend, scene)
            if not failed:
                break
        assert number > 4

    asyncio.run(asyncio.wait_for(body(), 100))


def test_crash_at_every_call_of_init() -> None:
    async def body() -> None:
        for effect in (False, True):
            number = 0
            while True:
                number += 1
                backend = MemoryBackend()
                try:
                    await Repository.create(FaultyBackend(backend, stop_at(number, effect=effect)))
                except Crashed:
                    if "config" not in backend.objects:
                        await Repository.create(backend)
                    repository = await Repository.open(backend)
                    snapshot = await take(repository, A)
                    assert await read(repository, snapshot) == A
                    await collect(repository)
                    await sound(repository, unreached=0)
                    assert not [name for name in backend.objects if name.startswith("probe/")]
                    continue
                break
            assert number > 8

    asyncio.run(body())


def test_of_two_creators_one_makes_the_repository() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        results = await asyncio.gather(*(Repository.create(backend) for _ in range(5)), return_exceptions=True)
        made = [result for result in results if isinstance(result, Repository)]
        assert len(made) == 1
        assert (await Repository.open(backend)).config == made[0].config
        assert await read(made[0], await take(await Repository.open(backend), A)) == A

    asyncio.run(body())


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_disk_is_full_from_some_call_on(name: str) -> None:
    """Every create fails from the n-th on; when there is room again, nothing is lost, and nothing was left behind that has to be cleaned up."""

    async def body() -> None:
        scene = Scene()
        await scene.build()
        number = 0
        while True:
            number += 1
            backend = MemoryBackend(dict(scene.objects))
            opened, faulty = await reopened(backend)
            created: list[Call] = []

            def plan(call: Call, first: int = number, created: list[Call] = created) -> Outcome:
                if call.operation == "create":
                    created.append(call)
                    if len(created) >= first:
                        raise StoreFull("no space left")
                return Outcome.PASS

            faulty.plan = plan
            try:
                await OPERATIONS[name](opened, scene)
            except StoreFull:
                left = {made for made in backend.objects if made not in scene.objects}
                if name == "commit":  # what the writer stored is gone at once; the room is needed
                    assert {made.split("/")[0] for made in left} <= {"log"}
                await aftermath(backend, scene)
                continue
            await aftermath(backend, scene)
            break
        assert number > 1

    asyncio.run(asyncio.wait_for(body(), 100))
