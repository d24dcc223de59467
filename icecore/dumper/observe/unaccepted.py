"""Connections of a tree that wait for accept(2). CRIU cannot dump such a TCP connection, nor such a
connection of unix sockets if the client has already sent data. If the client has closed its unix
socket, CRIU would leave the connection out.
"""

from __future__ import annotations

import os
import random
import time
from collections.abc import Iterator
from contextlib import suppress

import msgspec

from icecore.dumper.observe.files import tree_pids
from icecore.dumper.observe.sockets import tcp_queues, unix_sockets
from icecore.errors import NotFound
from icecore.host.kernel import procfs

#: How often to look again whether a server has accepted its connections, and the longest pause between
#: two looks, in seconds. Pauses are random, because periodic looks may always meet a periodic job at
#: For how many seconds to look whether a server accepts its connections, and the most seconds between
#: two looks. The pauses are random, because what a job does is often periodic.
_SECONDS, _PAUSE = 1.0, 0.04

_CURE = (
    "have the server accept its connections before the dump, or have its clients pause (--before)"
)
_TCP_CURE = f"{_CURE}; with --connections close, a restored job finds its TCP connections closed"


class Unaccepted(msgspec.Struct, frozen=True):
    """A socket with a connection that is not accepted yet.

    Attributes:
        message: What it is.
        cure: What makes a dump possible. Empty: CRIU dumps the tree without the connection.
    """

    message: str
    cure: str


def await_accepted(root: int, *, tcp: bool) -> list[Unaccepted]:
    """Wait for about a second for the server to accept the connections that CRIU cannot dump, or would
    leave out.

    Args:
        root: Host pid of the tree's root. Its network namespace is asked for TCP sockets, and this
            process's for unix sockets.
        tcp: Whether CRIU dumps TCP connections.

    Returns:
        The sockets that CRIU cannot dump. Every look found at least one with a connection that waited.
    """
    end = time.monotonic() + _SECONDS
    while (found := _look(root, tcp)) and time.monotonic() < end:
        time.sleep(random.uniform(0, _PAUSE))
    return [one for one in found if one.cure]


def _look(root: int, tcp: bool) -> list[Unaccepted]:
    """Look at the kernel's tables, and at the processes only if these name a socket."""
    suspects = _unix_suspects()
    if tcp:
        for inode, port in tcp_queues(root).items():
            what = f"listens on TCP port {port} and has connections that are not accepted yet"
            suspects[inode] = Unaccepted(what, _TCP_CURE)
    found = {}
    for pid in tree_pids(root) if suspects else ():
        for number, inode in _socket_inodes(pid):
            if inode in suspects and inode not in found:
                one = suspects[inode]
                what = f"descriptor {number} of process {pid} {one.message}"
                found[inode] = Unaccepted(what, one.cure)
    return list(found.values())


def _unix_suspects() -> dict[int, Unaccepted]:
    """Return unix sockets by inode: those that CRIU would refuse (criu/sk-unix.c, dump_one_unix_fd) or
    dump without a connection, because the client has closed it.
    """
    try:
        known = unix_sockets()
    except OSError:
        return {}  # a kernel without unix_diag: CRIU needs it too and reports it
    waiting = {client for one in known.values() for client in one.clients}
    sent = "is a unix socket that has sent data through a connection that is not accepted yet"
    suspects = {
        inode: Unaccepted(sent, _CURE) for inode in waiting & known.keys() if known[inode].unread
    }
    closed = Unaccepted("has a connection that the client has closed", "")
    return suspects | {inode: closed for inode, one in known.items() if 0 in one.clients}


def _socket_inodes(pid: int) -> Iterator[tuple[int, int]]:
    """Yield number and inode of each socket that a process has open."""
    with suppress(NotFound, OSError):  # it has ended
        for number in procfs.descriptor_numbers(pid):
            with suppress(FileNotFoundError):  # it was closed
                target = os.readlink(f"/proc/{pid}/fd/{number}")
                if target.startswith("socket:["):
                    yield number, int(target[8:-1])
