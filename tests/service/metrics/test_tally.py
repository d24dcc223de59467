"""What processes count: nothing is lost between several of them, and labels are bounded."""

from __future__ import annotations

import asyncio
import fcntl
import multiprocessing
import time
from pathlib import Path

import pytest

from icecore.errors import PreflightRefused
from icecore.events import Event, discard
from icecore.service.metrics import families, tally
from icecore.store.backend.blocks import Blocks
from icecore.store.backend.cached import Cached
from icecore.store.backend.memory import MemoryBackend
from icecore.store.backend.metrics import Metered, meters_of
from icecore.store.backend.retry import Patience, Retrying

FORK = multiprocessing.get_context("fork")


def add_some(state: Path, number: int) -> None:
    mine = tally.Tally(state)
    for _ in range(20):
        mine.event(Event("store.retry", {"operation": f"get {number % 2}"}))
        mine.flush()
    mine.flush(30)


def test_processes_add_up(tmp_path: Path) -> None:
    processes = [FORK.Process(target=add_some, args=(tmp_path, number)) for number in range(4)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
        assert process.exitcode == 0
    assert tally.read(tmp_path).of(families.RETRIES) == {("get 0",): 40, ("get 1",): 40}
    assert (tmp_path / tally.FOLDER / "totals.json").stat().st_mode & 0o777 == 0o600


def test_an_operation_counts_its_events_and_its_failure(tmp_path: Path) -> None:
    with (
        pytest.raises(PreflightRefused),
        tally.counted(tmp_path, "dump", discard) as emit,
    ):
        emit(Event("dump.preflight", {"state": "failed", "seconds": 0.5}))
        raise PreflightRefused([])
    with tally.counted(tmp_path, "dump", discard) as emit:
        done = {"job": "a", "window_seconds": 0.3, "logical": 8, "stored": 2, "spilled": True}
        emit(Event("dump.done", {**done, "changed": 4, "pre_copied": 0}))
        emit(
            Event("dump.store", {"state": "end", "seconds": 2, "bytes": 5, "by_codec": {"lz4": 2}})
        )
    found = tally.read(tmp_path)
    assert found.of(families.OPERATIONS) == {("dump", "failed"): 1, ("dump", "done"): 1}
    assert found.of(families.FAILURES) == {("dump", "PreflightRefused"): 1}
    assert found.of(families.PHASES)[("dump.preflight", "failed")] == 1
    assert found.of(families.WINDOW) == {("a", "0.5"): 1, ("a", "sum"): 0.3}
    assert found.of(families.DUMPED)[("stored",)] == 2
    assert found.of(families.STORED) == {("lz4",): 2}
    assert found.of(families.SPILLS) == {(): 1}
    assert found.of(families.PHASE_BYTES)[("dump.store",)] == 5


def test_a_job_beyond_the_bound_has_no_label_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(families, "MOST_JOBS", 2)
    for job in ("a", "b", "c", "d", "a"):
        tally.add(tmp_path, {families.WINDOW.name: {(job, "0.5"): 1, (job, "sum"): 0.4}})
    found = tally.read(tmp_path).of(families.WINDOW)
    assert {labels[0] for labels in found} == {"a", "b", families.OTHER_JOBS}
    assert found[("a", "0.5")] == 2 and found[(families.OTHER_JOBS, "0.5")] == 2


def test_a_damaged_file_counts_as_empty_and_a_directory_of_others_is_left_alone(
    tmp_path: Path,
) -> None:
    tally.add(tmp_path, {families.SPILLS.name: {(): 3}})
    (tmp_path / tally.FOLDER / "totals.json").write_bytes(b"{")
    tally.add(tmp_path, {families.SPILLS.name: {(): 1}})
    assert tally.read(tmp_path).of(families.SPILLS) == {(): 1}
    (tmp_path / "file").touch()
    mine = tally.Tally(tmp_path / "file" / "state")  # cannot be made
    mine.count(families.SPILLS)
    mine.flush()


def test_requests_are_counted_while_a_bucket_is_open(tmp_path: Path) -> None:
    mine = tally.Tally(tmp_path)
    backend = Cached(
        Retrying(Metered(MemoryBackend(), mine.event), Patience(attempts=1)),
        Blocks(tmp_path / "c", 1 << 20),
    )
    (meter,) = meters_of(backend)
    mine.watch(meter.counts)

    async def use(close: bool) -> None:
        await backend.create(f"a{int(close)}", [b"12345"])
        if close:
            await backend.close()

    for close in (False, True):  # closing reports the same requests as events
        asyncio.run(use(close))
        mine.flush()
        found = tally.read(tmp_path)
        assert found.of(families.REQUESTS)[("create",)] == 1 + close
        assert found.of(families.REQUEST_BYTES)[("create",)] == 5 + 5 * close
    mine.forget(meter.counts)
    mine.flush()
    assert tally.read(tmp_path).of(families.REQUESTS)[("create",)] == 2


def test_nothing_waits_for_a_process_that_is_stopped_while_it_adds(tmp_path: Path) -> None:
    own = tally.Tally(tmp_path)
    own.count(families.OPERATIONS, "dump", "done")
    own.flush()
    began = time.monotonic()
    with open(tmp_path / tally.FOLDER / "lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        own.count(families.OPERATIONS, "dump", "done")
        own.flush()
        with pytest.raises(BlockingIOError):
            tally.add(tmp_path, {}, seconds=0.1)
    assert time.monotonic() - began < 5
    done = ("dump", "done")
    assert tally.read(tmp_path).of(families.OPERATIONS)[done] == 1
    own.flush()  # nothing was lost
    assert tally.read(tmp_path).of(families.OPERATIONS)[done] == 2


def test_nothing_is_written_while_a_job_stands_still(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tally, "_FLUSH_SECONDS", 0.0)
    own = tally.Tally(tmp_path)
    own.event(Event("dump.window", {"state": "begin"}))
    for name in ("dump.criu", "store.requests", "run.paused"):
        own.event(Event(name, {"state": "end", "seconds": 1.0}))
    assert not (tmp_path / tally.FOLDER).exists()
    own.event(Event("dump.window", {"state": "end", "seconds": 1.0}))
    assert (tmp_path / tally.FOLDER / "totals.json").exists()
