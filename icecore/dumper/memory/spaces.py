"""A space on its way into the repository: its plans, what scans found, its records, and in the end its
map. A process, a file and an image are one space each.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.budget import CpuBudget
from icecore.dumper.memory.cells import ZERO, CellPlan, inherit_origins, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.pipeline import Pipeline, SpaceSink
from icecore.dumper.memory.scan import ReadElsewhere, ScanResult, Source, scan
from icecore.dumper.memory.staging import Staging
from icecore.errors import DumpFailed
from icecore.events import Advance, unwatched
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.cell import CELL, Records, data_pages
from icecore.store.format.fingerprints import FINGERPRINT, NO_FINGERPRINTS, Fingerprints
from icecore.store.format.manifest import Region, Space, SpaceKind
from icecore.store.snapshot.writer import SnapshotWriter


class ScanContext(msgspec.Struct, frozen=True):
    """What the scans of one dump share."""

    pipeline: Pipeline
    staging: Staging
    seed: int
    threads: int
    streams: int
    stop: threading.Event
    budget: CpuBudget
    advance: Advance = unwatched

    def scan(
        self,
        source: Source,
        stream: int,
        plan: CellPlan,
        regions: list[Region],
        known: KnownCells,
        read: ReadElsewhere | None = None,
        by_file: npt.NDArray[np.uint8] | None = None,
        threads: int = 0,
    ) -> Scanned:
        """Read the cells of a plan, and hand those that are not known to the pipeline.

        Args:
            read, by_file: As for `icecore.dumper.memory.scan.scan`.
            threads: Number of threads that read; 0: all that this dump has.
        """
        sink = self.pipeline.space(stream, plan, regions, known)
        result = scan(
            plan,
            source,
            known,
            seed=self.seed,
            staging=self.staging,
            threads=threads or self.threads,
            keep=sink.keep,
            stop=self.stop,
            advance=self.advance,
            pause=self.budget.pause,
            read=read,
            by_file=by_file,
        )
        sink.unchanged(result.row)
        return Scanned(plan, sink, result)


class ParentSpace(msgspec.Struct, frozen=True):
    """A space as the parent snapshot has it; ``restless`` is as in `Fingerprints`."""

    space: Space
    records: list[Records]
    known: KnownCells
    restless: npt.NDArray[np.uint64] = msgspec.field(default_factory=lambda: np.empty(0, np.uint64))


class Scanned(msgspec.Struct, frozen=True):
    """Scanned cells: their plan, the sink of those that are not known, and what was found."""

    plan: CellPlan
    sink: SpaceSink
    result: ScanResult


class _Part(msgspec.Struct, frozen=True):
    """Some cells of a space, with plan and scan result. ``at`` i8[n]: their rows in the sink; None:
    all rows.
    """

    plan: CellPlan
    sink: SpaceSink
    result: ScanResult
    at: npt.NDArray[np.int64] | None = None

    def records(self) -> Records:
        """Return CELL[n], with the cell numbers of this plan."""
        if self.at is None:
            return self.sink.records
        rows = self.sink.records[self.at]
        rows["cell"] = self.plan.cell
        return rows


class SpaceCapture(msgspec.Struct):
    """One space of the new snapshot.

    Attributes:
        kind, key, size, regions: As in the manifest's `Space`; the regions have their inherited
            grids.
        known: What the parent and pre-copy know of it.
        parent: The parent's space, whose nodes are reused where they are equal.
        stream: Its shard stream.
        seen: What pre-copy saw of its cells: keys u8[n] and fingerprints V16[n], ascending.
    """

    kind: SpaceKind
    key: str
    size: int
    regions: list[Region]
    known: KnownCells
    parent: ParentSpace | None
    stream: int = 0
    seen: KnownCells | None = None
    _parts: list[_Part] = msgspec.field(default_factory=list)

    @classmethod
    def make(
        cls,
        kind: SpaceKind,
        key: str,
        size: int,
        regions: list[Region],
        parent: ParentSpace | None,
        *,
        stream: int = 0,
    ) -> SpaceCapture:
        """Return a capture whose regions take over the parent's grids."""
        known = parent.known if parent else KnownCells.none()
        regions = inherit_origins(regions, parent.space.regions if parent else [])
        return cls(kind, key, size, regions, known, parent, stream)

    def scan(
        self,
        source: Source,
        extents: npt.NDArray[np.void],
        context: ScanContext,
        early: Scanned | None = None,
        touched: Sequence[int] = (),
    ) -> int:
        """Read the pages of ``extents`` from ``source`` and queue the cells that are not known yet.

        Args:
            early: Cells that were read already. Those with the same pages as in ``extents`` are not
                read again.
            touched: Addresses that may have been written to since.

        Returns:
            Bytes read, now or early.
        """
        plan = plan_cells(self.regions, extents)
        size = plan.bytes
        if early is not None:
            here, there = plan.same(early.plan)
            written = np.searchsorted(plan.key, np.array(touched, np.uint64), side="right") - 1
            sound = ~np.isin(here, written)
            here, there = here[sound], there[sound]
            result = ScanResult(early.result.fingerprint[there], early.result.row[there])
            self._parts.append(_Part(plan.take(here), early.sink, result, there))
            left = np.ones(len(plan), np.bool_)
            left[here] = False
            plan = plan.take(np.flatnonzero(left))
        if not len(plan):
            return size
        self.add(context.scan(source, self.stream, plan, self.regions, self.known))
        return size

    def take_over(self, source: Source, extents: npt.NDArray[np.void], context: ScanContext) -> int:
        """Take over what pre-copy saw of content that has not changed since. Only cells that it did
        not store are read.

        Args:
            extents: The pages as pre-copy found them.

        Returns:
            Bytes read.
        """
        plan = plan_cells(self.regions, extents)
        if self.seen is None or not len(plan):
            return self.scan(source, extents, context)
        found = self.seen.find(plan.key)
        rows = np.flatnonzero(found >= 0)
        read = ReadElsewhere(rows, self.seen.fingerprint[found[rows]])
        self.add(context.scan(source, self.stream, plan, self.regions, self.known, read))
        missing = self.known.differ(plan.key[rows], read.fingerprint)
        return plan.bytes - int(plan.length[rows[~missing]].sum())

    def add(self, part: Scanned, rows: npt.NDArray[np.int64] | None = None) -> None:
        """Add cells that were scanned in another way. Their sink already has the records of cells that
        did not change.

        Args:
            rows: i8[n], ascending: the rows of the part that count; None: all.
        """
        if rows is None:
            self._parts.append(_Part(part.plan, part.sink, part.result))
            return
        result = ScanResult(part.result.fingerprint[rows], part.result.row[rows])
        self._parts.append(_Part(part.plan.take(rows), part.sink, result, rows))

    @property
    def changed(self) -> int:
        """Bytes of cells that differ from the parent, or that it does not have, except cells that were
        found to be `ZERO` in place.
        """
        before = self.parent.known if self.parent else KnownCells.none()
        return sum(
            int(
                p.plan.length[
                    before.differ(p.plan.key, p.result.fingerprint) & (p.result.row != ZERO)
                ].sum()
            )
            for p in self._parts
        )

    @property
    def queued(self) -> int:
        """Bytes of cells that were handed to the pipeline."""
        return sum(int(p.plan.length[p.result.changed].sum()) for p in self._parts)

    def fingerprints(self) -> Fingerprints:
        """Return the fingerprints of all its cells."""
        if not self._parts:
            return NO_FINGERPRINTS
        keys = np.concatenate([part.plan.key for part in self._parts])
        fingerprints = np.concatenate([part.result.fingerprint for part in self._parts])
        order = np.argsort(keys, kind="stable")
        keys, fingerprints = keys[order], fingerprints[order]
        if self.seen is None:
            restless = self.parent.restless if self.parent else NO_FINGERPRINTS.restless
        else:
            restless = keys[self.seen.differ(keys, fingerprints) & (self.seen.find(keys) >= 0)]
        return Fingerprints(keys, fingerprints, restless)

    def records(self) -> list[Records]:
        """Return the CELL records by region, ascending by cell. Call it once the pipeline is drained."""
        if not self._parts or not self.regions:
            return [np.empty(0, CELL) for _ in self.regions]
        region = np.concatenate([part.plan.region for part in self._parts])
        rows = np.concatenate([part.records() for part in self._parts])
        order = np.lexsort((rows["cell"], region))
        region, rows = region[order], rows[order]
        if (
            (np.diff(region.astype(np.int64)) == 0) & (np.diff(rows["cell"].astype(np.int64)) == 0)
        ).any():
            raise DumpFailed(
                f"CRIU split a cell of {self.kind} {self.key} between lazy and written pages"
            )
        return (
            np.split(rows, np.searchsorted(region, np.arange(1, len(self.regions))))
            if len(self.regions) > 1
            else [rows]
        )

    def store(self, writer: SnapshotWriter) -> tuple[Space, int, int, int]:
        """Write the map.

        Returns:
            The manifest's space, the bytes of data pages, the bytes of zero pages, and the bytes of
            data pages that are device memory.
        """
        records = self.records()
        space = writer.put_map(
            self.kind,
            self.key,
            self.size,
            self.regions,
            records,
            self.parent.space if self.parent else None,
        )
        data = sum(int(data_pages(r).sum()) for r in records) * PAGE
        zero = sum(int(np.bitwise_count(r["zero"]).sum()) for r in records) * PAGE
        device = sum(
            int(data_pages(r).sum())
            for region, r in zip(self.regions, records, strict=True)
            if region.kind == "device"
        )
        return space, data, zero, device * PAGE


def cell_keys(regions: list[Region], records: list[Records]) -> npt.NDArray[np.uint64]:
    """Return the keys (`CellPlan.key`) of stored records, region by region."""
    keys = [
        np.maximum(
            np.int64(region.origin) + rows["cell"].astype(np.int64) * CELL_BYTES, region.start
        ).astype(np.uint64)
        for region, rows in zip(regions, records, strict=True)
    ]
    return np.concatenate(keys) if keys else np.empty(0, np.uint64)


def known_from(
    regions: list[Region],
    records: list[Records],
    fingerprints: Fingerprints,
) -> KnownCells:
    """Return what a parent's space tells: its records and the fingerprints of its hints. A cell
    without a fingerprint counts as changed.
    """
    keys = cell_keys(regions, records)
    rows = np.concatenate(records) if records else np.empty(0, CELL)
    own = np.zeros(len(keys), FINGERPRINT)
    if len(keys) and len(fingerprints.key):
        stored_keys, stored = fingerprints.key, fingerprints.fingerprint
        at = np.minimum(np.searchsorted(stored_keys, keys), len(stored_keys) - 1)
        there = stored_keys[at] == keys
        own[there] = stored[at[there]]
    order = np.argsort(keys, kind="stable")
    return KnownCells(keys[order], own[order], rows[order])
