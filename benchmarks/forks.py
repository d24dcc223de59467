#!/usr/bin/env python3
"""What workers that a process forks cost in the window, and of the machine's memory: a job with four
workers that read its memory, against the same job without any.

The workers stay, or the job forks them again every 0.7 s, as data loaders do for each epoch. All jobs
run at once; each round takes a snapshot of each.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from contextlib import ExitStack, suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, running, scratch, show
from benchmarks.worker import Worker

PART = "forks"
WINDOW_TARGET, MEMORY_TARGET = 1.5, 1.1
_WORKERS = 4
#: How long its workers live, in seconds; 0: it has none.
CASES = {"no workers": 0.0, "4 workers": 86400.0, "4 workers, forked every 0.7 s": 0.7}


def work(case: str, mib: int) -> None:
    """Be the job: ``mib`` of memory, and workers that read it."""
    data = bytearray(os.urandom(mib * MIB))
    print(len(data), flush=True)
    lives = CASES[case]
    while not lives:
        time.sleep(1.0)
    while True:
        workers = []
        for _ in range(_WORKERS):
            pid = os.fork()
            if not pid:
                _read(data, time.monotonic() + lives)
                os._exit(0)
            workers.append(pid)
        for pid in workers:
            os.waitpid(pid, 0)


def _read(data: bytearray, until: float) -> None:
    at = 0
    while time.monotonic() < until:
        at = (at * 31 + data[at] + 4099) % len(data)
        time.sleep(0.002)


def memory(root: int) -> int:
    """Bytes of memory of a process and its workers; what they share counts once."""
    total = 0
    with suppress(OSError):  # one that has just ended
        workers = Path(f"/proc/{root}/task/{root}/children").read_text().split()
        for pid in (str(root), *workers):
            lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
            total += next(int(line.split()[1]) for line in lines if line.startswith("Pss:")) << 10
    return total


def measure(mib: int, rounds: int) -> list[Result]:
    """All figures of this part.

    Args:
        mib: Memory of each job in MiB.
        rounds: How often everything is done.
    """
    found = Rounds()
    with scratch(PART) as folder, ExitStack() as stack:
        jobs = {
            case: stack.enter_context(running(__file__, "--be", case, "--mib", str(mib)))
            for case in CASES
        }
        time.sleep(1.0)
        for turn in range(-1, rounds):  # the first round makes the parents of the others
            progress(f"{PART}: round {turn + 1} of {rounds}")
            at = turn % len(CASES)  # the first of a round has the coldest memory
            for case in [*list(CASES)[at:], *list(CASES)[:at]]:
                with Worker() as worker:
                    pid = jobs[case]
                    place = folder / str(pid)
                    before = memory(pid)
                    worker.ask("open", path=str(place), create=not place.exists())
                    done = worker.ask("dump", pid=pid, job="forks")
                    after = memory(pid)
                if turn >= 0:
                    found.add(case, done["window"])
                found.add(f"memory {case}", after / max(1, before))
    first, *others = CASES
    return [
        result
        for case in others
        for result in (
            Result(
                PART,
                f"window / window without workers: {case}",
                found.ratio(case, first),
                WINDOW_TARGET,
                note=f"{found.median(case):.3f} s of {found.median(first):.3f} s",
            ),
            Result(
                PART,
                f"memory of the tree after a dump / before: {case}",
                found.of(f"memory {case}"),
                MEMORY_TARGET,
            ),
        )
    ]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Snapshots of jobs with forked workers.")
    parser.add_argument("--mib", type=int, default=400, help="memory of each job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--be", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        work(arguments.be, arguments.mib)
    show(measure(arguments.mib, arguments.rounds), Console(width=200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
