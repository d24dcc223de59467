"""Makes all checks of one restore."""

from __future__ import annotations

import os
import stat
from collections.abc import Sequence, Set
from contextlib import suppress

from msgspec.structs import replace

from icecore.host.criu.program import Criu
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import RunRecord
from icecore.restorer.files.allowed import Allowed
from icecore.restorer.files.beside import find_conflicts
from icecore.restorer.files.copies import plan_copies
from icecore.restorer.files.data import NO_DATA, handled_files, plan_data, with_attributes
from icecore.restorer.files.plan import FilePlan, plan_files
from icecore.restorer.files.rights import Inode, inode_of
from icecore.restorer.files.surroundings import plan_surroundings
from icecore.restorer.options import RestoreOptions
from icecore.restorer.owner import owner_of
from icecore.restorer.requirements.data import (
    Contents,
    check_data,
    check_left,
    check_temporary,
    entries,
)
from icecore.restorer.requirements.gpus import check_gpus
from icecore.restorer.requirements.machine import check_machine, check_names
from icecore.restorer.requirements.outcome import Requirement, Requirements
from icecore.restorer.requirements.room import Maps, check_room
from icecore.store.format.archive import ARCHIVE, container_title
from icecore.store.format.data import read_data
from icecore.store.format.manifest import Manifest, OpenFile
from icecore.store.format.surroundings import read_surroundings
from icecore.text import printable


def check_requirements(
    manifest: Manifest,
    options: RestoreOptions,
    criu: Criu,
    workdir: str,
    own_files: frozenset[str] = frozenset(),
    records: Maps | None = None,
    run: RunRecord | None = None,
    read: Contents | None = None,
    others: Sequence[Job] = (),
) -> Requirements:
    """Compare what a snapshot requires with this machine.

    Args:
        manifest: The snapshot's.
        options: How it would be restored.
        criu: The CRIU that would do it.
        workdir: Where the image files would lie.
        own_files: Open files that the new instance gets anew (its logs): they are not checked.
        records: Reads the map of a space, if the manifest alone cannot show that there is room;
            None: assume the worst case.
        run: How `icecore run` started the job; None: it did not.
        read: Reads a space as bytes; only snapshots with data directories need it.
        others: The jobs of this node.
    """
    copies = plan_copies(manifest, options, run, own_files)
    skip = own_files | set(copies.paths)
    # Private temporary directories are made anew, whatever happens to other files.
    private = run.tmp if run is not None else []
    directories = [one for one in read_data(manifest) if one.path not in private]
    active = options.files in ("auto", "restore") and not copies.directory
    tables = entries(manifest, directories, read) if directories and active else {}
    handled = handled_files(manifest, tables) - skip
    # The files of a job with a private root lie on the same host mounts, except for file systems of
    # its own (/dev/shm, /proc).
    around = read_surroundings(manifest)
    user = owner_of(manifest, run)
    asked = options.files == "restore"
    with Allowed(user, options.identity, of_others=asked) as allowed:
        files = plan_files(
            manifest,
            options.files,
            root=options.root,
            skip=skip | handled,
            verify=options.verify_files,
            programs=around.programs if around is not None else None,
            allowed=allowed,
        )
        surroundings = plan_surroundings(
            around,
            options.files,
            root=options.root,
            is_own=run.is_own if run is not None else lambda path: path in own_files,
            allowed=allowed,
        )
    files = files.joined(copies.plan).joined(surroundings)
    data = NO_DATA
    if tables:
        actions = with_attributes(files.actions, tables, user)
        files = replace(files, actions=actions)
        data = plan_data(
            manifest,
            directories,
            tables,
            root=options.root,
            owner=user,
            taken={one.file.path for one in files.actions}
            | {folder.path for folder in files.folders}
            | {
                path
                for file in manifest.files
                if file.policy == "content"
                for path in _names_of(file)
            },
            handled=handled,
        )
    conflicts = find_conflicts(
        manifest,
        [*files.actions, *data.present],
        options.files,
        root=options.root,
        skip=skip,
        directory=copies.directory,
        copies=run is not None,
    )
    files = _without_keeping(files, {conflict.file for conflict in conflicts})
    shared = frozenset(conflict.file for conflict in conflicts if conflict.shared)
    if options.files == "leave":
        files = _with_grown(files, manifest, shared, options.root)
    files = files.joined(data.files)
    of_gpus, gpu_plan = check_gpus(manifest, options)
    checks = [
        *_container(manifest),
        *check_machine(manifest, criu),
        *of_gpus,
        *check_names(manifest, name=options.identity is None),
        *check_room(manifest, workdir, records),
        *check_temporary(manifest, run, workdir, criu),
        *check_data(directories, options, active=active, others=others),
        *check_left(data.left),
        *(Requirement("file", False, f"{p.path}: {p.message}", p.cure) for p in files.problems),
        *(
            Requirement("holder", False, f"{c.path}: {c.message}", c.cure, hard=c.hard)
            for c in conflicts
        ),
    ]
    return Requirements(checks, files, copies, gpu_plan, shared, data.contents)


def _names_of(file: OpenFile) -> list[str]:
    return [file.path, *file.links]


def _container(manifest: Manifest) -> list[Requirement]:
    """Refuse what only a container engine can restore: the mounts of the container are its own."""
    if ARCHIVE not in manifest.extra:
        return []
    message = f"it is the checkpoint of a container, {printable(container_title(manifest))}"
    cure = (
        "'icecore export' writes the archive again, for 'podman container restore --import'"
        " or for an image of CRI-O"
    )
    return [Requirement("container", False, message, cure)]


def _without_keeping(files: FilePlan, held: Set[str]) -> FilePlan:
    """Return the plan without changing in place the files that a running process has open: they are
    replaced, and the process keeps the old ones.
    """
    return replace(
        files,
        actions=[
            replace(action, keep=False) if action.file.path in held else action
            for action in files.actions
        ],
    )


def _with_grown(files: FilePlan, manifest: Manifest, shared: Set[str], root: str) -> FilePlan:
    """Return the plan without the problem of a shared file that only grew: CRIU does not check its
    size.
    """
    grown: dict[str, Inode] = {}
    for file in manifest.files:
        if file.path not in shared:
            continue
        with suppress(OSError):
            now = os.stat(root + file.path, follow_symlinks=False)
            if stat.S_ISREG(now.st_mode) and now.st_uid == file.user and now.st_size > file.size:
                grown[file.path] = inode_of(now)
    problems = [problem for problem in files.problems if problem.path not in grown]
    return replace(files, problems=problems, untouched=files.untouched | frozenset(grown.values()))
