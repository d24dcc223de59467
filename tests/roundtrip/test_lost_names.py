"""Open files that lost their name, which another file has now."""

from __future__ import annotations

import json
import signal
import sys
from pathlib import Path

import pytest

from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = pytest.mark.criu

#: Replaces its file twice while it is open, as an update of packages does: each older one has
#: another hard link. It has the oldest open twice, and prints what it sees on each USR1.
JOB = """
import json, mmap, os, signal, sys
mode = os.O_RDWR if sys.argv[1] == "write" else os.O_RDONLY
opened = []
for number in (1, 2, 3):
    with open("new", "w") as file:
        file.write(f"content {number}")
    if number > 1:
        os.link("file", f"file.{number - 1}")
    os.rename("new", "file")
    opened.append(os.open("file", mode))
    if number == 1:
        opened.append(os.open("file", os.O_RDWR))
mapped = mmap.mmap(opened[2], 0, prot=mmap.PROT_READ)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
while True:
    seen = [os.pread(one, 100, 0).decode() for one in opened] + [mapped[:].decode()]
    print(json.dumps([seen, [os.fstat(one).st_ino for one in opened]]), flush=True)
    signal.sigwait([signal.SIGUSR1])
"""
SEEN = ["content 1", "content 1", "content 2", "content 3", "content 2"]


def inodes(job: Job, lines: int) -> list[int]:
    """Require that the job sees each file's own content; return the inodes of its descriptors."""
    path = job.log_path("stdout")
    assert eventually(lambda: len(path.read_text().splitlines()) >= lines)
    seen, found = json.loads(path.read_text().splitlines()[-1])
    assert seen == SEEN
    return list(found)


@pytest.mark.parametrize("others", ["kept", "gone"])
@pytest.mark.parametrize("mode", ["write", "read"])
def test_files_whose_name_another_file_has(
    trip: Trip, tmp_path: Path, mode: str, others: str
) -> None:
    registry, folder = Registry(tmp_path / "jobs"), tmp_path / "job"
    folder.mkdir()
    job = registry.start([sys.executable, "-c", JOB, mode], name="replaced", cwd=folder)
    try:
        first, _, second, third = inodes(job, 1)
        assert len({first, second, third}) == 3
        take(trip, job)
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        if others == "gone":
            (folder / "file.1").unlink()
            (folder / "file.2").unlink()
        else:
            (folder / "file.1").write_text("changed 1")
        job = bring_back(trip, registry, snapshot, files="restore").job or job
        before = len(job.log_path("stdout").read_text().splitlines())
        job.kill(signal.SIGUSR1)
        one, same, two, three = inodes(job, before + 1)
        assert one == same and len({one, two, three}) == 3
        if others == "kept":
            assert (one, two) == (first, second)
            assert (folder / "file.1").read_text() == "content 1"
        assert sorted(path.name for path in folder.iterdir()) == sorted(
            ["file", *(["file.1", "file.2"] if others == "kept" else [])]
        )
        assert (folder / "file").read_text() == "content 3"
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)


#: Has one file open under a name that it keeps, and twice under one that it lost.
LINKED = """
import json, os, signal
with open("kept", "w") as file:
    file.write("content")
os.link("kept", "lost")
opened = [os.open(name, os.O_RDWR) for name in ("kept", "lost", "lost")]
os.unlink("lost")
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
while True:
    seen = [os.pread(one, 100, 0).decode() for one in opened]
    print(json.dumps([seen, [os.fstat(one).st_ino for one in opened]]), flush=True)
    signal.sigwait([signal.SIGUSR1])
"""


def test_a_file_that_lost_one_of_the_names_under_which_it_is_open(
    trip: Trip, tmp_path: Path
) -> None:
    registry, folder = Registry(tmp_path / "jobs"), tmp_path / "job"
    folder.mkdir()
    job = registry.start([sys.executable, "-c", LINKED], name="linked", cwd=folder)
    try:
        assert eventually(lambda: job.log_path("stdout").read_text().count("\n") == 1)
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        (folder / "kept").write_text("changed")
        job = bring_back(trip, registry, snapshot, files="restore").job or job
        job.kill(signal.SIGUSR1)
        path = job.log_path("stdout")
        assert eventually(lambda: path.read_text().count("\n") == 2)
        seen, numbers = json.loads(path.read_text().splitlines()[-1])
        assert seen == ["content"] * 3 and len(set(numbers)) == 1
        assert [one.name for one in folder.iterdir()] == ["kept"]
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)
