"""Checks every object that the newest state reaches and reports each damaged one; damage never
stops the check.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable

import numpy as np

from icecore.errors import (
    Damaged,
    IcecoreError,
    ObjectMissing,
    RollbackDetected,
    StoreError,
)
from icecore.events import Event, phase
from icecore.sizes import CELL_BYTES
from icecore.store.backend.base import FOREIGN_AT_MOST, READERS_LEAVE, Foreign
from icecore.store.format.cell import Records
from icecore.store.format.cellmap import PACK
from icecore.store.format.envelope import ObjectKind
from icecore.store.format.fingerprints import fingerprint_bytes
from icecore.store.format.hints import HINTS_KIND, decode_hints, limited, touched_lineage
from icecore.store.format.keys import CONFIG_KIND
from icecore.store.format.manifest import MANIFEST_KIND, Manifest, cells_of
from icecore.store.format.names import (
    CONFIG,
    FILTERS,
    HINTS,
    KEYS,
    KINDS,
    LOG,
    PREFIX,
    SESSIONS,
    is_known,
    object_name,
    parse_name,
)
from icecore.store.format.state import (
    NAMES_KIND,
    PAGE_KIND,
    LogState,
    SnapshotRecord,
)
from icecore.store.log.identity import inspect
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import BEAT_KIND, Session, decode_heartbeat
from icecore.store.maintenance.check_log import LogCheck
from icecore.store.maintenance.check_maps import Maps, Name
from icecore.store.maintenance.check_shards import ShardCheck
from icecore.store.maintenance.findings import Damage, Findings, Report
from icecore.store.maintenance.reach import space_refs
from icecore.store.runtime.parallel import each
from icecore.store.snapshot.reader import SnapshotReader

_READ_BATCH = 64
_DECODED_AT_ONCE = 4


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
        self.findings = Findings(repository.emit)
        self._repository = repository
        self._backend = repository.backend
        self._keys = repository.keys
        self._share = share
        self._sizes: dict[Name, int] = {}
        self._named: set[Name] = set()
        self._maps = Maps(repository, self.findings, self._sizes)
        self._shards = ShardCheck(repository, self.findings, self._maps, self._sizes, self._named)
        self._hints: set[str] = set()
        self._lineages: set[str] = set()
        self._manifest: Manifest | None = None

    @property
    def report(self) -> Report:
        """What was found so far."""
        return self.findings.report

    async def run(self, state: LogState | None) -> None:
        """Run the whole check."""
        await self._look(state)
        self.report.lost = [damage for damage in self.report.damages if self._known(damage)]
        self.report.damages = [damage for damage in self.report.damages if not self._known(damage)]

    def _known(self, damage: Damage) -> bool:
        return bool(damage.snapshots) and self.report.quarantined.keys() >= set(damage.snapshots)

    async def _look(self, state: LogState | None) -> None:
        await self._identity()
        entry = await LogCheck(self._repository, self.findings).run()
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
        packs: set[Name] = {("nodes", pack) for pack in self._maps.packs}
        self._named |= packs
        for name in sorted(packs & self._sizes.keys()):
            if (
                await self._shards.footer(PACK, "nodes", name) is None
                and self._maps.packs[name[1]] <= self.report.quarantined.keys()
            ):
                self.findings.affect("nodes", object_name(*name), sorted(self._maps.packs[name[1]]))
        cells = await self._shards.cells()
        await self._shards.segments(state)
        await self._advice()
        if self._share > 0:
            await self._read(cells)
        unreached = self._sizes.keys() - self._named
        self.report.unreached = len(unreached)
        self.report.unreached_bytes = sum(self._sizes[name] for name in unreached)

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
                self.findings.note(error, PAGE_KIND.title, object_name("page", ref.id))
        for batch in state.condemned:
            if batch.ref is not None:
                self._named.add(("page", batch.ref.id))
            try:
                await self._repository.log.pages.read_names(batch, cached=False)
            except IcecoreError as error:
                assert batch.ref is not None
                self.findings.note(error, NAMES_KIND.title, object_name("page", batch.ref.id))
        records += state.tail
        for snapshot, times in Counter(record.snapshot for record in records).items():
            if times > 1:
                self.findings.damage("snapshot", snapshot, f"it is listed {times} times")
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
            self.findings.note(error, MANIFEST_KIND.title, record.manifest, snapshots)
            return
        self._manifest = manifest
        self._lineages.add(manifest.lineage)
        await self._hints_of(manifest)
        if parsed is not None and self._sizes.get(parsed) != record.manifest_length:
            self.findings.damage(
                MANIFEST_KIND.title,
                record.manifest,
                "its length differs from its record",
                snapshots,
            )
        numbers = self._maps.of_snapshot.setdefault(record.snapshot, [])
        for space, refs in zip(manifest.spaces, spaces, strict=True):
            own = await self._maps.read(refs, snapshots)
            numbers += own.values()
            self._maps.check_regions(record, space, refs, own)

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
                self.findings.note(error, HINTS_KIND.title, manifest.hints)

    async def _identity(self) -> None:
        """Check configuration, key slots, and the second copies of both."""
        try:
            mends = await inspect(self._backend, self._keys, self._repository.config)
        except StoreError as error:
            self.findings.note(error, CONFIG_KIND.title, CONFIG)
            return
        for mend in mends:
            if not mend.harmless:
                self.findings.damage(mend.kind, mend.name, mend.why)

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
            self.findings.note(error, kind.title, name)

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
                snapshots = self._maps.snapshots_of(
                    shard, np.array([place["offset"]]), "place", "base_place"
                )
                self.findings.note(error, "chunk", record["chunk"].tobytes().hex(), snapshots)

        await each(range(0, len(cells), _READ_BATCH), work, at_once=_DECODED_AT_ONCE)
