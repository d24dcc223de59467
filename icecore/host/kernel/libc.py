"""System calls that Python does not offer, typed for ctypes. Every call releases the GIL and leaves
its errno in ``ctypes.get_errno``.
"""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Mapping

_libc = ctypes.CDLL(None, use_errno=True)

_libc.process_vm_readv.argtypes = [
    ctypes.c_int,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_void_p,
    ctypes.c_ulong,
    ctypes.c_ulong,
]
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_writev.argtypes = _libc.process_vm_readv.argtypes
_libc.process_vm_writev.restype = ctypes.c_ssize_t
_libc.ioctl.argtypes = [ctypes.c_int, ctypes.c_ulong, ctypes.c_void_p]
_libc.ioctl.restype = ctypes.c_int
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.madvise.restype = ctypes.c_int
_libc.mmap.argtypes = [
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_long,
]
_libc.mmap.restype = ctypes.c_ssize_t
_libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_libc.munmap.restype = ctypes.c_int
_libc.syscall.restype = ctypes.c_long
_libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
_libc.fallocate.restype = ctypes.c_int
_libc.statfs.argtypes = [ctypes.c_char_p, ctypes.c_void_p]
_libc.statfs.restype = ctypes.c_int

#: statfs(2): file systems without a disk: tmpfs, hugetlbfs, ramfs.
TMPFS, HUGETLBFS = 0x01021994, 0x958458F6
_IN_MEMORY = (TMPFS, 0x858458F6, HUGETLBFS)
#: statfs(2): POSIX message queues (mq_overview(7)).
MQUEUE = 0x19800202

_M_ARENA_MAX, _M_MMAP_THRESHOLD = -8, -3  # malloc.h
_TUNABLES = "GLIBC_TUNABLES"  # read by the loader
_TUNABLES_BEFORE = "ICECORE_TUNABLES_BEFORE"
_KEEP_SIZE, _PUNCH_HOLE = 1, 2  # FALLOC_FL_KEEP_SIZE, FALLOC_FL_PUNCH_HOLE

#: ``process_vm_readv(pid, local iovecs, count, remote iovecs, count, 0)`` with addresses as
#: integers; bytes read, or -1.
process_vm_readv = _libc.process_vm_readv
#: The same in the other direction.
process_vm_writev = _libc.process_vm_writev
#: ``ioctl(fd, request, address of the argument)``; -1 on error.
ioctl = _libc.ioctl
#: ``syscall(number, …)`` for calls that the C library has no name for; -1 on error.
syscall = _libc.syscall


def keep_few_arenas() -> None:
    """Limit the C library to two arenas. By default, glibc makes up to eight per core, and each keeps
    its peak. Call this before threads start. Do nothing without glibc, or if MALLOC_ARENA_MAX is
    set.
    """
    option = getattr(_libc, "mallopt", None)
    if option is not None and "MALLOC_ARENA_MAX" not in os.environ:
        option(_M_ARENA_MAX, 2)


def map_pieces_from(size: int) -> None:
    """Have the C library map each piece of memory of at least ``size`` bytes for which its heap has
    no room on its own, so that it is returned to the system once it is free. Do nothing without
    glibc, or if MALLOC_MMAP_THRESHOLD_ is set.

    By default, glibc enlarges its heap for pieces of up to 32 MiB once it has seen such pieces, and
    between pieces that live for long, those that live for a moment leave gaps.
    """
    option = getattr(_libc, "mallopt", None)
    if option is not None and "MALLOC_MMAP_THRESHOLD_" not in os.environ:
        option(_M_MMAP_THRESHOLD, size)


def without_thread_caches(environment: Mapping[str, str]) -> dict[str, str]:
    """Return an environment in which a new program's threads keep no freed memory of their own.

    By default, glibc keeps up to seven freed pieces of each of 64 sizes for each thread, 0.23 MiB
    in all, and a process with many threads grows for hours until all of these caches are full. The
    new program calls `restore_environment` before it starts others.
    """
    before = environment.get(_TUNABLES, "")
    both = ":".join(filter(None, (before, "glibc.malloc.tcache_count=0")))
    return {**environment, _TUNABLES: both, _TUNABLES_BEFORE: before}


def restore_environment() -> bool:
    """Undo in this process's environment what `without_thread_caches` has changed; return whether it
    had.
    """
    before = os.environ.pop(_TUNABLES_BEFORE, None)
    if before is None:
        return False
    if before:
        os.environ[_TUNABLES] = before
    else:
        os.environ.pop(_TUNABLES, None)
    return True


def return_free_memory() -> None:
    """Return the C library's free memory to the system. Do nothing without glibc."""
    trim = getattr(_libc, "malloc_trim", None)
    if trim is not None:
        trim(ctypes.c_size_t(0))


def last_error(what: str) -> OSError:
    """Return the OSError of the call that just failed on this thread."""
    number = ctypes.get_errno()
    return OSError(number, f"{what}: {os.strerror(number)}")


def reserve(descriptor: int, offset: int, length: int) -> None:
    """Reserve space of a file for later writes, beyond its end, too; the file's size stays.

    Raises:
        OSError: There is no space, or the file system cannot reserve any.
    """
    if _libc.fallocate(descriptor, _KEEP_SIZE, offset, length):
        raise last_error("fallocate")


def punch(descriptor: int, offset: int, length: int) -> None:
    """Make a hole in a file that is open for writing: the range reads as zeros and its whole
    blocks are freed; the file's size stays (fallocate(2)).

    Raises:
        OSError: EOPNOTSUPP: the file system does not support it. Others as fallocate(2).
    """
    while _libc.fallocate(descriptor, _PUNCH_HOLE | _KEEP_SIZE, offset, length):
        if ctypes.get_errno() != errno.EINTR:
            raise last_error("fallocate")


def in_memory(path: str) -> bool:
    """Return whether a file lies in memory: on tmpfs, ramfs or hugetlbfs.

    Raises:
        OSError: There is no such file.
    """
    return file_system(path) in _IN_MEMORY


def file_system(path: str) -> int:
    """Return the type of the file system on which a file lies (statfs(2)).

    Raises:
        OSError: There is no such file.
    """
    about = (ctypes.c_long * 32)()  # struct statfs, which begins with its type; larger than any
    if _libc.statfs(os.fsencode(path), ctypes.addressof(about)):
        raise last_error(f"statfs({path})")
    return about[0]


def mmap(length: int, protection: int, flags: int, descriptor: int) -> int:
    """Map the first ``length`` bytes of a file and return their address (mmap(2)).

    Raises:
        OSError: The file cannot be mapped.
    """
    address = int(_libc.mmap(None, length, protection, flags, descriptor, 0))
    if address == -1:
        raise last_error(f"mmap of {length} bytes")
    return address


def munmap(address: int, length: int) -> None:
    """Unmap ``length`` bytes at ``address`` (munmap(2)).

    Raises:
        OSError: The kernel refuses the range.
    """
    if _libc.munmap(address, length):
        raise last_error(f"munmap at {address:#x}")


def madvise(address: int, length: int, advice: int) -> None:
    """Advise the kernel about ``length`` bytes of this process's memory at ``address``
    (madvise(2)).

    Raises:
        OSError: The kernel does not know the advice, or the range is not mapped.
    """
    if _libc.madvise(address, length, advice):
        raise last_error(f"madvise({advice}) at {address:#x}")
