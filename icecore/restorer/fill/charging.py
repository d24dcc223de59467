"""Charges restored shared memory to the job's cgroup: a page is charged to the group of the process
that first touches it (cgroups(7)), so a process in the job's group allocates the pages.
"""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO

import numpy as np
import numpy.typing as npt

from icecore.errors import NotFound, RestoreFailed
from icecore.host.kernel import cgroups
from icecore.host.kernel.limits import free_swap
from icecore.restorer.plan.cells import SpaceCells
from icecore.sizes import CELL_PAGES, PAGE

_MEMORY, _CURRENT = "memory", "memory.current"
#: Files and prefixes of memory.stat, of versions 2 and 1; what can be reclaimed without swap.
_LIMITS = (
    ("memory.max", _CURRENT, ""),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),
)
_RECLAIMABLE = ("inactive_file", "active_file", "slab_reclaimable")
#: What a group may have charged for each core, but not used (MEMCG_CHARGE_BATCH in Linux).
_CHARGED_AHEAD = 64 * PAGE
#: How long the allocation may take, and how often it is looked at, in seconds.
_SECONDS = 600.0
_LOOK_SECONDS = 1.0
_GIVEN_UP = "the restore was given up"
#: Exit status of the allocating process if it may not join the group.
_NOT_JOINED = 3
#: Arguments: the group's file, the exit status, the objects' descriptors. Standard input: for each
#: object the number of its ranges (u64), then the ranges (u64 pairs: offset, bytes). The last
#: range may reach past the end of the object, but must not extend the object. If a cgroup runs out
#: of memory, the kernel must kill this process, which looks small: the memory is not its own.
_ALLOCATE = """
import array, os, sys
with open("/proc/self/oom_score_adj", "w") as adjustment:
    adjustment.write("1000")
try:
    with open(sys.argv[1], "w") as group:
        group.write("0")
except OSError:
    sys.exit(int(sys.argv[2]))
words = array.array("Q", sys.stdin.buffer.read())
at = 0
for descriptor in map(int, sys.argv[3:]):
    end = at + 1 + 2 * words[at]
    size = os.fstat(descriptor).st_size
    for position in range(at + 1, end, 2):
        length = min(words[position + 1], size - words[position])
        if length > 0:
            os.posix_fallocate(descriptor, words[position], length)
    at = end
"""

_OUT_OF_MEMORY = tuple(
    f"OSError: [Errno {number}]" for number in (errno.ENOSPC, errno.ENOMEM, errno.EDQUOT)
)

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


def full_group(group: Path, size: int) -> Path | None:
    """Return the group, or the nearest one above it, whose limit does not leave room for ``size``
    bytes even if all is reclaimed that can be; None: there is room.

    To try would be wrong: where there is no room, the kernel may kill any process of the group.
    """
    for one in (group, *group.parents):
        if not (one / "cgroup.procs").exists():
            break
        room = _room(one)
        if room is not None and room < size:
            return one
    return None


def _room(group: Path) -> int | None:
    """Return the most bytes that a group can still get; None: it has no limit."""
    for limit, usage, prefix in _LIMITS:
        try:
            most, used = (int((group / name).read_text()) for name in (limit, usage))
            lines = (group / "memory.stat").read_text().splitlines()
        except OSError:
            continue
        except ValueError:  # "max"
            return None
        found = dict(line.split() for line in lines)
        cached = sum(int(found.get(prefix + name, 0)) for name in _RECLAIMABLE)
        with suppress(OSError):  # version 1 does not tell which part of it can be reclaimed
            cached += int((group / "memory.kmem.usage_in_bytes").read_text())
        return most - used + cached + (os.cpu_count() or 1) * _CHARGED_AHEAD + free_swap()
    return None


def _no_room(group: Path, why: str) -> RestoreFailed:
    return RestoreFailed(
        f"the cgroup {group} has no room for shared memory: {why}", cure="raise its memory limit"
    )


class Allocator:
    """Allocates pages that are charged to a cgroup, in a process of its own. `end` is for another
    thread.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = False

    def end(self) -> None:
        """Make `allocate` fail, now and from now on: kill its process."""
        with self._lock:
            self._ended = True
            if self._process is not None:
                self._process.kill()

    def allocate(self, group: Path, objects: Sequence[tuple[int, Ranges]]) -> bool:
        """Allocate the pages.

        Args:
            group: The directory of the cgroup.
            objects: Descriptors of memory objects, open for writing, and what to allocate of each.

        Returns:
            Whether they were charged to it; False: no process that this one starts may join it.

        Raises:
            RestoreFailed: The group has no room for them, there is no memory, or the group is frozen
                or throttled for too long; or `end` was called.
        """
        size = sum(int(ranges[:, 1].sum()) for _, ranges in objects)
        if (full := full_group(group, size)) is not None:
            raise _no_room(full, f"{size >> 20} MiB would exceed its limit")
        with open(os.memfd_create("icecore-ranges"), "w+b") as words:
            for _, ranges in objects:
                words.write(np.uint64(len(ranges)).tobytes() + ranges.astype(np.uint64).tobytes())
            words.seek(0)
            process = self._start(group, words, [descriptor for descriptor, _ in objects])
        said = self._wait(process, group)
        if process.returncode not in (0, _NOT_JOINED):
            if process.returncode > 0 and not said.startswith(_OUT_OF_MEMORY):
                raise RestoreFailed(
                    f"shared memory cannot be allocated in the cgroup {group}: {said}"
                )
            raise _no_room(group, said or "out of memory")
        return process.returncode == 0

    def _start(
        self, group: Path, words: IO[bytes], descriptors: Sequence[int]
    ) -> subprocess.Popen[bytes]:
        with self._lock:
            if self._ended:
                raise RestoreFailed(_GIVEN_UP)
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", "-S", "-c", _ALLOCATE),
                    *(str(group / "cgroup.procs"), str(_NOT_JOINED), *map(str, descriptors)),
                ],
                stdin=words,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                pass_fds=descriptors,
            )
            return self._process

    def _wait(self, process: subprocess.Popen[bytes], group: Path) -> str:
        """Wait for the process; return the last line of its standard error."""
        end = time.monotonic() + _SECONDS
        try:
            while True:
                # The freezer of version 1 delays even SIGKILL, so `end` does not suffice.
                with suppress(subprocess.TimeoutExpired):
                    said = process.communicate(timeout=_LOOK_SECONDS)[1]
                    if self._ended:
                        raise RestoreFailed(_GIVEN_UP)
                    return said.decode(errors="replace").strip().rpartition("\n")[2]
                if self._ended:
                    raise RestoreFailed(_GIVEN_UP)
                if time.monotonic() >= end:
                    raise RestoreFailed(
                        f"allocating shared memory in the cgroup {group} takes longer than"
                        f" {_SECONDS:g} s",
                        cure="thaw the cgroup, or raise its memory.high, and restore again",
                    )
        finally:
            self._reap(process)

    def _reap(self, process: subprocess.Popen[bytes]) -> None:
        process.kill()
        with suppress(subprocess.TimeoutExpired):
            process.wait(_LOOK_SECONDS)
        assert process.stderr is not None
        process.stderr.close()
