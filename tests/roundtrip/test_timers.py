"""Timers of timerfd_create(2) that had expired, or were set to a moment, when the snapshot was taken."""

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

#: A timer that repeats and is not read until a file exists, and timers set to moments.
TIMERS = """
import os, sys, threading, time
sys.path.insert(0, sys.argv[2])
from tests.programs import kernel
repeats, ahead = kernel.timerfd(0.02, 0.02), []
os.set_blocking(repeats, True)
begin = time.monotonic()
for number in range(10):
    moment = begin + 5 + number / 10
    ahead.append((kernel.timerfd_at(moment), moment))
time.sleep(0.2)
print("ready", flush=True)
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
for _ in range(3):
    assert int.from_bytes(os.read(repeats, 8), sys.byteorder) > 0
for timer, moment in ahead:
    os.read(timer, 8)
    assert time.monotonic() >= moment, (time.monotonic(), moment)
print("well", flush=True)
"""


def test_timers(trip: Trip, tmp_path: Path) -> None:
    registry = Registry(tmp_path / "jobs")
    use = tmp_path / "use"
    root = str(Path(__file__).parents[2])
    job = registry.start([sys.executable, "-c", TIMERS, str(use), root], name="timers", cwd="/")
    try:
        assert eventually(lambda: job.log_path("stdout").read_text() == "ready\n")
        snapshot = take(trip, job, stop=True)
        job.wait(10)
        restored = bring_back(trip, registry, snapshot)
        restored.wait_resident(60)
        assert restored.job is not None
        job = restored.job
        use.touch()
        assert job.wait(60).code == 0, job.log_path("stderr").read_text()
        assert job.log_path("stdout").read_text() == "ready\nwell\n"
    finally:
        for one in registry.instances():
            if one.alive:
                one.kill(signal.SIGKILL)
                one.wait(10)
