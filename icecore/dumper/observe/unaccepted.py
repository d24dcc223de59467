"""Connections of a tree that wait for accept(2). CRIU cannot dump those of TCP, nor those of unix
sockets through which the client has already sent data. Those that the client has closed would be
missing after a restore.
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

#: How often to look whether a server has accepted its connections, and the most seconds between two
#: looks. They are random, because what a job does is often periodic.
_LOOKS, _PAUSE = 50, 0.04

_CURE = "have the server accept its connections before the dump, or its clients pause (--before)"
_TCP_CURE = f"{_CURE}; with --connections close, a restored job finds its TCP connections closed"


class Unaccepted(msgspec.Struct, frozen=True):
    """A socket that CRIU cannot dump: what it is, and the cure."""

    message: str
    cure: str = _CURE


def await_accepted(
    root: int, *, tcp: bool, sockets: Iterable[tuple[int, Sequence[Socket]]] | None = None
) -> list[Unaccepted]:
    """Wait for the server to accept the connections that CRIU cannot dump, for a second or so.

    Args:
        root: Host pid of the tree's root.
        tcp: Whether CRIU dumps TCP connections.
        sockets: The sockets of each process, if they were read just now.

    Returns:
        What still waits. At each look, something did.
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
    """Find unix sockets that CRIU cannot dump, as it does (criu/sk-unix.c, dump_one_unix_fd).

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
