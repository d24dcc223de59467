"""Processes on the unix socket that the service refuses, because one user could use the shares of
many.

Each uid has a share of the service. A user with subordinate uids (subuid(5)) has thousands: in user
namespaces (user_namespaces(7)), and outside them through set-user-ID programs that are made there.
"""

from __future__ import annotations

import pwd
import time
from collections import deque
from pathlib import Path

from icecore.host.kernel.peer import Peer

SUBORDINATE = Path("/etc/subuid")
#: Users → whether the user database has them, and until when (time.monotonic) that is believed.
_known: dict[int, tuple[bool, float]] = {}
_KNOWN_SECONDS, _MOST_KNOWN = 60.0, 4096
#: When the database was asked last (time.monotonic): at most so often in a second.
_asked: deque[float] = deque(maxlen=10)
_OVERFLOW = Path("/proc/sys/kernel/overflowuid")


def refusal_of(peer: Peer) -> str:
    """Return why the service refuses a process; empty: it does not. A user whom this machine knows
    has one share, in whatever namespace.
    """
    if peer.uid == 0:
        return ""  # no uid of another namespace is shown as root's
    owner = _owner_of_subordinate(peer.uid)
    shares = peer.shares_user_namespace()
    if not owner and shares:
        return ""
    # All users whom this process's namespace lacks are shown as one.
    if (shares or peer.uid != _overflow()) and _is_known(peer.uid):
        return ""
    if owner:
        return f"uid {peer.uid} is a subordinate uid of {owner}"
    return (
        f"this machine knows no user {peer.uid}, and the caller has ended or is in another user"
        " namespace"
    )


def _owner_of_subordinate(uid: int) -> str:
    """Return whose subordinate uid this is; empty: nobody's."""
    try:
        lines = SUBORDINATE.read_text(errors="replace").splitlines()
    except OSError:  # there are none
        return ""
    for line in lines:
        owner, _, numbers = line.partition(":")
        first, _, count = numbers.partition(":")
        if first.isdecimal() and count.isdecimal() and 0 <= uid - int(first) < int(count):
            return owner
    return ""


def _overflow() -> int:
    """Return the uid as which users without a number in a namespace are shown."""
    try:
        return int(_OVERFLOW.read_text())
    except (OSError, ValueError):
        return 65534


def _is_known(uid: int) -> bool:
    """Return whether the user database has an entry. The event loop waits for the answer. So the
    database is asked seldom, and users are unknown while it would be asked more often.
    """
    now = time.monotonic()
    known, until = _known.get(uid, (False, 0.0))
    if now < until:
        return known
    if len(_asked) == _asked.maxlen and now < _asked[0] + 1.0:
        return False
    _asked.append(now)
    try:
        pwd.getpwuid(uid)
        known = True
    except KeyError:
        known = False
    if len(_known) >= _MOST_KNOWN:
        _known.clear()
    _known[uid] = known, now + _KNOWN_SECONDS
    return known
