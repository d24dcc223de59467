"""Looks up chunks in the live segments of one state. A missed chunk costs space, never correctness;
looking up an absent chunk should cost no read.

Short segments are held whole; of a long one, only its filter. An id that passes a filter is
searched among the neighbours of earlier finds, then in the one block of the segment that may hold
it.
"""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged, FormatTooNew, ObjectMissing
from icecore.events import Event, Sink, discard
from icecore.store.backend.base import Backend
from icecore.store.format.cell import PLACE, Bytes, Records
from icecore.store.format.filters import FilterSet, Numbers, decode_filter, filter_bytes
from icecore.store.format.names import filter_name, object_name
from icecore.store.format.segment import (
    ENTRY,
    MAX_ENTRIES,
    Head,
    Mask,
    head_bytes,
    in_shards,
    leading,
    parse_head,
    search,
    search_block,
    segment_bytes,
    verify_block,
)
from icecore.store.format.state import SegmentRef
from icecore.store.log.index import filtered, read_segment
from icecore.store.log.neighbours import Neighbours
from icecore.store.log.recent import RecentSegments
from icecore.store.log.tables import index_entries, read_table
from icecore.store.runtime.parallel import each

#: Ids looked up at once, blocks held at once (61 KiB each), and reads in flight.
_STEP = 1 << 14
_BLOCKS = 128
_AT_ONCE = 32
#: Filters held in memory, in bytes.
_FILTER_BYTES = 176 << 20
#: Of many ids, this many are searched in blocks first: if the shards of those found hold many of
#: the others, these need no block each.
_PROBES = 8
#: Up to this many ids, or this fraction of the ids looked up, are searched all at once.
_FEW = 64
_MISTAKES = 64
#: If a table yields fewer finds than this, the ids do not lie together.
_YIELD = 4
#: The second id found in a shard causes its table to be read.
_TOGETHER = 2

#: A segment's number and one of its blocks.
Block = tuple[int, int]


class Index:
    """The live segments of one state.

    ``lookup`` is for threads. After ``load``, segments that have no filter are held in memory, up
    to ``budget`` bytes in all; all segments, if they fit.

    Args:
        segments: The state's segments.
        key: The repository's segment key.
        avoid: Shards whose chunks must not be found: condemned ones.
        budget: Bytes of segments to hold.
        shard_key: The repository's shard key, to find chunks that lie beside finds even if no live
            segment names them; None: only chunks that one names.
        recent: What this process read or wrote before.
        emit: Gets ``index.damaged`` events.

    Attributes:
        damaged: Segments that could not be used, or only in part. This costs space, and no snapshot
            should fail for it.
    """

    def __init__(
        self,
        backend: Backend,
        segments: Sequence[SegmentRef],
        key: bytes,
        *,
        avoid: frozenset[bytes] = frozenset(),
        budget: int = 32 << 20,
        shard_key: bytes | None = None,
        recent: RecentSegments | None = None,
        emit: Sink = discard,
    ) -> None:
        self._backend = backend
        self._recent = recent or RecentSegments(0)
        self._key = key
        self._shard_key = shard_key
        self._avoid = avoid
        self._emit = emit
        refs = list(reversed(segments))  # the newest first: it is the most likely to match
        self._count = sum(ref.count for ref in refs)
        # A filter has a fortieth of its segment's size. Unless all segments are short, only those
        # without a filter are read whole.
        short = (
            refs
            if segment_bytes(self._count, key) <= budget
            else [ref for ref in refs if not filtered(ref)]
        )
        left, whole = budget, set[bytes]()
        for ref in sorted(short, key=lambda ref: ref.count):
            left -= segment_bytes(ref.count, key)
            if left < 0:
                break
            whole.add(ref.id)
        self._whole = [ref for ref in refs if ref.id in whole]
        self._large = [ref for ref in refs if ref.id not in whole]
        self._filters: FilterSet | None = None
        self._rows: dict[bytes, Records] = {}
        self._held: Records = np.empty(0, ENTRY)
        self._keys: npt.NDArray[np.uint64] = np.empty(0, np.uint64)
        self._order: Numbers = np.empty(0, np.int64)
        self._heads: dict[int, Head | None] = {}
        self._bad: set[Block] = set()
        self._near = Neighbours()
        self._found_in: Counter[bytes] = Counter()
        self._tabled: set[bytes] = set()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self.damaged: list[tuple[SegmentRef, Damaged | ObjectMissing]] = []

    @property
    def entries(self) -> int:
        """Entries in all segments."""
        return self._count

    async def load(self) -> None:
        """Read the segments that fit the budget."""
        if self._loop is not None:
            return
        self._loop = asyncio.get_running_loop()
        self._filters = FilterSet(self._large, _FILTER_BYTES) if self._large else None
        edges = np.concatenate([[0], np.cumsum([ref.count for ref in self._whole], dtype=np.int64)])
        held = np.empty(int(edges[-1]), ENTRY)

        async def read(number: int) -> None:
            ref = self._whole[number]
            try:
                entries = await self._whole_segment(ref)
            except (Damaged, ObjectMissing) as error:
                self._damage(ref, error)
                return
            if len(entries) != ref.count:
                self._damage(
                    ref,
                    Damaged(
                        "index segment",
                        object_name("segment", ref.id),
                        f"it has {len(entries)} entries instead of {ref.count}",
                    ),
                )
                return
            if self._avoid:
                entries = entries[~in_shards(entries, self._avoid)]
            first = int(edges[number])
            held[first : first + len(entries)] = entries
            self._rows[ref.id] = held[first : first + len(entries)]

        await each(range(len(self._whole)), read)
        await asyncio.to_thread(self._arrange, held, edges)

    def _arrange(self, held: Records, edges: Numbers) -> None:
        """Sort everything held, so that looking up in many segments costs as much as in one; of
        equal ids, the newest segment's comes first.
        """
        spans = [
            np.arange(edges[number], edges[number] + len(self._rows[ref.id]))
            for number, ref in enumerate(self._whole)
            if ref.id in self._rows
        ]
        rows = np.concatenate(spans) if spans else np.empty(0, np.int64)
        keys = leading(held["chunk"])[rows]
        order = np.argsort(keys, kind="stable")
        self._held, self._keys, self._order = held, keys[order], rows[order]

    def lookup(self, ids: Bytes) -> tuple[Mask, Records]:
        """Look up where chunks are stored. Call it after ``load``; if segments exceed the budget,
        not from the event loop's thread.

        Args:
            ids: Chunk ids, n x 32 bytes.

        Returns:
            Which were found, and n ``PLACE`` records, zero where not found.
        """
        found = np.zeros(len(ids), np.bool_)
        places = np.zeros(len(ids), PLACE)
        for first in range(0, len(ids), _STEP):
            part = slice(first, first + _STEP)
            self._lookup(ids[part], found[part], places[part])
        return found, places

    def _lookup(self, ids: Bytes, found: Mask, places: Records) -> None:
        if len(self._keys):
            hit, at = search(self._held, self._keys, ids, self._order)
            places[hit] = np.take(self._held, at[hit])["place"]
            found |= hit
        if self._filters is None:
            return
        left = np.flatnonzero(~found)
        if not len(left):
            return
        self._read_filters(self._filters, ids[left])
        candidates = self._filters.candidates(ids[left])
        maybe = (candidates >= 0).any(axis=0)
        self._resolve(ids, left[maybe], candidates[:, maybe], found, places)

    def find(self, chunk: bytes) -> np.void | None:
        """Return the ``PLACE`` of one chunk, or None: ``lookup``, but faster for a single id."""
        leads = np.uint64(int.from_bytes(chunk[:8], "big"))
        at = int(self._keys.searchsorted(leads))
        while at < len(self._keys) and self._keys[at] == leads:
            entry = self._held[self._order[at]]
            if entry["chunk"].tobytes() == chunk:
                held: np.void = entry["place"]
                return held
            at += 1
        if self._filters is None:
            return None
        found, places = self.lookup(np.frombuffer(chunk, np.uint8).reshape(1, 32))
        place: np.void = places[0]
        return place if found[0] else None

    def _read_filters(self, filters: FilterSet, ids: Bytes) -> None:
        """Read the filters of the segments in whose range an id lies."""
        if not filters.unknown(ids):
            return
        with self._lock:  # other threads wait: they need the filters as well
            wanted = filters.unknown(ids)
            for first in range(
                0, len(wanted), _AT_ONCE
            ):  # no more at once: filters are most of the index's memory
                self._read_some(filters, wanted[first : first + _AT_ONCE])

    def _read_some(self, filters: FilterSet, wanted: Sequence[int]) -> None:
        refs = [self._large[number] for number in wanted]
        names = [filter_name(ref.id) for ref in refs]
        rooms = [memoryview(bytearray(filter_bytes(ref, self._key))) for ref in refs]
        failures = self._read([(name, 0, room) for name, room in zip(names, rooms, strict=True)])
        for number, ref, name, room, failure in zip(
            wanted, refs, names, rooms, failures, strict=True
        ):
            words = None
            try:
                if failure is not None:
                    raise failure
                words = decode_filter(name, bytes(room), self._key, ref)
            except (Damaged, FormatTooNew, ObjectMissing):
                pass  # as if it did not exist: the ids that it would have denied are searched
            filters.put(number, words)

    def _resolve(
        self, ids: Bytes, left: Numbers, candidates: Numbers, found: Mask, places: Records
    ) -> None:
        """Search the ids that passed: first beside earlier finds, then a few of them in their
        blocks, then what lies beside those, and so on.

        Args:
            left: Indices of the ids to search.
            candidates: The segments that may have each, layers x len(left).
        """
        # A few ids are mostly false positives of the filters: nothing lies beside those.
        few = max(_FEW, len(ids) // _MISTAKES)
        probes, tables, since = _PROBES, 0, 0
        while len(left):
            newest = self._near.newest
            here, where = self._near.search(ids[left], since)
            places[left[here]], found[left[here]], since = where[here], True, newest
            if tables and here.sum() < _YIELD * tables:
                probes = len(left)  # the ids do not lie together
            left, candidates = left[~here], candidates[:, ~here]
            if not len(left):
                return
            step = max(1, len(left) // probes) if len(left) > few else 1
            hit = self._search_blocks(ids, left, candidates, step, found, places)
            tables = self._read_tables(places["shard"][left[hit]].tobytes(), eager=step > _YIELD)
            gone = hit | (candidates < 0).all(axis=0)
            left, candidates = left[~gone], candidates[:, ~gone]
            probes *= 2

    def _search_blocks(
        self,
        ids: Bytes,
        left: Numbers,
        candidates: Numbers,
        step: int,
        found: Mask,
        places: Records,
    ) -> Mask:
        """Search every ``step``-th id, and any others that must be in the same blocks, in its first
        candidate; ids that are not found lose that candidate.
        """
        layer = (candidates >= 0).argmax(axis=0)
        segment = candidates[layer, np.arange(len(left))]
        asked = np.isin(segment, segment[::step])
        order = np.flatnonzero(asked)
        order = order[np.argsort(segment[order], kind="stable")]
        numbers, edges = np.unique(segment[order], return_index=True)
        self._read_heads(numbers.tolist())
        block = np.zeros(len(left), np.int64)
        for number, members in zip(numbers.tolist(), np.split(order, edges[1:]), strict=True):
            head = self._heads[number]
            if head is not None:
                block[members] = head.blocks_of(leading(ids[left[members]]))
        keys = segment << 32 | block
        asked &= np.isin(keys, keys[::step])
        hit = np.zeros(len(left), np.bool_)
        wanted = np.unique(keys[asked])
        for first in range(0, len(wanted), _BLOCKS):
            blocks = self._read_blocks(
                [(int(key) >> 32, int(key) & 0xFFFFFFFF) for key in wanted[first : first + _BLOCKS]]
            )
            for number, entries in blocks.items():
                members = np.flatnonzero(asked & (segment == number))
                good, at = search_block(entries, ids[left[members]])
                places[left[members[good]]] = np.take(entries, at[good])["place"]
                hit[members[good]] = True
        found[left[hit]] = True
        lost = np.flatnonzero(asked & ~hit)
        candidates[layer[lost], lost] = -1
        return hit

    def _read_heads(self, numbers: Iterable[int]) -> None:
        wanted = []
        for number in numbers:
            if self._large[number].count > MAX_ENTRIES:
                self._heads[number] = None  # no segment is this long
            elif number not in self._heads:
                wanted.append(number)
        names = [object_name("segment", self._large[number].id) for number in wanted]
        rooms = [
            memoryview(bytearray(head_bytes(self._large[number].count, self._key)))
            for number in wanted
        ]
        failures = self._read([(name, 0, room) for name, room in zip(names, rooms, strict=True)])
        for number, name, room, failure in zip(wanted, names, rooms, failures, strict=True):
            ref = self._large[number]
            try:
                if failure is not None:
                    raise failure
                head = parse_head(name, bytes(room), self._key, ref.digest)
                if head.count != ref.count:
                    raise Damaged(
                        "index segment", name, f"it has {head.count} entries instead of {ref.count}"
                    )
                self._heads[number] = head
            except (Damaged, ObjectMissing) as error:
                self._heads[number] = None
                self._damage(ref, error)

    def _read_blocks(self, wanted: Sequence[Block]) -> dict[int, Records]:
        """Return, for each segment, the entries of its wanted blocks (ascending), except damaged
        ones.
        """
        reads = []
        for number, block in wanted:
            head = self._heads[number]
            if head is not None and (number, block) not in self._bad:
                offset, length = head.block(block)
                reads.append((number, block, head, offset, np.empty(length, np.uint8).data))
        failures = self._read([(head.name, offset, data) for _, _, head, offset, data in reads])
        blocks: dict[int, list[Records]] = {}
        for (number, block, head, _, data), failure in zip(reads, failures, strict=True):
            try:
                if failure is not None:
                    raise failure
                entries = verify_block(head, block, data, self._key)
            except (Damaged, ObjectMissing) as error:
                self._bad.add((number, block))
                self._damage(self._large[number], error)
                continue
            if self._avoid:
                entries = entries[~in_shards(entries, self._avoid)]
            blocks.setdefault(number, []).append(entries)
        return {
            number: parts[0] if len(parts) == 1 else np.concatenate(parts)
            for number, parts in blocks.items()
        }

    def _read_tables(self, names: bytes, *, eager: bool) -> int:
        """Read the tables of shards in which something was found: of all, or only of those in which
        it was not the first find; return how many were read.

        Args:
            names: The shard of each chunk found, 16 bytes each.
        """
        if self._shard_key is None or not names or self._in_loop():
            return 0
        shards = [names[at : at + 16] for at in range(0, len(names), 16)]
        with self._lock:
            self._found_in.update(shards)
            new = {
                shard
                for shard in shards
                if shard not in self._tabled and (eager or self._found_in[shard] >= _TOGETHER)
            }
            self._tabled.update(new)
        if not new:
            return 0
        key, loop, tables = self._shard_key, self._loop, []

        async def read(shard: bytes) -> None:
            try:
                tables.append(index_entries(shard, await read_table(self._backend, key, shard)))
            except (Damaged, FormatTooNew, ObjectMissing):
                pass  # 'check' reports it

        assert loop is not None
        asyncio.run_coroutine_threadsafe(each(new, read, at_once=_AT_ONCE), loop).result()
        if tables:
            self._near.add(np.concatenate(tables))
        return len(tables)

    def _in_loop(self) -> bool:
        try:
            return asyncio.get_running_loop() is self._loop
        except RuntimeError:
            return False

    def _read(
        self, reads: Sequence[tuple[str, int, memoryview]]
    ) -> list[Damaged | ObjectMissing | None]:
        """Read many ranges, many at once; return, for each, what was wrong with it.

        Raises:
            StoreError: The storage could not be reached.
        """
        failures: list[Damaged | ObjectMissing | None] = [None] * len(reads)
        if self._backend.direct:
            for at, (name, offset, out) in enumerate(reads):
                try:
                    self._backend.read_into(name, offset, out)
                except (Damaged, ObjectMissing) as error:
                    failures[at] = error
            return failures

        async def read(at: int) -> None:
            name, offset, out = reads[at]
            try:
                await self._backend.get_into(name, offset, out)
            except (Damaged, ObjectMissing) as error:
                failures[at] = error

        if reads:
            assert self._loop is not None
            asyncio.run_coroutine_threadsafe(
                each(range(len(reads)), read, at_once=_AT_ONCE), self._loop
            ).result()
        return failures

    def _damage(self, ref: SegmentRef, error: Damaged | ObjectMissing) -> None:
        if any(known.id == ref.id for known, _ in self.damaged):
            return
        self.damaged.append((ref, error))
        self._emit(
            Event("index.damaged", {"segment": object_name("segment", ref.id), "error": str(error)})
        )

    async def entries_of(self, ref: SegmentRef) -> Records:
        """Return all entries of a live segment. From memory, if they are held there, without those
        in condemned shards.
        """
        held = self._rows.get(ref.id)
        return held if held is not None else await self._whole_segment(ref)

    async def _whole_segment(self, ref: SegmentRef) -> Records:
        entries = self._recent.get(ref)
        if entries is None:
            entries = await read_segment(self._backend, ref, self._key)
            self._recent.add(ref, entries)
        return entries
