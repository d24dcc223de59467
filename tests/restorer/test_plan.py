"""The restore plan: every cell exactly once, every byte where the plan says, bounds kept."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from icecore.restorer.plan.memory import Batch, interleave, plan_batches, plan_one, room_for
from icecore.store.format.cell import CELL, Records

MIB = 1 << 20

Place = tuple[int, int, int]  # shard, offset, length
place = st.tuples(st.integers(1, 3), st.integers(0, 8 * MIB), st.integers(1, MIB + 256))


def table(places: list[tuple[Place, Place | None]]) -> Records:
    records = np.zeros(len(places), CELL)
    for row, (own, base) in enumerate(places):
        for name, value in (("place", own), ("base_place", base)):
            if value is not None:
                records[name][row]["shard"] = value[0]
                records[name][row]["offset"] = value[1]
                records[name][row]["length"] = value[2]
    return records


def check_bytes(records: Records, batch: Batch) -> None:
    """Executes the reads on shards whose byte at i is a function of shard and i, and looks at every
    cell's bytes.
    """

    def content(
        shard: int, offset: int, length: int
    ) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
        return (
            (np.arange(offset, offset + length, dtype=np.uint64) * 2654435761 + shard) % 251
        ).astype(np.uint32)

    buffer = np.full(batch.size, 999, np.uint32)
    for read in batch.reads:
        assert (buffer[read.at : read.at + read.length] == 999).all(), "reads overlap in the buffer"
        buffer[read.at : read.at + read.length] = content(read.shard[0], read.offset, read.length)
    for cell in batch.cells:
        for name, start, stop in (
            ("place", cell.start, cell.stop),
            ("base_place", cell.base_start, cell.base_stop),
        ):
            own = records[name][cell.row]
            assert stop - start == own["length"]
            expected = content(int(own["shard"][0]), int(own["offset"]), int(own["length"]))
            assert (buffer[start:stop] == expected).all()


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(place, st.one_of(st.none(), place)), min_size=1, max_size=24),
    st.sampled_from([0, 4096, MIB]),
    st.sampled_from([MIB, 4 * MIB]),
)
def test_every_cell_is_read_once_and_whole(
    places: list[tuple[Place, Place | None]], gap: int, read_size: int
) -> None:
    records = table(places)
    order = list(reversed(range(len(places))))
    found = []
    for batch in plan_batches(records, order, gap=gap, read_size=read_size):
        assert batch.size <= room_for(read_size)
        assert all(r.length <= max(read_size, MIB + 256) for r in batch.reads)
        found.extend(cell.row for cell in batch.cells)
        check_bytes(records, batch)
    assert found == order


def test_neighbours_become_one_range() -> None:
    records = table([((1, i * 1000, 1000), None) for i in range(10)])
    (batch,) = plan_batches(records, range(10), gap=0, read_size=MIB)
    assert [(r.offset, r.length) for r in batch.reads] == [(0, 10_000)]


def test_a_gap_is_read_along_only_while_it_is_small() -> None:
    records = table([((1, 0, 1000), None), ((1, 5000, 1000), None)])
    (batch,) = plan_batches(records, range(2), gap=3999, read_size=MIB)
    assert len(batch.reads) == 2
    (batch,) = plan_batches(records, range(2), gap=4000, read_size=MIB)
    assert [(r.offset, r.length) for r in batch.reads] == [(0, 6000)]


def test_one_chunk_shared_by_cells_is_read_once() -> None:
    records = table([((1, 0, 1000), None)] * 5)
    (batch,) = plan_batches(records, range(5), gap=0, read_size=MIB)
    assert [(r.offset, r.length) for r in batch.reads] == [(0, 1000)]


def test_a_fault_reads_its_cell_alone() -> None:
    records = table([((1, 0, 1000), (2, 50, 70)), ((1, 1000, 1000), None)])
    batch = plan_one(records, 0)
    assert [(r.offset, r.length) for r in batch.reads] == [(0, 1000), (50, 70)]
    check_bytes(records, batch)


@given(st.lists(st.integers(1, 200), min_size=1, max_size=4))
def test_processes_progress_alike(sizes: list[int]) -> None:
    parts, first = [], 0
    for size in sizes:
        parts.append(list(range(first, first + size)))
        first += size
    merged = interleave(parts)
    assert sorted(merged) == list(range(first))
    half = set(merged[: len(merged) // 2])
    for part in parts:
        assert [row for row in merged if row in set(part)] == part
        assert abs(len(half & set(part)) - len(part) / 2) <= 16 * len(parts) + 1
