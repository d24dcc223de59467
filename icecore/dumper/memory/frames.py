"""Memory that processes of one tree still share since fork(2). While both stand still, two pages in
the same page frame have the same content, so what was read in one process need not be read in the
other.

The kernel may move a page to another frame at any time, and then use the frame for another page. So
the frames of a process are read before and after those of the others, and only pages that stayed in
their frames count.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.cells import CellPlan
from icecore.errors import NotFound
from icecore.host.kernel.pagemap import EXCLUSIVE, PRESENT, SWAPPED, Pagemap
from icecore.sizes import PAGE

#: The frame number in an entry of pagemap; 0 without CAP_SYS_ADMIN (proc_pid_pagemap(5)).
_FRAME = np.uint64((1 << 55) - 1)
#: Runs of pages with gaps up to this many bytes are read together.
_GAP = 64 * PAGE


@dataclass(frozen=True)
class Frames:
    """Where the pages of a plan are in physical memory.

    Attributes:
        plan: The plan; n cells with p pages.
        first: i8[n + 1], the pages of cell i are ``frame[first[i]:first[i + 1]]``.
        frame: u8[p], page frame numbers; 0: not known.
        shared: u1[n], 1 for cells with pages that other processes have, too.
    """

    plan: CellPlan
    first: npt.NDArray[np.int64]
    frame: npt.NDArray[np.uint64]
    shared: npt.NDArray[np.uint8]

    def shared_with(self, other: Frames) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Find the cells that have the same pages, at the same addresses, in the same frames.

        Returns:
            Their rows here and there, ascending.
        """
        here, there = self.plan.same(other.plan)
        if not len(here):
            return here, there
        counts = self.first[here + 1] - self.first[here]
        starts = np.cumsum(counts) - counts
        ordinal = np.arange(int(counts.sum())) - np.repeat(starts, counts)
        own = self.frame[np.repeat(self.first[here], counts) + ordinal]
        equal = own == other.frame[np.repeat(other.first[there], counts) + ordinal]
        equal &= own != 0
        same = np.logical_and.reduceat(equal, starts)
        return here[same], there[same]

    def still(self, again: Frames) -> Frames:
        """Return these frames, without those of pages that have moved.

        Args:
            again: The frames of the same plan, read later.
        """
        return replace(self, frame=np.where(self.frame == again.frame, self.frame, np.uint64(0)))


def read_frames(pid: int, plan: CellPlan) -> Frames:
    """Read where the pages of a process are.

    Raises:
        NotFound: There is no such process.
    """
    if not len(plan):
        nothing = np.empty(0, np.uint64)
        return Frames(plan, np.zeros(1, np.int64), nothing, np.empty(0, np.uint8))
    pages = plan.length.astype(np.int64) // PAGE
    first = np.concatenate(([0], np.cumsum(pages)))
    low = plan.runs["address"].astype(np.int64)
    length = plan.runs["length"].astype(np.int64)
    frame = np.empty(int(first[-1]), np.uint64)
    # Spans of runs that are read together, and where each run's pages begin in the result.
    new = np.concatenate(([True], low[1:] - (low[:-1] + length[:-1]) > _GAP))
    heads = np.flatnonzero(new)
    ends = np.append(heads[1:], len(low))
    at = np.concatenate(([0], np.cumsum(length // PAGE)))
    with Pagemap(pid) as pagemap:
        for head, end in zip(heads.tolist(), ends.tolist(), strict=True):
            start = int(low[head])
            entries = pagemap.entries(start, int(low[end - 1] + length[end - 1]))
            counts = length[head:end] // PAGE
            ordinal = np.arange(int(counts.sum())) - np.repeat(np.cumsum(counts) - counts, counts)
            wanted = np.repeat((low[head:end] - start) // PAGE, counts) + ordinal
            frame[at[head] : at[end]] = entries[wanted]
    shared = np.logical_or.reduceat((frame & (PRESENT | EXCLUSIVE)) == PRESENT, first[:-1])
    known = (frame & (PRESENT | SWAPPED)) == PRESENT
    return Frames(
        plan, first, np.where(known, frame & _FRAME, np.uint64(0)), shared.astype(np.uint8)
    )


class SharedFrames:
    """The frames of processes that stand still, share pages, and may be forks of each other.

    Args:
        plans: The plan of each process, by pid.
        sources: Pid → another one of them, of which it may be a fork.
        threads: How many processes are read at once.
    """

    def __init__(
        self, plans: Mapping[int, CellPlan], sources: Mapping[int, int], threads: int
    ) -> None:
        self._plans = plans
        self._sources = sources
        self._frames: dict[int, Frames] = {}
        self._still: dict[int, Frames] = {}
        first = set(sources.values())
        with ThreadPoolExecutor(max(1, min(threads, len(plans))), "frames") as pool:
            list(pool.map(self._read, sorted(first)))
            list(pool.map(self._read, sorted(plans.keys() - first)))

    def _read(self, pid: int) -> None:
        with suppress(NotFound):  # it was killed; the capture reports it
            self._frames[pid] = read_frames(pid, self._plans[pid])

    def shared(self, pid: int) -> npt.NDArray[np.uint8] | None:
        """Return which cells of a process others share (`Frames.shared`); None: it is not known."""
        found = self._frames.get(pid)
        return None if found is None else found.shared

    def of(self, pid: int) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Find the cells that a process shares with its source. Call it once the source's cells have
        been read: they have not moved until then.

        Returns:
            The source, and the rows of the cells in the plan of the process and in the source's,
            ascending; None: it has no source, or one of them was killed.
        """
        source = self._sources.get(pid)
        if source is None or not {pid, source} <= self._frames.keys():
            return None
        if source not in self._still:
            try:
                again = read_frames(source, self._plans[source])
            except NotFound:
                return None
            self._still[source] = self._frames[source].still(again)
        here, there = self._frames[pid].shared_with(self._still[source])
        return source, here, there
