"""The cell, a 1 MiB window of a space, and the record that says where its bytes are. Maps, writers
and readers share this one row type.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from icecore.sizes import BITMAP_BYTES

NODE_CELLS = 64

Bytes = npt.NDArray[np.uint8]
Records = npt.NDArray[np.void]

#: Where a chunk's stored bytes lie: shard name, offset and length in it, codec
#: (icecore.store.format.codec). A zero shard with length 0 means "nowhere".
PLACE = np.dtype([("shard", "u1", 16), ("offset", "<u8"), ("length", "<u4"), ("codec", "u1")])

#: One cell of a map, 190 bytes, little-endian, unpadded. ``cell`` counts 1 MiB windows from its
#: region's origin. ``data`` and ``zero`` are page bitmaps (bit i of byte i//8, least significant
#: first = page i of the cell); a page in neither is absent. ``chunk`` is the id of the data pages'
#: bytes in address order, all zero when the cell has none. A delta names its base, always a full
#: chunk.
CELL = np.dtype(
    [
        ("cell", "<u4"),
        ("data", "u1", BITMAP_BYTES),
        ("zero", "u1", BITMAP_BYTES),
        ("chunk", "u1", 32),
        ("place", PLACE),
        ("base", "u1", 32),
        ("base_place", PLACE),
    ]
)


def data_pages(records: Records) -> npt.NDArray[np.int64]:
    """Return the number of data pages of each record."""
    counts: npt.NDArray[np.int64] = np.bitwise_count(records["data"]).sum(axis=1, dtype=np.int64)
    return counts


def page_mask(bitmap: Bytes) -> npt.NDArray[np.bool_]:
    """Return a 32-byte page bitmap as 256 booleans in page order."""
    return np.unpackbits(bitmap, bitorder="little").view(np.bool_)
