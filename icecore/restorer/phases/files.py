"""The third phase: write the job's files and CRIU's images, and put the files in place.

CRIU opens files by their paths and checks their sizes. So they are exchanged before CRIU starts,
and they stay only if the job runs: `hand_over` is the last moment at which nothing is undone yet.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import msgspec

from icecore.errors import RestoreFailed, RestoreRefused
from icecore.events import Event, phase
from icecore.host.criu.image_changes import (
    bound_limits,
    forget_signals,
    forget_sizes,
    rearm_timers,
)
from icecore.host.criu.shared_images import can_fill_shared, fillable_shared
from icecore.host.criu.socket_images import drop_datagrams, outside_datagrams, put_peers_first
from icecore.host.jobs import temporary
from icecore.host.jobs.identity import highest_limits, shortfall
from icecore.host.jobs.logs import Stream
from icecore.host.jobs.namespaces import INSTANCE_MOUNT
from icecore.host.jobs.restoring import Restoring
from icecore.restorer.credentials import require_credentials
from icecore.restorer.files.copies import require_all_covered
from icecore.restorer.files.data_export import link_lost_names, write_data
from icecore.restorer.files.file_recovery import command as recovery_command
from icecore.restorer.files.filewriter import FileTarget, shortage, write_files
from icecore.restorer.files.ghost_names import name_ghosts
from icecore.restorer.files.held_files import require_files
from icecore.restorer.files.image_paths import require_paths
from icecore.restorer.files.images import (
    FILE_NAME,
    Memory,
    image_targets,
    plan_memory,
    read_spaces,
    spaces_of,
)
from icecore.restorer.files.peers import can_connect
from icecore.restorer.files.put_back import PutBack
from icecore.restorer.files.rights import Inode
from icecore.restorer.fill.device_file import DeviceFile
from icecore.restorer.owner import owner_of
from icecore.restorer.phases.attempt import Attempt
from icecore.restorer.phases.planning import OWN_FOLDERS, Plan, Workspace
from icecore.restorer.phases.resources import Resources
from icecore.restorer.phases.undoing import Undo
from icecore.restorer.plan.cells import SpaceCells
from icecore.restorer.tree import Tree
from icecore.store.format.data import read_data
from icecore.store.format.manifest import Space
from icecore.store.format.surroundings import KEY


class ExpectedFiles(msgspec.Struct, frozen=True):
    """The files that the tree may have open.

    Attributes:
        inodes: Those that were put back or left as they are.
        places: Paths that the instance has for itself begin with one of these.
        given: Files that CRIU is handed as descriptors.
        recorded: The paths of files in the snapshot.
        surroundings: Whether ``inodes`` contains directories and FIFOs, too.
    """

    inodes: frozenset[Inode]
    places: tuple[str, ...]
    given: frozenset[str]
    recorded: frozenset[str]
    surroundings: bool


class FilledFile(msgspec.Struct, frozen=True):
    """The file of device memory, and what becomes of the thread that fills it."""

    file: DeviceFile
    filled: Future[None]


class Prepared(msgspec.Struct, frozen=True):
    """What CRIU finds.

    Attributes:
        memory: What is to come through userfaultfd.
        device_file: The device memory that does not; None: all does.
        device_bytes: Image id → bytes of device memory.
        put_back: The changes of the job's files.
        expected: What the tree may have open; None: nothing is checked.
        log_sizes: Bytes in the logs of the new instance.
        limits: The limits that are lower than they were, a sentence each.
    """

    memory: Memory
    device_file: FilledFile | None
    device_bytes: Mapping[int, int]
    put_back: PutBack
    expected: ExpectedFiles | None
    log_sizes: Mapping[Stream, int]
    limits: list[str]


def prepare_files(
    attempt: Attempt, undo: Undo, workspace: Workspace, plan: Plan, resources: Resources
) -> Prepared:
    """Write all files, and exchange the job's.

    Raises:
        RestoreRefused: There is no room for CRIU's images.
        RestoreFailed: A file cannot be written or exchanged.
        Damaged: The snapshot's images make no sense.
    """
    with phase(attempt.emit, "restore.images", snapshot=attempt.snapshot) as running:
        folder, manifest = workspace.images, plan.manifest
        copies, restoring = plan.requirements.copies, resources.restoring
        spaces = _Spaces.of(attempt, plan)
        undo.put_back = put_back = PutBack(
            plan.requirements.files.actions,
            spaces.cells_of(plan),
            attempt.state,
            attempt.options.root,
            attempt.snapshot,
            plan.requirements.files.folders,
            plan.requirements.files.sockets,
            plan.requirements.files.settled,
            plan.requirements.files.attributes,
        )
        put_back.prepare()
        logs = _logs(restoring, spaces)
        running.bytes += _fill_temporary(attempt, plan, resources)
        images = image_targets(folder, spaces.images, spaces.image_cells)
        running.bytes += _write(attempt, plan, [*images, *put_back.targets, *logs])
        require_credentials(folder, attempt.options.identity, plan.init)
        if resources.record is not None:
            require_all_covered(folder, copies, manifest, resources.record)
        memory = plan_memory(
            folder,
            spaces.memory,
            plan.criu.version,
            lazily=True,
            temporary=resources.memory.temporary,
            fillable=_fillable(plan, folder),
        )
        if short := shortage(folder, memory.page_images):
            raise RestoreRefused(
                f"there is no room for CRIU's page images: {short}",
                cure="name another directory with --workdir",
            )
        running.bytes += _write(attempt, plan, memory.page_images)
        # Only now: CRIU waits for the page images, while the driver needs this file much later.
        device_file = None
        if memory.filed:
            device_file = _start_device_file(attempt, undo, plan, resources, memory)
        _exchange(attempt, workspace, put_back)
        undo.ghosts = _name_ghosts(attempt, resources, folder)
        _require_paths(attempt, plan, resources, folder)
        forget_sizes(folder, plan.requirements.shared | plan.requirements.files.resized)
        rearm_timers(folder)
        if plan.init:
            forget_signals(folder, plan.init)
        _drop_datagrams(attempt, plan, folder)
        put_peers_first(folder)
        limits = _bound_limits(attempt, plan, folder)
        expected = _expected_files(plan, put_back)
        log_sizes: Mapping[Stream, int] = {}
        if restoring is not None:
            restoring.bind_copies(folder)
            log_sizes = restoring.job.log_sizes()
        running.fields |= {
            "files": len(put_back.targets) + len(logs),
            "page_image_bytes": sum(target.size for target in memory.page_images),
        }
    device_bytes = spaces.device_bytes()
    return Prepared(memory, device_file, device_bytes, put_back, expected, log_sizes, limits)


def _bound_limits(attempt: Attempt, plan: Plan, folder: Path) -> list[str]:
    """Lower the limits in CRIU's images to what they can be here; return a sentence on each."""
    # The init of another user's job has root's limits, which are none of the job's.
    foreign = plan.record is not None and plan.record.user != 0
    init = plan.init if foreign else 0
    lowered = bound_limits(folder, highest_limits(attempt.options.identity), init)
    short = [shortfall(number, *pair) for number, pair in sorted(lowered.items())]
    if short:
        attempt.emit(Event("restore.limits", {"snapshot": attempt.snapshot, "short": short}))
    return short


def hand_over(workspace: Workspace, prepared: Prepared, tree: Tree) -> None:
    """Check the files that the tree has open, which is about to run, and leave the exchanged ones
    to it. It is held, unless only root could change anything about its files and nothing was
    changed.

    Raises:
        RestoreFailed: The tree has another file open.
    """
    expected = prepared.expected
    if expected is not None and tree.held:
        require_files(
            tree.root(),
            workspace.images,
            expected.inodes,
            expected.places,
            expected.given,
            expected.recorded,
            surroundings=expected.surroundings,
        )
    prepared.put_back.hand_over()


class _Spaces(msgspec.Struct, frozen=True):
    """The spaces of a snapshot with their cells: CRIU's images, files by path, memory."""

    images: list[Space]
    image_cells: list[SpaceCells]
    files: dict[str, SpaceCells]
    sizes: dict[str, int]
    memory: list[tuple[Space, SpaceCells]]

    @classmethod
    def of(cls, attempt: Attempt, plan: Plan) -> _Spaces:
        """Read the cells of all spaces, the images' first."""
        images, files = spaces_of(plan.manifest, "image"), spaces_of(plan.manifest, "file")
        memory = spaces_of(plan.manifest, "process", "shared")
        far = not attempt.repository.backend.direct
        cells = iter(read_spaces(plan.reader, [*images, *files, *memory], parallel=far))
        return cls(
            images,
            [next(cells) for _ in images],
            {space.key: next(cells) for space in files},
            {space.key: space.size for space in files},
            list(zip(memory, cells, strict=True)),
        )

    def cells_of(self, plan: Plan) -> Callable[[str], SpaceCells]:
        """Return what gives the cells of a file by its path."""
        contents, copies = plan.requirements.contents, plan.requirements.copies

        def cells(path: str) -> SpaceCells:
            found = contents.get(path)
            if found is not None:
                return found.of(self.files[found.key])
            return self.files[copies.own_path(path)]

        return cells

    def device_bytes(self) -> dict[int, int]:
        return {
            int(space.key): sum(
                region.length for region in space.regions if region.kind == "device"
            )
            for space, _ in self.memory
            if space.kind == "process"
        }


def _logs(restoring: Restoring | None, spaces: _Spaces) -> list[FileTarget]:
    """Return what fills the logs of the new instance with what the job's logs held."""
    if restoring is None:
        return []
    return [
        FileTarget(str(place), spaces.sizes[path], spaces.files[path], existing=True)
        for path, place in restoring.redirected.items()
        if spaces.sizes.get(path) and place.name.endswith(".log")
    ]


def _fill_temporary(attempt: Attempt, plan: Plan, resources: Resources) -> int:
    """Write the content of the instance's private temporary directories; return its bytes.
    No process of the job sees them yet, and they are removed if the restore fails.
    """
    record, restoring, done = resources.record, resources.restoring, 0
    if record is None or restoring is None:
        return done
    recorded = {one.path for one in read_data(plan.manifest)}
    for point in record.tmp:
        if point not in recorded:
            continue
        place = temporary.place(restoring.job.directory, point)
        try:
            backend = attempt.repository.backend
            done += write_data(backend, attempt.loop, plan.reader, point, place).bytes
            link_lost_names(plan.manifest, point, place)
        except OSError as error:
            raise RestoreFailed(
                f"cannot write the job's private {point}: {error.strerror}",
                cure=f"free space in {attempt.state}",
            ) from error
    return done


def _temporary_places(resources: Resources) -> dict[str, Path]:
    """Return the directory that will be bound over each private temporary directory."""
    record, restoring = resources.record, resources.restoring
    if record is None or restoring is None:
        return {}
    return {one: temporary.place(restoring.job.directory, one) for one in record.tmp}


def _name_ghosts(attempt: Attempt, resources: Resources, images: Path) -> list[str]:
    """Have CRIU create files without a name under names that only this restore uses."""
    record = resources.record
    return name_ghosts(
        images,
        _temporary_places(resources),
        root=attempt.options.root,
        is_own=record.is_own if record is not None else lambda path: False,
    )


def _require_paths(attempt: Attempt, plan: Plan, resources: Resources, images: Path) -> None:
    """Require that no link of a user leads CRIU elsewhere."""
    record = resources.record
    require_paths(
        images,
        _temporary_places(resources),
        root=attempt.options.root,
        is_own=record.is_own if record is not None else lambda path: False,
        user=owner_of(plan.manifest, record),
    )


def _write(attempt: Attempt, plan: Plan, targets: Sequence[FileTarget]) -> int:
    """Write files from the store; return their bytes."""
    try:
        backend = attempt.repository.backend
        return write_files(backend, plan.reader, targets, plan.limits, attempt.loop)
    except OSError as error:
        raise RestoreFailed(f"cannot write {error.filename}: {error.strerror}") from error


def _exchange(attempt: Attempt, workspace: Workspace, put_back: PutBack) -> None:
    """Put the files in place. From now on the guard undoes that if this process dies."""
    if put_back.journal is not None:
        workspace.guard.undo_with(recovery_command(attempt.state), put_back.journal.folder)
    for path in put_back.exchange():
        message = f"{path} had a set-user-ID or set-group-ID bit, which a restore does not put back"
        attempt.emit(Event("restore.warning", {"name": "mode", "message": message}))


def _drop_datagrams(attempt: Attempt, plan: Plan, images: Path) -> None:
    """Leave datagram sockets unconnected whose peer outside of the tree is missing here, such as a
    log daemon's, or whose name others than root could make lead to another socket: programs
    connect again once a send fails, as after a restart of that daemon.
    """
    user = owner_of(plan.manifest, plan.record)
    outside = plan.manifest.namespaces.network != "host"
    missing = {
        one.inode
        for one in outside_datagrams(images)
        if not can_connect(one, attempt.options.root, user, own_network=outside)
    }
    if missing:
        drop_datagrams(images, missing)


def _expected_files(plan: Plan, put_back: PutBack) -> ExpectedFiles | None:
    """Return what the tree may have open; None if that is unknown (imported images), or if only
    root could change where a path leads.
    """
    files = plan.requirements.files
    record = plan.record
    # The job could change directories that the instance has for itself when they were read.
    own = record is not None and (bool(record.tmp) or record.isolation.root)
    if not (files.exposed or own) or not all(file.inode for file in plan.manifest.files):
        return None
    given = {f"/{FILE_NAME}"}
    places: tuple[str, ...] = ()
    if plan.record is not None:
        given |= set(plan.record.files.values())
        if plan.record.isolation.root:
            places = (f"{INSTANCE_MOUNT}/", *OWN_FOLDERS)
        places += tuple(f"{point}/" for point in plan.record.tmp)
    return ExpectedFiles(
        files.untouched | put_back.inodes,
        places,
        frozenset(given),
        frozenset(file.path for file in plan.manifest.files),
        KEY in plan.manifest.extra,
    )


def _start_device_file(
    attempt: Attempt, undo: Undo, plan: Plan, resources: Resources, memory: Memory
) -> FilledFile:
    """Start to fill the file of device memory: that needs neither CRIU nor the processes."""
    made = DeviceFile(
        memory.filed,
        memory.size,
        attempt.repository.backend,
        plan.reader,
        plan.limits,
        attempt.loop,
        placers=resources.file_placers,
    )
    pool = undo.stack.enter_context(ThreadPoolExecutor(1, "device-file"))
    undo.stack.callback(made.close)

    def fill() -> None:
        with _telling(made), phase(attempt.emit, "restore.gpu.memory") as running:
            made.run(running.progress)
            spent = made.spent
            running.bytes = spent.produced
            running.fields |= {
                "stored": spent.stored,
                "cells": spent.cells,
                "placers": made.placers,
                "redone": spent.redone,
                **spent.thread_seconds(),
            }

    return FilledFile(made, pool.submit(fill))


def _fillable(plan: Plan, folder: Path) -> set[int]:
    """Return the shared memory that is filled once CRIU has made it."""
    if not can_fill_shared():
        return set()
    return fillable_shared(folder, [process.image_id for process in plan.manifest.processes])


@contextmanager
def _telling(made: DeviceFile) -> Iterator[None]:
    """Fail the fill if the event sink raises: the driver would wait for it."""
    try:
        yield
    except BaseException as error:
        made.never(error)
        raise
