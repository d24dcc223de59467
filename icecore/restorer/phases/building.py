"""The fourth phase: have CRIU build the tree while its memory is fetched."""

from __future__ import annotations

import os
from contextlib import nullcontext, suppress
from pathlib import Path

import msgspec

from icecore.errors import RestoreFailed
from icecore.events import Event, phase
from icecore.host.criu.libraries import restore_environment
from icecore.host.criu.program import plugin_folder
from icecore.host.cuda import holder as plugin
from icecore.host.jobs.restoring import Restoring
from icecore.host.kernel.cgroups import files_to_join
from icecore.restorer import workingset
from icecore.restorer.credentials import require_names, rights_for_names
from icecore.restorer.files.images import FILE_NAME
from icecore.restorer.fill.shared import SharedFill
from icecore.restorer.owner import owner_of
from icecore.restorer.phases.attempt import Attempt
from icecore.restorer.phases.files import Prepared
from icecore.restorer.phases.planning import Plan, Workspace
from icecore.restorer.phases.resources import Resources, own_placers
from icecore.restorer.phases.undoing import Undo
from icecore.restorer.requirements.ports import remove_leftovers
from icecore.restorer.tree import Tree, criu_arguments


class Built(msgspec.Struct, frozen=True):
    """A tree that CRIU has built.

    Attributes:
        tree: Held, unless it is restored lazily and no file was changed.
        early: (process, address) of the cells that an earlier restore saw used first.
        shared: Fills shared memory; before it is complete, the tree must not run.
    """

    tree: Tree
    early: list[tuple[int, int]]
    shared: SharedFill


def build_tree(
    attempt: Attempt,
    undo: Undo,
    workspace: Workspace,
    plan: Plan,
    resources: Resources,
    prepared: Prepared,
) -> Built:
    """Run CRIU; the daemon listens from before the first page fault.

    Raises:
        RestoreRefused: A port of the job is still held, by closed connections or by another
            process.
        RestoreFailed: CRIU failed.
    """
    if plan.manifest.namespaces.network == "host":
        remove_leftovers(plan.manifest.requirements.ports)
    word, placers = str(workspace.work), resources.placers
    if resources.memory.filed and not prepared.memory.filed:
        # Device memory does not come through a file after all.
        if resources.file_placers is not None:
            with suppress(RestoreFailed):  # they have done nothing
                resources.file_placers.close()
        if placers is None:
            size = resources.memory.size
            placers = own_placers(attempt, undo, plan, size, word, word, beside="driver")
    device_file = prepared.device_file.file if prepared.device_file is not None else None
    undo.tree = tree = Tree(
        f"the restore of snapshot {attempt.snapshot}",
        workspace.guard,
        workspace.work,
        prepared.memory.lazy,
        attempt.repository.backend,
        plan.reader,
        plan.limits,
        attempt.loop,
        placers=placers,
        device_file=device_file,
    )
    options, restoring, devices = attempt.options, resources.restoring, resources.devices
    # Until the tree runs the changes of files can be undone: CRIU must not decide when that is. Nor
    # may a tree run before its shared memory is complete (`SharedFill.wait`).
    held = (
        tree.hold_script(undo.stack)
        if options.mode == "full"
        or prepared.put_back
        or prepared.expected is not None
        or prepared.memory.placed
        else None
    )
    own, prefix, descriptors = (
        (restoring.options, restoring.prefix, restoring.pass_fds) if restoring else ([], [], ())
    )
    if device_file is not None:
        own = [*own, "--inherit-fd", f"fd[{device_file.descriptor}]:{FILE_NAME}"]
        descriptors = (*descriptors, device_file.descriptor)
    plugins = _plugins(attempt, workspace.images, resources)
    arguments = criu_arguments(plan.manifest, options, [*own, *plugins], held)
    early: list[tuple[int, int]] = []
    if options.mode == "lazy":
        early = attempt.loop.run(
            workingset.recall(attempt.repository, plan.manifest.lineage, attempt.snapshot)
        )
    tree.fill.listen()
    shared = _fill_shared(attempt, undo, workspace, plan, prepared)
    tree.daemon.shared = shared.take
    with phase(attempt.emit, "restore.criu") as running:
        with devices.holder() if devices is not None else nullcontext() as holder:
            environment = _joining(
                attempt, plan, restoring, workspace.images
            ) | plugin.restore_environment(
                holder.fileno() if holder is not None else None, plan.criu.version
            )
            given = [*descriptors, *([holder.fileno()] if holder is not None else [])]
            try:
                tree.build(
                    plan.criu,
                    workspace.images,
                    arguments,
                    prefix,
                    given,
                    options.criu_seconds,
                    environment,
                    early,
                )
            except RestoreFailed as error:
                raise (shared.failure or error) from error
        running.fields["faults"] = tree.daemon.faults
    return Built(tree, early, shared)


def _fill_shared(
    attempt: Attempt, undo: Undo, workspace: Workspace, plan: Plan, prepared: Prepared
) -> SharedFill:
    """Return what fills shared memory as soon as CRIU has made it."""
    backend = attempt.repository.backend
    images, memory = workspace.images, prepared.memory.placed
    shared = SharedFill(images, memory, backend, plan.reader, plan.limits, attempt.loop)
    undo.stack.callback(shared.close)
    shared.start(workspace.guard)
    return shared


def _joining(
    attempt: Attempt, plan: Plan, restoring: Restoring | None, images: Path
) -> dict[str, str]:
    """Return the environment that has CRIU join the cgroups of the user for whom it restores and a
    cgroup of the instance's own, and make names with the rights of the job's user. If a cgroup of
    the user has been removed, such as that of a login that has ended, CRIU stays in this process's.

    Raises:
        UsageError: A cgroup cannot be joined from here.
        MissingTool: The library that does so was not built.
    """
    identity = attempt.options.identity
    groups: list[str] = []
    if identity is not None:
        gone: list[str] = []
        groups = files_to_join(identity.cgroups or {}, gone.append)
        for group in gone:
            message = f"the cgroup {group} has been removed; the job runs in that of its restorer"
            attempt.emit(Event("restore.warning", {"name": "cgroup", "message": message}))
    user = owner_of(plan.manifest, plan.record)
    foreign = user != os.geteuid()
    names = ""
    if user and foreign:
        require_names(plan.criu)
        names = rights_for_names(images, user, identity, plan.init)
    above = identity.cgroups if identity is not None else None
    own = restoring.make_group(above) if restoring is not None else None
    return restore_environment(groups, own, own_keyring=foreign, names=names)


def _plugins(attempt: Attempt, images: Path, resources: Resources) -> list[str]:
    """Return where CRIU takes its plugins from: never its own directory, whose plugin for CUDA
    would make the driver's calls a second time.
    """
    folder = attempt.options.criu_plugins
    if resources.devices is not None or (images / plugin.RECORD).exists():
        own = [plugin.require_plugin()]
        folder = str(plugin_folder(images.with_name("plugins"), folder, own))
    return ["--libdir", folder] if folder else []
