"""What a job has beside its GPU: a /tmp of its own, data directories, shared memory, and the seccomp
filter against io_uring.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

import icecore

from .conftest import needs
from .jobs import Lab, wait_lines

pytestmark = pytest.mark.timeout(200)

#: Counts on the device, in shared memory, in a closed file of its own /tmp, and in one of its data
#: directory that it replaces; none may differ from the others.
_JOB = """
import mmap, os, sys, time, torch
data = sys.argv[1]
state = torch.zeros(1 << 22, device="cuda")
shared = mmap.mmap(-1, 64 << 20)
shared[:] = os.urandom(1 << 20) * 64
assert "Seccomp:\\t2" in open("/proc/self/status").read()
number = 0
def put(path):
    with open(f"{path}.new", "w") as file:
        file.write(str(number))
    os.rename(f"{path}.new", path)
while True:
    number += 1
    state += 1
    shared[: 8] = shared[-8:] = number.to_bytes(8, "little")
    put("/tmp/count"); put(f"{data}/count")
    found = [int(state.min()), int(state.max()), int.from_bytes(shared[:8], "little"),
             int.from_bytes(shared[-8:], "little"),
             int(open("/tmp/count").read()), int(open(f"{data}/count").read())]
    if set(found) != {number}:
        print("differ", number, found, flush=True); sys.exit(9)
    print(number, flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def tmp_path() -> Iterator[Path]:
    """A directory outside /tmp, which a job with a private /tmp can see."""
    with tempfile.TemporaryDirectory(prefix="icecore-test-", dir=Path.home()) as folder:
        yield Path(folder)


@pytest.mark.parametrize("resident", [True, False], ids=["resident", "driver"])
def test_all_of_it_comes_back(resident: bool, lab: Lab) -> None:
    needs(1, "torch")
    data = lab.folder / "data"
    data.mkdir()
    job = lab.run("counts", "-c", _JOB, str(data), resident=resident, private_tmp=True, data=[data])
    goes_on(job)
    snapshots = []
    for _ in range(2):
        snapshots.append(lab.dump("counts").snapshot)
        goes_on(job)
    lab.kill(job.pid)
    for snapshot, mode in zip(reversed(snapshots), ("full", "lazy"), strict=True):
        (data / "count").unlink()
        restored = lab.restore(snapshot, mode=mode)
        assert restored.job is not None
        goes_on(restored.job)
        lab.kill(restored.pid)


def goes_on(job: icecore.Job, more: int = 20) -> None:
    log = job.log_path("stdout")
    before = len(log.read_text().splitlines()) if log.exists() else 0
    found = wait_lines(log, before + more, lambda: job.log_path("stderr").read_text(), 60)
    assert not any(line.startswith("differ") for line in found), found[-1]
