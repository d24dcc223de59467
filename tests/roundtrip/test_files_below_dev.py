"""Files that a job has below /dev are treated like others, whatever is mounted there."""

from __future__ import annotations

import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.host.jobs.registry import Registry
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = pytest.mark.criu

#: Has a file, a FIFO and a mapped file open; prints what it finds in them on each USR1.
JOB = """
import mmap, os, signal, sys
top = sys.argv[1]
os.makedirs(f"{top}/deep/er", 0o750)
file = os.open(f"{top}/deep/er/file", os.O_RDWR | os.O_CREAT)
os.write(file, b"content")
os.mkfifo(f"{top}/deep/fifo")
fifo = os.open(f"{top}/deep/fifo", os.O_RDWR)
other = os.open(f"{top}/mapped", os.O_RDWR | os.O_CREAT)
os.ftruncate(other, 8192)
mapped = mmap.mmap(other, 8192)
os.close(other)
mapped[:6] = b"mapped"
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR1])
while True:
    os.write(fifo, b"through")
    print(os.pread(file, 100, 0).decode(), mapped[:6].decode(), os.read(fifo, 100).decode(), flush=True)
    signal.sigwait([signal.SIGUSR1])
"""


@pytest.fixture(params=["devtmpfs", "tmpfs"])
def below_dev(request: pytest.FixtureRequest) -> Iterator[Path]:
    top = Path(tempfile.mkdtemp(prefix="icecore-test-", dir="/dev"))
    if request.param == "tmpfs":
        subprocess.run(["mount", "-t", "tmpfs", "x", top], timeout=60, check=True)
    try:
        yield top
    finally:
        if request.param == "tmpfs":
            subprocess.run(["umount", "--lazy", top], timeout=60, check=True)
        shutil.rmtree(top)


def test_files_below_dev_come_back(trip: Trip, tmp_path: Path, below_dev: Path) -> None:
    registry = Registry(tmp_path / "jobs")
    job = registry.start([sys.executable, "-c", JOB, str(below_dev)], name="below", cwd="/")
    try:
        said = job.log_path("stdout")
        assert eventually(lambda: said.read_text() == "content mapped through\n")
        snapshot = take(trip, job, stop=True)
        job.wait(20)
        for wiped in (False, True):
            (below_dev / "mapped").write_bytes(b"other" + bytes(8187))
            if wiped:
                (below_dev / "mapped").unlink()
                (below_dev / "deep/er/file").unlink()
                if below_dev.is_mount():  # else a restore makes no directories and FIFOs in it
                    shutil.rmtree(below_dev / "deep")
            job = bring_back(trip, registry, snapshot, files="restore").job or job
            job.kill(signal.SIGUSR1)
            said = job.log_path("stdout")
            assert eventually(lambda: said.read_text() == 2 * "content mapped through\n")  # noqa: B023
            job.kill(signal.SIGKILL)
            job.wait(20)
    finally:
        if job.alive:
            job.kill(signal.SIGKILL)
            job.wait(20)
