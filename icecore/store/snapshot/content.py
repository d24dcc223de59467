"""Reads the whole content of a small file's space into memory: tables, not data."""

from __future__ import annotations

from icecore.errors import Damaged
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.cell import page_mask
from icecore.store.format.manifest import Space
from icecore.store.snapshot.reader import SnapshotReader


def read_content(reader: SnapshotReader, space: Space, most: int) -> bytearray:
    """Return the bytes of a space of kind ``file`` or ``image``; absent pages are zeros.

    Args:
        most: Bytes that it may have.

    Raises:
        Damaged: It has more, or is not what was written.
        ObjectMissing: Part of it is gone.
    """
    if space.size > most:
        raise Damaged(
            "manifest",
            reader.manifest.snapshot,
            f"{space.kind} {space.key!a} has {space.size} bytes, more than {most}",
        )
    out = bytearray(space.size)
    if not space.regions:
        return out
    room = memoryview(bytearray(CELL_BYTES))
    for record in reader.records(space)[0]:
        data = reader.read_cell(record, room)
        base = int(record["cell"]) * CELL_BYTES
        for number, page in enumerate(page_mask(record["data"]).nonzero()[0].tolist()):
            start = base + page * PAGE
            length = min(PAGE, space.size - start)
            out[start : start + length] = data[number * PAGE : number * PAGE + length]
    return out
