"""The owner of a snapshot, and who may restore it."""

from __future__ import annotations

from icecore.errors import RestoreRefused
from icecore.host.jobs.identity import may_touch, user_name
from icecore.host.jobs.namespaces import RunRecord
from icecore.store.format.contract import read_run
from icecore.store.format.manifest import Manifest

ROOT = 0


def owner_of(manifest: Manifest, record: RunRecord | None) -> int:
    """Return the uid of a snapshot's owner: the user of the job, or, if `icecore run` did not start it,
    the user of its processes, root if they have several.

    Args:
        record: How `icecore run` started the job; None: it did not.
    """
    if record is not None:
        return record.user
    users = {process.user for process in manifest.processes}
    return users.pop() if len(users) == 1 else ROOT


def snapshot_owner(manifest: Manifest) -> int:
    """Return the uid whose snapshot it is (`owner_of`).

    Raises:
        Damaged: The record of its job makes no sense.
    """
    run = read_run(manifest)
    return owner_of(manifest, None) if run is None else run.user


def require_owner(manifest: Manifest, record: RunRecord | None, user: int) -> None:
    """Require that a user may restore a snapshot.

    Raises:
        RestoreRefused: It is another user's.
    """
    owner = owner_of(manifest, record)
    if not may_touch(user, owner):
        raise RestoreRefused(
            f"the snapshot is of user {user_name(owner)}, and user {user_name(user)} restores it",
            cure="restore it as that user, or as root",
        )
