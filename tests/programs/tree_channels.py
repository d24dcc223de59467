"""Pipes and unix sockets of `tree.py` in which something waits that nobody reads before the end."""

from __future__ import annotations

import array
import fcntl
import os
import socket
import struct
from pathlib import Path

from tests.programs import kernel
from tests.programs.tree_kept import content, same

F_SETPIPE_SZ, F_GETPIPE_SZ = 1031, 1032


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
        same(
            "content of the pipe",
            os.read(self.reader, self.size + 1),
            content(self.size, 1, self.size),
        )
        if self.fifo is not None:
            self.fifo.unlink()


class StalledPair:
    """A pair of connected unix sockets with messages waiting in both directions."""

    MESSAGES = (
        b"first",
        content(3000, 2),
        content(700, 3),
        b"last",
    )  # none empty: CRIU loses what follows one

    def __init__(self, kind: socket.SocketKind) -> None:
        self.kind = kind
        self.ends = socket.socketpair(socket.AF_UNIX, kind)
        self.ends[0].setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 100_000)
        self.buffer = self.ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF)
        for end in self.ends:
            for message in self.MESSAGES:
                end.send(message)

    def check(self) -> None:
        whole = (
            len(self.MESSAGES[0])
            if self.kind == socket.SOCK_DGRAM
            else sum(map(len, self.MESSAGES))
        )
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
    """A pair that attaches the sender's credentials to each message; CRIU (4.2) fails to dump one
    that is ``waiting``.
    """

    def __init__(self, *, waiting: bool) -> None:
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.ends[1].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
        self.waiting = waiting
        if waiting:
            self.ends[0].send(b"who")

    def check(self) -> None:
        same(
            "SO_PASSCRED of the sender",
            self.ends[0].getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED),
            0,
        )
        same(
            "SO_PASSCRED of the receiver",
            self.ends[1].getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED),
            1,
        )
        same(
            "bytes waiting with credentials",
            kernel.bytes_waiting(self.ends[1].fileno()),
            3 if self.waiting else 0,
        )

    def last(self) -> None:
        self.check()
        if not self.waiting:
            self.ends[0].send(b"who")
        data, ancillary, _, _ = self.ends[1].recvmsg(10, socket.CMSG_SPACE(12))
        same("message with credentials", data, b"who")
        same(
            "sender", struct.unpack("iII", ancillary[0][2]), (os.getpid(), os.getuid(), os.getgid())
        )


class PassedDescriptor:
    """An open file that is nowhere but in a socket's queue, sent and not yet received (SCM_RIGHTS)."""

    def __init__(self, path: Path) -> None:
        path.write_bytes(content(5000, 4))
        self.ends = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        descriptor = os.open(path, os.O_RDONLY)
        os.lseek(descriptor, 1000, os.SEEK_SET)
        self.ends[0].sendmsg(
            [b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [descriptor]))]
        )
        os.close(descriptor)

    def check(self) -> None:
        same("bytes waiting beside a descriptor", kernel.bytes_waiting(self.ends[1].fileno()), 1)

    def last(self) -> None:
        data, ancillary, _, _ = self.ends[1].recvmsg(10, socket.CMSG_SPACE(4))
        same("message beside a descriptor", data, b"x")
        same("descriptors received", len(ancillary), 1)
        descriptor = array.array("i", ancillary[0][2])[0]
        same("file received", os.read(descriptor, 10_000), content(5000, 4)[1000:])
