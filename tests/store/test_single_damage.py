"""Each object of a repository, one at a time, damaged in every way: it is named, everything outside
it can be recovered, and nobody is locked out.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from unittest import mock

import pytest

from icecore.errors import IcecoreError
from icecore.events import Event
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.envelope import seal
from icecore.store.format.hints import HINTS_KIND, TOUCHED
from icecore.store.log import index
from icecore.store.log.repository import StoredRepository
from icecore.store.log.watermark import Watermark
from icecore.store.maintenance.check import check
from icecore.store.maintenance.repair import Repairer
from tests.store.miniature import CHEAP, PASSPHRASE, collect, listed, read, sound, take
from tests.store.test_check import Harm, empty, extend, flip, remove, truncate

A = {cell: cell for cell in range(6)}
B = {**A, 3: 77, 9: 78}
CONTENTS = (A, B, {1: 200, 2: 201})
#: What any snapshot can be read without: nothing is lost with one of them.
REPLACEABLE = {"config", "keys", "copies", "log", "pages", "index", "filters", "hints", "sessions"}
#: What no dump and no restore needs.
ADVICE = {"copies", "index", "filters", "hints", "sessions"}


@pytest.fixture(autouse=True)
def every_segment_has_a_filter() -> Iterator[None]:
    with mock.patch.object(index, "FILTER_ENTRIES", 1):
        yield


def opening(
    backend: MemoryBackend,
    watermark: Watermark | None = None,
    emit: Callable[[Event], None] = lambda event: None,
):  # type: ignore[no-untyped-def]
    return StoredRepository.open(
        backend, passphrase=lambda: PASSPHRASE, watermark=watermark, emit=emit
    )


def flip_at(share: float) -> Harm:
    """Flip a bit at this part of the object."""

    def harm(objects: dict[str, bytes], name: str) -> None:
        data = bytearray(objects[name])
        data[min(len(data) - 1, int(len(data) * share))] ^= 1 << random.Random(name).randrange(8)
        objects[name] = bytes(data)

    return harm


async def build(encrypted: bool) -> tuple[MemoryBackend, dict[str, dict[int, int]], Watermark]:
    """Return a repository that has an object of every kind, and what a client has seen of it."""
    backend, watermark = MemoryBackend(), Watermark()
    repository = await StoredRepository.create(
        backend, passphrase=(lambda: PASSPHRASE) if encrypted else None, cost=CHEAP
    )
    first = await take(repository, CONTENTS[0])
    taken = [first, await take(repository, CONTENTS[1], first), await take(repository, CONTENTS[2])]
    filler = [
        await take(repository, {number: 210 + number}) for number in range(40)
    ]  # enough for a page
    await repository.forget(filler)
    await collect(repository)
    await repository.log.trim(12)
    name = f"hints/job/{TOUCHED}{0:016x}-0"
    await backend.create(name, [seal(HINTS_KIND, b"\x80", repository.keys.hints, name).data])
    session = await repository.begin(None, "dump", beat_seconds=None)
    await session.heartbeat()
    await sound(repository)
    await (await opening(backend, watermark)).snapshots()
    assert {one.split("/")[0] for one in backend.objects} == REPLACEABLE | {
        "shards",
        "nodes",
        "snapshots",
    }
    return backend, dict(zip(taken, CONTENTS, strict=True)), watermark


def kind(name: str) -> str:
    """Return the common prefix of names of the same kind of object."""
    parts = name.split("/")
    return "/".join(parts[:2]) if parts[0] == "copies" else parts[0]


async def readable(repository: StoredRepository, contents: dict[str, dict[int, int]]) -> set[str]:
    good = set()
    for snapshot, content in contents.items():
        try:
            if await read(repository, snapshot) == content:
                good.add(snapshot)
        except IcecoreError:
            pass
    return good


@pytest.mark.parametrize(
    ("harm", "encrypted"),
    [
        pytest.param(flip, True, id="flip-encrypted"),
        pytest.param(flip_at(0.0), False, id="flip-first"),
        pytest.param(flip_at(0.5), False, id="flip-middle"),
        pytest.param(flip_at(1.0), True, id="flip-last-encrypted"),
        pytest.param(truncate, False, id="truncate"),
        pytest.param(empty, False, id="empty"),
        pytest.param(extend, False, id="extend"),
        pytest.param(remove, False, id="remove"),
        pytest.param(remove, True, id="remove-encrypted"),
        pytest.param("another's", False, id="another's"),
        pytest.param("another's", True, id="another's-encrypted"),
    ],
)
def test_any_one_object(harm: Harm | str, encrypted: bool) -> None:
    async def body() -> None:
        whole, contents, watermark = await build(encrypted)
        strange, _, _ = await build(encrypted)
        logs = sorted(name for name in whole.objects if name.startswith("log/"))
        tried = set()
        for name in sorted(whole.objects):
            folder = name.split("/")[0]
            if folder == "log" and logs.index(name) not in (0, 1, 5, len(logs) - 1):
                continue  # they are all alike
            backend = MemoryBackend(dict(whole.objects))
            if harm == "another's":
                # A whole object of the same kind, of another repository.
                backend.objects[name] = next(
                    data
                    for other, data in sorted(strange.objects.items())
                    if kind(other) == kind(name)
                )
            else:
                assert callable(harm)
                harm(backend.objects, name)
            tried.add(folder)
            await one(backend, name, folder, contents, watermark)
        assert tried == REPLACEABLE | {"shards", "nodes", "snapshots"}

    async def one(
        backend: MemoryBackend,
        name: str,
        folder: str,
        contents: dict[str, dict[int, int]],
        watermark: Watermark,
    ) -> None:
        mine, other = Watermark(), Watermark()
        mine.save(watermark.load())
        other.save(watermark.load())
        repository = await opening(backend, mine)
        report = await check(repository, read_data=1.0)
        missing = name not in backend.objects
        if missing and (
            folder in ("filters", "hints", "sessions")
            or name == max(n for n in [*backend.objects, name] if n.startswith("log/"))
        ):
            assert report.sound, (
                name,
                [str(damage) for damage in report.damages],
            )  # advice may be missing, and old entries are trimmed
        else:
            assert not report.sound, name
            named = [
                damage for damage in report.damages if damage.name == name or name in damage.why
            ]
            assert named, (name, [str(damage) for damage in report.damages])
        newest = name == min(n for n in [*backend.objects, name] if n.startswith("log/"))
        before = await readable(repository, contents)
        if newest:
            assert not before
            before = set(contents)
        if folder in REPLACEABLE - {"log", "pages"}:
            assert before == set(contents), name
        if folder in ADVICE or folder in ("config", "keys"):
            # It stops neither a dump nor a restore.
            copy = MemoryBackend(dict(backend.objects))
            opened = await opening(copy)
            assert await read(opened, await take(opened, {4: 44, **A}, next(iter(contents)))) == {
                4: 44,
                **A,
            }
        done = await Repairer(repository, accept_rollback=newest and missing).apply()
        assert not done.beyond, (name, done.beyond)
        fresh = await opening(backend)
        assert set(await listed(fresh)) == set(contents), name
        after = await readable(fresh, contents)
        assert before <= after and (folder not in REPLACEABLE or after == set(contents)), name
        lost = {record.snapshot for record in await fresh.snapshots() if record.quarantined}
        assert lost == contents.keys() - after == done.quarantine.keys()
        report = await sound(fresh)
        assert (await Repairer(fresh).plan()).empty
        await collect(fresh, fence_seconds=0)
        await sound(fresh, unreached=0)
        assert await readable(await opening(backend), contents) == after
        # Another client that had seen the newest state goes on, and so does this one.
        for seen in (other, mine):
            opened = await opening(backend, seen)
            assert await read(opened, await take(opened, {1: 7}, next(iter(after), None))) == {1: 7}

    asyncio.run(asyncio.wait_for(body(), 300))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("harm", [flip, truncate, empty, remove])
def test_a_repository_of_an_earlier_version_gets_its_second_copies(
    harm: Harm, encrypted: bool
) -> None:
    async def body() -> None:
        whole, contents, _ = await build(encrypted)
        for name in [name for name in whole.objects if name.startswith("copies/")]:
            del whole.objects[name]
        report = await sound(await opening(whole))
        done = await Repairer(await opening(whole)).apply()
        assert {fix.name for fix in done.fixes} == {"copies/config", "copies/keys/00000000"}
        assert (await Repairer(await opening(whole)).plan()).empty and (
            await sound(await opening(whole))
        ).snapshots == report.snapshots
        for name in ("config", "keys/00000000"):
            assert whole.objects[f"copies/{name}"] == whole.objects[name]
            backend = MemoryBackend(dict(whole.objects))
            harm(backend.objects, name)
            told: list[Event] = []
            assert await readable(await opening(backend, emit=told.append), contents) == set(
                contents
            )
            assert [event.name for event in told] == ["store.copy_read"]
            await Repairer(await opening(backend)).apply()
            assert backend.objects[name] == whole.objects[name]

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_configuration_that_is_lost_with_its_copy_is_made_anew(encrypted: bool) -> None:
    async def body() -> None:
        backend, contents, watermark = await build(encrypted)
        config = (await opening(backend)).config
        for name in ("config", "copies/config"):
            flip(backend.objects, name)
        with pytest.raises(IcecoreError) as raised:
            await opening(backend)
        assert "'icecore repair'" in raised.value.cure
        repository = await StoredRepository.open(
            backend, passphrase=lambda: PASSPHRASE, rebuild=True
        )
        await Repairer(repository).apply()
        fresh = await opening(backend, watermark)
        assert (
            await readable(fresh, contents) == set(contents)
            and (fresh.config.id == config.id) == encrypted
        )
        await sound(fresh)

    asyncio.run(asyncio.wait_for(body(), 60))
