"""benchmarks/gpu.py --resident on a machine with fake GPUs: every part is gone through, and its
figures are there.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from tests.fakes.machine import MIB, Machine

# Last, and not first as the benchmarks themselves have it: icecore is the installed one.
sys.path.append(str(Path(__file__).resolve().parents[2]))

from benchmarks import gpu_phases
from benchmarks.gpu_resident import PARTS, Setting, lacking, measure

GIB = 1 << 30


@pytest.mark.criu
@pytest.mark.torture
def test_all_parts(joined: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_phases, "LEAST_BYTES", MIB)
    environment = joined.environment(resident=False)
    setting = Setting(
        24 * MIB / GIB,
        PARTS[:-2],
        distinct=8 * MIB / GIB,
        memory="driver",
        block=4,
        environment=environment,
        place=joined.directory,
        reserve=False,
    )
    measure(setting, tmp_path / "figures")
    # What was measured before is told together with what is measured now.
    found = {
        r.what.split(": ", 1)[1]: r
        for r in measure(replace(setting, parts=PARTS[-2:]), tmp_path / "figures")
    }
    for name in (
        "window, nothing changed",
        "window, 5 % changed",
        "window, all changed",
        "restore from what stayed on the GPU, until progress",
        "the driver's way / restore",
        "the driver's calls / window, nothing changed",
        "the driver's own restore and unlock / restore",
        "driver's way: scan / memory, huge pages",
        "driver's way: driver out",
    ):
        assert found[name].median > 0
    figures = json.loads((tmp_path / "figures").read_text())[f"{setting.gib:g}"]
    # All 24 MiB are looked at, and what is stored of them once.
    assert (
        8 * MIB <= figures["stored first"][0] < 20 * MIB
        and 8 * MIB <= figures["stored all changed"][0] < 20 * MIB
    )
    assert figures["stored nothing changed"][0] < MIB


def test_what_does_not_fit_is_said() -> None:
    assert not lacking(Setting(0.1))
    assert "host's memory" in lacking(Setting(10_000.0))
