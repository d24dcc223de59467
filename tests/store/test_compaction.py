"""Real snapshots with deltas, forgotten, compacted, collected and checked: every byte of the
remaining ones is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.errors import StoreError
from icecore.events import discard
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from icecore.store.format import codec
from icecore.store.format.names import Kind, parse_name
from icecore.store.log.chain import Log
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check import check
from icecore.store.maintenance.compact import compact
from icecore.store.maintenance.gc import Collector, Options
from icecore.store.snapshot.trial import Objective
from tests.store.images import Place, image, local_place, touch

#: So slow a link that bytes count, whatever CPU time a loaded machine takes.
THRIFTY = Objective(0.002e9, 2)


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def here(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Place]:
    with local_place(tmp_path / "repository", encrypted=request.param) as made:
        yield made


def size(root: Path, folder: str) -> int:
    return sum(path.stat().st_size for path in (root / folder).rglob("*") if path.is_file())


def test_deltas_survive_their_shards(here: Place, tmp_path: Path) -> None:
    root = tmp_path / "repository"
    first = image(12, "heap", seed=1)
    taken = [here.take(first, objective=THRIFTY)]
    contents = [first]
    for step in range(3):
        content = touch(contents[-1], [step, step + 1, 8], 20, step)
        content |= {
            cell: value
            for cell, value in image(12, "heap", seed=2 + step).items()
            if cell in (9, 10, 11)
        }
        taken.append(here.take(content, taken[-1], objective=THRIFTY))
        contents.append(content)
    records = taken[-1].records
    assert (records["place"]["codec"] & codec.DELTA != 0).any(), "this test needs deltas"
    # Other data that shares nothing, so that the repository is more than one lineage.
    other = image(4, "bfloat16", seed=9)
    apart = here.take(other, lineage="other")

    loop, repository = here.loop, here.repository
    loop.run(repository.forget([taken[0].snapshot, taken[1].snapshot]))
    before = size(root, "shards")
    plan = loop.run(Collector(repository, Options(compact_below=0.95)).plan())
    assert plan.compact
    result = loop.run(Collector(repository, Options(compact_below=0.95)).collect())
    assert result.compacted.shards == len(plan.compact) and result.compacted.snapshots == 2
    assert size(root, "shards") < before
    for kept, content in [*zip(taken[2:], contents[2:], strict=True), (apart, other)]:
        assert here.content(kept.snapshot) == content
    report = loop.run(check(repository, read_data=1.0))
    assert report.sound and report.unreached == 0 and report.read_chunks == report.chunks > 12

    # Snapshots go on from what was compacted: the parent's records name new places.
    reader = here.reader(taken[-1].snapshot)
    space = reader.manifest.spaces[0]
    (records,) = reader.records(space)
    taken[-1].records, taken[-1].space = records, space
    content = touch(contents[-1], [0, 5], 3, 77)
    following = here.take(content, taken[-1], objective=THRIFTY)
    assert following.statistics.stored < 1 << 20
    assert here.content(following.snapshot) == content
    report = loop.run(check(repository, read_data=1.0))
    assert report.sound


def test_nothing_is_compacted_twice(here: Place) -> None:
    first = here.take(image(6, "heap", seed=1))
    # Of another kind: deltas, which are tried by how long they take, would keep the first one's
    # cells alive.
    content = image(6, "heap", seed=1) | image(4, "bfloat16", seed=2)
    second = here.take(content, first)
    assert not (second.records["place"]["codec"] & codec.DELTA).any()
    here.loop.run(here.repository.forget([first.snapshot]))
    options = Options(compact_below=0.9)
    assert here.loop.run(Collector(here.repository, options).collect()).compacted.shards == 1
    sizes: dict[tuple[str, bytes], int] = {}
    assert here.loop.run(compact(here.repository, sizes, 0.9)).shards == 0  # type: ignore[arg-type]
    again = here.loop.run(Collector(here.repository, options).collect())
    assert again.compacted.shards == 0 and again.deleted == 0 and again.condemned == 0
    assert here.content(second.snapshot) == content


def test_a_shard_with_a_damaged_chunk_stays_as_it_is(here: Place, tmp_path: Path) -> None:
    first = here.take(image(6, "random", seed=1))
    second = here.take(image(6, "random", seed=1) | image(4, "random", seed=2), first)
    here.loop.run(here.repository.forget([first.snapshot]))
    record = second.records[5]
    shard = record["place"]["shard"].tobytes().hex()
    path = tmp_path / "repository" / "shards" / shard[:2] / shard
    path.chmod(0o600)
    with open(path, "r+b") as file:
        file.seek(int(record["place"]["offset"]) + 1000)
        byte = file.read(1)
        file.seek(-1, 1)
        file.write(bytes([byte[0] ^ 1]))
    emitted: list[str] = []
    here.repository.emit = lambda event: emitted.append(event.name)
    here.loop.run(Collector(here.repository, Options(compact_below=0.9)).collect())
    assert "gc.damaged" in emitted and path.exists()
    report = here.loop.run(check(here.repository, read_data=1.0))
    assert {damage.kind for damage in report.damages} == {"chunk"}
    assert [damage.snapshots for damage in report.damages] == [(second.snapshot,)]


def test_a_compaction_that_cannot_write_leaves_nothing(here: Place, tmp_path: Path) -> None:
    """Each write to a shard, and each publication, fails in turn: the old objects stay, and nothing
    is left of the new ones.
    """
    content = image(12, "random", seed=1)
    first = here.take(content | image(20, "random", seed=2) | content)
    second = here.take(content, first)
    here.loop.run(here.repository.forget([first.snapshot]))
    shards = tmp_path / "repository" / "shards"
    before = sorted(path for path in shards.rglob("*") if path.is_file())
    failed = 0
    while True:
        writes: list[Call] = []

        def plan(call: Call, writes: list[Call] = writes, passed: int = failed) -> Outcome:
            if call.operation == "append" or (call.operation, call.name[:7]) == (
                "create",
                "shards/",
            ):
                writes.append(call)
                if len(writes) > passed:
                    return Outcome.FAIL
            return Outcome.PASS

        faulty = FaultyBackend(here.repository.backend, plan)
        keys = here.repository.keys
        opened = StoredRepository(
            faulty, here.repository.config, keys, Log(faulty, keys.log), discard
        )
        try:
            done = here.loop.run(compact(opened, here.loop.run(_sizes(opened)), 0.9))
        except StoreError:
            assert sorted(path for path in shards.rglob("*") if path.is_file()) == before
            assert here.loop.run(check(opened)).sound
            failed += 1
            continue
        break
    assert done.shards == 1 and failed > 3
    here.loop.run(Collector(here.repository).collect())
    assert here.content(second.snapshot) == content
    report = here.loop.run(check(here.repository, read_data=1.0))
    assert report.sound and report.unreached == 0


async def _sizes(repository: StoredRepository) -> dict[tuple[Kind, bytes], int]:
    rows = [(parse_name(info.name), info.size) async for info in repository.backend.list("shards/")]
    return {parsed: size for parsed, size in rows if parsed is not None}


def test_deltas_whose_base_has_gone_are_stored_anew(here: Place, tmp_path: Path) -> None:
    """The base's snapshot is forgotten: the newest of a cell's deltas becomes full, the others
    become deltas of it, and a base with one delta left just goes.
    """
    contents = [image(6, "heap", seed=1)]
    taken = [here.take(contents[0], objective=THRIFTY)]
    for step, cells in enumerate(([0, 1, 2], [1, 2], [2])):
        contents.append(touch(contents[-1], cells, 12, 20 + step))
        taken.append(here.take(contents[-1], taken[-1], objective=THRIFTY))
    first = taken[0].records
    assert (taken[3].records["base"][:3] == first["chunk"][:3]).all(), (
        "this test needs deltas on the first snapshot's chunks"
    )
    loop, repository = here.loop, here.repository
    loop.run(repository.forget([taken[0].snapshot]))
    before = size(tmp_path / "repository", "shards")
    result = loop.run(Collector(repository, Options(compact_below=1.0)).collect())
    # Cell 0 has one delta, cell 1 two, cell 2 three.
    assert result.compacted.rebased == 6
    assert size(tmp_path / "repository", "shards") < before * 1.03
    records = []
    for one, content in zip(taken[1:], contents[1:], strict=True):
        assert here.content(one.snapshot) == content
        reader = here.reader(one.snapshot)
        records.append(reader.records(reader.manifest.spaces[0])[0])
    assert not (records[-1]["place"]["codec"] & codec.DELTA).any()
    for cell, deltas in ((0, 0), (1, 1), (2, 2)):
        based = {
            one["base"][cell].tobytes()
            for one in records
            if one["place"]["codec"][cell] & codec.DELTA
        }
        forms = {
            one["place"]["offset"][cell]
            for one in records
            if one["place"]["codec"][cell] & codec.DELTA
        }
        assert len(forms) == deltas and based <= {records[-1]["chunk"][cell].tobytes()}
    report = loop.run(check(repository, read_data=1.0))
    assert report.sound and report.unreached == 0
    # Full forms are found again by whoever has the same bytes.
    again = here.take(contents[-1], lineage="again")
    assert again.statistics.stored == 0
