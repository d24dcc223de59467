#!/usr/bin/env python3
"""Shared memory against private memory of the same size and change: how long the job stands still,
and how soon it is back with all its memory.

The kinds take turns in both orders, so that what one leaves in the machine's caches helps the other
as often. Restores get warm memory (`benchmarks.reserve`). A file that exists until the restored job
runs keeps its memory, so the job would get a virtual machine's cold memory. That would hide all
else.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import sys
from contextlib import suppress
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, scratch, show
from benchmarks.reserve import Reserve
from benchmarks.worker import Worker
from tests.dumper.puppet import Puppet

PART = "shared"
_TARGET = 1.3
#: How the job gets its memory.
KINDS = {
    "private": "m = mmap.mmap(-1, size, flags=0x22)",
    "shared anonymous": "m = mmap.mmap(-1, size)",
    "memfd": "f = os.memfd_create('x'); os.ftruncate(f, size); m = mmap.mmap(f, size)",
    "segment": (
        "assert libc.unshare(0x08000000) == 0; libc.shmat.restype = ctypes.c_void_p\n"
        "at = libc.shmat(libc.shmget(7, ctypes.c_size_t(size), 0o1600), None, 0)\n"
        "m = (ctypes.c_char * size).from_address(at)"
    ),
    "file on tmpfs": (
        "f = os.open(place + '/file', os.O_RDWR | os.O_CREAT)\n"
        "os.ftruncate(f, size); m = mmap.mmap(f, size)"
    ),
}
_FILL = "for at in range(0, size, MIB): m[at : at + MIB] = os.urandom(MIB)"
_CHANGE = "for at in range(0, size, 10 * MIB): m[at : at + MIB] = os.urandom(MIB)"
_CASES = ("unchanged", "10 % changed", "restore")


def measure(mib: int, rounds: int) -> list[Result]:
    """All figures of this part; ``mib`` of memory in each kind of job."""
    found = Rounds()
    with Reserve((mib + 512) * MIB) as reserve:
        for turn in range(rounds):
            order = list(KINDS) if turn % 2 == 0 else list(reversed(KINDS))
            for kind in order:
                progress(f"shared: round {turn + 1} of {rounds}, {kind}")
                with scratch(PART) as folder, Worker() as worker:
                    _one(kind, mib, folder, worker, reserve, found)
    return [
        Result(
            PART,
            f"{case}, {kind} by private",
            found.ratio(f"{kind}, {case}", f"private, {case}"),
            _TARGET,
            note=f"{found.median(f'{kind}, {case}'):.2f} s by {found.median(f'private, {case}'):.2f} s",
        )
        for kind in list(KINDS)[1:]
        for case in _CASES
    ]


def _one(
    kind: str, mib: int, folder: Path, worker: Worker, reserve: Reserve, found: Rounds
) -> None:
    """Dump one job three times, and restore it."""
    state = folder / "job"
    state.mkdir()
    puppet = Puppet(state)
    try:
        puppet.do(f"size = {mib} * MIB; place = {str(state)!r}\n{KINDS[kind]}\n{_FILL}", 120)
        worker.ask("open", path=str(folder / "repository"), create=True)
        worker.ask("dump", pid=puppet.pid, job="job")
        found.add(f"{kind}, unchanged", worker.ask("dump", pid=puppet.pid, job="job")["window"])
        puppet.do(_CHANGE, 60)
        last = worker.ask("dump", pid=puppet.pid, job="job")
        found.add(f"{kind}, 10 % changed", last["window"])
    finally:
        puppet.end()
    with reserve.lent():
        restored = worker.ask("restore", snapshot=last["snapshot"], mode="full")
    # The call then removes the replaced files while the job runs.
    found.add(f"{kind}, restore", restored["at"]["restore.running"] / 1e9)
    with suppress(ProcessLookupError):
        os.kill(restored["pid"], signal.SIGKILL)
    worker.ask("ended")
    shutil.rmtree(folder / "repository", ignore_errors=True)


def main() -> None:
    """This part alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=2048, help="memory of each job (default: 2 GiB)")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args()
    show(measure(options.mib, options.rounds), Console(width=200))


if __name__ == "__main__":
    main()
