"""Open files put back as they were when the snapshot was taken; the rule: a file is replaced as a whole, under its
name, so that whoever still has the old one open keeps it, or it is not touched."""

from __future__ import annotations

import os
import secrets
import shutil
import stat
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import blake3

from icecore.errors import Damaged, RestoreFailed
from icecore.restorer.cells import SpaceCells
from icecore.restorer.filewriter import FileTarget
from icecore.store.manifest import Manifest, OpenFile

FilesMode = Literal["auto", "restore", "truncate", "leave"]
#: Names that CRIU gives to hard links through which it finds unlinked files again; it removes them itself.
_LINK_REMAP = "link_remap."
_HASH_PIECE = 1 << 20


@dataclass(frozen=True)
class Problem:
    """Why a file stands in the way of a restore: what is the matter, and what can be done."""

    path: str
    message: str
    cure: str


@dataclass(frozen=True)
class Action:
    """What happens to one file: ``write`` its content, or cut it to its size (``truncate``).

    Attributes:
        root: What the file's path is relative to: for an instance's copies their directory, else the root of the job's file system.
    """

    kind: Literal["write", "truncate"]
    file: OpenFile
    root: str = ""

    @property
    def path(self) -> str:
        """Where on this machine the file is."""
        return self.root + self.file.path


@dataclass(frozen=True)
class FilePlan:
    """What has to be done to the open files, and what stands in the way."""

    actions: list[Action]
    problems: list[Problem]


def plan_files(
    manifest: Manifest, mode: FilesMode, *, root: str = "", skip: Set[str] = frozenset(), verify: bool = False
) -> FilePlan:
    """Compare the files on this machine with what the snapshot recorded.

    Args:
        manifest: The snapshot's.
        mode: As in `icecore.restorer.options.RestoreOptions`.
        root: What the paths are relative to, for a job with a private root.
        skip: Files that the new instance has of its own, by path.
        verify: Compare the content of read-only files whose hash was recorded.
    """
    actions: list[Action] = []
    problems: list[Problem] = []
    stored = {space.key for space in manifest.spaces if space.kind == "file"}
    for file in manifest.files:
        if file.policy == "absent" or file.path in skip:
            continue
        has_content = file.policy == "content" and file.path in stored
        outcome = _plan_one(file, has_content, "restore" if mode == "auto" else mode, root, verify)
        if isinstance(outcome, Action):
            actions.append(outcome)
        elif outcome is not None:
            problems.append(outcome)
    return FilePlan(actions, problems)


def _plan_one(file: OpenFile, has_content: bool, mode: FilesMode, root: str, verify: bool) -> Action | Problem | None:
    try:
        now = os.stat(root + file.path)
    except FileNotFoundError:
        if has_content and mode == "restore":
            return Action("write", file, root)
        return Problem(file.path, "it is not there", _cure_for_content(file, has_content, mode))
    except OSError as error:
        return Problem(file.path, f"it cannot be looked at: {error.strerror}", "run as a user who may")
    if not stat.S_ISREG(now.st_mode):
        return Problem(file.path, "it is no regular file any more", "move away what is there now")
    if has_content and mode == "restore" and file.writable:
        # Also if size and time are the same: a mapped file changes without its time.
        return Action("write", file, root)
    if now.st_size == file.size and (not file.mtime_ns or now.st_mtime_ns == file.mtime_ns):
        return None
    if has_content and mode == "restore":
        return Action("write", file, root)
    if now.st_size > file.size and file.writable and mode == "truncate":
        return Action("truncate", file, root)
    if now.st_size != file.size:
        message = f"it has {now.st_size} bytes, {file.size} when the snapshot was taken"
        return Problem(file.path, message, _cure_for_content(file, has_content, mode))
    if file.writable or mode == "leave":
        return None  # the same size is all that CRIU asks for
    if verify and file.digest and content_digest(root + file.path) == file.digest:
        return None
    message = "it was modified since the snapshot was taken (same size, other time)"
    return Problem(file.path, message, "bring the old file back, or take the risk with --files leave")


def _cure_for_content(file: OpenFile, has_content: bool, mode: FilesMode) -> str:
    if has_content and mode != "restore":
        return "use --files restore"
    if file.writable and mode != "truncate":
        return "bring the file back to its size, or use --files truncate if it only grew"
    return "bring the file back; a dump with --with-files keeps its content in the snapshot"


def content_digest(path: str) -> str:
    """BLAKE3 of a file's content in hexadecimal, as manifests record it."""
    state = blake3.blake3()
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_HASH_PIECE):
            state.update(piece)
    return state.hexdigest()


class PutBack:
    """Carries out a file plan: `targets` are written by a fetcher under temporary names beside the files, then
    `commit` puts them in place. Nothing has changed before `commit`; `abandon` removes the temporary files.

    Args:
        actions: From `plan_files`.
        cells: Gives the cells of a file's space, by path.
    """

    def __init__(self, actions: Sequence[Action], cells: Callable[[str], SpaceCells]) -> None:
        self._truncate = [action for action in actions if action.kind == "truncate"]
        self._write: list[tuple[Action, str]] = []
        self._made: list[str] = []
        self._placed_links: list[str] = []
        self.targets: list[FileTarget] = []
        for action in actions:
            if action.kind != "write":
                continue
            file = action.file
            if "\0" in file.path or not file.path.startswith("/"):
                raise Damaged("manifest", "of the snapshot", f"it has an open file named {file.path!r}")
            folder, name = os.path.split(action.path)
            temporary = os.path.join(folder, f".{name[:200]}.icecore-{secrets.token_hex(6)}")
            self._write.append((action, temporary))
            self.targets.append(FileTarget(temporary, file.size, cells(file.path), mode=0o600))

    def prepare(self) -> None:
        """Make the folders that are missing; to be called before the targets are created."""
        for action, _ in self._write:
            folder = os.path.dirname(action.path)
            try:
                os.makedirs(folder, exist_ok=True)
            except OSError as error:
                raise RestoreFailed(f"cannot make {folder} for {action.file.path}: {error.strerror}") from error

    def commit(self) -> None:
        """Give the written files their owner, mode, times and name; cut those that only grew."""
        for action, temporary in self._write:
            file, path = action.file, action.path
            try:
                os.chown(temporary, file.user, file.group)
                os.chmod(temporary, file.mode)
                os.utime(temporary, ns=(file.mtime_ns, file.mtime_ns))
                other = self._same_inode(action)
                if other:
                    _write_in_place(temporary, other, file)
                    os.link(other, path)
                    os.unlink(temporary)
                else:
                    os.replace(temporary, path)
            except OSError as error:
                raise RestoreFailed(f"cannot put {file.path} back: {error.strerror}") from error
            if os.path.basename(path).startswith(_LINK_REMAP):
                self._placed_links.append(path)
        for action in self._truncate:
            file = action.file
            try:
                os.truncate(action.path, file.size)
            except OSError as error:
                raise RestoreFailed(f"cannot cut {file.path} to {file.size} bytes: {error.strerror}") from error

    @staticmethod
    def _same_inode(action: Action) -> str:
        """Another name under which the very file is still there: its names must go on meaning one file."""
        file = action.file
        for name in file.links:
            try:
                now = os.stat(action.root + name)
            except OSError:
                continue
            if (now.st_ino, now.st_dev) == (file.inode, file.device):
                return action.root + name
        return ""

    def abandon(self) -> None:
        """The restore failed: remove what is temporary, and links that only CRIU would have removed."""
        for path in [*(temporary for _, temporary in self._write), *self._placed_links]:
            with suppress(OSError):
                os.unlink(path)


def _write_in_place(source: str, target: str, file: OpenFile) -> None:
    """Give ``target`` the content of ``source``, without making another file of it."""
    with open(source, "rb") as content, open(target, "r+b") as out:
        shutil.copyfileobj(content, out, _HASH_PIECE)
        out.truncate()
    os.utime(target, ns=(file.mtime_ns, file.mtime_ns))
