"""Chunk ids, page alignment and deltas: a chunk can be rebuilt from its base and the difference,
whatever pages either has.
"""

from __future__ import annotations

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings

from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.format import codec, delta
from icecore.store.format.chunk import align, changed_pages, chunk_id, pages_of
from icecore.store.format.codec import Choice
from tests.store.images import FULL, bitmap, make_data

KEY = bytes(range(32))
page_sets = st.lists(st.integers(0, CELL_PAGES - 1), min_size=1, max_size=20, unique=True).map(
    sorted
)


def room(pages: int = CELL_PAGES) -> memoryview:
    return memoryview(bytearray(pages * PAGE))


def test_the_id_covers_key_bitmap_and_bytes() -> None:
    data = make_data("heap", 2)
    identity = chunk_id(KEY, bitmap([1, 2]), data)
    assert len(identity) == 32
    assert identity == chunk_id(KEY, bitmap([1, 2]), memoryview(bytearray(data)))
    assert identity != chunk_id(KEY, bitmap([1, 3]), data)
    assert identity != chunk_id(bytes(32), bitmap([1, 2]), data)
    assert identity != chunk_id(KEY, bitmap([1, 2]), data[:-1] + b"\1")


@settings(max_examples=50, deadline=None)
@given(ours=page_sets, theirs=page_sets)
def test_align(ours: list[int], theirs: list[int]) -> None:
    base = {page: bytes([1 + page % 255]) * PAGE for page in theirs}
    out = room(len(ours))
    align(bitmap(theirs), b"".join(base.values()), bitmap(ours), out)
    assert bytes(out) == b"".join(base.get(page, bytes(PAGE)) for page in ours)


def test_align_refuses_bytes_that_are_not_the_bitmaps() -> None:
    with pytest.raises(ValueError, match="page bitmap"):
        align(bitmap([1]), bytes(2 * PAGE), bitmap([1]), room(1))


def encode_delta(
    kind: int, choice: Choice, ours: bytes, data: bytes, theirs: bytes, base: bytes
) -> tuple[int, bytes]:
    aligned = align(theirs, base, ours, room(pages_of(ours)))
    found = delta.difference(memoryview(data), aligned, room(), room())
    number, (body, *_) = codec.encode(found.xor if kind == codec.XOR else found.own, choice)
    return number | kind, b"".join(delta.parts(number | kind, theirs, found.changed, body))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    ours=page_sets,
    theirs=page_sets,
    kind=st.sampled_from([codec.XOR, codec.PATCH]),
    choice=st.sampled_from(
        [
            Choice(codec.RAW),
            Choice(codec.LZ4),
            Choice(codec.ZSTD, 1),
            Choice(codec.SHUFFLE4_ZSTD, 1),
            Choice(codec.BITSHUFFLE8_LZ4, 1),
        ]
    ),
    data=st.data(),
)
def test_delta_with_any_page_sets(
    ours: list[int], theirs: list[int], kind: int, choice: Choice, data: st.DataObject
) -> None:
    whole = np.frombuffer(make_data("heap", CELL_PAGES), np.uint8).reshape(-1, PAGE)
    base = whole[theirs].tobytes()
    mine = whole[ours].copy()
    for row in data.draw(st.lists(st.integers(0, len(ours) - 1), max_size=5)):
        mine[row, 100:200] ^= 0x55
    number, stored = encode_delta(kind, choice, bitmap(ours), mine.tobytes(), bitmap(theirs), base)
    assert delta.base_bitmap(stored) == bitmap(theirs)
    out = room(len(ours))
    delta.decode(number, memoryview(stored), bitmap(ours), memoryview(base), out, room())
    assert bytes(out) == mine.tobytes()


@pytest.mark.parametrize("kind", [codec.XOR, codec.PATCH])
def test_delta_decodes_in_place_where_the_pages_are_the_same(kind: int) -> None:
    base = make_data("float32", CELL_PAGES)
    mine = np.frombuffer(base, np.uint8).copy()
    mine[::PAGE] ^= 1
    number, stored = encode_delta(kind, Choice(codec.ZSTD, 1), FULL, mine.tobytes(), FULL, base)
    out = memoryview(bytearray(base))
    delta.decode(number, memoryview(stored), FULL, out, out, room())
    assert bytes(out) == mine.tobytes()


def test_an_unchanged_chunk_is_a_header() -> None:
    data = make_data("heap", 3)
    _, stored = encode_delta(
        codec.XOR, Choice(codec.RAW), bitmap([1, 2, 3]), data, bitmap([1, 2, 3]), data
    )
    assert len(stored) == delta.HEADER_BYTES + codec.DIGEST_BYTES


def test_few_changed_pages_make_a_small_delta() -> None:
    base = make_data("float32", CELL_PAGES)
    mine = np.frombuffer(base, np.uint8).copy()
    for page in range(0, CELL_PAGES, 32):
        mine[page * PAGE + 64 : page * PAGE + 128] ^= 0x3C
    _, sparse = encode_delta(codec.XOR, Choice(codec.ZSTD, 1), FULL, mine.tobytes(), FULL, base)
    residual = mine ^ np.frombuffer(base, np.uint8)
    _, whole = codec.encode(residual.tobytes(), Choice(codec.ZSTD, 1))
    assert len(sparse) < sum(len(part) for part in whole) < CELL_BYTES // 100


def test_changed_pages() -> None:
    base = bytearray(5 * PAGE)
    mine = bytearray(base)
    mine[0] = mine[4 * PAGE + 4095] = 1
    assert changed_pages(bytes(mine), bytes(base)).tobytes() == bitmap([0, 4])


@pytest.mark.parametrize("kind", [codec.XOR, codec.PATCH])
def test_damaged_deltas(kind: int) -> None:
    ours, theirs = bitmap([1, 2, 5]), bitmap([1, 2, 3])
    base, mine = make_data("heap", 3), make_data("heap", 3, seed=1)
    number, stored = encode_delta(kind, Choice(codec.ZSTD, 1), ours, mine, theirs, base)

    def decode(stored: bytes, base: bytes = base) -> None:
        delta.decode(number, memoryview(stored), ours, memoryview(base), room(3), room())

    decode(stored)
    for at in range(len(stored)):
        damaged = bytearray(stored)
        damaged[at] ^= 1 << at % 8
        with pytest.raises(ValueError, match="digest"):
            decode(bytes(damaged))
    for cut in range(0, len(stored), 7):
        with pytest.raises(ValueError, match="digest"):
            decode(stored[:cut])
    with pytest.raises(ValueError, match="number of pages"):
        decode(stored, base[:PAGE])
    body = stored[delta.HEADER_BYTES : -codec.DIGEST_BYTES]
    header = theirs + bitmap([0, 77])
    with pytest.raises(ValueError, match="does not have"):
        decode(header + body + codec.seal(header, body))
    short = theirs[:20]
    with pytest.raises(ValueError, match="header"):
        decode(short + codec.seal(short))
    with pytest.raises(ValueError, match="not a delta"):
        delta.decode(codec.ZSTD, memoryview(stored), ours, memoryview(base), room(3), room())
