"""The chunk, the bytes of a cell's data pages in address order: its id, and matching its pages to
those of another chunk. Pure.
"""

from __future__ import annotations

import blake3
import numpy as np

from icecore.sizes import BITMAP_BYTES, CELL_PAGES, PAGE
from icecore.store.format.cell import Bytes, page_mask
from icecore.store.format.codec import Buffer

#: The key of "no chunk" in a record.
NO_CHUNK = bytes(32)


def chunk_id(key: bytes, bitmap: Buffer, data: Buffer) -> bytes:
    """Return the chunk's 32-byte id: BLAKE3 keyed with the repository's chunk key over the page
    bitmap (32 bytes), then the pages' bytes.

    Args:
        key: 32 bytes.
        bitmap: The cell's data bitmap.
        data: The data pages' bytes in address order.
    """
    state = blake3.blake3(bitmap, key=key)
    state.update(data)
    return state.digest()


def pages_of(bitmap: Buffer) -> int:
    """Return the number of set bits of a 32-byte page bitmap."""
    return int.from_bytes(bitmap, "little").bit_count()


def as_pages(data: Buffer) -> Bytes:
    """Return the bytes as rows of one page each, no copy."""
    return np.frombuffer(data, np.uint8).reshape(-1, PAGE)


def align(base_bitmap: Buffer, base: Buffer, bitmap: Buffer, out: memoryview) -> memoryview:
    """Return the base's bytes for exactly the pages of ``bitmap``; a page that the base lacks is
    zero.

    Args:
        base_bitmap: Data bitmap of the base (32 bytes).
        base: The base's pages.
        bitmap: Data bitmap of the chunk to match.
        out: Room for that chunk's pages; must not overlap ``base``.

    Returns:
        ``out``, filled.
    """
    wanted, there = (
        page_mask(np.frombuffer(bitmap, np.uint8)),
        page_mask(np.frombuffer(base_bitmap, np.uint8)),
    )
    pages, target = as_pages(base), as_pages(out)
    if len(target) != np.count_nonzero(wanted) or len(pages) != np.count_nonzero(there):
        raise ValueError("the bytes do not fit their page bitmap")
    rank = np.cumsum(there) - 1
    chosen = np.flatnonzero(wanted)
    both = there[chosen]
    if both.all():
        np.take(pages, rank[chosen], axis=0, out=target, mode="clip")
    else:
        target[~both] = 0
        target[both] = pages[rank[chosen[both]]]
    return out


def changed_pages(data: Buffer, base: Buffer) -> Bytes:
    """Return a 32-byte bitmap over the chunk's pages (bit i: its i-th data page differs from the
    base's i-th). ``base`` is aligned.
    """
    words = PAGE // 8
    ours, theirs = (np.frombuffer(b, np.uint64).reshape(-1, words) for b in (data, base))
    differs = np.zeros(CELL_PAGES, np.bool_)
    differs[: len(ours)] = (ours != theirs).any(axis=1)
    return np.packbits(differs, bitorder="little")


__all__ = ["BITMAP_BYTES", "NO_CHUNK", "align", "as_pages", "changed_pages", "chunk_id", "pages_of"]
