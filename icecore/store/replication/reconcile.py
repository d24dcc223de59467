"""Plans a sync from two replicas' snapshot lists: which snapshots to copy, which marks to carry
over and, on request, which deletions to follow.

A deletion is followed only for a snapshot that a sync brought from this very source, so a region
never loses snapshots that were taken there or came from elsewhere.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from icecore.errors import UsageError
from icecore.store.format.marks import joined
from icecore.store.format.state import LogState, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.repository import StoredRepository


class Plan(msgspec.Struct, frozen=True):
    """What a sync would do at present.

    Attributes:
        bring: Snapshots that the target does not list, in commit order.
        mark: The source's records of snapshots that the target lists with other, older pins or
            tags.
        forget: The target's records of snapshots that came from the source, which has forgotten
            them since.
    """

    bring: list[SnapshotRecord] = msgspec.field(default_factory=list)
    mark: list[SnapshotRecord] = msgspec.field(default_factory=list)
    forget: list[SnapshotRecord] = msgspec.field(default_factory=list)

    @property
    def keep(self) -> list[SnapshotRecord]:
        """Snapshots of ``forget`` that stay, because they are pinned in the target."""
        return [record for record in self.forget if record.pinned]


async def plan(
    source: StoredRepository,
    target: StoredRepository,
    records: Sequence[SnapshotRecord] | None = None,
    *,
    forget: bool = False,
    job: str = "",
) -> Plan:
    """Compare the lists without changing anything.

    Args:
        records: The snapshots of the source to consider; None: all.
        forget: Include what the source has forgotten.
        job: Restrict that, and all snapshots where ``records`` is None, to this job.

    Raises:
        UsageError: The two do not share a master secret, or deletions are requested from a source
            that lists nothing.
    """
    require_replica(source, target)
    # In this order, what the target has from the source and the source does not list now has been
    # forgotten.
    there = {record.snapshot: record for record in await target.snapshots()}
    here = await source.snapshots()
    wanted = (
        records if records is not None else [record for record in here if job in ("", record.job)]
    )
    bring = [record for record in wanted if record.snapshot not in there]
    mark = [
        record
        for record in wanted
        if record.snapshot in there
        and joined(there[record.snapshot], record) is not there[record.snapshot]
    ]
    if not forget:
        return Plan(bring, mark)
    if not here and there:
        raise UsageError(
            f"{source.backend.where} lists no snapshots: its deletions are not followed",
            cure="check whether it has lost its log; if it is meant to be empty, run 'icecore forget' in the replica",
        )
    listed = {record.snapshot for record in here}
    gone = [
        record
        for record in there.values()
        if record.origin == source.config.id
        and record.snapshot not in listed
        and job in ("", record.job)
    ]
    return Plan(bring, mark, gone)


async def carry_marks(target: StoredRepository, records: Sequence[SnapshotRecord]) -> list[str]:
    """Give the target's snapshots the newer of both replicas' marks, in one transaction.

    Args:
        records: The source's records.

    Returns:
        Ids of the snapshots that changed.
    """
    if not records:
        return []
    theirs = {record.snapshot: record for record in records}
    changed: list[str] = []

    def carry(record: SnapshotRecord) -> SnapshotRecord:
        after = joined(record, theirs[record.snapshot])
        if after is not record:
            changed.append(record.snapshot)
        return after

    async def change(state: LogState, pages: Pages) -> LogState:
        changed.clear()
        edited = await catalog.edit(state, theirs, carry, pages)
        return edited if changed else state

    await target.log.transact(change, f"marks of {len(theirs)} snapshots")
    return changed


def require_replica(source: StoredRepository, target: StoredRepository) -> None:
    """Refuse two repositories that do not share a master secret.

    Raises:
        UsageError: They do not.
    """
    if source.keys.secret != target.keys.secret or source.keys.encrypted != target.keys.encrypted:
        raise UsageError(
            f"{target.backend.where} is not a replica of {source.backend.where}",
            cure="'icecore copy' copies snapshots to any other repository; 'icecore init --replica-of' makes a replica",
        )
