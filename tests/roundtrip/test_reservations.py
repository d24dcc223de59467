"""Address space that a job has only reserved costs neither memory nor a snapshot, and comes back."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from typing import Literal

import pytest

from icecore.dumper.dump import dump
from icecore.dumper.target import Target
from icecore.host.criu.libraries import CRIU_LIBRARY
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(not CRIU_LIBRARY.exists(), reason="needs a compiler"),
]

#: Reserves, touches the first, a middle and the last page of some mappings, and prints a digest of
#: them again and again.
RESERVE = """
import ctypes, hashlib, os, sys, time
total, count, access = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3] == "write"
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
size, places = total // count // 4096 * 4096, []
for number in range(count):
    start = libc.mmap(0, size, 3 if access else 0, 0x4022 if access else 0x22, -1, 0)
    assert start != 2**64 - 1
    libc.munmap(start + size - 4096, 4096, 0)  # or they become one
    for at in (0, size // 3 // 4096 * 4096, size - 8192) if number % 100 == 0 else ():
        assert access or libc.mprotect(start + at, 4096, 3) == 0
        ctypes.memmove(start + at, os.urandom(4096), 4096)
        places.append(start + at)
while True:
    print(hashlib.sha256(b"".join(ctypes.string_at(at, 4096) for at in places)).hexdigest(), flush=True)
    time.sleep(0.05)
"""
#: Reserves most of the address space, forks, and uses a page of each reservation once a file exists.
MOST = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
libc.mmap.restype = ctypes.c_size_t
libc.mmap.argtypes = [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_long]
libc.mprotect.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
def reserve(size, access):
    start = libc.mmap(0, size, access, 0x4022, -1, 0)
    assert start != 2**64 - 1
    return start
places = [reserve(size << 40, access) for size, access in ((60, 0), (20, 3), (25, 0))]
used = reserve(1 << 40, 3)
ctypes.memmove(used, b"used", 4)
child = os.fork()
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
for at in places:
    at += 7 << 40
    assert libc.mprotect(at, 4096, 3) == 0
    assert ctypes.string_at(at, 4096) == bytes(4096)
    ctypes.memmove(at, b"word", 4)
assert ctypes.string_at(used, 5) == b"used\\0"
print("used", flush=True)
if child:
    os._exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""
TIB = 1 << 40


def _lines(job: Job) -> list[str]:
    return job.log_path("stdout").read_text().split("\n")[:-1]


def _mappings(job: Job) -> list[tuple[int, int, int]]:
    return [
        (one.start, one.length, one.protection)
        for one in procfs.read_maps(job.main_process())
        if one.length > 1 << 30
    ]


@pytest.mark.parametrize(
    ("total", "count", "access"),
    [(8 * TIB, 1, "none"), (16 * TIB, 1000, "none"), (15 * TIB, 1, "write")],
)
def test_reserved_terabytes(
    trip: Trip, tmp_path: Path, total: int, count: int, access: str
) -> None:
    registry = Registry(tmp_path / "jobs")
    words = [sys.executable, "-c", RESERVE, str(total), str(count), access]
    job = registry.start(words, name="reserve", cwd="/")
    try:
        assert eventually(lambda: len(_lines(job)) > 1)
        reserved = _mappings(job)
        assert sum(length for _, length, _ in reserved) > total - (1 << 34)
        target = Target(job.pid, job.name, record=job.record())
        made = dump(trip.repository, trip.loop, target, criu=trip.criu)
        assert made.sizes.logical < 1 << 30
        (digest,) = set(_lines(job))
        job.kill(signal.SIGKILL)
        job.wait(10)
        restored = restore(
            trip.repository,
            trip.loop,
            made.snapshot,
            RestoreOptions(),
            criu=trip.criu,
            registry=registry,
        )
        restored.wait_resident(60)
        assert restored.job is not None
        job = restored.job
        assert _mappings(job) == reserved
        before = len(_lines(job))
        assert eventually(lambda: len(_lines(job)) > before + 1)
        assert set(_lines(job)) == {digest}
    finally:
        for one in registry.instances():
            if one.alive:
                one.kill(signal.SIGKILL)
                one.wait(10)


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_most_of_the_address_space(
    trip: Trip, tmp_path: Path, mode: Literal["full", "lazy"]
) -> None:
    registry = Registry(tmp_path / "jobs")
    use = tmp_path / "use"
    job = registry.start([sys.executable, "-c", MOST, str(use)], name="most", cwd="/")
    try:
        assert eventually(lambda: len(_lines(job)) == 2)
        reserved = _mappings(job)
        snapshot = take(trip, job, stop=True)
        job.wait(10)
        restored = bring_back(trip, registry, snapshot, mode=mode)
        restored.wait_resident(60)
        assert restored.job is not None
        job = restored.job
        assert _mappings(job) == reserved
        use.touch()
        assert job.wait(30).code == 0, job.log_path("stderr").read_text()
        assert _lines(job) == ["ready"] * 2 + ["used"] * 2
    finally:
        for one in registry.instances():
            if one.alive:
                one.kill(signal.SIGKILL)
                one.wait(10)
