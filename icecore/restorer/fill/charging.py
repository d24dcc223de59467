"""Charges restored shared memory to the job's cgroup: a page is charged to the group of the process
that first touches it (cgroups(7)), so a process in the job's group allocates the pages.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.errors import NotFound, RestoreFailed
from icecore.host.kernel import cgroups
from icecore.restorer.plan.cells import SpaceCells
from icecore.sizes import CELL_PAGES, PAGE

_MEMORY, _CURRENT = "memory", "memory.current"
_SECONDS = 600.0
#: Exit status of the allocating process if it may not join the group.
_NOT_JOINED = 3
#: Arguments: the group's file, the exit status, the objects' descriptors. Standard input: for each
#: object the number of its ranges (u64), then the ranges (u64 pairs: offset, bytes).
_ALLOCATE = """
import array, os, sys
try:
    with open(sys.argv[1], "w") as group:
        group.write("0")
except OSError:
    sys.exit(int(sys.argv[2]))
words = array.array("Q", sys.stdin.buffer.read())
at = 0
for descriptor in map(int, sys.argv[3:]):
    end = at + 1 + 2 * words[at]
    for position in range(at + 1, end, 2):
        os.posix_fallocate(descriptor, words[position], words[position + 1])
    at = end
"""

Ranges = npt.NDArray[np.uint64]


def paying_group(pid: int) -> Path | None:
    """Return the cgroup to which the memory of a process is charged, if this process's memory is
    charged to another one: of version 1's memory hierarchy, else of version 2. None: they are the
    same, or cannot be determined.
    """
    for one in sorted(cgroups.hierarchies(), key=lambda one: not one.name):
        if one.name and _MEMORY not in one.name.split(","):
            continue
        try:
            own, theirs = (_place(one, pid) for pid in ("self", pid))
        except NotFound:
            return None
        if own is None or theirs is None or _charged(one, own) == _charged(one, theirs):
            return None
        return theirs
    return None


def _place(hierarchy: cgroups.Hierarchy, pid: int | str) -> Path | None:
    group = cgroups.groups_of(pid).get(hierarchy.name)
    if group is None or group.endswith(" (deleted)"):
        return None
    below = os.path.relpath(group, hierarchy.root)
    return None if below.startswith("..") else hierarchy.point / below


def _charged(hierarchy: cgroups.Hierarchy, group: Path) -> Path:
    """Return the group that counts the memory of a group: in version 2, the nearest one with the
    memory controller, upwards.
    """
    while not hierarchy.name and group != hierarchy.point and not (group / _CURRENT).exists():
        group = group.parent
    return group


def ranges_of(cells: SpaceCells) -> Ranges:
    """Return u8[n, 2]: offset and bytes of each run of data pages, ascending."""
    bits = np.unpackbits(cells.records["data"], axis=1, bitorder="little").astype(np.bool_)
    pages = cells.base.astype(np.uint64)[:, None] // np.uint64(PAGE) + np.arange(
        CELL_PAGES, dtype=np.uint64
    )
    there = np.sort(pages[bits])
    if not len(there):
        return np.empty((0, 2), np.uint64)
    head = np.flatnonzero(np.concatenate(([True], np.diff(there) > 1)))
    count = np.diff(np.append(head, len(there)))
    return np.stack([there[head], count.astype(np.uint64)], axis=1) * np.uint64(PAGE)


def allocate(group: Path, objects: Sequence[tuple[int, Ranges]]) -> bool:
    """Allocate pages that are charged to a cgroup.

    Args:
        group: Its directory.
        objects: Descriptors of memory objects, open for writing, and what to allocate of each.

    Returns:
        Whether they were charged to it; False: no process that this one starts may join it.

    Raises:
        RestoreFailed: The group has no room for them, or there is no memory.
    """
    words = [
        np.concatenate(([np.uint64(len(ranges))], ranges.reshape(-1))) for _, ranges in objects
    ]
    descriptors = [descriptor for descriptor, _ in objects]
    done = subprocess.run(
        [
            *(sys.executable, "-I", "-S", "-c", _ALLOCATE),
            *(str(group / "cgroup.procs"), str(_NOT_JOINED), *map(str, descriptors)),
        ],
        input=np.concatenate(words).astype(np.uint64).tobytes(),
        capture_output=True,
        pass_fds=descriptors,
        timeout=_SECONDS,
    )
    if done.returncode not in (0, _NOT_JOINED):
        said = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise RestoreFailed(
            f"the cgroup {group} has no room for shared memory: {said or 'out of memory'}",
            cure="raise its memory limit",
        )
    return done.returncode == 0
