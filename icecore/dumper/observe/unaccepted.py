"""Connections of a tree that wait for accept(2). CRIU cannot dump such a TCP connection, nor such a
connection of unix sockets if the client has already sent data. If the client has closed its unix
socket, CRIU would leave the connection out.
"""

from __future__ import annotations

import random
import time
from collections.abc import Iterable, Mapping, Sequence

import msgspec

from icecore.dumper.observe.files import tree_pids
from icecore.dumper.observe.sockets import Socket, sockets_of, tcp_queues, unix_sockets
from icecore.errors import NotFound
from icecore.host.kernel import procfs

#: How often to look again whether a server has accepted its connections, and the longest pause between
#: two looks, in seconds. Pauses are random, because periodic looks may always meet a periodic job at
#: the same point.
_LOOKS, _PAUSE = 50, 0.04

_CURE = (
    "have the server accept its connections before the dump, or have its clients pause (--before)"
)
_TCP_CURE = f"{_CURE}; with --connections close, a restored job finds its TCP connections closed"


class Unaccepted(msgspec.Struct, frozen=True):
    """A socket that CRIU cannot dump: a description, and the cure."""

    message: str
    cure: str = _CURE


def await_accepted(
    root: int, *, tcp: bool, sockets: Iterable[tuple[int, Sequence[Socket]]] | None = None
) -> list[Unaccepted]:
    """Wait about a second for the tree to accept the connections that CRIU cannot dump.

    Args:
        root: Host pid of the tree's root.
        tcp: Whether CRIU is to dump TCP connections.
        sockets: The sockets of each process, if they were just read.

    Returns:
        The sockets with connections that still wait. Every look found at least one.
    """
    found = _look(_sockets(root) if sockets is None else sockets, tcp)
    for _ in range(_LOOKS):
        if not found:
            break
        time.sleep(random.uniform(0, _PAUSE))
        found = _look(_sockets(root), tcp)
    return found


def _sockets(root: int) -> list[tuple[int, Sequence[Socket]]]:
    found: list[tuple[int, Sequence[Socket]]] = []
    for pid in tree_pids(root):
        try:
            found.append((pid, sockets_of(pid, procfs.descriptors(pid))))
        except NotFound:
            continue  # it has ended
    return found


def _look(sockets: Iterable[tuple[int, Sequence[Socket]]], tcp: bool) -> list[Unaccepted]:
    unix, internet = dict[int, str](), dict[int, str]()
    network = 0
    for pid, own in sockets:
        for one in own:
            name = f"descriptor {one.descriptor} of process {pid}"
            if one.unix:
                unix[one.inode] = name
            elif one.protocol.startswith("TCP"):
                internet[one.inode], network = name, pid
    found = _look_at_unix(unix) if unix else []
    if internet and tcp:
        found += [
            Unaccepted(
                f"{internet[inode]} listens on TCP port {port} and has connections that are not accepted yet",
                _TCP_CURE,
            )
            for inode, port in tcp_queues(network).items()
            if inode in internet
        ]
    return found


def _look_at_unix(names: Mapping[int, str]) -> list[Unaccepted]:
    """Return the unix sockets that CRIU would refuse (criu/sk-unix.c, dump_one_unix_fd) or dump without a
    connection.

    Args:
        names: The tree's unix sockets, by inode.
    """
    try:
        known = unix_sockets()
    except OSError:
        return []  # a kernel without unix_diag: CRIU needs it too and reports it
    waiting = {client for one in known.values() for client in one.clients}
    closed = [inode for inode in names.keys() & known.keys() if 0 in known[inode].clients]
    return [
        Unaccepted(
            f"{names[inode]} is a unix socket with a connection that is not accepted yet and that the client has closed"
        )
        for inode in closed
    ] + [
        Unaccepted(
            f"{names[inode]} is a unix socket that has sent data through a connection that is not accepted yet"
        )
        for inode in names.keys() & known.keys() & waiting
        if known[inode].unread
    ]
