#!/usr/bin/env python3
"""Jobs with device memory: the window and the way back against what the driver alone takes, and against plain CRIU images with the driver's calls
around them (the way of CRIUgpu), on the same job in the same run.

Needs NVIDIA GPUs, PyTorch and cuda.bindings. One job for each GPU that is asked for, in one tree; each has the same device memory.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import struct
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import Result, Rounds, progress, scratch, show, write
from benchmarks.jobs import criu_run
from benchmarks.reserve import Reserve
from benchmarks.worker import Worker
from icecore.host import procfs
from icecore.host.criu import Criu, find_criu
from icecore.host.cuda.driver import Driver
from tests.programs import plain_criu

PART = "gpu"
GIB = 1 << 30
_JOB = Path(__file__).with_name("gpu_job.py")
_SECONDS = 180.0
#: Share of the device memory that changes before a dump.
CASES = {"nothing changed": 0.0, "2 % changed": 0.02, "all changed": 1.0}
_CRIU = ("--network-lock", "skip", "--manage-cgroups=ignore", "--file-locks", "--link-remap")


class Job:
    """A root process with one child for each GPU; a context manager that ends them."""

    def __init__(self, folder: Path, gib: float, gpus: int) -> None:
        self.states = [folder / f"state{number}" for number in range(gpus)]
        for state in self.states:
            state.mkdir()
        self._log = open(folder / "job.log", "wb")  # noqa: SIM115 - closed on leaving
        work = [[sys.executable, str(_JOB), str(state), str(gib), str(n)] for n, state in enumerate(self.states)]
        if gpus == 1:
            command = work[0]
        else:
            run = "import subprocess, sys; [p.wait() for p in [subprocess.Popen(a) for a in eval(sys.argv[1])]]"
            command = [sys.executable, "-c", run, repr(work)]
        environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
        self.process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=self._log, stderr=self._log, start_new_session=True, env=environment
        )
        self.pid = self.process.pid

    def wait_step(self, since_ns: int) -> int:
        """When all have made a step after that time (ns since the epoch)."""
        end = time.monotonic() + _SECONDS
        while (at := min(map(self._last, self.states))) <= since_ns:
            if time.monotonic() > end:
                raise RuntimeError(f"no step: {Path(self._log.name).read_text(errors='replace')[-1500:]}")
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
        end = time.monotonic() + _SECONDS
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
        self._log.close()


class Calls:
    """The driver's own calls for several processes at once, with their seconds."""

    def __init__(self) -> None:
        self._driver = Driver()

    def stop(self, pids: list[int]) -> float:
        """Lock and checkpoint."""
        return self._all(pids, lambda pid: self._driver.lock(pid, 10.0)) + self._all(pids, self._driver.checkpoint)

    def go(self, pids: list[int]) -> float:
        """Restore and unlock."""
        return self._all(pids, lambda pid: self._driver.restore(pid, {})) + self._all(pids, self._driver.unlock)

    @staticmethod
    def _all(pids: list[int], call: Any) -> float:
        began = time.perf_counter()
        with ThreadPoolExecutor(len(pids)) as pool:
            list(pool.map(call, pids))
        return time.perf_counter() - began


def workers_of(root: int) -> list[int]:
    """The GPU processes of the job: the root itself, or its children."""
    return procfs.children(root) or [root]


def measure(gib: float, gpus: int, rounds: int) -> list[Result]:
    """All figures; ``gib`` of device memory on each of ``gpus``."""
    criu, calls, found = find_criu(), Calls(), Rounds()
    # The largest step takes the driver's copy in the host's memory, as much staging, and as much in the repository.
    size = int(gib * gpus * GIB)
    with scratch(PART) as folder, Job(folder, gib, gpus) as job, Reserve(2 * size + 4 * GIB) as reserve, Worker() as worker:
        job.wait_step(0)
        worker.ask("open", path=str(folder / "repository"), create=True)
        progress("gpu: the first dump")
        _dump(worker, job, reserve, found, "first")
        number = 0
        for turn in range(rounds):
            progress(f"gpu: round {turn + 1} of {rounds}")
            pids = workers_of(job.pid)
            with reserve.lent():
                found.add("driver out", calls.stop(pids))
            found.add("driver back", calls.go(pids))
            _criugpu_dump(criu, calls, job, reserve, folder, found)
            if turn < rounds - 1:
                shutil.rmtree(folder / "images")
            for case, share in CASES.items():
                if share == 1.0 and turn:
                    continue  # once: each takes as much room in the repository
                number += 1
                job.change(number, share)
                _dump(worker, job, reserve, found, case)
        progress("gpu: restores")
        with reserve.lent():
            snapshot = worker.ask("dump", pid=job.pid, job="gpu", stop=True)["snapshot"]
        job.process.wait(60)
        for _ in range(rounds):
            for mode in ("full", "lazy"):
                _restore(worker, job, reserve, snapshot, mode, found)
        with plain_criu.adopting():
            _criugpu_restore(criu, calls, job, reserve, folder, found)
    return _results(found, gib, gpus)


def _dump(worker: Worker, job: Job, reserve: Reserve, found: Rounds, name: str) -> None:
    with reserve.lent():
        done = worker.ask("dump", pid=job.pid, job="gpu", max_window=600.0)
    phases: dict[str, float] = {k.removeprefix("dump.gpu."): v for k, v in done["phases"].items() if "gpu" in k}
    found.add(f"window {name}", done["window"])
    found.add(f"driver of {name}", sum(phases.values()))
    found.add(f"freeze of {name}", done["freeze"])
    found.add(f"stored {name}", done["stored"])
    found.add(f"seconds {name}", done["seconds"])
    progress(f"gpu: {name}: window {done['window']:.2f} s, {phases}, {done}")


def _criugpu_dump(
    criu: Criu, calls: Calls, job: Job, reserve: Reserve, folder: Path, found: Rounds
) -> None:
    images = folder / "images"
    shutil.rmtree(images, ignore_errors=True)
    images.mkdir()
    pids = workers_of(job.pid)
    with reserve.lent():
        began = time.perf_counter()
        calls.stop(pids)
        try:
            command: list[str | Path] = [criu.path, "dump", "-t", str(job.pid), "-D", images, "-o", "dump.log", "-v1"]
            criu_run([*command, "--leave-running", *_CRIU], images / "dump.log")
        finally:
            calls.go(pids)
        found.add("criugpu window", time.perf_counter() - began)


def _kill(pid: int) -> list[int]:
    """Ends a tree; returns its pids."""
    pids = procfs.tree(pid)
    for one in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(one, signal.SIGKILL)
    return pids


def _gone(pids: list[int]) -> None:
    """Wait until the pids are free."""
    end = time.monotonic() + _SECONDS
    while any(procfs.exists(one) for one in pids):
        for one in pids:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(one, os.WNOHANG)
        if time.monotonic() > end:
            raise RuntimeError(f"processes {pids} do not go away")
        time.sleep(0.01)


def _restore(worker: Worker, job: Job, reserve: Reserve, snapshot: str, mode: str, found: Rounds) -> None:
    with reserve.lent():
        done = worker.ask("restore", snapshot=snapshot, mode=mode)
        step = job.wait_step(done["called_ns"])
    found.add(f"{mode} step", (step - done["called_ns"]) / 1e9)
    at = {name: round(seconds / 1e9, 3) for name, seconds in done["at"].items()}
    progress(f"gpu: restore {mode}: progress after {(step - done['called_ns']) / 1e9:.2f} s, {at}")
    worker.ask("resident")
    pids = _kill(done["pid"])
    worker.ask("ended")
    _gone(pids)


def _criugpu_restore(
    criu: Criu, calls: Calls, job: Job, reserve: Reserve, folder: Path, found: Rounds
) -> None:
    images = folder / "images"
    with reserve.lent():
        called = time.time_ns()
        pid = plain_criu.restore(criu.path, images, _CRIU, _SECONDS)
        built = time.time_ns()
        found.add("driver restore", calls.go(workers_of(pid)))
        found.add("criugpu step", (job.wait_step(called) - called) / 1e9)
    progress(f"gpu: CRIUgpu: built after {(built - called) / 1e9:.2f} s")
    _gone(_kill(pid))


def _results(found: Rounds, gib: float, gpus: int) -> list[Result]:
    size = gib * GIB
    where = f"{gpus} × {gib:g} GiB"
    floor = tuple(a + b for a, b in zip(found.of("driver out"), found.of("driver back"), strict=True))
    results = [
        Result(PART, f"{where}: driver alone, out", tuple(size / s / 1e9 for s in found.of("driver out")), None, "higher", "GB/s a GPU"),
        Result(PART, f"{where}: driver alone, back", tuple(size / s / 1e9 for s in found.of("driver back")), None, "higher", "GB/s a GPU"),
        Result(
            PART,
            f"{where}: CRIUgpu's way: (window - driver) / driver",
            tuple((w - f) / f for w, f in zip(found.of("criugpu window"), floor, strict=True)),
        ),
    ]
    for case in CASES:
        own = zip(found.of(f"window {case}"), found.of(f"driver of {case}"), strict=True)
        note = f"window {found.median(f'window {case}'):.2f} s, stored {found.median(f'stored {case}') / 1e6:.0f} MB"
        results.append(
            Result(PART, f"{where}: (window - driver) / driver: {case}", tuple((w - d) / d for w, d in own), 0.15, note=note)
        )
    share = tuple(stored / (size * gpus) for stored in found.of("stored 2 % changed"))
    results.append(Result(PART, f"{where}: bytes added / device memory, 2 % changed", share, 0.025))
    back, theirs = found.median("driver back"), found.median("criugpu step")
    for mode in ("full", "lazy"):
        steps = found.of(f"{mode} step")
        note = f"{found.median(f'{mode} step'):.2f} s; driver {back:.2f} s, CRIUgpu's way {theirs:.2f} s"
        results.append(Result(PART, f"{where}: restore {mode} until progress / driver's restore", tuple(s / back for s in steps), 1.25, note=note))
        results.append(Result(PART, f"{where}: CRIUgpu's way / restore {mode}", tuple(theirs / s for s in steps), 2.0, "higher"))
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gib", type=float, default=16.0)
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write JSON into this folder")
    options = parser.parse_args()
    results = measure(options.gib, options.gpus, options.rounds)
    show(results, Console(width=180))
    if options.save:
        write(results, options.save)


if __name__ == "__main__":
    main()
