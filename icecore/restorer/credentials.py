"""The credentials of a user's processes: what a restore for that user may bring back, and with which
rights CRIU makes names for it.
"""

from __future__ import annotations

import grp
from pathlib import Path

from icecore.errors import MissingTool, RestoreRefused
from icecore.host.criu.images import load_credentials
from icecore.host.criu.program import Criu
from icecore.host.jobs.identity import Identity, user_name
from icecore.restorer.files.allowed import groups_now

#: The name of the symbol by which names.c recognises CRIU; other names may end with it.
_OF_CRIU = b"print_on_level\0"
#: A group that owns nothing.
_NOBODYS = 65534


def require_credentials(images: Path, identity: Identity | None, init: int) -> None:
    """Require that every process is the user's for whom a snapshot is restored, and has no group
    or capability that the user lacks now. Root may have everything restored.

    Otherwise, a set-user-ID program would act with the rights and the data that it had when the
    snapshot was taken, as often as the user likes. The user may also have left a group since.

    Args:
        images: CRIU's images.
        identity: For whom it is restored; None: for root.
        init: Image id of the job's init, which is icecore's and root's; 0: there is none.

    Raises:
        RestoreRefused: A process has more.
    """
    if identity is None or identity.user == 0:
        return
    allowed = groups_now(identity)
    for one in load_credentials(images):
        if one.process == init:
            continue
        who = user_name(identity.user)
        if one.users != {identity.user}:
            other = min(one.users - {identity.user})
            raise _refused(f"runs as user {user_name(other)}, but the restore is for user {who}")
        if one.capable:
            raise _refused(f"has capabilities, but the restore is for user {who}")
        if more := sorted(one.groups - allowed):
            raise _refused(f"has group {_group_name(more[0])}, of which user {who} is no member")


def require_names(criu: Criu) -> None:
    """Require a CRIU that the preloaded library recognises.

    Raises:
        MissingTool: It would make names with root's rights.
    """
    if _OF_CRIU not in criu.path.read_bytes():
        raise MissingTool(
            f"{criu.path} exports no functions to plugins, so icecore cannot limit its rights",
            cure="use the CRIU that tools/install-criu installs, or the path of the program itself instead of a script",
        )


def rights_for_names(images: Path, user: int, identity: Identity | None, init: int) -> str:
    """Return the rights with which CRIU makes names for a user's job, as the library preloaded into
    it reads them (icecore/host/criu/names.c). For an administrator, the groups are the job's.

    Args:
        user: The job's user, not root.
        identity, init: As for `require_credentials`.
    """
    if identity is not None and identity.user == user:
        group, groups = identity.group, groups_now(identity)
    else:
        own = [
            one
            for one in load_credentials(images)
            if one.process != init and one.users == {user} and not one.capable
        ]
        groups = {group for one in own for group in one.groups}
        group = own[0].group if own else _NOBODYS
    return " ".join(map(str, (user, group, *sorted(groups))))


def _group_name(group: int) -> str:
    try:
        return f"{grp.getgrgid(group).gr_name} ({group})"
    except KeyError:
        return str(group)


def _refused(what: str) -> RestoreRefused:
    return RestoreRefused(
        f"a process of the snapshot {what}",
        cure="have an administrator restore it, as root",
    )
