#!/usr/bin/env python3
"""Measure the dumper's own cost of storing cells with encoders: CPU time and context switches per
cell, and cells per second.

Cells of random bytes, all different, wait in this process's memory, as copies of device memory do.
The repository lies on tmpfs. The CPU time excludes the encoders. To compare two versions,
run this file in a checkout of each.
"""

from __future__ import annotations

import argparse
import resource
import sys
import threading
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from rich.console import Console

from benchmarks.common import Result, progress, scratch, show
from icecore.dumper.encode.encoders import Encoders
from icecore.dumper.memory.cells import EXTENT, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.pipeline import Pipeline
from icecore.dumper.memory.staging import ForeignSlot, Staging
from icecore.host.kernel.memory import HugeBuffer
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.manifest import Region
from icecore.store.snapshot.trial import Objective
from tests.store.images import local_place

PART = "encoders"
#: Cells that may wait.
_WAITING = 64
_STAGING = 64 << 20


def store(memory: HugeBuffer, cells: int, count: int, folder: Path) -> tuple[float, float, float]:
    """Store all cells with ``count`` encoders.

    Returns:
        Cells per second; the dumper's CPU seconds and context switches per cell.
    """
    start = memory.address
    regions = [Region(start, cells * CELL_BYTES, start, kind="device", lazy=False)]
    plan = plan_cells(regions, np.array([(start, cells * CELL_BYTES // PAGE)], EXTENT))
    room = threading.Semaphore(_WAITING)
    slots = [
        ForeignSlot(memory.view(at, at + CELL_BYTES), start + at, room.release)
        for at in range(0, cells * CELL_BYTES, CELL_BYTES)
    ]
    with (
        local_place(folder) as place,
        place.writer() as writer,
        Encoders(count, place.repository, 1, Objective(), lambda _: None, eager=True) as encoders,
        Staging(_STAGING) as staging,
        Pipeline(writer, staging, 2, encoders=encoders) as pipeline,
    ):
        encoders.start()
        for encoder in encoders._all:
            encoder.wait_ready()
        sink = pipeline.space(0, plan, regions, KnownCells.none())
        before, started = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
        for row, slot in enumerate(slots):
            room.acquire()
            pipeline.put(sink, row, slot)
        pipeline.drain()
        seconds = time.perf_counter() - started
        after = resource.getrusage(resource.RUSAGE_SELF)
        assert encoders.begun == count
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    switches = after.ru_nvcsw - before.ru_nvcsw + after.ru_nivcsw - before.ru_nivcsw
    return cells / seconds, cpu / cells, switches / cells


def measure(cells: int, count: int, rounds: int) -> list[Result]:
    """Return the figures of ``rounds`` rounds, after one warm-up round."""
    memory, random = HugeBuffer(cells * CELL_BYTES), np.random.default_rng(1)
    for at in range(0, cells * CELL_BYTES, CELL_BYTES):
        memory.view(at, at + CELL_BYTES)[:] = random.bytes(CELL_BYTES)
    found = []
    for turn in range(-1, rounds):
        progress(f"{PART}: round {turn + 1} of {rounds}")
        with scratch(PART) as folder:
            figures = store(memory, cells, count, folder / "repository")
        if turn >= 0:
            found.append(figures)
    what = f"{cells} cells, {count} encoders: "
    rates, cpu, switches = zip(*found, strict=True)
    return [
        Result(PART, f"{what}cells per second", rates, better="higher", unit="/s"),
        Result(
            PART,
            f"{what}the dumper's CPU time per cell",
            tuple(1e3 * one for one in cpu),
            unit="ms",
        ),
        Result(PART, f"{what}its context switches per cell", switches, unit=""),
    ]


def main() -> None:
    """Run the benchmark and print its figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--cells", type=int, default=1024)
    parser.add_argument("--count", type=int, default=2, help="encoders")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    show(measure(options.cells, options.count, options.rounds), Console(width=160))


if __name__ == "__main__":
    main()
