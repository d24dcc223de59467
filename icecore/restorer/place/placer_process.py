"""The placers of a restore: processes that read, verify and place cells, because threads of one
interpreter block each other.

A placer does nothing without a request, and ends when the restorer has ended. Arguments: a word
that identifies the restore, and the number of each placer's end of a SOCK_SEQPACKET socket pair
(`icecore.host.rpc.family`).
"""

from __future__ import annotations

import os
import socket
import sys

import msgspec
import numpy as np

from icecore.errors import IcecoreError
from icecore.host.kernel import userfaultfd
from icecore.host.kernel.memory import HugeBuffer, address_of
from icecore.host.rpc import packets, peer
from icecore.host.rpc.family import serve_each
from icecore.restorer.place.file_placer import FilePlacer
from icecore.restorer.place.locks import SharedLock
from icecore.restorer.place.placing import (
    ROOM_CELLS,
    Answer,
    CellState,
    Deliver,
    Delivered,
    Done,
    File,
    Forget,
    Open,
    PinnedRegion,
    Place,
    Ready,
    Request,
    Stage,
    Store,
    Target,
    WantedCell,
)
from icecore.restorer.place.reading import Reading, in_order
from icecore.restorer.place.stager import Stager
from icecore.restorer.plan.cells import page_pieces
from icecore.sizes import BITMAP_BYTES, CELL_BYTES
from icecore.store.backend.local import LocalBackend
from icecore.store.format import codec
from icecore.store.format.cell import CELL
from icecore.store.format.cipher import Key
from icecore.store.runtime.pool import Scratch
from icecore.store.snapshot.decoder import ChunkDecoder


class PlacerServer:
    """One placer's state.

    Args:
        order: The first message.
    """

    def __init__(self, order: Open) -> None:
        self._backend = LocalBackend(order.folder)
        self._decoder = ChunkDecoder(Key(order.key, order.encryption))
        self._stored = HugeBuffer(order.room, prefault=False)
        self._rooms = HugeBuffer(ROOM_CELLS * CELL_BYTES, prefault=False)
        # Every cell is read or decoded to here: it stays in the processor's cache, and leaves the
        # memory bandwidth to the driver, which copies at the same time.
        self._hot = HugeBuffer(CELL_BYTES, prefault=False)
        self._scratch = Scratch()
        self._lock = SharedLock(order.lock) if order.lock else None
        self._targets: dict[int, int] = {}
        self._stager: Stager | None = None
        self._file: FilePlacer | None = None

    def answer(self, request: Request, descriptors: list[int]) -> Answer | None:
        """Carry out a request; return the answer, if it has one."""
        match request:
            case Deliver():
                return self._deliver(request)
            case Place():
                return self._place(request)
            case Stage():
                assert self._stager is not None
                return self._stager.stage(request)
            case PinnedRegion():
                self._stager = Stager(
                    request,
                    descriptors[0],
                    descriptors[1:],
                    self._backend,
                    self._decoder,
                    self._stored,
                )
            case Store():
                assert self._file is not None
                return self._file.store(request)
            case File():
                file, table = descriptors
                self._file = FilePlacer(
                    request, file, table, self._backend, self._decoder, self._stored
                )
            case Target(number):
                self._targets[number] = descriptors[0]
            case Forget(number):
                os.close(self._targets.pop(number))
            case Open():
                raise ValueError("a second opening")
        return None

    def _deliver(self, request: Deliver) -> Delivered:
        count = len(request.cells)
        states, addresses, why = [CellState.MISSING] * count, [0] * count, ""
        records = np.frombuffer(request.records, CELL)
        reading = Reading(self._backend, request.reads, self._stored.view(0, request.size))
        for number, cell, alone in in_order(request.cells):
            try:
                data = self._read(cell, records[number], reading, alone=alone)
            except IcecoreError as error:
                why = str(error)
                continue
            pages = request.pages[BITMAP_BYTES * number : BITMAP_BYTES * (number + 1)]
            pieces = page_pieces(records[number]["data"].tobytes(), pages)
            states[number] = self._put(cell, address_of(data), pieces)
            if states[number] is CellState.HELD:  # the restorer knows where it belongs now
                room = self._rooms.view(number * CELL_BYTES, (number + 1) * CELL_BYTES)
                room[: len(data)] = data
                addresses[number] = address_of(room)
        return Delivered(states, addresses, why)

    def _read(
        self, cell: WantedCell, record: np.void, reading: Reading, *, alone: bool
    ) -> memoryview:
        """Return a cell's verified bytes, which are valid until the next is read. ``alone``: no
        other cell needs its stored bytes.
        """
        size = cell.stop - cell.start
        if (
            alone
            and size <= CELL_BYTES
            and int(record["place"]["codec"]) == codec.RAW
            and not self._decoder.encrypted
        ):
            stored = self._hot.view(0, size)
            if reading.straight(cell.start, stored):
                return self._decoder.decode(
                    record, stored, None, self._rooms.view(0, CELL_BYTES), self._scratch
                )
        stored = reading.until(max(cell.stop, cell.base_stop))
        base = (
            stored[cell.base_start : cell.base_stop] if cell.base_stop > cell.base_start else None
        )
        return self._decoder.decode(
            record, stored[cell.start : cell.stop], base, self._hot.view(), self._scratch
        )

    def _put(self, cell: WantedCell, source: int, pieces: list[tuple[int, int, int]]) -> CellState:
        """Place a cell where it was in the snapshot, unless its process has changed the memory
        there.
        """
        target = self._targets[cell.target]
        assert self._lock is not None
        with self._lock.reading():
            if self._lock.changed(cell.flag):
                return CellState.HELD
            for offset, position, length in pieces:
                placed = userfaultfd.place(target, cell.window + offset, source + position, length)
                if placed.stop is userfaultfd.Stop.DEAD:
                    return CellState.DEAD
                if placed.stop is not userfaultfd.Stop.DONE or placed.unmapped:
                    return CellState.HELD
        return CellState.PLACED

    def _place(self, request: Place) -> Done:
        target = self._targets[request.target]
        outcomes = []
        try:
            for destination, source, length in request.moves:
                placed = userfaultfd.place(target, destination, source, length)
                outcomes.append((placed.stop.value, placed.unmapped))
        except OSError as error:
            return Done(outcomes, error.errno or 1, str(error))
        return Done(outcomes)


def serve(control: socket.socket) -> None:
    """Answer until the other end is closed.

    Raises:
        PeerDied: It is.
    """
    decode = msgspec.msgpack.Decoder(Request).decode
    encode = msgspec.msgpack.Encoder().encode
    placer: PlacerServer | None = None
    packets.send(control, encode(Ready()))
    while True:
        data, descriptors = packets.receive(control)
        request = decode(data)
        if placer is None:
            assert isinstance(request, Open)
            placer = PlacerServer(request)
        elif (answer := placer.answer(request, descriptors)) is not None:
            packets.send(control, encode(answer))


def main() -> None:
    """Entry: ``placer_process WORD CONTROL_FD…``."""
    peer.ignore_signals()
    codec.load()
    serve_each([int(word) for word in sys.argv[2:]], serve)


if __name__ == "__main__":
    main()
