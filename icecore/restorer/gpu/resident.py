"""Resident device memory of a restore: a GPU worker fills it from the store while CRIU builds the
processes, which then map it. A process runs only after all of its memory is complete and verified.

`icecore.restorer.gpu.resident_fill` fills it, with placers if the repository is a directory and
there are cores for them.

With ``from_resident`` a keeper still holds the memory on the GPUs since the processes ended: its
fingerprints are compared with the snapshot's, and only cells that differ are fetched. The keeper
first lets go of memory that the snapshot does not have; memory that it does not hold is allocated
and fetched.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.errors import (
    Damaged,
    FormatTooNew,
    IcecoreError,
    NotFound,
    RestoreFailed,
    StoreError,
)
from icecore.events import Sink, phase
from icecore.host.gpu.working import HostRegion, Worker, WorkerFailed
from icecore.host.kernel.limits import raise_descriptor_limit
from icecore.host.resident.client import Agent, Keeper
from icecore.host.resident.keeper import make_place, start_keeper
from icecore.host.rpc.calls import Call
from icecore.restorer.fetch.fetcher import Fetcher
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.fetch.sink import CellSink
from icecore.restorer.gpu.gpus import GpuPlan
from icecore.restorer.gpu.resident_fill import GpuCells, ResidentFill, region_for
from icecore.restorer.gpu.resident_targets import TargetAllocation, Targets
from icecore.restorer.place.placers import Placers
from icecore.restorer.plan.cells import SpaceCells, space_cells
from icecore.sizes import CELL_BYTES
from icecore.store.format.cell import CELL, Records
from icecore.store.format.contract import read_resident
from icecore.store.format.fingerprints import (
    Fingerprints,
    decode_fingerprints,
    fingerprint_bytes,
    fingerprint_seed,
)
from icecore.store.format.hints import decode_hints, limited
from icecore.store.format.manifest import Space, cells_of
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader

_POLL_SECONDS = 0.2
#: How often processes that wait for their memory are told to keep waiting, and how long they wait
#: without being told.
_HOLD_SECONDS = 2.0
_LEASE_SECONDS = 60.0
#: How long the worker lingers once its work is done.
_LINGER_SECONDS = 0.3


class Resident:
    """The resident memory of one restore, which begins to be filled when this is made. To be closed
    once `map` is done or the tree is dead.

    Args:
        repository, loop, reader: Where the snapshot is.
        limits: Threads, memory, patience.
        gpus: Which GPU each process gets.
        place: The directory of keeper and agents on this machine; made if missing.
        user: Whose job it is.
        held: The directory of the keeper that holds the memory; None: none does.
        placers: Starts processes that place so many bytes, if they pay.
        word: Shows in the worker's command line.
        emit: Gets the ``restore.resident.…`` phases.
    """

    def __init__(
        self,
        repository: StoredRepository,
        loop: LoopThread,
        reader: SnapshotReader,
        limits: Limits,
        gpus: GpuPlan,
        place: Path,
        *,
        user: int,
        held: Path | None,
        placers: Callable[[int], Placers | None],
        word: str,
        emit: Sink,
    ) -> None:
        raise_descriptor_limit()  # one for each allocation
        self._repository, self._loop, self._reader, self._limits = repository, loop, reader, limits
        self._emit = emit
        self._place = place
        self._user = user
        self._held = held is not None
        self._holder = Keeper(held) if held is not None else None
        self._elsewhere = held is not None and held != place
        recorded = read_resident(reader.manifest)
        self._processes = recorded.processes if recorded is not None else {}
        self._targets = Targets(self._processes, gpus)
        try:
            self._have_keeper()
            self._worker = Worker(word, gpus=self._targets.by_device())
        except BaseException:
            self._targets.close()
            raise
        self._start_placers = placers
        self._placers: Placers | None = None
        self._region: HostRegion | None = None
        self._fill: ResidentFill | None = None
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._bring, name="resident", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End the worker, which lets go of what no process has mapped. May be called twice."""
        if self._fill is not None:
            self._fill.give_up()
        self._worker.close()
        self._thread.join()
        if self._fill is not None:
            self._fill.stop()
        if self._placers is not None:
            # One may have been killed: nothing waits for what it did.
            with suppress(RestoreFailed):
                self._placers.close()
        self._targets.close()
        if self._region is not None:
            self._region.close()
            self._region = None

    def map(self, pids: Mapping[int, int], failure: Callable[[], BaseException | None]) -> None:
        """Wait until the memory is complete, and have each process map it and run. The driver has
        unlocked them.

        Args:
            pids: Image id → pid here.
            failure: Returns what has broken the restore meanwhile; then this gives up.

        Raises:
            RestoreFailed, StoreError, Damaged: It cannot be done; the tree must be killed.
        """
        agents = {image: Agent(self._place, image, tracee=pids[image]) for image in self._processes}
        held = 0.0
        while self._thread.is_alive():
            if time.monotonic() - held > _HOLD_SECONDS:
                held = time.monotonic()
                for agent in agents.values():
                    # Else a process would take its memory from its keeper, filled or not, and run.
                    # An agent that cannot be asked now is asked again.
                    with suppress(IcecoreError):
                        agent.hold(_LEASE_SECONDS)
            self._thread.join(_POLL_SECONDS)
            broken = failure()
            if broken is not None:
                raise broken
        if self._failure is not None:
            raise _explained(self._failure)
        with phase(self._emit, "restore.resident.map", processes=len(self._processes)):
            try:
                for image, agent in agents.items():
                    agent.map(self._targets.descriptors(image))
                for agent in agents.values():
                    agent.go()
                with suppress(WorkerFailed):  # its work is done: they run
                    self._worker.linger(_LINGER_SECONDS)
                if self._holder is not None and self._elsewhere:
                    # The instance's own keeper holds it now.
                    for process in self._processes.values():
                        with suppress(NotFound):  # the other has ended, and let go of everything
                            self._holder.forget(process.token_bytes)
            except IcecoreError as error:
                raise RestoreFailed(
                    f"cannot map resident memory: {error.message}", cure=error.cure
                ) from error

    def outlive(self, init: int, status: Path) -> None:
        """Have the memory of the processes, which run, outlive them unless they end well
        (`Keeper.keep`).

        Raises:
            NotFound, ResidentFailed, OSError: It will not.
        """
        for process in self._processes.values():
            Keeper(self._place).keep(process.token_bytes, init, status)

    # -- within

    def _have_keeper(self) -> None:
        make_place(self._place, self._user)
        keeper = start_keeper(self._place)
        if self._holder is not None:
            self._targets.take(self._holder)
            return
        # An agent would map what the keeper holds of these if the restore took longer than it
        # waits.
        tokens = {process.token_bytes for process in self._processes.values()}
        for known in keeper.processes():
            if known.token in tokens and not known.alive:
                keeper.forget(known.token)

    def _bring(self) -> None:
        try:
            by_device = self._targets.by_device()
            if not by_device:
                return
            with phase(self._emit, "restore.resident.prepare"):
                fill = self._fill_of(by_device)
            with phase(self._emit, "restore.resident.memory") as running:
                fill.run(running.progress)
                if self._placers is not None:
                    self._placers.close()
                spent = fill.spent
                running.bytes = spent.produced
                running.fields.update(
                    fetched=spent.cells,
                    redone=spent.redone,
                    placers=fill.placers,
                    digested=fill.digested,
                    **spent.thread_seconds(),
                )
        except BaseException as error:  # noqa: BLE001 - raised by `map`
            self._failure = error

    def _fill_of(self, by_device: Mapping[str, list[TargetAllocation]]) -> ResidentFill:
        """Allocate or map the memory on the GPUs, and prepare its fill."""
        devices, digests = list(by_device), list[Call]()
        with ThreadPoolExecutor(2 + len(devices), "resident") as pool:
            if not self._held:  # all that needs no GPU, while the worker starts
                self._placers = self._start_placers(
                    sum(target.about.size for target in self._targets.all)
                )
                region, wanted = pool.submit(self._have_region), pool.submit(self._wanted, devices)
            self._worker.begin(devices, fingerprints=self._held)
            if self._placers is not None:
                digests = self._worker.prepare_digests(devices)
            list(pool.map(self._have, devices, by_device.values()))
            if self._held:
                wanted = pool.submit(self._wanted, devices)
                self._placers = self._start_placers(len(wanted.result().records) * CELL_BYTES)
                if self._placers is not None:
                    digests = self._worker.prepare_digests(devices)
                region = pool.submit(self._have_region)
            self._worker.take_host(region.result(), devices[0])
            fill = ResidentFill(
                wanted.result(),
                self._worker,
                region.result(),
                partial(self._fetcher, wanted.result()),
            )
        if self._placers is not None:
            fill.hand_out(self._placers, digests, bytes(self._repository.keys.chunk))
        self._fill = fill
        return fill

    def _have_region(self) -> HostRegion:
        self._region = region_for(self._placers)
        return self._region

    def _fetcher(self, wanted: GpuCells, sink: CellSink) -> Fetcher:
        return Fetcher(
            self._repository.backend,
            self._reader,
            wanted.records,
            sink,
            self._limits,
            self._loop,
        )

    def _have(self, device: str, targets: Sequence[TargetAllocation]) -> None:
        there, new = (
            [target for target in targets if target.held],
            [target for target in targets if not target.held],
        )
        if there:
            sizes, descriptors = (
                [target.about.size for target in there],
                [target.descriptor for target in there],
            )
            self._worker.map(device, [target.handle for target in there], sizes, descriptors)
        made = (
            self._worker.allocate(
                device, [target.handle for target in new], [target.about.size for target in new]
            )
            if new
            else []
        )
        for target, descriptor in zip(new, made, strict=True):
            target.descriptor = descriptor

    def _cells(self, space: Space) -> SpaceCells:
        return space_cells(space.regions, self._reader.records(space))

    def _wanted(self, devices: Sequence[str]) -> GpuCells:
        """Return the cells to fetch."""
        tables: list[Records] = []
        device: list[int] = []
        handle: list[int] = []
        offset: list[int] = []
        seed, known = self._fingerprints() if self._held else (0, {})
        for space in (
            s
            for s in self._reader.manifest.spaces
            if s.kind == "device" and int(s.key) in self._processes
        ):
            image, cells = int(space.key), self._cells(space)
            own = {
                target.about.address: target
                for target in self._targets.all
                if target.process == image
            }
            starts = np.array(sorted(own), np.uint64)
            complete = len(cells) == sum(target.about.size for target in own.values()) // CELL_BYTES
            if not complete:
                raise Damaged("map", "of a space", f"device {space.key} lacks cells")
            wanted = (
                self._differing(own, cells, seed, known.get(f"device:{space.key}"))
                if self._held
                else cells.records["data"].any(axis=1)
            )
            rows = np.flatnonzero(wanted)
            targets = [own[start] for start in starts.tolist()]
            at = np.searchsorted(starts, cells.base[rows], side="right") - 1
            device.extend(
                np.array([devices.index(target.device) for target in targets], np.int64)[
                    at
                ].tolist()
            )
            handle.extend(np.array([target.handle for target in targets], np.int64)[at].tolist())
            offset.extend((cells.base[rows] - starts[at]).tolist())
            tables.append(cells.records[rows])
        return GpuCells(
            np.concatenate(tables) if tables else np.empty(0, CELL), devices, device, handle, offset
        )

    # -- memory that is still held

    def _fingerprints(self) -> tuple[int, dict[str, Fingerprints]]:
        """Return the lineage's seed and the snapshot's fingerprints; without them everything is
        fetched.
        """
        manifest, keys = self._reader.manifest, self._repository.keys
        seed = fingerprint_seed(keys, manifest.lineage)
        with suppress(Damaged, FormatTooNew, StoreError):
            if manifest.hints:
                limit = fingerprint_bytes(cells_of(manifest), len(manifest.spaces))
                kind = limited(limit)
                data = self._loop.run(
                    self._repository.backend.get(manifest.hints, limit=kind.object_limit)
                )
                body = decode_hints(
                    manifest.hints,
                    data,
                    keys.hints,
                    bytes.fromhex(manifest.hints_digest),
                    kind=kind,
                )
                return seed, decode_fingerprints(body, limit)
        return seed, {}

    def _differing(
        self,
        own: Mapping[int, TargetAllocation],
        cells: SpaceCells,
        seed: int,
        known: Fingerprints | None,
    ) -> npt.NDArray[np.bool_]:
        """Return which cells differ from the snapshot. New memory is zeros."""
        differing = np.array(cells.records["data"].any(axis=1), np.bool_)
        if known is None or len(known.key) != len(cells) or (known.key != cells.base).any():
            return np.ones(len(cells), np.bool_)
        there = known.fingerprint.view(np.uint64).reshape(-1, 2)
        for target in (target for target in own.values() if target.held):
            words = self._worker.fingerprints(target.device, [target.handle], seed)
            first = int(np.searchsorted(cells.base, np.uint64(target.about.address)))
            differing[first : first + len(words)] = (
                there[first : first + len(words)] != words
            ).any(axis=1)
        return differing


def _explained(error: BaseException) -> BaseException:
    if isinstance(error, WorkerFailed) or not isinstance(error, IcecoreError):
        message, cure = (
            getattr(error, "message", f"{type(error).__name__}: {error}"),
            getattr(error, "cure", ""),
        )
        made = RestoreFailed(f"cannot restore resident memory: {message}", cure=cure)
        made.__cause__ = error
        return made
    return error
