"""The public Repository: opens, lists, compares and cleans, synchronously; everything that waits
runs in one background event loop.

What few commands need is imported where it is used: to load all took as long as many a command.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TypeVar

from icecore import addressing
from icecore.config import Config
from icecore.errors import Damaged, IcecoreError, NotFound, ObjectMissing, StoreError, UsageError
from icecore.events import Event, Sink, discard
from icecore.passphrase import Passphrase, current
from icecore.places import backend_at
from icecore.store.backend.base import Backend
from icecore.store.format.keys import Parameters
from icecore.store.format.manifest import Manifest
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import Repository as Core
from icecore.store.runtime.loop import LoopThread
from icecore.trust import Client

if TYPE_CHECKING:
    from icecore.difference import Difference
    from icecore.store.format.slots import Slot, Slots
    from icecore.store.log.identity import Mend
    from icecore.store.maintenance.check import Report
    from icecore.store.maintenance.diagnosis import Plan as RepairPlan
    from icecore.store.maintenance.forget import Decision, Policy
    from icecore.store.maintenance.gc import Freed
    from icecore.store.maintenance.gc import Options as GcOptions
    from icecore.store.maintenance.gc import Plan as GcPlan
    from icecore.store.maintenance.gc import Result as GcResult
    from icecore.store.maintenance.repair import Repairer
    from icecore.store.maintenance.stats import Stats
    from icecore.store.replication.reconcile import Plan as SyncPlan
    from icecore.store.replication.replicas import Synced
    from icecore.store.replication.transfer import Copied
    from icecore.store.snapshot.reader import SnapshotReader

T = TypeVar("T")


class Repository:
    """An open repository; `open` and `create` make them. A context manager; all methods may be
    called from any thread.

    Everything raises `icecore.errors.StoreError` when the storage fails and
    `icecore.errors.Damaged` when what is read is not what was written.

    Attributes:
        core: The repository of `icecore.store`, which lives in ``loop``.
        loop: The background event loop.
    """

    def __init__(
        self,
        core: Core,
        loop: LoopThread,
        state: str = "",
        *,
        config: Config | None = None,
        owner: Repository | None = None,
    ) -> None:
        self.core = core
        self.loop = loop
        self._state = state
        self._config = config
        self._owner = owner
        self._siblings: list[Repository] | None = None

    @classmethod
    def open(
        cls,
        location: str | os.PathLike[str],
        *,
        replicas: Sequence[str] = (),
        passphrase: Passphrase | None = None,
        plain: bool = False,
        state: str = "",
        config: Config | None = None,
        rebuild: bool = False,
        emit: Sink = discard,
    ) -> Repository:
        """Open the repository at a location.

        Args:
            location: Its directory, or ``s3://BUCKET/PREFIX``.
            replicas: Locations of its replicas, the nearest first: what they have in common with it
                is read from the first that has it, this location before all of them unless it is
                named among them. One that cannot be reached is told of and passed over.
            passphrase: Gives it, if the repository is encrypted; None: ``config``'s file or
                command, if there is one, else ICECORE_PASSPHRASE_FILE, …_COMMAND;
                ICECORE_PASSPHRASE, or the terminal. Where one is given, other than by the terminal,
                a plain repository is refused.
            plain: A plain repository is meant all the same.
            config: Says how buckets are reached (sections [s3] and [cache]). None: what
                `icecore.config.load` gives.
            state: Directory in which is remembered which repository is where, and its newest state:
                another one, or an older one, shown later is an error. Empty: this node's.
            rebuild: Open it even if nothing is left of its configuration, to `repair` it.
            emit: Gets the events of everything done through it.

        Raises:
            NotFound: There is none.
            WrongPassphrase: It is encrypted, and there is no passphrase or a wrong one.
            RepositoryReplaced: This node knows another repository there, or an encrypted one.
            PlainRefused: It is plain, and a passphrase is given.
            RecordDamaged: What this node remembers is damaged.
            RollbackDetected: It shows an older state than this node has seen (raised by whatever
                reads the state first).
            FormatTooNew: A later version of icecore wrote it.
        """
        backend = _with_replicas(os.fspath(location), replicas, config, emit)
        client = Client(state, config)
        return cls._make(
            backend,
            state,
            config,
            lambda: client.open(
                backend, passphrase=passphrase, plain=plain, rebuild=rebuild, emit=emit
            ),
        )

    @classmethod
    def create(
        cls,
        location: str | os.PathLike[str],
        *,
        shard_bytes: int = 64 << 20,
        passphrase: Passphrase | None = None,
        plain: bool = False,
        state: str = "",
        config: Config | None = None,
        emit: Sink = discard,
    ) -> Repository:
        """Make a repository at a location; a directory is made where it is missing, a bucket has to
        be there.

        Args:
            shard_bytes: Size in bytes at which an object of chunks is closed: 1 MiB to 1 GiB.
            passphrase: Encrypt it; what this gives opens it. None: it is not encrypted.
            plain: Let it be plain although this node knows an encrypted one there.
            state, config, emit: As in `open`.

        Raises:
            PlainRefused: This node knows an encrypted one there.
            UsageError: There is one already, or the storage does not do what a repository needs
                (hard links, conditional writes).
        """
        if not 1 << 20 <= shard_bytes <= 1 << 30:
            raise UsageError(
                f"shards of {shard_bytes} bytes", cure="use 1 MiB to 1 GiB; 64 MiB serves well"
            )
        backend = backend_at(os.fspath(location), create=True, config=config, emit=emit)
        parameters, client = Parameters(shard_bytes), Client(state, config)
        return cls._make(
            backend,
            state,
            config,
            lambda: client.create(
                backend, parameters, passphrase=passphrase, plain=plain, emit=emit
            ),
        )

    @classmethod
    def _make(
        cls,
        backend: Backend,
        state: str,
        config: Config | None,
        make: Callable[[], Coroutine[Any, Any, Core]],
    ) -> Repository:
        loop = LoopThread()
        try:
            core = loop.run(make())
        except BaseException:
            loop.run(backend.close())
            loop.close()
            raise
        return cls(core, loop, state, config=config)

    @property
    def location(self) -> str:
        """Where it is, in words."""
        return self.core.backend.where

    @property
    def id(self) -> str:
        """Its id, 32 hexadecimal digits; a copy made by copying files has the same."""
        return self.core.config.id

    def snapshots(self, *, job: str = "", tags: Iterable[str] = ()) -> list[SnapshotRecord]:
        """The snapshots in order of their commits.

        Args:
            job: Only this job's.
            tags: Only those with all of these tags.
        """
        wanted = set(tags)
        found = self.loop.run(self.core.snapshots())
        return [
            record for record in found if job in ("", record.job) and wanted <= set(record.tags)
        ]

    def find(self, snapshot: str) -> SnapshotRecord:
        """The snapshot that is meant by an id, the beginning of one, ``JOB``, ``JOB~1``, ``JOB@1``
        or ``latest`` (`icecore.addressing.resolve`).

        Raises:
            NotFound: None is.
            UsageError: Several ids begin so.
        """
        # The usual words need a page of the list, or none; however many snapshots there are.
        if addressing.is_id(snapshot):
            try:
                return self.loop.run(self.core.find(snapshot))
            except NotFound:
                pass  # it may yet be the name of a job
        found = self.loop.run(self.core.newest_of(snapshot)) if snapshot else None
        return found or addressing.resolve(self.snapshots(), snapshot)

    def manifest(self, snapshot: str | SnapshotRecord) -> Manifest:
        """All that is known of a snapshot: processes, regions, files, sizes in bytes, what a
        restore needs.

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
        """A reader of a snapshot's memory and files. It pins nothing: what it reads may be
        collected once the snapshot is forgotten.

        Raises:
            NotFound: There is no such snapshot.
        """
        from icecore.store.snapshot.reader import SnapshotReader

        return SnapshotReader(self.core, self.manifest(snapshot), self.loop.loop)

    def diff(self, older: str | SnapshotRecord, newer: str | SnapshotRecord) -> Difference:
        """What differs between two snapshots, by whole cells (1 MiB), from their maps alone.

        Raises:
            NotFound: There is no such snapshot.
        """
        from icecore import difference

        return difference.compare(self.reader(older), self.reader(newer))

    def plan_forget(self, policy: Policy, *, job: str = "") -> list[Decision]:
        """What a retention policy would keep and why, job by job, oldest first; nothing is changed.

        Args:
            job: Apply it to this job only.

        Raises:
            UsageError: The policy would keep nothing.
        """
        from icecore.store.maintenance import forget

        return forget.plan(self.snapshots(job=job), policy)

    def plan_free(self, snapshots: Iterable[str | SnapshotRecord]) -> Freed:
        """What forgetting these snapshots would free, in bytes, once `gc` has run; nothing is
        changed.

        Raises:
            NotFound: One of them does not exist.
            Damaged: A snapshot cannot be read, so what it needs is unknown.
        """
        from icecore.store.maintenance.gc import Collector

        names = [self._record(snapshot).snapshot for snapshot in snapshots]
        return self.loop.run(Collector(self.core).plan_forget(names))

    def forget(self, snapshots: Iterable[str | SnapshotRecord]) -> list[SnapshotRecord]:
        """Take snapshots off the list, in one transaction; `gc` then frees what only they needed.

        Returns:
            Those that were removed: pinned ones stay.

        Raises:
            NotFound: One of them does not exist.
        """
        names = [self._record(snapshot).snapshot for snapshot in snapshots]
        return self.loop.run(self.core.forget(names))

    def update(
        self,
        snapshot: str | SnapshotRecord,
        *,
        pinned: bool | None = None,
        tags: Sequence[str] | None = None,
    ) -> SnapshotRecord:
        """Pin or unpin a snapshot, or replace its labels; None leaves them as they are.

        Raises:
            NotFound: There is no such snapshot.
        """
        return self.loop.run(
            self.core.update(self._record(snapshot).snapshot, pinned=pinned, tags=tags)
        )

    def plan_gc(self, options: GcOptions | None = None) -> GcPlan:
        """What a garbage collection would do, bytes included; nothing is changed.

        Raises:
            Damaged: A kept snapshot cannot be read, so what it needs is unknown.
        """
        from icecore.store.maintenance.gc import Collector

        return self.loop.run(Collector(self.core, options).plan())

    def gc(self, options: GcOptions | None = None) -> GcResult:
        """Delete what no snapshot and no open session needs, and rewrite objects that are mostly
        dead. Safe beside everything else.

        Raises:
            Damaged: A kept snapshot cannot be read, so what it needs is unknown; nothing was
                deleted.
        """
        from icecore.store.maintenance.gc import Collector

        return self.loop.run(Collector(self.core, options).collect())

    def check(self, *, read_data: float = 0.0, register: bool = True) -> Report:
        """Look at every object that the snapshots need, while the repository is in use.

        Args:
            read_data: Share (0 to 1) of the data that is read, decoded and verified as well.
            register: Keep what is looked at from being collected meanwhile; without, for places
                that cannot be written to.

        Returns:
            What was found; damage is reported, not raised.
        """
        from icecore.store.maintenance.check import check

        return self.loop.run(check(self._itself(), read_data=read_data, register=register))

    def _itself(self) -> Core:
        """Without copies that are kept elsewhere: what is damaged here has to be seen."""
        core = self.core
        return Core(core.backend.source, core.config, core.keys, core.log, core.emit)

    def create_replica(
        self,
        location: str | os.PathLike[str],
        *,
        passphrase: Passphrase | None = None,
        plain: bool = False,
        emit: Sink = discard,
    ) -> Repository:
        """Make an empty replica: a repository with the same master secret, its own log and its own
        passphrases, that `sync_to` fills.

        Args:
            location: Where; a directory is made where it is missing, a bucket has to be there.
            passphrase: Opens it, if this one is encrypted; None: as for `open`.
            plain: Let that of a plain repository be plain although this node knows an encrypted one
                there.

        Raises:
            PlainRefused: This node knows an encrypted one there.
            UsageError: There is a repository already, or the place does not do what one needs.
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
        """What `sync_to` would do; nothing is changed. Arguments and errors as there."""
        from icecore.store.replication import reconcile

        wanted = self._meant(snapshots, forget)

        async def look(target: Core) -> SyncPlan:
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
        """Bring snapshots to a replica: only what is missing travels, as it is. Safe to interrupt,
        and goes on where it was.

        Pins and tags travel too: of a snapshot that both have, the marks that were changed last
        count, and where both were changed it gets what both say.

        Args:
            location: The replica's.
            snapshots: Which; None: all.
            job: Only this job's, where ``snapshots`` names none.
            forget: Also forget there what came from here and has been forgotten here since, unless
                it is pinned there.
            register: Keep what is read here from being collected meanwhile; without, for places
                that cannot be written to.

        Returns:
            What was done; snapshots that are damaged here are told of and left out, and then
            nothing is forgotten.

        Raises:
            UsageError: It is no replica of this repository; or forgets are asked for of named
                snapshots, or of a repository that lists none.
            StoreError: Storage failed, or a collector is at work there for too long.
        """
        from icecore.store.replication import reconcile
        from icecore.store.replication.replicas import sync

        wanted = self._meant(snapshots, forget)

        async def run(target: Core) -> Synced:
            todo = await reconcile.plan(self.core, target, wanted, forget=forget, job=job)
            return await sync(self.core, target, todo, register=register)

        return self._with_replica(location, run)

    def _meant(
        self, snapshots: Iterable[str | SnapshotRecord] | None, forget: bool
    ) -> list[SnapshotRecord] | None:
        if snapshots is not None and forget:
            raise UsageError(
                "forgets are carried of all snapshots or of a job's, not of named ones",
                cure="leave the names out, or name a job",
            )
        return None if snapshots is None else [self._record(snapshot) for snapshot in snapshots]

    def _with_replica(
        self, location: str | os.PathLike[str], work: Callable[[Core], Coroutine[Any, Any, T]]
    ) -> T:
        async def run() -> T:
            backend = backend_at(os.fspath(location), config=self._config, emit=self.core.emit)
            try:
                return await work(await self._open_replica(backend))
            finally:
                await backend.close()

        return self.loop.run(run())

    @property
    def _client(self) -> Client:
        return Client(self._state, self._config)

    async def _open_replica(self, backend: Backend) -> Core:
        """Open a replica of this repository, which is encrypted if this one is."""
        return await self._client.open(
            backend, secret=self.core.keys.secret, plain=not self.encrypted, emit=self.core.emit
        )

    def copy_to(
        self,
        location: str | os.PathLike[str],
        snapshots: Iterable[str | SnapshotRecord] | None = None,
        *,
        passphrase: Passphrase | None = None,
        register: bool = True,
    ) -> Copied:
        """Copy snapshots to any other repository: all is stored anew under its keys. Safe to
        interrupt; what is copied is not copied again.

        Args:
            location: The other's.
            snapshots: Which; None: all that it does not have.
            passphrase: Opens it, if it is encrypted; None: as for `open`.
            register: Keep what is read here from being collected meanwhile; without, for places
                that cannot be written to.

        Returns:
            What was done; snapshots that are damaged here are told of and left out.
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

    def holder(self, snapshot: str) -> Repository:
        """The repository that lists a snapshot; see `locate`."""
        return self.locate(snapshot)[0]

    def locate(self, snapshot: str) -> tuple[Repository, SnapshotRecord]:
        """The repository that lists a snapshot, and how: this one, or, if it does not (as while its
        replication goes on) or only in quarantine, the first replica that lists it whole.

        It reads from all of them, and is closed with this one.

        Raises:
            NotFound: None lists it.
            UsageError: Several ids begin so.
        """
        found: tuple[Repository, SnapshotRecord] | None = None
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

    def _others(self) -> list[Repository]:
        """The replicas as repositories of their own."""
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
                    Repository(opened, self.loop, self._state, config=self._config, owner=self)
                )
        return self._siblings

    @property
    def encrypted(self) -> bool:
        """Whether it takes a passphrase to open it."""
        return self.core.keys.encrypted

    def key_slots(self) -> list[Slot]:
        """The slots of an encrypted repository: each opens with a passphrase of its own.

        Raises:
            UsageError: It is not encrypted.
        """
        from icecore.store.format import slots as slot_changes
        from icecore.store.log import keychain

        found = self.loop.run(keychain.newest(self.core.backend))
        if found.slots is None:
            raise UsageError(
                f"{self.location} is not encrypted",
                cure="'icecore init --encrypt' makes one that is",
            )
        slot_changes.verify(found.name, found.slots, self.core.keys.secret)
        return found.slots.slots

    def add_passphrase(self, label: str, passphrase: bytes) -> list[Slot]:
        """Let a further passphrase open the repository; returns the slots that there are now.

        Raises:
            UsageError: The label is taken, the passphrase is too short, or the repository is not
                encrypted.
        """
        from icecore.store.format import slots as slot_changes

        return self._change_slots(
            lambda slots: slot_changes.add(
                slots, self.core.keys.secret, passphrase, label, slot_changes.Cost()
            )
        )

    def remove_passphrase(self, which: str) -> list[Slot]:
        """Let a passphrase, given by its slot's label or id, open it no longer. Who has had it may
        have kept what it opens: the data is as before.

        Raises:
            NotFound: There is no such slot.
            UsageError: It is the only one, or the repository is not encrypted.
        """
        from icecore.store.format import slots as slot_changes

        return self._change_slots(
            lambda slots: slot_changes.remove(slots, self.core.keys.secret, which)
        )

    def change_passphrase(self, which: str, passphrase: bytes) -> list[Slot]:
        """Put another passphrase in the place of one, given by its slot's label or id (empty: of
        the only one).

        Raises:
            NotFound: There is no such slot.
            UsageError: There are several and none is named, the passphrase is too short, or the
                repository is not encrypted.
        """

        from icecore.store.format import slots as slot_changes

        def edit(slots: Slots) -> Slots:
            if not which and len(slots.slots) > 1:
                raise UsageError(
                    f"there are {len(slots.slots)} slots",
                    cure="name one; 'icecore key list' lists them",
                )
            return slot_changes.rotate(
                slots,
                self.core.keys.secret,
                which or slots.slots[0].id,
                passphrase,
                slot_changes.Cost(),
            )

        return self._change_slots(edit)

    def _change_slots(self, edit: Callable[[Slots], Slots]) -> list[Slot]:
        from icecore.store.log import keychain

        return self.loop.run(keychain.change(self.core.backend, self.core.keys, edit)).slots

    def recovery_file(self) -> bytes:
        """The content of a recovery file: what `import_keys` needs to open this repository again
        where it has lost its keys or its configuration.

        Of a repository that is not encrypted it is a secret; of an encrypted one it needs one of
        the passphrases that there are now.
        """
        from icecore.store.log import recovery

        return self.loop.run(recovery.export(self.core))

    @staticmethod
    def import_keys(
        location: str | os.PathLike[str],
        name: str,
        data: bytes,
        *,
        passphrase: Passphrase | None = None,
        config: Config | None = None,
        emit: Sink = discard,
    ) -> list[Mend]:
        """Put back from a recovery file what a repository has lost of its keys and its
        configuration; what is whole there stays.

        Args:
            name, data: The file's name, for messages, and its content.
            location, passphrase, config, emit: As of `open`; the passphrase is one of the time of
                the file.

        Returns:
            What was put back.

        Raises:
            UsageError: It is the file of another repository.
            Damaged: The file is.
        """
        from icecore.store.log.recovery import Restorer

        backend = backend_at(os.fspath(location), config=config, emit=emit)
        restorer = Restorer(backend, name, data, passphrase or current(config), emit=emit)
        with LoopThread() as loop:
            try:
                return loop.run(restorer.apply())
            finally:
                loop.run(backend.close())

    def plan_repair(
        self,
        source: Repository | str | os.PathLike[str] | None = None,
        *,
        read_data: float = 1.0,
        accept_rollback: bool = False,
    ) -> RepairPlan:
        """What a repair would put right, and what is lost; nothing is changed.

        Args:
            source: A replica, or its location: what is damaged here is looked for there first.
            read_data: Share (0 to 1) of the data that is read; damage to what is not read is not
                found.
            accept_rollback: Go on from what is there even where this node has seen newer log
                entries that are absent, or other ones.

        Raises:
            UsageError: ``source`` is no replica of this repository.
            RollbackDetected: This node has seen a newer state, and that is not accepted.
        """
        return self._repair(source, lambda repairer: repairer.plan(), read_data, accept_rollback)

    def repair(
        self,
        source: Repository | str | os.PathLike[str] | None = None,
        *,
        read_data: float = 1.0,
        accept_rollback: bool = False,
    ) -> RepairPlan:
        """Put right what can be, in one transaction; what still reads is not touched, and snapshots
        that lost data stay listed, quarantined.

        Arguments and errors as of `plan_repair`; returns what was done.
        """
        return self._repair(source, lambda repairer: repairer.apply(), read_data, accept_rollback)

    def _repair(
        self,
        source: Repository | str | os.PathLike[str] | None,
        what: Callable[[Repairer], Coroutine[Any, Any, RepairPlan]],
        read_data: float,
        accept_rollback: bool,
    ) -> RepairPlan:
        from icecore.store.maintenance.repair import Repairer

        if source is None:
            return self.loop.run(
                what(Repairer(self._itself(), read_data=read_data, accept_rollback=accept_rollback))
            )

        async def run() -> RepairPlan:
            # Its back end must be of this event loop.
            place = source.location if isinstance(source, Repository) else os.fspath(source)
            backend = backend_at(place, config=self._config, emit=self.core.emit)
            try:
                return await what(
                    Repairer(
                        self._itself(),
                        await self._open_replica(backend),
                        read_data=read_data,
                        accept_rollback=accept_rollback,
                    )
                )
            finally:
                await backend.close()

        return self.loop.run(run())

    def stats(self, *, register: bool = True) -> Stats:
        """Bytes by job, lineage and codec, live and dead.

        Args:
            register: Keep what is read from being collected meanwhile; without, for places that
                cannot be written to.
        """
        from icecore.store.maintenance.stats import stats

        return self.loop.run(stats(self.core, register=register))

    def _record(self, snapshot: str | SnapshotRecord) -> SnapshotRecord:
        return snapshot if isinstance(snapshot, SnapshotRecord) else self.find(snapshot)

    def close(self) -> None:
        """Let go of the storage and end the background loop."""
        if self._owner is None and not self.loop.loop.is_closed():
            self.loop.run(self.core.close())
            self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Repository({self.location!r})"


def lost(record: SnapshotRecord) -> Damaged:
    """The error of whoever needs what a snapshot in quarantine has lost."""
    cure = "'icecore repair --from PLACE' restores it from a replica that has it, 'icecore forget SNAPSHOT' gives it up"
    return Damaged("snapshot", record.snapshot, record.quarantined, cure=cure)


def _with_replicas(
    location: str, replicas: Sequence[str], config: Config | None, emit: Sink
) -> Backend:
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
