"""The first phase: make a working directory, open the snapshot, and check the machine against it.
Nothing outside the working directory changes yet.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from pathlib import Path

import msgspec

from icecore.errors import IcecoreError, UsageError
from icecore.events import Event
from icecore.host.criu.program import Criu, find_criu
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation, RunRecord
from icecore.host.kernel.limits import raise_descriptor_limit, require_directory, threads_for
from icecore.host.workdir import make_work_directory
from icecore.restorer.fetch.fetcher import PLACE_THREADS
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.files.copies import require_copies_possible
from icecore.restorer.files.file_recovery import recover
from icecore.restorer.files.images import spaces_of
from icecore.restorer.guard.client import RestoreGuard
from icecore.restorer.options import RestoreOptions
from icecore.restorer.owner import require_owner
from icecore.restorer.phases.attempt import Attempt
from icecore.restorer.phases.undoing import Undo
from icecore.restorer.requirements.check import check_requirements
from icecore.restorer.requirements.outcome import Requirements
from icecore.store.format.contract import read_run
from icecore.store.format.manifest import Manifest
from icecore.store.log.repository import UNREGISTERED
from icecore.store.log.session import Session
from icecore.store.snapshot.reader import SnapshotReader

#: Bytes fetched and not yet placed, for each process with device memory.
_BUDGET = 512 << 20
#: File systems that a job with a private root has for itself: their files come with CRIU's images.
OWN_FOLDERS = ("/dev/shm/", "/proc/", "/dev/pts/", "/dev/mqueue/")


class Workspace(msgspec.Struct, frozen=True):
    """The working directory of a restore, on tmpfs, and the guard that removes it if this process
    dies.

    Attributes:
        top: The directory.
        images: CRIU's images.
        work: CRIU's working directory.
        guard: It has not started CRIU yet.
    """

    top: Path
    images: Path
    work: Path
    guard: RestoreGuard


class Plan(msgspec.Struct, frozen=True):
    """The snapshot, and how it is restored on this machine, which meets its requirements.

    Attributes:
        manifest: The snapshot's.
        reader: Reads its cells.
        drivers: Processes with device memory of their own, each of which occupies a thread of the
            driver; at least 1.
        limits: Threads, memory, patience.
        criu: The CRIU that builds the tree.
        record: How `icecore run` started the job; None: it did not.
        requirements: The outcome of all checks.
    """

    manifest: Manifest
    reader: SnapshotReader
    drivers: int
    limits: Limits
    criu: Criu
    record: RunRecord | None
    requirements: Requirements

    @property
    def init(self) -> int:
        """The image id of the job's init; 0: it has none."""
        return self.manifest.processes[0].image_id if self.record is not None else 0


def make_workspace(attempt: Attempt, undo: Undo) -> Workspace:
    """Make the working directory, and start the guard.

    Raises:
        UsageError: A directory that the options name is missing.
    """
    require_places(attempt.options, attempt.workdir)
    recover(attempt.state, attempt.tell)  # an earlier restore may have left files half changed
    top, lock = make_work_directory("icecore-restore-", attempt.workdir, attempt.emit)
    undo.stack.callback(os.close, lock)
    undo.stack.callback(shutil.rmtree, top, ignore_errors=True)
    images, work = top / "images", top / "work"
    images.mkdir(mode=0o700)
    work.mkdir(mode=0o700)
    undo.guard = guard = RestoreGuard(str(work), str(top), lock=lock)
    # One descriptor for each process and child. After the guard, because CRIU inherits its limit.
    raise_descriptor_limit()
    return Workspace(top, images, work, guard)


def plan_restore(attempt: Attempt, undo: Undo, workspace: Workspace) -> Plan:
    """Open the snapshot and check the machine.

    Raises:
        RestoreRefused: The machine does not meet what the snapshot requires.
        UsageError: The options do not fit the snapshot.
    """
    options = attempt.options
    manifest, reader = _open(attempt, undo)
    drivers = _with_device_memory(manifest)
    limits = Limits(
        options.threads or threads_for(PLACE_THREADS),
        options.budget_bytes or _BUDGET * drivers,
        max(1, options.attempts),
        options.stall_seconds,
    )
    criu = attempt.criu or find_criu()
    record = run_record(manifest)
    if options.identity is not None:
        require_owner(manifest, record, options.identity.user)
    jobs = attempt.registry.instances()
    requirements = compare(manifest, reader, record, options, criu, str(workspace.top), jobs)
    for warning in requirements.warnings:
        attempt.emit(Event("restore.warning", {"name": warning.name, "message": warning.message}))
    requirements.require()
    for path in sorted(requirements.files.resized):
        message = f"{path} belongs or belonged to another user, and stays as it is"
        attempt.emit(Event("restore.warning", {"name": "files", "message": message}))
    return Plan(manifest, reader, drivers, limits, criu, record, requirements)


def require_places(options: RestoreOptions, workdir: str) -> None:
    """Require the directories that the options name.

    Raises:
        UsageError: One is missing.
    """
    require_directory(workdir, "--workdir")
    if options.root:
        require_directory(options.root, "--root")


def run_record(manifest: Manifest) -> RunRecord | None:
    """Return how `icecore run` started the job, if it did.

    Raises:
        Damaged: The record makes no sense.
    """
    run = read_run(manifest)
    if run is None:
        return None
    isolation, files = run.isolation, run.files
    return RunRecord(
        name=run.name,
        command=run.command,
        cwd=run.cwd,
        isolation=Isolation(
            pid=isolation.pid,
            ipc=isolation.ipc,
            network=isolation.network,
            root=isolation.root,
            tmp=isolation.tmp is True,
        ),
        files={
            "stdout.log": files.stdout,
            "stderr.log": files.stderr,
            "status": files.status,
            "icecore-init": files.init,
        },
        binds=run.binds,
        init=run.init,
        files_to=run.files_to,
        copies=run.copies,
        user=run.user,
        user_name=run.user_name,
        data=run.data,
        log_limit=run.log_limit,
        log_start=run.log_start,
    )


def compare(
    manifest: Manifest,
    reader: SnapshotReader,
    record: RunRecord | None,
    options: RestoreOptions,
    criu: Criu | None,
    workdir: str,
    jobs: Sequence[Job],
) -> Requirements:
    """Compare the options with the snapshot, and what the snapshot requires with this machine.

    Args:
        jobs: Those of this node.

    Raises:
        UsageError: The options do not fit the snapshot.
    """
    if record is None and options.instance:
        raise UsageError(
            f"the snapshot is of processes that 'icecore run' did not start: they are restored without a job that could be named {options.instance}",
            cure="leave out --name, and follow the processes by pid; only jobs of 'icecore run' have names",
        )
    require_copies_possible(options, record)
    own = _own_files(manifest, record)
    criu = criu or find_criu()
    return check_requirements(
        manifest, options, criu, workdir, own, reader.records, record, reader.content, jobs
    )


def _own_files(manifest: Manifest, record: RunRecord | None) -> frozenset[str]:
    """Return the open files that the new instance does not get by path."""
    if record is None:
        return frozenset()
    own = set(record.files.values())
    own |= {file.path for file in manifest.files if record.is_own(file.path)}
    if record.isolation.root:
        own |= {file.path for file in manifest.files if file.path.startswith(OWN_FOLDERS)}
    return frozenset(own)


def _with_device_memory(manifest: Manifest) -> int:
    """Count the processes with device memory among their own; at least 1."""
    spaces = spaces_of(manifest, "process")
    return max(1, sum(any(region.kind == "device" for region in space.regions) for space in spaces))


def _open(attempt: Attempt, undo: Undo) -> tuple[Manifest, SnapshotReader]:
    """Open the manifest that a session pins, which keeps the snapshot's objects from deletion."""
    repository, loop = attempt.repository, attempt.loop
    if not attempt.options.register:
        attempt.emit(Event("restore.warning", {"name": "session", "message": UNREGISTERED}))
        manifest = loop.run(repository.manifest(attempt.snapshot))
        return manifest, SnapshotReader(repository, manifest, loop.loop)
    record = attempt.record
    beginning = loop.submit(repository.read_session(attempt.snapshot))
    early = loop.submit(repository.manifest(record)) if record is not None else None
    try:
        opened: Session = beginning.result()
        undo.stack.callback(_end_session, attempt, opened)
        assert opened.base is not None
        # Compaction may have given the snapshot another manifest since it was looked up.
        if early is not None and record is not None and opened.base.manifest == record.manifest:
            manifest = early.result()
        else:
            manifest = loop.run(repository.manifest(opened.base))
    finally:
        if early is not None:
            early.cancel()
    return manifest, SnapshotReader(repository, manifest, loop.loop)


def _end_session(attempt: Attempt, session: Session) -> None:
    try:
        attempt.loop.run(session.abort())
    except IcecoreError as error:
        # It only pinned the snapshot, and is fenced after the silence timeout.
        attempt.tell(Event("restore.warning", {"name": "session", "message": str(error)}))
