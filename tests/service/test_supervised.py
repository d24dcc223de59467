"""Jobs under ``icecore run --resume``: preempted, crashed, taken over, refused; with real processes
and a real CRIU. What a job has written is always what an undisturbed run writes.
"""

from __future__ import annotations

import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO
from unittest import mock

import pytest

from icecore import Config
from icecore.errors import JobHeld, ResumeFailed
from icecore.events import Event
from icecore.host.jobs.identity import Identity
from icecore.host.kernel import procfs
from icecore.node.engine import RepositoryEngine
from icecore.repository import Repository
from icecore.service.record import read
from icecore.service.supervision.instances import Instances
from icecore.service.supervision.plan import Plan
from icecore.service.supervision.supervisor import Supervisor
from icecore.service.supervision.watchdog import end, lives
from icecore.store.format.state import SnapshotRecord
from icecore.store.log import lease
from icecore.store.log.lease_clock import now
from tests.cli.conftest import SECONDS, Cli, until

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

#: Counts up to LAST, a line each STEP seconds; from line AT on ends with STATUS, as often as there
#: are marks left in the file MARKS.
COUNTER = """
import os, sys, time
last, step, at, status, marks = int(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]), sys.argv[5]
for number in range(last):
    print("line", number, flush=True)
    if 0 <= at <= number and os.path.exists(marks):
        left = int(open(marks).read())
        if left:
            open(marks, "w").write(str(left - 1))
            sys.exit(status)
    time.sleep(step)
"""

SIGHUP_IS_IGNORED = 1 << (signal.SIGHUP - 1)


class Counter:
    """A supervised counter of ``lines`` lines."""

    def __init__(self, cli: Cli, lines: int = 40, step: float = 0.1) -> None:
        self.cli = cli
        self.lines = lines
        self.marks = cli.folder / "marks"
        program = cli.folder / "counter.py"
        program.write_text(COUNTER)
        self.command = [sys.executable, str(program), str(lines), str(step)]
        cli.run("init")

    def start(self, *options: str, at: int = -1, status: int = 1) -> subprocess.Popen[str]:
        words = ("run", "--name", "counter", "--resume", *options, "--", *self.command)
        return self.cli.start(*words, str(at), str(status), str(self.marks))

    def whole(self) -> list[str]:
        """What an undisturbed run writes."""
        return [f"line {number}" for number in range(self.lines)]

    def snapshots(self) -> int:
        return len(self.cli.run("ls").stdout.splitlines()) - 1


def ended(process: subprocess.Popen[str]) -> tuple[int, list[str], str]:
    out, err = process.communicate(timeout=SECONDS)
    return process.returncode, out.splitlines(), err


def written(cli: Cli, lines: float) -> Callable[[], bool]:
    """Whether the job has written so many lines."""

    def holds() -> bool:
        found = [job for job in cli.registry.instances() if job.alive]
        return bool(found) and len(found[-1].log_path("stdout").read_text().split()) >= 2 * lines

    return holds


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_preempted_and_brought_back(cli: Cli, number: int) -> None:
    counter = Counter(cli)
    first = counter.start("--preempted-exit", "99", "--requeue-command", "echo again >> requeued")
    until(written(cli, 8), "8 lines")
    first.send_signal(number)
    status, before, said = ended(first)
    assert status == 99 and "stopping it with a snapshot" in said
    assert (cli.folder / "requeued").read_text() == "again\n"
    assert before == counter.whole()[: len(before)] and len(before) < counter.lines
    status, after, said = ended(counter.start())
    assert status == 0 and "was restored from" in said
    assert before + after == counter.whole()


def test_preempted_while_a_periodic_snapshot_is_taken(cli: Cli) -> None:
    counter = Counter(cli, lines=10_000)
    before: list[str] = []
    for _ in range(3):
        process = counter.start("--every", "0.3s")
        known = counter.snapshots()
        until(lambda: counter.snapshots() > known, "a periodic snapshot", SECONDS)  # noqa: B023
        time.sleep(0.3)  # the next is under way
        process.send_signal(signal.SIGTERM)
        status, lines, said = ended(process)
        assert status == 85 and lines, said
        before += lines
    assert before == counter.whole()[: len(before)]
    assert counter.snapshots() >= 6


def test_a_snapshot_that_has_not_frozen_the_job_yet_becomes_its_last(cli: Cli) -> None:
    counter = Counter(cli)
    settings = cli.folder / "icecore.toml"
    settings.write_text('[dump]\nbefore = "touch begun; until [ -e go ]; do sleep 0.05; done"\n')
    process = counter.start("--every", "0.3s")
    until((cli.folder / "begun").exists, "a periodic snapshot", SECONDS)
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    (cli.folder / "go").touch()
    status, before, said = ended(process)
    assert status == 85 and counter.snapshots() == 1, said
    settings.unlink()
    status, after, said = ended(counter.start())
    assert status == 0 and before + after == counter.whole(), said


def test_a_hook_that_fails_after_the_restore_costs_nothing(cli: Cli) -> None:
    """The job was stopped when its snapshot was taken; it goes on, and all its output is shown."""
    counter = Counter(cli)
    process = counter.start()
    until(written(cli, 8), "8 lines")
    os.kill(cli.job("counter").main_process(), signal.SIGSTOP)
    process.send_signal(signal.SIGTERM)
    status, before, said = ended(process)
    assert status == 85, said
    counter.cli = Cli(cli.folder, {**cli.environment, "ICECORE_RESTORE_AFTER": "false"})
    status, after, said = ended(counter.start())
    assert status == 0 and "ended with status 1" in said, said
    assert before + after == counter.whole()


def test_what_a_job_writes_during_a_hook_that_fails_is_shown(cli: Cli) -> None:
    counter = Counter(cli)
    process = counter.start()
    until(written(cli, 8), "8 lines")
    process.send_signal(signal.SIGTERM)
    _, before, _ = ended(process)
    counter.cli = Cli(cli.folder, {**cli.environment, "ICECORE_RESTORE_AFTER": "sleep 1; false"})
    status, after, said = ended(counter.start())
    assert status == 0 and "ended with status 1" in said, said
    assert before + after == counter.whole()


@pytest.mark.parametrize(
    ("how", "options", "status"),
    [
        ("killed", (), 85),
        ("failed", ("--restart", "on-failure"), 85),
        ("failed", (), 3),
        ("ended by the user", ("--restart", "on-failure"), 137),
    ],
)
def test_a_job_that_ends_while_it_is_being_stopped(
    how: str, options: tuple[str, ...], status: int, cli: Cli
) -> None:
    """The newest snapshot remains, and the exit status asks for another start. A failure of the job
    itself keeps its status, and so does an end that the user asked for.
    """
    counter = Counter(cli, lines=150)
    note = "echo $ICECORE_SNAPSHOT $ICECORE_SNAPSHOT_TIME > requeued"
    process = counter.start("--every", "1s", "--requeue-command", note, *options, at=0, status=3)
    until(lambda: counter.snapshots() > 0, "a periodic snapshot", SECONDS)
    repository = Path(cli.environment["ICECORE_REPOSITORY"])
    repository.rename(repository.with_name("away"))
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    assert process.poll() is None  # it tries again and again to take the last snapshot
    if how == "killed":
        [job] = [job for job in cli.registry.instances() if job.alive]
        os.kill(job.main_process(), signal.SIGKILL)
    elif how == "ended by the user":
        cli.run("kill", "-s", "KILL", "counter")
    else:
        mark = counter.marks.with_name("mark")
        mark.write_text("1")
        mark.rename(counter.marks)
    found, before, said = ended(process)
    repository.with_name("away").rename(repository)
    assert found == status, said
    assert ("ended before it was stopped" in said) == (status == 85)
    assert (cli.folder / "requeued").exists() == (status == 85)
    newest = cli.run("ls", "--json").stdout.splitlines()[-1]
    if status == 85:
        snapshot, at = (cli.folder / "requeued").read_text().split()
        assert snapshot in newest and at.endswith("Z")
    found, after, said = ended(counter.start())
    assert found == 0 and "was restored from" in said
    whole = counter.whole()
    assert before == whole[: len(before)] and after == whole[-len(after) :]
    assert len(before) + len(after) >= len(whole)  # what it did after the snapshot it does again


def test_a_job_without_a_snapshot_that_is_killed_while_it_is_being_stopped(cli: Cli) -> None:
    counter = Counter(cli, lines=150)
    process = counter.start()
    until(written(cli, 3), "3 lines")
    repository = Path(cli.environment["ICECORE_REPOSITORY"])
    repository.rename(repository.with_name("away"))
    process.send_signal(signal.SIGTERM)
    time.sleep(0.5)
    [job] = [job for job in cli.registry.instances() if job.alive]
    os.kill(job.main_process(), signal.SIGKILL)
    status, _, said = ended(process)
    repository.with_name("away").rename(repository)
    assert status == 128 + signal.SIGKILL, said


def test_a_signal_while_a_job_waits_to_be_restored(cli: Cli) -> None:
    """It is restored by whoever starts it again."""
    counter = Counter(cli, lines=40)
    counter.marks.write_text("9")
    process = counter.start("--restart", "on-failure", "--every", "0.3s", at=10, status=3)
    until(written(cli, 3), "3 lines")
    until(lambda: not any(job.alive for job in cli.registry.instances()), "its end", SECONDS)
    process.send_signal(signal.SIGTERM)
    counter.marks.unlink()
    status, _, said = ended(process)
    assert status == 85 and "ended before it was stopped: exited 3" in said, said


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGHUP])
def test_what_the_user_ends_is_not_brought_back(number: signal.Signals, cli: Cli) -> None:
    """TERM and KILL keep the job from being restored; HUP does not."""
    counter = Counter(cli, lines=60)
    process = counter.start("--restart", "on-failure", "--every", "0.5s")
    until(lambda: counter.snapshots() > 0, "a periodic snapshot", SECONDS)
    cli.run("kill", "-s", number.name.removeprefix("SIG"), "counter")
    status, lines, said = ended(process)
    if number == signal.SIGHUP:
        assert status == 0 and "was restored from" in said
        assert lines[-1] == counter.whole()[-1]
        return
    assert status == 128 + number and "was restored from" not in said, said
    assert f"killed by {number.name}, as 'icecore kill' asked; not restored" in said
    status, lines, said = ended(counter.start())
    assert status == 0 and "was restored from" in said, said
    assert lines[-1] == counter.whole()[-1]


def test_windows_that_are_too_long_do_not_stretch_the_interval_forever(cli: Cli) -> None:
    counter = Counter(cli, lines=140)
    (cli.folder / "icecore.toml").write_text('[dump]\nmax_window = "0.1 ms"\n')
    words = ("run", "--name", "counter", "--resume", "--every", "0.4s", "--max-loss", "2s")
    process = cli.start("--json", *words, "--", *counter.command, "-1", "1", "none")
    out, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    failed = [event for event in events if event["event"] == "run.snapshot_failed"]
    assert all("window" in event["error"] for event in failed), failed
    pauses = [event["next_seconds"] for event in failed]
    assert len(pauses) >= 5 and pauses[0] <= 1.0 and max(pauses) == 2.0, pauses


def test_retention_after_a_commit(cli: Cli) -> None:
    counter = Counter(cli, lines=50)
    status, lines, _ = ended(counter.start("--every", "0.5s", "--keep-last", "2"))
    assert status == 0 and lines == counter.whole()
    assert 1 <= counter.snapshots() <= 3


def test_a_crash_is_restored_and_a_crash_loop_is_not_for_ever(cli: Cli) -> None:
    counter = Counter(cli, lines=30)
    counter.marks.write_text("2")
    status, lines, said = ended(
        counter.start("--every", "0.4s", "--restart", "on-failure:5", at=20, status=7)
    )
    assert status == 0, said
    assert said.count("exited 7") == 2 and said.count("was restored from") == 2
    assert lines[-1] == "line 29" and set(lines) == set(counter.whole())

    counter = Counter.__new__(Counter)
    counter.__dict__.update(cli=cli, lines=30, marks=cli.folder / "marks")
    counter.command = [sys.executable, str(cli.folder / "counter.py"), "30", "0.05"]
    counter.marks.write_text("99")
    words = ("run", "--name", "loop", "--restart", "on-failure:2", "--", *counter.command)
    status, lines, said = ended(cli.start(*words, "5", "7", str(counter.marks)))
    assert status == 7 and said.count("exited 7") == 3 and lines == counter.whole()[:6] * 3


def test_a_job_that_fails_from_one_snapshot_is_brought_back_from_an_older_one(cli: Cli) -> None:
    counter = Counter(cli, lines=4000)
    counter.marks.write_text("0")
    process = counter.start("--every", "0.5s", "--restart", "on-failure:9", at=0, status=7)
    until(lambda: counter.snapshots() >= 3, "three snapshots")
    counter.marks.write_text("4")
    until(lambda: [job.alive for job in cli.registry.instances()] == 4 * [False] + [True], "five")
    until(lambda: cli.registry.instances()[-1].state == "running", "it runs")
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    status, _, said = ended(process)
    assert status == 85, said
    restored = [line.split()[-1] for line in said.splitlines() if "was restored from" in line]
    assert len(restored) == 4 and restored[0] == restored[1] != restored[2], restored
    series = read(cli.folder / "state", "counter").series
    assert series is not None and series.count == 4
    counter.marks.write_text("1")  # the next supervisor goes on with what the first one knew
    process = counter.start("--every", "0.5s", "--restart", "on-failure:4", at=0, status=7)
    status, _, said = ended(process)
    assert status == 7 and said.count("was restored from") == 1, said


def runs(pid: int) -> bool:
    return procfs.exists(pid) and not procfs.is_zombie(pid)


def test_a_command_without_its_init_does_not_run_beside_its_successor(cli: Cli) -> None:
    """Without a pid namespace of its own, a job's processes outlive their init."""
    counter = Counter(cli, lines=3000)
    process = counter.start("--restart", "on-failure", "--pid", "host")
    until(written(cli, 3), "3 lines")
    job = cli.job("counter")
    command = job.main_process()
    if job.group is None:
        pytest.skip("no cgroup of its own")
    os.kill(job.pid, signal.SIGKILL)
    until(lambda: cli.job("counter").instance != job.instance, "its successor")
    assert not runs(command)
    until(written(cli, 3), "3 lines")
    successor = cli.job("counter")
    command = successor.main_process()
    process.kill()
    process.communicate(timeout=SECONDS)
    os.kill(successor.pid, signal.SIGKILL)
    assert runs(command)
    assert lives(successor)
    end(successor)
    assert not lives(successor) and not runs(command)


def test_a_job_that_leaves_after_its_init_was_killed_leaves_nothing(cli: Cli) -> None:
    counter = Counter(cli, lines=3000)
    counter.cli = Cli(cli.folder, {**cli.environment, "ICECORE_DUMP_BEFORE": "sleep 5; false"})
    process = counter.start("--restart", "on-failure", "--pid", "host")
    until(written(cli, 3), "3 lines")
    job = cli.job("counter")
    command = job.main_process()
    if job.group is None:
        pytest.skip("no cgroup of its own")
    process.send_signal(signal.SIGTERM)
    time.sleep(1.0)
    os.kill(job.pid, signal.SIGKILL)
    status, _, said = ended(process)
    assert status == 85 and not runs(command), said


#: Counts. If a file ``bad`` exists at line 30, its state is bad from then on, and it fails at line
#: 58. It waits for a file ``one`` at line 30, and for ``two`` at line 58.
SPOILED = """
import os, sys, time
bad = False
for number in range(80):
    print("line", number, flush=True)
    time.sleep(0.1)
    while not os.path.exists({30: "one", 58: "two"}.get(number, ".")):
        time.sleep(0.1)
    bad = bad or (number == 30 and os.path.exists("bad"))
    if bad and number == 58:
        sys.exit(7)
"""


@pytest.mark.torture  # `test_failures.py` has the same without processes
def test_a_job_is_brought_back_from_before_its_state_was_bad(cli: Cli) -> None:
    """Snapshots of the bad state neither count as progress nor push out the good one."""
    cli.run("init")
    (cli.folder / "bad").touch()
    words = ("--every", "1.8s", "--keep-last", "9", "--restart", "on-failure:9")
    process = cli.start(
        "--json", "run", "--name", "own", *words, "--", sys.executable, "-c", SPOILED
    )
    snapshots = lambda: len(cli.run("ls").stdout.splitlines()) - 1  # noqa: E731
    until(lambda: snapshots() > 0, "a good snapshot")
    (cli.folder / "one").touch()
    until(written(cli, 33), "a bad state")
    known = snapshots()
    until(lambda: snapshots() > known + 1, "a bad snapshot")
    (cli.folder / "two").touch()
    until(lambda: len(cli.registry.instances()) > 1, "restored once")
    (cli.folder / "bad").unlink()
    out, err = process.communicate(timeout=2 * SECONDS)
    assert process.returncode == 0, err
    events = [json.loads(line) for line in out.splitlines()]
    names = [event["event"] for event in events]
    before = events[: names.index("run.failed")]
    taken = [event["snapshot"] for event in before if event["event"] == "run.snapshot"]
    restored = [event["snapshot"] for event in events if event["event"] == "run.resumed"]
    assert len(restored) > 2, events
    assert restored == [one for one in taken[::-1] for _ in range(2)][: len(restored)]


#: Opens a file and counts slowly. While a file ``bad`` exists, it fails at the number 15, once a
#: file ``ready`` exists.
READER = """
import os, sys, time
if not os.path.exists("data"):
    open("data", "w").write("content\\n")
file = open("data")
for number in range(40):
    print("line", number, flush=True)
    time.sleep(0.1)
    while number == 15 and os.path.exists("bad") and not os.path.exists("ready"):
        time.sleep(0.1)
    if number == 15 and os.path.exists("bad"):
        os.rename("data", "away")
        sys.exit(7)
"""


@pytest.mark.parametrize(
    "options",
    [
        ("--restart", "on-failure:9"),
        pytest.param(
            ("--resume", "--restart", "on-failure:2", "--or-start"), marks=pytest.mark.torture
        ),
    ],
)
def test_a_failed_restore_is_tried_again(options: tuple[str, ...], cli: Cli) -> None:
    cli.run("init")
    (cli.folder / "bad").touch()
    (cli.folder / "data").write_text("content\n")  # older than the job: no snapshot contains it
    said = cli.folder / "said"
    words = ("run", "--name", "reader", "--every", "0.5s", *options)
    with open(said, "wb") as err, open(cli.folder / "output", "wb") as out:
        process = subprocess.Popen(
            [*cli.command(*words), "--", sys.executable, "-c", READER],
            env=cli.environment,
            cwd=cli.folder,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
        )
    try:
        until(lambda: len(cli.run("ls").stdout.splitlines()) > 1, "a snapshot")
        (cli.folder / "ready").touch()
        until(lambda: "run.resume_failed" in said.read_text(), "a restore fails", 20)
        (cli.folder / "bad").unlink()
        if "on-failure:9" in options:
            (cli.folder / "away").rename(cli.folder / "data")
        assert process.wait(SECONDS) == 0, said.read_text()
    finally:
        process.kill()
        process.wait()
    lines = (cli.folder / "output").read_text().splitlines()
    whole = [f"line {number}" for number in range(40)]
    assert lines[:16] == whole[:16]
    assert (lines[16:] == whole) == ("--or-start" in options)
    assert lines[-1] == "line 39"


def test_one_instance_of_a_name(cli: Cli, tmp_path: Path) -> None:
    counter = Counter(cli, lines=3000)
    first = counter.start("--every", "1s")
    until(written(cli, 3), "3 lines")
    status, _, said = ended(counter.start())
    assert status == 16 and "supervised by another process of this node" in said
    other = Cli(tmp_path, {**cli.environment, "ICECORE_STATE": str(tmp_path / "other")})
    words = ("run", "--name", "counter", "--resume", "--", *counter.command, "-1", "1", "none")
    found = other.start(*words)
    status, _, said = ended(found)
    assert status == 16 and "is run by" in said
    first.send_signal(signal.SIGTERM)
    assert ended(first)[0] == 85
    until(lambda: not any(job.alive for job in cli.registry.instances()), "ended")


def is_busy(process: subprocess.Popen[str], seconds: float) -> bool:
    """Return whether a process still runs after ``seconds``."""
    time.sleep(seconds)
    return process.poll() is None


def test_a_third_signal_ends_a_stop_but_a_second_does_not(cli: Cli) -> None:
    counter = Counter(cli, lines=1000)
    process = counter.start()
    until(written(cli, 3), "3 lines")
    process.send_signal(signal.SIGTERM)
    status, before, _ = ended(process)
    assert status == 85
    counter.cli = Cli(cli.folder, {**cli.environment, "ICECORE_DUMP_BEFORE": "sleep 14"})
    for number, leaves in ((signal.SIGTERM, 85), (signal.SIGINT, 128 + signal.SIGINT)):
        note = f"echo $ICECORE_SNAPSHOT > requeued-{leaves}"
        process = counter.start("--requeue-command", note)
        until(written(cli, len(before) + 3), "it goes on")
        process.send_signal(number)
        if number == signal.SIGTERM:  # HUP follows at once, as from service managers: one signal
            process.send_signal(signal.SIGHUP)
        assert is_busy(process, 4.0)
        process.send_signal(number)
        if number == signal.SIGTERM:
            assert is_busy(process, 4.0)
            process.send_signal(number)
        status, lines, said = ended(process)
        assert status == leaves, said
        assert before + lines == counter.whole()[: len(before) + len(lines)]
        assert not any(job.alive for job in cli.registry.instances())
    (snapshot,) = (cli.folder / "requeued-85").read_text().split()
    assert snapshot in cli.run("ls", "--json").stdout
    assert not (cli.folder / "requeued-130").exists()
    counter.cli = cli
    process = counter.start()  # the last committed snapshot stands
    until(written(cli, len(before) + 1), "it goes on")
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 85


def test_a_third_signal_ends_a_job_without_a_snapshot(cli: Cli) -> None:
    counter = Counter(cli, lines=1000)
    counter.cli = Cli(cli.folder, {**cli.environment, "ICECORE_DUMP_BEFORE": "sleep 14"})
    process = counter.start()
    until(written(cli, 3), "3 lines")
    for number in (signal.SIGUSR1, signal.SIGTERM):
        process.send_signal(number)
        assert is_busy(process, 4.0)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 128 + signal.SIGTERM


def test_a_second_signal_leaves_time_for_the_commit(cli: Cli) -> None:
    counter = Counter(cli, lines=1000)
    counter.cli = Cli(cli.folder, {**cli.environment, "ICECORE_DUMP_BEFORE": "sleep 8"})
    process = counter.start("--preempted-exit", "99")
    until(written(cli, 3), "3 lines")
    process.send_signal(signal.SIGUSR1)
    assert is_busy(process, 4.0)
    process.send_signal(signal.SIGTERM)
    status, _, said = ended(process)
    assert status == 99 and "was stopped with snapshot" in said, said


def test_a_killed_supervisor_is_followed_by_another(cli: Cli) -> None:
    counter = Counter(cli, lines=60)
    first = counter.start("--every", "1s")
    until(written(cli, 5), "5 lines")
    first.kill()
    before = first.communicate(timeout=SECONDS)[0].splitlines()
    (job,) = [job for job in cli.registry.instances() if job.alive]
    time.sleep(0.5)  # what it writes meanwhile is shown, too
    status, lines, said = ended(counter.start("--every", "1s"))
    assert status == 0 and "already runs" in said, said
    twice = len(before) + len(lines) - counter.lines  # killed between a line and the note of it
    assert 0 <= twice <= 1 and before + lines[twice:] == counter.whole()
    assert [
        line.strip() for line in job.log_path("stdout").read_text().splitlines()
    ] == counter.whole()


@pytest.mark.parametrize("pid", ["private", "host"])
def test_the_watchdog_stops_and_ends_a_job_without_a_lease(cli: Cli, pid: str) -> None:
    job_command = [sys.executable, "-c", "import time; time.sleep(600)"]
    cli.run("run", "-d", "--pid", pid, "--name", "left", "--", *job_command)
    job = cli.job("left")
    words = [
        sys.executable,
        "-P",
        "-m",
        "icecore.service.supervision.watchdog",
        str(cli.folder / "state"),
    ]
    words += [job.name, job.instance, "1.0"]
    (cli.folder / "state" / "schedules").mkdir(mode=0o700)

    def stopped() -> bool:
        return procfs.status(job.main_process()).state == "T"

    def begun(ago: float = 0.0) -> tuple[subprocess.Popen[bytes], IO[bytes]]:
        process = subprocess.Popen([*words, str(now() - ago)], stdin=subprocess.PIPE)
        assert process.stdin is not None
        return process, process.stdin

    message = struct.Struct("<cd")
    process, pipe = begun()
    try:
        for _ in range(2):
            until(stopped, "stopped")
            pipe.write(message.pack(b"r", now() - 5))  # a renewal that took too long
            pipe.flush()
            time.sleep(0.5)
            assert stopped()
            pipe.write(message.pack(b"r", now() + 2))
            pipe.flush()
            until(lambda: not stopped(), "it goes on")
        until(stopped, "stopped")
        process.kill()  # its successor knows when the lease was renewed, and who was stopped
        process.wait()
        process, pipe = begun(ago=2.0)
        time.sleep(1.0)
        assert stopped()
        process.kill()
        process.wait()
        process, pipe = begun(ago=-20.0)
        until(lambda: not stopped(), "it goes on")
        pipe.write(message.pack(b"d", 0.0))
        pipe.close()
        assert process.wait(20) == 0 and job.alive
        os.kill(job.main_process(), signal.SIGSTOP)  # by whoever: not the watchdog's to continue
        process, pipe = begun()
        time.sleep(2.0)
        pipe.write(message.pack(b"r", now()))
        pipe.flush()
        time.sleep(0.5)
        assert stopped()
        os.kill(job.main_process(), signal.SIGCONT)
        until(stopped, "stopped")
        pipe.close()
        assert process.wait(20) == 0
        until(lambda: not job.alive, "ended")
    finally:
        process.kill()
        process.wait()


def test_output_waits_for_room(cli: Cli) -> None:
    counter = Counter(cli, lines=30)
    small = cli.folder / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", small], check=True, timeout=9)
    try:
        (small / "output").write_bytes(bytes(4094))  # two more bytes fit
        filled = small / "filled"
        with open(filled, "wb", 0) as rest, pytest.raises(OSError, match="No space"):
            while True:
                rest.write(bytes(4096))
        words = ("run", "--name", "counter", "--resume", "--", *counter.command)
        with open(small / "output", "ab") as output, open(cli.folder / "said", "wb") as said:
            process = subprocess.Popen(
                [*cli.command(*words), "-1", "1", str(counter.marks)],
                env=cli.environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=said,
            )
        until(lambda: b"cannot write the output" in (cli.folder / "said").read_bytes(), "a warning")
        filled.unlink()
        assert process.wait(SECONDS) == 0
        assert (small / "output").read_bytes()[4094:].decode().splitlines() == counter.whole()
    finally:
        subprocess.run(["umount", small], check=True, timeout=9)


def full_pipe() -> tuple[int, int]:
    """Return both ends of a full pipe."""
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    with pytest.raises(BlockingIOError):
        while True:
            os.write(writer, bytes(4096))
    os.set_blocking(writer, True)
    return reader, writer


@pytest.mark.parametrize("form", ["--quiet", "--json"])
def test_a_reader_that_does_not_read_delays_nothing(form: str, cli: Cli) -> None:
    counter = Counter(cli, lines=10_000)
    reader, writer = full_pipe()
    words = ("run", "--name", "counter", "--resume", "--every", "0.5s", "--", *counter.command)
    with open(cli.folder / "said", "wb") as said:
        process = subprocess.Popen(
            [*cli.command(form, *words), "-1", "1", str(counter.marks)],
            env=cli.environment,
            stdin=subprocess.DEVNULL,
            stdout=writer,
            stderr=writer if form == "--quiet" else said,
        )
    os.close(writer)
    try:
        until(lambda: counter.snapshots() >= 2, "two snapshots", SECONDS)
        process.send_signal(signal.SIGTERM)
        began, known = time.monotonic(), counter.snapshots()
        assert process.wait(SECONDS) == 85
        assert time.monotonic() - began < 25.0
    finally:
        process.kill()
        process.wait()
        os.close(reader)
    assert counter.snapshots() > known
    assert not any(job.alive for job in cli.registry.instances())


def test_what_is_ignored_stays_ignored_and_a_signal_ends_the_wait_for_the_lease(
    cli: Cli, tmp_path: Path
) -> None:
    counter = Counter(cli, lines=3000)
    words = ("run", "--name", "counter", "--resume", "--", *counter.command, "-1", "1", "none")
    first = subprocess.Popen(
        ["nohup", *cli.command(*words)],
        env=cli.environment,
        cwd=cli.folder,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    until(written(cli, 3), "3 lines")
    (job,) = [job for job in cli.registry.instances() if job.alive]
    assert SIGHUP_IS_IGNORED & int(procfs.status_fields(first.pid)["SigIgn"][0], 16), (
        "a signal that nohup ignores has no handler"
    )
    first.send_signal(signal.SIGHUP)
    time.sleep(1.0)
    assert first.poll() is None and job.alive
    first.kill()
    first.wait()
    other = Cli(tmp_path, {**cli.environment, "ICECORE_STATE": str(tmp_path / "other")})
    second = subprocess.Popen(
        other.command(*words), env=other.environment, stderr=subprocess.PIPE, text=True
    )
    assert second.stderr is not None
    assert any("waiting for a heartbeat" in line for line in second.stderr)
    second.send_signal(signal.SIGTERM)
    assert second.wait(SECONDS) == 85  # whoever sent it starts it again
    second.stderr.close()
    cli.run("kill", "-s", "KILL", "counter")


@pytest.mark.parametrize(("number", "status"), [(signal.SIGUSR1, 99), (signal.SIGINT, 130)])
def test_a_signal_while_slurm_is_asked(number: int, status: int, cli: Cli) -> None:
    cli.run("init")
    tools = cli.folder / "tools"
    tools.mkdir()
    (tools / "scontrol").write_text(f"#!/bin/sh\ntouch {cli.folder}/asked; exec sleep 30\n")
    (tools / "scontrol").chmod(0o755)
    own = {"SLURM_JOB_ID": "1", "PATH": f"{tools}:{cli.environment['PATH']}"}
    asking = Cli(cli.folder, {**cli.environment, **own})
    requeue = ("--preempted-exit", "99", "--requeue-command", "echo x$ICECORE_SNAPSHOT > requeued")
    process = asking.start("run", "--name", "own", "--resume", *requeue, "--", "/bin/true")
    until((cli.folder / "asked").exists, "asked")
    process.send_signal(number)
    time.sleep(0.1)
    process.send_signal(signal.SIGTERM)  # changes nothing
    assert ended(process)[0] == status
    assert (cli.folder / "requeued").exists() == (status == 99)
    assert not cli.registry.instances()


@pytest.mark.torture
def test_a_stopped_supervisor_does_not_keep_its_job_running_for_ever(cli: Cli) -> None:
    """As after Ctrl-Z: nobody renews the lease, so the watchdog stops the job after a minute."""
    counter = Counter(cli, lines=100_000)
    first = counter.start()
    until(written(cli, 3), "3 lines")
    (job,) = [job for job in cli.registry.instances() if job.alive]
    first.send_signal(signal.SIGSTOP)
    until(lambda: procfs.status(job.main_process()).state == "T", "stopped", 100)
    first.send_signal(signal.SIGCONT)
    until(lambda: procfs.status(job.main_process()).state != "T", "it goes on")
    first.send_signal(signal.SIGTERM)
    assert ended(first)[0] == 85


def test_a_job_of_another_user_is_neither_taken_over_nor_ended(cli: Cli) -> None:
    cli.run("init")
    cli.run("run", "-d", "--name", "train", "--", "/bin/sleep", "600")
    config = Config(state=str(cli.folder / "state"))
    with Repository.open(
        cli.folder / "repository", config=config, state=config.state
    ) as repository:
        engine = RepositoryEngine(repository, config, Identity.of_user("4242"))
        supervisor = Supervisor(
            Plan("train", lambda: pytest.fail("it must not start")),
            engine,
            write=lambda job, piece: None,
            emit=lambda event: None,
        )
        with pytest.raises(JobHeld, match="another user"):
            supervisor.run()
    assert cli.job("train").alive
    cli.run("kill", "-s", "KILL", "train")


def test_a_name_is_reserved_between_a_failure_and_the_restore(cli: Cli) -> None:
    counter = Counter(cli, lines=40)
    counter.marks.write_text("3")
    process = counter.start("--restart", "on-failure:9", "--every", "0.3s", at=10, status=3)
    until(written(cli, 3), "3 lines")
    tried = []
    while process.poll() is None:
        done = cli.start("run", "-d", "--name", "counter", "--", "/bin/sleep", "600")
        tried.append(ended(done)[0])
        time.sleep(0.2)
    status, lines, said = ended(process)
    assert status == 0 and lines[-1] == "line 39", said
    assert said.count("exited 3") == 3 and "a job named counter runs" not in said
    assert tried.count(2) > 3 and tried.count(0) <= 1  # only once the supervisor has ended


def test_the_supervisor_waits_for_a_name_that_another_job_has(cli: Cli) -> None:
    counter = Counter(cli, lines=60)
    counter.marks.write_text("1")
    process = counter.start("--restart", "on-failure:9", "--every", "0.3s", at=40, status=3)
    until(written(cli, 3), "3 lines")
    until(lambda: not any(job.alive for job in cli.registry.instances()), "its end", SECONDS)
    with mock.patch("icecore.host.jobs.reserved.is_reserved", lambda state, name: False):
        other = cli.registry.start(["/bin/sleep", "600"], name="counter")
    time.sleep(3.0)  # more than one try
    assert process.poll() is None and other.alive
    other.kill(signal.SIGKILL)
    status, lines, said = ended(process)
    assert status == 0 and lines[-1] == "line 59", said
    assert "a job named counter runs" in said and "was restored from" in said


def test_root_neither_takes_over_nor_restores_jobs_of_other_users(cli: Cli) -> None:
    cli.run("init")
    own = ("run", "--name", "train", "--resume")
    count = (
        "--",
        "/bin/sh",
        "-c",
        "n=0; while [ $n -lt 90 ]; do n=$((n+1)); echo $n; sleep .1; done",
    )
    cli.run("run", "-d", "--user", "4242", "--cwd", "/", "--name", "train", *count)
    status, _, said = ended(cli.start(*own, "--", "/bin/true"))
    assert status == 16 and "another user of this node" in said
    assert cli.job("train").alive
    cli.run("dump", "train", "--stop")
    status, lines, said = ended(cli.start(*own, "--", "/bin/echo", "root"))
    assert (status, lines) == (0, ["root"]), said
    status, lines, said = ended(cli.start(*own, "--user", "4242", "--cwd", "/", *count))
    assert status == 0 and lines[-1] == "90" and lines[0] != "1", said


@pytest.mark.parametrize("before", ["", "glibc.malloc.check=0"])
def test_a_supervisor_keeps_no_freed_memory_for_threads_and_its_job_has_the_old_environment(
    cli: Cli, before: str
) -> None:
    """Else it grows for hours. The allocator is told before the program begins, so it begins twice."""
    cli.run("init")
    shows = (
        "import os; own = open('/proc/' + os.environ['SUPERVISOR'] + '/environ').read();"
        "print([v for k, v in os.environ.items() if 'TUNABLES' in k], own.count('tcache_count=0'))"
    )
    given = {"GLIBC_TUNABLES": before} if before else {}
    words = ["run", "--name", "shows", "--resume", "--", sys.executable, "-c", shows]
    script = 'export SUPERVISOR=$$; exec "$0" "$@"'
    done = subprocess.run(
        ["sh", "-c", script, *cli.command(*words)],
        env={**cli.environment, **given},
        cwd=cli.folder,
        capture_output=True,
        text=True,
        timeout=SECONDS,
    )
    assert done.stdout.strip() == f"{[before] if before else []} 1", done.stderr


def test_names_that_are_no_names(cli: Cli) -> None:
    cli.run("init")
    for name in ("../x", "a/b", ""):
        assert ended(cli.start("run", "--name", name, "--resume", "--", "true"))[0] == 2
    assert cli.run("schedule", "explain", "../x", status=2)


def test_a_notice_that_a_command_gives(cli: Cli) -> None:
    counter = Counter(cli, lines=1000)
    asks = f"test -e {cli.folder}/notice"
    bounds = ("--max-overhead", "90%", "--max-loss", "7s")
    process = counter.start("--notice-command", asks, "--every", "1s", "--notice", "0.01s", *bounds)
    until(lambda: counter.snapshots() > 1, "a snapshot that is recorded, and another one")
    # Its own bounds, not those of the configuration.
    explained = cli.one("schedule", "schedule", "explain", "counter")
    assert explained["interval_seconds"] == 1.0 and 0 < explained["auto_seconds"] <= 7.0
    (cli.folder / "notice").touch()
    status, lines, said = ended(process)
    assert status == 85 and "ended with status 0; stopping it" in said
    assert "but the notice is 10.0 ms" in said
    assert lines == counter.whole()[: len(lines)]


def test_a_signal_that_is_passed_on(cli: Cli) -> None:
    cli.run("init")
    code = (
        "import signal; signal.signal(signal.SIGUSR1, lambda *_: exit(5));"
        " print('ready', flush=True); signal.pause()"
    )
    words = ("run", "--name", "own", "--on-term", "pass", "--", sys.executable, "-c", code)
    process = cli.start(*words)
    until(written(cli, 0.5), "it is ready")
    process.send_signal(signal.SIGUSR1)
    assert ended(process)[0] == 5


def test_a_job_that_was_told_something_is_restored_when_it_fails(cli: Cli) -> None:
    """A signal that was passed on, and did not end the job, is no reason to leave it."""
    cli.run("init")
    code = (
        "import os, signal, time\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('told', flush=True))\n"
        "for n in range(40):\n"
        "    print(n, flush=True)\n"
        "    time.sleep(0.1)\n"
        "    if n == 30 and not os.path.exists('once'):\n"
        "        open('once', 'w').close()\n"
        "        os._exit(3)\n"
    )
    words = (
        "run",
        "--name",
        "own",
        "--on-term",
        "pass",
        "--restart",
        "on-failure",
        "--every",
        "1s",
    )
    process = cli.start(*words, "--", sys.executable, "-c", code)
    until(written(cli, 3), "3 lines")
    process.send_signal(signal.SIGUSR1)
    status, lines, said = ended(process)
    assert "told" in lines and status == 0 and "was restored from" in said, said
    assert lines[-1] == "39"


def test_snapshots_in_quarantine_are_passed_over(cli: Cli) -> None:
    """The newest whole one is restored, without --fall-back; if none is, nothing starts anew."""
    cli.run("init")
    config = Config(state=str(cli.folder / "state"))

    def record(number: int, lost: str) -> SnapshotRecord:
        return SnapshotRecord(
            f"{number:032x}", "own", "1" * 32, "", number, "m", 1, b"d" * 32, quarantined=lost
        )

    with Repository.open(cli.folder / "repository", config=config, state=config.state) as opened:
        engine = RepositoryEngine(opened, config)
        found = [record(1, ""), record(2, ""), record(3, "a shard")]
        with mock.patch.object(engine, "snapshots", lambda job: list(found)):
            plan = Plan("own", lambda: pytest.fail("it must not start"))
            instances = Instances(
                plan, engine, mock.Mock(), lambda name, **_: None, lambda event: None
            )
            assert [one.created_ns for one in instances.candidates()] == [2, 1]
            found[:] = [record(3, "a shard")]
            with pytest.raises(ResumeFailed, match="in quarantine"):
                instances.first()


def test_what_cannot_be_restored(cli: Cli) -> None:
    cli.run("init")
    data = cli.folder / "data"
    data.write_text("first\n")
    code = "import time; f = open('data'); [print('tick', flush=True) or time.sleep(0.1) for _ in range(3000)]"
    words = ("run", "--name", "reader", "--resume")
    command = ("--", sys.executable, "-c", code)
    first = cli.start(*words, *command)
    until(lambda: any(job.alive for job in cli.registry.instances()), "it runs")
    time.sleep(1.0)
    first.send_signal(signal.SIGTERM)
    assert ended(first)[0] == 85
    data.unlink()
    status, _, said = ended(cli.start(*words, *command))
    assert status == 17 and "--or-start starts it anew" in said
    data.write_text("another\n")
    process = cli.start(*words, "--or-start", *command)
    until(lambda: any(job.alive for job in cli.registry.instances()), "it runs")
    time.sleep(1.0)
    process.send_signal(signal.SIGTERM)
    assert ended(process)[0] == 85
    data.write_text("a third, longer\n")  # the newest does not fit any more, nor does the first
    assert ended(cli.start(*words, "--fall-back", "1", *command))[0] == 17


def test_a_job_is_paused_while_another_could_take_its_name(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    counter = Counter(cli, lines=80)
    monkeypatch.setattr(lease, "BEAT_SECONDS", 0.2)
    monkeypatch.setattr(lease, "PAUSE_SECONDS", 1.0)
    monkeypatch.setenv("ICECORE_STATE", str(cli.folder / "state"))
    place, away = cli.folder / "repository", cli.folder / "away"
    config = Config(state=str(cli.folder / "state"))
    registry = cli.registry
    lines: list[bytes] = []
    told: list[str] = []
    states: list[str] = []

    def emit(event: Event) -> None:
        told.append(event.name)
        if event.name == "run.paused":
            job = registry.find("counter")
            until(lambda: procfs.status(job.main_process()).state == "T", "stopped")
            states.append("stopped")
            away.rename(place)
        if event.name == "run.unpaused":
            states.append("goes on")

    def start() -> object:
        job = registry.start([*counter.command, "-1", "1", "none"], name="counter")
        place.rename(away)
        return job

    with Repository.open(place, config=config) as repository:
        supervisor = Supervisor(
            Plan("counter", start),  # type: ignore[arg-type]
            RepositoryEngine(repository, config),
            write=lambda job, piece: lines.append(piece.data),
            emit=emit,
        )
        assert supervisor.run() == 0
    assert states == ["stopped", "goes on"] and "run.lease_lost" not in told
    assert b"".join(lines).decode().splitlines() == counter.whole()


#: Counts up to LAST; its number in memory, one that it keeps in a directory, and the number of files
#: there may never differ.
FILED = """
import os, sys, time
last, top = int(sys.argv[1]), sys.argv[2]
number = 0
while number < last:
    kept = int(open(f"{top}/count").read()) if number else 0
    files = [name for name in os.listdir(top) if name.startswith("segment-")]
    if kept != number or len(files) != number:
        sys.exit(f"{number} in memory, {kept} in the file, {len(files)} segments")
    with open(f"{top}/segment-{number}", "w") as file:
        file.write(f"{number}\\n" * 1000)
    number += 1
    with open(f"{top}/new", "w") as file:
        file.write(str(number))
    os.rename(f"{top}/new", f"{top}/count")
    print("line", number - 1, flush=True)
    time.sleep(0.1)
"""


def test_data_comes_back_with_a_job_that_is_resumed(cli: Cli) -> None:
    program, top = cli.folder / "filed.py", cli.folder / "filed"
    program.write_text(FILED)
    top.mkdir()
    cli.run("init")
    words = ["run", "--name", "filed", "--resume", "--every", "0.5s", "--data", str(top), "--"]
    words += [sys.executable, str(program), "120", str(top)]
    first = cli.start(*words)
    until(lambda: len(cli.run("ls").stdout.splitlines()) > 2, "two snapshots")
    taken = len(list(top.glob("segment-*")))
    until(lambda: len(list(top.glob("segment-*"))) > taken + 3, "it goes on")
    first.kill()  # nobody takes another snapshot
    first.communicate(timeout=SECONDS)
    job = cli.job("filed")
    job.kill(signal.SIGKILL)
    job.wait(SECONDS)
    (top / "segment-0").write_text("overwritten")
    (top / "segment-of-another").write_text("added")
    words[words.index("--")] = "--data=/srv"
    words.insert(words.index("--data=/srv") + 1, "--")
    status, after, said = ended(cli.start(*words))
    assert status == 0 and "was restored from" in said, said
    assert "not among them: /srv" in said and str(top) not in said.partition("not among")[2]
    assert after[-1] == "line 119" and after[0] != "line 0"
    assert {path.name: path.read_text() for path in top.iterdir()} == {
        "count": "120",
        **{f"segment-{number}": f"{number}\n" * 1000 for number in range(120)},
    }
