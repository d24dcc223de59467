"""Cells come out of a repository as they went in, through both ways of reading, with faults first
and failures named.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import Damaged, IcecoreError, ObjectMissing, StoreError
from icecore.events import Event
from icecore.restorer.fetch.fetcher import Fetcher
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.fetch.sink import CellSink
from icecore.store.backend.base import Backend
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome
from icecore.store.backend.local import LocalBackend
from icecore.store.backend.replicas import ReplicaBackend
from icecore.store.format.cell import Records
from icecore.store.snapshot.reader import SnapshotReader
from tests.restorer.places import Place, SlowBackend, repository_place, store_cells

CELLS = 24
LIMITS = Limits(threads=2, budget=64 << 20, attempts=3, stall=5)


@dataclass
class Stored:
    place: Place
    reader: SnapshotReader
    records: Records
    content: list[bytes]


@pytest.fixture(scope="module", params=[False, True], ids=["plain", "encrypted"])
def stored(request: pytest.FixtureRequest) -> Iterator[Stored]:
    random = np.random.default_rng(1)
    content: list[bytes] = []
    bitmaps: list[bytes] = []
    for number in range(CELLS):
        pages = 256 if number % 3 else int(random.integers(1, 256))
        mask = np.zeros(256, np.uint8)
        mask[random.choice(256, pages, replace=False)] = 1
        noise = random.integers(0, 256 if number % 2 else 3, pages * 4096, np.uint8)
        bitmaps.append(np.packbits(mask, bitorder="little").tobytes())
        content.append(noise.tobytes())
    with repository_place(encrypted=request.param) as place:
        reader, records = store_cells(place, list(zip(bitmaps, content, strict=True)))
        yield Stored(place, reader, records, content)


def backend_of(kind: str, stored: Stored) -> Backend:
    return LocalBackend(stored.place.root) if kind == "direct" else SlowBackend(stored.place.root)


class Collected(CellSink):
    """A sink that keeps what it gets."""

    def __init__(self, pause: float = 0.0) -> None:
        self.rows: list[int] = []
        self.data: dict[int, bytes] = {}
        self.pause = pause
        self.errors: list[BaseException] = []

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)

    def place(self, row: int, data: memoryview) -> None:
        if self.pause:
            time.sleep(self.pause)
        self.rows.append(row)
        self.data[row] = bytes(data)


class Refusing(CellSink):
    """A sink that cannot place a row, or any."""

    def __init__(self, row: int | None = None) -> None:
        self.row = row

    def place(self, row: int, data: memoryview) -> None:
        if self.row is None or row == self.row:
            raise OSError("no room")


@pytest.mark.parametrize("kind", ["direct", "loop"])
def test_every_cell_comes_out_verified(stored: Stored, kind: str) -> None:
    sink = Collected()
    fetcher = Fetcher(
        backend_of(kind, stored), stored.reader, stored.records, sink, LIMITS, stored.place.loop
    )
    fetcher.start(range(CELLS))
    assert fetcher.wait(30)
    fetcher.stop()
    assert sorted(sink.rows) == list(range(CELLS))
    assert [sink.data[row] for row in range(CELLS)] == stored.content
    assert fetcher.spent.produced == sum(map(len, stored.content)) and fetcher.spent.cells == CELLS


@pytest.mark.parametrize("kind", ["direct", "loop"])
def test_a_fault_comes_before_the_plan_and_is_served_while_that_is_closed(
    stored: Stored, kind: str
) -> None:
    sink = Collected()
    fetcher = Fetcher(
        backend_of(kind, stored), stored.reader, stored.records, sink, LIMITS, stored.place.loop
    )
    fetcher.start(range(CELLS), opened=False)
    for row in (17, 5, 17):
        fetcher.urgent(row)
    end = time.monotonic() + 10
    while len(sink.data) < 2 and time.monotonic() < end:
        time.sleep(0.005)
    assert set(sink.data) == {5, 17}
    assert not fetcher.wait(0.05)
    fetcher.open()
    assert fetcher.wait(30)
    fetcher.stop()
    assert [sink.data[row] for row in range(CELLS)] == stored.content


@pytest.mark.parametrize("kind", ["direct", "loop"])
def test_a_fault_jumps_a_long_queue(stored: Stored, kind: str) -> None:
    sink = Collected(pause=0.05)
    fetcher = Fetcher(
        backend_of(kind, stored), stored.reader, stored.records, sink, LIMITS, stored.place.loop
    )
    fetcher.start(range(CELLS))
    time.sleep(0.05)
    fetcher.urgent(CELLS - 1)
    assert fetcher.wait(30)
    fetcher.stop()
    assert sink.rows.index(CELLS - 1) < CELLS - 4
    assert [sink.data[row] for row in range(CELLS)] == stored.content


def test_a_failed_read_is_tried_again(stored: Stored) -> None:
    backend = SlowBackend(stored.place.root)
    backend.failures = [StoreError("the network is down"), StoreError("still down")]
    sink = Collected()
    fetcher = Fetcher(backend, stored.reader, stored.records, sink, LIMITS, stored.place.loop)
    fetcher.start(range(CELLS))
    assert fetcher.wait(30)
    fetcher.stop()
    assert [sink.data[row] for row in range(CELLS)] == stored.content


@pytest.mark.parametrize(
    "failure",
    [
        ObjectMissing("there is no object x"),
        Damaged("object", "x", "it ends early"),
        StoreError("no route"),
    ],
)
def test_a_lasting_failure_ends_everything_once(stored: Stored, failure: IcecoreError) -> None:
    backend = SlowBackend(stored.place.root)
    backend.failures = [failure] * 100
    sink = Collected()
    fetcher = Fetcher(backend, stored.reader, stored.records, sink, LIMITS, stored.place.loop)
    fetcher.start(range(CELLS))
    with pytest.raises(type(failure)):
        fetcher.wait(30)
    fetcher.stop()
    assert sink.errors == [failure]


def test_storage_that_gives_no_answer_fails(stored: Stored) -> None:
    backend = SlowBackend(stored.place.root)
    backend.delay = 30
    limits = Limits(threads=1, budget=64 << 20, attempts=2, stall=0.1)
    fetcher = Fetcher(
        backend, stored.reader, stored.records, Collected(), limits, stored.place.loop
    )
    fetcher.start(range(CELLS))
    with pytest.raises(StoreError, match="no answer"):
        fetcher.wait(30)
    fetcher.stop()


def test_what_fails_last_is_never_taken_for_delivered(
    stored: Stored, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not even between its end and the word that it has failed."""

    def late(self: Fetcher, error: BaseException) -> None:
        time.sleep(0.3)
        fail(self, error)

    fail = Fetcher.fail
    monkeypatch.setattr(Fetcher, "fail", late)
    fetcher = Fetcher(
        LocalBackend(stored.place.root),
        stored.reader,
        stored.records,
        Refusing(CELLS - 1),
        LIMITS,
        stored.place.loop,
    )
    fetcher.start(range(CELLS))
    with pytest.raises(IcecoreError, match="no room"):
        fetcher.wait(30)
    fetcher.stop()


def test_a_sink_that_fails_ends_everything(stored: Stored) -> None:
    backend = LocalBackend(stored.place.root)
    fetcher = Fetcher(backend, stored.reader, stored.records, Refusing(), LIMITS, stored.place.loop)
    fetcher.start(range(CELLS))
    with pytest.raises(IcecoreError, match="no room"):
        fetcher.wait(30)
    fetcher.stop()


@pytest.mark.parametrize("kind", ["direct", "loop"])
def test_damage_is_named_and_never_delivered(stored: Stored, kind: str) -> None:
    row = 7
    place = stored.records["place"][row]
    path = (
        stored.place.root
        / "shards"
        / place["shard"].tobytes().hex()[:2]
        / place["shard"].tobytes().hex()
    )
    at = int(place["offset"]) + int(place["length"]) // 2
    os.chmod(path, 0o600)
    original = path.read_bytes()
    path.write_bytes(original[:at] + bytes([original[at] ^ 4]) + original[at + 1 :])
    try:
        sink = Collected()
        fetcher = Fetcher(
            backend_of(kind, stored), stored.reader, stored.records, sink, LIMITS, stored.place.loop
        )
        fetcher.start(range(CELLS))
        with pytest.raises(Damaged) as caught:
            fetcher.wait(30)
        fetcher.stop()
        assert stored.records["chunk"][row].tobytes().hex() in str(caught.value)
        assert row not in sink.data
    finally:
        path.write_bytes(original)


def test_a_stopped_fetcher_leaves_nothing_waiting_in_the_loop(stored: Stored) -> None:
    async def tasks() -> int:
        return len(asyncio.all_tasks())

    before = stored.place.run(tasks())
    backend = SlowBackend(stored.place.root)
    backend.delay = 30
    fetcher = Fetcher(
        backend, stored.reader, stored.records, Collected(), LIMITS, stored.place.loop
    )
    fetcher.start(list(range(CELLS)) * 10, opened=False)
    fetcher.urgent(3)
    time.sleep(0.05)
    assert stored.place.run(tasks()) > before
    fetcher.stop()
    end = time.monotonic() + 5
    while stored.place.run(tasks()) > before and time.monotonic() < end:
        time.sleep(0.01)
    assert stored.place.run(tasks()) == before


def test_ranges_in_flight_are_bounded_by_the_budget(stored: Stored) -> None:
    backend = SlowBackend(stored.place.root)
    backend.delay = 0.02
    limits = Limits(threads=2, budget=40 << 20, attempts=1, stall=5)
    sink = Collected()
    fetcher = Fetcher(backend, stored.reader, stored.records, sink, limits, stored.place.loop)
    before = threading.active_count()
    fetcher.start(list(range(CELLS)) * 6)
    assert fetcher.wait(30)
    assert threading.active_count() < before + 40
    fetcher.stop()
    # How many ranges that are depends on what the cells were coded by, and that on how long it
    # took.
    assert 0 < backend.most_in_flight <= limits.budget


@pytest.mark.parametrize("kind", ["direct", "loop"])
@pytest.mark.parametrize("harm", ["flipped", "cut", "missing", "away"])
def test_what_the_nearest_replica_cannot_give_comes_from_the_next(
    stored: Stored, kind: str, harm: str, tmp_path: Path
) -> None:
    """The nearest has damaged or no objects, or goes away while rows are being delivered; no row is
    lost, and none is wrong.
    """
    near = tmp_path / "near"
    shutil.copytree(stored.place.root, near)
    shards = [path for path in (near / "shards").rglob("*") if path.is_file()]
    for path in shards:
        if harm == "flipped":
            data = bytearray(path.read_bytes())
            data[1000 : len(data) - 20000 : 30_000] = bytes(
                byte ^ 1 for byte in data[1000 : len(data) - 20000 : 30_000]
            )
            path.write_bytes(data)
        elif harm == "cut":
            os.truncate(path, path.stat().st_size // 2)
        elif harm == "missing":
            path.unlink()
    first = LocalBackend(near) if kind == "direct" else SlowBackend(near)
    own = backend_of(kind, stored)
    served = FaultyBackend(first)
    if harm == "away":
        reads = 0

        def plan(call: Call) -> Outcome:
            nonlocal reads
            reads += call.name.startswith("shards/")
            return Outcome.PASS if reads <= 1 else Outcome.FAIL

        served.plan = plan
    events: list[Event] = []
    backend = ReplicaBackend(own, [served, own], emit=events.append)
    sink = Collected()
    fetcher = Fetcher(backend, stored.reader, stored.records, sink, LIMITS, stored.place.loop)
    fetcher.start(range(CELLS), opened=False)
    fetcher.urgent(3)
    fetcher.open()
    assert fetcher.wait(30)
    fetcher.stop()
    assert [sink.data[row] for row in range(CELLS)] == stored.content
    assert any(call.name.startswith("shards/") for call in served.calls)
    assert events and {event.name for event in events} == {"store.failover"}


def test_damage_everywhere_is_damage(stored: Stored, tmp_path: Path) -> None:
    near = tmp_path / "near"
    shutil.copytree(stored.place.root, near)
    for path in (near / "shards").rglob("*"):
        if path.is_file():
            path.write_bytes(bytes(byte ^ 1 for byte in path.read_bytes()))
    own = LocalBackend(near)
    fetcher = Fetcher(
        ReplicaBackend(own, [own, LocalBackend(near)]),
        stored.reader,
        stored.records,
        Collected(),
        LIMITS,
        stored.place.loop,
    )
    fetcher.start(range(CELLS))
    with pytest.raises(Damaged):
        fetcher.wait(30)
    fetcher.stop()
