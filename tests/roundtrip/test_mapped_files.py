"""Files that a job writes through mappings. icecore must know how they were opened, although
neither the protection of a mapping nor its link in /proc always shows it.
"""

from __future__ import annotations

import signal
import sys
from pathlib import Path

import pytest

from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
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


#: Maps a page of a file opened for reading. On the first USR1, maps a file opened for writing in its
#: place and stores a number there; each further USR1 increments it. Prints the number each time.
REPLACING = """
import ctypes, mmap, os, signal, sys
library = ctypes.CDLL(None, use_errno=True)
library.mmap.restype = ctypes.c_void_p
library.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
at = 0x700000000000
def put(path, flags, protection, fixed=0x10):
    file = os.open(path, flags)
    assert library.mmap(at, 4096, protection, mmap.MAP_SHARED | fixed, file, 0) == at
    os.close(file)
def protect(how):
    assert library.mprotect(ctypes.c_void_p(at), ctypes.c_size_t(4096), how) == 0
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
put(sys.argv[1], os.O_RDONLY, 1)
print("read", flush=True)
signal.sigwait([signal.SIGUSR1])
put(sys.argv[2], os.O_RDWR, 3)
if sys.argv[3] == "remove":
    os.unlink(sys.argv[2])
number = 0
while True:
    protect(3)
    ctypes.memmove(at, b"%04d" % number, 4)
    if sys.argv[3] == "protect":
        protect(1)
    print(ctypes.string_at(at, 4).decode(), flush=True)
    signal.sigwait([signal.SIGUSR1])
    number = int(ctypes.string_at(at, 4)) + 1
"""


@pytest.mark.parametrize("how", ["leave", "protect", "remove"])
def test_a_mapping_in_the_place_of_one_that_was_read_only(
    trip: Trip, tmp_path: Path, how: str
) -> None:
    """The kernel keeps the mode of a link in /proc/PID/map_files until a lookup finds no mapping at
    exactly these addresses, so the second mapping's link says that its file was opened for reading.
    """
    registry, read, written = Registry(tmp_path / "jobs"), tmp_path / "read", tmp_path / "written"
    read.write_bytes(bytes(4096))
    written.write_bytes(bytes(4096))
    job = registry.start(
        [sys.executable, "-c", REPLACING, str(read), str(written), how], name="r", cwd=tmp_path
    )

    def printed(text: str) -> None:
        assert eventually(lambda: job.log_path("stdout").read_text().split()[-1:] == [text])

    try:
        printed("read")
        take(trip, job)
        job.kill(signal.SIGUSR1)
        printed("0000")
        link = Path(f"/proc/{procfs.tree(job.pid)[-1]}/map_files/700000000000-700000001000")
        assert link.readlink().name.startswith("written") and not link.lstat().st_mode & 0o200
        first = take(trip, job)
        job.kill(signal.SIGUSR1)
        printed("0001")
        second = take(trip, job, stop=True)
        job.wait(20)
        for snapshot, number in ((second, 1), (first, 0), (second, 1)):
            if how != "remove":
                written.write_bytes(b"9999" + bytes(4092))
            job = bring_back(trip, registry, snapshot, files="restore").job or job
            assert how == "remove" or written.read_bytes()[:4] == b"%04d" % number
            job.kill(signal.SIGUSR1)
            printed(f"{number + 1:04}")
            job.kill(signal.SIGKILL)
            job.wait(20)
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)
