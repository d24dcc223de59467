"""The job is never lost: if the dumper or its guard is killed, interrupted or stopped at any
moment, the job runs on within a second.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest

from icecore.dumper.freeze.guard import GuardLost
from icecore.dumper.options import DumpOptions
from icecore.events import Event
from icecore.host.kernel import procfs
from tests.moments import Due, at
from tests.programs import driving

from .failing import SECONDS, Dumper, Job, Witness, fails, members
from .world import Events, leftovers, standing, until_clean

pytestmark = pytest.mark.criu


@pytest.fixture
def dumpers() -> Iterator[list[Dumper]]:
    """Start dumpers; end them after the test."""
    started: list[Dumper] = []
    yield started
    for dumper in started:
        if dumper.process.poll() is None:
            dumper.process.kill()
        dumper.process.communicate(timeout=20)


KILLED = [
    (("dump.criu", "begin"), 0.01, False),
    (("dump.criu", "end"), 0.0, False),
    (("dump.criu", "end"), 0.0, True),
    (("dump.window", "begin"), 0.0, False),
    (("dump.window", "begin"), 0.02, False),
    (("dump.window", "begin"), 0.04, False),
    (("dump.files", "begin"), 0.05, False),
    (("dump.files", "begin"), 0.05, True),
    (("dump.window", "end"), 0.0, False),
    (("dump.store", "begin"), 0.0, False),
    (("dump.store", "begin"), 0.0, True),
    (("store.commit", "begin"), 0.0, True),
]


def test_a_dumper_that_is_killed(
    due: Due, job: Job, witness: Witness, dumpers: list[Dumper]
) -> None:
    for moment, delay, stop in due(KILLED):
        with at(*moment, delay, "stop" if stop else ""):
            # It pauses at the moment unless it is to be met on the way, where it may be done before
            # it is killed.
            on = bool(delay) and moment[0] != "dump.files"
            before = len(witness.store.snapshots())
            dumper = Dumper(witness.store, job, None if on else moment, stop=stop)
            dumpers.append(dumper)
            dumper.until(*moment)
            time.sleep(delay)
            dumper.process.kill()
            killed = time.time_ns()
            job.runs(killed)
            until_clean(witness.store.workdir)
            assert not standing(job.pid)
            listed = len(witness.store.snapshots())
            assert listed == before or (on and listed == before + 1)
            witness.verify(listed)
            witness.next_dump_is_good()
            job.has_found_no_error()
    job.is_well()


INTERRUPTED = [
    (("dump.precopy", "begin"), False),
    (("dump.criu", "end"), False),
    (("dump.window", "begin"), False),
    (("dump.files", "begin"), False),
    (("dump.store", "begin"), False),
    (("dump.store", "begin"), True),
]


def test_a_dumper_that_is_interrupted(
    due: Due, job: Job, witness: Witness, dumpers: list[Dumper]
) -> None:
    for moment, stop in due(INTERRUPTED):
        with at(*moment, "stop" if stop else ""):
            before = len(witness.store.snapshots())
            dumper = Dumper(witness.store, job, moment, stop=stop, pre_copy="on")
            dumpers.append(dumper)
            dumper.until(*moment)
            status = dumper.end(signal.SIGINT)
            ended = time.time_ns()
            assert status == -signal.SIGINT
            assert not leftovers(witness.store.workdir)
            job.runs(ended)
            witness.verify(before)
            assert not witness.open_sessions()
            witness.next_dump_is_good()
            job.has_found_no_error()
    job.is_well()


def test_a_dumper_that_is_interrupted_while_criu_freezes(
    job: Job, witness: Witness, dumpers: list[Dumper]
) -> None:
    dumper = Dumper(
        witness.store, job, ("dump.files", "begin")
    )  # must not end before it is seen to stand still
    dumpers.append(dumper)
    dumper.until("dump.window", "begin")
    job.stopped_since(time.time_ns())
    dumper.end(signal.SIGINT)
    ended = time.time_ns()
    assert not leftovers(witness.store.workdir)
    job.runs(ended)
    witness.verify(1)
    witness.next_dump_is_good()


def test_a_dumper_that_is_stopped_in_the_window(
    job: Job, witness: Witness, dumpers: list[Dumper]
) -> None:
    """Ctrl-Z: the dumper lives but does nothing, so its guard must end the window."""
    dumper = Dumper(witness.store, job, ("dump.files", "begin"), max_window=2.0)
    dumpers.append(dumper)
    dumper.until("dump.files", "begin")
    dumper.process.send_signal(signal.SIGSTOP)
    stopped = time.time_ns()
    job.runs(stopped, 2.0 + 1.0 + SECONDS)
    assert not standing(job.pid)
    dumper.process.send_signal(signal.SIGCONT)
    dumper.process.kill()
    until_clean(witness.store.workdir)
    witness.verify(1)
    witness.next_dump_is_good()


def guard_of(workdir: Path) -> int:
    """Return the guard process. A child of it that watches CRIU has the same command line."""
    found = members(workdir, "icecore.dumper.freeze.guard_process")
    [guard] = [pid for pid in found if procfs.status(pid).parent not in found]
    return guard


def kill_guard(workdir: Path) -> Callable[[Event], None]:
    """Kills the guard process."""

    def kill(_: Event) -> None:
        os.kill(guard_of(workdir), signal.SIGKILL)

    return kill


GUARD_KILLED = [
    ("dump.precopy", "begin"),
    ("dump.criu", "end"),
    ("dump.window", "begin"),
    ("dump.files", "begin"),
]


def test_a_guard_that_is_killed(due: Due, job: Job, witness: Witness) -> None:
    def dump(moment: tuple[str, str]) -> None:
        events = Events({moment: kill_guard(witness.store.workdir)})
        witness.store.dump(job.pid, DumpOptions(pre_copy="on"), events=events)

    for moment in due(GUARD_KILLED):
        with at(*moment):
            fails(job, witness, partial(dump, moment), GuardLost)
            witness.next_dump_is_good()
            job.has_found_no_error()
    job.is_well()


def test_a_guard_that_is_killed_while_criu_freezes(job: Job, witness: Witness) -> None:
    guards: list[int] = []

    def later() -> None:
        job.stopped_since(time.time_ns())
        os.kill(guards[0], signal.SIGKILL)

    def look(_: Event) -> None:
        guards.append(guard_of(witness.store.workdir))

    killer = threading.Thread(target=later)
    killer.start()
    events = Events(
        {("dump.criu", "end"): look, ("dump.files", "begin"): lambda _: killer.join(20)}
    )  # must not end before it is seen to stand still
    fails(job, witness, lambda: witness.store.dump(job.pid, events=events), GuardLost)
    witness.next_dump_is_good()


def test_a_guard_that_is_killed_after_the_window(job: Job, witness: Witness) -> None:
    """The guard is no longer needed, so the snapshot is good."""
    result = witness.store.dump(
        job.pid, events=Events({("dump.store", "begin"): kill_guard(witness.store.workdir)})
    )
    assert witness.store.snapshots() == [witness.first, result.snapshot]
    assert not leftovers(witness.store.workdir)


def test_a_guard_that_is_killed_before_the_end_of_a_stop(job: Job, witness: Witness) -> None:
    kill = kill_guard(witness.store.workdir)
    events = Events({("dump.store", "begin"): kill})
    result = witness.store.dump(job.pid, DumpOptions(stop=True), events=events)
    assert not driving.alive(job.pid)
    assert witness.store.snapshots() == [witness.first, result.snapshot]
