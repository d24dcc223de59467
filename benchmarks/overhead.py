#!/usr/bin/env python3
"""What `icecore run --every` costs a job on CPUs: its steps per second with and without.

Plain and supervised runs alternate, so that the noise of the machine hits both; each round gives one
ratio. The job keeps GIB of numbers and changes a quarter of them over and over, 16 MiB a step. A
supervised run is measured from the job's first steps on, so it includes the first, full snapshot.

    benchmarks/overhead.py --rounds 4 --seconds 90 --every 30s --gib 1
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

from benchmarks.common import Result, progress, show, write  # noqa: E402

_BLOCK = 16 << 20
#: Steps done, and the processor seconds that they took.
_PROGRESS = struct.Struct("<Qd")
_READY_SECONDS = 120.0
_END_SECONDS = 120.0
_WARM_STEPS = 50


def work(path: str, gib: float) -> None:
    """Be the job: compute until a signal ends it, and note each step in a file."""
    import numpy as np

    blocks = max(4, round(gib * (1 << 30)) // _BLOCK)
    numbers = np.random.default_rng(7).random((blocks, _BLOCK // 4), dtype=np.float32)
    out = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    for step in range(1 << 62):
        block = numbers[step % (blocks // 4)]
        np.multiply(block, np.float32(0.999), out=block)
        np.add(block, np.float32(0.001), out=block)
        os.pwrite(out, _PROGRESS.pack(step + 1, time.process_time()), 0)


@dataclass(frozen=True)
class Sample:
    """How far the job was at a moment. Times in seconds."""

    at: float
    steps: int
    processor: float


@dataclass
class Measured:
    """One run.

    Attributes:
        rate: Steps per second.
        per_processor: Steps per second of the job's processor time.
        seconds: Its length.
        windows: Seconds for which snapshots stopped the job.
    """

    seconds: float
    rate: float
    per_processor: float
    windows: list[float] = field(default_factory=list)


def look(path: Path) -> Sample:
    """Return how far the job is."""
    try:
        steps, processor = _PROGRESS.unpack(path.read_bytes())
    except (OSError, struct.error):
        steps, processor = 0, 0.0
    return Sample(time.monotonic(), steps, processor)


def measure(path: Path, process: subprocess.Popen[str], seconds: float) -> Measured:
    """Measure a job that has just been started.

    Raises:
        RuntimeError: It does not run.
    """
    end = time.monotonic() + _READY_SECONDS
    while (first := look(path)).steps < _WARM_STEPS:
        if process.poll() is not None or time.monotonic() > end:
            raise RuntimeError("the job does not run")
        time.sleep(0.01)
    time.sleep(seconds)
    if process.poll() is not None:
        raise RuntimeError(f"the job ended with status {process.returncode}")
    last = look(path)
    steps, took = last.steps - first.steps, last.at - first.at
    return Measured(took, steps / took, steps / max(1e-9, last.processor - first.processor))


@contextmanager
def started(
    words: list[str], environment: dict[str, str], out: Path, log: Path
) -> Iterator[subprocess.Popen[str]]:
    """Start a process; end it with SIGINT, which a supervisor passes to its job."""
    with open(out, "w") as said, open(log, "w") as errors:
        process = subprocess.Popen(
            words, env=environment, stdin=subprocess.DEVNULL, stdout=said, stderr=errors, text=True
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGINT)
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def run_plain(folder: Path, job: list[str], seconds: float) -> Measured:
    """Measure the job alone."""
    path = folder / "steps"
    with started([*job, str(path)], dict(os.environ), folder / "out", folder / "err") as process:
        return measure(path, process, seconds)


def run_supervised(folder: Path, job: list[str], seconds: float, every: str) -> Measured:
    """Measure the job under `icecore run --every`, with a repository of its own."""
    path, out, err = folder / "steps", folder / "out", folder / "err"
    environment = {
        **os.environ,
        "ICECORE_STATE": str(folder / "state"),
        "ICECORE_REPOSITORY": str(folder / "repository"),
    }
    icecore = [sys.executable, "-m", "icecore", "--json"]
    subprocess.run(
        [*icecore, "init"], env=environment, check=True, capture_output=True, timeout=120
    )
    words = [*icecore, "run", "--name", "overhead", "--every", every, "--on-term", "pass", "--"]
    with started([*words, *job, str(path)], environment, out, err) as process:
        found = measure(path, process, seconds)
    events = [json.loads(line) for line in out.read_text().splitlines() if line.startswith("{")]
    failed = [one["error"] for one in events if one["event"] == "run.snapshot_failed"]
    if failed:
        raise RuntimeError(f"a snapshot failed: {failed[0]}")
    found.windows = [one["window_seconds"] for one in events if one["event"] == "run.snapshot"]
    return found


@contextmanager
def scratch(below: str | None) -> Iterator[Path]:
    """A directory that is removed afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="icecore-bench-overhead-", dir=below))
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def main() -> int:
    """Measure, print the table, and write the figures."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else "")
    parser.add_argument("--rounds", type=int, default=4, help="pairs of runs (4)")
    parser.add_argument("--seconds", type=float, default=90.0, help="length of a run (90)")
    parser.add_argument("--every", default="30s", help="interval between snapshots (30s)")
    parser.add_argument("--gib", type=float, default=1.0, help="memory of the job in GiB (1)")
    parser.add_argument("--below", help="where repositories are made (the temporary directory)")
    parser.add_argument("--out", default="/tmp/icecore-overhead", help="folder for the figures")
    parser.add_argument("--work", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.work:
        work(given.work, given.gib)
    job = [sys.executable, __file__, "--gib", str(given.gib), "--work"]
    plain: list[Measured] = []
    supervised: list[Measured] = []
    for number in range(given.rounds):
        # Each kind is first in every second round.
        for kind in ("plain", "supervised") if number % 2 == 0 else ("supervised", "plain"):
            with scratch(given.below) as folder:
                if kind == "plain":
                    plain.append(run_plain(folder, job, given.seconds))
                else:
                    supervised.append(run_supervised(folder, job, given.seconds, given.every))
        a, b = plain[-1], supervised[-1]
        progress(
            f"round {number + 1}: {a.rate:.1f} and {b.rate:.1f} steps/s,"
            f" windows {', '.join(f'{window:.2f} s' for window in b.windows)}"
        )
    results = _results(plain, supervised, given.every)
    from rich.console import Console

    show(results, Console(width=160))
    write(results, Path(given.out))
    return 0


def _results(plain: list[Measured], supervised: list[Measured], every: str) -> list[Result]:
    pairs = list(zip(plain, supervised, strict=True))
    windows = [window for one in supervised for window in one.windows]
    if not windows:
        raise RuntimeError("no snapshot was taken: make the runs longer")
    what = f"run --every {every} / plain"
    note = f"{len(windows)} snapshots, window {statistics.median(windows):.2f} s (median)"
    return [
        Result(
            "overhead",
            f"steps per second, {what}",
            tuple(b.rate / a.rate for a, b in pairs),
            better="higher",
            note=note,
        ),
        Result(
            "overhead",
            f"steps per processor second, {what}",
            tuple(b.per_processor / a.per_processor for a, b in pairs),
            better="higher",
        ),
        Result(
            "overhead",
            "time stopped in windows / time of the run",
            tuple(sum(one.windows) / one.seconds for one in supervised),
        ),
        Result("overhead", "window", tuple(windows), unit="s"),
    ]


if __name__ == "__main__":
    sys.exit(main())
