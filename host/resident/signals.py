"""Threads that block the signal with which a process is parked; rule: each gets its own mask back (the signal's handler does that) as it goes on.

The C library lets nobody block that signal; runtimes that make system calls of their own do. From outside, ptrace(2) changes a thread's mask while it
stands still.
"""

from __future__ import annotations

import ctypes
import os
import struct
import time
from collections.abc import Iterable
from pathlib import Path

_SEIZE, _INTERRUPT, _DETACH, _GETSIGMASK, _SETSIGMASK = 0x4206, 0x4207, 17, 0x420A, 0x420B
_WALL = 0x40000000
_TGSIGQUEUEINFO = {"x86_64": 297, "aarch64": 240}
_SI_QUEUE, _PARK_VALUE = -1, 0x69636563  # as threads.c has it
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
        return _pending(pid, thread, number) or _send(pid, thread, number)
    finally:
        _ptrace(_DETACH, thread)


def _pending(pid: int, thread: int, number: int) -> bool:
    """Whether it was sent already: one signal too many would wait, blocked, for ever."""
    text = Path(f"/proc/{pid}/task/{thread}/status").read_text()
    return bool(int(text.partition("\nSigPnd:\t")[2].split()[0], 16) >> (number - 1) & 1)


def _send(pid: int, thread: int, number: int) -> bool:
    info = ctypes.create_string_buffer(
        struct.pack("iiiiiiQ", number, 0, _SI_QUEUE, 0, os.getpid(), os.getuid(), _PARK_VALUE), 128
    )
    return int(_libc.syscall(_TGSIGQUEUEINFO[os.uname().machine], pid, thread, number, info)) == 0


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
