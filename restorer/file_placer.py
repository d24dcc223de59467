"""The part of a placer that puts device memory into a file, decoded where it belongs; its rule: what it says is there has been verified."""

from __future__ import annotations

import mmap
import os

import numpy as np

from icecore.errors import IcecoreError
from icecore.host.memory import HugeBuffer
from icecore.restorer.cells import FULL_CELL, page_pieces
from icecore.restorer.placing import Spot, Store, Stored
from icecore.restorer.reading import Reading, in_order
from icecore.store.cell import BITMAP_BYTES, CELL, CELL_BYTES
from icecore.store.decoder import ChunkDecoder
from icecore.store.local import LocalBackend
from icecore.store.pool import Scratch


class FilePlacer:
    """See the module.

    Args:
        size: Of the file.
        file: Its descriptor, which is this object's now.
        stored: Room for what is read.
    """

    def __init__(self, size: int, file: int, backend: LocalBackend, decoder: ChunkDecoder, stored: HugeBuffer) -> None:
        mapped = mmap.mmap(file, size)
        mapped.madvise(mmap.MADV_DONTDUMP)
        self._file = memoryview(mapped)
        os.close(file)
        self._backend, self._decoder, self._stored = backend, decoder, stored
        self._room = HugeBuffer(CELL_BYTES, prefault=False)
        self._scratch = Scratch()

    def store(self, request: Store) -> Stored:
        """Do what a message says."""
        there, why = [False] * len(request.cells), ""
        records = np.frombuffer(request.records, CELL)
        reading = Reading(self._backend, request.reads, self._stored.view(0, request.size))
        for number, cell, alone in in_order(request.cells):
            pages = request.pages[BITMAP_BYTES * number : BITMAP_BYTES * (number + 1)]
            try:
                self._cell(cell, records[number], pages, reading, alone=alone)
            except IcecoreError as error:
                why = str(error)
                continue
            there[number] = True
        return Stored(there, why)

    def _cell(self, cell: Spot, record: np.void, pages: bytes, reading: Reading, *, alone: bool) -> None:
        """Put the pages of a cell that are wanted where they belong. ``alone``: no other one needs its stored bytes."""
        room = self._room.view()
        if pages == FULL_CELL:
            to = self._file[cell.position : cell.position + CELL_BYTES]
            reading.whole_cell(cell[:4], record, self._decoder, to, room, self._scratch, alone=alone)
            return
        stored = reading.until(max(cell.stop, cell.base_stop))
        base = stored[cell.base_start : cell.base_stop] if cell.base_stop > cell.base_start else None
        data = self._decoder.decode(record, stored[cell.start : cell.stop], base, room, self._scratch)
        for offset, position, length in page_pieces(record["data"].tobytes(), pages):
            self._file[cell.position + offset : cell.position + offset + length] = data[position : position + length]
