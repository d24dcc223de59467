"""Copies snapshots between unrelated repositories: every cell is read, verified, and stored again
under the other repository's keys and codecs.

A snapshot keeps its id, so an interrupted copy resumes. A copied parent serves its children: a cell
that the source's child shares with its parent is not read again, and one that differs a little
becomes a delta again. Synchronous; threads read and store cells at the same time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor

import msgspec
import numpy as np

from icecore.errors import Damaged, NotFound, ObjectMissing, UsageError
from icecore.events import Event, phase
from icecore.sizes import CELL_BYTES
from icecore.store.format import codec
from icecore.store.format.cell import CELL, Records
from icecore.store.format.manifest import Manifest, Region, Sizes, Space
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import UNREGISTERED, StoredRepository
from icecore.store.replication.replicas import Lost
from icecore.store.runtime.loop import LoopThread
from icecore.store.runtime.pool import huge_buffer
from icecore.store.snapshot.reader import SnapshotReader
from icecore.store.snapshot.trial import Objective
from icecore.store.snapshot.writer import SnapshotWriter

PURPOSE = "copy"
#: Cells that a thread takes at a time: neighbours, which lie together in the source.
_RUN = 32


class Copied(msgspec.Struct):
    """What a copy did.

    Attributes:
        snapshots: Ids of the copied snapshots.
        logical: Bytes of their data pages, before deduplication.
        read: Bytes of these that were read from the source; a copied parent had the others.
        stored: New bytes in shards.
        lost: Snapshots that were left out because objects of theirs are damaged or missing in the
            source.
    """

    snapshots: list[str] = msgspec.field(default_factory=list)
    logical: int = 0
    read: int = 0
    stored: int = 0
    lost: list[Lost] = msgspec.field(default_factory=list)


def copy(
    source: StoredRepository,
    target: StoredRepository,
    loop: LoopThread,
    records: Sequence[SnapshotRecord],
    *,
    threads: int = 0,
    objective: Objective | None = None,
    register: bool = True,
) -> Copied:
    """Copy snapshots, parents before children. Each is committed before the next begins.

    Args:
        source, target: Both live in ``loop``.
        records: The snapshots, in commit order; those that the target lists are skipped.
        threads: Threads that read and store; 0: one per core.
        objective: What the target's codecs should save.
        register: Protect what is read from collection. Not for a source that cannot be written to:
            what is then missing is reported and left out.

    Raises:
        UsageError: Source and target are the same.
        StoreError: Storage failed; what was committed stays.
    """
    if source.config.id == target.config.id:
        raise UsageError(
            f"{source.backend.where} is copied into itself", cure="name another repository"
        )
    if not register:
        target.emit(Event("copy.warning", {"message": UNREGISTERED}))
    done = Copied()
    there = loop.run(target.snapshots())
    listed = {record.snapshot for record in there}
    # What both have, in commit order, as bases. Chunks of snapshots that lost data may be the
    # damaged ones.
    here = {record.snapshot: record for record in loop.run(source.snapshots())}
    sound = {record.snapshot for record in there if not record.quarantined}
    both = [record for name, record in here.items() if name in sound]
    for record in records:
        if record.snapshot in listed:
            continue
        try:
            reading = (
                loop.run(source.read_session(record.snapshot, purpose=PURPOSE))
                if register
                else None
            )
        except NotFound:
            continue  # forgotten meanwhile
        try:
            with phase(target.emit, "copy.snapshot", snapshot=record.snapshot) as running:
                before = done.stored
                _Copy(source, target, loop, threads or os.cpu_count() or 1, objective, done).run(
                    record, _base(record, both)
                )
                running.bytes = done.stored - before
            listed.add(record.snapshot)
            both.append(record)
            done.snapshots.append(record.snapshot)
        except (Damaged, ObjectMissing) as error:
            done.lost.append(Lost(record.snapshot, error))
            target.emit(Event("copy.lost", {"snapshot": record.snapshot, "error": str(error)}))
        finally:
            if reading is not None:
                loop.run(reading.abort())
    return done


def _base(record: SnapshotRecord, both: Sequence[SnapshotRecord]) -> str | None:
    """Return the base of a copy: the parent or, if one of the two repositories has forgotten it,
    the newest snapshot of the lineage before it.
    """
    if any(one.snapshot == record.parent for one in both):
        return record.parent
    earlier = [
        one for one in both if one.lineage == record.lineage and one.created_ns < record.created_ns
    ]
    return max(earlier, key=lambda one: one.created_ns).snapshot if earlier else None


class _Before(msgspec.Struct, frozen=True):
    """A region of the parent: the records of its cells in source and target, by cell."""

    theirs: dict[int, np.void]
    ours: dict[int, np.void]


class _Copy:
    """One snapshot."""

    def __init__(
        self,
        source: StoredRepository,
        target: StoredRepository,
        loop: LoopThread,
        threads: int,
        objective: Objective | None,
        done: Copied,
    ) -> None:
        self._source = source
        self._target = target
        self._loop = loop
        self._threads = threads
        self._objective = objective
        self._done = done
        self._rooms = threading.local()
        self._count = threading.Lock()

    def run(self, record: SnapshotRecord, parent: str | None) -> None:
        """Copy and commit the snapshot."""
        manifest = self._loop.run(self._source.manifest(record))
        reader = SnapshotReader(self._source, manifest, self._loop.loop)
        session = self._loop.run(self._target.begin(parent, PURPOSE))
        before, spaces = _Parents.load(self._source, self._target, self._loop, parent), []
        processes = [space.key for space in manifest.spaces if space.kind == "process"]
        streams = {key: number for number, key in enumerate(processes)}
        with SnapshotWriter(
            self._target,
            session,
            self._loop.loop,
            streams=max(1, len(streams)),
            objective=self._objective,
            emit=self._target.emit,
        ) as writer:
            for space in manifest.spaces:
                stream = streams.get(space.key, 0) if space.kind == "process" else 0
                spaces.append(self._space(reader, writer, space, stream, before))
            statistics = writer.statistics
            sizes: Sizes = msgspec.structs.replace(manifest.sizes, stored=statistics.stored)
            # Fingerprints depend on the source's keys; the next dump creates new ones.
            whole: Manifest = msgspec.structs.replace(
                manifest, spaces=spaces, sizes=sizes, hints="", hints_digest=""
            )
            writer.commit(msgspec.structs.replace(whole, tags=record.tags, pinned=record.pinned))
        self._done.stored += statistics.stored

    def _space(
        self,
        reader: SnapshotReader,
        writer: SnapshotWriter,
        space: Space,
        stream: int,
        before: _Parents,
    ) -> Space:
        parent = before.space(space)
        copied: list[Records] = []
        for region, records in zip(space.regions, reader.records(space), strict=True):
            rows = np.zeros(len(records), CELL)
            self._region(
                reader, writer, records, rows, stream, region, before.region(space, region)
            )
            copied.append(rows)
        return writer.put_map(space.kind, space.key, space.size, space.regions, copied, parent)

    def _region(
        self,
        reader: SnapshotReader,
        writer: SnapshotWriter,
        records: Records,
        rows: Records,
        stream: int,
        region: Region,
        before: _Before,
    ) -> None:
        def work(first: int) -> None:
            for at in range(first, min(first + _RUN, len(records))):
                rows[at] = self._cell(reader, writer, records[at], stream, region, before)

        failed: list[BaseException] = []
        with ThreadPoolExecutor(self._threads, thread_name_prefix="copy") as pool:
            for future in [pool.submit(work, first) for first in range(0, len(records), _RUN)]:
                error = future.exception()
                if error is not None:
                    failed.append(error)
                    pool.shutdown(wait=False, cancel_futures=True)
                    break
        if failed:
            raise failed[0]

    def _cell(
        self,
        reader: SnapshotReader,
        writer: SnapshotWriter,
        record: np.void,
        stream: int,
        region: Region,
        before: _Before,
    ) -> np.void:
        cell = int(record["cell"])
        theirs, ours = before.theirs.get(cell), before.ours.get(cell)
        unchanged = theirs is not None and _same(record, theirs)
        if unchanged and ours is not None and _same_pages(record, ours) and _usable(writer, ours):
            return ours
        if not hasattr(self._rooms, "out"):
            self._rooms.out = huge_buffer(CELL_BYTES)
        data = reader.read_cell(record, self._rooms.out)
        with self._count:
            self._done.read += len(data)
            self._done.logical += len(data)
        return writer.store_cell(
            stream,
            cell,
            record["data"].tobytes(),
            record["zero"].tobytes(),
            data,
            ours,
            region=region.start,
        )


class _Parents:
    """The parent in both repositories."""

    def __init__(self) -> None:
        self._spaces: dict[tuple[str, str], Space] = {}
        self._theirs: dict[tuple[str, str, int], Records] = {}
        self._ours: dict[tuple[str, str, int], Records] = {}

    @classmethod
    def load(
        cls,
        source: StoredRepository,
        target: StoredRepository,
        loop: LoopThread,
        parent: str | None,
    ) -> _Parents:
        """Read the parent; proceed without one if it cannot be read."""
        made = cls()
        if parent is None:
            return made
        try:
            ours = SnapshotReader.open(target, parent, loop.loop)
            made._ours = dict(_regions(ours))
            made._spaces = {(space.kind, space.key): space for space in ours.manifest.spaces}
            made._theirs = dict(_regions(SnapshotReader.open(source, parent, loop.loop)))
        except (Damaged, ObjectMissing, NotFound) as error:
            target.emit(Event("copy.parent_missing", {"snapshot": parent, "error": str(error)}))
        return made

    def space(self, space: Space) -> Space | None:
        """Return the target's space with that kind and key."""
        return self._spaces.get((space.kind, space.key))

    def region(self, space: Space, region: Region) -> _Before:
        """Return the cells of the region with the same origin."""
        key = (space.kind, space.key, region.origin)
        return _Before(_by_cell(self._theirs.get(key)), _by_cell(self._ours.get(key)))


def _regions(reader: SnapshotReader) -> Iterator[tuple[tuple[str, str, int], Records]]:
    for space in reader.manifest.spaces:
        for region, records in zip(space.regions, reader.records(space), strict=True):
            yield (space.kind, space.key, region.origin), records


def _by_cell(records: Records | None) -> dict[int, np.void]:
    return {} if records is None else dict(zip(records["cell"].tolist(), records, strict=True))


def _same_pages(one: np.void, other: np.void) -> bool:
    return bool((one["data"] == other["data"]).all() and (one["zero"] == other["zero"]).all())


def _same(one: np.void, other: np.void) -> bool:
    return bool((one["chunk"] == other["chunk"]).all()) and _same_pages(one, other)


def _usable(writer: SnapshotWriter, record: np.void) -> bool:
    usable: Callable[[bytes], bool] = writer.session.usable
    places = [record["place"]] + (
        [record["base_place"]] if int(record["place"]["codec"]) & codec.DELTA else []
    )
    return all(usable(place["shard"].tobytes()) for place in places if int(place["length"]))


__all__ = ["Copied", "Lost", "copy"]
