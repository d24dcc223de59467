"""userfaultfd(2): fill another process's missing pages and learn how its address space changes. A
placement never blocks and stops once the map has changed.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import fcntl
import os
import platform

import msgspec

from icecore.host.kernel import libc
from icecore.sizes import PAGE

API = 0xAA
FEATURE_EVENT_FORK = 1 << 1
FEATURE_EVENT_REMAP = 1 << 2
FEATURE_EVENT_REMOVE = 1 << 3
FEATURE_EVENT_UNMAP = 1 << 6
#: Everything that a daemon needs to keep its picture of the address space true.
EVENT_FEATURES = (
    FEATURE_EVENT_FORK | FEATURE_EVENT_REMAP | FEATURE_EVENT_REMOVE | FEATURE_EVENT_UNMAP
)

REGISTER_MISSING = 1 << 0
#: Of a file in memory: also who touches a page that the file has and the process has not yet is
#: reported (Linux 5.14).
REGISTER_MINOR = 1 << 2

_IOC_API = 0xC018AA3F
_IOC_REGISTER = 0xC020AA00
_IOC_UNREGISTER = 0x8010AA01
_IOC_WAKE = 0x8010AA02
_IOC_COPY = 0xC028AA03
_IOC_ZERO = 0xC020AA04
_IOC_NEW = 0xAA00
_SYSCALL = {"x86_64": 323, "aarch64": 282}


class _ApiArgument(ctypes.Structure):
    _fields_ = [
        ("api", ctypes.c_uint64),
        ("features", ctypes.c_uint64),
        ("ioctls", ctypes.c_uint64),
    ]


class _RangeArgument(ctypes.Structure):
    _fields_ = [("start", ctypes.c_uint64), ("length", ctypes.c_uint64)]


class _RegisterArgument(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("ioctls", ctypes.c_uint64),
    ]


class _CopyArgument(ctypes.Structure):
    _fields_ = [
        ("destination", ctypes.c_uint64),
        ("source", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("done", ctypes.c_int64),
    ]


class _ZeroArgument(ctypes.Structure):
    _fields_ = [
        ("start", ctypes.c_uint64),
        ("length", ctypes.c_uint64),
        ("mode", ctypes.c_uint64),
        ("done", ctypes.c_int64),
    ]


class Fault(msgspec.Struct, frozen=True):
    """A thread waits for the page at ``address`` (page-aligned). ``thread`` is its id where
    FEATURE_THREAD_ID was asked for, else 0.
    """

    address: int
    flags: int
    thread: int


class Fork(msgspec.Struct, frozen=True):
    """The process forked: ``descriptor`` is the child's own userfaultfd (owned by whoever read the
    event), with the parent's registrations.
    """

    descriptor: int


class Remap(msgspec.Struct, frozen=True):
    """``length`` bytes moved from ``source`` to ``target``: what was missing at the one is now
    missing at the other.

    An `Unmap` of the source follows (unless MREMAP_DONTUNMAP), which must find nothing left there
    to drop. If the memory shrinks as well, an `Unmap` of what is cut off precedes it, and before
    Linux 6.15 ``length`` is the old one.
    """

    source: int
    target: int
    length: int


class Remove(msgspec.Struct, frozen=True):
    """The process discarded ``start`` to ``end`` (madvise DONTNEED, REMOVE): still registered, and
    zero from now on.
    """

    start: int
    end: int


class Unmap(msgspec.Struct, frozen=True):
    """The process unmapped ``start`` to ``end``."""

    start: int
    end: int


Event = Fault | Fork | Remap | Remove | Unmap


class Stop(enum.Enum):
    """Why a placement ended."""

    #: All of the range was gone through.
    DONE = "done"
    #: The address space is changing (EAGAIN): read the pending events, look the address up again,
    #: go on after ``advanced``.
    CHANGED = "changed"
    #: The process is gone (ESRCH).
    DEAD = "dead"


class Placed(msgspec.Struct, frozen=True):
    """What a placement did.

    ``advanced`` bytes of the range were settled: ``filled`` now, ``present`` before (a fault was
    served first), ``unmapped`` are no longer registered there.
    """

    stop: Stop
    advanced: int
    filled: int
    present: int
    unmapped: int


def create(*, features: int = EVENT_FEATURES, nonblocking: bool = True) -> int:
    """Create a userfaultfd for this process and agree on its interface: through the system call,
    else /dev/userfaultfd.

    Args:
        features: FEATURE_ bits that must be there.
        nonblocking: Whether reads return at once when nothing happened.

    Raises:
        OSError: No permission (CAP_SYS_PTRACE, or access to /dev/userfaultfd), or the kernel lacks
            a feature.
    """
    flags = os.O_CLOEXEC | (os.O_NONBLOCK if nonblocking else 0)
    uffd = libc.syscall(_SYSCALL[platform.machine()], flags)
    if uffd < 0 and ctypes.get_errno() == errno.EPERM:
        device = os.open("/dev/userfaultfd", os.O_RDWR | os.O_CLOEXEC)
        try:
            uffd = fcntl.ioctl(device, _IOC_NEW, flags)
        finally:
            os.close(device)
    if uffd < 0:
        raise libc.last_error("userfaultfd")
    argument = _ApiArgument(API, features, 0)
    if libc.ioctl(uffd, _IOC_API, ctypes.addressof(argument)):
        error = libc.last_error(f"UFFDIO_API with features {features:#x}")
        os.close(uffd)
        raise error
    return int(uffd)


def register(uffd: int, start: int, length: int, mode: int = REGISTER_MISSING) -> None:
    """Have faults of ``length`` bytes from ``start`` (both page-aligned) reported, not filled with
    zeros.
    """
    argument = _RegisterArgument(start, length, mode, 0)
    if libc.ioctl(uffd, _IOC_REGISTER, ctypes.addressof(argument)):
        raise libc.last_error(f"UFFDIO_REGISTER at {start:#x}")


def unregister(uffd: int, start: int, length: int) -> None:
    """Return faults of the range to the kernel; waiting threads are woken and find zeros."""
    argument = _RangeArgument(start, length)
    if libc.ioctl(uffd, _IOC_UNREGISTER, ctypes.addressof(argument)):
        raise libc.last_error(f"UFFDIO_UNREGISTER at {start:#x}")


def wake(uffd: int, start: int, length: int) -> None:
    """Wake the threads that wait for a page of the range; each faults again if the page is still
    missing.
    """
    argument = _RangeArgument(start, length)
    if libc.ioctl(uffd, _IOC_WAKE, ctypes.addressof(argument)):
        raise libc.last_error(f"UFFDIO_WAKE at {start:#x}")


def copy(uffd: int, destination: int, source: int, length: int, mode: int = 0) -> tuple[int, int]:
    """Make one UFFDIO_COPY: ``length`` bytes (whole pages) of this process's memory at ``source``
    become the pages at ``destination``.

    Returns:
        Bytes done, and the errno (0 when all was done). EAGAIN with bytes done says only that
        something stopped it there: ask again from there.
    """
    argument = _CopyArgument(destination, source, length, mode, 0)
    if libc.ioctl(uffd, _IOC_COPY, ctypes.addressof(argument)) == 0:
        return length, 0
    return max(argument.done, 0), ctypes.get_errno()


def zero(uffd: int, start: int, length: int, mode: int = 0) -> tuple[int, int]:
    """Make one UFFDIO_ZEROPAGE: the missing pages become zero pages. Returns as `copy` does."""
    argument = _ZeroArgument(start, length, mode, 0)
    if libc.ioctl(uffd, _IOC_ZERO, ctypes.addressof(argument)) == 0:
        return length, 0
    return max(argument.done, 0), ctypes.get_errno()


def place(uffd: int, destination: int, source: int, length: int) -> Placed:
    """Fill ``length`` bytes at ``destination`` from this process's memory at ``source``, skipping
    pages that exist or are unmapped.

    Must run while nobody reads events of this descriptor (the read lock of its map): only then may
    it go on after a partial copy.

    Args:
        uffd: The userfaultfd of the process to fill.
        destination: Page-aligned address there.
        source: Address here.
        length: Bytes, whole pages.

    Raises:
        OSError: Anything but a page that exists (EEXIST), a range that is changing (EAGAIN),
            unmapped (ENOENT), or a dead process (ESRCH).
    """
    return _settle(uffd, destination, source, length)


def place_zero(uffd: int, start: int, length: int) -> Placed:
    """Fill with zero pages, as `place` does."""
    return _settle(uffd, start, None, length)


def _settle(uffd: int, destination: int, source: int | None, length: int) -> Placed:
    advanced = filled = present = unmapped = 0
    step = length
    while advanced < length:
        size = min(step, length - advanced)
        if source is None:
            done, error = zero(uffd, destination + advanced, size)
        else:
            done, error = copy(uffd, destination + advanced, source + advanced, size)
        advanced += done
        filled += done
        if error == 0:
            step *= 2
        elif error == errno.EAGAIN:
            if done == 0:
                return Placed(Stop.CHANGED, advanced, filled, present, unmapped)
        elif error == errno.EEXIST:
            advanced += PAGE
            present += PAGE
        elif error == errno.ENOENT:
            # Either nothing is registered here any more, or the range now spans two VMAs (the
            # process may mprotect a part of it, of which no event tells): narrow down until it fits
            # into one, or a single page is known to be gone.
            if size == PAGE:
                advanced += PAGE
                unmapped += PAGE
            else:
                step = max(PAGE, size // 2 // PAGE * PAGE)
        elif error == errno.ESRCH:
            return Placed(Stop.DEAD, advanced, filled, present, unmapped)
        else:
            raise OSError(
                error, f"placing {size} bytes at {destination + advanced:#x}: {os.strerror(error)}"
            )
    return Placed(Stop.DONE, length, filled, present, unmapped)
