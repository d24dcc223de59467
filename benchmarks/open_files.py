#!/usr/bin/env python3
"""A large file on disk that a job has open for writing: how much longer the job stands still than
it does without the file.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import Result, Rounds, progress, scratch, show
from benchmarks.worker import Worker
from tests.dumper.puppet import Puppet

PART = "open files"
#: The target of reserved memory, because none was given for this case.
_TARGET = 1.2
_DISK = "/var/tmp"
_OPEN = (
    "f = os.open(place + '/file', os.O_RDWR | os.O_CREAT)\n"
    "for at in range(0, size, MIB): os.pwrite(f, os.urandom(MIB), at)\n"
    "os.fsync(f)"
)
#: What happens to the file before each snapshot but the first.
_CASES = {
    "unchanged": "",
    "1 MiB appended": "os.lseek(f, 0, 2); os.write(f, os.urandom(MIB))",
    "1 % changed": "for at in range(0, size, 100 * MIB): os.pwrite(f, os.urandom(MIB), at)",
}


def measure(mib: int, rounds: int) -> list[Result]:
    """Return all figures of this part, with a file of ``mib`` MiB."""
    found = Rounds()
    for turn in range(rounds):
        order = ("with", "without") if turn % 2 == 0 else ("without", "with")
        for kind in order:
            progress(f"open files: round {turn + 1} of {rounds}, {kind}")
            with scratch(PART) as folder, Worker() as worker:
                _one(kind, mib if kind == "with" else 0, folder, worker, found)
    return [
        Result(
            PART,
            f"window, {mib} MiB {case} / no file",
            found.ratio(f"with, {case}", f"without, {case}"),
            _TARGET,
            note=f"{found.median(f'with, {case}'):.3f} s / {found.median(f'without, {case}'):.3f} s",
        )
        for case in ("first", *_CASES)
    ]


def _one(kind: str, mib: int, folder: Path, worker: Worker, found: Rounds) -> None:
    """Dump one job as often as there are cases."""
    state = folder / "job"
    state.mkdir()
    with tempfile.TemporaryDirectory(dir=_DISK, prefix="icecore-benchmark-") as place:
        puppet = Puppet(state)
        try:
            memory = "m = mmap.mmap(-1, 300 * MIB, flags=0x22)\nfor at in range(0, 300 * MIB, MIB): m[at : at + MIB] = os.urandom(MIB)"
            puppet.do(f"size = {mib} * MIB; place = {place!r}\n{memory}\n{_OPEN}", 300)
            worker.ask("open", path=str(folder / "repository"), create=True)
            first = worker.ask("dump", pid=puppet.pid, job="job")
            found.add(f"{kind}, first", first["window"])
            for case, change in _CASES.items():
                puppet.do(change or "pass", 60)
                done = worker.ask("dump", pid=puppet.pid, job="job")
                found.add(f"{kind}, {case}", done["window"])
        finally:
            puppet.end()


def main() -> None:
    """Run this part alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=2048, help="size of the file (default: 2 GiB)")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    show(measure(options.mib, options.rounds), Console(width=200))


if __name__ == "__main__":
    main()
