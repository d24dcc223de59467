"""Restored processes still hold their file locks, even on files that they have mapped."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
from pathlib import Path

import pytest

from icecore.errors import RestoreFailed
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, lines, needs_library, take, wait_lines

pytestmark = [pytest.mark.criu, needs_library]

#: Three processes lock parts of one file, which each of them maps. One is stopped. One has a seccomp
#: filter that kills it if it calls fcntl(2) again. The first also holds a lock of flock(2).
JOB = """
import ctypes, fcntl, mmap, os, signal, struct, sys, time
file = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)
os.ftruncate(file, 8192)
def lock(kind, start, length):
    fcntl.fcntl(file, fcntl.F_SETLK, struct.pack("hhqqi4x", kind, 0, start, length, 0))
def confine():
    libc = ctypes.CDLL(None)
    words = [(0x20, 0, 0, 0), (0x15, 0, 1, 72), (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7FFF0000)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *word) for word in words))
    about = ctypes.create_string_buffer(struct.pack("HxxxxxxP", 4, ctypes.addressof(code)))
    assert libc.prctl(38, 1, 0, 0, 0) == 0 and libc.prctl(22, 2, about, 0, 0) == 0
def work(number, at):
    memory = mmap.mmap(file, 8192)
    lock(fcntl.F_WRLCK, at, 10)
    lock(fcntl.F_RDLCK, at + 20, 0 if at == 2000 else 10)
    if number == 1:
        confine()
    print("ready", flush=True)
    if number == 2:
        os.kill(os.getpid(), signal.SIGSTOP)
    step = 0
    while True:
        step += 1
        memory[at] = step % 256
        print(number, step, flush=True)
        time.sleep(0.01)
for number in (1, 2):
    if not os.fork():
        work(number, 1000 * number)
os.dup2(os.open(sys.argv[1], os.O_RDWR), 50)
fcntl.flock(50, fcntl.LOCK_EX)
work(0, 0)
"""


def held(path: Path) -> set[tuple[str, ...]]:
    """Return kind, mode, start and end of each lock on a file."""
    found = set()
    for line in Path("/proc/locks").read_text().splitlines():
        words = line.split()
        if words[1] != "->" and words[5].endswith(f":{path.stat().st_ino}"):
            found.add((words[1], words[3], *words[6:]))
    return found


def pids(job: Job) -> list[int]:
    """Return the pids of the processes with locks, in the order in which they started."""
    found = procfs.tree(job.pid)[1:]
    return sorted(found, key=lambda pid: procfs.status(pid).own_pid)


@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_locks_of_files_that_are_mapped(
    mode: str, trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    path = tmp_path / "locked"
    job = registry.start([sys.executable, "-c", JOB, str(path)], name="locks")
    wait_lines(job, 20)
    assert eventually(lambda: procfs.status(pids(job)[2]).state == "T")
    wanted = held(path)
    assert len(wanted) == 7, wanted
    snapshot = take(trip, job, stop=True)
    job.wait(20)
    assert not held(path)
    restored = bring_back(trip, registry, snapshot, mode=mode)
    assert restored.job is not None
    assert held(path) == wanted
    for number in (0, 1):
        before = len([line for line in lines(restored.job) if line.startswith(f"{number} ")])
        assert eventually(
            lambda b=before, n=number: (
                len([x for x in lines(restored.job) if x.startswith(f"{n} ")]) > b + 5
            )
        ), lines(restored.job)[-5:]
    stopped = pids(restored.job)[2]
    assert procfs.status(stopped).state == "T"
    os.kill(stopped, signal.SIGCONT)
    assert eventually(lambda: any(line.startswith("2 ") for line in lines(restored.job)))
    restored.wait_resident(30)


def test_a_lock_that_another_process_has(trip: Trip, registry: Registry, tmp_path: Path) -> None:
    path = tmp_path / "locked"
    job = registry.start([sys.executable, "-c", JOB, str(path)], name="locks")
    wait_lines(job, 20)
    snapshot = take(trip, job, stop=True)
    job.wait(20)
    with subprocess.Popen(
        [sys.executable, "-c", _OTHER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None and other.stdout.readline()
        with pytest.raises(RestoreFailed, match="another process has locked a file"):
            bring_back(trip, registry, snapshot, files="leave")
        other.communicate(timeout=20)
    assert not held(path)


#: Locks a part of the file until end of input.
_OTHER = """
import fcntl, sys
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX, 1, 1005)
print("locked", flush=True)
sys.stdin.read()
"""

#: Two processes write to an SQLite database with a write-ahead log; both map its -shm file.
WRITERS = """
import os, sqlite3, sys, time
database = sqlite3.connect(sys.argv[1], isolation_level=None)
database.execute("PRAGMA journal_mode=WAL")
database.execute("CREATE TABLE steps (who INT, step INT, PRIMARY KEY (who, step))")
database.close()
child = os.fork()
database = sqlite3.connect(sys.argv[1], timeout=20, isolation_level=None)
for step in range(10**9):
    database.execute("INSERT INTO steps VALUES (?, ?)", (1 if child else 2, step))
    if child:
        print(step, database.execute("SELECT count(*) FROM steps WHERE who = 1").fetchone()[0], flush=True)
    time.sleep(0.005)
"""


def test_a_database_that_two_processes_write_to(
    trip: Trip, registry: Registry, tmp_path: Path
) -> None:
    data = tmp_path / "data"
    data.mkdir()
    command = [sys.executable, "-c", WRITERS, str(data / "db")]
    job = registry.start(command, name="writers", data=[data])
    wait_lines(job, 20)
    snapshot = take(trip, job)
    wait_lines(job, len(lines(job)) + 20)
    job.kill(signal.SIGKILL)
    job.wait(20)
    restored = bring_back(trip, registry, snapshot).job
    assert restored is not None
    for line in wait_lines(restored, len(lines(restored)) + 60):
        step, count = map(int, line.split())
        assert count == step + 1
    with sqlite3.connect(data / "db", timeout=20) as another:
        assert another.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        (steps,) = another.execute("SELECT count(*) FROM steps WHERE who = 2").fetchone()
    assert steps > 0
    another.close()
    assert restored.alive
