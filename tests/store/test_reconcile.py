"""What a sync carries over besides snapshots: pins and tags of both sides and, on request,
deletions of snapshots from the source.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterable

import pytest

from icecore.errors import UsageError
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.marks import REMEMBERED, joined, marked
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.replication import reconcile
from icecore.store.replication import replicas as replication
from icecore.store.replication.replicas import Synced
from tests.store.miniature import collect, listed, read, sound, take

A = {cell: cell for cell in range(6)}
RECORD = SnapshotRecord(
    "ab" * 16, "job", "lineage", "", 9, "snapshots/x", 10, bytes(32), tags=["born"]
)


async def regions(count: int = 2) -> list[StoredRepository]:
    """Create empty replicas of each other."""
    first = await StoredRepository.create(MemoryBackend())
    return [
        first,
        *[
            await StoredRepository.create(MemoryBackend(), secret=first.keys.secret)
            for _ in range(count - 1)
        ],
    ]


async def sync(
    source: StoredRepository, target: StoredRepository, *, forget: bool = False, job: str = ""
) -> Synced:
    todo = await reconcile.plan(source, target, forget=forget, job=job)
    return await replication.sync(source, target, todo, patience=0.2)


async def marks(repository: StoredRepository) -> dict[str, tuple[bool, tuple[str, ...]]]:
    return {
        record.snapshot: (record.pinned, tuple(record.tags))
        for record in await repository.snapshots()
    }


# -- marks


def test_the_newer_marks_count_whoever_made_them() -> None:
    pinned = marked(RECORD, pinned=True)
    assert joined(RECORD, pinned) == pinned and joined(pinned, RECORD) is pinned
    unpinned = marked(pinned, pinned=False, tags=[])
    assert joined(pinned, unpinned) == unpinned and joined(unpinned, pinned) is unpinned
    assert marked(pinned, pinned=True, tags=["born"]) is pinned


def test_marks_that_were_made_apart_are_joined_alike_on_both_sides() -> None:
    one, other = marked(RECORD, pinned=True), marked(marked(RECORD, tags=["x"]), tags=["x", "y"])
    both = joined(one, other)
    assert (both.pinned, both.tags) == (True, ["born", "x", "y"])
    mirrored = joined(other, one)
    assert (mirrored.pinned, mirrored.tags, mirrored.marks[-1]) == (
        both.pinned,
        both.tags,
        both.marks[-1],
    )
    # Each side's own past is known to be past, and what is made on top of the joined marks is newer
    # than either.
    for before in (one, other, RECORD):
        assert joined(both, before) is both
        after = marked(mirrored, pinned=False, tags=[])
        assert (joined(before, after).pinned, joined(before, after).tags) == (False, [])


def test_marks_that_are_too_far_apart_are_joined() -> None:
    far = RECORD
    for number in range(REMEMBERED + 4):
        far = marked(far, tags=[str(number)])
    assert len(far.marks) == REMEMBERED
    assert joined(RECORD, far) == far
    near = marked(RECORD, pinned=True)
    assert joined(near, far).pinned and joined(far, near).pinned


def test_differences_of_which_nothing_is_on_record_are_joined() -> None:
    """An earlier version pinned without recording the change."""
    old = SnapshotRecord(
        "ab" * 16,
        "job",
        "lineage",
        "",
        9,
        "snapshots/x",
        10,
        bytes(32),
        tags=["other"],
        pinned=True,
    )
    one, other = joined(RECORD, old), joined(old, RECORD)
    assert (one.pinned, one.tags) == (other.pinned, other.tags) == (True, ["born", "other"])
    assert joined(one, other) is one and joined(RECORD, RECORD) is RECORD


def test_records_of_earlier_versions_are_read() -> None:
    import msgspec

    short = msgspec.msgpack.encode(
        list(msgspec.msgpack.decode(msgspec.msgpack.encode(RECORD)))[:-2]
    )
    assert msgspec.msgpack.decode(short, type=SnapshotRecord) == RECORD


def test_regions_settle_on_the_same_marks() -> None:
    """Marks and syncs in any order between three regions: in the end, all agree, and on the last
    word if there was one.
    """

    async def body(seed: int) -> None:
        dice = random.Random(seed)
        here = await regions(3)
        snapshot = await take(here[0], A)
        await sync(here[0], here[1])
        await sync(here[0], here[2])
        pins: set[bool] = set()
        for _ in range(dice.randrange(2, 12)):
            if dice.random() < 0.5:
                pin = dice.random() < 0.5
                pins.add(pin)
                tags = dice.sample(["a", "b", "c"], dice.randrange(3))
                await dice.choice(here).update(snapshot, pinned=pin, tags=tags)
            else:
                await sync(*dice.sample(here, 2))
        for _ in range(3):
            for source, target in ((0, 1), (1, 2), (2, 0), (2, 1), (1, 0)):
                await sync(here[source], here[target])
        settled = [await marks(one) for one in here]
        assert settled[0] == settled[1] == settled[2]
        if pins == {True}:
            assert settled[0][snapshot][0], "a pin that nobody took off"
        # The last word, said when all had heard everything, is everybody's.
        await here[2].update(snapshot, pinned=False, tags=["last"])
        for source, target in ((0, 2), (2, 1), (1, 0), (0, 1)):
            await sync(here[source], here[target])
        assert [await marks(one) for one in here] == [{snapshot: (False, ("last",))}] * 3

    for seed in range(40):
        asyncio.run(body(seed))


def test_marks_are_carried_in_one_transaction_and_before_everything_else() -> None:
    async def body() -> None:
        here, there = await regions()
        ids = [
            await take(here, {cell: 10 * number + cell for cell in range(3)}) for number in range(3)
        ]
        await sync(here, there)
        for one in ids[:2]:
            await here.update(one, pinned=True, tags=["keep"])
        new = await take(here, {1: 200}, tags=["new"])
        before = (await there.log.newest()).generation

        def plan(call: Call) -> Outcome:
            return (
                Outcome.FAIL
                if call.operation == "create" and call.name.startswith("shards/")
                else Outcome.PASS
            )

        failing = await StoredRepository.open(FaultyBackend(there.backend, plan))
        with pytest.raises(Exception, match="injected"):
            await sync(here, failing)
        entries = [
            (await there.log.read(at)).state.changes
            for at in range(before + 1, (await there.log.newest()).generation + 1)
        ]
        assert entries[0] == ["marks of 2 snapshots"]
        done = await sync(here, there)
        assert done.snapshots == [new] and not done.marked
        assert await marks(there) == await marks(here)
        generation = (await there.log.newest()).generation
        assert (
            not (await sync(here, there)).marked
            and (await there.log.newest()).generation == generation
        )

    asyncio.run(body())


# -- forgets


async def taken(repository: StoredRepository, values: Iterable[int], job: str = "job") -> list[str]:
    return [await take(repository, {1: value, 2: value + 1}, job=job) for value in values]


def test_forgets_follow_only_when_asked_and_only_what_came_from_there() -> None:
    async def body() -> None:
        here, there = await regions()
        kept, gone, other_job, pinned = await taken(here, range(10, 50, 10))
        (theirs,) = await taken(there, [60])
        await sync(here, there)
        await sync(there, here)
        assert (
            set(await listed(here))
            == set(await listed(there))
            == {kept, gone, other_job, pinned, theirs}
        )
        await there.update(pinned, pinned=True)
        await here.forget([gone, pinned, theirs])
        await sync(here, there)
        assert set(await listed(there)) == {kept, gone, other_job, pinned, theirs}, "not asked for"
        assert not (await reconcile.plan(here, there)).forget
        plan = await reconcile.plan(here, there, forget=True)
        assert {record.snapshot for record in plan.forget} == {gone, pinned}
        assert [record.snapshot for record in plan.keep] == [pinned]
        assert not (await sync(here, there, forget=True, job="another")).forgotten
        done = await sync(here, there, forget=True)
        assert (done.forgotten, done.kept, done.snapshots) == ([gone], [pinned], [])
        assert set(await listed(there)) == {kept, other_job, pinned, theirs}, (
            "what was taken there stays, whoever forgot his copy of it"
        )
        await collect(there)
        await sound(there, unreached=0)
        assert await read(there, theirs) == {1: 60, 2: 61}
        # Back to where it was forgotten it comes with a sync the other way, as what is missing
        # does.
        assert set((await sync(there, here)).snapshots) == {pinned, theirs}
        assert not (await sync(here, there, forget=True)).forgotten
        # What was taken there and is forgotten there follows the other way.
        await there.forget([theirs])
        assert (await sync(there, here, forget=True)).forgotten == [theirs]

    asyncio.run(body())


def test_forgets_do_not_follow_a_source_that_lost_its_list_or_part_of_its_data() -> None:
    async def body() -> None:
        here, there = await regions()
        first, second = await taken(here, [10, 20])
        await sync(here, there)
        await here.forget([first, second])
        with pytest.raises(UsageError, match="lists no snapshots"):
            await reconcile.plan(here, there, forget=True)
        (damaged,) = await taken(here, [30])
        await collect(here)
        objects = here.backend.objects  # type: ignore[attr-defined]
        for name in [name for name in objects if name.startswith("shards/")]:
            objects[name] = bytes(len(objects[name]))
        done = await sync(here, there, forget=True)
        assert [lost.snapshot for lost in done.lost] == [damaged] and not done.forgotten
        assert set(await listed(there)) == {first, second}
        await here.forget([damaged])
        await taken(here, [40])
        assert set((await sync(here, there, forget=True)).forgotten) == {first, second}

    asyncio.run(body())


def test_a_chain_of_regions_hands_forgets_on() -> None:
    async def body() -> None:
        one, two, three = await regions(3)
        gone, kept = await taken(one, [10, 20])
        await sync(one, two)
        await sync(two, three)
        await one.forget([gone])
        assert not (await sync(one, three, forget=True)).forgotten, "that is not where it came from"
        assert (await sync(one, two, forget=True)).forgotten == [gone]
        assert (await sync(two, three, forget=True)).forgotten == [gone]
        assert await listed(three) == [kept]

    asyncio.run(body())
