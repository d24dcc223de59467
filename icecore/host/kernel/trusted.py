"""Connect to sockets that a job names. No data is sent before the owner is known, and symbolic
links are not followed.

A process may have forged its environment, and the contents of the directory that it names there. So
a directory is opened below the root of the process that named it, without links; a socket is opened
before it is connected to, so that both are the same; and the kernel identifies the process that
listens there (SO_PEERCRED).
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import socket
import stat
import struct
from pathlib import Path

from icecore.host.kernel import libc

_OPENAT2 = 437  # the same on every architecture
_NO_MAGICLINKS, _NO_SYMLINKS, _IN_ROOT = 0x02, 0x04, 0x10
_HOW = struct.Struct("QQQ")  # struct open_how
_TRIES = 100
_KEEPER = "icecore-keeper"
_GIVEN = "trusted.icecore.user"  # xattr(7): only CAP_SYS_ADMIN can set or see it
_CREDENTIALS = struct.Struct("3i")  # struct ucred
_NAMED = re.compile(r"(/proc/\d+/root)(/.*)")
_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH


def open_directory(path: Path) -> int:
    """Open a directory (O_PATH); one that is named by way of a process, ``/proc/PID/root/…``, below
    that root and without following links.

    Raises:
        OSError: There is none; ELOOP: a link is on the way.
    """
    named = _NAMED.fullmatch(str(path))
    if named is None:
        return os.open(path, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    root = os.open(named[1], os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _open_below(root, named[2], os.O_PATH | os.O_DIRECTORY, _NO_SYMLINKS)
    finally:
        os.close(root)


def open_file(pid: int, path: str) -> int:
    """Open the regular file at this path below a process's root for reading.

    Raises:
        OSError: There is none.
    """
    root = os.open(f"/proc/{pid}/root", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        descriptor = _open_below(root, path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY)
    finally:
        os.close(root)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "no regular file", path)
    return descriptor


def give(directory: int, user: int) -> None:
    """Give a directory to a user, as one in which root serves that user: see `require_private`.

    Raises:
        OSError: The file system keeps no extended attributes, or this process may not set them.
    """
    os.setxattr(directory, _GIVEN, str(user).encode())
    os.fchmod(directory, 0o700)
    os.fchown(directory, user, -1)


def _was_given(directory: int, user: int) -> bool:
    """Return whether root gave a directory to its owner: no other user can set the attribute."""
    try:
        return os.getxattr(f"/proc/self/fd/{directory}", _GIVEN) == str(user).encode()
    except OSError:
        return False


def require_private(directory: int, path: Path) -> None:
    """Require that a directory is root's, this user's own, or was given to its owner by root
    (`give`), and that nobody else can write to it.

    Raises:
        PermissionError: It is not.
    """
    about = os.fstat(directory)
    own = about.st_uid in (0, os.geteuid()) or _was_given(directory, about.st_uid)
    if not own or about.st_mode & _OTHERS_WRITE:
        raise PermissionError(errno.EPERM, "others could have put there what they like", str(path))


def connect(connection: socket.socket, path: Path, *, pid: int | None) -> None:
    """Connect to a unix socket, and require that it has the expected owner.

    Args:
        path: Where it is.
        pid: The process that must be listening there, as this machine sees it; None: a process of
            root's or of this user's, in a directory of theirs; or a keeper of root's, in a
            directory that root gave to another user.

    Raises:
        PermissionError: Another process listens there, or another user could have put the socket
            there.
        OSError: As connect(2).
    """
    directory = open_directory(path.parent)
    try:
        owner = os.fstat(directory).st_uid
        if pid is None:
            require_private(directory, path.parent)
        found = os.open(path.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
    finally:
        os.close(directory)
    try:
        if not stat.S_ISSOCK(os.fstat(found).st_mode):
            raise PermissionError(errno.EPERM, "no socket", str(path))
        connection.connect(f"/proc/self/fd/{found}")
    finally:
        os.close(found)
    listener, user, _ = _CREDENTIALS.unpack(
        connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    )
    if pid is not None and listener != pid:
        raise PermissionError(
            errno.EPERM, f"process {listener} listens there, not process {pid}", str(path)
        )
    if pid is None and user not in (0, os.geteuid()):
        raise PermissionError(errno.EPERM, f"a process of user {user} listens there", str(path))
    if pid is None and owner not in (0, os.geteuid()) and not _is_keeper(listener):
        raise PermissionError(errno.EPERM, f"process {listener} is no keeper", str(path))


def _is_keeper(pid: int) -> bool:
    """Return whether a process of root's is a keeper: in the directory of another user, a link may
    lead to any server of root's.
    """
    try:
        program = os.readlink(f"/proc/{pid}/exe").removesuffix(" (deleted)")
    except OSError:
        return False
    return os.path.basename(program) == _KEEPER


def _open_below(root: int, path: str, flags: int, resolve: int = 0) -> int:
    how = ctypes.create_string_buffer(
        _HOW.pack(flags | os.O_CLOEXEC, 0, _NO_MAGICLINKS | _IN_ROOT | resolve)
    )
    name = os.fsencode(path)
    for _ in range(_TRIES):
        descriptor = int(
            libc.syscall(_OPENAT2, root, ctypes.c_char_p(name), how, ctypes.c_size_t(_HOW.size))
        )
        if descriptor >= 0:
            return descriptor
        if ctypes.get_errno() not in (
            errno.EAGAIN,
            errno.EINTR,
        ):  # a rename meanwhile makes the kernel ask for another try
            break
    raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()), path)
