"""Maps: records become nodes and come back. A node that differs from its reference is reported as
damaged. Many small regions are fast.
"""

from __future__ import annotations

import time

import hypothesis.strategies as st
import numpy as np
import pytest
import zstandard
from hypothesis import given, settings

from icecore.errors import Damaged
from icecore.sizes import PAGE
from icecore.store.format import cellmap, codec
from icecore.store.format.cell import CELL, NODE_CELLS, Records
from icecore.store.format.cellmap import (
    MAX_STORED_NODE_BYTES,
    PACK,
    NodeDecoder,
    decode_node,
    encode_nodes,
    group,
    parse_refs,
)
from icecore.store.format.container import TAIL_BYTES
from icecore.store.format.keys import Keys
from icecore.store.format.manifest import NODE_REF, Region, Space
from icecore.store.snapshot.packs import MAX_PACKS, MapWriter

KEY = bytes(range(32))
KEYS = Keys.derive(bytes(32))


def records_of(cells: list[int], seed: int = 0) -> Records:
    random = np.random.default_rng(seed)
    records = np.zeros(len(cells), CELL)
    records["cell"] = cells
    records["data"] = 0x0F
    records["zero"] = 0x10
    records["chunk"] = random.integers(0, 256, (len(cells), 32))
    place = records["place"]
    place["shard"], place["offset"], place["length"], place["codec"] = (
        7,
        np.arange(len(cells)) * 1000,
        900,
        codec.ZSTD,
    )
    return records


def refs_of(
    nodes: list[tuple[bytes, bytes]], records: list[Records]
) -> np.ndarray[tuple[int], np.dtype[np.void]]:
    groups = group(records)
    refs = np.zeros(len(nodes), NODE_REF)
    refs["region"], refs["group"] = groups.region, groups.group
    for at, (identity, stored) in enumerate(nodes):
        refs["node"][at] = np.frombuffer(identity, np.uint8)
        refs["length"][at] = len(stored)
    return refs


@settings(max_examples=50, deadline=None)
@given(st.lists(st.lists(st.integers(0, 1000), unique=True, max_size=80).map(sorted), max_size=6))
def test_records_come_back(regions: list[list[int]]) -> None:
    records = [records_of(cells, seed) for seed, cells in enumerate(regions)]
    nodes = encode_nodes(KEY, records)
    assert len(nodes) == sum(len({cell // NODE_CELLS for cell in cells}) for cells in regions)
    back, counts = NodeDecoder(KEY).decode(
        [memoryview(stored) for _, stored in nodes], refs_of(nodes, records)
    )
    assert counts.sum() == len(back)
    expected = np.concatenate(records) if records else np.empty(0, CELL)
    assert back.tobytes() == expected.tobytes()


def test_equal_records_have_equal_ids_whatever_their_region() -> None:
    one, other = records_of([3, 5]), records_of([3, 5])
    (first, _), (second, _) = encode_nodes(KEY, [one, other])
    assert first == second
    other["zero"][1, 0] ^= 0x20
    assert encode_nodes(KEY, [other])[0][0] != first
    assert encode_nodes(bytes(32), [one])[0][0] != first


def test_cells_must_ascend() -> None:
    with pytest.raises(ValueError, match="ascend"):
        group([records_of([3, 3])])
    group([records_of([3]), records_of([3])])


@pytest.mark.parametrize("cells", [1, 20])
def test_every_flipped_bit_of_a_node_is_seen(cells: int) -> None:
    ((identity, stored),) = encode_nodes(KEY, [records_of(list(range(cells)))])
    assert len(decode_node(stored, identity, KEY)) == cells
    for at in range(len(stored)):
        for bit in range(8):
            damaged = bytearray(stored)
            damaged[at] ^= 1 << bit
            with pytest.raises(Damaged) as caught:
                decode_node(bytes(damaged), identity, KEY)
            assert (caught.value.kind, caught.value.name) == ("node", identity.hex())
    for cut in (0, 1, 9, len(stored) // 2, len(stored) - 1):
        with pytest.raises(Damaged):
            decode_node(stored[:cut], identity, KEY)
    with pytest.raises(Damaged):
        decode_node(stored, bytes(32), KEY)


def test_incompressible_nodes_are_kept_as_they_are() -> None:
    record = np.frombuffer(np.random.default_rng(0).bytes(CELL.itemsize), CELL)
    ((identity, stored),) = encode_nodes(KEY, [record])
    assert stored == b"\0" + record.tobytes()
    assert decode_node(stored, identity, KEY).tobytes() == record.tobytes()
    with pytest.raises(Damaged):
        decode_node(b"\1" + stored[1:], identity, KEY)


def test_a_bomb_is_refused_by_its_header() -> None:
    frame = b"\1" + zstandard.ZstdCompressor().compress(bytes(64 << 20))
    with pytest.raises(Damaged, match="not a node's"):
        decode_node(frame + codec.seal(frame), bytes(32), KEY)


def wrong(**changes: int) -> Records:
    records = records_of([1, 2])
    for name, value in changes.items():
        where = records
        *path, last = name.split("__")
        for step in path:
            where = where[step]
        where[last] = value
    return records


@pytest.mark.parametrize(
    "records",
    [
        wrong(data=0xFF),
        wrong(place__codec=77),
        wrong(place__length=100 * PAGE * 40),
        wrong(place__length=0),
        wrong(place__codec=codec.RAW),
        wrong(place__codec=codec.XOR | codec.ZSTD),
        wrong(base=1),
        wrong(base_place__codec=codec.XOR | codec.ZSTD),
        wrong(base_place__length=5),
        records_of([2, 1]),
    ],
)
def test_records_that_cannot_be(records: Records) -> None:
    """They have the id that their reference says: a faulty writer created them."""
    node = records.tobytes()
    ((identity, stored),) = [(cellmap.node_ids(KEY, [node])[0], b"\0" + node)]
    refs = np.zeros(1, NODE_REF)
    refs["node"] = np.frombuffer(identity, np.uint8)
    with pytest.raises(Damaged, match="contradicts"):
        NodeDecoder(KEY).decode([memoryview(stored)], refs)


def test_a_node_of_another_group_is_refused() -> None:
    records = [records_of([70])]
    nodes = encode_nodes(KEY, records)
    refs = refs_of(nodes, records)
    refs["group"] = 0
    with pytest.raises(Damaged, match="contradicts"):
        NodeDecoder(KEY).decode([memoryview(nodes[0][1])], refs)


def test_references_that_cannot_be() -> None:
    refs = np.zeros(2, NODE_REF)
    refs["group"], refs["length"] = [0, 1], 50
    assert len(parse_refs(refs.tobytes(), 1)) == 2
    for nodes, regions in (
        (refs.tobytes()[:-1], 1),
        (refs[::-1].tobytes(), 1),
        (refs.tobytes(), 0),
    ):
        with pytest.raises(ValueError, match="node references"):
            parse_refs(nodes, regions)
    for length in (0, 1, MAX_STORED_NODE_BYTES + 1, 1 << 31):
        refs["length"][1] = length
        with pytest.raises(ValueError, match="length"):
            parse_refs(refs.tobytes(), 1)


def space(records: list[Records], nodes: bytes) -> Space:
    return Space("process", "1", 0, [Region(0, 1 << 30, 0) for _ in records], nodes)


def test_packs() -> None:
    records = [records_of(list(range(200))), records_of([5])]
    maps = MapWriter(KEYS)
    refs = parse_refs(maps.add(records, None), 2)
    parts = maps.finish()
    assert parts is not None
    pack = b"".join(parts)
    where = PACK.parse_tail(maps.name, len(pack), pack[-TAIL_BYTES:])
    entries = cellmap.parse_pack_footer(KEYS.shard, maps.name, len(pack), pack[where.offset :])
    assert [e.tobytes() for e in entries["node"]] == [r.tobytes() for r in refs["node"]]
    assert (entries["offset"] == refs["offset"]).all()
    assert (entries["length"] == refs["length"]).all()
    for at in range(where.offset, len(pack)):
        damaged = bytearray(pack)
        damaged[at] ^= 0x10
        with pytest.raises(Damaged) as caught:
            cellmap.parse_pack_footer(
                KEYS.shard, maps.name, len(pack), bytes(damaged[where.offset :])
            )
        assert (caught.value.kind, caught.value.name) == ("nodes", f"nodes/{maps.name.hex()}")


def test_equal_nodes_of_the_parent_are_reused_and_packs_stay_few() -> None:
    groups = 40
    records = records_of(list(range(groups * NODE_CELLS)))
    parent: Space | None = None
    sizes = []
    for generation in range(12):
        records = records.copy()
        records["zero"][generation * NODE_CELLS, 0] ^= 0x20
        maps = MapWriter(KEYS)
        now = space([records], maps.add([records], parent))
        refs = parse_refs(now.nodes, 1)
        packs = {pack.tobytes() for pack in refs["pack"]}
        assert len(refs) == groups
        assert len(packs) <= MAX_PACKS
        assert refs["node"].tobytes() == b"".join(
            cellmap.node_ids(KEYS.node, group([records]).node_bytes())
        )
        sizes.append(refs["pack"].tobytes().count(maps.name))
        parent = now
    assert sizes[0] == groups
    assert sizes[1:3] == [1, 1]
    assert max(sizes[1:]) <= 12


def test_a_parents_references_that_cannot_be_are_damage() -> None:
    records = [records_of([1])]
    with pytest.raises(Damaged):
        MapWriter(KEYS).add(records, space(records, b"x" * 10))


def test_many_small_regions_are_quick() -> None:
    """20 000 regions of one cell each, as in a process with that many VMAs; the bound is ten times
    the usual duration.
    """
    records = [records_of([0], seed) for seed in range(20_000)]
    started = time.process_time()
    maps = MapWriter(KEYS)
    refs = parse_refs(maps.add(records, None), len(records))
    stored = maps.finish()
    assert stored is not None
    nodes = memoryview(bytes(stored[0]))
    pieces = [
        nodes[o : o + n]
        for o, n in zip(refs["offset"].tolist(), refs["length"].tolist(), strict=True)
    ]
    back, _ = NodeDecoder(KEYS.node).decode(pieces, refs)
    assert time.process_time() - started < 5
    assert back.tobytes() == np.concatenate(records).tobytes()
