"""The process at the other end of a unix socket, as the kernel knows it (unix(7), socket(7))."""

from __future__ import annotations

import errno
import os
import select
import socket
import struct

import msgspec

from icecore.errors import Denied, NotFound
from icecore.host.kernel import procfs

_UCRED = struct.Struct("iII")
#: Since Linux 6.5; Python does not name it.
_SO_PEERPIDFD = 77
_GID = struct.Struct("I")
_MOST_GROUPS = 65536


class Peer(msgspec.Struct, frozen=True):
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
        """Return the peer of a connected unix socket; `close` releases its pidfd.

        Raises:
            OSError: It has ended.
            Denied: It has too many groups.
        """
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

    def shares_user_namespace(self) -> bool:
        """Return whether the process is in the user namespace of this one. False also if it has
        ended, or is not visible from here.
        """
        try:
            if self.pid <= 0 or _user_namespace(self.pid) != _user_namespace("self"):
                return False
            if self.pidfd < 0 and int(procfs.status_fields(self.pid)["Uid"][1]) != self.uid:
                return False  # another process has its pid
        except (OSError, NotFound):
            return False
        return self.alive

    def close(self) -> None:
        """Release the pidfd."""
        if self.pidfd >= 0:
            os.close(self.pidfd)


def _pidfd(connection: socket.socket) -> int:
    """Return a pidfd of the peer; -1: the kernel is too old.

    Raises:
        OSError: The peer has ended.
    """
    try:
        return int(connection.getsockopt(socket.SOL_SOCKET, _SO_PEERPIDFD))
    except OSError as error:
        if error.errno != errno.ENOPROTOOPT:
            raise
    return -1


def _user_namespace(pid: int | str) -> tuple[int, int] | None:
    """Return what identifies the user namespace of a process; None: the kernel has none."""
    if not os.path.exists("/proc/self/ns/user"):
        return None
    about = os.stat(f"/proc/{pid}/ns/user")
    return about.st_dev, about.st_ino


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
