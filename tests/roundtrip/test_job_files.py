"""Files of a real job: a restore that fails or is killed leaves them as they were, one that runs
has put them back.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from icecore.errors import RestoreFailed
from icecore.events import Event, Sink, discard
from icecore.host.jobs.registry import Registry
from icecore.restorer.files.file_recovery import recover
from icecore.restorer.guard.guard_process import descendants
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import check, restore
from icecore.restorer.restored import Restored
from icecore.restorer.tree import Tree
from tests import zygote
from tests.host.target import eventually
from tests.restorer.criu_place import await_gone
from tests.restorer.job_file_places import look
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = pytest.mark.criu

#: Has files open for reading and writing, and appends to one that lies in a directory of its own;
#: ends once a file is there.
JOB = """
import os, sys, time
home = sys.argv[1]
data = open(f"{home}/data", "r+b", buffering=0)
log = open(f"{home}/own/log", "ab", buffering=0)
memory = bytearray(os.urandom(4 << 20))
print("there", flush=True)
while not os.path.exists(f"{home}/../finish"):
    time.sleep(0.01)
data.write(b"by the restored job\\n")
log.write(b"by the restored job\\n")
sys.exit(7)
"""
THEN = b"what the job's file held\n" * 1000


@dataclass
class Stopped:
    """A job that was dumped and ended, whose files are newer now."""

    trip: Trip
    registry: Registry
    snapshot: str
    home: Path

    def restore(self, emit: Sink = discard, **options: object) -> Restored:
        chosen = RestoreOptions(**options)  # type: ignore[arg-type]
        return restore(
            self.trip.repository,
            self.trip.loop,
            self.snapshot,
            chosen,
            criu=self.trip.criu,
            registry=self.registry,
            emit=emit,
        )

    def change(self, mode: str) -> None:
        """Make the files newer, in a way that ``--files`` of this mode puts right."""
        with open(self.home / "data", "ab") as file:
            file.write(b"newer\n" * 100)
        if mode == "restore":
            (self.home / "data").write_bytes(b"newer than the snapshot\n")
            (self.home / "data").chmod(0o600)
            (self.home / "own" / "log").unlink()
            (self.home / "own").rmdir()

    @property
    def journals(self) -> list[Path]:
        folder = self.registry.state / "restores"
        return sorted(folder.iterdir()) if folder.exists() else []

    def assert_runs_with_old_files(self, restored: Restored) -> None:
        restored.wait_resident(60)
        assert (self.home / "data").read_bytes() == THEN
        assert self.journals == [] and sorted(os.listdir(self.home)) == ["data", "own"]
        assert os.listdir(self.home / "own") == ["log"]
        (self.home.parent / "finish").touch()
        assert restored.wait(30).exit_code == 7
        assert (self.home / "data").read_bytes() == b"by the restored job\n" + THEN[20:]
        assert (self.home / "own" / "log").read_bytes() == b"the log\nby the restored job\n"


@pytest.fixture
def stopped(trip: Trip, tmp_path: Path) -> Iterator[Stopped]:
    registry = Registry(tmp_path / "jobs")
    home = tmp_path / "place" / "home"
    (home / "own").mkdir(parents=True)
    (home / "data").write_bytes(THEN)
    (home / "own" / "log").write_bytes(b"the log\n")
    job = registry.start([sys.executable, "-c", JOB, str(home)], name="files", cwd=tmp_path)
    try:
        until = time.monotonic() + 20
        while "there" not in job.log_path("stdout").read_text():
            assert time.monotonic() < until, job.log_path("stderr").read_text()
            time.sleep(0.01)
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        yield Stopped(trip, registry, snapshot, home)
    finally:
        for one in registry.instances():
            if one.alive:
                one.kill(9)
                one.wait(10)


@pytest.fixture
def workdir() -> Iterator[str]:
    """On tmpfs; what restores leave there whose guard was killed, too, goes with it."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="icecore-test-") as folder:
        yield folder


MODES = ["full", "lazy"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("files", ["restore", "truncate"])
def test_a_job_that_runs_has_its_old_files(stopped: Stopped, mode: str, files: str) -> None:
    stopped.change(files)
    found = check(
        stopped.trip.repository,
        stopped.trip.loop,
        stopped.snapshot,
        RestoreOptions(files=files),
        criu=stopped.trip.criu,
    )  # type: ignore[arg-type]
    planned = {Path(action.file.path).name: action.kind for action in found.files.actions}
    assert planned == (
        {"data": "replace", "log": "create"} if files == "restore" else {"data": "truncate"}
    )
    stopped.assert_runs_with_old_files(stopped.restore(mode=mode, files=files))


#: Where a restore is broken off: an event and its state, before the job runs.
STEPS = [
    ("restore.images", "begin"),
    ("restore.images", "end"),
    ("restore.criu", "begin"),
    ("restore.criu", "end"),
    ("restore.memory", "begin"),
]
CASES = [
    *(("full", "restore", step) for step in STEPS),
    *(("lazy", "restore", step) for step in STEPS[1:4]),
    ("full", "truncate", STEPS[3]),
    ("lazy", "truncate", STEPS[1]),
]


@pytest.mark.parametrize(("mode", "files", "step"), CASES)
def test_a_restore_that_fails_leaves_all_files_as_they_were(
    stopped: Stopped, mode: str, files: str, step: tuple[str, str]
) -> None:
    stopped.change(files)
    before = look(stopped.home)

    def emit(event: Event) -> None:
        if (event.name, event.fields.get("state")) == step:
            raise RestoreFailed("broken off")

    with pytest.raises(RestoreFailed, match="broken off"):
        stopped.restore(emit, mode=mode, files=files)
    assert look(stopped.home) == before
    assert stopped.journals == []
    stopped.assert_runs_with_old_files(stopped.restore(mode=mode, files=files))


def test_a_restore_whose_criu_fails_leaves_all_files_as_they_were(stopped: Stopped) -> None:
    stopped.change("restore")
    before = look(stopped.home)
    with pytest.raises(RestoreFailed):
        stopped.restore(criu_plugins="/nowhere", criu_seconds=0.0)
    assert look(stopped.home) == before and stopped.journals == []


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("how", ["interrupted", "no fifo", "criu is killed"])
def test_a_restore_that_fails_after_the_hand_over_and_before_the_job_runs_loses_no_file(
    stopped: Stopped, monkeypatch: pytest.MonkeyPatch, mode: str, how: str
) -> None:
    stopped.change("restore")
    before = look(stopped.home)
    events: list[Event] = []
    resume = Tree.resume

    def fail(tree: Tree, seconds: float) -> int:
        if how == "interrupted":
            raise KeyboardInterrupt
        if how == "no fifo":
            (tree._work / "go").unlink()
        else:
            os.kill(
                tree.daemon.criu_pid, signal.SIGSTOP
            )  # so that it is let go, and ends before it can do anything
            threading.Timer(0.5, os.kill, (tree.daemon.criu_pid, signal.SIGKILL)).start()
        return resume(tree, seconds)

    monkeypatch.setattr(Tree, "resume", fail)
    with pytest.raises((KeyboardInterrupt, FileNotFoundError, RestoreFailed)):
        stopped.restore(events.append, mode=mode)
    assert not any(job.alive for job in stopped.registry.instances())
    if how != "criu is killed":
        assert look(stopped.home) == before and stopped.journals == []
        return
    (kept,) = [path for path in stopped.home.iterdir() if path.name.startswith(".data")]
    assert kept.read_bytes() == b"newer than the snapshot\n"
    assert any(
        str(kept) in str(event.fields["message"])
        for event in events
        if event.name == "restore.warning"
    )


def test_a_restore_that_fails_once_the_job_runs_leaves_the_job_its_files(stopped: Stopped) -> None:
    stopped.change("restore")

    def emit(event: Event) -> None:
        if event.name == "restore.running":
            raise RestoreFailed("broken off")

    with pytest.raises(RestoreFailed, match="broken off"):
        stopped.restore(emit)
    assert (stopped.home / "data").read_bytes() == THEN
    assert stopped.journals == [] and sorted(os.listdir(stopped.home)) == ["data", "own"]


@pytest.mark.parametrize(
    ("mode", "files"), [("full", "restore"), ("lazy", "restore"), ("lazy", "leave")]
)
def test_a_file_that_is_swapped_before_criu_opens_it_is_not_given_to_the_job(
    stopped: Stopped, mode: str, files: str
) -> None:
    """CRIU asks for size and mode only: whoever controls the directory could give the job a file of
    root's.
    """

    def emit(event: Event) -> None:
        if (event.name, event.fields.get("state")) == ("restore.criu", "begin"):
            data = stopped.home / "data"
            data.rename(stopped.home / "away")
            data.write_bytes(THEN[::-1])
            data.chmod((stopped.home / "away").stat().st_mode & 0o7777)

    with pytest.raises(RestoreFailed, match="is not the file that was checked"):
        stopped.restore(emit, mode=mode, files=files)
    assert (stopped.home / "data").read_bytes() == THEN[::-1], "the job did not run"
    assert not any(job.alive for job in stopped.registry.instances())


def _end_scripts(workdir: str) -> None:
    """End CRIU's action scripts below a work directory: one that CRIU started after the look at its
    tree would wait for ever.
    """
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):
                if workdir.encode() in (entry / "cmdline").read_bytes():
                    os.kill(int(entry.name), signal.SIGKILL)


_SCRIPT = """
import sys, time
sys.path.append({tests!r})
from pathlib import Path
from icecore.host.jobs.registry import Registry
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from icecore.store.backend.local import LocalBackend
from icecore.store.runtime.loop import LoopThread
from icecore.store.log.repository import StoredRepository
with LoopThread() as loop:
    repository = loop.run(StoredRepository.open(LocalBackend({repository!r})))
    def emit(event):
        if (event.name, event.fields.get("state")) == {step!r}:
            print("here", flush=True)
            time.sleep(60)
    options = RestoreOptions(mode={mode!r}, files={files!r}, workdir={workdir!r})
    restored = restore(repository, loop, {snapshot!r}, options, registry=Registry(Path({state!r})), emit=emit)
    restored.wait_resident()
    print("runs", flush=True)
"""


@pytest.mark.parametrize("guard", [True, False], ids=["its guard lives", "its guard is killed too"])
@pytest.mark.parametrize(
    ("mode", "files", "step"),
    [
        *CASES[1:],
        ("full", "restore", ("restore.running", None)),
        ("lazy", "restore", ("restore.running", None)),
    ],
)
def test_a_restore_that_is_killed_leaves_files_all_old_or_all_new(
    stopped: Stopped, workdir: str, mode: str, files: str, guard: bool, step: tuple[str, str | None]
) -> None:
    stopped.change(files)
    before = look(stopped.home)
    script = _SCRIPT.format(
        tests=str(Path(__file__).parents[2]),
        repository=str(stopped.trip.work / "repository"),
        step=step,
        snapshot=stopped.snapshot,
        mode=mode,
        files=files,
        state=str(stopped.registry.state),
        workdir=workdir,
    )
    restorer = zygote.program(script, stderr=False)
    tree: list[int] = []
    try:
        assert restorer.stdout is not None and restorer.stdout.readline() == b"here\n"
        tree = descendants(restorer.pid)
        guards = [
            pid for pid in tree if b"guard_process" in Path(f"/proc/{pid}/cmdline").read_bytes()
        ]
        if not guard:
            for pid in guards:  # first, so that it does not see its restorer die
                os.kill(pid, signal.SIGSTOP)
        restorer.kill()
        restorer.wait(10)
        if not guard:
            for pid in reversed(tree):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
    finally:
        restorer.kill()
        restorer.wait(10)
        if not guard:
            _end_scripts(workdir)
    await_gone(tree, 30)
    if guard:
        # Under load, the guard may not have been seen among the processes that have ended.
        assert eventually(lambda: stopped.journals == []), "the guard has put them right"
    else:
        assert len(stopped.journals) == 1
        recover(stopped.registry.state)
        assert stopped.journals == []
    if step[0] == "restore.running":  # the job had its files
        assert (stopped.home / "data").read_bytes() == THEN
        assert sorted(os.listdir(stopped.home)) == ["data", "own"] and os.listdir(
            stopped.home / "own"
        ) == ["log"]
    else:
        assert look(stopped.home) == before


#: Inserts a row into a database with a rollback journal each time a file is there.
DATABASE = """
import os, sqlite3, sys, time
base = sqlite3.connect("base", isolation_level=None)
base.execute("CREATE TABLE rows (number INTEGER)")
for number in range(5):
    while not os.path.exists(f"go{number}"):
        time.sleep(0.01)
    base.execute("INSERT INTO rows VALUES (?)", (number,))
    print(base.execute("SELECT count(*), sum(number) FROM rows").fetchall(), flush=True)
"""


@pytest.mark.parametrize("data", [False, True])
def test_a_database_is_the_file_that_it_was(trip: Trip, tmp_path: Path, data: bool) -> None:
    """SQLite refuses to write to a database whose inode number has changed."""
    registry = Registry(tmp_path / "jobs")
    home = tmp_path / "home"
    home.mkdir()
    words = [sys.executable, "-c", DATABASE]
    job = registry.start(words, name="base", cwd=home, data=[home] if data else [])

    def inserts(number: int) -> None:
        (home / f"go{number}").touch()
        log = job.log_path("stdout")
        assert eventually(lambda: log.read_text().count("\n") > number), job.log_path(
            "stderr"
        ).read_text()

    try:
        inserts(0)
        snapshot = take(trip, job)
        inode = (home / "base").stat().st_ino
        inserts(1)
        for _ in range(2):
            if job.alive:
                job.kill(signal.SIGKILL)
            job.wait(10)
            restored = bring_back(trip, registry, snapshot)
            restored.wait_resident(60)
            assert restored.job is not None
            job = restored.job
            for number in range(1, 5):
                inserts(number)
            assert job.wait(30).code == 0
            assert (home / "base").stat().st_ino == inode
            assert job.log_path("stdout").read_text().splitlines()[-1] == "[(5, 10)]"
    finally:
        for one in registry.instances():
            if one.alive:
                one.kill(signal.SIGKILL)
                one.wait(10)
