"""Trainings by libraries' own loops on a real GPU: what they log is what an undisturbed run logs, bit
for bit.
"""

from __future__ import annotations

import pytest

from icecore.errors import DumpFailed

from .conftest import needs
from .jobs import HERE, Lab, lines, same, wait_lines
from .libraries import LIBRARIES, OTHERS

pytestmark = pytest.mark.timeout(300)
PROGRAM = str(HERE / "libraries.py")


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_goes_on(library: str, lab: Lab) -> None:
    """Beside it runs the same, undisturbed. Two snapshots, killed, restored from both."""
    needs(1, *LIBRARIES[library][1])
    out = lab.folder / "lines"
    # By default, JAX reserves three quarters of the free GPU memory.
    less = {"XLA_PYTHON_CLIENT_MEM_FRACTION": "0.1"}
    undisturbed = lab.plain(
        PROGRAM, library, "--out", str(lab.folder / "undisturbed"), environment=less
    )
    pid = lab.plain(PROGRAM, library, "--out", str(out), environment=lab.resident())
    wait_lines(out, 20, lab.logs, 120)
    snapshots = []
    for _ in range(2):
        snapshots.append(lab.dump(pid).snapshot)
        wait_lines(out, len(lines(out)) + 60, lab.logs)
    lab.kill(pid)
    found = lines(out)
    for snapshot, mode in zip(reversed(snapshots), ("full", "lazy"), strict=True):
        restored = lab.restore(snapshot, mode=mode)
        wait_lines(out, len(lines(out)) + 60, lab.logs)
        lab.kill(restored.pid)
        same(lines(out), max(found, lines(out), key=len))
        found = max(found, lines(out), key=len)
    same(found, wait_lines(lab.folder / "undisturbed", len(found), lab.logs, 120))
    lab.kill(undisturbed)


@pytest.mark.parametrize(("library", "ranks"), [("fsdp", 1), ("gloo", 2)])
def test_ranks_under_torchrun(library: str, ranks: int, lab: Lab) -> None:
    """`icecore run --gpu` of torchrun: two snapshots, killed, restored from both."""
    needs(1, *OTHERS[library][1])
    words = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), PROGRAM)
    jobs = [
        lab.run(name, *words, library, "--out", str(lab.folder / name), network=True)
        for name in ("undisturbed", "train")
    ]

    def log() -> str:
        return jobs[1].log_path("stderr").read_text()[-3000:]

    out = lab.folder / "train"
    wait_lines(out, 20, log, 120)
    snapshots = []
    for _ in range(2):
        snapshots.append(lab.dump("train").snapshot)
        wait_lines(out, len(lines(out)) + 60, log)
    lab.kill(jobs[1].pid)
    found = lines(out)
    for snapshot in reversed(snapshots):
        restored = lab.restore(snapshot)
        wait_lines(out, len(lines(out)) + 60, log)
        lab.kill(restored.pid)
        same(lines(out), max(found, lines(out), key=len))
        found = max(found, lines(out), key=len)
    same(found, wait_lines(lab.folder / "undisturbed", len(found), log, 120))
    lab.kill(jobs[0].pid)


def test_a_profiled_process_is_refused_and_goes_on(lab: Lab) -> None:
    """The driver cannot checkpoint it."""
    needs(1, *OTHERS["profile"][1])
    out = lab.folder / "lines"
    pid = lab.plain(PROGRAM, "profile", "--out", str(out), environment=lab.resident())
    wait_lines(out, 20, lab.logs, 120)
    for _ in range(2):
        with pytest.raises(DumpFailed) as caught:
            lab.dump(pid)
        assert "profiler" in caught.value.cure
        wait_lines(out, len(lines(out)) + 60, lab.logs)
    lab.kill(pid)
