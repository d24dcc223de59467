"""A log whose newest entries are lost continues from what is intact, with every snapshot whose
manifest is intact, and without deceiving any client or writer.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from icecore.errors import Damaged, IcecoreError, RollbackDetected, SessionFenced, StoreError
from icecore.events import Event
from icecore.store.backend.faulty import Crashed, stop_at
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format import gaps
from icecore.store.format.names import log_name
from icecore.store.format.state import Gap, LogState
from icecore.store.log import catalog
from icecore.store.log.chain import Log
from icecore.store.log.lease import holder
from icecore.store.log.lease import take as take_lease
from icecore.store.log.repository import StoredRepository
from icecore.store.log.watermark import FileWatermark, Watermark
from icecore.store.maintenance.check import check
from icecore.store.maintenance.gc import Collector, Options
from icecore.store.maintenance.relog import RECOVERED
from icecore.store.maintenance.repair import Repairer
from tests.store.miniature import (
    CHEAP,
    PASSPHRASE,
    collect,
    listed,
    put,
    read,
    reopened,
    sound,
    take,
)
from tests.store.test_check import Harm, empty, extend, flip, remove, swap, truncate

A = {cell: cell for cell in range(6)}
B = {**A, 3: 77, 9: 78}
C = {1: 200, 2: 201}
LAST = {5: 91, 6: 92}


class Place:
    """A repository with some history, and a client that has seen all of it.

    Attributes:
        contents: What its snapshots hold, the last one's commit last.
        forgotten: One that was forgotten and not collected.
    """

    def __init__(self, encrypted: bool = False) -> None:
        self.backend = MemoryBackend()
        self.contents: dict[str, dict[int, int]] = {}
        self.forgotten = ""
        self.last = ""
        self.encrypted = encrypted
        self.watermark = Watermark()

    async def build(self) -> Place:
        given = (lambda: PASSPHRASE) if self.encrypted else None
        repository = await StoredRepository.create(self.backend, passphrase=given, cost=CHEAP)
        first = await take(repository, A)
        self.contents[first] = A
        self.contents[await take(repository, B, first)] = B
        self.forgotten = await take(repository, {1: 240, 2: 241})
        await repository.forget([self.forgotten])
        self.contents[await take(repository, C)] = C
        self.last = await take(repository, LAST, first)
        self.contents[self.last] = LAST
        await (await self.open(self.watermark)).snapshots()
        return self

    async def open(
        self, watermark: Watermark | None = None, *, told: list[Event] | None = None
    ) -> StoredRepository:
        emit = (lambda event: told.append(event)) if told is not None else (lambda event: None)
        given = (lambda: PASSPHRASE) if self.encrypted else None
        return await StoredRepository.open(
            self.backend, passphrase=given, watermark=watermark, emit=emit
        )

    @property
    def entries(self) -> list[str]:
        """Names of log entries, the newest first."""
        return sorted(name for name in self.backend.objects if name.startswith("log/"))

    async def readable(self) -> dict[str, dict[int, int]]:
        """Return what can be read, by snapshot."""
        repository = await self.open()
        return {snapshot: await read(repository, snapshot) for snapshot in await listed(repository)}


async def repaired(
    place: Place, *, accept: bool = False, watermark: Watermark | None = None
) -> StoredRepository:
    """Check, plan and repair; then everything is intact, and the collector deletes nothing that is
    needed.
    """
    repository = await place.open(watermark)
    assert not (await check(repository, read_data=1.0)).sound
    before = dict(place.backend.objects)
    plan = await Repairer(repository, accept_rollback=accept).plan()
    assert {name: data for name, data in place.backend.objects.items() if name in before} == before
    done = await Repairer(repository, accept_rollback=accept).apply()
    assert (
        done.fixes and done.recovered == plan.recovered and not done.quarantine and not done.beyond
    )
    await sound(await place.open())
    held = await place.readable()
    for _ in range(2):
        await collect(await place.open(), fence_seconds=0)
        await sound(await place.open())
    assert await place.readable() == held
    await sound(await place.open(), unreached=0)
    assert (await Repairer(await place.open()).plan()).empty
    return repository


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
@pytest.mark.parametrize("harm", [flip, truncate, empty, extend, swap])
@pytest.mark.parametrize("lost", [1, 2, 3, 100])
def test_the_newest_entries_are_damaged(harm: Harm, lost: int, encrypted: bool) -> None:
    async def body() -> None:
        place = await Place(encrypted).build()
        whole = dict(place.backend.objects)
        damaged = place.entries[:lost]
        for name in damaged:
            if harm is swap:
                place.backend.objects[name] = whole[
                    place.entries[-1] if name != place.entries[-1] else place.entries[0]
                ]
            else:
                harm(place.backend.objects, name)
        with pytest.raises(Damaged) as raised:
            await (await place.open()).snapshots()
        assert raised.value.name == damaged[0]
        report = await check(await place.open())
        assert {damage.name for damage in report.damages if damage.kind == "log entry"} >= set(
            damaged
        )
        await repaired(place)
        held = await place.readable()
        assert place.contents.items() <= held.items()
        # Where no entry tells that it was forgotten, a snapshot that is still there comes back.
        assert held.keys() - place.contents.keys() == ({place.forgotten} if lost == 100 else set())
        records = {record.snapshot: record for record in await (await place.open()).snapshots()}
        assert RECOVERED in records[place.last].tags
        found = {snapshot for snapshot, record in records.items() if RECOVERED in record.tags}
        assert (found == {place.last}) == (lost in (1, 2))
        # Whoever saw an entry that is lost is told, once, and goes on; the log does.
        told: list[Event] = []
        seen = await place.open(place.watermark, told=told)
        assert set(await listed(seen)) == held.keys()
        assert [event.name for event in told] == ["log.repaired"]
        await take(seen, {7: 7}, place.last)
        await listed(await place.open(place.watermark, told=told))
        assert len(told) == 1

    asyncio.run(asyncio.wait_for(body(), 100))


@pytest.mark.parametrize("lost", [1, 3, 100])
def test_the_newest_entries_are_missing(lost: int) -> None:
    """This cannot be told from an older copy that was put back, so a person decides."""

    async def body() -> None:
        place = await Place().build()
        missing = place.entries[:lost]
        for name in missing:
            remove(place.backend.objects, name)
        with pytest.raises(RollbackDetected, match="already seen") as raised:
            await (await place.open(place.watermark)).snapshots()
        assert "icecore repair --accept-rollback" in raised.value.cure
        report = await check(await place.open(place.watermark))
        assert missing[0] in {damage.name for damage in report.damages}
        for work in (
            Repairer(await place.open(place.watermark)).plan,
            Repairer(await place.open(place.watermark)).apply,
        ):
            with pytest.raises(RollbackDetected):
                await work()
        other = another_client(place.watermark)
        await repaired(place, accept=True, watermark=place.watermark)
        assert place.contents.items() <= (await place.readable()).items()
        told: list[Event] = []
        assert set(await listed(await place.open(other, told=told))) >= set(place.contents)
        assert [event.name for event in told] == ["log.repaired"]

    asyncio.run(asyncio.wait_for(body(), 100))


def another_client(watermark: Watermark) -> Watermark:
    """Return another client that has seen the same."""
    other = Watermark()
    other.save(watermark.load())
    return other


def test_all_entries_are_missing_and_nobody_knows_what_there_was() -> None:
    async def body() -> None:
        place = await Place().build()
        for name in place.entries:
            remove(place.backend.objects, name)
        with pytest.raises(Damaged, match="no entry at all"):
            await (await place.open()).snapshots()
        await repaired(place)
        assert (await (await place.open()).log.newest()).generation > 1 << 32
        assert place.contents.items() <= (await place.readable()).items()
        # Beyond all that anybody has seen.
        assert set(await listed(await place.open(place.watermark))) >= set(place.contents)

    asyncio.run(asyncio.wait_for(body(), 100))


@pytest.mark.parametrize("harm", [flip, remove])
@pytest.mark.parametrize("which", ["second newest", "anchor", "first", "run"])
def test_older_entries_are_lost(which: str, harm: Harm, monkeypatch: pytest.MonkeyPatch) -> None:
    """They only serve to follow the log, so entries that clients have seen before them or among
    them are still followed.
    """
    monkeypatch.setattr("icecore.store.log.entries.ANCHOR_EVERY", 8)

    async def body() -> None:
        place = await Place().build()
        watermarks = []
        repository = await place.open()
        for number in range(40):
            if number % 3 == 0:
                watermarks.append(another_client(place.watermark))
            await take(repository, {1: number})
            await (await place.open(place.watermark)).snapshots()
        newest = (await repository.log.newest()).generation
        chosen = {
            "second newest": [newest - 1],
            "anchor": [newest // 8 * 8 - 7],
            "first": [1],
            "run": list(range(20, 70)),
        }[which]
        names = [log_name(generation) for generation in chosen]
        for name in names:
            harm(place.backend.objects, name)
        report = await check(await place.open())
        assert {damage.name for damage in report.damages} == set(names) or (
            which == "first" and harm is remove and report.sound
        )
        held = await place.readable()
        for watermark in watermarks if which != "run" and harm is flip else []:
            # One that is damaged keeps nobody from following the log: its neighbours tell.
            assert set(await listed(await place.open(another_client(watermark)))) == held.keys()
        blind = [
            watermark
            for watermark in watermarks
            if which == "run" and harm is flip and watermark.load().generation < 60
        ]
        if blind:
            with pytest.raises(RollbackDetected, match="too many log entries are damaged"):
                await Repairer(await place.open(another_client(blind[0]))).apply()
            assert (await Repairer(await place.open(blind[0]), accept_rollback=True).apply()).fixes
            watermarks.remove(blind[0])
        done = await Repairer(await place.open()).apply()
        assert not done.recovered and not done.quarantine and not done.beyond
        assert await place.readable() == held
        await sound(await place.open())
        for watermark in watermarks:
            seen, told = watermark.load().generation, list[Event]()
            assert set(await listed(await place.open(watermark, told=told))) == held.keys()
            assert bool(told) == (
                seen in chosen and seen + 1 in chosen
            )  # the successor of the last one still names it
        await take(await place.open(), {1: 1})
        await (await place.open()).log.trim(20)
        await sound(await place.open())

    asyncio.run(asyncio.wait_for(body(), 100))


def test_an_unnoted_gap_and_another_log_are_not_believed(tmp_path: Path) -> None:
    """A gap speaks of its own log only: a client that saw another entry before the gap notices."""

    async def body() -> None:
        place = await Place().build()
        fork = MemoryBackend(dict(place.backend.objects))
        mine = FileWatermark(tmp_path / "seen")
        await take(await StoredRepository.open(fork), {1: 1})
        await (await StoredRepository.open(fork, watermark=mine)).snapshots()
        for _ in range(2):
            await take(await place.open(), {1: 2})
        flip(place.backend.objects, place.entries[0])
        # The repository was forked; what this client has seen is whole and not damaged, so it is
        # not in the gap.
        with pytest.raises((RollbackDetected, Damaged)):
            await (await place.open(mine)).snapshots()
        with pytest.raises(RollbackDetected):
            await Repairer(await place.open(mine)).apply()
        await Repairer(await place.open()).apply()
        with pytest.raises(RollbackDetected):
            await (await place.open(mine)).snapshots()
        await Repairer(await place.open(mine), accept_rollback=True).apply()
        assert set(await listed(await place.open(mine))) >= set(place.contents)

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_fork_is_not_hidden_by_an_older_entry_that_is_lost() -> None:
    """A client saw another entry in the place of the lost one: the next entry does not refer to
    what it saw.
    """

    async def body() -> None:
        place = await Place().build()
        fork = MemoryBackend(dict(place.backend.objects))
        mine = Watermark()
        repository = await StoredRepository.open(fork, watermark=mine)
        await repository.update(place.last, pinned=True)
        await repository.snapshots()
        honest = await place.open()
        for tag in ("one", "two"):
            await honest.update(place.last, tags=[tag])
        assert log_name(mine.load().generation) == place.entries[1]
        flip(place.backend.objects, place.entries[1])
        done = await Repairer(await place.open()).apply()
        assert [fix.kind for fix in done.fixes] == ["log entry"]
        with pytest.raises(RollbackDetected):
            await (await place.open(mine)).snapshots()
        told: list[Event] = []
        assert await listed(await place.open(place.watermark, told=told)) and not told

    asyncio.run(asyncio.wait_for(body(), 60))


def test_what_had_been_forgotten_stays_so_and_what_was_not_committed_is_marked() -> None:
    async def body() -> None:
        place = await Place().build()
        repository = await place.open()
        # A writer dies between its manifest and its commit; a snapshot is forgotten by the entry
        # that is lost.
        session = await repository.begin(None, "dump", beat_seconds=None)
        orphan, _ = await put(repository, session, {8: 180})
        first = next(iter(place.contents))
        await repository.forget([first])
        flip(place.backend.objects, place.entries[0])
        await repaired(place)
        records = {record.snapshot: record for record in await (await place.open()).snapshots()}
        assert records.keys() == place.contents.keys() | {orphan.snapshot}
        assert {snapshot for snapshot, record in records.items() if RECOVERED in record.tags} == {
            orphan.snapshot
        }
        assert await read(await place.open(), orphan.snapshot) == {8: 180}

    asyncio.run(asyncio.wait_for(body(), 60))


def test_an_orphan_with_missing_parts_is_not_listed() -> None:
    async def body() -> None:
        place = await Place().build()
        repository = await place.open()
        session = await repository.begin(None, "dump", beat_seconds=None)
        before = set(place.backend.objects)
        orphan, _ = await put(repository, session, {8: 180})
        shard = next(
            name for name in place.backend.objects.keys() - before if name.startswith("shards/")
        )
        del place.backend.objects[shard]
        flip(place.backend.objects, place.entries[0])
        done = await Repairer(await place.open()).apply()
        assert orphan.manifest in done.unlisted and orphan.snapshot not in done.recovered
        assert set(await listed(await place.open())) == set(place.contents)
        await sound(await place.open())

    asyncio.run(asyncio.wait_for(body(), 60))


def test_a_job_that_runs_keeps_its_lease() -> None:
    """A repair continues the log; another node that wants to run the job still has to wait."""

    async def body() -> None:
        place = await Place().build()
        repository = await place.open()
        lease = await take_lease(repository, "train", where="here")
        await take(repository, {1: 1})
        flip(place.backend.objects, place.entries[0])
        await Repairer(await place.open()).apply()
        held = await holder(await place.open(), "train")
        assert held is not None and held.id == lease.session
        await lease.release()
        assert await holder(await place.open(), "train") is None

    asyncio.run(asyncio.wait_for(body(), 60))


def test_sessions_of_before_are_void_and_what_they_may_use_stays() -> None:
    async def body() -> None:
        place = await Place().build()
        repository = await place.open()
        writer = await repository.begin(None, "dump", beat_seconds=None)
        record, entries = await put(repository, writer, {8: 180})
        reader = await repository.read_session(next(iter(place.contents)), beat_seconds=None)
        assert reader.base is not None
        await repository.forget([reader.base.snapshot])
        await take(repository, {1: 1})
        flip(place.backend.objects, place.entries[0])
        await Repairer(await place.open()).apply()
        with pytest.raises(SessionFenced):
            await writer.commit(record, entries)
        assert not await writer.abort()  # deletes nothing: the repair has listed what it wrote
        assert await read(await place.open(), record.snapshot) == {8: 180}
        # What the reader had pinned is kept, as long as it may be reading.
        await Collector(await place.open(), Options()).collect()
        assert await read(repository, reader.base) == A
        await Collector(await place.open(), Options(fence_seconds=0)).collect()
        with pytest.raises(IcecoreError):
            await read(repository, reader.base)
        await sound(await place.open(), unreached=0)

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("harm", [flip, remove])
def test_a_writer_that_slept_does_not_win_a_lost_generation(harm: Harm) -> None:
    async def body() -> None:
        place = await Place().build()
        sleeper = Log(place.backend, (await place.open()).keys.log)
        await sleeper.newest()
        watermark = another_client(place.watermark)
        await take(await place.open(watermark), {1: 1})
        for name in place.entries[:2]:
            harm(place.backend.objects, name)
        await Repairer(await place.open(watermark), accept_rollback=True).apply()

        async def change(state: LogState, pages: catalog.Pages) -> LogState:
            return msgspec.structs.replace(state, changes=["late"])

        entry = await sleeper.transact(change, "late", prove=False)
        newest = await (await place.open()).log.newest()
        assert newest.digest == entry.digest, (
            "its entry is the newest, or it would have been lost without a word"
        )
        await sound(await place.open())

    asyncio.run(asyncio.wait_for(body(), 60))


def test_two_repairs_at_once() -> None:
    async def body() -> None:
        place = await Place().build()
        flip(place.backend.objects, place.entries[0])
        results = await asyncio.gather(
            *(Repairer(repository).apply() for repository in [await place.open() for _ in range(3)])
        )
        assert sum(bool(result.recovered) for result in results) == 1
        await sound(await place.open())
        assert place.contents.items() == (await place.readable()).items()

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("effect", [False, True])
def test_a_repair_that_stops_anywhere_can_be_done_again(effect: bool) -> None:
    async def body() -> int:
        place = await Place().build()
        flip(place.backend.objects, place.entries[0])
        remove(place.backend.objects, place.entries[1])
        written, number = dict(place.backend.objects), 0
        while True:
            number += 1
            place.backend = MemoryBackend(dict(written))
            opened, faulty = await reopened(place.backend)
            faulty.plan = stop_at(len(faulty.calls) + number, effect=effect)
            try:
                await Repairer(opened, accept_rollback=True).apply()
            except (Crashed, StoreError, Damaged):
                await Repairer(await place.open(), accept_rollback=True).apply()
                await sound(await place.open())
                assert place.contents.items() <= (await place.readable()).items()
                continue
            return number

    assert asyncio.run(asyncio.wait_for(body(), 100)) > 20


@pytest.mark.parametrize("known", [False, True], ids=["new client", "known"])
@pytest.mark.parametrize("lost", [0, 1, 100])
@pytest.mark.parametrize(
    "planted",
    [["log/" + "0" * 16], ["log/" + "0" * 15 + "1"], [log_name(1 << 50), "log/" + "0" * 16]],
    ids=["last", "one below", "two"],
)
def test_a_name_planted_far_beyond_the_log_bricks_nothing(
    planted: list[str], lost: int, known: bool
) -> None:
    async def body() -> None:
        place = await Place().build()
        newest = place.watermark.load().generation
        damaged = place.entries[:lost]
        for name in damaged:
            flip(place.backend.objects, name)
        for name in planted:
            place.backend.objects[name] = b""
        watermark = another_client(place.watermark) if known else Watermark()
        if not lost:
            # It is passed over: whoever reads and writes is told, and goes on.
            told: list[Event] = []
            opened = await place.open(watermark, told=told)
            assert set(await listed(opened)) == set(place.contents)
            assert [
                event.fields["object"] for event in told if event.name == "log.planted"
            ] == sorted(planted, reverse=True)
            snapshot = await take(opened, {7: 7}, place.last)
            assert (await opened.log.newest()).generation > newest
            place.contents[snapshot] = {7: 7}
        report = await check(await place.open(watermark))
        assert {damage.name for damage in report.damages} >= {*planted, *damaged}
        await repaired(place, watermark=watermark)
        assert not set(planted) & set(place.backend.objects)
        assert place.contents.items() <= (await place.readable()).items()
        assert (await (await place.open()).log.newest()).generation < newest + 100
        await take(await place.open(watermark), {8: 8})
        await sound(await place.open())

    asyncio.run(asyncio.wait_for(body(), 100))


def test_a_name_planted_within_reach_takes_the_log_there_and_no_further() -> None:
    """Absent entries below it could indicate an older copy, so a person decides. That does not
    exhaust the generations.
    """

    async def body() -> None:
        place = await Place().build()
        planted = log_name(place.watermark.load().generation + 5000)
        place.backend.objects[planted] = b""
        with pytest.raises(RollbackDetected, match="4999 log entries"):
            await Repairer(await place.open()).apply()
        await repaired(place, accept=True)
        assert (
            await (await place.open()).log.newest()
        ).generation > place.watermark.load().generation + 5000
        assert place.contents.items() == (await place.readable()).items()

    asyncio.run(asyncio.wait_for(body(), 100))


@pytest.mark.parametrize("known", [False, True], ids=["new client", "known"])
@pytest.mark.parametrize("whole", [0, 2], ids=["none is whole", "older are whole"])
def test_absent_entries_below_a_damaged_one_are_not_passed_over(whole: int, known: bool) -> None:
    """Entries are deleted, and the newest one is replaced by one byte: what is left is an older
    copy, whatever the newest name is.
    """

    async def body() -> None:
        place = await Place().build()
        names = place.entries
        for name in names[1 : len(names) - whole]:
            remove(place.backend.objects, name)
        place.backend.objects[names[0]] = b"x"
        before = dict(place.backend.objects)
        watermark = another_client(place.watermark) if known else Watermark()
        for work in (
            Repairer(await place.open(watermark)).plan,
            Repairer(await place.open(watermark)).apply,
        ):
            with pytest.raises(RollbackDetected, match="are absent") as raised:
                await work()
            assert "icecore repair --accept-rollback" in raised.value.cure
        assert {name for name in place.backend.objects if name.startswith("log/")} == {
            name for name in before if name.startswith("log/")
        }
        await repaired(place, accept=True, watermark=watermark)
        assert place.contents.items() <= (await place.readable()).items()

    asyncio.run(asyncio.wait_for(body(), 100))


def test_nothing_is_written_where_no_generation_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    async def body() -> None:
        place = await Place().build()
        flip(place.backend.objects, place.entries[0])
        before = dict(place.backend.objects)
        newest = place.watermark.load().generation
        monkeypatch.setattr("icecore.store.maintenance.relog.LAST_GENERATION", newest + (1 << 40))
        with pytest.raises(StoreError, match="hardly any generations left"):
            await Repairer(await place.open()).apply()
        assert place.backend.objects == before
        place = await Place().build()
        for module in ("reading", "chain"):
            monkeypatch.setattr(
                f"icecore.store.log.{module}.LAST_GENERATION", place.watermark.load().generation
            )
        assert set(await listed(await place.open())) == set(place.contents)
        with pytest.raises(StoreError, match="last generation"):
            await (await place.open()).update(place.last, pinned=True)

    asyncio.run(asyncio.wait_for(body(), 100))


@pytest.mark.parametrize(
    ("noted", "start", "wanted", "found"),
    [
        ([], 9, 3, 3),
        ([Gap(4, 5)], 9, 3, 3),
        ([Gap(4, 5)], 9, 4, 6),
        ([Gap(4, 5)], 6, 4, 3),
        ([Gap(1, 5)], 6, 4, 0),
        ([Gap(1, 2), Gap(4, 8)], 9, 5, 3),
    ],
)
def test_stepping_over_gaps(noted: list[Gap], start: int, wanted: int, found: int) -> None:
    assert gaps.step(noted, start, wanted) == found


def test_gaps_are_joined_and_cut() -> None:
    made = gaps.joined([Gap(7, 9, b"c"), Gap(2, 3, b"a"), Gap(4, 4, b"b"), Gap(8, 8)])
    assert made == [Gap(2, 4, b"a"), Gap(7, 9, b"c")]
    assert (
        gaps.between(made, 1, 12) == [(10, 12), (5, 6), (1, 1)] and gaps.between(made, 2, 3) == []
    )
    assert gaps.kept(made, 4) == [Gap(7, 9, b"c")] and gaps.ranges([3, 1, 2, 9]) == [(1, 3), (9, 9)]
