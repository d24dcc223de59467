"""Files of a job: created, given their owner, opened and removed, each checked to be the intended
inode; only `JobFiles` calls this.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Mapping
from contextlib import suppress

from icecore.host.kernel.filesystem import acting_as
from icecore.restorer.files.jobpaths import UNSUPPORTED, PathRefused, Place
from icecore.restorer.files.rights import (
    Inode,
    Owner,
    as_allowed,
    give,
    inode_of,
)
from icecore.store.format.manifest import OpenFile

#: Beginnings of names of extended attributes that the owner of a file can set.
_OF_USERS = (b"user.", b"system.posix_acl_")
#: Set-ID bits are never put back: the owner could write to the file before it got them.
_MODES = 0o1777


def create(place: Place, owner: Owner) -> int:
    """Do what `JobFiles.create` says."""
    flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    directory = place.directory
    descriptor = as_allowed(
        directory, owner, lambda: os.open(place.name, flags, 0o600, dir_fd=directory.descriptor)
    )
    try:
        give(descriptor, owner)
    except BaseException:
        os.close(descriptor)
        unlink(place, None, owner)
        raise
    return descriptor


def settle(descriptor: int, file: OpenFile, attributes: Mapping[bytes, bytes] | None) -> bool:
    """Do what `JobFiles.settle` says."""
    owner = Owner(file.user, file.group)
    give(descriptor, owner)  # first, because chown(2) removes capabilities

    def rest() -> None:
        if attributes is not None:
            replace_attributes(descriptor, attributes)
        os.fchmod(descriptor, file.mode & _MODES)
        os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))

    try:
        with acting_as(*owner, [owner.group]):
            rest()
    except (
        PermissionError
    ):  # it is the very file that was created: as root nothing else can be meant
        rest()
    return bool(file.mode & ~_MODES)


def create_fifo(place: Place, owner: Owner) -> int:
    """Do what `JobFiles.create_fifo` says."""
    directory = place.directory
    as_allowed(
        directory,
        owner,
        lambda: os.mkfifo(place.name, 0o600, dir_fd=directory.descriptor),
    )
    try:
        if directory.root_only:
            # No other user can have replaced it there.
            os.chown(place.name, *owner, dir_fd=directory.descriptor, follow_symlinks=False)
        found = os.open(
            place.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.descriptor
        )
    except BaseException:
        unlink(place, None, owner)
        raise
    about = os.fstat(found)
    if not stat.S_ISFIFO(about.st_mode) or about.st_uid != owner.user or about.st_nlink != 1:
        os.close(found)
        raise PathRefused(
            f"another user replaced a FIFO in {directory.path} during its creation",
            cure="keep others from writing to that directory",
        )
    return found


def settle_fifo(descriptor: int, owner: Owner, mode: int, mtime_ns: int | None) -> None:
    """Do what `JobFiles.settle_fifo` says."""
    # The descriptor's own link names this inode and no other.
    name = f"/proc/self/fd/{descriptor}"
    about = os.fstat(descriptor)
    if (about.st_uid, about.st_gid) != owner:
        os.chown(name, *owner)
    with acting_as(*owner, [owner.group]):
        with suppress(OSError):  # it inherited no access control list, or the file system has none
            os.removexattr(name, b"system.posix_acl_access")
        os.chmod(name, mode)
        if mtime_ns is not None:
            os.utime(name, ns=(mtime_ns, mtime_ns))


def create_symlink(place: Place, owner: Owner, target: bytes, mtime_ns: int) -> int:
    """Do what `JobFiles.create_symlink` says."""
    directory = place.directory
    name, folder = os.fsencode(place.name), directory.descriptor
    as_allowed(directory, owner, lambda: os.symlink(target, name, dir_fd=folder))
    try:
        if directory.root_only:
            # No other user can have replaced it there.
            os.chown(name, *owner, dir_fd=folder, follow_symlinks=False)
        with acting_as(*owner, [owner.group]):
            os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=folder, follow_symlinks=False)
        found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    except BaseException:
        unlink(place, None, owner)
        raise
    about = os.fstat(found)
    if not stat.S_ISLNK(about.st_mode) or about.st_uid != owner.user:
        os.close(found)
        raise PathRefused(
            f"another user replaced a link in {directory.path} during its creation",
            cure="keep others from writing to that directory",
        )
    return found


def replace_attributes(
    descriptor: int, wanted: Mapping[bytes, bytes], before: Collection[bytes] = ()
) -> None:
    """Set the extended attributes of a file or directory, and remove others that owners can set: a
    new file inherits an access control list from its directory.

    Args:
        before: Names of further attributes to remove if they are not wanted.
    """
    try:
        there = [os.fsencode(name) for name in os.listxattr(descriptor)]
    except OSError as error:
        if wanted or error.errno not in UNSUPPORTED:
            raise
        return
    for name in there:
        if name not in wanted and (name.startswith(_OF_USERS) or name in before):
            os.removexattr(descriptor, name)
    for name, value in wanted.items():
        os.setxattr(descriptor, name, value)


def open_path(place: Place, known: Inode) -> int:
    """Do what `JobFiles.open_path` says."""
    found = os.open(
        place.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.directory.descriptor
    )
    if inode_of(os.fstat(found)) != known:
        os.close(found)
        path = os.path.join(place.directory.path, place.name)
        raise PathRefused(f"{path} is no longer the same file", cure="restore again")
    return found


def open_inode(place: Place, known: Inode, owner: int, flags: int) -> int:
    """Do what `JobFiles.open_inode` says."""
    found = open_path(place, known)
    try:
        about = os.fstat(found)
        path = os.path.join(place.directory.path, place.name)
        if not stat.S_ISREG(about.st_mode):
            raise PathRefused(f"{path} is not a regular file", cure="move it away")
        if about.st_uid != owner:
            raise PathRefused(
                f"{path} belongs to user {about.st_uid}, not to user {owner}",
                cure="give the file back to its owner, or move it away",
            )
        # The descriptor's own link names this inode and no other.
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC)
    finally:
        os.close(found)


def unlink(place: Place, known: Inode | None, owner: Owner) -> bool:
    """Do what `JobFiles.unlink` says."""
    about = place.stat()
    if (
        about is None
        or stat.S_ISDIR(about.st_mode)
        or (known is not None and inode_of(about) != known)
    ):
        return False
    try:
        # A user who replaces the name now only gets a name in the user's own directory removed.
        as_allowed(
            place.directory,
            owner,
            lambda: os.unlink(place.name, dir_fd=place.directory.descriptor),
        )
    except FileNotFoundError:
        return False
    return True
