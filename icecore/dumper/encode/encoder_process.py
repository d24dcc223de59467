"""The encoders of a dump: processes that drop pages of zeros, compute chunk ids, encode chunks, and
write them to shards or other files that the dumper has open.

An encoder does nothing without a request, and ends when the dumper has ended. Arguments: a word
that identifies the dump, and for each encoder the descriptor of its end of a SOCK_SEQPACKET socket
pair (`icecore.host.rpc.family`).
"""

from __future__ import annotations

import ctypes
import os
import socket
import sys
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from icecore.dumper.encode.protocol import (
    ROOM_CELLS,
    Answer,
    Append,
    Appended,
    Cell,
    Failed,
    Fetch,
    Fetched,
    Load,
    Loaded,
    Named,
    Open,
    Ready,
    Request,
)
from icecore.dumper.encode.zero_pages import NO_PAGES, without_zero_pages
from icecore.errors import IcecoreError, ObjectMissing
from icecore.events import Event
from icecore.host.kernel import libc
from icecore.host.kernel.memory import HugeBuffer
from icecore.host.rpc import packets, peer
from icecore.host.rpc.family import serve_each
from icecore.sizes import CELL_BYTES
from icecore.store.backend.local import LocalBackend, write_at
from icecore.store.format import codec
from icecore.store.format.cipher import Key, overhead
from icecore.store.format.names import object_name
from icecore.store.format.shard import place_chunk
from icecore.store.snapshot.forms import Chunk, Forms, Written
from icecore.store.snapshot.trial import Objective


class EncoderServer:
    """One encoder's state.

    Args:
        order: The first message.
        ask: Sends the dumper a `Fetch` and returns its answer.
    """

    def __init__(self, order: Open, ask: Callable[[Fetch], Fetched]) -> None:
        self._backend = LocalBackend(order.folder) if order.folder else None
        self._ask = ask
        self._pid = order.pid
        self._damaged: list[dict[str, object]] = []
        self._key = Key(order.key, order.encryption)
        self._forms = Forms(
            order.streams,
            self._fetch,
            self._key,
            Objective(order.link, order.cores),
            self._note,
            peek=self._backend is not None,
        )
        self._tag = overhead(self._key)
        #: Buffer in which forms are encrypted; None: no encryption.
        self._out = HugeBuffer(CELL_BYTES + codec.MAX_OVERHEAD) if self._tag else None
        self._rooms = HugeBuffer(ROOM_CELLS * CELL_BYTES)
        self._scratch = HugeBuffer(ROOM_CELLS * CELL_BYTES).array.reshape(ROOM_CELLS, CELL_BYTES)
        #: The file to which it writes, and the offset there of what the dumper fetched.
        self._file = self._spare = -1
        #: The chunk of each cell that the last `Load` read; None: no data pages.
        self._chunks: list[Chunk | None] = []

    def answer(self, request: Request, descriptors: Sequence[int]) -> Answer:
        """Carry out a request. Descriptors that come with it become this object's."""
        try:
            match request:
                case Load():
                    return self._load(request)
                case Append():
                    return self._append(request, descriptors)
                case Open() | Fetched():
                    raise ValueError(f"not expected: {type(request).__name__}")
        except (IcecoreError, OSError) as error:
            return Failed(str(error))

    def _load(self, request: Load) -> Loaded:
        self._chunks.clear()
        return Loaded([self._name(number, cell) for number, cell in enumerate(request.cells)])

    def _name(self, number: int, cell: Cell) -> Named:
        at, size = number * CELL_BYTES, cell.size
        here = (ctypes.c_uint64 * 2)(self._rooms.address + at, CELL_BYTES)
        there = (ctypes.c_uint64 * 2)(cell.address, size)
        read = libc.process_vm_readv(
            self._pid, ctypes.addressof(here), 1, ctypes.addressof(there), 1, 0
        )
        if read != size:
            raise OSError(ctypes.get_errno(), f"read {read} of {size} bytes of {self._pid}")
        bitmap, zero, data = cell.bitmap, NO_PAGES, self._rooms.view(at, at + size)
        if cell.sparse:
            bitmap, zero, data = without_zero_pages(
                np.frombuffer(bitmap, np.uint8), data, self._scratch[number]
            )
        if not len(data):
            self._chunks.append(None)
            return Named(b"", bitmap, zero, 0, True)
        chunk = self._forms.chunk(bitmap, data)
        self._chunks.append(chunk)
        return Named(chunk.id, bitmap, zero, chunk.length, chunk.zero)

    def _append(self, request: Append, descriptors: Sequence[int]) -> Appended:
        if descriptors:
            # Network file systems write everything back before they close a file, so it stays open
            # until the next one.
            before, (self._file,) = self._file, descriptors
            if before >= 0:
                os.close(before)
        self._spare = request.spare
        at, written, tag = request.offset, [], self._tag if request.sealed else 0
        for one in request.cells:
            chunk = self._chunks[one.number]
            assert chunk is not None
            form = chunk.form(request.stream, one.region, one.base)
            length, parts = form.length + tag, form.parts
            if tag and self._out is not None:
                room = self._out.view(0, length)
                place_chunk(self._key, request.name, at, chunk.id, parts, room)
                parts = [room]
            if write_at(self._file, parts, at) != length:
                raise ValueError("a form has another length than it says")
            written.append(Written(form.number, length, form.base))
            at += length
        damaged, self._damaged = self._damaged, []
        return Appended(written, damaged)

    def _fetch(self, shard: bytes, offset: int, out: memoryview) -> None:
        if self._backend is not None:
            self._backend.read_into(object_name("shard", shard), offset, out)
            return
        error = self._ask(Fetch(shard, offset, len(out))).error
        if error:
            raise ObjectMissing(error)
        if os.preadv(self._file, [out], self._spare) != len(out):
            raise OSError("the dumper's file is shorter than what it fetched")

    def _note(self, event: Event) -> None:
        self._damaged.append(dict(event.fields))


def serve(control: socket.socket) -> None:
    """Answer requests until the other end is closed.

    Raises:
        PeerDied: The other end is closed.
    """
    decode = msgspec.msgpack.Decoder(Request).decode
    encode = msgspec.msgpack.Encoder().encode
    encoder: EncoderServer | None = None

    def ask(request: Fetch) -> Fetched:
        packets.send(control, encode(request))
        answer = decode(packets.receive(control)[0])
        assert isinstance(answer, Fetched)
        return answer

    packets.send(control, encode(Ready(os.getpid())))
    while True:
        data, descriptors = packets.receive(control)
        request = decode(data)
        if encoder is None:
            assert isinstance(request, Open)
            encoder = EncoderServer(request, ask)
        else:
            packets.send(control, encode(encoder.answer(request, descriptors)))


def main() -> None:
    """Entry: ``encoder_process WORD CONTROL_FD…``."""
    peer.ignore_signals()
    codec.load()
    serve_each([int(word) for word in sys.argv[2:]], serve)


if __name__ == "__main__":
    main()
