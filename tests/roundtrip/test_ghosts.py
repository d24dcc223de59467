"""Open files and directories that no longer have a name: each restore creates them under names of its
own.
"""

from __future__ import annotations

import ctypes
import errno
import json
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from icecore.errors import RestoreFailed
from icecore.events import Event
from icecore.host.criu.libraries import RESTORE_LIBRARY
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.restorer.files.ghost_names import name_ghosts
from icecore.restorer.phases import files
from tests.host.target import eventually
from tests.restorer.job_file_places import look
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = pytest.mark.criu

_HERE = -100  # AT_FDCWD

#: Keeps files and directories open that it has removed: files, one of them with a long name and one
#: together with its directory; and a directory together with its parent. On each USR1, it prints what
#: it sees.
JOB = """
import json, os, shutil, signal
opened = []
for number in range(20):
    os.makedirs("gone", exist_ok=True)
    name = {18: 250 * "x", 19: "gone/19"}.get(number, str(number))
    opened.append(os.open(name, os.O_RDWR | os.O_CREAT))
    os.write(opened[-1], name.encode())
    os.unlink(name)
os.makedirs("gone/below")
folders = [os.open(name, os.O_RDONLY) for name in ("gone/below", "gone", "gone")]
os.fchmod(folders[1], 0o710)
shutil.rmtree("gone")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("begun", flush=True)
while True:
    signal.sigwait([signal.SIGUSR1])
    seen = [os.pread(one, 100, 0).decode() for one in opened]
    found = [os.fstat(one) for one in folders]
    names = [os.listdir(one) for one in folders]
    print(json.dumps([seen, [oct(one.st_mode) for one in found], names,
        [one.st_nlink for one in found], [one.st_ino for one in found],
        [os.readlink(f"/proc/self/fd/{one}") for one in opened + folders]]), flush=True)
"""


@dataclass
class Ghosts:
    """A snapshot of a job that has ended. The job's directory is empty."""

    trip: Trip
    registry: Registry
    folder: Path
    snapshot: str

    def bring_back(self, name: str = "") -> Job:
        job = bring_back(self.trip, self.registry, self.snapshot, instance=name or None).job
        assert job is not None
        return job


@pytest.fixture
def ghosts(trip: Trip, tmp_path: Path) -> Iterator[Ghosts]:
    registry, folder = Registry(tmp_path / "jobs"), tmp_path / "job"
    folder.mkdir()
    job = registry.start([sys.executable, "-c", JOB], name="ghosts", cwd=folder)
    try:
        assert eventually(lambda: job.log_path("stdout").read_text() == "begun\n")
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        assert not any(folder.iterdir())
        yield Ghosts(trip, registry, folder, snapshot)
    finally:
        for one in registry.instances():
            end(one)


def end(job: Job) -> None:
    if job.alive:
        job.kill(signal.SIGKILL)
        job.wait(20)


def require_all(job: Job, folder: Path) -> None:
    """Require that the job still has its removed files and directories open."""
    path = job.log_path("stdout")
    before = path.read_text().count("\n")
    job.kill(signal.SIGUSR1)
    assert eventually(lambda: path.read_text().count("\n") == before + 1)
    seen, modes, names, links, inodes, paths = json.loads(path.read_text().splitlines()[-1])
    assert seen == [*map(str, range(18)), (250 * "x")[:100], "gone/19"]
    assert modes == ["0o40755", "0o40710", "0o40710"]
    assert names == [[]] * 3 and links == [0] * 3
    assert inodes[0] != inodes[1] == inodes[2]
    assert all(path.startswith(f"{folder}/") and path.endswith(" (deleted)") for path in paths)
    assert all(path.count(".ghost") <= 1 for path in paths), "a name has grown"


def test_restores_of_one_snapshot_at_the_same_time(ghosts: Ghosts) -> None:
    with ThreadPoolExecutor(4) as pool:
        jobs = list(pool.map(ghosts.bring_back, ("one", "two", "three", "four")))
    for job in jobs:
        require_all(job, ghosts.folder)
    assert not any(ghosts.folder.iterdir())


@pytest.mark.parametrize("what", ["empty", "full"])
def test_names_that_others_have_now(ghosts: Ghosts, what: str) -> None:
    """By itself, CRIU would use an empty directory with the old name, change it, and remove it."""
    gone = ghosts.folder / "gone"
    gone.mkdir(mode=0o750)
    for name in ("0", "1", *(["gone/19", "gone/kept"] if what == "full" else [])):
        (ghosts.folder / name).write_text("another's")
    before = look(ghosts.folder)
    first, second = ghosts.bring_back("one"), ghosts.bring_back("two")
    require_all(first, ghosts.folder)
    require_all(second, ghosts.folder)
    ghosts.snapshot = take(ghosts.trip, first)
    require_all(ghosts.bring_back("three"), ghosts.folder)
    assert look(ghosts.folder) == before


def test_what_a_killed_criu_leaves_is_removed(
    ghosts: Ghosts, monkeypatch: pytest.MonkeyPatch
) -> None:
    names: list[str] = []

    def name(*arguments: Any, **options: Any) -> list[str]:
        names.extend(name_ghosts(*arguments, **options))
        return names

    def emit(event: Event) -> None:
        if (event.name, event.fields.get("state")) == ("restore.criu", "begin"):
            Path(names[0]).touch()
            Path(names[-1]).mkdir()
            raise RestoreFailed("killed")

    monkeypatch.setattr(files, "name_ghosts", name)
    ghosts.folder.rmdir()
    with pytest.raises(RestoreFailed, match="killed"):
        bring_back(ghosts.trip, ghosts.registry, ghosts.snapshot, emit)
    assert len(names) == 23 and not ghosts.folder.exists()


#: Keeps two removed files open: one in a directory that it uses on USR1, one whose directory it also
#: removed. Its working directory was removed together with the parent.
IN_DIRECTORY = """
import os, signal
os.makedirs("kept", 0o750); os.makedirs("kept/gone"); os.makedirs("gone/below")
files = [os.open(f"{name}/file", os.O_RDWR | os.O_CREAT) for name in ("kept", "kept/gone")]
os.unlink("kept/file"); os.unlink("kept/gone/file")
os.rmdir("kept/gone")
top = os.getcwd()
os.chdir("gone/below")
os.rmdir(f"{top}/gone/below"); os.rmdir(f"{top}/gone")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("begun", flush=True)
signal.sigwait([signal.SIGUSR1])
os.mkdir(f"{top}/kept/new")
print("made", flush=True)
signal.pause()
"""


def test_the_directory_of_a_removed_file_is_made_again(trip: Trip, tmp_path: Path) -> None:
    registry, folder = Registry(tmp_path / "jobs"), tmp_path / "job"
    folder.mkdir()
    job = registry.start([sys.executable, "-c", IN_DIRECTORY], name="kept", cwd=folder)
    try:
        path = job.log_path("stdout")
        assert eventually(lambda: path.read_text() == "begun\n")
        before = look(tmp_path / "job", inodes=False)
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        (folder / "kept").rmdir()
        job = bring_back(trip, registry, snapshot).job or job
        assert look(folder, inodes=False) == before, "something else was created"
        job.kill(signal.SIGUSR1)
        path = job.log_path("stdout")
        assert eventually(lambda: path.read_text() == "begun\nmade\n")
    finally:
        end(job)


def test_a_name_that_another_restore_uses_for_a_moment(tmp_path: Path) -> None:
    linkat = ctypes.CDLL(str(RESTORE_LIBRARY), use_errno=True).linkat
    ghost, name, other = (tmp_path / one for one in ("ghost", "name.cr_link", "name"))
    for one in (ghost, name, other):
        one.write_text(one.name)
    arguments = (_HERE, bytes(ghost), _HERE)
    assert linkat(*arguments, bytes(other), 0) == -1 and ctypes.get_errno() == errno.EEXIST
    with ThreadPoolExecutor(1) as pool:
        linked = pool.submit(linkat, *arguments, bytes(name), 0)
        time.sleep(0.1)
        assert not linked.done()
        name.unlink()
        assert linked.result(20) == 0
    assert name.samefile(ghost) and other.read_text() == "name"
