"""Resident device memory of a restore: filled from the store by a GPU worker while CRIU brings the processes up, then mapped by them; the rule: a process
runs once all of its memory is there and verified, or it does not run.

Where the repository is a directory and there are cores for it, placers (`icecore.restorer.placer_process`) read and decode cells into their own parts of
pinned memory, from which the worker copies them to the GPU, where they are verified (`icecore.host.resident.digest`); elsewhere the fetcher's threads
do all of it.

With ``from_resident`` the memory is the keeper's, still held on the GPUs since the processes were ended: its fingerprints are compared with the snapshot's,
and only cells that differ are fetched.
"""

from __future__ import annotations

import ctypes
import json
import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged, FormatTooNew, IcecoreError, RestoreFailed, RestoreRefused, StoreError
from icecore.events import Progress, Sink, phase
from icecore.host.resident.client import Agent, Keeper
from icecore.host.resident.keeper import start_keeper
from icecore.host.resident.working import HostRegion, Worker, WorkerFailed
from icecore.restorer.cells import FULL_CELL, SpaceCells, page_pieces, space_cells
from icecore.restorer.fetch import Fetcher, Limits
from icecore.restorer.gpus import GpuPlan
from icecore.restorer.placers import Placer, PlacerLost, Placers
from icecore.restorer.placing import STAGED_CELLS, STAGED_PARTS, Bounds, Part, Region
from icecore.restorer.plan import Batch, Cell
from icecore.store.cell import CELL, CELL_BYTES, Records
from icecore.store.fingerprints import Fingerprints, decode_fingerprints, fingerprint_seed
from icecore.store.hints import HINTS_KIND, decode_hints
from icecore.store.loop import LoopThread
from icecore.store.manifest import Manifest, Space
from icecore.store.reader import SnapshotReader
from icecore.store.repository import Repository

#: Cells of pinned memory for the fetcher's threads.
_SLOTS = 64
#: Requests that each placer gets at the least.
_TURNS = 4
_POLL_SECONDS = 0.2
#: That the worker is there once its work is done.
_LINGER_SECONDS = 0.3


@dataclass(frozen=True)
class Recorded:
    """One allocation as the snapshot has it: as `icecore.host.resident.protocol.Allocation`."""

    identity: int
    address: int
    size: int
    requested: int
    device: str
    ordinal: int


@dataclass(frozen=True)
class RecordedProcess:
    """One process's.

    Attributes:
        token: Names it through checkpoint and restore.
        imports: Allocations that are the memory of others: its identity for each → (image id, identity there).
    """

    token: bytes
    allocations: list[Recorded]
    imports: dict[int, tuple[int, int]]


def recorded(manifest: Manifest) -> tuple[str, dict[int, RecordedProcess]]:
    """What a snapshot says of resident memory: the directory as the job has it, and each process by image id.

    Raises:
        Damaged: It makes no sense.
    """
    text = manifest.extra.get("resident")
    if text is None:
        return "", {}
    try:
        known = json.loads(text)
        directory = str(known["directory"])
        processes = {
            int(image): RecordedProcess(
                bytes.fromhex(about["token"]),
                [Recorded(*(of(one) for of, one in zip(_FIELDS, row, strict=True))) for row in about["allocations"]],
                {int(identity): (int(owner), int(there)) for identity, owner, there in about.get("imports", [])},
            )
            for image, about in known["processes"].items()
        }
        if not directory.startswith("/"):
            raise ValueError("its directory has no path")
        spaces = {int(space.key): space for space in manifest.spaces if space.kind == "device"}
        for image, process in processes.items():
            regions = [(region.start, region.length) for region in spaces[image].regions]
            if regions != [(one.address, one.size) for one in process.allocations]:
                raise ValueError(f"the allocations of process {image} are not its regions")
            if any(one.size % CELL_BYTES or one.address % CELL_BYTES for one in process.allocations):
                raise ValueError("an allocation does not consist of whole cells")
        there = {(image, one.identity) for image, process in processes.items() for one in process.allocations}
        if not there.issuperset(owner for process in processes.values() for owner in process.imports.values()):
            raise ValueError("a process has memory of another that is not there")
        return directory, processes
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise Damaged("manifest", manifest.snapshot, f"what it says of resident memory: {error}") from error


def resident_bytes(manifest: Manifest) -> int:
    """What the processes have mapped of it: it goes neither into host memory nor through page faults."""
    return sum(region.length for space in manifest.spaces if space.kind == "device" for region in space.regions)


_FIELDS: tuple[Callable[[Any], Any], ...] = (int, int, int, int, str, int)


@dataclass
class _Piece:
    """One allocation: the worker's number for it, the GPU that it is on now, and a descriptor of it."""

    process: int
    about: Recorded
    device: str
    handle: int
    descriptor: int = -1


class _Wanted(NamedTuple):
    """CELL[n] to fetch, and where each goes: the allocation, and the offset in it."""

    records: Records
    targets: Sequence[tuple[_Piece, int]]


class Resident:
    """The resident memory of one restore; it begins to come when this is made. Close it in the end, once `map` is done or the tree is dead.

    Args:
        repository, loop, reader: Where the snapshot is.
        limits: Threads, memory, patience.
        gpus: Which GPU each process gets.
        place: The directory of keeper and agents, as this machine sees it; made where it is missing.
        held: The directory of the keeper that has the memory; None: nobody has.
        placers: Starts processes that place so many bytes, if they pay.
        word: Shows in the worker's command line.
        emit: Gets the ``restore.resident.…`` phases.
    """

    def __init__(
        self,
        repository: Repository,
        loop: LoopThread,
        reader: SnapshotReader,
        limits: Limits,
        gpus: GpuPlan,
        place: Path,
        *,
        held: Path | None,
        placers: Callable[[int], Placers | None],
        word: str,
        emit: Sink,
    ) -> None:
        self._repository, self._loop, self._reader, self._limits = repository, loop, reader, limits
        self._emit = emit
        self._place = place
        self._held = held is not None
        self._holder = Keeper(held) if held is not None else None
        self._elsewhere = held is not None and held != place
        _, self._processes = recorded(reader.manifest)
        self._pieces = self._assign(gpus)
        self._have_keeper()
        self._worker = Worker(word)
        self._start_placers = placers
        self._placers: Placers | None = None
        self._staging = 0
        self._digests: list[Future[Any]] = []
        self._digested = False
        self._region: HostRegion | None = None
        self._slots: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._fetcher: Fetcher | None = None
        self._failure: BaseException | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._bring, name="resident", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the worker, which lets go of what nobody has mapped. May be called twice."""
        self._ended = True
        if self._fetcher is not None:
            self._fetcher.fail(RestoreFailed("the restore was given up"))  # nothing, once it is complete
        self._worker.close()
        self._thread.join()
        if self._fetcher is not None:
            self._fetcher.stop()
        if self._placers is not None:
            self._placers.close()
        for piece in self._pieces:
            if piece.descriptor >= 0:
                os.close(piece.descriptor)
                piece.descriptor = -1
        if self._region is not None:
            self._region.close()
            self._region = None

    def map(self, pids: Mapping[int, int], failure: Callable[[], BaseException | None]) -> None:
        """Wait until all is there, and have each process map it and run. The driver has unlocked them.

        Args:
            pids: Image id → pid here.
            failure: What has broken the restore meanwhile; then this gives up.

        Raises:
            RestoreFailed, StoreError, Damaged: It cannot be; the tree must be killed.
        """
        while self._thread.is_alive():
            self._thread.join(_POLL_SECONDS)
            broken = failure()
            if broken is not None:
                raise broken
        if self._failure is not None:
            raise _explained(self._failure)
        with phase(self._emit, "restore.resident.map", processes=len(self._processes)):
            agents = {image: Agent(self._place, image, tracee=pids[image]) for image in self._processes}
            try:
                for image, agent in agents.items():
                    agent.map(self._descriptors(image))
                for agent in agents.values():
                    agent.go()
                with suppress(WorkerFailed):  # its work is done: they run
                    self._worker.linger(_LINGER_SECONDS)
                if self._holder is not None and self._elsewhere:
                    for process in self._processes.values():  # the instance's own keeper has it now
                        self._holder.forget(process.token)
            except IcecoreError as error:
                raise RestoreFailed(f"resident memory could not be mapped: {error.message}", cure=error.cure) from error

    # -- within

    def _descriptors(self, image: int) -> dict[int, int]:
        """What a process maps, by its identities: of memory that several have, each gets a duplicate of one descriptor, as it was."""
        found = {(piece.process, piece.about.identity): piece.descriptor for piece in self._pieces}
        own = {identity: descriptor for (process, identity), descriptor in found.items() if process == image}
        return own | {identity: found[owner] for identity, owner in self._processes[image].imports.items()}

    def _assign(self, gpus: GpuPlan) -> list[_Piece]:
        pieces: list[_Piece] = []
        for image, process in self._processes.items():
            pairs = gpus.processes.get(image, {})
            for one in process.allocations:
                pieces.append(_Piece(image, one, pairs.get(one.device, one.device), len(pieces)))
        return pieces

    def _have_keeper(self) -> None:
        self._place.mkdir(mode=0o700, parents=True, exist_ok=True)
        keeper = start_keeper(self._place)
        if self._holder is not None:
            self._take(self._holder)
            return
        # What it kept of these would be mapped, were the restore to take longer than an agent waits.
        tokens = {process.token for process in self._processes.values()}
        for known in keeper.processes():
            if known.token in tokens and not known.alive:
                keeper.forget(known.token)

    def _take(self, keeper: Keeper) -> None:
        """Descriptors of what the keeper holds.

        Raises:
            RestoreRefused: It does not hold all of it, or not where it shall be.
        """
        cure = "restore without --from-resident: all is fetched then"
        for image, process in self._processes.items():
            held = {one.identity: (one, descriptor) for one, descriptor in keeper.take(process.token)}
            own = [piece for piece in self._pieces if piece.process == image]
            for piece in own:
                found, descriptor = held.pop(piece.about.identity, (None, -1))
                piece.descriptor = descriptor
                if found is None or (found.address, found.size) != (piece.about.address, piece.about.size):
                    self._give_up(held)
                    raise RestoreRefused(f"the memory of process {image} is not held on this machine any more", cure=cure)
                if found.device != piece.device:
                    self._give_up(held)
                    raise RestoreRefused(f"memory of process {image} is held on {found.device}, not on {piece.device}", cure=cure)
            for _, descriptor in held.values():
                os.close(descriptor)

    def _give_up(self, held: Mapping[int, tuple[object, int]]) -> None:
        for descriptor in (*(fd for _, fd in held.values()), *(piece.descriptor for piece in self._pieces)):
            if descriptor >= 0:
                os.close(descriptor)
        for piece in self._pieces:
            piece.descriptor = -1

    def _by_device(self) -> dict[str, list[_Piece]]:
        found: dict[str, list[_Piece]] = {}
        for piece in self._pieces:
            found.setdefault(piece.device, []).append(piece)
        return found

    def _bring(self) -> None:
        try:
            by_device = self._by_device()
            if not by_device:
                return
            if not self._held:
                self._placers = self._start_placers(sum(piece.about.size for piece in self._pieces))
            with phase(self._emit, "restore.resident.prepare"):
                self._worker.begin(list(by_device), fingerprints=self._held)
                if self._placers is not None:
                    self._digests = self._worker.prepare_digests(list(by_device))
                for device, pieces in by_device.items():
                    self._have(device, pieces)
                wanted = self._wanted()
                if self._held:
                    self._placers = self._start_placers(len(wanted.records) * CELL_BYTES)
                    if self._placers is not None:
                        self._digests = self._worker.prepare_digests(list(by_device))
                staged = len(self._placers.all) * 2 * STAGED_CELLS if self._placers is not None else 0
                self._region = HostRegion((_SLOTS + staged) * CELL_BYTES)
                self._region.prefault()
                self._worker.take_host(self._region, next(iter(by_device)))
            with phase(self._emit, "restore.resident.memory") as running:
                self._fill(wanted, running.progress)
                if self._fetcher is not None:
                    spent = self._fetcher.spent
                    running.bytes = spent.produced
                    running.fields.update(
                        fetched=spent.cells,
                        redone=spent.redone,
                        placers=self._staging,
                        digested=self._digested,
                        read_thread_seconds=spent.read,
                        decode_thread_seconds=spent.decode,
                        sink_thread_seconds=spent.sink,
                    )
        except BaseException as error:  # noqa: BLE001 - raised by whoever waits
            self._failure = error

    def _have(self, device: str, pieces: Sequence[_Piece]) -> None:
        handles, sizes = [piece.handle for piece in pieces], [piece.about.size for piece in pieces]
        if self._held:
            self._worker.map(device, handles, sizes, [piece.descriptor for piece in pieces])
            return
        for piece, descriptor in zip(pieces, self._worker.allocate(device, handles, sizes), strict=True):
            piece.descriptor = descriptor

    def _cells(self, space: Space) -> SpaceCells:
        return space_cells(space.regions, self._reader.records(space))

    def _wanted(self) -> _Wanted:
        """What is not there."""
        tables, targets = [], []
        seed, known = self._fingerprints() if self._held else (0, {})
        for space in (s for s in self._reader.manifest.spaces if s.kind == "device" and int(s.key) in self._processes):
            image, cells = int(space.key), self._cells(space)
            own = {piece.about.address: piece for piece in self._pieces if piece.process == image}
            starts = np.array(sorted(own), np.uint64)
            complete = len(cells) == sum(piece.about.size for piece in own.values()) // CELL_BYTES
            if not complete:
                raise Damaged("map", "of a space", f"device {space.key} lacks cells")
            wanted = self._differing(own, cells, seed, known.get(f"device:{space.key}")) if self._held else cells.records["data"].any(axis=1)
            rows = np.flatnonzero(wanted)
            at = np.searchsorted(starts, cells.base[rows], side="right") - 1
            for row, number in zip(rows.tolist(), at.tolist(), strict=True):
                piece = own[int(starts[number])]
                targets.append((piece, int(cells.base[row]) - piece.about.address))
            tables.append(cells.records[rows])
        return _Wanted(np.concatenate(tables) if tables else np.empty(0, CELL), targets)

    def _fill(self, wanted: _Wanted, progress: Progress) -> None:
        """Fetch what is not there."""
        records, targets = wanted
        for slot in range(_SLOTS):
            self._slots.put(slot)
        empty = ~records["data"].any(axis=1) if len(records) else np.empty(0, np.bool_)

        def place(row: int, data: memoryview) -> None:
            piece, offset = targets[row]
            self._place_cell(piece, offset, records[row]["data"].tobytes(), data)

        for row in np.flatnonzero(empty).tolist():  # held, and not zeros any more
            place(row, memoryview(b""))
        self._fetcher = Fetcher(
            self._repository.backend, self._reader, records, place, self._limits, self._loop, failed=lambda _: None
        )
        self._fetcher.progress = progress
        if self._placers is not None:
            self._hand_out(self._placers, wanted)
        self._fetcher.start(np.flatnonzero(~empty).tolist())
        self._fetcher.wait()
        for _ in range(_SLOTS):  # all have come back: everything is where it belongs
            self._slot()
        if self._failure is not None:
            raise self._failure
        self._fetcher.stop()
        if self._placers is not None:
            self._placers.close()

    def _hand_out(self, placers: Placers, wanted: _Wanted) -> None:
        """Have placers stage cells, and the worker copy them from there."""
        assert self._region is not None and self._fetcher is not None
        records, targets = wanted
        devices = sorted({piece.device for piece in self._pieces})
        numbers = {device: number for number, device in enumerate(devices)}
        placers.begin()
        for number, placer in enumerate(placers.all):
            region = Region(self._region.size, (_SLOTS + number * 2 * STAGED_CELLS) * CELL_BYTES, devices)
            with suppress(PlacerLost), self._worker.connect() as theirs:  # who asks one that is lost first is told
                placer.share(region, self._region.descriptor, theirs.fileno())

        whole = (records["data"] == 0xFF).all(axis=1)
        key = bytes(self._repository.keys.chunk)

        def wrong(rows: Sequence[int]) -> set[int]:
            """Which of these cells, all of whose pages are there, are on their GPU other than in the snapshot."""
            found: set[int] = set()
            for device in devices:
                own = [row for row in rows if targets[row][0].device == device]
                if own:
                    digests = self._worker.digests(device, [(targets[row][0].handle, targets[row][1]) for row in own], key)
                    found.update(np.array(own)[(digests != records["chunk"][own]).any(axis=1)].tolist())
            return found

        def bounds(cell: Cell) -> Bounds:
            piece, offset = targets[cell.row]
            return Bounds(*cell[1:], numbers[piece.device], piece.handle, offset)

        def through(placer: Placer, batches: Sequence[Batch]) -> list[int]:
            rows = [cell.row for batch in batches for cell in batch.cells]
            table = records[rows]
            parts, at = [], 0
            for batch in batches:
                own = table[at : at + len(batch.cells)].tobytes()
                parts.append(Part(list(batch.reads), list(map(bounds, batch.cells)), own, batch.size))
                at += len(batch.cells)
            staged = placer.stage(parts, digested=self._digested)
            if staged.broken:
                raise WorkerFailed(staged.broken)
            there = [row for row, is_there in zip(rows, staged.there, strict=True) if is_there and whole[row]]
            other = wrong(there) if self._digested else set()
            return [row for row, there in zip(rows, staged.there, strict=True) if not there or row in other]

        with suppress(WorkerFailed):  # no NVRTC here: placers verify
            for future in self._digests:
                self._worker.finish(future)
            self._digested = True
        # Few large requests: this process does little then. Not so large that one placer works while the others have no more.
        share = len(records) // (len(placers.all) * _TURNS * STAGED_CELLS)
        self._fetcher.hand_out(placers.all, through, cells=STAGED_CELLS, batches=max(1, min(STAGED_PARTS, share)))
        self._staging = len(placers.all)

    def _slot(self) -> int:
        while True:
            if self._failure is not None:
                raise self._failure
            try:
                return self._slots.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                if self._ended:
                    raise RestoreFailed("the restore was given up") from None

    def _place_cell(self, piece: _Piece, offset: int, bitmap: bytes, data: memoryview) -> None:
        """Put a cell on its GPU; called by the fetcher's threads."""
        assert self._region is not None
        slot = self._slot()
        to = self._region.address + slot * CELL_BYTES
        if bitmap == FULL_CELL:
            ctypes.memmove(to, _address(data), CELL_BYTES)
        else:
            ctypes.memset(to, 0, CELL_BYTES)
            source = _address(data) if len(data) else 0
            for at, position, length in page_pieces(bitmap, bitmap):
                ctypes.memmove(to + at, source + position, length)

        def done(future: Future[Any]) -> None:
            error = future.exception()
            if error is not None:
                self._failure = self._failure or error
            self._slots.put(slot)

        self._worker.place(piece.device, [(piece.handle, offset)], [slot * CELL_BYTES]).add_done_callback(done)

    # -- memory that is still held

    def _fingerprints(self) -> tuple[int, dict[str, Fingerprints]]:
        """The lineage's seed and the snapshot's fingerprints; without these everything is fetched."""
        manifest, keys = self._reader.manifest, self._repository.keys
        seed = fingerprint_seed(keys, manifest.lineage)
        with suppress(Damaged, FormatTooNew, StoreError):
            if manifest.hints:
                data = self._loop.run(self._repository.backend.get(manifest.hints, limit=HINTS_KIND.object_limit))
                return seed, decode_fingerprints(
                    decode_hints(manifest.hints, data, keys.hints, bytes.fromhex(manifest.hints_digest))
                )
        return seed, {}

    def _differing(
        self,
        own: Mapping[int, _Piece],
        cells: SpaceCells,
        seed: int,
        known: Fingerprints | None,
    ) -> npt.NDArray[np.bool_]:
        """Which cells are not as the snapshot has them."""
        differing = np.ones(len(cells), np.bool_)
        if known is None or len(known.key) != len(cells) or (known.key != cells.base).any():
            return differing
        there = known.fingerprint.view(np.uint64).reshape(-1, 2)
        for piece in own.values():
            words = self._worker.fingerprints(piece.device, [piece.handle], seed)
            first = int(np.searchsorted(cells.base, np.uint64(piece.about.address)))
            differing[first : first + len(words)] = (there[first : first + len(words)] != words).any(axis=1)
        return differing


def _address(data: memoryview) -> int:
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def _explained(error: BaseException) -> BaseException:
    if isinstance(error, WorkerFailed) or not isinstance(error, IcecoreError):
        message, cure = getattr(error, "message", f"{type(error).__name__}: {error}"), getattr(error, "cure", "")
        made = RestoreFailed(f"resident memory could not be brought back: {message}", cure=cure)
        made.__cause__ = error
        return made
    return error
