"""The owner of a snapshot, and who may restore it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icecore.errors import IcecoreError, RestoreRefused
from icecore.host.jobs.identity import may_touch, user_name
from icecore.host.jobs.namespaces import RunRecord
from icecore.store.format.contract import read_run
from icecore.store.format.manifest import Manifest

if TYPE_CHECKING:
    from icecore.store.format.state import SnapshotRecord
    from icecore.store.log.repository import StoredRepository

ROOT = 0
#: Manifests that are read at a time.
_READERS = 16


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


async def owners(
    repository: StoredRepository, records: Sequence[SnapshotRecord]
) -> list[int | None]:
    """Return the owner of each snapshot (`snapshot_owner`); None: its manifest cannot be read."""
    turns = asyncio.Semaphore(_READERS)

    async def owner(record: SnapshotRecord) -> int | None:
        async with turns:
            try:
                return snapshot_owner(await repository.manifest(record))
            except IcecoreError:  # damaged, or only on a replica
                return None

    return list(await asyncio.gather(*map(owner, records)))


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
