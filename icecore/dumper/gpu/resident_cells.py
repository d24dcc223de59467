"""The cells of resident memory: fingerprinted on their GPUs and compared with the parent's. A cell
has changed if the parent does not have it exactly as it is.

The window does this for all memory; `icecore.dumper.gpu.resident_ahead` does it before the window for
the memory that exists then.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.cells import EXTENT, UNKNOWN, ZERO, CellPlan, plan_cells
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.spaces import SpaceCapture
from icecore.errors import DumpFailed
from icecore.host.gpu.working import Worker
from icecore.host.resident.fingerprint import Words, zero_words
from icecore.host.resident.protocol import Allocation
from icecore.host.resident.sharing import Taken
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.manifest import Region


class AllocationCells(msgspec.Struct):
    """The cells of one allocation: the worker's handle, and the rows of its process's plan."""

    handle: int
    allocation: Allocation
    descriptor: int
    first: int
    cells: int

    @property
    def rows(self) -> slice:
        """Rows of its cells."""
        return slice(self.first, self.first + self.cells)


class ProcessCells(msgspec.Struct):
    """One process's resident memory.

    Attributes:
        words: u64[n, 2], the fingerprints.
        row: i64[n], the parent's row for each cell, `UNKNOWN` or `ZERO`. A restore clears memory
            anyway, so cells of zeros are neither copied nor stored.
        zero: u64[2], the fingerprint of zeros.
    """

    pid: int
    capture: SpaceCapture
    plan: CellPlan
    pieces: list[AllocationCells]
    words: npt.NDArray[np.uint64]
    row: npt.NDArray[np.int64]
    zero: Words

    def compare(self, rows: slice = slice(None)) -> None:
        """Compare cells, which now have fingerprints, with the parent's."""
        known, words = self.capture.known, self.words[rows]
        found = np.where((words == self.zero).all(axis=1), ZERO, UNKNOWN)
        if len(known.key):
            candidates = known.find(self.plan.key[rows])
            there = known.fingerprint[np.maximum(candidates, 0)].view(np.uint64).reshape(-1, 2)
            found = np.where((candidates >= 0) & (there == words).all(axis=1), candidates, found)
        self.row[rows] = found

    def known(self, piece: AllocationCells) -> bool:
        """Return whether the parent has any cell of an allocation."""
        return bool((self.capture.known.find(self.plan.key[piece.rows]) >= 0).any())

    def changed(self, piece: AllocationCells) -> npt.NDArray[np.bool_]:
        """Return which cells of an allocation have changed; bool[cells]."""
        changed: npt.NDArray[np.bool_] = self.row[piece.rows] == UNKNOWN
        return changed


def plan_process(
    pid: int,
    key: str,
    pairs: Sequence[Taken],
    worker: Worker,
    parent: Parent | None,
    seed: int,
    *,
    stream: int = 0,
) -> ProcessCells:
    """Plan the cells of one process. Until they are fingerprinted, all count as changed.

    Args:
        pid: Host pid of the process. ``key``: its pid in its own namespace, which names its space.
        pairs: The process's allocations, by address.
        seed: The lineage's seed for fingerprints.
        stream: The shard stream of its space.
    """
    before = parent.space("device", key) if parent else None
    regions = [
        Region(one.address, one.size, one.address, 3, 0, kind="device", name=one.device)
        for one, _ in pairs
    ]
    capture = SpaceCapture.make("device", key, 0, regions, before, stream=stream)
    extents = np.array([(one.address, one.size // PAGE) for one, _ in pairs], EXTENT)
    plan = plan_cells(capture.regions, extents)
    pieces, first = [], 0
    for handle, (one, descriptor) in zip(worker.new_handles(len(pairs)), pairs, strict=True):
        pieces.append(AllocationCells(handle, one, descriptor, first, one.size // CELL_BYTES))
        first += pieces[-1].cells
    if first != len(plan) or (plan.length != CELL_BYTES).any():
        raise DumpFailed("an allocation does not consist of whole cells")
    words, row = np.zeros((len(plan), 2), np.uint64), np.full(len(plan), UNKNOWN, np.int64)
    return ProcessCells(pid, capture, plan, pieces, words, row, zero_words(seed))


def by_device(
    processes: Sequence[ProcessCells],
) -> Mapping[str, list[tuple[ProcessCells, AllocationCells]]]:
    """Return the allocations by GPU."""
    found: dict[str, list[tuple[ProcessCells, AllocationCells]]] = {}
    for process in processes:
        for piece in process.pieces:
            found.setdefault(piece.allocation.device, []).append((process, piece))
    return found


def fingerprint(
    worker: Worker,
    device: str,
    pieces: Sequence[tuple[ProcessCells, AllocationCells]],
    seed: int,
    seconds: float = 300.0,
) -> int:
    """Map memory of one GPU, leave it mapped, and fill in its cells' ``words``. Each of the worker's
    calls may take ``seconds``.

    Returns:
        Bytes fingerprinted.

    Raises:
        WorkerFailed: The worker cannot do it.
    """
    own = [piece for _, piece in pieces]
    handles = [one.handle for one in own]
    worker.map(
        device,
        handles,
        [one.allocation.size for one in own],
        [one.descriptor for one in own],
        seconds,
    )
    words = worker.fingerprints(device, handles, seed, seconds)
    at = 0
    for process, piece in pieces:
        process.words[piece.rows] = words[at : at + piece.cells]
        at += piece.cells
    return at * CELL_BYTES
