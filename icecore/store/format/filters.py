"""Filters of index segments: they answer without a read, for nearly every chunk that is in no
segment, that it is in none. Pure. A filter never denies an id that is in its segment.

A filter is a split block Bloom filter, as in Apache Parquet (BloomFilter.md in
apache/parquet-format; Putze, Sanders and Singler, "Cache-, Hash- and Space-Efficient Bloom
Filters", 2007): a block of eight 32-bit words for each id, one bit set in each word, so that a
lookup touches one cache line. Chunk ids are keyed digests, so their own bytes are the hash.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged
from icecore.store.format.cell import Bytes
from icecore.store.format.envelope import DIGEST_BYTES, ObjectKind, seal, sealed_bytes, unseal
from icecore.store.format.state import SegmentRef

#: Bits for each entry. With 16, 0.1 % of the ids that are not in the segment pass. The long
#: segments of a large index, which hold most of its entries, may let 0.35 % pass: of the 256 ranges
#: of ids, those with this many entries or more.
BITS, LARGE_BITS = 16, 13
LARGE_ENTRIES = 1 << 17
_FINEST = 8
_WORDS = 8
_BLOCK_BYTES = 4 * _WORDS
#: The filter of the longest segment has 128 MiB.
FILTER_KIND = ObjectKind("index filter", b"ICEFILT", 1, 256 << 20, None)
#: Where in an id its hash lies: one number chooses the block, the other the bits. The leading bytes
#: do not serve, as a segment's ids share some of them.
_HASH = slice(16, 24)
#: Odd numbers that multiply the second number for each word; the leading five bits of the product
#: are the bit's number. As in Parquet.
_SALTS = np.array(
    [
        0x47B6137B,
        0x44974D91,
        0x8824AD5B,
        0xA2B7289D,
        0x705495C7,
        0x2DF1424B,
        0x9EFC4947,
        0x5C6BFB31,
    ],
    np.uint32,
)

Words = npt.NDArray[np.uint32]
Numbers = npt.NDArray[np.int64]


def block_count(segment: SegmentRef) -> int:
    """Return the number of blocks in the filter of a segment."""
    large = segment.bits == _FINEST and segment.count >= LARGE_ENTRIES
    return -(-segment.count * (LARGE_BITS if large else BITS) // (8 * _BLOCK_BYTES))


def filter_bytes(segment: SegmentRef, key: bytes) -> int:
    """Return the length in bytes of the filter object of a segment, written under ``key``."""
    return sealed_bytes(DIGEST_BYTES + block_count(segment) * _BLOCK_BYTES, key)


def encode_filter(ids: Bytes, segment: SegmentRef, key: bytes, name: str) -> bytes:
    """Return the filter object of a segment.

    Args:
        ids: The segment's chunk ids, n x 32 bytes.
        key: The segment key.
        name: The object's name; only encryption needs it.
    """
    words = np.zeros((block_count(segment), _WORDS), np.uint32)
    high, bits = _hash(ids)
    blocks = (high * np.uint64(len(words)) >> np.uint64(32)).astype(np.int64)
    for word in range(_WORDS):
        np.bitwise_or.at(words[:, word], blocks, bits[:, word])
    return seal(FILTER_KIND, segment.digest + words.astype("<u4").tobytes(), key, name).data


def decode_filter(name: str, data: bytes, key: bytes, segment: SegmentRef) -> Words:
    """Return the blocks of a segment's filter, from object ``name``: n x 8 words.

    Raises:
        Damaged: It is not what was written, or another segment's.
        FormatTooNew: A later version wrote it.
    """
    body = unseal(FILTER_KIND, name, data, key)
    if body[:DIGEST_BYTES] != segment.digest:
        raise Damaged(FILTER_KIND.title, name, "it belongs to another segment")
    if len(body) != DIGEST_BYTES + block_count(segment) * _BLOCK_BYTES:
        raise Damaged(
            FILTER_KIND.title,
            name,
            f"it has {len(body)} bytes, which does not fit the {segment.count} entries of its segment",
        )
    return np.frombuffer(body, "<u4", offset=DIGEST_BYTES).reshape(-1, _WORDS)


def _hash(ids: Bytes) -> tuple[npt.NDArray[np.uint64], Words]:
    """Return, for each id, the number that chooses its block, and its bit in each of the block's
    words (n x 8).
    """
    numbers = np.ascontiguousarray(ids[:, _HASH]).view("<u4")
    bits: Words = np.uint32(1) << (numbers[:, 1:] * _SALTS >> np.uint32(27))
    return numbers[:, 0].astype(np.uint64), bits


class FilterSet:
    """The filters of many segments in one array, so that a query costs the same for any number of
    segments. Each filter is loaded when it is first needed.

    Args:
        segments: In the order in which they are asked.
        budget: Bytes of filters to hold; the longest segments that do not fit go without.
    """

    def __init__(self, segments: Sequence[SegmentRef], budget: int) -> None:
        self._layers = _layers(segments)
        counts = [block_count(ref) for ref in segments]
        self._base = np.zeros(len(counts), np.int64)
        self._blocks = np.zeros(len(counts), np.uint64)
        #: Segments whose filter has not been requested yet, and those whose filter is not
        #: available.
        self._unknown = np.zeros(len(counts), np.bool_)
        self._without = np.ones(len(counts), np.bool_)
        used = 1  # the first block serves all segments without a filter
        for number in sorted(range(len(counts)), key=counts.__getitem__):
            if (used + counts[number]) * _BLOCK_BYTES > budget:
                break
            self._base[number], self._blocks[number] = used, counts[number]
            self._unknown[number], self._without[number] = True, False
            used += counts[number]
        # The system provides this memory only when a filter is written to it.
        self._words: Words = np.zeros((used, _WORDS), np.uint32)

    def unknown(self, ids: Bytes) -> list[int]:
        """Return the numbers of the segments in whose range an id lies and whose filter is neither
        loaded nor known to be unavailable.
        """
        if not self._unknown.any():
            return []
        here = self._layers[:, np.unique(ids[:, 0])]
        numbers = np.unique(here[here >= 0])
        found: list[int] = numbers[self._unknown[numbers]].tolist()
        return found

    def put(self, number: int, words: Words | None) -> None:
        """Set the filter of a segment; None if it is not available."""
        if words is None:
            self._without[number] = True
        else:
            base = self._base[number]
            self._words[base : base + len(words)] = words
        self._unknown[number] = False

    def candidates(self, ids: Bytes) -> Numbers:
        """Return the segments that may have an id: their numbers, layers x n, -1 where there is
        none, in the order in which to ask them.
        """
        high, bits = _hash(ids)
        found = self._layers[:, ids[:, 0]]
        for layer in found:
            block = self._base[layer] + (high * self._blocks[layer] >> np.uint64(32)).astype(
                np.int64
            )
            # Four 64-bit words in place of eight 32-bit words: tests all of an id's bits.
            absent = (~np.take(self._words, block, axis=0) & bits).view(np.uint64)
            denied = (absent[:, 0] | absent[:, 1] | absent[:, 2] | absent[:, 3]) != 0
            layer[denied & ~self._without[layer]] = -1
        return found


def _layers(segments: Sequence[SegmentRef]) -> npt.NDArray[Any]:
    """Return, for each leading byte of an id, the segments in whose range it lies, in order:
    layers x 256, -1 where there is none.
    """
    depth = np.zeros(256, np.int64)
    layers: list[Numbers] = []
    for number, ref in enumerate(segments):
        first = ref.prefix << (8 - ref.bits) if ref.bits else 0
        span = slice(first, first + (1 << (8 - ref.bits)))
        if first > 255:
            continue  # no id begins with this byte
        at = int(depth[span].max())
        if at == len(layers):
            layers.append(np.full(256, -1, np.int64))
        layers[at][span] = number
        depth[span] = at + 1
    return np.stack(layers) if layers else np.empty((0, 256), np.int64)
