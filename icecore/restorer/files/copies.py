"""Chooses the files that an instance gets as its own copies (``--files-to``). The files at the
original paths are only read, and covered for the instance alone (`icecore.host.jobs.mounts`).
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

import msgspec
from msgspec.structs import replace

from icecore.errors import RestoreRefused, UsageError
from icecore.host.criu.images import load_files, load_remaps
from icecore.host.jobs.namespaces import RunRecord, can_cover
from icecore.restorer.files.plan import FilePlan, Problem, plan_files
from icecore.restorer.options import RestoreOptions
from icecore.store.format.manifest import Manifest, OpenFile

_ANOTHER = "name another directory with --files-to"
_IN_PLACE_OR_LEAVE = "choose --files restore or leave"
#: Puts the files of an instance that had copies at their own paths again.
IN_PLACE = "/"


class Copies(msgspec.Struct, frozen=True):
    """Which files of an instance are copies.

    Attributes:
        directory: Holds each under its whole path; empty: there are none.
        paths: The files, by the path at which the instance sees them.
        plan: What to do in the directory, and which problems prevent it. Its files have their paths
            there.
    """

    directory: str
    paths: list[str]
    plan: FilePlan

    def own_path(self, path: str) -> str:
        """Return the path at which the instance sees a file of `plan`; other paths, also those of
        other files in `directory`, are returned as they are.
        """
        own = path.removeprefix(self.directory)
        return own if own in self.paths else path


def require_copies_possible(options: RestoreOptions, record: RunRecord | None) -> None:
    """Refuse a directory for copies that has no meaning with the other options.

    Raises:
        UsageError: It cannot.
    """
    if options.root and record is not None and record.tmp:
        raise UsageError(
            f"a job with a private {record.tmp[0]} (--tmp) cannot have another root (--root)",
            cure="leave out --root",
        )
    if options.root and (options.files_to or (record is not None and record.copies)):
        raise UsageError(
            "a job with its own copies (--files-to) cannot have another root (--root)",
            cure="leave out --root",
        )
    if not options.files_to:
        return
    if options.files in ("truncate", "leave"):
        raise UsageError(
            f"--files {options.files} and --files-to exclude each other: copies are made from the snapshot",
            cure="leave one of them out",
        )
    if record is None:
        raise UsageError(
            "--files-to gives copies to jobs of 'icecore run'; the snapshot is of processes that it did not start",
            cure="choose --files restore, truncate or leave",
        )


def plan_copies(
    manifest: Manifest, options: RestoreOptions, record: RunRecord | None, own: Set[str]
) -> Copies:
    """Decide which files are copies, and compare what is there with the snapshot.

    An instance that has copies keeps them in their directory at every restore of its own snapshots,
    unless the options name another.

    Args:
        manifest: The snapshot's.
        options: How it is restored.
        record: How the job was started; None: not by `icecore run`, and it has no copies.
        own: Files that the instance does not get by path.
    """
    none = Copies("", [], FilePlan([], []))
    if record is None or options.files_to == IN_PLACE:
        return none
    files = [file for file in manifest.files if file.policy != "absent" and file.path not in own]
    before = set(record.copies)
    if options.files_to:
        directory = os.path.realpath(options.files_to)
        stored = {space.key for space in manifest.spaces if space.kind == "file"}
        chosen = [
            file
            for file in files
            if file.writable
            or file.path in before
            # Where there is none, the snapshot's is put in place: it covers nothing.
            or (file.path in stored and os.path.lexists(file.path) and not _unchanged(file))
        ]
        extra: list[str] = []
    elif before:
        directory, stored = record.files_to, None
        chosen = [file for file in files if file.path in before]
        # The job may open again what it has closed.
        extra = sorted(
            path
            for path in before - {file.path for file in files}
            if os.path.isfile(directory + path)
        )
    else:
        return none
    problems = _problems_of_directory(directory)
    for file in chosen:
        problems += _problems_of(file, stored)
        if not can_cover(file.path, record.isolation):
            problems.append(
                Problem(
                    file.path,
                    "CRIU cannot name it as a mount of a private root",
                    _IN_PLACE_OR_LEAVE,
                )
            )
    plan = plan_files(
        _moved(manifest, chosen, directory), options.files, verify=options.verify_files
    )
    refused = {directory + problem.path for problem in problems}
    problems += [problem for problem in plan.problems if problem.path not in refused]
    # Exposed, so that the tree is checked before it runs: it must have the copies open, and not
    # what they cover.
    plan = replace(plan, problems=problems, exposed=True)
    return Copies(directory, sorted({file.path for file in chosen} | set(extra)), plan)


def require_all_covered(
    images: Path, copies: Copies, manifest: Manifest, record: RunRecord
) -> None:
    """Refuse copies where the job has a file open for writing under a second name as well, which no
    copy covers.

    Args:
        images: CRIU's images.
        copies, manifest, record: Of the restore.

    Raises:
        RestoreRefused: There is such a name.
    """
    if not copies.directory:
        return
    remapped = {
        number for remap in load_remaps(images) for number in (remap.original, remap.target)
    }
    known = {file.path for file in manifest.files}
    for file in load_files(images):
        writable = (
            file.flags & os.O_ACCMODE != os.O_RDONLY
            and stat.S_ISREG(file.mode)
            and not file.external
        )
        if (
            writable
            and file.id not in remapped
            and file.path not in known
            and not record.is_own(file.path)
        ):
            raise RestoreRefused(
                f"the job has {file.path} open for writing, which is another name of a file that gets a copy: that name would not lead to the copy",
                cure="choose --files restore, truncate or leave",
            )


def _moved(manifest: Manifest, files: list[OpenFile], directory: str) -> Manifest:
    """Return the snapshot as if these files had been in the directory."""
    there = [msgspec.structs.replace(file, path=directory + file.path) for file in files]
    spaces = [
        msgspec.structs.replace(space, key=directory + space.key)
        for space in manifest.spaces
        if space.kind == "file"
    ]
    return msgspec.structs.replace(manifest, files=there, spaces=spaces)


def make_directory(directory: str) -> bool:
    """Make the directory of copies if it is missing, with access for its owner only; return whether
    it was made.

    Raises:
        RestoreRefused: It cannot be made, or others could change what is in it.
    """
    _require_safe(directory)
    try:
        os.makedirs(directory, mode=0o700)
        made = True
    except FileExistsError:
        made = False
    except OSError as error:
        raise RestoreRefused(
            f"cannot make the directory {directory} for copies: {error.strerror}", cure=_ANOTHER
        ) from error
    # In /tmp another user may have made it meanwhile, or a directory on the way to it.
    _require_safe(directory)
    return made


def _require_safe(directory: str) -> None:
    if problems := _problems_of_directory(directory):
        raise RestoreRefused(f"{problems[0].path}: {problems[0].message}", cure=problems[0].cure)


def remove_empty(directory: str) -> None:
    """Remove a directory that was made, unless it has contents."""
    with suppress(OSError):
        os.rmdir(directory)


def _problems_of_directory(directory: str) -> list[Problem]:
    """Return why copies cannot be in a directory: root writes them, and no other user may redirect
    root.
    """
    if os.path.realpath(directory) != directory:
        return [Problem(directory, "its path leads through a symbolic link", _ANOTHER)]
    path = ""
    for name in ["", *directory.split("/")[1:]]:
        path = f"{path.rstrip('/')}/{name}"
        try:
            now = os.lstat(path)
        except FileNotFoundError:
            return []  # it will be made
        except OSError as error:
            return [Problem(path, f"cannot examine it: {error.strerror}", _ANOTHER)]
        if not stat.S_ISDIR(now.st_mode):
            return [Problem(path, "it is not a directory", _ANOTHER)]
        # In a sticky directory users cannot move files of others; the last directory holds the
        # copies.
        moves = now.st_mode & 0o022 and not (now.st_mode & stat.S_ISVTX and path != directory)
        if now.st_uid not in (0, os.geteuid()) or moves:
            return [
                Problem(
                    path,
                    "users other than root can change its contents",
                    f"{_ANOTHER}, in directories that only root may write to",
                )
            ]
    return []


def _problems_of(file: OpenFile, stored: Set[str] | None) -> list[Problem]:
    """Return why a file cannot have a copy. ``stored``: the files whose content is in the snapshot;
    None: the copies exist and need none.
    """
    if file.links:
        return [
            Problem(
                file.path,
                "it lost the name under which it was opened, so it cannot have a copy",
                _IN_PLACE_OR_LEAVE,
            )
        ]
    if stored is not None and (file.policy != "content" or file.path not in stored):
        message = "its content is not in the snapshot, so there is nothing to copy"
        return [
            Problem(
                file.path,
                message,
                "choose --files leave or truncate; a dump with --files content keeps it",
            )
        ]
    folder = os.path.dirname(file.path)
    if os.path.realpath(folder) != folder:
        return [
            Problem(
                file.path,
                "its path leads through a symbolic link, so a copy cannot cover it",
                _IN_PLACE_OR_LEAVE,
            )
        ]
    try:
        now = os.lstat(file.path)
    except OSError as error:
        message = f"a copy must cover a file at this path, and there is none: {error.strerror}"
        return [
            Problem(
                file.path,
                message,
                f"make an empty one: install -D /dev/null {shlex.quote(file.path)}",
            )
        ]
    if not stat.S_ISREG(now.st_mode):
        return [
            Problem(
                file.path,
                "a copy must cover a regular file, and this is none",
                "move it away",
            )
        ]
    return []


def _unchanged(file: OpenFile) -> bool:
    """Return whether the file at its own path has the size and time that were recorded."""
    try:
        now = os.stat(file.path)
    except OSError:
        return False
    return (now.st_size, now.st_mtime_ns) == (file.size, file.mtime_ns)
