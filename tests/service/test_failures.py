"""From which snapshot a failing job is brought back, with a simulated clock."""

from __future__ import annotations

import time
from collections.abc import Iterator
from unittest import mock

import pytest

from icecore.host.jobs.description import describe
from icecore.host.jobs.namespaces import Isolation
from icecore.service.record import Taken
from icecore.service.supervision.failures import Failures
from icecore.store.format.state import SnapshotRecord

_MINUTE = 60.0


class World:
    """A job whose clock stands still except for `run`. Snapshots are named by the job's time."""

    def __init__(self) -> None:
        self.now = 1e6
        self.failures = Failures({}, lambda: self.now)
        self.records: list[SnapshotRecord] = []

    def begin(self, snapshot: str = "") -> None:
        with mock.patch.object(time, "time", lambda: self.now):
            job = describe("own", ["x"], "/", Isolation(), [], snapshot=snapshot)
            self.failures.begin(job)

    def run(self, minutes: float) -> None:
        self.now += minutes * _MINUTE

    def take(self, name: str) -> None:
        self.failures.take(Taken(self.now, 0.0, 0.0, 0.0, 0, name))
        self.records.insert(0, record(name, self.now))

    def crash(self) -> list[str] | None:
        self.failures.end()
        self.now += 30.0  # until its output is shown
        self.failures.fail()
        chosen = self.failures.choose(self.records)
        return None if chosen is None else [one.snapshot for one in chosen]


def record(name: str, at: float) -> SnapshotRecord:
    return SnapshotRecord(name, "own", "1" * 32, "", round(at * 1e9), "m", 1, b"d" * 32)


@pytest.fixture
def world() -> Iterator[World]:
    made = World()
    made.begin()
    yield made


def test_a_bad_state_is_left_behind(world: World) -> None:
    """The state is bad from 65 on; the job crashes at 85, whatever snapshots it takes before."""
    for number in range(1, 9):
        world.run(10)
        world.take(f"{number}0")
    world.run(5)
    begun = []
    for _ in range(4):
        chosen = world.crash()
        assert chosen is not None
        begun.append(chosen[0])
        world.begin(chosen[0])
        for _ in range((80 - int(chosen[0])) // 10):
            world.run(10)
            world.take(f"bad-{world.now}")
        world.run(5)
        assert world.failures.lasts
    assert begun == ["80", "80", "70", "70"]
    chosen = world.crash()
    assert chosen is not None and chosen[:2] == ["60", "50"]
    world.begin("60")  # which is good
    world.run(26)  # to 86: not far enough
    world.take("86")
    assert world.failures.count == 5
    world.run(5)
    world.take("91")
    assert not world.failures.lasts
    world.run(5)
    assert world.crash() == [one.snapshot for one in world.records]


def test_a_crash_loop_ends(world: World) -> None:
    for number in range(3):
        world.run(10)
        world.take(str(number))
    world.run(5)
    chosen, begun = world.crash(), []
    while chosen:
        begun.append(chosen[0])
        world.begin(chosen[0])
        world.run(5 + 10 * (2 - int(chosen[0])))
        chosen = world.crash()
    assert chosen is None and begun == ["2", "2", "1", "1", "0", "0"]


def test_a_job_is_tried_for_some_time(world: World) -> None:
    world.run(1)
    world.take("only")
    for _ in range(5):
        assert world.failures.choose(world.records) is not None
        world.failures.end()
        world.failures.fail()
        world.begin("only")
    chosen = world.failures.choose(world.records)
    assert chosen is not None and [one.snapshot for one in chosen] == ["only"]
    world.now += 31.0
    assert world.failures.choose(world.records) is None


def test_a_job_that_crashes_later_and_later_keeps_its_progress(world: World) -> None:
    for number in range(20):
        world.run(10)
        world.take(f"first-{number}")
        world.run(5)
        assert world.failures.count == 0
        chosen = world.crash()
        assert chosen is not None and chosen[0] == f"first-{number}"
        world.begin(chosen[0])
        world.run(6)  # past its failure, and at once a snapshot
        world.take(f"second-{number}")


def test_a_failure_long_after_the_one_before_is_another_one(world: World) -> None:
    """Even if only users take snapshots, of which the supervisor knows nothing."""
    for number in range(5):
        world.run(60)
        world.records.insert(0, record(f"own-{number}", world.now))
        world.run(60)
        chosen = world.crash()
        assert chosen is not None and chosen[0] == f"own-{number}"
        assert world.failures.count == 1
        world.failures._created = {one.snapshot: one.created_ns / 1e9 for one in world.records}
        world.begin(chosen[0])


def test_snapshots_that_were_taken_before_count_by_their_times() -> None:
    world = World()
    world.records = [record("new", world.now - 600.0), record("old", world.now - 1200.0)]
    world.failures = Failures(
        {one.snapshot: one.created_ns / 1e9 for one in world.records}, lambda: world.now
    )
    world.begin("new")
    world.run(5)
    assert world.crash() == ["new", "old"]
    world.begin("old")
    world.run(14)
    world.take("early")
    assert world.failures.lasts
    world.run(2.5)
    world.take("late")
    assert not world.failures.lasts


def test_a_job_without_snapshots_starts_anew(world: World) -> None:
    world.run(5)
    assert world.crash() == []
    world.begin()
    world.run(4)
    world.take("too-early")
    assert world.failures.lasts
    world.run(1)
    assert world.crash() == []
    world.begin()
    world.run(6)
    world.take("late")
    assert not world.failures.lasts
    world.run(1)
    assert world.crash() == ["late", "too-early"]
    world.failures.start_anew()
    assert world.failures.choose(world.records) == []


def test_failed_restores_go_back_too(world: World) -> None:
    for name in ("old", "new"):
        world.run(10)
        world.take(name)
    assert world.crash() == ["new", "old"]
    world.failures.fail_to_begin()
    world.failures.fail_to_begin()
    chosen = world.failures.choose(world.records)
    assert chosen is not None and [one.snapshot for one in chosen] == ["old"]
