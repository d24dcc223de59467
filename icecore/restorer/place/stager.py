"""The part of a placer that brings cells to GPUs: it decodes them into its own part of pinned
memory, from which the GPU worker copies them. They are verified here or on the GPU. A half of that
part is reused only after the worker has copied all of it.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import chain

import numpy as np

from icecore.errors import IcecoreError
from icecore.host.kernel.memory import HugeBuffer, address_of
from icecore.host.rpc import packets
from icecore.restorer.place.placing import STAGED_CELLS, Bounds, Part, PinnedRegion, Stage, Staged
from icecore.restorer.place.reading import Reading, in_order
from icecore.restorer.plan.cells import FULL_CELL, page_pieces
from icecore.sizes import CELL_BYTES
from icecore.store.backend.local import LocalBackend
from icecore.store.format.cell import CELL
from icecore.store.runtime.pool import Scratch
from icecore.store.snapshot.decoder import ChunkDecoder

_COPY_SECONDS = 300.0


class CopyFailed(Exception):
    """The worker has ended, or could not copy."""


class _Copies:
    """A GPU's copies of the two halves."""

    def __init__(self, control: int) -> None:
        self._control = socket.socket(fileno=control)
        self._control.settimeout(_COPY_SECONDS)
        self._number = 0
        self._under_way: tuple[set[int], set[int]] = (set(), set())

    def begin(self, half: int, cells: Iterable[tuple[int, int, int]]) -> None:
        """Have cells copied, each given as (allocation, offset, place in the region)."""
        self._number += 1
        try:
            numbers = array("q", [self._number, *chain.from_iterable(cells)])
            packets.send(self._control, numbers.tobytes())
        except OSError as error:
            raise CopyFailed(f"the GPU worker ended: {error}") from error
        self._under_way[half].add(self._number)

    def finish(self, half: int) -> None:
        """Wait for the copies of a half."""
        while self._under_way[half]:
            try:
                data, _ = packets.receive(self._control)
            except packets.PeerDied:
                raise CopyFailed("the GPU worker ended") from None
            except OSError as error:
                raise CopyFailed(f"the GPU worker does not answer: {error}") from error
            number = int.from_bytes(data[:8], sys.byteorder)
            for numbers in self._under_way:
                numbers.discard(number)
            if len(data) > 8:
                raise CopyFailed(f"the GPU worker failed: {data[8:].decode(errors='replace')}")


class Stager:
    """Stages cells.

    Args:
        region: The message.
        memory, gpus: Descriptors that came with it; this object closes them.
        stored: Room for stored bytes.
    """

    def __init__(
        self,
        region: PinnedRegion,
        memory: int,
        gpus: Sequence[int],
        backend: LocalBackend,
        decoder: ChunkDecoder,
        stored: HugeBuffer,
    ) -> None:
        self._region = memoryview(mmap.mmap(memory, region.size))
        os.close(memory)
        self._at = region.at
        self._copies = [_Copies(control) for control in gpus]
        self._backend, self._decoder, self._stored = backend, decoder, stored
        self._room = HugeBuffer(CELL_BYTES, prefault=False)
        self._scratch = Scratch()
        self._half = 0

    def stage(self, request: Stage) -> Staged:
        """Carry out a request."""
        there: list[bool] = []
        why = ""
        try:
            for part in request.parts:
                self._half = 1 - self._half
                self._finish(self._half)
                here, wrong = self._part(
                    part,
                    self._at + self._half * STAGED_CELLS * CELL_BYTES,
                    verified=not request.digested,
                )
                there.extend(here)
                why = wrong or why
            for half in (0, 1):
                self._finish(half)
        except CopyFailed as error:
            return Staged([], broken=str(error))
        return Staged(there, why)

    def _part(self, part: Part, at: int, *, verified: bool) -> tuple[list[bool], str]:
        """Stage the cells of a part from ``at`` on; return which are there, and why one is not.
        ``verified``: verify complete cells too.
        """
        there, why = [False] * len(part.cells), ""
        records = np.frombuffer(part.records, CELL)
        reading = Reading(self._backend, part.reads, self._stored.view(0, part.size))
        for number, cell, alone in in_order(part.cells):
            place = at + number * CELL_BYTES
            to = self._region[place : place + CELL_BYTES]
            try:
                self._cell(cell, records[number], reading, to, alone=alone, verified=verified)
            except IcecoreError as error:
                why = str(error)
                continue
            there[number] = True
        for device, copies in enumerate(self._copies):
            own = [
                (cell.handle, cell.offset, at + n * CELL_BYTES)
                for n, cell in enumerate(part.cells)
                if there[n] and cell.device == device
            ]
            if own:
                copies.begin(self._half, own)
        return there, why

    def _finish(self, half: int) -> None:
        for copies in self._copies:
            copies.finish(half)

    def _cell(
        self,
        cell: Bounds,
        record: np.void,
        reading: Reading,
        to: memoryview,
        *,
        alone: bool,
        verified: bool,
    ) -> None:
        """Decode a cell to ``to``. ``alone``: no other cell needs its stored bytes."""
        bitmap = record["data"].tobytes()
        if bitmap == FULL_CELL:
            reading.whole_cell(
                cell[:4],
                record,
                self._decoder,
                to,
                self._room.view(),
                self._scratch,
                alone=alone,
                verified=verified,
            )
            return
        stored = reading.until(max(cell.stop, cell.base_stop))
        base = (
            stored[cell.base_start : cell.base_stop] if cell.base_stop > cell.base_start else None
        )
        data = self._decoder.decode(
            record, stored[cell.start : cell.stop], base, self._room.view(), self._scratch
        )
        ctypes.memset(address_of(to), 0, CELL_BYTES)
        for offset, position, length in page_pieces(bitmap, bitmap):
            to[offset : offset + length] = data[position : position + length]
