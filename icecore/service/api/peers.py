"""Processes on the unix socket that the service refuses, because one user could use the shares of
many.

Each uid has a share of the service. A user with subordinate uids (subuid(5)) has thousands: in user
namespaces (user_namespaces(7)), and outside them through set-user-ID programs that are made there.
"""

from __future__ import annotations

import pwd
from pathlib import Path

from icecore.host.kernel.peer import Peer

SUBORDINATE = Path("/etc/subuid")


def refusal_of(peer: Peer) -> str:
    """Return why the service refuses a process; empty: it does not."""
    if not peer.shares_user_namespace():
        return "the caller is in another user namespace, or has ended"
    owner = _owner_of_subordinate(peer.uid)
    return f"uid {peer.uid} is a subordinate uid of {owner}" if owner else ""


def _owner_of_subordinate(uid: int) -> str:
    """Return whose subordinate uid this is; empty: nobody's, or that of a user of this machine."""
    try:
        lines = SUBORDINATE.read_text(errors="replace").splitlines()
    except OSError:  # there are none
        return ""
    for line in lines:
        owner, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if first.isdecimal() and count.isdecimal() and 0 <= uid - int(first) < int(count):
            return "" if _is_known(uid) else owner
    return ""


def _is_known(uid: int) -> bool:
    try:
        pwd.getpwuid(uid)
    except KeyError:
        return False
    return True
