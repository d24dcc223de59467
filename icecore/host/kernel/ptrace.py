"""Stop threads of other processes with ptrace(2). A tracer is a thread, so all calls for a tracee
happen in one short-lived thread (`apart`).

A thread of ours that ends lets go of all that it traces, also of one that has not stopped yet: that
could not be detached from, and would stand for ever.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

T = TypeVar("T")

#: Requests.
CONT, SYSCALL = 7, 24
PEEKSIGINFO = 0x4209
_DETACH, _GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 17, 0x4204, 0x4205, 0x4206, 0x4207
_GETSIGMASK, _SETSIGMASK = 0x420A, 0x420B
_SETOPTIONS = 0x4200
_OPTION_SYSGOOD, _OPTION_SUSPEND_SECCOMP = 1, 1 << 21
_EVENT_STOP, _SYSGOOD = 128, 0x80
_WALL = 0x40000000
_NT_PRSTATUS = 1
_GET_SYSCALL_INFO = 0x420E
#: struct ptrace_syscall_info: which, and from its 24th byte on number and arguments, or the result.
_CALL = struct.Struct("<B23x7Q")
_ENTRY, _EXIT = 1, 2
_REGISTERS_BYTES = 1024
_SPIN_SECONDS, _POLL_SECONDS = 0.001, 0.0005

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
_libc.ptrace.restype = ctypes.c_long


class Stop(NamedTuple):
    """Why a thread is stopped: the signal about to be delivered (``event`` 0), or the one with
    which a stop is reported.
    """

    signal: int
    event: int

    @property
    def trap(self) -> bool:
        """It was interrupted, or its process is stopped by a signal: in the kernel's handling of
        signals, from where interrupted calls are restarted.
        """
        return self.event == _EVENT_STOP

    @property
    def at_call(self) -> bool:
        """At the beginning or end of a system call."""
        return self.signal == signal.SIGTRAP | _SYSGOOD


class _Vector(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def apart(work: Callable[[], T]) -> T:
    """Run ``work`` in a thread of its own and return its result."""
    with ThreadPoolExecutor(1, "tracer") as pool:
        return pool.submit(work).result()


@contextmanager
def standing(thread: int, seconds: float) -> Iterator[int]:
    """Stop a thread for the duration of the block. Only the calling thread may use it and the
    functions below.

    Yields:
        SIGTRAP, or with which signal its whole process is stopped anyway; 0: it does not stand,
        because it has ended, has another tracer, or takes longer.
    """
    if not request(_SEIZE, thread, 0, _OPTION_SYSGOOD):
        yield 0
        return
    try:
        yield _stopped(thread, seconds) if interrupt(thread) else 0
    finally:
        request(_DETACH, thread)


@contextmanager
def unfiltered(thread: int) -> Iterator[None]:
    """Suspend the seccomp filters of a thread that stands, for the duration of the block: they may
    kill it for a call that this process has it make.

    Raises:
        ProcessLookupError: It has ended, or the kernel refuses.
    """
    if not request(_SETOPTIONS, thread, 0, _OPTION_SYSGOOD | _OPTION_SUSPEND_SECCOMP):
        raise ProcessLookupError(thread)
    try:
        yield
    finally:
        request(_SETOPTIONS, thread, 0, _OPTION_SYSGOOD)


def request(what: int, thread: int, address: int = 0, data: object = None) -> bool:
    """Make a request that returns nothing; False: the thread has ended or is not stopped, or the
    kernel refuses.
    """
    return ask(what, thread, address, data) >= 0


def ask(what: int, thread: int, address: int = 0, data: object = None) -> int:
    """Make a request and return its result; -1 is a failure."""
    return int(_libc.ptrace(what, thread, address, data))


def interrupt(thread: int) -> bool:
    """Stop the thread before it runs its program's code again."""
    return request(_INTERRUPT, thread)


def wait(thread: int, *, block: bool) -> Stop | None:
    """Return the next stop of a thread; None if there is none yet and ``block`` is False.

    Raises:
        ProcessLookupError: It has ended.
    """
    try:
        found, status = os.waitpid(thread, _WALL if block else _WALL | os.WNOHANG)
    except ChildProcessError:
        raise ProcessLookupError(thread) from None
    if not found:
        return None
    if not os.WIFSTOPPED(status):
        raise ProcessLookupError(thread)
    return Stop(os.WSTOPSIG(status), status >> 16)


def _stopped(thread: int, seconds: float) -> int:
    began, last = time.monotonic(), False
    while not last:
        waited = time.monotonic() - began
        last = waited >= seconds  # one more look: who waits may be what was held up
        try:
            stop = wait(thread, block=False)
        except ProcessLookupError:
            return 0
        if stop is None:
            time.sleep(_POLL_SECONDS if waited > _SPIN_SECONDS else 0)
        elif stop.trap:
            return stop.signal
        else:  # a signal was just being delivered: it is, and then the thread stops
            request(CONT, thread, 0, stop.signal)
    return 0


class SystemCall(NamedTuple):
    """A system call that a thread is stopped before or after.

    Attributes:
        entered: It stands before the call.
        number, arguments: Of the call, then.
        result: What it returns otherwise; negative: an errno.
    """

    entered: bool
    number: int = 0
    arguments: tuple[int, ...] = ()
    result: int = 0


def system_call(thread: int) -> SystemCall | None:
    """Return the system call that a thread is stopped at; None if it is not at one."""
    buffer = ctypes.create_string_buffer(_CALL.size)
    if ask(_GET_SYSCALL_INFO, thread, len(buffer), ctypes.addressof(buffer)) <= 0:
        return None
    kind, *words = _CALL.unpack(buffer.raw)
    if kind == _ENTRY:
        return SystemCall(entered=True, number=words[0], arguments=tuple(words[1:]))
    return (
        SystemCall(entered=False, result=ctypes.c_int64(words[0]).value) if kind == _EXIT else None
    )


def mask_of(thread: int) -> int | None:
    """Return the signals that a stopped thread blocks, or will block again when a call that changed
    that returns; None if it has ended.
    """
    mask = ctypes.c_uint64()
    return mask.value if request(_GETSIGMASK, thread, 8, ctypes.addressof(mask)) else None


def set_mask(thread: int, mask: int) -> bool:
    """Set the signals that a stopped thread blocks; False if it has ended."""
    value = ctypes.c_uint64(mask)
    return request(_SETSIGMASK, thread, 8, ctypes.addressof(value))


def registers(thread: int) -> bytes:
    """Return all general registers of a stopped thread in the kernel's layout (struct
    user_regs_struct); empty if it has ended.
    """
    buffer = ctypes.create_string_buffer(_REGISTERS_BYTES)
    vector = _Vector(ctypes.addressof(buffer), len(buffer))
    return (
        buffer.raw[: vector.length]
        if request(_GETREGSET, thread, _NT_PRSTATUS, ctypes.addressof(vector))
        else b""
    )


def set_registers(thread: int, values: bytes) -> bool:
    """Set the registers of a stopped thread; False if it has ended."""
    buffer = ctypes.create_string_buffer(values, len(values))
    vector = _Vector(ctypes.addressof(buffer), len(values))
    return request(_SETREGSET, thread, _NT_PRSTATUS, ctypes.addressof(vector))


def signals_pending(thread: int, first: int, count: int) -> list[bytes]:
    """Return up to ``count`` of the signals pending for a stopped thread, from the ``first`` on, as
    siginfo_t.
    """
    size = 128
    found = ctypes.create_string_buffer(size * count)
    which = ctypes.create_string_buffer(struct.pack("QIi", first, 0, count))
    some = ask(PEEKSIGINFO, thread, ctypes.addressof(which), ctypes.addressof(found))
    return [found.raw[at * size : (at + 1) * size] for at in range(max(0, some))]
