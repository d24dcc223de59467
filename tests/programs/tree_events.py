"""Signals, timers and event descriptors of `tree.py`, and what its processes are: ids, limits,
names.
"""

from __future__ import annotations

import fcntl
import os
import resource
import select
import signal
import time
from typing import Any

from tests.programs import kernel
from tests.programs.tree_kept import Broken, same

HOUR = 3600.0
STALLED_ROUNDS = 1000  # rounds without a tick of a fast timer after which it counts as dead


class PendingSignals:
    """Blocked signals that wait, process-wide and for a thread, some queued several times with
    values.
    """

    def __init__(self) -> None:
        rt = signal.SIGRTMIN
        self.queued = [(rt + 3, value) for value in (11, -22, 33, 44, 55)] + [(rt + 4, 0x7EEDBEEF)]
        self.numbers = {signal.SIGUSR1, signal.SIGUSR2, rt + 3, rt + 4, rt + 5}
        signal.pthread_sigmask(signal.SIG_BLOCK, self.numbers)
        os.kill(os.getpid(), signal.SIGUSR1)
        kernel.sigqueue(os.getpid(), signal.SIGUSR2, 123)
        for number, value in self.queued:
            kernel.sigqueue(os.getpid(), number, value)
        kernel.sigqueue_thread(os.getpid(), os.getpid(), rt + 5, 77)

    def check(self) -> None:
        same("pending signals", signal.sigpending() & self.numbers, self.numbers)
        same("blocked signals", signal.pthread_sigmask(signal.SIG_BLOCK, []) >= self.numbers, True)

    def last(self) -> None:
        self.check()
        me = os.getpid()
        taken = kernel.sigtake(signal.SIGUSR1)
        same("SIGUSR1", taken and (taken.code, taken.pid), (0, me))
        for number, value in [(signal.SIGUSR2, 123), *self.queued, (signal.SIGRTMIN + 5, 77)]:
            same(
                "queued signal",
                kernel.sigtake(number),
                kernel.Signal(number, kernel.SI_QUEUE, me, value),
            )
        for number in self.numbers:
            same("no further signal", kernel.sigtake(number), None)


class Timers:
    """Fast timers that must go on ticking, and slow ones whose remaining time must only shrink."""

    def __init__(self) -> None:
        self.ticks = 0
        self.tick_signal = signal.SIGRTMIN + 7
        signal.signal(signal.SIGALRM, self._tick)
        signal.pthread_sigmask(signal.SIG_BLOCK, [self.tick_signal, signal.SIGRTMIN + 8])
        signal.setitimer(signal.ITIMER_REAL, 0.03, 0.03)
        signal.setitimer(signal.ITIMER_VIRTUAL, HOUR, HOUR)
        self.slow_descriptor, self.fast_descriptor = (
            kernel.timerfd(HOUR, 0),
            kernel.timerfd(0.02, 0.02),
        )
        self.slow_timer = kernel.timer_create(signal.SIGRTMIN + 8, 1, HOUR, 60.0)
        self.fast_timer = kernel.timer_create(self.tick_signal, 0x1234, 0.025, 0.025)
        self.left = {"slow timerfd": HOUR, "slow timer": HOUR, "ITIMER_VIRTUAL": HOUR}
        self.silent = {"ITIMER_REAL": 0, "timerfd": 0, "timer": 0}
        self.seen = 0

    def _tick(self, number: int, frame: object) -> None:
        self.ticks += 1

    def check(self) -> None:
        same("interval of ITIMER_REAL", signal.getitimer(signal.ITIMER_REAL)[1], 0.03)
        self._fired("ITIMER_REAL", self.ticks != self.seen)
        self.seen = self.ticks
        try:
            self._fired("timerfd", int.from_bytes(os.read(self.fast_descriptor, 8), "little") > 0)
        except BlockingIOError:
            self._fired("timerfd", False)
        if taken := kernel.sigtake(self.tick_signal):
            same("timer's signal", (taken.code, taken.value), (kernel.SI_TIMER, 0x1234))
        self._fired("timer", taken is not None)
        for what, (left, interval), every in (
            ("slow timerfd", kernel.timerfd_left(self.slow_descriptor), 0.0),
            ("slow timer", kernel.timer_left(self.slow_timer), 60.0),
            ("ITIMER_VIRTUAL", signal.getitimer(signal.ITIMER_VIRTUAL), HOUR),
        ):
            same(f"interval of the {what}", interval, every)
            # A hundredth of a second of grace: the kernel rounds virtual time to its own ticks.
            if not 0 < left <= self.left[what] + 0.01:
                raise Broken(f"{what}: {left} s left, {self.left[what]} s before")
            self.left[what] = left

    def _fired(self, what: str, fired: bool) -> None:
        self.silent[what] = 0 if fired else self.silent[what] + 1
        if self.silent[what] > STALLED_ROUNDS:
            raise Broken(f"the periodic {what} has not fired for {STALLED_ROUNDS} rounds")

    def last(self) -> None:
        before = self.ticks
        until = time.monotonic() + 5
        while self.ticks == before and time.monotonic() < until:
            time.sleep(0.01)
        same("ITIMER_REAL still ticks", self.ticks > before, True)
        self.check()


class Events:
    """eventfds with unread counts and an epoll set over them, a pipe and a timer, each with its own
    event mask.
    """

    def __init__(self, timer: int) -> None:
        # No EFD_SEMAPHORE: CRIU (4.2) restores such an eventfd as an ordinary one.
        self.other = os.eventfd(5, os.EFD_NONBLOCK)
        self.counter = os.eventfd(0xABCDEF, os.EFD_NONBLOCK)
        self.idle_reader, self.idle_writer = os.pipe()
        self.epoll = select.epoll()
        self.epoll.register(self.other, select.EPOLLIN)
        self.epoll.register(self.counter, select.EPOLLOUT | select.EPOLLIN)
        self.epoll.register(self.idle_reader, select.EPOLLIN | select.EPOLLRDHUP)
        self.epoll.register(timer, 0)
        self.edge = os.eventfd(0)
        self.epoll.register(self.edge, select.EPOLLIN | select.EPOLLET)

    def check(self) -> None:
        expected = {self.other: select.EPOLLIN, self.counter: select.EPOLLIN | select.EPOLLOUT}
        same("ready descriptors", dict(self.epoll.poll(0)), expected)

    def last(self) -> None:
        self.check()
        same("eventfd", os.eventfd_read(self.counter), 0xABCDEF)
        same("other eventfd", os.eventfd_read(self.other), 5)
        os.write(self.idle_writer, b"x")
        os.eventfd_write(self.edge, 1)
        ready = dict(self.epoll.poll(1))
        same("epoll sees the pipe", ready.get(self.idle_reader), select.EPOLLIN)
        same("epoll sees the edge", ready.get(self.edge), select.EPOLLIN)
        same("no edge twice", self.edge in dict(self.epoll.poll(0)), False)


class Identity:
    """What a process inherited or set: ids, directories, mask, limits, niceness, name, handlers,
    descriptors' flags.
    """

    def __init__(self, *, has_parent: bool) -> None:
        self.has_parent = (
            has_parent  # within the tree: the parent of its root is another one after a restore
        )
        signal.signal(signal.SIGWINCH, signal.SIG_IGN)
        self.cloexec = os.open("/dev/null", os.O_RDONLY)
        self.inherited = os.open("/dev/null", os.O_WRONLY | os.O_APPEND)
        os.set_inheritable(self.inherited, True)
        self.before = self.now()

    def now(self) -> dict[str, Any]:
        mask = os.umask(0)
        os.umask(mask)
        return {
            "pid": os.getpid(),
            "parent": os.getppid() if self.has_parent else None,
            "session": os.getsid(0),
            "group": os.getpgid(0),
            "uid": os.getresuid(),
            "groups": os.getgroups(),
            "directory": os.getcwd(),
            "umask": mask,
            "open files": resource.getrlimit(resource.RLIMIT_NOFILE),
            "core size": resource.getrlimit(resource.RLIMIT_CORE),
            "stack size": resource.getrlimit(resource.RLIMIT_STACK),
            "niceness": os.nice(0),
            "name": kernel.get_name(),
            "death signal": kernel.get_death_signal(),
            "SIGWINCH": signal.getsignal(signal.SIGWINCH),
            "inherited flags": fcntl.fcntl(self.inherited, fcntl.F_GETFL)
            & (os.O_APPEND | os.O_WRONLY),
            "inherited": (os.get_inheritable(self.inherited), os.get_inheritable(self.cloexec)),
        }

    def check(self) -> None:
        now = self.now()
        for name, value in self.before.items():
            same(name, now[name], value)

    def last(self) -> None:
        self.check()
