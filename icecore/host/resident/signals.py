"""Threads that block the signal that parks a process. Each gets its own signal mask back as it
continues, whoever dies meanwhile.

The C library lets nobody block that signal; runtimes that make system calls of their own do, and it
does so itself for a moment. From outside, ptrace(2) changes a thread's mask while it stands still.
The signal that is sent just before carries the mask that the thread had, which its handler puts
back. All other signals are blocked until then: the handler must interrupt what the thread was
doing, not the handler of another signal, which would return to a mask of its own. For the same
reason there is never a second one: they come in the order in which they were sent, but handlers
return in the other.
"""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterable

from icecore.host.kernel import libc, ptrace

_TGSIGQUEUEINFO = {"x86_64": 297, "aarch64": 240}
_SI_QUEUE, _PARK_VALUE = -1, 0x69636563  # as threads.c has it
_ALL = (1 << 64) - 1
_AT_ONCE = 32
_STOP_SECONDS = 1.0


def reach(pid: int, threads: Iterable[int], number: int) -> list[int]:
    """Let signal ``number`` through to threads of process ``pid``, once, and send it; returns those
    that could not be reached.

    The caller must be allowed to trace the process; a thread that ended meanwhile counts as
    reached.
    """
    return ptrace.apart(lambda: [thread for thread in threads if not _reach(pid, thread, number)])


def _is_pending(thread: int, number: int) -> bool:
    """Whether a signal with a mask waits already: the thread has not come to run since, or is still
    in the handler of one without.
    """
    first = 0
    while True:
        some = ptrace.signals_pending(thread, first, _AT_ONCE)
        if any(struct.unpack_from("iii", one) == (number, _PARK_VALUE, _SI_QUEUE) for one in some):
            return True
        if len(some) < _AT_ONCE:
            return False
        first += len(some)


def _reach(pid: int, thread: int, number: int) -> bool:
    with ptrace.standing(thread, _STOP_SECONDS) as stands:
        if stands and _is_pending(thread, number):
            return True
        mask = ptrace.mask_of(thread) if stands else None
        if (
            mask is not None
            and _send(pid, thread, number, mask)
            and ptrace.set_mask(thread, _ALL & ~(1 << (number - 1)))
        ):
            return True
    return not os.path.exists(f"/proc/{pid}/task/{thread}")


def _send(pid: int, thread: int, number: int, mask: int) -> bool:
    info = ctypes.create_string_buffer(
        struct.pack("iiiiiiQ", number, _PARK_VALUE, _SI_QUEUE, 0, os.getpid(), os.getuid(), mask),
        128,
    )
    return int(libc.syscall(_TGSIGQUEUEINFO[os.uname().machine], pid, thread, number, info)) == 0
