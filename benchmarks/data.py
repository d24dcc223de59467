#!/usr/bin/env python3
"""What data directories (`icecore run --data`) add to the window: snapshots of one job with its
directory and without it, in turn.

Before each snapshot the job rewrites a share of the files, and closes them. "just before": the last
of them as late as the dump begins; "all the time": it rewrites files one after the other, also
while the dump prepares the window.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from pathlib import Path

from msgspec.structs import replace

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from icecore.dumper.dump import dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.host.criu.program import find_criu
from icecore.host.jobs.registry import Registry
from icecore.store.backend.local import LocalBackend
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread

#: Holds memory; rewrites a file in MILLISECONDS each, all the time, unless that is 0.
JOB = """
import os, random, sys, time
top, size, pause = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
held = os.urandom(64 << 20)
names = sorted(os.path.join(folder, name) for folder, _, files in os.walk(top) for name in files)
print("there", flush=True)
while True:
    time.sleep(pause or 1)
    if pause:
        with open(random.choice(names), "wb") as file:
            file.write(os.urandom(size))
"""


def fill(top: Path, files: int, size: int) -> list[Path]:
    """Make the files, a hundred in each directory."""
    found = []
    for number in range(files):
        folder = top / f"{number // 100:04}"
        folder.mkdir(exist_ok=True)
        path = folder / f"{number % 100:02}"
        path.write_bytes(os.urandom(size))
        found.append(path)
    return found


def main() -> None:
    """Run the comparison and print its figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--mib", type=int, default=2048, help="of all files")
    parser.add_argument("--changed", type=float, default=0.01, help="share of the files")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--place", default="/var/tmp", help="where the files are")
    arguments = parser.parse_args()
    for case, pause in (("just before", 0.0), ("all the time", 0.01)):
        _case(arguments, case, pause)


def _case(arguments: argparse.Namespace, case: str, pause: float) -> None:
    size = (arguments.mib << 20) // arguments.files
    windows: dict[str, list[float]] = {"with": [], "without": []}
    with (
        tempfile.TemporaryDirectory(prefix="icecore-bench-data-", dir=arguments.place) as name,
        LoopThread() as loop,
    ):
        folder = Path(name)
        top = folder / "data"
        top.mkdir()
        paths = fill(top, arguments.files, size)
        registry = Registry(folder / "state")
        words = [sys.executable, "-c", JOB, str(top), str(size), str(pause)]
        job = registry.start(words, name="bench", cwd="/", data=[top])
        repository = loop.run(StoredRepository.create(LocalBackend(folder / "repo", create=True)))
        try:
            while "there" not in job.log_path("stdout").read_text():
                time.sleep(0.05)
            record = job.record()
            records = {"with": record, "without": replace(record, data=[])}
            for turn in range(arguments.rounds + 1):
                for kind in sorted(records, reverse=turn % 2 == 1):
                    for path in random.sample(paths, round(arguments.changed * len(paths))):
                        path.write_bytes(os.urandom(size))
                    target = Target(job.pid, f"bench-{kind}", record=records[kind])
                    done = dump(repository, loop, target, DumpOptions(), criu=find_criu())
                    if turn:
                        windows[kind].append(done.window_seconds)
                    print(
                        f"{case} {kind:<8} window {done.window_seconds * 1000:6.0f} ms,"
                        f" all {done.seconds:5.1f} s, changed {done.sizes.changed >> 20} MiB,"
                        f" stored {done.sizes.stored >> 20} MiB",
                        flush=True,
                    )
        finally:
            job.kill(9)
            job.wait(20)
            loop.run(repository.close())
    medians = {kind: statistics.median(found) * 1000 for kind, found in windows.items()}
    added = medians["with"] - medians["without"]
    print(
        f"{case}: {arguments.files} files, {arguments.mib} MiB, {arguments.changed:.1%} changed:"
        f" window {medians['without']:.0f} ms without, {medians['with']:.0f} ms with,"
        f" ratio {medians['with'] / medians['without']:.2f}, added {added:.0f} ms (target 150)"
    )


if __name__ == "__main__":
    main()
