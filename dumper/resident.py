"""Resident device memory in a dump: taken away before the driver's checkpoint, given back after it, and meanwhile what changed is copied aside; the rule: the
job gets its memory back whatever becomes of the copies.

The copies are the worker's (`icecore.host.resident.worker`), made while driver and CRIU do their parts. What it fingerprints is compared with the parent's;
only what differs is copied, on the device where there is room. Then the job runs on, and the copies go through the same pipeline as all other memory.
"""

from __future__ import annotations

import json
import os
import threading
import time
import uuid
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.dumper.cells import EXTENT, CellPlan, plan_cells
from icecore.dumper.fingerprints import FINGERPRINT
from icecore.dumper.parent import Parent
from icecore.dumper.pipeline import SpaceSink
from icecore.dumper.resident_look import ResidentLook
from icecore.dumper.scan import ScanResult
from icecore.dumper.spaces import Machinery, Scanned, SpaceCapture
from icecore.errors import DumpFailed
from icecore.events import Sink, phase
from icecore.host import limits
from icecore.host.resident.client import Agent
from icecore.host.resident.gpu import NOWHERE, ON_DEVICE, spare_room
from icecore.host.resident.keeper import start_keeper
from icecore.host.resident.protocol import Allocation
from icecore.host.resident.sharing import Shares, find_shares
from icecore.host.resident.tree import LockAll, ResidentTree, UnlockAll
from icecore.host.resident.working import HostRegion, Worker, copy_cell
from icecore.store.cell import CELL_BYTES, PAGE
from icecore.store.manifest import Region

#: Cells of the host region through which copies on a device travel.
_RING = 32
_POLL_SECONDS = 0.2
_UNLIMITED_LEASE = 3600.0
_LEASE_GRACE = 30.0
_KEEPER_SECONDS = 5.0
#: Of imported memory, where its process cannot tell.
_NO_DEVICE = f"GPU-{uuid.UUID(int=0)}"


@dataclass
class _Piece:
    """One allocation: the worker's number for it, and the rows of its process's plan that are its cells."""

    handle: int
    allocation: Allocation
    descriptor: int
    first: int
    cells: int


@dataclass
class _Process:
    """One process's resident memory. ``words`` u64[n, 2]: the fingerprints; ``place`` i64[n]: where copies of changed cells are."""

    pid: int
    capture: SpaceCapture
    plan: CellPlan
    sink: SpaceSink
    pieces: list[_Piece]
    words: npt.NDArray[np.uint64]
    row: npt.NDArray[np.int64]
    place: npt.NDArray[np.int64]
    device: list[str] = field(default_factory=list)


class Resident:
    """The resident memory of one dump (close it in the end: the worker ends).

    Args:
        look: Who has some.
        word: Shows in the worker's command line.
        emit: Gets the ``dump.resident.…`` phases.
    """

    def __init__(self, look: ResidentLook, word: str, emit: Sink) -> None:
        self.look = look
        self._emit = emit
        self._directory = os.open(look.seen_from(next(iter(look.pids))), os.O_PATH | os.O_CLOEXEC)
        # Through a descriptor: the job may be gone when its memory is let go of.
        self._place = Path(f"/proc/self/fd/{self._directory}")
        self._tree: ResidentTree | None = None
        self._worker = Worker(word)
        self._region: HostRegion | None = None
        self._copying: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._processes: list[_Process] = []
        self._sharing = Shares({}, {})

    def close(self) -> None:
        """End the worker. May be called twice."""
        self._worker.close()
        if self._copying is not None:
            self._copying.join()  # the worker is gone: its calls fail
        if self._region is not None:
            self._region.close()
            self._region = None
        if self._directory >= 0:
            os.close(self._directory)
            self._directory = -1

    @property
    def agents(self) -> list[tuple[str, int, int]]:
        """(directory, pid as it sees itself, pid here) of each process, for whoever brings them back when this process is gone."""
        return [(str(self.look.seen_from(pid)), own, pid) for pid, own in self.look.pids.items()]

    def prepare(self, staging_bytes: int, changing: int | None) -> None:
        """Have the worker ready on all GPUs, and host memory for copies, before anything is stopped.

        Args:
            staging_bytes: Bound on that memory, but for what is likely to change and has no room on its GPU: that comes on top.
            changing: Bytes that are likely to have changed since the parent; None: there is none.

        Raises:
            WorkerFailed, ResidentFailed: It cannot be had.
        """
        agents = [Agent(self._place, own, tracee=pid) for pid, own in self.look.pids.items()]
        self._have_keeper(agents)
        self._tree = ResidentTree(self._place, self.look.pids)
        sizes: Counter[str] = Counter()
        for one in (one for agent in agents for one in agent.allocations() if not one.imported):
            sizes[one.device] += one.size
        del sizes[_NO_DEVICE]
        if not sizes:
            return
        devices = sorted(sizes)
        free = self._worker.begin(devices)
        short = sum(max(0, min(size, changing if changing is not None else size) - spare_room(free[device])) for device, size in sizes.items())
        most = max(min(staging_bytes, sizes.total(), limits.memory_available() // 4), min(short, limits.memory_available() // 2))
        self._region = HostRegion((_RING + most // CELL_BYTES) * CELL_BYTES)
        self._region.prefault()
        self._worker.take_host(self._region, devices[0])

    def _have_keeper(self, agents: Sequence[Agent]) -> None:
        """A keeper that has died is replaced; the processes hand everything over within about a second."""
        start_keeper(self.look.seen_from(next(iter(self.look.pids))))
        end = time.monotonic() + _KEEPER_SECONDS
        while any(agent.report().counts.unheld for agent in agents) and time.monotonic() < end:
            time.sleep(0.02)

    # -- in the window

    def take_away(self, lock: LockAll, unlock: UnlockAll, limit: float | None) -> None:
        """Park all and take their memory away; all or none.

        Args:
            limit: Seconds that this may take; None: no limit.
        """
        assert self._tree is not None
        with phase(self._emit, "dump.resident.unmap", processes=len(self._tree.pids)) as running:
            lease = _UNLIMITED_LEASE if limit is None else limit + _LEASE_GRACE
            running.bytes = self._tree.take_away(lock, unlock, seconds=min(60.0, limit or 60.0), lease=lease)
        self._sharing = find_shares(self._tree.taken)

    def begin_copy(self, machinery: Machinery, parent: Parent | None) -> None:
        """Begin to copy what changed; `wait_copied` waits for it."""
        self._copying = threading.Thread(target=self._copy, args=(machinery, parent), name="resident", daemon=True)
        self._copying.start()

    def wait_copied(self, check: Callable[[], None]) -> None:
        """Until all is copied.

        Args:
            check: Raises when it is not to be waited for any more.

        Raises:
            DumpFailed: It could not be.
        """
        assert self._copying is not None
        while self._copying.is_alive():
            self._copying.join(_POLL_SECONDS)
            check()
        if self._failure is not None:
            message = getattr(self._failure, "message", str(self._failure))
            raise DumpFailed(
                f"resident device memory cannot be captured: {message}", cure=getattr(self._failure, "cure", "")
            ) from self._failure

    def give_back(self) -> None:
        """Map all again, and let them run."""
        assert self._tree is not None
        with phase(self._emit, "dump.resident.map", processes=len(self._tree.pids)):
            self._tree.give_back()

    def undo(self) -> None:
        """Give back what stands, as far as that goes; it raises nothing."""
        if self._tree is not None:
            self._tree.__exit__(None, None, None)

    def gone(self, *, keep: bool) -> None:
        """The processes were killed; ``keep``: their memory stays where it is."""
        assert self._tree is not None
        self._tree.ended(keep=keep)

    # -- copying

    def _copy(self, machinery: Machinery, parent: Parent | None) -> None:
        try:
            assert self._tree is not None
            pairs = self._sharing.owned  # what several have is stored once
            self._processes = [
                self._plan(pid, number, pairs[pid], machinery, parent) for number, pid in enumerate(sorted(pairs))
            ]
            by_device: dict[str, list[tuple[_Process, _Piece]]] = {}
            for process in self._processes:
                for piece in process.pieces:
                    by_device.setdefault(piece.allocation.device, []).append((process, piece))
            if not by_device:
                return
            with ThreadPoolExecutor(len(by_device), "gpu") as pool:
                with phase(self._emit, "dump.resident.fingerprint") as running:
                    for future in [
                        pool.submit(self._fingerprint, device, pieces, machinery.seed)
                        for device, pieces in by_device.items()
                    ]:
                        running.bytes += future.result()
                for process in self._processes:
                    self._compare(process)
                with phase(self._emit, "dump.resident.copy") as running:
                    shares = self._shares(list(by_device))
                    futures = [
                        pool.submit(self._stage, device, pieces, shares[device]) for device, pieces in by_device.items()
                    ]
                    counts = [future.result() for future in futures]
                    running.bytes = sum(changed for changed, _ in counts)
                    running.fields["in_window"] = sum(left for _, left in counts)
            for process in self._processes:
                self._keep(process, machinery, in_window=True)
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._failure = error

    def _plan(
        self,
        pid: int,
        number: int,
        pairs: Sequence[tuple[Allocation, int]],
        machinery: Machinery,
        parent: Parent | None,
    ) -> _Process:
        key = str(self.look.pids[pid])
        before = parent.space("device", key) if parent else None
        regions = [Region(one.address, one.size, one.address, 3, 0, kind="device", name=one.device) for one, _ in pairs]
        capture = SpaceCapture.make("device", key, 0, regions, before, stream=number % machinery.streams)
        extents = np.array([(one.address, one.size // PAGE) for one, _ in pairs], EXTENT)
        plan = plan_cells(capture.regions, extents)
        handles = self._worker.new_handles(len(pairs))
        pieces, first = [], 0
        for handle, (one, descriptor) in zip(handles, pairs, strict=True):
            cells = one.size // CELL_BYTES
            pieces.append(_Piece(handle, one, descriptor, first, cells))
            first += cells
        if first != len(plan) or (plan.length != CELL_BYTES).any():
            raise DumpFailed("an allocation does not consist of whole cells")
        sink = machinery.pipeline.space(capture.stream, plan, capture.regions, capture.known)
        words = np.zeros((len(plan), 2), np.uint64)
        nothing = np.full(len(plan), NOWHERE, np.int64)
        devices = [piece.allocation.device for piece in pieces for _ in range(piece.cells)]
        return _Process(pid, capture, plan, sink, pieces, words, nothing.copy(), nothing, devices)

    def _fingerprint(self, device: str, pieces: Sequence[tuple[_Process, _Piece]], seed: int) -> int:
        own = [piece for _, piece in pieces]
        self._worker.map(
            device,
            [one.handle for one in own],
            [one.allocation.size for one in own],
            [one.descriptor for one in own],
        )
        words = self._worker.fingerprints(device, [one.handle for one in own], seed)
        at = 0
        for process, piece in pieces:
            process.words[piece.first : piece.first + piece.cells] = words[at : at + piece.cells]
            at += piece.cells
        return at * CELL_BYTES

    @staticmethod
    def _compare(process: _Process) -> None:
        """Which cells are as the parent has them."""
        known = process.capture.known
        candidates = known.find(process.plan.key)
        if not len(known.key):
            return
        there = known.fingerprint[np.maximum(candidates, 0)].view(np.uint64).reshape(-1, 2)
        same = (candidates >= 0) & (there == process.words).all(axis=1)
        process.row[same] = candidates[same]

    def _shares(self, devices: Sequence[str]) -> dict[str, tuple[int, int]]:
        """Each GPU's part of the host region: where, and how large."""
        assert self._region is not None
        each = (self._region.size // CELL_BYTES - _RING) // len(devices) * CELL_BYTES
        return {device: (_RING * CELL_BYTES + number * each, each) for number, device in enumerate(devices)}

    def _stage(self, device: str, pieces: Sequence[tuple[_Process, _Piece]], share: tuple[int, int]) -> tuple[int, int]:
        masks = [process.row[piece.first : piece.first + piece.cells] < 0 for process, piece in pieces]
        mask = np.concatenate(masks)
        if not mask.any():
            return 0, 0
        places = self._worker.stage(device, [piece.handle for _, piece in pieces], mask, *share)
        at = 0
        for (process, piece), own in zip(pieces, masks, strict=True):
            some = int(own.sum())
            process.place[piece.first : piece.first + piece.cells][own] = places[at : at + some]
            at += some
        return len(places) * CELL_BYTES, int((places == NOWHERE).sum()) * CELL_BYTES

    def _keep(self, process: _Process, machinery: Machinery, *, in_window: bool) -> None:
        """Hand changed cells to the pipeline: in the window those for which there was no room, after it those that were copied aside."""
        assert self._region is not None
        changed = process.row < 0
        rows = np.flatnonzero(changed & ((process.place == NOWHERE) == in_window))
        if not len(rows):
            return
        aside = process.place[rows]
        through = rows[in_window | (aside >= ON_DEVICE)]
        for row in rows[~(in_window | (aside >= ON_DEVICE))].tolist():
            self._hand_on(process, row, int(process.place[row]), machinery)
        firsts = [piece.first for piece in process.pieces]
        for device in dict.fromkeys(process.device):
            rows_there = [row for row in through.tolist() if process.device[row] == device]
            for at in range(0, len(rows_there), _RING):
                some = rows_there[at : at + _RING]
                if in_window:
                    owners = [process.pieces[bisect_right(firsts, row) - 1] for row in some]
                    cells = [(own.handle, (row - own.first) * CELL_BYTES) for own, row in zip(owners, some, strict=True)]
                else:
                    cells = [(-1, int(process.place[row]) - ON_DEVICE) for row in some]
                places = [number * CELL_BYTES for number in range(len(some))]
                self._worker.finish(self._worker.fetch(device, cells, places))
                for row, place in zip(some, places, strict=True):
                    self._hand_on(process, row, place, machinery)

    def _hand_on(self, process: _Process, row: int, place: int, machinery: Machinery) -> None:
        assert self._region is not None
        if machinery.stop.is_set():
            raise DumpFailed("the dump was abandoned")
        slot = machinery.staging.acquire()
        copy_cell(self._region, place, slot.address)
        process.sink.keep(row, slot)

    # -- afterwards

    def store(self, machinery: Machinery) -> list[SpaceCapture]:
        """Hand all that was copied aside to the pipeline; the spaces.

        Raises:
            WorkerFailed: The worker ended with copies that were on a GPU.
        """
        for process in self._processes:
            self._keep(process, machinery, in_window=False)
            process.sink.unchanged(process.row)
            fingerprints = np.ascontiguousarray(process.words).view(FINGERPRINT).reshape(-1)
            process.capture.add(Scanned(process.plan, process.sink, ScanResult(fingerprints, process.row)))
        return [process.capture for process in self._processes]

    def describe(self, images: Mapping[int, int]) -> dict[str, str]:
        """What a restore needs to know, for the manifest's ``extra`` (docs/format.md)."""
        processes = {
            str(images[pid]): {
                "token": self.look.reports[pid].token.hex(),
                "allocations": [
                    [one.identity, one.address, one.size, one.requested, one.device, one.ordinal] for one, _ in pairs
                ],
                "imports": [
                    [one.allocation.identity, images[one.owner[0]], one.owner[1]] for one in self._sharing.imports[pid]
                ],
            }
            for pid, pairs in self._sharing.owned.items()
        }
        return {"resident": json.dumps({"directory": self.look.directory, "processes": processes})}
