"""The dedup index as a whole: which segments are merged when, and how they are split. Their number
grows with the logarithm of the number of chunks.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence

import msgspec
import numpy as np

from icecore.errors import Damaged
from icecore.store.backend.base import Backend
from icecore.store.format import filters
from icecore.store.format.cell import Records
from icecore.store.format.names import filter_name, object_name
from icecore.store.format.segment import (
    ENTRY,
    MAX_ENTRIES,
    TITLE,
    Head,
    encode_segment,
    head_bytes,
    merge,
    parse_head,
    parse_segment,
    partition,
    segment_bytes,
    verify_block,
)
from icecore.store.format.state import SegmentRef

#: Segments of one size class and one range that are merged into one, so a class has fewer than this
#: many; half as many where there are many ranges.
FAN_IN = 8
#: A segment longer than this many entries is split into ranges by the leading bits of its ids.
SPLIT_ENTRIES = 1 << 20
#: A segment of at least this many entries has a filter beside it; of a range, an eighth of that.
#: Shorter ones are few, and read whole.
FILTER_ENTRIES = 8192
_CLASS_ENTRIES = 1024
#: Ranges are split by this many bits, down to those of one byte.
_FINER, _FINEST = 3, 8


class Merge(msgspec.Struct, frozen=True):
    """Segments of one range that are to become one."""

    inputs: tuple[SegmentRef, ...]

    @property
    def entries(self) -> int:
        """Entries that the inputs hold together."""
        return sum(ref.count for ref in self.inputs)


def size_class(count: int) -> int:
    """Return 0 for less than 1024 entries, 1 for less than 8 times that, and so on."""
    size = 0
    while count >= _CLASS_ENTRIES:
        count //= FAN_IN
        size += 1
    return size


def plan_merges(segments: Sequence[SegmentRef], *, entries: int) -> list[Merge]:
    """Return what to merge so that the number of live segments grows with the logarithm of the
    index.

    Args:
        segments: The live segments.
        entries: Largest merge in entries.

    Returns:
        Merges of segments of the same range and size class, where there are ``FAN_IN`` of them,
        along with everything smaller in that range, which would only be merged again soon. At most
        one for each range.
    """
    ranges: dict[tuple[int, int], list[SegmentRef]] = {}
    for ref in segments:
        ranges.setdefault((ref.bits, ref.prefix), []).append(ref)
    merges = []
    for (bits, _), members in ranges.items():
        for size in range(max(size_class(ref.count) for ref in members), -1, -1):
            if sum(size_class(ref.count) == size for ref in members) >= (
                FAN_IN // 2 if bits else FAN_IN
            ):
                merge_ = Merge(tuple(ref for ref in members if size_class(ref.count) <= size))
                if merge_.entries <= entries:
                    merges.append(merge_)
                    break
    return merges


class NewSegment(msgspec.Struct, frozen=True):
    """A segment ready to be stored, its entries, and its filter if it is long enough to have one."""

    ref: SegmentRef
    parts: list[bytes | memoryview]
    entries: Records
    filter: bytes | None = None


def build(
    entries: Records, key: bytes, identity: Callable[[], bytes], *, bits: int = 0, prefix: int = 0
) -> list[NewSegment]:
    """Return the segments that hold ``entries`` (sorted, all in the given range), split into
    narrower ranges if there are many.
    """
    if len(entries) > SPLIT_ENTRIES and bits < _FINEST:
        finer = min(_FINEST, bits + _FINER)
        return [
            segment
            for part, held in partition(entries, finer)
            for segment in build(held, key, identity, bits=finer, prefix=part)
        ]
    if not len(entries):
        return []
    # The name begins with the range, so the folder of a segment says what is in it.
    name = bytes([prefix << (8 - bits) & 0xFF if bits else 0]) + identity()[1:]
    parts, digest = encode_segment(
        entries, key, bits=bits, prefix=prefix, name=object_name("segment", name)
    )
    length = sum(memoryview(part).nbytes for part in parts)
    ref = SegmentRef(name, digest, length, len(entries), bits, prefix)
    return [
        NewSegment(ref, parts, entries, make_filter(ref, entries, key) if filtered(ref) else None)
    ]


def filtered(ref: SegmentRef) -> bool:
    """Return whether the segment is long enough to have a filter."""
    return ref.count >= (FILTER_ENTRIES // 8 if ref.bits else FILTER_ENTRIES)


def make_filter(ref: SegmentRef, entries: Records, key: bytes) -> bytes:
    """Return the filter object of a segment with these entries."""
    return filters.encode_filter(entries["chunk"], ref, key, filter_name(ref.id))


async def read_segment(backend: Backend, ref: SegmentRef, key: bytes) -> Records:
    """Return all entries of a segment, verified.

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
    """Return the segments that replace a merge's inputs, without entries in the shards ``dead``; of
    equal ids, the last input's stays.
    """
    runs = [await read(ref) for ref in reversed(planned.inputs)]
    first = planned.inputs[0]

    def work() -> list[NewSegment]:
        return build(merge(runs, dead), key, identity, bits=first.bits, prefix=first.prefix)

    return await asyncio.to_thread(work)


async def merge_long(
    backend: Backend,
    planned: Merge,
    key: bytes,
    identity: Callable[[], bytes],
    dead: frozenset[bytes] = frozenset(),
) -> AsyncGenerator[NewSegment, None]:
    """Do as ``merge_segments`` for segments of any length: one range after the other, so that at
    most one range's entries are in memory.

    Raises:
        Damaged: An input is not what was written.
    """
    first = planned.inputs[0]
    bits = first.bits
    while planned.entries >> (bits - first.bits) > SPLIT_ENTRIES and bits < _FINEST:
        bits = min(_FINEST, bits + _FINER)
    if bits == first.bits:
        for segment in await merge_segments(
            lambda ref: read_segment(backend, ref, key), planned, key, identity, dead
        ):
            yield segment
        return
    heads = [await read_head(backend, ref, key) for ref in reversed(planned.inputs)]
    for prefix in range(
        first.prefix << (bits - first.bits), (first.prefix + 1) << (bits - first.bits)
    ):
        runs = [await _read_range(backend, head, key, bits, prefix) for head in heads]
        for segment in await asyncio.to_thread(_built, runs, dead, key, identity, bits, prefix):
            yield segment


def _built(
    runs: list[Records],
    dead: frozenset[bytes],
    key: bytes,
    identity: Callable[[], bytes],
    bits: int,
    prefix: int,
) -> list[NewSegment]:
    return build(merge(runs, dead), key, identity, bits=bits, prefix=prefix)


async def read_head(backend: Backend, ref: SegmentRef, key: bytes) -> Head:
    """Return the head of a segment.

    Raises:
        Damaged: It is not what was written.
    """
    name = object_name("segment", ref.id)
    if ref.count > MAX_ENTRIES:
        raise Damaged(TITLE, name, f"it claims {ref.count} entries, more than any segment has")
    data = bytearray(head_bytes(ref.count, key))
    await backend.get_into(name, 0, memoryview(data))
    return parse_head(name, bytes(data), key, ref.digest)


async def _read_range(backend: Backend, head: Head, key: bytes, bits: int, prefix: int) -> Records:
    """Return the entries of a segment whose ids begin with the ``bits`` bits ``prefix``."""
    first, last = head.blocks_between(prefix << (64 - bits), (prefix + 1) << (64 - bits))
    if first == last:
        return np.empty(0, ENTRY)
    start, (offset, length) = head.block(first)[0], head.block(last - 1)
    data = memoryview(bytearray(offset + length - start))
    await backend.get_into(head.name, start, data)

    def work() -> Records:
        blocks = []
        for number in range(first, last):
            at, size = head.block(number)
            blocks.append(verify_block(head, number, data[at - start : at - start + size], key))
        entries: Records = np.concatenate(blocks)
        within: Records = entries[entries["chunk"][:, 0] >> (8 - bits) == prefix]
        return within

    return await asyncio.to_thread(work)


def replaced(
    segments: Sequence[SegmentRef], inputs: Sequence[SegmentRef], outputs: Sequence[SegmentRef]
) -> list[SegmentRef] | None:
    """Return ``segments`` with ``outputs`` in the place of ``inputs``; None if one of the inputs is
    no longer live.
    """
    gone = {ref.id for ref in inputs}
    if len(gone & {ref.id for ref in segments}) != len(gone):
        return None
    return [*(ref for ref in segments if ref.id not in gone), *outputs]
