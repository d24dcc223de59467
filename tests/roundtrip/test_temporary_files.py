"""Temporary files that a job has made and only reads: libraries pass arrays to processes so."""

from __future__ import annotations

import os
import secrets
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.dumper.observe.temporary import TemporaryFiles
from icecore.errors import RestoreRefused
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.store.format.manifest import OpenFile
from tests.host.target import eventually, target
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = pytest.mark.criu

#: Makes a file (or takes an existing one), maps it for reading, and prints the number in it on each
#: USR1. On USR2, replaces the file with another.
JOB = """
import mmap, os, signal, sys
def make(number):
    os.makedirs(os.path.dirname(sys.argv[1]), exist_ok=True)
    with open(sys.argv[1], "wb") as file:
        file.write(number.to_bytes(4096, "little"))
    with open(sys.argv[1], "rb") as file:
        return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
if sys.argv[2] == "own":
    memory = make(1)
else:
    with open(sys.argv[1], "rb") as file:
        memory = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1, signal.SIGUSR2])
while True:
    print(int.from_bytes(memory, "little"), flush=True)
    if signal.sigwait([signal.SIGUSR1, signal.SIGUSR2]) == signal.SIGUSR2:
        memory.close()
        os.unlink(sys.argv[1])
        os.rmdir(os.path.dirname(sys.argv[1]))
        memory = make(2)
"""


@pytest.fixture(params=["/dev/shm", "/tmp", "/var/tmp", "TMPDIR"])
def file(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    place = tmp_path if request.param == "TMPDIR" else Path(request.param)
    folder = place / f"icecore-test-{secrets.token_hex(4)}"
    yield folder / "array"
    if folder.exists():
        (folder / "array").unlink(missing_ok=True)
        folder.rmdir()


def start(tmp_path: Path, file: Path, whose: str) -> Job:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-c", JOB, str(file), whose]
    return Registry(tmp_path / "jobs").start(
        command, name="reads", cwd=tmp_path, environment=environment
    )


def said(job: Job) -> list[str]:
    return job.log_path("stdout").read_text().split()


def says(job: Job, number: int, told: int = signal.SIGUSR1) -> bool:
    """Send the job a signal, and return whether it then prints this number."""
    before = len(said(job))
    job.kill(told)
    assert eventually(lambda: len(said(job)) > before)
    return said(job)[-1] == str(number)


def recorded(trip: Trip, snapshot: str, path: Path) -> OpenFile:
    (one,) = [
        one
        for one in trip.loop.run(trip.repository.manifest(snapshot)).files
        if one.path == str(path)
    ]
    return one


def end(job: Job) -> None:
    if job.alive:
        job.kill(signal.SIGKILL)
        job.wait(20)


def test_it_comes_back_once_the_job_has_removed_it(trip: Trip, tmp_path: Path, file: Path) -> None:
    job = start(tmp_path, file, "own")
    try:
        assert eventually(lambda: said(job) == ["1"])
        first = take(trip, job)
        one = recorded(trip, first, file)
        assert (one.policy, one.temporary, one.writable) == ("content", True, False)
        assert says(job, 2, signal.SIGUSR2)
        second = take(trip, job, stop=True)
        job.wait(20)
        registry = Registry(tmp_path / "jobs")
        with pytest.raises(RestoreRefused, match="modified since"):  # it may be another job's
            bring_back(trip, registry, first)
        assert file.read_bytes() == (2).to_bytes(4096, "little")
        for snapshot, number in ((first, 1), (second, 2)):
            file.unlink()
            file.parent.rmdir()
            job = bring_back(trip, registry, snapshot).job or job
            assert says(job, number)
            again = take(trip, job, stop=True, parent=snapshot)
            job.wait(20)
            assert recorded(trip, again, file).temporary, "it is older than the processes"
            file.unlink()
            job = bring_back(trip, registry, again).job or job
            assert says(job, number)
            end(job)
    finally:
        end(job)


def test_a_file_that_was_there_before_is_not_stored(trip: Trip, tmp_path: Path) -> None:
    file = tmp_path / "given"
    file.write_bytes((3).to_bytes(4096, "little"))
    job = start(tmp_path, file, "given")
    try:
        assert eventually(lambda: said(job) == ["3"])
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        assert recorded(trip, snapshot, file).policy == "checked"
        file.unlink()
        with pytest.raises(RestoreRefused, match="it is missing"):
            bring_back(trip, Registry(tmp_path / "jobs"), snapshot)
    finally:
        end(job)


def test_a_file_in_shared_memory_of_the_jobs_own_is_not_stored_twice(
    trip: Trip, tmp_path: Path
) -> None:
    file = Path("/dev/shm/icecore-test/array")
    job = Registry(tmp_path / "jobs").start(
        [sys.executable, "-c", JOB, str(file), "own"],
        name="reads",
        cwd=tmp_path,
        isolation=Isolation(root=True),
    )
    try:
        assert eventually(lambda: said(job) == ["1"])
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        assert not file.exists() and not recorded(trip, snapshot, file).temporary
        job = bring_back(trip, Registry(tmp_path / "jobs"), snapshot).job or job
        assert says(job, 1)
    finally:
        end(job)


#: Makes three files, of which the two smaller ones have as many bytes together as may be stored.
SEVERAL = """
import os, signal, sys, tempfile
made = [tempfile.NamedTemporaryFile() for _ in range(3)]
for file, size in zip(made, (96 << 20, 200 << 20, 160 << 20)):
    file.truncate(size)
opened = [os.open(file.name, os.O_RDONLY) for file in made]
for file in made:
    os.close(file.file.fileno())
print(*(file.name for file in made), flush=True)
signal.pause()
"""


def test_the_smallest_are_stored(trip: Trip, tmp_path: Path) -> None:
    command = [sys.executable, "-c", SEVERAL]
    job = Registry(tmp_path / "jobs").start(command, name="several", cwd=tmp_path)
    paths: list[Path] = []
    try:
        assert eventually(lambda: len(said(job)) == 3)
        paths = [Path(word) for word in said(job)]
        snapshot = take(trip, job)
        stored = [recorded(trip, snapshot, path).policy for path in paths]
        assert stored == ["content", "checked", "content"]
    finally:
        end(job)
        for path in paths:
            path.unlink(missing_ok=True)


def test_which_files_are_temporary() -> None:
    code = """
    import tempfile
    made = tempfile.NamedTemporaryFile()
    say(made.name); hear()
    made.truncate((256 << 20) + 1)
    say("large"); hear()
    os.unlink(made.name); open(made.name, "w")
    say("another"); hear()
    """
    with target(code) as it:
        (name,) = it.hear()
        made = Path(name).stat()

        def is_temporary(about: os.stat_result, path: str = name) -> bool:
            return TemporaryFiles([it.pid]).contain(path, about)

        assert is_temporary(made)
        assert not is_temporary(made, "/etc/passwd") and not is_temporary(made, "/tmp/none")
        it.tell("go on")
        it.hear()
        assert not is_temporary(Path(name).stat()), "it is large"
        it.tell("go on")
        it.hear()
        assert not is_temporary(made), "another file has its name"
        Path(name).unlink()
