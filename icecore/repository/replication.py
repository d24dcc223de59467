"""Replicas and copies: bring snapshots to other repositories, and find the replica that has one."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Self, TypeVar

from icecore.access.passphrase import Passphrase, current
from icecore.access.places import backend_at
from icecore.config import Config
from icecore.errors import IcecoreError, NotFound, StoreError, UsageError
from icecore.events import Event, Sink, discard
from icecore.repository.opened import Opened
from icecore.store.backend.base import Backend
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository

if TYPE_CHECKING:
    from icecore.store.replication.reconcile import Plan as SyncPlan
    from icecore.store.replication.replicas import Synced
    from icecore.store.replication.transfer import Copied

T = TypeVar("T")


class Replication(Opened):
    """Makes and fills replicas, copies to other repositories, and reads from the nearest replica."""

    def create_replica(
        self,
        location: str | os.PathLike[str],
        *,
        passphrase: Passphrase | None = None,
        plain: bool = False,
        emit: Sink = discard,
    ) -> Self:
        """Make an empty replica: a repository with the same master secret, but with its own log and
        its own passphrases. `sync_to` fills it.

        Args:
            location: The replica's location. A missing directory is created; a bucket must exist.
            passphrase: Opens the replica, if this repository is encrypted. None: as for `open`.
            plain: Allow a plain replica although this node knows an encrypted repository there.

        Raises:
            PlainRefused: This node knows an encrypted repository there.
            UsageError: There already is a repository, or the storage lacks what one requires.
        """
        backend = backend_at(os.fspath(location), create=True, config=self._config, emit=emit)
        given = (passphrase or current(self._config)) if self.encrypted else None
        parameters, secret = self.core.config.parameters, self.core.keys.secret
        return self._make(
            backend,
            self._state,
            self._config,
            lambda: self._client.create(
                backend, parameters, passphrase=given, secret=secret, plain=plain, emit=emit
            ),
        )

    def plan_sync(
        self,
        location: str | os.PathLike[str],
        snapshots: Iterable[str | SnapshotRecord] | None = None,
        *,
        job: str = "",
        forget: bool = False,
    ) -> SyncPlan:
        """Return what `sync_to` would do. Changes nothing; takes the arguments of `sync_to`."""
        from icecore.store.replication import reconcile

        wanted = self._wanted(snapshots, forget)

        async def look(target: StoredRepository) -> SyncPlan:
            return await reconcile.plan(self.core, target, wanted, forget=forget, job=job)

        return self._with_replica(location, look)

    def sync_to(
        self,
        location: str | os.PathLike[str],
        snapshots: Iterable[str | SnapshotRecord] | None = None,
        *,
        job: str = "",
        forget: bool = False,
        register: bool = True,
    ) -> Synced:
        """Bring snapshots to a replica. Only missing objects travel, unchanged. Safe to interrupt;
        a later call resumes.

        Pins and tags travel too. If both repositories list a snapshot, the marks that changed last
        win; if both changed, the replica gets the union.

        Args:
            location: The replica's location.
            snapshots: The snapshots. None: all.
            job: Only this job's, where ``snapshots`` is None.
            forget: Also forget in the replica what came from here and was forgotten here since,
                unless it is pinned there.
            register: Protect what is read here from concurrent collections. Pass False where the
                storage is not writable.

        Returns:
            What was done. Snapshots that are damaged here are reported and left out; then nothing
            is forgotten.

        Raises:
            UsageError: The location holds no replica of this repository; or ``forget`` is combined
                with named snapshots or with a repository that lists none.
            StoreError: The storage failed, or a collector is active there for too long.
        """
        from icecore.store.replication import reconcile
        from icecore.store.replication.replicas import sync

        wanted = self._wanted(snapshots, forget)

        async def run(target: StoredRepository) -> Synced:
            todo = await reconcile.plan(self.core, target, wanted, forget=forget, job=job)
            return await sync(self.core, target, todo, register=register)

        return self._with_replica(location, run)

    def copy_to(
        self,
        location: str | os.PathLike[str],
        snapshots: Iterable[str | SnapshotRecord] | None = None,
        *,
        passphrase: Passphrase | None = None,
        register: bool = True,
    ) -> Copied:
        """Copy snapshots to any other repository, encoded again under its keys. Safe to interrupt;
        a later call does not copy again what was copied.

        Args:
            location: The other repository's location.
            snapshots: The snapshots. None: all that it lacks.
            passphrase: Opens the other repository, if it is encrypted. None: as for `open`.
            register: Protect what is read here from concurrent collections. Pass False where the
                storage is not writable.

        Returns:
            What was done. Snapshots that are damaged here are reported and left out.
        """
        from icecore.store.replication.transfer import copy

        wanted = (
            self.snapshots()
            if snapshots is None
            else [self._record(snapshot) for snapshot in snapshots]
        )
        backend = backend_at(os.fspath(location), config=self._config, emit=self.core.emit)
        try:
            opened = self.loop.run(
                self._client.open(backend, passphrase=passphrase, emit=self.core.emit)
            )
            return copy(self.core, opened, self.loop, wanted, register=register)
        finally:
            self.loop.run(backend.close())

    def holder(self, snapshot: str) -> Self:
        """Return the repository that lists a snapshot; see `locate`."""
        return self.locate(snapshot)[0]

    def locate(self, snapshot: str) -> tuple[Self, SnapshotRecord]:
        """Return the repository that lists a snapshot, and the record.

        That is this repository, or the first replica that lists the snapshot whole if this
        repository does not list it (as during its replication) or only in quarantine. The result
        reads from all replicas and is closed with this repository.

        Raises:
            NotFound: No repository lists the snapshot.
            UsageError: Several ids begin so.
        """
        found: tuple[Self, SnapshotRecord] | None = None
        missing: NotFound | None = None
        try:
            record = self.find(snapshot)
            found, snapshot = (self, record), record.snapshot
            if not record.quarantined:
                return found
        except NotFound as error:
            missing = error
        for sibling in self._others():
            try:
                record = sibling.find(snapshot)
            except NotFound:
                continue
            if not record.quarantined:
                return sibling, record
            found = found or (sibling, record)
        if found is None:
            assert missing is not None
            raise missing
        return found

    def _wanted(
        self, snapshots: Iterable[str | SnapshotRecord] | None, forget: bool
    ) -> list[SnapshotRecord] | None:
        if snapshots is not None and forget:
            raise UsageError(
                "--forget applies to all snapshots or to a job's, not to named snapshots",
                cure="leave out the names, or name a job",
            )
        return None if snapshots is None else [self._record(snapshot) for snapshot in snapshots]

    def _with_replica(
        self,
        location: str | os.PathLike[str],
        work: Callable[[StoredRepository], Coroutine[Any, Any, T]],
    ) -> T:
        async def run() -> T:
            backend = backend_at(os.fspath(location), config=self._config, emit=self.core.emit)
            try:
                return await work(await self._open_replica(backend))
            finally:
                await backend.close()

        return self.loop.run(run())

    def _others(self) -> list[Self]:
        """Return the reachable replicas as repositories."""
        from icecore.store.backend.replicas import ReplicaBackend

        if self._siblings is None:
            self._siblings = []
            core, places = self.core, self.core.backend.replicas
            own = core.backend.own if isinstance(core.backend, ReplicaBackend) else core.backend
            for place in (place for place in places if place is not own):
                try:
                    backend = ReplicaBackend(place, places, emit=core.emit)
                    opened = self.loop.run(self._open_replica(backend))
                except IcecoreError as error:
                    core.emit(
                        Event("store.replica_missing", {"place": place.where, "error": str(error)})
                    )
                    continue
                self._siblings.append(
                    type(self)(opened, self.loop, self._state, config=self._config, owner=self)
                )
        return self._siblings


def backend_with_replicas(
    location: str, replicas: Sequence[str], config: Config | None, emit: Sink
) -> Backend:
    """Return the storage at a location, read through its reachable replicas, the nearest first."""
    own = backend_at(location, config=config, emit=emit)
    if not replicas:
        return own
    from icecore.store.backend.replicas import ReplicaBackend

    nearest: list[Backend] = [] if location in replicas else [own]
    for place in replicas:
        try:
            nearest.append(
                own if place == location else backend_at(place, config=config, emit=emit)
            )
        except (NotFound, StoreError) as error:
            emit(Event("store.replica_missing", {"place": place, "error": str(error)}))
    return ReplicaBackend(own, nearest, emit=emit)
