#!/usr/bin/env python3
"""What reserved address space costs in the window: a job that reserves 16 TiB and touches a little
of it, against the same job without the reservation.

Four reservations: without access (PROT_NONE) or writable without a promise of memory
(MAP_NORESERVE), each in one mapping and in 1,000. All jobs run at once; each round takes a snapshot
of each.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import sys
import time
from contextlib import ExitStack
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, running, scratch, show
from benchmarks.worker import Worker

PART = "reservations"
TARGET = 1.2
_TIB = 1 << 40
_PAGE = 4096
_PROT_READ_WRITE = 3
_MAP_PRIVATE_ANONYMOUS = 0x22
_MAP_NORESERVE = 0x4000
#: TiB, mappings, whether they are writable.
CASES = {
    "nothing reserved": (0, 0, False),
    "no access, 1 mapping": (16, 1, False),
    "no access, 1,000 mappings": (16, 1000, False),
    "writable, 1 mapping": (15, 1, True),
    "writable, 1,000 mappings": (16, 1000, True),
}


def work(case: str, mib: int) -> None:
    """Be the job: touch ``mib`` of ordinary memory and 30 pages of what is reserved, then sleep."""
    tib, count, writable = CASES[case]
    heap = bytearray(os.urandom(MIB)) * mib
    libc = ctypes.CDLL(None, use_errno=True)
    libc.mmap.restype = ctypes.c_size_t
    libc.mmap.argtypes = [ctypes.c_size_t] * 2 + [ctypes.c_int] * 3 + [ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_size_t, ctypes.c_size_t]
    protection = _PROT_READ_WRITE if writable else 0
    flags = _MAP_PRIVATE_ANONYMOUS | (_MAP_NORESERVE if writable else 0)
    starts = []
    for _ in range(count):
        size = tib * _TIB // count // _PAGE * _PAGE
        start = libc.mmap(0, size, protection, flags, -1, 0)
        if start == 2**64 - 1:
            raise OSError(ctypes.get_errno(), "mmap")
        # A gap, or the kernel makes neighbours one mapping.
        libc.munmap(start + size - _PAGE, _PAGE)
        starts.append(start)
    for number in range(30 if starts else 0):
        start = starts[number * len(starts) // 30] + number * 64 * MIB
        if not writable and libc.mprotect(start, _PAGE, _PROT_READ_WRITE):
            raise OSError(ctypes.get_errno(), "mprotect")
        ctypes.memmove(start, os.urandom(_PAGE), _PAGE)
    print(len(heap), flush=True)
    time.sleep(86400)


def measure(mib: int, rounds: int) -> list[Result]:
    """All figures of this part.

    Args:
        mib: Ordinary memory of each job in MiB.
        rounds: How often everything is done.
    """
    found = Rounds()
    with scratch(PART) as folder, ExitStack() as stack:
        jobs = {
            case: stack.enter_context(running(__file__, "--be", case, "--mib", str(mib)))
            for case in CASES
        }
        for turn in range(-1, rounds):  # the first round makes the parents of the others
            progress(f"reservations: round {turn + 1} of {rounds}")
            at = turn % len(CASES)  # the first of a round has the coldest memory
            for case in [*list(CASES)[at:], *list(CASES)[:at]]:
                with Worker() as worker:
                    pid = jobs[case]
                    place = folder / str(pid)
                    worker.ask("open", path=str(place), create=not place.exists())
                    done = worker.ask("dump", pid=pid, job="reservations")
                if turn >= 0:
                    found.add(case, done["window"])
                    found.add(f"freeze {case}", done["freeze"])
    first, *others = CASES
    return [
        Result(
            PART,
            f"window / window without: {case}",
            found.ratio(case, first),
            TARGET,
            note=f"{found.median(case):.3f} s of {found.median(first):.3f} s; "
            f"freeze {found.median(f'freeze {case}'):.3f} of {found.median(f'freeze {first}'):.3f}",
        )
        for case in others
    ]


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Snapshots of jobs that reserve address space.")
    parser.add_argument("--mib", type=int, default=200, help="ordinary memory of each job")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--be", choices=CASES, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.be:
        work(arguments.be, arguments.mib)
    show(measure(arguments.mib, arguments.rounds), Console(width=200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
