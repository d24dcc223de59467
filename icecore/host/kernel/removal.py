"""Removes a directory with all that is below it, through descriptors: no symbolic link or mount
leads out of it, and long paths do not matter.
"""

from __future__ import annotations

import errno
import math
import os
import time
from contextlib import suppress

from icecore.host.kernel.filesystem import open_confined

#: Levels of directories that are removed, and times that another process adds one meanwhile.
_MOST_LEVELS = 1 << 16


def remove_tree(
    directory: int, name: str, *, seize: bool = False, seconds: float = math.inf
) -> None:
    """Remove a name in a directory, with all that is below it. Others may remove it, too.

    Args:
        directory: Descriptor of the directory.
        seize: Take each directory from its owner before its content is removed, so that no other
            user adds anything to it.
        seconds: How long to go on with directories that are deeper than those before. What is left
            then can be removed by another call.

    Raises:
        OSError: Something cannot be removed, or is added all the time. ETIMEDOUT: ``seconds`` are
            over.
    """
    if _is_removed(directory, name):
        return
    with suppress(FileNotFoundError):
        inner = _open_directory(directory, name, seize)
        try:
            _empty(inner, seize, time.monotonic() + seconds)
        finally:
            os.close(inner)
        os.rmdir(name, dir_fd=directory)


def _empty(top: int, seize: bool, until: float) -> None:
    """Remove what is in a directory, however deep it is: each directory in it hands what it holds
    up to it first.
    """
    for _ in range(_MOST_LEVELS):
        names = os.listdir(top)
        for name in names:
            if not _is_removed(top, name):
                _hand_up(top, name, seize)
        if not names:
            return
        if time.monotonic() > until:
            raise OSError(errno.ETIMEDOUT, os.strerror(errno.ETIMEDOUT))
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP))


def _hand_up(top: int, name: str, seize: bool) -> None:
    """Move what a directory holds to the one above it, and remove the directory. One to which
    something is added meanwhile stays for the next round.
    """
    try:
        inner = _open_directory(top, name, seize)
    except FileNotFoundError:
        return
    try:
        for below in os.listdir(inner):
            if not _is_removed(inner, below):
                own = f".icecore-{os.urandom(8).hex()}"
                with suppress(FileNotFoundError):
                    os.rename(below, own, src_dir_fd=inner, dst_dir_fd=top)
    finally:
        os.close(inner)
    _is_removed(top, name)


def _is_removed(directory: int, name: str) -> bool:
    """Remove a file or an empty directory; False: it is a directory that holds something."""
    try:
        os.unlink(name, dir_fd=directory)
        return True
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.EISDIR, errno.EPERM):
            raise
    try:
        os.rmdir(name, dir_fd=directory)
    except FileNotFoundError:
        return True
    except OSError as error:
        if error.errno not in (errno.ENOTEMPTY, errno.EEXIST):
            raise
        return False
    return True


def _open_directory(directory: int, name: str, seize: bool) -> int:
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW
    descriptor = open_confined(directory, name, flags, cross=False)
    if seize:
        try:
            os.fchown(descriptor, os.geteuid(), os.getegid())
            os.fchmod(descriptor, 0o700)
        except BaseException:
            os.close(descriptor)
            raise
    return descriptor
