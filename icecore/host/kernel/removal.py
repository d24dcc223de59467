"""Removes a directory with all that is below it, through descriptors: no symbolic link or mount
leads out of it, and long paths do not matter.
"""

from __future__ import annotations

import errno
import os

from icecore.host.kernel.filesystem import open_confined

#: Levels of directories that are removed, and times that another process adds one meanwhile.
_MOST_LEVELS = 1 << 16


def remove_tree(directory: int, name: str) -> None:
    """Remove a name in a directory, with all that is below it.

    Args:
        directory: Descriptor of the directory.

    Raises:
        OSError: Something cannot be removed, or is added all the time.
    """
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
                        own = f".icecore-{os.urandom(8).hex()}"
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
