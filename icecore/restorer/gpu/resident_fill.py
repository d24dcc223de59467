"""Brings cells from the store to GPUs, through pinned memory from which a GPU worker copies them.
Every cell on a GPU is verified.

Placers read and decode cells into their own parts of that memory. Complete cells are verified on
the GPU, by digest (`icecore.host.resident.digest`), and this process fetches those that differ
again. Without placers the fetcher's threads do everything.
"""

from __future__ import annotations

import ctypes
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from typing import Any, NamedTuple

import numpy as np

from icecore.errors import RestoreFailed
from icecore.events import Progress
from icecore.host.gpu.working import HostRegion, Worker, WorkerFailed
from icecore.host.kernel.memory import address_of
from icecore.host.rpc.calls import Call
from icecore.restorer.fetch.fetcher import Fetcher, Through
from icecore.restorer.fetch.limits import Spent
from icecore.restorer.fetch.sink import CellSink
from icecore.restorer.place.placers import Placer, PlacerLost, Placers
from icecore.restorer.place.placing import STAGED_CELLS, STAGED_PARTS, Bounds, Part, PinnedRegion
from icecore.restorer.plan.cells import FULL_CELL, page_pieces
from icecore.restorer.plan.memory import Batch
from icecore.sizes import CELL_BYTES
from icecore.store.format.cell import Records

#: Cells of the region for the fetcher's threads.
_SLOTS = 64
#: The fewest requests that each placer gets.
_TURNS = 4
_POLL_SECONDS = 0.2


class GpuCells(NamedTuple):
    """The cells to fetch, and where each goes.

    Attributes:
        records: CELL[n].
        devices: The GPUs.
        device: For each cell the number of its GPU.
        handle: For each cell the worker's number for its allocation.
        offset: For each cell the offset in the allocation.
    """

    records: Records
    devices: Sequence[str]
    device: Sequence[int]
    handle: Sequence[int]
    offset: Sequence[int]


def region_for(placers: Placers | None) -> HostRegion:
    """Return prefaulted host memory for a fill with these placers; the caller closes it."""
    staged = len(placers.all) * 2 * STAGED_CELLS if placers is not None else 0
    region = HostRegion((_SLOTS + staged) * CELL_BYTES)
    region.prefault()
    return region


class ResidentFill(CellSink):
    """Brings cells to GPUs.

    Args:
        wanted: What goes where.
        worker: Has mapped the allocations and the region.
        region: Of `region_for`.
        fetcher: Makes the fetcher for this sink.

    Attributes:
        spent: What the workers have done; complete once `run` has ended.
        placers: How many processes get cells.
        digested: Whether cells from placers were verified by digest, at least in the end.
    """

    def __init__(
        self,
        wanted: GpuCells,
        worker: Worker,
        region: HostRegion,
        fetcher: Callable[[CellSink], Fetcher],
    ) -> None:
        self._wanted, self._worker, self._region = wanted, worker, region
        self._fetcher = fetcher(self)
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._ended = False
        self._bitmaps = [record.tobytes() for record in wanted.records["data"]]
        self._digests: Sequence[Call] = ()
        self._key = b""
        self._doubtful: list[int] = []
        self.placers = 0
        self.digested = False

    @property
    def spent(self) -> Spent:
        """What the fetcher's threads have done."""
        return self._fetcher.spent

    def run(self, progress: Progress) -> None:
        """Fill until everything is complete.

        Raises:
            WorkerFailed, StoreError, Damaged, RestoreFailed: It cannot be done.
        """
        for slot in range(_SLOTS):
            self._slots.put(slot)
        empty = [not any(bitmap) for bitmap in self._bitmaps]
        # Memory that is still held, and no longer zeros there.
        for row in np.flatnonzero(empty).tolist():
            self.place(row, memoryview(b""))
        self._fetcher.progress = progress
        self._fetcher.start(np.flatnonzero(~np.array(empty, np.bool_)).tolist())
        self._fetcher.wait()
        for _ in range(_SLOTS):  # all slots are free again: every copy is done
            self._slot()
        if self._failure is not None:
            raise self._failure
        self._fetcher.stop()
        self._look_again()

    def _look_again(self) -> None:
        """Verify the cells of lost placers again: what such a placer had staged may have arrived
        after the cell that was fetched in its place.

        Raises:
            RestoreFailed: A cell differs from the snapshot.
        """
        if self._doubtful:
            self._worker.begin(
                self._wanted.devices, fingerprints=False
            )  # once all copies in flight are done
            if self._other(self._doubtful, self._key):
                raise RestoreFailed(
                    "a placer process was lost, and cells are damaged",
                    cure="try again; icecore check finds the damage",
                )

    def give_up(self) -> None:
        """Have `run` end; no effect once it is complete."""
        self._ended = True
        self._fetcher.fail(RestoreFailed("the restore was given up"))

    def stop(self) -> None:
        """Let the fetcher's threads end."""
        self._fetcher.stop()

    def hand_out(self, placers: Placers, digests: Sequence[Call], key: bytes) -> None:
        """Have placers stage cells, and the worker copy them from there; before `run`.

        Args:
            digests: Of `Worker.prepare_digests`: until they are done, and if a GPU cannot compute
                digests, the placers verify.
            key: The repository's chunk key.
        """
        placers.begin()
        for number, placer in enumerate(placers.all):
            region = PinnedRegion(
                self._region.size, (_SLOTS + number * 2 * STAGED_CELLS) * CELL_BYTES
            )
            with ExitStack() as stack:
                gpus = [
                    stack.enter_context(self._worker.connect(device)).fileno()
                    for device in self._wanted.devices
                ]
                with suppress(PlacerLost):  # raised again by the first request
                    placer.share(region, self._region.descriptor, gpus)
        self._digests = digests
        # Few large requests keep this process idle; too large ones leave one placer working while
        # the others have ended.
        share = len(self._wanted.records) // (len(placers.all) * _TURNS * STAGED_CELLS)
        batches = max(1, min(STAGED_PARTS, share))
        self._key = key
        self._fetcher.hand_out(placers.all, self._through(), cells=STAGED_CELLS, batches=batches)
        self.placers = len(placers.all)

    def _through(self) -> Through:
        records, _, device, handle, offset = self._wanted

        def through(placer: Placer, batches: Sequence[Batch]) -> list[int]:
            rows = [cell.row for batch in batches for cell in batch.cells]
            table = records[rows]
            parts, at = [], 0
            for batch in batches:
                cells = [
                    Bounds(*cell[1:], device[cell.row], handle[cell.row], offset[cell.row])
                    for cell in batch.cells
                ]
                parts.append(
                    Part(
                        list(batch.reads), cells, table[at : at + len(cells)].tobytes(), batch.size
                    )
                )
                at += len(cells)
            digested = all(one.done() and one.exception() is None for one in self._digests)
            self.digested = self.digested or digested
            try:
                staged = placer.stage(parts, digested=digested)
            except PlacerLost:
                if digested:
                    self._doubtful.extend(rows)
                raise
            if staged.broken:
                raise WorkerFailed(staged.broken)
            other = (
                self._other(
                    [row for row, there in zip(rows, staged.there, strict=True) if there], self._key
                )
                if digested
                else ()
            )
            return [
                row
                for row, there in zip(rows, staged.there, strict=True)
                if not there or row in other
            ]

        return through

    def _other(self, rows: Sequence[int], key: bytes) -> set[int]:
        """Return which complete cells of these differ on their GPU from the snapshot."""
        records, devices, device, handle, offset = self._wanted
        found: set[int] = set()
        for number, name in enumerate(devices):
            own = [row for row in rows if device[row] == number and self._bitmaps[row] == FULL_CELL]
            if own:
                digests = self._worker.digests(
                    name, [(handle[row], offset[row]) for row in own], key
                )
                found.update(np.array(own)[(digests != records["chunk"][own]).any(axis=1)].tolist())
        return found

    def _slot(self) -> int:
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                return self._slots.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._ended:
                    raise RestoreFailed("the restore was given up") from None

    def place(self, row: int, data: memoryview) -> None:
        """Put a cell on its GPU; see `CellSink.place`."""
        bitmap = self._bitmaps[row]
        slot = self._slot()
        to = self._region.address + slot * CELL_BYTES
        if bitmap == FULL_CELL:
            ctypes.memmove(to, address_of(data), CELL_BYTES)
        else:
            ctypes.memset(to, 0, CELL_BYTES)
            source = address_of(data) if len(data) else 0
            for at, position, length in page_pieces(bitmap, bitmap):
                ctypes.memmove(to + at, source + position, length)

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._failure = self._failure or error
            self._slots.put(slot)

        wanted = self._wanted
        cell = (wanted.handle[row], wanted.offset[row])
        self._worker.place(
            wanted.devices[wanted.device[row]], [cell], [slot * CELL_BYTES]
        ).add_done_callback(done)
