"""The process at the other end of a unix socket, as the kernel knows it (unix(7), socket(7))."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass

from icecore.errors import Denied
from icecore.host.kernel import procfs

_UCRED = struct.Struct("iII")
#: Since Linux 6.5; Python does not name it.
_SO_PEERPIDFD = 77
_GID = struct.Struct("I")
_MOST_GROUPS = 65536


@dataclass(frozen=True)
class Peer:
    """The process at the other end of a unix socket, as it was when it connected.

    Attributes:
        pid: Its pid. It may have been reused, unless ``pidfd`` shows that the process is alive.
        pidfd: Identifies the process; -1 if the kernel has no SO_PEERPIDFD.
        gids: Its effective and supplementary groups.
    """

    pid: int
    uid: int
    gid: int
    gids: tuple[int, ...]
    pidfd: int = -1

    @classmethod
    def of(cls, connection: socket.socket) -> Peer:
        """Return the peer of a connected unix socket; `close` releases its pidfd."""
        level = socket.SOL_SOCKET
        pid, uid, gid = _UCRED.unpack(connection.getsockopt(level, socket.SO_PEERCRED, _UCRED.size))
        return cls(pid, uid, gid, _groups(connection), _pidfd(connection))

    @property
    def alive(self) -> bool:
        """Whether ``pid`` is still this process."""
        if self.pidfd < 0:
            return procfs.exists(self.pid)
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return not poll.poll(0)

    def close(self) -> None:
        """Release the pidfd."""
        if self.pidfd >= 0:
            os.close(self.pidfd)


def _pidfd(connection: socket.socket) -> int:
    with suppress(OSError):  # an older kernel
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    return -1


def _groups(connection: socket.socket) -> tuple[int, ...]:
    """Return the supplementary groups of a peer (SO_PEERGROUPS, socket(7))."""
    size = 64
    while size <= _MOST_GROUPS:
        try:
            data = connection.getsockopt(socket.SOL_SOCKET, 59, size * _GID.size)
        except OSError as error:
            if error.errno != errno.ERANGE:
                raise
            size *= 8
            continue
        return tuple(gid for (gid,) in _GID.iter_unpack(data))
    raise Denied("the caller has too many groups")
