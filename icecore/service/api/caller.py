"""Callers of the service: a process on the unix socket, or the holder of a token."""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress
from dataclasses import dataclass
from enum import IntEnum
from fnmatch import fnmatchcase

from icecore.errors import Denied
from icecore.host.jobs.identity import user_name
from icecore.host.kernel import procfs

_UCRED = struct.Struct("iII")
#: Since Linux 6.5; Python does not name it.
_SO_PEERPIDFD = 77
_GID = struct.Struct("I")
_MOST_GROUPS = 65536


class Role(IntEnum):
    """Permissions of a caller; each role includes the ones before it.

    Only routes that reveal nothing about jobs are public.
    """

    PUBLIC = 0
    READ = 1
    OPERATE = 2
    ADMIN = 3


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
        import select

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


@dataclass(frozen=True)
class Caller:
    """An authenticated caller.

    Attributes:
        name: For logs: ``uid 1000 (alice)`` or ``token ci``.
        kind: How it was authenticated.
        role: Its permissions.
        uid: The user whose jobs it starts; None: a token without a user.
        sees_all: It may access the jobs of all users.
        jobs: Patterns (fnmatch(3)) of the names of jobs that it may access.
        where: Origin of the call: ``pid 17`` or an address.
        peer: Its process, on the unix socket.
    """

    name: str
    kind: str
    role: Role
    uid: int | None
    sees_all: bool
    jobs: tuple[str, ...] = ("*",)
    where: str = ""
    peer: Peer | None = None

    def may_touch(self, job: str, owner: int | None) -> bool:
        """Return whether it may access a job of a user, or a snapshot of such a job.

        Args:
            owner: None: not recorded, so the job belongs to the administrators.
        """
        if not any(fnmatchcase(job, pattern) for pattern in self.jobs):
            return False
        return self.sees_all or (owner is not None and owner == self.uid)

    @property
    def whole_node(self) -> bool:
        """Whether nothing restricts it to some jobs."""
        return self.sees_all and "*" in self.jobs


def of_peer(peer: Peer, *, admin_gid: int | None, others: Role) -> Caller:
    """Return the caller at the other end of a unix socket.

    Args:
        admin_gid: Members of this group see all, as root does.
        others: The role of all others, for their own jobs.
    """
    is_admin = peer.uid == 0 or (admin_gid is not None and admin_gid in (peer.gid, *peer.gids))
    return Caller(
        name=f"uid {peer.uid} ({user_name(peer.uid)})",
        kind="socket",
        role=Role.ADMIN if is_admin else others,
        uid=peer.uid,
        sees_all=is_admin,
        where=f"pid {peer.pid}",
        peer=peer,
    )
