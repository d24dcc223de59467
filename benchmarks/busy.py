#!/usr/bin/env python3
"""What a snapshot of a job that never rests costs: stored bytes against what the snapshot keeps,
the first window against a plain ``criu dump`` of the same job, and the job's pace meanwhile.

The job has a heap that cannot be compressed, and one writing thread for each core. Three patterns:
``hot`` rewrites one quarter of the heap all the time; ``sweep`` goes through all of it, over and
over; ``steps`` rewrites half of it in a burst, then computes for as long. Each dump is the first
into a new repository.
"""

from __future__ import annotations

import argparse
import mmap
import os
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, scratch, show
from benchmarks.jobs import plain_dump
from benchmarks.worker import Worker
from icecore.host.criu.program import Criu, find_criu

PART = "busy"
PATTERNS = ("hot", "sweep", "steps")
_READY_SECONDS = 120.0
_PACE_SECONDS = 3.0
_UNIT = 256 << 10


def work(pattern: str, mib: int, threads: int, page: Path) -> None:
    """Be the job: count units of work in ``page``, one counter (u64) for each thread."""
    import threading

    import numpy as np

    heap = np.random.default_rng(0).integers(0, 1 << 63, mib * MIB // 8, np.uint64)
    with open(page, "r+b") as file:
        counters = np.frombuffer(mmap.mmap(file.fileno(), mmap.PAGESIZE), np.uint64)

    def run(thread: int) -> None:
        own = np.array_split(heap, threads)[thread]
        units = np.array_split(own, max(1, own.nbytes // _UNIT))
        spare, at = np.empty_like(units[0]), 0
        hot = {"hot": len(units) // 4, "sweep": len(units), "steps": len(units) // 2}[pattern]
        while True:
            unit = units[at % hot]
            if pattern == "steps" and (at // hot) % 2:
                np.multiply(unit, 3, out=spare[: len(unit)])
            else:
                unit += np.uint64(at + 1)
            # The pace is that of the computation: memory alone would be rewritten in no time.
            for _ in range(8):
                np.multiply(unit, 3, out=spare[: len(unit)])
            at += 1
            counters[thread] += np.uint64(1)

    for thread in range(1, threads):
        threading.Thread(target=run, args=(thread,), daemon=True).start()
    run(0)


class Busy:
    """The running job: its process, and its pace."""

    def __init__(self, process: subprocess.Popen[bytes], page: Path) -> None:
        self.pid = process.pid
        with open(page, "rb") as file:
            self._page = mmap.mmap(file.fileno(), mmap.PAGESIZE, prot=mmap.PROT_READ)

    def units(self) -> int:
        """Units of work that are done."""
        return sum(struct.unpack_from("<64Q", self._page))

    def pace(self, seconds: float = _PACE_SECONDS) -> float:
        """Units a second, undisturbed."""
        before, began = self.units(), time.monotonic()
        time.sleep(seconds)
        return (self.units() - before) / (time.monotonic() - began)


@contextmanager
def busy(pattern: str, mib: int, threads: int, folder: Path) -> Iterator[Busy]:
    """The job, at its pace; it is killed afterwards."""
    page = folder / "counters"
    page.write_bytes(bytes(mmap.PAGESIZE))
    process = subprocess.Popen(
        [sys.executable, __file__, "--be", pattern, "--mib", str(mib), "--threads", str(threads)],
        env={**os.environ, "BUSY_PAGE": str(page), "OPENBLAS_NUM_THREADS": "1"},
        cwd="/",
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        job, end = Busy(process, page), time.monotonic() + _READY_SECONDS
        while job.units() < 100 * threads:
            if time.monotonic() > end or process.poll() is not None:
                raise RuntimeError(f"the job did not start: {process.poll()}")
            time.sleep(0.05)
        yield job
    finally:
        process.kill()
        process.wait(60)


def measure(mib: int, rounds: int, threads: int, patterns: tuple[str, ...]) -> list[Result]:
    """All figures of this part.

    Args:
        mib: Heap of the job in MiB.
        rounds: How often everything is done.
        threads: Threads of the job.
    """
    criu, found = find_criu(), Rounds()
    with scratch(PART) as folder:
        for pattern in patterns:
            with busy(pattern, mib, threads, folder) as job:
                for turn in range(rounds):
                    progress(f"busy: {pattern}, round {turn + 1} of {rounds}")
                    _round(criu, job, folder, pattern, found)
    return [result for pattern in patterns for result in _results(found, pattern)]


def _round(criu: Criu, job: Busy, folder: Path, pattern: str, found: Rounds) -> None:
    images, repository = folder / "images", folder / "repository"
    try:
        found.add(f"plain {pattern}", plain_dump(criu, job.pid, images))
    finally:
        shutil.rmtree(images, ignore_errors=True)
    try:
        with Worker() as worker:
            worker.ask("open", path=str(repository), create=True)
            pace = job.pace()
            before, began = job.units(), time.monotonic()
            done = worker.ask("dump", pid=job.pid, job="busy", pre_copy="on")
            took, units = time.monotonic() - began, job.units() - before
            pace = (pace + job.pace()) / 2  # other work on the machine comes and goes
        stored = sum(path.stat().st_size for path in repository.rglob("*") if path.is_file())
    finally:
        shutil.rmtree(repository, ignore_errors=True)
    window = done["window"]
    precopy = done["events"]["dump.precopy"]
    found.add(f"window {pattern}", window)
    found.add(f"stored {pattern}", stored)
    found.add(f"kept {pattern}", done["events"]["dump.done"]["logical"])
    found.add(f"pace {pattern}", units / (took - window))
    found.add(f"undisturbed {pattern}", pace)
    found.add(f"took {pattern}", took)
    found.add(f"precopy {pattern}", precopy["seconds"])
    found.add(f"ahead {pattern}", precopy["stored"] / (1 << 20))


def _results(found: Rounds, pattern: str) -> list[Result]:
    def median(name: str) -> float:
        return found.median(f"{name} {pattern}")

    return [
        Result(
            PART,
            f"stored / kept: {pattern}",
            found.ratio(f"stored {pattern}", f"kept {pattern}"),
            1.15,
            note=f"{median('stored') / MIB:.0f} MiB; {median('ahead'):.0f} MiB before the window",
        ),
        Result(
            PART,
            f"first window / plain criu dump: {pattern}",
            found.ratio(f"window {pattern}", f"plain {pattern}"),
            0.35,
            note=f"{median('window'):.2f} s of {median('plain'):.2f} s",
        ),
        Result(
            PART,
            f"the job's pace outside of the window / undisturbed: {pattern}",
            found.ratio(f"pace {pattern}", f"undisturbed {pattern}"),
            0.8,
            "higher",
            note=f"the dump took {median('took'):.1f} s, pre-copy {median('precopy'):.1f} s",
        ),
    ]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Snapshots of a job that never rests.")
    parser.add_argument("--mib", type=int, default=1024, help="heap of the job")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--patterns", default=",".join(PATTERNS))
    parser.add_argument("--be", choices=PATTERNS, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        work(arguments.be, arguments.mib, arguments.threads, Path(os.environ["BUSY_PAGE"]))
    results = measure(
        arguments.mib, arguments.rounds, arguments.threads, tuple(arguments.patterns.split(","))
    )
    show(results, Console(width=200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
