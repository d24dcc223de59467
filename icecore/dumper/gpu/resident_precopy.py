"""Pre-copy of resident memory: store, while the job runs, what would find no room for copies in the
window. A chunk holds what was copied aside, its fingerprint is of that copy, and the window checks
every cell again.

Only memory at rest is worth it, so memory is fingerprinted twice, `_REST_SECONDS` apart. Cells that
were at rest but changed until the window are noted as restless and skipped the next time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.dumper.gpu.resident_ahead import (
    CALL_SECONDS,
    GpuAccess,
    announce,
    announced,
    fingerprint_in_portions,
    mapped,
    owned,
)
from icecore.dumper.gpu.resident_cells import AllocationCells, ProcessCells, by_device, plan_process
from icecore.dumper.memory.cells import UNKNOWN
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.pipeline import SpaceSink
from icecore.dumper.memory.spaces import ScanContext
from icecore.errors import DumpFailed
from icecore.host.gpu.worker import MOST_DESCRIPTORS
from icecore.host.gpu.working import HostRegion, Worker, copy_cell, fetch_through
from icecore.host.resident.client import Agent, Keeper
from icecore.host.resident.fingerprint import Words
from icecore.host.resident.gpu import NOWHERE, ON_DEVICE, SPARE
from icecore.sizes import CELL_BYTES
from icecore.store.format.cell import CELL
from icecore.store.format.fingerprints import FINGERPRINT

#: Time between the two scans (most training steps take less), and the longest duration of the first.
_REST_SECONDS, _SCAN_SECONDS = 0.5, 5.0
#: Bytes of spare device memory to take at a time: the running job finds that much less.
_ROOM = 1 << 30
#: Least room for which pre-copy pays off: each time it fills up, memory is mapped and fingerprinted
#: once more.
_LEAST_ROOM = 64 << 20
#: Bytes of memory to map at a time.
_PORTION = 8 << 30


class ResidentPreCopied(msgspec.Struct, frozen=True):
    """What was learnt of one process.

    Attributes:
        known: Cells that are stored, the parent's and the new ones.
        seen: Keys and fingerprints of all cells that were fingerprinted twice (its records mean
            nothing).
        stored: Bytes that were stored.
    """

    known: KnownCells
    seen: KnownCells
    stored: int


class _Process(msgspec.Struct):
    """The cells of one process. bool[n] each: ``restless``: storing them before the window was in
    vain the last time; ``wanted``: to be stored if they are at rest; ``seen``: fingerprinted twice;
    ``stored``: handed to the sink.
    """

    cells: ProcessCells
    sink: SpaceSink
    restless: npt.NDArray[np.bool_]
    wanted: npt.NDArray[np.bool_]
    seen: npt.NDArray[np.bool_]
    stored: npt.NDArray[np.bool_]
    #: u64[n, 2]: fingerprints of the first scan; where ``stored``, those of the copies.
    words: Words

    def result(self) -> ResidentPreCopied:
        """Return what was learnt, once the pipeline is drained."""
        cells, plan, rows = self.cells, self.cells.plan, np.flatnonzero(self.stored)
        known = cells.capture.known.updated(
            plan.key[rows], _packed(self.words[rows]), self.sink.records[rows]
        )
        # Cells that were not reached again stay as restless as they were: their fingerprint differs
        # from zero words.
        cells.words[~self.seen] = 0
        looked = np.flatnonzero(self.seen | self.restless)
        looked = looked[np.argsort(plan.key[looked], kind="stable")]
        seen = KnownCells(
            plan.key[looked], _packed(cells.words[looked]), np.zeros(len(looked), CELL)
        )
        return ResidentPreCopied(known, seen, len(rows) * CELL_BYTES)


def _packed(words: Words) -> npt.NDArray[np.void]:
    return np.ascontiguousarray(words).view(FINGERPRINT).reshape(-1)


def pre_copy_resident(
    worker: Worker,
    region: HostRegion,
    place: Path,
    agents: Mapping[int, Agent],
    tokens: Mapping[int, bytes],
    parent: Parent | None,
    context: ScanContext,
    wanted: Mapping[str, int],
    spare: Mapping[str, int],
) -> dict[int, ResidentPreCopied]:
    """Store cells that are at rest and that the parent does not have, and wait until they are stored.

    Args:
        worker: Ready on all GPUs.
        region: The worker's host region, whose beginning is used.
        place: The keeper's directory.
        agents, tokens: Agents and tokens of the processes, by pid.
        context: What stores the cells.
        wanted: By GPU, the most bytes to store.
        spare: By GPU, bytes of its memory that copies may take.

    Raises:
        IcecoreError: It failed. The processes go on, and nothing is mapped unless the worker hangs.
    """
    keeper, seed = Keeper(place), context.seed
    with announced(agents.values()):
        pairs = owned(keeper, tokens)
        processes = []
        for number, pid in enumerate(sorted(pairs)):  # as in the window
            stream = number % context.streams
            cells = plan_process(
                pid, str(agents[pid].pid), pairs[pid], worker, parent, seed, stream=stream
            )
            sink = context.pipeline.space(
                stream, cells.plan, cells.capture.regions, cells.capture.known
            )
            before, none = cells.capture.parent, np.zeros(len(cells.plan), np.bool_)
            restless = np.isin(cells.plan.key, before.restless) if before else none
            processes.append(
                _Process(
                    cells,
                    sink,
                    restless,
                    none.copy(),
                    none.copy(),
                    none.copy(),
                    np.zeros_like(cells.words),
                )
            )
        own = {id(process.cells): process for process in processes}
        devices = {
            device: [(own[id(cells)], piece) for cells, piece in pieces]
            for device, pieces in by_device([process.cells for process in processes]).items()
            if wanted.get(device, 0) >= CELL_BYTES and spare.get(device, 0) >= _LEAST_ROOM
        }
        if not devices:
            return {}
        announce(agents.values())  # again, because planning takes long for many allocations
        began = time.monotonic()
        with ThreadPoolExecutor(len(devices), "look") as pool:
            for future in [
                pool.submit(
                    _first_scan,
                    GpuAccess(worker, keeper, tokens, seed, device),
                    pieces,
                    began + _SCAN_SECONDS,
                )
                for device, pieces in devices.items()
            ]:
                future.result()
    for process in processes:
        # Zero words mark cells that were not reached.
        process.wanted = (
            ~process.restless & (process.cells.row == UNKNOWN) & process.words.any(axis=1)
        )
    context.stop.wait(max(0.0, began + _REST_SECONDS - time.monotonic()))
    for device, pieces in devices.items():
        access = GpuAccess(worker, keeper, tokens, seed, device)
        copying = _Copying(
            access, region, list(agents.values()), context, min(spare[device], _ROOM) // CELL_BYTES
        )
        try:
            copying.copy(pieces, wanted[device] // CELL_BYTES)
        finally:
            worker.release(device, spare=True)
    context.pipeline.drain()
    return {process.cells.pid: process.result() for process in processes}


def _first_scan(
    access: GpuAccess, pieces: Iterable[tuple[_Process, AllocationCells]], until: float
) -> None:
    by_cells = {id(process.cells): process for process, _ in pieces}
    for cells, piece in fingerprint_in_portions(
        access, [(process.cells, piece) for process, piece in pieces], until
    ):
        by_cells[id(cells)].words[piece.rows] = cells.words[piece.rows]
        cells.compare(piece.rows)


class _Copying(msgspec.Struct, frozen=True):
    """Stores the memory at rest of one GPU, ``room`` cells at a time: copied aside on the GPU,
    fingerprinted there, and fetched once everything is unmapped.
    """

    access: GpuAccess
    region: HostRegion
    agents: Sequence[Agent]
    context: ScanContext
    room: int

    def copy(self, pieces: Sequence[tuple[_Process, AllocationCells]], most: int) -> None:
        """Store at most ``most`` cells."""
        left = [
            (process, piece)
            for process, piece in pieces
            if (process.wanted | process.restless)[piece.rows].any()
        ]
        while left and most > 0:
            if self.context.stop.is_set():
                raise DumpFailed("the dump was abandoned")
            some, size = [left.pop()], 0
            size += some[0][1].allocation.size
            while (
                left
                and size + left[-1][1].allocation.size <= _PORTION
                and len(some) < MOST_DESCRIPTORS
            ):
                some.append(left.pop())
                size += some[-1][1].allocation.size
            stored = self._portion(some, min(self.room, most))
            if stored is None:
                return
            most -= stored
            # Those that found no room this time.
            left += [
                (process, piece) for process, piece in some if process.wanted[piece.rows].any()
            ]

    def _portion(self, pieces: Sequence[tuple[_Process, AllocationCells]], most: int) -> int | None:
        """Store some cells and return how many; None: there is no room on the GPU."""
        worker, device = self.access.worker, self.access.device
        rows: list[tuple[_Process, int]] = []
        with (
            announced(self.agents),
            mapped(self.access, [(process.cells, piece) for process, piece in pieces]) as there,
        ):
            present = {id(piece) for _, piece in there}
            masks = []
            for process, piece in pieces:
                own = piece.rows
                if id(piece) not in present:
                    process.wanted[own] = False
                    continue
                process.seen[own] = True
                calm = process.wanted[own] & (process.cells.words[own] == process.words[own]).all(
                    axis=1
                )
                process.wanted[own] = calm
                chosen = np.flatnonzero(calm)[: most - len(rows)]
                rows += [(process, piece.first + int(at)) for at in chosen]
                mask = np.zeros(piece.cells, np.bool_)
                mask[chosen] = True
                masks.append(mask)
            if not rows:
                return 0
            announce(self.agents)  # again: mapping and fingerprinting took part of the time
            places = worker.stage(
                device,
                [piece.handle for _, piece in there],
                np.concatenate(masks),
                0,
                0,
                spare=len(rows) * CELL_BYTES,
                seconds=CALL_SECONDS,
            )
            aside = worker.spare_fingerprints(device, self.access.seed, seconds=CALL_SECONDS)
        if (places == NOWHERE).all():
            return None
        found = [
            (row, int(at) - ON_DEVICE)
            for row, at in zip(rows, places, strict=True)
            if at != NOWHERE
        ]
        fetch_through(
            worker,
            self.region,
            device,
            [(SPARE, at) for _, at in found],
            self._keeper(found, aside),
        )
        return len(found)

    def _keeper(
        self, found: Sequence[tuple[tuple[_Process, int], int]], aside: Words
    ) -> Callable[[int, int], None]:
        def keep(number: int, place: int) -> None:
            (process, row), at = found[number]
            slot = self.context.staging.acquire()
            copy_cell(self.region, place, slot.address)
            process.sink.keep(row, slot)
            process.words[row] = aside[at // CELL_BYTES]
            process.stored[row], process.wanted[row] = True, False

        return keep
