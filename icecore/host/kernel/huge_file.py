"""Files in memory, on huge pages where some are free, in a tmpfs that is mounted nowhere. A file is
gone with its last descriptor and mapping.
"""

from __future__ import annotations

import ctypes
import errno
import os

from icecore.host.kernel import libc

_FSOPEN, _FSCONFIG, _FSMOUNT = 430, 431, 432
_CLOEXEC = 1
_SET_STRING, _CREATE = 1, 6


def create(size: int) -> int:
    """Create a file of ``size`` bytes, none of which takes memory before it is written.

    Its pages are of 2 MiB where such are free (tmpfs(5), ``huge=always``), whatever the machine's
    policy for other shared memory.

    Returns:
        A descriptor for reading and writing; the caller's to close.

    Raises:
        OSError: A tmpfs cannot be made (that needs CAP_SYS_ADMIN).
    """
    context = _call("fsopen", _FSOPEN, ctypes.c_char_p(b"tmpfs"), _CLOEXEC)
    try:
        # No limit: what bounds other memory bounds this.
        _set(context, b"size", b"0")
        try:
            _set(context, b"huge", b"always")
        except OSError as error:
            if error.errno != errno.EINVAL:  # a kernel without huge pages
                raise
        _call("fsconfig", _FSCONFIG, context, _CREATE, None, None, 0)
        mount = _call("fsmount", _FSMOUNT, context, _CLOEXEC, 0)
    finally:
        os.close(context)
    try:
        file = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=mount)
    finally:
        os.close(mount)
    try:
        os.ftruncate(file, size)
    except BaseException:
        os.close(file)
        raise
    return file


def _set(context: int, option: bytes, value: bytes) -> None:
    """Set an option of a file system that is being made."""
    words = (ctypes.c_char_p(option), ctypes.c_char_p(value))
    _call("fsconfig", _FSCONFIG, context, _SET_STRING, *words, 0)


def _call(name: str, number: int, *arguments: object) -> int:
    result = libc.syscall(number, *arguments)
    if result < 0:
        raise libc.last_error(name)
    return int(result)
