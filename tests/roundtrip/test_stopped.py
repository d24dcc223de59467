"""A dump does not change which processes are stopped by job control."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from icecore.host.criu.libraries import CRIU_LIBRARY
from icecore.host.jobs.registry import Registry
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import lines, take, wait_lines

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(
        not CRIU_LIBRARY.exists(), reason="needs a C compiler when icecore is built"
    ),
]

#: Continues a stopped child as soon as it runs again after a window, while CRIU detaches the others.
JOB = """
import os, select, signal, threading, time
if not os.fork():
    for _ in range(400):
        threading.Thread(target=time.sleep, args=(1000,)).start()
    time.sleep(1000)
time.sleep(0.5)
answers, answer = os.pipe()
child = os.fork()
if not child:
    while True:
        os.kill(os.getpid(), signal.SIGSTOP)
        os.write(answer, b"1")
while True:
    os.waitpid(child, os.WUNTRACED)
    print("stopped", flush=True)
    before = time.monotonic()
    while (now := time.monotonic()) - before < 0.02:
        before = now
    os.kill(child, signal.SIGCONT)
    print("continued" if select.select([answers], [], [], 5)[0] else "lost", flush=True)
    os.read(answers, 1)
"""


def test_a_process_that_is_continued_right_after_a_window(trip: Trip, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "jobs")
    job = registry.start([sys.executable, "-c", JOB], name="stopped")
    try:
        wait_lines(job, 0)
        for _ in range(5):
            before = len(lines(job))
            take(trip, job)
            assert eventually(lambda count=before: len(lines(job)) > count + 1, seconds=10)
        assert "lost" not in lines(job)
    finally:
        job.kill(9)
        job.wait(20)
