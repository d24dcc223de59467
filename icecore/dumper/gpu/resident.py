"""Resident device memory in a dump: taken away before the driver's checkpoint and given back after
it. Meanwhile, what changed is copied aside. The job gets its memory back whatever becomes of the
copies.

The worker (`icecore.host.gpu.worker`) makes the copies while the driver and CRIU do their parts. It
fingerprints the memory; only what differs from the parent is copied, on the device if there is
room. Then the job runs on, and the copies go through the same pipeline as all other memory.
"""

from __future__ import annotations

import os
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import msgspec

from icecore.dumper.gpu.resident_ahead import find_changes
from icecore.dumper.gpu.resident_copy import ResidentCopy
from icecore.dumper.gpu.resident_precopy import ResidentPreCopied, pre_copy_resident
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.spaces import ScanContext, SpaceCapture
from icecore.dumper.observe.resident_inspection import ResidentInspection
from icecore.dumper.preflight.gpu_changes import GpusChanged
from icecore.errors import DumpFailed, IcecoreError
from icecore.events import Sink, Value, phase
from icecore.host.gpu.working import RING, HostRegion, Worker
from icecore.host.kernel import cpu, limits
from icecore.host.kernel.trusted import open_directory, require_private
from icecore.host.resident.client import Agent, Copies, Keeper
from icecore.host.resident.copyplan import Foreseen, foresee, pinned_bytes
from icecore.host.resident.gpu import spare_room
from icecore.host.resident.keeper import start_keeper
from icecore.host.resident.sharing import Shares, find_shares
from icecore.host.resident.tree import LockAll, ResidentTree, UnlockAll
from icecore.sizes import CELL_BYTES
from icecore.store.format import contract
from icecore.store.format.manifest import Manifest

_POLL_SECONDS = 0.2
_UNLIMITED_LEASE = 3600.0
_LEASE_GRACE = 30.0
_KEEPER_SECONDS = 5.0
#: Threads that copy between a process and its GPU, including the driver's. More gain little.
_COPY_THREADS = 8
#: Allocations that a process may hand over in the window, at 0.6 ms each.
_FEW = 16
_LET_GO_SECONDS = 10.0
#: Bytes of zeros on a GPU that a job may write to between the search for changes and the window of
#: its first snapshot.
_LIKELY_ZEROS = 1 << 30
#: Device of imported memory whose process does not know it.
_NO_DEVICE = f"GPU-{uuid.UUID(int=0)}"


class Resident:
    """The resident memory of one dump. Closing it ends the worker.

    Args:
        inspection: The processes with resident memory.
        word: Shown in the worker's command line.
        emit: Gets the ``dump.resident.…`` phases.
        outlives: Once the snapshot is committed, the job's memory outlives a job that does not end
            well (`outlive`).
    """

    def __init__(
        self, inspection: ResidentInspection, word: str, emit: Sink, *, outlives: bool = False
    ) -> None:
        limits.raise_descriptor_limit()  # one for each allocation, twice
        self.inspection = inspection
        self._outlives = outlives
        self._emit = emit
        seen = inspection.seen_from(next(iter(inspection.pids)))
        self._directory = open_directory(seen)
        try:
            require_private(
                self._directory, seen
            )  # otherwise another user may have put files there that a keeper would replace
        except BaseException:
            os.close(self._directory)
            raise
        # Through a descriptor, because the job may have ended by the time its memory is freed.
        self._place = Path(f"/proc/self/fd/{self._directory}")
        self._tree: ResidentTree | None = None
        self._agents: list[Agent] = []
        self._told: list[Agent] = []
        self._spare: dict[str, int] = {}
        self._worker = Worker(word)
        self._region: HostRegion | None = None
        self._copying: threading.Thread | None = None
        self._failure: BaseException | None = None
        self._copy: ResidentCopy | None = None
        self._sharing = Shares({}, {})
        self._over = threading.Event()
        #: Where copies will probably go, once `prepare` knows.
        self.foreseen: Foreseen | None = None
        self._short: dict[str, int] = {}
        self._pre_copied: dict[int, ResidentPreCopied] = {}

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

    def give_up(self) -> None:
        """Make `prepare`, which runs in another thread, end soon."""
        self._over.set()
        self._worker.give_up()

    def _require_going_on(self) -> None:
        if self._over.is_set():
            raise DumpFailed("the dump was abandoned")

    @property
    def copying_pids(self) -> frozenset[int]:
        """Return the processes whose memory is away that make the driver's copies themselves."""
        return frozenset() if self._tree is None else frozenset(self._tree.copying)

    @property
    def agents(self) -> list[tuple[str, int, int]]:
        """Directory, pid in its own namespace and host pid of each process, for the helper that
        brings the processes back if this one dies.
        """
        return [
            (str(self.inspection.seen_from(pid)), own, pid)
            for pid, own in self.inspection.pids.items()
        ]

    def prepare(
        self,
        staging_bytes: int,
        context: ScanContext,
        parent: Parent | None,
        *,
        moved: int,
        reserved: int,
    ) -> dict[str, Value]:
        """Prepare the worker on all GPUs, and host memory for copies, before anything is stopped.

        Args:
            staging_bytes: Bound on that memory, not counting memory that is likely to change and has
                no room on its GPU, which comes on top.
            context, parent: What will store the copies, and what they are compared with.
            moved: Bytes that the driver will move into the host's memory. As many again are staged,
                so twice this amount is not available.
            reserved: Bytes of host memory that other parts of the dump may still take.

        Returns:
            Event fields: ``pinned`` bytes, and what was found of changes (docs/reference/events.md).

        Raises:
            WorkerFailed, ResidentFailed: The worker or the memory is not available.
        """
        agents = {
            pid: Agent(self._place, own, tracee=pid) for pid, own in self.inspection.pids.items()
        }
        self._agents = list(agents.values())
        self._have_keeper()
        self._tree = ResidentTree(self._place, self.inspection.pids)
        sizes: Counter[str] = Counter()
        for one in (
            one for agent in agents.values() for one in agent.allocations() if not one.imported
        ):
            sizes[one.device] += one.size
        del sizes[_NO_DEVICE]
        if not sizes:
            return {}
        free = self._worker.begin(sorted(sizes))
        self._spare = {device: spare_room(some) for device, some in free.items()}
        changed: Mapping[str, int]
        looked = 0
        try:
            tokens = {pid: report.token for pid, report in self._tree.reports.items()}
            found = find_changes(self._worker, self._place, agents, tokens, parent, context.seed)
            said: dict[str, Value] = {
                "looked": found.looked,
                "changed": sum(found.changed.values()),
            }
            changed, looked = found.changed, found.looked
        except IcecoreError as error:  # `take_away` reports a worker that has ended
            said = {"not_looked": error.message}
            changed = {} if parent else sizes
        self._require_going_on()
        # The job goes on writing: what changed in the parent may change again, and what is zeros now
        # may be in use by then. It is not known on which GPU the parent's changes were: they may all
        # be on any one GPU, but not on all of them.
        if parent is not None:
            before = _changed_in(parent.manifest)
            wanted = {
                device: min(size, max(before, changed.get(device, 0)))
                for device, size in sizes.items()
            }
            likely = max(before, sum(changed.values()))
        else:
            wanted = {
                device: min(size, changed.get(device, 0) + _LIKELY_ZEROS)
                for device, size in sizes.items()
            }
            likely = sum(wanted.values())
        available = max(0, limits.memory_available() - 2 * moved - reserved)
        most = pinned_bytes(
            sizes,
            self._spare,
            wanted=wanted,
            likely=likely,
            staging=staging_bytes,
            available=available,
            # Otherwise it is known what has changed in all of the memory that the parent has.
            growing=parent is None
            or not looked == sum(sizes.values()) == _allocated_in(parent.manifest),
        )
        self._region = HostRegion((RING + most // CELL_BYTES) * CELL_BYTES)
        self._region.prefault(self._over)
        self._require_going_on()
        self._worker.take_host(self._region, min(sizes))
        self.foreseen = foresee(wanted, self._spare, most)
        self._short = {
            device: max(0, size - self._spare.get(device, 0)) for device, size in wanted.items()
        }
        return {**said, "pinned": self._region.size}

    def pre_copy(self, context: ScanContext, parent: Parent | None, *, least: int) -> None:
        """Store memory at rest that has no room on its GPU, before anything is stopped and after
        `prepare`. Memory that changes until the window finds the same room as without pre-copy.

        Args:
            context, parent: What stores it, and what it is compared with.
            least: Bytes without room from which on pre-copy pays off.

        Raises:
            StoreError: It cannot be stored.
        """
        if self._region is None or self._tree is None or sum(self._short.values()) < max(1, least):
            return
        with phase(self._emit, "dump.resident.precopy") as running:
            agents = dict(zip(self.inspection.pids, self._agents, strict=True))
            tokens = {pid: report.token for pid, report in self._tree.reports.items()}
            try:
                self._pre_copied = pre_copy_resident(
                    self._worker,
                    self._region,
                    self._place,
                    agents,
                    tokens,
                    parent,
                    context,
                    self._short,
                    self._spare,
                )
            except (
                IcecoreError
            ) as error:  # a failed store raises in `drain`, a lost worker in `take_away`
                context.pipeline.drain()
                running.fields["not_stored"] = error.message
            running.bytes = self.pre_copied

    @property
    def pre_copied(self) -> int:
        """Bytes that were stored before the window."""
        return sum(one.stored for one in self._pre_copied.values())

    def _have_keeper(self) -> None:
        """Replace a keeper that has died, and have the processes hand everything over to it. What
        they allocate meanwhile they hand over in the window.
        """
        start_keeper(
            Path(f"/proc/{os.getpid()}/fd/{self._directory}")
        )  # the directory that was inspected, whatever its path leads to by now
        end = time.monotonic() + _KEEPER_SECONDS
        while (
            any(agent.report().counts.unheld > _FEW for agent in self._agents)
            and time.monotonic() < end
        ):
            time.sleep(0.02)

    # -- in the window

    def take_away(
        self, lock: LockAll, unlock: UnlockAll, limit: float | None, *, copies: bool = True
    ) -> None:
        """Park all processes and take their memory away, or none.

        Args:
            limit: Seconds that this may take; None: no limit.
            copies: Whether those processes that can make the driver's copies themselves do so
                (`copying_pids`).
        """
        assert self._tree is not None
        if self._worker.gone:  # nothing could be copied in the window
            raise DumpFailed(
                "the GPU worker ended before the window",
                cure="find out why it was killed (out of memory?), and try again",
            )
        with phase(self._emit, "dump.resident.unmap", processes=len(self._tree.pids)) as running:
            lease = _UNLIMITED_LEASE if limit is None else limit + _LEASE_GRACE
            running.bytes = self._tree.take_away(
                lock,
                unlock,
                seconds=min(60.0, limit or 60.0),
                lease=lease,
                copies=_copies(self._tree.pids) if copies else None,
            )
        self._sharing = find_shares(self._tree.taken)

    def begin_copy(self, context: ScanContext, parent: Parent | None) -> None:
        """Begin to copy what changed; `wait_copied` waits for it."""
        self._copy = ResidentCopy(
            self._worker,
            self._region,
            self._spare,
            self._sharing,
            self.inspection.pids,
            self._pre_copied,
            context,
            parent,
            self._emit,
        )
        self._copying = threading.Thread(
            target=self._run_copy, args=(self._copy,), name="resident", daemon=True
        )
        self._copying.start()

    def _run_copy(self, copy: ResidentCopy) -> None:
        try:
            copy.run()
        except BaseException as error:  # noqa: BLE001 - raised by `wait_copied`
            self._failure = error

    def wait_copied(self, check: Callable[[], None]) -> None:
        """Wait until everything is copied.

        Args:
            check: Raises when waiting must end.

        Raises:
            GpusChanged: The job has memory that it did not have when the dump began.
            DumpFailed: The copies failed.
        """
        assert self._copying is not None
        while self._copying.is_alive():
            self._copying.join(_POLL_SECONDS)
            check()
        if isinstance(self._failure, GpusChanged):
            raise self._failure
        if self._failure is not None:
            message = getattr(self._failure, "message", str(self._failure))
            raise DumpFailed(
                f"resident device memory cannot be captured: {message}",
                cure=getattr(self._failure, "cure", ""),
            ) from self._failure

    def give_back(self) -> None:
        """Map all memory again and let the processes run."""
        assert self._tree is not None
        with phase(self._emit, "dump.resident.map", processes=len(self._tree.pids)):
            self._announce()  # the worker has it mapped until `let_go`
            self._tree.give_back()

    def undo(self) -> None:
        """Give back what was taken away, as far as possible. Never raises."""
        if self._tree is not None:
            self._tree.__exit__(None, None, None)

    def gone(self, *, keep: bool) -> None:
        """Note that the processes were killed. ``keep``: their memory stays where it is."""
        assert self._tree is not None
        self._tree.ended(keep=keep)

    def outlive(self, init: int, status: Path) -> None:
        """Have the job's memory outlive a job that does not end well (`Keeper.keep`), now that the
        snapshot is committed.

        Raises:
            NotFound, ResidentFailed, OSError: The keeper cannot.
        """
        for report in self.inspection.reports.values():
            Keeper(self._place).keep(report.token, init, status)

    # -- afterwards

    def let_go(self) -> None:
        """Have the worker unmap the job's memory, so that the job can free it. The copies stay.

        Raises:
            DumpFailed: The worker failed to, and was ended instead.
        """
        devices = self._copy.devices if self._copy is not None else {}
        if devices:
            if self._told:
                self._announce()
            with ThreadPoolExecutor(len(devices), "gpu") as pool:
                futures = [
                    pool.submit(
                        self._worker.release,
                        device,
                        [piece.handle for _, piece in pieces],
                        seconds=_LET_GO_SECONDS,
                    )
                    for device, pieces in devices.items()
                ]
            failed = [error for future in futures if (error := future.exception()) is not None]
            if failed and not self._worker.gone:  # a worker that has ended has nothing mapped
                self._worker.kill()
                raise DumpFailed(
                    f"the GPU worker does not let go of the job's memory: {failed[0]}"
                ) from failed[0]
        for agent in self._told:
            with suppress(IcecoreError):  # its process has ended
                agent.look(0.0)

    def _announce(self) -> None:
        """Have allocations that find no memory wait, because memory that the job frees is still
        mapped by the worker.
        """
        agents, self._told = self._told or self._agents, list[Agent]()
        with ThreadPoolExecutor(max(1, len(agents)), "look") as pool:
            futures = [(agent, pool.submit(agent.look, _LET_GO_SECONDS)) for agent in agents]
        # An older preload does not support it.
        self._told = [agent for agent, future in futures if future.exception() is None]

    def store(self) -> list[SpaceCapture]:
        """Hand everything that was copied aside to the pipeline and return the spaces. Then tell
        the worker to end: it has no work left.

        Raises:
            WorkerFailed: The worker ended while copies were on a GPU.
        """
        spaces = self._copy.store() if self._copy is not None else []
        self._worker.give_up()
        return spaces

    def describe(self, images: Mapping[int, int]) -> contract.Resident:
        """Return what a restore needs to know.

        Args:
            images: Host pid → image id.
        """
        processes = {
            images[pid]: contract.ResidentProcess(
                self.inspection.reports[pid].token.hex(),
                [
                    contract.ResidentAllocation(
                        one.identity, one.address, one.size, one.requested, one.device, one.ordinal
                    )
                    for one, _ in pairs
                ],
                [
                    contract.ResidentImport(
                        one.allocation.identity, images[one.owner[0]], one.owner[1]
                    )
                    for one in self._sharing.imports[pid]
                ],
                self.inspection.reports[pid].counts.left,
            )
            for pid, pairs in self._sharing.owned.items()
        }
        return contract.Resident(self.inspection.directory, processes, self._outlives)


def _copies(pids: Collection[int]) -> Copies:
    """Return how each process makes the driver's copies, if these processes share the cores. The
    agent keeps to the affinity of its process.
    """
    some = max(1, len(pids))
    cores = limits.threads_for(_COPY_THREADS * some) // some
    groups = Counter(filter(None, map(cpu.group_limit, pids)))
    for (_, allowed), members in groups.items():
        cores = min(cores, int(allowed / members))
    return Copies(threads=max(0, cores - 1), huge=limits.spare_huge_bytes(some))


def _changed_in(manifest: Manifest) -> int:
    """Return how many bytes of resident memory had changed in a snapshot, at the most."""
    sizes = manifest.sizes
    known = sizes.resident_changed
    return sizes.changed if known is msgspec.UNSET else known


def _allocated_in(manifest: Manifest) -> int:
    """Return how many bytes of resident memory the job had in a snapshot."""
    spaces = [space for space in manifest.spaces if space.kind == "device"]
    return sum(region.length for space in spaces for region in space.regions)
