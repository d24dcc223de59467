"""A read returns what was written, or raises an error that names what is damaged; few reads
suffice.
"""

from __future__ import annotations

import random
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import hypothesis.strategies as st
import msgspec
import numpy as np
import pytest
from hypothesis import given, settings

from icecore.errors import Damaged, NotFound, ObjectMissing
from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.backend.faulty import FaultyBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format import codec
from icecore.store.format.cell import NODE_CELLS
from icecore.store.format.manifest import NODE_REF, Region
from icecore.store.runtime.pool import Scratch
from icecore.store.snapshot import reader as reader_module
from icecore.store.snapshot.decoder import ChunkDecoder
from icecore.store.snapshot.reader import plan_nodes
from tests.store.images import (
    FULL,
    NONE,
    Image,
    Place,
    Taken,
    bitmap,
    image,
    make_data,
    place,
    touch,
)


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def here(backend: MemoryBackend) -> Iterator[Place]:
    with place(backend) as made:
        yield made


def room() -> memoryview:
    return memoryview(bytearray(CELL_BYTES))


def only(backend: MemoryBackend, prefix: str) -> str:
    (name,) = [name for name in backend.objects if name.startswith(prefix)]
    return name


def stored_at(backend: MemoryBackend, place: np.void) -> memoryview:
    shard = place["shard"].tobytes().hex()
    start = int(place["offset"])
    return memoryview(backend.objects[f"shards/{shard[:2]}/{shard}"])[
        start : start + int(place["length"])
    ]


def flip(backend: MemoryBackend, name: str, at: int, bit: int = 1) -> None:
    whole = bytearray(backend.objects[name])
    whole[at] ^= bit
    backend.objects[name] = bytes(whole)


@pytest.mark.parametrize("kind", ["random", "heap", "bfloat16"])
def test_decode_with_the_callers_buffers(here: Place, backend: MemoryBackend, kind: str) -> None:
    content = image(1, kind)
    record = here.take(content).records[0]
    decoder, scratch, out = ChunkDecoder(here.repository.keys.chunk), Scratch(), room()
    stored = stored_at(backend, record["place"])
    got = decoder.decode(record, stored, None, out, scratch)
    assert got == content[0][1]
    if record["place"]["codec"] == codec.RAW:
        assert got is stored
        assert not any(out[:64])
    else:
        assert got.obj is out.obj


def take_delta(here: Place) -> tuple[dict[int, tuple[bytes, bytes]], Taken]:
    before = image(1, "heap")
    first = here.take(before)
    content = touch(before, [0], pages=40, seed=1)
    second = here.take(content, first)
    assert second.records[0]["place"]["codec"] & codec.DELTA
    return content, second


def test_decode_of_a_delta(here: Place, backend: MemoryBackend) -> None:
    content, taken = take_delta(here)
    record = taken.records[0]
    decoder = ChunkDecoder(here.repository.keys.chunk)
    own, base = (stored_at(backend, record[which]) for which in ("place", "base_place"))
    assert decoder.decode(record, own, base, room(), Scratch()) == content[0][1]
    with pytest.raises(ValueError, match="base"):
        decoder.decode(record, own, None, room(), Scratch())


def test_reading_a_cell_takes_at_most_two_reads() -> None:
    backend = FaultyBackend(MemoryBackend())
    with place(backend) as here:
        _, taken = take_delta(here)
        reader = here.reader(taken.snapshot)
        (records,) = reader.records(taken.space)
        before = len(backend.calls)
        reader.read_cell(records[0], room())
        assert [call.operation for call in backend.calls[before:]] == ["read_into", "read_into"]


def test_through_the_event_loop_where_there_are_no_direct_reads(backend: MemoryBackend) -> None:
    backend.direct = False
    with place(backend) as here:
        content, taken = take_delta(here)
        assert here.content(taken.snapshot) == content


@pytest.mark.parametrize("kind", ["random", "text", "heap", "float32"])
def test_any_flipped_bit_of_a_stored_chunk_is_named(
    here: Place, backend: MemoryBackend, kind: str
) -> None:
    record = here.take({0: (bitmap([1, 5, 9]), make_data(kind, 3))}).records[0]
    reader_of, out = here.reader, room()
    snapshot = here.loop.run(here.repository.snapshots())[0].snapshot
    reader = reader_of(snapshot)
    name = only(backend, "shards/")
    for at in [
        *random.Random(0).sample(range(int(record["place"]["length"])), 300),
        0,
        int(record["place"]["length"]) - 1,
    ]:
        flip(backend, name, at, 1 << at % 8)
        with pytest.raises(Damaged) as caught:
            reader.read_cell(record, out)
        assert (caught.value.kind, caught.value.name) == ("chunk", record["chunk"].tobytes().hex())
        assert name in caught.value.why
        flip(backend, name, at, 1 << at % 8)
    assert reader.read_cell(record, out) == make_data(kind, 3)


def test_a_damaged_delta_and_a_damaged_base_are_told_apart(
    here: Place, backend: MemoryBackend
) -> None:
    _, taken = take_delta(here)
    record, reader = taken.records[0], here.reader(taken.snapshot)
    for which, chunk in (("place", "chunk"), ("base_place", "base")):
        shard = record[which]["shard"].tobytes().hex()
        name = f"shards/{shard[:2]}/{shard}"
        start, length = int(record[which]["offset"]), int(record[which]["length"])
        for at in random.Random(0).sample(range(start, start + length), 100):
            flip(backend, name, at)
            with pytest.raises(Damaged) as caught:
                reader.read_cell(record, room())
            assert caught.value.name == record[chunk].tobytes().hex()
            flip(backend, name, at)


def test_another_chunks_bytes_are_damage(here: Place, backend: MemoryBackend) -> None:
    """Right digest and length, wrong chunk: as if a shard had been exchanged."""
    records = here.take(image(2, "random")).records
    decoder = ChunkDecoder(here.repository.keys.chunk)
    with pytest.raises(Damaged, match="match its id"):
        decoder.decode(records[0], stored_at(backend, records[1]["place"]), None, room(), Scratch())


def test_raw_base_exchanged_is_named(here: Place) -> None:
    before = image(1, "random")
    first = here.take(before)
    second = here.take(touch(before, [0], pages=2, seed=1), first)
    record = second.records[0]
    backend = here.repository.backend
    assert isinstance(backend, MemoryBackend)
    own = stored_at(backend, record["place"])
    with pytest.raises(Damaged) as caught:
        ChunkDecoder(here.repository.keys.chunk).decode(
            record, own, memoryview(make_data("random", CELL_PAGES, 5)), room(), Scratch()
        )
    assert caught.value.name == record["base"].tobytes().hex()


@pytest.mark.parametrize("prefix", ["nodes/", "snapshots/"])
def test_any_flipped_bit_of_maps_and_manifest_is_named(
    here: Place, backend: MemoryBackend, prefix: str
) -> None:
    taken = here.take({cell: (bitmap([cell]), make_data("random", 1, cell)) for cell in range(30)})
    name = only(backend, prefix)
    # A pack's footer is not read by a restore.
    end = (
        len(backend.objects[name])
        if prefix == "snapshots/"
        else sum(np.frombuffer(taken.space.nodes, NODE_REF)["length"].tolist())
    )
    for at in range(end):
        flip(backend, name, at, 1 << at % 8)
        with pytest.raises(Damaged) as caught:
            here.reader(taken.snapshot).records(taken.space)
        if prefix == "nodes/":
            assert (caught.value.kind, caught.value.name) == (
                "node",
                np.frombuffer(taken.space.nodes, NODE_REF)["node"][0].tobytes().hex(),
            )
        else:
            assert caught.value.name == name
        flip(backend, name, at, 1 << at % 8)
    assert here.reader(taken.snapshot).records(taken.space)[0].tobytes() == taken.records.tobytes()


@pytest.mark.parametrize("prefix", ["shards/", "nodes/", "snapshots/"])
def test_truncated_and_missing_objects(here: Place, backend: MemoryBackend, prefix: str) -> None:
    content = image(2, "random")
    taken = here.take(content)
    name = only(backend, prefix)
    whole = backend.objects[name]
    backend.objects[name] = whole[: len(whole) // 3]
    with pytest.raises(Damaged):
        here.content(taken.snapshot)
    del backend.objects[name]
    with pytest.raises(ObjectMissing, match=name):
        here.content(taken.snapshot)
    backend.objects[name] = whole
    assert here.content(taken.snapshot) == content
    with pytest.raises(NotFound):
        here.reader("0" * 32)


def test_many_regions_and_few_reads() -> None:
    backend = FaultyBackend(MemoryBackend())
    with place(backend) as here:
        data = make_data("heap", 1)
        with here.writer() as writer:
            records = []
            for region in range(300):
                cells = list(range(region % 3)) + ([100] if region % 5 == 0 else [])
                rows = [
                    writer.store_cell(
                        0, cell, bitmap([cell]), NONE, memoryview(data), None, region=region
                    )
                    for cell in cells
                ]
                records.append(
                    np.array(rows, rows[0].dtype) if rows else np.empty(0, [("cell", "<u4")])
                )
            dtype = next(r.dtype for r in records if len(r))
            records = [r if len(r) else np.empty(0, dtype) for r in records]
            regions = [Region(i << 30, 1 << 30, i << 30) for i in range(300)]
            space = writer.put_map("process", "1", 0, regions, records, None)
            snapshot = writer.commit(here.manifest([space]))
        before = len(backend.calls)
        back = here.reader(snapshot).records(space)
        reads = [call for call in backend.calls[before:] if call.name.startswith("nodes/")]
        assert len(reads) == 1
        assert [r.tobytes() for r in back] == [r.tobytes() for r in records]


@settings(max_examples=100, deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 200), st.integers(2, 30)), max_size=40),
    st.integers(0, 50),
    st.integers(1, 200),
)
def test_planned_reads_cover_all_nodes(
    nodes: list[tuple[int, int, int]], gap: int, read_size: int
) -> None:
    """Nodes lie at multiples of 30 and are at most that long, as distinct nodes of a pack never
    overlap.
    """
    refs = np.zeros(len(nodes), NODE_REF)
    lengths = {(pack, slot): length for pack, slot, length in nodes}
    for at, (pack, slot, _) in enumerate(nodes):
        refs["pack"][at] = pack
        refs["offset"][at], refs["length"][at] = slot * 30, lengths[pack, slot]
    reads = plan_nodes(refs, gap=gap, read_size=read_size)
    assert sorted(at for read in reads for at in read.refs.tolist()) == list(range(len(nodes)))
    for read in reads:
        for at in read.refs:
            assert refs["pack"][at].tobytes() == read.pack
            assert (
                read.offset <= refs["offset"][at]
                and refs["offset"][at] + refs["length"][at] <= read.offset + read.length
            )
        assert (
            read.length <= read_size or len({refs["offset"][at] for at in read.refs.tolist()}) == 1
        )


def test_eight_threads_read_the_same_snapshot(here: Place) -> None:
    content = image(3 * NODE_CELLS // 16, "heap")
    taken = here.take(touch(content, list(range(0, len(content), 3)), 2, 1), here.take(content))
    expected = here.content(taken.snapshot)
    reader = here.reader(taken.snapshot)
    (records,) = reader.records(taken.space)
    wrong: list[int] = []

    def run(first: int) -> None:
        out = room()
        for record in np.roll(records, first):
            if bytes(reader.read_cell(record, out)) != expected[int(record["cell"])][1]:
                wrong.append(int(record["cell"]))

    threads = [threading.Thread(target=run, args=(first,)) for first in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not wrong


def test_too_little_room_is_refused(here: Place) -> None:
    taken = here.take({0: (FULL, make_data("random", CELL_PAGES))})
    with pytest.raises(ValueError, match="room"):
        here.reader(taken.snapshot).read_cell(taken.records[0], memoryview(bytearray(PAGE)))


_PART = (bitmap(range(3)), make_data("random", 3, 7))
_TABLE = {**image(2, "random"), 2: _PART}
_TABLE_BYTES = 2 * CELL_BYTES + 2 * PAGE + 100


def test_a_table_is_read(here: Place) -> None:
    taken = here.take(_TABLE)
    table = msgspec.structs.replace(taken.space, size=_TABLE_BYTES)
    wanted = b"".join(data for _, data in _TABLE.values())[:_TABLE_BYTES]
    assert here.reader(taken.snapshot).content(table, 1 << 30) == wanted
    with pytest.raises(Damaged, match="more than"):
        here.reader(taken.snapshot).content(table, _TABLE_BYTES - 1)


@pytest.mark.parametrize(
    ("cells", "size"),
    [
        (_TABLE, 1 << 30),
        ({}, 1 << 30),
        (_TABLE, _TABLE_BYTES - 2 * PAGE),
        (_TABLE, 2 * CELL_BYTES),
        ({0: _TABLE[0], 2: _PART}, _TABLE_BYTES),
        ({**_TABLE, 1: (FULL, bytes(CELL_BYTES))}, _TABLE_BYTES),
        ({**_TABLE, 1: (bitmap(range(255)), make_data("random", 255))}, _TABLE_BYTES),
    ],
)
def test_a_table_of_which_the_map_lacks_something_or_has_more(
    here: Place, cells: Image, size: int
) -> None:
    taken = here.take(cells)
    table = msgspec.structs.replace(taken.space, size=size)
    tracemalloc.start()
    try:
        with pytest.raises(Damaged, match="do not hold exactly these"):
            here.reader(taken.snapshot).content(table, 1 << 30)
        assert tracemalloc.get_traced_memory()[1] < 64 << 20
    finally:
        tracemalloc.stop()


def test_threads_that_read_maps_share_their_memory(
    here: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each space's records are counted once, however many threads read them and however often."""
    data = make_data("heap", 1)
    with here.writer() as writer:
        spaces = []
        for number in range(64):
            rows = [
                writer.store_cell(number, 0, bitmap([0]), NONE, memoryview(data), None, region=0)
            ]
            spaces.append(
                writer.put_map(
                    "process", str(number), 0, [Region(0, 1 << 20, 0)], [np.array(rows)], None
                )
            )
        snapshot = writer.commit(here.manifest(spaces))
    size = 64 * rows[0].nbytes
    monkeypatch.setattr(reader_module, "_MAP_BYTES", size)
    reader = here.reader(snapshot)
    with ThreadPoolExecutor(8) as pool:
        for _ in range(20):
            assert all(len(found[0]) == 1 for found in pool.map(reader.records, spaces))
    monkeypatch.setattr(reader_module, "_MAP_BYTES", size - 1)
    reader = here.reader(snapshot)
    with ThreadPoolExecutor(8) as pool, pytest.raises(Damaged, match="more memory than"):
        list(pool.map(reader.records, spaces))
