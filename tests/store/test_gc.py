"""The collector deletes what nothing reaches and nothing else (forgotten snapshots, remains of dead
writers, sparse shards), beside open sessions.
"""

from __future__ import annotations

import asyncio

import msgspec
import pytest

from icecore.errors import NotFound, ObjectMissing, SessionFenced, StoreDenied, StoreError
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome, always, far_away
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.state import LogState
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance import gc
from icecore.store.maintenance.gc import Collector, Options
from icecore.store.maintenance.reach import Reach, space_refs
from icecore.store.maintenance.repair import Repairer
from tests.store.miniature import collect, listed, put, read, reopened, sound, state_of, take
from tests.store.test_repair import spoil

A = {cell: cell for cell in range(20)}
B = {**A, **{cell: 100 + cell for cell in range(18)}}


def test_forgotten_snapshots_are_deleted_and_the_others_stay() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        first = await take(repository, A)
        second = await take(repository, B, first)
        other = await take(repository, {1: 200})
        assert [record.snapshot for record in await repository.forget([first, "f" * 32])] == [first]
        before = dict(backend.objects)
        plan = await Collector(repository, Options(compact_below=0)).plan()
        assert backend.objects == before
        result = await collect(repository, compact_below=0)
        assert result.deleted == len(plan.delete) and result.deleted_bytes >= plan.delete_bytes > 0
        assert await read(repository, second) == B and await read(repository, other) == {1: 200}
        with pytest.raises(NotFound):
            await repository.manifest(first)
        await sound(repository, unreached=0)
        assert {item.name for item in plan.delete} == {
            name for name in before if name not in backend.objects
        }
        await repository.forget([second, other])
        await collect(repository)
        await sound(repository, unreached=0)
        assert {name.split("/")[0] for name in backend.objects} == {
            "config",
            "copies",
            "keys",
            "log",
        }
        assert (await state_of(repository)).state.condemned == []

    asyncio.run(body())


def test_what_a_snapshot_in_quarantine_still_has_survives_a_failing_read() -> None:
    """Only what a repair found to be unreadable counts as lost."""

    class Flaky(MemoryBackend):
        missing = ""

        async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
            if name == self.missing:
                raise ObjectMissing("a proxy does not find it")
            return await super().get(name, limit=limit)

    async def body() -> None:
        backend = Flaky()
        repository = await StoredRepository.create(backend)
        await take(repository, {1: 1})
        (lost,) = [name for name in backend.objects if name.startswith("shards/")]
        whole = await take(repository, {1: 1, 2: 2, 3: 3, 4: 4})
        spoil(backend, lost)
        assert whole in (await Repairer(repository).apply()).quarantine
        before = dict(backend.objects)
        backend.missing = (await repository.find(whole)).manifest
        with pytest.raises(ObjectMissing):
            await collect(await StoredRepository.open(backend))
        assert before.keys() <= backend.objects.keys()
        del backend.objects[backend.missing]  # and now a repair says so
        assert whole in (await Repairer(await StoredRepository.open(backend)).apply()).quarantine
        assert (await collect(await StoredRepository.open(backend))).deleted

    asyncio.run(body())


def test_a_commit_that_may_have_taken_place_is_not_undone() -> None:
    """The store takes the entry and refuses, for a moment, the read that proves it."""

    async def body() -> None:
        backend = MemoryBackend()
        armed = ""

        def plan(call: Call) -> Outcome:
            nonlocal armed
            if armed and call.operation == "create" and call.name.startswith("log/"):
                armed = "written"
            elif armed == "written" and call.operation == "get_into":
                armed = ""
                raise StoreDenied("the token has expired")
            return Outcome.PASS

        repository = await StoredRepository.create(FaultyBackend(backend, plan))
        session = await repository.begin(None, "test", beat_seconds=None)
        record, entries = await put(repository, session, A)
        armed = "armed"
        with pytest.raises(StoreError, match="unknown") as caught:
            await session.commit(record, entries)
        assert not isinstance(caught.value, StoreDenied) and not armed
        assert not await session.abort(), "it is committed"
        assert await read(repository, record.snapshot) == A
        await sound(repository, unreached=0)

    asyncio.run(body())


def test_a_collector_whose_session_was_ended_deletes_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another one, whose clock says that this one is dead, has ended it; a sync may have created
    the names again.
    """
    monkeypatch.setattr(gc, "_OPEN_SECONDS", -1.0)

    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        for value in range(8):
            await take(repository, {1: value})
        await repository.forget(await listed(repository))
        session = ""

        class Collected(Collector):
            async def _deletable(self, state: LogState) -> object:  # type: ignore[override]
                nonlocal session
                found = await super()._deletable(state)
                (session,) = [one.id for one in state.sessions if one.purpose == gc.COLLECT]
                other = await StoredRepository.open(backend)

                async def end(state: LogState, pages: Pages) -> LogState:
                    return msgspec.structs.replace(state, sessions=[])

                await other.log.transact(end, "fence")
                return found

        before = len(backend.objects)
        with pytest.raises(SessionFenced):
            await Collected(repository, Options()).collect()
        shards = [name for name in backend.objects if name.startswith("shards/")]
        assert session and len(shards) == 8 and len(backend.objects) >= before

    asyncio.run(body())


def test_what_snapshots_have_in_common_is_read_once() -> None:
    """This includes tasks that mark at the same time; if one of them fails to read, nothing counts
    as marked.
    """

    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        parent = await take(repository, A)
        for cell in range(40, 48):
            await take(repository, {**A, cell: cell}, parent)
        opened, faulty = await reopened(backend)
        faulty._delay = far_away(0.002)
        records = await opened.snapshots()
        faulty.calls.clear()
        reach = Reach(opened)
        await reach.add(records)
        reads = [call for call in faulty.calls if call.name.startswith("nodes/")]
        assert len(reads) == len(records)  # one node each, all different
        first = await opened.manifest(records[0])
        (refs,) = space_refs(first, "")
        again = Reach(opened)
        faulty.calls.clear()
        await asyncio.gather(*(again._space(refs, records[0]) for _ in range(4)))
        assert len(faulty.calls) == 1

        # A read that fails is nobody's any more.
        failing = Reach(opened)
        faulty.plan = lambda call: Outcome.FAIL if call.name.startswith("nodes/") else Outcome.PASS
        with pytest.raises(StoreError):
            await failing.add(records)
        faulty.plan = always
        await failing.add(records)
        assert failing.names == reach.names
        assert {shard: live.bytes for shard, live in failing.shards()} == {
            shard: live.bytes for shard, live in reach.shards()
        }

    asyncio.run(body())


def test_sparse_shards_are_rewritten_under_the_same_ids() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        first = await take(repository, A)
        second = await take(repository, B, first)
        third = await take(repository, {**B, 40: 7}, second)
        await repository.forget([first])
        plan = await Collector(repository).plan()
        assert len(plan.compact) == 1 and plan.compact_bytes > 17 * 4096
        old = {record.snapshot: record.manifest for record in await repository.snapshots()}
        result = await collect(repository)
        assert result.compacted.shards == 1 and result.compacted.snapshots == 2
        assert (
            result.compacted.copied_bytes == 3 * 4096
        )  # cells 18 and 19, and 7 which is cell 7's content
        new = {record.snapshot: record.manifest for record in await repository.snapshots()}
        assert list(new) == [second, third] and not set(new.values()) & set(old.values())
        assert await read(repository, second) == B and await read(repository, third) == {**B, 40: 7}
        await sound(repository, unreached=0)
        assert (await collect(repository)).compacted.shards == 0
        # Dedup finds the chunks at their new place.
        objects = set(backend.objects)
        fourth = await take(repository, {5: 18, 6: 19, 7: 7})
        assert not [name for name in set(backend.objects) - objects if name.startswith("shards/")]
        assert await read(repository, fourth) == {5: 18, 6: 19, 7: 7}

    asyncio.run(body())


def test_an_open_session_keeps_what_it_may_use() -> None:
    async def body() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        first = await take(repository, A)
        reader = await repository.read_session(first, beat_seconds=None)
        writer = await repository.begin(None, "test", beat_seconds=None)
        await repository.forget([first])
        result = await collect(repository)
        assert result.deleted == 0
        assert reader.base is not None
        assert await read(repository, reader.base) == A
        # The writer began before anything was condemned: it may reuse the forgotten snapshot's
        # chunks.
        record, entries = await put(repository, writer, A)
        assert entries is None
        await writer.commit(record, entries)
        await collect(repository)
        assert await read(repository, record.snapshot) == A
        await reader.abort()
        await collect(repository)
        assert await read(repository, record.snapshot) == A
        await sound(repository, unreached=0)

    asyncio.run(body())


def test_a_later_session_does_not_touch_what_is_condemned() -> None:
    async def body() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        first = await take(repository, A)
        early = await repository.begin(None, "holds on", beat_seconds=None)
        await repository.forget([first])
        assert (await collect(repository)).waiting > 0
        late = await repository.begin(None, "test", beat_seconds=None)
        record, entries = await put(repository, late, A)
        assert entries is not None and len(entries) == 20
        await early.abort()
        await collect(repository)  # deletes the condemned shard while the late session is open
        await late.commit(record, entries)
        assert await read(repository, record.snapshot) == A
        await collect(repository)
        await sound(repository, unreached=0)

    asyncio.run(body())


def test_what_an_open_session_wrote_is_pardoned_by_its_commit() -> None:
    async def body() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        session = await repository.begin(None, "test", beat_seconds=None)
        record, entries = await put(repository, session, A)
        result = await collect(repository)
        assert result.condemned == 3 and result.deleted == 0
        await session.commit(record, entries)
        assert (await state_of(repository)).state.condemned == []
        following = await repository.begin(record.snapshot, "test", beat_seconds=None)
        assert (await put(repository, following, A))[1] is None  # its shard is usable again
        await following.abort()
        await sound(repository)

    asyncio.run(body())


def test_remains_of_a_dead_writer_go_when_it_is_fenced() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        kept = await take(repository, {1: 1})
        dead = await repository.begin(kept, "test", beat_seconds=None)
        await dead.heartbeat()
        record, entries = await put(repository, dead, A)
        assert (await collect(repository)).fenced == 0
        assert any(name.startswith("sessions/") for name in backend.objects)
        result = await collect(repository, fence_seconds=0)
        assert result.fenced == 1 and result.deleted > 0
        with pytest.raises(SessionFenced):
            await dead.commit(record, entries)
        assert await dead.abort() is False
        await collect(repository)
        await sound(repository, unreached=0)
        assert not any(name.startswith("sessions/") for name in backend.objects)
        assert await read(repository, kept) == {1: 1}
        with pytest.raises(ObjectMissing):
            await repository.manifest(record)

    asyncio.run(body())


def test_abort_deletes_what_the_session_wrote() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        before = {name for name in backend.objects if not name.startswith("log/")}
        session = await repository.begin(None, "test", beat_seconds=None)
        await put(repository, session, A)
        await session.heartbeat()
        await session.heartbeat()
        assert await session.abort() is True
        assert {name for name in backend.objects if not name.startswith("log/")} == before
        assert (await state_of(repository)).state.sessions == []

    asyncio.run(body())


def test_abort_after_a_commit_of_unknown_outcome_deletes_nothing_that_was_committed() -> None:
    """The commit took effect, its replies were lost, and the caller retried before giving up."""

    async def body() -> None:
        inner = MemoryBackend()
        await StoredRepository.create(inner)
        repository, faulty = await reopened(inner)
        session = await repository.begin(None, "test", beat_seconds=None)
        record, entries = await put(repository, session, A)

        def plan(call: Call) -> Outcome:
            if call.name.startswith("log/"):
                return Outcome.LOSE if call.operation == "create" else Outcome.FAIL
            return Outcome.PASS

        faulty.plan = plan
        with pytest.raises(StoreError, match="unknown"):
            await session.commit(record, entries)
        faulty.plan = always
        with pytest.raises(SessionFenced):
            await session.commit(record, entries)
        faulty.plan = lambda call: Outcome.PASS
        assert await session.abort() is False
        assert await read(await StoredRepository.open(inner), record.snapshot) == A
        await sound(await StoredRepository.open(inner))

    asyncio.run(body())


def test_pinned_snapshots_are_not_forgotten() -> None:
    async def body() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        first, second = await take(repository, A), await take(repository, B)
        await repository.update(first, pinned=True, tags=["keep"])
        assert [record.snapshot for record in await repository.forget([first, second])] == [second]
        record = await repository.find(first)
        assert record.pinned and record.tags == ["keep"]
        await repository.update(first, pinned=False)
        assert len(await repository.forget([first])) == 1
        with pytest.raises(NotFound):
            await repository.update(first, pinned=True)

    asyncio.run(body())


def test_two_collectors_and_a_commit_in_one_entry() -> None:
    """Transactions of one process share an entry: a commit carried with the collector's is not
    overlooked.
    """

    async def body() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        for round_ in range(6):
            first = await take(repository, A)
            session = await repository.begin(None, "test", beat_seconds=None)
            await repository.forget([first])
            record, entries = await put(repository, session, {**A, 30: round_})
            await asyncio.gather(
                collect(repository, fence_seconds=3600.0),
                session.commit(record, entries),
                collect(repository, compact_below=0.9),
                take(repository, B),
                collect(repository),
            )
            assert await read(repository, record.snapshot) == {**A, 30: round_}
        for snapshot in await listed(repository):
            await read(repository, snapshot)
        await collect(repository)
        await sound(repository, unreached=0)

    asyncio.run(body())


def test_many_names_are_condemned_in_an_object_of_their_own() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        for number in range(30):
            await take(repository, {cell: (number * 7 + cell) % 256 for cell in range(5)})
        early = await repository.begin(None, "test", beat_seconds=None)
        await repository.forget(await listed(repository))
        await collect(repository)
        state = (await state_of(repository)).state
        assert (
            state.condemned[0].ref is not None
            and state.condemned[0].ref.count > catalog.INLINE_NAMES
        )
        await early.abort()
        await collect(repository)
        await sound(repository, unreached=0)
        assert {name.split("/")[0] for name in backend.objects} == {
            "config",
            "copies",
            "keys",
            "log",
        }

    asyncio.run(body())


def test_what_forgetting_would_free() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        first = await take(repository, A)
        second = await take(repository, {**B, 41: 99}, first)
        third = await take(repository, {1: 200, 2: 201})
        await repository.forget([await take(repository, {1: 210})])  # is to be freed in any case
        before = dict(backend.objects)

        async def freed(ids: list[str]) -> tuple[int, int]:
            return_ = await Collector(repository).plan_forget(ids)
            assert backend.objects == before
            return return_.bytes, return_.compact_bytes

        async def really(ids: list[str]) -> int:
            copy = await StoredRepository.open(MemoryBackend(dict(backend.objects)))
            base = await StoredRepository.open(MemoryBackend(dict(backend.objects)))
            await copy.forget(ids)
            return sum(
                [
                    -(await collect(base, compact_below=0)).deleted_bytes,
                    (await collect(copy, compact_below=0)).deleted_bytes,
                ]
            )

        for ids in ([], [third], [second], [first, second], [first, second, third]):
            whole, more = await freed(ids)
            # The index is rewritten, too, which is not foreseen.
            assert whole <= await really(ids) <= whole + 4096
            assert more == 0
        whole, more = await freed([first])
        assert 17 * 4096 < more < 18 * 4096 + 4096  # its shard becomes mostly dead

    asyncio.run(body())


def test_working_sets_live_as_long_as_their_lineage() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        ids = {
            job: [await take(repository, A, job=job), await take(repository, B, job=job)]
            for job in ("one", "two")
        }
        kept = {job: f"hints/{job}/touched-0123-ab" for job in ids}
        for name in (*kept.values(), "hints/one/00ff", "hints/gone/touched-0123-ab"):
            await backend.create(name, [b"advice"])
        await repository.forget([ids["one"][0]])
        await collect(repository)
        assert {name for name in backend.objects if name.startswith("hints/")} == set(kept.values())
        await repository.forget([ids["one"][1]])
        await collect(repository)
        assert {name for name in backend.objects if name.startswith("hints/")} == {kept["two"]}

    asyncio.run(body())
