"""Reaches files below a directory part by part, without following links: whatever is planted there,
nothing outside is read, written or removed.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

_WALK = os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
#: Without O_NONBLOCK the open of a FIFO waits for a writer.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_KINDS = {
    stat.S_IFLNK: "a symbolic link",
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFBLK: "a block device",
    stat.S_IFCHR: "a character device",
    stat.S_IFDIR: "a directory",
}


class NotRegular(OSError):
    """Something other than a regular file has the name; ``strerror`` says what."""


class Found(NamedTuple):
    """The contents of a directory: regular files (name and bytes), real directories, and everything
    else (name and kind).
    """

    files: list[tuple[str, int]]
    folders: list[str]
    others: list[tuple[str, str]]


def kind_of(mode: int) -> str:
    """Return the kind of file for ``st_mode``, in words."""
    return _KINDS.get(stat.S_IFMT(mode), "a regular file")


@contextmanager
def opened(root: Path, folders: Sequence[str]) -> Iterator[int]:
    """Open a directory below ``root`` (whose own path may contain links) for the duration of the
    context.

    Yields:
        A descriptor for ``dir_fd``; it cannot be read from.

    Raises:
        FileNotFoundError: It does not exist.
        NotADirectoryError: A part of its path is a link, or not a directory.
    """
    at = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for folder in folders:
            below = os.open(folder, _WALK, dir_fd=at)
            os.close(at)
            at = below
        yield at
    finally:
        os.close(at)


def open_regular(root: Path, name: str) -> int:
    """Open the regular file ``name`` (parts between slashes) below ``root`` for reading, without
    blocking.

    Raises:
        FileNotFoundError, NotADirectoryError: It does not exist.
        NotRegular: Something else has its name.
    """
    *folders, last = name.split("/")
    with opened(root, folders) as at:
        try:
            descriptor = os.open(last, _READ, dir_fd=at)
        except OSError:
            require_regular(os.stat(last, dir_fd=at, follow_symlinks=False).st_mode)
            raise
    try:
        require_regular(os.fstat(descriptor).st_mode)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def size_of(root: Path, name: str) -> int:
    """Return the bytes of the regular file ``name`` below ``root``; raise as :func:`open_regular`
    does.
    """
    *folders, last = name.split("/")
    with opened(root, folders) as at:
        found = os.stat(last, dir_fd=at, follow_symlinks=False)
    require_regular(found.st_mode)
    return found.st_size


def require_regular(mode: int) -> None:
    """Raise `NotRegular` unless ``st_mode`` is that of a regular file; FileNotFoundError for a
    directory, which may hold objects with longer names.
    """
    if stat.S_ISDIR(mode):
        raise FileNotFoundError(2, kind_of(mode))
    if not stat.S_ISREG(mode):
        raise NotRegular(0, f"{kind_of(mode)} is in its place")


def scan(root: Path, folders: Sequence[str]) -> Found:
    """List a directory below ``root``, except names that begin with a dot.

    Raises:
        FileNotFoundError, NotADirectoryError: It does not exist.
    """
    found = Found([], [], [])
    with opened(root, folders) as at:
        descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
        try:
            with os.scandir(descriptor) as entries:
                for entry in entries:
                    if entry.name.startswith("."):
                        continue
                    try:
                        if entry.is_file(follow_symlinks=False):
                            found.files.append(
                                (entry.name, entry.stat(follow_symlinks=False).st_size)
                            )
                        elif entry.is_dir(follow_symlinks=False):
                            found.folders.append(entry.name)
                        else:
                            found.others.append(
                                (entry.name, kind_of(entry.stat(follow_symlinks=False).st_mode))
                            )
                    except FileNotFoundError:
                        continue  # deleted during the listing
        finally:
            os.close(descriptor)
    return found
