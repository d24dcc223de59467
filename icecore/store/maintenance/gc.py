"""The garbage collector: finds what nothing reaches, condemns it in the log, and deletes it once no
open session can have come to use it.

Nothing is lost, at whatever point this or another collector, writer or reader stops, because:

1. An object is condemned (at generation g) only if it was listed before the state to change was
   read, and neither that state nor anything that its snapshots and pins reach refers to it. So
   whoever wrote it began before g.
2. A session that began after g sees the mark and does not reuse the object. A session that began
   before g prevents its deletion while it is open.
3. An object is deleted only by a state m >= g in which every open session began after g, and from
   which it is still unreached. A snapshot or pin of a later state can reach it only through a
   session that is open in m or begins later, and such sessions do not reuse it (2). So nothing will
   ever reach it.
4. The mark of a shard stays until no live index segment refers to it, so no session finds the shard
   there without seeing the mark.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable

import msgspec

from icecore.errors import Damaged, ObjectMissing, SessionFenced, StoreFull, UsageError
from icecore.events import Event, phase
from icecore.store.format.hints import touched_lineage
from icecore.store.format.names import (
    FILTERS,
    HINTS,
    KINDS,
    LOG,
    PREFIX,
    PROBE,
    SESSIONS,
    Kind,
    filtered_segment,
    heartbeat_session,
    log_generation,
    object_name,
    parse_name,
)
from icecore.store.format.state import LEASE, LogState, SessionRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.entries import KEPT_ENTRIES, Entry
from icecore.store.log.presence import has_ended
from icecore.store.log.reading import now
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import decode_heartbeat
from icecore.store.maintenance.compact import Compacted, Sparse, compact, find_sparse
from icecore.store.maintenance.reach import Reach
from icecore.store.maintenance.reindex import Reindexer
from icecore.store.runtime.parallel import each

Name = tuple[Kind, bytes]

#: Purpose of the session that a collector holds while it deletes. It uses nothing, so it prevents
#: no deletion; it tells `icecore.store.replication.replicas` that names may be about to be deleted.
COLLECT = "gc"
#: A collector that has been silent for longer counts as dead: only a sync waits for it.
COLLECTOR_SECONDS = 86_400.0
#: A session that has been silent for longer counts as dead.
FENCE_SECONDS = 1800.0
#: A shard of which less than this share is reached is rewritten.
COMPACT_BELOW = 0.5
_SWEEP_SECONDS = 86_400.0
#: A collector that deletes looks this often whether its session is open; the clock includes sleep.
_OPEN_SECONDS = 600.0
_ROUNDS = 3


class Options(msgspec.Struct, frozen=True):
    """The options of a collection.

    Attributes:
        fence_seconds: Silence after which a session is fenced.
        compact_below: Shards of which less than this share is reached are rewritten; 0 for never.
        keep_entries: Log entries to leave, at least as many as clients rely on.
        sweep_seconds: Age at which remains of interrupted writes are removed.
    """

    fence_seconds: float = FENCE_SECONDS
    compact_below: float = COMPACT_BELOW
    keep_entries: int = KEPT_ENTRIES
    sweep_seconds: float = _SWEEP_SECONDS

    def __post_init__(self) -> None:
        if self.keep_entries < KEPT_ENTRIES:
            raise UsageError(
                f"a collection cannot keep only {self.keep_entries} log entries",
                cure=f"keep {KEPT_ENTRIES} or more: clients treat fewer as an attack",
            )


class Item(msgspec.Struct, frozen=True):
    """An object and its size in bytes."""

    name: str
    bytes: int


class Plan(msgspec.Struct, frozen=True):
    """What a collection would do at present.

    Attributes:
        fence: Sessions whose process has ended, or that have long been silent.
        condemn: Objects that nothing reaches.
        delete: Objects that can be deleted at once: condemned before, or now and with no session
            open.
        wait: Objects whose deletion an open session prevents.
        pardon: Condemned objects that a snapshot reaches again.
        compact: Shards to rewrite.
        rewrite: Number of index segments to rewrite.
        trim: Old log entries, stale heartbeats, filters of deleted segments, useless hints.
        kept_bytes: Bytes that remain, before compaction.
    """

    generation: int
    fence: list[SessionRecord] = msgspec.field(default_factory=list)
    condemn: list[Item] = msgspec.field(default_factory=list)
    delete: list[Item] = msgspec.field(default_factory=list)
    wait: list[Item] = msgspec.field(default_factory=list)
    pardon: list[str] = msgspec.field(default_factory=list)
    compact: list[Sparse] = msgspec.field(default_factory=list)
    rewrite: int = 0
    trim: list[Item] = msgspec.field(default_factory=list)
    kept_bytes: int = 0

    @property
    def delete_bytes(self) -> int:
        """Bytes that can be deleted at once."""
        return sum(item.bytes for item in self.delete)

    @property
    def wait_bytes(self) -> int:
        """Bytes that wait for a session to end."""
        return sum(item.bytes for item in self.wait)

    @property
    def compact_bytes(self) -> int:
        """Bytes that rewriting shards frees."""
        return sum(item.bytes - item.live.bytes for item in self.compact)


class Freed(msgspec.Struct, frozen=True):
    """What forgetting some snapshots would free once the collector has run and no session is open:
    ``objects`` with ``bytes`` in all, and ``compact_bytes`` more by rewriting shards that become
    mostly dead.
    """

    objects: int
    bytes: int
    compact_bytes: int


class Result(msgspec.Struct, frozen=True):
    """What a collection did."""

    fenced: int
    compacted: Compacted
    condemned: int
    deleted: int
    deleted_bytes: int
    waiting: int
    rewritten: int
    trimmed: int


class Collector:
    """One run of the collector. ``plan`` changes nothing; ``collect`` executes it, and checks
    everything again that others may have changed.

    Args:
        repository: The repository.
        options: The options.
    """

    def __init__(self, repository: StoredRepository, options: Options | None = None) -> None:
        self._repository = repository
        self._backend = repository.backend
        self._log = repository.log
        self._options = options or Options()
        self._reach = Reach(repository)
        self._sizes: dict[Name, int] = {}
        self._before = 0
        self._open_at = 0.0

    async def plan(self) -> Plan:
        """Return what there is to do.

        Raises:
            Damaged, ObjectMissing: A kept snapshot cannot be read, so what it reaches is unknown;
                nothing can be collected.
        """
        await self._survey()
        entry = await self._log.newest()
        fence = await self._silent(entry.state)
        gone = {record.id for record in fence}
        sessions = [record for record in entry.state.sessions if record.id not in gone]
        state = msgspec.structs.replace(entry.state, sessions=sessions)
        await self._mark(state)
        marked = await self._marks(state)
        dead = self._unreached(state)
        condemn = sorted(dead - marked.keys())
        oldest = min((record.began for record in _keeping(state)), default=state.generation + 2)
        delete = sorted(name for name in dead if marked.get(name, state.generation + 1) < oldest)
        wait = sorted(dead - set(delete))
        merges = await Reindexer(self._repository, delete).plan(state.segments)
        return Plan(
            generation=entry.generation,
            fence=fence,
            condemn=[self._item(name) for name in condemn],
            delete=[self._item(name) for name in delete],
            wait=[self._item(name) for name in wait],
            pardon=[object_name(*name) for name in sorted(marked.keys() & self._reach.names)],
            compact=find_sparse(self._reach, self._sizes, self._options.compact_below),
            rewrite=sum(len(merge.inputs) for merge in merges),
            trim=[*await self._old(), *await self._old_entries(entry.generation)],
            kept_bytes=sum(size for name, size in self._sizes.items() if name not in dead),
        )

    async def plan_forget(self, snapshots: Collection[str]) -> Freed:
        """Return what forgetting these snapshots would free, in addition to what can be freed
        already.

        Raises:
            Damaged, ObjectMissing: A snapshot cannot be read, so what it reaches is unknown.
        """
        gone = frozenset(snapshots)
        await self._survey()
        state = (await self._log.newest()).state
        records = await catalog.everything(state, self._log.pages)
        await self._reach.add(record for record in records if record.snapshot not in gone)
        then, sparse = self._unreached(state), self._sparse_bytes()
        await self._reach.add(records)
        freed = then - self._unreached(state)
        more = max(0, sparse - self._sparse_bytes())
        return Freed(len(freed), sum(self._sizes[name] for name in freed), more)

    def _sparse_bytes(self) -> int:
        sparse = find_sparse(self._reach, self._sizes, self._options.compact_below)
        return sum(item.bytes - item.live.bytes for item in sparse)

    async def collect(self) -> Result:
        """Fence, compact, condemn, delete, clean up the index, trim. Safe to stop anywhere, and to
        run beside anything.

        Raises:
            Damaged, ObjectMissing: A kept snapshot cannot be read, so what it reaches is unknown;
                nothing is deleted.
        """
        emit = self._repository.emit
        with phase(emit, "gc.survey"):
            await self._survey()
            fenced = await self._fence()
            await self._mark_newest()
        compacted = Compacted()
        if find_sparse(self._reach, self._sizes, self._options.compact_below):
            with phase(emit, "gc.compact") as running:
                try:
                    compacted = await compact(
                        self._repository, self._sizes, self._options.compact_below
                    )
                except StoreFull as error:
                    self._no_room("shards", error)
                running.bytes = compacted.copied_bytes
            # The reach of the old manifests must be forgotten; otherwise, what was compacted would
            # stay until another run.
            self._reach = Reach(self._repository)
            await self._survey()
        # Open until the last deletion: a sync that would create a deleted name again waits for its
        # end.
        async with await self._repository.begin(
            None, COLLECT, load_index=False, leave=0
        ) as session:
            result = await self._collect(session.id, fenced, compacted)
        await self._backend.keep_reserve()
        return result

    def _no_room(self, what: str, error: StoreFull) -> None:
        """Report that rewriting is skipped: it frees space in the end, but requires some first, and
        what can be deleted at once must not wait for that.
        """
        self._repository.emit(
            Event(
                "gc.no_room",
                {"what": what, "error": f"{what} are not rewritten this time: {error.message}"},
            )
        )

    async def _collect(self, session: str, fenced: int, compacted: Compacted) -> Result:
        emit = self._repository.emit
        condemned = deleted = deleted_bytes = merged = waiting = 0
        for _ in range(_ROUNDS):
            entry, new = await self._condemn()
            _require_open(entry.state, session)
            with phase(emit, "gc.delete") as running:
                deletable, waits = await self._deletable(entry.state)
                await self._delete(deletable, session)
                running.bytes = sum(self._sizes.get(name, 0) for name in deletable)
            # What was condemned before the listing began, and was not listed, was deleted by a
            # collector that stopped afterwards.
            marks = await self._marks(entry.state)
            absent = {
                name for name, at in marks.items() if at <= self._before and name not in self._sizes
            }
            rewritten = 0
            try:
                rewritten = await Reindexer(self._repository, absent.union(deletable)).run()
            except StoreFull as error:
                self._no_room("index segments", error)
            condemned, deleted, merged = (
                condemned + new,
                deleted + len(deletable),
                merged + rewritten,
            )
            deleted_bytes, waiting = deleted_bytes + running.bytes, len(waits)
            await self._survey()
            # What rewriting the index and the lists of marks left behind is collected at once.
            if not self._unreached((await self._log.newest()).state) - set(waits):
                break
        trimmed = await self._trim()
        return Result(
            fenced, compacted, condemned, deleted, deleted_bytes, waiting, merged, trimmed
        )

    async def _survey(self) -> None:
        """List all objects that sessions write. Call it before reading the state: then whoever
        wrote a listed object began before that state.
        """
        self._before = (await self._log.newest()).generation
        self._sizes.clear()
        for kind in KINDS:
            async for info in self._backend.list(PREFIX[kind]):
                parsed = parse_name(info.name)
                if parsed is not None:
                    self._sizes[parsed] = info.size

    async def _mark(self, state: LogState) -> None:
        """Mark what the state's snapshots and pins reach; read nothing that was marked before."""
        records = await catalog.everything(state, self._log.pages)
        pins = [record for session in state.sessions for record in session.pins]
        await self._reach.add([*records, *pins])

    async def _mark_newest(self) -> LogState:
        entry = await self._log.newest()
        while True:
            try:
                await self._mark(entry.state)
                return entry.state
            except ObjectMissing:
                newer = await self._log.newest()
                if newer.digest == entry.digest:
                    raise
                entry = newer  # a manifest was replaced and deleted during the read

    def _unreached(self, state: LogState) -> set[Name]:
        """Return listed objects that neither the state nor what it reaches refers to."""
        named: set[Name] = {("page", ref.id) for ref in state.pages}
        named |= {("page", batch.ref.id) for batch in state.condemned if batch.ref is not None}
        named |= {("segment", ref.id) for ref in state.segments}
        return self._sizes.keys() - named - self._reach.names

    async def _marks(self, state: LogState) -> dict[Name, int]:
        """Return the condemned objects, each with the generation at which it was condemned."""
        marks: dict[Name, int] = {}
        for batch in state.condemned:
            for name in await self._log.pages.read_names(batch):
                marks[name] = max(batch.generation, marks.get(name, 0))
        return marks

    def _item(self, name: Name) -> Item:
        return Item(object_name(*name), self._sizes.get(name, 0))

    async def _silent(self, state: LogState) -> list[SessionRecord]:
        """Return the sessions that count as dead: their process has ended, or they have been silent
        for long by both this machine's clock and theirs.

        This decides when to fence, never what is safe to delete. A collector's session is the
        exception, as syncs wait for its end: its deletions may still be in flight after its process
        has ended.
        """
        latest: dict[str, str] = {}
        async for info in self._backend.list(SESSIONS):
            session = heartbeat_session(info.name)
            if session is not None:
                latest[session] = info.name
        silent = []
        for record in state.sessions:
            if record.purpose.startswith(LEASE):
                continue  # only another taker ends it, because a job may run under it
            ended = has_ended(record.process)
            if ended and record.purpose != COLLECT:
                silent.append(record)
                continue
            heard = record.created_ns
            if record.id in latest:
                try:
                    data = await self._backend.get(latest[record.id], limit=1 << 17)
                    heard = max(
                        heard,
                        decode_heartbeat(
                            latest[record.id], data, self._repository.keys.sessions
                        ).at_ns,
                    )
                except (ObjectMissing, Damaged):
                    continue  # its heartbeat is just being written, or is unreadable: spare it
            patience = self._options.fence_seconds
            if record.purpose == COLLECT and patience and not ended:
                patience = max(patience, COLLECTOR_SECONDS)
            if time.time_ns() - heard > patience * 1e9:
                silent.append(record)
        return silent

    async def _delete(self, names: Iterable[Name], session: str) -> None:
        """Delete objects while the session is open.

        Raises:
            SessionFenced: Another collector took this one for dead and ended the session, so the
                names may be in use again.
        """

        async def delete(name: Name) -> None:
            if now() - self._open_at > _OPEN_SECONDS:
                state = (await self._log.newest()).state
                _require_open(state, session)
                self._open_at = now()
            await self._backend.delete(object_name(*name))

        self._open_at = now()
        await each(names, delete)

    async def _fence(self) -> int:
        """FENCE: end the sessions that count as dead."""
        silent = {record.id for record in await self._silent((await self._log.newest()).state)}
        if not silent:
            return 0

        async def change(state: LogState, pages: Pages) -> LogState:
            left = [record for record in state.sessions if record.id not in silent]
            return (
                state
                if len(left) == len(state.sessions)
                else msgspec.structs.replace(state, sessions=left)
            )

        await self._log.transact(change, f"fence {' '.join(sorted(silent))}", leave=0)
        self._repository.emit(Event("gc.fence", {"sessions": sorted(silent)}))
        return len(silent)

    async def _condemn(self) -> tuple[Entry, int]:
        """CONDEMN what is unreached, and pardon what is reached again. The marking is complete for
        the returned state.
        """
        condemned = 0

        async def change(state: LogState, pages: Pages) -> LogState:
            nonlocal condemned
            await self._mark(state)
            marks = await self._marks(state)
            changed = await catalog.pardon(state, marks.keys() & self._reach.names, pages)
            new = sorted(self._unreached(state) - marks.keys())
            condemned = len(new)
            if new:
                batch = await pages.condemned(state.generation, new)
                changed = msgspec.structs.replace(changed, condemned=[*changed.condemned, batch])
            return changed

        entry = await self._log.transact(change, "condemn", leave=0)
        # The entry may carry other transactions of this process that were applied after this one,
        # such as a commit.
        await self._mark(entry.state)
        return entry, condemned

    async def _deletable(self, state: LogState) -> tuple[list[Name], list[Name]]:
        """Return the condemned objects that can be deleted, and those that a session prevents from
        being deleted; the marking must be complete for ``state``.
        """
        marks = await self._marks(state)
        unreached = self._unreached(state)
        oldest = min((record.began for record in _keeping(state)), default=state.generation + 1)
        delete = sorted(
            name for name, generation in marks.items() if name in unreached and generation < oldest
        )
        return delete, sorted(
            name for name, generation in marks.items() if name in unreached and generation >= oldest
        )

    async def _old(self) -> list[Item]:
        """Return objects outside the state's reach that are known to be useless: heartbeats of
        ended sessions, unreferenced hints, probes.
        """
        # A filter is stored after its segment, so one that existed before a listing without its
        # segment belongs to a deleted segment.
        filters = [info async for info in self._backend.list(FILTERS)]
        segments = (
            {info.name async for info in self._backend.list(PREFIX["segment"])}
            if filters
            else set()
        )
        beats = [info async for info in self._backend.list(SESSIONS)]
        hints = [info async for info in self._backend.list(HINTS)]
        old = [Item(*info) async for info in self._backend.list(PROBE)]
        for info in filters:
            segment = filtered_segment(info.name)
            if segment is not None and object_name("segment", segment) not in segments:
                old.append(Item(*info))
        # Read after the listings: whoever stored what is listed had begun, so its session is open
        # in this state, or over.
        state = await self._mark_newest()
        open_ = {record.id for record in state.sessions}
        keeping = _keeping(state)
        old += [Item(*info) for info in beats if heartbeat_session(info.name) not in open_]
        if (
            not keeping
        ):  # an open session may have stored the hints of a snapshot that it has yet to commit
            old += [Item(*info) for info in hints if not self._advises(info.name)]
        return old

    def _advises(self, hint: str) -> bool:
        """Return whether a hint object is useful: a kept snapshot refers to it, or it is a working
        set of a lineage that has a snapshot.
        """
        return hint in self._reach.hints or touched_lineage(hint) in self._reach.lineages

    async def _old_entries(self, newest: int) -> list[Item]:
        listed = [info async for info in self._backend.list(LOG)]
        return [
            Item(*info)
            for info in listed
            if (log_generation(info.name) or newest) <= newest - self._options.keep_entries
        ]

    async def _trim(self) -> int:
        old = await self._old()
        await each(old, lambda item: self._backend.delete(item.name))
        trimmed = await self._log.trim(self._options.keep_entries)
        return trimmed + len(old) + await self._backend.sweep(self._options.sweep_seconds)


def _require_open(state: LogState, session: str) -> None:
    """Require that a collector's session is open.

    Raises:
        SessionFenced: Another process has ended it.
    """
    if state.session(session) is None:
        raise SessionFenced("another process declared this collector dead", cure="collect again")


def _keeping(state: LogState) -> list[SessionRecord]:
    """Return the open sessions that may use what is condemned after they began: all except
    collectors', and leases, which use nothing.
    """
    return [
        record
        for record in state.sessions
        if record.purpose != COLLECT and not record.purpose.startswith(LEASE)
    ]
