"""Jobs do without io_uring, before and after a restore."""

from __future__ import annotations

import errno
import signal
import sys
from pathlib import Path

import pytest

from icecore.host.jobs.registry import Registry
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = pytest.mark.criu

#: Several threads, old and new, and a child ask for a ring again and again.
ASKS = """
import ctypes, os, threading, time
libc = ctypes.CDLL(None, use_errno=True)
def ask(word):
    ring = libc.syscall(425, 4, ctypes.create_string_buffer(120))
    os.write(1, f"{word} {ctypes.get_errno() if ring < 0 else 'a ring'}\\n".encode())
def asks():
    while True:
        ask("thread")
        time.sleep(0.05)
for _ in range(3):
    threading.Thread(target=asks).start()
if os.fork():
    while True:
        new = threading.Thread(target=ask, args=("new",))
        new.start()
        new.join()
        time.sleep(0.05)
while True:
    ask("child")
    time.sleep(0.05)
"""


def test_no_rings(trip: Trip, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "jobs")
    job = registry.start([sys.executable, "-c", ASKS], name="asks", cwd="/")
    every = {f"{word} {errno.EPERM}" for word in ("thread", "new", "child")}
    try:
        for _ in range(2):
            log, asked = job.log_path("stdout"), job.log_path("stdout").stat().st_size
            assert eventually(lambda: set(log.read_text()[asked:].splitlines()[1:-1]) >= every)  # noqa: B023
            snapshot = take(trip, job, stop=True)
            job.wait(10)
            restored = bring_back(trip, registry, snapshot)
            restored.wait_resident(60)
            assert restored.job is not None
            job = restored.job
        log, asked = job.log_path("stdout"), job.log_path("stdout").stat().st_size
        assert eventually(lambda: set(log.read_text()[asked:].splitlines()[1:-1]) >= every)
        assert set(log.read_text().splitlines()[:-1]) == every
    finally:
        for one in registry.instances():
            if one.alive:
                one.kill(signal.SIGKILL)
                one.wait(10)
