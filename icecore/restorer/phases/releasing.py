"""The last phase: let the tree run, and leave it once all its memory is loaded. What fails
afterwards is a warning, and no failure of the restore.
"""

from __future__ import annotations

import shutil
import threading
import time
from contextlib import ExitStack

from icecore.errors import IcecoreError
from icecore.events import Event, Value
from icecore.host.jobs.job import Job
from icecore.restorer import workingset
from icecore.restorer.phases.attempt import Attempt
from icecore.restorer.phases.building import Built
from icecore.restorer.phases.files import Prepared, hand_over
from icecore.restorer.phases.loading import bring_devices_back, load_memory
from icecore.restorer.phases.planning import Plan, Workspace
from icecore.restorer.phases.resources import Resources
from icecore.restorer.phases.undoing import Undo
from icecore.restorer.restored import Restored
from icecore.restorer.tree import Tree


def let_run(
    attempt: Attempt,
    workspace: Workspace,
    resources: Resources,
    prepared: Prepared,
    built: Built,
) -> Restored:
    """Let the tree run, and say so. Its files are its own from now on."""
    tree, patience = built.tree, attempt.options.criu_seconds
    hand_over(workspace, prepared, tree)
    pid = tree.resume(patience) if tree.held else tree.running(patience)
    prepared.put_back.note_ran()
    if resources.devices is not None and resources.resident is not None:
        # The tree runs, but for the threads that its preload has parked.
        tree.map_resident(resources.resident, resources.devices)
        resources.resident.close()
    job = resources.restoring.started(pid) if resources.restoring is not None else None
    seconds = time.perf_counter() - attempt.began
    fields: dict[str, Value] = {
        "snapshot": attempt.snapshot,
        "pid": pid,
        "seconds": seconds,
        "instance": job.instance if job is not None else "",
        "log_bytes": {str(stream): size for stream, size in prepared.log_sizes.items()},
    }
    attempt.emit(Event("restore.running", fields))
    sizes, limits = prepared.log_sizes, prepared.limits
    return Restored(attempt.snapshot, pid, job, seconds, log_sizes=sizes, limits=limits)


def remove_replaced(attempt: Attempt, prepared: Prepared) -> None:
    """Remove what the job's files replaced."""
    attempt.tell_left(prepared.put_back.finish())


def run_while_loading(
    attempt: Attempt,
    undo: Undo,
    workspace: Workspace,
    plan: Plan,
    resources: Resources,
    prepared: Prepared,
    built: Built,
) -> Restored:
    """Let the tree run, and load its memory in a thread of its own, which also releases it."""
    tree = built.tree
    bring_devices_back(attempt, resources, prepared, tree)
    restored = let_run(attempt, workspace, resources, prepared, built)
    shutil.rmtree(workspace.images, ignore_errors=True)

    def finish() -> None:
        try:
            load_memory(attempt, plan, tree)
            # Not before: it waits for the disk, and the job waits for its memory.
            remove_replaced(attempt, prepared)
            _remember(attempt, plan, built)
            release(attempt, undo, resources, tree, restored)
        except BaseException as error:  # noqa: BLE001 - raised by `Restored.wait_resident`
            first = tree.failure or error
            try:
                undo.run(first)
            finally:
                restored._loaded.set_exception(first)

    threading.Thread(target=finish, name="restore", daemon=True).start()
    return restored


def release(
    attempt: Attempt, undo: Undo, resources: Resources, tree: Tree, restored: Restored
) -> None:
    """Release a tree whose memory is loaded: it lives without this process, and nothing that still
    fails is a failure of its restore.
    """
    tree.release(stay=not attempt.options.detach)
    seconds = time.perf_counter() - attempt.began
    restored.seconds_to_resident = seconds

    def done(status: int | BaseException) -> None:
        if isinstance(status, int):
            restored._exit.set_result(status)
        else:
            restored._exit.set_exception(status)

    # The steps run in reverse, each even if another fails.
    with (
        attempt.only_warning("the tree runs, but not all of its restore could be put away"),
        ExitStack() as steps,
    ):
        steps.callback(undo.stack.close)
        steps.callback(
            attempt.tell,
            Event("restore.resident", {"snapshot": attempt.snapshot, "seconds": seconds}),
        )
        if attempt.options.detach:
            steps.callback(tree.leave)
        else:
            steps.callback(tree.await_exit, restored.pid, done)
        if restored.job is not None:
            steps.callback(_outlive, attempt, resources, restored.job)
    restored._loaded.set_result(seconds)


def _outlive(attempt: Attempt, resources: Resources, job: Job) -> None:
    """Have device memory outlive a crash of the job. Not before all memory is loaded: if that fails
    the tree is killed, and would leave its device memory.
    """
    if resources.resident is None or not job.description.keep_resident:
        return
    try:
        resources.resident.outlive(job.pid, job.status_path)
    except (IcecoreError, OSError) as error:
        message = f"device memory does not outlive a crash of this job: {getattr(error, 'message', error)}"
        attempt.tell(Event("restore.warning", {"name": "keep-resident", "message": message}))


def _remember(attempt: Attempt, plan: Plan, built: Built) -> None:
    """Record which cells the tree used first, for the next restore."""
    touched = built.tree.fill.touched()
    if not touched or not attempt.options.register:
        return
    # What an earlier observation brought early caused no page fault, and is needed as much.
    cells = list(dict.fromkeys([*touched, *built.early]))
    try:
        attempt.loop.run(
            workingset.remember(attempt.repository, plan.manifest.lineage, attempt.snapshot, cells)
        )
    except IcecoreError as error:
        attempt.emit(Event("restore.warning", {"name": "working-set", "message": str(error)}))
