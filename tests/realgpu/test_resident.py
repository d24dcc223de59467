"""Resident device memory on a real GPU: whatever the program is, it goes on bit for bit through
windows, kills and restores.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import icecore
from icecore.host.resident.client import Keeper

from .conftest import needs
from .first import TRAIN, reference
from .jobs import HERE, Lab, lines, same, wait_lines
from .resident import Resident, held, ranks, stress

pytestmark = pytest.mark.timeout(900)

_NVCC = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
_PAUSE = ("--pause", "0.02")
#: What writes lines to the file that is named in the end, the same in every run; the modules that
#: it needs; the MiB that are resident at the least.
PROGRAMS = {
    "eager": ((sys.executable, TRAIN, *_PAUSE, "--out"), ("torch",), 30),
    "graph": ((sys.executable, TRAIN, *_PAUSE, "--how", "graph", "--out"), ("torch",), 30),
    "compile": ((sys.executable, TRAIN, *_PAUSE, "--how", "compile", "--out"), ("torch",), 30),
    "serve": (
        (sys.executable, str(HERE / "serve.py"), "--socket", "{folder}/{name}.socket", "--load"),
        ("torch",),
        2000,
    ),
    "nvcc": (("{folder}/others",), (), 256),
    "features": (("{folder}/features",), (), 0),
    "cupy": ((sys.executable, str(HERE / "others.py"), "cupy"), ("cupy",), 128),
    "jax": ((sys.executable, str(HERE / "others.py"), "jax"), ("jax",), 128),
}


@pytest.mark.parametrize("program", PROGRAMS)
def test_a_program_goes_on(program: str, lab: Lab) -> None:
    """Beside it run, undisturbed, the same without the preload, and with it; all three do the same."""
    command, modules, resident = PROGRAMS[program]
    needs(1, *modules)
    if program in ("nvcc", "features"):
        if not os.path.exists(_NVCC):
            pytest.skip("there is no nvcc")
        built = Path(command[0].format(folder=lab.folder))
        subprocess.run(
            [_NVCC, "-O2", "-rdc=true", "-o", built, HERE / f"{built.name}.cu"],
            check=True,
            timeout=120,
        )

    def start(name: str, environment: dict[str, str]) -> tuple[int, Path]:
        words = [
            word.format(folder=lab.folder, name=name) for word in (*command, f"{{folder}}/{name}")
        ]
        return lab.plain(*words[1:], program=words[0], environment=environment), lab.folder / name

    without, unmarked = start("without", {}), start("with", lab.resident())
    pid, out = start("lines", lab.resident())
    wait_lines(out, 20, lab.logs)
    assert lab.resident_bytes(pid) >= resident << 20
    snapshots = []
    for _ in range(2):
        print(f"{len(lines(out))} lines before the dump", flush=True)
        snapshots.append(lab.dump(pid).snapshot)
        print(f"{len(lines(out))} lines after it", flush=True)
        wait_lines(out, len(lines(out)) + 20, lab.logs)
    lab.kill(pid)
    found = lines(out)
    for number, snapshot in enumerate(reversed(snapshots)):
        (lab.folder / "lines.socket").unlink(missing_ok=True)
        restored = lab.restore(snapshot, mode=("full", "lazy")[number])
        print(f"{len(lines(out))} lines after the restore", flush=True)
        wait_lines(out, len(lines(out)) + 50, lab.logs)
        lab.kill(restored.pid)
        found = max(found, lines(out), key=len)
        same(lines(out), found)
    for other, about in (without, unmarked):
        same(found, wait_lines(about, len(found), lab.logs))
        lab.kill(other)


def test_what_encoders_store(lab: Lab) -> None:
    """Encoders read copies of device memory where they are, in the host region."""
    needs(1, "torch")
    about = ("--width", "2048", "--ballast", "3")
    wanted = reference(lab.folder, *about, steps=800)
    out = lab.folder / "losses"
    pid = lab.plain(TRAIN, "--out", str(out), *_PAUSE, *about, environment=lab.resident())
    wait_lines(out, 20, lab.logs)
    snapshots = []
    for _ in range(3):
        snapshots.append(lab.dump(pid, encoders=6).snapshot)
        same(wait_lines(out, len(lines(out)) + 20, lab.logs), wanted)
    assert [row["encoders"] for row in lab.rows] == [[6]] * 3
    lab.kill(pid)
    for snapshot, mode in zip(reversed(snapshots), ("full", "lazy", "full"), strict=True):
        restored = lab.restore(snapshot, mode=mode)
        same(wait_lines(out, len(lines(out)) + 30, lab.logs), wanted)
        lab.kill(restored.pid)


def test_memory_that_stayed(tmp_path: Path) -> None:
    needs(1, "torch")
    made = Resident(tmp_path, 2.0)
    try:
        held(made)
    finally:
        made.close()


def test_memory_that_a_crash_left(lab: Lab) -> None:
    """Killed in the middle of a step, twice; the second time what the first restore brought."""
    needs(1, "torch")
    wanted = reference(lab.folder)
    out = lab.folder / "losses"
    job = lab.run("train", TRAIN, "--out", str(out), "--pause", "0.02", keep_resident=True)
    wait_lines(out, 20, lambda: job.log_path("stderr").read_text())
    snapshot = lab.dump("train").snapshot
    for _ in range(2):
        same(wait_lines(out, len(lines(out)) + 30), wanted)
        os.kill(job.main_process(), signal.SIGKILL)
        job.wait(60)
        assert job.description.resident
        [process] = Keeper(Path(job.description.resident)).processes()
        print("left:", process, flush=True)
        assert process.retained and not process.alive and process.size > 32 << 20
        restored = lab.restore(snapshot, from_resident=True)
        assert restored.job is not None
        job = restored.job
    same(wait_lines(out, len(lines(out)) + 30), wanted)
    lab.dump("train")
    lab.kill(job.pid)
    icecore.Registry(Path(lab.config.state)).remove(job)


@pytest.mark.parametrize("gpus", [2, 4])
def test_ranks_that_have_each_others_memory(gpus: int, lab: Lab) -> None:
    needs(gpus, "torch")
    ranks(lab, gpus, 1.0)


def test_a_job_that_never_rests(lab: Lab) -> None:
    needs(1, "torch")
    stress(lab, 10, 0.0)


def test_a_job_that_rests_on_a_full_gpu(lab: Lab) -> None:
    """What has no room on it is stored before the window."""
    stress(lab, 5, 6.0)
    assert lab.rows[0]["copied"]["dump.resident.precopy"] > 2 << 30


def test_training_under_run_gpu(lab: Lab) -> None:
    needs(1, "torch")
    wanted = reference(lab.folder)
    out = lab.folder / "losses"
    job = lab.run("train", TRAIN, "--out", str(out), "--pause", "0.02")
    wait_lines(out, 20, lambda: job.log_path("stderr").read_text())
    # What it has allocated is handed over once it has allocated nothing for a while.
    keeper, end = Keeper(job.directory / "resident"), time.monotonic() + 60
    while sum(process.size for process in keeper.processes()) <= 32 << 20:
        assert time.monotonic() < end
        time.sleep(0.1)
    snapshots = [lab.dump("train").snapshot for _ in range(2)]
    same(wait_lines(out, len(lines(out)) + 20), wanted)
    lab.kill(job.pid)
    for snapshot in reversed(snapshots):
        restored = lab.restore(snapshot)
        same(wait_lines(out, len(lines(out)) + 30), wanted)
        lab.kill(restored.pid)
