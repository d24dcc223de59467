#!/usr/bin/env python3
"""What a commit costs when the repository has 1, 100 and 10 000 snapshots: requests, bytes and
seconds, over a back end that counts.

Synthetic snapshots of a hundred jobs, each with a manifest and a few new chunks in the index; the
back end is memory, so the seconds are icecore's own. A commit is everything from the session's
beginning to its end; the dedup index is loaded in another run of the same, as what that costs
follows the number of chunks and not of snapshots (of reads it costs none here, as one process makes
all commits and keeps what is short). Work that is not done at every commit (merging index segments,
trimming the log) is spread over them: means of 512 commits, CPU seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import os
import statistics
import sys
import time
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from rich.console import Console

from benchmarks.common import Result, progress, show
from icecore.store.backend.faulty import FaultyBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.cell import PLACE
from icecore.store.format.names import new_snapshot_id
from icecore.store.format.segment import make_entries
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository

PART = "commits"
SIZES = (1, 100, 10_000)
_JOBS = 100
_CHUNKS = 16
_MANIFEST_BYTES = 2000
#: A whole period of what is not done at every commit: the log is trimmed every 512 entries, of
#: which a commit makes two.
_MEASURED = 512
_FEW = 8


@dataclass
class Cost:
    """What one commit cost."""

    requests: int
    written: int
    read: int
    seconds: float


async def _commit(
    repository: StoredRepository,
    back: FaultyBackend,
    number: int,
    base: str | None,
    load_index: bool,
) -> tuple[str, Cost]:
    """One snapshot from BEGIN to COMMIT."""
    back.calls.clear()
    started = time.process_time()
    session = await repository.begin(
        base, "benchmark", load_index=load_index, beat_seconds=None, prove=False
    )
    data = os.urandom(_MANIFEST_BYTES)
    manifest = await session.put("manifest", [data])
    places = np.zeros(_CHUNKS, PLACE)
    places["shard"] = np.frombuffer(os.urandom(16), np.uint8)
    places["length"] = 1000
    entries = make_entries(
        np.frombuffer(os.urandom(32 * _CHUNKS), np.uint8).reshape(_CHUNKS, 32), places
    )
    record = SnapshotRecord(
        new_snapshot_id(),
        f"job-{number % _JOBS}",
        f"{number % _JOBS:032x}",
        base or "",
        time.time_ns(),
        manifest,
        len(data),
        hashlib.blake2b(data, digest_size=32).digest(),
    )
    await session.commit(record, entries)
    seconds = time.process_time() - started
    written = sum(call.bytes for call in back.calls if call.operation == "create")
    read = sum(call.bytes for call in back.calls if call.operation != "create")
    return record.snapshot, Cost(len(back.calls), written, read, seconds)


async def _measure(sizes: tuple[int, ...]) -> list[Result]:
    back = FaultyBackend(MemoryBackend())
    repository = await StoredRepository.create(back)
    newest: dict[int, str] = {}
    number = 0
    costs: dict[tuple[int, bool], list[Cost]] = {}

    async def one(load_index: bool) -> Cost:
        nonlocal number
        newest[number % _JOBS], cost = await _commit(
            repository, back, number, newest.get(number % _JOBS), load_index
        )
        number += 1
        return cost

    for size in sizes:
        progress(f"commits: up to {size} snapshots")
        while number < size:
            await one(False)
        costs[size, False] = [await one(False) for _ in range(_MEASURED if size > 1 else _FEW)]
        costs[size, True] = [await one(True) for _ in range(_FEW)]
    return _results(sizes, costs)


def _results(sizes: tuple[int, ...], costs: dict[tuple[int, bool], list[Cost]]) -> list[Result]:
    results = []
    # The first repository is so small that it has no full page of its list yet; the comparison
    # begins at the second.
    base = sizes[1]
    for size in sizes[1:]:
        mean = statistics.fmean(cost.requests for cost in costs[size, False])
        results.append(
            Result(PART, f"requests of a commit at {size} snapshots", (mean,), 6.0, unit="")
        )
    for load_index in (False, True):
        setting = ", dedup index loaded" if load_index else ""
        for what in ("written", "read", "seconds") if not load_index else ("seconds",):
            means = {
                size: statistics.fmean(getattr(c, what) for c in costs[size, load_index])
                for size in sizes
            }
            note = ", ".join(f"{size}: {means[size]:.4g}" for size in sizes)
            unit = " s" if what == "seconds" else "" if what == "requests" else " B"
            results.append(
                Result(
                    PART,
                    f"{what} of a commit at {sizes[-1]} / at {base} snapshots{setting}",
                    (means[sizes[-1]] / max(means[base], 1e-9),),
                    1.5 if not load_index else None,
                    note=f"mean{unit}: {note}",
                )
            )
    return results


def measure(sizes: tuple[int, ...] = SIZES) -> list[Result]:
    """All figures of this part."""
    return asyncio.run(_measure(sizes))


def main() -> None:
    """This part alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--sizes", type=int, nargs=3, default=SIZES, help="snapshots in the repository"
    )
    show(measure(tuple(parser.parse_args().sizes)), Console(width=200))


if __name__ == "__main__":
    main()
