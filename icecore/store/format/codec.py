"""The stored forms of a chunk's bytes, each with a number. Pure; a decoder writes only into the
buffer that its caller sized.

Every form except zero and raw ends with 8 bytes, the XXH3-64 (little-endian) of all stored bytes
before it, so that damage is detected before a decompressor sees it. The chunk id covers raw bytes.
docs/reference/format-data.md specifies each form.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from functools import cache
from types import MappingProxyType
from typing import Any, Literal

import msgspec
import numpy as np
import xxhash
import zstandard


@cache
def _numcodecs() -> Any:
    """Return the library, which looks for plug-ins as it is imported: commands that decode nothing
    do not wait for it.
    """
    import numcodecs.blosc
    import numcodecs.lz4
    import numcodecs.zstd

    # The library's other setting shares one global context behind a lock; these functions are
    # called from many threads at once.
    numcodecs.blosc.use_threads = False
    return numcodecs


def load() -> None:
    """Import what encoding and decoding need, in a process that is to be forked."""
    _numcodecs()


Buffer = bytes | bytearray | memoryview

ZERO = 0
RAW = 1
LZ4 = 2
ZSTD = 3
SHUFFLE2_ZSTD = 4
SHUFFLE4_ZSTD = 5
SHUFFLE8_ZSTD = 6
BITSHUFFLE2_LZ4 = 7
BITSHUFFLE4_LZ4 = 8
BITSHUFFLE8_LZ4 = 9

#: Delta forms: one of these bits is set beside the number of the form that holds the changed pages
#: (icecore.store.format.delta).
PATCH = 0x40
XOR = 0x80
DELTA = PATCH | XOR

#: Bytes after every form except zero and raw.
DIGEST_BYTES = 8

#: No form is longer than the bytes that it encodes plus this (the blosc header, the lz4 length, the
#: delta header, the digest). Readers rely on it.
MAX_OVERHEAD = 256

_BLOSC_BLOCK = 256 << 10
_BLOSC_HEADER = struct.Struct("<4B3I")
_BLOSC_FORMAT_LZ4 = 1
_BLOSC_FORMAT_ZSTD = 4
_BLOSC_SHUFFLE = 0x01
_BLOSC_MEMCPYED = 0x02
_BLOSC_BITSHUFFLE = 0x04
_LZ4_LENGTH = struct.Struct("<I")


class Blosc(msgspec.Struct, frozen=True):
    """Parameters of one blosc form: item size in bytes, the shuffle (1 bytes, 2 bits) and the
    compressor behind it.
    """

    item: int
    shuffle: Literal[1, 2]
    compressor: Literal["zstd", "lz4"]


BLOSC: Mapping[int, Blosc] = MappingProxyType(
    {
        SHUFFLE2_ZSTD: Blosc(2, 1, "zstd"),
        SHUFFLE4_ZSTD: Blosc(4, 1, "zstd"),
        SHUFFLE8_ZSTD: Blosc(8, 1, "zstd"),
        BITSHUFFLE2_LZ4: Blosc(2, 2, "lz4"),
        BITSHUFFLE4_LZ4: Blosc(4, 2, "lz4"),
        BITSHUFFLE8_LZ4: Blosc(8, 2, "lz4"),
    }
)

_NAMES: Mapping[int, str] = MappingProxyType(
    {
        ZERO: "zero",
        RAW: "raw",
        LZ4: "lz4",
        ZSTD: "zstd",
        **{
            n: f"{'bit' if b.shuffle == 2 else ''}shuffle{b.item}+{b.compressor}"
            for n, b in BLOSC.items()
        },
    }
)


class Choice(msgspec.Struct, frozen=True):
    """How to encode: the number of a full form, and the level where the form has one (zstd:
    negative levels are its fast ones).
    """

    codec: int
    level: int = 0


def known(codec: int) -> bool:
    """Return whether this version can decode the number."""
    if codec & DELTA:
        return codec & DELTA != DELTA and codec & ~DELTA in _NAMES and codec & ~DELTA != ZERO
    return codec in _NAMES


def name(codec: int) -> str:
    """Return the codec's name as events, ``show`` and the documents write it, e.g.
    ``xor/shuffle4+zstd``.
    """
    base = _NAMES.get(codec & ~DELTA, f"unknown {codec}")
    return {0: base, XOR: f"xor/{base}", PATCH: f"patch/{base}"}.get(
        codec & DELTA, f"unknown {codec}"
    )


def seal(*parts: Buffer) -> bytes:
    """Return the digest that is stored after ``parts``, 8 bytes."""
    state = xxhash.xxh3_64()
    for part in parts:
        state.update(part)
    return state.digest()[::-1]


def unseal(stored: memoryview) -> memoryview:
    """Return the stored bytes without their digest, which is checked.

    Raises:
        ValueError: The digest does not match.
    """
    if len(stored) <= DIGEST_BYTES:
        raise ValueError("shorter than its digest")
    body = stored[:-DIGEST_BYTES]
    if xxhash.xxh3_64_digest(body)[::-1] != stored[-DIGEST_BYTES:]:
        raise ValueError("its digest differs")
    return body


class Encoder:
    """Encode into full forms. It holds what is expensive to create, so keep one per thread. Not
    thread-safe.
    """

    def __init__(self) -> None:
        self._zstd: dict[int, zstandard.ZstdCompressor] = {}

    def body(self, data: memoryview, choice: Choice) -> Buffer:
        """Return the form without its digest: ``data`` itself for raw, otherwise new bytes. Where
        they are longer than ``data``, the caller falls back to raw.
        """
        if choice.codec == RAW:
            return data
        if choice.codec == LZ4:
            compressed: bytes = _numcodecs().lz4.compress(data, 1)
            return compressed
        if choice.codec == ZSTD:
            compressor = self._zstd.get(choice.level)
            if compressor is None:
                compressor = self._zstd[choice.level] = zstandard.ZstdCompressor(
                    level=choice.level, write_content_size=True, write_checksum=False
                )
            return compressor.compress(data)
        form = BLOSC[choice.codec]
        if len(data) % form.item:
            raise ValueError(f"{len(data)} bytes are not items of {form.item}")
        items = np.frombuffer(data, f"<u{form.item}")
        compressed = _numcodecs().blosc.compress(
            items, form.compressor.encode(), max(1, choice.level), form.shuffle, _BLOSC_BLOCK
        )
        return compressed


def encode(
    data: Buffer, choice: Choice, encoder: Encoder | None = None
) -> tuple[int, tuple[Buffer, ...]]:
    """Return one full form of ``data``.

    Returns:
        The codec number (raw where the chosen form would not be smaller) and the parts to store one
        after the other; for raw the part is ``data`` itself.
    """
    view = memoryview(data)
    body = (encoder or Encoder()).body(view, choice)
    if choice.codec == RAW or len(body) + DIGEST_BYTES >= len(view):
        return RAW, (view,)
    return choice.codec, (body, seal(body))


def decode(codec: int, stored: memoryview, out: memoryview) -> None:
    """Fill ``out`` from a full form, which must decode to exactly ``len(out)`` bytes; nothing
    larger is ever allocated.

    Raises:
        ValueError: The number is unknown or a delta's, the digest differs, or the form does not
            decode to exactly ``len(out)`` bytes.
    """
    if codec == RAW:
        if len(stored) != len(out):
            raise ValueError(f"{len(stored)} raw bytes where {len(out)} belong")
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(stored, np.uint8))
    elif codec == ZERO:
        if len(stored):
            raise ValueError("a zero chunk has no stored bytes")
        np.frombuffer(out, np.uint8).fill(0)
    else:
        decode_body(codec, unseal(stored), out)


def decode_body(codec: int, body: memoryview, out: memoryview) -> None:
    """Fill ``out`` from the body of a compressed full form (no digest); raw bytes are allowed too.

    Raises:
        ValueError: As :func:`decode`.
    """
    if codec == RAW:
        decode(RAW, body, out)
        return
    if codec == LZ4:
        decompress = _numcodecs().lz4.decompress
        if len(body) < _LZ4_LENGTH.size or _LZ4_LENGTH.unpack_from(body)[0] != len(out):
            raise ValueError(f"its lz4 length is not {len(out)}")
    elif codec == ZSTD:
        decompress = _numcodecs().zstd.decompress
        _check_zstd(body, len(out))
    elif codec in BLOSC:
        decompress = _numcodecs().blosc.decompress
        _check_blosc(BLOSC[codec], body, len(out))
    else:
        raise ValueError(f"unknown codec {codec}")
    try:
        decompress(body, out)
    except RuntimeError as error:
        raise ValueError(str(error)) from error


def _check_zstd(body: memoryview, expected: int) -> None:
    try:
        frame = zstandard.get_frame_parameters(body[:18])
    except zstandard.ZstdError as error:
        raise ValueError(f"not a zstd frame: {error}") from error
    if frame.content_size != expected:
        raise ValueError(f"its zstd frame is not of {expected} bytes")
    if frame.dict_id:
        raise ValueError("its zstd frame needs a dictionary")


def _check_blosc(form: Blosc, body: memoryview, expected: int) -> None:
    if len(body) < _BLOSC_HEADER.size:
        raise ValueError("shorter than a blosc header")
    version, _, flags, item, length, block, stored = _BLOSC_HEADER.unpack_from(body)
    compressor = _BLOSC_FORMAT_ZSTD if form.compressor == "zstd" else _BLOSC_FORMAT_LZ4
    shuffle = _BLOSC_SHUFFLE if form.shuffle == 1 else _BLOSC_BITSHUFFLE
    if (
        version != 2
        or flags >> 5 != compressor
        or flags & (_BLOSC_SHUFFLE | _BLOSC_MEMCPYED | _BLOSC_BITSHUFFLE) != shuffle
    ):
        raise ValueError("its blosc header does not agree with the codec")
    if item != form.item or length != expected or stored != len(body):
        raise ValueError(f"its blosc header is not of {expected} bytes")
    if not 0 < block <= max(expected, _BLOSC_BLOCK):
        raise ValueError("its blosc header has a bad block size")
