"""The transaction log: every transaction takes effect exactly once, whoever else writes, whichever
replies are lost, and however long a writer sleeps.
"""

from __future__ import annotations

import asyncio
import itertools
import multiprocessing
import random
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import pytest

from icecore.errors import (
    Damaged,
    NotFound,
    ObjectExists,
    RecordDamaged,
    RollbackDetected,
    StoreError,
)
from icecore.store.backend.base import Backend, Buffer, ObjectInfo
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from icecore.store.backend.local import LocalBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.names import log_generation, log_name
from icecore.store.format.state import (
    LogState,
    SegmentRef,
    SessionRecord,
    decode_entry,
    encode_entry,
)
from icecore.store.log import chain as chain_module
from icecore.store.log import reading
from icecore.store.log.catalog import Pages
from icecore.store.log.chain import Log
from icecore.store.log.watermark import FileWatermark, Seen, Watermark

KEY = b"k" * 32


def enter(identity: str) -> object:
    """Return a change that adds a session with this id, whatever the state."""

    async def change(state: LogState, pages: Pages) -> LogState:
        record = SessionRecord(identity, state.generation, "test", "host", 0)
        return msgspec.structs.replace(state, sessions=[*state.sessions, record])

    return change


async def founded(backend: Backend) -> Log:
    log = Log(backend, KEY)
    await log.found()
    return log


async def write(log: Log, ids: list[str]) -> None:
    for identity in ids:
        await log.transact(enter(identity), "enter")  # type: ignore[arg-type]


def drawn(count: int) -> list[str]:
    return [secrets.token_hex(16) for _ in range(count)]


async def chain(log: Log) -> LogState:
    """Return the newest state, after following the whole chain back to the beginning."""
    newest = following = await log.newest()
    for generation in range(newest.generation - 1, 0, -1):
        entry = await log.read(generation)
        assert following.state.predecessor == entry.digest
        following = entry
    return newest.state


def test_transactions_of_one_process_share_entries() -> None:
    async def body() -> None:
        log = await founded(MemoryBackend())
        ids = drawn(50)
        await asyncio.gather(*(write(log, [identity]) for identity in ids))
        state = await chain(log)
        assert sorted(record.id for record in state.sessions) == sorted(ids)
        assert state.generation < 10

    asyncio.run(body())


def test_many_clients_contend() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        await founded(backend)
        ids = [drawn(10) for _ in range(8)]
        await asyncio.gather(*(write(Log(backend, KEY), mine) for mine in ids))
        state = await chain(Log(backend, KEY))
        assert sorted(record.id for record in state.sessions) == sorted(itertools.chain(*ids))
        # Each client's transactions took place in the order in which it made them.
        order = [record.id for record in state.sessions]
        for mine in ids:
            assert [identity for identity in order if identity in mine] == mine

    asyncio.run(body())


def write_here(root: str, ids: list[str]) -> None:
    """A client in a separate thread or process."""

    async def body() -> None:
        backend = LocalBackend(root)
        await write(Log(backend, KEY), ids)
        await backend.close()

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("kind", ["threads", "processes"])
def test_contention_on_a_real_directory(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is spawned finds this module by its name; last on the path, so that the installed package
    # comes first.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    backend = LocalBackend(tmp_path)
    asyncio.run(founded(backend))
    ids = [drawn(12) for _ in range(4)]
    if kind == "threads":
        with ThreadPoolExecutor(4) as pool:
            list(pool.map(write_here, [str(tmp_path)] * 4, ids))
    else:
        context = multiprocessing.get_context("spawn")
        processes = [context.Process(target=write_here, args=(str(tmp_path), mine)) for mine in ids]
        for process in processes:
            process.start()
        for process in processes:
            process.join(90)
            assert process.exitcode == 0

    async def look() -> None:
        fresh = LocalBackend(tmp_path)
        state = await chain(Log(fresh, KEY))
        assert sorted(record.id for record in state.sessions) == sorted(itertools.chain(*ids))
        assert state.generation == 1 + 48
        await fresh.close()

    asyncio.run(look())


@pytest.mark.parametrize("seed", range(5))
def test_lost_replies_and_failures_are_settled(seed: int) -> None:
    """With four clients, a third of the creates fails before its effect or loses its reply."""

    async def body() -> None:
        inner = MemoryBackend()
        await founded(inner)
        dice = random.Random(seed)

        def plan(call: Call) -> Outcome:
            if call.operation != "create":
                return Outcome.PASS
            return dice.choice(
                [Outcome.PASS, Outcome.PASS, Outcome.PASS, Outcome.PASS, Outcome.FAIL, Outcome.LOSE]
            )

        ids = [drawn(8) for _ in range(4)]
        await asyncio.gather(*(write(Log(FaultyBackend(inner, plan), KEY), mine) for mine in ids))
        state = await chain(Log(inner, KEY))
        assert sorted(record.id for record in state.sessions) == sorted(itertools.chain(*ids))

    asyncio.run(body())


def test_an_unknown_outcome_is_said_to_be_unknown() -> None:
    async def body() -> None:
        inner = MemoryBackend()
        await founded(inner)
        for outcome in (Outcome.FAIL, Outcome.LOSE):
            backend = FaultyBackend(
                inner,
                lambda call, outcome=outcome: (
                    outcome if call.operation == "create" else Outcome.PASS
                ),  # type: ignore[misc]
            )
            log = Log(backend, KEY)
            if outcome is Outcome.FAIL:
                with pytest.raises(StoreError, match="unknown"):
                    await write(log, drawn(1))
            else:  # found out by the entry's own bytes
                await write(log, drawn(1))
        assert (await Log(inner, KEY).newest()).generation == 2

    asyncio.run(body())


class Sleeper(MemoryBackend):
    """Stops before creating a chosen name, until it is woken."""

    def __init__(self, objects: dict[str, bytes], name: str) -> None:
        super().__init__(objects)
        self.name = name
        self.asleep = asyncio.Event()
        self.wake = asyncio.Event()

    async def create(self, name: str, parts: object) -> None:
        if name == self.name:
            self.name = ""
            self.asleep.set()
            await self.wake.wait()
        await super().create(name, parts)  # type: ignore[arg-type]


@pytest.mark.parametrize("others", [3, 60])
@pytest.mark.parametrize("trimmed", [False, True])
def test_a_writer_that_slept_does_not_believe_that_it_won(
    others: int, trimmed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its generation was taken, and possibly trimmed again, while it slept: then its create
    succeeds, and must not count.
    """
    monkeypatch.setattr("icecore.store.log.entries.KEPT_ENTRIES", 2)

    async def body() -> None:
        backend = MemoryBackend()
        log = await founded(backend)
        sleepy = Sleeper(backend.objects, log_name(2))
        sleeper = Log(sleepy, KEY)
        mine, theirs = drawn(1), drawn(others)
        task = asyncio.create_task(write(sleeper, mine))
        await sleepy.asleep.wait()
        await write(log, theirs)
        if trimmed:
            assert await log.trim(keep=2) == others - 1
            assert log_name(2) not in backend.objects or others < 3
        sleepy.wake.set()
        if trimmed and others > 32:
            # Too long ago for the ids that entries repeat to tell: nothing is claimed, and nobody
            # else is misled.
            with pytest.raises(StoreError, match="unknown"):
                await task
            mine = []
        else:
            await task
        state = (await Log(backend, KEY).newest()).state
        assert sorted(record.id for record in state.sessions) == sorted(theirs + mine)
        await log.trim(keep=2)
        assert len([name for name in backend.objects if name.startswith("log/")]) == 2
        await write(Log(backend, KEY), drawn(1))

    asyncio.run(body())


class SlowlyTrimmed(MemoryBackend):
    """Deletes many objects one by one, in random order, and calls ``between`` after each deletion."""

    def __init__(self, seed: int, between: Callable[[], Awaitable[None]]) -> None:
        super().__init__()
        self._dice = random.Random(seed)
        self._between = between

    async def delete(self, name: str) -> None:
        await super().delete(name)
        await self._between()

    async def delete_many(self, names: Sequence[str]) -> None:
        for name in self._dice.sample(names, len(names)):
            await self.delete(name)


@pytest.mark.parametrize("prove", [True, False], ids=["at once", "with the next"])
@pytest.mark.parametrize("slept_at", [2, 3, 4, 5, 6, 7, 8, 9])
def test_trimming_in_any_order_misleads_no_sleeper(
    slept_at: int, prove: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer wakes after each deletion of a trim: what it then believes to have done is in the
    log.
    """
    monkeypatch.setattr("icecore.store.log.entries.KEPT_ENTRIES", 2)
    monkeypatch.setattr("icecore.store.log.entries.ANCHOR_EVERY", 4)

    async def run(woken_after: int) -> bool:
        deleted, task = 0, None

        async def between() -> None:
            nonlocal deleted
            deleted += 1
            if deleted == woken_after:
                sleepy.wake.set()
                assert task is not None
                await asyncio.wait([task])

        backend = SlowlyTrimmed(slept_at, between)
        log = await founded(backend)
        sleepy = Sleeper(backend.objects, log_name(slept_at))
        sleeper, mine, done = Log(sleepy, KEY), drawn(1)[0], False
        await write(sleeper, drawn(slept_at - 2))

        async def leave(state: LogState, pages: Pages) -> LogState:
            if state.session(mine) is None:
                raise NotFound("it never began")
            left = [record for record in state.sessions if record.id != mine]
            return msgspec.structs.replace(
                state, sessions=left, changes=[], segments=[SegmentRef(bytes(16), bytes(32), 1, 1)]
            )

        async def begin_and_commit() -> None:
            nonlocal done
            await sleeper.transact(enter(mine), "begin", prove=prove)  # type: ignore[arg-type]
            await sleeper.transact(leave, "commit")
            done = True

        task = asyncio.create_task(begin_and_commit())
        await sleepy.asleep.wait()
        theirs = drawn(16)
        await write(log, theirs)
        await log.trim(keep=2)
        sleepy.wake.set()
        if prove:
            await task  # it finds out, and begins anew
        else:
            try:
                await task
            except NotFound:
                pass
        state = (await Log(backend, KEY).newest()).state
        assert bool(state.segments) == done and state.session(mine) is None
        assert set(theirs) <= {record.id for record in state.sessions}
        assert (await Log(backend, KEY).newest()).generation == slept_at - 1 + 16 + (
            2 if done else 0
        )
        await Log(backend, KEY).trim(keep=2)
        assert len([name for name in backend.objects if name.startswith("log/")]) == 2
        return deleted >= woken_after

    async def body() -> None:
        woken_after = 1
        while await run(woken_after):
            woken_after += 1
        assert woken_after > 14

    asyncio.run(body())


def test_what_an_older_writer_left_without_anchors_is_trimmed_in_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("icecore.store.log.entries.ANCHOR_EVERY", 4)

    async def body() -> None:
        inner = MemoryBackend()
        backend = FaultyBackend(inner)
        log = await founded(backend)
        for number in range(30):
            await write(log, drawn(1))
            if number < 12:  # what a writer would have left that knows no anchors
                entry = await log.read((await log.newest()).generation)
                bare = encode_entry(msgspec.structs.replace(entry.state, anchor=None), KEY)
                inner.objects[log_name(entry.generation)] = bare.data
                log = Log(backend, KEY)
        backend.calls.clear()
        assert await log.trim(keep=5) == 26
        deleted = [
            (call.operation, log_generation(call.name))
            for call in backend.calls
            if call.operation.startswith("delete")
        ]
        # Entry 13 is the first anchor that a writer of today names: by itself, like what is older,
        # and those after it; the rest at once.
        assert deleted == [
            *(("delete", generation) for generation in [*range(1, 14), 17, 21, 25]),
            ("delete_many", 14),
        ]

    asyncio.run(body())


def test_a_log_that_moved_on_is_looked_at_before_anything_is_built_on_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The jump is far more than entries repeat: nothing could tell later whether what was created
    then is part of the log.
    """
    monkeypatch.setattr("icecore.store.log.entries.KEPT_ENTRIES", 2)

    async def body() -> None:
        backend = MemoryBackend()
        log, other = await founded(backend), Log(backend, KEY)
        await write(other, drawn(1))
        await write(log, drawn(100))
        await log.trim(keep=2)
        passed = time.clock_gettime(time.CLOCK_BOOTTIME) + 3600
        for module in ("reading", "chain"):
            monkeypatch.setattr(f"icecore.store.log.{module}.now", lambda: passed)
        await write(other, drawn(1))
        assert (await log.newest()).generation == 103

    asyncio.run(body())


@pytest.mark.parametrize("directory", [False, True])
def test_an_anchor_that_another_process_trimmed_is_not_read_from_an_open_file(
    directory: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A writer that believed in it would build on a state that is no longer part of the log."""
    monkeypatch.setattr("icecore.store.log.entries.KEPT_ENTRIES", 2)
    monkeypatch.setattr("icecore.store.log.entries.ANCHOR_EVERY", 4)

    async def body() -> None:
        objects: dict[str, bytes] = {}
        one, two = [LocalBackend(tmp_path) if directory else MemoryBackend(objects) for _ in "12"]
        log, other = await founded(one), Log(two, KEY)
        mine, theirs = drawn(2), drawn(12)
        await write(log, mine)  # reads the anchor
        await write(other, theirs)
        assert await other.trim(keep=2) > 10
        passed = time.clock_gettime(time.CLOCK_BOOTTIME) + 3600
        for module in ("reading", "chain"):
            monkeypatch.setattr(f"icecore.store.log.{module}.now", lambda: passed)
        mine += (late := drawn(1))
        await write(log, late)
        state = (await Log(two, KEY).newest()).state
        assert {record.id for record in state.sessions} == {*mine, *theirs}
        for backend in (one, two):
            await backend.close()

    asyncio.run(body())


def test_a_trim_that_fails_holds_nobody_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chain_module, "_TRIM_EVERY", 2)

    async def body() -> None:
        log = await founded(MemoryBackend())

        async def trim(keep: int) -> int:
            await asyncio.sleep(0.05)
            raise Damaged("log entry", "log/x", "a bit")

        monkeypatch.setattr(log, "trim", trim)
        async with asyncio.timeout(20):
            for identity in drawn(4):
                await write(log, [identity])
        assert (await log.newest()).generation == 5

    asyncio.run(body())


def test_trimming_leaves_the_newest_and_writers_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("icecore.store.log.entries.KEPT_ENTRIES", 5)

    async def body() -> None:
        backend = MemoryBackend()
        log, other = await founded(backend), Log(backend, KEY)
        await write(other, drawn(1))
        await write(log, drawn(20))
        assert await log.trim(keep=5) == 17
        assert [generation async for generation in log.generations()] == [22, 21, 20, 19, 18]
        await write(other, drawn(3))  # it knows generation 2 only
        assert (await log.newest()).generation == 25

    asyncio.run(body())


def test_a_listing_may_lag_behind() -> None:
    class Lagging(MemoryBackend):
        async def list(self, prefix: str):  # type: ignore[no-untyped-def, override]
            rows = [info async for info in MemoryBackend.list(self, prefix)]
            for info in rows[5:]:
                yield info

    async def body() -> None:
        backend = Lagging()
        log = await founded(backend)
        log._known = None
        ids = drawn(10)
        inner = Log(MemoryBackend(backend.objects), KEY)
        await write(inner, ids)
        assert (await Log(backend, KEY).newest()).generation == 11
        await write(Log(backend, KEY), drawn(2))
        assert len((await inner.newest()).state.sessions) == 12

    asyncio.run(body())


def test_the_error_of_a_change_is_that_of_the_newest_state() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        log, other = await founded(backend), Log(backend, KEY)
        await write(log, drawn(1))
        mine = drawn(1)
        await write(other, mine)

        async def needs(state: LogState, pages: Pages) -> LogState:
            if state.session(mine[0]) is None:
                raise NotFound("not there")
            return msgspec.structs.replace(state, sessions=[])

        await log.transact(needs, "needs")  # log has not seen the other's entry yet
        with pytest.raises(NotFound):
            await log.transact(needs, "needs")
        assert (await log.newest()).generation == 4

    asyncio.run(body())


def test_one_bad_change_does_not_spoil_its_neighbours() -> None:
    async def body() -> None:
        log = await founded(MemoryBackend())

        async def bad(state: LogState, pages: Pages) -> LogState:
            raise NotFound("no")

        async def nothing(state: LogState, pages: Pages) -> LogState:
            return state

        ids = drawn(2)
        results = await asyncio.gather(
            write(log, ids[:1]),
            log.transact(bad, "bad"),
            log.transact(nothing, "nothing"),
            write(log, ids[1:]),
            return_exceptions=True,
        )
        assert isinstance(results[1], NotFound) and results[0] is None and results[3] is None
        assert [record.id for record in (await log.newest()).state.sessions] == ids

    asyncio.run(body())


def test_a_caller_that_goes_away_holds_nobody_up() -> None:
    async def body() -> None:
        backend = FaultyBackend(MemoryBackend(), delay=lambda call: 0.01)
        log = await founded(backend)
        ids = drawn(4)
        tasks = [asyncio.create_task(write(log, [identity])) for identity in ids]
        await asyncio.sleep(0.005)
        tasks[0].cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        there = [record.id for record in (await log.newest()).state.sessions]
        assert set(ids[1:]) <= set(there)

    asyncio.run(body())


def test_a_reader_that_asks_again_reads_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """It makes one request if nothing is new, and lists again after some seconds."""

    async def body() -> None:
        objects = MemoryBackend()
        log = await founded(objects)
        backend = FaultyBackend(objects)
        reader = Log(backend, KEY)

        async def asked() -> tuple[int, list[str]]:
            backend.calls.clear()
            entry = await reader.again()
            return entry.generation, [call.operation for call in backend.calls]

        assert "list" in (await asked())[1]
        generation, calls = await asked()
        assert (generation, len(calls)) == (1, 1) and "list" not in calls
        await write(log, drawn(3))
        generation, calls = await asked()
        assert generation == 4 and "list" not in calls
        monkeypatch.setattr(reading, "_LISTED_SECONDS", 0.0)
        generation, calls = await asked()
        assert generation == 4 and "list" in calls

    asyncio.run(body())


def test_a_reader_that_asks_again_notices_an_older_state_and_a_fork() -> None:
    """Another object of this process, or another process, has seen more or something else."""

    async def body() -> None:
        for more, forked_by in ((2, 0), (2, 2), (2, 5)):
            backend, watermark = MemoryBackend(), Watermark()
            log = Log(backend, KEY, watermark=watermark)
            await log.found()
            await write(log, drawn(3))
            shown = MemoryBackend(dict(backend.objects))
            reader = Log(shown, KEY, watermark=watermark)
            await reader.again()
            await write(log, drawn(more))
            if forked_by:
                await write(Log(shown, KEY), drawn(forked_by))
            with pytest.raises(RollbackDetected):
                await reader.again()

    asyncio.run(body())


def test_an_older_state_is_noticed(tmp_path: Path) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        watermark = FileWatermark(tmp_path / "seen")
        log = Log(backend, KEY, watermark=watermark)
        await log.found()
        await write(log, drawn(3))
        copy = dict(backend.objects)
        await write(log, drawn(3))
        # Older; another of the same length; others that have gone on for longer, by less and by
        # more than entries repeat.
        for forked in (0, 3, 5, 20, 100):
            rolled = MemoryBackend(dict(copy))
            if forked:
                await write(Log(rolled, KEY), drawn(forked))
            with pytest.raises(RollbackDetected):
                await Log(rolled, KEY, watermark=FileWatermark(tmp_path / "seen")).newest()
            with pytest.raises(RollbackDetected):
                await write(Log(rolled, KEY, watermark=FileWatermark(tmp_path / "seen")), drawn(1))
            await Log(
                rolled, KEY, watermark=Watermark()
            ).newest()  # who has not seen more cannot know
        await Log(backend, KEY, watermark=FileWatermark(tmp_path / "seen")).newest()
        with pytest.raises(RollbackDetected):
            await Log(MemoryBackend(), KEY, watermark=FileWatermark(tmp_path / "seen")).newest()
        # Others go on with the same log: whoever saw less follows, however far.
        for more in (1, 40, 100):
            known = FileWatermark(tmp_path / "seen").load()
            await write(Log(backend, KEY), drawn(more))
            assert (
                await Log(backend, KEY, watermark=FileWatermark(tmp_path / "seen")).newest()
            ).generation > known.generation

    asyncio.run(body())


async def forked(
    at: int, mine: int, theirs: int
) -> tuple[MemoryBackend, MemoryBackend, FileWatermark | Watermark]:
    """Return a log that a client has seen whole, a fork that left it after generation ``at``, and
    what the client remembers.
    """
    backend, watermark = MemoryBackend(), Watermark()
    log = Log(backend, KEY, watermark=watermark)
    await log.found()
    await write(log, drawn(at - 1))
    other = MemoryBackend(dict(backend.objects))
    await write(log, drawn(mine))
    await write(Log(other, KEY), drawn(theirs))
    return backend, other, watermark


@pytest.mark.parametrize("theirs", [4, 30, 31, 32, 33, 100, 600])
@pytest.mark.parametrize(
    "withheld",
    ["the one that was seen", "the next", "all but the newest", "each thirty-first", "anchors"],
)
def test_a_fork_is_noticed_whatever_entries_are_withheld(theirs: int, withheld: str) -> None:
    async def body() -> None:
        _, other, watermark = await forked(3, 2, theirs)
        seen, newest = watermark.load().generation, 3 + theirs
        gone = {
            "the one that was seen": [seen],
            "the next": [seen + 1],
            "all but the newest": range(1, newest),
            "each thirty-first": range(newest - 31, 0, -31),
            "anchors": [1, 513],
        }[withheld]
        for generation in gone:
            if generation != newest:
                other.objects.pop(log_name(generation), None)
        for prove in (True, False):
            with pytest.raises(RollbackDetected):
                await Log(other, KEY, watermark=watermark).newest(prove=prove)
        with pytest.raises(RollbackDetected):
            await write(Log(other, KEY, watermark=watermark), drawn(1))
        assert watermark.load().generation == seen

    asyncio.run(body())


def test_entries_of_two_forks_do_not_pass_for_one_log() -> None:
    """Check the entry seen before, and others that do not belong to it."""

    async def body() -> None:
        for theirs in (4, 31, 32, 100, 600):
            backend, other, watermark = await forked(3, 2, theirs)
            for shown in (range(1, 6), range(4, 6), range(5, 6)):
                mixed = MemoryBackend(dict(other.objects))
                mixed.objects |= {
                    log_name(generation): backend.objects[log_name(generation)]
                    for generation in shown
                }
                with pytest.raises((RollbackDetected, Damaged)):
                    await Log(mixed, KEY, watermark=watermark).newest()

    asyncio.run(body())


def test_two_first_entries_do_not_pass_for_one() -> None:
    """The first entry carries no transaction: only the digest in the second one refers to it."""

    async def body() -> None:
        backend, other, watermark = MemoryBackend(), MemoryBackend(), Watermark()
        first = Log(backend, KEY, watermark=watermark)
        await first.found()
        await first.newest()
        await write(await founded(other), drawn(5))
        other.objects[log_name(1)] = backend.objects[log_name(1)]
        with pytest.raises(RollbackDetected):
            await Log(other, KEY, watermark=watermark).newest()

    asyncio.run(body())


def test_an_attempt_that_lost_shares_no_transaction_ids_with_the_next(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Otherwise, two entries of one generation could carry the same ids, and an entry that follows
    one would seem to follow the other.
    """

    async def body() -> None:
        backend = MemoryBackend()
        log = await founded(backend)
        await write(log, drawn(1))
        attempts: list[bytes] = []

        class Lost(MemoryBackend):
            async def create(self, name: str, parts: Sequence[Buffer]) -> None:
                if name == log_name(3) and len(attempts) < 3:
                    attempts.append(b"".join(parts))
                    raise ObjectExists("it is said to be there")
                await super().create(name, parts)

            async def get_into(self, name: str, offset: int, out: memoryview) -> None:
                if name == log_name(3) and name not in self.objects:
                    out[:] = bytes(len(out))  # another's
                    return
                await super().get_into(name, offset, out)

        await write(Log(Lost(backend.objects), KEY), drawn(1))
        carried = [
            decode_entry(log_name(3), 3, data, KEY).transactions[-1].ids
            for data in [*attempts, backend.objects[log_name(3)]]
        ]
        assert len(carried) == 4 and len(set(carried)) == 4

    asyncio.run(body())


def test_what_may_have_been_trimmed_may_be_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    """A client that has seen nothing for as many entries as are kept continues; one entry less, and
    an absent one is an error.
    """
    monkeypatch.setattr("icecore.store.log.entries.KEPT_ENTRIES", 40)

    async def body() -> None:
        for more, refused in ((39, True), (40, False), (41, False), (90, False)):
            backend, watermark = MemoryBackend(), Watermark()
            log = Log(backend, KEY, watermark=watermark)
            await log.found()
            await write(log, drawn(2))
            await write(Log(backend, KEY), drawn(more))
            del backend.objects[log_name(3)]
            again = Log(backend, KEY, watermark=watermark)
            if refused:
                with pytest.raises(RollbackDetected, match=r"log entry 3 .* is absent"):
                    await again.newest()
            else:
                assert (await again.newest()).generation == 3 + more
        # An entry that is there still tells, however old it is.
        _, other, watermark = await forked(3, 2, 90)
        with pytest.raises(RollbackDetected):
            await Log(other, KEY, watermark=watermark).newest()

    asyncio.run(body())


@pytest.mark.parametrize("lag", [0, 30])
def test_a_trim_while_the_log_is_read_is_no_attack(
    lag: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between any two requests of a reader, others commit and trim, and its listings may be stale."""
    monkeypatch.setattr("icecore.store.log.entries.KEPT_ENTRIES", 40)

    class Busy(FaultyBackend):
        at = more = 0

        async def list(self, prefix: str):  # type: ignore[no-untyped-def, override]
            rows = [info async for info in super().list(prefix)]
            for info in rows[lag:]:
                yield info

        async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
            self.at -= 1
            if self.at == 0:
                await write(Log(self.inner, KEY), drawn(self.more))
                await Log(self.inner, KEY).trim(40)
            return await super().get(name, limit=limit)

    async def body() -> None:
        interfered = 0
        for more in (1, 20, 41, 100):
            for at in range(1, 8):
                backend, watermark = MemoryBackend(), Watermark()
                log = Log(backend, KEY, watermark=watermark)
                await log.found()
                await write(log, drawn(2))
                await write(Log(backend, KEY), drawn(39))
                busy = Busy(backend)
                busy.at, busy.more = at, more
                found = await Log(busy, KEY, watermark=watermark).newest()
                interfered += busy.at <= 0
                # More than is kept, lag and trim together: an older entry is found, but none that
                # is not of this log.
                assert found.generation in (42, 42 + more) or (
                    lag + more > 40 and found.generation >= 3
                )
        assert interfered > 8

    asyncio.run(body())


def test_an_entry_that_is_listed_and_cannot_be_read_is_named() -> None:
    class Withholding(MemoryBackend):
        async def list(self, prefix: str):  # type: ignore[no-untyped-def, override]
            yield ObjectInfo(log_name(4), 100)
            async for info in super().list(prefix):
                yield info

    async def body() -> None:
        backend = Withholding()
        await write(await founded(MemoryBackend(backend.objects)), drawn(2))
        with pytest.raises(Damaged, match="listed, but cannot be read") as caught:
            await Log(backend, KEY).newest()
        assert caught.value.name == log_name(4)

    asyncio.run(body())


def test_a_repair_may_move_the_log_back_and_nobody_else(tmp_path: Path) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        log = Log(backend, KEY, watermark=FileWatermark(tmp_path / "seen"))
        await log.found()
        await write(log, drawn(4))
        seen = log.watermark.load()
        del backend.objects[log_name(5)]
        again = Log(backend, KEY, watermark=FileWatermark(tmp_path / "seen"))
        with pytest.raises(RollbackDetected):
            await again.newest()
        before = await again.read(4)
        with pytest.raises(RollbackDetected):
            again.accept(
                before, instead_of=Seen(4, before.digest.hex())
            )  # it knew something else than this client
        again.accept(before, instead_of=seen)
        assert (await again.newest()).digest == before.digest
        await write(again, drawn(1))
        assert (
            await Log(backend, KEY, watermark=FileWatermark(tmp_path / "seen")).newest()
        ).generation == 5
        assert FileWatermark(tmp_path / "seen").load() != seen

    asyncio.run(body())


@pytest.mark.parametrize(
    "torn",
    [
        b"",
        b"{",
        b"{}",
        b'{"generation":3}',
        b'{"generation":0,"digest":""}',
        b"\xff",
        b'{"generation":3,"digest":"no"}',
    ],
)
def test_a_memory_that_is_torn_is_not_taken_for_none(tmp_path: Path, torn: bytes) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        log = Log(backend, KEY, watermark=FileWatermark(tmp_path / "seen"))
        await log.found()
        await write(log, drawn(2))
        (tmp_path / "seen").write_bytes(torn)
        fresh = Log(backend, KEY, watermark=FileWatermark(tmp_path / "seen"))
        with pytest.raises(RecordDamaged):
            await fresh.newest()
        with pytest.raises(RecordDamaged):
            await write(fresh, drawn(1))
        assert (tmp_path / "seen").read_bytes() == torn

    asyncio.run(body())


def remember(path: str, generations: list[int]) -> None:
    """A process that sees these generations."""
    for generation in generations:
        FileWatermark(path).save(Seen(generation, f"{generation:064x}"))


def test_clients_that_remember_at_once_lose_nothing(tmp_path: Path) -> None:
    path = tmp_path / "seen" / "one"
    with ThreadPoolExecutor(4) as pool:
        list(
            pool.map(
                remember, [str(path)] * 4, [list(range(1 + start, 81, 4)) for start in range(4)]
            )
        )
    assert FileWatermark(path).load().generation == 80
    assert path.stat().st_mode & 0o777 == 0o600 and path.parent.stat().st_mode & 0o777 == 0o700
    assert sorted(one.name for one in path.parent.iterdir()) == [".lock", "one"]
    FileWatermark(path).save(Seen(7, "0" * 64))  # an older one says nothing
    with pytest.raises(RollbackDetected):
        FileWatermark(path).save(
            Seen(80, "0" * 64)
        )  # another process of this client was shown another log
    assert FileWatermark(path).load() == Seen(80, f"{80:064x}")


def test_damaged_entries_are_named() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        log = await founded(backend)
        await write(log, drawn(2))
        name = log_name(3)
        good = backend.objects[name]
        for bad in (
            good[:-1],
            good + b"\0",
            good[:60],
            b"",
            good[:20] + bytes([good[20] ^ 1]) + good[21:],
            backend.objects[log_name(2)],
        ):
            backend.objects[name] = bad
            with pytest.raises(Damaged) as caught:
                await Log(backend, KEY).newest()
            assert caught.value.kind == "log entry" and caught.value.name == name
        backend.objects[name] = good
        with pytest.raises(Damaged):
            await Log(backend, b"x" * 32).newest()
        with pytest.raises(Damaged):
            await Log(MemoryBackend(), KEY).newest()

    asyncio.run(body())
