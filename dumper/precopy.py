"""Pre-copy: the running job's private memory, scanned and stored before the window, so that only what changes meanwhile is left for it.

Its rule: torn reads are harmless, because a chunk is named by what was read, and the window looks at every cell again.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from icecore.dumper.allocations import allocations, cut
from icecore.dumper.cells import EXTENT, CellPlan, inherit_origins, plan_cells
from icecore.dumper.fingerprints import KnownCells
from icecore.dumper.pipeline import Pipeline, SpaceSink
from icecore.dumper.scan import ScanResult, scan
from icecore.dumper.staging import Slot, Staging
from icecore.errors import DumpFailed, NotFound
from icecore.events import Advance, unwatched
from icecore.host import procfs
from icecore.host.memory import RemoteReader
from icecore.host.pagemap import SCAN_FILE, SCAN_PRESENT, SCAN_SWAPPED, SCAN_ZERO_FRAME, Pagemap
from icecore.store.cell import PAGE
from icecore.store.manifest import Region


@dataclass(frozen=True)
class PreCopied:
    """What pre-copy learnt of one process.

    Attributes:
        regions: Its private anonymous memory then, with the cell grid that the window goes on using.
        known: Cells that are stored, the parent's and the new ones.
        changed: Bytes that differed from the parent.
        scanned: Bytes read.
    """

    regions: list[Region]
    known: KnownCells
    changed: int
    scanned: int


def private_regions(pid: int) -> list[Region]:
    """The private anonymous mappings of a process, but for its stacks: what CRIU will leave to be read in place."""
    out = []
    for mapping in procfs.read_maps(pid):
        anonymous = mapping.inode == 0 and (mapping.path in ("", "[heap]") or mapping.path.startswith("[anon:"))
        if mapping.private and anonymous:
            kind = "heap" if mapping.path == "[heap]" else "anonymous"
            out.append(
                Region(mapping.start, mapping.length, mapping.start, mapping.protection, mapping.flags, kind, "", True)
            )
    return out


def present_extents(pid: int, regions: list[Region]) -> npt.NDArray[np.void]:
    """Pages of ``regions`` that hold something of the process's own, as EXTENT records: neither absent nor the kernel's shared zero page."""
    if not regions:
        return np.empty(0, EXTENT)
    with Pagemap(pid) as pagemap:
        runs = pagemap.runs(
            regions[0].start,
            regions[-1].start + regions[-1].length,
            any_of=SCAN_PRESENT | SCAN_SWAPPED,
            wanted=SCAN_FILE | SCAN_ZERO_FRAME,
        )
    runs = runs[(runs["categories"] & np.uint64(SCAN_ZERO_FRAME)) == 0]
    out = np.empty(len(runs), EXTENT)
    out["address"] = runs["start"]
    out["pages"] = (runs["end"] - runs["start"]) // np.uint64(PAGE)
    return out


def pre_copy(
    pid: int,
    stream: int,
    parent_regions: list[Region],
    parent: KnownCells,
    *,
    pipeline: Pipeline,
    staging: Staging,
    seed: int,
    threads: int,
    stop: threading.Event,
    advance: Advance = unwatched,
) -> PreCopied | None:
    """Scan one running process and store what its parent snapshot does not have. Waits until it is stored.

    Returns:
        What the window can rely on; None when the process ended meanwhile or would not be read (the window will say why, if it matters).
    """
    try:
        with RemoteReader(pid) as reader:
            regions = private_regions(pid)
            regions = inherit_origins(cut(regions, allocations(reader, regions)), parent_regions)
            plan = plan_cells(regions, present_extents(pid, regions))
            sink = pipeline.space(stream, plan, regions, parent)
            result = scan(
                plan,
                _Vanishing(reader),
                parent,
                seed=seed,
                staging=staging,
                threads=threads,
                keep=sink.keep,
                stop=stop,
                advance=advance,
            )
        pipeline.drain()
    except NotFound:
        return None
    return PreCopied(
        regions, known_after(plan, result, sink, parent), int(plan.length[result.changed].sum()), plan.bytes
    )


def known_after(plan: CellPlan, result: ScanResult, sink: SpaceSink, before: KnownCells) -> KnownCells:
    """What is known once the cells that a scan handed on are stored."""
    changed = result.changed
    return before.updated(plan.key[changed], result.fingerprint[changed], sink.records[changed])


class _Vanishing:
    """A reader of a process that goes on: a cell of which a page is unmapped between planning and reading counts as zeros, and the window corrects it."""

    def __init__(self, reader: RemoteReader) -> None:
        self._reader = reader

    def read_into(self, iovecs: int, count: int, buffer: Slot, size: int) -> None:
        try:
            self._reader.read_into(iovecs, count, buffer, size)
        except DumpFailed:
            buffer.view(0, size)[:] = bytes(size)
