"""Kernel objects that a process of `tree.py` owns: each is set up once, checked in every round, used up in the last.

``check`` looks without changing what a later look relies on; ``last`` consumes what is in flight and compares it.
Both raise Broken with what they expected and found.
"""

from __future__ import annotations

import array
import fcntl
import mmap
import os
import resource
import select
import signal
import socket
import struct
import time
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from tests.programs import kernel

F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032
F_OFD_GETLK, F_OFD_SETLK = 36, 37
HOUR = 3600.0
STALLED_ROUNDS = 1000  # rounds without a tick of a fast timer after which it counts as dead


class Broken(Exception):
    """An object is not what it was."""


class Kept(Protocol):
    """What a process checks in each round and once more, thoroughly, at the end."""

    def check(self) -> None: ...

    def last(self) -> None: ...


def same(what: str, found: Any, expected: Any) -> None:
    """Raises Broken unless both are equal; long byte strings are described, not shown."""
    if found == expected:
        return
    if isinstance(found, bytes) and isinstance(expected, bytes):
        at = next((n for n, (a, b) in enumerate(zip(found, expected, strict=False)) if a != b), len(found))
        raise Broken(f"{what}: {len(found)} bytes instead of {len(expected)}, the first difference at {at}")
    raise Broken(f"{what}: {found!r} instead of {expected!r}")


def content(size: int, *key: int) -> bytes:
    """Pseudo-random bytes that are a function of the key."""
    return np.random.Generator(np.random.SFC64(list(key))).bytes(size)


class StalledPipe:
    """A pipe (or FIFO) whose bytes nobody reads, with a capacity of its own."""

    def __init__(self, size: int, capacity: int, fifo: Path | None = None) -> None:
        self.size, self.fifo = size, fifo
        if fifo is None:
            self.reader, self.writer = os.pipe()
        else:
            os.mkfifo(fifo)
            self.reader = os.open(fifo, os.O_RDWR)
            self.writer = os.open(fifo, os.O_WRONLY)
        os.set_blocking(self.writer, False)
        fcntl.fcntl(self.writer, F_SETPIPE_SZ, capacity)
        self.capacity = fcntl.fcntl(self.writer, F_GETPIPE_SZ)
        written = os.write(self.writer, content(size, 1, size))
        same("bytes written to a pipe", written, size)

    def check(self) -> None:
        same("bytes waiting in the pipe", kernel.bytes_waiting(self.reader), self.size)
        same("pipe capacity", fcntl.fcntl(self.writer, F_GETPIPE_SZ), self.capacity)
        same("O_NONBLOCK of the writing end", os.get_blocking(self.writer), False)
        same("O_NONBLOCK of the reading end", os.get_blocking(self.reader), True)

    def last(self) -> None:
        self.check()
        same("content of the pipe", os.read(self.reader, self.size + 1), content(self.size, 1, self.size))
        if self.fifo is not None:
            self.fifo.unlink()


class StalledPair:
    """A pair of connected unix sockets with messages waiting in both directions."""

    MESSAGES = (b"first", content(3000, 2), content(700, 3), b"last")  # none empty: CRIU loses what follows one

    def __init__(self, kind: socket.SocketKind) -> None:
        self.kind = kind
        self.ends = socket.socketpair(socket.AF_UNIX, kind)
        self.ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
        self.buffer = self.ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for end in self.ends:
            for message in self.MESSAGES:
                end.send(message)

    def check(self) -> None:
        whole = len(self.MESSAGES[0]) if self.kind == socket.SOCK_DGRAM else sum(map(len, self.MESSAGES))
        for end in self.ends:
            same(f"bytes waiting in {self.kind.name}", kernel.bytes_waiting(end.fileno()), whole)
        same("SO_SNDBUF", self.ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF), self.buffer)

    def last(self) -> None:
        self.check()
        for end in self.ends:
            end.setblocking(False)
            if self.kind == socket.SOCK_STREAM:
                same("content of a socket", end.recv(100_000), b"".join(self.MESSAGES))
                continue
            for message in self.MESSAGES:
                same(f"message of {self.kind.name}", end.recv(100_000), message)


class CredentialPair:
    """A pair that attaches the sender's credentials to each message; idle, because CRIU saves no such message."""

    def __init__(self) -> None:
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)

    def check(self) -> None:
        same("SO_PASSCRED of the sender", self.ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED), 0)
        same("SO_PASSCRED of the receiver", self.ends[1].getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED), 1)

    def last(self) -> None:
        self.check()
        self.ends[0].send(b"who")
        data, ancillary, _, _ = self.ends[1].recvmsg(10, socket.CMSG_SPACE(12))
        same("message with credentials", data, b"who")
        same("sender", struct.unpack("iII", ancillary[0][2]), (os.getpid(), os.getuid(), os.getgid()))


class PassedDescriptor:
    """An open file that is nowhere but in a socket's queue, sent and not yet received: CRIU (4.2) fails to dump it."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(content(5000, 4))
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptor = os.open(path, os.O_RDONLY)
        os.lseek(descriptor, 1000, os.SEEK_SET)
        self.ends[0].sendmsg([b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))])
        os.close(descriptor)

    def check(self) -> None:
        same("bytes waiting beside a descriptor", kernel.bytes_waiting(self.ends[1].fileno()), 1)

    def last(self) -> None:
        data, ancillary, _, _ = self.ends[1].recvmsg(10, socket.CMSG_SPACE(4))
        same("message beside a descriptor", data, b"x")
        same("descriptors received", len(ancillary), 1)
        descriptor = array.array("i", ancillary[0][2])[0]
        same("file received", os.read(descriptor, 10_000), content(5000, 4)[1000:])


class DeletedFile:
    """A file without a name, used through its descriptor; ``mapped`` adds a private mapping with pages of its own."""

    BLOCK = 4096

    def __init__(self, path: Path, size: int, *, mapped: bool = False) -> None:
        self.size = size
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        whole = content(size, 5, size)
        os.write(self.file, whole)
        self.blocks = [bytearray(whole[n : n + self.BLOCK]) for n in range(0, size, self.BLOCK)]
        self.offset = os.lseek(self.file, 12345, os.SEEK_SET)
        self.round = 0
        self.mapping: mmap.mmap | None = None
        if mapped:
            self.mapping = mmap.mmap(self.file, size, flags=mmap.MAP_PRIVATE)
            for n in range(0, len(self.blocks), 2):
                self.mapping[n * self.BLOCK : n * self.BLOCK + 8] = struct.pack("<Q", n)
        os.unlink(path)

    def check(self) -> None:
        facts = os.fstat(self.file)
        same("links of a deleted file", facts.st_nlink, 0)
        same("size of a deleted file", facts.st_size, self.size)
        same("offset in a deleted file", os.lseek(self.file, 0, os.SEEK_CUR), self.offset)
        self.round += 1
        n = self.round % len(self.blocks)
        self._check_block(n)
        if self.mapping is None:
            self.blocks[n][:8] = struct.pack("<Q", self.round)
            os.pwrite(self.file, self.blocks[n], n * self.BLOCK)

    def last(self) -> None:
        self.check()
        for n in range(len(self.blocks)):
            self._check_block(n)

    def _check_block(self, n: int) -> None:
        block = bytes(self.blocks[n])
        same(f"block {n} of a deleted file", os.pread(self.file, self.BLOCK, n * self.BLOCK), block)
        if self.mapping is not None:
            own = struct.pack("<Q", n) + block[8:] if n % 2 == 0 else block
            found = self.mapping[n * self.BLOCK : (n + 1) * self.BLOCK]
            same(f"block {n} of a private mapping of a deleted file", found, own)


class LinkedFile:
    """A file whose name is gone while another hard link to it is left."""

    def __init__(self, path: Path, link: Path) -> None:
        self.link = link
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(self.file, content(9000, 6))
        os.link(path, link)
        os.unlink(path)
        self.inode = os.fstat(self.file).st_ino

    def check(self) -> None:
        facts = os.fstat(self.file)
        same("size of a file with another link", facts.st_size, 9000)
        same("inode of the other link", os.stat(self.link).st_ino, facts.st_ino)
        same("offset in a file with another link", os.lseek(self.file, 0, os.SEEK_CUR), 9000)

    def last(self) -> None:
        self.check()
        same("content through the descriptor", os.pread(self.file, 10_000, 0), content(9000, 6))
        same("content through the other link", self.link.read_bytes(), content(9000, 6))


class Locks:
    """flock, POSIX and open-file-description locks of this process; ``Probe`` sees from another one that they hold."""

    def __init__(self, directory: Path) -> None:
        self.flocked = os.open(directory / "flock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.flocked, fcntl.LOCK_EX)
        self.posix = os.open(directory / "posix-lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(self.posix, fcntl.LOCK_EX, 10, 10)
        self.description = os.open(directory / "ofd-lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.fcntl(self.description, F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 5, 5, 0))

    def check(self) -> None:
        for descriptor in (self.flocked, self.posix, self.description):
            same("size of a lock file", os.fstat(descriptor).st_size, 0)

    def last(self) -> None:
        self.check()


class Probe:
    """Tries to take another process's locks, and must not get them."""

    def __init__(self, directory: Path, owner: int) -> None:
        self.owner = owner
        self.flocked = os.open(directory / "flock", os.O_RDWR)
        self.posix = os.open(directory / "posix-lock", os.O_RDWR)
        self.description = os.open(directory / "ofd-lock", os.O_RDWR)

    def check(self) -> None:
        try:
            fcntl.flock(self.flocked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            fcntl.flock(self.flocked, fcntl.LOCK_UN)
            raise Broken("the flock was lost")
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 100, 0)
        for what, descriptor, command, expected in (
            ("POSIX lock", self.posix, fcntl.F_GETLK, (fcntl.F_WRLCK, 10, 10, self.owner)),
            ("description lock", self.description, F_OFD_GETLK, (fcntl.F_WRLCK, 5, 5, -1)),
        ):
            kind, _, start, size, pid = struct.unpack("hhqqi4x", fcntl.fcntl(descriptor, command, wanted))
            same(what, (kind, start, size, pid), expected)

    def last(self) -> None:
        self.check()


class SealedMemory:
    """A memfd that can neither be written nor change its size any more, and its mapping."""

    SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK

    def __init__(self, size: int = 200_000) -> None:
        self.size = size
        self.file = os.memfd_create("icecore-sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(self.file, content(size, 8))
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, self.SEALS)
        self.mapping = mmap.mmap(self.file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)

    def check(self) -> None:
        same("seals", fcntl.fcntl(self.file, fcntl.F_GET_SEALS), self.SEALS)
        same("size of a sealed memfd", os.fstat(self.file).st_size, self.size)
        try:
            os.pwrite(self.file, b"x", 0)
        except PermissionError:
            pass
        else:
            raise Broken("a sealed memfd could be written")
        same("name of a memfd", os.readlink(f"/proc/self/fd/{self.file}"), "/memfd:icecore-sealed (deleted)")

    def last(self) -> None:
        self.check()
        same("content of a sealed memfd", os.pread(self.file, self.size + 1, 0), content(self.size, 8))
        same("mapping of a sealed memfd", self.mapping[:], content(self.size, 8))


class PendingSignals:
    """Blocked signals that wait, process-wide and for a thread, some queued several times with values."""

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
            same("queued signal", kernel.sigtake(number), kernel.Signal(number, kernel.SI_QUEUE, me, value))
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
        self.slow_descriptor, self.fast_descriptor = kernel.timerfd(HOUR, 0), kernel.timerfd(0.02, 0.02)
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
    """eventfds with unread counts and an epoll set over them, a pipe and a timer, each with its own event mask."""

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
    """What a process inherited or set: ids, directories, mask, limits, niceness, name, handlers, descriptors' flags."""

    def __init__(self, *, has_parent: bool) -> None:
        self.has_parent = has_parent  # within the tree: the parent of its root is another one after a restore
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
            "inherited flags": fcntl.fcntl(self.inherited, fcntl.F_GETFL) & (os.O_APPEND | os.O_WRONLY),
            "inherited": (os.get_inheritable(self.inherited), os.get_inheritable(self.cloexec)),
        }

    def check(self) -> None:
        now = self.now()
        for name, value in self.before.items():
            same(name, now[name], value)

    def last(self) -> None:
        self.check()


class SystemV:
    """System V shared memory, a semaphore and a message queue; restorable only in an ipc namespace of one's own."""

    def __init__(self) -> None:
        self.memory = kernel.SharedMemory(300_000)
        self.memory.write(content(300_000, 9))
        self.semaphore = kernel.Semaphore(42)
        self.queue = kernel.MessageQueue()
        for n in range(3):
            self.queue.send(n + 1, content(500, 10, n))

    def check(self) -> None:
        same("System V semaphore", self.semaphore.value(), 42)
        same("System V memory", self.memory.read()[:4096], content(300_000, 9)[:4096])

    def last(self) -> None:
        self.check()
        same("all of the System V memory", self.memory.read(), content(300_000, 9))
        for n in range(3):
            same("System V message", self.queue.receive(), (n + 1, content(500, 10, n)))
        self.semaphore.remove()
        self.queue.remove()


class Blackboard:
    """Several kinds of shared memory that two processes rewrite by turns: all must always hold the same version."""

    SIZE = 128 << 10

    def __init__(self, directory: Path, shm_names: tuple[str, str]) -> None:
        self.maps: dict[str, mmap.mmap] = {"anonymous": mmap.mmap(-1, self.SIZE)}
        self.memfd = os.memfd_create("icecore-shared", os.MFD_CLOEXEC)
        self.descriptors = {
            "memfd": self.memfd,
            "POSIX shm": os.open(f"/dev/shm/{shm_names[0]}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600),
            "unlinked POSIX shm": os.open(f"/dev/shm/{shm_names[1]}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600),
            "mapped file": os.open(directory / "mapped", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600),
        }
        for name, descriptor in self.descriptors.items():
            os.ftruncate(descriptor, self.SIZE)
            self.maps[name] = mmap.mmap(descriptor, self.SIZE)
        os.unlink(f"/dev/shm/{shm_names[1]}")
        os.close(self.descriptors.pop("POSIX shm"))
        self.write(0)

    def page(self, name: str, version: int, at: int) -> bytes:
        return content(4096, 11, sum(name.encode()), version, at)

    def write(self, version: int) -> None:
        """Rewrites three pages of each kind for this version; the others keep what an earlier version wrote."""
        for name, memory in self.maps.items():
            for at in pages_of(version):
                memory[at * 4096 : (at + 1) * 4096] = self.page(name, version, at)

    def verify(self, version: int, pages: range | tuple[int, ...]) -> None:
        for name, memory in self.maps.items():
            for at in pages:
                writer = last_writer(version, at)
                expected = bytes(4096) if writer is None else self.page(name, writer, at)
                same(f"{name}, page {at}, version {version}", memory[at * 4096 : (at + 1) * 4096], expected)

    def verify_all(self, version: int) -> None:
        self.verify(version, range(self.SIZE // 4096))
        for name, descriptor in self.descriptors.items():
            same(f"size of the {name}", os.fstat(descriptor).st_size, self.SIZE)
            same(f"{name} read as a file", os.pread(descriptor, self.SIZE, 0), self.maps[name][:])

    def address(self) -> int:
        return kernel.address_of(self.maps["anonymous"])


PAGES = Blackboard.SIZE // 4096


def pages_of(version: int) -> tuple[int, ...]:
    """The three pages that a version rewrites: the first, one in order, and one further on."""
    return tuple(dict.fromkeys((0, version % PAGES, (version * 7 + 3) % PAGES)))


def last_writer(version: int, page: int) -> int | None:
    """The newest version up to this one that rewrote the page; any page is rewritten within PAGES versions."""
    return next((v for v in range(version, max(-1, version - PAGES), -1) if page in pages_of(v)), None)
