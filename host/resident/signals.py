"""Threads that block the signal with which a process is parked; rule: each gets its own mask back (the signal's handler does that) as it goes on.

In-process there is no way to reach such a thread: sending the signal would even make a ``sigwait`` of the application's return it. From outside,
ptrace(2) can change its mask while it stands still.
"""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Iterable

_SEIZE, _INTERRUPT, _DETACH, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 17, 0x420A, 0x420B
_WALL = 0x40000000
_TGKILL = {"x86_64": 234, "aarch64": 131}
_STOP_SECONDS = 1.0

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long
_libc.syscall.restype = ctypes.c_long


def reach(pid: int, threads: Iterable[int], number: int) -> list[int]:
    """Let signal ``number`` through to threads of process ``pid``, and send it; returns those that could not be reached.

    The caller must be allowed to trace the process; a thread that ended meanwhile counts as reached.
    """
    return [thread for thread in threads if not _reach(pid, thread, number)]


def _ptrace(request: int, thread: int, address: int = 0, data: object = None) -> bool:
    return int(_libc.ptrace(request, thread, address, data)) == 0


def _reach(pid: int, thread: int, number: int) -> bool:
    if not _ptrace(_SEIZE, thread):
        return not os.path.exists(f"/proc/{pid}/task/{thread}")
    try:
        if not _ptrace(_INTERRUPT, thread) or not _wait_stopped(thread):
            return False
        mask = ctypes.c_uint64()
        if not _ptrace(_GETSIGMASK, thread, 8, ctypes.addressof(mask)):
            return False
        mask.value &= ~(1 << (number - 1))
        if not _ptrace(_SETSIGMASK, thread, 8, ctypes.addressof(mask)):
            return False
        return int(_libc.syscall(_TGKILL[os.uname().machine], pid, thread, number)) == 0
    finally:
        _ptrace(_DETACH, thread)


def _wait_stopped(thread: int) -> bool:
    until = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < until:
        try:
            found, status = os.waitpid(thread, os.WNOHANG | _WALL)
        except ChildProcessError:
            return False
        if found:
            return os.WIFSTOPPED(status)
        time.sleep(0.0005)
    return False
