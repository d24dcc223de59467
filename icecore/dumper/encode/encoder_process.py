"""The encoders of a dump: processes that drop pages of zeros, compute chunk ids, and encode chunks.

An encoder does nothing without a request, and ends when the dumper has ended. Arguments: a word
that identifies the dump, and for each encoder the descriptor of its end of a SOCK_SEQPACKET socket
pair (`icecore.host.rpc.family`).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import sys

import msgspec
import numpy as np

from icecore.dumper.encode.protocol import (
    ROOM_CELLS,
    Answer,
    Cell,
    Encode,
    Encoded,
    Failed,
    Load,
    Loaded,
    Named,
    Open,
    Ready,
    Request,
)
from icecore.dumper.encode.zero_pages import NO_PAGES, without_zero_pages
from icecore.errors import IcecoreError
from icecore.events import Event
from icecore.host.kernel import libc
from icecore.host.kernel.memory import HugeBuffer
from icecore.host.rpc import packets, peer
from icecore.host.rpc.family import serve_each
from icecore.sizes import CELL_BYTES
from icecore.store.backend.local import LocalBackend
from icecore.store.format import codec
from icecore.store.format.cipher import Key
from icecore.store.format.names import object_name
from icecore.store.format.shard import fill
from icecore.store.snapshot.forms import Forms, OwnChunk
from icecore.store.snapshot.trial import Objective


class EncoderServer:
    """One encoder's state.

    Args:
        order: The first message.
        memory: The memfd that came with it, for forms.
    """

    def __init__(self, order: Open, memory: int) -> None:
        self._backend = LocalBackend(order.folder)
        self._pid = order.pid
        self._damaged: list[dict[str, object]] = []
        self._forms = Forms(
            order.streams,
            self._fetch,
            Key(order.key, order.encryption),
            Objective(order.link, order.cores),
            self._note,
            peek=True,
        )
        with open(memory, "rb") as file:
            self._out = memoryview(mmap.mmap(memory, os.fstat(file.fileno()).st_size))
        self._rooms = HugeBuffer(ROOM_CELLS * CELL_BYTES)
        self._scratch = HugeBuffer(ROOM_CELLS * CELL_BYTES).array.reshape(ROOM_CELLS, CELL_BYTES)
        #: The chunk of each cell that was read (None: no data pages), and whether the chunk is the
        #: whole cell as it is in the dumper's memory.
        self._chunks: list[tuple[OwnChunk | None, bool]] = []

    def answer(self, request: Request) -> Answer:
        """Carry out a request."""
        try:
            match request:
                case Load():
                    return self._load(request)
                case Encode():
                    return self._form(request)
                case Open():
                    raise ValueError("a second opening")
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
            self._chunks.append((None, False))
            return Named(b"", bitmap, zero, 0, True)
        chunk = self._forms.chunk(bitmap, data)
        self._chunks.append((chunk, len(data) == size))
        return Named(chunk.id, bitmap, zero, chunk.length, chunk.zero)

    def _form(self, request: Encode) -> Encoded:
        chunk, whole = self._chunks[request.number]
        assert chunk is not None
        form = chunk.form(request.stream, request.region, request.base)
        lengths = None
        if form.number != codec.RAW or not whole:
            fill(self._out, form.parts)
            lengths = [len(part) for part in form.parts]
        damaged, self._damaged = self._damaged, []
        return Encoded(form.number, lengths, form.base, damaged)

    def _fetch(self, shard: bytes, offset: int, out: memoryview) -> None:
        self._backend.read_into(object_name("shard", shard), offset, out)

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
    packets.send(control, encode(Ready(os.getpid())))
    while True:
        data, descriptors = packets.receive(control)
        request = decode(data)
        if encoder is None:
            assert isinstance(request, Open)
            encoder = EncoderServer(request, *descriptors)
        else:
            packets.send(control, encode(encoder.answer(request)))


def main() -> None:
    """Entry: ``encoder_process WORD CONTROL_FD…``."""
    peer.ignore_signals()
    codec.load()
    serve_each([int(word) for word in sys.argv[2:]], serve)


if __name__ == "__main__":
    main()
