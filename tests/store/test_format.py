"""docs/reference/format.md and the code agree on magics, bounds, sizes and key names; and fixed bytes that
every later version must read.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

from icecore.store.format import segment
from icecore.store.format.envelope import HEADER_BYTES, ObjectKind
from icecore.store.format.filters import (
    BITS,
    FILTER_KIND,
    LARGE_BITS,
    LARGE_ENTRIES,
    block_count,
    decode_filter,
    encode_filter,
)
from icecore.store.format.hints import HINTS_KIND
from icecore.store.format.keys import CONFIG_KIND, ENCRYPTED_FORMAT, FORMAT, KEY_KIND, USES
from icecore.store.format.manifest import MANIFEST_KIND, NODE_REF
from icecore.store.format.names import (
    KINDS,
    PREFIX,
    filter_name,
    heartbeat_name,
    key_name,
    log_name,
    object_name,
)
from icecore.store.format.state import (
    ENTRY_KIND,
    NAME_BYTES,
    NAMES_KIND,
    PAGE_KIND,
    REMEMBERED,
    LogState,
    SegmentRef,
    SnapshotRecord,
    decode_entry,
)
from icecore.store.log import catalog, entries, index
from icecore.store.log.session import BEAT_KIND

DOCUMENT = (Path(__file__).parents[2] / "docs" / "reference" / "format.md").read_text()
#: Without its line ends.
PROSE = " ".join(DOCUMENT.split())
ENVELOPES = [
    CONFIG_KIND,
    KEY_KIND,
    ENTRY_KIND,
    PAGE_KIND,
    NAMES_KIND,
    MANIFEST_KIND,
    FILTER_KIND,
    HINTS_KIND,
    BEAT_KIND,
]


@pytest.mark.parametrize("kind", ENVELOPES, ids=lambda kind: kind.title)
def test_magics_and_bounds(kind: ObjectKind) -> None:
    magic = kind.magic.decode().replace("\0", "\\0")
    assert f"`{magic}`" in DOCUMENT and len(kind.magic) == 7 and kind.version == 1
    rows = [
        row.split("|")[1:3]
        for row in DOCUMENT.splitlines()
        if re.match(r"\| .* \| \d+ (K|M|G)iB \|", row)
    ]
    bounds = {
        title.strip(): int(bound.split()[0]) << {"KiB": 10, "MiB": 20, "GiB": 30}[bound.split()[1]]
        for titles, bound in rows
        for title in titles.split(",")
    }
    assert bounds[kind.title] == kind.limit
    assert len({kind.magic for kind in ENVELOPES}) == len(ENVELOPES)


def test_names_are_as_documented() -> None:
    identity = bytes.fromhex("00112233445566778899aabbccddeeff")
    for kind in KINDS:
        name = object_name(kind, identity)
        shape = name.replace(identity.hex(), "<id>").replace("/00/", "/<xx>/")
        assert f"| `{shape}` |" in DOCUMENT
        assert name.startswith(PREFIX[kind])
    assert log_name(1) == "log/fffffffffffffffe" and key_name(0) == "keys/00000000"
    assert heartbeat_name("ab" * 16, 3) == f"sessions/{'ab' * 16}/0000000000000003"
    assert filter_name(identity) == f"filters/{identity.hex()}"
    kinds = ", ".join(f"{number} {kind}" for number, kind in enumerate(KINDS))
    assert kinds in PROSE and NAME_BYTES == 17


def test_numbers_are_as_documented() -> None:
    assert f"array of {NODE_REF.itemsize}-byte records" in PROSE
    assert (
        f"| | {segment.ENTRY.itemsize}·n |" in PROSE
        and f"{segment.FENCE.itemsize}·⌈n/1024⌉" in PROSE
    )
    assert (
        segment.BLOCK_ENTRIES == 1024
        and segment.MAX_ENTRIES == 1 << 26
        and index.SPLIT_ENTRIES == 1 << 20
    )
    assert (
        f"of {index.FILTER_ENTRIES} entries or more ({index.FILTER_ENTRIES // 8} where" in PROSE
        and f"⌈{BITS}·n/256⌉ blocks of" in PROSE
    )
    assert f"(⌈{LARGE_BITS}·n/256⌉ where `bits` is 8 and they are {LARGE_ENTRIES} or more)" in PROSE
    counts = [
        block_count(SegmentRef(bytes(16), bytes(32), 1, count, bits))
        for bits in (6, 8)
        for count in (1000, 131071, 131072, 1 << 20)
    ]
    assert counts == [63, 8192, 8192, 65536, 63, 8192, 6656, 53248]
    assert (
        index.FAN_IN == 8
        and catalog.TAIL_RECORDS == 32
        and catalog.FAN_IN == 8
        and catalog.PAGE_RECORDS == 2048
    )
    assert (
        f"The newest {entries.KEPT_ENTRIES} entries are kept" in PROSE
        and f"the last {REMEMBERED} generations" in PROSE
    )
    assert HEADER_BYTES == 56 and FORMAT == 1 and ENCRYPTED_FORMAT == 2
    uses = re.search(r"with the uses ((`\w+`[,. \n]+)+)", PROSE)
    assert uses is not None
    assert re.findall(r"`(\w+)`", uses.group(1)) == list(USES)


def test_fields_are_as_documented() -> None:
    for field in LogState.__struct_fields__:
        assert f"| `{field}` |" in DOCUMENT
    text = DOCUMENT[DOCUMENT.index("**Snapshot record**") :]
    at = [text.index(f"`{field}`") for field in SnapshotRecord.__struct_fields__]
    assert at == sorted(at)


#: An entry as version 1 wrote it, with the key 00 01 … 1f.
ENTRY = (
    "4943454c4f4700010100000000000000fb00000000000000b66a5831be9f0221c347627943215d3e732b14e9e9b0d451418c"
    "ac41e72bcb5428b52ffd20fbc5040002092127806b3a9d1cbe96ab480203b7403cd521b000e4e6b6528fb6bddc2e10990427"
    "08bf311083762401f3cd4bc13d36df32b58fa3a3cc7394fe3d66e9cbca1c2e8f03681a681b2c08ef18bd52be26704c57222a"
    "1e860284695893a40d995fa85564dee959655724d617b2466e123823deb6ae7499036d32feebf6adacb487a3d42a9717668c"
    "0600460d25200eb95c2dac88051334200f"
)


#: The filter of 40 made ids, as the first version that had filters wrote it, with the same key.
FILTER = (
    "49434546494c5401000000000000000080000000000000001a4f640ea125ad54759273808bcefa574292ed53ebc8ed9e6947"
    "16474239deea000000000000000000000000000000000000000000000000000000000000000083483b47458660bca64804e8"
    "333830cc32b033b89fc064321ec0bd2055a316080016a02852048190014b0045184502005080994a09180681e24000006348"
    "010a82cedd204120ca4da4484885b00eca8126b2a306066836534b81f083518ab290"
)


def test_bytes_of_the_first_filters_are_read() -> None:
    ids = np.frombuffer(hashlib.shake_128(b"ids").digest(40 * 32), np.uint8).reshape(-1, 32)
    key = bytes(range(32))
    ref = SegmentRef(bytes(16), bytes(32), 1, 40)
    assert encode_filter(ids, ref, key, "n").hex() == FILTER
    assert len(decode_filter("n", bytes.fromhex(FILTER), key, ref)) == 3


def test_bytes_of_version_1_are_read() -> None:
    record = SnapshotRecord(
        "01" * 16, "job", "l", "", 7, "snapshots/x", 9, bytes(32), 1, 2, 3, 0.5, ["t"], True
    )
    state = LogState(3, b"\2" * 32, 5, ["change"], tail=[record])
    key = bytes(range(32))
    assert decode_entry("log/x", 3, bytes.fromhex(ENTRY), key) == state
