"""From which snapshot a failing job is brought back, with a simulated clock."""

from __future__ import annotations

import queue
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import msgspec
import pytest

from icecore.errors import RestoreFailed, ResumeFailed
from icecore.events import Event
from icecore.host.jobs.description import describe
from icecore.host.jobs.job import ExitStatus
from icecore.host.jobs.namespaces import Isolation
from icecore.service.record import FOLDER, Measured, Series, Taken
from icecore.service.supervision import supervisor as deciding
from icecore.service.supervision.failures import Failures
from icecore.service.supervision.messages import Dumped, Message
from icecore.service.supervision.plan import Plan
from icecore.service.supervision.snapshots import Snapshots
from icecore.service.supervision.supervisor import Supervisor
from icecore.store.format.state import SnapshotRecord
from icecore.store.maintenance.forget import Policy

_MINUTE = 60.0


class World:
    """A job whose clock stands still except for `run`. Snapshots are named by the job's time."""

    def __init__(self) -> None:
        self.now = 1e6
        self.failures = Failures({}, lambda: self.now)
        self.records: list[SnapshotRecord] = []
        self.taken: list[Taken] = []

    def begin(self, snapshot: str = "") -> None:
        with mock.patch.object(time, "time", lambda: self.now):
            job = describe("own", ["x"], "/", Isolation(), [], snapshot=snapshot)
            self.failures.begin(job)

    def run(self, minutes: float) -> None:
        self.now += minutes * _MINUTE

    def take(self, name: str) -> None:
        taken = self.failures.take(Taken(self.now, 0.0, 0.0, 0.0, 0, name), self.now)
        self.taken.append(taken)
        self.records.insert(0, record(name, self.now))

    def supervise_again(self) -> None:
        """Have another supervisor, which knows the first one's record."""
        measured = Measured(taken=self.taken, series=self.failures.series)
        data = msgspec.json.encode(measured)
        created = {one.snapshot: one.created_ns / 1e9 for one in self.records}
        self.failures = Failures(
            created, lambda: self.now, msgspec.json.decode(data, type=Measured)
        )

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


@pytest.mark.parametrize("days", [0.01, 9.0])
def test_the_time_between_snapshots_of_other_nodes_is_no_time_of_the_job(days: float) -> None:
    """The job may have been down. Once it has run longer than before it failed, the series ends."""
    world = World()
    world.records = [record("new", world.now - 600.0), record("old", world.now - days * 86400.0)]
    created = {one.snapshot: one.created_ns / 1e9 for one in world.records}
    world.failures = Failures(created, lambda: world.now)
    world.begin("new")
    world.run(5)
    assert world.crash() == ["new", "old"]
    world.begin("new")
    world.run(5)
    assert world.crash() == ["new", "old"]
    world.begin("old")
    world.run(5.4)
    world.take("early")
    assert world.failures.lasts
    world.run(0.2)
    world.take("late")
    assert not world.failures.lasts


def test_a_crash_loop_from_snapshots_of_other_nodes_ends() -> None:
    """The job fails 65 minutes after the old snapshot, 5 minutes after the new one."""
    world = World()
    world.records = [record("60", world.now - 600.0), record("0", world.now - 86400.0)]
    created = {one.snapshot: one.created_ns / 1e9 for one in world.records}
    world.failures = Failures(created, lambda: world.now)
    chosen: list[str] | None = ["60"]
    for begun in range(99):
        if chosen is None:
            break
        at = int(chosen[0].partition("-")[0])
        world.begin(chosen[0])
        while at + 10 < 65:
            world.run(10)
            at += 10
            world.take(f"{at}-{begun}")
        world.run(65 - at)
        chosen = world.crash()
    assert chosen is None


def test_a_job_without_snapshots_starts_anew(world: World) -> None:
    world.run(5)
    assert world.crash() == []
    world.begin()
    world.run(4)
    world.take("too-early")
    assert world.failures.lasts
    world.run(1)
    assert world.crash() == ["too-early"]
    world.begin("too-early")
    world.run(2)
    world.take("late")
    assert not world.failures.lasts
    world.run(1)
    assert world.crash() == ["late", "too-early"]


@pytest.mark.parametrize("anew", [False, True])
def test_a_job_that_first_fails_without_snapshots_is_given_up_too(anew: bool, world: World) -> None:
    """Its snapshots are restored once there are some; starting anew is the last that is tried."""
    world.run(5)
    if anew:  # with --or-start, since no snapshot could be restored
        world.records.append(record("broken", world.now))
        assert world.crash() == ["broken"]
        world.failures.start_anew()
        world.records.clear()  # of another lineage
        assert world.failures.choose(world.records) == []
    else:
        assert world.crash() == []
    chosen: list[str] | None = []
    begun = []
    while chosen is not None:
        begun.append(chosen[0] if chosen else "")
        world.begin(begun[-1])
        if not begun[-1]:
            world.records.clear()  # those of the lineage before
            world.run(4)
        world.take(f"{len(begun)}")
        world.run(1)
        chosen = world.crash()
        assert world.failures.lasts
        assert len(begun) < 20
    assert begun == ["", "1", "1", "", ""]


def test_a_job_that_never_gets_to_a_snapshot_is_given_up(world: World) -> None:
    world.run(5)
    assert world.crash() == []
    world.begin()
    world.run(5)
    assert world.crash() == []
    world.begin()
    world.run(5)
    assert world.crash() is None


def test_failed_restores_go_back_too(world: World) -> None:
    for name in ("old", "new"):
        world.run(10)
        world.take(name)
    assert world.crash() == ["new", "old"]
    world.failures.fail_to_begin(world.records[:1])
    world.failures.fail_to_begin(world.records[:1])
    assert world.failures.count == 1
    chosen = world.failures.choose(world.records)
    assert chosen is not None and [one.snapshot for one in chosen] == ["old"]


class Bringing:
    """A supervisor whose job has just failed, with a clock of its own; nothing is really restored.

    Attributes:
        records: The snapshots that exist, newest first.
        broken: Those that cannot be restored.
        begun: The snapshots from which instances began, ``first`` before all; empty strings: they
            were started anew.
    """

    def __init__(
        self, state: Path, patch: pytest.MonkeyPatch, first: str = "", **plan: Any
    ) -> None:
        self.now = 1e6
        self.records: list[SnapshotRecord] = []
        self.broken: set[str] = set()
        self.begun: list[str] = []
        self.events: list[Event] = []
        engine = mock.Mock()
        engine.registry.state = state
        engine.snapshots = lambda name: self.records[::-1]
        engine.restore = self._restore
        (state / FOLDER).mkdir(exist_ok=True)
        plan.setdefault("restarts", -1)
        self.supervisor = Supervisor(
            Plan("own", self._start, **plan),
            engine,
            write=lambda job, piece: None,
            emit=self.events.append,
        )
        self.failures = Failures(
            self.supervisor._instances.created,
            lambda: self.now,
            self.supervisor._record.measured,
        )
        for name, value in {
            "_failures": self.failures,
            "_job": mock.Mock(instance="1" * 32, **{"end_requested.return_value": False}),
            "_wait": self._wait,
            "_begin": self._begin,
        }.items():
            patch.setattr(self.supervisor, name, value)
        patch.setattr(self.supervisor._output, "drain", lambda hurried: None)
        patch.setattr(deciding, "lineage_of", lambda job: "1" * 32)
        patch.setattr(deciding, "lives", lambda job: False)
        self.supervisor._instances.created[first] = 3.0
        self._note(first)

    def fail(self, seconds: float = 1.0) -> int | None:
        """Have the job fail after some time; return the supervisor's exit status, if there is one."""
        self.now += seconds
        self.failures.end()
        return self.supervisor._on_end(ExitStatus(code=7))

    def told(self, name: str) -> int:
        return sum(event.name == name for event in self.events)

    def _restore(self, snapshot: str, name: str, *, emit: object) -> mock.Mock:
        if snapshot in self.broken:
            raise RestoreFailed("it is broken")
        return mock.Mock(job=mock.Mock(snapshot=snapshot), log_sizes={})

    def _start(self) -> Any:
        return mock.Mock(snapshot="")

    def _begin(self, begun: Any) -> None:
        self._note(begun[0].snapshot)

    def _note(self, snapshot: str) -> None:
        self.begun.append(snapshot)
        with mock.patch.object(time, "time", lambda: self.now):
            job = describe("own", ["x"], "/", Isolation(), [], snapshot=snapshot)
            self.failures.begin(job)

    def _wait(self, seconds: float) -> int:
        assert self.now < 1.1e6, "it does not end"
        self.now += max(seconds, 0.01)
        return 0


def test_no_instance_begins_while_one_before_lives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Processes without a pid namespace of their own may be impossible to kill for a while."""
    own = Bringing(tmp_path, monkeypatch)
    left = [True] * 6
    monkeypatch.setattr(deciding, "lives", lambda job: bool(left) and left.pop())
    monkeypatch.setattr(deciding, "end", lambda job: None)
    assert own.fail() is None
    assert not left and own.begun == ["", ""]
    assert own.told("run.resume_failed") == 2


@pytest.mark.parametrize("or_start", [False, True])
def test_snapshots_that_are_all_in_quarantine_are_not_tried_for_ever(
    or_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Bringing(tmp_path, monkeypatch, or_start=or_start)
    own.records = [msgspec.structs.replace(record("1", 1.0), quarantined="a shard")]
    if or_start:
        assert own.fail() is None
        assert own.begun == ["", ""]
    else:
        with pytest.raises(ResumeFailed, match="in quarantine"):
            own.fail()
        assert own.told("run.gave_up") == 1
    assert own.now < 1e6 + 5.0  # at once


def test_restores_that_fail_do_not_count_against_the_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The job's work is not discarded while any of its snapshots can be restored."""
    own = Bringing(tmp_path, monkeypatch, restarts=1, or_start=True)
    own.records = [record(str(number), 100.0 - number) for number in range(10)]
    own.broken = {str(number) for number in range(9)}
    assert own.fail() is None
    assert own.begun == ["", "9"]
    assert own.fail() == 7  # the job failed, no restore
    assert own.told("run.resume_failed") == 18


@pytest.mark.parametrize("or_start", [False, True])
def test_all_snapshots_are_tried_before_the_job_starts_anew(
    or_start: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Bringing(tmp_path, monkeypatch, restarts=1, or_start=or_start)
    own.records = [record(str(number), 100.0 - number) for number in range(3)]
    own.broken = {"0", "1", "2"}
    if or_start:
        assert own.fail() is None
        assert own.begun == ["", ""]
    else:
        with pytest.raises(ResumeFailed, match="it is broken"):
            own.fail()
    assert own.told("run.resume_failed") >= 6


def test_the_next_supervisor_goes_on_with_a_series(world: World) -> None:
    """Also after a long time in which the job did not run."""
    for name in ("old", "new"):
        world.run(10)
        world.take(name)
    world.run(5)
    assert world.crash() == ["new", "old"]
    world.begin("new")
    world.run(4)
    world.take("bad")
    world.run(1)
    assert world.crash() == ["new", "old"]
    world.run(10_000)
    world.supervise_again()
    assert world.failures.lasts and world.failures.count == 2
    world.begin("bad")  # with which it was stopped
    world.run(1)
    assert world.crash() == ["new", "old"]
    world.begin("new")
    world.run(5)
    assert world.crash() == ["old"]
    world.begin("old")
    world.run(15)
    world.take("early")
    assert world.failures.lasts
    world.run(1)
    world.take("late")
    assert not world.failures.lasts and world.failures.series is None


def test_a_start_anew_ends_the_series_of_an_earlier_supervisor(world: World) -> None:
    """Its snapshots were removed, for example."""
    world.run(5)
    world.take("one")
    world.run(5)
    assert world.crash() == ["one"]
    world.supervise_again()
    world.begin()
    assert not world.failures.lasts
    world.run(5)
    world.records.clear()
    assert world.crash() == []
    world.supervise_again()
    world.begin()  # still before its first snapshot
    world.run(5)
    world.crash()
    assert world.failures.count == 2


def test_a_series_in_a_record() -> None:
    assert msgspec.json.decode(b'{"failures": 2}', type=Measured).series is None
    series = Series(1.0, 2, None, ["a", "b"], False, {"a": 1})
    shorter = Measured(series=series).shorter().series
    assert shorter is not None and (shorter.count, shorter.past) == (2, 1.0)
    assert not shorter.candidates and not shorter.tried


def test_a_run_that_gives_up_is_not_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its status says so to a service manager. A person who starts it again starts from the newest
    snapshot from before, and what fails again does not push that out.
    """
    own = Bringing(tmp_path, monkeypatch)
    own.records = [record("new", 2.0), record("old", 1.0)]
    for _ in range(2):
        status = None
        while status is None:
            status = own.fail(20.0)
        assert status == ResumeFailed.exit_code and own.told("run.gave_up") == 1
        assert own.begun[1:] == ["new", "new", "old", "old"]
        series = own.supervisor._record.measured.series
        assert series is not None and series.count == 0
        own.supervisor._record.save(  # it took that one, too
            msgspec.structs.replace(
                own.supervisor._record.measured,
                taken=[Taken(3.0, 0.0, 0.0, 0.0, 0, "bad", job_time=3.0)],
            )
        )
        own = Bringing(tmp_path, monkeypatch, "bad")
        own.records = [record("bad", 3.0), record("new", 2.0), record("old", 1.0)]
        assert own.failures.lasts


def test_a_job_that_succeeds_leaves_no_series(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Bringing(tmp_path, monkeypatch)
    assert own.fail() is None
    assert own.supervisor._record.measured.series is not None
    assert own.supervisor._on_end(ExitStatus(code=0)) == 0
    assert own.supervisor._record.measured.series is None


def test_time_in_which_the_job_is_paused_does_not_count(world: World) -> None:
    world.run(10)
    world.take("good")
    world.run(5)
    assert world.crash() == ["good"]
    world.begin("good")
    world.run(4)
    world.failures.pause()
    world.run(60)
    world.take("while-paused")
    assert world.failures.lasts
    world.failures.go_on()
    world.run(1)
    world.take("bad")
    assert world.failures.lasts and world.taken[-1].job_time == 1e6 + 15 * _MINUTE
    assert world.crash() == ["good"] and world.failures.count == 2


def test_a_supervisor_says_when_the_job_is_paused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = Bringing(tmp_path, monkeypatch)
    lease = mock.Mock(lost="", certain=True)
    monkeypatch.setattr(own.supervisor, "_hold", mock.Mock(lease=lease))
    began = own.failures._at(own.now)
    for certain, ran in ((True, 0.0), (False, 5.0), (False, 5.0), (True, 5.0), (True, 10.0)):
        lease.certain = certain
        own.supervisor._tick()
        assert own.failures._at(own.now) - began == ran
        own.now += 5.0


def test_a_snapshot_counts_from_its_commit_and_not_from_the_end_of_the_retention(
    tmp_path: Path,
) -> None:
    (tmp_path / FOLDER).mkdir()
    began: list[float] = []
    engine, messages = mock.Mock(), queue.SimpleQueue[Message]()
    engine.registry.state = tmp_path
    engine.dump.return_value = mock.Mock(
        snapshot="1", window_seconds=0.0, sizes=mock.Mock(stored=1)
    )
    engine.forget = lambda policy, job: began.append(time.monotonic())
    plan = Plan("own", lambda: pytest.fail("it must not start"), keep=Policy(last=1))
    Snapshots(
        plan,
        engine,
        messages,
        mock.Mock(),
        mock.Mock(),
        session=str,
        needless=lambda: False,
        forgets=lambda: True,
    ).begin(mock.Mock(), stop=False)
    done = messages.get(timeout=10.0)
    assert isinstance(done, Dumped) and done.taken is not None, done
    assert began[0] - 5.0 < done.committed <= began[0]


@pytest.mark.parametrize("first", [True, False], ids=["failed with snapshots", "without"])
def test_a_series_ends_where_the_job_has_been_on_another_node(world: World, first: bool) -> None:
    """It failed here long ago; what it did elsewhere is not thrown away for that."""
    if first:
        world.run(10)
        world.take("old")
    world.run(600)
    world.crash()
    world.begin("old" if first else "")
    world.run(1)  # and moves
    world.run(10_000)
    world.records.insert(0, record("elsewhere", world.now))
    world.supervise_again()
    assert world.failures.lasts
    world.begin("elsewhere")
    assert not world.failures.lasts
    world.run(300)
    chosen = world.crash()
    assert chosen is not None and chosen[0] == "elsewhere" and world.failures.count == 1
