"""Checks every object that the newest state reaches and reports each damaged one; damage never
stops the check.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from icecore.errors import (
    Damaged,
    IcecoreError,
    ObjectMissing,
    RollbackDetected,
    StoreDenied,
    StoreError,
)
from icecore.events import Event, phase
from icecore.sizes import CELL_BYTES
from icecore.store.backend.base import FOREIGN_AT_MOST, READERS_LEAVE, Foreign
from icecore.store.format.cell import CELL, Records
from icecore.store.format.cellmap import PACK, check_regions, parse_pack_footer
from icecore.store.format.container import TAIL_BYTES, Container
from icecore.store.format.envelope import ObjectKind
from icecore.store.format.filters import FILTER_KIND, FilterSet, decode_filter
from icecore.store.format.fingerprints import fingerprint_bytes
from icecore.store.format.gaps import between, gap_of
from icecore.store.format.hints import HINTS_KIND, decode_hints, limited, touched_lineage
from icecore.store.format.keys import CONFIG_KIND
from icecore.store.format.manifest import MANIFEST_KIND, Manifest, Space, cells_of
from icecore.store.format.names import (
    CONFIG,
    FILTERS,
    HINTS,
    KEYS,
    KINDS,
    LOG,
    PREFIX,
    SESSIONS,
    Kind,
    filter_name,
    is_known,
    log_generation,
    log_name,
    object_name,
    parse_name,
)
from icecore.store.format.segment import TITLE as SEGMENT_TITLE
from icecore.store.format.shard import SHARD, parse_footer
from icecore.store.format.state import (
    ENTRY_KIND,
    NAMES_KIND,
    PAGE_KIND,
    Condemned,
    LogState,
    SegmentRef,
    SnapshotRecord,
)
from icecore.store.log.chain import FAR, KEPT_ENTRIES, PLANTED, Entry, anchor_before
from icecore.store.log.identity import inspect
from icecore.store.log.index import filtered, read_segment
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import BEAT_KIND, Session, decode_heartbeat
from icecore.store.maintenance import relog
from icecore.store.maintenance.reach import Refs, read_nodes, space_refs
from icecore.store.runtime.parallel import each
from icecore.store.snapshot.reader import SnapshotReader

Name = tuple[Kind, bytes]
_READ_BATCH = 64
_DECODED_AT_ONCE = 4
#: Of a run of missing entries, at most so many are named.
_HOLE = 64


@dataclass(frozen=True)
class Damage:
    """One thing that is wrong.

    Attributes:
        kind: Its kind: log entry, snapshot page, manifest, node, nodes, shard, chunk, index
            segment, …
        name: The object, or the chunk's or node's id.
        why: What is wrong, in words.
        snapshots: Snapshots that cannot be restored because of it.
    """

    kind: str
    name: str
    why: str
    snapshots: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f"{self.kind} {self.name}: {self.why}"


@dataclass
class Report:
    """What a check found.

    Attributes:
        damages: Everything that is wrong; empty if nothing is.
        lost: Known damage, which affects only quarantined snapshots.
        quarantined: Snapshots recorded as having lost data, and what.
        foreign: Files and objects that do not belong to the repository. They are left alone and do
            no harm.
        failed: Those of ``damages`` that are objects which the store failed to return; they may be
            intact.
        denied: The first refusal, if the store refused to return any object.
        doubtful: Shards that are damaged or missing, or hold a damaged chunk.
        snapshots: Number of listed snapshots.
        objects: Number of objects by kind.
        bytes: Bytes of objects by kind.
        unreached: Objects that nothing reaches and that wait for the collector, with their bytes.
            Not damage.
        chunks: Distinct chunks that are reached.
        read_chunks: Chunks that were decoded and verified.
    """

    damages: list[Damage] = field(default_factory=list)
    lost: list[Damage] = field(default_factory=list)
    quarantined: dict[str, str] = field(default_factory=dict)
    foreign: list[Foreign] = field(default_factory=list)
    failed: list[Damage] = field(default_factory=list)
    denied: StoreDenied | None = None
    doubtful: set[bytes] = field(default_factory=set)
    snapshots: int = 0
    objects: Counter[str] = field(default_factory=Counter)
    bytes: Counter[str] = field(default_factory=Counter)
    unreached: int = 0
    unreached_bytes: int = 0
    chunks: int = 0
    read_chunks: int = 0

    @property
    def sound(self) -> bool:
        """Whether nothing is damaged except what quarantined snapshots have lost."""
        return not self.damages


async def check(
    repository: StoredRepository,
    *,
    read_data: float = 0.0,
    register: bool = True,
    session: Session | None = None,
) -> Report:
    """Check a repository, while it is in use.

    Args:
        read_data: Share of the reached chunks, 0 to 1, to read, decode and verify as well.
        register: Open a session for the duration of the check, so that no collector deletes what is
            being checked. Without one, for a place that cannot be written to, objects that others
            delete or replace meanwhile may be reported as missing.
        session: An open session; check the state at its beginning.

    Returns:
        The findings. An error is raised only if the store cannot be reached.
    """
    checker = _Checker(repository, read_data)
    with phase(repository.emit, "check"):
        if session is not None or not register:
            await checker.run(session.state if session is not None else None)
            return checker.report
        try:
            session = await repository.begin(None, "check", load_index=False, leave=READERS_LEAVE)
        except (Damaged, ObjectMissing, RollbackDetected):
            await checker.run(None)  # the log is damaged, so nothing can be registered in it
            return checker.report
        async with session:
            await checker.run(session.state)
    return checker.report


class _Checker:
    def __init__(self, repository: StoredRepository, share: float) -> None:
        self.report = Report()
        self._repository = repository
        self._backend = repository.backend
        self._keys = repository.keys
        self._share = share
        self._sizes: dict[Name, int] = {}
        self._named: set[Name] = set()
        self._seen: set[tuple[str, str, str]] = set()
        #: Records of all distinct nodes, one array per node, and for each snapshot the numbers of
        #: its nodes.
        self._nodes: list[Records] = []
        self._numbers: dict[tuple[bytes, bytes, int], int] = {}
        self._of_snapshot: dict[str, list[int]] = {}
        self._packs: dict[bytes, set[str]] = {}
        self._footers: dict[bytes, Records | None] = {}
        self._hints: set[str] = set()
        self._lineages: set[str] = set()
        self._manifest: Manifest | None = None

    def note(
        self, error: IcecoreError, kind: str, name: str, snapshots: Sequence[str] = ()
    ) -> None:
        """Record an error as damage of object ``name``, or of what the error names."""
        if isinstance(error, Damaged):
            self.damage(
                error.kind if error.kind != "object" else kind, error.name, error.why, snapshots
            )
        elif isinstance(error, ObjectMissing):
            self.damage(kind, name, "it is missing", snapshots)
        else:
            self.damage(kind, name, str(error), snapshots)
            if isinstance(error, StoreDenied):
                self.report.denied = self.report.denied or error
            if isinstance(error, StoreError):
                self.report.failed.append(Damage(kind, name, str(error), tuple(snapshots)))

    def damage(self, kind: str, name: str, why: str, snapshots: Sequence[str] = ()) -> None:
        """Report damage once."""
        key = (kind, name, why)
        if key not in self._seen:
            self._seen.add(key)
            self.report.damages.append(Damage(kind, name, why, tuple(snapshots)))
            self._repository.emit(Event("check.damage", {"kind": kind, "object": name, "why": why}))

    async def run(self, state: LogState | None) -> None:
        """Run the whole check."""
        await self._look(state)
        self.report.lost = [damage for damage in self.report.damages if self._known(damage)]
        self.report.damages = [damage for damage in self.report.damages if not self._known(damage)]

    def _known(self, damage: Damage) -> bool:
        return bool(damage.snapshots) and self.report.quarantined.keys() >= set(damage.snapshots)

    async def _look(self, state: LogState | None) -> None:
        await self._identity()
        entry = await self._log_chain(state)
        if entry is None:
            return
        state = state or entry.state
        await self._list()
        await self._foreign()
        records = await self._records(state)
        self.report.snapshots = len(records)
        self.report.quarantined = {
            record.snapshot: record.quarantined for record in records if record.quarantined
        }
        pinned = {pin.manifest: pin for session in state.sessions for pin in session.pins}
        for record in {**pinned, **{record.manifest: record for record in records}}.values():
            await self._snapshot(record)
        for name in sorted(
            name for name in self._named if name[0] == "nodes" and name in self._sizes
        ):
            if (
                await self._footer(PACK, "nodes", name) is None
                and self._packs[name[1]] <= self.report.quarantined.keys()
            ):
                self._affect("nodes", object_name(*name), sorted(self._packs[name[1]]))
        cells = await self._cells()
        await self._segments(state)
        await self._advice()
        if self._share > 0:
            await self._read(cells)
        unreached = self._sizes.keys() - self._named
        self.report.unreached = len(unreached)
        self.report.unreached_bytes = sum(self._sizes[name] for name in unreached)

    async def _log_chain(self, state: LogState | None) -> Entry | None:
        """Check that every log entry, from the newest on, is readable and is the one that its
        successor refers to; return the newest readable one.
        """
        log = self._repository.log
        try:
            newest: Entry | None = await log.newest()
        except (Damaged, RollbackDetected) as error:
            condition = await relog.look(log)
            for name, why in relog.lost(condition):
                self.damage(ENTRY_KIND.title, name, why)
            newest = condition.base
            if condition.whole or newest is None:
                self.note(error, ENTRY_KIND.title, LOG)
        sizes = {info.name: info.size async for info in self._backend.list(LOG)}
        self.report.objects["log"] = len(sizes)
        self.report.bytes["log"] = sum(sizes.values())
        listed = [generation for generation in map(log_generation, sizes) if generation is not None]
        known = max(newest.generation if newest is not None else 0, log.watermark.load().generation)
        for generation in listed:
            if generation > known + FAR:
                self.damage(ENTRY_KIND.title, log_name(generation), PLANTED)
        if newest is not None:
            await self._older(
                newest,
                sorted(
                    (generation for generation in listed if generation < newest.generation),
                    reverse=True,
                ),
            )
        return newest

    async def _older(self, newest: Entry, listed: Sequence[int]) -> None:
        """Check the entries before the newest, except those that a repair recorded as lost."""
        noted = newest.state.gaps
        following, wanted = newest.generation, newest.state.predecessor
        for generation in listed:
            if gap_of(noted, generation) is not None:
                continue
            await self._absent(following, generation, newest)
            gap = gap_of(noted, generation + 1)
            expected = (
                wanted if generation + 1 == following else gap.base if gap is not None else b""
            )
            following, wanted = generation, b""
            try:
                entry = await self._repository.log.read(generation)
            except IcecoreError as error:
                if not isinstance(error, ObjectMissing) or not await self._trimmed(
                    generation, newest.generation
                ):
                    self.note(error, ENTRY_KIND.title, log_name(generation))
                continue
            if expected and expected != entry.digest:
                self.damage(
                    ENTRY_KIND.title,
                    log_name(generation),
                    "it is not the one that its successor follows",
                )
            wanted = entry.state.predecessor

    async def _absent(self, following: int, generation: int, newest: Entry) -> None:
        """Report absent entries between two listed ones."""
        if following - generation == 1:
            return
        for first, last in between(newest.state.gaps, generation + 1, following - 1):
            if last - first >= _HOLE or not await self._trimmed(last, newest.generation):
                for lost in range(last, max(first - 1, last - _HOLE), -1):
                    self.damage(ENTRY_KIND.title, log_name(lost), "it is missing")

    async def _trimmed(self, generation: int, newest: int) -> bool:
        """Return whether an entry is missing because of a trim: everything older is missing as
        well, or a trim is under way, which has taken its anchor.
        """
        left = {other async for other in self._repository.log.generations()}
        return min(left) > generation or (
            generation <= newest - KEPT_ENTRIES and anchor_before(generation) not in left
        )

    async def _list(self) -> None:
        for kind in KINDS:
            async for info in self._backend.list(PREFIX[kind]):
                parsed = parse_name(info.name)
                if parsed is None:
                    continue  # foreign
                self._sizes[parsed] = info.size
                self.report.objects[kind] += 1
                self.report.bytes[kind] += info.size

    async def _foreign(self) -> None:
        """Report what does not belong to the repository; it is not damage."""
        found = {one.name: one for one in await self._backend.source.foreign()}
        for prefix in (*PREFIX.values(), LOG, KEYS, SESSIONS, FILTERS):
            async for info in self._backend.list(prefix):
                if not is_known(info.name):
                    found.setdefault(
                        info.name,
                        Foreign(info.name, "an object whose name is not one of the repository's"),
                    )
                if len(found) >= FOREIGN_AT_MOST:
                    break
        self.report.foreign = [found[name] for name in sorted(found)]
        for one in self.report.foreign:
            self._repository.emit(
                Event("check.foreign", {"object": ascii(one.name)[1:-1], "what": one.what})
            )

    async def _records(self, state: LogState) -> list[SnapshotRecord]:
        records: list[SnapshotRecord] = []
        for ref in state.pages:
            self._named.add(("page", ref.id))
            try:
                records += await self._repository.log.pages.read(ref, cached=False)
            except IcecoreError as error:
                self.note(error, PAGE_KIND.title, object_name("page", ref.id))
        for batch in state.condemned:
            if batch.ref is not None:
                self._named.add(("page", batch.ref.id))
            try:
                await self._repository.log.pages.read_names(batch, cached=False)
            except IcecoreError as error:
                assert batch.ref is not None
                self.note(error, NAMES_KIND.title, object_name("page", batch.ref.id))
        records += state.tail
        for snapshot, times in Counter(record.snapshot for record in records).items():
            if times > 1:
                self.damage("snapshot", snapshot, f"it is listed {times} times")
        return records

    async def _snapshot(self, record: SnapshotRecord) -> None:
        """Check a manifest, its packs and nodes."""
        parsed = parse_name(record.manifest)
        if parsed is not None:
            self._named.add(parsed)
        snapshots = [record.snapshot]
        try:
            manifest = await self._repository.manifest(record)
            spaces = space_refs(manifest, record.manifest)
        except IcecoreError as error:
            self.note(error, MANIFEST_KIND.title, record.manifest, snapshots)
            return
        self._manifest = manifest
        self._lineages.add(manifest.lineage)
        await self._hints_of(manifest)
        if parsed is not None and self._sizes.get(parsed) != record.manifest_length:
            self.damage(
                MANIFEST_KIND.title,
                record.manifest,
                "its length differs from its record",
                snapshots,
            )
        numbers = self._of_snapshot.setdefault(record.snapshot, [])
        for space, refs in zip(manifest.spaces, spaces, strict=True):
            own = await self._space(refs, snapshots)
            numbers += own.values()
            self._regions(record, space, refs, own)

    async def _hints_of(self, manifest: Manifest) -> None:
        """Check hints. They are advice: a damaged one costs time, not a snapshot."""
        if manifest.hints and manifest.hints not in self._hints:
            self._hints.add(manifest.hints)
            try:
                kind = limited(fingerprint_bytes(cells_of(manifest), len(manifest.spaces)))
                data = await self._backend.get(manifest.hints, limit=kind.object_limit)
                decode_hints(
                    manifest.hints,
                    data,
                    self._keys.hints,
                    bytes.fromhex(manifest.hints_digest) or None,
                    kind=kind,
                )
            except IcecoreError as error:
                self.note(error, HINTS_KIND.title, manifest.hints)

    async def _identity(self) -> None:
        """Check configuration, key slots, and the second copies of both."""
        try:
            mends = await inspect(self._backend, self._keys, self._repository.config)
        except StoreError as error:
            self.note(error, CONFIG_KIND.title, CONFIG)
            return
        for mend in mends:
            if not mend.harmless:
                self.damage(mend.kind, mend.name, mend.why)

    async def _advice(self) -> None:
        """Check working sets and heartbeats, which readers can do without."""
        async for info in self._backend.list(HINTS):
            if touched_lineage(info.name) in self._lineages:
                await self._readable(
                    info.name,
                    HINTS_KIND,
                    lambda name, data: decode_hints(name, data, self._keys.hints),
                )
        async for info in self._backend.list(SESSIONS):
            await self._readable(
                info.name,
                BEAT_KIND,
                lambda name, data: decode_heartbeat(name, data, self._keys.sessions),
            )

    async def _readable(
        self, name: str, kind: ObjectKind, decode: Callable[[str, bytes], object]
    ) -> None:
        try:
            decode(name, await self._backend.get(name, limit=kind.object_limit))
        except ObjectMissing:
            pass  # replaced meanwhile, or its session has ended
        except IcecoreError as error:
            self.note(error, kind.title, name)

    def _regions(
        self, record: SnapshotRecord, space: Space, refs: Refs, numbers: dict[int, int]
    ) -> None:
        """Check cells against their regions, as every reader of the map does."""
        nodes = [self._nodes[number] for number in numbers.values()]
        if not nodes:
            return
        regions = refs["region"][list(numbers)].astype(np.int64)
        try:
            check_regions(
                space.regions,
                np.concatenate(nodes),
                np.repeat(regions, [len(node) for node in nodes]),
            )
        except ValueError as error:
            self.damage(
                MANIFEST_KIND.title,
                record.manifest,
                f"{space.kind} {space.key!a}: {error}",
                [record.snapshot],
            )

    async def _space(self, refs: Refs, snapshots: list[str]) -> dict[int, int]:
        """Read nodes not seen before; return the number of the node of each reference whose node
        can be read.
        """
        keys = [(ref["node"].tobytes(), ref["pack"].tobytes(), int(ref["offset"])) for ref in refs]
        fresh = np.array([at for at, key in enumerate(keys) if key not in self._numbers], np.int64)
        for pack in {key[1] for key in keys}:
            if ("nodes", pack) not in self._sizes:
                self.damage("nodes", object_name("nodes", pack), "it is missing", snapshots)
            self._named.add(("nodes", pack))
            self._packs.setdefault(pack, set()).update(snapshots)
        there = np.array([("nodes", keys[at][1]) in self._sizes for at in fresh], np.bool_)
        await self._nodes_of(refs, keys, fresh[there], snapshots)
        return {at: self._numbers[key] for at, key in enumerate(keys) if key in self._numbers}

    async def _nodes_of(
        self,
        refs: Refs,
        keys: list[tuple[bytes, bytes, int]],
        which: npt.NDArray[np.int64],
        snapshots: list[str],
    ) -> None:
        """Read nodes together; on failure, split them until the damaged ones are isolated."""
        if not len(which):
            return
        try:
            records, counts = await read_nodes(self._repository, refs[which])
        except IcecoreError as error:
            if len(which) == 1:
                pack = object_name("nodes", keys[int(which[0])][1])
                if isinstance(error, Damaged) and error.kind == "node":
                    error = Damaged(error.kind, error.name, f"{error.why} (in {pack})")
                self.note(error, "nodes", pack, snapshots)
                return
            half = len(which) // 2
            await self._nodes_of(refs, keys, which[:half], snapshots)
            await self._nodes_of(refs, keys, which[half:], snapshots)
            return
        for at, held in zip(which.tolist(), np.split(records, np.cumsum(counts)[:-1]), strict=True):
            self._numbers[keys[at]] = len(self._nodes)
            self._nodes.append(held)

    async def _footer(self, container: Container, kind: Kind, name: Name) -> Records | None:
        """Return the table of a shard or pack; None, after reporting it, if it is damaged or
        missing.
        """
        size = self._sizes.get(name)
        if size is None:
            self.damage(kind, object_name(*name), "it is missing")
            return None
        parse: Callable[[bytes, bytes, int, bytes], Records] = (
            parse_footer if kind == "shard" else parse_pack_footer
        )
        try:
            tail = bytearray(min(size, TAIL_BYTES))
            await self._backend.get_into(object_name(*name), size - len(tail), memoryview(tail))
            where = container.parse_tail(name[1], size, tail)
            footer = bytearray(where.length)
            await self._backend.get_into(object_name(*name), where.offset, memoryview(footer))
            return parse(self._keys.shard, name[1], size, bytes(footer))
        except IcecoreError as error:
            self.note(error, kind, object_name(*name))
            return None

    async def _table(self, shard: bytes) -> Records | None:
        if shard not in self._footers:
            self._footers[shard] = await self._footer(SHARD, "shard", ("shard", shard))
        return self._footers[shard]

    async def _cells(self) -> Records:
        """Check every place in a record against its shard's footer; return the records of distinct
        chunks.
        """
        records = np.concatenate(self._nodes) if self._nodes else np.empty(0, CELL)
        records = records[records["place"]["length"] > 0]
        for place, chunk in (("place", "chunk"), ("base_place", "base")):
            held = records[records[place]["length"] > 0]
            for shard, which in _by_shard(held[place]):
                await self._shard(shard, held[which], place, chunk)
        different = _different(records["place"])
        self.report.chunks = len(different)
        return records[different]

    async def _shard(self, shard: bytes, held: Records, place: str, chunk: str) -> None:
        self._named.add(("shard", shard))
        table = await self._table(shard)
        if table is None:
            self.report.doubtful.add(shard)
            self._affect(
                "shard",
                object_name("shard", shard),
                self._snapshots_of(shard, held[place]["offset"], place),
            )
            return
        wrong = held[~_agree(table, held[place], held[chunk])]
        if len(wrong):
            self.report.doubtful.add(shard)
            self.damage(
                "shard",
                object_name("shard", shard),
                f"{len(wrong)} chunks that maps refer to are not in its footer",
                self._snapshots_of(shard, wrong[place]["offset"], place),
            )

    def _affect(self, kind: str, name: str, snapshots: Sequence[str]) -> None:
        """Add snapshots to damage that was reported before."""
        for at, damage in enumerate(self.report.damages):
            if damage.kind == kind and damage.name == name:
                both = tuple(sorted({*damage.snapshots, *snapshots}))
                self.report.damages[at] = Damage(damage.kind, damage.name, damage.why, both)

    def _snapshots_of(
        self, shard: bytes, offsets: npt.NDArray[np.uint64], *places: str
    ) -> list[str]:
        """Return the snapshots that have a cell at one of these places."""
        wanted = np.frombuffer(shard, np.uint8)
        nodes = set()
        for number, node in enumerate(self._nodes):
            for place in places:
                here = (node[place]["shard"] == wanted).all(axis=1) & np.isin(
                    node[place]["offset"], offsets
                )
                if (here & (node[place]["length"] > 0)).any():
                    nodes.add(number)
        return [
            snapshot
            for snapshot, numbers in self._of_snapshot.items()
            if not nodes.isdisjoint(numbers)
        ]

    async def _segments(self, state: LogState) -> None:
        """Check that index segments are readable and consistent with the shards."""
        condemned = {name for batch in state.condemned for name in await self._names(batch)}
        for ref in state.segments:
            name = object_name("segment", ref.id)
            self._named.add(("segment", ref.id))
            try:
                entries = await read_segment(self._backend, ref, self._keys.segment)
            except IcecoreError as error:
                self.note(error, SEGMENT_TITLE, name)
                continue
            if len(entries) != ref.count:
                self.damage(
                    SEGMENT_TITLE, name, f"it has {len(entries)} entries instead of {ref.count}"
                )
            if filtered(ref):
                await self._filter(ref, entries)
            for shard, which in _by_shard(entries["place"]):
                if ("shard", shard) in condemned:
                    continue  # condemned, so nobody uses what the index says of it
                if ("shard", shard) not in self._sizes:
                    self.damage(
                        SEGMENT_TITLE,
                        name,
                        f"it names {object_name('shard', shard)}, which is missing",
                    )
                    continue
                table = await self._table(shard)
                if (
                    table is not None
                    and not _agree(table, entries["place"][which], entries["chunk"][which]).all()
                ):
                    self.damage(
                        SEGMENT_TITLE,
                        name,
                        f"it names chunks that {object_name('shard', shard)} does not have",
                    )

    async def _filter(self, ref: SegmentRef, entries: Records) -> None:
        """Check a segment's filter, if any: it must be intact and pass what is in the segment."""
        name = filter_name(ref.id)
        try:
            data = await self._backend.get(name, limit=FILTER_KIND.object_limit)
            words = decode_filter(name, data, self._keys.segment, ref)
        except ObjectMissing:
            return
        except IcecoreError as error:
            self.note(error, FILTER_KIND.title, name)
            return
        alone = FilterSet([ref], words.nbytes + FILTER_KIND.limit)
        alone.put(0, words)
        if (alone.candidates(entries["chunk"]) < 0).any():
            self.damage(FILTER_KIND.title, name, "it denies chunks of its segment")

    async def _names(self, batch: Condemned) -> list[Name]:
        try:
            return await self._repository.log.pages.read_names(batch)
        except IcecoreError:
            return []  # reported before

    async def _read(self, cells: Records) -> None:
        """Read, decode and verify chunks in storage order."""
        if self._manifest is None:
            return
        if self._share < 1:
            chosen = np.random.default_rng().random(len(cells)) < self._share
            cells = cells[chosen]
        reader = SnapshotReader(self._repository, self._manifest, asyncio.get_running_loop())
        rooms = threading.local()

        def verify(batch: Records) -> list[tuple[np.void, IcecoreError]]:
            if not hasattr(rooms, "out"):
                rooms.out = memoryview(bytearray(CELL_BYTES))
            failed = []
            for record in batch:
                try:
                    reader.read_cell(record, rooms.out)
                except IcecoreError as error:
                    failed.append((record, error))
            return failed

        async def work(first: int) -> None:
            batch = cells[first : first + _READ_BATCH]
            failed = await asyncio.to_thread(verify, batch)
            self.report.read_chunks += len(batch)
            for record, error in failed:
                place = record["place"]
                shard = place["shard"].tobytes()
                based = record["base_place"]["length"] > 0
                self.report.doubtful |= {
                    shard,
                    *([record["base_place"]["shard"].tobytes()] if based else []),
                }
                snapshots = self._snapshots_of(
                    shard, np.array([place["offset"]]), "place", "base_place"
                )
                self.note(error, "chunk", record["chunk"].tobytes().hex(), snapshots)

        await each(range(0, len(cells), _READ_BATCH), work, at_once=_DECODED_AT_ONCE)


def _agree(table: Records, places: Records, chunks: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return which places, with the ids of the chunks expected there, agree with a shard's table."""
    if not len(table):
        return np.zeros(len(places), np.bool_)
    at = np.minimum(np.searchsorted(table["offset"], places["offset"]), len(table) - 1)
    found = table[at]
    agree: npt.NDArray[np.bool_] = (found["chunk"] == chunks).all(axis=1)
    for name in ("offset", "length", "codec"):
        agree &= found[name] == places[name]
    return agree


def _by_shard(places: Records) -> Iterator[tuple[bytes, npt.NDArray[np.int64]]]:
    """Yield each shard in ``places``, and the indices that name it."""
    if not len(places):
        return
    shards, inverse = np.unique(
        np.ascontiguousarray(places["shard"]).view("S16")[:, 0], return_inverse=True
    )
    order = np.argsort(inverse, kind="stable")
    edges = np.searchsorted(inverse[order], np.arange(len(shards) + 1))
    for number, name in enumerate(shards.tolist()):
        yield name.ljust(16, b"\0"), order[edges[number] : edges[number + 1]]


def _different(places: Records) -> npt.NDArray[np.int64]:
    """Return one index for each distinct place, in storage order."""
    keys = np.empty((len(places), 24), np.uint8)
    keys[:, :16] = places["shard"]
    keys[:, 16:] = places["offset"].astype(">u8").view(np.uint8).reshape(-1, 8)
    return np.unique(keys.view("S24")[:, 0], return_index=True)[1]
