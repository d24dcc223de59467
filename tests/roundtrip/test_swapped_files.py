"""A job's file that somebody swaps for a link before CRIU opens it is not given to the job,
whatever the link leads to.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from icecore.errors import RestoreFailed
from icecore.events import Event, discard
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.restorer.restored import Restored
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = pytest.mark.criu

#: Has files open and mapped that CRIU opens by their paths, and others that it makes itself; ends
#: once a file is there.
JOB = """
import ctypes, mmap, os, sys, time
home = sys.argv[1]
data = open(f"{home}/data", "r+b", buffering=0)
empty = open(f"{home}/empty", "r+b", buffering=0)
library = ctypes.CDLL(None)
library.mmap.restype = ctypes.c_void_p
for name, flags in ("mapped", mmap.MAP_SHARED), ("private", mmap.MAP_PRIVATE):
    with open(f"{home}/{name}", "r+b") as file:  # Python's own mappings keep a descriptor
        assert library.mmap(None, ctypes.c_size_t(4096), 3, flags, file.fileno(), ctypes.c_long(0)) != ctypes.c_void_p(-1).value
unnamed = open(f"{home}/unnamed", "w+b", buffering=0)
unnamed.write(b"unnamed")
os.unlink(f"{home}/unnamed")
unnamed_mapping = mmap.mmap(unnamed.fileno(), 7, mmap.MAP_SHARED)
memory = os.memfd_create("own")
os.write(memory, b"in memory")
in_memory = mmap.mmap(memory, 9)
shared = mmap.mmap(-1, 4096)
version = open("/proc/sys/kernel/ostype")
print("there", flush=True)
while not os.path.exists(f"{home}/../finish"):
    time.sleep(0.01)
assert os.pread(unnamed.fileno(), 9, 0) == unnamed_mapping[:] == b"unnamed" and in_memory[:] == b"in memory" and version.read() == "Linux\\n"
sys.exit(7)
"""


class Ended:
    """A job that was dumped and ended."""

    def __init__(self, trip: Trip, tmp_path: Path) -> None:
        self.trip, self.registry, self.home = (
            trip,
            Registry(tmp_path / "jobs"),
            tmp_path / "place" / "home",
        )
        self.home.mkdir(parents=True)
        self.home.chmod(0o777)
        for name, size in (("data", 9), ("empty", 0), ("mapped", 4096), ("private", 4096)):
            (self.home / name).write_bytes(bytes(size))
            (self.home / name).chmod(0o600)
        self.job = self.registry.start(
            [sys.executable, "-c", JOB, str(self.home)], name="swapped", cwd=tmp_path
        )

    def dump(self) -> None:
        self._await_output(self.job)
        self.snapshot = take(self.trip, self.job, stop=True)
        self.job.wait(20)

    @staticmethod
    def _await_output(job: Job) -> None:
        until = time.monotonic() + 20
        while "there" not in job.log_path("stdout").read_text():
            assert time.monotonic() < until, job.log_path("stderr").read_text()
            time.sleep(0.01)

    def restore(
        self, meanwhile: Callable[[], None] | None = None, mode: str = "full", files: str = "leave"
    ) -> Restored:
        def emit(event: Event) -> None:
            if meanwhile is not None and (event.name, event.fields.get("state")) == (
                "restore.criu",
                "begin",
            ):
                meanwhile()

        return bring_back(
            self.trip,
            self.registry,
            self.snapshot,
            emit if meanwhile else discard,
            mode=mode,
            files=files,
        )

    def swap(self, name: str, target: str) -> None:
        """What who controls the directory can do."""
        (self.home / name).rename(self.home / "away")
        (self.home / name).symlink_to(target)


@pytest.fixture
def ended(trip: Trip, tmp_path: Path) -> Iterator[Ended]:
    made = Ended(trip, tmp_path)
    try:
        made.dump()
        yield made
    finally:
        for job in made.registry.instances():
            if job.alive:
                job.kill(9)
                with suppress(TimeoutError):
                    job.wait(10)


@pytest.mark.parametrize("mode", ["full", "lazy"])
@pytest.mark.parametrize("files", ["leave", "restore"])
def test_what_criu_makes_itself_is_no_other_file(ended: Ended, mode: str, files: str) -> None:
    restored = ended.restore(mode=mode, files=files)
    restored.wait_resident(30)
    (ended.home.parent / "finish").touch()
    assert restored.wait(20).exit_code == 7, (
        restored.job and restored.job.log_path("stderr").read_text()
    )


@pytest.mark.parametrize(
    "attack",
    [
        "memory of a process",
        "a file without a name",
        "a memfd",
        "a mapped file",
        "a file mapped privately",
    ],
)
def test_a_file_that_is_swapped_for_a_link_is_not_given_to_the_job(
    ended: Ended, tmp_path: Path, attack: str
) -> None:
    secret = tmp_path / "secret"
    name, size = {
        "a mapped file": ("mapped", 4096),
        "a file mapped privately": ("private", 4096),
    }.get(attack, ("data", 9))
    secret.write_bytes(b"s" * size)
    secret.chmod(0o600)
    descriptor = os.memfd_create("own") if attack == "a memfd" else os.open(secret, os.O_RDWR)
    try:
        target = str(secret)
        if attack == "memory of a process":
            name, target = "empty", f"/proc/{os.getpid()}/mem"
        elif attack == "a file without a name":
            secret.unlink()
            target = f"/proc/{os.getpid()}/fd/{descriptor}"
        elif attack == "a memfd":
            os.write(descriptor, b"s" * size)
            os.fchmod(descriptor, 0o600)
            target = f"/proc/{os.getpid()}/fd/{descriptor}"
        with pytest.raises(RestoreFailed, match="is not the file that was checked"):
            ended.restore(lambda: ended.swap(name, target))
    finally:
        os.close(descriptor)
    assert not any(job.alive for job in ended.registry.instances())
