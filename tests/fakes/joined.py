"""The fake libcuda and the fake driver on one machine, and jobs that dumps and restores meet there;
rule: nothing of a job is left after its test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from tests.fakes import job, ring
from tests.fakes.foreseen import Foreseen, lines_after, size_of
from tests.fakes.machine import HERE, Machine
from tests.programs import driving

MIB = 1 << 20


class Job:
    """A job of `tests.fakes.job`.

    Args:
        folder: Its output goes there.
    """

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        *,
        gpus: tuple[int, ...] = (0,),
        mib: int = 4,
        buffers: int = 3,
        children: int = 0,
        late: str = "",
        freed: bool = False,
        pool: int = 0,
        unseen: bool = False,
        left: int = 0,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.machine, self.folder = machine, folder
        self.mib, self.buffers, self.pool = mib, buffers, pool
        self._foreseen = Foreseen(job.foreseen(mib, buffers))
        self.outs = [
            folder / "lines",
            *(folder / f"lines.{number}" for number in range(1, children + 1)),
        ]
        more = {
            **({"late": late} if late else {}),
            **({"freed": True} if freed else {}),
            **({"unseen": True} if unseen else {}),
            "pool": pool,
            "left": left,
        }
        self._start(
            "job.py", {"gpus": gpus, "mib": mib, "buffers": buffers, "children": children, **more}
        )

    def _start(self, program: str, order: dict[str, Any], **more: str) -> None:
        machine, folder = self.machine, self.folder
        with open(folder / "log", "wb") as log:
            self.process = subprocess.Popen(
                [
                    sys.executable,
                    "-S",
                    str(HERE / program),
                    json.dumps({"out": str(self.outs[0]), **order}),
                ],
                env={**machine.environment(), **more},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd=folder,
            )
        self.pid = self.process.pid
        self.wait_steps(3)
        self.pids = driving.tree_of(self.pid)

    @property
    def resident(self) -> int:
        """Bytes of its resident memory."""
        return len(self.outs) * (self.buffers * self.mib + self.pool) * MIB

    def lines(self, number: int = 0) -> list[str]:
        """What one of its processes has written."""
        with suppress(FileNotFoundError):
            return self.outs[number].read_text().split("\n")[:-1]
        return []

    def wait_steps(self, more: int, seconds: float = 20.0) -> None:
        """Wait until every process has made so many steps more than now."""
        before = [(out, size_of(out)) for out in self.outs]
        end = time.monotonic() + seconds
        while any(lines_after(out, size) < more for out, size in before):
            assert time.monotonic() < end, f"no steps: {self._log()}"
            time.sleep(0.005)

    def _log(self) -> str:
        with suppress(FileNotFoundError):
            return (self.folder / "log").read_text()[-2000:]
        return ""

    def goes_on(self) -> None:
        """It makes steps, and every line is what an undisturbed process would have written."""
        self.wait_steps(4)
        for number in range(len(self.outs)):
            lines = self.lines(number)
            assert lines == self._foreseen.first(len(lines))

    def reap(self) -> None:
        """After a dump that stopped it, or a kill."""
        end = time.monotonic() + 20
        for pid in self.pids:
            while os.path.exists(f"/proc/{pid}"):
                with suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
                assert time.monotonic() < end, f"process {pid} is still there"
                time.sleep(0.002)

    def kill(self) -> None:
        """End it, restored or not."""
        for pid in driving.members(self.folder):
            driving.kill_tree(pid)
        self.reap()


class Ring(Job):
    """Ranks of `tests.fakes.ring`, which share memory: each has a buffer that the one before
    writes, and 2 MiB of its own.

    Args:
        let_go: They release the handles of what they have mapped.
        ipc: The buffers are cudaMalloc's, and shared by CUDA's legacy IPC.
        nccl: They look as if they used NCCL, and were started with these settings.
    """

    def __init__(
        self,
        machine: Machine,
        folder: Path,
        *,
        ranks: int = 2,
        mib: int = 4,
        let_go: bool = False,
        ipc: bool = False,
        nccl: dict[str, str] | None = None,
    ) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._look(machine, folder, ranks, mib)
        order = {"ranks": ranks, "mib": mib, "let_go": let_go, "ipc": ipc, "nccl": nccl is not None}
        self._start("ring.py", order, **(nccl or {}))

    @classmethod
    def at(cls, machine: Machine, folder: Path, ranks: int = 2, mib: int = 4) -> Ring:
        """Of one that somebody else started."""
        found = cls.__new__(cls)
        found._look(machine, folder, ranks, mib)
        return found

    def _look(self, machine: Machine, folder: Path, ranks: int, mib: int) -> None:
        self.machine, self.folder = machine, folder
        self.mib, self.ranks, self.buffers = mib, ranks, 2
        self._rounds = Foreseen(ring.foreseen(ranks, mib))
        self.outs = [folder / "lines", *(folder / f"lines.{number}" for number in range(1, ranks))]

    @property
    def resident(self) -> int:
        """Bytes, each counted once."""
        return self.ranks * (self.mib + 2) * MIB

    def goes_on(self) -> None:
        """Every rank makes steps, for which it needs all others' memory, and every line is right."""
        self.wait_steps(6)
        found = [self.lines(number) for number in range(self.ranks)]
        wanted = self._rounds.first(max(map(len, found)))
        for rank, lines in enumerate(found):
            assert lines == [step[rank] for step in wanted[: len(lines)]]
