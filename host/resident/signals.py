"""Threads that block the signal with which a process is parked; rule: each gets its own mask back as it goes on, whoever dies meanwhile.

The C library lets nobody block that signal; runtimes that make system calls of their own do, and it does so itself for a moment. From outside, ptrace(2)
changes a thread's mask while it stands still. The signal that is sent just before carries the mask that the thread had, which its handler puts back. All
other signals are blocked until then: the handler must interrupt what the thread was doing, not the handler of another signal, which would return to a mask
of its own. For the same reason there is never a second one: they come in the order in which they were sent, but handlers return in the other.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

_CONT, _DETACH, _SEIZE, _INTERRUPT, _PEEKSIGINFO = 7, 17, 0x4206, 0x4207, 0x4209
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_EVENT_STOP = 128
_WALL = 0x40000000
_TGSIGQUEUEINFO = {"x86_64": 297, "aarch64": 240}
_SI_QUEUE, _PARK_VALUE = -1, 0x69636563  # as threads.c has it
_ALL = (1 << 64) - 1
_STOP_SECONDS = 1.0
_SIGINFO_BYTES, _AT_ONCE = 128, 32

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.syscall.restype = ctypes.c_long


def reach(pid: int, threads: Iterable[int], number: int) -> list[int]:
    """Let signal ``number`` through to threads of process ``pid``, once, and send it; returns those that could not be reached.

    The caller must be allowed to trace the process; a thread that ended meanwhile counts as reached.
    """
    # A thread of ours that ends lets go of all that it traces, also of one that has not stopped yet: that could not be detached from, and would stand for ever.
    with ThreadPoolExecutor(1, "reach") as pool:
        return pool.submit(lambda: [thread for thread in threads if not _reach(pid, thread, number)]).result()


@contextmanager
def standing(thread: int) -> Iterator[bool]:
    """Stop a thread, and let it go on afterwards; gives whether it stands. For the calling thread alone, and `mask_of`, `set_mask` within."""
    if not _ptrace(_SEIZE, thread):
        yield False
        return
    try:
        yield _ptrace(_INTERRUPT, thread) and _wait_stopped(thread)
    finally:
        _ptrace(_DETACH, thread)


def mask_of(thread: int) -> int | None:
    """The signals that a thread that stands blocks, or will again when a call that changed that returns; None: it has ended."""
    mask = ctypes.c_uint64()
    return mask.value if _ptrace(_GETSIGMASK, thread, 8, ctypes.addressof(mask)) else None


def set_mask(thread: int, mask: int) -> bool:
    """Of a thread that stands; False: it has ended."""
    value = ctypes.c_uint64(mask)
    return _ptrace(_SETSIGMASK, thread, 8, ctypes.addressof(value))


def _ptrace(request: int, thread: int, address: int = 0, data: object = None) -> bool:
    return int(_libc.ptrace(request, thread, address, data)) == 0


def _is_pending(thread: int, number: int) -> bool:
    """Whether a signal with a mask waits already: the thread has not come to run since, or is still in the handler of one without."""
    found = ctypes.create_string_buffer(_SIGINFO_BYTES * _AT_ONCE)
    first = 0
    while True:
        which = ctypes.create_string_buffer(struct.pack("QIi", first, 0, _AT_ONCE))
        some = int(_libc.ptrace(_PEEKSIGINFO, thread, ctypes.addressof(which), ctypes.addressof(found)))
        for at in range(max(0, some)):
            if struct.unpack_from("iii", found, at * _SIGINFO_BYTES) == (number, _PARK_VALUE, _SI_QUEUE):
                return True
        if some < _AT_ONCE:
            return False
        first += some


def _reach(pid: int, thread: int, number: int) -> bool:
    with standing(thread) as stands:
        if stands and _is_pending(thread, number):
            return True
        mask = mask_of(thread) if stands else None
        if mask is not None and _send(pid, thread, number, mask) and set_mask(thread, _ALL & ~(1 << (number - 1))):
            return True
    return not os.path.exists(f"/proc/{pid}/task/{thread}")


def _send(pid: int, thread: int, number: int, mask: int) -> bool:
    info = ctypes.create_string_buffer(
        struct.pack("iiiiiiQ", number, _PARK_VALUE, _SI_QUEUE, 0, os.getpid(), os.getuid(), mask), 128
    )
    return int(_libc.syscall(_TGSIGQUEUEINFO[os.uname().machine], pid, thread, number, info)) == 0


def _wait_stopped(thread: int) -> bool:
    until = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < until:
        try:
            found, status = os.waitpid(thread, os.WNOHANG | _WALL)
        except ChildProcessError:
            return False
        if not found:
            time.sleep(0.0005)
        elif not os.WIFSTOPPED(status):
            return False
        elif status >> 16 == _EVENT_STOP:
            return True
        else:  # a signal was just being delivered: it is, and then the thread stops
            _ptrace(_CONT, thread, 0, os.WSTOPSIG(status))
    return False
