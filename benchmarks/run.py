#!/usr/bin/env python3
"""All benchmarks, one table: what was reached, what should be, on which machine. ``make bench
ARGS=--quick`` tries them out.

Ratios within one run on the same input are what counts; nothing else should run on the machine
meanwhile.
"""

from __future__ import annotations

import argparse
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks import commits, encryption, peers, restore, scale, window
from benchmarks.common import Result, progress, show, write

RESULTS = Path(__file__).resolve().parent / "results"


def parts(quick: bool, mib: int, rounds: int) -> dict[str, Callable[[], list[Result]]]:
    """The parts by name; ``mib`` of memory for window and restore."""
    return {
        "window": partial(window.measure, mib, rounds),
        "restore": partial(restore.measure, mib, rounds),
        **{
            f"peers-{name}": partial(
                peers.measure, name, peers.sized(name, 200 if quick else None), rounds
            )
            for name in peers.JOBS
        },
        **{
            f"encryption-{name}": partial(
                encryption.measure, name, peers.sized(name, 200 if quick else None), rounds
            )
            for name in encryption.JOBS
        },
        "commits": partial(commits.measure, (1, 100, 1000) if quick else commits.SIZES),
        "scale": partial(
            scale.measure,
            (1000, 10_000) if quick else scale.SIZES,
            1_000_000 if quick else scale.MARKED,
        ),
    }


def main() -> int:
    """Measure, print, and say by the exit status whether everything could be measured (not whether
    targets are met).
    """
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--quick",
        action="store_true",
        help="small jobs, one round: whether it works, not how fast it is",
    )
    parser.add_argument("--rounds", type=int, help="default: 5")
    parser.add_argument(
        "--mib", type=int, help="memory of the job of window and restore; default: 4 GB"
    )
    parser.add_argument(
        "--part",
        action="append",
        help="window, restore, peers-JOB, encryption-JOB (inference, training), commits, scale; default: all",
    )
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS}/DATE.json")
    options = parser.parse_args()
    chosen = parts(
        options.quick,
        options.mib or (300 if options.quick else 3815),
        options.rounds or (1 if options.quick else 5),
    )
    unknown = set(options.part or ()) - set(chosen)
    if unknown:
        parser.error(f"no such part: {', '.join(sorted(unknown))}")
    results: list[Result] = []
    failed = []
    for name, measure in chosen.items():
        if options.part and name not in options.part:
            continue
        try:
            results += measure()
        except Exception:  # noqa: BLE001 - the other parts are still worth measuring
            progress(f"{name}: {traceback.format_exc()}")
            failed.append(name)
    console = Console(width=None if sys.stdout.isatty() else 200)
    show(results, console)
    if options.save:
        console.print(f"written: {write(results, RESULTS)}")
    if failed:
        console.print(f"[red]could not be measured: {', '.join(failed)}[/red]")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
