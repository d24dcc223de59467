"""The map of a space as a Merkle table: nodes of up to 64 cells of one region, named by the keyed
BLAKE3 of their records. Pure; one call handles many nodes.

A node's uncompressed bytes are its CELL records, ascending by cell. Stored, a byte says whether
they follow as they are (0) or as one zstd frame and its digest (1). Nodes lie back to back in a
pack, an object with a footer.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from itertools import pairwise

import blake3
import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from icecore.errors import Damaged
from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.format import codec
from icecore.store.format.cell import CELL, NODE_CELLS, Bytes, Records
from icecore.store.format.cipher import TAG_BYTES, opened_piece, overhead, sealed_piece
from icecore.store.format.codec import Buffer
from icecore.store.format.container import Container
from icecore.store.format.manifest import NODE_REF, Region
from icecore.store.format.manifest_rules import MAX_NODES
from icecore.store.format.names import object_name

#: One node of a pack.
PACK_ENTRY = np.dtype([("node", "u1", 32), ("offset", "<u8"), ("length", "<u4")])
_PACK_ENTRY = struct.Struct("<32sQI")

PACK = Container("nodes", b"icnodes\n", 1, PACK_ENTRY, MAX_NODES)

_PLAIN, _ZSTD = b"\0", b"\1"
_LEVEL = 1

#: Whether a codec has the number.
_KNOWN_CODECS = np.fromiter((codec.known(number) for number in range(256)), np.bool_, 256)
#: Upper bounds of a node's uncompressed and stored length.
MAX_NODE_BYTES = NODE_CELLS * CELL.itemsize
MAX_STORED_NODE_BYTES = MAX_NODE_BYTES + 1 + TAG_BYTES
#: No shard or pack is longer, so a place beyond it is invalid.
MAX_CONTAINER_BYTES = 1 << 40
#: u1[257, 32]: the bitmap of the first N pages of a cell.
_FIRST_PAGES = np.packbits(
    np.arange(CELL_PAGES) < np.arange(CELL_PAGES + 1)[:, None], axis=1, bitorder="little"
)

Indices = npt.NDArray[np.int64]


class Groups(msgspec.Struct, frozen=True):
    """A space's records cut into nodes, in (region, group) order.

    Attributes:
        records: The records of all regions, one after the other.
        starts: Index of each node's first record, and at the end the number of records.
        region: Each node's region.
        group: Each node's number in its region: cell // 64.
    """

    records: Records
    starts: Indices
    region: Indices
    group: Indices

    def __len__(self) -> int:
        return len(self.region)

    def node_bytes(self) -> list[memoryview]:
        """Return the uncompressed bytes of every node."""
        data = np.ascontiguousarray(self.records).view(np.uint8).reshape(-1).data
        edges = (self.starts * CELL.itemsize).tolist()
        return [data[a:b] for a, b in pairwise(edges)]


def group(records: Sequence[Records]) -> Groups:
    """Cut the records of a space (an array per region, each ascending by cell) into nodes.

    Raises:
        ValueError: A region's cells do not ascend.
    """
    # Not np.concatenate: it derives the common type of structured arrays pair by pair, 25 µs each.
    together = np.frombuffer(b"".join([r.tobytes() for r in records]), CELL)
    region = np.repeat(np.arange(len(records), dtype=np.int64), [len(r) for r in records])
    cell = together["cell"].astype(np.int64)
    number = cell // NODE_CELLS
    same_region = region[1:] == region[:-1]
    if (np.diff(cell)[same_region] <= 0).any():
        raise ValueError("the cells of a region must ascend")
    begins = np.ones(len(cell), np.bool_)
    begins[1:] = ~same_region | (np.diff(number) != 0)
    first: Indices = np.flatnonzero(begins)
    return Groups(
        together, np.concatenate((first, np.array([len(cell)]))), region[first], number[first]
    )


def node_ids(key: bytes, nodes: Sequence[Buffer]) -> list[bytes]:
    """Return the ids of nodes, from their uncompressed bytes."""
    return [blake3.blake3(node, key=key).digest() for node in nodes]


class NodeEncoder:
    """Compresses nodes into their stored form. Not thread-safe."""

    def __init__(self) -> None:
        self._zstd = zstandard.ZstdCompressor(
            level=_LEVEL, write_content_size=True, write_checksum=False
        )

    def encode(self, node: memoryview) -> bytes:
        """Return the stored form of one node."""
        compressed = self._zstd.compress(node)
        if len(compressed) + codec.DIGEST_BYTES >= len(node):
            return _PLAIN + node
        return b"".join((_ZSTD, compressed, codec.seal(_ZSTD, compressed)))


def place_node(key: bytes, pack: bytes, offset: int, identity: bytes, stored: bytes) -> bytes:
    """Return what goes to ``offset`` of pack ``pack`` for a node: its stored form, encrypted where
    ``key``, the repository's node key, encrypts.
    """
    return sealed_piece(key, object_name("nodes", pack), offset, identity, stored)


def encode_nodes(key: bytes, records: Sequence[Records]) -> list[tuple[bytes, bytes]]:
    """Return all nodes of a space, in (region, group) order, as ``(id, stored bytes)``; ``key`` is
    the repository's node key.
    """
    nodes = group(records).node_bytes()
    encoder = NodeEncoder()
    return [
        (identity, encoder.encode(node))
        for identity, node in zip(node_ids(key, nodes), nodes, strict=True)
    ]


class NodeDecoder:
    """Reads stored nodes. Not thread-safe.

    Args:
        key: The repository's node key.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._zstd = zstandard.ZstdDecompressor()

    def plain(self, stored: memoryview, identity: bytes) -> Buffer:
        """Return the uncompressed bytes of a node.

        Raises:
            Damaged: They are not those of node ``identity``. At most a node's bytes are allocated.
        """
        node: Buffer
        if stored[:1] == _PLAIN:
            node = stored[1:]
        elif stored[:1] == _ZSTD:
            try:
                body = codec.unseal(stored)[1:]
                frame = zstandard.get_frame_parameters(body[:18])
                if not 0 < frame.content_size <= MAX_NODE_BYTES or frame.dict_id:
                    raise _damaged(identity, "its zstd frame is not a node's")
                node = self._zstd.decompress(body, max_output_size=MAX_NODE_BYTES)
            except (ValueError, zstandard.ZstdError) as error:
                raise _damaged(identity, str(error)) from error
        else:
            raise _damaged(identity, "it has an unknown form")
        if not node or len(node) % CELL.itemsize or len(node) > MAX_NODE_BYTES:
            raise _damaged(identity, f"it has {len(node)} bytes")
        if blake3.blake3(node, key=self._key).digest() != identity:
            raise _damaged(identity, "its records do not match its id")
        return node

    def decode(
        self,
        stored: Sequence[memoryview],
        refs: npt.NDArray[np.void],
        take: Callable[[int], bool] = lambda count: True,
    ) -> tuple[Records, Indices]:
        """Decode and check many nodes of a space.

        Args:
            stored: Their stored bytes.
            refs: Their NODE_REF records.
            take: Takes memory for so many bytes of records; returns whether there is enough.

        Returns:
            All records, one after the other, and how many each node has.

        Raises:
            Damaged: A node is not what was written, or not of the group that its reference says; or
                there is not enough memory for its records.
        """
        identities = refs["node"].tobytes()
        if overhead(self._key):
            stored = [self._opened(s, refs[i]) for i, s in enumerate(stored)]
        plain = []
        for i, s in enumerate(stored):
            plain.append(self.plain(s, identities[32 * i : 32 * i + 32]))
            if not take(len(plain[-1])):
                raise _damaged(
                    identities[32 * i : 32 * i + 32],
                    "with it, the records of the snapshot's cells take more memory than this machine has to spare",
                )
        counts = np.fromiter((len(p) // CELL.itemsize for p in plain), np.int64, len(plain))
        records = np.frombuffer(b"".join(plain), CELL)
        owner = np.repeat(np.arange(len(plain)), counts)
        wrong = _wrong(records, refs["group"].astype(np.int64)[owner], owner, overhead(self._key))
        if wrong.any():
            node = int(owner[np.flatnonzero(wrong)[0]])
            raise _damaged(
                identities[32 * node : 32 * node + 32], "a record in it contradicts itself"
            )
        return records, counts

    def verify(self, stored: memoryview, ref: np.void) -> None:
        """Check the stored bytes of one node, regardless of its group.

        Raises:
            Damaged: They are not what was written.
        """
        self.plain(
            self._opened(stored, ref) if overhead(self._key) else stored, ref["node"].tobytes()
        )

    def _opened(self, stored: memoryview, ref: np.void) -> memoryview:
        identity, pack = ref["node"].tobytes(), object_name("nodes", ref["pack"].tobytes())
        try:
            return memoryview(opened_piece(self._key, pack, int(ref["offset"]), identity, stored))
        except ValueError as error:
            raise _damaged(identity, f"{error} (in {pack})") from error


def decode_node(stored: Buffer, identity: bytes, key: bytes) -> Records:
    """Return the CELL records of one node, given its stored form (decrypted).

    Raises:
        Damaged: It is not what was written.
    """
    return np.frombuffer(NodeDecoder(key).plain(memoryview(stored), identity), CELL)


def _wrong(records: Records, groups: Indices, owner: Indices, tag: int) -> npt.NDArray[np.bool_]:
    """Return which records cannot have been written: a wrong group or order, a page both data and
    zero, a codec or length that does not fit the pages.

    Args:
        tag: Bytes by which stored chunks are longer because they are encrypted.
    """
    cell = records["cell"].astype(np.int64)
    wrong: npt.NDArray[np.bool_] = cell // NODE_CELLS != groups
    wrong[1:] |= (np.diff(cell) <= 0) & (owner[1:] == owner[:-1])
    wrong |= (records["data"] & records["zero"]).any(axis=1)
    pages = np.bitwise_count(records["data"]).sum(axis=1, dtype=np.int64)
    numbers, length = records["place"]["codec"], records["place"]["length"].astype(np.int64)
    delta = numbers & codec.DELTA != 0
    wrong |= (
        ~_KNOWN_CODECS[numbers]
        | (length > pages * PAGE + tag)
        | ((numbers == codec.ZERO) != (length == 0))
    )
    wrong |= (numbers == codec.RAW) & (length != pages * PAGE + tag)
    base_numbers, base_length = records["base_place"]["codec"], records["base_place"]["length"]
    wrong |= delta != records["base"].any(axis=1)
    wrong |= (
        ~_KNOWN_CODECS[base_numbers]
        | (base_numbers & codec.DELTA != 0)
        | (base_length > CELL_BYTES + tag)
        | (delta != (base_length > 0))
    )
    for place in ("place", "base_place"):
        wrong |= records[place]["offset"] > MAX_CONTAINER_BYTES
    return wrong


def check_regions(regions: Sequence[Region], records: Records, region: Indices) -> None:
    """Check that cells lie in their regions, with all their pages. As regions are disjoint, this
    means that no page of a space is in two cells.

    Args:
        regions: The regions of a space.
        records: CELL records.
        region: The region of each.

    Raises:
        ValueError: A cell lies outside its region.
    """
    if not len(records):
        return
    bounds = np.array(
        [(one.origin, one.start, one.start + one.length) for one in regions], np.int64
    )
    origin, start, end = bounds[region].T
    base = origin + records["cell"].astype(np.int64) * CELL_BYTES
    if ((base >= end) | (base + CELL_BYTES <= start)).any():
        raise ValueError("a cell lies outside of its region")
    edges = np.flatnonzero((base < start) | (base + CELL_BYTES > end))
    base, start, end = base[edges], start[edges], end[edges]
    before, until = (np.clip(-(-(bound - base) // PAGE), 0, CELL_PAGES) for bound in (start, end))
    there = records["data"][edges] | records["zero"][edges]
    if (there & ~(_FIRST_PAGES[until] & ~_FIRST_PAGES[before])).any():
        raise ValueError("a page of a cell lies outside its region")


def pack_footer(key: bytes, name: bytes, ids: Sequence[bytes], lengths: Sequence[int]) -> bytes:
    """Return the footer of a pack whose nodes lie one after the other; ``key`` is the repository's
    shard key, as for every footer.
    """
    table, offset = [], 0
    for identity, length in zip(ids, lengths, strict=True):
        table.append(_PACK_ENTRY.pack(identity, offset, length))
        offset += length
    return PACK.footer(key, name, b"".join(table), offset)


def parse_pack_footer(key: bytes, name: bytes, size: int, footer: Buffer) -> Records:
    """Return the nodes of a pack: PACK_ENTRY records in order.

    Raises:
        Damaged, FormatTooNew: As :meth:`Container.parse_footer`.
    """
    entries = PACK.parse_footer(key, name, size, footer)
    if ((entries["length"] <= 1) | (entries["length"] > MAX_STORED_NODE_BYTES)).any():
        raise PACK.damaged(name, "a node has an impossible length")
    return entries


def parse_refs(nodes: bytes, regions: int) -> npt.NDArray[np.void]:
    """Return a space's NODE_REF records, checked.

    Raises:
        ValueError: Not whole records, not ascending, of a region that is not there, or of a length
            that no node has.
    """
    if len(nodes) % NODE_REF.itemsize:
        raise ValueError("not whole node references")
    refs = np.frombuffer(nodes, NODE_REF)
    order = refs["region"].astype(np.int64) << 32 | refs["group"].astype(np.int64)
    if (np.diff(order) <= 0).any() or (refs["region"] >= regions).any():
        raise ValueError("node references that do not ascend or have no region")
    if ((refs["length"] <= 1) | (refs["length"] > MAX_STORED_NODE_BYTES)).any():
        raise ValueError("a node reference of a length that no node has")
    if (refs["offset"] > MAX_CONTAINER_BYTES).any():
        raise ValueError("a node reference beyond the size of any pack")
    return refs


def _damaged(identity: bytes, why: str) -> Damaged:
    return Damaged("node", identity.hex(), why)


__all__ = [
    "MAX_STORED_NODE_BYTES",
    "PACK",
    "PACK_ENTRY",
    "Bytes",
    "Groups",
    "NodeDecoder",
    "NodeEncoder",
    "check_regions",
    "decode_node",
    "encode_nodes",
    "group",
    "node_ids",
    "pack_footer",
    "parse_pack_footer",
    "parse_refs",
]
