"""The helper: states, time-outs and errors by pid; whoever dies, what was locked runs again."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.host.cuda.api import (
    HelperLost,
    IllegalState,
    LockTimeout,
    NotSupported,
    Placement,
    State,
)
from icecore.host.gpu.client import Helper, start_here
from icecore.host.kernel import limits
from tests.fakes.world import GPUS, World

from .conftest import Launch


@pytest.fixture
def helper(world: World) -> Iterator[Helper]:
    with Helper(start_here, "test") as helper:
        helper.wait_ready()
        yield helper


def test_free_memory_in_pieces_of_a_huge_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "buddyinfo").write_text(
        "Node 0, zone    DMA32    505    606    588    492    351    239    135     83     67     63    664 \n"
        "Node 0, zone   Normal  21692  33155  16579   9674   5959   2517   1497   1244   1263      0      2 \n"
    )
    listed = sum(
        int(count) << at
        for line in (tmp_path / "buddyinfo").read_text().splitlines()
        for at, count in enumerate(line.split()[-11:])
    )
    # Some is not accepted yet, or not taken into use: it is in no list of free pieces.
    (tmp_path / "meminfo").write_text(
        f"MemTotal: 99999999 kB\nMemFree: {listed * mmap.PAGESIZE // 1024 + 8192} kB\n"
    )
    monkeypatch.setattr(limits, "_BUDDYINFO", tmp_path / "buddyinfo")
    monkeypatch.setattr(limits, "_MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(limits, "huge_page_bytes", lambda: 512 * mmap.PAGESIZE)
    assert limits.free_huge_bytes() == (63 * 512 + 666 * 1024) * mmap.PAGESIZE + (8 << 20)
    (tmp_path / "meminfo").write_text(
        "MemTotal: 99999999 kB\nMemFree: 1000 kB\n"
    )  # read a moment later
    assert limits.free_huge_bytes() == (63 * 512 + 666 * 1024) * mmap.PAGESIZE
    (tmp_path / "buddyinfo").write_text("")  # hidden: nothing is known
    assert limits.free_huge_bytes() == 0


def test_a_round_of_two_processes_to_other_gpus(
    helper: Helper, launch: Launch, world: World
) -> None:
    targets = [launch(GPUS[:1]), launch(GPUS[1:2])]
    pids = [target.pid for target in targets]
    assert {helper.state(pid) for pid in pids} == {State.RUNNING} and helper.state(
        os.getpid()
    ) is State.NOT_CUDA
    assert helper.restore_thread(pids[0]) in map(int, os.listdir(f"/proc/{pids[0]}/task"))
    assert not helper.lock(pids, 5.0)
    placed, failed = helper.checkpoint(pids)
    assert {pid: one.placement for pid, one in placed.items()} == dict.fromkeys(
        pids, Placement.PROCESS
    ) and not failed
    assert not any(world.on(gpu) for gpu in GPUS)
    assert {helper.state(pid) for pid in pids} == {State.CHECKPOINTED}
    assert not helper.restore({pids[0]: {GPUS[0]: GPUS[2]}, pids[1]: {}})
    assert [world.on(gpu) for gpu in GPUS] == [0, 1, 1, 0]
    assert not helper.unlock(pids)
    for target in targets:
        target.wait_steps(3)
        target.is_right()


def test_what_the_driver_refuses(helper: Helper, launch: Launch, world: World) -> None:
    target = launch(busy=0.8)
    while not (failed := helper.lock([target.pid], 0.05)):  # between two steps
        helper.unlock([target.pid])
    assert isinstance(failed[target.pid], LockTimeout)
    assert helper.state(target.pid) is State.RUNNING
    assert isinstance(helper.checkpoint([target.pid])[1][target.pid], IllegalState)
    world.fault("lock", code=801)
    error = helper.lock([target.pid], 5.0)[target.pid]
    assert isinstance(error, NotSupported) and "docs/how-to/gpu-jobs.md" in error.cure
    assert helper.lock([os.getpid()], 5.0)[os.getpid()].code == 1
    target.wait_steps(2)


def test_memory_of_the_driver_is_fatal_to_threads_that_run_while_the_driver_moves_it(
    helper: Helper, launch: Launch
) -> None:
    target = launch(lent=True)
    assert target.process is not None
    assert not helper.lock([target.pid], 5.0)
    time.sleep(0.2)
    assert target.process.poll() is None
    helper.checkpoint([target.pid])
    assert target.process.wait(10) == -signal.SIGSEGV


@pytest.mark.parametrize("checkpointed", [False, True], ids=["locked", "checkpointed"])
@pytest.mark.parametrize("how", ["undo", "gone", "deadline", "another"])
def test_what_was_locked_runs_again(
    how: str, checkpointed: bool, launch: Launch, world: World
) -> None:
    target = launch()
    helper = Helper(start_here, "test")
    own = helper.wait_ready()
    assert not helper.lock([target.pid], 5.0)
    if checkpointed:
        assert not helper.checkpoint([target.pid])[1]
    if how == "undo":
        world.fault("restore" if checkpointed else "unlock", code=999)  # it tries again
        assert helper.undo() == {}
    elif how == "deadline":
        helper.deadline(0.1)
    elif how == "gone":
        helper.close()
    else:
        os.kill(own, signal.SIGKILL)
        assert isinstance(helper.checkpoint([target.pid])[1][target.pid], HelperLost)
        with Helper(start_here, "test") as second:
            second.wait_ready()
            second.adopt([target.pid])
            assert second.undo() == {}
    target.wait_steps(3)
    target.is_right()
    helper.close()


def test_a_process_that_somebody_else_locked_is_left_alone(helper: Helper, launch: Launch) -> None:
    target = launch()
    with Helper(start_here, "other") as other:
        assert not other.lock([target.pid], 5.0)
        assert isinstance(helper.lock([target.pid], 5.0)[target.pid], IllegalState)
        helper.close()
        time.sleep(0.3)
        assert other.state(target.pid) is State.LOCKED
    target.wait_steps(2)
