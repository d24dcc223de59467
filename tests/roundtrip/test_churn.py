"""Snapshots at random moments of jobs that never rest, each of them restored: what goes wrong only
after other snapshots, or after other restores, shows here.
"""

from __future__ import annotations

import os
import random
import secrets
import signal
import sys
import time
from pathlib import Path

import pytest

from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip
from tests.roundtrip.test_instances import bring_back, take

pytestmark = [pytest.mark.criu, pytest.mark.torture]

SECONDS = float(os.environ.get("ICECORE_TORTURE_SECONDS", "20"))
PROGRAM = Path(__file__).with_name("churn.py")
#: Lines that a job writes after a snapshot or a restore.
MORE = 40


def end(job: Job) -> None:
    if job.alive:
        job.kill(signal.SIGKILL)
        job.wait(20)


@pytest.mark.parametrize("what", ["maps", "fork", "spawn", "forkserver"])
def test_each_snapshot_of_a_job_that_never_rests(trip: Trip, tmp_path: Path, what: str) -> None:
    seed = int(os.environ.get("ICECORE_TORTURE_SEED", str(time.time_ns() % 10**6)))
    print("seed", seed)
    chance = random.Random(seed)
    folder, registry = tmp_path / "data", Registry(tmp_path / "jobs")
    folder.mkdir()
    out = folder / "out"

    def lines() -> list[str]:
        return out.read_text().split("\n")[:-1] if out.exists() else []

    def writes(job: Job, count: int) -> list[str]:
        """Wait until the file has so many lines."""
        assert eventually(lambda: len(lines()) >= count, seconds=60), (
            len(lines()),
            count,
            job.log_path("stderr").read_text()[-2000:],
        )
        return lines()

    prefix = f"icecore-test-{secrets.token_hex(4)}"
    command = [sys.executable, str(PROGRAM), str(out), what, f"/{prefix}"]
    job = registry.start(command, name="churn", cwd=tmp_path, data=[folder])
    try:
        writes(job, 10)
        snapshots, until = [], time.monotonic() + SECONDS / 3
        while time.monotonic() < until:
            time.sleep(chance.uniform(0, 0.4))
            parent = snapshots[-1] if snapshots else ""
            snapshots.append(take(trip, job, parent=parent))
        wanted = writes(job, len(lines()) + 2 * MORE)
        end(job)
        wanted = lines()
        chance.shuffle(snapshots)
        until = time.monotonic() + SECONDS
        for number, snapshot in enumerate(snapshots):
            if time.monotonic() > until:
                break
            mode = chance.choice(["full", "lazy"])
            job = bring_back(trip, registry, snapshot, mode=mode).job or job
            found = writes(job, len(lines()) + MORE)
            same = min(len(found), len(wanted))
            assert found[:same] == wanted[:same], (number, snapshot, mode)
            end(job)
    finally:
        end(job)
        for name in Path("/dev/shm").glob(f"sem.{prefix}*"):  # of killed instances
            name.unlink(missing_ok=True)
