"""Repair after any damage: what can be read stays readable, what a replica has comes back, and what
is lost is named and quarantined.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from unittest import mock

import pytest

from icecore.errors import IcecoreError, UsageError
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format import codec
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance import repair
from icecore.store.maintenance.check import check
from icecore.store.maintenance.diagnosis import Plan
from icecore.store.maintenance.gc import Collector
from icecore.store.maintenance.repair import Repairer
from icecore.store.snapshot.trial import Objective
from tests.store.images import image, local_place, touch
from tests.store.miniature import collect, listed, read, sound, take
from tests.store.test_check import A, B, Harm, build, empty, extend, flip, remove, swap, truncate

CONTENTS = (A, B, {1: 200, 2: 201})


async def readable(repository: StoredRepository, contents: dict[str, dict[int, int]]) -> set[str]:
    """Return the snapshots that can be read back byte for byte."""
    good = set()
    for snapshot, content in contents.items():
        try:
            if await read(repository, snapshot) == content:
                good.add(snapshot)
        except IcecoreError:
            pass
    return good


@pytest.mark.parametrize("replica", [False, True], ids=["alone", "replica"])
@pytest.mark.parametrize("harm", [flip, truncate, empty, extend, remove, swap])
def test_any_one_object_is_damaged(harm: Harm, replica: bool) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        contents = dict(zip(await build(backend), CONTENTS, strict=True))
        names = [
            name
            for name in sorted(backend.objects)
            if name.split("/")[0] not in ("config", "keys", "copies")
        ]
        newest = min(name for name in names if name.startswith("log/"))
        tried = set()
        for name in names:
            folder = name.split("/")[0]
            if name == newest or (
                harm is swap and sum(other.startswith(folder) for other in names) < 2
            ):
                continue
            if folder == "log" and random.Random(name).random() > 0.1:
                continue  # they are all alike
            tried.add(folder)
            harmed = MemoryBackend(dict(backend.objects))
            harm(harmed.objects, name)
            repository = await StoredRepository.open(harmed)
            source = (
                await StoredRepository.open(MemoryBackend(dict(backend.objects)))
                if replica
                else None
            )
            before = await readable(repository, contents)
            objects = dict(harmed.objects)
            plan = await Repairer(repository, source).plan()
            kept = {
                other: data
                for other, data in harmed.objects.items()
                if not other.startswith("log/")
            }
            assert kept == {
                other: data for other, data in objects.items() if not other.startswith("log/")
            }
            done = await Repairer(repository, source).apply()
            assert (done.quarantine.keys(), done.beyond) == (plan.quarantine.keys(), [])

            fresh = await StoredRepository.open(harmed)
            assert set(await listed(fresh)) == set(contents)
            after = await readable(fresh, contents)
            assert before <= after and (not replica or after == set(contents)), name
            quarantined = {
                record.snapshot: record.quarantined
                for record in await fresh.snapshots()
                if record.quarantined
            }
            assert quarantined.keys() == contents.keys() - after == done.quarantine.keys()
            report = await sound(fresh)
            assert report.quarantined == quarantined
            assert not (await Repairer(fresh, source).plan()).fixes, "a second repair finds nothing"
            # It goes on as if nothing had been: the collector, and snapshots that must not be built
            # on what is lost.
            await collect(fresh)
            report = await sound(fresh, unreached=0)
            content = {cell: value for one in contents.values() for cell, value in one.items()}
            assert await read(fresh, await take(fresh, content)) == content
            assert await readable(fresh, contents) == after
            await fresh.forget(list(quarantined))
            await collect(fresh)
            assert not (await sound(fresh, unreached=0)).quarantined
        assert tried >= {"shards", "nodes", "snapshots", "log"} and (
            "index" in tried or harm is swap
        )

    asyncio.run(asyncio.wait_for(body(), 110))


@pytest.mark.parametrize("seed", range(6))
def test_much_is_damaged_at_once(seed: int) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        contents = dict(zip(await build(backend), CONTENTS, strict=True))
        harmed = MemoryBackend(dict(backend.objects))
        dice = random.Random(seed)
        names = [
            name
            for name in sorted(backend.objects)
            if name.split("/")[0] not in ("config", "keys", "copies", "log")
        ]
        for name in dice.sample(names, len(names) // 2):
            dice.choice([flip, truncate, empty, remove])(harmed.objects, name)
        repository = await StoredRepository.open(harmed)
        before = await readable(repository, contents)
        done = await Repairer(repository).apply()
        after = await readable(repository, contents)
        assert before <= after
        there = set(await listed(repository))
        assert there >= after and there == after | done.quarantine.keys()
        assert (
            there == set(contents) or done.beyond
        )  # a page's snapshots whose manifests are gone as well
        await sound(repository)
        await collect(repository)
        # What is in quarantine comes back when a replica turns up.
        source = await StoredRepository.open(MemoryBackend(dict(backend.objects)))
        done = await Repairer(repository, source).apply()
        assert await readable(repository, contents) == there
        assert set(done.release) == there - after and not (await sound(repository)).quarantined

    asyncio.run(asyncio.wait_for(body(), 110))


def test_deltas_and_bases(tmp_path: Path) -> None:
    """Chunks of a real lineage with deltas: each stored chunk in turn is damaged."""
    thrifty = Objective(0.05e9, 2)
    with local_place(tmp_path / "repository") as here:
        contents = [image(5, "heap", seed=1)]
        taken = [here.take(contents[0], objective=thrifty)]
        for step in range(2):
            contents.append(touch(contents[-1], [step, 3], 20, step))
            taken.append(here.take(contents[-1], taken[-1], objective=thrifty))
        loop = here.loop
        assert (taken[2].records["place"]["codec"] & codec.DELTA != 0).any(), (
            "this test needs deltas"
        )
        rows = {
            (
                record["place"]["shard"].tobytes().hex(),
                int(record["place"]["offset"]),
                int(record["place"]["length"]),
            )
            for one in taken
            for record in one.records
        }
        healed, lost = 0, 0
        for shard, offset, length in sorted(rows):
            path = tmp_path / "repository" / "shards" / shard[:2] / shard
            path.chmod(0o600)
            whole = path.read_bytes()
            data = bytearray(whole)
            data[offset + length // 2] ^= 1
            path.write_bytes(data)
            plan = loop.run(Repairer(here.repository).plan())
            assert plan.quarantine and not plan.beyond
            suffer = set()
            for one, content in zip(taken, contents, strict=True):
                try:
                    assert here.content(one.snapshot) == content
                except IcecoreError:
                    suffer.add(one.snapshot)
            assert plan.quarantine.keys() == suffer
            lost += len(suffer)
            path.write_bytes(whole)
            healed += 1
        assert healed == len(rows) > 6 < lost

        # The same chunk elsewhere takes the place of what is lost: another lineage stored it anew
        # while its shard was gone.
        shard, offset, length = max(rows)
        path = tmp_path / "repository" / "shards" / shard[:2] / shard
        path.write_bytes(b"")
        quarantined = loop.run(Repairer(here.repository).apply()).quarantine
        assert quarantined
        again = here.take(contents[-1], lineage="again")
        assert here.content(again.snapshot) == contents[-1]
        released = loop.run(Repairer(here.repository).apply())
        assert taken[-1].snapshot in released.release
        assert here.content(taken[-1].snapshot) == contents[-1]
        loop.run(Collector(here.repository).collect())
        assert loop.run(check(here.repository, read_data=1.0)).sound


def spoil(backend: MemoryBackend, shard: str) -> None:
    """Change a bit of the first chunk of a shard."""
    data = bytearray(backend.objects[shard])
    data[50] ^= 1
    backend.objects[shard] = bytes(data)


async def while_a_repair_has_found(
    backend: MemoryBackend,
    between: Callable[[StoredRepository], Awaitable[None]],
    then: Callable[[StoredRepository], Awaitable[None]],
) -> Plan:
    """Repair. Let ``between`` happen once all is found and nothing is changed yet, and ``then`` after
    the first round.
    """
    run, first = repair._Apply.run, True

    async def later(self: repair._Apply) -> None:
        nonlocal first
        if not first:
            return await run(self)
        first = False
        await between(await StoredRepository.open(backend))
        await run(self)
        await then(await StoredRepository.open(backend))

    with mock.patch.object(repair._Apply, "run", later):
        return await Repairer(await StoredRepository.open(backend)).apply()


def test_what_is_condemned_does_not_come_back_into_the_index() -> None:
    """A collector deletes it, with its mark, while the repair rewrites a segment that names it."""

    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        taken, shards = [], []
        for value in range(8):
            before = set(backend.objects)
            taken.append(await take(repository, {1: 100 + value}))
            shards += [name for name in backend.objects if name.startswith("shards/")][-1:]
            assert shards[-1] not in before
        slow = await repository.begin(None, "a slow dump", beat_seconds=None)
        await repository.forget(taken[:1])
        await collect(repository)
        assert shards[0] in backend.objects, "the slow dump may have come to use it"
        spoil(backend, shards[1])

        async def between(other: StoredRepository) -> None:
            await slow.abort()
            await collect(other)
            assert shards[0] not in backend.objects

        async def then(fresh: StoredRepository) -> None:
            assert await read(fresh, await take(fresh, {1: 100})) == {1: 100}

        done = await while_a_repair_has_found(backend, between, then)
        assert list(done.quarantine) == [taken[1]]

    asyncio.run(body())


def test_what_is_condemned_takes_the_place_of_nothing() -> None:
    """The manifest from before a compaction refers to what a collector is about to delete."""

    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        forgotten = await take(repository, {cell: cell for cell in range(6)})
        kept = await take(repository, {1: 1, 2: 2})
        slow = await repository.begin(None, "a slow dump", beat_seconds=None)
        await repository.forget([forgotten])
        before = set(backend.objects)
        await collect(repository)
        (compacted,) = [name for name in backend.objects.keys() - before if "shards/" in name]
        spoil(backend, compacted)

        async def between(other: StoredRepository) -> None:
            await slow.abort()
            await collect(other)

        async def then(other: StoredRepository) -> None:
            report = await check(other, read_data=1.0)
            assert not report.damages and (report.chunks, len(report.lost)) == (2, 1)

        done = await while_a_repair_has_found(backend, between, then)
        assert list(done.quarantine) == [kept]  # one of its two chunks is lost

    asyncio.run(body())


def test_only_a_replica_is_a_second_source() -> None:
    async def body() -> None:
        one, other = [await StoredRepository.create(MemoryBackend()) for _ in range(2)]
        with pytest.raises(UsageError):
            Repairer(one, other)
        assert (await Repairer(one).apply()).empty

    asyncio.run(body())


def test_what_others_do_meanwhile_stays() -> None:
    """A repair that began before a commit and a collection replaces nothing that it has not
    examined.
    """

    async def body() -> None:
        backend = MemoryBackend()
        contents = dict(zip(await build(backend), CONTENTS, strict=True))
        shard = max(
            (name for name in backend.objects if name.startswith("shards/")),
            key=lambda name: len(backend.objects[name]),
        )
        flip(backend.objects, shard)
        one, other = await StoredRepository.open(backend), await StoredRepository.open(backend)
        content = {5: 120, 6: 121}
        results = await asyncio.gather(
            Repairer(one).apply(),
            take(other, content),
            collect(other),
            Repairer(other).apply(),
            return_exceptions=True,
        )
        assert not [result for result in results if isinstance(result, BaseException)], results
        contents[results[1]] = content  # type: ignore[index]
        fresh = await StoredRepository.open(backend)
        await Repairer(fresh).apply()
        lost = {record.snapshot for record in await fresh.snapshots() if record.quarantined}
        assert lost == contents.keys() - await readable(fresh, contents)
        await sound(fresh)

    asyncio.run(body())
