#!/usr/bin/env python3
"""How long a job stands still for a snapshot, against a plain ``criu dump`` to tmpfs of the same
job in the same minute.

The job is memory-pattern: private memory that cannot be compressed and changes only on request. Two
clocks: the dumper's (the window it reports, against the seconds of the criu command) and the job's
own (the longest gap between two of its ticks, in both cases). Two settings: the default, in which
pre-copy runs before the window, and ``pre_copy off``, in which the window does all the work.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, scratch, show
from benchmarks.jobs import Watch, job, plain_dump
from benchmarks.reserve import Reserve
from benchmarks.worker import Worker
from icecore.dumper.options import DumpOptions
from icecore.host.criu.program import Criu, find_criu
from tests.programs import driving

PART = "window"
#: What changes before a dump, in percent of the cells and of the pages of such a cell; and the
#: targets.
CASES = {
    "nothing changed": (0, 0, 0.35),
    "10 % of the cells changed": (10, 100, 0.45),
    "10 % of the pages of every cell changed": (100, 10, 0.45),
    "all changed": (100, 100, 0.7),
}
SETTINGS = {"default": "auto", "pre_copy off": "off"}
_EXTRA = 200 * MIB


def measure(mib: int, rounds: int, staging: int = DumpOptions().staging_bytes) -> list[Result]:
    """All figures of this part.

    Args:
        mib: Private memory of the job in MiB.
        rounds: How often everything is done.
        staging: The dumper's staging bound in bytes.
    """
    criu, found, threads = find_criu(), Rounds(), os.cpu_count() or 1
    # The largest step takes the staging and one more copy of everything in the repository.
    with (
        scratch(PART) as folder,
        job("memory-pattern", folder, ["--mib", str(mib)]) as running,
        Reserve((mib + 256) * MIB) as reserve,
    ):
        number = 0
        for turn in range(rounds):
            for setting, pre_copy in SETTINGS.items():
                progress(f"window: round {turn + 1} of {rounds}, {setting}")
                _plain(criu, running, folder, reserve, found, setting)
                repository = folder / "repository"
                options = {"pre_copy": pre_copy, "staging_bytes": staging}
                _dump(repository, running, reserve, "", options, found)
                for case, (cells, pages, _) in CASES.items():
                    if cells:
                        number += 1
                        driving.change(running.state_dir, number, cells, pages)
                    _dump(repository, running, reserve, f"{case}, {setting}", options, found)
                shutil.rmtree(repository)
        with Worker() as worker:
            rates = worker.ask("scan", pid=running.pid, rounds=rounds, threads=threads)
    for floor, scan in zip(rates["floors"], rates["scans"], strict=True):
        found.add("floor", floor)
        found.add("scan", scan)
    return _results(found, staging, threads)


def _plain(
    criu: Criu,
    running: driving.Running,
    folder: Path,
    reserve: Reserve,
    found: Rounds,
    setting: str,
) -> None:
    images = folder / "images"
    try:
        with reserve.lent(), Watch(running.state_dir) as watch:
            found.add(f"plain, {setting}", plain_dump(criu, running.pid, images))
        found.add(f"plain gap, {setting}", watch.gap)
    finally:
        shutil.rmtree(images, ignore_errors=True)


def _dump(
    repository: Path,
    running: driving.Running,
    reserve: Reserve,
    name: str,
    options: dict[str, object],
    found: Rounds,
) -> None:
    """One dump by a fresh process; the first into a repository (``name`` empty) is only the parent
    of the others.
    """
    with Worker() as worker:
        worker.ask("open", path=str(repository), create=not repository.exists())
        with reserve.lent(), Watch(running.state_dir) as watch:
            done = worker.ask("dump", pid=running.pid, job="memory-pattern", **options)
    if name:
        found.add(name, done["window"])
        found.add(f"gap of {name}", watch.gap)
        found.add(f"freeze of {name}", done["freeze"])
        found.add(f"scanned of {name}", done["scanned"])
        found.add(f"inside of {name}", done["inside"] - done["freeze"])
        found.add(f"spilled of {name}", done["spilled"])
    found.add("grown", done["grown"])


def _results(found: Rounds, staging: int, threads: int) -> list[Result]:
    results = []
    for setting in SETTINGS:
        plain, gap = f"plain, {setting}", f"plain gap, {setting}"
        for case, (_, _, target) in CASES.items():
            name = f"{case}, {setting}"
            note = (
                f"{found.median(name):.2f} s of {found.median(plain):.2f} s; CRIU's freeze {found.median(f'freeze of {name}'):.2f} s, "
                f"ours {found.median(f'inside of {name}'):.2f} s; scan floor {_floor_seconds(found, name):.2f} s"
                + ("; staging ran full" if found.median(f"spilled of {name}") else "")
            )
            results.append(
                Result(
                    PART,
                    f"window / plain criu dump: {name}",
                    found.ratio(name, plain),
                    target,
                    note=note,
                )
            )
            ticks = f"{found.median(f'gap of {name}'):.2f} s of {found.median(gap):.2f} s"
            results.append(
                Result(
                    PART,
                    f"job's own gap / gap of criu dump: {name}",
                    found.ratio(f"gap of {name}", gap),
                    target,
                    note=ticks,
                )
            )
    rates = f"{found.median('scan') / 1e9:.1f} of {found.median('floor') / 1e9:.1f} GB/s on {threads} threads"
    results.append(
        Result(
            PART,
            "scan / process_vm_readv into a reused buffer",
            found.ratio("scan", "floor"),
            0.7,
            "higher",
            note=rates,
        )
    )
    bound = (staging + _EXTRA) / MIB
    peak = (max(found.of("grown")) / MIB / bound,)
    note = f"{max(found.of('grown')) / MIB:.0f} MiB of {bound:.0f} MiB (staging bound {staging / MIB:.0f} + 200)"
    results.append(
        Result(
            PART, "peak extra memory of the dumper, the worst dump / bound", peak, 1.0, note=note
        )
    )
    return results


def _floor_seconds(found: Rounds, name: str) -> float:
    """What reading what was scanned takes at the floor's rate."""
    return found.median(f"scanned of {name}") / found.median("floor")


def main() -> None:
    """This part alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--mib", type=int, default=3815, help="private memory of the job (default: 4 GB)"
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--staging-mib", type=int, default=DumpOptions().staging_bytes // MIB)
    options = parser.parse_args()
    show(measure(options.mib, options.rounds, options.staging_mib * MIB), Console(width=200))


if __name__ == "__main__":
    main()
