"""The part of a placer that decodes device memory into a file. What it reports as there is
verified.
"""

from __future__ import annotations

import mmap
import os
import time

from icecore.errors import IcecoreError
from icecore.host.kernel.memory import HugeBuffer
from icecore.restorer.place.file_table import FileTable
from icecore.restorer.place.placing import PLACER_BYTES, ROOM_CELLS, File, Store, Stored
from icecore.restorer.place.reading import Reading, in_order
from icecore.restorer.plan.cells import FULL_CELL, page_pieces
from icecore.restorer.plan.memory import Batch, Cell, gap_for, plan_batches
from icecore.sizes import CELL_BYTES
from icecore.store.backend.local import LocalBackend
from icecore.store.runtime.pool import Scratch
from icecore.store.snapshot.decoder import ChunkDecoder


class FilePlacer:
    """Puts cells into a file.

    Args:
        about: The message.
        file, table: Descriptors that came with it; this object closes them.
        stored: Room for stored bytes.
    """

    def __init__(
        self,
        about: File,
        file: int,
        table: int,
        backend: LocalBackend,
        decoder: ChunkDecoder,
        stored: HugeBuffer,
    ) -> None:
        mapped = mmap.mmap(file, about.size)
        mapped.madvise(mmap.MADV_DONTDUMP)
        self._file = memoryview(mapped)
        os.close(file)
        self._table = FileTable.shared(table, about.rows)
        self._backend, self._decoder, self._stored = backend, decoder, stored
        self._room = HugeBuffer(CELL_BYTES, prefault=False)
        self._scratch = Scratch()

    def store(self, request: Store) -> Stored:
        """Carry out a request."""
        began = time.perf_counter()
        there, size, why = bytearray(request.stop - request.first), 0, ""
        rows, gap = range(request.first, request.stop), gap_for(self._backend.read_size)
        for batch in plan_batches(
            self._table.records, rows, gap=gap, read_size=PLACER_BYTES, cells=ROOM_CELLS
        ):
            size += batch.size
            why = self._batch(batch, request.first, there) or why
        return Stored(bytes(there), size, time.perf_counter() - began, why)

    def _batch(self, batch: Batch, first: int, there: bytearray) -> str:
        """Put the cells of a batch into the file; return why one is not there."""
        why = ""
        reading = Reading(self._backend, batch.reads, self._stored.view(0, batch.size))
        for _, cell, alone in in_order(batch.cells):
            try:
                self._cell(cell, reading, alone=alone)
            except IcecoreError as error:
                why = str(error)
                continue
            there[cell.row - first] = 1
        return why

    def _cell(self, cell: Cell, reading: Reading, *, alone: bool) -> None:
        """Put the pages of a cell that are wanted where they belong. ``alone``: no other one needs
        its stored bytes.
        """
        row, start, stop, base_start, base_stop = cell
        record, pages = self._table.records[row], self._table.wanted[row].tobytes()
        position, room = int(self._table.position[row]), self._room.view()
        if pages == FULL_CELL:
            to = self._file[position : position + CELL_BYTES]
            reading.whole_cell(
                (start, stop, base_start, base_stop),
                record,
                self._decoder,
                to,
                room,
                self._scratch,
                alone=alone,
            )
            return
        stored = reading.until(max(stop, base_stop))
        base = stored[base_start:base_stop] if base_stop > base_start else None
        data = self._decoder.decode(record, stored[start:stop], base, room, self._scratch)
        for offset, at, length in page_pieces(record["data"].tobytes(), pages):
            self._file[position + offset : position + offset + length] = data[at : at + length]
