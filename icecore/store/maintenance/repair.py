"""Repairs a damaged repository: plans, then applies in one transaction. Nothing that can still be
read is destroyed, and no snapshot disappears silently.

What is damaged is searched in a second source (a replica), then elsewhere in the repository, and
stored again under new names; the collector deletes the old objects once nothing reaches them.
Snapshots that lost data for good stay listed, quarantined with the reason.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.errors import StoreError, UsageError
from icecore.events import Event, phase
from icecore.store.backend.base import READERS_LEAVE
from icecore.store.format.cell import Records
from icecore.store.format.gaps import gap_of, joined
from icecore.store.format.keys import Keys
from icecore.store.format.manifest import MANIFEST_KIND
from icecore.store.format.names import log_name, random_id
from icecore.store.format.rows import Place, Stored
from icecore.store.format.segment import sort_entries
from icecore.store.format.state import ENTRY_KIND, LogState, PageRef, SegmentRef, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.identity import inspect, mend
from icecore.store.log.index import build
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session
from icecore.store.maintenance.check import check
from icecore.store.maintenance.diagnosis import Diagnosis, Fix, Plan, Survey
from icecore.store.maintenance.findings import Damage
from icecore.store.maintenance.reach import Refs
from icecore.store.maintenance.relog import Relogger, Relogging, fill, lost
from icecore.store.maintenance.rewrite import MapRewriter, NewManifest
from icecore.store.maintenance.salvage import Key
from icecore.store.snapshot.shard_writer import ShardWriter

_ROUNDS = 4


class Repairer:
    """One repair. ``plan`` changes nothing; ``apply`` plans again and executes it.

    Args:
        repository: The repository.
        source: An open replica of it, which is searched first for what is damaged here. They must
            share a master secret.
        read_data: Share of the chunks to read, 0 to 1; damage to data that is not read is not
            found.
        accept_rollback: As in `icecore.store.maintenance.relog.Relogger`.

    Raises:
        UsageError: ``source`` is not a replica.
    """

    def __init__(
        self,
        repository: StoredRepository,
        source: StoredRepository | None = None,
        *,
        read_data: float = 1.0,
        accept_rollback: bool = False,
    ) -> None:
        if source is not None and not _same_secret(source.keys, repository.keys):
            raise UsageError(
                f"{source.backend.where} is not a replica of {repository.backend.where}",
                cure="name one with the same master secret",
            )
        self._repository = repository
        self._source = source
        self._read_data = read_data
        self._relogger = Relogger(repository, accept_rollback=accept_rollback)

    async def plan(self) -> Plan:
        """Return what there is to do. If the newest log entry is lost, other damage is found once
        the log continues.

        Raises:
            RollbackDetected: This client has seen a newer entry, or a different one, and that is
                not accepted.
            StoreError: The store failed; what it failed to return does not count as damaged.
        """
        relogging = await self._relogger.plan()
        if relogging is not None:
            return _continued(relogging)
        async with await self._begin() as session:
            return (await self._survey(session)).plan

    async def apply(self) -> Plan:
        """Repair; safe to stop anywhere. Return what was done; raise as ``plan`` does.

        Maps taken from the replica may lead to more damage, which takes another round. Each round
        is one transaction.
        """
        done = Plan()
        relogging = await self._relogger.apply()
        if relogging is not None:
            done = _continued(relogging)
            self._repository.emit(
                Event(
                    "repair.log",
                    {"generation": relogging.generation, "recovered": list(done.recovered)},
                )
            )
        with phase(self._repository.emit, "repair"):
            for round_ in range(_ROUNDS):
                async with await self._begin() as session:
                    survey = await self._survey(session, index=relogging is not None and not round_)
                    await mend(self._repository.backend, survey.mends)
                    for generation in survey.absent:
                        await fill(self._repository, generation)
                    if not survey.plan.empty:
                        await _Apply(self._repository, session, survey).run()
                for name in survey.trim:
                    await self._repository.backend.delete(name)
                plan = survey.plan
                done.damages += plan.damages if not round_ else []
                done.fixes += plan.fixes
                done.quarantine |= plan.quarantine
                done.release += plan.release
                done.beyond = list(dict.fromkeys([*done.beyond, *plan.beyond]))
                if plan.empty:
                    break
        for snapshot, why in done.quarantine.items():
            self._repository.emit(Event("repair.quarantined", {"snapshot": snapshot, "why": why}))
        return done

    async def _begin(self) -> Session:
        return await self._repository.begin(None, "repair", load_index=False, leave=READERS_LEAVE)

    async def _survey(self, session: Session, *, index: bool = False) -> Survey:
        report = await check(self._repository, read_data=self._read_data, session=session)
        if report.denied is not None:
            raise report.denied
        if report.failed:
            failed = report.failed[0]
            raise StoreError(
                f"{failed.kind} {failed.name} may be intact, but the store failed to return it: {failed.why}",
                cure="try again; if the storage itself has lost it (a bad disk), delete the object and repair again",
            )
        survey = Survey(Plan(report.damages))
        mends = (
            []
            if report.damages
            else await inspect(
                self._repository.backend, self._repository.keys, self._repository.config
            )
        )
        if report.sound and not report.quarantined and not mends and not index:
            return survey
        await Diagnosis(self._repository, self._source, session, report, survey, index=index).run()
        return survey


def _continued(relogging: Relogging) -> Plan:
    plan = Plan([Damage(ENTRY_KIND.title, name, why) for name, why in lost(relogging.condition)])
    plan.fixes = [Fix(ENTRY_KIND.title, log_name(relogging.generation), relogging.words())]
    for record in relogging.recovered:
        plan.recovered[record.snapshot] = (
            f"of job {record.job!r}: it is unknown whether it had been committed, or forgotten since"
        )
    plan.unlisted = relogging.unlisted
    plan.beyond = [
        Damage(MANIFEST_KIND.title, name, why) for name, why in relogging.unreadable.items()
    ]
    return plan


def _same_secret(one: Keys, other: Keys) -> bool:
    """Return whether two repositories are replicas. Encrypted ones still have a few keys of their
    own each.
    """
    return one.secret == other.secret and one.encrypted == other.encrypted


class _Apply:
    """Stores the new objects, and replaces the old ones."""

    def __init__(self, repository: StoredRepository, session: Session, survey: Survey) -> None:
        self._repository = repository
        self._session = session
        self._survey = survey
        self._entries: list[Records] = []

    async def run(self) -> None:
        """Apply everything, with one transaction at the end."""
        survey = self._survey
        moved = await self._pieces()
        rewriter = MapRewriter(
            self._repository,
            self._session,
            moved,
            read=self._nodes,
            again=survey.new_nodes,
            skip=survey.lost_nodes,
        )
        swaps: dict[str, tuple[str, NewManifest]] = {}
        for snapshot, manifest in survey.manifests.items():
            name = survey.records[snapshot].manifest
            changed = await rewriter.manifest(manifest, name, store=snapshot in survey.restored)
            if changed is not None:
                swaps[snapshot] = name, changed
        await rewriter.flush()
        segments = await self._segments()
        plan = survey.plan

        def edit(record: SnapshotRecord) -> SnapshotRecord:
            if record.manifest != survey.records[record.snapshot].manifest:
                return (
                    record  # another process has replaced it: the findings are not about this one
                )
            if record.snapshot in swaps:
                record = swaps[record.snapshot][1](record)
            why = (
                ""
                if record.snapshot in plan.release
                else plan.quarantine.get(record.snapshot, record.quarantined)
            )
            return msgspec.structs.replace(record, quarantined=why)

        async def change(state: LogState, pages: Pages) -> LogState:
            refs = list[PageRef]()
            for ref in state.pages:
                found = survey.pages.get(ref.id)
                if found is None:
                    refs.append(ref)
                elif found:
                    refs.append(await pages.write(found))
            state = msgspec.structs.replace(
                state,
                pages=refs,
                condemned=[
                    batch
                    for batch in state.condemned
                    if batch.ref is None or batch.ref.id not in survey.forget_marks
                ],
                segments=[ref for ref in state.segments if ref.id not in survey.segments]
                + segments,
                gaps=joined([*state.gaps, *survey.lost]),
            )
            if state.anchor is not None and gap_of(state.gaps, state.anchor.generation) is not None:
                state = msgspec.structs.replace(state, anchor=None)  # nobody finds it there
            return await catalog.edit(state, {*swaps, *plan.quarantine, *plan.release}, edit, pages)

        await self._session.transform(
            change, f"repair: {len(plan.fixes)} fixes, {len(plan.quarantine)} quarantined"
        )

    async def _pieces(self) -> dict[Key, Place | Stored]:
        """Store what was saved; return where everything from damaged shards is now."""
        salvage = self._survey.salvage
        moved: dict[Key, Place | Stored] = {}
        async with ShardWriter(self._repository, self._session) as writer:
            for key, saved in sorted(salvage.saved.items()):
                piece = saved.piece
                moved[key] = await writer.put(
                    piece.chunk, saved.bitmap, piece.base, piece.place.codec, [saved.stored]
                )
            await writer.flush()
            new = writer.entries()
        self._entries += [] if new is None else [new]
        for key, place in [*salvage.found.items(), *salvage.instead.items()]:
            moved[key] = Stored(place)
        for key, twin in salvage.twins.items():
            there = moved.get(twin, salvage.places.get(twin))
            assert isinstance(there, Place)
            moved[key] = Stored(there)
        return moved

    async def _nodes(self, refs: Refs) -> tuple[Records, npt.NDArray[np.int64]]:
        nodes = [self._survey.nodes[node.tobytes()] for node in refs["node"]]
        return np.concatenate(nodes), np.array([len(node) for node in nodes], np.int64)

    async def _segments(self) -> list[SegmentRef]:
        survey = self._survey
        entries = [
            *self._entries,
            *survey.reindex,
            *(kept for kept in survey.segments.values() if kept is not None),
        ]
        made = (
            build(sort_entries(np.concatenate(entries)), self._repository.keys.segment, random_id)
            if entries
            else []
        )
        for segment in made:
            await self._session.put_segment(segment)
        return [segment.ref for segment in made]
