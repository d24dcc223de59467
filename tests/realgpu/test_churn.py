"""Take snapshots, at random moments, of jobs that constantly change their objects on the GPU. Restore
them in random order.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from icecore.errors import DumpFailed

from .conftest import needs
from .jobs import HERE, Lab, lines, same, wait_lines

pytestmark = [pytest.mark.timeout(400), pytest.mark.torture]

PROGRAM = str(HERE / "churn.py")
SECONDS = float(os.environ.get("ICECORE_TORTURE_SECONDS", "40"))
#: Name → the job, the module that it needs, its environment.
JOBS: dict[str, tuple[str, str, dict[str, str]]] = {
    "memory": ("memory", "torch", {}),
    "expandable": ("memory", "torch", {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}),
    "processes": ("processes", "", {}),
    "jax": ("jax", "jax", {}),
}
#: Lines to wait for after each restore; after the last snapshot, three times as many.
MORE = 15


def take(lab: Lab, *, gpu_shared: bool, times: int = 20) -> str:
    """Take a snapshot; try again if a process with device memory ended during the dump."""
    for _ in range(times):
        try:
            return lab.dump("churn", gpu_shared=gpu_shared).snapshot
        except DumpFailed as error:
            if "ended during the dump" not in error.message:
                raise
            print("  again:", error.message, flush=True)
    raise TimeoutError("a process ended during each dump")


@pytest.mark.parametrize("how", ["resident", "driver"])
@pytest.mark.parametrize("name", JOBS)
def test_each_snapshot_of_a_job_that_never_rests(name: str, how: str, lab: Lab) -> None:
    what, module, environment = JOBS[name]
    needs(1, *([module] if module else []))
    seed = int(os.environ.get("ICECORE_TORTURE_SEED", str(time.time_ns() % 10**6)))
    print("seed", seed, flush=True)
    chance = random.Random(seed)
    data = lab.folder / "data"  # also holds files of compilers, which are not always open
    data.mkdir()
    out = data / "out"
    job = lab.run(
        *("churn", PROGRAM, what, str(out)),
        resident=how == "resident",
        environment={**environment, "TMPDIR": str(data)},
        data=[data],
    )
    wait_lines(out, 5, lambda: job.log_path("stderr").read_text())
    taken, until = [], time.monotonic() + SECONDS / 3
    while time.monotonic() < until:
        time.sleep(chance.uniform(0, 0.5))
        taken.append(take(lab, gpu_shared=name == "processes"))  # its processes share no memory
    wait_lines(out, len(lines(out)) + 3 * MORE)
    lab.kill(job.pid)
    lab.reap_ended(0.2)
    wanted = lines(out)
    chance.shuffle(taken)
    until = time.monotonic() + SECONDS
    for number, snapshot in enumerate(taken):
        if time.monotonic() > until:
            break
        mode = chance.choice(["full", "lazy"])
        print(f"  restore {number + 1} of {len(taken)}: {snapshot}, {mode}", flush=True)
        restored = lab.restore(snapshot, mode=mode)
        found = wait_lines(out, min(len(lines(out)) + MORE, len(wanted)), seconds=60)
        same(found[: len(wanted)], wanted)
        lab.kill(restored.pid)
        lab.reap_ended(0.2)
