"""What is damaged in a repository, and what can be repaired from what is left. Changes nothing; for
``repair``.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Set

import msgspec
import numpy as np

from icecore.errors import Damaged, FormatTooNew, ObjectMissing
from icecore.store.format.cell import CELL, Records
from icecore.store.format.filters import FILTER_KIND
from icecore.store.format.gaps import ranges
from icecore.store.format.hints import HINTS_KIND, touched_lineage
from icecore.store.format.manifest import MANIFEST_KIND, Manifest, decode_manifest
from icecore.store.format.names import PREFIX, log_generation, log_name, object_name, parse_name
from icecore.store.format.rows import unpack
from icecore.store.format.segment import TITLE as SEGMENT_TITLE
from icecore.store.format.segment import in_shards, of_shards
from icecore.store.format.state import (
    ENTRY_KIND,
    PAGE_KIND,
    Gap,
    PageRef,
    SegmentRef,
    SnapshotRecord,
    decode_page,
    leading,
)
from icecore.store.log.entries import PLANTED
from icecore.store.log.identity import Mend, inspect
from icecore.store.log.index import read_segment
from icecore.store.log.lookup import Index
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import BEAT_KIND, Session
from icecore.store.log.tables import index_entries, read_table
from icecore.store.maintenance.findings import Damage, Report
from icecore.store.maintenance.reach import Refs, readable_nodes, space_refs
from icecore.store.maintenance.relog import complete, record_of
from icecore.store.maintenance.salvage import Key, Salvage, Salvager
from icecore.text import harmless

_UNREADABLE = (Damaged, ObjectMissing, FormatTooNew)


class Fix(msgspec.Struct, frozen=True):
    """One repair that is possible.

    Attributes:
        kind: The kind of object, as in :class:`Damage`.
        name: The object, or the chunk's or node's id.
        how: The repair, in words.
    """

    kind: str
    name: str
    how: str


class Plan(msgspec.Struct):
    """What a repair would do at present.

    Attributes:
        damages: The findings of the check.
        fixes: What is repaired.
        quarantine: Snapshots that lost data, and what.
        release: Quarantined snapshots that are readable again.
        beyond: Damage that cannot be repaired from what is left.
        recovered: Snapshots that are listed again because their manifests were found, and what is
            known of them.
        unlisted: Manifests of unlisted snapshots that are not listed again, and why.
    """

    damages: list[Damage] = msgspec.field(default_factory=list)
    fixes: list[Fix] = msgspec.field(default_factory=list)
    quarantine: dict[str, str] = msgspec.field(default_factory=dict)
    release: list[str] = msgspec.field(default_factory=list)
    beyond: list[Damage] = msgspec.field(default_factory=list)
    recovered: dict[str, str] = msgspec.field(default_factory=dict)
    unlisted: dict[str, str] = msgspec.field(default_factory=dict)

    @property
    def empty(self) -> bool:
        """Whether there is nothing to do."""
        return not (self.fixes or self.quarantine or self.release or self.recovered)


class Survey(msgspec.Struct):
    """All findings about a repository, for ``repair``."""

    plan: Plan
    pages: dict[bytes, list[SnapshotRecord]] = msgspec.field(default_factory=dict)
    forget_marks: set[bytes] = msgspec.field(default_factory=set)
    segments: dict[bytes, Records | None] = msgspec.field(default_factory=dict)
    reindex: list[Records] = msgspec.field(default_factory=list)
    manifests: dict[str, Manifest] = msgspec.field(default_factory=dict)
    restored: set[str] = msgspec.field(default_factory=set)
    records: dict[str, SnapshotRecord] = msgspec.field(default_factory=dict)
    lost_nodes: set[bytes] = msgspec.field(default_factory=set)
    new_nodes: set[bytes] = msgspec.field(default_factory=set)
    salvage: Salvage = msgspec.field(default_factory=Salvage)
    leave: set[bytes] = msgspec.field(default_factory=set)
    nodes: dict[bytes, Records] = msgspec.field(default_factory=dict)
    trim: list[str] = msgspec.field(default_factory=list)
    lost: list[Gap] = msgspec.field(default_factory=list)
    absent: list[int] = msgspec.field(default_factory=list)
    mends: list[Mend] = msgspec.field(default_factory=list)


class Diagnosis:
    """Finds out what can be repaired, and from what.

    Args:
        index: Rebuild the index from everything that is reached.
    """

    def __init__(
        self,
        repository: StoredRepository,
        source: StoredRepository | None,
        session: Session,
        report: Report,
        survey: Survey,
        *,
        index: bool = False,
    ) -> None:
        self._reindex = index
        self._repository = repository
        self._source = source
        self._session = session
        self._state = session.state
        self._report = report
        self._survey = survey
        self._plan = survey.plan
        self._nodes = survey.nodes
        self._of_snapshot: dict[str, list[bytes]] = {}
        self._lost: dict[str, list[str]] = {}
        self._condemned: set[str] = set()
        self._packs = {damage.name for damage in report.damages if damage.kind == "nodes"}
        self._suffering = {snapshot for damage in report.damages for snapshot in damage.snapshots}
        self._shard_names: set[bytes] = set()
        self._named: set[str] = set()

    async def run(self) -> None:
        """Run the whole diagnosis."""
        sizes = {}
        async for info in self._repository.backend.list(PREFIX["shard"]):
            parsed = parse_name(info.name)
            if parsed is not None:
                sizes[parsed[1]] = info.size
        self._shard_names = set(sizes)
        records = await self._lists()
        self._named = {record.manifest for record in records}
        for record in records:
            self._survey.records[record.snapshot] = record
            await self._snapshot(record)
        for pack in sorted(self._packs):
            self._fix("nodes", pack, "its readable parts are stored again")
        await self._shards(sizes)
        await self._index(sizes)
        self._quarantine()
        await self._others()

    def _fix(self, kind: str, name: str, how: str) -> None:
        self._plan.fixes.append(Fix(kind, name, how))

    async def _lists(self) -> list[SnapshotRecord]:
        """Collect every available snapshot record, and the unreadable lists of marks."""
        pages, records, unreadable = (
            self._repository.log.pages,
            list[SnapshotRecord](),
            list[PageRef](),
        )
        for ref in self._state.pages:
            try:
                records += await pages.read(ref, cached=False)
            except _UNREADABLE:
                unreadable.append(ref)
        records += self._state.tail
        for batch in self._state.condemned:
            try:
                self._condemned |= {
                    object_name(*name) for name in await pages.read_names(batch, cached=False)
                }
            except _UNREADABLE:
                assert batch.ref is not None
                self._survey.forget_marks.add(batch.ref.id)
                self._fix(
                    "name list",
                    object_name("page", batch.ref.id),
                    "left out: the collector marks again",
                )
        known = {record.snapshot for record in records}
        for ref in unreadable:
            found, how = await self._page(ref, known, {record.manifest for record in records})
            known |= {record.snapshot for record in found}
            self._survey.pages[ref.id] = found
            self._fix(PAGE_KIND.title, object_name("page", ref.id), how)
            if len(found) < ref.count:
                why = f"{ref.count - len(found)} of its {ref.count} snapshots are missing"
                self._plan.beyond.append(Damage(PAGE_KIND.title, object_name("page", ref.id), why))
            records += found
        return records

    async def _page(
        self, ref: PageRef, known: set[str], named: set[str]
    ) -> tuple[list[SnapshotRecord], str]:
        name = object_name("page", ref.id)
        if self._source is not None:
            try:
                data = await self._source.backend.get(name, limit=PAGE_KIND.object_limit)
                return decode_page(
                    name, data, self._repository.keys.log, ref
                ), "taken from the replica"
            except _UNREADABLE:
                pass
        found: dict[str, SnapshotRecord] = {}
        async for place, data, manifest in self._manifests(named | self._condemned):
            if (
                manifest.snapshot not in known
                and ref.first <= leading(manifest.snapshot) <= ref.last
            ):
                record = record_of(manifest, place, data)
                # Of two manifests of one snapshot, a collector replaced one: the one whose nodes
                # exist counts.
                if manifest.snapshot not in found or await self._complete(manifest):
                    found[manifest.snapshot] = record
        how = f"rebuilt from {len(found)} manifests; tags and pins are those of the dump"
        return sorted(found.values(), key=lambda record: record.snapshot), how

    async def _complete(self, manifest: Manifest) -> bool:
        try:
            for pack in _packs(manifest):
                await self._repository.backend.size(object_name("nodes", pack))
        except ObjectMissing:
            return False
        return True

    async def _snapshot(self, record: SnapshotRecord) -> None:
        """Collect a snapshot's manifest and nodes from wherever they are available."""
        manifest = await self._manifest(record)
        if manifest is None:
            self._lose(record.snapshot, f"its manifest {record.manifest} cannot be read")
            return
        self._survey.manifests[record.snapshot] = manifest
        nodes = self._of_snapshot.setdefault(record.snapshot, [])
        for refs in space_refs(manifest, record.manifest):
            names = [node.tobytes() for node in refs["node"]]
            nodes += names
            fresh = [at for at, name in enumerate(names) if name not in self._nodes]
            await self._read(refs[fresh])
            for at in fresh:
                if names[at] in self._survey.lost_nodes:
                    self._lose(
                        record.snapshot, f"node {names[at].hex()} of its maps cannot be read"
                    )

    async def _manifest(self, record: SnapshotRecord) -> Manifest | None:
        if record.snapshot in self._suffering:
            other = await self._another(record.snapshot)
            if other is not None:
                self._survey.restored.add(record.snapshot)
                self._fix(
                    MANIFEST_KIND.title,
                    record.manifest,
                    f"taken from {other[0]}, which is of the same snapshot and refers to existing objects",
                )
                return other[1]
        try:
            manifest = await self._repository.manifest(record)
            space_refs(manifest, record.manifest)
            return manifest
        except _UNREADABLE:
            pass
        if self._source is not None:
            try:
                manifest = await self._source.manifest(record)
                self._survey.restored.add(record.snapshot)
                self._fix(MANIFEST_KIND.title, record.manifest, "taken from the replica")
                return manifest
            except _UNREADABLE:
                pass
        return None

    async def _manifests(self, without: Set[str]) -> AsyncIterator[tuple[str, bytes, Manifest]]:
        """Yield name, bytes and content of every manifest that can be read, except those named."""
        async for info in self._repository.backend.list(PREFIX["manifest"]):
            if info.name in without:
                continue
            try:
                data = await self._repository.backend.get(
                    info.name, limit=MANIFEST_KIND.object_limit
                )
                manifest = decode_manifest(data, self._repository.keys.manifest, name=info.name)
            except _UNREADABLE:
                continue
            yield info.name, data, manifest

    async def _another(self, snapshot: str) -> tuple[str, Manifest] | None:
        """Return another complete manifest of a snapshot: one that a collector wrote and the log
        does not know of, or one that it has not deleted yet. Nothing that it refers to is
        condemned.
        """
        if self._survey.forget_marks:
            return None  # it is unknown what is condemned
        packs = self._condemned_of("nodes")
        shards = self._shard_names - self._condemned_of("shard")
        async for name, _, manifest in self._manifests(self._named):
            if (
                manifest.snapshot == snapshot
                and not packs & _packs(manifest)
                and await complete(self._repository, manifest, name, shards)
            ):
                return name, manifest
        return None

    def _condemned_of(self, kind: str) -> frozenset[bytes]:
        """Return the ids of the condemned objects of a kind."""
        names = map(parse_name, self._condemned)
        return frozenset(name[1] for name in names if name is not None and name[0] == kind)

    async def _read(self, refs: Refs) -> None:
        failed: list[int] = []
        for at, cells in await readable_nodes(
            self._repository, refs, lambda at, error: failed.append(at)
        ):
            self._nodes[refs["node"][at].tobytes()] = cells
        for node, pack in zip(refs["node"], refs["pack"], strict=True):
            # A pack that is partly damaged: its readable nodes are stored again, so that the pack
            # can go.
            if (
                object_name("nodes", pack.tobytes()) in self._packs
                and node.tobytes() in self._nodes
            ):
                self._survey.new_nodes.add(node.tobytes())
        left = refs[failed]
        if self._source is not None and len(left):
            for at, cells in await readable_nodes(self._source, left):
                node = left["node"][at].tobytes()
                self._nodes[node] = cells
                self._survey.new_nodes.add(node)
                self._fix("node", node.hex(), "taken from the replica")
        self._survey.lost_nodes |= {node.tobytes() for node in left["node"]} - self._nodes.keys()

    async def _shards(self, sizes: dict[bytes, int]) -> None:
        """Salvage every chunk in a doubtful shard that is still reached."""
        cells = np.concatenate(list(self._nodes.values())) if self._nodes else np.empty(0, CELL)
        # Including chunks that only the index refers to: writers would come to use them.
        named = {
            parse_name(damage.name) for damage in self._report.damages if damage.kind == "shard"
        }
        told = {name[1] for name in named if name is not None}
        doubtful = frozenset(self._report.doubtful | told | (_reached([cells]) - sizes.keys()))
        if not doubtful:
            return
        index = self._session.index  # finds nothing in condemned shards
        if self._survey.forget_marks:
            index = Index(self._repository.backend, [], self._repository.keys.segment)
        await index.load()
        salvage = await Salvager(self._repository, self._source, cells, doubtful, index).run()
        harmed = salvage.harmed
        for shard in doubtful - harmed:
            try:
                await self._table(shard, sizes)
            except _UNREADABLE:
                harmed.add(shard)
        for key in [key for key in salvage.saved if key[0] not in harmed]:
            # Its shard is intact; another chunk made it doubtful.
            salvage.places[key] = salvage.saved.pop(key).piece.place
        self._survey.salvage, self._survey.leave = salvage, harmed
        for shard in sorted(harmed):
            here = [saved for key, saved in salvage.saved.items() if key[0] == shard]
            away = sum(saved.elsewhere for saved in here)
            other = sum(key[0] == shard for key in [*salvage.found, *salvage.twins])
            gone = sum(key[0] == shard for key in salvage.lost)
            if len(here) + other:
                how = f"{len(here)} chunks stored again, {away} of them from the replica; {other} found at another place; {gone} lost"
                self._fix("shard", object_name("shard", shard), how)
        for key in salvage.instead:
            self._fix(
                "chunk",
                f"at {key[1]} of {object_name('shard', key[0])}",
                "its base is lost; found at another place",
            )
        for snapshot, nodes in self._of_snapshot.items():
            gone = _count_lost(
                [self._nodes[node] for node in nodes if node in self._nodes], salvage
            )
            if gone:
                self._lose(snapshot, f"{gone} of its chunks are lost")

    async def _index(self, sizes: dict[bytes, int]) -> None:
        """Remove unusable entries from segments. If one cannot be read, take its contents from the
        shards' footers.
        """
        wrong = {damage.name for damage in self._report.damages if damage.kind == SEGMENT_TITLE}
        harmed = frozenset(self._survey.leave)
        doomed = self._condemned_of("shard")
        kept, dropped = list[SegmentRef](), self._reindex
        for ref in self._state.segments:
            name = object_name("segment", ref.id)
            if name in wrong or self._survey.forget_marks:
                # Without their marks, it is unknown which shards are condemned, so only what is
                # reached may be found.
                self._survey.segments[ref.id], dropped = None, True
                self._fix(SEGMENT_TITLE, name, "left out; rebuilt from the reached shards")
                continue
            kept.append(ref)
            if harmed:
                entries = await read_segment(
                    self._repository.backend, ref, self._repository.keys.segment
                )
                dead = in_shards(entries, harmed)
                if dead.any():
                    # A collector may delete what is condemned, and its mark, before this is
                    # committed.
                    self._survey.segments[ref.id] = entries[~in_shards(entries, harmed | doomed)]
                    self._fix(
                        SEGMENT_TITLE, name, f"{int(dead.sum())} entries of damaged shards left out"
                    )
        if dropped:
            index = Index(self._repository.backend, kept, self._repository.keys.segment)
            await index.load()
            for shard in _reached(self._nodes.values()) - harmed:
                try:
                    entries = index_entries(shard, await self._table(shard, sizes))
                except _UNREADABLE:
                    continue
                found, _ = await asyncio.to_thread(index.lookup, entries["chunk"])
                self._survey.reindex.append(entries[~found])

    async def _table(self, shard: bytes, sizes: dict[bytes, int]) -> Records:
        return await read_table(
            self._repository.backend, self._repository.keys.shard, shard, sizes.get(shard, 0)
        )

    def _lose(self, snapshot: str, why: str) -> None:
        reasons = self._lost.setdefault(snapshot, [])
        if why not in reasons:
            reasons.append(why)

    def _quarantine(self) -> None:
        for snapshot, record in self._survey.records.items():
            reasons = self._lost.get(snapshot, [])
            why = "; ".join(map(harmless, reasons[:3])) + (
                f"; and {len(reasons) - 3} more" if len(reasons) > 3 else ""
            )
            if why and why != record.quarantined:
                self._plan.quarantine[snapshot] = why
            elif not why and record.quarantined and self._read_all():
                self._plan.release.append(snapshot)

    def _read_all(self) -> bool:
        return self._report.read_chunks == self._report.chunks

    async def _others(self) -> None:
        """Handle damage outside what snapshots reach."""
        await self._entries()
        hints = {damage.name for damage in self._report.damages if damage.kind == HINTS_KIND.title}
        for snapshot, manifest in list(self._survey.manifests.items()):
            if manifest.hints in hints:
                self._survey.manifests[snapshot] = msgspec.structs.replace(
                    manifest, hints="", hints_digest=""
                )
                self._survey.restored.add(snapshot)
                self._fix(HINTS_KIND.title, manifest.hints, "left out: they only save time")
        for damage in self._report.damages:
            if damage.kind == FILTER_KIND.title:
                self._survey.trim.append(damage.name)
                self._fix(
                    FILTER_KIND.title,
                    damage.name,
                    "removed: it only saves time, and 'gc' rebuilds it",
                )
            elif damage.kind == BEAT_KIND.title:
                self._survey.trim.append(damage.name)
                self._fix(
                    BEAT_KIND.title, damage.name, "removed: its session writes the next heartbeat"
                )
            elif damage.kind == HINTS_KIND.title and touched_lineage(damage.name) is not None:
                self._survey.trim.append(damage.name)
                self._fix(HINTS_KIND.title, damage.name, "removed: it only saves time")
        await self._identity()

    async def _entries(self) -> None:
        """Record damaged entries before the newest as lost: they serve only to prove that the log
        is the one seen before.
        """
        log = self._repository.log
        damages = [damage for damage in self._report.damages if damage.kind == ENTRY_KIND.title]
        for damage in damages:
            if damage.why == PLANTED:
                self._survey.trim.append(damage.name)
                self._fix(damage.kind, damage.name, "removed: it is not a log entry")
        wrong = {
            log_generation(damage.name) or 0 for damage in damages if damage.why != PLANTED
        } - {0}
        listed = {generation async for generation in log.generations()}
        self._survey.absent = sorted(wrong - listed)
        for first, last in ranges(wrong):
            digest = b""
            if first - 1 in listed:
                try:
                    digest = (await log.read(first - 1)).digest
                except _UNREADABLE:
                    pass
            self._survey.lost.append(Gap(first, last, digest))
            self._fix(
                ENTRY_KIND.title,
                log_name(last),
                f"{last - first + 1} entries recorded as lost: later entries hold the complete state",
            )

    async def _identity(self) -> None:
        """Inspect configuration, keys, and the second copies of both."""
        mends = await inspect(
            self._repository.backend, self._repository.keys, self._repository.config
        )
        self._survey.mends = mends
        for mend in mends:
            if mend.how:
                self._fix(mend.kind, mend.name, mend.how)
            else:
                self._plan.beyond.append(Damage(mend.kind, mend.name, mend.why))


def _packs(manifest: Manifest) -> set[bytes]:
    """Return the ids of the node packs that a manifest refers to."""
    return {pack.tobytes() for refs in space_refs(manifest, "") for pack in refs["pack"]}


def _reached(nodes: Iterable[Records]) -> set[bytes]:
    """Return the shards that records refer to."""
    found: set[bytes] = set()
    for records in nodes:
        for field_ in ("place", "base_place"):
            places = records[field_][records[field_]["length"] > 0]
            found |= {
                bytes(shard).ljust(16, b"\0")
                for shard in set(places["shard"].copy().view("S16")[:, 0].tolist())
            }
    return found


def _count_lost(nodes: Iterable[Records], salvage: Salvage) -> int:
    """Return how many of these cells' chunks are lost for good."""
    if not salvage.lost:
        return 0
    shards = frozenset(shard for shard, _ in salvage.lost)
    gone: set[Key] = set()
    for records in nodes:
        doubtful = of_shards(records["place"]["shard"], shards) | of_shards(
            records["base_place"]["shard"], shards
        )
        for row in map(unpack, records[doubtful]):
            place, _, base = row.stored
            key = place.shard, place.offset
            if key in salvage.lost or (
                not salvage.replaced(key)
                and base.length
                and (base.shard, base.offset) in salvage.lost
            ):
                gone.add(key)
    return len(gone)
