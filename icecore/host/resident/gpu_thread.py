"""The thread that makes the calls to one GPU in the worker. It keeps the bus busy while there are
cells to place.

Cells go to their places in two lanes: while those of one are on their way the other's begin.
Whoever has many of them has a socket to this thread (`icecore.restorer.place.stager`), so that no
other thread of the interpreter has to be woken for them: each message is 64-bit numbers, the
caller's for the request and then (allocation, offset, place in the host region) of each cell; the
answer is the request's number and, where it failed, why.
"""

from __future__ import annotations

import array
import os
import queue
import select
import socket
import threading
import traceback
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import NamedTuple

from icecore.host.resident.gpu import Gpu
from icecore.host.rpc import packets
from icecore.host.rpc.calls import Refusal, Request

_NUMBER = 8


class _Order(NamedTuple):
    """Cells to place, (allocation, offset) each, from where; ``tell`` is called with why that
    failed, or nothing.
    """

    cells: list[tuple[int, int]]
    places: list[int]
    tell: Callable[[str], None]


class _Going(NamedTuple):
    """Orders that are under way."""

    lane: int
    orders: list[_Order]


class GpuThread(threading.Thread):
    """See the module.

    Args:
        answer: Carries any request out but ``place`` and ``connect``, and answers it.
    """

    def __init__(self, gpu: Gpu, answer: Callable[[Request], None]) -> None:
        super().__init__(name="gpu", daemon=True)
        self._gpu, self._answer = gpu, answer
        self._inbox: queue.SimpleQueue[Request] = queue.SimpleQueue()
        self._wake = os.eventfd(0, os.EFD_CLOEXEC)
        self._poll = select.poll()
        self._poll.register(self._wake, select.POLLIN)
        self._sockets: dict[int, socket.socket] = {}
        self._going: _Going | None = None

    def put(self, request: Request) -> None:
        """Called by other threads."""
        self._inbox.put(request)
        os.eventfd_write(self._wake, 1)

    def run(self) -> None:
        """Until the process ends; which it does where this thread cannot go on, because others wait
        for its answers.
        """
        try:
            while True:
                self._turn()
        except BaseException:  # noqa: BLE001 - said, and told by the process's end
            traceback.print_exc()
        os._exit(1)

    def _turn(self) -> None:
        ready = [number for number, _ in self._poll.poll(None if self._going is None else 0)]
        orders = [
            order
            for number in ready
            if number != self._wake
            if (order := self._order(number)) is not None
        ]
        for request in (
            [self._inbox.get() for _ in range(os.eventfd_read(self._wake))]
            if self._wake in ready
            else ()
        ):
            if request.call == "place":
                cells, places = request.about["cells"], request.about["places"]
                orders.append(_Order(cells, places, partial(_tell, request)))
                continue
            self._send_off(orders)
            orders = []
            self._take(request)
        self._send_off(orders)

    def _take(self, request: Request) -> None:
        if request.call != "connect":
            self._arrived()
            self._answer(request)
            return
        theirs = socket.socket(fileno=request.descriptors[0])
        self._sockets[theirs.fileno()] = theirs
        self._poll.register(theirs, select.POLLIN)
        request.answer()

    def _order(self, number: int) -> _Order | None:
        """What came on a socket."""
        theirs = self._sockets[number]
        try:
            data, _ = packets.receive(theirs)
        except OSError:
            self._poll.unregister(number)
            self._sockets.pop(number).close()
            return None
        numbers = array.array("q", data).tolist()

        def tell(error: str) -> None:
            with suppress(OSError):  # nobody is there any more
                packets.send(theirs, data[:_NUMBER] + error.encode())

        return _Order(list(zip(numbers[1::3], numbers[2::3], strict=True)), numbers[3::3], tell)

    def _send_off(self, orders: list[_Order]) -> None:
        """Begin with these, then end those of the other lane."""
        if not orders:
            self._arrived()
            return
        lane, failure = 0 if self._going is None else 1 - self._going.lane, ""
        try:
            cells = [cell for order in orders for cell in order.cells]
            self._gpu.place(cells, [place for order in orders for place in order.places], lane)
        except Exception as error:  # noqa: BLE001 - told to the clients, which wait for an answer
            failure = _text(error)
        self._arrived()
        if not failure:
            self._going = _Going(lane, orders)
            return
        with suppress(
            Exception
        ):  # some may have begun: nobody writes to their sources before these have ended
            self._gpu.memory.wait(lane)
        for order in orders:
            order.tell(failure)

    def _arrived(self) -> None:
        """Wait for those that are under way, and tell whoever asked."""
        going, self._going, failure = self._going, None, ""
        if going is None:
            return
        try:
            self._gpu.memory.wait(going.lane)
        except Exception as error:  # noqa: BLE001 - as above
            failure = _text(error)
        for order in going.orders:
            order.tell(failure)


def _tell(request: Request, error: str) -> None:
    if error:
        request.refuse(Refusal(error))
    else:
        request.answer()


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {error}"
