"""Resolves the path of a job's file to a directory descriptor and a name. A symbolic link is
followed only where root alone could make it.

The kernel shows paths of open files resolved, so on the machine of the snapshot no component is a
link. On another machine the administrator may have made one (/var/run, a /home on another disk).
Such a link is followed if it belongs to root and every directory on the way to it belongs to root
and is not writable by others: no other user can make, move or replace it. Any other link is
refused, because its maker chooses where root writes.
"""

from __future__ import annotations

import errno
import os
import stat
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import TracebackType
from typing import Self

import msgspec

from icecore.errors import Damaged, RestoreFailed
from icecore.host.kernel.filesystem import open_confined

#: Errors of file systems without an operation.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)
_MOST_LINKS = 40
#: Directories of one job that are open together. A restore may change files in many more.
_MOST_OPEN = 128


class PathRefused(RestoreFailed):
    """A path leads through something that another user controls."""


@dataclass(frozen=True)
class Directory:
    """A directory that was resolved and checked; what is done in it goes through its descriptor.

    Attributes:
        path: As requested, below the root.
        device, inode: Which directory it is.
        root_only: Only root can make, rename and remove names in it.
        opened: Returns the descriptor.
    """

    path: str
    device: int
    inode: int
    root_only: bool
    opened: Callable[[Directory], int] = field(repr=False, compare=False)

    @property
    def descriptor(self) -> int:
        """Return a descriptor, open with O_PATH, which the `JobPaths` owns and may close once it
        opens others: use it at once. One call at a time may use a `JobPaths`.

        Raises:
            PathRefused: The directory was closed meanwhile, and its path leads elsewhere now.
            OSError: As open(2).
        """
        return self.opened(self)


class Place(msgspec.Struct, frozen=True):
    """A name in a directory; there may be nothing there."""

    directory: Directory
    name: str

    def stat(self) -> os.stat_result | None:
        """Return the stat result of the name, without following a link; None: it does not exist."""
        try:
            return os.stat(self.name, dir_fd=self.directory.descriptor, follow_symlinks=False)
        except FileNotFoundError:
            return None


def root_only(about: os.stat_result) -> bool:
    """Return whether only root (or this process's user) can change the names in a directory."""
    return about.st_uid in (0, os.geteuid()) and not about.st_mode & (stat.S_IWGRP | stat.S_IWOTH)


def components(path: str) -> list[str]:
    """Return the components of a recorded path.

    Raises:
        Damaged: The kernel never shows such a path for an open file.
    """
    parts = path.split("/")[1:]
    if not path.startswith("/") or "\0" in path or any(part in ("", ".", "..") for part in parts):
        raise Damaged("manifest", "of the snapshot", f"it has an open file named {path!r}")
    return parts


class _Level(msgspec.Struct):
    descriptor: int
    #: Whether root alone controls this directory and every one on the way to it.
    trusted: bool


class JobPaths(msgspec.Struct):
    """Resolves the paths of one job; a context manager that closes the directories.

    Args:
        root: Directory that is the root of the job's file system. Empty: this process's.
    """

    root: str = ""
    _directories: dict[str, Directory] = msgspec.field(default_factory=dict)
    #: Open descriptors by directory, the most recently used last.
    _open: OrderedDict[Directory, int] = msgspec.field(default_factory=OrderedDict)
    #: Directories that were reached through a link in the last component: always open.
    _linked: dict[Directory, int] = msgspec.field(default_factory=dict)
    _guarded: dict[str, bool] = msgspec.field(default_factory=dict)
    _root: int = -1

    def __post_init__(self) -> None:
        self._root = os.open(self.root or "/", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)

    def forget(self) -> None:
        """Close the directories; those that were handed out are void."""
        for descriptor in (*self._open.values(), *self._linked.values()):
            os.close(descriptor)
        for known in (self._directories, self._open, self._linked):
            known.clear()

    def close(self) -> None:
        """Close all descriptors; directories that were handed out are void."""
        self.forget()
        if self._root >= 0:
            os.close(self._root)
            self._root = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def directory(self, path: str) -> Directory:
        """Return the directory at ``path``, an absolute path below the root.

        Raises:
            PathRefused: A component is a symbolic link that users other than root could make.
            OSError: FileNotFoundError, NotADirectoryError, or as open(2).
        """
        known = self._directories.get(path)
        if known is not None:
            return known
        return self._keep(path, self._resolved(path))

    def _resolved(self, path: str) -> int:
        try:
            return open_confined(self._root, path.lstrip("/") or ".", os.O_PATH | os.O_DIRECTORY)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            descriptor, name = self._walk(path, last_is_directory=True)
            assert not name
            return descriptor

    def guarded(self, folder: str) -> bool:
        """Return whether only root can change a directory's names, and where its path leads."""
        known = self._guarded.get(folder)
        if known is None:
            try:
                about = os.stat(self.root + folder, follow_symlinks=False)
            except OSError:
                return False
            above = folder == "/" or self.guarded(os.path.dirname(folder))
            known = self._guarded[folder] = (
                above and stat.S_ISDIR(about.st_mode) and root_only(about)
            )
        return known

    def locate(self, path: str) -> Place:
        """Return where the file at ``path`` lies; a trusted link as the last component is followed.

        Raises:
            Damaged: No such path can be recorded.
            PathRefused, OSError: As `directory`.
        """
        components(path)
        folder, name = os.path.split(path)
        place = Place(self.directory(folder), name)
        about = place.stat()
        if about is None or not stat.S_ISLNK(about.st_mode):
            return place
        descriptor, name = self._walk(path, last_is_directory=False)
        return Place(self._keep(f"{path}\0", descriptor, folder), name)

    def _keep(self, key: str, descriptor: int, path: str | None = None) -> Directory:
        about = os.fstat(descriptor)
        directory = Directory(
            key if path is None else path,
            about.st_dev,
            about.st_ino,
            root_only(about),
            self._descriptor_of,
        )
        self._directories[key] = directory
        if path is None:
            self._remember(directory, descriptor)
        elif directory in self._linked:
            os.close(descriptor)
        else:
            self._linked[directory] = descriptor
        return directory

    def _remember(self, directory: Directory, descriptor: int) -> None:
        self._open[directory] = descriptor
        while len(self._open) > _MOST_OPEN:
            os.close(self._open.popitem(last=False)[1])

    def _descriptor_of(self, directory: Directory) -> int:
        """Return an open descriptor of a directory; open it again if it was closed since."""
        linked = self._linked.get(directory)
        if linked is not None:
            return linked
        if directory in self._open:
            self._open.move_to_end(directory)
            return self._open[directory]
        descriptor = self._resolved(directory.path)
        about = os.fstat(descriptor)
        if (about.st_dev, about.st_ino) != (directory.device, directory.inode):
            os.close(descriptor)
            raise PathRefused(
                f"the directory {directory.path} was replaced meanwhile",
                cure="keep others from writing to its parent directory",
            )
        self._remember(directory, descriptor)
        return descriptor

    def _walk(self, path: str, *, last_is_directory: bool) -> tuple[int, str]:
        """Resolve one component after the other, following trusted links.

        Returns:
            The last directory's descriptor, and the name in it (empty with ``last_is_directory``).
        """
        pending = deque(part for part in path.split("/") if part)
        levels = [_Level(os.dup(self._root), root_only(os.fstat(self._root)))]
        links = 0
        seen: list[str] = []
        try:
            while pending:
                part = pending.popleft()
                if part in ("", "."):
                    continue
                if part == "..":  # only in the target of a trusted link
                    if len(levels) > 1:
                        os.close(levels.pop().descriptor)
                    continue
                seen.append(part)
                here = levels[-1]
                try:
                    found = open_confined(here.descriptor, part, os.O_PATH | os.O_NOFOLLOW)
                except FileNotFoundError:
                    if pending or last_is_directory:
                        raise
                    return levels.pop().descriptor, part
                about = os.fstat(found)
                if stat.S_ISLNK(about.st_mode):
                    try:
                        links += 1
                        target = self._target(path, part, found, about, here, links)
                    finally:
                        os.close(found)
                    if target.startswith("/"):
                        while len(levels) > 1:
                            os.close(levels.pop().descriptor)
                    pending.extendleft(reversed(target.split("/")))
                elif stat.S_ISDIR(about.st_mode) and (pending or last_is_directory):
                    levels.append(_Level(found, here.trusted and root_only(about)))
                else:
                    os.close(found)
                    if pending or last_is_directory:
                        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), path)
                    return levels.pop().descriptor, part
            return levels.pop().descriptor, ""
        finally:
            for level in levels:
                os.close(level.descriptor)

    @staticmethod
    def _target(
        path: str, part: str, link: int, about: os.stat_result, here: _Level, links: int
    ) -> str:
        """Return where a link leads, if root alone could make it."""
        if links > _MOST_LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        if not here.trusted or about.st_uid not in (0, os.geteuid()):
            raise PathRefused(
                f"{path} leads through the symbolic link {part!r}, which users other than root can create or replace",
                cure=f"replace the link {part!r} with the directory or file itself, or have root make it in a directory that only root may write to",
            )
        return os.readlink("", dir_fd=link)
