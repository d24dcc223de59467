"""Open files that lost their name, which another file has now."""

from __future__ import annotations

import json
import secrets
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from icecore.events import Event
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
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
        assert sorted(path.name for path in folder.iterdir()) == ["file", "file.1", "file.2"]
        assert [(folder / name).stat().st_ino for name in ("file.1", "file.2")] == [one, two]
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


#: Has a named semaphore, as `multiprocessing` does unless it forks. glibc creates and maps it under
#: a temporary name, and then links it to its final name. The job acquires it once. On each USR1, it
#: prints whether another process, which opens it by name, can acquire it (False: it is taken).
NAMED = """
import multiprocessing, os, signal, sys
def look(lock, out):
    out.send(lock.acquire(block=False))
if __name__ == "__main__":
    context = multiprocessing.get_context("spawn")
    lock = context.Lock()
    lock.acquire()
    print("/dev/shm/sem." + lock._semlock.name.lstrip("/"), flush=True)
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
    while True:
        signal.sigwait([signal.SIGUSR1])
        ends = context.Pipe()
        child = context.Process(target=look, args=(lock, ends[1]))
        child.start()
        print(ends[0].recv() if ends[0].poll(20) else "no answer", flush=True)
        child.join()
"""


def named(trip: Trip, folder: Path, isolation: Isolation | None = None) -> tuple[Job, Path]:
    """Start the job; return it and the path of its semaphore."""
    script = folder / "named.py"
    script.write_text(NAMED)
    job = Registry(folder / "jobs").start(
        [sys.executable, str(script)], name="named", cwd=folder, isolation=isolation
    )
    assert eventually(lambda: len(said(job)) == 1)
    return job, Path(said(job)[0])


def said(job: Job) -> list[str]:
    return job.log_path("stdout").read_text().split()


def is_taken(job: Job) -> bool:
    """Whether another process finds the semaphore taken."""
    before = len(said(job))
    job.kill(signal.SIGUSR1)
    assert eventually(lambda: len(said(job)) > before, seconds=30)
    return said(job)[-1] == "False"


@pytest.mark.parametrize("stop", [True, False])
def test_a_semaphore_has_its_name_again(trip: Trip, tmp_path: Path, stop: bool) -> None:
    """Its name may be unchanged, gone, taken by another file, or left by a killed instance."""
    job, name = named(trip, tmp_path)
    try:
        assert is_taken(job)
        snapshot = take(trip, job, stop=stop)
        if not stop:
            job.kill(signal.SIGKILL)
        job.wait(20)
        for now in ("same", "gone", "another", "that of the last instance"):
            if now in ("gone", "another"):
                name.unlink()
            if now == "another":
                name.write_bytes(bytes(32))
            job = bring_back(trip, Registry(tmp_path / "jobs"), snapshot).job or job
            assert is_taken(job), now
            job.kill(signal.SIGKILL)
            job.wait(20)
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)
        name.unlink(missing_ok=True)


#: Has a file open in shared memory under a name that it lost. It has two others.
TWO_NAMES = """
import os, signal, sys
first, second, lost = sys.argv[1:]
file = os.open(lost, os.O_RDWR | os.O_CREAT)
os.write(file, b"content")
os.link(lost, first)
os.link(lost, second)
os.unlink(lost)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
print("begun", flush=True)
while True:
    signal.sigwait([signal.SIGUSR1])
    print(os.pread(file, 100, 0).decode(), os.fstat(file).st_ino, flush=True)
"""


@pytest.mark.parametrize(
    ("place", "left"),
    [
        ("memory", "both"),
        ("memory", "first"),
        ("memory", "none"),
        ("memory", "others"),
        ("disk", "second"),
        ("disk", "others"),
    ],
)
def test_a_file_with_two_other_names(trip: Trip, tmp_path: Path, place: str, left: str) -> None:
    folder = Path("/dev/shm" if place == "memory" else tmp_path)
    prefix = f"icecore-test-{secrets.token_hex(4)}"
    first, second, lost = (folder / f"{prefix}.{name}" for name in ("first", "second", "lost"))
    registry = Registry(tmp_path / "jobs")
    command = [sys.executable, "-c", TWO_NAMES, *map(str, (first, second, lost))]
    job = registry.start(command, name="two", cwd=tmp_path)
    try:
        assert eventually(lambda: said(job) == ["begun"])
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        for name, kept in ((first, ("both", "first")), (second, ("both", "second"))):
            if left == "others":
                made = folder / f"{prefix}.made"
                made.write_text("another's")
                made.rename(name)
            elif left not in kept:
                name.unlink()
        for time in (1, 2):
            job = bring_back(trip, registry, snapshot).job or job
            before = len(said(job))
            job.kill(signal.SIGUSR1)
            assert eventually(lambda: len(said(job)) == before + 2)  # noqa: B023
            if time == 1:
                job.kill(signal.SIGKILL)
                job.wait(20)
        content, inode = said(job)[-2:]
        assert content == "content" and not lost.exists()
        for name in (first, second):
            assert name.stat().st_ino == int(inode) and name.read_text() == content
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)
        for name in (first, second):
            name.unlink(missing_ok=True)


def test_a_semaphore_in_a_private_root(trip: Trip, tmp_path: Path) -> None:
    job, _ = named(trip, tmp_path, Isolation(root=True))
    try:
        snapshot = take(trip, job)
        job.kill(signal.SIGKILL)
        job.wait(20)
        job = bring_back(trip, Registry(tmp_path / "jobs"), snapshot).job or job
        assert is_taken(job)
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)


def test_jobs_with_semaphores_come_back_at_the_same_time(trip: Trip, tmp_path: Path) -> None:
    """CRIU gives links of different jobs the same names, and the jobs share /dev/shm."""
    jobs: list[Job] = []
    names, snapshots, links = [], [], []
    try:
        for number in range(3):
            folder = tmp_path / str(number)
            folder.mkdir()
            job, name = named(trip, folder)
            jobs.append(job)
            names.append(name)
            snapshots.append(take(trip, job))
            manifest = trip.loop.run(trip.repository.manifest(snapshots[-1]))
            links += [one.path for one in manifest.files if one.links == [str(name)]]
            job.kill(signal.SIGKILL)
            job.wait(20)
        assert len(set(links)) == 3, "each has a name of its own"

        def restore(number: int) -> None:
            registry = Registry(tmp_path / str(number) / "jobs")
            restored = bring_back(trip, registry, snapshots[number]).job
            assert restored is not None
            jobs[number] = restored

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(restore, range(3)))
        assert [is_taken(job) for job in jobs] == [True] * 3
        assert not any(Path(link).exists() for link in links)
    finally:
        for job in jobs:
            if job.alive:
                job.kill(signal.SIGKILL)
                job.wait(20)
        for name in names:
            name.unlink(missing_ok=True)


#: Creates a semaphore as sem_open(3) does, but slowly.
MAKING = """
import os, sys, time
made, name = sys.argv[1:]
file = os.open(made, os.O_RDWR | os.O_CREAT | os.O_EXCL)
os.write(file, bytes(32))
os.link(made, name)
print("begun", flush=True)
time.sleep(1.5)
os.unlink(made)
time.sleep(1000)
"""


def test_a_semaphore_that_is_being_created(trip: Trip, tmp_path: Path) -> None:
    made, name = (Path(f"/dev/shm/sem.{secrets.token_hex(size)}") for size in (3, 8))
    registry = Registry(tmp_path / "jobs")
    events: list[Event] = []
    job = registry.start([sys.executable, "-c", MAKING, str(made), str(name)], name="making")
    try:
        assert eventually(lambda: bool(said(job)))
        snapshot = take(trip, job, stop=True, emit=events.append)
        assert any(event.name == "dump.retry" for event in events)
        job.wait(20)
        name.unlink()
        job = bring_back(trip, registry, snapshot).job or job
        assert name.exists() and not made.exists()
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)
        for path in (made, name):
            path.unlink(missing_ok=True)
