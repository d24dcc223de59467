"""Operations on single snapshots: read, compare, pin and label, forget."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from icecore.errors import Damaged, ObjectMissing
from icecore.repository.opened import Opened, lost
from icecore.store.format.state import SnapshotRecord

if TYPE_CHECKING:
    from icecore.snapshots.difference import Difference
    from icecore.store.format.manifest import Manifest
    from icecore.store.maintenance.forget import Decision, Policy
    from icecore.store.maintenance.gc import Freed
    from icecore.store.snapshot.reader import SnapshotReader


class Snapshots(Opened):
    """Reads and changes snapshots."""

    def manifest(self, snapshot: str | SnapshotRecord) -> Manifest:
        """Return the manifest of a snapshot: processes, regions, files, sizes in bytes, and the
        requirements of a restore.

        Raises:
            NotFound: There is no such snapshot.
        """
        record = self._record(snapshot)
        try:
            return self.loop.run(self.core.manifest(record))
        except (Damaged, ObjectMissing) as error:
            if record.quarantined:
                raise lost(record) from error
            raise

    def reader(self, snapshot: str | SnapshotRecord) -> SnapshotReader:
        """Return a reader of a snapshot's memory and files. It pins nothing: once the snapshot is
        forgotten, a collection may delete what it reads.

        Raises:
            NotFound: There is no such snapshot.
        """
        from icecore.store.snapshot.reader import SnapshotReader

        return SnapshotReader(self.core, self.manifest(snapshot), self.loop.loop)

    def diff(self, older: str | SnapshotRecord, newer: str | SnapshotRecord) -> Difference:
        """Compare two snapshots by whole cells (1 MiB), from their maps alone.

        Raises:
            NotFound: There is no such snapshot.
        """
        from icecore.snapshots import difference

        return difference.compare(self.reader(older), self.reader(newer))

    def update(
        self,
        snapshot: str | SnapshotRecord,
        *,
        pinned: bool | None = None,
        tags: Sequence[str] | None = None,
    ) -> SnapshotRecord:
        """Pin or unpin a snapshot, or replace its tags; None leaves either unchanged.

        Raises:
            NotFound: There is no such snapshot.
        """
        return self.loop.run(
            self.core.update(self._record(snapshot).snapshot, pinned=pinned, tags=tags)
        )

    def plan_forget(self, policy: Policy, *, job: str = "") -> list[Decision]:
        """Return what a retention policy would keep, and why, job by job, oldest first. Changes
        nothing.

        Args:
            job: Apply the policy to this job only.

        Raises:
            UsageError: The policy would keep nothing.
        """
        from icecore.store.maintenance import forget

        return forget.plan(self.snapshots(job=job), policy)

    def plan_free(self, snapshots: Iterable[str | SnapshotRecord]) -> Freed:
        """Return the bytes that `gc` would free once these snapshots are forgotten. Changes nothing.

        Raises:
            NotFound: One of the snapshots does not exist.
            Damaged: A snapshot cannot be read, so its needs are unknown.
        """
        from icecore.store.maintenance.gc import Collector

        names = [self._record(snapshot).snapshot for snapshot in snapshots]
        return self.loop.run(Collector(self.core).plan_forget(names))

    def forget(self, snapshots: Iterable[str | SnapshotRecord]) -> list[SnapshotRecord]:
        """Remove snapshots from the list, in one transaction; `gc` then frees what only they needed.

        Returns:
            The removed snapshots. Pinned ones stay.

        Raises:
            NotFound: One of the snapshots does not exist.
        """
        names = [self._record(snapshot).snapshot for snapshot in snapshots]
        return self.loop.run(self.core.forget(names))
