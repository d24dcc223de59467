"""Snapshots at random moments of jobs that change all the time what they have on the GPU, each of
them restored, in random order.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from .conftest import needs
from .jobs import HERE, Lab, lines, same, wait_lines

pytestmark = [pytest.mark.timeout(400), pytest.mark.torture]

PROGRAM = str(HERE / "churn.py")
SECONDS = float(os.environ.get("ICECORE_TORTURE_SECONDS", "40"))
#: Name → the job, the module that it needs, its environment, options of its dumps.
JOBS: dict[str, tuple[str, str, dict[str, str], dict[str, bool]]] = {
    "memory": ("memory", "torch", {}, {}),
    "expandable": ("memory", "torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}, {}),
    "processes": ("processes", "", {}, {"gpu_shared": True}),  # they share nothing
    "jax": ("jax", "jax", {}, {}),
}
#: Lines that a job writes after a snapshot or a restore.
MORE = 15


@pytest.mark.parametrize("how", ["resident", "driver"])
@pytest.mark.parametrize("name", JOBS)
def test_each_snapshot_of_a_job_that_never_rests(name: str, how: str, lab: Lab) -> None:
    job, module, environment, options = JOBS[name]
    needs(1, *([module] if module else []))
    seed = int(os.environ.get("ICECORE_TORTURE_SEED", str(time.time_ns() % 10**6)))
    print("seed", seed, flush=True)
    chance = random.Random(seed)
    out = lab.folder / "out"
    if how == "resident":
        environment = {**environment, **lab.resident()}
    root = lab.plain(PROGRAM, job, str(out), environment=environment)
    wait_lines(out, 5, lab.logs)
    taken, until = [], time.monotonic() + SECONDS / 3
    while time.monotonic() < until:
        time.sleep(chance.uniform(0, 0.5))
        taken.append(lab.dump(root, **options).snapshot)
    wanted = wait_lines(out, len(lines(out)) + 3 * MORE, lab.logs)
    lab.kill(root)
    lab.reap_ended(0.2)
    wanted = lines(out)
    chance.shuffle(taken)
    until = time.monotonic() + SECONDS
    for number, snapshot in enumerate(taken):
        if time.monotonic() > until:
            break
        mode = chance.choice(["full", "lazy"])
        print(f"  restore {number + 1} of {len(taken)}: {snapshot}, {mode}", flush=True)
        root = lab.restore(snapshot, mode=mode).pid
        found = wait_lines(out, min(len(lines(out)) + MORE, len(wanted)), lab.logs, 60)
        same(found[: len(wanted)], wanted)
        lab.kill(root)
        lab.reap_ended(0.2)
