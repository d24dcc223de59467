"""Resident device memory on a real GPU: training goes on bit for bit through windows, kills and restores, and from memory that stayed on the GPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from icecore.host.resident.client import Keeper

from .conftest import needs
from .first import TRAIN, reference
from .jobs import Lab, lines, same, wait_lines
from .resident import Resident, held, lineage

pytestmark = pytest.mark.timeout(900)


@pytest.mark.parametrize("part", [lineage, held])
def test_training(part: object, tmp_path: Path) -> None:
    needs(1, "torch")
    made = Resident(tmp_path, 2.0)
    try:
        part(made)  # type: ignore[operator]
    finally:
        made.close()


def test_training_under_run_gpu(lab: Lab) -> None:
    needs(1, "torch")
    wanted = reference(lab.folder)
    out = lab.folder / "losses"
    job = lab.run("train", TRAIN, "--out", str(out), "--pause", "0.02")
    wait_lines(out, 20, lambda: job.log_path("stderr").read_text())
    [process] = Keeper(job.directory / "resident").processes()
    assert process.size > 32 << 20
    snapshots = [lab.dump("train").snapshot for _ in range(2)]
    same(wait_lines(out, len(lines(out)) + 20), wanted)
    lab.kill(job.pid)
    for snapshot in reversed(snapshots):
        restored = lab.restore(snapshot)
        same(wait_lines(out, len(lines(out)) + 30), wanted)
        lab.kill(restored.pid)
