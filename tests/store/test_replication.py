"""Replicas: only missing objects move, unchanged, whatever is interrupted; collectors on both
sides; and reads from several places at once.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from icecore.errors import Damaged, ObjectMissing, StoreError, UsageError
from icecore.events import Event
from icecore.store.backend.base import Backend
from icecore.store.backend.faulty import (
    Call,
    Crashed,
    FaultyBackend,
    Outcome,
    Plan,
    always,
    stop_at,
)
from icecore.store.backend.memory import MemoryBackend
from icecore.store.backend.replicas import ReplicaBackend
from icecore.store.backend.testing import BackendConformance
from icecore.store.format.keys import Parameters
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.gc import COLLECT
from icecore.store.maintenance.repair import Repairer
from icecore.store.replication import reconcile
from icecore.store.replication import replicas as replication
from tests.store.miniature import CHEAP, PASSPHRASE, collect, listed, read, sound, take
from tests.store.test_check import Harm, flip, remove

A = {cell: cell for cell in range(12)}
B = {**A, **{cell: 100 + cell for cell in range(4)}}
C = {cell: 50 + cell for cell in range(5)}
COMMON = ("shards/", "nodes/", "snapshots/")


def common(backend: MemoryBackend) -> set[str]:
    return {name for name in backend.objects if name.startswith(COMMON)}


class World:
    """A repository with three snapshots and an empty replica of it."""

    def __init__(self, encrypted: bool) -> None:
        self.encrypted = encrypted
        self.here, self.there = MemoryBackend(), MemoryBackend()
        self.contents: dict[str, dict[int, int]] = {}

    async def build(self) -> World:
        given = (lambda: PASSPHRASE) if self.encrypted else None
        parameters = Parameters(shard_bytes=1 << 18)
        first = await StoredRepository.create(self.here, parameters, passphrase=given, cost=CHEAP)
        await StoredRepository.create(
            self.there, parameters, passphrase=given, cost=CHEAP, secret=first.keys.secret
        )
        old = await take(first, A)
        self.contents[old] = A
        self.contents[await take(first, B, old)] = B
        self.contents[await take(first, C)] = C
        return self

    async def open(self, backend: Backend) -> StoredRepository:
        return await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE)

    async def sync(
        self, here: Backend | None = None, there: Backend | None = None, patience: float = 0.2
    ) -> replication.Synced:
        source, target = await self.open(here or self.here), await self.open(there or self.there)
        return await replication.sync(
            source, target, await reconcile.plan(source, target), patience=patience
        )

    async def complete(self, there: Backend | None = None) -> None:
        """The replica has everything, and nothing else."""
        repository = await self.open(there or self.there)
        assert await listed(repository) == list(self.contents)
        for snapshot, content in self.contents.items():
            assert await read(repository, snapshot) == content
        await collect(repository, fence_seconds=0)
        await sound(repository, unreached=0)


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_only_what_is_missing_travels(encrypted: bool) -> None:
    async def body() -> None:
        world = await World(encrypted).build()
        done = await world.sync()
        assert done.snapshots == list(world.contents) and not done.lost
        assert {name: world.there.objects[name] for name in common(world.there)} == {
            name: world.here.objects[name] for name in common(world.here)
        }
        assert done.objects == len(common(world.here)) and done.present > 0
        await world.complete()

        assert (await world.sync()).objects == 0
        source = await world.open(world.here)
        parent = list(world.contents)[1]
        new = {**B, 3: 200}
        world.contents[await take(source, new, parent)] = new
        again = await world.sync()
        # A new shard, node pack and manifest; the shards of the unchanged cells were there.
        assert again.objects == 3 and again.snapshots == list(world.contents)[3:]
        await world.complete()
        # The replica deduplicates against what was brought to it, and the way back is the same.
        target = await world.open(world.there)
        before = common(world.there)
        world.contents[await take(target, {**new, 40: 40})] = {**new, 40: 40}
        assert (
            len([name for name in common(world.there) - before if name.startswith("shards/")]) == 1
        )
        source = await world.open(world.here)
        back = await replication.sync(target, source, await reconcile.plan(target, source))
        assert back.objects == 3
        await world.complete(world.here)

    asyncio.run(body())


@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_crash_at_every_call_of_a_sync(side: str, effect: bool) -> None:
    """Everything listed in the replica is complete; the next sync, with or without a collection
    there, copies the rest.
    """

    async def body() -> None:
        whole = await World(True).build()
        number = 0
        while True:
            number += 1
            world = World(True)
            world.here, world.there = (
                MemoryBackend(dict(whole.here.objects)),
                MemoryBackend(dict(whole.there.objects)),
            )
            world.contents = whole.contents
            broken = FaultyBackend(
                world.here if side == "source" else world.there, stop_at(number, effect=effect)
            )
            try:
                await (world.sync(here=broken) if side == "source" else world.sync(there=broken))
            except Crashed:
                repository = await world.open(world.there)
                for snapshot in await listed(repository):
                    assert await read(repository, snapshot) == world.contents[snapshot]
                if number % 2:
                    await collect(repository, fence_seconds=0)
                    await sound(repository, unreached=0)
                await world.sync()
                await world.complete()
                continue
            break
        assert number > 20

    asyncio.run(asyncio.wait_for(body(), 100))


@pytest.mark.parametrize("outcome", [Outcome.FAIL, Outcome.LOSE])
def test_single_failures_of_a_sync(outcome: Outcome) -> None:
    async def body() -> None:
        whole = await World(False).build()
        number = 0
        while True:
            number += 1
            world = World(False)
            world.here, world.there = (
                MemoryBackend(dict(whole.here.objects)),
                MemoryBackend(dict(whole.there.objects)),
            )
            world.contents = whole.contents
            failed: list[Call] = []

            def plan(call: Call, bad: int = number, failed: list[Call] = failed) -> Outcome:
                if call.number == bad:
                    failed.append(call)
                    return outcome
                return Outcome.PASS

            try:
                await world.sync(there=FaultyBackend(world.there, plan))
            except StoreError:
                await world.sync()
            else:
                await world.sync()
            await world.complete()
            if not failed:
                break
        assert number > 20

    asyncio.run(asyncio.wait_for(body(), 100))


def test_what_the_replica_forgot_comes_again_only_when_its_collector_is_done() -> None:
    async def body() -> None:
        world = await World(False).build()
        await world.sync()
        target = await world.open(world.there)
        last = list(world.contents)[-1]

        # Forgotten and condemned, but not deleted, because a session is open: a sync waits, and
        # then says why.
        await target.forget([last])
        keeper = await target.begin(None, "old", beat_seconds=None)
        await collect(target)
        assert (await target.log.newest()).state.condemned
        with pytest.raises(StoreError, match="about to be deleted"):
            await world.sync()
        await keeper.abort()
        # The sync itself has the collector delete them, then creates them again.
        assert (await world.sync()).objects == 3
        await world.complete()

        # A collector at work may be about to delete the very name that comes.
        target = await world.open(world.there)
        await target.forget([last])
        await collect(target)
        collector = await target.begin(None, COLLECT, load_index=False, beat_seconds=None)
        with pytest.raises(StoreError, match="collector is at work"):
            await world.sync()
        waiting = asyncio.create_task(world.sync(patience=20))
        await asyncio.sleep(0.3)
        assert not waiting.done()
        await collector.abort()
        assert (await waiting).snapshots == [last]
        await world.complete()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_sleeping_collector_does_not_delete_what_comes_again() -> None:
    """The collector has decided to delete, and sleeps before its first deletion; the sync waits
    until it has finished.
    """

    async def body() -> None:
        world = await World(False).build()
        await world.sync()
        target = await world.open(world.there)
        last = list(world.contents)[-1]
        await target.forget([last])
        awake, asleep = asyncio.Event(), asyncio.Event()

        class Sleepy(FaultyBackend):
            async def delete(self, name: str) -> None:
                if name.startswith("shards/"):
                    asleep.set()
                    await awake.wait()
                await super().delete(name)

        collecting = asyncio.create_task(collect(await world.open(Sleepy(world.there))))
        await asyncio.wait_for(asleep.wait(), 10)
        # Another collector does the same work to its end: the names are free again.
        await collect(await world.open(world.there))
        assert [
            name for name in common(world.here) - common(world.there) if name.startswith("shards/")
        ]
        with pytest.raises(StoreError, match="collector is at work"):
            await world.sync()
        awake.set()
        await collecting
        await world.sync()
        await world.complete()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_two_syncs_at_once_and_one_that_gives_up() -> None:
    async def body() -> None:
        world = await World(True).build()

        def plan(call: Call) -> Outcome:
            return (
                Outcome.FAIL
                if call.operation == "create" and call.name.startswith("snapshots/")
                else Outcome.PASS
            )

        failing = world.sync(there=FaultyBackend(world.there, plan))
        results = await asyncio.gather(world.sync(), world.sync(), failing, return_exceptions=True)
        assert isinstance(results[2], StoreError) or not isinstance(results[2], BaseException)
        await world.complete()

    asyncio.run(asyncio.wait_for(body(), 60))


def test_damage_does_not_travel() -> None:
    async def body() -> None:
        world = await World(True).build()
        last = list(world.contents)[-1]
        source = await world.open(world.here)
        reach = replication.Reach(source)
        await reach.add([await source.find(last)])
        (shard,) = [replication.object_name(*name) for name in reach.names if name[0] == "shard"]
        data = world.here.objects[shard]
        world.here.objects[shard] = data[:100] + bytes([data[100] ^ 1]) + data[101:]
        done = await world.sync()
        assert [lost.snapshot for lost in done.lost] == [last] and isinstance(
            done.lost[0].error, Damaged
        )
        assert await listed(await world.open(world.there)) == list(world.contents)[:-1]
        assert shard not in world.there.objects
        await sound(await world.open(world.there))
        # From a source that has another replica, what is damaged here is taken from there.
        healed = ReplicaBackend(world.here, [world.here, MemoryBackend({shard: data})])
        assert (await world.sync(here=healed)).snapshots == [last]
        await world.complete()

    asyncio.run(body())


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("harm", [flip, remove])
def test_repair_brings_back_what_a_replica_has(harm: Harm, encrypted: bool) -> None:
    """Each shared object is damaged in turn. Alone, what is lost is quarantined, and is not copied."""

    async def body() -> None:
        world = await World(encrypted).build()
        await world.sync()
        lost = 0
        for name in sorted(common(world.here)):
            harmed = MemoryBackend(dict(world.here.objects))
            harm(harmed.objects, name)
            alone = await world.open(MemoryBackend(dict(harmed.objects)))
            quarantined = (await Repairer(alone).apply()).quarantine.keys()
            lost += len(quarantined)
            fresh = await StoredRepository.create(
                MemoryBackend(),
                passphrase=(lambda: PASSPHRASE) if encrypted else None,
                cost=CHEAP,
                secret=alone.keys.secret,
            )
            done = await replication.sync(alone, fresh, await reconcile.plan(alone, fresh))
            assert {one.snapshot for one in done.lost} == quarantined
            assert set(await listed(fresh)) == world.contents.keys() - quarantined
            await sound(fresh, unreached=0)

            repaired = await Repairer(
                await world.open(harmed), await world.open(world.there)
            ).apply()
            assert repaired.fixes and not repaired.quarantine and not repaired.beyond
            await world.complete(harmed)
        assert lost >= len(
            world.contents
        )  # of a manifest nothing can be done without; of a shard and a pack, the footer

    asyncio.run(asyncio.wait_for(body(), 60))


def test_strangers_are_refused() -> None:
    async def body() -> None:
        world = await World(True).build()
        stranger = MemoryBackend()
        await StoredRepository.create(stranger, passphrase=lambda: PASSPHRASE, cost=CHEAP)
        with pytest.raises(UsageError, match="not a replica"):
            await world.sync(there=stranger)
        secret = (await world.open(world.here)).keys.secret
        with pytest.raises(UsageError, match="not a replica"):
            await StoredRepository.open(stranger, secret=secret)
        # A replica opens without its own passphrase for whoever has the secret.
        assert (await StoredRepository.open(world.there, secret=secret)).keys.secret == secret

    asyncio.run(body())


# -- reading from several places


class TestReplicaBackend(BackendConformance):
    """A back end over two places is a conforming back end."""

    @pytest.fixture(autouse=True)
    def _place(self) -> None:
        self.own = MemoryBackend()

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[Backend]:
        yield ReplicaBackend(self.own, [MemoryBackend(), self.own])


def served(backend: FaultyBackend) -> int:
    return sum(call.operation in ("get", "get_into", "read_into") for call in backend.calls)


def test_a_restore_reads_from_wherever_the_objects_are() -> None:
    """Before a replication is complete, the log is the repository's own, and data comes from the
    nearest place that has it.
    """

    async def body() -> None:
        world = await World(True).build()
        whole = dict(world.there.objects)
        number = 4
        while True:
            number += 7
            world.there = MemoryBackend(dict(whole))
            broken = FaultyBackend(world.there, stop_at(number, effect=True))
            try:
                await world.sync(there=broken)
            except Crashed:
                pass
            else:
                break
            # What has arrived is gone at home; the rest is only there.
            home = {
                name: data
                for name, data in world.here.objects.items()
                if name not in common(world.there)
            }
            events: list[Event] = []
            own = MemoryBackend(home)
            repository = await world.open(
                ReplicaBackend(own, [world.there, own], emit=events.append)
            )
            for snapshot, content in world.contents.items():
                assert await read(repository, snapshot) == content
            assert {event.name for event in events} <= {"store.failover"}

    asyncio.run(asyncio.wait_for(body(), 60))


def places(
    *plans: Plan, direct: bool = False, delays: tuple[float, ...] = ()
) -> tuple[list[FaultyBackend], ReplicaBackend, list[Event]]:
    """Build places that all hold one shard, the repository itself last; as remote storage unless
    ``direct``.
    """
    made, events = [], []
    for number, plan in enumerate(plans):
        wait = delays[number] if delays else 0.0
        place = FaultyBackend(
            MemoryBackend({"shards/aa/x": bytes(range(200)), "config": b"%d" % number}),
            plan,
            delay=lambda call, wait=wait: wait,
        )  # type: ignore[misc]
        place.direct = direct
        place.where = f"place {number}"
        made.append(place)
    return made, ReplicaBackend(made[-1], made, emit=events.append), events


@pytest.mark.parametrize("direct", [False, True], ids=["async", "direct"])
def test_the_nearest_first_and_the_next_when_it_fails(direct: bool) -> None:
    async def body() -> None:
        made, backend, events = places(always, always, direct=direct)
        out = memoryview(bytearray(50))

        async def fetch() -> bytes:
            if direct:
                backend.read_into("shards/aa/x", 10, out)
            else:
                await backend.get_into("shards/aa/x", 10, out)
            return bytes(out)

        assert await fetch() == bytes(range(10, 60))
        assert (served(made[0]), served(made[1])) == (1, 0)
        made[0].plan = lambda call: Outcome.FAIL
        assert await fetch() == bytes(range(10, 60))
        assert [event.fields["place"] for event in events] == ["place 0"]
        # It is asked last for a while, but asked if nobody else has it.
        assert await fetch() == bytes(range(10, 60)) and served(made[0]) == 2
        made[0].plan, made[1].plan = always, lambda call: Outcome.FAIL
        assert await fetch() == bytes(range(10, 60))
        made[0].plan = lambda call: Outcome.FAIL
        with pytest.raises(StoreError, match="injected"):
            await fetch()
        # What is not common is its own and nobody else's.
        made[0].plan = made[1].plan = always
        assert await backend.get("config") == b"1"
        await backend.create("shards/bb/new", [b"new"])
        assert "shards/bb/new" not in made[0].inner.objects  # type: ignore[attr-defined]
        with pytest.raises(ObjectMissing):
            await backend.get("shards/cc/none")

    asyncio.run(body())


def test_unreachable_is_said_rather_than_missing() -> None:
    async def body() -> None:
        _, backend, _ = places(lambda call: Outcome.FAIL, always)
        with pytest.raises(StoreError, match="injected") as caught:
            await backend.get("shards/cc/none")
        assert not isinstance(caught.value, ObjectMissing)

    asyncio.run(body())


def test_stragglers_are_hedged() -> None:
    async def body() -> None:
        made, backend, _ = places(always, always, delays=(30.0, 0.0))
        backend = ReplicaBackend(made[1], made, hedge=0.05)
        out = memoryview(bytearray(50))
        before, began = len(asyncio.all_tasks()), time.monotonic()
        await backend.get_into("shards/aa/x", 0, out)
        assert bytes(out) == bytes(range(50)) and time.monotonic() - began < 10
        assert (served(made[0]), served(made[1])) == (1, 1)
        # The straggler was given up; nothing of it is left running.
        assert len(asyncio.all_tasks()) == before

    asyncio.run(asyncio.wait_for(body(), 20))


@pytest.mark.parametrize("harm", ["flipped", "cut", "missing"])
def test_what_is_damaged_in_one_place_is_read_from_another(harm: str) -> None:
    async def body() -> None:
        world = await World(True).build()
        await world.sync()
        whole = dict(world.there.objects)
        for name in common(world.there):
            data = whole[name]
            objects = dict(whole)
            if harm == "missing":
                del objects[name]
            else:
                half = len(data) // 2
                objects[name] = (
                    data[:half]
                    if harm == "cut"
                    else data[:half] + bytes([data[half] ^ 1]) + data[half + 1 :]
                )
            near = MemoryBackend(objects)
            repository = await world.open(ReplicaBackend(world.here, [near, world.here]))
            for snapshot, content in world.contents.items():
                assert await read(repository, snapshot) == content
            # Nowhere sound: named, not believed.
            alone = await world.open(ReplicaBackend(near, [near, MemoryBackend()]))
            failed = 0
            for snapshot in world.contents:
                try:
                    assert await read(alone, snapshot) == world.contents[snapshot]
                except (Damaged, ObjectMissing):
                    failed += 1
            assert failed or harm == "cut"  # half of a shard may be enough

    asyncio.run(asyncio.wait_for(body(), 60))
