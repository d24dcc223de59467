"""The driver's mapping, made while its thread is traced: that thread, and what else the process does, notice nothing."""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

from icecore.host import limits, procfs
from icecore.host.cuda.populate import SMALLEST, Populating, free_huge_bytes

pytestmark = pytest.mark.timeout(60)

#: A thread that makes a mapping as the driver does whenever it is told to, looks at it and fills it, another that computes, and a handler for signals.
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
    """A process of `TARGET`."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([sys.executable, "-c", TARGET], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.thread = int(self.process.stdout.readline())

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


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="on x86-64 only")
@pytest.mark.parametrize("signals", [False, True])
def test_a_mapping_is_there(target: Target, signals: bool) -> None:
    huge = limits.huge_pages() != "never" and free_huge_bytes() > 4 * SMALLEST
    sent = 0
    for _ in range(12):
        with Populating(target.process.pid, target.thread) as made:
            if signals:  # the main thread's handler runs; the driver's thread may get it, too
                for _ in range(3):
                    os.kill(target.process.pid, signal.SIGUSR1)
                    sent += 1
                ctypes.CDLL(None).tgkill(target.process.pid, target.thread, signal.SIGUSR1)
            said = target.make(SMALLEST + 12288)
        assert said[0] == "True"
        assert not made.why
        if huge:
            assert made.huge == made.bytes >= SMALLEST - (4 << 20)
            assert int(said[1]) << 10 >= made.bytes
        else:
            assert (made.bytes, made.huge) == (SMALLEST + 12288, 0)
    assert not procfs.status(target.thread).tracer
    assert not signals or int(said[2]) > 0


def test_other_mappings_are_left_alone(target: Target) -> None:
    with Populating(target.process.pid, target.thread) as made:
        assert target.make(SMALLEST - mmap.PAGESIZE)[0] == "True"
    assert (made.bytes, made.why) == (0, "")
    began = time.monotonic()
    with Populating(target.process.pid, target.thread):
        pass
    assert time.monotonic() - began < 1.0
    assert not procfs.status(target.thread).tracer
    assert target.make(SMALLEST)[0] == "True"


@pytest.mark.parametrize("how", ["unknown", "gone", "traced", "stopped", "dies"])
def test_threads_that_are_not_to_be_had(target: Target, how: str) -> None:
    thread, pid = target.thread, target.process.pid
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
