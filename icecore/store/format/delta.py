"""Delta forms: a chunk stored as its pages that differ from a base chunk. The base is always a full
chunk.

Stored: the base's data bitmap (32 bytes) · the bitmap of changed pages (32 bytes, bit i is the
chunk's i-th data page) · the body of a full form of the changed pages, either as they are (patch)
or xored with the base's (xor) · the digest. Pages that the base lacks count as zero.
"""

from __future__ import annotations

import msgspec
import numpy as np

from icecore.sizes import BITMAP_BYTES, PAGE
from icecore.store.format import codec
from icecore.store.format.cell import Bytes, page_mask
from icecore.store.format.chunk import align, as_pages, changed_pages, pages_of
from icecore.store.format.codec import Buffer

HEADER_BYTES = 2 * BITMAP_BYTES


class Difference(msgspec.Struct, frozen=True):
    """What differs between a chunk and its aligned base.

    ``changed`` is a 32-byte bitmap over the chunk's pages, ``own`` the changed pages' bytes,
    ``xor`` their residual; ``whole`` is whether all pages changed.
    """

    changed: bytes
    own: memoryview
    xor: memoryview
    whole: bool


def difference(data: memoryview, base: memoryview, own: memoryview, xor: memoryview) -> Difference:
    """Compare a chunk with its aligned base.

    Args:
        data: The chunk's bytes.
        base: The base's bytes for the same pages (:func:`icecore.store.format.chunk.align`).
        own: Scratch as long as ``data``; where every page changed, ``data`` itself is used instead.
        xor: A second scratch.
    """
    changed = changed_pages(data, base)
    count = pages_of(changed.tobytes())
    length = count * PAGE
    if length == len(data):
        np.bitwise_xor(_words(data), _words(base), out=_words(xor[:length]))
        return Difference(changed.tobytes(), data, xor[:length], True)
    rows = np.flatnonzero(page_mask(changed))
    np.take(as_pages(data), rows, axis=0, out=as_pages(own[:length]), mode="clip")
    residual = xor[:length]
    np.take(as_pages(base), rows, axis=0, out=as_pages(residual), mode="clip")
    np.bitwise_xor(_words(own[:length]), _words(residual), out=_words(residual))
    return Difference(changed.tobytes(), own[:length], residual, False)


def parts(number: int, base_bitmap: bytes, changed: bytes, body: Buffer) -> tuple[Buffer, ...]:
    """Return the parts to store for a delta of codec ``number`` whose changed pages were encoded to
    ``body``.
    """
    if not codec.known(number) or not number & codec.DELTA:
        raise ValueError(f"{number} is not a delta codec")
    header = base_bitmap + changed
    return header, body, codec.seal(header, body)


def base_bitmap(stored: Buffer) -> bytes:
    """Return the base's data bitmap, from the first 32 stored bytes of a delta.

    Raises:
        ValueError: Too short.
    """
    if len(stored) < BITMAP_BYTES:
        raise ValueError("shorter than a delta's header")
    return bytes(stored[:BITMAP_BYTES])


def decode(
    number: int,
    stored: memoryview,
    bitmap: Buffer,
    base: memoryview,
    out: memoryview,
    scratch: memoryview,
) -> None:
    """Fill ``out`` with a chunk from its delta and its base.

    Args:
        number: The delta's codec.
        stored: Its stored bytes.
        bitmap: The chunk's data bitmap.
        base: The decoded bytes of the base (not aligned), as many pages as the delta's base bitmap
            has.
        out: Room for exactly the chunk's pages; must not overlap ``base`` unless it *is* ``base``
            (then the bitmaps must be equal: decoding is in place).
        scratch: At least as long as ``out``.

    Raises:
        ValueError: Unknown number, wrong digest, sizes that do not agree, or a body that does not
            decode.
    """
    if not codec.known(number) or not number & codec.DELTA:
        raise ValueError(f"{number} is not a delta codec")
    body = codec.unseal(stored)
    if len(body) < HEADER_BYTES:
        raise ValueError("shorter than a delta's header")
    theirs, changed = (
        bytes(body[:BITMAP_BYTES]),
        np.frombuffer(body[BITMAP_BYTES:HEADER_BYTES], np.uint8),
    )
    pages = len(out) // PAGE
    rows = np.flatnonzero(page_mask(changed))
    if len(rows) and rows[-1] >= pages:
        raise ValueError("it changes pages that the chunk does not have")
    if pages_of(theirs) * PAGE != len(base):
        raise ValueError("its base has a different number of pages")
    residual = scratch[: len(rows) * PAGE]
    codec.decode_body(number & ~codec.DELTA, body[HEADER_BYTES:], residual)
    if theirs != bytes(bitmap):
        align(theirs, base, bitmap, out)
    elif base is not out:
        np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(base, np.uint8))
    _place(number, rows, as_pages(residual), as_pages(out))


def _place(
    number: int, rows: np.ndarray[tuple[int], np.dtype[np.int64]], residual: Bytes, target: Bytes
) -> None:
    if number & codec.PATCH:
        target[rows] = residual
    elif len(rows) == len(target):
        np.bitwise_xor(_words(target), _words(residual), out=_words(target))
    else:
        np.bitwise_xor(_words(target[rows]), _words(residual), out=_words(residual))
        target[rows] = residual


def _words(data: Buffer | Bytes) -> np.ndarray[tuple[int, ...], np.dtype[np.uint64]]:
    if isinstance(data, np.ndarray):
        return data.view(np.uint64)
    return np.frombuffer(data, np.uint64)
