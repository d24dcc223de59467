"""Pre-copy: scan and store the running job's memory before the window, so that only what changes
meanwhile is left for it.

Torn reads are harmless, because a chunk is named by what was read, and the window checks every cell
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.allocations import allocations, cut
from icecore.dumper.memory.background import in_background
from icecore.dumper.memory.cells import CellPlan, inherit_origins, plan_cells
from icecore.dumper.memory.frames import read_frames
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.pipeline import Pipeline, SpaceSink
from icecore.dumper.memory.present import (
    has_shared_pages,
    pages_of,
    private_regions,
)
from icecore.dumper.memory.scan import ScanResult, Source, scan
from icecore.dumper.memory.spaces import ParentSpace, ScanContext
from icecore.dumper.memory.staging import Slot, Staging
from icecore.errors import DumpFailed, NotFound
from icecore.events import Advance, unwatched
from icecore.host.kernel import procfs
from icecore.host.kernel.memory import RemoteReader
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import Region

#: Time between two reads of a restless cell; most training steps take less.
_REST_SECONDS = 0.5
#: With fewer restless bytes than this, they are stored even if that may be in vain.
_LEAST_RESTLESS = 64 << 20
#: The first round stores this part of what is calm, and shows how fast it changes; each later one
#: twice as much.
_FIRST_ROUND = 16
#: Share of what is left that may be expected to change before all of it is stored.
_IN_VAIN = 1 / 8
#: Looks, in all rounds, that wait for the rest to calm down.
_MOST_LOOKS = 3


class PreCopied(msgspec.Struct, frozen=True):
    """What pre-copy learnt of one process or shared object.

    Attributes:
        regions: Its memory then (of a process, its private memory), with the cell grid
            that the window reuses.
        known: Cells that are stored, the parent's and the new ones.
        seen: Keys and fingerprints of all cells that were read (its records mean nothing).
        changed: Bytes that differed from the parent.
        stored: Bytes of these that were stored.
        left: Bytes of these that were not, or have changed again.
        scanned: Bytes read.
    """

    regions: list[Region]
    known: KnownCells
    seen: KnownCells
    changed: int
    stored: int
    left: int
    scanned: int


class _Scanner(msgspec.Struct, frozen=True):
    """How one space is scanned."""

    stream: int
    regions: list[Region]
    reader: Source
    pipeline: Pipeline
    staging: Staging
    seed: int
    threads: int
    stop: threading.Event
    pause: Callable[[], None]

    def scan(
        self,
        plan: CellPlan,
        known: KnownCells,
        keep: Callable[[int, Slot], None],
        advance: Advance = unwatched,
    ) -> ScanResult:
        """Read the cells of a plan, in threads of low priority: the job runs."""
        return in_background(
            lambda: scan(
                plan,
                self.reader,
                known,
                seed=self.seed,
                staging=self.staging,
                threads=self.threads,
                keep=keep,
                stop=self.stop,
                advance=advance,
                pause=self.pause,
                by_file=self._shared(plan),
            ),
            self.stop,
        )

    def _shared(self, plan: CellPlan) -> npt.NDArray[np.uint8] | None:
        """Return which cells other processes share now."""
        pid = self.reader.process
        if pid is None or self.reader.file is None:
            return None
        return read_frames(pid, plan).shared

    def sink(self, plan: CellPlan, known: KnownCells) -> SpaceSink:
        """Return the sink for cells of a plan."""
        return self.pipeline.space(self.stream, plan, self.regions, known)

    def drop(self, row: int, slot: Slot) -> None:
        """Keep nothing."""
        self.staging.release(slot)


def pre_copy(
    pid: int,
    stream: int,
    before: ParentSpace | None,
    context: ScanContext,
    *,
    busy: bool,
    advance: Advance = unwatched,
) -> PreCopied | None:
    """Scan a running process, store what its parent snapshot does not have, and wait until it is
    stored.

    What a busy process changes again is stored in vain. So its cells, and those that were restless
    in the parent (storing them before the window was in vain), are stored only if they did not
    change between two looks, and only as long as that gains something.

    Args:
        busy: Whether the process uses CPU time, so that a cell is stored only after two reads found
            it unchanged.

    Returns:
        What the window can rely on; None if the process has ended or cannot be read (the window
        reports why, if it matters).
    """
    try:
        regions = private_regions(procfs.read_maps(pid))
        extents = pages_of(pid, regions, context.threads)
        with RemoteReader(pid, shared=has_shared_pages(pid, extents)) as reader:
            regions = inherit_origins(
                cut(regions, allocations(reader, regions, extents)),
                before.space.regions if before else [],
            )
            source = RunningReader(reader)
            return copy_space(stream, regions, extents, source, before, context, advance, busy)
    except NotFound:
        return None


def copy_space(
    stream: int,
    regions: list[Region],
    extents: npt.NDArray[np.void],
    source: Source,
    before: ParentSpace | None,
    context: ScanContext,
    advance: Advance = unwatched,
    busy: bool = False,
) -> PreCopied:
    """Scan a space whose content may change meanwhile, as `pre_copy` does.

    Args:
        regions: With the grids that they take over.
        extents: EXTENT records of its pages.
        source: Reads it; what is not there any more reads as zeros.
        busy: Whether something writes to it all the time, so that no cell is stored before it was
            seen not to change.
    """
    known = before.known if before else KnownCells.none()
    plan = plan_cells(regions, extents)
    scanner = _Scanner(
        stream,
        regions,
        source,
        context.pipeline,
        context.staging,
        context.seed,
        context.threads,
        context.stop,
        context.budget.pause,
    )
    held = _held(plan, before, busy)
    sink = scanner.sink(plan, known)
    began = time.monotonic()
    result = scanner.scan(
        plan,
        known,
        lambda row, slot: scanner.drop(row, slot) if held[row] else sink.keep(row, slot),
        advance,
    )
    context.pipeline.drain()
    changed = result.changed
    calm = changed[~held[changed]]
    stored = known.updated(plan.key[calm], result.fingerprint[calm], sink.records[calm])
    kept = int(plan.length[calm].sum())
    size, left = int(plan.length[changed].sum()), 0
    doubtful = changed[held[changed]]
    if len(doubtful):
        cells = plan.take(doubtful)
        late = _Rounds(scanner, cells, result.fingerprint[doubtful], known, began)
        stored = late.run(stored)
        kept += late.stored
        left = size - kept + late.stored - late.true
    order = np.argsort(plan.key, kind="stable")
    seen = KnownCells(plan.key[order], result.fingerprint[order], np.zeros(len(plan), CELL))
    return PreCopied(regions, stored, seen, size, kept, left, plan.bytes)


def _held(plan: CellPlan, before: ParentSpace | None, busy: bool) -> npt.NDArray[np.bool_]:
    """Return for each cell whether it is stored only after it was seen not to change: every cell of
    a busy process, else those that were restless in the parent.
    """
    if busy:
        return np.ones(len(plan), np.bool_)
    restless = np.isin(plan.key, before.restless) if before else np.zeros(len(plan), np.bool_)
    if int(plan.length[restless].sum()) < _LEAST_RESTLESS:
        restless[:] = False
    return restless


class _Rounds:
    """Stores cells of a busy process that do not change, in rounds, as live migration does. It
    stops when the next round would gain nothing, because what it stores would change before the
    window. Each cell is stored at most once.

    Args:
        cells: The cells that differ from the parent.
        fingerprint: V16[n], as they were read at ``began``.
        known: What the parent knows.
        began: Time of that look (time.monotonic).

    Attributes:
        stored: Bytes that were stored.
        true: Bytes of these that had not changed at the last look.
    """

    def __init__(
        self,
        scanner: _Scanner,
        cells: CellPlan,
        fingerprint: npt.NDArray[np.void],
        known: KnownCells,
        began: float,
    ) -> None:
        self.stored = self.true = 0
        self._scanner = scanner
        self._cells = cells
        self._fingerprint = fingerprint
        self._known = known
        self._looked = began

    def run(self, stored: KnownCells) -> KnownCells:
        """Return ``stored`` with what the rounds have stored."""
        left = np.arange(len(self._cells))
        total = self._size(left)
        if total >= _LEAST_RESTLESS:
            self._scanner.stop.wait(max(0.0, self._looked + _REST_SECONDS - time.monotonic()))
            left = left[self._still(left)]
        true, looks = np.empty(0, np.int64), _MOST_LOOKS
        share = max(_LEAST_RESTLESS, total // _FIRST_ROUND)
        while len(left):
            began, before = self._looked, self._size(true) + self._size(left)
            count = int(np.searchsorted(np.cumsum(self._cells.length[left]), share)) + 1
            now, left = left[:count], left[count:]
            stored, true = self._store(now, stored), np.concatenate([true, now])
            if not len(left) and len(true) == len(now):
                break  # everything in one round: nobody needs to know how it went
            true, left = true[self._still(true)], left[self._still(left)]
            seconds = self._looked - began
            rate = self._size(now) / seconds
            moved = before - self._size(true) - self._size(left)
            while self._in_vain(moved / before / seconds, left, rate) and looks:
                looks -= 1
                left, moved, before, seconds = self._look_later(left)
            if self._in_vain(moved / before / seconds, left, rate):
                break
            share *= 2
        self.true = self._size(true)
        return stored

    def _in_vain(self, pace: float, left: npt.NDArray[np.int64], rate: float) -> bool:
        """Return whether too much of what is left would change before all of it is stored.

        Args:
            pace: Share of the cells that changes in a second.
            rate: Bytes that are stored in a second.
        """
        return pace * self._size(left) / rate > _IN_VAIN

    def _look_later(
        self, left: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], int, int, float]:
        """Look again after a while, without storing anything.

        Returns:
            The cells that did not change; the bytes that did, of how many, in how many seconds.
        """
        began, before = self._looked, self._size(left)
        self._scanner.stop.wait(max(0.0, began + _REST_SECONDS - time.monotonic()))
        left = left[self._still(left)]
        return left, before - self._size(left), max(1, before), self._looked - began

    def _size(self, rows: npt.NDArray[np.int64]) -> int:
        return int(self._cells.length[rows].sum())

    def _still(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Look at cells again; return for each whether it is as it was."""
        self._looked = time.monotonic()
        cells = self._cells.take(rows)
        same = KnownCells(cells.key, self._fingerprint[rows], np.zeros(len(rows), CELL))
        found = self._scanner.scan(cells, same, self._scanner.drop)
        return found.row >= 0

    def _store(self, rows: npt.NDArray[np.int64], stored: KnownCells) -> KnownCells:
        """Store cells as they are now."""
        cells = self._cells.take(rows)
        sink = self._scanner.sink(cells, self._known)
        found = self._scanner.scan(cells, self._known, sink.keep)
        self._scanner.pipeline.drain()
        self._fingerprint[rows] = found.fingerprint
        new = found.changed
        self.stored += int(cells.length[new].sum())
        return stored.updated(cells.key[new], found.fingerprint[new], sink.records[new])


class RunningReader:
    """A reader of a running process. A cell of which a page is unmapped between planning and reading
    counts as zeros; the window corrects it.
    """

    mapped = None

    def __init__(self, reader: RemoteReader) -> None:
        self._reader = reader
        self.process = reader.process
        self.file = reader.file

    def read_into(self, iovecs: int, count: int, buffer: Slot, size: int) -> None:
        try:
            self._reader.read_into(iovecs, count, buffer, size)
        except DumpFailed:
            buffer.view(0, size)[:] = bytes(size)
