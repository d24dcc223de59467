"""What the benchmarks of GPU jobs share: the job itself, the driver's own calls, the end of a tree.
Its rule: nothing of a job is left after its block.
"""

from __future__ import annotations

import contextlib
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from icecore.host.gpu.backend import find_backend
from icecore.host.kernel import procfs

_JOB = Path(__file__).with_name("gpu_job.py")
SECONDS = 180.0


class Job:
    """A root process with one child for each GPU; a context manager that ends them.

    Args:
        folder: Its output goes there.
        gib: Device memory of each child.
        gpus: How many children; they have GPUs 0, 1, … of ``present``, and begin again with 0 where
            there are fewer.
        environment: Beside this process's own.
        more: Further arguments of `gpu_job`.
    """

    def __init__(
        self,
        folder: Path,
        gib: float,
        gpus: int,
        *,
        present: int = 0,
        environment: Mapping[str, str] | None = None,
        more: Sequence[str] = (),
    ) -> None:
        folder.mkdir(exist_ok=True)
        self.states = [folder / f"state{number}" for number in range(gpus)]
        for state in self.states:
            state.mkdir()
        self._log = folder / "job.log"
        work = [
            [sys.executable, str(_JOB), str(state), str(gib), str(n % (present or gpus)), *more]
            for n, state in enumerate(self.states)
        ]
        if gpus == 1:
            command = work[0]
        else:
            run = "import subprocess, sys; [p.wait() for p in [subprocess.Popen(a) for a in eval(sys.argv[1])]]"
            command = [sys.executable, "-c", run, repr(work)]
        inherited = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        # Closed at once: a restore refuses to replace a file that another process writes to.
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={**inherited, **(environment or {})},
            )
        self.pid = self.process.pid

    def wait_step(self, since_ns: int) -> int:
        """When all have made a step after that time (ns since the epoch)."""
        end = time.monotonic() + SECONDS
        while (at := min(map(self._last, self.states))) <= since_ns:
            if time.monotonic() > end:
                raise RuntimeError(f"no step: {self._log.read_text(errors='replace')[-1500:]}")
            time.sleep(0.0005)
        return at

    @staticmethod
    def _last(state: Path) -> int:
        try:
            data = (state / "progress").read_bytes()[:16]
        except FileNotFoundError:
            return 0
        return int(struct.unpack("<QQ", data)[1]) if len(data) == 16 else 0

    def change(self, number: int, share: float) -> None:
        """Have every process draw a share of its memory anew."""
        for state in self.states:
            (state / "order").write_text(f"{number} {share}")
        end = time.monotonic() + SECONDS
        for state in self.states:
            while not (state / "done").exists() or (state / "done").read_text() != str(number):
                if time.monotonic() > end:
                    raise RuntimeError("the job did not change its memory")
                time.sleep(0.005)

    def __enter__(self) -> Job:
        return self

    def __exit__(self, *about: object) -> None:
        for pid in procfs.tree(self.pid) if procfs.exists(self.pid) else []:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait(60)


class Calls:
    """The driver's own calls for several processes at once, with their seconds."""

    def __init__(self) -> None:
        self._driver = find_backend().connect()

    def stop(self, pids: list[int]) -> float:
        """Lock and checkpoint."""
        return self._all(pids, lambda pid: self._driver.lock(pid, 10.0)) + self._all(
            pids, self._driver.checkpoint
        )

    def go(self, pids: list[int]) -> float:
        """Restore and unlock."""
        return self._all(pids, lambda pid: self._driver.restore(pid, {})) + self._all(
            pids, self._driver.unlock
        )

    @staticmethod
    def _all(pids: list[int], call: Any) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(len(pids)) as pool:
            list(pool.map(call, pids))
        return time.perf_counter() - began


def workers_of(root: int) -> list[int]:
    """The GPU processes of the job: the root itself, or its children."""
    return procfs.children(root) or [root]


def huge_pages(pids: Sequence[int]) -> float:
    """Which share of the private memory of processes lies in huge pages: of checkpointed ones, of
    what the driver has mapped there above all.
    """
    found = {"Anonymous": 0, "AnonHugePages": 0}
    for pid in pids:
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()[1:]:
            name, size = line.split(":")
            if name in found:
                found[name] += int(size.split()[0])
    return found["AnonHugePages"] / max(1, found["Anonymous"])


def kill(pid: int) -> list[int]:
    """Ends a tree; returns its pids."""
    pids = procfs.tree(pid)
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    return pids


def gone(pids: list[int]) -> None:
    """Wait until the pids are free."""
    end = time.monotonic() + SECONDS
    while any(procfs.exists(one) for one in pids):
        for one in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one, os.WNOHANG)
        if time.monotonic() > end:
            raise RuntimeError(f"processes {pids} do not go away")
        time.sleep(0.01)
