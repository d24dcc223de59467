"""The driver's mapping, made while its thread is traced: that thread, and what else the process
does, notice nothing.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from icecore.host.cuda.populate import SMALLEST, Populating
from icecore.host.kernel import limits, procfs
from icecore.sizes import CELL_BYTES

pytestmark = [
    pytest.mark.skipif(os.uname().machine != "x86_64", reason="on x86-64 only"),
]

#: A thread that makes a mapping as the driver does whenever it is told to, looks at it and fills
#: it, another that computes, and a handler for signals.
TARGET = """
import ctypes, hashlib, os, signal, sys, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype = ctypes.c_void_p
libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
seen = [0]
signal.signal(signal.SIGUSR1, lambda *_: seen.__setitem__(0, seen[0] + 1))
def compute():
    data, wanted = bytes(range(256)) * 4096, None
    while True:
        digest = hashlib.blake2b(data).hexdigest()
        assert wanted in (None, digest)
        wanted = digest
threading.Thread(target=compute, daemon=True).start()
def driver():
    print(threading.get_native_id(), flush=True)
    for line in sys.stdin:
        size = int(line)
        at = libc.mmap(None, size, 3, 0x8022, -1, 0)
        whole = (ctypes.c_char * size).from_address(at)
        ok = not any(whole[k] != b"\\0" for k in range(0, size, 1 << 16))
        resident = [l.split()[1] for l in open("/proc/self/smaps_rollup") if l.startswith("AnonHuge")][0]
        ctypes.memset(at, 7, size)
        ok = ok and whole[size - 1] == b"\\7" and libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(size)) == 0
        print(ok, resident, seen[0], flush=True)
thread = threading.Thread(target=driver)
thread.start()
thread.join()
"""


class Target:
    """A process of `TARGET`, started by ``words``.

    Attributes:
        thread: The driver's, as the process itself sees it.
    """

    def __init__(self, *words: str, first: str = "") -> None:
        self.process = subprocess.Popen(
            [*words, sys.executable, "-c", first + TARGET],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self.thread = int(self.process.stdout.readline())
        self.pid = procfs.children(self.process.pid)[0] if words else self.process.pid

    def make(self, size: int) -> list[str]:
        """Have it make a mapping; what it says of it."""
        assert self.process.stdin is not None and self.process.stdout is not None
        print(size, file=self.process.stdin, flush=True)
        return self.process.stdout.readline().split()


@pytest.fixture
def target() -> Iterator[Target]:
    made = Target()
    yield made
    made.process.kill()
    made.process.communicate()


def check(target: Target, said: list[str], made: Populating) -> None:
    """The mapping was made, of huge pages as far as there were some."""
    assert said[0] == "True"
    assert not made.why
    assert made.huge <= made.bytes and int(said[1]) << 10 >= made.huge
    if limits.huge_pages() == "never" or limits.free_huge_bytes() < 8 * SMALLEST:
        assert SMALLEST <= made.bytes <= SMALLEST + 12288  # huge or not, as few as were free
    else:
        assert SMALLEST - (4 << 20) <= made.huge <= made.bytes <= made.huge + (2 << 20)
        assert int(said[1]) << 10 >= made.bytes


@pytest.mark.parametrize("meanwhile", ["nothing", "signals", "stops"])
def test_a_mapping_is_there(target: Target, meanwhile: str) -> None:
    status = Path(f"/proc/{target.pid}/task/{target.thread}/status")
    blocked = [line for line in status.read_text().splitlines() if line.startswith("SigBlk")]
    over = threading.Event()

    def disturb() -> None:
        while not over.wait(0.0005):
            if meanwhile == "signals":
                os.kill(target.pid, signal.SIGUSR1)
                ctypes.CDLL(None).tgkill(target.pid, target.thread, signal.SIGUSR1)
            elif meanwhile == "stops":
                os.kill(target.pid, signal.SIGSTOP)
                os.kill(target.pid, signal.SIGCONT)

    disturber = threading.Thread(target=disturb)
    disturber.start()
    try:
        for _ in range(12):
            with Populating(target.pid, target.thread) as made:
                said = target.make(SMALLEST + 12288)
            if meanwhile == "stops" and made.why:
                continue  # it was stopped when it was to be traced
            check(target, said, made)
    finally:
        over.set()
        disturber.join()
    os.kill(target.pid, signal.SIGCONT)
    assert target.make(SMALLEST)[0] == "True"
    assert not procfs.status(target.thread).tracer
    assert [
        line for line in status.read_text().splitlines() if line.startswith("SigBlk")
    ] == blocked
    assert meanwhile != "signals" or int(said[2]) > 0


#: Whoever calls madvise(…, MADV_HUGEPAGE) is killed (seccomp(2)).
FILTER = """
import ctypes, struct
code = [(0x20, 0, 0, 0), (0x15, 0, 3, 28), (0x20, 0, 0, 32), (0x15, 0, 1, 14), (0x06, 0, 0, 0x80000000), (0x06, 0, 0, 0x7fff0000)]
code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *one) for one in code))
libc = ctypes.CDLL(None, use_errno=True)
assert libc.prctl(38, 1, 0, 0, 0) == 0
assert libc.syscall(317, 1, 0, struct.pack("HxxxxxxP", 6, ctypes.addressof(code))) == 0
"""


def test_a_thread_with_seccomp_filters() -> None:
    """They are off for icecore's call, and for no call of the thread's own."""
    target = Target(first=FILTER)
    try:
        with Populating(target.pid, target.thread) as made:
            said = target.make(SMALLEST + 12288)
        check(target, said, made)
        own = "import mmap; mmap.mmap(-1, 8192).madvise(14)"
        killed = subprocess.run([sys.executable, "-c", FILTER + own], timeout=20)
        assert killed.returncode == -signal.SIGSYS, "the filter works"
    finally:
        target.process.kill()
        target.process.communicate()


@pytest.mark.skipif(limits.huge_pages() == "never", reason="this machine has no huge pages")
def test_a_mapping_for_which_there_are_not_enough_huge_pages(
    target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(limits, "free_huge_bytes", lambda: SMALLEST + 12288)
    with Populating(target.pid, target.thread) as made:
        said = target.make(2 * SMALLEST)
    assert said[0] == "True" and not made.why
    assert SMALLEST - (4 << 20) <= made.huge <= SMALLEST + 12288
    assert 2 * SMALLEST - (2 << 20) < made.bytes <= 2 * SMALLEST
    assert limits.huge_pages() == "always" or int(said[1]) << 10 <= made.huge


def test_huge_pages_end_where_a_cell_does(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where they end differs from dump to dump; what comes after is to be cut as before."""
    monkeypatch.setattr(Populating, "_advise", lambda *_: 0)
    start, made = 0x7F593AB8A000, Populating(target.pid, target.thread)
    for free in (SMALLEST + 12288, SMALLEST + (5 << 20) + 4096):
        monkeypatch.setattr(limits, "free_huge_bytes", lambda free=free: free)
        until = made._huge_until(start, start + 4 * SMALLEST, 2 << 20)
        assert free - CELL_BYTES < until - start <= free and (until - start) % CELL_BYTES == 0
    assert made._huge_until(start, start + SMALLEST + 4096, 2 << 20) == start + SMALLEST + 4096


def test_a_process_of_another_pid_namespace() -> None:
    target = Target("unshare", "--pid", "--fork", "--kill-child")
    try:
        assert target.thread < 10
        with Populating(target.pid, target.thread) as made:
            said = target.make(SMALLEST + 12288)
        check(target, said, made)
    finally:
        os.kill(target.pid, signal.SIGKILL)
        target.process.communicate()


def test_other_mappings_are_left_alone(target: Target) -> None:
    with Populating(target.pid, target.thread) as made:
        assert target.make(SMALLEST - mmap.PAGESIZE)[0] == "True"
    assert (made.bytes, made.why) == (0, "")
    began = time.monotonic()
    with Populating(target.pid, target.thread):
        pass
    assert time.monotonic() - began < 10
    assert not procfs.status(target.thread).tracer
    assert target.make(SMALLEST)[0] == "True"


@pytest.mark.parametrize("how", ["unknown", "gone", "traced", "stopped", "dies"])
def test_threads_that_are_not_to_be_had(target: Target, how: str) -> None:
    thread, pid = target.thread, target.pid
    if how == "unknown":
        thread = 0
    elif how == "gone":
        thread = 4194303
    elif how == "traced":
        with Populating(pid, target.thread), Populating(pid, target.thread) as second:
            assert target.make(SMALLEST)[0] == "True"
        assert "traced" in second.why and not second.bytes
        return
    elif how == "stopped":
        os.kill(pid, signal.SIGSTOP)
        while not procfs.status(pid).stopped:
            time.sleep(0.001)
    with Populating(pid, thread) as made:
        if how == "dies":
            target.process.kill()
            target.process.wait(10)
    assert made.why and not made.bytes
    if how == "stopped":
        assert procfs.status(pid).stopped
        os.kill(pid, signal.SIGCONT)
    if how != "dies":
        assert target.make(SMALLEST)[0] == "True"
