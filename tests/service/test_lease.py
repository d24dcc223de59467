# ruff: noqa: ASYNC110 - what is waited for is time that passes in another task
"""The lease of a job's name: one holder on whatever nodes, by the log alone."""

from __future__ import annotations

import asyncio
import time

import msgspec
import pytest

from icecore.errors import JobHeld, SessionFenced
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.state import LogState, SessionRecord
from icecore.store.log import lease
from icecore.store.log.catalog import Pages
from icecore.store.log.repository import StoredRepository
from tests.store.miniature import collect, listed, put, take

NAME = "trainer"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.05)
    monkeypatch.setattr(lease, "PAUSE_SECONDS", 0.4)
    monkeypatch.setattr(lease, "SILENCE_SECONDS", 0.8)
    monkeypatch.setattr(lease, "_LOOK_SECONDS", 0.02)


async def elsewhere(repository: StoredRepository) -> None:
    """Have the open sessions look like those of another machine, whose processes nobody can see."""

    async def change(state: LogState, pages: Pages) -> LogState:
        moved = [msgspec.structs.replace(one, process=None) for one in state.sessions]
        return msgspec.structs.replace(state, sessions=moved)

    await repository.log.transact(change, "elsewhere")


async def two() -> tuple[MemoryBackend, StoredRepository, StoredRepository]:
    backend = MemoryBackend()
    first = await StoredRepository.create(backend)
    return backend, first, await StoredRepository.open(backend)


def test_one_of_many_gets_it() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        await StoredRepository.create(backend)
        clients = [await StoredRepository.open(backend) for _ in range(6)]
        found = await asyncio.gather(
            *(lease.take(client, NAME) for client in clients), return_exceptions=True
        )
        held = [one for one in found if isinstance(one, lease.Lease)]
        assert len(held) == 1 and all(isinstance(one, JobHeld) for one in found if one not in held)
        await held[0].release()
        again = await lease.take(clients[0], NAME)
        other = await lease.take(clients[1], "another")
        assert again.certain and other.certain
        await again.release()
        await other.release()
        assert (await clients[2].log.newest()).state.sessions == []

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_living_holder_on_another_machine_keeps_it() -> None:
    async def body() -> None:
        _, first, second = await two()
        held = await lease.take(first, NAME)
        await elsewhere(first)
        waited: list[SessionRecord] = []
        with pytest.raises(JobHeld, match=NAME):
            await lease.take(second, NAME, told=waited.append)
        assert len(waited) == 1 and held.certain
        await held.release()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_silent_holder_loses_it_and_knows_before() -> None:
    """The store does not hear the holder any more: it stops trusting its lease before another takes it."""

    async def body() -> None:
        backend = MemoryBackend()
        await StoredRepository.create(backend)
        deaf = False

        def plan(call: Call) -> Outcome:
            return Outcome.FAIL if deaf else Outcome.PASS

        first = await StoredRepository.open(FaultyBackend(backend, plan))
        second = await StoredRepository.open(backend)
        held = await lease.take(first, NAME)
        await elsewhere(second)
        deaf = True
        taking = asyncio.create_task(lease.take(second, NAME))
        doubted = 0.0
        while not taking.done():
            if not held.certain and not doubted:
                doubted = time.monotonic()
            await asyncio.sleep(0.005)
        taken = time.monotonic()
        taker = taking.result()
        assert doubted and doubted < taken - 0.1, "it has to know before"
        deaf = False
        while not held.lost:
            await asyncio.sleep(0.02)
        assert not held.certain and taker.certain
        await held.release()
        assert taker.certain
        await taker.release()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_holder_that_the_store_forgets_for_a_moment_keeps_it() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        await StoredRepository.create(backend)
        deaf = False

        def plan(call: Call) -> Outcome:
            return Outcome.FAIL if deaf else Outcome.PASS

        first = await StoredRepository.open(FaultyBackend(backend, plan))
        held = await lease.take(first, NAME)
        deaf = True
        while held.certain:
            await asyncio.sleep(0.01)
        deaf = False
        while not held.certain:
            await asyncio.sleep(0.01)
        assert not held.lost
        await held.release()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_lease_keeps_no_collector_from_deleting_and_is_not_fenced_by_one() -> None:
    async def body() -> None:
        backend, first, second = await two()
        held = await lease.take(first, NAME)
        await elsewhere(second)
        snapshot = await take(second, {0: 1, 1: 2})
        await second.forget([snapshot])
        assert await listed(second) == []
        for _ in range(3):
            await collect(second, fence_seconds=0.0)
        assert not [name for name in backend.objects if name.startswith("shards/")]
        await asyncio.sleep(0.3)
        assert held.certain
        await held.release()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_taker_does_not_end_a_holder_that_has_come_back() -> None:
    """It saw the silence; the holder renewed before the taker's transaction."""

    async def body() -> None:
        _, first, second = await two()
        held = await lease.take(first, NAME)
        seen = await lease.holder(second, NAME)
        assert seen is not None
        held._renewed -= 10.0  # it could not renew for long
        await held._require()
        with pytest.raises(JobHeld):
            await lease._fence(second, NAME, seen)
        assert not held.lost and await lease.holder(second, NAME) != seen
        await held.release()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_who_has_ended_is_not_waited_for_where_its_job_can_be_seen() -> None:
    async def body() -> None:
        _, first, second = await two()
        held = await lease.take(first, NAME, where="here:/state")
        held._task.cancel()

        async def change(state: LogState, pages: Pages) -> LogState:
            gone = [
                msgspec.structs.replace(
                    one, process=msgspec.structs.replace(one.process, pid=(1 << 22) - 1)
                )
                for one in state.sessions
                if one.process is not None
            ]
            return msgspec.structs.replace(state, sessions=gone)

        await second.log.transact(change, "its process has ended")
        began = time.monotonic()
        taken = await lease.take(second, NAME, where="here:/state")
        assert time.monotonic() - began < lease.SILENCE_SECONDS
        await taken.release()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_users_hold_leases_of_one_name_and_an_administrator_excludes_all() -> None:
    async def body() -> None:
        _, first, second = await two()
        alice = await lease.take(first, NAME, user=1000)
        bob = await lease.take(second, NAME, user=10001)
        assert alice.certain and bob.certain
        for user in (1000, None):
            with pytest.raises(JobHeld, match=NAME):
                await lease.take(second, NAME, user=user)
        await alice.release()
        with pytest.raises(JobHeld, match=NAME):
            await lease.take(second, NAME)
        await bob.release()
        root = await lease.take(first, NAME)
        for user in (1000, 10001, 0):
            with pytest.raises(JobHeld, match=NAME):
                await lease.take(second, NAME, user=user)
        other = await lease.take(second, f"{NAME}-2", user=1000)
        await root.release()
        await other.release()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_a_user_takes_no_silent_lease_of_another_user() -> None:
    async def body() -> None:
        _, first, second = await two()
        silent = await lease.take(first, NAME, user=1000)
        await elsewhere(first)
        silent._task.cancel()  # it gives no sign of life any more
        bob = await lease.take(second, NAME, user=1001)
        await asyncio.sleep(1.5 * lease.SILENCE_SECONDS)
        await silent._require()
        root = asyncio.create_task(lease.take(second, NAME))
        with pytest.raises(JobHeld):  # bob is alive
            await root
        await bob.release()
        taken = await lease.take(second, NAME, user=1000)
        with pytest.raises(SessionFenced):
            await silent._require()
        await taken.release()

    asyncio.run(asyncio.wait_for(body(), 30))


def test_nothing_is_committed_under_a_lease_that_was_taken() -> None:
    async def body() -> None:
        _, first, second = await two()
        held = await lease.take(first, NAME)
        async with await first.begin(None, "dump", load_index=False) as session:
            session.under = held.session
            await session.commit(*await put(first, session, {1: 1}))
        session = await first.begin(None, "dump", load_index=False)
        session.under = held.session
        seen = await lease.holder(second, NAME)
        assert seen is not None
        await lease._fence(second, NAME, seen)
        with pytest.raises(SessionFenced, match="under which"):
            await session.commit(*await put(first, session, {1: 2}))
        assert await session.abort()
        assert len(await listed(second)) == 1

    asyncio.run(asyncio.wait_for(body(), 30))
