"""A crash at every store call of every operation, before or after its effect: nothing committed is
lost, and nothing is left over after a collection.
"""

from __future__ import annotations

import asyncio
import random

import pytest

from icecore.errors import IcecoreError, StoreError, StoreFull
from icecore.store.backend.faulty import Call, Crashed, FaultyBackend, Outcome, stop_at
from icecore.store.backend.memory import MemoryBackend
from icecore.store.log.repository import StoredRepository
from tests.store.miniature import collect, listed, read, reopened, sound, take
from tests.store.operations import OPERATIONS, A, aftermath, prepared, prepared_for_all, unlocked


@pytest.mark.parametrize("stride", [2, pytest.param(1, marks=pytest.mark.torture)])
@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_crash_at_every_call(name: str, effect: bool, stride: int) -> None:
    """A crash after one call leaves the same as a crash before the next one, so every second call
    suffices.
    """

    async def body() -> None:
        scene, operation = await prepared(name), OPERATIONS[name]
        before = await scene.readable(MemoryBackend(scene.objects))
        number = 0
        while True:
            number += stride if number > 20 else 1
            backend = MemoryBackend(dict(scene.objects))
            opened, faulty = await reopened(backend)
            offset = len(faulty.calls)
            faulty.plan = stop_at(offset + number, effect=effect)
            try:
                await operation.run(opened, scene)
            except Crashed:
                await aftermath(backend, scene, operation, before)
                continue
            await aftermath(backend, scene, operation, before)
            break
        assert number > 4

    asyncio.run(asyncio.wait_for(body(), 100))


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.torture)])
@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.LOSE])
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_call_fails_once(name: str, outcome: Outcome, stride: int) -> None:
    """An error or a lost reply at one call: the operation succeeds or reports it, and the same
    process cleans up.
    """

    async def body() -> None:
        scene, operation = await prepared(name), OPERATIONS[name]
        readable = await scene.readable(MemoryBackend(scene.objects))
        number = 0
        while True:
            # A long operation has many calls of few kinds.
            number += stride if number > 20 else 1
            backend = MemoryBackend(dict(scene.objects))
            opened, faulty = await reopened(backend)
            offset = len(faulty.calls)
            failed: list[Call] = []

            def plan(
                call: Call, bad: int = offset + number, failed: list[Call] = failed
            ) -> Outcome:
                if call.number == bad:
                    failed.append(call)
                    return outcome
                return Outcome.PASS

            faulty.plan = plan
            before = set(await listed(await unlocked(backend)))
            try:
                result = await operation.run(opened, scene)
            except IcecoreError as error:
                assert isinstance(error, StoreError)
                if name.startswith("commit"):
                    assert set(await listed(await StoredRepository.open(backend))) == before
            else:
                if name.startswith("commit"):
                    assert set(await listed(await StoredRepository.open(backend))) == before | {
                        result
                    }
            await aftermath(backend, scene, operation, readable)
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
                    await StoredRepository.create(
                        FaultyBackend(backend, stop_at(number, effect=effect))
                    )
                except Crashed:
                    if "config" not in backend.objects:
                        await StoredRepository.create(backend)
                    repository = await StoredRepository.open(backend)
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
        results = await asyncio.gather(
            *(StoredRepository.create(backend) for _ in range(5)), return_exceptions=True
        )
        made = [result for result in results if isinstance(result, StoredRepository)]
        assert len(made) == 1
        assert (await StoredRepository.open(backend)).config == made[0].config
        assert await read(made[0], await take(await StoredRepository.open(backend), A)) == A

    asyncio.run(body())


@pytest.mark.parametrize("name", OPERATIONS)
def test_the_disk_is_full_from_some_call_on(name: str) -> None:
    """Every create fails from the n-th on. When there is room again, nothing is lost, and nothing
    is left that needs cleaning up.
    """

    async def body() -> None:
        scene, operation = await prepared(name), OPERATIONS[name]
        readable = await scene.readable(MemoryBackend(scene.objects))
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
                await operation.run(opened, scene)
            except StoreFull:
                left = {made for made in backend.objects if made not in scene.objects}
                if name.startswith(
                    "commit"
                ):  # what the writer stored is gone at once; the room is needed
                    assert {made.split("/")[0] for made in left} <= {"log"}
                await aftermath(backend, scene, operation, readable)
                continue
            await aftermath(backend, scene, operation, readable)
            break
        assert number > 1

    asyncio.run(asyncio.wait_for(body(), 100))


@pytest.mark.torture
@pytest.mark.timeout(3600)
def test_crash_after_crash() -> None:
    """Operation after operation, each interrupted somewhere, by a lost reply or a failure among
    others; then other processes clean up.
    """

    async def body() -> None:
        dice = random.Random(4)
        names = [name for name, operation in OPERATIONS.items() if operation.harm is None]
        whole = await prepared_for_all()
        before = await whole.readable(MemoryBackend(whole.objects))
        for round_ in range(1500):
            scene = whole.copy()
            backend = MemoryBackend(scene.objects)
            tried = []
            for _ in range(dice.randint(2, 6)):
                name, last = dice.choice(names), dice.randint(1, 60)
                outcome = dice.choice(
                    [Outcome.STOP_BEFORE, Outcome.STOP_AFTER, Outcome.LOSE, Outcome.FAIL]
                )
                faulty = FaultyBackend(backend)
                opened = await unlocked(faulty)
                last += len(faulty.calls)
                faulty.plan = lambda call, last=last, outcome=outcome: (  # type: ignore[misc]
                    outcome if call.number == last else Outcome.PASS
                )
                tried.append((name, last, outcome))
                try:
                    await OPERATIONS[name].run(opened, scene)
                except (Crashed, IcecoreError):
                    pass
            try:
                await aftermath(backend, scene, OPERATIONS["gc"], before)
            except BaseException:
                print(f"round {round_}: {tried}")
                raise

    asyncio.run(body())
