"""Directories of a job: made, given their owner, and removed; only `JobFiles` calls this."""

from __future__ import annotations

import errno
import os
import secrets
from dataclasses import dataclass

from icecore.host.kernel.filesystem import acting_as, open_confined
from icecore.restorer.files.jobpaths import JobPaths, PathRefused, Place
from icecore.restorer.files.rights import Inode, Owner, as_allowed, give, groups_of, inode_of

#: Levels of directories that are removed, and times that another process adds one meanwhile.
_MOST_LEVELS = 1 << 16


@dataclass(frozen=True)
class MadeDirectory:
    """A directory that was made: its name, in what, and which one it is."""

    place: Place
    inode: Inode


def make_directories(paths: JobPaths, path: str, owner: Owner, mode: int) -> list[MadeDirectory]:
    """Do what `JobFiles.make_directories` says."""
    try:
        paths.directory(path)
        return []
    except FileNotFoundError:
        parent, name = os.path.split(path)
        made = make_directories(paths, parent, owner, mode)
    place = Place(paths.directory(parent), name)
    descriptor = place.directory.descriptor
    try:
        as_allowed(place.directory, owner, lambda: os.mkdir(name, mode, dir_fd=descriptor))
    except FileExistsError:
        try:
            paths.directory(path)  # made meanwhile
        except FileNotFoundError:
            raise PathRefused(
                f"{path} is a symbolic link that leads nowhere",
                cure="remove it, or make the directory that it names",
            ) from None
        return made
    if place.directory.root_only:
        os.chown(
            name, *owner, dir_fd=descriptor, follow_symlinks=False
        )  # no other user can have replaced it there
    found = paths.directory(path)
    about = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
    if inode_of(about) != (found.device, found.inode) or about.st_uid != owner.user:
        raise PathRefused(
            f"another user replaced the directory {path} during its creation",
            cure="keep others from writing to its parent directory",
        )
    return [*made, MadeDirectory(place, inode_of(about))]


def settle_directory(made: MadeDirectory, owner: Owner, mode: int, mtime_ns: int | None) -> None:
    """Do what `JobFiles.settle_directory` says."""
    # The owner need not have access to the directory above. Nothing else is opened than a
    # directory, and it is not read.
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(made.place.name, flags, dir_fd=made.place.directory.descriptor)
    try:
        about = os.fstat(descriptor)
        if inode_of(about) != made.inode or about.st_uid != owner.user:
            path = os.path.join(made.place.directory.path, made.place.name)
            raise PathRefused(
                f"another user replaced the directory {path} during the restore",
                cure="keep others from writing to its parent directory",
            )
        give(descriptor, owner)
        with acting_as(*owner, [owner.group]):
            os.fchmod(descriptor, mode)
            if mtime_ns is not None:
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(descriptor)


def hand_directory(made: MadeDirectory, owner: Owner, mode: int, mtime_ns: int) -> None:
    """Do what `JobFiles.hand_directory` says."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(made.place.name, flags, dir_fd=made.place.directory.descriptor)
    try:
        if inode_of(os.fstat(descriptor)) != made.inode:
            raise PathRefused(f"{made.place.name} was replaced during the export")
        give(descriptor, owner)
        os.fchmod(descriptor, mode)
        os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(descriptor)


def remove_directory(made: MadeDirectory, owner: Owner) -> bool:
    """Do what `JobFiles.rmdir` says."""
    about = made.place.stat()
    if about is None or inode_of(about) != made.inode:
        return False
    try:
        as_allowed(
            made.place.directory,
            owner,
            lambda: os.rmdir(made.place.name, dir_fd=made.place.directory.descriptor),
        )
    except OSError:
        return False
    return True


def remove_tree(place: Place, known: Inode, owner: Owner) -> bool:
    """Do what `JobFiles.remove_tree` says."""
    about = place.stat()
    if about is None or inode_of(about) != known:
        return False
    groups = groups_of(owner) if owner.user else []
    with acting_as(*owner, groups):
        _remove(place.directory.descriptor, place.name)
    return True


def _remove(directory: int, name: str) -> None:
    """Remove a name in a directory, with all that is below it."""
    if _is_removed(directory, name):
        return
    inner = _open_directory(directory, name)
    try:
        _empty(inner)
    finally:
        os.close(inner)
    os.rmdir(name, dir_fd=directory)


def _empty(top: int) -> None:
    """Remove what is in a directory, however deep it is: each directory in it hands what it holds
    up to it first.

    Raises:
        OSError: Something cannot be removed, or is added all the time.
    """
    for _ in range(_MOST_LEVELS):
        names = os.listdir(top)
        for name in names:
            if _is_removed(top, name):
                continue
            inner = _open_directory(top, name)
            try:
                for below in os.listdir(inner):
                    if not _is_removed(inner, below):
                        own = f".icecore-{secrets.token_hex(8)}"
                        os.rename(below, own, src_dir_fd=inner, dst_dir_fd=top)
            finally:
                os.close(inner)
            os.rmdir(name, dir_fd=top)
        if not names:
            return
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _is_removed(directory: int, name: str) -> bool:
    """Remove a file or an empty directory; False: it is a directory that holds something."""
    try:
        os.unlink(name, dir_fd=directory)
        return True
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    try:
        os.rmdir(name, dir_fd=directory)
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _open_directory(directory: int, name: str) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    return open_confined(directory, name, flags, cross=False)
