"""The device memory of a dump. Every GPU process is locked, then checkpointed and brought back while
CRIU holds all other threads. No process stays behind in another state.

A helper that the guard started makes the driver's calls (`icecore.host.gpu.helper`). It undoes them
if this process dies; if the helper itself is lost, another one takes over.
"""

from __future__ import annotations

import socket
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from msgspec.structs import replace

from icecore.dumper.freeze.guard import DumpGuard
from icecore.dumper.gpu.locking import lock_all, lock_briefly, raise_failed, unlock
from icecore.dumper.gpu.recorded import record_devices, record_gpus
from icecore.dumper.gpu.resident import Resident
from icecore.dumper.memory.parent import Parent
from icecore.dumper.memory.spaces import ScanContext, SpaceCapture
from icecore.dumper.observe.gpus import GpuInspection
from icecore.dumper.observe.resident_inspection import has_mapped
from icecore.dumper.preflight.gpu_changes import (
    GpusChanged,
    ended,
    patiently,
    require_no_more_contexts,
    require_no_others,
    require_still_orphans,
)
from icecore.dumper.preflight.orphans import left_open, misjudged
from icecore.errors import DumpFailed, IcecoreError, MissingTool, NotFound, PreflightRefused
from icecore.events import Event, Sink, phase
from icecore.host.cuda.api import DeviceError, HelperLost, Placement, State
from icecore.host.gpu.client import Helper, start_here
from icecore.host.kernel import procfs
from icecore.host.resident.client import ResidentFailed
from icecore.host.resident.copyplan import Foreseen
from icecore.store.format import contract

#: How much longer than the window the helper waits before it brings the processes back by itself.
_GRACE_SECONDS = 2.0
_GO_SECONDS = 60.0
#: Time between hanging up on CRIU and the moment at which it is about to let the tree go.
_HELD_SECONDS = 30.0
_SLOWEST_RATE = 0.5e9


class Devices:
    """The GPU processes of one dump. As a context manager that is left with an error, it brings all
    of them back to running.

    Args:
        root: Host pid of the tree's root.
        inspection: The GPU processes.
        guard: Starts the helper.
        word: Shown in the helper's command line.
        lock_seconds: How long a process's submitted work may take to end.
        emit: Gets the ``dump.gpu.…`` phases.
        resident: Their resident memory, if any.
        populate: Make the driver's mappings for it.

    Attributes:
        pids: Host pids of the processes with CUDA state.
        ranges: Where the device memory of each process lies in the process's memory once it is
            checkpointed: (start, end).
        temporary: The ranges where nothing was before the checkpoint and nothing is after the
            restore: the driver removes them again.
    """

    def __init__(
        self,
        root: int,
        inspection: GpuInspection,
        guard: DumpGuard,
        word: str,
        lock_seconds: float,
        emit: Sink,
        resident: Resident | None = None,
        populate: bool = True,
    ) -> None:
        self._root = root
        self._inspection = inspection
        self._guard = guard
        self._word = word
        self._lock_seconds = lock_seconds
        self._emit = emit
        self._populate = populate
        self._touched = False
        self.pids: list[int] = []
        self.ranges: dict[int, list[tuple[int, int]]] = {}
        self.temporary: dict[int, list[tuple[int, int]]] = {}
        self._nvml: list[int] = []
        self._resident = resident
        self._helper = Helper(guard.start, word)

    def holder(self) -> socket.socket:
        """Return the socket for the plugin of the CRIU that will hold the tree. The caller closes it."""
        return self._helper.holder()

    def close(self) -> None:
        """End the helper and the worker. May be called twice."""
        self._helper.close()
        if self._resident is not None:
            self._resident.close()

    def require(
        self,
        staging_bytes: int,
        context: ScanContext,
        parent: Parent | None,
        *,
        reserved: int,
    ) -> None:
        """Wait until CUDA is initialised in the helper, query the processes' states, and prepare
        copies of resident memory.

        Args:
            staging_bytes: Bound on pinned host memory for copies of resident memory; memory that is
                likely to change and has no room on its GPU comes on top.
            context, parent: What stores these copies, and what they are compared with.
            reserved: Bytes of host memory that other parts of the dump may still take.

        Raises:
            MissingTool: The driver's calls cannot be made.
            GpusChanged: An orphan uses CUDA now; nothing was stopped.
            PreflightRefused: A process is in a state in which it cannot be dumped; nothing was
                stopped.
        """
        self._helper.wait_ready()
        states: dict[int, State] = {}

        def ask() -> None:
            asked = [] if states else self._inspection.processes
            for one in (*asked, *self._inspection.orphans):
                states[one.pid] = self._helper.state(one.pid)
            require_still_orphans(self._inspection, states)

        try:
            patiently(ask)
        except GpusChanged as error:
            if not error.unclear:  # else `misjudged` refuses it
                raise
        reasons = [(r.name, r.message, r.cure) for r in misjudged(self._inspection, states)]
        for pid, state in states.items():
            if state not in (State.NOT_CUDA, State.RUNNING):
                cure = (
                    f"bring it back: cuda-checkpoint --toggle --pid {pid}"
                    if state is not State.FAILED
                    else "end it: the driver has lost its state"
                )
                reasons.append(
                    ("gpu-state", f"the driver reports that process {pid} is {state.value}", cure)
                )
        if reasons:
            raise PreflightRefused(reasons)
        self.pids = [pid for pid, state in states.items() if state is not State.NOT_CUDA]
        cuda = [one for one in self._inspection.processes if one.pid in self.pids]
        others = [one for one in self._inspection.processes if one.pid not in self.pids]
        self._inspection = replace(
            self._inspection, processes=cuda, orphans=[*self._inspection.orphans, *others]
        )
        if self._resident is not None:
            with phase(self._emit, "dump.resident.prepare") as running:
                running.fields |= self._resident.prepare(
                    staging_bytes,
                    context,
                    parent,
                    moved=self._inspection.most_bytes,
                    reserved=reserved,
                )

    def give_up(self) -> None:
        """Make `require`, which runs in another thread, end soon, because the dump has failed."""
        self._helper.give_up()
        if self._resident is not None:
            self._resident.give_up()

    def pre_copy(self, context: ScanContext, parent: Parent | None, *, least: int) -> None:
        """Before the window, store resident memory that has no room on its GPU. Call it after
        `require`.

        Args:
            context, parent: As for `require`.
            least: Do nothing if fewer bytes than this have no room.
        """
        if self._resident is not None:
            self._resident.pre_copy(context, parent, least=least)

    @property
    def foreseen(self) -> Foreseen | None:
        """Where copies of resident memory will probably go; None: not known yet, or no resident
        memory.
        """
        found = None if self._resident is None else self._resident.foreseen
        return found and found._replace(left=max(0, found.left - self.pre_copied))

    @property
    def pre_copied(self) -> int:
        """Bytes of resident memory that were stored before the window."""
        return 0 if self._resident is None else self._resident.pre_copied

    def require_unchanged(self) -> None:
        """Require that no other process has started to use a GPU. The job still runs.

        Raises:
            GpusChanged: One has, and has not ended within a moment.
        """
        patiently(lambda: require_no_others(self._root, self._inspection, self.pids))
        self._leave_out(ended(self._inspection))
        require_no_more_contexts(self._inspection)

    def _leave_out(self, pids: Collection[int]) -> None:
        if pids:
            self.pids = [pid for pid in self.pids if pid not in pids]
            left = [one for one in self._inspection.processes if one.pid not in pids]
            self._inspection = replace(self._inspection, processes=left)

    # -- in the window

    def lock(self, limit: float | None, context: ScanContext, parent: Parent | None) -> None:
        """Lock all processes and begin to copy changed resident memory. CRIU freezes the tree next.

        Args:
            context, parent: What stores these copies, and what they are compared with.
            limit: Seconds from now after which the processes must run again whatever this process
                does. None: no limit.

        Raises:
            GpusChanged: A process has memory, or a context, that it did not have before.
            DumpFailed: A process could not be locked; the context manager brings all back.
        """
        self._touched = True
        try:
            self._helper.deadline(None if limit is None else limit + _GRACE_SECONDS)
            if self._resident is not None:
                self._helper.resident(self._resident.agents)
                self._resident.take_away(
                    lambda pids, seconds: lock_briefly(
                        self._helper, pids, min(seconds, self._lock_seconds)
                    ),
                    lambda pids: unlock(self._helper, pids),
                    limit,
                    copies=self._populate,
                )
                self._resident.begin_copy(context, parent)
            lock_all(self._helper, self.pids, self._lock_seconds, self._emit, self._leave_out_ended)
            self._leave_out_ended()  # also those that were locked
            self._require_taken_away()
            require_no_more_contexts(self._inspection)
        except (DeviceError, NotFound, ResidentFailed) as error:
            raise _uncapturable(error) from error

    def _leave_out_ended(self) -> Collection[int]:
        over = ended(self._inspection)
        self._leave_out(over)
        return over

    def _require_taken_away(self) -> None:
        """Require that no memory of a keeper is mapped, because the driver restores what it
        checkpoints into other memory. Locked processes cannot allocate any more.

        Raises:
            GpusChanged: Some is.
        """
        for pid in self.pids:
            if has_mapped(pid):
                raise GpusChanged(
                    f"process {pid} has resident memory now that it did not have when the dump began",
                    cure="dump it again",
                )

    def checkpoint(self, seconds: float, held: Callable[[], None]) -> bool:
        """Checkpoint all processes while CRIU holds every other thread of the tree, so that no thread
        touches what the driver takes away.

        Args:
            seconds: How long CRIU may take to freeze the tree.
            held: Called when CRIU has frozen it, before the driver begins.

        Returns:
            False if CRIU did not freeze the tree.

        Raises:
            DumpFailed: A process could not be checkpointed; the context manager brings all back.
        """
        try:
            if not self._helper.hold(self.pids, seconds):
                self._helper.leave()  # a CRIU that freezes the tree later fails
                return False
            held()
            before = {pid: procfs.read_maps(pid) for pid in self.pids}
            with phase(self._emit, "dump.gpu.checkpoint") as running:
                copying = self._resident.copying_pids if self._resident is not None else frozenset()
                done, failed = self._helper.checkpoint(
                    self.pids, populate=self._populate, copying=copying
                )
                raise_failed(failed, "checkpointed")
                after = {pid: procfs.read_maps(pid) for pid in self.pids}
                require_no_others(self._root, self._inspection, self.pids)
                self._nvml = left_open(after, self._inspection.backend)
                if {one.placement for one in done.values()} - {Placement.PROCESS}:
                    raise DumpFailed(
                        "the driver put device memory where this version of icecore does not look",
                        cure="use a newer icecore",
                    )
                self.ranges = {pid: procfs.appeared(before[pid], after[pid]) for pid in self.pids}
                # Where pinned memory was mapped before, the driver maps it again.
                self.temporary = {
                    pid: _free_of(ranges, before[pid]) for pid, ranges in self.ranges.items()
                }
                running.bytes = sum(
                    end - start for ranges in self.ranges.values() for start, end in ranges
                )
                running.fields["populated"] = sum(one.populated for one in done.values())
                running.fields["huge"] = sum(one.huge for one in done.values())
                running.fields["copying"] = len(copying)
                reasons = dict.fromkeys(
                    one.not_populated for one in done.values() if one.not_populated
                )
                if reasons:
                    running.fields["not_populated"] = "; ".join(reasons)
            self._helper.go_on()
        except (DeviceError, NotFound) as error:
            raise _uncapturable(error) from error
        return True

    def wait_copied(self, check: Callable[[], None]) -> None:
        """Wait until changed resident memory is copied aside; ``check`` raises if the window is over."""
        if self._resident is not None:
            self._resident.wait_copied(check)

    def let_go(self) -> None:
        """Release the job's memory, after the window."""
        if self._resident is not None:
            self._resident.let_go()

    def store(self) -> list[SpaceCapture]:
        """Store what was copied aside, after the window."""
        return [] if self._resident is None else self._resident.store()

    def go(self) -> None:
        """Bring all processes back before CRIU, after the hang-up, lets go of them. `give_back`
        returns their resident memory.

        Raises:
            DumpFailed: A process cannot be brought back.
        """
        size = sum(end - start for ranges in self.ranges.values() for start, end in ranges)
        try:
            # No window ends this any more. If it takes this long, a process is stopped or the driver
            # hangs.
            self._helper.deadline(_GO_SECONDS + size / _SLOWEST_RATE)
            held = self._helper.hold(self.pids, _HELD_SECONDS)
        except DeviceError as error:
            raise DumpFailed(
                f"GPU processes cannot be brought back: {error.message}", cure=error.cure
            ) from error
        if not held:
            raise DumpFailed("CRIU let go of GPU processes before the driver had brought them back")
        with phase(self._emit, "dump.gpu.restore") as running:
            running.bytes = size
            failed = self._helper.restore({pid: {} for pid in self.pids})
        if not failed:
            self._note_temporary()
            with phase(self._emit, "dump.gpu.unlock"):
                failed = self._helper.unlock(self.pids)
        if failed:
            self._undo()
            raise_failed(failed, "brought back at the first attempt")
        try:
            self._helper.go_on()
        except DeviceError as error:
            raise DumpFailed(
                f"CRIU does not let go of GPU processes: {error.message}", cure=error.cure
            ) from error

    def _note_temporary(self) -> None:
        """Narrow `temporary` to what is free again, while nothing else runs in the processes."""
        for pid, ranges in self.temporary.items():
            with suppress(NotFound):
                self.temporary[pid] = _free_of(ranges, procfs.read_maps(pid))

    def give_back(self) -> None:
        """Give the processes their resident memory back, once CRIU has let go of them. They run then.

        Raises:
            DumpFailed: A process cannot have it.
        """
        if self._resident is not None:
            try:
                self._resident.give_back()
            except IcecoreError as error:
                self._undo()
                raise DumpFailed(
                    f"resident memory was not mapped at the first attempt: {error.message}",
                    cure=error.cure,
                ) from error
            self._helper.resident([])
        self._helper.deadline(None)
        self._touched = False

    def leave(self) -> None:
        """Prepare for the end of the tree: CRIU must wait for no process when it is let go."""
        self._touched = False
        with suppress(DeviceError):  # without the helper CRIU does not wait
            self._helper.leave()

    def gone(self, *, keep_resident: bool) -> None:
        """Note that the tree was killed. ``keep_resident``: its resident memory stays on the GPUs."""
        if self._resident is None:
            return
        with suppress(DeviceError):  # a lost helper brings no process back
            self._helper.resident([])
        try:
            self._resident.gone(keep=keep_resident)
        except IcecoreError as error:  # the snapshot is committed, and the job has ended
            message = f"device memory of the ended job may not be free yet: {error.message}"
            self._warn("resident", message, "free it with 'icecore rm' of the job")

    def outlive(self, init: int, status: Path) -> None:
        """Keep resident memory beyond the job, now that the snapshot is committed; see
        `icecore.dumper.gpu.resident.Resident.outlive`.
        """
        if self._resident is None:
            return
        try:
            self._resident.outlive(init, status)
        except (IcecoreError, OSError) as error:
            message = f"device memory does not outlive a crash of this job: {getattr(error, 'message', error)}"
            cure = "the next dump tries again; a keeper that an older icecore started runs until its job ends"
            self._warn("keep-resident", message, cure)

    def warn(self) -> None:
        """Warn of what processes lose in a restore. The window is over."""
        for pid in self._nvml:
            message = f"process {pid} uses NVML and CUDA: after a restore, its NVML calls fail until it calls nvmlShutdown and nvmlInit again"
            self._warn("nvml", message, "have it initialise NVML for each reading")

    def _warn(self, name: str, message: str, cure: str) -> None:
        self._emit(Event("dump.warning", {"name": name, "message": message, "cure": cure}))

    def describe(self, images: Mapping[int, int]) -> contract.Gpus | None:
        """Return what a restore needs to know; None if no process has CUDA state.

        Args:
            images: Host pid → image id.
        """
        return record_gpus(self._inspection, self.pids, self.temporary, images)

    def describe_resident(self, images: Mapping[int, int]) -> contract.Resident | None:
        """Return what a restore needs to know of resident memory; None if there is none."""
        if not self.pids or self._resident is None:
            return None
        return self._resident.describe(images)

    def requirements(self) -> list[dict[str, str]]:
        """Return the GPUs that the processes had, for the manifest's requirements."""
        return record_devices(self._inspection)

    # -- undoing

    def __enter__(self) -> Devices:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        try:
            if self._touched:
                self._undo()
        finally:
            self.close()

    def _undo(self) -> None:
        """Bring all processes back to running, whatever state they are in.

        Raises:
            DumpFailed: A process cannot be brought back.
        """
        self._guard.hang_up()  # a CRIU that holds the tree finishes, and waits for this before it lets go
        try:
            try:
                left = self._helper.undo()
            except HelperLost:
                left = self._undo_with_another()
        finally:  # also if a helper does not answer
            if self._resident is not None:
                self._resident.undo()
        self._touched = False
        if left:
            raise DumpFailed(
                f"GPU processes could not be brought back to running: {'; '.join(left.values())}",
                cure="; ".join(f"cuda-checkpoint --toggle --pid {pid}" for pid in left),
            )

    def _undo_with_another(self) -> dict[int, str]:
        self._helper.close()
        for start in (self._guard.start, start_here):
            try:
                self._helper = Helper(start, self._word)
                self._helper.wait_ready()
                self._helper.adopt(self.pids)
                if self._resident is not None:
                    self._helper.resident(self._resident.agents)
                return self._helper.undo()
            except (MissingTool, DumpFailed, DeviceError) as error:
                last: IcecoreError = error
                continue  # the guard is gone too: start the helper from this process
        return {pid: f"process {pid}: {last.message}" for pid in self.pids}


def _free_of(
    ranges: Sequence[tuple[int, int]], mappings: Iterable[procfs.Mapping]
) -> list[tuple[int, int]]:
    """Return the ranges that overlap no mapping, except for addresses that are only reserved."""
    taken = [(m.start, m.end) for m in mappings if m.protection & procfs.PROT_READ]
    return [
        (start, end)
        for start, end in ranges
        if not any(first < end and start < last for first, last in taken)
    ]


def _uncapturable(error: IcecoreError) -> DumpFailed:
    return DumpFailed(f"device memory cannot be captured: {error.message}", cure=error.cure)
