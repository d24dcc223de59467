"""The background pipeline: threads that drop zero pages and store the rest. During the window they
wait behind a gate, because the window comes first.
"""

from __future__ import annotations

import queue
import threading
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.background import lower_priority
from icecore.dumper.memory.budget import CpuBudget
from icecore.dumper.memory.cells import ZERO, CellPlan
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.staging import Slot, Staging
from icecore.events import Advance, unwatched
from icecore.sizes import BITMAP_BYTES, CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import Region

_WORDS = PAGE // 8
_SPILL_SLOTS = 64
_NO_PAGES = bytes(BITMAP_BYTES)


class CellStore(Protocol):
    """The part of the store's writer that the pipeline needs."""

    def store_cell(
        self,
        stream: int,
        cell: int,
        data_bitmap: bytes,
        zero_bitmap: bytes,
        data: memoryview,
        previous: np.void | None,
        *,
        region: int = 0,
    ) -> np.void:
        """Store one cell and return its CELL record."""


class SpaceSink:
    """Collects the records of one space while its cells go through the pipeline.

    Attributes:
        records: CELL[n], by rows of the plan; complete once the pipeline is drained.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stream: int,
        plan: CellPlan,
        regions: list[Region],
        known: KnownCells,
    ) -> None:
        self.records = np.zeros(len(plan), CELL)
        self._pipeline = pipeline
        self._stream = stream
        self._plan = plan
        self._known = known
        self._candidates = known.find(plan.key)
        # A restore clears resident device memory first, so its zeros need not be stored.
        self._sparse = np.array(
            [
                (r.kind in ("anonymous", "heap") and r.lazy) or (r.kind == "device" and not r.lazy)
                for r in regions
            ],
            np.bool_,
        )

    def keep(self, row: int, slot: Slot) -> None:
        """Take over a slot that holds the cell of ``row``, and queue the cell."""
        self._pipeline.put(self, row, slot)

    def length(self, row: int) -> int:
        """Return the bytes of the cell of ``row``."""
        return int(self._plan.length[row])

    def store(
        self, row: int, slot: Slot, scratch: npt.NDArray[np.uint8], writer: CellStore
    ) -> None:
        """Encode and store one cell. The pipeline's threads call this."""
        plan = self._plan
        size = int(plan.length[row])
        bitmap, zero, data = plan.bitmap[row].tobytes(), _NO_PAGES, slot.view(0, size)
        if self._sparse[plan.region[row]]:
            bitmap, zero, data = without_zero_pages(plan.bitmap[row], data, scratch)
        candidate = int(self._candidates[row])
        previous = self._known.record[candidate] if candidate >= 0 else None
        region = int(plan.region[row])
        self.records[row] = writer.store_cell(
            self._stream, int(plan.cell[row]), bitmap, zero, data, previous, region=region
        )

    def zeros(self, rows: npt.NDArray[np.int64]) -> None:
        """Record cells that hold only zeros. ``rows`` i8[n]: as for `unchanged`."""
        zero = np.flatnonzero(rows == ZERO)
        self.records[zero] = np.zeros(1, CELL)
        self.records["cell"][zero] = self._plan.cell[zero]
        self.records["zero"][zero] = self._plan.bitmap[zero]

    def unchanged(self, rows: npt.NDArray[np.int64]) -> None:
        """Take over the known records of cells that did not change. ``rows`` i8[n]: the known row,
        or -1.
        """
        same = np.flatnonzero(rows >= 0)
        self.records[same] = self._known.record[rows[same]]
        self.records["cell"][same] = self._plan.cell[same]


def without_zero_pages(
    bitmap: npt.NDArray[np.uint8], data: memoryview, scratch: npt.NDArray[np.uint8]
) -> tuple[bytes, bytes, memoryview]:
    """Split a cell's present pages into data and zero pages.

    Args:
        bitmap: u1[32], the present pages.
        data: Their bytes in address order.
        scratch: u1[1 MiB] to gather the data pages in.

    Returns:
        Data bitmap, zero bitmap, and the bytes of the data pages (``data`` itself when there are no
        zero pages).
    """
    pages = np.frombuffer(data, np.uint64).reshape(-1, _WORDS)
    zero = (pages[:, 0] | pages[:, _WORDS // 2 - 1] | pages[:, -1]) == 0
    suspects = np.flatnonzero(zero)
    if not len(suspects):
        return bitmap.tobytes(), _NO_PAGES, data
    # max() takes half the time of any(), which converts each word first.
    zero[suspects] = (pages[suspects] if len(suspects) < len(pages) else pages).max(axis=1) == 0
    if not zero.any():
        return bitmap.tobytes(), _NO_PAGES, data
    present = np.flatnonzero(np.unpackbits(bitmap, bitorder="little"))
    mask = np.zeros(CELL_PAGES, np.bool_)
    mask[present[zero]] = True
    zero_bitmap = np.packbits(mask, bitorder="little")
    kept = np.flatnonzero(~zero)
    out = scratch[: len(kept) * PAGE]
    np.take(pages, kept, axis=0, out=out.view(np.uint64).reshape(-1, _WORDS))
    return (bitmap & ~zero_bitmap).tobytes(), zero_bitmap.tobytes(), out.data


class _Mark:
    """A barrier that goes through the queue once for each thread. When all threads have arrived,
    everything queued before it is stored.
    """

    def __init__(self, threads: int) -> None:
        self._left = threads
        self._lock = threading.Lock()
        self.passed = threading.Event()

    def arrive(self) -> None:
        """Wait for the other threads, or until the barrier is lifted."""
        with self._lock:
            self._left -= 1
            if self._left == 0:
                self.passed.set()
        self.passed.wait()


class Pipeline:
    """Threads between staging and the store.

    While the gate is closed (the window), cells wait in staging. When staging runs low, the gate
    opens: the spill goes straight into the repository.

    Args:
        writer: Stores the cells.
        staging: Where slots are given back.
        threads: Number of encoding threads.
        budget: Bounds the CPU time of these threads while the job runs; None: no bound.
    """

    def __init__(
        self, writer: CellStore, staging: Staging, threads: int, budget: CpuBudget | None = None
    ) -> None:
        self._budget = budget or CpuBudget()
        self._writer = writer
        self._staging = staging
        self._queue: queue.SimpleQueue[tuple[SpaceSink, int, Slot] | _Mark | None] = (
            queue.SimpleQueue()
        )
        self._gate = threading.Event()
        self._gate.set()
        # The scan outruns the store many times over, so a wider margin would only open the gate when
        # staging would have sufficed.
        self._low = max(4, min(_SPILL_SLOTS, staging.capacity // 8))
        staging.when_empty = self._spill
        self._mark = _Mark(threads)
        self._failure: BaseException | None = None
        self._advance: Advance = unwatched
        self.spilled = False
        self._threads = [
            threading.Thread(target=self._run, name=f"encode-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def space(
        self, stream: int, plan: CellPlan, regions: list[Region], known: KnownCells
    ) -> SpaceSink:
        """Return a sink for the cells of one space, which go to shard stream ``stream``."""
        return SpaceSink(self, stream, plan, regions, known)

    def put(self, sink: SpaceSink, row: int, slot: Slot) -> None:
        """Queue one cell.

        Raises:
            Whatever the store raised first.
        """
        if self._failure is not None:
            self._staging.release(slot)
            raise self._failure
        self._queue.put((sink, row, slot))
        if self._staging.available < self._low:
            self._spill()

    def _spill(self) -> None:
        """Open the gate if anything waits behind it. If nothing does, the scan threads hold the
        remaining slots and have not handed any on.
        """
        if not self._gate.is_set() and not self._queue.empty():
            self.spilled = True
            self._gate.set()

    def close_gate(self) -> None:
        """Begin the window: leave the cores to the scan, and lift the bound on CPU time."""
        self._gate.clear()
        self._budget.lift()

    def open_gate(self, advance: Advance = unwatched) -> None:
        """End the window. ``advance`` is told of bytes as they are stored."""
        self._advance = advance
        self._gate.set()

    def drain(self) -> None:
        """Wait until everything queued is stored.

        Raises:
            Whatever the store raised first.
        """
        self._gate.set()
        mark = self._mark = _Mark(len(self._threads))
        for _ in self._threads:
            self._queue.put(mark)
        try:
            # A thread that fails sets the failure first and then lifts the mark that it sees, so no
            # failure is missed.
            if self._threads and self._failure is None:
                mark.passed.wait()
        finally:
            mark.passed.set()
        if self._failure is not None:
            raise self._failure

    def _run(self) -> None:
        lower_priority()  # the job runs whenever the gate is open
        scratch = np.empty(CELL_BYTES, np.uint8)
        while (item := self._queue.get()) is not None:
            if isinstance(item, _Mark):
                item.arrive()
                continue
            self._gate.wait()
            sink, row, slot = item
            try:
                try:
                    if self._failure is None:
                        sink.store(row, slot, scratch, self._writer)
                        self._advance(sink.length(row))
                finally:
                    self._staging.release(slot)
                self._budget.pause()
            except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
                self._failure = self._failure or error
                self._mark.passed.set()
                self._staging.abandon(error)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._failure = self._failure or error
        self._gate.set()
        self._budget.lift()
        for _ in self._threads:
            self._queue.put(None)
        for thread in self._threads:
            thread.join()
