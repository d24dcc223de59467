"""Writes one snapshot: cells in, records out, everything else in the background. Synchronous and
thread-safe, so that worker threads can share it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from types import TracebackType
from typing import Any, NamedTuple, Self, TypeVar

import msgspec
import numpy as np

from icecore.errors import StoreError, UsageError
from icecore.events import Event, Sink, discard, phase
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format import codec
from icecore.store.format.cell import PLACE, Records
from icecore.store.format.cellmap import MAX_CONTAINER_BYTES
from icecore.store.format.chunk import NO_CHUNK, pages_of
from icecore.store.format.cipher import overhead
from icecore.store.format.codec import Buffer
from icecore.store.format.contract import recorded_owner
from icecore.store.format.data import data_bytes
from icecore.store.format.envelope import seal
from icecore.store.format.hints import HINTS_KIND
from icecore.store.format.manifest import Manifest, Region, Space, SpaceKind, encode_manifest
from icecore.store.format.names import HINTS, object_name, random_id
from icecore.store.format.rows import Place, Row, Stored, pack, unpack
from icecore.store.format.segment import make_entries
from icecore.store.format.shard import EncodedChunk, ShardTable
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session
from icecore.store.log.uploads import Uploads
from icecore.store.runtime.pool import BufferPool
from icecore.store.snapshot.ahead import ReadAhead
from icecore.store.snapshot.bases import Candidate
from icecore.store.snapshot.forms import Appender, AppenderLost, Chunk, Forms, Wanted
from icecore.store.snapshot.packs import MapWriter
from icecore.store.snapshot.stream import BufferedStream, DraftStream, ShardStream, SharedFiles
from icecore.store.snapshot.trial import Objective

T = TypeVar("T")

#: Shard buffers in addition to the one that each stream fills, hence concurrent uploads: one upload
#: to S3 carries 85 to 90 MB/s.
IN_FLIGHT = 8
_LEAST_SHARD_BYTES = 4 * CELL_BYTES
_PATIENCE_SECONDS = 600.0
_CLAIM_WAIT_SECONDS = 0.5
_NOTHING_HERE = Stored(Place(bytes(16), 0, 0, codec.ZERO))


class Statistics(msgspec.Struct):
    """What was written so far. ``stored`` is new bytes in shards, ``by_codec`` the same by codec
    name, ``reused`` logical bytes that were stored already.

    ``chunks`` and ``deltas`` count what was newly stored, ``reused_from`` the chunks found in the
    session, the parent, or the index.
    """

    logical: int = 0
    stored: int = 0
    reused: int = 0
    chunks: int = 0
    deltas: int = 0
    by_codec: Counter[str] = msgspec.field(default_factory=Counter)
    reused_from: Counter[str] = msgspec.field(default_factory=Counter)


class ReadCell(NamedTuple):
    """A cell that an `Appender` has read, for :meth:`SnapshotWriter.store_read`.

    Attributes:
        number: The number of its chunk in the appender. The cell has at least one data page.
        cell, region, previous: As in :meth:`SnapshotWriter.store_cell`.
        data_bitmap, zero_bitmap: Its bitmaps.
        chunk: The chunk's id.
        length: Bytes in the data pages.
        zeros: Whether all of them are zero.
        own: Makes the chunk in this process.
    """

    number: int
    cell: int
    region: int
    previous: np.void | None
    data_bitmap: bytes
    zero_bitmap: bytes
    chunk: bytes
    length: int
    zeros: bool
    own: Callable[[], Chunk]


class _Claim(threading.Event):
    """An entry in the table of chunks while a thread stores the chunk."""


class SnapshotWriter:
    """Writes one snapshot in one session; a context manager that aborts unless it was committed.

    Args:
        repository: The repository.
        session: An open session of it, begun in ``loop``.
        loop: The event loop of repository and session, in another thread than those that call the
            writer.
        streams: Number of shard streams: one for each process whose restore should read shards of
            its own.
        objective: What to save, bytes or time.
        emit: Gets ``store.upload``, ``store.commit`` and ``store.base_damaged`` events.
        memory: Bound in bytes of the shard buffers, used where the back end has no drafts; shards
            are then as small as it requires. Each calling thread takes 7 to 9 MiB more, or 5 to
            10 MiB with an appender.
    """

    def __init__(
        self,
        repository: StoredRepository,
        session: Session,
        loop: asyncio.AbstractEventLoop,
        *,
        streams: int = 1,
        objective: Objective | None = None,
        emit: Sink = discard,
        memory: int = 256 << 20,
    ) -> None:
        if streams < 1:
            raise UsageError(f"a snapshot has at least one stream, not {streams}")
        self.session = session
        self._repository = repository
        self._loop = loop
        self._emit = emit
        self._keys = repository.keys
        self._uploads = Uploads(session, loop, emit)
        self._streams: Sequence[ShardStream] = self._make_streams(streams, memory)
        self._ahead = ReadAhead(repository.backend, loop)
        self._forms = Forms(
            streams,
            self._fetch,
            self._keys.chunk,
            objective or Objective(),
            emit,
            peek=repository.backend.direct,
        )
        # Chunk and base of the deltas of this session → the base's bitmap: what pre-copy stored may
        # change again before it can be read back.
        self._base_bitmaps: dict[tuple[bytes, bytes], bytes] = {}
        self._maps = MapWriter(self._keys)
        self._lock = threading.Lock()
        self._chunks: dict[bytes, Stored | _Claim] = {}
        self._entries: list[Records] = []
        self._own_shards: set[bytes] = set()
        self._statistics = Statistics()
        self._over = False

    def _make_streams(self, count: int, memory: int) -> Sequence[ShardStream]:
        keys, shard_bytes = self._keys, self._repository.config.parameters.shard_bytes
        if self._repository.backend.drafts:
            return [
                DraftStream(self._uploads, keys, self._closed, shard_bytes) for _ in range(count)
            ]
        buffers = count + IN_FLIGHT
        pool = BufferPool(max(_LEAST_SHARD_BYTES, min(shard_bytes, memory // buffers)), buffers)
        files = SharedFiles()
        return [
            BufferedStream(pool, self._uploads, keys, self._closed, _PATIENCE_SECONDS, files)
            for _ in range(count)
        ]

    @property
    def statistics(self) -> Statistics:
        """A copy of the statistics so far."""
        with self._lock:
            now = self._statistics
            return Statistics(
                now.logical,
                now.stored,
                now.reused,
                now.chunks,
                now.deltas,
                now.by_codec.copy(),
                now.reused_from.copy(),
            )

    def store_cell(
        self,
        stream: int,
        cell: int,
        data_bitmap: bytes,
        zero_bitmap: bytes,
        data: memoryview,
        previous: np.void | None,
        *,
        region: int = 0,
    ) -> np.void:
        """Store one cell, unless its bytes are stored already.

        Args:
            stream: The shard stream it belongs to.
            cell: Its number, counted from its region's origin.
            data_bitmap: Its data pages, 32 bytes.
            zero_bitmap: Its zero pages, 32 bytes.
            data: The data pages' bytes in address order; not used after the call.
            previous: The parent's (or pre-copy's) record of the same cell, which it may become a
                delta of.
            region: The region of the stream's process, by index or start; neighbours in a region
                are assumed to be similar.

        Returns:
            The CELL record for :meth:`put_map`.

        Raises:
            StoreError: Storing this or an earlier cell failed; the snapshot cannot be committed any
                more.
        """
        self._uploads.check()
        if len(data) != pages_of(data_bitmap) * PAGE:
            raise ValueError(f"{len(data)} bytes for {pages_of(data_bitmap)} data pages")
        if not len(data):
            return pack(Row(cell, data_bitmap, zero_bitmap, NO_CHUNK, _NOTHING_HERE))
        chunk = self.chunk(data_bitmap, data)
        before = unpack(previous) if previous is not None else None
        stored = self._store_here(stream, region, chunk.id, len(data), before, lambda: chunk)
        return pack(Row(cell, data_bitmap, zero_bitmap, chunk.id, stored))

    def chunk(self, bitmap: bytes, data: memoryview) -> Chunk:
        """Return the chunk of these data pages."""
        return self._forms.chunk(bitmap, data)

    def store_read(
        self, stream: int, cells: Sequence[ReadCell], appender: Appender
    ) -> tuple[list[np.void], AppenderLost | None]:
        """Store cells that an appender has read: it writes the chunks that are not stored yet to a
        shard, or to a file from which they are copied.

        Returns:
            The CELL records, and the appender's error if it was lost; this process then stored the
            rest.

        Raises:
            StoreError: As from :meth:`store_cell`.
        """
        self._uploads.check()
        before = [unpack(one.previous) if one.previous is not None else None for one in cells]
        stored: dict[int, Stored] = {}
        mine: list[int] = []
        lost: AppenderLost | None = None
        try:
            # Do not wait here for a thread that stores one of these chunks: it may be waiting for a
            # chunk that this thread has claimed.
            for number, cell in enumerate(cells):
                held = self._take(cell.chunk, cell.length)
                if held is None:
                    mine.append(number)
                    held = self._elsewhere(cell.chunk, before[number], cell.length)
                    if held is None and cell.zeros:
                        held = self._count(_NOTHING_HERE)
                    if held is not None:
                        self._settle(cell.chunk, held)
                        mine.pop()
                if isinstance(held, Stored):
                    stored[number] = held
            # No more at once than fits into a shard.
            step = max(1, self._repository.config.parameters.shard_bytes // CELL_BYTES)
            for at in range(0, len(mine), step):
                some = mine[at : at + step]
                lost = self._append(stream, cells, before, some, stored, appender) or lost
        except BaseException:
            for number in mine:
                if number not in stored:
                    self._settle(cells[number].chunk, None)
            raise
        for number, cell in enumerate(cells):
            if number not in stored:
                stored[number] = self._store_here(
                    stream, cell.region, cell.chunk, cell.length, before[number], cell.own
                )
        rows = (
            Row(one.cell, one.data_bitmap, one.zero_bitmap, one.chunk, stored[number])
            for number, one in enumerate(cells)
        )
        return [pack(row) for row in rows], lost

    def _append(
        self,
        stream: int,
        cells: Sequence[ReadCell],
        before: Sequence[Row | None],
        mine: Sequence[int],
        stored: dict[int, Stored],
        appender: Appender,
    ) -> AppenderLost | None:
        """Have the appender store the cells ``mine``, and record in ``stored`` how they are stored. If
        the appender is lost, store them in this process, and return its error.
        """
        wanted = [
            Wanted(cells[number].number, cells[number].region, self._candidate(before[number]))
            for number in mine
        ]
        lost = None
        places: list[Stored] = []
        rest = codec.MAX_OVERHEAD + overhead(self._keys.chunk)
        most = sum(cells[number].length + rest for number in mine)
        try:
            with self._streams[stream].lend(most, len(mine)) as lent:
                try:
                    written = appender.append(stream, lent.room, wanted, self._emit, self._read)
                except AppenderLost as error:
                    lost, written = error, []
                    lent.take_back()
                for number, one in zip(mine, written, strict=lost is None):
                    chunk = cells[number].chunk
                    shard, offset, length = lent.add(chunk, cells[number].data_bitmap, one)
                    place = Place(shard, offset, length, one.number)
                    places.append(self._how(chunk, place, one.base))
        except AppenderLost as error:  # there was no room to lend
            lost = error
        for number, place_of in zip(mine, places, strict=lost is None):
            stored[number] = self._count(place_of)
            self._settle(cells[number].chunk, place_of)
        if lost is not None:
            for number in mine:
                self._uploads.check()
                cell = cells[number]
                made = self._store(stream, cell.region, cell.own(), before[number])
                stored[number] = self._count(made)
                self._settle(cell.chunk, made)
        return lost

    def put_map(
        self,
        space_kind: SpaceKind,
        key: str,
        size: int,
        regions: list[Region],
        records: Sequence[Records],
        parent: Space | None,
    ) -> Space:
        """Store the map of a space.

        Args:
            space_kind: As in :class:`Space`, like ``key``, ``size`` and ``regions``.
            records: CELL records from :meth:`store_cell` (or the parent): one array per region,
                ascending by cell.
            parent: The same space in the session's base; its equal nodes are reused.
        """
        if len(records) != len(regions):
            raise ValueError(f"{len(records)} arrays of records for {len(regions)} regions")
        return Space(space_kind, key, size, regions, self._maps.add(records, parent))

    def put_hints(self, lineage: str, fingerprints: Buffer) -> tuple[str, bytes]:
        """Store hints that may speed up the next snapshot or a restore of this lineage; their loss
        only costs time.

        Returns:
            The object's name and digest, for :attr:`Manifest.hints` and
            :attr:`Manifest.hints_digest`.
        """
        name = f"{HINTS}{lineage}/{random_id().hex()}"
        sealed = seal(HINTS_KIND, bytes(fingerprints), self._keys.hints, name)
        self._wait(self.session.create(name, [sealed.data]))
        return name, sealed.digest

    def commit(self, manifest: Manifest) -> str:
        """Store what is left, then the manifest, and list the snapshot. No other thread may be
        storing cells any more.

        Returns:
            The snapshot's id, ``manifest.snapshot``.

        Raises:
            StoreError: Something could not be stored. Nothing was committed, unless the error says
                that this is unknown (:meth:`abort` finds out).
            SessionFenced: The session was declared dead.
        """
        with phase(self._emit, "store.commit", snapshot=manifest.snapshot) as running:
            self._ahead.close()
            for stream in self._streams:
                stream.flush()
            nodes = self._maps.finish()
            if nodes is not None:
                self._uploads.start("nodes", self._maps.name, nodes)
            name = random_id()
            sealed = encode_manifest(manifest, self._keys.manifest, object_name("manifest", name))
            self._uploads.start("manifest", name, [sealed.data])
            self._uploads.wait()
            sizes = manifest.sizes
            record = SnapshotRecord(
                snapshot=manifest.snapshot,
                job=manifest.job,
                lineage=manifest.lineage,
                parent=manifest.parent,
                created_ns=manifest.created_ns,
                manifest=object_name("manifest", name),
                manifest_length=len(sealed.data),
                manifest_digest=sealed.digest,
                logical=sizes.logical,
                stored=sizes.stored,
                changed=sizes.changed,
                window_seconds=manifest.window_seconds,
                tags=manifest.tags,
                pinned=manifest.pinned,
                device=sizes.device,
                data=data_bytes(manifest),
                owner=recorded_owner(manifest),
            )
            self._wait(
                self.session.commit(
                    record, np.concatenate(self._entries) if self._entries else None
                )
            )
            self._end()
            running.fields |= {
                "stored": self._statistics.stored,
                "nodes": self._maps.stored,
                "manifest": len(sealed.data),
            }
        return manifest.snapshot

    def abort(self) -> bool:
        """End the session and delete what was stored; also after a failed :meth:`commit`.

        Returns:
            False if the commit had taken place after all, or another process had ended the session.
        """
        if self._over:
            return False
        self._ahead.close()
        for stream in self._streams:
            stream.abandon()
        self._uploads.settle()
        ended = self._wait(self.session.abort())
        self._end()
        return ended

    def _end(self) -> None:
        """Let go of what refers back to this writer. Its buffers, tens of MiB of huge pages, would
        otherwise stay until the collector of cycles looks at its oldest generation: after 70
        snapshots of a small job.
        """
        self._over = True
        self._streams = ()
        del self._forms

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._over:
            return
        try:
            self.abort()
        except StoreError as failure:
            # The collector deletes what an unfinished session left; the first error is the one to
            # report.
            self._emit(Event("store.abort", {"error": str(failure)}))
            if error is None:
                raise

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()

    def _store_here(
        self,
        stream: int,
        region: int,
        chunk: bytes,
        length: int,
        before: Row | None,
        make: Callable[[], Chunk],
    ) -> Stored:
        """Store a chunk in this process, unless it is stored already; return how it is stored.

        Args:
            make: Makes the chunk.
        """
        while isinstance(held := self._take(chunk, length), _Claim):
            held.wait(_CLAIM_WAIT_SECONDS)
            self._uploads.check()
        if held is not None:
            return held
        try:
            stored = self._elsewhere(chunk, before, length)
            if stored is None:
                stored = self._count(self._store(stream, region, make(), before))
        except BaseException:
            self._settle(chunk, None)
            raise
        self._settle(chunk, stored)
        return stored

    def _take(self, chunk: bytes, length: int) -> Stored | _Claim | None:
        """Return how the chunk is stored in this session, or the claim of the thread that is storing
        it now. Otherwise claim it and return None: this thread must store it and call
        :meth:`_settle`.
        """
        with self._lock:
            held = self._chunks.get(chunk)
            if held is None:
                self._chunks[chunk] = _Claim()
                self._statistics.logical += length
            elif isinstance(held, Stored):
                self._statistics.logical += length
                self._reused("session", length)
            return held

    def _settle(self, chunk: bytes, stored: Stored | None) -> None:
        with self._lock:
            claim = self._chunks.pop(chunk)
            if stored is not None:
                self._chunks[chunk] = stored
        if isinstance(claim, _Claim):
            claim.set()

    def _reused(self, where: str, length: int) -> None:
        self._statistics.reused += length
        self._statistics.reused_from[where] += 1

    def _elsewhere(self, chunk: bytes, before: Row | None, length: int) -> Stored | None:
        """Return how the chunk is stored in the parent or another snapshot, and count it as reused; or
        None.
        """
        where, stored = self._find_elsewhere(chunk, before)
        if stored is None or not (
            stored.place.codec & codec.DELTA or self._can_be(stored.place, length)
        ):
            return None
        with self._lock:
            self._reused(where, length)
        return stored

    def _find_elsewhere(self, chunk: bytes, before: Row | None) -> tuple[str, Stored | None]:
        usable = self.session.usable
        if before is not None:
            was = before.stored
            delta = was.place.codec & codec.DELTA
            if (
                before.chunk == chunk
                and usable(was.place.shard)
                and (not delta or usable(was.base_place.shard))
            ):
                return "parent", was
            if delta and was.base == chunk and usable(was.base_place.shard):
                return "parent", Stored(was.base_place)
        if self.session.index.entries:
            place = self.session.index.find(chunk)
            if place is not None:
                return "index", self._from_index(place)
        return "", None

    def _can_be(self, place: Place, length: int) -> bool:
        """Return whether a full chunk of ``length`` bytes can have this place. The index, or a
        delta's record, may be wrong, and a map with an impossible place is refused as a whole.
        """
        tag = overhead(self._keys.chunk)
        longest = (
            place.length <= length + tag
            if place.codec != codec.RAW
            else place.length == length + tag
        )
        return (
            longest
            and place.offset <= MAX_CONTAINER_BYTES
            and (place.codec == codec.ZERO) == (place.length == 0)
        )

    def _from_index(self, place: np.void) -> Stored | None:
        shard, number = place["shard"].tobytes(), int(place["codec"])
        # Deltas are not in the index, as it does not say what their base is.
        if number & codec.DELTA or not codec.known(number) or not self.session.usable(shard):
            return None
        return Stored(Place(shard, int(place["offset"]), int(place["length"]), number))

    def _store(self, stream: int, region: int, chunk: Chunk, before: Row | None) -> Stored:
        if chunk.zero:
            return _NOTHING_HERE
        number, parts, length, base = chunk.form(stream, region, self._candidate(before))
        put = self._streams[stream].put
        own = NO_CHUNK if base is None else base.chunk
        shard, offset, length = put(
            EncodedChunk(chunk.id, chunk.bitmap, own, number, parts, length)
        )
        return self._how(chunk.id, Place(shard, offset, length, number), base)

    def _how(self, chunk: bytes, place: Place, base: Candidate | None) -> Stored:
        """Return how a chunk written to ``place`` is stored, and remember its base's bitmap."""
        if base is None:
            return Stored(place)
        self._base_bitmaps[chunk, base.chunk] = base.bitmap
        return Stored(place, base.chunk, base.place)

    def _candidate(self, before: Row | None) -> Candidate | None:
        """Return what the cell may become a delta of: the parent's chunk or, if that is a delta, its
        base.
        """
        if before is None or before.chunk == NO_CHUNK:
            return None
        place, base, base_place = before.stored
        if not place.codec & codec.DELTA:
            candidate = Candidate(before.chunk, place, before.data)
        else:
            # The base's bitmap is at the head of the delta, which cannot be read while it is being
            # uploaded.
            bitmap = self._base_bitmaps.get((before.chunk, base), b"")
            if not bitmap and not self._usable_base(place.shard):
                return None
            candidate = Candidate(base, base_place, bitmap, place)
        usable = candidate.place.codec != codec.ZERO and self._usable_base(candidate.place.shard)
        return candidate if usable else None

    def _count(self, stored: Stored) -> Stored:
        """Count what was newly stored, and return it."""
        place = stored.place
        with self._lock:
            now = self._statistics
            now.stored += place.length
            now.chunks += 1
            now.deltas += place.codec & codec.DELTA != 0
            now.by_codec[codec.name(place.codec)] += place.length
            if place.codec != codec.ZERO:
                self._own_shards.add(place.shard)
        return stored

    def _closed(self, shard: ShardTable) -> None:
        """Add the full chunks of a complete shard to the new index entries."""
        table = shard.entries()
        full = table[table["codec"] & codec.DELTA == 0]
        places = np.zeros(len(full), PLACE)
        places["shard"] = np.frombuffer(shard.name, np.uint8)
        for name in ("offset", "length", "codec"):
            places[name] = full[name]
        entries = make_entries(full["chunk"], places)
        with self._lock:
            self._entries.append(entries)

    def _usable_base(self, shard: bytes) -> bool:
        """Return whether a chunk in ``shard`` may be a base: one that is still being uploaded
        cannot be read back.
        """
        if shard in self._own_shards:
            return self._uploads.stored(shard)
        return self.session.usable(shard)

    def _read(self, shard: bytes, offset: int, out: memoryview) -> None:
        """Read a shard for an appender. There is no read-ahead: there are too many appenders."""
        self._wait(self._repository.backend.get_into(object_name("shard", shard), offset, out))

    def _fetch(self, shard: bytes, offset: int, out: memoryview) -> None:
        backend, name = self._repository.backend, object_name("shard", shard)
        if backend.direct:
            backend.read_into(name, offset, out)
        else:
            self._ahead.fetch(name, offset, out)
