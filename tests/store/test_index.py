"""The dedup index finds every entry with its place, through any mixture of merged, split and partly
loaded segments.
"""

from __future__ import annotations

import asyncio
import time
from unittest import mock

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
from icecore.store.format.names import object_name, random_id
from icecore.store.format.segment import (
    BLOCK_ENTRIES,
    Mask,
    in_shards,
    leading,
    make_entries,
    merge,
    parse_segment,
    partition,
    search,
    sort_entries,
)
from icecore.store.format.state import SegmentRef
from icecore.store.log import index as index_module
from icecore.store.log.index import (
    FAN_IN,
    Merge,
    build,
    merge_long,
    merge_segments,
    plan_merges,
    read_segment,
    replaced,
    size_class,
)
from icecore.store.log.lookup import Index
from icecore.store.log.recent import RecentSegments

KEY = b"k" * 32


def drawn(count: int, seed: int) -> tuple[Bytes, Records]:
    dice = np.random.default_rng(seed)
    ids = dice.integers(0, 256, (count, 32), np.uint8)
    places = np.zeros(count, PLACE)
    places["shard"] = (
        dice.integers(0, 4, (count, 16), np.uint8)
        if count < 100
        else dice.integers(0, 256, (count, 16), np.uint8)
    )
    places["offset"] = np.arange(count)
    places["length"] = seed + 1
    return ids, places


async def store(backend: Backend, entries: Records) -> list[SegmentRef]:
    refs = []
    for segment in build(sort_entries(entries), KEY, random_id):
        await backend.create(object_name("segment", segment.ref.id), segment.parts)
        refs.append(segment.ref)
    return refs


def looked_up(index: Index, ids: Bytes) -> tuple[Mask, Records]:
    """Return the answers of ``lookup``, after checking that ``find`` gives the same for each id."""
    found, places = index.lookup(ids)
    for at in range(len(ids)):
        place = index.find(ids[at].tobytes())
        assert (place is not None) == found[at]
        assert place is None or place == places[at]
    return found, places


@pytest.mark.parametrize("budget", [1 << 30, 50_000, 0])
def test_lookups_through_many_segments(budget: int) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        refs, ids, places = [], [], []
        for seed, count in enumerate([1, 5, BLOCK_ENTRIES, BLOCK_ENTRIES + 1, 5000]):
            some, where = drawn(count, seed)
            refs += await store(backend, make_entries(some, where))
            ids.append(some)
            places.append(where)
        all_ids, all_places = np.concatenate(ids), np.concatenate(places)
        index = Index(backend, refs, KEY, budget=budget)
        await index.load()
        assert index.entries == len(all_ids)
        asked = np.concatenate([all_ids, drawn(3000, 99)[0]])
        order = np.random.default_rng(7).permutation(len(asked))[
            :: 1 if budget > 1 << 20 else 4
        ]  # with little room each reads a block
        found, got = await asyncio.to_thread(looked_up, index, asked[order])
        assert (found == (order < len(all_ids))).all()
        assert (got[found] == all_places[order[found]]).all()
        assert not got[~found].view(np.uint8).any()
        found, _ = index.lookup(np.zeros((0, 32), np.uint8))
        assert len(found) == 0

    asyncio.run(body())


def test_only_live_segments_are_cached() -> None:
    """What merges replaced goes, and makes room: nothing that is live is dropped for it."""
    made = [
        build(sort_entries(make_entries(*drawn(100, seed))), KEY, random_id)[0] for seed in range(5)
    ]
    size = made[0].entries.nbytes
    recent = RecentSegments(budget=4 * size)
    for segment in made[:3]:
        recent.add(segment.ref, segment.entries)
    live = [segment.ref for segment in made[2:]]
    recent.keep(live)
    for segment in made[3:]:
        recent.add(segment.ref, segment.entries)
    held = [recent.get(segment.ref) for segment in made]
    assert held[:2] == [None, None]
    for segment, entries in zip(made[2:], held[2:], strict=True):
        assert entries is not None and (entries == segment.entries).all()


def test_condemned_shards_are_not_found_and_the_newest_place_wins() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        ids, old = drawn(50, 1)
        _, new = drawn(50, 2)
        old["shard"], new["shard"] = 1, 2
        refs = await store(backend, make_entries(ids, old)) + await store(
            backend, make_entries(ids[:20], new[:20])
        )
        for budget in (1 << 30, 0):
            index = Index(backend, refs, KEY, budget=budget)
            await index.load()
            found, places = looked_up(index, ids)
            assert (
                found.all()
                and (places["shard"][:20] == 2).all()
                and (places["shard"][20:] == 1).all()
            )
            index = Index(backend, refs, KEY, budget=budget, avoid=frozenset({bytes([2] * 16)}))
            await index.load()
            found, places = looked_up(index, ids)
            assert found.all() and (places["shard"] == 1).all()
            index = Index(
                backend,
                refs,
                KEY,
                budget=budget,
                avoid=frozenset({bytes([1] * 16), bytes([2] * 16)}),
            )
            await index.load()
            assert not looked_up(index, ids)[0].any()

    asyncio.run(body())


def test_ids_that_share_their_leading_bytes() -> None:
    dice = np.random.default_rng(3)
    ids = dice.integers(0, 256, (3000, 32), np.uint8)
    ids[:, :7] = 5
    ids[:, 7] = dice.integers(0, 3, 3000)
    places = np.zeros(3000, PLACE)
    places["offset"] = np.arange(3000)
    entries = sort_entries(make_entries(ids, places))
    text = [entry["chunk"].tobytes() for entry in entries]
    assert text == sorted(text) and len(text) == 3000
    found, at = search(entries, leading(entries["chunk"]), ids)
    assert found.all() and (entries["place"]["offset"][at] == np.arange(3000)).all()
    others = ids.copy()
    others[:, 31] ^= 1
    known = set(text)
    found, _ = search(entries, leading(entries["chunk"]), others)
    assert found.tolist() == [row.tobytes() in known for row in others]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 5)), max_size=30), max_size=5),
    st.sets(st.integers(0, 5)),
)
def test_merging_is_a_dictionary(runs: list[list[tuple[int, int]]], dead: set[int]) -> None:
    """Of equal ids, the first one stays; entries in dead shards are dropped."""
    sources, expected = [], {}
    for run in runs:
        ids = np.zeros((len(run), 32), np.uint8)
        places = np.zeros(len(run), PLACE)
        for row, (chunk, shard) in enumerate(run):
            ids[row, chunk % 32] = chunk + 1
            places["shard"][row] = shard
            if shard not in dead:
                expected.setdefault(ids[row].tobytes(), shard)
        sources.append(make_entries(ids, places))
    merged = merge(sources, frozenset(bytes([shard] * 16) for shard in dead))
    assert {
        entry["chunk"].tobytes(): int(entry["place"]["shard"][0]) for entry in merged
    } == expected
    assert [entry["chunk"].tobytes() for entry in merged] == sorted(expected)


def test_shards_that_end_in_zeros() -> None:
    ids, places = drawn(4, 5)
    places["shard"] = 0
    places["shard"][:, 0] = [1, 1, 1, 2]
    places["shard"][1, 15] = 9
    entries = make_entries(ids, places)
    assert in_shards(entries, [bytes([1] + [0] * 15)]).tolist() == [True, False, True, False]
    assert in_shards(entries, [bytes([1] + [0] * 14 + [9]), bytes([2] + [0] * 15)]).tolist() == [
        False,
        True,
        False,
        True,
    ]


def test_large_segments_are_cut_by_prefix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(index_module, "SPLIT_ENTRIES", 500)

    async def body() -> None:
        backend = MemoryBackend()
        ids, places = drawn(20_000, 4)
        refs = await store(backend, make_entries(ids, places))
        assert sum(ref.count for ref in refs) == 20_000 and {ref.bits for ref in refs} == {6}
        assert all(ref.id[0] >> 2 == ref.prefix for ref in refs)
        index = Index(backend, refs, KEY)
        await index.load()
        found, got = looked_up(index, ids)
        assert found.all() and (got == places).all()
        merged = [
            segment
            for ref in refs
            for segment in await merge_segments(
                lambda ref: read_segment(backend, ref, KEY), Merge((ref,)), KEY, random_id
            )
        ]
        assert [(s.ref.bits, s.ref.prefix, s.ref.count) for s in merged] == [
            (r.bits, r.prefix, r.count) for r in refs
        ]

    asyncio.run(body())


@pytest.mark.parametrize("key", [KEY, Key(KEY, b"e" * 32)], ids=["plain", "encrypted"])
@pytest.mark.parametrize("bits", [0, 3, 7, 8])
def test_long_segments_are_merged_range_by_range(
    key: bytes, bits: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The result equals a merge of everything at once, and no read is as long as an input."""

    async def body() -> None:
        faulty, prefix = (
            FaultyBackend(MemoryBackend()),
            0b1010110 >> (7 - bits) if bits < 8 else 0b10101101,
        )
        dice = np.random.default_rng(bits)
        refs, runs = [], []
        ids, _ = drawn(5000, 3)
        ids[:, 0] = (prefix << (8 - bits)) + (ids[:, 0] >> bits) if bits else ids[:, 0]
        for number in range(4):
            some = ids[np.sort(dice.permutation(len(ids))[:3000])]
            entries = sort_entries(make_entries(some, drawn(3000, 10 + number)[1]))
            (segment,) = build(entries, key, random_id, bits=bits, prefix=prefix)
            await faulty.create(object_name("segment", segment.ref.id), segment.parts)
            refs.append(segment.ref)
            runs.append(entries)
        dead = frozenset(
            [runs[0]["place"]["shard"][0].tobytes(), runs[3]["place"]["shard"][7].tobytes()]
        )
        monkeypatch.setattr(index_module, "SPLIT_ENTRIES", 1000)
        faulty.calls.clear()
        made = [
            segment
            async for segment in merge_long(faulty, Merge(tuple(refs)), key, random_id, dead)
        ]
        expected = merge(runs[::-1], dead)
        assert sum(segment.ref.count for segment in made) == len(expected) < 5000
        got = [
            parse_segment(object_name("segment", s.ref.id), b"".join(s.parts), key, s.ref.digest)[1]
            for s in made
        ]
        assert (sort_entries(np.concatenate(got)) == expected).all()
        for segment, entries in zip(made, got, strict=True):
            assert (
                entries["chunk"][:, 0] >> (8 - segment.ref.bits) == segment.ref.prefix
            ).all() or not segment.ref.bits
        if bits < 7:
            assert max(call.bytes for call in faulty.calls) < refs[0].length and len(made) > 1

    asyncio.run(body())


def test_damage_to_an_input_stops_a_merge() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        refs = [
            ref for seed in (1, 2) for ref in await store(backend, make_entries(*drawn(3000, seed)))
        ]
        name = object_name("segment", refs[1].id)
        backend.objects[name] = backend.objects[name][:-1] + bytes([backend.objects[name][-1] ^ 1])
        with mock.patch.object(index_module, "SPLIT_ENTRIES", 1000), pytest.raises(Damaged):
            async for _ in merge_long(backend, Merge(tuple(refs)), KEY, random_id):
                pass

    asyncio.run(body())


def test_partition_covers_everything() -> None:
    entries = sort_entries(make_entries(*drawn(1000, 8)))
    for bits in range(9):
        parts = list(partition(entries, bits))
        assert (np.concatenate([part for _, part in parts]) == entries).all()
        for prefix, part in parts:
            assert (part["chunk"][:, 0] >> (8 - bits) == prefix).all() if bits else prefix == 0


def test_the_number_of_segments_stays_small() -> None:
    """Commit after commit, with planned merges: the number of segments grows only with the
    logarithm.
    """
    live: list[SegmentRef] = []
    written = 0
    for number in range(3000):
        live.append(SegmentRef(random_id(), bytes(32), 1, 200 + number % 100))
        for planned in plan_merges(live, entries=1 << 62):
            total = planned.entries
            written += total
            joined = replaced(live, planned.inputs, [SegmentRef(random_id(), bytes(32), 1, total)])
            assert joined is not None
            live = joined
        assert len(live) <= FAN_IN * (size_class(250 * (number + 1)) + 1)
    assert sum(ref.count for ref in live) == sum(200 + number % 100 for number in range(3000))
    assert written <= 5 * sum(
        ref.count for ref in live
    )  # each entry is rewritten a few times at most
    assert replaced(live, [SegmentRef(random_id(), bytes(32), 1, 1)], []) is None


def test_damage_to_any_block_is_seen() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        ids, places = drawn(3000, 6)
        (ref,) = await store(backend, make_entries(ids, places))
        name = object_name("segment", ref.id)
        good = backend.objects[name]
        backend.objects[name] = good[:-100] + bytes([good[-100] ^ 1]) + good[-99:]
        with pytest.raises(Damaged):
            parse_segment(name, backend.objects[name], KEY, ref.digest)
        index = Index(backend, [ref], KEY, budget=0)
        await index.load()
        order = np.argsort(leading(ids))
        found, _ = index.lookup(ids[order])
        assert (
            found[: 2 * BLOCK_ENTRIES].all() and not found[2 * BLOCK_ENTRIES :].any()
        )  # the sound blocks still serve
        assert [damaged.id for damaged, _ in index.damaged] == [ref.id]

    asyncio.run(body())


def test_lookups_are_vectorised() -> None:
    """Not a timing test: a million lookups in a million entries would take minutes with Python work
    for each.
    """
    ids, places = drawn(1_000_000, 9)
    entries = sort_entries(make_entries(ids, places))
    keys = leading(entries["chunk"])
    started = time.perf_counter()
    found, at = search(entries, keys, ids)
    assert time.perf_counter() - started < 30
    assert found.all() and (entries["place"][at[::1000]] == places[::1000]).all()
