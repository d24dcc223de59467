"""Parsers of the control plane's objects: encoded values come back; any other bytes give a named
error, never a crash or a wrong value.
"""

from __future__ import annotations

import struct
from collections.abc import Callable

import blake3
import msgspec
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from icecore.errors import Damaged, FormatTooNew, UsageError
from icecore.store.backend.base import check_name, check_prefix
from icecore.store.format.cell import PLACE
from icecore.store.format.envelope import HEADER_BYTES, ObjectKind, seal, unseal
from icecore.store.format.keys import (
    USES,
    Config,
    Keys,
    KeySlot,
    Parameters,
    decode_config,
    encode_config,
    encode_slot,
    new_slot,
    open_slot,
)
from icecore.store.format.manifest import (
    MANIFEST_KIND,
    NODE_REF,
    Manifest,
    Namespaces,
    Region,
    Requirements,
    Space,
    decode_manifest,
    encode_manifest,
)
from icecore.store.format.names import KINDS, log_generation, log_name, object_name, parse_name
from icecore.store.format.segment import (
    encode_segment,
    make_entries,
    parse_head,
    parse_segment,
    sort_entries,
)
from icecore.store.format.state import (
    ENTRY_KIND,
    NAMES_KIND,
    PAGE_KIND,
    Condemned,
    LogState,
    NameListRef,
    PageRef,
    SegmentRef,
    SessionRecord,
    SnapshotRecord,
    Written,
    decode_entry,
    decode_names,
    decode_page,
    encode_entry,
    encode_names,
    encode_page,
)
from icecore.store.log.session import Heartbeat, decode_heartbeat, encode_heartbeat

KEY = bytes(range(32))
KEYS = Keys.derive(KEY)
QUICK = settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])

ids = st.binary(min_size=16, max_size=16)
digests = st.binary(min_size=32, max_size=32)
hex_ids = ids.map(bytes.hex)
counts = st.integers(0, 2**40)
texts = st.text(max_size=20)
records = st.builds(
    SnapshotRecord,
    hex_ids,
    texts,
    texts,
    texts,
    st.integers(0, 2**62),
    texts,
    counts,
    digests,
    counts,
    counts,
    counts,
    st.floats(0, 1e6),
    st.lists(texts, max_size=3),
    st.booleans(),
)
names = st.tuples(st.sampled_from(KINDS), ids)
name_bytes = st.lists(names, max_size=5).map(
    lambda items: b"".join(bytes([KINDS.index(k)]) + i for k, i in items)
)
states = st.builds(
    LogState,
    generation=st.just(5),
    predecessor=digests,
    created_ns=st.integers(0, 2**62),
    changes=st.lists(texts, max_size=3),
    transactions=st.lists(st.builds(Written, st.integers(1, 5), ids), max_size=3),
    pages=st.lists(
        st.builds(PageRef, ids, digests, counts, st.integers(0, 2**18), counts, counts),
        max_size=3,
        unique_by=lambda ref: ref.id,
    ),
    tail=st.lists(records, max_size=4),
    sessions=st.lists(
        st.builds(
            SessionRecord,
            hex_ids,
            st.integers(0, 5),
            texts,
            texts,
            st.integers(0, 2**62),
            st.lists(records, max_size=2),
        ),
        max_size=3,
    ),
    condemned=st.lists(
        st.builds(
            Condemned,
            st.integers(0, 5),
            name_bytes,
            st.none() | st.builds(NameListRef, ids, digests, counts, counts),
        ),
        max_size=3,
        unique_by=lambda batch: batch.ref.id if batch.ref else id(batch),
    ),
    segments=st.lists(
        st.builds(SegmentRef, ids, digests, counts, counts, st.just(8), st.integers(0, 255)),
        max_size=3,
        unique_by=lambda ref: ref.id,
    ),
)


def entries_of(count: int, seed: int = 0) -> np.ndarray:
    dice = np.random.default_rng(seed)
    places = np.frombuffer(dice.bytes(count * PLACE.itemsize), PLACE)
    return sort_entries(make_entries(dice.integers(0, 256, (count, 32), np.uint8), places))


def a_manifest() -> Manifest:
    refs = np.zeros(3, NODE_REF)
    refs["group"] = [0, 1, 2]
    return Manifest(
        1,
        "a" * 32,
        "job",
        "lineage",
        "",
        1,
        "host",
        "writer",
        1,
        [],
        [Space("process", "1", 0, [Region(0, 1 << 20, 0)], refs.tobytes())],
        [],
        Requirements("x86_64", "6", "4"),
        Namespaces(),
        [],
    )


STATE = LogState(
    5,
    bytes(32),
    7,
    ["change"],
    [Written(5, bytes(16))],
    condemned=[Condemned(3, bytes([1]) + bytes(16))],
)
RECORD = SnapshotRecord("ab" * 16, "job", "lineage", "", 9, "snapshots/x", 10, bytes(32))
SEGMENT = b"".join(encode_segment(entries_of(2100), KEY)[0])

#: Each object: sound bytes, and how they are read.
OBJECTS: dict[str, tuple[bytes, Callable[[bytes], object]]] = {
    "log entry": (encode_entry(STATE, KEY).data, lambda data: decode_entry("n", 5, data, KEY)),
    "snapshot page": (
        encode_page([RECORD] * 3, KEY).data,
        lambda data: decode_page("n", data, KEY),
    ),
    "name list": (
        encode_names([("shard", bytes(16))] * 90, KEY).data,
        lambda data: decode_names("n", data, KEY),
    ),
    "key slot": (encode_slot(new_slot()).data, lambda data: open_slot("n", data)),
    "configuration": (
        encode_config(Config(1, "c" * 32, 1, Parameters()), KEYS).data,
        lambda data: decode_config("n", data, KEYS),
    ),
    "heartbeat": (
        encode_heartbeat(Heartbeat("d" * 32, 1, 2, "h", 3), KEY),
        lambda data: decode_heartbeat("n", data, KEY),
    ),
    "manifest": (
        encode_manifest(a_manifest(), KEY).data,
        lambda data: decode_manifest(data, KEY, name="n"),
    ),
    "index segment": (SEGMENT, lambda data: parse_segment("n", data, KEY)),
}


@pytest.mark.parametrize("title", OBJECTS)
def test_every_flipped_bit_and_every_cut_is_named(title: str) -> None:
    good, parse = OBJECTS[title]
    parse(good)
    positions = (
        range(len(good))
        if len(good) < 3000
        else [*range(300), *range(300, len(good), 331), len(good) - 1]
    )
    for at in positions:
        for bit in range(8):
            bad = good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :]
            with pytest.raises(Damaged) as caught:
                parse(bad)
            assert caught.value.kind == title and caught.value.name == "n"
    for cut in [*range(min(len(good), 200)), *range(200, len(good), 997), len(good) - 1]:
        with pytest.raises(Damaged):
            parse(good[:cut])
    with pytest.raises(Damaged):
        parse(good + b"\0")


@pytest.mark.parametrize("title", OBJECTS)
def test_random_bytes_are_named(title: str) -> None:
    good, parse = OBJECTS[title]

    @settings(max_examples=300, deadline=None)
    @given(st.binary(max_size=300), st.integers(0, 120), st.booleans())
    def check(noise: bytes, kept: int, replace: bool) -> None:
        data = good[:kept] + noise + (good[kept + len(noise) :] if replace else b"")
        if data == good:
            return
        with pytest.raises((Damaged, FormatTooNew)):
            parse(data)

    check()


@pytest.mark.parametrize("title", [title for title in OBJECTS if title != "index segment"])
def test_sealed_nonsense_is_named(title: str) -> None:
    """Even bytes sealed by a holder of the key: parsers trust no body."""
    good, parse = OBJECTS[title]
    kinds = {"key slot": b"ICEKEYS", "configuration": b"ICECONF", "heartbeat": b"ICEBEAT"}
    magic = kinds.get(title, good[:7])
    key = {
        "key slot": blake3.blake3(
            b"", derive_key_context="icecore format 1 public integrity"
        ).digest(),
        "configuration": KEYS.config,
    }.get(title, KEY)
    kind = ObjectKind(title, magic, 1, 1 << 20)
    values = st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text(max_size=8)
        | st.binary(max_size=40),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(
                st.sampled_from([*LogState.__struct_fields__, *Manifest.__struct_fields__, "x"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=12,
    )

    @QUICK
    @given(st.one_of(st.binary(max_size=200), values.map(msgspec.msgpack.encode)))
    def check(body: bytes) -> None:
        try:
            parse(seal(kind, body, key).data)
        except (Damaged, FormatTooNew):
            return
        assert (title == "snapshot page" and body == b"\x90") or (
            title == "name list" and len(body) % 17 == 0
        )

    check()
    deep = b"\x81\xa1x" + b"\x91" * 100_000 + b"\xc0"
    if title != "name list":
        with pytest.raises(Damaged):
            parse(seal(kind, deep, key).data)


@pytest.mark.parametrize("title", OBJECTS)
def test_the_next_version_is_told_apart_from_damage(title: str) -> None:
    good, parse = OBJECTS[title]
    header = good[:7] + b"\2" + good[8:24]
    key = {
        "key slot": blake3.blake3(
            b"", derive_key_context="icecore format 1 public integrity"
        ).digest(),
        "configuration": KEYS.config,
    }.get(title, KEY)
    covered = (
        good[HEADER_BYTES : HEADER_BYTES + 3 * 40]
        if title == "index segment"
        else good[HEADER_BYTES:]
    )
    digest = blake3.blake3(header + covered, key=key).digest()
    with pytest.raises(FormatTooNew):
        parse(header + digest + good[HEADER_BYTES:])


@QUICK
@given(states)
def test_entries_round_trip(state: LogState) -> None:
    assert decode_entry("n", 5, encode_entry(state, KEY).data, KEY) == state
    with pytest.raises(Damaged):
        decode_entry("n", 6, encode_entry(state, KEY).data, KEY)


@QUICK
@given(st.lists(records, max_size=20))
def test_pages_round_trip(page: list[SnapshotRecord]) -> None:
    sealed = encode_page(page, KEY)
    assert decode_page("n", sealed.data, KEY) == page
    for wrong in (
        PageRef(bytes(16), bytes(32), 0, len(page), 0, 0),
        PageRef(bytes(16), sealed.digest, 0, len(page) + 1, 0, 0),
    ):
        with pytest.raises(Damaged):
            decode_page("n", sealed.data, KEY, wrong)


@QUICK
@given(st.lists(names, max_size=50))
def test_name_lists_round_trip(items: list[tuple[str, bytes]]) -> None:
    assert sorted(decode_names("n", encode_names(items, KEY).data, KEY)) == sorted(items)  # type: ignore[arg-type]


def test_a_frame_that_lies_about_its_size_allocates_nothing() -> None:
    """A zstd bomb, sealed with the right key, is refused because of its declared sizes."""
    kind = ObjectKind("thing", b"THINGS!", 1, 1 << 20)
    bomb = zstandard.ZstdCompressor(level=19).compress(bytes(1 << 28))
    for claimed in (10, 1 << 20, 1 << 28, (1 << 64) - 1):
        header = struct.pack("<7sBBxxxxxxxQ", b"THINGS!", 1, 1, claimed)
        digest = blake3.blake3(header + bomb, key=KEY).digest()
        with pytest.raises(Damaged):
            unseal(kind, "n", header + digest + bomb, KEY)
    with pytest.raises(ValueError):
        seal(kind, bytes(kind.limit + 1), KEY)


def test_a_head_that_claims_much_allocates_nothing() -> None:
    for count in (1 << 26, (1 << 26) + 1, 1 << 63):
        with pytest.raises(Damaged):
            parse_head(
                "n",
                struct.pack("<7sBBB6sQ", b"ICESEGM", 1, 0, 0, bytes(6), count) + bytes(100),
                KEY,
            )


def test_keys_differ_and_are_fixed() -> None:
    derived = [getattr(KEYS, use) for use in USES]
    assert len(set(derived)) == len(derived) and all(len(key) == 32 for key in derived)
    # Known answers: what is stored today must open for ever.
    assert (
        KEYS.chunk.hex()
        == blake3.blake3(KEY, derive_key_context="icecore format 1 chunk").hexdigest()
    )
    assert KEYS.log.hex() == "d07bc76addc925f59e4f13695b9ce8432feb51f68e408db2d99bc9624d08e608"
    assert "…" in repr(KEYS) and KEYS.chunk.hex() not in repr(KEYS)


def test_a_slot_of_another_method_is_too_new() -> None:
    with pytest.raises(FormatTooNew):
        open_slot("n", encode_slot(KeySlot(1, "argon2id", b"")).data)
    with pytest.raises(Damaged):
        open_slot("n", encode_slot(KeySlot(1, "plain", b"short")).data)
    with pytest.raises(FormatTooNew):
        decode_config("n", encode_config(Config(3, "c" * 32, 1, Parameters()), KEYS).data, KEYS)


@given(names, st.integers(1, 2**64 - 1))
def test_names_round_trip(item: tuple[str, bytes], generation: int) -> None:
    kind, identity = item
    assert parse_name(object_name(kind, identity)) == item  # type: ignore[arg-type]
    check_name(object_name(kind, identity))  # type: ignore[arg-type]
    assert log_generation(log_name(generation)) == generation
    assert generation == 1 or log_name(generation) < log_name(generation - 1)


@given(st.text(max_size=60))
def test_no_other_name_is_taken_for_an_object(text: str) -> None:
    for name in (text, f"shards/{text}", f"log/{text}"):
        parsed = parse_name(name)
        assert parsed is None or object_name(*parsed) == name
        generation = log_generation(name)
        assert generation is None or log_name(generation) == name
        try:
            assert check_name(name) == name
            assert not name.startswith("/") and ".." not in name.split("/") and name.isascii()
        except UsageError as error:
            assert error.message
    with pytest.raises(UsageError):
        check_prefix("no-slash")


assert (ENTRY_KIND.magic, PAGE_KIND.magic, NAMES_KIND.magic, MANIFEST_KIND.magic) == (
    b"ICELOG\0",
    b"ICEPAGE",
    b"ICENAME",
    b"ICEMANI",
)
