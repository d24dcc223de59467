"""Every stored form decodes to its input, into the caller's buffer. Invalid stored bytes raise
ValueError and nothing else.
"""

from __future__ import annotations

import struct

import hypothesis.strategies as st
import numpy as np
import pytest
import zstandard
from hypothesis import HealthCheck, given, settings

from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.format import codec
from icecore.store.format.codec import Choice
from tests.store.images import KINDS, make_data

CHOICES = [
    Choice(codec.RAW),
    Choice(codec.LZ4),
    Choice(codec.ZSTD, -5),
    Choice(codec.ZSTD, 1),
    Choice(codec.ZSTD, 6),
    *(Choice(number, 1) for number in codec.BLOSC),
]


def stored_form(data: bytes, choice: Choice) -> tuple[int, bytes]:
    number, parts = codec.encode(data, choice)
    return number, b"".join(parts)


def decoded(number: int, stored: bytes, length: int) -> bytes:
    out = bytearray(length)
    codec.decode(number, memoryview(stored), memoryview(out))
    return bytes(out)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("choice", CHOICES, ids=str)
@pytest.mark.parametrize("pages", [1, 3, CELL_PAGES])
def test_gives_back_what_went_in(kind: str, choice: Choice, pages: int) -> None:
    data = make_data(kind, pages)
    number, stored = stored_form(data, choice)
    assert len(stored) <= len(data)
    assert number in (choice.codec, codec.RAW)
    assert decoded(number, stored, len(data)) == data


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    choice=st.sampled_from(CHOICES),
    pages=st.integers(1, 6),
    block=st.binary(min_size=1, max_size=3000),
    stride=st.integers(1, 600),
)
def test_gives_back_any_bytes(choice: Choice, pages: int, block: bytes, stride: int) -> None:
    data = bytearray((block * (pages * PAGE // len(block) + 1))[: pages * PAGE])
    data[::stride] = bytes(i % 251 for i in range(len(data[::stride])))
    number, stored = stored_form(bytes(data), choice)
    assert decoded(number, stored, len(data)) == data


def test_zero_needs_no_bytes() -> None:
    assert decoded(codec.ZERO, b"", 3 * PAGE) == bytes(3 * PAGE)
    with pytest.raises(ValueError, match="zero chunk"):
        decoded(codec.ZERO, b"x", PAGE)


@pytest.mark.parametrize("choice", [c for c in CHOICES if c.codec != codec.RAW], ids=str)
def test_any_flipped_bit_and_any_other_length_is_seen(choice: Choice) -> None:
    data = make_data("heap", 2)
    number, stored = stored_form(data, choice)
    assert number == choice.codec
    for at in range(len(stored)):
        for bit in (1 << (at % 8), 0x80 >> (at % 8)):
            damaged = bytearray(stored)
            damaged[at] ^= bit
            with pytest.raises(ValueError, match=r"digest|blosc|lz4|zstd"):
                decoded(number, bytes(damaged), len(data))
    for cut in (0, 1, codec.DIGEST_BYTES, len(stored) // 2, len(stored) - 1):
        with pytest.raises(ValueError, match="digest"):
            decoded(number, stored[:cut], len(data))
    with pytest.raises(ValueError, match="digest"):
        decoded(number, stored + b"\0", len(data))
    for wrong in (PAGE, 3 * PAGE, CELL_BYTES):
        with pytest.raises(ValueError, match=r"lz4|zstd|blosc"):
            decoded(number, stored, wrong)


@pytest.mark.parametrize(
    "number", [10, 0x3F, codec.XOR | codec.PATCH | codec.RAW, codec.XOR | codec.ZERO, 255]
)
def test_unknown_numbers(number: int) -> None:
    assert not codec.known(number)
    assert "unknown" in codec.name(number) or number & codec.DELTA
    with pytest.raises(ValueError, match=r"digest|unknown"):
        decoded(number, bytes(100), PAGE)


def sealed(body: bytes) -> bytes:
    return body + codec.seal(body)


def test_bombs_are_refused_by_their_headers() -> None:
    """Bytes with a valid digest whose headers promise more than the chunk has: malicious, not
    accidental.
    """
    bomb = bytes(64 << 20)
    frame = zstandard.ZstdCompressor().compress(bomb)
    with pytest.raises(ValueError, match="not of 4096 bytes"):
        decoded(codec.ZSTD, sealed(frame), PAGE)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compress(bomb)
    with pytest.raises(ValueError, match="not of 4096 bytes"):
        decoded(codec.ZSTD, sealed(unsized), PAGE)
    with pytest.raises(ValueError, match="lz4 length"):
        decoded(codec.LZ4, sealed(struct.pack("<I", 1 << 31) + bytes(50)), PAGE)
    number, stored = stored_form(make_data("heap", 4), Choice(codec.BITSHUFFLE8_LZ4, 1))
    header = bytearray(stored[: -codec.DIGEST_BYTES])
    header[4:8] = struct.pack("<I", 1 << 30)
    with pytest.raises(ValueError, match="blosc"):
        decoded(number, sealed(bytes(header)), 4 * PAGE)
    header = bytearray(stored[: -codec.DIGEST_BYTES])
    header[8:12] = struct.pack("<I", 1 << 30)
    with pytest.raises(ValueError, match="block size"):
        decoded(number, sealed(bytes(header)), 4 * PAGE)


@settings(max_examples=200, deadline=None)
@given(
    number=st.sampled_from([codec.LZ4, codec.ZSTD, *codec.BLOSC]),
    kind=st.sampled_from(("heap", "text")),
    data=st.data(),
)
def test_damage_under_a_right_digest_never_writes_past_the_buffer(
    number: int, kind: str, data: st.DataObject
) -> None:
    """The decompressors themselves, fed with garbage that has a valid beginning."""
    whole = make_data(kind, 2)
    _, stored = stored_form(whole, Choice(number, 1))
    body = bytearray(stored[: -codec.DIGEST_BYTES])
    for _ in range(data.draw(st.integers(1, 8))):
        body[data.draw(st.integers(0, len(body) - 1))] = data.draw(st.integers(0, 255))
    fence = np.full(PAGE, 0xA5, np.uint8)
    room = np.concatenate((np.zeros(len(whole), np.uint8), fence))
    try:
        codec.decode(number, memoryview(sealed(bytes(body))), room.data[: len(whole)])
    except ValueError:
        pass
    assert (room[len(whole) :] == fence).all()


def test_names() -> None:
    assert codec.name(codec.BITSHUFFLE8_LZ4) == "bitshuffle8+lz4"
    assert codec.name(codec.XOR | codec.SHUFFLE4_ZSTD) == "xor/shuffle4+zstd"
    assert codec.name(codec.PATCH | codec.RAW) == "patch/raw"
