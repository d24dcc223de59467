"""What is written comes back, is stored once, takes little space where little changed, and is never
partial: failed sessions leave nothing behind.
"""

from __future__ import annotations

import gc
import os
import resource
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import StoreError, StoreFull
from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.backend.base import Backend
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from icecore.store.backend.local import LocalBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format import codec
from icecore.store.format.cell import Records
from icecore.store.format.chunk import NO_CHUNK, chunk_id
from icecore.store.format.container import TAIL_BYTES
from icecore.store.format.manifest import Region
from icecore.store.format.shard import SHARD, parse_footer
from icecore.store.runtime.pool import BufferPool, Scratch
from icecore.store.snapshot.trial import Objective
from tests.store.images import (
    FULL,
    KINDS,
    NONE,
    Image,
    Place,
    bitmap,
    image,
    local_place,
    make_data,
    place,
    touch,
)

THRIFTY = Objective(0.01e9, 2)


@pytest.fixture
def here(tmp_path: Path) -> Iterator[Place]:
    with local_place(tmp_path / "repository") as made:
        yield made


def bases(records: Records) -> set[bytes]:
    return {record["base"].tobytes() for record in records} - {NO_CHUNK}


def is_delta(records: Records) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    return records["place"]["codec"] & codec.DELTA != 0


@pytest.mark.parametrize("kind", KINDS)
def test_round_trip(here: Place, kind: str) -> None:
    content = image(3, kind) | {
        7: (bitmap([0, 9, 255]), make_data(kind, 3, 77)),
        64: (bitmap([3]), make_data(kind, 1, 78)),
        65: (NONE, b""),
    }
    taken = here.take(content)
    assert here.content(taken.snapshot) == content
    assert taken.statistics.logical == sum(len(data) for _, data in content.values())
    assert taken.statistics.stored == sum(taken.statistics.by_codec.values())
    if kind == "zero":
        assert taken.statistics.stored == 0


def test_equal_cells_of_a_snapshot_are_stored_once(here: Place) -> None:
    data = make_data("random", CELL_PAGES)
    taken = here.take(dict.fromkeys(range(5), (FULL, data)), threads=4)
    assert taken.statistics.stored == CELL_BYTES
    assert taken.statistics.chunks == 1
    assert taken.statistics.reused_from["session"] == 4
    assert len({record["place"].tobytes() for record in taken.records}) == 1


def test_what_the_parent_has_is_not_stored_again(here: Place) -> None:
    first = here.take(image(6))
    moved = here.take(image(6), first)
    assert moved.statistics.stored == 0
    assert moved.statistics.reused_from == {"parent": 6}
    assert moved.space.nodes == first.space.nodes
    assert here.content(moved.snapshot) == image(6)


def test_what_another_lineage_has_is_found_in_the_index(here: Place) -> None:
    here.take(image(6), lineage="one")
    other = {cell + 100: content for cell, content in image(6).items()} | {
        0: (FULL, make_data("heap", CELL_PAGES, 999))
    }
    taken = here.take(other, lineage="two")
    assert taken.statistics.reused_from == {"index": 6}
    assert taken.statistics.chunks == 1
    assert here.content(taken.snapshot) == other


def test_few_changed_pages_cost_little_more_than_the_pages(here: Place) -> None:
    first = here.take(image(8, "float32"))
    later = touch(image(8, "float32"), [1, 3], pages=4, seed=1)
    second = here.take(later, first)
    assert is_delta(second.records).tolist() == [False, True, False, True] + [False] * 4
    assert second.statistics.deltas == 2
    assert second.statistics.stored < 2 * 4 * 400
    assert here.content(second.snapshot) == later


def test_deltas_are_of_depth_one_over_generations(here: Place) -> None:
    content: Image = image(2, "float32")
    taken = here.take(content)
    full = {record["chunk"].tobytes() for record in taken.records}
    for generation in range(5):
        content = touch(content, [0], pages=3, seed=generation)
        taken = here.take(content, taken)
        assert bases(taken.records) <= full
        assert is_delta(taken.records).tolist() == [True, False]
        assert here.content(taken.snapshot) == content


def test_a_delta_that_has_grown_becomes_a_full_chunk_and_the_next_base(here: Place) -> None:
    before = image(1, "float32")
    first = here.take(before)
    content = dict(before)
    changed = bytearray(before[0][1])
    changed[: 100 * PAGE] = make_data("random", 100, 1)
    content[0] = FULL, bytes(changed)
    second = here.take(content, first)
    assert is_delta(second.records).all()
    changed[100 * PAGE : 200 * PAGE] = make_data("random", 100, 2)
    content[0] = FULL, bytes(changed)
    third = here.take(content, second)
    assert not is_delta(third.records).any()
    content = touch(content, [0], pages=1, seed=3)
    fourth = here.take(content, third)
    assert bases(fourth.records) == {third.records[0]["chunk"].tobytes()}
    assert here.content(fourth.snapshot) == content


def test_going_back_to_the_base_needs_no_bytes(here: Place) -> None:
    before = image(1, "float32")
    first = here.take(before)
    second = here.take(touch(before, [0], pages=2, seed=1), first)
    assert is_delta(second.records).all()
    third = here.take(before, second)
    assert third.statistics.stored == 0
    assert third.records["place"].tobytes() == first.records["place"].tobytes()
    assert not bases(third.records)


@pytest.mark.parametrize("direct", [True, False])
def test_deltas_between_different_page_sets(direct: bool) -> None:
    backend = MemoryBackend()
    backend.direct = direct
    with place(backend) as here:
        whole = np.frombuffer(make_data("float32", CELL_PAGES), np.uint8).reshape(-1, PAGE)

        def cell(pages: list[int]) -> dict[int, tuple[bytes, bytes]]:
            return {0: (bitmap(pages), whole[pages].tobytes())}

        taken = here.take(cell(list(range(200))))
        for pages in (
            list(range(10, 210)),
            list(range(150)),
            list(range(0, 200, 1)),
            list(range(5, 256, 2)),
            [199],
        ):
            before, taken = taken, here.take(cell(pages), taken)
            assert here.content(taken.snapshot) == cell(pages), before
        assert taken.statistics.stored < PAGE


def test_pages_rewritten_with_other_bytes_are_patched(here: Place) -> None:
    before = image(1, "random")
    first = here.take(before, objective=THRIFTY)
    changed = bytearray(before[0][1])
    changed[5 * PAGE : 25 * PAGE] = make_data("text", 20)
    content = {0: (FULL, bytes(changed))}
    second = here.take(content, first, objective=THRIFTY)
    assert second.records[0]["place"]["codec"] & codec.DELTA == codec.PATCH
    assert second.statistics.stored < 20 * PAGE // 2
    assert here.content(second.snapshot) == content


def test_a_damaged_base_is_not_built_upon(here: Place, tmp_path: Path) -> None:
    before = image(1, "float32")
    first = here.take(before)
    (shard,) = (tmp_path / "repository" / "shards").rglob("*/*")
    whole = bytearray(shard.read_bytes())
    whole[12345] ^= 1
    shard.write_bytes(whole)
    content = touch(before, [0], pages=1, seed=1)
    second = here.take(content, first)
    assert not is_delta(second.records).any()
    assert here.content(second.snapshot) == content
    assert [
        event.fields["chunk"] for event in here.events if event.name == "store.base_damaged"
    ] == [first.records[0]["chunk"].tobytes().hex()]


def test_condemned_shards_are_neither_reused_nor_built_upon(here: Place) -> None:
    before = image(2, "float32")
    first = here.take(before)
    shard = first.records[0]["place"]["shard"].tobytes()
    with here.writer(first.snapshot) as writer:
        writer.session._condemned = frozenset([shard])
        same = here.store(writer, before, first)
        assert (same["place"]["shard"] != np.frombuffer(shard, np.uint8)).any(axis=1).all()
        changed = here.store(writer, touch(before, [0, 1], pages=1, seed=1), first)
        assert not is_delta(changed).any()
        assert writer.statistics.reused == 0


def test_a_chunk_of_the_same_session_can_be_a_base_once_it_is_stored(here: Place) -> None:
    """As when pre-copy stored a cell that the window finds changed."""
    before = image(12, "random")
    with here.writer(memory=1) as writer:
        early = here.store(writer, before)
        writer._streams[0].flush()
        writer._uploads.wait()
        known = {int(record["cell"]): record for record in early}
        later = touch(before, list(range(12)), pages=1, seed=1)
        records = np.zeros(12, early.dtype)
        for cell, (bits, data) in later.items():
            records[cell] = writer.store_cell(0, cell, bits, NONE, memoryview(data), known[cell])
        assert is_delta(records).all()
        space = writer.put_map(
            "process", "1", 12 * CELL_BYTES, [Region(0, 12 * CELL_BYTES, 0)], [records], None
        )
        snapshot = writer.commit(here.manifest([space]))
    assert here.content(snapshot) == later


def test_a_chunk_still_in_memory_is_no_base(here: Place) -> None:
    before = image(1, "random")
    with here.writer() as writer:
        early = here.store(writer, before)
        (_, data) = touch(before, [0], pages=1, seed=1)[0]
        record = writer.store_cell(0, 0, FULL, NONE, memoryview(data), early[0])
        assert not record["place"]["codec"] & codec.DELTA


async def listed(backend: Backend, prefix: str) -> list[str]:
    return [info.name async for info in backend.list(prefix)]


@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "buffers"])
def test_eight_threads_and_many_shards(tmp_path: Path, drafts: bool) -> None:
    content = image(24, "random") | {cell: image(1, "random")[0] for cell in range(100, 140)}
    backend = LocalBackend(tmp_path, create=True)
    backend.drafts = drafts
    with place(backend, shard_bytes=4 << 20) as here:
        with here.writer() as writer:
            records = here.store(writer, content, threads=8)
            space = writer.put_map(
                "process", "1", 140 * CELL_BYTES, [Region(0, 140 * CELL_BYTES, 0)], [records], None
            )
            snapshot = writer.commit(here.manifest([space]))
            assert writer.statistics.chunks == 24
            assert writer.statistics.logical == len(content) * CELL_BYTES
        assert here.content(snapshot) == content
        names = here.loop.run(listed(backend, "shards/"))
        assert 6 <= len(names) <= 6 + (os.cpu_count() or 1)
        chunks = []
        for name in names:
            whole, identity = here.loop.run(backend.get(name)), bytes.fromhex(name[-32:])
            where = SHARD.parse_tail(identity, len(whole), whole[-TAIL_BYTES:])
            assert where.offset <= 4 << 20
            for entry in parse_footer(
                here.repository.keys.shard, identity, len(whole), whole[where.offset :]
            ):
                stored = whole[int(entry["offset"]) : int(entry["offset"]) + int(entry["length"])]
                chunks.append(chunk_id(here.repository.keys.chunk, entry["data"].tobytes(), stored))
                assert chunks[-1] == entry["chunk"].tobytes()
        assert len(chunks) == len(set(chunks)) == 24
        assert not list(tmp_path.rglob(".new-*"))


def test_streams_have_their_own_shards(here: Place) -> None:
    with here.writer(streams=3) as writer:
        places = [
            writer.store_cell(
                stream,
                cell,
                FULL,
                NONE,
                memoryview(make_data("random", CELL_PAGES, 10 * stream + cell)),
                None,
            )["place"]["shard"].tobytes()
            for cell in range(2)
            for stream in range(3)
        ]
    assert places[:3] == places[3:]
    assert len(set(places)) == 3


@pytest.mark.parametrize("drafts", [True, False], ids=["drafts", "buffers"])
def test_memory_is_bounded(tmp_path: Path, drafts: bool) -> None:
    """96 MiB of incompressible cells: at most a few buffers stay in memory, however slow the
    storage is.
    """
    backend = FaultyBackend(
        LocalBackend(tmp_path, create=True),
        delay=lambda call: 0.02 if call.name.startswith("shards") else 0.0,
    )
    backend.drafts = drafts
    with place(backend, shard_bytes=4 << 20) as here, here.writer() as writer:
        data = np.frombuffer(make_data("random", CELL_PAGES), np.uint8).copy()

        def some(first: int, cells: int) -> None:
            for cell in range(first, first + cells):
                data[:8] = np.frombuffer(cell.to_bytes(8, "little"), np.uint8)
                writer.store_cell(0, cell, FULL, NONE, data.data, None)

        some(0, 24)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        some(24, 72)
        assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 24 << 10
        assert writer.statistics.stored == 96 * CELL_BYTES


def objects(backend: MemoryBackend) -> set[str]:
    return {
        name
        for name in backend.objects
        if name.split("/")[0] in ("shards", "nodes", "snapshots", "index", "hints")
    }


def test_an_aborted_snapshot_leaves_nothing() -> None:
    backend = MemoryBackend()
    with place(backend) as here:
        with pytest.raises(KeyboardInterrupt), here.writer(memory=1) as writer:
            records = here.store(writer, image(9, "random"))
            writer.put_map(
                "process", "1", 9 * CELL_BYTES, [Region(0, 9 * CELL_BYTES, 0)], [records], None
            )
            writer.put_hints("lineage", b"fingerprints")
            writer._uploads.settle()
            assert objects(backend)
            raise KeyboardInterrupt
        assert not objects(backend)
        assert not here.loop.run(here.repository.log.newest()).state.sessions


@pytest.mark.parametrize("commits", [True, False])
def test_the_memory_of_a_writer_is_freed_with_it(commits: bool) -> None:
    """Not when the garbage collector next looks at its oldest generation."""
    with place(MemoryBackend()) as here:
        before = here.take(image(3, "random"))
        gc.collect()
        gc.disable()
        try:
            if commits:
                here.take(image(3, "random", seed=4), before)
            else:
                with here.writer(before.snapshot) as writer:
                    here.store(writer, image(3, "random", seed=4), before)
                del writer
            left = [one for one in gc.get_objects() if isinstance(one, (BufferPool, Scratch))]
        finally:
            gc.enable()
        assert not left


def test_a_full_store_is_told_of_at_the_next_cell_and_at_commit() -> None:
    inner = MemoryBackend()
    backend = FaultyBackend(inner)
    with place(backend) as here:
        kept = here.take(image(2, "random", seed=5))
        full = threading.Event()

        def plan(call: Call) -> Outcome:
            if full.is_set() and call.operation == "create" and call.name.startswith("shards"):
                raise StoreFull("no space left")
            return Outcome.PASS

        backend.plan = plan
        full.set()
        with pytest.raises(StoreFull), here.writer(memory=1) as writer:
            here.store(writer, image(40, "random"), threads=2)
        with pytest.raises(StoreFull), here.writer() as writer:
            records = here.store(writer, image(2, "random"))
            space = writer.put_map(
                "process", "1", 2 * CELL_BYTES, [Region(0, 2 * CELL_BYTES, 0)], [records], None
            )
            writer.commit(here.manifest([space]))
        assert not here.loop.run(here.repository.log.newest()).state.sessions
        full.clear()
        assert [record.snapshot for record in here.loop.run(here.repository.snapshots())] == [
            kept.snapshot
        ]
        assert here.content(kept.snapshot) == image(2, "random", seed=5)
        assert len({name for name in objects(inner) if name.startswith("shards")}) == 1


@pytest.mark.parametrize("operation", ["append", "create"])
def test_a_draft_that_fails_leaves_nothing(tmp_path: Path, operation: str) -> None:
    backend = FaultyBackend(LocalBackend(tmp_path, create=True))
    with place(backend, shard_bytes=4 << 20) as here:
        kept = here.take(image(2, "random", seed=5))

        def plan(call: Call) -> Outcome:
            if call.operation == operation and call.name.startswith("shards") and call.number > 60:
                raise StoreFull("no space left")
            return Outcome.PASS

        backend.plan = plan
        with pytest.raises(StoreFull), here.writer(kept.snapshot) as writer:
            here.store(writer, image(80, "random"), kept, threads=4)
            writer.commit(here.manifest([]))
        backend.plan = lambda call: Outcome.PASS
        assert here.content(kept.snapshot) == image(2, "random", seed=5)
        assert len(here.loop.run(listed(backend, "shards/"))) == 1
        assert not list(tmp_path.rglob(".new-*"))


def test_lost_replies_do_not_lose_a_snapshot() -> None:
    backend = FaultyBackend(MemoryBackend())
    seen: set[str] = set()

    def plan(call: Call) -> Outcome:
        if (
            call.operation == "create"
            and call.name.startswith(("shards", "nodes", "snapshots"))
            and call.name not in seen
        ):
            seen.add(call.name)
            return Outcome.LOSE
        return Outcome.PASS

    with place(backend) as here:
        backend.plan = plan
        taken = here.take(image(3))
        assert len(seen) == 3
        assert here.content(taken.snapshot) == image(3)


@pytest.mark.parametrize("kind", ["nodes", "snapshots", "shards"])
def test_an_unreachable_store_at_commit(kind: str) -> None:
    inner = MemoryBackend()
    backend = FaultyBackend(inner)
    with place(backend) as here:
        backend.plan = lambda call: (
            Outcome.FAIL
            if call.operation == "create" and call.name.startswith(kind)
            else Outcome.PASS
        )
        with pytest.raises(StoreError):
            here.take(image(2))
        assert here.loop.run(here.repository.snapshots()) == []
        assert not objects(inner)


def test_cells_that_do_not_fit_their_bitmap_are_refused(here: Place) -> None:
    with here.writer() as writer, pytest.raises(ValueError, match="data pages"):
        writer.store_cell(0, 0, bitmap([1]), NONE, memoryview(bytes(2 * PAGE)), None)


def test_a_snapshot_of_nothing(here: Place) -> None:
    with here.writer() as writer:
        space = writer.put_map("file", "/empty", 0, [], [], None)
        snapshot = writer.commit(here.manifest([space]))
    assert here.reader(snapshot).records(space) == []


def test_hints(here: Place) -> None:
    from icecore.errors import Damaged
    from icecore.store.format.hints import decode_hints

    with here.writer() as writer:
        name, digest = writer.put_hints("lineage", b"f" * 1000)
        writer.commit(here.manifest([]))
    data = here.loop.run(here.repository.backend.get(name))
    key = here.repository.keys.hints
    assert decode_hints(name, data, key, digest) == b"f" * 1000
    with pytest.raises(Damaged):
        decode_hints(name, data[:-1] + bytes([data[-1] ^ 1]), key, digest)


def test_thrifty_objective_stores_less(here: Place) -> None:
    quick, small = (
        here.take(image(2, "float32", 1)),
        here.take(image(2, "float32", 2), objective=THRIFTY),
    )
    assert small.statistics.stored < 0.95 * quick.statistics.logical


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_a_region_where_deltas_failed_is_still_looked_at(encrypted: bool, tmp_path: Path) -> None:
    """Most cells are rewritten, so deltas are given up there for a while; a cell with few changed
    pages is found nevertheless.
    """
    with local_place(tmp_path / "repository", encrypted=encrypted) as here:
        before = image(20, "random")
        first = here.take(before)
        few = {cell: touch(before, [cell], pages=2, seed=1)[cell] for cell in (6, 13, 19)}
        content = image(20, "random", seed=9) | few
        second = here.take(content, first)
        assert np.flatnonzero(is_delta(second.records)).tolist() == [6, 13, 19]
        assert here.content(second.snapshot) == content


def test_what_pre_copy_made_a_delta_of_can_change_again(here: Place) -> None:
    """The cell's newest record is a delta that cannot be read back yet, but its base can."""
    before = image(1, "random")
    first = here.take(before)
    once = touch(before, [0], pages=2, seed=1)
    twice = touch(once, [0], pages=2, seed=2)
    with here.writer(first.snapshot) as writer:
        early = here.store(writer, once, first)
        record = writer.store_cell(0, 0, FULL, NONE, memoryview(twice[0][1]), early[0])
        assert record["base"].tobytes() == first.records[0]["chunk"].tobytes()
        space = writer.put_map(
            "process",
            "1",
            CELL_BYTES,
            [Region(0, CELL_BYTES, 0)],
            [np.array([record])],
            first.space,
        )
        snapshot = writer.commit(here.manifest([space], first.snapshot))
    assert here.content(snapshot) == twice


def test_the_first_shard_of_a_far_store_is_sent_before_it_is_full() -> None:
    """This keeps the link busy; later shards are as long as allowed, however fast the store is."""
    backend = MemoryBackend()
    with place(backend, 16 << 20) as here:
        taken = here.take(image(40, "random", 1))
        assert len(here.content(taken.snapshot)) == 40
    sizes = sorted(
        len(data) >> 20 for name, data in backend.objects.items() if name.startswith("shards/")
    )
    assert sizes == [4, 4, 16, 16]  # the first, what was left, and two full ones
