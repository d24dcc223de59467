"""The index segment, an immutable sorted piece of the index (chunk id → place): encoding, search
and merge. Pure; a block is verified before it is searched.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence

import blake3
import msgspec
import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged, FormatTooNew
from icecore.store.format.cell import PLACE, Bytes, Records
from icecore.store.format.cipher import (
    ENCRYPTED,
    Buffer,
    flag,
    opened_piece,
    overhead,
    sealed_piece,
)

#: One row of a segment, 61 bytes: a chunk's id and where its stored bytes lie.
ENTRY = np.dtype([("chunk", "u1", 32), ("place", PLACE)])
#: Entries in one block, the unit that is fetched and verified at a time (62 464 bytes).
BLOCK_ENTRIES = 1024
BLOCK_BYTES = BLOCK_ENTRIES * ENTRY.itemsize
#: One row of the fence table: the leading 8 bytes of a block's first chunk id, and the block's
#: digest.
FENCE = np.dtype([("first", ">u8"), ("digest", "u1", 32)])

TITLE = "index segment"
MAGIC = b"ICESEGM"
VERSION = 1
HEADER_BYTES = 56
MAX_ENTRIES = 1 << 26
#: What its encrypted pieces are bound to besides their place.
_FENCES, _BLOCK = b"fences", b"block"
#: magic (7 bytes), version, prefix bits, prefix, reserved (6 bytes of zero), entries; the digest of
#: header and fences follows, then the fences.
_HEADER = struct.Struct("<7sBBB6sQ")

Mask = npt.NDArray[np.bool_]


def leading(ids: Bytes) -> npt.NDArray[np.uint64]:
    """Return the leading 8 bytes of each 32-byte id as a number that sorts like the id."""
    return np.ascontiguousarray(ids[:, :8]).view(">u8")[:, 0].astype(np.uint64)


class Head(msgspec.Struct, frozen=True):
    """The beginning of a segment: all that is needed to fetch and verify single blocks.

    Attributes:
        count: Entries in the segment.
        fences: One ``FENCE`` per block.
        first: The fences' leading numbers in native order.
        tag: Bytes that encryption adds to the fence table and to each block.
    """

    name: str
    count: int
    bits: int
    prefix: int
    fences: Records
    first: npt.NDArray[np.uint64]
    tag: int = 0

    @property
    def start(self) -> int:
        """Offset of the first block in bytes."""
        return HEADER_BYTES + self.fences.nbytes + self.tag

    @property
    def length(self) -> int:
        """Length of the whole object in bytes."""
        return self.start + self.count * ENTRY.itemsize + len(self.fences) * self.tag

    def block(self, number: int) -> tuple[int, int]:
        """Return the offset and length of a block in bytes."""
        entries = min(BLOCK_ENTRIES, self.count - number * BLOCK_ENTRIES)
        return self.start + number * (BLOCK_BYTES + self.tag), entries * ENTRY.itemsize + self.tag

    def blocks_of(self, keys: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return the block in which each id (by its leading number) would be.

        Ids that share their leading 8 bytes with the first id of a block may also lie at the end of
        the block before; they are then not found. That costs a duplicate chunk once in 2^64, never
        a wrong one.
        """
        return np.maximum(np.searchsorted(self.first, keys, side="right").astype(np.int64) - 1, 0)

    def blocks_between(self, low: int, high: int) -> tuple[int, int]:
        """Return the blocks, as first and last + 1, that may hold ids whose leading numbers are at
        least ``low`` and less than ``high`` (at most 2^64).
        """
        last = int(np.searchsorted(self.first, np.uint64(high - 1), side="right"))
        # The block before the first that begins with such an id may end with one.
        return max(0, int(np.searchsorted(self.first, np.uint64(low))) - 1) if last else 0, last


def head_bytes(count: int, key: bytes) -> int:
    """Return the length in bytes of the head of a segment with ``count`` entries written under
    ``key``.
    """
    return HEADER_BYTES + -(-count // BLOCK_ENTRIES) * FENCE.itemsize + overhead(key)


def segment_bytes(count: int, key: bytes) -> int:
    """Return the length in bytes of a segment with ``count`` entries written under ``key``."""
    return (
        head_bytes(count, key) + count * ENTRY.itemsize + -(-count // BLOCK_ENTRIES) * overhead(key)
    )


def parse_head(
    name: str, data: bytes | memoryview, key: bytes, digest: bytes | None = None
) -> Head:
    """Return the head in the first bytes of segment ``name``; ``data`` may be longer than it.

    Args:
        digest: The digest by which the state refers to the segment.

    Raises:
        Damaged: It is not what was written.
        FormatTooNew: It was written by a later version.
    """
    view = memoryview(data)
    if view.nbytes < HEADER_BYTES:
        raise Damaged(TITLE, name, f"it has {view.nbytes} bytes, fewer than its header")
    magic, version, bits, prefix, reserved, count = _HEADER.unpack(view[: _HEADER.size])
    if magic != MAGIC:
        raise Damaged(TITLE, name, f"it begins with {magic!r} instead of {MAGIC!r}")
    if not 0 < count <= MAX_ENTRIES:
        raise Damaged(
            TITLE,
            name,
            f"it claims {count} entries, more than the {MAX_ENTRIES} that it can have, or none",
        )
    end = head_bytes(count, key)
    if view.nbytes < end:
        raise Damaged(TITLE, name, f"its fence table ends after {view.nbytes} of {end} bytes")
    written = bytes(view[_HEADER.size : HEADER_BYTES])
    if _head_digest(bytes(view[: _HEADER.size]), view[HEADER_BYTES:end], key) != written:
        raise Damaged(TITLE, name, "the digest of its header does not match its bytes")
    if digest is not None and digest != written:
        raise Damaged(TITLE, name, "it is not the one that was referred to")
    if version & ~ENCRYPTED > VERSION:
        raise FormatTooNew(
            f"{TITLE} {name} has version {version & ~ENCRYPTED}, this icecore reads up to {VERSION}",
            cure="use a newer icecore",
        )
    if bits > 8 or reserved != bytes(6):
        raise Damaged(TITLE, name, "its header has values that are not defined")
    if version & ENCRYPTED != flag(key):
        raise Damaged(TITLE, name, "its encryption differs from its repository's")
    table = _opened(name, key, HEADER_BYTES, _FENCES, bytes(view[HEADER_BYTES:end]))
    fences: Records = np.frombuffer(table, FENCE)
    return Head(name, count, bits, prefix, fences, fences["first"].astype(np.uint64), overhead(key))


def _opened(name: str, key: bytes, offset: int, what: bytes, stored: Buffer) -> Buffer:
    try:
        return opened_piece(key, name, offset, what, stored)
    except ValueError as error:
        raise Damaged(TITLE, name, f"its {what.decode()}: {error}") from error


def _head_digest(header: bytes, fences: bytes | memoryview, key: bytes) -> bytes:
    hasher = blake3.blake3(header, key=key)
    hasher.update(fences)
    return hasher.digest()


def verify_block(
    head: Head, number: int, data: bytes | bytearray | memoryview, key: bytes
) -> Records:
    """Return the entries of a block.

    Raises:
        Damaged: Its bytes are not what was written.
    """
    data = _opened(head.name, key, head.block(number)[0], _BLOCK, data)
    if blake3.blake3(data, key=key).digest() != head.fences[number]["digest"].tobytes():
        raise Damaged(TITLE, head.name, f"the digest of block {number} does not match its bytes")
    return np.frombuffer(data, ENTRY)


def parse_segment(
    name: str, data: bytes | memoryview, key: bytes, digest: bytes | None = None
) -> tuple[Head, Records]:
    """Return the head and all entries of segment ``name``, every block verified.

    Raises:
        Damaged: It is not what was written.
        FormatTooNew: It was written by a later version.
    """
    view = memoryview(data)
    head = parse_head(name, view, key, digest)
    if view.nbytes != head.length:
        raise Damaged(TITLE, name, f"it has {view.nbytes} bytes instead of {head.length}")
    blocks = []
    for number in range(len(head.fences)):
        offset, length = head.block(number)
        blocks.append(verify_block(head, number, view[offset : offset + length], key))
    if head.tag:
        return head, np.concatenate(blocks)
    return head, np.frombuffer(view[head.start :], ENTRY)


def encode_segment(
    entries: Records, key: bytes, *, bits: int = 0, prefix: int = 0, name: str = ""
) -> tuple[list[bytes | memoryview], bytes]:
    """Return the parts of a segment that holds ``entries`` (sorted, as ``sort_entries`` makes
    them), and its digest.

    Args:
        name: The object's name; only encryption needs it.
    """
    if not 0 < len(entries) <= MAX_ENTRIES:
        raise ValueError(f"a segment has 1 to {MAX_ENTRIES} entries, not {len(entries)}")
    entries = np.ascontiguousarray(entries)
    body = entries.view(np.uint8).data
    fences = np.zeros(-(-len(entries) // BLOCK_ENTRIES), FENCE)
    fences["first"] = leading(entries["chunk"][::BLOCK_ENTRIES])
    for number in range(len(fences)):
        block = body[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
        fences["digest"][number] = np.frombuffer(blake3.blake3(block, key=key).digest(), np.uint8)
    header = _HEADER.pack(MAGIC, VERSION | flag(key), bits, prefix, bytes(6), len(entries))
    table = sealed_piece(key, name, HEADER_BYTES, _FENCES, fences.tobytes())
    digest = _head_digest(header, table, key)
    parts: list[bytes | memoryview] = [header + digest + table]
    if not overhead(key):
        return [*parts, body], digest
    at = len(parts[0])
    for number in range(len(fences)):
        parts.append(
            sealed_piece(
                key, name, at, _BLOCK, body[number * BLOCK_BYTES : (number + 1) * BLOCK_BYTES]
            )
        )
        at += len(parts[-1])
    return parts, digest


def make_entries(ids: Bytes, places: Records) -> Records:
    """Return entries of ``ids`` (n x 32) and their ``PLACE`` records."""
    entries = np.zeros(len(ids), ENTRY)
    entries["chunk"] = ids
    entries["place"] = places
    return entries


def sort_entries(entries: Records) -> Records:
    """Return ``entries`` in ascending order of chunk id; of several with the same id, the first
    one.
    """
    if len(entries) == 0:
        return entries
    keys = leading(entries["chunk"])
    order = np.argsort(keys, kind="stable")
    ordered, keys = entries[order], keys[order]
    ties = np.flatnonzero(keys[1:] == keys[:-1])
    if len(ties) == 0:
        return ordered
    same = (ordered["chunk"][ties] == ordered["chunk"][ties + 1]).all(axis=1)
    if not same.all():  # different ids with equal leading bytes: order by all of them
        columns = np.ascontiguousarray(entries["chunk"]).view(">u8")
        ordered = entries[np.lexsort(columns.T[::-1])]
    chunks = ordered["chunk"]
    keep = np.ones(len(ordered), np.bool_)
    keep[1:] = (chunks[1:] != chunks[:-1]).any(axis=1)
    return ordered[keep]


def merge(sources: Sequence[Records], dead: Sequence[bytes] | frozenset[bytes] = ()) -> Records:
    """Return one sorted run of all ``sources`` (those given first win) without entries in the
    shards ``dead``.
    """
    entries = np.concatenate(sources) if sources else np.zeros(0, ENTRY)
    if len(dead) and len(entries):
        entries = entries[~in_shards(entries, dead)]
    return sort_entries(entries)


def in_shards(entries: Records, shards: Sequence[bytes] | frozenset[bytes]) -> Mask:
    """Return which entries lie in one of ``shards`` (16-byte ids)."""
    return of_shards(entries["place"]["shard"], shards)


def of_shards(held: Bytes, shards: Sequence[bytes] | frozenset[bytes]) -> Mask:
    """Return which of ``held`` (n x 16 bytes) are among ``shards``."""
    wanted = np.frombuffer(b"".join(shards), np.uint8).reshape(-1, 16)
    held = np.ascontiguousarray(held)
    # The leading 8 bytes decide nearly all; fixed-width byte strings compare exactly but slowly.
    mask = np.isin(leading(held), leading(wanted))
    candidates = np.flatnonzero(mask)
    mask[candidates] = np.isin(held[candidates].view("S16")[:, 0], wanted.view("S16")[:, 0])
    return mask


def partition(entries: Records, bits: int) -> Iterator[tuple[int, Records]]:
    """Yield ``entries`` (sorted) cut by the leading ``bits`` bits (at most 8) of their ids:
    ``(prefix, entries)`` of those that are not empty.
    """
    first = entries["chunk"][:, 0] >> (8 - bits) if bits else np.zeros(len(entries), np.uint8)
    edges = np.searchsorted(first, np.arange((1 << bits) + 1))
    for prefix in range(1 << bits):
        if edges[prefix] < edges[prefix + 1]:
            yield prefix, entries[edges[prefix] : edges[prefix + 1]]


#: Fewer ids are looked up one by one: the vectorised calls take longer.
_FEW = 3


def search_block(entries: Records, ids: Bytes) -> tuple[Mask, npt.NDArray[np.int64]]:
    """Search in the sorted entries of one or a few blocks; see `search`."""
    keys = leading(entries["chunk"])
    if len(ids) >= _FEW:
        return search(entries, keys, ids)
    found, where = np.zeros(len(ids), np.bool_), np.zeros(len(ids), np.int64)
    for number, wanted in enumerate(leading(ids)):
        at = int(keys.searchsorted(wanted))
        while at < len(keys) and keys[at] == wanted:
            if (entries["chunk"][at] == ids[number]).all():
                found[number], where[number] = True, at
                break
            at += 1
    return found, where


def search(
    entries: Records,
    keys: npt.NDArray[np.uint64],
    ids: Bytes,
    order: npt.NDArray[np.int64] | None = None,
) -> tuple[Mask, npt.NDArray[np.int64]]:
    """Look ``ids`` up in ``entries``: which were found, and where (0 for those not found).

    Args:
        keys: The entries' leading numbers, ascending.
        order: Which entry each of ``keys`` belongs to, if the entries are in another order.
    """
    wanted = leading(ids)
    # Sorting the queries is cheaper than looking them up out of order, and taking whole records is
    # cheaper than gathering one field of them.
    ascending = np.argsort(wanted)
    at = np.empty(len(ids), np.int64)
    at[ascending] = np.searchsorted(keys, wanted[ascending])
    found = np.zeros(len(ids), np.bool_)
    open_ = np.flatnonzero(at < len(keys))
    open_ = open_[keys[at[open_]] == wanted[open_]]
    while len(open_):
        rows = at[open_] if order is None else order[at[open_]]
        match = (np.take(entries, rows)["chunk"] == ids[open_]).all(axis=1)
        found[open_[match]] = True
        open_ = open_[~match]
        at[open_] += 1
        open_ = open_[at[open_] < len(keys)]
        open_ = open_[keys[at[open_]] == wanted[open_]]
    at[~found] = 0
    if order is not None and len(order):
        at = order[at]
    return found, at
