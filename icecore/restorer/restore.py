"""A restore from beginning to end: plan, build, load, release. The whole tree runs with all its
memory, or none of it runs and nothing of it is left.
"""

from __future__ import annotations

import time

from icecore.errors import RestoreFailed
from icecore.events import Event, Sink, discard
from icecore.host.criu.program import Criu
from icecore.host.jobs.registry import Registry
from icecore.host.kernel.limits import kernel_version, overcommits
from icecore.restorer.fill.device_file import FileUnusable
from icecore.restorer.options import RestoreOptions
from icecore.restorer.phases.attempt import DEFAULT_WORKDIR, Attempt
from icecore.restorer.phases.building import build_tree
from icecore.restorer.phases.files import prepare_files
from icecore.restorer.phases.loading import load_all, load_shared
from icecore.restorer.phases.planning import (
    compare,
    make_workspace,
    plan_restore,
    require_places,
    run_record,
)
from icecore.restorer.phases.releasing import (
    let_run,
    release,
    remove_replaced,
    run_while_loading,
)
from icecore.restorer.phases.resources import start_resources
from icecore.restorer.phases.undoing import Undo
from icecore.restorer.requirements.outcome import Requirements
from icecore.restorer.restored import Restored
from icecore.restorer.tree import PidTaken
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader

#: The first Linux whose userfaultfd reports pages that a file in memory has and a process has not
#: mapped yet.
_FIRST_MINOR_FAULTS = (5, 14)


def restore(
    repository: StoredRepository,
    loop: LoopThread,
    snapshot: str | SnapshotRecord,
    options: RestoreOptions | None = None,
    *,
    criu: Criu | None = None,
    registry: Registry | None = None,
    emit: Sink = discard,
) -> Restored:
    """Restore a snapshot's process tree.

    Args:
        repository: Holds the snapshot; it lives in ``loop``.
        snapshot: Its id, or its record: then its manifest is read while the session begins, which
            saves round trips to distant storage.
        options: See `RestoreOptions`; None: its defaults.
        criu: Which CRIU; None: the one that `find_criu` finds.
        registry: Records the jobs of `icecore run`; None: the usual one.
        emit: Gets ``restore.*`` events.

    Returns:
        The tree, which runs: with ``mode`` full once all its memory is loaded, with ``mode`` lazy
        at once.

    Raises:
        NotFound: There is no such snapshot.
        RestoreRefused: This machine does not meet what the snapshot requires; nothing was started.
        RestoreFailed: The restore failed; nothing of the tree runs.
        Damaged: An object of the snapshot is not what was written; nothing of the tree runs.
        StoreError: The storage failed; nothing of the tree runs.
    """
    record = snapshot if isinstance(snapshot, SnapshotRecord) else None
    attempt = Attempt(
        repository,
        loop,
        record.snapshot if record is not None else str(snapshot),
        record,
        options or RestoreOptions(),
        criu,
        registry or Registry(),
        emit,
        time.perf_counter(),
        device_file=kernel_version() >= _FIRST_MINOR_FAULTS and overcommits(),
    )
    failed: FileUnusable | PidTaken
    while True:
        try:
            return _run(attempt)
        except FileUnusable as error:
            name, how, failed = "device-memory", " without a file for it", error
        except PidTaken as error:
            name, how, failed = "pid", "", error
        following = attempt.after(failed)
        if following is None:
            raise RestoreFailed(failed.message, cure=failed.cure) from failed
        message = f"{failed.message}; retrying the restore{how}"
        emit(Event("restore.warning", {"name": name, "message": message}))
        attempt = following


def _run(attempt: Attempt) -> Restored:
    """Go through the phases; undo all of them if one fails."""
    undo = Undo(attempt)
    try:
        workspace = make_workspace(attempt, undo)
        plan = plan_restore(attempt, undo, workspace)
        resources = start_resources(attempt, undo, workspace, plan)
        prepared = prepare_files(attempt, undo, workspace, plan, resources)
        built = build_tree(attempt, undo, workspace, plan, resources, prepared)
        load_shared(attempt, prepared, built)
        if attempt.options.mode == "lazy":
            return run_while_loading(attempt, undo, workspace, plan, resources, prepared, built)
        load_all(attempt, plan, resources, prepared, built)
        restored = let_run(attempt, workspace, resources, prepared, built)
        remove_replaced(attempt, prepared)
        release(attempt, undo, resources, built.tree, restored)
        return restored
    except BaseException as error:
        undo.run(undo.failure or error)
        if undo.failure is not None and undo.failure is not error:
            # What broke first; that CRIU was killed for it explains nothing.
            raise undo.failure from None
        raise


def check(
    repository: StoredRepository,
    loop: LoopThread,
    snapshot: str,
    options: RestoreOptions | None = None,
    *,
    criu: Criu | None = None,
    registry: Registry | None = None,
) -> Requirements:
    """Check what `restore` checks first, for ``--dry-run``. Arguments as there.

    Raises:
        NotFound: There is no such snapshot.
        UsageError: A directory that the options name is missing.
        Damaged: Its manifest is not what was written.
    """
    options = options or RestoreOptions()
    workdir = options.workdir or DEFAULT_WORKDIR
    require_places(options, workdir)
    manifest = loop.run(repository.manifest(snapshot))
    reader = SnapshotReader(repository, manifest, loop.loop)
    record, jobs = run_record(manifest), (registry or Registry()).instances()
    return compare(manifest, reader, record, options, criu, workdir, jobs)
