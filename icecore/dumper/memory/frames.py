"""Memory that processes of one tree still share since fork(2). While both stand still, two pages in
the same page frame have the same content, so what was read in one process need not be read in the
other.

The kernel may move a page to another frame at any time, and then use the frame for another page. So
the frames of a process are read before and after those of the others, and only pages that stayed in
their frames count.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.cells import CellPlan
from icecore.errors import NotFound
from icecore.host.kernel.pagemap import EXCLUSIVE, PRESENT, SWAPPED, Pagemap
from icecore.sizes import PAGE

#: The frame number in an entry of pagemap; 0 without CAP_SYS_ADMIN (proc_pid_pagemap(5)).
_FRAME = np.uint64((1 << 55) - 1)
_THERE = PRESENT | SWAPPED
#: Runs of pages with gaps up to this many bytes are read together, and no more than so many bytes.
_GAP, _SPAN = 64 * PAGE, 1 << 30
#: Cells that are compared at a time, and processes that are read at once: both take memory.
_CELLS, _MOST_THREADS = 2048, 8


class Frames(msgspec.Struct, frozen=True):
    """Where the pages of a plan are in physical memory.

    Attributes:
        plan: The plan; n cells with p pages.
        first: i8[n + 1], the pages of cell i are ``frame[first[i]:first[i + 1]]``.
        frame: u8[p], page frame numbers; 0: not known.
        shared: u1[n], 1 for cells with pages that other processes may have, too.
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
        same = np.zeros(len(here), np.bool_)
        for low in range(0, len(here), _CELLS):
            rows, others = here[low : low + _CELLS], there[low : low + _CELLS]
            counts = self.first[rows + 1] - self.first[rows]
            starts = np.cumsum(counts) - counts
            own = self.frame[_spread(self.first[rows], counts)]
            equal = own == other.frame[_spread(other.first[others], counts)]
            same[low : low + _CELLS] = np.logical_and.reduceat(equal & (own != 0), starts)
        return here[same], there[same]


def _spread(starts: npt.NDArray[np.int64], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """Return ``counts[i]`` numbers from ``starts[i]`` on, for each i."""
    before = np.cumsum(counts) - counts
    return np.repeat(starts - before, counts) + np.arange(int(counts.sum()))


def read_frames(pid: int, plan: CellPlan) -> Frames:
    """Read where the pages of a process are.

    Raises:
        NotFound: There is no such process.
    """
    if not len(plan):
        nothing = np.empty(0, np.uint64)
        return Frames(plan, np.zeros(1, np.int64), nothing, np.empty(0, np.uint8))
    first = np.concatenate(([0], np.cumsum(plan.length.astype(np.int64) // PAGE)))
    low = plan.runs["address"].astype(np.int64)
    counts = plan.runs["length"].astype(np.int64) // PAGE
    at = np.concatenate(([0], np.cumsum(counts)))
    frame = np.empty(int(first[-1]), np.uint64)
    apart = low[1:] - (low[:-1] + counts[:-1] * PAGE) > _GAP
    apart |= low[1:] // _SPAN != low[:-1] // _SPAN
    heads = np.flatnonzero(np.concatenate(([True], apart)))
    ends = np.append(heads[1:], len(low))
    with Pagemap(pid) as pagemap:
        for head, end in zip(heads.tolist(), ends.tolist(), strict=True):
            start = int(low[head])
            entries = pagemap.entries(start, int(low[end - 1] + counts[end - 1] * PAGE))
            if len(entries) != at[end] - at[head]:  # with gaps
                entries = entries[_spread((low[head:end] - start) // PAGE, counts[head:end])]
            frame[at[head] : at[end]] = entries
    # Entries of pages that are swapped out do not tell whether others have them, too.
    shared = np.logical_or.reduceat(
        ((frame & _THERE) != 0) & ((frame & EXCLUSIVE) == 0), first[:-1]
    )
    frame[(frame & _THERE) != PRESENT] = 0
    frame &= _FRAME
    return Frames(plan, first, frame, shared.astype(np.uint8))


class SharedFrames:
    """The frames of processes that stand still, share pages, and may be forks of each other.

    Args:
        plans: The plan of each process, by pid; sources first.
        sources: Pid → another one of them, of which it may be a fork.
        threads: How many processes are read at once.
        stop: When set, nothing more is read.
    """

    def __init__(
        self,
        plans: Mapping[int, CellPlan],
        sources: Mapping[int, int],
        threads: int,
        stop: threading.Event,
    ) -> None:
        self._plans = plans
        self._sources = sources
        self._stop = stop
        #: Of sources only: eight bytes for each page are kept of them.
        self._frames: dict[int, Frames | None] = dict.fromkeys(sources.values())
        self._shared: dict[int, npt.NDArray[np.uint8]] = {}
        self._rows: dict[int, tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}
        self._still: dict[int, npt.NDArray[np.bool_]] = {}
        self._looking = threading.Lock()  # several processes may have the same source
        for pid in [pid for pid in plans if pid in self._frames]:
            self._read(pid)  # one after the other: a source may have a source
        if others := [pid for pid in plans if pid not in self._frames]:
            with ThreadPoolExecutor(max(1, min(threads, _MOST_THREADS)), "frames") as pool:
                list(pool.map(self._read, others))

    def _read(self, pid: int) -> None:
        if self._stop.is_set():
            return
        with suppress(NotFound):  # it was killed; the capture reports it
            found = read_frames(pid, self._plans[pid])
            self._shared[pid] = found.shared
            source = self._sources.get(pid)
            other = self._frames.get(source) if source is not None else None
            if other is not None:
                self._rows[pid] = found.shared_with(other)
            if pid in self._frames:
                self._frames[pid] = found

    def shared(self, pid: int) -> npt.NDArray[np.uint8] | None:
        """Return which cells of a process others share (`Frames.shared`); None: it is not known."""
        return self._shared.get(pid)

    def of(self, pid: int) -> tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]] | None:
        """Find the cells that a process shares with its source. Call it once the source's cells have
        been read: they have not moved until then.

        Returns:
            The source, and the rows of the cells in the plan of the process and in the source's,
            ascending; None: it has no source, or one of them was killed.
        """
        if pid not in self._rows or self._stop.is_set():
            return None
        source = self._sources[pid]
        with self._looking:
            if source not in self._still:
                before = self._frames[source]
                assert before is not None  # its rows were compared with it
                try:
                    again = read_frames(source, before.plan)
                except NotFound:
                    return None
                self._still[source] = np.logical_and.reduceat(
                    before.frame == again.frame, before.first[:-1]
                )
        here, there = self._rows[pid]
        still = self._still[source][there]
        return source, here[still], there[still]
