"""The dedup index: which chunks are stored, asked of the live segments of one state; a miss costs space, never correctness."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged, ObjectMissing
from icecore.store.backend import Backend
from icecore.store.cell import PLACE, Bytes, Records
from icecore.store.names import object_name
from icecore.store.parallel import each
from icecore.store.segment import (
    Head,
    Mask,
    encode_segment,
    head_bytes,
    in_shards,
    leading,
    merge,
    parse_head,
    parse_segment,
    partition,
    search,
    segment_bytes,
    verify_block,
)
from icecore.store.state import SegmentRef

#: Segments of one size class and one range that are merged into one: a class has less than this many; half as many where there are many ranges.
FAN_IN = 8
#: A segment longer than this many entries is cut into ranges by the leading bits of its ids.
SPLIT_ENTRIES = 1 << 20
_CLASS_ENTRIES = 1024


@dataclass(frozen=True)
class Merge:
    """Segments that are to become one: all of one range."""

    inputs: tuple[SegmentRef, ...]

    @property
    def entries(self) -> int:
        """Entries that the inputs hold together."""
        return sum(ref.count for ref in self.inputs)


def size_class(count: int) -> int:
    """0 for less than 1024 entries, 1 for less than 8 times that, and so on."""
    size = 0
    while count >= _CLASS_ENTRIES:
        count //= FAN_IN
        size += 1
    return size


def plan_merges(segments: Sequence[SegmentRef], *, entries: int) -> list[Merge]:
    """What to merge so that the number of live segments grows with the logarithm of the index.

    Args:
        segments: The live segments.
        entries: No merge larger than this many entries.

    Returns:
        Merges of segments of the same range and size class, where there are ``FAN_IN`` of them; with everything smaller in that range, which
        would only be merged again soon. At most one for each range.
    """
    ranges: dict[tuple[int, int], list[SegmentRef]] = {}
    for ref in segments:
        ranges.setdefault((ref.bits, ref.prefix), []).append(ref)
    merges = []
    for (bits, _), members in ranges.items():
        for size in range(max(size_class(ref.count) for ref in members), -1, -1):
            if sum(size_class(ref.count) == size for ref in members) >= (FAN_IN // 2 if bits else FAN_IN):
                merge_ = Merge(tuple(ref for ref in members if size_class(ref.count) <= size))
                if merge_.entries <= entries:
                    merges.append(merge_)
                    break
    return merges


@dataclass(frozen=True)
class NewSegment:
    """A segment that is ready to be stored."""

    ref: SegmentRef
    parts: list[bytes | memoryview]


def build(
    entries: Records, key: bytes, identity: Callable[[], bytes], *, bits: int = 0, prefix: int = 0
) -> list[NewSegment]:
    """The segments that hold ``entries`` (sorted, all in the given range), cut into narrower ranges where they are many."""
    if len(entries) > SPLIT_ENTRIES and bits < 8:
        finer = min(8, bits + 3)
        return [
            segment
            for part, held in partition(entries, finer)
            for segment in build(held, key, identity, bits=finer, prefix=part)
        ]
    if not len(entries):
        return []
    # The name begins with the range, so that the folder of a segment says what is in it.
    name = bytes([prefix << (8 - bits) & 0xFF if bits else 0]) + identity()[1:]
    parts, digest = encode_segment(entries, key, bits=bits, prefix=prefix, name=object_name("segment", name))
    length = sum(memoryview(part).nbytes for part in parts)
    return [NewSegment(SegmentRef(name, digest, length, len(entries), bits, prefix), parts)]


class Index:
    """The live segments of one state.

    ``lookup`` is for threads; segments up to ``budget`` bytes in all, smallest first, are held in memory after ``load``, of the others single
    blocks are read as they are asked for.

    Args:
        segments: The state's segments.
        key: The repository's segment key.
        avoid: Shards whose chunks are not to be found: condemned ones.
        budget: Bytes of segments to hold.
    """

    def __init__(
        self,
        backend: Backend,
        segments: Sequence[SegmentRef],
        key: bytes,
        *,
        avoid: frozenset[bytes] = frozenset(),
        budget: int = 256 << 20,
    ) -> None:
        self._backend = backend
        self._key = key
        self._avoid = avoid
        self._budget = budget
        self._refs = list(reversed(segments))  # the newest first: it is the likeliest to know
        self._loaded: dict[bytes, Records] = {}
        self._keys: dict[bytes, npt.NDArray[np.uint64]] = {}
        self._heads: dict[bytes, Head] = {}
        self._loop: asyncio.AbstractEventLoop | None = None
        self.damaged: list[tuple[SegmentRef, Damaged | ObjectMissing]] = []

    @property
    def entries(self) -> int:
        """Entries in all segments."""
        return sum(ref.count for ref in self._refs)

    async def load(self) -> None:
        """Read what fits the budget, and the heads of the rest.

        A damaged or missing segment, or block of one, is passed over and listed in ``damaged``: it costs space, and no snapshot should fail for it.
        """
        self._loop = asyncio.get_running_loop()
        left = self._budget
        whole: list[SegmentRef] = []
        large: list[SegmentRef] = []
        for ref in sorted(self._refs, key=lambda ref: ref.length):
            if ref.length <= left:
                left -= ref.length
                whole.append(ref)
            else:
                large.append(ref)
        held = {ref.id for ref in whole}

        async def read(ref: SegmentRef) -> None:
            await self._load(ref, self._load_whole if ref.id in held else self._load_head)

        await each([*whole, *large], read)

    async def _load(self, ref: SegmentRef, how: Callable[[SegmentRef], Awaitable[None]]) -> None:
        try:
            await how(ref)
        except (Damaged, ObjectMissing) as error:
            self._refs.remove(ref)
            self.damaged.append((ref, error))

    async def _load_whole(self, ref: SegmentRef) -> None:
        if ref.id not in self._loaded:
            entries = await read_segment(self._backend, ref, self._key)
            if self._avoid:
                entries = entries[~in_shards(entries, self._avoid)]
            self._keys[ref.id] = leading(entries["chunk"])
            self._loaded[ref.id] = entries

    async def _load_head(self, ref: SegmentRef) -> None:
        if ref.id not in self._heads:
            name = object_name("segment", ref.id)
            data = bytearray(head_bytes(ref.count, self._key))
            await self._backend.get_into(name, 0, memoryview(data))
            self._heads[ref.id] = await asyncio.to_thread(parse_head, name, bytes(data), self._key, ref.digest)

    def lookup(self, ids: Bytes) -> tuple[Mask, Records]:
        """Where chunks are stored. To be called after ``load``, from any thread but the event loop's if segments exceed the budget.

        Args:
            ids: Chunk ids, n x 32 bytes.

        Returns:
            Which were found, and n ``PLACE`` records, zero where not found.
        """
        found = np.zeros(len(ids), np.bool_)
        places = np.zeros(len(ids), PLACE)
        if not len(ids):
            return found, places
        first = ids[:, 0]
        for ref in self._refs:
            missing = np.flatnonzero(~found & ((first >> (8 - ref.bits)) == ref.prefix) if ref.bits else ~found)
            if not len(missing):
                continue
            entries = self._loaded.get(ref.id)
            if entries is not None:
                self._take(entries, self._keys[ref.id], ids, missing, found, places)
            else:
                self._search_blocks(ref, ids, missing, found, places)
        return found, places

    def find(self, chunk: bytes) -> np.void | None:
        """The ``PLACE`` of one chunk, or None; as ``lookup``, at a tenth of its time for a single id."""
        leads = np.uint64(int.from_bytes(chunk[:8], "big"))
        for ref in self._refs:
            if ref.bits and chunk[0] >> (8 - ref.bits) != ref.prefix:
                continue
            entries = self._loaded.get(ref.id)
            if entries is None:
                found, places = np.zeros(1, np.bool_), np.zeros(1, PLACE)
                ids = np.frombuffer(chunk, np.uint8).reshape(1, 32)
                self._search_blocks(ref, ids, np.zeros(1, np.int64), found, places)
                if found[0]:
                    place: np.void = places[0]
                    return place
                continue
            keys = self._keys[ref.id]
            at = int(keys.searchsorted(leads))
            while at < len(keys) and keys[at] == leads:
                entry = entries[at]
                if entry["chunk"].tobytes() == chunk:
                    place = entry["place"]
                    return place
                at += 1
        return None

    def _take(
        self,
        entries: Records,
        keys: npt.NDArray[np.uint64],
        ids: Bytes,
        asked: npt.NDArray[np.int64],
        found: Mask,
        places: Records,
    ) -> None:
        if not len(entries):
            return
        hit, at = search(entries, keys, ids[asked])
        places[asked[hit]] = np.take(entries, at[hit])["place"]
        found[asked[hit]] = True

    def _search_blocks(
        self, ref: SegmentRef, ids: Bytes, missing: npt.NDArray[np.int64], found: Mask, places: Records
    ) -> None:
        head = self._heads[ref.id]
        numbers = head.blocks_of(leading(ids[missing]))
        for number in np.unique(numbers).tolist():
            offset, length = head.block(number)
            data = bytearray(length)
            try:
                self._read(head.name, offset, memoryview(data))
                entries = verify_block(head, number, data, self._key)
            except (Damaged, ObjectMissing) as error:
                self.damaged.append((ref, error))  # what it holds is not found
                continue
            if self._avoid:
                entries = entries[~in_shards(entries, self._avoid)]
            self._take(entries, leading(entries["chunk"]), ids, missing[numbers == number], found, places)

    def _read(self, name: str, offset: int, out: memoryview) -> None:
        if self._backend.direct:
            self._backend.read_into(name, offset, out)
        else:
            assert self._loop is not None
            asyncio.run_coroutine_threadsafe(self._backend.get_into(name, offset, out), self._loop).result()

    async def entries_of(self, ref: SegmentRef) -> Records:
        """All entries of a live segment (but not those in condemned shards), from memory where they are held."""
        loaded = self._loaded.get(ref.id)
        return loaded if loaded is not None else await read_segment(self._backend, ref, self._key)


async def read_segment(backend: Backend, ref: SegmentRef, key: bytes) -> Records:
    """All entries of a segment, verified.

    Raises:
        Damaged: It is not what was written.
    """
    name = object_name("segment", ref.id)
    data = await backend.get(name, limit=segment_bytes(ref.count, key))
    _, entries = await asyncio.to_thread(parse_segment, name, data, key, ref.digest)
    return entries


async def merge_segments(
    read: Callable[[SegmentRef], Awaitable[Records]],
    planned: Merge,
    key: bytes,
    identity: Callable[[], bytes],
    dead: frozenset[bytes] = frozenset(),
) -> list[NewSegment]:
    """The segments that take the place of a merge's inputs, without entries in the shards ``dead``; of equal ids the last input's stays."""
    runs = [await read(ref) for ref in reversed(planned.inputs)]
    first = planned.inputs[0]

    def work() -> list[NewSegment]:
        return build(merge(runs, dead), key, identity, bits=first.bits, prefix=first.prefix)

    return await asyncio.to_thread(work)


def replaced(
    segments: Sequence[SegmentRef], inputs: Sequence[SegmentRef], outputs: Sequence[SegmentRef]
) -> list[SegmentRef] | None:
    """``segments`` with ``outputs`` in the place of ``inputs``, or None if one of those is no longer live."""
    gone = {ref.id for ref in inputs}
    if len(gone & {ref.id for ref in segments}) != len(gone):
        return None
    return [*(ref for ref in segments if ref.id not in gone), *outputs]
