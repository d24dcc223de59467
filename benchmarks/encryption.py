#!/usr/bin/env python3
"""What encryption costs: dumps of a running job, and import and export of three successive CRIU
image directories, encrypted and plain in turns.

Everything lies on tmpfs and is read warm, so that nothing but the processor limits either. Opening
(Argon2id) is done once, before.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import Result, Rounds, progress, scratch, show, tree_bytes
from benchmarks.jobs import job
from benchmarks.peers import JOBS, dump_three, sized, warm
from benchmarks.reserve import Reserve
from benchmarks.worker import Worker

PART = "encryption"
MIB = 1 << 20
_KINDS = ("plain", "encrypted")
_DUMPS = ("dump 1st", "dump 2nd")
_STEPS = ("import 1st", "import 2nd", "import 3rd", "export")


def measure(name: str, arguments: Sequence[str], rounds: int) -> list[Result]:
    """The ratios for one job.

    Args:
        name: The test program.
        arguments: Its arguments.
    """
    found = Rounds()
    with scratch(PART) as folder:
        _dumps(name, arguments, rounds, folder, found)
        directories = dump_three(name, arguments, folder)
        warm(directories)
        sizes = [tree_bytes(directory) for directory in directories]
        with Reserve(2 * max(sizes) + 256 * MIB) as reserve:
            for turn in range(-1, rounds):
                progress(f"{PART}: {name}, round {turn + 1} of {rounds}")
                for kind in _KINDS if turn % 2 else reversed(_KINDS):
                    rates, cpu = _one(kind, folder / "work", directories, sizes, reserve)
                    if turn < 0:
                        continue  # the first brings libraries in
                    for step in _STEPS:
                        found.add(f"{kind} {step}", rates[step])
                        found.add(f"{kind} cpu {step}", cpu[step])
    results = []
    for step in (*_DUMPS, *_STEPS):
        rates_ = ", ".join(f"{kind} {found.median(f'{kind} {step}'):.2f}" for kind in _KINDS)
        seconds = ", ".join(f"{kind} {found.median(f'{kind} cpu {step}'):.2f}" for kind in _KINDS)
        what = f"{name}, {sizes[0] / 1e9:.2f} GB: {step}, speed encrypted / plain"
        ratios = found.ratio(f"encrypted {step}", f"plain {step}")
        results.append(
            Result(PART, what, ratios, 0.5, "higher", note=f"GB/s: {rates_}; CPU s: {seconds}")
        )
    return results


def _dumps(name: str, arguments: Sequence[str], rounds: int, folder: Path, found: Rounds) -> None:
    """Dump a running job twice, into either kind of repository in turns: from the call to the
    commit.
    """
    with job(name, folder, arguments) as running:
        for turn in range(-1, rounds):
            progress(f"{PART}: {name}, dumps, round {turn + 1} of {rounds}")
            for kind in _KINDS if turn % 2 else reversed(_KINDS):
                with Worker() as worker:
                    worker.ask(
                        "open",
                        path=str(folder / "dumps"),
                        create=True,
                        encrypted=kind == "encrypted",
                    )
                    for step in _DUMPS:
                        before = worker.ask("cpu")["seconds"]
                        seconds = worker.ask("dump", pid=running.pid, job="job")["seconds"]
                        if turn >= 0:
                            found.add(f"{kind} {step}", _memory(running.pid) / seconds / 1e9)
                            found.add(f"{kind} cpu {step}", worker.ask("cpu")["seconds"] - before)
                shutil.rmtree(folder / "dumps")


def _memory(pid: int) -> int:
    """Bytes that the process has in memory."""
    status = Path(f"/proc/{pid}/status").read_text()
    return next(
        int(line.split()[1]) << 10 for line in status.splitlines() if line.startswith("VmRSS:")
    )


def _one(
    kind: str, work: Path, directories: list[Path], sizes: list[int], reserve: Reserve
) -> tuple[dict[str, float], dict[str, float]]:
    """GB/s and CPU seconds of each step."""
    work.mkdir()
    rates: dict[str, float] = {}
    cpu: dict[str, float] = {}
    try:
        with Worker() as worker:
            worker.ask(
                "open", path=str(work / "repository"), create=True, encrypted=kind == "encrypted"
            )

            def timed(step: str, size: int, verb: str, **options: str) -> str:
                before = worker.ask("cpu")["seconds"]
                with reserve.lent():
                    started = time.perf_counter()
                    answer = worker.ask(verb, **options)
                    rates[step] = size / (time.perf_counter() - started) / 1e9
                cpu[step] = worker.ask("cpu")["seconds"] - before
                return str(answer.get("snapshot", ""))

            for step, directory, size in zip(_STEPS, directories, sizes, strict=False):
                snapshot = timed(
                    step, size, "import_directory", directory=str(directory), job="job"
                )
            (work / "out").mkdir()
            timed(_STEPS[-1], sizes[-1], "export", snapshot=snapshot, directory=str(work / "out"))
    finally:
        shutil.rmtree(work, ignore_errors=True)
    return rates, cpu


def main() -> None:
    """This part alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--job", choices=JOBS, action="append", help="default: all")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--mib", type=int, help="another size of the job's memory")
    options = parser.parse_args()
    results: list[Result] = []
    for name in options.job or JOBS:
        results += measure(name, sized(name, options.mib), options.rounds)
    show(results, Console(width=200))


if __name__ == "__main__":
    main()
