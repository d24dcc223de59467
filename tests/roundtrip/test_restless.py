"""Trees whose processes and threads come and go all the time: dumps succeed, with a cgroup of the
job's own and without, and the job notices nothing.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.dumper.dump import dump
from icecore.dumper.freeze.guard import DumpGuard
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import DumpFailed
from icecore.events import Event
from icecore.host.criu.libraries import CRIU_LIBRARY
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import cgroups, freezer, frozen
from tests.dumper.failing import CANNOT_STOP, have_criu_fail_to_stop
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(not CRIU_LIBRARY.exists(), reason="needs a compiler"),
]

#: Starts some 50 processes a second, by fork and by vfork, and counts.
FORKS = """
import itertools, os, subprocess, time
for number in itertools.count():
    child = os.fork()
    if not child:
        os._exit(number % 7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == number % 7
    done = subprocess.run(["/bin/echo", str(number)], capture_output=True, check=True)
    print(int(done.stdout), flush=True)
    time.sleep(0.02)
"""

SHELL = """
number=0
while :; do
    /bin/echo $number
    number=$((number + 1))
    sleep 0.02
done
"""

THREADS = """
import itertools, threading
for number in itertools.count():
    others = [threading.Thread(target=threading.Event().wait, args=(0.002,)) for _ in range(3)]
    for one in others: one.start()
    for one in others: one.join()
    print(number, flush=True)
"""

#: It does not print: a thread of the pool forks, and a child that was forked while another thread held
#: the lock of sys.stdout would wait for it for ever, snapshot or not.
POOL = """
import itertools, multiprocessing, os
def square(number): return number * number
if __name__ == "__main__":
    with multiprocessing.get_context("fork").Pool(3, maxtasksperchild=1) as pool:
        for number, found in enumerate(pool.imap(square, itertools.count())):
            assert found == number * number
            os.write(1, b"%d\\n" % number)
"""

MAKE = """
all: $(foreach n,$(shell seq 400),t$n)
t%:; @sleep 0.02; echo $* >> done.$*; test `wc -l < done.$*` = 1
"""


class Restless:
    """Starts jobs that print numbers, dumps them, and checks what they print."""

    def __init__(self, trip: Trip, place: Path) -> None:
        self.trip = trip
        self.place = place
        self.registry = Registry(place / "jobs")
        self.retries: list[Event] = []

    def start(self, *words: str, own_group: bool = True) -> Job:
        job = self.registry.start(words, name="restless", cwd=str(self.place))
        assert job.group is not None, "this machine has no cgroups that can be written to"
        if not own_group:
            leave(job.group)
        assert eventually(lambda: len(numbers(job)) > 3)
        return job

    def dump(self, job: Job, **options: object) -> str:
        target = Target(job.pid, job.name, record=job.record())
        chosen = DumpOptions(**options)  # type: ignore[arg-type]
        return dump(
            self.trip.repository,
            self.trip.loop,
            target,
            chosen,
            criu=self.trip.criu,
            emit=lambda event: self.retries.append(event) if event.name == "dump.retry" else None,
        ).snapshot

    def restore(self, snapshot: str) -> Job:
        return self.trip.restore_job(self.registry, snapshot)


def numbers(job: Job) -> list[int]:
    """Return the complete lines that a job printed, which are the numbers from 0 on."""
    text = job.log_path("stdout").read_text()
    found = [int(line) for line in text[: text.rfind("\n") + 1].split()]
    assert job.log_path("stderr").read_text() == ""
    assert found == list(range(len(found)))
    return found


def goes_on(job: Job) -> bool:
    before = len(numbers(job))
    return eventually(lambda: len(numbers(job)) > before + 3)


def leave(group: Path) -> None:
    """Move all processes out of a cgroup."""
    deadline = time.monotonic() + 10
    while pids := (group / "cgroup.procs").read_text().split():
        assert time.monotonic() < deadline
        for pid in pids:
            try:
                (group.parent / "cgroup.procs").write_text(pid)
            except ProcessLookupError:
                continue


@pytest.fixture
def restless(trip: Trip, tmp_path: Path) -> Iterator[Restless]:
    if (group := freezer.make_group(f"probe-{os.getpid()}")) is None:
        pytest.skip("no hierarchy of cgroups can be written to")
    freezer.remove_group(group)
    made = Restless(trip, tmp_path)
    try:
        yield made
    finally:
        for one in made.registry.instances():
            if one.alive:
                if one.group is not None:
                    frozen.thaw(one.group)
                one.kill(signal.SIGKILL)
            one.wait(10)
            assert one.group is None or not one.group.exists()


@pytest.mark.parametrize("own_group", [True, False])
def test_a_tree_that_forks_all_the_time(restless: Restless, own_group: bool) -> None:
    job = restless.start(sys.executable, "-c", FORKS, own_group=own_group)
    for _ in range(3):
        snapshot = restless.dump(job)
        assert goes_on(job)
    job.kill(signal.SIGKILL)
    job.wait(10)
    again = restless.restore(snapshot)
    assert again.group is not None and freezer.group_of(again.pid) == again.group
    assert goes_on(again)


def test_the_freezer_of_version_1(restless: Restless, monkeypatch: pytest.MonkeyPatch) -> None:
    first = [one for one in cgroups.hierarchies() if "freezer" in one.name.split(",")]
    if not first:
        pytest.skip("no freezer of version 1 is mounted")
    monkeypatch.setattr(cgroups, "hierarchies", lambda: first)
    job = restless.start(sys.executable, "-c", FORKS)
    assert job.group is not None and (job.group / "freezer.state").exists()
    for _ in range(2):
        restless.dump(job)
        assert goes_on(job)
    assert not restless.retries


@pytest.mark.torture
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("own_group", [True, False])
@pytest.mark.parametrize("code", [FORKS, SHELL, THREADS, POOL])
def test_two_hundred_dumps(restless: Restless, code: str, own_group: bool) -> None:
    words = ["bash"] if code == SHELL else [sys.executable]
    job = restless.start(*words, "-c", textwrap.dedent(code), own_group=own_group)
    failed = 0
    for _ in range(200):
        try:
            restless.dump(job)
        except DumpFailed:
            failed += 1
        assert goes_on(job)
    assert failed <= (0 if own_group else 1)


@pytest.mark.torture
@pytest.mark.timeout(600)
def test_a_build(restless: Restless) -> None:
    (restless.place / "Makefile").write_text(MAKE)
    job = restless.registry.start(["make", "-j", "4"], name="build", cwd=str(restless.place))
    while job.alive:
        try:
            restless.dump(job)
        except DumpFailed:
            assert not eventually(lambda: job.alive, 1)  # it ended during the dump
    status = job.wait(30)
    assert status.code == 0, job.log_path("stderr").read_text()
    assert len(list(restless.place.glob("done.*"))) == 400


def test_an_attempt_that_fails_is_reported_and_repeated(
    restless: Restless, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = restless.start(sys.executable, "-c", FORKS)
    have_criu_fail_to_stop(monkeypatch, 2)
    restless.dump(job)
    assert len(restless.retries) == 2
    for one in restless.retries:
        assert CANNOT_STOP in str(one.fields["error"])
        assert 0 < float(str(one.fields["pause"])) <= 1
    assert goes_on(job)


def test_attempts_are_bounded(restless: Restless, monkeypatch: pytest.MonkeyPatch) -> None:
    job = restless.start(sys.executable, "-c", FORKS)
    monkeypatch.setattr("icecore.dumper.dump._MOST_PAUSE", 0.01)
    have_criu_fail_to_stop(monkeypatch, 100)
    with pytest.raises(DumpFailed, match=CANNOT_STOP):
        restless.dump(job)
    assert 5 < len(restless.retries) < 20
    assert goes_on(job)


def test_the_group_is_thawed_whoever_is_killed(restless: Restless) -> None:
    """CRIU, killed between freezing and thawing, leaves a frozen group to the guard."""
    job = restless.start(sys.executable, "-c", FORKS)
    assert job.group is not None
    guard = DumpGuard(str(restless.place / "work"))
    try:
        script = f"{_freezing(job.group)}; kill -9 $$"
        assert guard.prepare(["sh", "-c", script], 20, group=job.group) is not None
        assert not frozen.is_frozen(job.group)
        assert goes_on(job)
        freeze(job.group)
    finally:
        guard.release()
    assert not frozen.is_frozen(job.group)
    assert goes_on(job)


def _freezing(group: Path) -> str:
    second = (group / "cgroup.freeze").exists()
    return f"echo {'1' if second else 'FROZEN'} > {group}/{'cgroup.freeze' if second else 'freezer.state'}"


def freeze(group: Path) -> None:
    if (group / "cgroup.freeze").exists():
        (group / "cgroup.freeze").write_text("1")
    else:
        (group / "freezer.state").write_text("FROZEN")


def test_a_group_that_killed_processes_left_frozen_is_thawed(restless: Restless) -> None:
    """All processes of a dump were killed at once; whoever looks at the node's jobs next thaws."""
    job = restless.start(sys.executable, "-c", FORKS)
    assert job.group is not None
    guard = subprocess.Popen(["sleep", "60"])
    assert freezer.mark(job.group, guard.pid)
    freeze(job.group)
    seen: list[Event] = []
    registry = Registry(restless.place / "jobs", emit=seen.append)
    try:
        registry.thaw_left()
        assert frozen.is_frozen(job.group) and not seen  # the guard will thaw it
    finally:
        guard.kill()
        guard.wait(10)
    registry.thaw_left()
    assert [(one.name, one.fields["job"]) for one in seen] == [("job.thawed", "restless")]
    assert goes_on(job)
    freeze(job.group)  # by somebody else: the mark is gone
    registry.thaw_left()
    assert frozen.is_frozen(job.group) and len(seen) == 1
    frozen.thaw(job.group)


def test_a_dump_thaws_what_an_earlier_one_left_frozen(restless: Restless) -> None:
    job = restless.start(sys.executable, "-c", FORKS)
    assert job.group is not None
    guard = subprocess.Popen(["sleep", "60"])
    try:
        assert freezer.mark(job.group, guard.pid)
    finally:
        guard.kill()
        guard.wait(10)
    freeze(job.group)
    restless.dump(job)
    assert goes_on(job)


def test_a_group_that_somebody_else_froze_stays_frozen(restless: Restless) -> None:
    job = restless.start(sys.executable, "-c", FORKS)
    assert job.group is not None
    assert freezer.contains(job.group, [job.pid]) and not freezer.contains(job.group, [os.getpid()])
    freeze(job.group)
    assert frozen.is_frozen(job.group)
    frozen.thaw(job.group)
    assert not frozen.is_frozen(job.group)
    assert not freezer.remove_group(job.group)
    assert goes_on(job)
