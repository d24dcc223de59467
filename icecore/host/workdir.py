"""Working directories on tmpfs. A directory belongs to the processes that hold its lock; the user's
next command removes those that nobody holds.

The lock is flock(2) on a file in the directory. All processes that inherit its descriptor share it,
and the kernel releases it when the last of them has ended, however it ends. A new directory has no
lock, so its maker checks it again once it has the lock: a process that found the directory unlocked
may have removed it.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from icecore.events import Event, Sink, discard

#: The lock's name in a working directory.
LOCK = "in-use.log"
_NAME = re.compile(r"icecore-(dump|restore)-[a-z0-9_]{8}")


def make_work_directory(
    prefix: str, parent: str | os.PathLike[str], emit: Sink = discard
) -> tuple[Path, int]:
    """Make a working directory, and remove unused ones beside it.

    Args:
        prefix: What its name begins with: ``icecore-dump-`` or ``icecore-restore-``.
        parent: An existing directory, on tmpfs.
        emit: Gets ``workdir.swept``.

    Returns:
        The directory, and a descriptor that holds its lock; the caller's to close.
    """
    sweep(parent, emit)
    while True:
        made = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            lock = os.open(made / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:  # it was swept as soon as it existed
            continue
        fcntl.flock(lock, fcntl.LOCK_EX)
        if _is_at(lock, made):
            return made, lock
        os.close(lock)


def sweep(parent: str | os.PathLike[str], emit: Sink = discard) -> None:
    """Remove the unused working directories of this user.

    Args:
        emit: Gets ``workdir.swept`` for each.
    """
    for path in _found(Path(parent)):
        with suppress(OSError):  # another sweeper was faster, or it cannot be removed
            if _remove_unused(path):
                emit(Event("workdir.swept", {"directory": str(path)}))


def _found(parent: Path) -> Iterator[Path]:
    """Yield what may be a working directory of this user."""
    try:
        names = os.listdir(parent)
    except OSError:
        return
    for name in sorted(names):
        if not _NAME.fullmatch(name):
            continue
        with suppress(FileNotFoundError):
            about = os.lstat(parent / name)
            if (
                stat.S_ISDIR(about.st_mode)
                and about.st_uid == os.geteuid()
                and not about.st_mode & 0o077
            ):
                yield parent / name


def _remove_unused(path: Path) -> bool:
    """Remove a working directory if no process holds its lock; return whether it was removed."""
    try:
        lock = os.open(path / LOCK, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        os.rmdir(
            path
        )  # its maker, if it lives, makes another; where there is more in it, it is none of ours
        return True
    try:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        if not _is_at(lock, path):
            return False
        for entry in os.listdir(path):
            if entry == LOCK:
                continue
            inner = path / entry
            if inner.is_dir() and not inner.is_symlink():
                shutil.rmtree(inner)
            else:
                inner.unlink()
        os.unlink(
            path / LOCK
        )  # last: if this process dies in between, the next sweep removes the rest
        os.rmdir(path)
        return True
    finally:
        os.close(lock)


def _is_at(lock: int, directory: Path) -> bool:
    """Return whether the lock is still that of the directory."""
    try:
        return os.path.samestat(os.fstat(lock), os.lstat(directory / LOCK))
    except FileNotFoundError:
        return False
