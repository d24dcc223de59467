"""Several processes of a job through one window: all or none."""

from __future__ import annotations

import gc
import os
from collections.abc import Collection

import pytest

from icecore.errors import IcecoreError
from icecore.host.resident.client import ResidentFailed, State
from icecore.host.resident.tree import ResidentTree
from tests.fakes.machine import MIB, Machine, Target, until


class Job:
    """Three processes with contexts, two of them with resident memory."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.targets = {target.pid: target for target in (machine.target() for _ in range(3))}
        self.digests: dict[int, tuple[int, str]] = {}
        for number, target in enumerate(self.targets.values()):
            target("start()")
            if number < 2:
                address = target("alloc(4 * MIB)")[1]
                self.digests[target.pid] = (address, target(f"fill({address}, 4 * MIB, {number})"))
        self.tree = ResidentTree(machine.directory, {pid: pid for pid in self.targets})

    def lock(self, pids: Collection[int], seconds: float) -> None:
        for pid in pids:
            self.targets[pid].lock(seconds)

    def unlock(self, pids: Collection[int]) -> None:
        for pid in pids:
            self.targets[pid].unlock()

    def states(self) -> set[State]:
        return {target.agent.report().state for target in self.with_memory()}

    def with_memory(self) -> list[Target]:
        return [self.targets[pid] for pid in self.digests]

    def runs_unharmed(self) -> bool:
        return self.states() == {State.RUNNING} and all(
            self.targets[pid](f"hashed({address}, 4 * MIB)") == digest
            for pid, (address, digest) in self.digests.items()
        )


@pytest.fixture
def job(machine: Machine) -> Job:
    return Job(machine)


def test_all_at_once(job: Job) -> None:
    assert sorted(job.tree.pids) == sorted(job.targets)
    assert job.tree.resident_bytes == 8 * MIB
    gc.collect()
    before = len(os.listdir("/proc/self/fd"))
    with job.tree as tree:
        assert tree.take_away(job.lock, job.unlock) == 8 * MIB
        assert job.states() == {State.UNMAPPED}
        tree.give_back()
        assert job.runs_unharmed()
        tree.take_away(job.lock, job.unlock)
    assert job.runs_unharmed()  # left in the middle
    assert len(os.listdir("/proc/self/fd")) == before


def test_not_even_the_keepers_death_loses_memory(job: Job) -> None:
    job.tree.take_away(job.lock, job.unlock)
    job.machine.kill_keeper()
    job.tree.give_back()
    assert job.runs_unharmed()
    job.machine.start_keeper()
    until(lambda: all(target.agent.report().counts.unheld == 0 for target in job.with_memory()))


@pytest.mark.parametrize("where", ["lock", "unlock"])
def test_what_fails_for_one_is_undone_for_all(job: Job, where: str) -> None:
    def failing(pids: Collection[int], *limit: float) -> None:
        getattr(job, where)(list(pids)[:1], *limit)
        raise ResidentFailed("the driver", 600)

    with pytest.raises(ResidentFailed, match="the driver"):
        job.tree.take_away(
            failing if where == "lock" else job.lock,
            failing if where == "unlock" else job.unlock,
            seconds=3,
        )
    job.unlock(job.targets)
    until(lambda: job.states() == {State.RUNNING})
    assert job.runs_unharmed()


def test_one_that_cannot_give_its_memory_away(job: Job) -> None:
    (job.machine.cuda / "fail-unmap").touch()
    extra = job.with_memory()[1]
    assert extra("[alloc(2 * MIB)[0] for _ in range(2)]") == [
        0,
        0,
    ]  # the fake refuses the second in a process
    with pytest.raises(ResidentFailed, match="999"):
        job.tree.take_away(job.lock, job.unlock)
    assert job.runs_unharmed()


def test_one_that_has_ended(job: Job) -> None:
    gone, other = job.with_memory()
    job.tree.take_away(job.lock, job.unlock)
    gone.end()
    with pytest.raises(IcecoreError), job.tree:
        job.tree.give_back()
    assert other.agent.report().state == State.RUNNING
