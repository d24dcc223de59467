"""What a supervisor (`icecore.service.supervision.supervisor`) needs of the public calls, for one repository."""

from __future__ import annotations

from dataclasses import replace

from icecore import api
from icecore.config import Config
from icecore.dumper.dump import DumpResult
from icecore.dumper.stopping import StopRequest
from icecore.errors import Damaged, JobHeld, NotFound, ObjectMissing
from icecore.events import Sink
from icecore.host.jobs.identity import Identity
from icecore.host.jobs.job import Job
from icecore.repository import Repository
from icecore.restorer.restored import Restored
from icecore.store.format.contract import snapshot_owner
from icecore.store.format.state import SnapshotRecord
from icecore.store.maintenance.forget import Policy, plan


class RepositoryEngine:
    """The engine of one open repository and one configuration.

    Args:
        repository: Where snapshots are.
        config: Settings of dumps and restores.
        identity: The identity with which jobs are restored; None: that of the snapshot.
        owner: The user whose jobs and snapshots count, if there is no identity: others may have a
            job of the same name. Jobs without an identity are root's.
    """

    def __init__(
        self,
        repository: Repository,
        config: Config,
        identity: Identity | None = None,
        owner: int = 0,
    ) -> None:
        self._identity = identity
        self._user = owner if identity is None else identity.user
        self.user = None if identity is None else identity.user
        self._owners: dict[str, int] = {}
        self.registry = api.registry(config)
        self.core = repository.core
        self.loop = repository.loop
        self._repository = repository
        self._config = config

    def owns(self, job: Job) -> bool:
        """Return whether a job belongs to the user."""
        return job.description.user == self._user

    def find(self, name: str) -> Job:
        """Return the newest instance of a job.

        Raises:
            NotFound: There is none.
            JobHeld: It is another user's.
        """
        job = self.registry.find(name)
        if self.owns(job):
            return job
        if job.alive:
            raise JobHeld(f"another user of this node has a job {name}", cure="use another name")
        raise NotFound(
            f"there is no job {name}", cure="'icecore ps -a' lists the jobs of this node"
        )

    def snapshots(self, job: str) -> list[SnapshotRecord]:
        """Return the snapshots of a job in order of their commits. If there are only some whose
        owner cannot be read, return these, so that the job is not started anew as if it had no
        snapshot. They cannot be restored.

        Raises:
            StoreError: The repository cannot be reached.
        """
        found = [(one, self._owner(one)) for one in self._repository.snapshots(job=job)]
        own = [one for one, owner in found if owner == self._user]
        return own or [one for one, owner in found if owner is None]

    def _owner(self, record: SnapshotRecord) -> int | None:
        """Return the uid of a snapshot's job; None: it cannot be read."""
        if record.owner is not None:
            return record.owner
        if record.snapshot not in self._owners:
            try:
                self._owners[record.snapshot] = snapshot_owner(self._repository.manifest(record))
            except (Damaged, ObjectMissing):
                return None
        return self._owners[record.snapshot]

    def dump(self, instance: str, *, stopping: StopRequest, under: str, emit: Sink) -> DumpResult:
        """Take a snapshot of a job; raises what `icecore.dump` does.

        Args:
            stopping: Whether the job is to end with it; can be asked during the dump.
            under: Session without which the snapshot is not committed.
        """
        stop = stopping.asked  # the checks also depend on what is asked by now
        options = replace(api.dump_options(self._config), under=under, stop=stop)
        return api.dump(
            instance,
            self._repository,
            options,
            config=self._config,
            stopping=stopping,
            emit=emit,
        )

    def restore(self, snapshot: str, name: str, *, emit: Sink) -> Restored:
        """Restore a snapshot as the job of a name, with all its memory; raises what
        `icecore.restore` does.
        """
        options = replace(
            api.restore_options(self._config), instance=name, detach=True, identity=self._identity
        )
        restored = api.restore(snapshot, self._repository, options, config=self._config, emit=emit)
        restored.wait_resident()
        return restored

    def forget(self, policy: Policy, job: str) -> None:
        """Forget what a policy does not keep of a job's snapshots.

        A policy goes by the times of snapshots, which are wrong after the wall clock was set. So
        the newest commits stay whatever their times, as many as the policy's ``last`` and at least one.
        """
        known = [
            one
            for one in self.snapshots(job)
            if self._identity is None or self._owner(one) == self._user
        ]
        newest = {one.snapshot for one in known[-max(1, policy.last) :]}
        gone = [
            one.record
            for one in plan(known, policy)
            if not one.keep and one.record.snapshot not in newest
        ]
        if gone:
            self._repository.forget(gone)
