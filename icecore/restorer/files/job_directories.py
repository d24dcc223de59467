"""Directories of a job: made, given their owner, and removed; only `JobFiles` calls this."""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping

import msgspec

from icecore.host.kernel.filesystem import acting_as
from icecore.host.kernel.listing import attributes_of
from icecore.host.kernel.removal import remove_tree as remove_all
from icecore.restorer.files.job_inodes import replace_attributes
from icecore.restorer.files.jobpaths import JobPaths, PathRefused, Place
from icecore.restorer.files.rights import Inode, Owner, as_allowed, give, groups_of, inode_of


class MadeDirectory(msgspec.Struct, frozen=True):
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


def settle_directory(
    made: MadeDirectory,
    owner: Owner,
    mode: int,
    mtime_ns: int | None,
    attributes: Mapping[bytes, bytes] | None,
    before: Collection[bytes],
) -> None:
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
            if attributes is not None:
                os.fchmod(descriptor, mode | 0o700)  # without it, nobody may set attributes
                replace_attributes(descriptor, attributes, before)
            os.fchmod(descriptor, mode)
            if mtime_ns is not None:
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
    finally:
        os.close(descriptor)


def attributes(place: Place, known: Inode) -> dict[bytes, bytes]:
    """Do what `JobFiles.attributes` says."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(place.name, flags, dir_fd=place.directory.descriptor)
    try:
        if inode_of(os.fstat(descriptor)) != known:
            raise PathRefused(f"{place.name} was replaced", cure="restore again")
        return attributes_of(descriptor, privileged=True)
    finally:
        os.close(descriptor)


def hand_directory(
    made: MadeDirectory,
    owner: Owner,
    mode: int,
    mtime_ns: int,
    attributes: Mapping[bytes, bytes],
) -> None:
    """Do what `JobFiles.hand_directory` says."""
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    descriptor = os.open(made.place.name, flags, dir_fd=made.place.directory.descriptor)
    try:
        if inode_of(os.fstat(descriptor)) != made.inode:
            raise PathRefused(f"{made.place.name} was replaced during the export")
        give(descriptor, owner)
        replace_attributes(descriptor, attributes)
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
        remove_all(place.directory.descriptor, place.name)
    return True
