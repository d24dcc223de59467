"""Callers of the service: a process on the unix socket, or the holder of a token."""

from __future__ import annotations

from enum import IntEnum
from fnmatch import fnmatchcase

import msgspec

from icecore.host.jobs.identity import user_name
from icecore.host.kernel.peer import Peer


class Role(IntEnum):
    """Permissions of a caller; each role includes the ones before it.

    Only routes that reveal nothing about jobs are public.
    """

    PUBLIC = 0
    READ = 1
    OPERATE = 2
    ADMIN = 3


class Caller(msgspec.Struct, frozen=True):
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
    def rights(self) -> tuple[Role, int | None, bool, tuple[str, ...]]:
        """What it may do."""
        return self.role, self.uid, self.sees_all, self.jobs

    @property
    def whole_node(self) -> bool:
        """Whether nothing restricts it to some jobs."""
        return self.sees_all and "*" in self.jobs

    @property
    def is_as_root(self) -> bool:
        """Whether it may have root do anything: it is an unrestricted administrator."""
        return self.role >= Role.ADMIN and self.whole_node


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
