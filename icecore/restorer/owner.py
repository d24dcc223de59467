"""The owner of a snapshot, and who may restore it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icecore.errors import IcecoreError, RestoreRefused
from icecore.host.jobs.identity import may_touch, user_name
from icecore.host.jobs.namespaces import RunRecord
from icecore.store.format.contract import processes_owner, snapshot_owner
from icecore.store.format.manifest import Manifest

if TYPE_CHECKING:
    from icecore.store.format.state import SnapshotRecord
    from icecore.store.log.repository import StoredRepository

#: Manifests that are read at a time.
_READERS = 16


def owner_of(manifest: Manifest, record: RunRecord | None) -> int:
    """Return the uid of a snapshot's owner (`snapshot_owner`).

    Args:
        record: How `icecore run` started the job; None: it did not.
    """
    return processes_owner(manifest) if record is None else record.user


async def owners(
    repository: StoredRepository, records: Sequence[SnapshotRecord]
) -> list[int | None]:
    """Return the owner of each snapshot, from its record, or else from its manifest; None: neither
    tells it.
    """
    turns = asyncio.Semaphore(_READERS)

    async def owner(record: SnapshotRecord) -> int | None:
        if record.owner is not None:
            return record.owner
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
