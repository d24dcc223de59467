#!/usr/bin/env python3
"""What a job of `icecore run --gpu` costs while nobody takes a snapshot of it: the same job without
icecore, with its preload, and (collectives) with --no-resident, in turn. What allocations cost:
tests/resident/gpu_probe.py overhead.

Needs an NVIDIA GPU and PyTorch; for collectives two.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import Result, Rounds, progress, show, write

PART = "gpu steady"
#: How a job is started → words before its command, and which jobs that is measured with.
WAYS: dict[str, tuple[list[str], set[str]]] = {
    "without icecore": ([], {"steps", "collectives"}),
    "run --gpu": (["run", "--gpu", "--rm"], {"steps", "collectives"}),
    "run --gpu --no-resident": (["run", "--gpu", "--no-resident", "--rm"], {"collectives"}),
}
_FIRST = "without icecore"
_JOB = str(Path(__file__).resolve().parent / "gpu_steady_job.py")
_SECONDS = 150.0


def once(job: str, way: str, number: int) -> dict[str, float]:
    """The figures of one run."""
    words, command, name = (
        WAYS[way][0],
        [sys.executable, _JOB, job],
        f"steady-{os.getpid()}-{number}",
    )
    icecore = [sys.executable, "-P", "-m", "icecore", "-q"]
    if words:
        command = [*icecore, *words, "--name", name, "--", *command]
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_SECONDS
        )
    except subprocess.TimeoutExpired:
        if words:  # the job outlives who started it
            subprocess.run(
                [*icecore, "kill", name, "-s", "KILL"], stdin=subprocess.DEVNULL, timeout=60
            )
        raise
    if done.returncode:
        raise RuntimeError(f"{job}, {way}: {done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(
        next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    )
    return found


def measure(job: str, rounds: int) -> list[Result]:
    """All ways of one job, in turn."""
    ways = [way for way, (_, jobs) in WAYS.items() if job in jobs]
    found = {way: Rounds() for way in ways}
    for turn in range(rounds):
        for at, way in enumerate(ways):
            progress(f"{PART}: {job}, {way}, round {turn + 1} of {rounds}")
            for name, value in once(job, way, turn * len(ways) + at).items():
                found[way].add(name, value)
    results = []
    for way in ways[1:]:
        for name, values in found[way].figures.items():
            base = found[_FIRST]
            ratios = tuple(
                value / other for value, other in zip(values, base.of(name), strict=True)
            )
            if job == "steps":
                note = f"{found[way].median(name):.3f} and {base.median(name):.3f} ms; without icecore {min(base.of(name)):.3f} to {max(base.of(name)):.3f}"
            else:
                note = f"{found[way].median(name) / 1e9:.0f} and {base.median(name) / 1e9:.0f} GB/s"
            results.append(
                Result(
                    PART,
                    f"{name}: {way} / {_FIRST}",
                    ratios,
                    None,
                    "lower" if job == "steps" else "higher",
                    note=note,
                )
            )
    return results


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--jobs",
        default="steps",
        help="steps, collectives, or both, by a comma (default: %(default)s)",
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", type=Path, help="write JSON into this folder")
    options = parser.parse_args()
    results = [result for job in options.jobs.split(",") for result in measure(job, options.rounds)]
    show(results, Console(width=160))
    if options.save:
        write(results, options.save)


if __name__ == "__main__":
    main()
