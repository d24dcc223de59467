"""File system calls that Python lacks: resolution without symbolic links, exchange of two names,
and access checks as another user.

The rule: a name is resolved below a directory descriptor, and a thread acts as another user only
within `acting_as`.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from icecore.host.kernel import libc

#: openat2(2): no symbolic link in any component, no jump through /proc/PID/fd and the like, and the
#: start directory is the root.
RESOLVE_NO_MAGICLINKS = 0x02
RESOLVE_NO_SYMLINKS = 0x04
RESOLVE_IN_ROOT = 0x10
_CONFINED = RESOLVE_NO_MAGICLINKS | RESOLVE_NO_SYMLINKS | RESOLVE_IN_ROOT
#: Also: no other mount, bind mounts included.
RESOLVE_NO_XDEV = 0x01
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

_OPENAT2 = 437  # the same on every architecture
_SETGROUPS = {"x86_64": 116, "aarch64": 159}
#: A rename beside the lookup makes the kernel ask for another try; it ends this only where somebody
#: renames all the time.
_TRIES = 100
_NO_CHANGE = 0xFFFFFFFF

#: statx(2): what is asked for, and where the answer lies in struct statx.
_AT_FDCWD, _AT_SYMLINK_NOFOLLOW, _STATX_BTIME = -100, 0x100, 0x800
_STATX_BYTES = 256
_BIRTH = struct.Struct("=I76xqI")

#: statfs(2): overlayfs.
_OVERLAY = 0x794C7630
#: ioctl(2) that returns the blocks of a range of a file, and a request for the first byte, with no
#: room for an answer.
_FIEMAP = 0xC020660B
_FIRST_BYTE = struct.pack("=QQIIII", 0, 1, 0, 0, 0, 0)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.renameat2.argtypes = [
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_int,
    ctypes.c_char_p,
    ctypes.c_uint,
]
_libc.renameat2.restype = ctypes.c_int
for _name in ("setfsuid", "setfsgid"):
    getattr(_libc, _name).argtypes = [ctypes.c_uint32]
    getattr(_libc, _name).restype = ctypes.c_int


class _OpenHow(ctypes.Structure):
    """``struct open_how`` of openat2(2)."""

    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def open_confined(directory: int, path: str, flags: int, *, cross: bool = True) -> int:
    """Open ``path`` below a directory, without following any symbolic link (openat2(2)); the
    descriptor is close-on-exec.

    With ``O_PATH | O_NOFOLLOW`` a symbolic link as the last component is opened itself.

    Args:
        cross: Whether it may lie on another mount than the directory.

    Raises:
        OSError: ELOOP: a component is a symbolic link. EXDEV: it lies on another mount. Others as
            open(2).
    """
    how = _OpenHow(flags | os.O_CLOEXEC, 0, _CONFINED | (0 if cross else RESOLVE_NO_XDEV))
    name = os.fsencode(path)
    for _ in range(_TRIES):
        descriptor: int = libc.syscall(
            _OPENAT2, directory, ctypes.c_char_p(name), ctypes.byref(how), ctypes.sizeof(how)
        )
        if descriptor >= 0:
            return descriptor
        if ctypes.get_errno() not in (errno.EAGAIN, errno.EINTR):
            break
    number = ctypes.get_errno()
    raise OSError(number, os.strerror(number), path)


def rename(directory: int, old: str, new: str, flags: int = 0) -> None:
    """Rename within one directory, with the flags of renameat2(2).

    Raises:
        OSError: EINVAL: the file system does not support the flag. Others as rename(2).
    """
    if _libc.renameat2(directory, os.fsencode(old), directory, os.fsencode(new), flags):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), old, None, new)


def may_be_in_memory(path: str) -> bool:
    """Return whether a file lies in memory, also below an overlay, or whether that is unknown.

    An overlay hides where a file lies, and the paths of its layers are those of another mount
    namespace. But it forwards a request for a file's blocks, which file systems in memory do not
    support.

    Raises:
        OSError: There is no such file, or it cannot be read.
    """
    if libc.file_system(path) != _OVERLAY:
        return libc.in_memory(path)
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        fcntl.ioctl(descriptor, _FIEMAP, _FIRST_BYTE)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def birth_ns(path: str) -> int:
    """Return when a file was made (statx(2)), ns since the epoch; a link is not followed.

    Raises:
        OSError: There is no such file, or its file system does not record that time (EOPNOTSUPP).
    """
    about = ctypes.create_string_buffer(_STATX_BYTES)
    if _libc.statx(_AT_FDCWD, os.fsencode(path), _AT_SYMLINK_NOFOLLOW, _STATX_BTIME, about):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), path)
    known, seconds, rest = _BIRTH.unpack_from(about)
    if not known & _STATX_BTIME:
        raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP), path)
    return int(seconds) * 1_000_000_000 + int(rest)


@contextmanager
def acting_as(user: int, group: int, groups: Sequence[int]) -> Iterator[None]:
    """Access files as another user while the block runs, in this thread only (setfsuid(2)).

    Call it in a thread that no Python signal handler interrupts: any but the main one. Processes
    without root's rights act as themselves.

    Args:
        groups: Supplementary groups.
    """
    if os.geteuid() != 0:
        yield
        return
    before = os.getgroups()
    try:
        _set_groups(groups)
        _libc.setfsgid(group)
        _libc.setfsuid(
            user
        )  # also gives up CAP_DAC_OVERRIDE, CAP_CHOWN and their like, until it is root again
        if (_libc.setfsuid(_NO_CHANGE) & _NO_CHANGE, _libc.setfsgid(_NO_CHANGE) & _NO_CHANGE) != (
            user,
            group,
        ):
            raise PermissionError(
                errno.EPERM, f"this process may not access files as user {user}, group {group}"
            )
        yield
    finally:
        _libc.setfsuid(os.geteuid())
        _libc.setfsgid(os.getegid())
        _set_groups(before)


def _set_groups(groups: Sequence[int]) -> None:
    """Set the groups of this thread; the C library's setgroups would set them for all threads."""
    machine = os.uname().machine
    number = _SETGROUPS.get(machine)
    if number is None:
        raise OSError(errno.ENOSYS, f"the number of setgroups(2) is unknown on {machine}")
    array = (ctypes.c_uint32 * len(groups))(*groups)
    if libc.syscall(number, len(groups), array):
        raise libc.last_error("setgroups")
