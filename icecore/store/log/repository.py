"""A repository: combines storage, keys, log and sessions into the few calls with which the rest of
icecore stores and finds snapshots.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING, TypeVar

from icecore.errors import (
    Damaged,
    Distrusted,
    FormatTooNew,
    NotFound,
    ObjectExists,
    ObjectMissing,
    StoreError,
    StoreFull,
    UsageError,
    WrongPassphrase,
)
from icecore.events import Sink, discard
from icecore.store.backend.base import READERS_LEAVE, Backend
from icecore.store.format import marks
from icecore.store.format.envelope import is_encrypted
from icecore.store.format.keys import (
    CONFIG_KIND,
    ENCRYPTED_FORMAT,
    FORMAT,
    Config,
    Keys,
    Parameters,
    decode_config,
    encode_config,
    encode_slot,
    new_slot,
)
from icecore.store.format.names import CONFIG, copy_name, key_name, parse_name
from icecore.store.format.slots import Cost, new_slots
from icecore.store.format.state import LogState, SessionRecord, SnapshotRecord
from icecore.store.log import catalog, identity
from icecore.store.log.catalog import Pages
from icecore.store.log.chain import Log
from icecore.store.log.keychain import Admit, Passphrase, read_keys
from icecore.store.log.recent import RecentSegments
from icecore.store.log.watermark import Recollection, Watermark
from icecore.text import require_label

if TYPE_CHECKING:
    from icecore.store.format.manifest import Manifest
    from icecore.store.log.session import Session

T = TypeVar("T")

_RACERS = 4
_REMAINS_CURE = "remove what is there, or name another place"

#: What a reader without a session must be told.
UNREGISTERED = "no session is registered in the repository: a collection elsewhere may delete objects that are still needed, and then this fails"

#: Seconds between the heartbeats of a session.
BEAT_SECONDS = 60.0


class StoredRepository:
    """An open repository; ``create`` and ``open`` make them.

    Attributes:
        backend: Where its objects live.
        config: Its identity and parameters.
        keys: Its keys.
        log: Its transaction log.
        emit: Where events go.
    """

    def __init__(self, backend: Backend, config: Config, keys: Keys, log: Log, emit: Sink) -> None:
        self.backend = backend
        self.config = config
        self.keys = keys
        self.log = log
        self.log.emit = emit
        self.emit = emit
        self._recent = RecentSegments()

    @classmethod
    async def create(
        cls,
        backend: Backend,
        parameters: Parameters | None = None,
        *,
        passphrase: Passphrase | None = None,
        cost: Cost | None = None,
        secret: bytes = b"",
        watermark: Watermark | None = None,
        emit: Sink = discard,
    ) -> StoredRepository:
        """Make the place a repository.

        Args:
            passphrase: Encrypts the repository and opens it; None: it is not encrypted.
            cost: The cost of trying a passphrase.
            secret: The master secret of the repository that this becomes a replica of; by default a
                new one.

        Raises:
            UsageError: It is already a repository, the store lacks a required property, or the
                passphrase is too short.
            WrongPassphrase: An interrupted creation left a slot that the passphrase does not open.
        """
        await probe(backend)
        try:
            await backend.get(CONFIG, limit=CONFIG_KIND.object_limit)
        except ObjectMissing:
            pass
        else:
            raise UsageError(f"{backend.where} is already a repository")
        # An interrupted creation leaves its slot and first entry. They are reused, which also
        # settles a race of two creators.
        named, given = secrets.token_hex(16), b""
        if passphrase is None:
            slot = encode_slot(new_slot(secret))
        else:
            given = await asyncio.to_thread(passphrase)
            master = secret or secrets.token_bytes(32)
            slot = encode_slot(
                await asyncio.to_thread(new_slots, named, master, given, "first", cost)
            )
        await identity.agreed(
            backend, copy_name(key_name(0)), await identity.agreed(backend, key_name(0), slot.data)
        )
        keys = await read_keys(backend, (lambda: given) if passphrase is not None else None)
        if (passphrase is not None) != keys.encrypted or (secret and keys.secret != secret):
            raise _begun(backend)
        log = Log(backend, keys.log, watermark=watermark)
        await log.found()
        if any([generation > 1 async for generation in log.generations()]):
            raise UsageError(
                f"{backend.where} holds the log of a repository that lost its configuration",
                cure=_REMAINS_CURE,
            )
        number, named = (ENCRYPTED_FORMAT, keys.repository) if keys.encrypted else (FORMAT, named)
        config = Config(number, named, time.time_ns(), parameters or Parameters())
        data = await identity.agreed(backend, copy_name(CONFIG), encode_config(config, keys).data)
        if decode_config(CONFIG, data, keys).parameters != config.parameters:
            raise _begun(backend)
        config = decode_config(CONFIG, data, keys)
        try:
            await backend.create(CONFIG, [data])
        except ObjectExists as error:
            raise UsageError(f"{backend.where} is already a repository") from error
        await backend.keep_reserve()
        return cls(backend, config, keys, log, emit)

    @classmethod
    async def open(
        cls,
        backend: Backend,
        *,
        passphrase: Passphrase | None = None,
        secret: bytes = b"",
        watermark: Watermark | None = None,
        recollection: Recollection | None = None,
        admit: Admit | None = None,
        rebuild: bool = False,
        known: str = "",
        emit: Sink = discard,
    ) -> StoredRepository:
        """Open the repository in ``backend``.

        Args:
            passphrase: Called if the repository is encrypted.
            secret: The master secret of a repository that it must be a replica of; opens it without
                a passphrase.
            recollection: Where its configuration is remembered.
            admit: Called before anything but keys and configuration is read; for an encrypted
                repository, before the passphrase is asked for.
            rebuild: Create a configuration if none is left; for a repair, which stores it.
            known: The id that it had, as far as this client knows; used if ``rebuild`` finds none.

        Raises:
            WrongPassphrase: It is encrypted, and the passphrase is missing or wrong.
            NotFound: There is none.
            FormatTooNew: A later version wrote it.
            Damaged: Its configuration or key slot is damaged, and so is the second copy.
        """
        passphrase = identity.asked_once(passphrase)
        recalled = recollection.load() if recollection is not None else b""
        if recalled:
            try:
                keys = await read_keys(
                    backend,
                    passphrase,
                    secret,
                    encrypted=is_encrypted(recalled),
                    admit=admit,
                    emit=emit,
                )
                return cls._opened(
                    backend, decode_config(CONFIG, recalled, keys), keys, watermark, admit, emit
                )
            except (Damaged, Distrusted, FormatTooNew, UsageError, WrongPassphrase):
                pass  # another repository is here now, or none: its own objects count
        later: FormatTooNew | None = None
        try:
            data = await backend.get(CONFIG, limit=CONFIG_KIND.object_limit)
            keys = await read_keys(
                backend, passphrase, secret, encrypted=is_encrypted(data), admit=admit, emit=emit
            )
            try:
                config = decode_config(CONFIG, data, keys)
            except FormatTooNew as error:
                later = error  # its digest verifies: no damage, and no older copy may replace it
            else:
                if admit is not None:
                    admit(config.id, keys.encrypted)
        except (
            Damaged,
            Distrusted,
            FormatTooNew,
            ObjectMissing,
            UsageError,
            WrongPassphrase,
        ) as error:
            found = await identity.from_copies(
                backend,
                passphrase,
                secret,
                error,
                rebuild=rebuild,
                known=known,
                admit=admit,
                emit=emit,
            )
            keys, config, data = found.keys, found.config, found.data
        if later is not None:
            raise later
        repository = cls._opened(backend, config, keys, watermark, admit, emit)
        if recollection is not None:
            recollection.save(data)
        return repository

    @classmethod
    def _opened(
        cls,
        backend: Backend,
        config: Config,
        keys: Keys,
        watermark: Watermark | None,
        admit: Admit | None,
        emit: Sink,
    ) -> StoredRepository:
        if admit is not None:
            admit(config.id, keys.encrypted)
        return cls(backend, config, keys, Log(backend, keys.log, watermark=watermark), emit)

    async def snapshots(self) -> list[SnapshotRecord]:
        """Return all snapshots in order of their commits."""
        return await self._current(
            lambda state: catalog.everything(state, self.log.pages), again=True
        )

    async def find(self, snapshot: str) -> SnapshotRecord:
        """Return the record of a snapshot.

        Raises:
            NotFound: It is not listed.
        """
        return await self._current(lambda state: self._find(state, snapshot), prove=False)

    async def _find(self, state: LogState, snapshot: str) -> SnapshotRecord:
        record = await catalog.find(state, snapshot, self.log.pages)
        if record is None:
            raise NotFound(
                f"there is no snapshot {snapshot} in {self.backend.where}",
                cure="'icecore ls' lists them",
            )
        return record

    async def newest_of(self, job: str) -> SnapshotRecord | None:
        """Return the newest snapshot of a job, if it has one; read no more of the list than what
        came after it.
        """
        return await self._current(lambda state: catalog.newest_of(state, job, self.log.pages))

    async def manifest(self, snapshot: str | SnapshotRecord) -> Manifest:
        """Return the manifest of a snapshot, given by id or by its record.

        A record is used as it is (that of a session's pin stays readable while the session is
        open); an id is looked up.

        Raises:
            NotFound: It is not listed.
            Damaged: The manifest is not what was written.
            ObjectMissing: The manifest is gone.
        """
        if isinstance(snapshot, SnapshotRecord):
            return await self._manifest(snapshot)

        async def read(state: LogState) -> Manifest:
            return await self._manifest(await self._find(state, snapshot))

        return await self._current(read, prove=False)

    async def _manifest(self, record: SnapshotRecord) -> Manifest:
        try:
            return await self._manifest_from(self.backend, record)
        except (Damaged, ObjectMissing) as error:
            self.backend.suspect(error)
            for replica in self.backend.replicas:
                try:
                    return await self._manifest_from(replica, record)
                except (Damaged, StoreError):
                    continue
            raise

    async def _manifest_from(self, backend: Backend, record: SnapshotRecord) -> Manifest:
        # numpy, which it needs, loads slowly, and the list of snapshots does without.
        from icecore.store.format.manifest import MANIFEST_KIND, decode_manifest

        parsed = parse_name(record.manifest)
        if parsed is None or parsed[0] != "manifest":
            raise Damaged(
                "snapshot", record.snapshot, f"its manifest has the name {record.manifest[:80]!a}"
            )
        data = await backend.get(record.manifest, limit=MANIFEST_KIND.object_limit)
        manifest = decode_manifest(
            data, self.keys.manifest, name=record.manifest, digest=record.manifest_digest
        )
        if manifest.snapshot != record.snapshot:
            raise Damaged(
                MANIFEST_KIND.title,
                record.manifest,
                f"it is of snapshot {manifest.snapshot}, not {record.snapshot}",
            )
        return manifest

    async def _current(
        self,
        read: Callable[[LogState], Awaitable[T]],
        *,
        prove: bool = True,
        again: bool = False,
    ) -> T:
        """Return the result of ``read`` on the newest state; repeat it if an object disappeared
        because the state moved on.

        Args:
            prove: As in ``Log.newest``. It makes no difference when one snapshot is looked up by
                its id: one that an entry lists was committed, and if none is found, or its objects
                are gone, the newest state is read.
            again: Find the newest state with `Log.again`.
        """
        entry = await (self.log.again() if again else self.log.newest(prove=prove))
        self.log.pages.keep(entry.state)
        while True:
            try:
                return await read(entry.state)
            except (ObjectMissing, NotFound):
                newer = await self.log.newest()
                if newer.digest == entry.digest:
                    raise
                entry = newer

    async def begin(
        self,
        base: str | None,
        purpose: str,
        *,
        load_index: bool = True,
        beat_seconds: float | None = BEAT_SECONDS,
        prove: bool = True,
        leave: int | None = None,
        insist: bool = False,
        excludes: Callable[[SessionRecord], bool] | None = None,
        host: str = "",
    ) -> Session:
        """Begin a writer's session.

        Args:
            base: The parent snapshot, pinned until the session ends.
            purpose: For people: dump, import, copy.
            load_index: Load the dedup index.
            beat_seconds: Seconds between heartbeats in the background of this event loop; None:
                only on request.
            prove: Establish at once that the session is registered. Otherwise, its commit does, for
                writers that store only under names of their own and whose work is void if it is
                not. Saves a request.
            leave: For a session that frees space, or only reads: it begins even if there is no
                room, as in ``Log.transact``.
            insist: Begin even if the space left is needed to free space, for a caller that has no
                other chance.
            excludes: Tells which open sessions it may not begin beside. None: none.
            host: Who holds it, for people. Empty: this host's name.

        Raises:
            NotFound: ``base`` is not listed.
            JobHeld: A session that it excludes is open.
            StoreFull: There is no room, or so little that it is left to those who free space.
        """
        pins = [] if base is None else [base]
        # A repository of an earlier version has none, or others have used it.
        room = await self.backend.keep_reserve()
        if leave is None and not room and not insist:
            raise StoreFull(
                f"{self.backend.where} is nearly full: what is left is needed to free space",
                cure="run 'icecore forget' and 'icecore gc', or free space there by other means",
            )
        return await self._begin(
            pins, purpose, load_index, beat_seconds, prove, leave, excludes, host
        )

    async def read_session(
        self, snapshot: str, *, purpose: str = "restore", beat_seconds: float | None = BEAT_SECONDS
    ) -> Session:
        """Begin a reader's session: until it ends (``abort``), nothing of ``snapshot`` is deleted,
        even if it is forgotten.

        Raises:
            NotFound: ``snapshot`` is not listed.
        """
        return await self._begin([snapshot], purpose, False, beat_seconds, True, READERS_LEAVE)

    async def _begin(
        self,
        pins: Sequence[str],
        purpose: str,
        load_index: bool,
        beat_seconds: float | None,
        prove: bool,
        leave: int | None,
        excludes: Callable[[SessionRecord], bool] | None = None,
        host: str = "",
    ) -> Session:
        from icecore.store.log import session as sessions  # loads numpy

        return await sessions.begin(
            self.backend,
            self.keys,
            self.log,
            self._recent,
            self.emit,
            pins=pins,
            purpose=purpose,
            load_index=load_index,
            every_seconds=beat_seconds,
            prove=prove,
            leave=leave,
            excludes=excludes,
            host=host,
        )

    async def forget(self, snapshots: Collection[str]) -> list[SnapshotRecord]:
        """Remove snapshots from the list, in one transaction; the collector deletes what only they
        reach.

        Returns:
            Those that were removed; pinned and unlisted ones are not.
        """
        removed: list[SnapshotRecord] = []

        def remove(record: SnapshotRecord) -> SnapshotRecord | None:
            if record.pinned:
                return record
            removed.append(record)
            return None

        async def change(state: LogState, pages: Pages) -> LogState:
            removed.clear()
            changed = await catalog.edit(state, snapshots, remove, pages)
            return changed if removed else state

        await self.log.transact(change, f"forget {len(snapshots)} snapshots", leave=0)
        return removed

    async def update(
        self, snapshot: str, *, pinned: bool | None = None, tags: Sequence[str] | None = None
    ) -> SnapshotRecord:
        """Pin or unpin a snapshot, or give it other tags.

        Raises:
            NotFound: It is not listed.
            UsageError: A new label is invalid.
        """
        updated: list[SnapshotRecord] = []

        def set_fields(record: SnapshotRecord) -> SnapshotRecord:
            for tag in set(tags or ()) - set(record.tags):
                require_label(tag)
            record = marks.marked(record, pinned=pinned, tags=tags)
            updated.append(record)
            return record

        async def change(state: LogState, pages: Pages) -> LogState:
            updated.clear()
            changed = await catalog.edit(state, [snapshot], set_fields, pages)
            if not updated:
                raise NotFound(
                    f"there is no snapshot {snapshot} in {self.backend.where}",
                    cure="'icecore ls' lists them",
                )
            return changed

        await self.log.transact(change, f"update {snapshot}", leave=READERS_LEAVE)
        return updated[0]

    async def close(self) -> None:
        """Close the back end."""
        await self.backend.close()


def _begun(backend: Backend) -> UsageError:
    return UsageError(
        f"{backend.where} holds an unfinished creation of another repository",
        cure="remove its 'keys' and 'copies', or name another place",
    )


async def probe(backend: Backend) -> None:
    """Test whether the store does what a repository relies on, above all create-if-absent.

    Raises:
        UsageError: It does not; the message says what.
        StoreError: It cannot be written to.
    """
    name = f"probe/{secrets.token_hex(16)}"
    first, second = secrets.token_bytes(100), secrets.token_bytes(100)
    cure = "use a file system with hard links, or an object store with conditional writes (If-None-Match: *)"
    twice = UsageError(
        f"{backend.where} lets an object be created twice: concurrent writers would lose data",
        cure=cure,
    )
    await backend.create(name, [first])
    raced = f"{name}-raced"
    try:
        try:
            await backend.create(name, [second])
        except ObjectExists:
            pass
        else:
            raise twice
        # Some stores check first and write later; only a race reveals that.
        racing = (backend.create(raced, [secrets.token_bytes(100)]) for _ in range(_RACERS))
        ended = await asyncio.gather(*racing, return_exceptions=True)
        for outcome in ended:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ObjectExists):
                raise outcome
        if ended.count(None) != 1:
            raise twice
        part = bytearray(10)
        await backend.get_into(name, 50, memoryview(part))
        listed = [info async for info in backend.list("probe/") if info.name == name]
        if (
            await backend.get(name) != first
            or part != first[50:60]
            or len(listed) != 1
            or listed[0].size != 100
        ):
            raise UsageError(f"{backend.where} does not return what was written", cure=cure)
    finally:
        await backend.delete(name)
        await backend.delete(raced)
    try:
        await backend.get(name)
    except ObjectMissing:
        return
    raise StoreError(f"{backend.where} still has an object that was deleted", cure=cure)
