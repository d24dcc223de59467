"""Trainings with forked workers on a real GPU: nothing is changed of them, and their losses are
those of an undisturbed run, bit for bit.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from icecore.dumper.observe.inspection import inspect_tree
from icecore.dumper.options import DumpOptions
from icecore.dumper.preflight.prediction import predict
from icecore.host.criu.program import find_criu
from icecore.host.kernel import procfs

from .conftest import needs
from .jobs import HERE, Lab, lines, same, wait_lines

pytestmark = pytest.mark.timeout(400)

LOADER = str(HERE / "loader.py")
STEPS = 1500
#: Name → what the training is told.
JOBS: dict[str, tuple[str, ...]] = {
    "epochs": (),
    "persistent": ("--persistent",),
    "compile": ("--persistent", "--how", "compile"),
    "save_by_thread": ("--persistent", "--save", "thread"),
    "save_by_process": ("--persistent", "--save", "process"),
    "nvml": ("--persistent", "--nvml", "{folder}/nvml"),
}
_references: dict[tuple[str, ...], list[str]] = {}


@pytest.fixture(scope="module")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("references")


def reference(scratch: Path, job: str) -> list[str]:
    """The lines of an undisturbed run. Checkpoints and loggers change nothing; new workers in each
    epoch do, because each time a seed is drawn from the generator that shuffles.
    """
    words = JOBS[job]
    key = tuple(word for word in ("--persistent", "compile") if word in words)
    if key not in _references:
        out = scratch / f"reference{len(_references)}"
        told = [word for one in key for word in (("--how", one) if one == "compile" else (one,))]
        subprocess.run(
            [sys.executable, LOADER, "--out", str(out), "--steps", str(STEPS), *told],
            check=True,
            timeout=300,
            cwd=scratch,
        )
        _references[key] = lines(out)
        assert len(_references[key]) == STEPS
        print(f"reference {key}: {STEPS} steps", flush=True)
    return _references[key]


def tell(root: int) -> None:
    """What preflight finds, a line each."""
    found = inspect_tree(root, find_criu(), "/dev/shm", DumpOptions())
    assert found.gpus is not None
    for one in found.gpus.processes:
        print(
            f"  CUDA: process {one.pid}, {dict(one.contexts)} bytes, {one.resident >> 20} MiB resident",
            flush=True,
        )
    for one in found.gpus.orphans:
        own = next(p for p in found.processes if p.pid == one.pid)
        files = sum(d.target.startswith("/dev/nvidia") for d in own.descriptors)
        mapped = sum(m.path.startswith("/dev/nvidia") for m in own.mappings)
        print(
            f"  no CUDA: process {one.pid} ({own.status.name}), {files} descriptors, {mapped} mappings of device files",
            flush=True,
        )
    print("  predicted:", predict(found), flush=True)


def goes_on(lab: Lab, out: Path, wanted: Sequence[str], more: int = 30) -> None:
    found = wait_lines(out, len(lines(out)) + more, lab.logs, 120)
    same(found, wanted)
    print(f"  {len(found)} losses are right", flush=True)


def run(
    lab: Lab,
    wanted: Sequence[str],
    words: Sequence[str],
    environment: dict[str, str],
    modes: Sequence[str] = ("full", "lazy"),
) -> None:
    """Two snapshots while it runs, both restored, each killed in between; what was restored is
    dumped again.
    """
    out = lab.folder / "losses"
    (lab.folder / "saves").mkdir()
    pid = lab.plain(LOADER, "--out", str(out), "--pause", "0.03", *words, environment=environment)
    wait_lines(out, 15, lab.logs)
    tell(pid)
    taken = []
    for _ in range(2):
        taken.append(lab.dump(pid).snapshot)
        goes_on(lab, out, wanted, 60)  # an epoch ends, and new workers are forked
    lab.kill(pid)
    for snapshot, mode in zip(reversed(taken), modes, strict=True):
        restored = lab.restore(snapshot, mode=mode)
        goes_on(lab, out, wanted, 60)
        last = restored.pid
        if snapshot == taken[0]:
            break
        lab.kill(restored.pid)
    pids = procfs.tree(last)
    again = lab.dump(last, stop=True).snapshot
    lab.reap(pids)
    lab.reap_ended()  # workers that were forked since
    restored = lab.restore(again)
    goes_on(lab, out, wanted)
    lab.kill(restored.pid)


@pytest.mark.parametrize("how", ["resident", "driver"])
@pytest.mark.parametrize("job", [job for job in JOBS if job != "save_by_process"])
def test_a_training_with_workers(job: str, how: str, lab: Lab, scratch: Path) -> None:
    needs(1, "torch")
    wanted = reference(scratch, job)
    words = [word.format(folder=lab.folder) for word in JOBS[job]]
    run(
        lab,
        wanted,
        words,
        {"GLOO_SOCKET_IFNAME": "lo", **(lab.resident() if how == "resident" else {})},
    )
    if job == "nvml":
        found = lines(lab.folder / "nvml")
        kinds = [line.split()[0] for line in found]
        print(
            "  NVML:",
            len(found),
            "readings,",
            kinds.count("error"),
            "errors:",
            sorted({line for line in found if line.startswith("error")}),
            flush=True,
        )
        assert kinds[-1] == "ok" and kinds.count("error") <= 3, (
            "an error for each restore at the most"
        )


@pytest.mark.parametrize("job", ["epochs", "save_by_process"])
def test_under_run_gpu(job: str, lab: Lab, scratch: Path) -> None:
    """`icecore run --gpu` and `--gpu-map`, which here maps the only GPU to itself. The process that
    saves checkpoints has a context on the GPU and NCCL too, so it must be started under `run --gpu`.
    """
    needs(1, "torch")
    wanted = reference(scratch, job)
    out = lab.folder / "losses"
    (lab.folder / "saves").mkdir()
    started = lab.run(
        "train",
        LOADER,
        "--out",
        str(out),
        "--pause",
        "0.03",
        *JOBS[job],
        environment={"GLOO_SOCKET_IFNAME": "lo"},
    )
    wait_lines(out, 15, lambda: started.log_path("stderr").read_text())
    snapshots = [lab.dump("train").snapshot for _ in range(2)]
    same(wait_lines(out, len(lines(out)) + 60), wanted)
    lab.kill(started.pid)
    for snapshot in reversed(snapshots):
        restored = lab.restore(snapshot, gpu_map={"0": "0"})
        same(wait_lines(out, len(lines(out)) + 60, seconds=120), wanted)
        lab.kill(restored.pid)


def test_a_worker_that_ends_by_itself_after_a_restore(lab: Lab) -> None:
    """It closes and unmaps what it inherited, and libcuda's exit handlers run in it."""
    needs(1, "torch")
    out = lab.folder / "lines"
    pid = lab.plain("-c", _ENDING, str(out))
    wait_lines(out, 3, lab.logs)
    pids = procfs.tree(pid)
    children = [one for one in pids if one != pid]
    tell(pid)
    snapshot = lab.dump(pid, stop=True).snapshot
    lab.reap(pids)
    restored = lab.restore(snapshot)
    for child in (one for one in procfs.tree(restored.pid) if one != restored.pid):
        print(
            "  restored child:", sorted({d.target for d in procfs.descriptors(child)}), flush=True
        )
    Path(f"{out}.go").touch()
    found = wait_lines(out, len(lines(out)) + 4, lab.logs, 60)
    print(f"  {len(children)} children:", found, flush=True)
    assert [line for line in found if line.startswith("child")] == [
        "child 0 ended: 0",
        "child 1 ended: 0",
    ]
    assert found[-1] == "sum 2097152.0"
    lab.kill(restored.pid)


#: A CUDA process with two forked children, which end as programs do (not by _exit) once there is a
#: file.
_ENDING = """
import os, sys, time, torch
out = sys.argv[1]
def tell(*words):
    with open(out, "a") as file:
        print(*words, file=file, flush=True)
data = torch.ones(1 << 21, device="cuda")
pinned = torch.ones(1 << 20).pin_memory()
torch.cuda.synchronize()
children = []
for number in range(2):
    pid = os.fork()
    if pid == 0:
        while not os.path.exists(out + ".go"):
            time.sleep(0.01)
        if number:
            for name in os.listdir("/proc/self/fd"):
                if int(name) > 2:
                    try:
                        os.close(int(name))
                    except OSError:
                        pass
        sys.exit(0)
    children.append(pid)
for step in range(3):
    tell("begun", step)
while not os.path.exists(out + ".go"):
    time.sleep(0.01)
tell("goes on")
for number, pid in enumerate(children):
    tell("child", number, "ended:", os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
tell("sum", data.sum().item())
while True:
    time.sleep(1)
"""


def test_no_worker_is_left_behind() -> None:
    """Checks the machine, for whoever runs this again."""
    mine = [
        pid
        for pid in map(int, filter(str.isdecimal, os.listdir("/proc")))
        if LOADER.encode() in _command(pid)
    ]
    assert not mine


def _command(pid: int) -> bytes:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return b""
