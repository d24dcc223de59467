"""Replicas: copies snapshots between repositories that share a master secret. Objects move as they
are, and only missing ones are transferred.

A replica is a repository of its own (configuration, passphrases, log, sessions, index) whose
shards, node packs, manifests and hints have the same names and bytes as elsewhere, so that a
restore can read each from wherever it is. Only here may a name be created again after it was
deleted. The replica's collector loses nothing by that:

1. What is needed is not condemned in the state in which the sync's session began, and no collector
   that decided before can delete it: none was at work in that state (each has a session while it
   deletes), or else the sync waits.
2. A collector that begins later deletes only what was condemned before the oldest session, so
   nothing that this session needs, created again or found.
3. A sync never deletes what it stored, as others may have come to use it. What an interrupted sync
   leaves is for the collector, or for the next sync to use.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from contextlib import nullcontext
from functools import partial

import msgspec
import numpy as np
from msgspec.structs import replace

from icecore.errors import (
    Damaged,
    IcecoreError,
    NotFound,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
)
from icecore.events import Event, phase
from icecore.store.backend.base import READERS_LEAVE, Backend
from icecore.store.format import codec
from icecore.store.format.cell import Records
from icecore.store.format.cellmap import PACK, NodeDecoder, parse_pack_footer
from icecore.store.format.chunk import chunk_id
from icecore.store.format.cipher import opened_piece
from icecore.store.format.container import TAIL_BYTES
from icecore.store.format.hints import decode_hints
from icecore.store.format.keys import Keys
from icecore.store.format.manifest import NODE_REF, decode_manifest
from icecore.store.format.names import object_name, parse_name
from icecore.store.format.shard import SHARD, parse_footer
from icecore.store.format.state import LogState, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.lookup import Index
from icecore.store.log.repository import UNREGISTERED, StoredRepository
from icecore.store.log.session import Session
from icecore.store.log.tables import index_entries, read_table
from icecore.store.maintenance.gc import COLLECT, Collector
from icecore.store.maintenance.reach import Reach
from icecore.store.replication import reconcile
from icecore.store.replication.reconcile import Plan
from icecore.store.runtime.parallel import each

PURPOSE = "sync"
#: Objects in transfer at once; each is held in memory whole.
AT_ONCE = 4
#: The longest object: shards of 1 GiB and their footers.
_LIMIT = 2 << 30
_TRIES = 5
_BACKOFF_SECONDS = 0.1
_POLL_SECONDS = 0.5


class Lost(msgspec.Struct, frozen=True):
    """A snapshot that could not be copied, and why."""

    snapshot: str
    error: IcecoreError


class Synced(msgspec.Struct):
    """What a sync did.

    Attributes:
        snapshots: Ids of the copied snapshots.
        objects, bytes: What was transferred.
        present: Objects that the target had already.
        marked: Ids of existing snapshots that got the source's pins or tags.
        forgotten: Ids of snapshots forgotten in the target because the source has forgotten them.
        kept: Ids of snapshots not forgotten because they are pinned in the target.
        lost: Snapshots that were left out because objects of theirs are damaged or missing in the
            source.
    """

    snapshots: list[str] = msgspec.field(default_factory=list)
    objects: int = 0
    bytes: int = 0
    present: int = 0
    marked: list[str] = msgspec.field(default_factory=list)
    forgotten: list[str] = msgspec.field(default_factory=list)
    kept: list[str] = msgspec.field(default_factory=list)
    lost: list[Lost] = msgspec.field(default_factory=list)


async def sync(
    source: StoredRepository,
    target: StoredRepository,
    todo: Plan,
    *,
    patience: float = 60.0,
    register: bool = True,
) -> Synced:
    """Execute the plan of `icecore.store.replication.reconcile.plan`: marks first, as a pin
    protects; then the snapshots, each with its objects first and its entry in the replica's log
    last; then, if no snapshot was left out, the deletions. Safe to stop anywhere and to restart
    with a new plan.

    Args:
        source: Where the snapshots are, in the same event loop as ``target``. Reads from other
            replicas as well, if its back end does.
        todo: What to do; what has been done meanwhile is skipped.
        patience: Seconds to wait for collectors at work in the target.
        register: Protect what is read from collection. Not for a source that cannot be written to:
            what is then missing is reported and left out.

    Raises:
        UsageError: The two do not share a master secret.
        StoreError: Storage failed, or a collector of the target is at work for too long.
    """
    reconcile.require_replica(source, target)
    run = _Sync(source, target, patience)
    if not register:
        target.emit(Event("sync.warning", {"message": UNREGISTERED}))
    run.done.marked = await reconcile.carry_marks(target, todo.mark)
    for record in todo.bring:
        try:
            reading = (
                await source.read_session(record.snapshot, purpose=PURPOSE) if register else None
            )
        except NotFound:
            continue  # forgotten meanwhile
        async with reading or nullcontext():
            await run.bring(reading.base or record if reading is not None else record)
    # A snapshot that could not be copied is a reason to keep what only the target has.
    if todo.forget and not run.done.lost:
        run.done.forgotten = [
            record.snapshot for record in await target.forget([one.snapshot for one in todo.forget])
        ]
        left = {record.snapshot for record in await target.snapshots()}
        run.done.kept = [record.snapshot for record in todo.forget if record.snapshot in left]
    return run.done


class _Sync:
    def __init__(self, source: StoredRepository, target: StoredRepository, patience: float) -> None:
        self.done = Synced()
        self._source = source
        self._target = target
        self._patience = patience
        self._looked_at: set[bytes] = set()
        self._index: Index | None = None

    async def bring(self, record: SnapshotRecord) -> None:
        """Copy one snapshot."""
        if record.quarantined:
            self._lose(record, Damaged("snapshot", record.snapshot, record.quarantined))
            return
        with phase(self._target.emit, "sync.snapshot", snapshot=record.snapshot) as running:
            before = self.done.bytes
            try:
                reach = Reach(self._source)
                await reach.add([record])
            except (Damaged, ObjectMissing) as error:
                self._lose(record, error)
                return
            names = sorted(object_name(*name) for name in reach.names)
            session = await self._begin(names)
            # Not "async with": on failure, what was stored stays for the next attempt or the
            # collector.
            try:
                if (
                    await catalog.find(session.state, record.snapshot, self._target.log.pages)
                    is not None
                ):
                    return
                entries = await self._objects(session, record, names, sorted(reach.hints))
                await session.transform(
                    partial(_list, replace(record, origin=self._source.config.id)),
                    f"sync {record.snapshot}",
                    entries,
                )
                self.done.snapshots.append(record.snapshot)
            except (Damaged, ObjectMissing) as error:
                self._lose(record, error)
            finally:
                await session.abort()
            running.bytes = self.done.bytes - before

    def _lose(self, record: SnapshotRecord, error: IcecoreError) -> None:
        self.done.lost.append(Lost(record.snapshot, error))
        self._target.emit(Event("sync.lost", {"snapshot": record.snapshot, "error": str(error)}))

    async def _begin(self, names: Collection[str]) -> Session:
        """Begin a session in whose first state nothing needed is condemned, and no collector is at
        work.
        """
        wanted = {parsed for parsed in map(parse_name, names) if parsed is not None}
        waited, collected = 0.0, False
        while True:
            session = await self._target.begin(None, PURPOSE, load_index=False)
            try:
                marks = wanted & await catalog.condemned_names(
                    session.state, self._target.log.pages
                )
                busy = any(record.purpose == COLLECT for record in session.state.sessions)
            except BaseException:
                await session.abort()
                raise
            if not marks and not busy:
                return session
            await session.abort()
            if marks and not busy and not collected:
                # It was here before, and forgotten: its old objects must be gone before they can be
                # created again.
                await Collector(self._target).collect()
                collected = True
                continue
            if waited >= self._patience:
                raise StoreError(
                    f"{len(marks)} of the objects are about to be deleted in {self._target.backend.where}"
                    if marks
                    else f"a collector is at work in {self._target.backend.where}",
                    cure="sync again when it has ended, and the sessions that keep it waiting; 'icecore gc' there ends dead ones",
                )
            await asyncio.sleep(_POLL_SECONDS)
            waited += _POLL_SECONDS
            collected = False

    async def _objects(
        self, session: Session, record: SnapshotRecord, names: Sequence[str], hints: Sequence[str]
    ) -> Records | None:
        """Store missing objects; return index entries of shards that the target's index lacks."""
        entries: list[Records] = []

        async def one(name: str) -> None:
            session.adopt(name)
            if await _exists(self._target.backend, name):
                self.done.present += 1
                table = await self._table(name)
            else:
                data, table = await self._fetch(name, record)
                await store(self._target.backend, name, data)
                self.done.objects += 1
                self.done.bytes += len(data)
            if table is not None:
                entries.append(table)

        async def hint(name: str) -> None:
            try:
                await one(name)
            except (Damaged, ObjectMissing) as error:
                # Advice: a snapshot is complete without it.
                self._target.emit(
                    Event("sync.hints_missing", {"object": name, "error": str(error)})
                )

        kinds = ("shards/", "nodes/", "snapshots/")
        for kind in kinds:
            await each([name for name in names if name.startswith(kind)], one, at_once=AT_ONCE)
        await each(hints, hint, at_once=AT_ONCE)
        return np.concatenate(entries) if entries else None

    async def _fetch(self, name: str, record: SnapshotRecord) -> tuple[bytes, Records | None]:
        """Return a whole, verified object and the result of `verify`; from another replica of the
        source if its own copy is damaged.

        Raises:
            Damaged, ObjectMissing: No replica has it intact.
        """
        first: IcecoreError | None = None
        for backend in (self._source.backend, *self._source.backend.replicas):
            try:
                data = await backend.get(name, limit=_LIMIT)
                return data, await asyncio.to_thread(verify, self._source.keys, name, data, record)
            except (Damaged, StoreError) as error:
                first = first or error
        assert first is not None
        raise first

    async def _table(self, name: str) -> Records | None:
        """Return index entries of a shard that the target has, if its index lacks them: an
        interrupted sync stored it.
        """
        parsed = parse_name(name)
        if parsed is None or parsed[0] != "shard" or parsed[1] in self._looked_at:
            return None
        self._looked_at.add(parsed[1])
        table = await read_table(self._target.backend, self._target.keys.shard, parsed[1])
        entries = index_entries(parsed[1], table)
        if not len(entries) or await self._knows(entries[:1]):
            return None
        return entries

    async def _knows(self, entries: Records) -> bool:
        if self._index is None:
            # Loaded once: it is never asked about shards of this run, which it misses.
            async with await self._target.begin(
                None, PURPOSE, beat_seconds=None, leave=READERS_LEAVE
            ) as session:
                self._index = session.index
        found, _ = await asyncio.to_thread(self._index.lookup, entries["chunk"])
        return bool(found.all())


async def _list(record: SnapshotRecord, state: LogState, pages: Pages) -> LogState:
    """List a snapshot, unless another sync has listed it."""
    if await catalog.find(state, record.snapshot, pages) is not None:
        return state
    return await catalog.add(state, [record], pages)


def verify(keys: Keys, name: str, data: bytes, record: SnapshotRecord) -> Records | None:
    """Check every byte of an object on its way to a replica.

    Args:
        record: The snapshot whose manifest it is, for a manifest.

    Returns:
        A shard's index entries.

    Raises:
        Damaged: It is not what was written.
    """
    parsed = parse_name(name)
    if parsed is None:
        decode_hints(name, data, keys.hints)
        return None
    kind, identity = parsed
    view = memoryview(data)
    if kind == "manifest":
        decode_manifest(
            data,
            keys.manifest,
            name=name,
            digest=record.manifest_digest if name == record.manifest else None,
        )
        return None
    container, parse = (SHARD, parse_footer) if kind == "shard" else (PACK, parse_pack_footer)
    where = container.parse_tail(identity, len(data), view[-TAIL_BYTES:])
    table = parse(keys.shard, identity, len(data), view[where.offset :])
    if kind == "nodes":
        _verify_nodes(keys, identity, table, view)
        return None
    for entry in table:
        _verify_chunk(
            keys,
            name,
            entry,
            view[int(entry["offset"]) : int(entry["offset"]) + int(entry["length"])],
        )
    entries = index_entries(identity, table)
    return entries if len(entries) else None


def _verify_nodes(keys: Keys, pack: bytes, table: Records, data: memoryview) -> None:
    decoder = NodeDecoder(keys.node)
    for entry in table:
        ref = np.zeros(1, NODE_REF)[0]
        ref["node"], ref["pack"] = entry["node"], np.frombuffer(pack, np.uint8)
        ref["offset"], ref["length"] = entry["offset"], entry["length"]
        start = int(entry["offset"])
        decoder.verify(data[start : start + int(entry["length"])], ref)


def _verify_chunk(keys: Keys, name: str, entry: np.void, stored: memoryview) -> None:
    chunk = entry["chunk"].tobytes()
    try:
        plain = memoryview(opened_piece(keys.chunk, name, int(entry["offset"]), chunk, stored))
        if entry["codec"] != codec.RAW:
            codec.unseal(plain)
        elif chunk_id(keys.chunk, entry["data"].tobytes(), plain) != chunk:
            raise ValueError("its bytes do not match its id")
    except ValueError as error:
        raise Damaged("chunk", chunk.hex(), f"{error} (at {entry['offset']} of {name})") from error


async def _exists(backend: Backend, name: str) -> bool:
    try:
        await backend.size(name)
    except ObjectMissing:
        return False
    return True


async def store(backend: Backend, name: str, data: bytes) -> None:
    """Create an object whose bytes are the same no matter who creates it: an existing object, or a
    lost reply, is not a failure.
    """
    tries = 0
    while True:
        try:
            await backend.create(name, [data])
            return
        except ObjectExists:
            return
        except (StoreFull, StoreDenied):
            raise
        except StoreError:
            tries += 1
            if tries == _TRIES:
                raise
            await asyncio.sleep(_BACKOFF_SECONDS * 2**tries)
