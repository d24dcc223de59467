"""Filters of index segments never deny an entry and pass few others; a damaged, foreign or missing
filter only costs reads.
"""

from __future__ import annotations

import asyncio

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from icecore.errors import Damaged
from icecore.store.backend.base import Backend
from icecore.store.backend.faulty import FaultyBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.cell import PLACE, Bytes, Records
from icecore.store.format.cipher import Key
from icecore.store.format.codec import RAW
from icecore.store.format.filters import (
    FILTER_KIND,
    FilterSet,
    block_count,
    decode_filter,
    encode_filter,
    filter_bytes,
)
from icecore.store.format.names import filter_name, filtered_segment, object_name, random_id
from icecore.store.format.segment import make_entries, sort_entries
from icecore.store.format.shard import ShardTable
from icecore.store.format.state import SegmentRef
from icecore.store.log import index as index_module
from icecore.store.log.index import build
from icecore.store.log.lookup import Index
from icecore.store.log.neighbours import Neighbours
from icecore.store.log.repository import StoredRepository
from icecore.store.log.tables import read_table
from icecore.store.maintenance.check import check
from icecore.store.maintenance.gc import Collector
from icecore.store.maintenance.repair import Repairer
from tests.store.miniature import collect, page, sound, state_of, take

KEY = b"k" * 32
ENCRYPTED = Key(KEY, b"e" * 32)
_BITMAP = b"\1" + bytes(31)


def drawn(count: int, seed: int) -> Bytes:
    return np.random.default_rng(seed).integers(0, 256, (count, 32), np.uint8)


def ref_of(count: int, bits: int = 0, prefix: int = 0) -> SegmentRef:
    return SegmentRef(random_id(), bytes(32), 1, count, bits, prefix)


@pytest.mark.parametrize("key", [KEY, ENCRYPTED], ids=["plain", "encrypted"])
def test_what_is_in_is_let_through_and_nearly_nothing_else(key: bytes) -> None:
    ids = drawn(20_000, 1)
    ref = ref_of(len(ids))
    data = encode_filter(ids, ref, key, "filters/x")
    assert len(data) == filter_bytes(ref, key)
    filters = FilterSet([ref], 1 << 20)
    assert filters.unknown(ids[:1]) == [0]
    filters.put(0, decode_filter("filters/x", data, key, ref))
    assert filters.unknown(ids) == []
    assert (filters.candidates(ids) == 0).all()
    passed = (filters.candidates(drawn(100_000, 2)) == 0).mean()
    assert 0.0003 < passed < 0.002


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 7), st.integers(1, 400)), max_size=12),
    st.integers(0, 1 << 32),
)
def test_sets_of_filters_are_the_filters_by_themselves(
    spans: list[tuple[int, int, int]], seed: int
) -> None:
    """For any ranges and any budget, each id's candidates are in order, and include every segment
    that has it.
    """
    refs, held = [], []
    for number, (bits, prefix, count) in enumerate(spans):
        bits, prefix = (bits, prefix % (1 << bits)) if bits else (0, 0)
        ids = drawn(count, seed + number)
        ids[:, 0] = (prefix << (8 - bits)) + (ids[:, 0] >> bits) if bits else ids[:, 0]
        refs.append(ref_of(count, bits, prefix))
        held.append(ids)
    filters = FilterSet(refs, 3000)
    everything = np.concatenate([drawn(50, seed + 99), *held])
    for number in filters.unknown(everything):
        data = encode_filter(held[number], refs[number], KEY, "n")
        filters.put(number, decode_filter("n", data, KEY, refs[number]))
    for number, ids in enumerate(held):
        candidates = filters.candidates(ids)
        assert (candidates == number).any(axis=0).all()
    for column in filters.candidates(everything).T:
        asked = column[column >= 0]
        assert (np.diff(asked) > 0).all()


def test_a_range_that_cannot_be_is_never_asked() -> None:
    filters = FilterSet([ref_of(10, 3, 200), ref_of(10)], 1 << 20)
    assert filters.unknown(drawn(500, 1)) == [1]


def test_foreign_and_damaged_filters_are_refused() -> None:
    ids = drawn(100, 3)
    ref = SegmentRef(random_id(), KEY, 1, 100)
    data = encode_filter(ids, ref, KEY, "n")
    for other, why in (
        (ref_of(100), "another segment"),
        (msgspec.structs.replace(ref, count=2000), "does not fit"),
    ):
        with pytest.raises(Damaged, match=why):
            decode_filter("n", data, KEY, other)
    with pytest.raises(Damaged):
        decode_filter("n", data[:80] + b"\0" + data[81:], KEY, ref)
    with pytest.raises(Damaged):
        decode_filter("another name", encode_filter(ids, ref, ENCRYPTED, "n"), ENCRYPTED, ref)
    assert FILTER_KIND.limit >= 32 + 32 * block_count(ref_of(1 << 26))


def test_names() -> None:
    identity = random_id()
    assert filtered_segment(filter_name(identity)) == identity
    for name in (
        "filters/x",
        "filters/" + "0" * 31,
        identity.hex(),
        f"index/00/{identity.hex()}",
        f"filters/{'0' * 32}\n",
    ):
        assert filtered_segment(name) is None


async def stored(backend: Backend, entries: Records, *, filtered: bool = True) -> list[SegmentRef]:
    refs = []
    for segment in build(sort_entries(entries), KEY, random_id):
        await backend.create(object_name("segment", segment.ref.id), segment.parts)
        if filtered:
            assert segment.filter is not None
            await backend.create(filter_name(segment.ref.id), [segment.filter])
        refs.append(segment.ref)
    return refs


@pytest.mark.parametrize("direct", [True, False])
def test_a_miss_costs_no_read(direct: bool) -> None:
    async def body() -> None:
        faulty = FaultyBackend(MemoryBackend())
        faulty.direct = direct
        ids = drawn(60_000, 4)
        places = np.zeros(len(ids), PLACE)
        places["offset"] = np.arange(len(ids))
        refs = [
            ref
            for part in (slice(0, 40_000), slice(40_000, 60_000))
            for ref in await stored(faulty, make_entries(ids[part], places[part]))
        ]
        index = Index(faulty, refs, KEY, budget=0)
        await index.load()
        faulty.calls.clear()
        found, _ = await asyncio.to_thread(index.lookup, drawn(1, 5))
        assert not found.any() and [call.name for call in faulty.calls][:2] == [
            filter_name(ref.id) for ref in reversed(refs)
        ]
        faulty.calls.clear()
        found, _ = await asyncio.to_thread(index.lookup, drawn(1000, 6))
        assert not found.any() and len(faulty.calls) < 50
        found, got = await asyncio.to_thread(index.lookup, ids)
        assert found.all() and (got == places).all()

    asyncio.run(body())


@pytest.mark.parametrize("harm", ["damaged", "foreign", "missing", "short"])
def test_without_a_sound_filter_everything_is_found_all_the_same(harm: str) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        ids = drawn(20_000, 7)
        (ref,) = await stored(
            backend, make_entries(ids, np.zeros(len(ids), PLACE)), filtered=harm != "missing"
        )
        (other,) = await stored(backend, make_entries(drawn(20_000, 8), np.zeros(len(ids), PLACE)))
        name = filter_name(ref.id)
        if harm == "damaged":
            backend.objects[name] = (
                backend.objects[name][:100] + b"\1\2\3" + backend.objects[name][103:]
            )
        elif harm == "foreign":
            backend.objects[name] = backend.objects[filter_name(other.id)]
        elif harm == "short":
            backend.objects[name] = backend.objects[name][:50]
        index = Index(backend, [ref], KEY, budget=0)
        await index.load()
        found, _ = await asyncio.to_thread(
            index.lookup, np.concatenate([ids[:3000], drawn(3000, 9)])
        )
        assert found[:3000].all() and not found[3000:].any()
        assert not index.damaged  # the segment itself is sound

    asyncio.run(body())


async def with_shards(
    backend: Backend, shards: int, chunks: int
) -> tuple[list[SegmentRef], Bytes, Records]:
    """Build shards of which only the footers matter, and one segment that refers to their chunks."""
    ids, places = drawn(shards * chunks, 10), np.zeros(shards * chunks, PLACE)
    for number in range(shards):
        table = ShardTable(random_id(), 1 << 23)
        for at in range(number * chunks, (number + 1) * chunks):
            places["offset"][at] = table.add(ids[at].tobytes(), _BITMAP, bytes(32), RAW, 4096)
            places["shard"][at] = np.frombuffer(table.name, np.uint8)
        places["length"], places["codec"] = 4096, RAW
        await backend.create(
            object_name("shard", table.name), [bytes(table.used), table.footer(KEY)]
        )
    return await stored(backend, make_entries(ids, places)), ids, places


@pytest.mark.parametrize("direct", [True, False])
def test_what_lies_together_is_found_together(direct: bool) -> None:
    async def body() -> None:
        faulty = FaultyBackend(MemoryBackend())
        refs, ids, places = await with_shards(faulty, 100, 100)
        faulty.direct = direct
        index = Index(faulty, refs, KEY, budget=0, shard_key=KEY)
        await index.load()
        faulty.calls.clear()
        asked = np.concatenate([ids[3000:5000], drawn(2000, 11)])
        found, got = await asyncio.to_thread(index.lookup, asked)
        assert (
            found[:2000].all()
            and not found[2000:].any()
            and (got[:2000] == places[3000:5000]).all()
        )
        # One filter, one head, 20 shards with their size and footer, some blocks: not the 2000 that
        # were asked for.
        assert len(faulty.calls) < 120
        faulty.calls.clear()
        for at in range(7000, 7100):
            place = await asyncio.to_thread(index.find, ids[at].tobytes())
            assert place is not None and place == places[at]
        assert len(faulty.calls) <= 6
        # What is not asked together is found as well.
        index = Index(faulty, refs, KEY, budget=0, shard_key=KEY)
        await index.load()
        order = np.random.default_rng(12).permutation(len(ids))[:300]
        found, got = await asyncio.to_thread(index.lookup, ids[order])
        assert found.all() and (got == places[order]).all()

    asyncio.run(body())


def test_neighbours_in_condemned_or_unreadable_shards() -> None:
    """A shard to avoid has no neighbours, and one with an unreadable footer is still found through
    the index.
    """

    async def body() -> None:
        backend = MemoryBackend()
        refs, ids, places = await with_shards(backend, 90, 100)
        condemned = places["shard"][0].tobytes()
        name = object_name("shard", places["shard"][150].tobytes())
        backend.objects[name] = backend.objects[name][:-1] + b"\0"
        del backend.objects[object_name("shard", places["shard"][250].tobytes())]
        index = Index(backend, refs, KEY, budget=0, shard_key=KEY, avoid=frozenset([condemned]))
        await index.load()
        found, got = await asyncio.to_thread(index.lookup, ids[:400])
        assert not found[:100].any() and found[100:].all() and (got[100:] == places[100:400]).all()

    asyncio.run(body())


def test_neighbours_are_bounded() -> None:
    near = Neighbours(1000)
    runs = [make_entries(drawn(400, seed), np.zeros(400, PLACE)) for seed in range(5)]
    for run in runs[:2]:
        near.add(run)
    assert near.search(runs[0]["chunk"])[0].all()  # now the second is the longest unused
    near.add(runs[2])
    assert near.search(runs[0]["chunk"])[0].all() and not near.search(runs[1]["chunk"])[0].any()
    near.add(np.concatenate([runs[3], runs[4], runs[1]]))
    assert not near.search(runs[3]["chunk"])[0].any() and near.search(runs[2]["chunk"])[0].all()


def test_tables_of_long_footers_are_read_in_two() -> None:
    async def body() -> None:
        faulty = FaultyBackend(MemoryBackend())
        _, ids, _ = await with_shards(faulty, 8, 1300)
        for name in [name for name in faulty.inner.objects if name.startswith("shards/")][:2]:  # type: ignore[attr-defined]
            faulty.calls.clear()
            table = await read_table(faulty, KEY, bytes.fromhex(name[-32:]))
            assert len(table) == 1300 and len(faulty.calls) == 3
            assert (ids == table["chunk"][0]).all(axis=1).any()

    asyncio.run(body())


def test_the_collector_gives_filters_and_takes_those_of_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        first = await take(repository, {cell: cell for cell in range(20)})
        assert not [name for name in backend.objects if name.startswith("filters/")]
        monkeypatch.setattr(index_module, "FILTER_ENTRIES", 8)
        await collect(repository)
        (ref,) = (await state_of(repository)).state.segments
        assert filter_name(ref.id) in backend.objects
        await take(repository, {cell: 100 + cell for cell in range(20)}, first)
        refs = (await state_of(repository)).state.segments
        assert {name for name in backend.objects if name.startswith("filters/")} == {
            filter_name(ref.id) for ref in refs
        }
        before = dict(backend.objects)
        stray = filter_name(random_id())
        await backend.create(stray, [b"left by nobody"])
        plan = await Collector(repository).plan()
        assert [item.name for item in plan.trim] == [stray] and set(backend.objects) == {
            *before,
            stray,
        }
        for index in (Index(backend, refs, repository.keys.segment, budget=0),):
            await index.load()
            entries = np.concatenate([await index.entries_of(ref) for ref in refs])
            found, _ = await asyncio.to_thread(index.lookup, entries["chunk"])
            assert found.all() and len(entries) == 40
        # One that is damaged, or denies what is there, is found and removed; the collector makes it
        # anew.
        good = backend.objects[filter_name(refs[0].id)]
        empty = encode_filter(
            np.zeros((refs[0].count, 32), np.uint8), refs[0], repository.keys.segment, ""
        )
        for bad in (good[:-1] + b"\xff", empty):
            backend.objects[filter_name(refs[0].id)] = bad
            report = await check(repository)
            assert [damage.name for damage in report.damages] == [filter_name(refs[0].id)]
            assert [fix.kind for fix in (await Repairer(repository).apply()).fixes] == [
                "index filter"
            ]
            assert filter_name(refs[0].id) not in backend.objects
            await collect(repository)
            assert backend.objects[filter_name(refs[0].id)] == good
            await sound(repository)
        await repository.forget([first])
        await collect(repository)
        await sound(repository, unreached=0)
        refs = (await state_of(repository)).state.segments
        assert {name for name in backend.objects if name.startswith("filters/")} == {
            filter_name(ref.id) for ref in refs
        }
        assert page(1) != page(2)

    asyncio.run(body())
