"""Every byte of a held process tree, read through /proc alone, so that it can be compared with what
a restore brings back.
"""

from __future__ import annotations

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

PAGE = 4096
PRESENT = np.uint64((1 << 63) | (1 << 62))  # in memory, or swapped out
#: The kernel's own, new at every start.
KERNELS = ("[vvar]", "[vvar_vclock]", "[vdso]", "[vsyscall]")


@dataclass(frozen=True)
class Region:
    """A mapping: its place, permissions and name; ``held`` the pages that have content of their
    own, ``data`` their bytes in order.
    """

    start: int
    end: int
    mode: str
    name: str
    held: NDArray[np.bool_]
    data: bytes

    def __str__(self) -> str:
        return f"{self.start:#x}-{self.end:#x} {self.mode} {self.name}"


Memory = dict[int, list[Region]]


def tree(root: int) -> list[int]:
    """A process and its descendants, parents first."""
    found = [root]
    for pid in found:
        for thread in os.listdir(f"/proc/{pid}/task"):
            found += map(int, Path(f"/proc/{pid}/task/{thread}/children").read_text().split())
    return found


def state_of(pid: int) -> str:
    """The letter that the kernel gives for a process's state."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def hold(root: int, seconds: float = 10.0) -> None:
    """Stop every process of a job but its init, and wait until they stand still."""
    pids = tree(root)[1:]
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    wait_held(root, seconds)


def wait_held(root: int, seconds: float = 10.0) -> None:
    """Wait until every process of a job but its init stands still.

    Raises:
        TimeoutError: They do not.
    """
    until = time.monotonic() + seconds
    while states := {pid: state for pid in tree(root)[1:] if (state := state_of(pid)) != "T"}:
        if time.monotonic() > until:
            raise TimeoutError(f"processes do not stand still: {states}")
        time.sleep(0.005)


def let_go(root: int) -> None:
    """Let the processes of a job go on."""
    for pid in tree(root)[1:]:
        os.kill(pid, signal.SIGCONT)


def read(root: int, directory: str) -> Memory:
    """All memory of a held tree, by the pid that each process has in its own namespace.

    Args:
        directory: Of the instance: what lies there has another path in the next one, and counts as
            the same.
    """
    found: Memory = {}
    for pid in tree(root):
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                found[int(line.split()[-1])] = _joined(_regions(pid, directory))
    return found


def _regions(pid: int, directory: str) -> list[Region]:
    regions = []
    memory = os.open(f"/proc/{pid}/mem", os.O_RDONLY)
    pagemap = os.open(f"/proc/{pid}/pagemap", os.O_RDONLY)
    try:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            span, mode, _, _, inode, *rest = line.split(maxsplit=5)
            start, end = (int(word, 16) for word in span.split("-"))
            name = rest[0].replace(directory, "INSTANCE") if rest else ""
            name = name.removeprefix(
                "/memfd:"
            )  # CRIU makes anonymous shared memory anew as a memfd
            if name in KERNELS:
                continue
            entries = np.frombuffer(
                os.pread(pagemap, (end - start) // PAGE * 8, start // PAGE * 8), np.uint64
            )
            held = (entries & PRESENT) != 0
            if inode != "0":
                held = np.ones(
                    len(entries), np.bool_
                )  # of a file or shared memory: what is not in memory yet counts as well
            regions.append(Region(start, end, mode, name, *_content(memory, start, held)))
    finally:
        os.close(memory)
        os.close(pagemap)
    return regions


def _joined(regions: list[Region]) -> list[Region]:
    """Neighbours of one kind as one region: whether the kernel joins them depends on the order in
    which they were made.
    """
    joined: list[Region] = []
    for region in regions:
        last = joined[-1] if joined else None
        if last is not None and (last.end, last.mode, last.name) == (
            region.start,
            region.mode,
            region.name,
        ):
            held = np.concatenate((last.held, region.held))
            joined[-1] = Region(
                last.start, region.end, region.mode, region.name, held, last.data + region.data
            )
        else:
            joined.append(region)
    return joined


def _content(memory: int, start: int, held: NDArray[np.bool_]) -> tuple[NDArray[np.bool_], bytes]:
    """The held pages' bytes; pages that cannot be read (beyond the end of a file) are taken out of
    ``held``.
    """
    edges = np.flatnonzero(np.diff(np.concatenate(([False], held, [False])).astype(np.int8)))
    held, parts = held.copy(), []
    for first, after in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        at = first
        while at < after:
            try:
                piece = os.pread(memory, (after - at) * PAGE, start + at * PAGE)
            except OSError:
                piece = b""
            whole = len(piece) // PAGE
            parts.append(piece[: whole * PAGE])
            at += whole
            if not whole:
                held[at] = False
                at += 1
    return held, b"".join(parts)


def differences(before: Memory, after: Memory) -> tuple[int, list[str]]:
    """Bytes compared, and in words whatever differs. A page that only one side holds counts as
    zeros on the other.
    """
    compared, wrong = 0, []
    if before.keys() != after.keys():
        wrong.append(f"processes {sorted(before)} became {sorted(after)}")
    for pid in before.keys() & after.keys():
        there = {region.start: region for region in after[pid]}
        for region in before[pid]:
            other = there.pop(region.start, None)
            if other is None or (other.end, other.mode, other.name) != (
                region.end,
                region.mode,
                region.name,
            ):
                wrong.append(f"process {pid}: {region} became {other}")
                continue
            compared += int((region.held | other.held).sum()) * PAGE
            if not np.array_equal(region.held, other.held) or region.data != other.data:
                pages = _differing(region, other)
                if len(pages):
                    wrong.append(
                        f"process {pid}: {len(pages)} pages differ in {region.start:#x} {region.name}, first {pages[0]}"
                    )
        wrong.extend(f"process {pid}: new region {start:#x}" for start in there)
    return compared, wrong


def _differing(one: Region, other: Region) -> NDArray[np.int64]:
    return np.flatnonzero((_spread(one) != _spread(other)).any(axis=1)).astype(np.int64)


def _spread(region: Region) -> NDArray[np.uint64]:
    """All pages of a region as rows, zeros where it holds none."""
    pages = np.zeros((len(region.held), PAGE // 8), np.uint64)
    pages[region.held] = np.frombuffer(region.data, np.uint64).reshape(-1, PAGE // 8)
    return pages
