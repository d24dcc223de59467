"""Real programs survive a round trip through a repository, with their own checks of their data:
dumped, ended, restored, asked for their verdict.
"""

from __future__ import annotations

import os
import time

import pytest

from icecore.errors import DumpFailed
from icecore.host.kernel import procfs
from tests.programs import driving, redis_client, redis_load
from tests.programs.catalogue import PROGRAMS, Program, port_of
from tests.roundtrip.conftest import Trip

pytestmark = pytest.mark.criu

DUMPABLE = [program for program in PROGRAMS.values() if program.dumpable and program.source]
LAZY = ["training", "node", "many-vmas", "sparse", "guarded", "inference", "tree"]


def verdict(program: Program, running: driving.Running) -> None:
    """Ask a program for its final verification; it must find nothing wrong."""
    driving.ask_finish(program, running.state_dir)
    said = driving.wait_finished(program, running.state_dir)
    assert said.passed, said.errors


@pytest.mark.parametrize(
    ("program", "full"),
    [
        *(pytest.param(program, False, id=program.name) for program in DUMPABLE),
        pytest.param(PROGRAMS["many-vmas"], True, id="20 000 vmas", marks=pytest.mark.torture),
    ],
)
def test_it_goes_on_from_the_last_of_three_snapshots(
    program: Program, full: bool, trip: Trip
) -> None:
    running = trip.start(program, own_namespaces=program.own_ipc, full=full)
    try:
        for _ in range(2):
            trip.dump(running.pid)
            driving.wait_progress(running.state_dir)
        last = trip.dump(running.pid, stop=True)
        running.process.wait(10)
        assert not driving.members(running.state_dir)
        before = driving.forget(running.state_dir)
        restored = trip.restore(last.snapshot)
        after = driving.wait_progress(running.state_dir, steps=3)
        assert before is not None and before.counter <= after.counter
        assert after.writes > before.writes, "the restored process is not the one that was dumped"
        verdict(program, running)
        assert restored.wait(20).exit_code == program.exit_status
    finally:
        driving.stop(running)


def test_the_vdso_of_another_kernel_is_dumped_again(
    trip: Trip, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a restore on another kernel, the snapshot's vDSO is executable memory of no file, which
    CRIU recognises and dumps whole. A fault that CRIU injects into itself has the same effect.
    """
    program = PROGRAMS["memory-pattern"]
    running = trip.start(program)
    try:
        snapshot = trip.dump(running.pid, stop=True).snapshot
        running.process.wait(10)
        for fault in (True, True, False):
            if fault:
                monkeypatch.setenv("CRIU_FAULT", "127")
            before = driving.forget(running.state_dir)
            restored = trip.restore(snapshot)
            monkeypatch.delenv("CRIU_FAULT", raising=False)
            after = driving.wait_progress(running.state_dir, steps=3)
            assert before is not None and after.writes > before.writes
            small = [m for m in procfs.read_maps(restored.pid) if m.anonymous and m.length < 65536]
            assert not fault or any(m.protection & procfs.PROT_EXEC for m in small)
            snapshot = trip.dump(restored.pid, stop=True).snapshot
            restored.wait(20)
        driving.forget(running.state_dir)
        restored = trip.restore(snapshot)
        driving.wait_progress(running.state_dir, steps=3)
        verdict(program, running)
        assert restored.wait(20).exit_code == program.exit_status
    finally:
        driving.stop(running)


@pytest.mark.parametrize("name", LAZY)
def test_it_runs_while_its_memory_arrives(name: str, trip: Trip) -> None:
    program = PROGRAMS[name]
    running = trip.start(program)
    try:
        snapshot = trip.dump(running.pid, stop=True).snapshot
        running.process.wait(10)
        driving.forget(running.state_dir)
        restored = trip.restore(snapshot, mode="lazy")
        driving.wait_progress(running.state_dir)
        restored.wait_resident(60)
        verdict(program, running)
        assert restored.wait(20).exit_code == program.exit_status
    finally:
        driving.stop(running)


@pytest.mark.parametrize("round_", range(3))
def test_it_forks_moves_and_discards_memory_while_that_arrives(round_: int, trip: Trip) -> None:
    program = PROGRAMS["mutator"]
    running = trip.start(program)
    try:
        snapshot = trip.dump(running.pid, stop=True).snapshot
        running.process.wait(10)
        driving.forget(running.state_dir)
        driving.go(running.state_dir)
        restored = trip.restore(snapshot, mode="lazy")
        driving.wait_progress(running.state_dir)
        restored.wait_resident(60)
        verdict(program, running)
        assert restored.wait(20).exit_code == program.exit_status
    finally:
        driving.stop(running)


def test_a_job_that_ran_on_after_the_dump_goes_back_with_its_files(trip: Trip) -> None:
    program = PROGRAMS["logger"]
    running = trip.start(program)
    try:
        early = trip.dump(running.pid)
        driving.wait_progress(running.state_dir, steps=5)
        trip.dump(running.pid)
        driving.wait_progress(running.state_dir, steps=5)
        driving.kill_tree(running.pid)
        running.process.wait(10)
        before = driving.forget(running.state_dir)
        restored = trip.restore(early.snapshot)
        after = driving.wait_progress(running.state_dir)
        assert before is not None and after.counter < before.counter
        verdict(program, running)
        assert restored.wait(20).exit_code == program.exit_status
    finally:
        driving.stop(running)


def test_what_criu_cannot_dump_goes_on(trip: Trip) -> None:
    program = PROGRAMS["tree-credentials"]
    running = trip.start(program)
    try:
        with pytest.raises(DumpFailed, match="Control messages"):
            trip.dump(running.pid)
        driving.wait_progress(running.state_dir)
        verdict(program, running)
        assert running.process.wait(20) == program.exit_status
    finally:
        driving.stop(running)


def test_redis_loses_its_connections_and_no_data(trip: Trip) -> None:
    program = PROGRAMS["redis-alone"]
    running = trip.start(program)
    try:
        connection = redis_load.connect(port_of(running.state_dir), timeout_s=10)
        load = redis_client.Load(connection, "outside", 300)
        assert [wrong for _ in range(10) for wrong in load.round()] == []
        snapshot = trip.dump(running.pid, stop=True).snapshot
        running.process.wait(10)
        restored = trip.restore(snapshot, connections="close")
        with pytest.raises((OSError, redis_client.RedisError)):
            connection.call("PING")
        connection.close()
        load.connection = redis_load.connect(port_of(running.state_dir), timeout_s=10)
        assert load.verify_all() == []
        assert load.round() == []
        load.connection.close()
        driving.ask_finish(program, running.state_dir)
        assert restored.wait(20).exit_code == program.exit_status
    finally:
        driving.stop(running)


def test_a_lineage_of_restores(trip: Trip) -> None:
    """Each restored instance is dumped again: what is unchanged is stored once."""
    program = PROGRAMS["memory-pattern"]  # its memory changes on request only
    running = trip.start(program)
    try:
        pid, sizes = running.pid, []
        for generation in range(3):
            result = trip.dump(pid, stop=True)
            sizes.append(result.sizes.stored)
            if generation == 0:
                running.process.wait(10)
            while os.path.exists(f"/proc/{pid}"):
                time.sleep(0.01)
            pid = trip.restore(result.snapshot).pid
            driving.wait_progress(running.state_dir)
        assert max(sizes[1:]) < sizes[0] / 10, sizes
        verdict(program, running)
    finally:
        driving.stop(running)


@pytest.mark.parametrize("name", ["training", "logger", "many-vmas"])
def test_a_streamed_dump_is_the_same_snapshot(name: str, trip: Trip) -> None:
    """The fallback: CRIU sends all memory in the window."""
    program = PROGRAMS[name]
    running = trip.start(program)
    try:
        first = trip.dump(running.pid, memory="streamed")
        driving.wait_progress(running.state_dir)
        last = trip.dump(running.pid, memory="streamed")
        assert last.parent == first.snapshot
        driving.wait_progress(running.state_dir)
        driving.kill_tree(running.pid)
        running.process.wait(10)
        driving.forget(running.state_dir)
        restored = trip.restore(last.snapshot)
        driving.wait_progress(running.state_dir)
        verdict(program, running)
        assert restored.wait(20).exit_code == program.exit_status
    finally:
        driving.stop(running)
