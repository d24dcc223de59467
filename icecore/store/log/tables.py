"""The tables in the footers of shards, read from storage and verified: what a shard contains,
whatever the index knows of it.
"""

from __future__ import annotations

import numpy as np

from icecore.store.backend.base import Backend
from icecore.store.format import codec
from icecore.store.format.cell import PLACE, Records
from icecore.store.format.container import TAIL_BYTES
from icecore.store.format.names import object_name
from icecore.store.format.segment import make_entries
from icecore.store.format.shard import SHARD, parse_footer

#: Bytes read from a shard's end at first: the footer of 64 MiB of chunks is mostly shorter, so one
#: request suffices.
_GUESS_BYTES = 128 << 10


async def read_table(
    backend: Backend, key: bytes, shard: bytes, size: int | None = None
) -> Records:
    """Return the footer's table of a shard, in one or two reads.

    Args:
        key: The repository's shard key.
        size: Size of the object in bytes, if known; otherwise the storage is asked.

    Raises:
        Damaged, ObjectMissing: It cannot be read.
    """
    name = object_name("shard", shard)
    if size is None:
        size = await backend.size(name)
    end = bytearray(min(size, _GUESS_BYTES))
    await backend.get_into(name, size - len(end), memoryview(end))
    where = SHARD.parse_tail(shard, size, end[-TAIL_BYTES:])
    if where.length <= len(end):
        return parse_footer(key, shard, size, end[-where.length :])
    footer = bytearray(where.length)
    await backend.get_into(name, where.offset, memoryview(footer))
    return parse_footer(key, shard, size, footer)


def index_entries(shard: bytes, table: Records) -> Records:
    """Return index entries of the full chunks in a shard's table."""
    full = table[table["codec"] & codec.DELTA == 0]
    places = np.zeros(len(full), PLACE)
    places["shard"] = np.frombuffer(shard, np.uint8)
    for field in ("offset", "length", "codec"):
        places[field] = full[field]
    return make_entries(full["chunk"], places)
