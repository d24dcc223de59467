"""The second phase: start what works while CRIU's images are written: the GPU helper, the place of
the new instance, resident memory on its way to the GPUs, and the placers.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import msgspec
from msgspec.structs import replace

from icecore.errors import RestoreFailed, RestoreRefused
from icecore.host.cuda.populate import SMALLEST
from icecore.host.jobs.namespaces import INSTANCE_MOUNT, RunRecord
from icecore.host.jobs.restoring import Restoring
from icecore.host.kernel.limits import memory_available
from icecore.private import make_parents
from icecore.restorer.files.copies import make_directory, remove_empty
from icecore.restorer.files.images import SPARE
from icecore.restorer.files.jobfiles import JobFiles
from icecore.restorer.files.rights import Owner
from icecore.restorer.gpu.devices import Devices
from icecore.restorer.gpu.keepers import claim_keeper, let_go
from icecore.restorer.gpu.resident import Resident
from icecore.restorer.phases.attempt import Attempt
from icecore.restorer.phases.planning import Plan, Workspace
from icecore.restorer.phases.undoing import Undo
from icecore.restorer.place.placers import Beside, Placers, placers_for
from icecore.restorer.place.placing import PLACER_BYTES
from icecore.restorer.plan.memory import room_for
from icecore.store.format.contract import read_gpus, read_resident, resident_bytes


class Resources(msgspec.Struct, frozen=True):
    """What works beside CRIU.

    Attributes:
        devices: The GPU helper; None: the job used no GPU.
        record: How the new instance is started, with its copies of files; None: no job.
        restoring: The place of the new instance; None: no job.
        resident: Resident memory on its way to the GPUs, if the snapshot has any.
        memory: How host memory and device memory come back.
        placers: Processes that fill what comes through userfaultfd; None: threads do.
        file_placers: Processes that fill the file of device memory; None: threads do.
    """

    devices: Devices | None
    record: RunRecord | None
    restoring: Restoring | None
    resident: Resident | None
    memory: MemoryPlan
    placers: Placers | None
    file_placers: Placers | None


class MemoryPlan(msgspec.Struct, frozen=True):
    """How memory comes back.

    Attributes:
        size: Bytes, resident memory left out.
        filed: How many of them may come through the file of device memory.
        temporary: Image id of a process → where that memory lies, (start, end) in address order.
    """

    size: int
    filed: int
    temporary: Mapping[int, list[tuple[int, int]]]


def start_resources(attempt: Attempt, undo: Undo, workspace: Workspace, plan: Plan) -> Resources:
    """Start them.

    Raises:
        RestoreRefused: Device memory that ``from_resident`` needs is not held here.
    """
    word = str(workspace.work)
    devices = None
    if plan.requirements.gpus is not None:
        devices = Devices(plan.requirements.gpus, word, attempt.emit)
        undo.stack.callback(devices.close)
    record, restoring = _make_instance(attempt, undo, plan)
    resident = _start_resident(attempt, undo, plan, devices, record, restoring, word)
    memory = _plan_memory(attempt, plan, devices)
    filed = memory.filed
    file_placers = own_placers(attempt, undo, plan, filed, word)
    beside: Beside = "nothing" if devices is None else "file" if filed else "driver"
    placers = own_placers(attempt, undo, plan, memory.size - filed, word, word, beside=beside)
    return Resources(devices, record, restoring, resident, memory, placers, file_placers)


def _make_instance(
    attempt: Attempt, undo: Undo, plan: Plan
) -> tuple[RunRecord | None, Restoring | None]:
    """Make the place for the new instance of a job of `icecore run`."""
    record = plan.record
    if record is None:
        return None, None
    copies = plan.requirements.copies
    if copies.directory and make_directory(copies.directory):
        undo.stack.callback(remove_empty, copies.directory)
    dumped = record.copies
    record = replace(record, files_to=copies.directory, copies=copies.paths)
    restoring = undo.stack.enter_context(
        attempt.registry.restoring(
            record,
            snapshot=attempt.snapshot,
            lineage=plan.manifest.lineage,
            name=attempt.options.instance,
            dumped=dumped,
        )
    )
    return record, restoring


def _start_resident(
    attempt: Attempt,
    undo: Undo,
    plan: Plan,
    devices: Devices | None,
    record: RunRecord | None,
    restoring: Restoring | None,
    word: str,
) -> Resident | None:
    """Start to fill resident memory: that needs neither CRIU nor the processes."""
    options, manifest = attempt.options, plan.manifest
    recorded = read_resident(manifest)
    if options.from_resident and (recorded is None or not recorded.processes):
        raise RestoreRefused(
            "the snapshot has no resident memory", cure="leave out --from-resident"
        )
    if devices is None or recorded is None or not recorded.processes:
        return None
    directory, processes = recorded.directory, recorded.processes
    place = Path(f"{options.root}{directory}")
    if restoring is not None and record is not None:
        if record.isolation.root and directory.startswith(f"{INSTANCE_MOUNT}/"):
            place = restoring.job.directory / directory.removeprefix(f"{INSTANCE_MOUNT}/")
        restoring.has_keeper(place, keep=recorded.outlives)
        if record.isolation.root and record.user:
            restoring.job.directory.chmod(0o711)  # the way to the keeper leads through it
    user = record.user if record is not None else 0
    if user and not options.root:
        make_parents(place.parent)  # so that the user can enter it
    # A path of the job's own, which no other user may redirect.
    if place == Path(f"{options.root}{directory}") and not (user and place.is_dir()):
        try:
            with JobFiles(options.root) as files:
                files.make_directories(directory, Owner(os.geteuid(), os.getegid()), 0o700)
        except OSError as error:
            raise RestoreFailed(
                f"cannot make {place} for the keeper of device memory: {error.strerror}"
            ) from error
    held: Path | None = None
    if options.from_resident:
        # Of several keepers the likeliest is that of the instance which was last at this snapshot,
        # or has its job's name.
        others = attempt.registry.keepers(attempt.snapshot, manifest.job)
        held = claim_keeper([place, *others], processes, undo.stack)
    else:
        own = restoring.job.instance if restoring is not None else ""
        let_go(attempt.registry, manifest.lineage, own, processes)
    resident = Resident(
        attempt.repository,
        attempt.loop,
        plan.reader,
        plan.limits,
        devices.plan,
        place,
        user=user,
        held=held,
        placers=lambda size: _placers(attempt, plan, size, word),
        word=word,
        emit=attempt.emit,
    )
    undo.stack.callback(resident.close)
    return resident


def _plan_memory(attempt: Attempt, plan: Plan, devices: Devices | None) -> MemoryPlan:
    """Decide whether device memory comes through a file."""
    sizes, resident = plan.manifest.sizes, resident_bytes(plan.manifest)
    every = max(0, sizes.logical - min(resident, sizes.device))  # the rest of a pool is zeros
    recorded = read_gpus(plan.manifest)
    if devices is None or recorded is None or not attempt.device_file:
        return MemoryPlan(every, 0, {})
    ranges = {image: process.temporary for image, process in recorded.processes.items()}
    mapped = sum(end - start for own in ranges.values() for start, end in own)
    device = min(mapped, max(0, sizes.device - resident))
    if device < SMALLEST:  # no mapping is as large, unless it is sparse
        return MemoryPlan(every, 0, {})
    # Both kinds of placers hold as much as the budget.
    if memory_available() < every + device * SPARE + 2 * plan.limits.budget:
        return MemoryPlan(every, 0, {})
    return MemoryPlan(every, device, ranges)


def own_placers(
    attempt: Attempt,
    undo: Undo,
    plan: Plan,
    size: int,
    word: str,
    lock: str = "",
    *,
    beside: Beside = "nothing",
) -> Placers | None:
    """Start processes that place ``size`` bytes, if they pay; they end with the restore at the
    latest.

    Args:
        word: Shows in their command line.
        lock: Directory for the lock that they share with this process; empty: they need none.
        beside: See `placers_for`.
    """
    placers = _placers(attempt, plan, size, word, lock, beside)
    if placers is not None:
        undo.stack.callback(placers.close)
    return placers


def _placers(
    attempt: Attempt, plan: Plan, size: int, word: str, lock: str = "", beside: Beside = "nothing"
) -> Placers | None:
    """As `own_placers`, but the caller closes them. They load while CRIU's images are written."""
    options, backend = attempt.options, attempt.repository.backend
    count = options.placers or (
        0
        if options.threads
        else placers_for(size, plan.limits.budget, processes=plan.drivers, beside=beside)
    )
    if not count or not size or not backend.direct or not backend.folder:
        return None
    room, key = room_for(PLACER_BYTES), attempt.repository.keys.chunk
    return Placers(
        count,
        backend.folder,
        key,
        room=room,
        patience=options.stall_seconds,
        word=word,
        lock=lock,
    )
