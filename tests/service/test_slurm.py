"""Under Slurm: a batch job that a higher partition preempts goes on, on the other node. A real
Slurm of two nodes, from Debian's packages, unpacked into a directory.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.service.supervision.grace import Grace, find_grace
from tests.cli.conftest import Cli, until

pytestmark = [pytest.mark.criu, pytest.mark.usefixtures("needs_criu")]

_TOOL = Path(__file__).with_name("slurm-cluster")
_COUNTER = """
import sys, time
for number in range(int(sys.argv[1])):
    print("line", number, flush=True)
    time.sleep(0.2)
"""
_BATCH = """#!/bin/bash
export ICECORE_STATE={folder}/state.$SLURMD_NODENAME
unset LD_LIBRARY_PATH
exec {python} -P -m icecore.cli run --name job-$SLURM_JOB_ID --resume --every 5s \\
    --on-term snapshot --preempted-exit 99 -- {python} {folder}/counter.py {lines}
"""


@dataclass
class Cluster:
    """A running Slurm, and icecore for its jobs."""

    folder: Path
    environment: dict[str, str]
    cli: Cli

    def slurm(self, *words: str) -> str:
        """What a command of Slurm's prints."""
        done = subprocess.run(
            words,
            env=self.environment,
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, f"{words}: {done.stdout}{done.stderr}"
        return done.stdout

    def submit(self, *options: str, lines: int, out: str) -> str:
        """Submit a counter as users do; its job id."""
        script = self.folder / f"{out}.sh"
        script.write_text(_BATCH.format(folder=self.folder, python=sys.executable, lines=lines))
        words = ("--parsable", "--requeue", "--open-mode=append", "-o", out, "-e", f"{out}.err")
        return self.slurm("sbatch", *words, *options, str(script)).strip()

    def about(self, job: str) -> dict[str, str]:
        """What Slurm says of a job."""
        words = self.slurm("scontrol", "-o", "show", "job", job).split()
        return dict(word.split("=", 1) for word in words if "=" in word)

    def lines(self, out: str) -> list[str]:
        path = self.folder / out
        return path.read_text().splitlines() if path.exists() else []


@pytest.fixture
def cluster(cli: Cli) -> Iterator[Cluster]:
    folder = cli.folder
    tool = [str(_TOOL), "start", str(folder)]
    started = subprocess.run(
        tool, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300
    )
    try:
        assert started.returncode == 0, started.stdout + started.stderr
        shown = subprocess.run(
            ["bash", "-c", f". {folder}/env; env -0"], capture_output=True, check=True, timeout=20
        ).stdout
        own = dict(os.fsdecode(pair).split("=", 1) for pair in shown.split(b"\0") if pair)
        made = Cluster(folder, {**own, "ICECORE_REPOSITORY": str(folder / "repository")}, cli)
        (folder / "counter.py").write_text(_COUNTER)
        cli.run("init")
        yield made
        with suppress(AssertionError):
            made.slurm("scancel", "--full", "-s", "KILL", "--state=RUNNING")
    finally:
        subprocess.run([str(_TOOL), "stop", str(folder)], timeout=60, check=False)
        for state in folder.glob("state.*"):
            for job in Registry(state).instances():
                if job.alive:
                    job.kill(signal.SIGKILL)
        until(lambda: not _daemons(folder), "stopped", 30)


def _daemons(folder: Path) -> list[int]:
    """The processes of this Slurm that still run."""
    found = []
    for path in folder.glob("*.pid"):
        with suppress(ValueError, OSError):
            pid = int(path.read_text())
            if not procfs.is_zombie(pid):
                found.append(pid)
    return found


def test_preempted_jobs_go_on_on_another_node(cluster: Cluster) -> None:
    lines = 150
    first = cluster.submit("-p", "low", "--signal=B:USR1@15", lines=lines, out="first")
    until(lambda: len(cluster.lines("first")) > 20, "20 lines")
    own = {**cluster.environment, "SLURM_JOB_ID": first}
    for partition, grace in (
        ("low", Grace(20.0, "GraceTime of partition low")),
        ("high", Grace(5.0, "KillWait of Slurm")),  # which is not preempted
    ):
        assert find_grace({**own, "SLURM_JOB_PARTITION": partition}) == grace
    node = cluster.about(first)["NodeList"]
    words = ("--parsable", "-p", "high", "-w", node, "-o", "/dev/null", "--wrap", "sleep 900")
    other = cluster.slurm("sbatch", *words).strip()
    second = cluster.submit("-p", "low", "--signal=B:USR1@15", lines=40, out="second")
    for job, out, count in ((first, "first", lines), (second, "second", 40)):
        until(lambda: cluster.lines(out)[-1:] == [f"line {count - 1}"], "whole", 180)  # noqa: B023
        assert cluster.lines(out) == [f"line {number}" for number in range(count)]
        until(lambda: cluster.about(job)["JobState"] == "COMPLETED", "completed", 30)  # noqa: B023
    about, preempting = cluster.about(first), cluster.about(other)
    cluster.slurm("scancel", other)
    assert about["Restarts"] == "1"
    # Slurm may give the node to the first job once more before the other one gets it.
    assert about["NodeList"] != node or preempting["StartTime"] >= about["EndTime"]
    said = (cluster.folder / "first.err").read_text()
    assert "SIGUSR1; stopping it with a snapshot" in said and "was restored from" in said


@pytest.mark.torture
def test_at_the_time_limit_a_job_leaves_and_comes_back(cluster: Cluster) -> None:
    lines = 450
    job = cluster.submit("-p", "low", "-t", "1", "--signal=B:USR1@20", lines=lines, out="limited")
    until(lambda: cluster.lines("limited")[-1:] == [f"line {lines - 1}"], "whole", 400)
    assert cluster.lines("limited") == [f"line {number}" for number in range(lines)]
    assert int(cluster.about(job)["Restarts"]) >= 1
