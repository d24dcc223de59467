"""A process that CRIU kills and brings back: its device memory stays where it is meanwhile."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from icecore.host.criu.program import Criu
from icecore.host.resident.client import Agent, State
from icecore.host.resident.window import give_back
from tests.fakes.machine import HERE, MIB, Machine, Process, until
from tests.host.criu_harness import parametrize

from .test_window import take

#: Counts in device memory and beside it; writes both, and a hash of the rest of that memory.
JOB = """
import sys, time
sys.path.insert(0, sys.argv[1])
from target import *
start()
at = alloc(8 * MIB)[1]
fill(at, 8 * MIB, 11)
word = ctypes.c_ulonglong.from_address(at)
word.value = k = 0
out = os.open(sys.argv[2], os.O_RDWR | os.O_CREAT, 0o600)
while True:
    k += 1
    word.value += 1
    os.pwrite(out, f"{k:12} {word.value:12} {hashed(at + 8, MIB)}".encode(), 0)
    time.sleep(0.005)
"""


class Job(Process):
    """The job, with nothing open that leads out of it."""

    def __init__(self, machine: Machine, out: Path) -> None:
        self.out = out
        self.machine = machine
        with open("/dev/null", "r+b") as null:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-c", JOB, str(HERE), str(out)],
                env=machine.environment(),
                stdin=null,
                stdout=null,
                stderr=null,
                start_new_session=True,
            )
        self.pid = self._process.pid
        machine.processes.append(self)
        until(lambda: out.exists() and self.state()[0] > 3)

    def state(self) -> tuple[int, int, str]:
        """(steps, steps counted on the device, hash)."""
        words = self.out.read_text().split() or ["0", "0", ""]
        return int(words[0]), int(words[1]), words[2]


def _wait_for_steps(job: Job, more: int) -> None:
    beyond = job.state()[0] + more
    until(lambda: job.state()[0] >= beyond)


@parametrize
def test_killed_and_brought_back(criu: Criu, machine: Machine, tmp_path: Path) -> None:
    images = machine.root / "images"
    images.mkdir()
    job = Job(machine, tmp_path / "out")
    before = job.state()
    for _ in range(2):
        take(job)
        subprocess.run(
            [
                str(criu.path),
                "dump",
                "-t",
                str(job.pid),
                "-D",
                str(images),
                "-o",
                "dump.log",
                "-v3",
                "--network-lock",
                "skip",
            ],
            check=True,
            timeout=60,
        )
        if job._process.returncode is None:
            job._process.wait(10)
        until(lambda: not os.path.exists(f"/proc/{job.pid}"))
        assert machine.used() == 8 * MIB
        [held] = machine.keeper.processes()
        assert (held.retained, held.size) == (True, 8 * MIB)
        subprocess.run(
            [
                str(criu.path),
                "restore",
                "-D",
                str(images),
                "-o",
                "restore.log",
                "-v3",
                "-d",
                "--network-lock",
                "skip",
            ],
            check=True,
            timeout=60,
        )
        agent = Agent(machine.directory, job.pid)
        report = agent.report()
        assert (report.state, report.token) == (State.UNMAPPED, held.token)
        give_back(agent)
        _wait_for_steps(job, 4)
        now = job.state()
        assert now[0] == now[1]
        assert now[2] == before[2]
        until(
            lambda: (
                [(one.alive, one.retained) for one in machine.keeper.processes()] == [(True, False)]
            )
        )
    os.kill(job.pid, 9)
    until(lambda: machine.used() == 0)
