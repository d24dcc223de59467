"""Pre-copy: scan and store the running job's memory before the window, so that only what changes
meanwhile is left for it.

Torn reads are harmless, because a chunk is named by what was read, and the window checks every cell
again.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.allocations import allocations, cut
from icecore.dumper.memory.cells import CellPlan, inherit_origins, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.pipeline import Pipeline, SpaceSink
from icecore.dumper.memory.present import present_extents, private_regions, ranges_of
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


@dataclass(frozen=True)
class PreCopied:
    """What pre-copy learnt of one process or shared object.

    Attributes:
        regions: Its memory then (of a process, the private anonymous memory), with the cell grid
            that the window reuses.
        known: Cells that are stored, the parent's and the new ones.
        seen: Keys and fingerprints of all cells that were read (its records mean nothing).
        changed: Bytes that differed from the parent.
        stored: Bytes of these that were stored.
        scanned: Bytes read.
    """

    regions: list[Region]
    known: KnownCells
    seen: KnownCells
    changed: int
    stored: int
    scanned: int


@dataclass(frozen=True)
class _Scanner:
    """How one space is scanned."""

    stream: int
    regions: list[Region]
    reader: Source
    pipeline: Pipeline
    staging: Staging
    seed: int
    threads: int
    stop: threading.Event

    def scan(
        self,
        plan: CellPlan,
        known: KnownCells,
        keep: Callable[[int, Slot], None],
        advance: Advance = unwatched,
    ) -> ScanResult:
        """Read the cells of a plan."""
        return scan(
            plan,
            self.reader,
            known,
            seed=self.seed,
            staging=self.staging,
            threads=self.threads,
            keep=keep,
            stop=self.stop,
            advance=advance,
        )

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
    advance: Advance = unwatched,
) -> PreCopied | None:
    """Scan a running process, store what its parent snapshot does not have, and wait until it is
    stored.

    A cell is restless if storing it before the window was in vain the last time. Restless cells are
    read again after a while and stored only if they have come to rest.

    Returns:
        What the window can rely on; None if the process has ended or cannot be read (the window
        reports why, if it matters).
    """
    try:
        with RemoteReader(pid) as reader:
            regions = private_regions(procfs.read_maps(pid))
            regions = inherit_origins(
                cut(regions, allocations(reader, regions)), before.space.regions if before else []
            )
            extents = present_extents(pid, ranges_of(regions), context.threads)
            source = RunningReader(reader)
            return copy_space(stream, regions, extents, source, before, context, advance)
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
) -> PreCopied:
    """Scan a space whose content may change meanwhile, as `pre_copy` does.

    Args:
        regions: With the grids that they take over.
        extents: EXTENT records of its pages.
        source: Reads it; what is not there any more reads as zeros.
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
    )
    restless = np.isin(plan.key, before.restless) if before else np.zeros(len(plan), np.bool_)
    if int(plan.length[restless].sum()) < _LEAST_RESTLESS:
        restless[:] = False
    sink = scanner.sink(plan, known)
    began = time.monotonic()
    result = scanner.scan(
        plan,
        known,
        lambda row, slot: scanner.drop(row, slot) if restless[row] else sink.keep(row, slot),
        advance,
    )
    context.pipeline.drain()
    changed = result.changed
    calm = changed[~restless[changed]]
    stored = known.updated(plan.key[calm], result.fingerprint[calm], sink.records[calm])
    kept = int(plan.length[calm].sum())
    doubtful = changed[restless[changed]]
    if len(doubtful):
        context.stop.wait(max(0.0, began + _REST_SECONDS - time.monotonic()))
        again = plan.take(doubtful)
        same = KnownCells(again.key, result.fingerprint[doubtful], np.zeros(len(again), CELL))
        rested = again.take(np.flatnonzero(scanner.scan(again, same, scanner.drop).row >= 0))
        last = scanner.sink(rested, known)
        found = scanner.scan(rested, known, last.keep)
        context.pipeline.drain()
        new = found.changed
        stored = stored.updated(rested.key[new], found.fingerprint[new], last.records[new])
        kept += int(rested.length[new].sum())
    order = np.argsort(plan.key, kind="stable")
    seen = KnownCells(plan.key[order], result.fingerprint[order], np.zeros(len(plan), CELL))
    return PreCopied(regions, stored, seen, int(plan.length[changed].sum()), kept, plan.bytes)


class RunningReader:
    """A reader of a running process. A cell of which a page is unmapped between planning and reading
    counts as zeros; the window corrects it.
    """

    def __init__(self, reader: RemoteReader) -> None:
        self._reader = reader
        self.process = reader.process
        self.file = None

    def read_into(self, iovecs: int, count: int, buffer: Slot, size: int) -> None:
        try:
            self._reader.read_into(iovecs, count, buffer, size)
        except DumpFailed:
            buffer.view(0, size)[:] = bytes(size)
