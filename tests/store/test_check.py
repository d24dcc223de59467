"""The check finds and names damage to any object of any kind, and the snapshots affected; a restore
of those fails cleanly.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable

import pytest

from icecore.errors import Damaged, IcecoreError, ObjectMissing
from icecore.store.backend.faulty import Crashed, stop_at
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.names import log_name
from icecore.store.log.lookup import Index
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check import check
from tests.store.miniature import collect, listed, read, reopened, sound, take

A = {cell: cell for cell in range(6)}
B = {**A, 3: 77, 9: 78}

Harm = Callable[[dict[str, bytes], str], None]


def flip(objects: dict[str, bytes], name: str) -> None:
    data = bytearray(objects[name])
    data[random.Random(name).randrange(len(data))] ^= 1 << random.Random(name).randrange(8)
    objects[name] = bytes(data)


def truncate(objects: dict[str, bytes], name: str) -> None:
    objects[name] = objects[name][: len(objects[name]) // 2]


def empty(objects: dict[str, bytes], name: str) -> None:
    objects[name] = b""


def extend(objects: dict[str, bytes], name: str) -> None:
    objects[name] += b"\0"


def remove(objects: dict[str, bytes], name: str) -> None:
    del objects[name]


def swap(objects: dict[str, bytes], name: str) -> None:
    """Replace an object by another of the same kind, an intact one for shards and the like."""
    folder = name.split("/")[0]
    objects[name] = next(
        data
        for other, data in sorted(objects.items())
        if other.split("/")[0] == folder and other != name
    )


async def build(backend: MemoryBackend) -> tuple[str, str, str]:
    repository = await StoredRepository.create(backend)
    first = await take(repository, A)
    second = await take(repository, B, first)
    third = await take(repository, {1: 200, 2: 201})
    filler = [
        await take(repository, {number: 210 + number}) for number in range(40)
    ]  # enough for a page
    await repository.forget(filler)
    await collect(repository)
    await repository.log.trim(20)
    report = await sound(repository, unreached=0)
    log = [len(data) for name, data in backend.objects.items() if name.startswith("log/")]
    assert (
        0 < report.bytes["log"] <= sum(log) and report.objects["log"] == len(log) - 1
    )  # the check ended its own session
    return first, second, third


@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
def test_a_trim_that_broke_off_is_no_damage(effect: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icecore.store.log.entries.ANCHOR_EVERY", 4)
    monkeypatch.setattr("icecore.store.maintenance.check_log.KEPT_ENTRIES", 6)

    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        for number in range(10):
            await take(repository, {1: number})
        written, number = dict(backend.objects), 0
        while True:
            number += 1
            inner = MemoryBackend(dict(written))
            opened, faulty = await reopened(inner)
            faulty.plan = stop_at(len(faulty.calls) + number, effect=effect)
            try:
                await opened.log.trim(6)
            except Crashed:
                left = [name for name in inner.objects if name.startswith("log/")]
                await sound(await StoredRepository.open(inner))
                assert await (await StoredRepository.open(inner)).log.trim(6)
                continue
            break
        assert (
            number > 6 and len(left) < 15
        )  # it also broke off among those that are deleted at once
        # One that is kept, or whose anchor is there, is missed.
        for generation in ((await repository.log.newest()).generation - 3, 3):
            backend.objects = dict(written)
            del backend.objects[log_name(generation)]
            report = await check(await StoredRepository.open(backend))
            assert [damage.name for damage in report.damages] == [log_name(generation)]

    asyncio.run(body())


@pytest.mark.parametrize("harm", [flip, truncate, empty, extend, remove, swap])
def test_every_object_is_looked_at(harm: Harm) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        await build(backend)
        kinds = {
            "shards": {
                "shard",
                "chunk",
                "index segment",
            },  # the index names a shard that is missing
            "nodes": {"nodes", "node"},
            "snapshots": {"manifest"},
            "index": {"index segment"},
            "pages": {"snapshot page"},
        }
        tried = set()
        for name in sorted(backend.objects):
            folder = name.split("/")[0]
            if folder in ("config", "keys", "copies") or (
                harm is swap and sum(other.startswith(folder) for other in backend.objects) < 2
            ):
                continue
            if folder == "log" and harm is remove:
                continue  # below
            harmed = MemoryBackend(dict(backend.objects))
            harm(harmed.objects, name)
            repository = await StoredRepository.open(harmed)
            report = await check(repository, read_data=1.0)
            assert not report.sound, name
            if folder == "log":
                assert {damage.kind for damage in report.damages} == {"log entry"}
                assert name in {damage.name for damage in report.damages}
                continue
            tried.add(folder)
            named = [
                damage for damage in report.damages if damage.name == name or name in damage.why
            ]
            assert named, [str(damage) for damage in report.damages]
            assert {damage.kind for damage in named} <= kinds[folder]
            # A snapshot is said to suffer exactly if it cannot be read.
            suffering = {snapshot for damage in report.damages for snapshot in damage.snapshots}
            for snapshot in await listed(repository) if folder != "pages" else []:
                try:
                    await read(repository, snapshot)
                except IcecoreError:
                    assert snapshot in suffering, (name, [str(damage) for damage in report.damages])
            if folder in ("index", "pages"):
                assert not suffering
        assert (
            tried
            == ({"shards", "nodes", "snapshots", "index", "pages"} if harm is not swap else tried)
            and tried
        )

    asyncio.run(body())


@pytest.mark.parametrize("harm", [flip, truncate, empty, remove])
@pytest.mark.parametrize("name", ["config", "keys/00000000"])
def test_damaged_identity(harm: Harm, name: str) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        harm(backend.objects, f"copies/{name}")
        assert [damage.name for damage in (await check(repository)).damages] == [f"copies/{name}"]
        harm(backend.objects, name)
        report = await check(repository)
        assert {damage.name for damage in report.damages} == {name, f"copies/{name}"}
        with pytest.raises(IcecoreError):
            await StoredRepository.open(backend)

    asyncio.run(body())


def test_log_entries_that_are_missing() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        await build(backend)
        names = sorted(name for name in backend.objects if name.startswith("log/"))
        del backend.objects[names[5]]
        report = await check(await StoredRepository.open(backend))
        assert [(damage.kind, damage.name) for damage in report.damages] == [
            ("log entry", names[5])
        ]
        # Without its newest entries it is an older state: to a client that has seen more, that is a
        # rollback; the check finds what it can.
        for name in names[:5]:
            del backend.objects[name]
        assert (await check(await StoredRepository.open(backend))).damages

    asyncio.run(body())


def test_everything_at_once_is_reported_not_raised() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        first, second, third = await build(backend)
        for name in sorted(backend.objects):
            if name.split("/")[0] in ("shards", "nodes", "snapshots", "index"):
                random.Random(name).choice([flip, truncate, empty, remove])(backend.objects, name)
        repository = await StoredRepository.open(backend)
        report = await check(repository, read_data=1.0)
        assert {first, second, third} == {
            snapshot for damage in report.damages for snapshot in damage.snapshots
        }
        assert {"manifest"} <= {damage.kind for damage in report.damages}
        # Nothing is collected while it is unknown what the snapshots reach.
        before = {name for name in backend.objects if not name.startswith(("log/", "pages/"))}
        with pytest.raises((Damaged, ObjectMissing)):
            await collect(repository)
        assert {
            name for name in backend.objects if not name.startswith(("log/", "pages/"))
        } == before

    asyncio.run(body())


def test_a_damaged_index_costs_space_only() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        first = await take(repository, A)
        segment = next(name for name in backend.objects if name.startswith("index/"))
        flip(backend.objects, segment)
        repository = await StoredRepository.open(backend)
        second = await take(repository, A)
        assert await read(repository, first) == await read(repository, second) == A
        await repository.forget([first])
        await collect(repository)
        assert await read(repository, second) == A
        report = await check(repository)
        assert [damage.kind for damage in report.damages] == ["index segment"]
        index = Index(
            backend, (await repository.log.newest()).state.segments, repository.keys.segment
        )
        await index.load()
        assert len(index.damaged) == 1

    asyncio.run(body())


def test_a_check_runs_beside_a_collector() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository, other = (
            await StoredRepository.create(backend),
            await StoredRepository.open(backend),
        )
        for round_ in range(3):
            old = await take(repository, {cell: round_ * 30 + cell for cell in range(20)})
            await take(repository, {cell: round_ * 30 + cell for cell in range(2)})
            reports = [asyncio.create_task(check(other, read_data=1.0)) for _ in range(3)]
            await asyncio.sleep(0.01)
            await repository.forget([old])
            await collect(repository)
            for report in await asyncio.gather(*reports):
                assert report.sound, [str(damage) for damage in report.damages]
        await collect(repository)
        assert (await sound(repository, unreached=0)).snapshots == 3
        assert log_name(1) in backend.objects

    asyncio.run(body())
