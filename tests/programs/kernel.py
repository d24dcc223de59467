"""Linux calls that Python's standard library lacks, through libc; each raises OSError with the
call's name.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import struct
import subprocess
import sys
import termios
from dataclasses import dataclass

SI_QUEUE, SI_TIMER = -1, -2
SFD_NONBLOCK = TFD_NONBLOCK = os.O_NONBLOCK
SFD_CLOEXEC = TFD_CLOEXEC = os.O_CLOEXEC
TFD_TIMER_ABSTIME = 1
CLOCK_REALTIME, CLOCK_MONOTONIC = 0, 1
PR_SET_PDEATHSIG, PR_GET_PDEATHSIG, PR_SET_NAME, PR_GET_NAME = 1, 2, 15, 16
IPC_PRIVATE, IPC_RMID, SHM_RDONLY, SEM_SETVAL, SEM_GETVAL = 0, 0, 0o10000, 16, 12


class _Value(ctypes.Union):
    _fields_ = (("as_int", ctypes.c_int), ("as_pointer", ctypes.c_void_p))


class _Info(ctypes.Structure):
    """siginfo_t of 64-bit Linux, as far as queued signals and timers need it."""

    _fields_ = (
        ("number", ctypes.c_int),
        ("error", ctypes.c_int),
        ("code", ctypes.c_int),
        ("_align", ctypes.c_int),
        ("pid", ctypes.c_int),  # of a timer: its id
        ("uid", ctypes.c_int),  # of a timer: its overrun
        ("value", _Value),
        ("_rest", ctypes.c_char * 96),
    )


class _Timespec(ctypes.Structure):
    _fields_ = (("sec", ctypes.c_long), ("nsec", ctypes.c_long))


class _Itimerspec(ctypes.Structure):
    _fields_ = (("interval", _Timespec), ("value", _Timespec))


class _Event(ctypes.Structure):
    """struct sigevent of 64-bit Linux."""

    _fields_ = (
        ("value", _Value),
        ("number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("_rest", ctypes.c_char * 48),
    )


class _Set(ctypes.Structure):
    """sigset_t: 1024 bits."""

    _fields_ = (("words", ctypes.c_uint64 * 16),)

    @classmethod
    def of(cls, *numbers: int) -> _Set:
        made = cls()
        for number in numbers:
            made.words[(number - 1) // 64] |= 1 << (number - 1) % 64
        return made


@dataclass(frozen=True)
class Signal:
    """A signal taken from the queue: number, SI_… code, sender's pid (or timer's id) and the value
    sent along.
    """

    number: int
    code: int
    pid: int
    value: int


_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.shmat.restype = ctypes.c_void_p
_libc.sigqueue.argtypes = [ctypes.c_int, ctypes.c_int, _Value]


def _checked(name: str, result: int) -> int:
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{name}: {os.strerror(number)}")
    return result


def sigqueue(pid: int, number: int, value: int) -> None:
    _checked("sigqueue", _libc.sigqueue(pid, number, _Value(as_int=value)))


def sigqueue_thread(pid: int, thread: int, number: int, value: int) -> None:
    """Queues a signal for one thread (rt_tgsigqueueinfo, number 297 on x86-64)."""
    info = _Info(
        number=number, code=SI_QUEUE, pid=os.getpid(), uid=os.getuid(), value=_Value(as_int=value)
    )
    _checked("rt_tgsigqueueinfo", _libc.syscall(297, pid, thread, number, ctypes.byref(info)))


def sigtake(*numbers: int) -> Signal | None:
    """Takes the next pending signal of these (blocked) ones, or None at once."""
    info, now = _Info(), _Timespec(0, 0)
    wanted = _Set.of(*numbers)
    if _libc.sigtimedwait(ctypes.byref(wanted), ctypes.byref(info), ctypes.byref(now)) < 0:
        if ctypes.get_errno() == 11:  # EAGAIN: none pending
            return None
        _checked("sigtimedwait", -1)
    return Signal(info.number, info.code, info.pid, info.value.as_int)


def signalfd(*numbers: int) -> int:
    wanted = _Set.of(*numbers)
    return _checked(
        "signalfd", _libc.signalfd(-1, ctypes.byref(wanted), SFD_NONBLOCK | SFD_CLOEXEC)
    )


def read_signalfd(descriptor: int) -> list[tuple[int, int]]:
    """All queued signals as (number, value), in order; empty when there is none."""
    taken: list[tuple[int, int]] = []
    while True:
        try:
            record = os.read(descriptor, 128)
        except BlockingIOError:
            return taken
        number, value = (
            struct.unpack_from("<I", record, 0)[0],
            struct.unpack_from("<i", record, 44)[0],
        )
        taken.append((number, value))


def _spec(first_s: float, every_s: float) -> _Itimerspec:
    def split(seconds: float) -> _Timespec:
        return _Timespec(int(seconds), int((seconds - int(seconds)) * 1e9))

    return _Itimerspec(split(every_s), split(first_s))


def _seconds(spec: _Itimerspec) -> tuple[float, float]:
    return spec.value.sec + spec.value.nsec / 1e9, spec.interval.sec + spec.interval.nsec / 1e9


def timerfd(first_s: float, every_s: float) -> int:
    descriptor = _checked(
        "timerfd_create", _libc.timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC)
    )
    spec = _spec(first_s, every_s)
    _checked("timerfd_settime", _libc.timerfd_settime(descriptor, 0, ctypes.byref(spec), None))
    return descriptor


def timerfd_at(moment: float) -> int:
    """A timer that expires at a moment (CLOCK_MONOTONIC, seconds); a read waits for it."""
    descriptor = _checked("timerfd_create", _libc.timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC))
    spec = _spec(moment, 0.0)
    _checked(
        "timerfd_settime",
        _libc.timerfd_settime(descriptor, TFD_TIMER_ABSTIME, ctypes.byref(spec), None),
    )
    return descriptor


def timerfd_left(descriptor: int) -> tuple[float, float]:
    """(seconds until it fires, interval in seconds)."""
    spec = _Itimerspec()
    _checked("timerfd_gettime", _libc.timerfd_gettime(descriptor, ctypes.byref(spec)))
    return _seconds(spec)


def timer_create(number: int, value: int, first_s: float, every_s: float) -> int:
    """A POSIX timer that queues signal ``number`` with ``value``; returns its id."""
    event, timer = _Event(_Value(as_int=value), number, 0), ctypes.c_void_p()
    _checked(
        "timer_create",
        _libc.timer_create(CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)),
    )
    spec = _spec(first_s, every_s)
    _checked("timer_settime", _libc.timer_settime(timer, 0, ctypes.byref(spec), None))
    return timer.value or 0


def timer_left(timer: int) -> tuple[float, float]:
    """(seconds until it fires, interval in seconds)."""
    spec = _Itimerspec()
    _checked("timer_gettime", _libc.timer_gettime(ctypes.c_void_p(timer), ctypes.byref(spec)))
    return _seconds(spec)


def set_name(name: str) -> None:
    _checked("PR_SET_NAME", _libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0))


def get_name() -> str:
    buffer = ctypes.create_string_buffer(16)
    _checked("PR_GET_NAME", _libc.prctl(PR_GET_NAME, buffer, 0, 0, 0))
    return buffer.value.decode()


def set_death_signal(number: int) -> None:
    _checked("PR_SET_PDEATHSIG", _libc.prctl(PR_SET_PDEATHSIG, number, 0, 0, 0))


def get_death_signal() -> int:
    number = ctypes.c_int()
    _checked("PR_GET_PDEATHSIG", _libc.prctl(PR_GET_PDEATHSIG, ctypes.byref(number), 0, 0, 0))
    return number.value


def bytes_waiting(descriptor: int) -> int:
    """FIONREAD: bytes that can be read from a pipe or socket (of a datagram socket: of the next
    message).
    """
    buffer = bytearray(4)
    fcntl.ioctl(descriptor, termios.FIONREAD, buffer)
    return int(struct.unpack("i", buffer)[0])


def address_of(memory: mmap.mmap) -> int:
    """Where a writable mapping starts."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


class SharedMemory:
    """A System V shared memory segment, attached, and marked for destruction with its last user."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.id = _checked("shmget", _libc.shmget(IPC_PRIVATE, ctypes.c_size_t(size), 0o600))
        self.address = _libc.shmat(self.id, None, 0)
        if self.address in (None, ctypes.c_void_p(-1).value):
            _checked("shmat", -1)
        _checked("IPC_RMID", _libc.shmctl(self.id, IPC_RMID, None))

    def read(self) -> bytes:
        return ctypes.string_at(self.address, self.size)

    def write(self, content: bytes) -> None:
        ctypes.memmove(self.address, content, self.size)


class Semaphore:
    """A System V semaphore."""

    def __init__(self, value: int) -> None:
        self.id = _checked("semget", _libc.semget(IPC_PRIVATE, 1, 0o600))
        _checked("SETVAL", _libc.semctl(self.id, 0, SEM_SETVAL, value))

    def value(self) -> int:
        return _checked("GETVAL", _libc.semctl(self.id, 0, SEM_GETVAL))

    def remove(self) -> None:
        _checked("IPC_RMID", _libc.semctl(self.id, 0, IPC_RMID))


class MessageQueue:
    """A System V message queue."""

    def __init__(self) -> None:
        self.id = _checked("msgget", _libc.msgget(IPC_PRIVATE, 0o600))

    def send(self, kind: int, text: bytes) -> None:
        record = struct.pack("l", kind) + text
        _checked("msgsnd", _libc.msgsnd(self.id, record, ctypes.c_size_t(len(text)), 0))

    def receive(self) -> tuple[int, bytes]:
        buffer = ctypes.create_string_buffer(8 + 1024)
        size = _checked(
            "msgrcv", _libc.msgrcv(self.id, buffer, ctypes.c_size_t(1024), 0, 0o4000)
        )  # IPC_NOWAIT
        return struct.unpack("l", buffer.raw[:8])[0], buffer.raw[8 : 8 + size]

    def remove(self) -> None:
        _checked("IPC_RMID", _libc.msgctl(self.id, IPC_RMID, None))


_CLONE3 = 435
#: Runs in a process of one thread: a copy of one with several may hang before it executes anything.
_SPAWN = """
import ctypes, os, signal, sys
chosen = ctypes.c_int(int(sys.argv[1]))
# struct clone_args, version 1: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size,
# tls, set_tid, set_tid_size.
call = (ctypes.c_uint64 * 10)(0, 0, 0, 0, signal.SIGCHLD, 0, 0, 0, ctypes.addressof(chosen), 1)
libc = ctypes.CDLL(None, use_errno=True)
pid = libc.syscall(int(sys.argv[2]), call, ctypes.sizeof(call))
if pid == 0:
    try:
        os.execvp(sys.argv[3], sys.argv[3:])
    finally:
        os._exit(127)
sys.exit(0 if pid > 0 else os.strerror(ctypes.get_errno()))
"""


def spawn_with_id(pid: int, program: str, *arguments: str) -> None:
    """Run a program in an orphan with an id of the caller's choice (clone3(2)).

    Raises:
        CalledProcessError: A process or thread has it, for example; standard error says.
    """
    words = [sys.executable, "-S", "-c", _SPAWN, str(pid), str(_CLONE3), program, *arguments]
    subprocess.run(words, check=True, timeout=30, stdin=subprocess.DEVNULL)
