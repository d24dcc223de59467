"""Copies changed resident memory aside in the window, and stores the copies after it.

The memory is fingerprinted on its GPU; only what differs from the parent is copied, on the GPU if
there is room, else into pinned host memory. What finds no room at all is stored in the window.
"""

from __future__ import annotations

import sys
import threading
from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.gpu.resident_cells import (
    AllocationCells,
    ProcessCells,
    by_device,
    fingerprint,
    plan_process,
)
from icecore.dumper.gpu.resident_precopy import ResidentPreCopied
from icecore.dumper.memory.cells import UNKNOWN
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.pipeline import SpaceSink
from icecore.dumper.memory.scan import ScanResult
from icecore.dumper.memory.spaces import ScanContext, Scanned, SpaceCapture
from icecore.dumper.memory.staging import ForeignSlot
from icecore.dumper.preflight.gpu_changes import GpusChanged
from icecore.errors import DumpFailed
from icecore.events import Sink, phase
from icecore.host.gpu.working import RING, HostRegion, Worker, copy_cell, fetch_through
from icecore.host.resident.copyplan import divide
from icecore.host.resident.gpu import NOWHERE, ON_DEVICE, SPARE, spare_room
from icecore.host.resident.sharing import Shares, Taken
from icecore.sizes import CELL_BYTES
from icecore.store.format.fingerprints import FINGERPRINT

#: Cells of the host region from which copies on a GPU are stored, at most; and how many make that
#: pay, because staging lets them go sooner.
_MOST_PLACES, _LEAST_PLACES = 16 * RING, 4 * RING


class CopiedProcess(msgspec.Struct):
    """The resident memory of one process on its way into the snapshot. ``place`` i64[n]: where the
    copies of changed cells are.
    """

    cells: ProcessCells
    sink: SpaceSink
    place: npt.NDArray[np.int64]
    device: list[str]


class Places:
    """Free places in the host region. Thread-safe.

    Args:
        free: Their offsets.

    Attributes:
        count: How many there are, free or not.
    """

    def __init__(self, free: Sequence[int]) -> None:
        self.count = len(free)
        self._free = list(free)
        #: The fewest places for which anyone waits.
        self._least = sys.maxsize
        self._change = threading.Condition()

    def take(self, count: int, check: Callable[[], None]) -> list[int]:
        """Wait until so many are free, and return them.

        Args:
            check: Called now and then; raises when waiting has become pointless.
        """
        with self._change:
            while len(self._free) < count:
                check()
                self._least = min(self._least, count)
                self._change.wait(1.0)
            taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, place: int) -> None:
        """Return a place."""
        with self._change:
            self._free.append(place)
            # Waking a thread for each place would cost all others the interpreter's lock.
            if len(self._free) >= self._least:
                self._least = sys.maxsize
                self._change.notify_all()


class ResidentCopy:
    """The copies of one window.

    Args:
        worker: Has all GPUs in use prepared.
        region: Pinned host memory for copies; None: there is none, as no process had resident
            memory when the dump began.
        spare: Bytes on each GPU that were free before the window.
        shares: The memory that was taken away.
        pids: Host pid → pid in its own namespace.
        pre_copied: What was stored before the window, by host pid.
        context, parent: What stores the copies, and what they are compared with.
        emit: Gets the ``dump.resident.fingerprint`` and ``dump.resident.copy`` phases.

    Attributes:
        processes: The processes, once `run` has planned them.
    """

    def __init__(
        self,
        worker: Worker,
        region: HostRegion | None,
        spare: Mapping[str, int],
        shares: Shares,
        pids: Mapping[int, int],
        pre_copied: Mapping[int, ResidentPreCopied],
        context: ScanContext,
        parent: Parent | None,
        emit: Sink,
    ) -> None:
        self._worker = worker
        self._region = region
        self._spare = dict(spare)
        self._shares = shares
        self._pids = pids
        self._pre_copied = pre_copied
        self._context = context
        self._parent = parent
        self._emit = emit
        self.processes: list[CopiedProcess] = []
        self._places: Places | None = None

    @property
    def devices(self) -> Mapping[str, Sequence[tuple[ProcessCells, AllocationCells]]]:
        """What the worker has mapped, by GPU."""
        return by_device([process.cells for process in self.processes])

    def run(self) -> None:
        """Fingerprint the memory and copy what changed.

        Raises:
            DumpFailed: Memory has no room for copies, or the dump was abandoned.
            WorkerFailed: The worker ended.
        """
        pairs = self._shares.owned  # shared memory is stored once
        self.processes = [
            self._plan(pid, number, pairs[pid]) for number, pid in enumerate(sorted(pairs))
        ]
        devices = by_device([process.cells for process in self.processes])
        if not devices:
            return
        with ThreadPoolExecutor(len(devices), "gpu") as pool:
            with phase(self._emit, "dump.resident.fingerprint") as running:
                for future in [
                    pool.submit(fingerprint, self._worker, device, pieces, self._context.seed)
                    for device, pieces in devices.items()
                ]:
                    running.bytes += future.result()
            for process in self.processes:
                process.cells.compare()
            with phase(self._emit, "dump.resident.copy") as running:
                rooms = self._divide(devices)
                futures = [
                    pool.submit(self._stage, device, pieces, rooms[device])
                    for device, pieces in devices.items()
                ]
                counts = [future.result() for future in futures]
                running.bytes = sum(changed for changed, _ in counts)
                running.fields["in_window"] = sum(left for _, left in counts)
        for process in self.processes:
            self._keep(process, in_window=True)

    def _plan(
        self,
        pid: int,
        number: int,
        pairs: Sequence[Taken],
    ) -> CopiedProcess:
        stream = number % self._context.streams
        cells = plan_process(
            pid,
            str(self._pids[pid]),
            pairs,
            self._worker,
            self._parent,
            self._context.seed,
            stream=stream,
        )
        if (ahead := self._pre_copied.get(pid)) is not None:
            cells.capture.known, cells.capture.seen = ahead.known, ahead.seen
        sink = self._context.pipeline.space(
            stream, cells.plan, cells.capture.regions, cells.capture.known
        )
        devices = [piece.allocation.device for piece in cells.pieces for _ in range(piece.cells)]
        return CopiedProcess(cells, sink, np.full(len(cells.plan), NOWHERE, np.int64), devices)

    def _divide(
        self, devices: Mapping[str, Sequence[tuple[ProcessCells, AllocationCells]]]
    ) -> dict[str, tuple[int, int]]:
        """Divide the host region among the GPUs: offset and size of each part.

        Device memory that was not free before the window must not be used for copies either: the
        driver has freed it for the checkpoint and needs it back.
        """
        if self._region is None:
            raise GpusChanged(
                "the job has resident memory now that it did not have when the dump began",
                cure="dump it again",
            )
        free = self._worker.begin(list(devices))
        short = {}
        for device, pieces in devices.items():
            changed = sum(int(process.changed(piece).sum()) for process, piece in pieces)
            self._spare[device] = min(self._spare.get(device, 0), spare_room(free[device]))
            short[device] = max(0, changed - self._spare[device] // CELL_BYTES)
        at, shares = RING, {}
        for device, cells in divide(self._region.size // CELL_BYTES - RING, short).items():
            shares[device] = (at * CELL_BYTES, cells * CELL_BYTES)
            at += cells
        return shares

    def _stage(
        self,
        device: str,
        pieces: Sequence[tuple[ProcessCells, AllocationCells]],
        share: tuple[int, int],
    ) -> tuple[int, int]:
        masks = [process.changed(piece) for process, piece in pieces]
        mask = np.concatenate(masks)
        if not mask.any():
            return 0, 0
        places = self._worker.stage(
            device, [piece.handle for _, piece in pieces], mask, *share, spare=self._spare[device]
        )
        by_pid = {process.cells.pid: process for process in self.processes}
        at = 0
        for (cells, piece), own in zip(pieces, masks, strict=True):
            some = int(own.sum())
            by_pid[cells.pid].place[piece.rows][own] = places[at : at + some]
            at += some
        return len(places) * CELL_BYTES, int((places == NOWHERE).sum()) * CELL_BYTES

    def _keep(self, process: CopiedProcess, *, in_window: bool) -> None:
        """Hand changed cells to the pipeline: in the window those without room for a copy, after it
        those that were copied aside.
        """
        changed = process.cells.row == UNKNOWN
        rows = np.flatnonzero(changed & ((process.place == NOWHERE) == in_window))
        if not len(rows):
            return
        assert self._region is not None  # or there would be no copies
        aside = process.place[rows]
        through = rows[in_window | (aside >= ON_DEVICE)]
        for row in rows[~(in_window | (aside >= ON_DEVICE))].tolist():
            self._hand_over(process, row, int(process.place[row]), lambda: None)
        pieces = process.cells.pieces
        firsts = [piece.first for piece in pieces]
        for device in dict.fromkeys(process.device):
            rows_there = [row for row in through.tolist() if process.device[row] == device]
            if in_window:
                owners = [pieces[bisect_right(firsts, row) - 1] for row in rows_there]
                cells = [
                    (own.handle, (row - own.first) * CELL_BYTES)
                    for own, row in zip(owners, rows_there, strict=True)
                ]
                hand_on = partial(self._hand_on_of, process, rows_there)
                fetch_through(self._worker, self._region, device, cells, hand_on)
            else:
                cells = [(SPARE, int(process.place[row]) - ON_DEVICE) for row in rows_there]
                self._fetch_aside(process, device, cells, rows_there)

    def _hand_on_of(
        self, process: CopiedProcess, rows: Sequence[int], number: int, place: int
    ) -> None:
        self._hand_on(process, rows[number], place)

    def _hand_on(self, process: CopiedProcess, row: int, place: int) -> None:
        assert self._region is not None
        self._check()
        slot = self._context.staging.acquire()
        copy_cell(self._region, place, slot.address)
        process.sink.keep(row, slot)

    def _fetch_aside(
        self,
        process: CopiedProcess,
        device: str,
        cells: Sequence[tuple[int, int]],
        rows: Sequence[int],
    ) -> None:
        """Fetch copies from a GPU into free cells of the region, from which they are stored."""
        assert self._region is not None
        places = self._free_places()
        if places.count < _LEAST_PLACES:
            hand_on = partial(self._hand_on_of, process, rows)
            fetch_through(self._worker, self._region, device, cells, hand_on)
            return
        done = 0
        while done < len(cells):
            to = places.take(min(RING, len(cells) - done), self._check)
            some = cells[done : done + len(to)]
            self._worker.finish(self._worker.fetch(device, some, to))
            for row, place in zip(rows[done : done + len(to)], to, strict=True):
                self._hand_over(process, row, place, partial(places.give_back, place))
            done += len(to)

    def _free_places(self) -> Places:
        """Return the cells of the region that hold no copies; those that are being stored come back
        later.
        """
        if self._places is None:
            assert self._region is not None
            every = np.concatenate([one.place for one in self.processes])
            last = int(every[(every != NOWHERE) & (every < ON_DEVICE)].max(initial=0))
            rest = range(max(RING, last // CELL_BYTES + 1), self._region.size // CELL_BYTES)
            free = [*range(RING), *rest[: _MOST_PLACES - RING]]
            self._places = Places([number * CELL_BYTES for number in free])
        return self._places

    def _hand_over(
        self, process: CopiedProcess, row: int, place: int, over: Callable[[], None]
    ) -> None:
        """Hand a cell of the region to the pipeline, which stores it from there."""
        assert self._region is not None
        self._check()
        address = self._region.address + place
        process.sink.keep(row, ForeignSlot(self._region.cell(place), address, over))

    def _check(self) -> None:
        self._context.pipeline.check()
        if self._context.stop.is_set():
            raise DumpFailed("the dump was abandoned")

    def store(self) -> list[SpaceCapture]:
        """Hand everything that was copied aside to the pipeline and return the spaces.

        Raises:
            WorkerFailed: The worker ended while copies were on a GPU.
        """
        for process in self.processes:
            self._keep(process, in_window=False)
            cells = process.cells
            process.sink.unchanged(cells.row)
            process.sink.zeros(cells.row)
            fingerprints = np.ascontiguousarray(cells.words).view(FINGERPRINT).reshape(-1)
            cells.capture.add(
                Scanned(cells.plan, process.sink, ScanResult(fingerprints, cells.row))
            )
        return [process.cells.capture for process in self.processes]
