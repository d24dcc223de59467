"""A file that a job writes through a mapping which is read-only whenever a snapshot is taken."""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from icecore.host.jobs.registry import Registry
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = pytest.mark.criu

#: Writes its file's first page with each USR1, between two calls of mprotect: its page is dirty
#: already, so no times change. It prints what the page begins with.
JOB = """
import ctypes, mmap, os, signal, sys
library = ctypes.CDLL(None, use_errno=True)
library.mmap.restype = ctypes.c_void_p
file = os.open(sys.argv[1], os.O_RDWR)
at = library.mmap(None, ctypes.c_size_t(4096), 3, mmap.MAP_SHARED, file, ctypes.c_long(0))
if sys.argv[2] == "close":
    os.close(file)
def protect(how):
    assert library.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(4096), how) == 0
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
number = 0
while True:
    protect(3)
    ctypes.memmove(at, b"%04d" % number, 4)
    protect(1)
    print(ctypes.string_at(at, 4).decode(), flush=True)
    signal.sigwait([signal.SIGUSR1])
    number = int(ctypes.string_at(at, 4)) + 1
"""


@pytest.mark.parametrize("descriptor", ["open", "close"])
def test_stores_through_a_mapping_that_was_read_only_are_stored(
    trip: Trip, tmp_path: Path, descriptor: str
) -> None:
    registry, file = Registry(tmp_path / "jobs"), tmp_path / "file"
    file.write_bytes(bytes(8192))
    job = registry.start(
        [sys.executable, "-c", JOB, str(file), descriptor], name="mapped", cwd=tmp_path
    )

    def printed(text: str) -> None:
        assert eventually(lambda: job.log_path("stdout").read_text().split()[-1:] == [text])

    try:
        printed("0000")
        first = take(trip, job)
        before = file.stat().st_mtime_ns
        job.kill(signal.SIGUSR1)
        printed("0001")
        assert file.stat().st_mtime_ns == before  # else the times would tell
        second = take(trip, job, stop=True)
        job.wait(20)
        for snapshot, number in ((first, 0), (second, 1), (first, 0)):
            file.write_bytes(b"9999" + bytes(8188))
            job = bring_back(trip, registry, snapshot, files="restore").job or job
            assert file.read_bytes()[:4] == b"%04d" % number
            job.kill(signal.SIGUSR1)
            assert eventually(lambda: file.read_bytes()[:4] == b"%04d" % (number + 1))  # noqa: B023
            job.kill(signal.SIGKILL)
            job.wait(20)
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)
