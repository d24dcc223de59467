"""Continues a log whose newest entries are lost: finds the newest intact entry and the snapshots
with surviving manifests; plans, then writes one entry.

Nothing is overwritten or deleted. The new entry comes after every generation known to have existed.
It records the lost ones (`icecore.store.format.gaps`), and their names stay taken, so that no
suspended writer creates one.
"""

from __future__ import annotations

import secrets
import socket
import time
from collections.abc import Iterable

import msgspec
import numpy as np

from icecore.errors import (
    Damaged,
    FormatTooNew,
    ObjectExists,
    ObjectMissing,
    RollbackDetected,
    StoreError,
)
from icecore.store.format import gaps, marks
from icecore.store.format.cell import Records
from icecore.store.format.contract import recorded_owner
from icecore.store.format.data import data_bytes
from icecore.store.format.envelope import ObjectKind, digest_of, seal
from icecore.store.format.manifest import MANIFEST_KIND, Manifest, decode_manifest
from icecore.store.format.names import (
    LAST_GENERATION,
    LOG,
    PREFIX,
    log_name,
    object_name,
    parse_name,
)
from icecore.store.format.state import (
    LEASE,
    REMEMBERED,
    Gap,
    LogState,
    PageRef,
    SessionRecord,
    SnapshotRecord,
    Written,
    encode_entry,
)
from icecore.store.log.chain import Log
from icecore.store.log.entries import FAR, KEPT_ENTRIES, PLANTED, Entry
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.reach import readable_nodes, space_refs
from icecore.store.runtime.parallel import each

#: The label of snapshots that are listed again because their manifests were found.
RECOVERED = "recovered"
#: Purpose of the session that a continued log begins with: it prevents the deletion of what was
#: condemned while lost sessions may still be open.
GUARD = "repair"
#: If nothing tells which generations existed, the log continues this far beyond the known ones.
_FAR = 1 << 32
#: More names than that are not taken.
_FILLED = 4096
_PAGE_AT = 128
_PAGE_RECORDS = 2048
_TRIES = 4
_UNREADABLE = (Damaged, ObjectMissing, FormatTooNew)
_LOST_KIND = ObjectKind("lost log entry", b"ICELOST", 1, 1 << 10, None)


class Condition(msgspec.Struct, frozen=True):
    """The condition of a log's newest part.

    Attributes:
        base: The newest readable entry, or None.
        top: The newest generation known to have existed; 0 if none is known.
        damaged: Unreadable entries above ``base``, and why.
        missing: Runs of generations above ``base`` without an entry; empty if they are too many to
            name.
        absent: Number of generations above ``base`` without an entry. Without ``base``, among the
            newest ones that a log keeps: older ones may have been trimmed.
        planted: Unreadable names beyond ``top`` that no log entry can have.
    """

    base: Entry | None
    top: int
    damaged: dict[int, str] = msgspec.field(default_factory=dict)
    missing: list[tuple[int, int]] = msgspec.field(default_factory=list)
    absent: int = 0
    planted: list[int] = msgspec.field(default_factory=list)

    @property
    def whole(self) -> bool:
        """Whether the newest entry is intact."""
        return self.base is not None and self.base.generation == self.top


async def look(log: Log) -> Condition:
    """Look for the newest readable entry.

    Raises:
        FormatTooNew: A later version wrote the newest entry.
        StoreError: The store failed.
    """
    seen = log.watermark.load().generation
    for _ in range(_TRIES):
        listed = [generation async for generation in log.generations()]
        damaged: dict[int, str] = {}
        base: Entry | None = None
        for generation in listed:
            try:
                base = await log.read(generation)
                break
            except Damaged as error:
                damaged[generation] = error.why
            except ObjectMissing:
                break
        else:
            generation = 0
        if base is None and generation:
            continue  # trimmed between the listing and the read
        limit = max(seen, generation) + FAR
        planted = [far for far in damaged if far > limit]
        listed = [known for known in listed if known <= limit]
        top = max([seen, *listed[:1]])
        low = generation if base is not None else max(0, top - KEPT_ENTRIES)
        absent = top - low - sum(low < known <= top for known in listed)
        damaged = {known: why for known, why in damaged.items() if known <= limit}
        return Condition(
            base, top, damaged, gaps.ranges(_absent(listed, generation, top)), absent, planted
        )
    raise StoreError("other clients keep adding to the log", cure="try again")


def _absent(listed: list[int], low: int, top: int) -> Iterable[int]:
    if top - low > _FILLED:
        return ()
    return set(range(low + 1, top + 1)).difference(listed)


class Relogging(msgspec.Struct):
    """What continuing the log would do.

    Attributes:
        condition: The condition of the log.
        generation: The generation of the entry to write.
        recovered: Snapshots whose manifests were found.
        unlisted: Manifests that are not listed, and why.
        unreadable: Manifests whose snapshot is unknown, and why.
        pins: Snapshots that open sessions had pinned.
        began: Generation at which the oldest of these sessions began.
    """

    condition: Condition
    generation: int
    recovered: list[SnapshotRecord] = msgspec.field(default_factory=list)
    unlisted: dict[str, str] = msgspec.field(default_factory=dict)
    unreadable: dict[str, str] = msgspec.field(default_factory=dict)
    pins: list[SnapshotRecord] = msgspec.field(default_factory=list)
    began: int = 0

    def words(self) -> str:
        """Return what is lost, for people."""
        base = self.condition.base
        found = f"{len(self.recovered)} unlisted snapshots with intact manifests are listed again, labelled {RECOVERED!r}"
        lost = "lost are later forgets, pins and labels, snapshots without an intact manifest, and the work of open sessions"
        if base is None:
            return f"the log starts again at generation {self.generation}: {found}; {lost}"
        when = time.strftime("%Y-%m-%d %H:%M:%S UTC", time.gmtime(base.state.created_ns / 1e9))
        return f"the log continues from generation {base.generation} ({when}) with generation {self.generation}: {found}; {lost}"


class Relogger:
    """One attempt. ``plan`` changes nothing; ``apply`` plans again and writes.

    Args:
        accept_rollback: Continue even if this client has seen newer entries that are absent, or
            different ones. Only a person can tell whether storage has lost them or somebody has put
            back an older copy.
    """

    def __init__(self, repository: StoredRepository, *, accept_rollback: bool = False) -> None:
        self._repository = repository
        self._backend = repository.backend
        self._log = repository.log
        self._accept = accept_rollback

    async def plan(self) -> Relogging | None:
        """Return what there is to do, or None if the newest entry is intact.

        Raises:
            RollbackDetected: The log is older than, or different from, what this client has seen,
                and that is not accepted.
        """
        condition = await look(self._log)
        if not self._accept:
            try:
                await self._log.newest()
            except Damaged as error:
                await self._verify(condition, error)
        return None if condition.whole else await self._found(condition)

    async def _verify(self, condition: Condition, error: Damaged) -> None:
        """Check that what is left continues what this client has seen, and that lost entries are
        damaged: absent ones may indicate an older copy.
        """
        if condition.absent:
            ends = (
                f"generation {condition.base.generation}"
                if condition.base is not None
                else "none that can be read"
            )
            raise RollbackDetected(
                f"{condition.absent} log entries up to generation {condition.top} of the repository in {self._backend.where} are absent: the newest"
                f" whole one is {ends}, and nobody can tell whether storage has lost the others, or somebody has deleted them",
                cure=self._log.cure_of_rollback,
            ) from error
        if condition.base is None:
            return
        try:
            await self._log.continues(condition.base)
        except Damaged:
            raise RollbackDetected(
                f"too many log entries are damaged to determine whether generation {condition.base.generation} continues what this client has seen",
                cure=self._log.cure_of_rollback,
            ) from error

    async def apply(self) -> Relogging | None:
        """Continue the log; safe to interrupt."""
        for _ in range(_TRIES):
            plan = await self.plan()
            if plan is None:
                if self._accept:
                    await self._settle()
                return None
            try:
                await self._write(plan)
            except ObjectExists:
                continue  # another process continued it
            return plan
        raise StoreError("other clients keep adding to the log", cure="try again")

    async def _settle(self) -> None:
        """Accept the newest entry if it differs from the one seen before, or if that is unknown."""
        try:
            await self._log.newest()
        except (RollbackDetected, Damaged):
            newest = (await look(self._log)).base
            assert newest is not None
            self._log.accept(newest, instead_of=self._log.watermark.load())

    async def _found(self, condition: Condition) -> Relogging:
        base = condition.base
        plan = Relogging(
            condition,
            (
                condition.top
                if condition.top and (base or condition.damaged)
                else condition.top + _FAR
            )
            + 1,
        )
        if plan.generation > LAST_GENERATION - FAR:
            raise StoreError(
                f"the log in {self._backend.where} has hardly any generations left after {plan.generation - 1}",
                cure="'icecore copy' copies its snapshots to a new repository",
            )
        listed: list[SnapshotRecord] = []
        condemned: set[str] = set()
        if base is not None:
            listed = await self._records(base.state.pages)
            listed += base.state.tail
            for batch in base.state.condemned:
                try:
                    condemned |= {
                        object_name(*name)
                        for name in await self._log.pages.read_names(batch, cached=False)
                    }
                except _UNREADABLE:
                    pass  # the repair that follows omits the list
            plan.pins = [pin for session in base.state.sessions for pin in session.pins]
            plan.began = min(
                (session.began for session in base.state.sessions), default=plan.generation
            )
        known = {record.snapshot for record in listed}
        forgotten = await self._listed_before(base, known)
        forgotten |= {pin.snapshot for pin in plan.pins} - known
        listing = [parse_name(info.name) async for info in self._backend.list(PREFIX["shard"])]
        shards = {parsed[1] for parsed in listing if parsed is not None}
        found: dict[str, SnapshotRecord] = {}
        async for info in self._backend.list(PREFIX["manifest"]):
            if info.name in {record.manifest for record in listed}:
                continue
            if info.name in condemned:
                plan.unlisted[info.name] = "it was condemned before"
                continue
            try:
                data = await self._backend.get(info.name, limit=MANIFEST_KIND.object_limit)
                manifest = decode_manifest(data, self._repository.keys.manifest, name=info.name)
            except _UNREADABLE as error:
                plan.unreadable[info.name] = (
                    f"it cannot be read: {error.why if isinstance(error, Damaged) else error}"
                )
                continue
            if manifest.snapshot in known or manifest.snapshot in found:
                continue
            if manifest.snapshot in forgotten:
                plan.unlisted[info.name] = f"snapshot {manifest.snapshot} was forgotten before"
            elif not await complete(self._repository, manifest, info.name, shards):
                plan.unlisted[info.name] = (
                    f"parts of snapshot {manifest.snapshot} of job {manifest.job!r} are missing"
                )
            else:
                record = record_of(manifest, info.name, data)
                found[manifest.snapshot] = marks.marked(
                    record, tags=[*(tag for tag in record.tags if tag != RECOVERED), RECOVERED]
                )
                plan.unlisted.pop(info.name, None)
        plan.recovered = sorted(
            found.values(), key=lambda record: (record.created_ns, record.snapshot)
        )
        return plan

    async def _records(self, refs: Iterable[PageRef]) -> list[SnapshotRecord]:
        records: list[SnapshotRecord] = []
        for ref in refs:
            try:
                records += await self._log.pages.read(ref, cached=False)
            except _UNREADABLE:
                pass  # the repair that follows finds its snapshots by their manifests
        return records

    async def _listed_before(self, base: Entry | None, known: set[str]) -> set[str]:
        """Return the snapshots that an entry before ``base`` lists and ``base`` does not: they were
        forgotten, so they stay forgotten.
        """
        before: set[str] = set()
        pages: dict[bytes, PageRef] = {}
        if base is None:
            return before

        async def read(generation: int) -> None:
            try:
                state = (await self._log.read(generation)).state
            except _UNREADABLE:
                return
            before.update(record.snapshot for record in state.tail)
            pages.update({ref.id: ref for ref in state.pages})

        older = [
            generation
            async for generation in self._log.generations()
            if generation < base.generation
        ]
        await each(older, read)
        for ref in base.state.pages:
            pages.pop(ref.id, None)
        before.update(record.snapshot for record in await self._records(pages.values()))
        return before - known

    async def _write(self, plan: Relogging) -> None:
        base, generation, pages = plan.condition.base, plan.generation, self._log.pages
        before = base.state if base is not None else LogState(generation, bytes(32), 0)
        first = base.generation + 1 if base is not None else 1
        tail, refs = [*before.tail, *plan.recovered], list(before.pages)
        while len(tail) >= _PAGE_AT:
            refs.append(await pages.write(tail[:_PAGE_RECORDS]))
            del tail[:_PAGE_RECORDS]
        now = time.time_ns()
        guard = SessionRecord(
            secrets.token_hex(16),
            plan.began or generation,
            GUARD,
            socket.gethostname(),
            now,
            plan.pins,
        )
        digest = base.digest if base is not None else b""
        state = msgspec.structs.replace(
            before,
            generation=generation,
            predecessor=digest or bytes(32),
            created_ns=now,
            changes=[
                f"repair: continues after generation {first - 1}, {generation - first} entries lost, {len(plan.recovered)} snapshots found"
            ],
            transactions=[
                *[
                    written
                    for written in before.transactions
                    if written.generation > generation - REMEMBERED
                ],
                Written(generation, secrets.token_bytes(16)),
            ],
            pages=refs,
            tail=tail,
            # Jobs run under leases, and their holders do not know of this.
            sessions=[
                *(one for one in before.sessions if one.purpose.startswith(LEASE)),
                guard,
            ],
            # What the lost entries condemned is unknown, so the index may contain only what
            # snapshots reach; it is rebuilt.
            segments=[],
            anchor=None,
            gaps=gaps.joined([*before.gaps, Gap(first, generation - 1, digest)]),
        )
        sealed = encode_entry(state, self._repository.keys.log)
        for low, high in plan.condition.missing:
            for lost in range(low, high + 1):
                await fill(self._repository, lost)
        seen = self._log.watermark.load()
        await self._backend.create(log_name(generation), [sealed.data])
        self._log.accept(Entry(state, sealed.digest), instead_of=seen)
        await self._log.newest()


async def fill(repository: StoredRepository, generation: int) -> None:
    """Take the name of a lost entry, so that no suspended writer creates it and takes its entry for
    valid.
    """
    name = log_name(generation)
    try:
        await repository.backend.create(
            name, [seal(_LOST_KIND, b"", repository.keys.log, name).data]
        )
    except ObjectExists:
        pass


async def complete(
    repository: StoredRepository, manifest: Manifest, name: str, shards: set[bytes]
) -> bool:
    """Return whether everything that a manifest refers to exists.

    Args:
        shards: The listed shards.
    """
    failed: list[int] = []
    try:
        for refs in space_refs(manifest, name):
            for _, cells in await readable_nodes(
                repository, refs, lambda at, error: failed.append(at)
            ):
                if not named_shards(cells) <= shards:
                    return False
    except Damaged:
        return False
    return not failed


def named_shards(cells: Records) -> set[bytes]:
    """Return the shards that records refer to."""
    found: set[bytes] = set()
    for field_ in ("place", "base_place"):
        places = cells[field_][cells[field_]["length"] > 0]
        found |= {
            bytes(shard).ljust(16, b"\0")
            for shard in np.unique(np.ascontiguousarray(places["shard"]).view("S16")).tolist()
        }
    return found


def record_of(manifest: Manifest, name: str, data: bytes) -> SnapshotRecord:
    """Return the record with which a snapshot was committed."""
    sizes = manifest.sizes
    return SnapshotRecord(
        manifest.snapshot,
        manifest.job,
        manifest.lineage,
        manifest.parent,
        manifest.created_ns,
        name,
        len(data),
        digest_of(data),
        sizes.logical,
        sizes.stored,
        sizes.changed,
        manifest.window_seconds,
        manifest.tags,
        manifest.pinned,
        sizes.device,
        data=data_bytes(manifest),
        owner=recorded_owner(manifest),
    )


def lost(condition: Condition) -> list[tuple[str, str]]:
    """Return the lost entries, each with a reason, for reports."""
    found = [
        (log_name(generation), why)
        for generation, why in sorted(condition.damaged.items(), reverse=True)
    ]
    for first, last in reversed(condition.missing):
        more = f", and so are the {last - first} before it" if last > first else ""
        found.append((log_name(last), f"it is missing{more}"))
    if condition.base is None and not found:
        found.append((LOG, "there is no entry at all"))
    return found + [(log_name(generation), PLANTED) for generation in condition.planted]
