"""With whose rights a job's files are changed: the owner's, or root's where only root can change the
directory.
"""

from __future__ import annotations

import os
import pwd
from collections.abc import Callable
from typing import NamedTuple, TypeVar

from icecore.host.kernel.filesystem import acting_as
from icecore.restorer.files.jobpaths import Directory

Result = TypeVar("Result")


class Owner(NamedTuple):
    """The owner of a file."""

    user: int
    group: int


class Inode(NamedTuple):
    """The identity of a file."""

    device: int
    inode: int


def inode_of(about: os.stat_result) -> Inode:
    """Return which file a stat result describes."""
    return Inode(about.st_dev, about.st_ino)


def as_allowed(directory: Directory, owner: Owner, work: Callable[[], Result]) -> Result:
    """Change names in a directory as the owner; as root if only root can change it.

    Raises:
        PermissionError: The owner may not.
    """
    try:
        with acting_as(*owner, [owner.group]):
            return work()
    except PermissionError as error:
        if directory.root_only:
            return work()
        try:
            with acting_as(*owner, groups_of(owner)):
                return work()
        except PermissionError:
            raise PermissionError(
                error.errno,
                f"user {owner.user}, who owns the file, may not change {directory.path}",
                directory.path,
            ) from error


def groups_of(owner: Owner) -> list[int]:
    """Return all groups of a user that this machine knows."""
    try:
        return os.getgrouplist(pwd.getpwuid(owner.user).pw_name, owner.group)
    except (KeyError, OSError):
        return [owner.group]


def give(descriptor: int, owner: Owner) -> None:
    """Set the owner of a file that was created, where the directory or root's rights made it
    another.
    """
    about = os.fstat(descriptor)
    if (about.st_uid, about.st_gid) != owner:
        os.fchown(descriptor, *owner)
