"""CRIU's pagemap images as numpy arrays, in the formats of 4.1 and 4.2. Millions of entries take
well under a second.
"""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged
from icecore.host.criu.protobuf import Message, WireError, decode_columns, encode_columns
from icecore.sizes import PAGE

#: Longest image file that is read into memory: a pagemap of 4 TiB that CRIU 4.2 wrote, which ends
#: an entry after 1 MiB, has 80 MiB.
MAX_IMAGE_BYTES = 128 << 20

#: Entry flags: the content is in the parent snapshot; may be restored lazily; is in the pages
#: image.
PE_PARENT, PE_LAZY, PE_PRESENT = 1, 2, 4

#: One entry: ``pages`` pages from ``address``.
ENTRY = np.dtype([("address", "<u8"), ("pages", "<u8"), ("flags", "<u4")])
Entries = npt.NDArray[np.void]

_MAGIC = struct.pack("<II", 0x54564319, 0x56084025)
_SIZE = struct.Struct("<I")
_ADDRESS, _PAGES, _IN_PARENT, _FLAGS, _WIDE_PAGES = 1, 2, 3, 4, 5


def decode_pagemap(data: bytes, name: str = "pagemap") -> tuple[int, Entries]:
    """Read a pagemap image of any CRIU from 3 on.

    Args:
        data: The image file.
        name: What to call it in errors.

    Returns:
        The number of its pages image (``pages-N.img``), and its entries as they stand.

    Raises:
        Damaged: It is no pagemap image, or is cut off.
    """
    try:
        if data[:8] != _MAGIC:
            raise WireError("wrong magic")
        (size,) = _SIZE.unpack_from(data, 8)
        at = 12 + size
        pages_id = Message.decode(data[12:at]).integer(1)
        # Where each message begins is known only from the one before: the one loop that remains.
        places = []
        end = len(data)
        while at < end:
            places.append(at)
            at += 4 + data[at]
        if at != end:
            raise WireError("the last entry is cut off")
        where = np.array(places, np.int64)
        source = np.frombuffer(data, np.uint8)
        if len(where) and (where[-1] + 4 > end or any(source[where + k].any() for k in (1, 2, 3))):
            raise WireError("an entry has an impossible length")
        start = where + 4
        columns = decode_columns(
            data,
            start,
            start + source[where] if len(where) else start,
            (_ADDRESS, _PAGES, _IN_PARENT, _FLAGS, _WIDE_PAGES),
        )
    except (WireError, struct.error, IndexError) as error:
        raise Damaged("image", name, str(error)) from error
    entries = np.zeros(len(places), ENTRY)
    entries["address"] = columns[_ADDRESS]
    entries["pages"] = np.where(columns[_WIDE_PAGES] != 0, columns[_WIDE_PAGES], columns[_PAGES])
    # Before flags were there, an entry was in the parent or present.
    plain = np.where(columns[_IN_PARENT] != 0, np.uint64(PE_PARENT), np.uint64(PE_PRESENT))
    entries["flags"] = np.where(columns[_FLAGS] != 0, columns[_FLAGS], plain)
    return pages_id, entries


def encode_pagemap(pages_id: int, entries: Entries, version: tuple[int, ...]) -> bytes:
    """Return a pagemap image for a CRIU version. With a 32-bit and a 64-bit page count, older
    versions can read 4.2's too.
    """
    head = Message([(1, 0, pages_id)]).encode()
    columns = [
        (_ADDRESS, entries["address"].astype(np.uint64)),
        (_PAGES, np.minimum(entries["pages"], 0xFFFFFFFF).astype(np.uint64)),
        (_FLAGS, entries["flags"].astype(np.uint64)),
    ]
    if version[:2] >= (4, 2):
        columns.append((_WIDE_PAGES, entries["pages"].astype(np.uint64)))
    body = encode_columns(columns, sized=True) if len(entries) else b""
    return _MAGIC + _SIZE.pack(len(head)) + head + body


def merge_entries(entries: Entries) -> Entries:
    """Merge adjacent entries of equal flags (4.2 ends an entry after 256 pages)."""
    if len(entries) == 0:
        return entries
    starts = np.ones(len(entries), np.bool_)
    following = entries["address"][:-1] + entries["pages"][:-1] * np.uint64(PAGE)
    starts[1:] = (entries["address"][1:] != following) | (
        entries["flags"][1:] != entries["flags"][:-1]
    )
    heads = np.flatnonzero(starts)
    merged = entries[heads].copy()
    merged["pages"] = np.add.reduceat(entries["pages"], heads)
    return merged


def read_whole(path: Path) -> bytes:
    """Read an image file if its size is plausible: its author may have made it sparse and huge.

    Raises:
        Damaged: It is longer than any image that is read whole.
    """
    with open(path, "rb") as file:
        data = file.read(MAX_IMAGE_BYTES + 1)
    if len(data) > MAX_IMAGE_BYTES:
        raise Damaged("image", path.name, f"it has more than {MAX_IMAGE_BYTES >> 20} MiB")
    return data


def load_pagemap(path: Path, *, merge: bool = True) -> tuple[int, Entries]:
    """Decode a pagemap file; adjacent entries are merged unless ``merge`` is False."""
    pages_id, entries = decode_pagemap(read_whole(path), path.name)
    return pages_id, merge_entries(entries) if merge else entries


def write_pagemap(path: Path, pages_id: int, entries: Entries, version: tuple[int, ...]) -> None:
    """Write `encode_pagemap` to a file."""
    path.write_bytes(encode_pagemap(pages_id, entries, version))
