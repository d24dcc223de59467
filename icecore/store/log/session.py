"""A session: the registered presence of a writer or a long reader. While it is open, nothing that
it pins, wrote or may reuse is deleted.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import time
from collections.abc import Awaitable, Callable, Sequence
from types import TracebackType
from typing import Self

import msgspec

from icecore.errors import (
    Damaged,
    JobHeld,
    NotFound,
    ObjectExists,
    ObjectMissing,
    SessionFenced,
    StoreDenied,
    StoreError,
    StoreFull,
)
from icecore.events import Event, Sink
from icecore.store.backend.base import READERS_LEAVE, Backend, Buffer, Draft
from icecore.store.format.cell import Records
from icecore.store.format.envelope import ObjectKind, seal, unseal
from icecore.store.format.keys import Keys
from icecore.store.format.names import (
    Kind,
    filter_name,
    heartbeat_name,
    object_name,
    parse_name,
    random_id,
)
from icecore.store.format.segment import sort_entries
from icecore.store.format.state import LogState, SegmentRef, SessionRecord, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.chain import Log
from icecore.store.log.entries import Entry
from icecore.store.log.index import NewSegment, build, merge_segments, plan_merges, replaced
from icecore.store.log.lookup import Index
from icecore.store.log.presence import this_process
from icecore.store.log.recent import RecentSegments
from icecore.text import host_name

BEAT_KIND = ObjectKind("heartbeat", b"ICEBEAT", 1, 1 << 16, None)
#: A commit merges index segments of up to this many entries in all; larger merges are left to the
#: collector.
COMMIT_MERGE_ENTRIES = 1 << 16
_PUT_TRIES = 4
_PUT_BACKOFF_SECONDS = 0.05


class Heartbeat(msgspec.Struct, frozen=True, array_like=True):
    """A session's periodic heartbeat; advice for whoever considers fencing it."""

    session: str
    sequence: int
    at_ns: int
    host: str
    pid: int


def encode_heartbeat(beat: Heartbeat, key: bytes) -> bytes:
    """Return the object of ``beat``."""
    return seal(
        BEAT_KIND, msgspec.msgpack.encode(beat), key, heartbeat_name(beat.session, beat.sequence)
    ).data


def decode_heartbeat(name: str, data: bytes, key: bytes) -> Heartbeat:
    """Return the heartbeat in object ``name``.

    Raises:
        Damaged: It is not what was written.
    """
    body = unseal(BEAT_KIND, name, data, key)
    try:
        return msgspec.msgpack.decode(body, type=Heartbeat)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(BEAT_KIND.title, name, str(error)) from error


class Session:
    """An open session, made by ``StoredRepository.begin``. As an async context manager, it is aborted on
    exit unless it was committed.

    Attributes:
        id: 32 hexadecimal digits.
        generation: The generation at which it began.
        base: The pinned parent, or the snapshot being read.
        state: The repository's state at BEGIN.
        index: The dedup index at BEGIN, if ``begin`` was told to load it.
    """

    def __init__(
        self,
        backend: Backend,
        keys: Keys,
        log: Log,
        recent: RecentSegments,
        emit: Sink,
        record: SessionRecord,
        entry: Entry,
    ) -> None:
        self.id = record.id
        #: Another session: nothing is committed once that one has ended. Empty: none.
        self.under = ""
        self.generation = entry.generation
        self.base: SnapshotRecord | None = record.pins[0] if record.pins else None
        self.state = entry.state
        self.index = Index(backend, entry.state.segments, keys.segment, recent=recent)
        self._backend = backend
        self._keys = keys
        self._log = log
        self._recent = recent
        self._emit = emit
        self._condemned: frozenset[bytes] = frozenset()
        self._created: set[str] = set()
        self._adopted: set[str] = set()
        self._beats = 0
        self._beating: asyncio.Task[None] | None = None
        self._over = False
        self._uncertain = False

    async def prepare(self, *, load_index: bool, every_seconds: float | None) -> None:
        """Read what is condemned and, optionally, the index; start the heartbeat. For ``begin``."""
        condemned = await catalog.condemned_names(self.state, self._log.pages)
        self._condemned = frozenset(identity for kind, identity in condemned if kind == "shard")
        self._recent.keep(self.state.segments)
        self._log.pages.keep(self.state)
        self.index = Index(
            self._backend,
            self.state.segments,
            self._keys.segment,
            avoid=self._condemned,
            shard_key=self._keys.shard,
            recent=self._recent,
            emit=self._emit,
        )
        if load_index:
            await self.index.load()
        if every_seconds is not None:
            self.keep_alive(every_seconds)

    def usable(self, shard: bytes) -> bool:
        """Return whether dedup may reuse chunks in ``shard`` (16 bytes): at BEGIN it existed and
        was not condemned.
        """
        return shard not in self._condemned

    async def put(self, kind: Kind, parts: Sequence[Buffer]) -> str:
        """Store an object under a new random name, and remember it for ``abort``.

        Returns:
            Its name.

        Raises:
            StoreFull: No space.
            StoreError: It could not be stored.
        """
        return await self.put_named(kind, random_id(), parts)

    def draft(self, kind: Kind, identity: bytes) -> Draft:
        """Return a draft of an object under a random part drawn by the caller, for threads; only if
        the back end has drafts.

        Once published, it belongs to the session, as if by ``put_named``.
        """
        name = object_name(kind, identity)
        draft = self._backend.draft(name)
        self._created.add(name)
        return draft

    async def put_named(self, kind: Kind, identity: bytes, parts: Sequence[Buffer]) -> str:
        """Store an object under a random part that the caller drew before (``names.random_id``),
        because the object's own bytes or other objects mention it; return its name.
        """
        name = object_name(kind, identity)
        await self.create(name, parts)
        return name

    async def put_segment(self, segment: NewSegment) -> None:
        """Store an index segment, then its filter: a filter without its segment belongs to a
        segment that was deleted.
        """
        await self.put_named("segment", segment.ref.id, segment.parts)
        if segment.filter is not None:
            await self.create(filter_name(segment.ref.id), [segment.filter])

    def adopt(self, name: str) -> None:
        """Adopt an object that others may have come to use as well: the commit removes it from
        among the condemned, ``abort`` leaves it.
        """
        self._adopted.add(name)

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        """Store object ``name``, which nobody else draws, and remember it for ``abort``; retry
        transient failures.
        """
        self._created.add(name)
        tries = 0
        while True:
            try:
                await self._backend.create(name, parts)
                return
            except ObjectExists:
                if tries:
                    return  # nobody else draws this name: an earlier attempt succeeded
                raise
            except (StoreFull, StoreDenied):
                raise
            except StoreError:
                tries += 1
                if tries == _PUT_TRIES:
                    raise
                await asyncio.sleep(_PUT_BACKOFF_SECONDS * 2**tries)

    async def heartbeat(self) -> None:
        """Report that this session is alive.

        Raises:
            StoreError: The store could not be reached; one missed heartbeat does no harm.
        """
        self._beats += 1
        beat = Heartbeat(self.id, self._beats, time.time_ns(), host_name(), os.getpid())
        name, data = (
            heartbeat_name(self.id, self._beats),
            encode_heartbeat(beat, self._keys.sessions),
        )
        try:
            await self._backend.create(name, [data])
        except StoreFull:
            if not await self._backend.give_up_reserve(READERS_LEAVE):
                raise
            await self._backend.create(name, [data])
        if self._beats > 1:
            await self._backend.delete(heartbeat_name(self.id, self._beats - 1))

    def keep_alive(self, every_seconds: float) -> None:
        """Send heartbeats in the background of the running event loop until the session ends."""

        async def beat() -> None:
            while True:
                await asyncio.sleep(every_seconds)
                try:
                    await self.heartbeat()
                except StoreError as error:
                    self._emit(
                        Event("session.heartbeat", {"session": self.id, "error": str(error)})
                    )

        self._beating = asyncio.create_task(beat())

    async def commit(self, record: SnapshotRecord, entries: Records | None = None) -> Entry:
        """End the session and list its snapshot, in one transaction.

        Everything that the manifest refers to must have been stored.

        Args:
            record: The new snapshot.
            entries: Newly stored chunks (``segment.make_entries``), for the index.

        Raises:
            SessionFenced: The session was declared dead; nothing of it was committed.
            StoreError: The store failed. ``abort`` finds out whether the commit took place.
        """

        async def change(state: LogState, pages: Pages) -> LogState:
            return await catalog.add(state, [record], pages)

        return await self.transform(change, f"commit {record.snapshot}", entries)

    async def transform(
        self,
        change: Callable[[LogState, Pages], Awaitable[LogState]],
        words: str,
        entries: Records | None = None,
    ) -> Entry:
        """End the session with a ``change`` other than one new snapshot; raise as ``commit`` does.

        Args:
            change: Gets a state without this session, in which its index entries are live.
            words: What it does, for people.
            entries: As in ``commit``.
        """
        publish = await self._segments(entries)
        own = {
            parsed
            for parsed in map(parse_name, self._created | self._adopted)
            if parsed is not None
        }

        async def whole(state: LogState, pages: Pages) -> LogState:
            state = self._without(state)
            state = msgspec.structs.replace(state, segments=await publish(state.segments))
            # A collector that saw these objects before any state named them has marked them; nobody
            # deletes them while this session is open.
            state = await catalog.pardon(state, own, pages)
            return await change(state, pages)

        before, self._uncertain = self._uncertain, True
        try:
            entry = await self._log.transact(whole, words)
        except (StoreFull, StoreDenied):
            self._uncertain = before  # at least this attempt certainly wrote nothing
            raise
        self._over = True
        await self._silence()
        return entry

    def _without(self, state: LogState) -> LogState:
        if state.session(self.id) is None:
            raise SessionFenced(
                f"session {self.id} was ended by another process; its work is void",
                cure="a session that is silent for long is fenced; run it again",
            )
        if self.under and state.session(self.under) is None:
            raise SessionFenced(
                f"session {self.under}, under which this one works, has ended; its work is void",
                cure="another process runs the job; 'icecore ls' shows its snapshots",
            )
        return msgspec.structs.replace(
            state, sessions=[session for session in state.sessions if session.id != self.id]
        )

    async def _segments(
        self, entries: Records | None
    ) -> Callable[[list[SegmentRef]], Awaitable[list[SegmentRef]]]:
        """Return the change that adds this session's new index entries to a list of live segments,
        merged with small ones or as they are.
        """
        own = (
            await asyncio.to_thread(build, sort_entries(entries), self._keys.segment, random_id)
            if entries is not None and len(entries)
            else []
        )
        held = {segment.ref.id: segment for segment in own}
        stored: set[bytes] = set()
        live = (self._log.known or self.state).segments
        merges = [
            planned
            for planned in plan_merges(
                [*live, *(segment.ref for segment in own)], entries=COMMIT_MERGE_ENTRIES
            )
            if own and held.keys() <= {ref.id for ref in planned.inputs}
        ]
        merged: list[NewSegment] = []
        inputs: list[SegmentRef] = []

        async def read(ref: SegmentRef) -> Records:
            if ref.id in held:
                assert entries is not None
                return sort_entries(entries)
            return await self.index.entries_of(ref)

        if merges:
            try:
                merged = await merge_segments(read, merges[0], self._keys.segment, random_id)
                inputs = [ref for ref in merges[0].inputs if ref.id not in held]
                await self._store(merged, stored)
            except (Damaged, ObjectMissing) as error:
                # 'check' reports a damaged segment; a snapshot must not fail for an index that only
                # saves space.
                self._emit(Event("index.damaged", {"error": str(error)}))
                merged, inputs = [], []

        async def publish(segments: list[SegmentRef]) -> list[SegmentRef]:
            if merged:
                joined = replaced(segments, inputs, [segment.ref for segment in merged])
                if joined is not None:
                    return joined
            await self._store(own, stored)
            return [*segments, *(segment.ref for segment in own)]

        return publish

    async def _store(self, segments: Sequence[NewSegment], stored: set[bytes]) -> None:
        for segment in segments:
            if segment.ref.id not in stored:
                await self.put_segment(segment)
                self._recent.add(segment.ref, segment.entries)
                stored.add(segment.ref.id)

    async def abort(self) -> bool:
        """End the session without a snapshot and delete what it stored. Call it after any failure,
        including one of ``commit``.

        Returns:
            False if the session was not open any more: committed after all, or fenced. Then nothing
            is deleted here; the collector deletes what is not reached, as others may have come to
            use it.
        """
        if self._over:
            return False
        if not self._uncertain:
            # Nobody else ends this session with a snapshot, so nothing will ever name these. On a
            # full disk, the transaction needs the room.
            await self._delete_created()
        was_open = False

        async def change(state: LogState, pages: Pages) -> LogState:
            nonlocal was_open
            was_open = state.session(self.id) is not None
            left = [session for session in state.sessions if session.id != self.id]
            return msgspec.structs.replace(state, sessions=left)

        # An open session prevents a collector from freeing anything.
        await self._log.transact(change, f"end {self.id}", leave=0)
        self._over = True
        await self._silence()
        if was_open:
            # The session was open until now, which proves that its commit never took place, and
            # never will.
            await self._delete_created()
        return was_open

    async def _delete_created(self) -> None:
        for name in sorted(self._created):
            await self._backend.delete(name)
            self._created.discard(name)

    async def _silence(self) -> None:
        if self._beating is not None:
            self._beating.cancel()
            try:
                await self._beating
            except asyncio.CancelledError:
                pass
            self._beating = None
        if self._beats:
            try:
                for sequence in range(max(1, self._beats - 1), self._beats + 1):
                    await self._backend.delete(heartbeat_name(self.id, sequence))
            except StoreError as error:
                self._emit(Event("session.heartbeat", {"session": self.id, "error": str(error)}))

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        await self.abort()


async def begin(
    backend: Backend,
    keys: Keys,
    log: Log,
    recent: RecentSegments,
    emit: Sink,
    *,
    pins: Sequence[str],
    purpose: str,
    load_index: bool,
    every_seconds: float | None,
    prove: bool = True,
    leave: int | None = None,
    excludes: Callable[[SessionRecord], bool] | None = None,
    host: str = "",
) -> Session:
    """BEGIN: register a session that pins the snapshots ``pins``, the first of which is its base;
    ``prove`` and ``leave`` as in ``Log.transact``.

    Args:
        excludes: Tells which open sessions it may not begin beside. None: none.
        host: Who holds it, for people. Empty: this host's name.

    Raises:
        JobHeld: Such a session is open.
        NotFound: A snapshot is not in the repository.
    """
    identity = secrets.token_hex(16)
    host = host or host_name()
    record: SessionRecord | None = None

    async def change(state: LogState, pages: Pages) -> LogState:
        nonlocal record
        if excludes is not None and any(
            excludes(other) and other.id != identity for other in state.sessions
        ):
            raise JobHeld(f"another process is at work: {purpose}")
        found = []
        for snapshot in pins:
            listed = await catalog.find(state, snapshot, pages)
            if listed is None:
                raise NotFound(
                    f"there is no snapshot {snapshot} in {backend.where}",
                    cure="'icecore ls' lists them",
                )
            found.append(listed)
        record = SessionRecord(
            identity, state.generation, purpose, host, time.time_ns(), found, this_process()
        )
        return msgspec.structs.replace(state, sessions=[*state.sessions, record])

    entry = await log.transact(change, f"begin {purpose} {identity}", prove=prove, leave=leave)
    assert record is not None
    session = Session(backend, keys, log, recent, emit, record, entry)
    try:
        await session.prepare(load_index=load_index, every_seconds=every_seconds)
    except BaseException:
        try:
            await session.abort()
        except StoreError:
            pass  # the error raised below says why; the session is fenced after a long silence
        raise
    return session
