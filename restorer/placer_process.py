"""The placers of a restore: processes that read, verify and place cells, because threads of one interpreter stand in each other's way.

Its rule: it does what it is told and nothing on its own; when the restorer is gone, it ends. One process loads the libraries and then forks the placers, before
it has any thread. Arguments: a word to know it by, and the number of each placer's end of a SOCK_SEQPACKET socket pair.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import sys
from contextlib import suppress

import msgspec
import numpy as np

from icecore.errors import IcecoreError
from icecore.host import userfaultfd
from icecore.host.memory import HugeBuffer
from icecore.restorer.placing import (
    MESSAGE,
    ROOM_CELLS,
    Answer,
    Done,
    Forget,
    Open,
    Place,
    Prepare,
    Prepared,
    Request,
    Target,
)
from icecore.store.cell import CELL, CELL_BYTES
from icecore.store.cipher import Key
from icecore.store.local import LocalBackend
from icecore.store.names import object_name
from icecore.store.pool import Scratch
from icecore.store.reader import ChunkDecoder

_PR_SET_PDEATHSIG = 1
_IGNORED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


class Placer:
    """One placer's state.

    Args:
        order: The first message.
    """

    def __init__(self, order: Open) -> None:
        self._backend = LocalBackend(order.folder)
        self._decoder = ChunkDecoder(Key(order.key, order.encryption))
        self._stored = HugeBuffer(order.room, prefault=False)
        self._rooms = HugeBuffer(ROOM_CELLS * CELL_BYTES, prefault=False)
        self._scratch = Scratch()
        self._targets: dict[int, int] = {}

    def answer(self, request: Request, descriptors: list[int]) -> Answer | None:
        """Do what a message says."""
        match request:
            case Prepare():
                return self._prepare(request)
            case Place():
                return self._place(request)
            case Target(number):
                self._targets[number] = descriptors[0]
            case Forget(number):
                os.close(self._targets.pop(number))
            case Open():
                raise ValueError("a second opening")
        return None

    def _prepare(self, request: Prepare) -> Prepared:
        stored = self._stored.view(0, request.size)
        addresses, why = [0] * len(request.cells), ""
        try:
            for shard, offset, length, at in request.reads:
                self._backend.read_into(object_name("shard", shard), offset, stored[at : at + length])
        except IcecoreError as error:
            return Prepared(addresses, str(error))
        records = np.frombuffer(request.records, CELL)
        for number, (start, stop, base_start, base_stop) in enumerate(request.cells):
            base = stored[base_start:base_stop] if base_stop > base_start else None
            room = self._rooms.view(number * CELL_BYTES, (number + 1) * CELL_BYTES)
            try:
                data = self._decoder.decode(records[number], stored[start:stop], base, room, self._scratch)
            except IcecoreError as error:
                why = str(error)
                continue
            addresses[number] = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
        return Prepared(addresses, why)

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
    """Answer until the other end is closed."""
    decode = msgspec.msgpack.Decoder(Request).decode
    encode = msgspec.msgpack.Encoder().encode
    placer: Placer | None = None
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MESSAGE, 1, socket.MSG_CMSG_CLOEXEC)
        if not data:
            return
        request = decode(data)
        if placer is None:
            assert isinstance(request, Open)
            placer = Placer(request)
        elif (answer := placer.answer(request, descriptors)) is not None:
            control.sendall(encode(answer))


def main() -> None:
    """Entry: ``placer_process WORD CONTROL_FD…``."""
    for ignored in _IGNORED:
        signal.signal(ignored, signal.SIG_IGN)
    numbers = [int(word) for word in sys.argv[2:]]
    children = []
    for number in numbers:
        child = os.fork()
        if child == 0:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
            for other in numbers:
                if other != number:
                    os.close(other)
            status = 1
            try:
                with suppress(ConnectionError), socket.socket(fileno=number) as control:
                    serve(control)
                status = 0
            finally:
                os._exit(status)
        children.append(child)
    for number in numbers:
        os.close(number)
    for child in children:
        os.waitpid(child, 0)


if __name__ == "__main__":
    main()
