#!/usr/bin/env python3
"""A TCP proxy on the loopback that is a link: so many bytes a second and so long a round trip,
shared by all of its connections.

Modelled: the rate, one bottleneck in each direction, shared fairly among connections; the delay,
handshake included; each connection's window, which begins at ten segments and doubles a round trip
(slow start, RFC 6928) up to what kernels allow by default. Not modelled: loss, other traffic. It
runs in a process of its own, so that it takes nothing of the measured one's interpreter.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from typing import Any

_CHUNK = 64 << 10
_FIRST_WINDOW = 10 * 1460
#: As net.ipv4.tcp_rmem and tcp_wmem let a connection have by default.
_LAST_WINDOW = 4 << 20
#: Timers are late; the link may catch up on so many seconds.
_LATE_SECONDS = 0.005
_AHEAD_SECONDS = 0.002
_START_SECONDS = 20.0


class Direction:
    """One direction of the link: takes chunks of the connections in turn, each as long as it takes
    to send.

    Args:
        rate: Bytes a second.
        delay: Seconds from one end to the other.
    """

    def __init__(self, rate: float, delay: float) -> None:
        self.delay = delay
        self._rate = rate
        self._ready: deque[Flow] = deque()
        self._wake = asyncio.Event()
        self._free_at = 0.0

    def offer(self, flow: Flow, data: bytes) -> None:
        """A chunk of ``flow`` waits to be sent; an empty one is its end."""
        flow.waiting.append(data)
        if len(flow.waiting) == 1:
            self._ready.append(flow)
            self._wake.set()

    async def serve(self) -> None:
        """Send, for ever."""
        clock = asyncio.get_running_loop().time
        while True:
            while not self._ready:
                self._wake.clear()
                await self._wake.wait()
            flow = self._ready.popleft()
            data = flow.waiting.popleft()
            if flow.waiting:
                self._ready.append(flow)
            self._free_at = max(self._free_at, clock() - _LATE_SECONDS) + len(data) / self._rate
            flow.travelling.put_nowait((max(self._free_at, clock()) + self.delay, data))
            ahead = self._free_at - clock()
            if ahead > _AHEAD_SECONDS:
                await asyncio.sleep(ahead - _AHEAD_SECONDS / 2)


class Flow:
    """One direction of one connection.

    Args:
        opens_in: Seconds until the first byte can be sent: the handshake.
    """

    def __init__(
        self, link: Direction, source: socket.socket, sink: socket.socket, opens_in: float
    ) -> None:
        self.waiting: deque[bytes] = deque()
        self.travelling: asyncio.Queue[tuple[float, bytes]] = asyncio.Queue()
        self._link = link
        self._source = source
        self._sink = sink
        self._opens_in = opens_in
        self._window = _FIRST_WINDOW
        self._unacknowledged = 0
        self._room = asyncio.Event()

    async def send(self) -> None:
        """From the source onto the link, as far as the window goes."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._opens_in)
        while True:
            while self._unacknowledged >= self._window:
                self._room.clear()
                await self._room.wait()
            data = await loop.sock_recv(
                self._source, min(_CHUNK, self._window - self._unacknowledged)
            )
            self._unacknowledged += len(data)
            self._link.offer(self, data)
            if not data:
                return

    async def deliver(self) -> None:
        """From the link to the sink, when it has arrived; the acknowledgement travels back as long."""
        loop = asyncio.get_running_loop()
        while True:
            at, data = await self.travelling.get()
            if at > loop.time():
                await asyncio.sleep(at - loop.time())
            if not data:
                with contextlib.suppress(OSError):
                    self._sink.shutdown(socket.SHUT_WR)
                return
            await loop.sock_sendall(self._sink, data)
            loop.call_later(self._link.delay, self._acknowledged, len(data))

    def _acknowledged(self, size: int) -> None:
        self._unacknowledged -= size
        self._window = min(_LAST_WINDOW, self._window + size)
        self._room.set()


async def serve(port: int, rate: float, round_trip: float) -> None:
    """Listen on a port of the loopback, say which on stdout, and pass on to ``port``."""
    loop = asyncio.get_running_loop()
    up, down = Direction(rate, round_trip / 2), Direction(rate, round_trip / 2)
    running = {asyncio.create_task(up.serve()), asyncio.create_task(down.serve())}
    listener = socket.create_server(("127.0.0.1", 0), backlog=256)
    listener.setblocking(False)
    print(listener.getsockname()[1], flush=True)
    while True:
        client, _ = await loop.sock_accept(listener)
        task = asyncio.create_task(_connection(client, port, up, down, round_trip))
        running.add(task)
        task.add_done_callback(running.discard)


async def _connection(
    client: socket.socket, port: int, up: Direction, down: Direction, round_trip: float
) -> None:
    loop = asyncio.get_running_loop()
    server = socket.socket()
    with client, server:
        for one in (client, server):
            one.setblocking(False)
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        with contextlib.suppress(OSError):
            await loop.sock_connect(server, ("127.0.0.1", port))
            there, back = Flow(up, client, server, round_trip), Flow(down, server, client, 0.0)
            await _until_one_fails([there.send(), there.deliver(), back.send(), back.deliver()])


async def _until_one_fails(work: list[Coroutine[Any, Any, None]]) -> None:
    """A reset on one side ends both."""
    tasks = [asyncio.ensure_future(one) for one in work]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()


@contextmanager
def shaped(endpoint: str, rate: float, round_trip: float) -> Iterator[str]:
    """A URL on the loopback that leads to ``endpoint`` over a link.

    Args:
        rate: Bytes a second in each direction.
        round_trip: Seconds.
    """
    words = [sys.executable, __file__, endpoint.rpartition(":")[2], str(rate), str(round_trip)]
    process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdin is not None and process.stdout is not None
    try:
        timer = threading.Timer(_START_SECONDS, process.kill)
        timer.start()
        try:
            port = process.stdout.readline().strip()
        finally:
            timer.cancel()
        if not port:
            raise RuntimeError(f"the shaping proxy ended with status {process.wait(10)}")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait(10)
        process.stdin.close()
        process.stdout.close()


def _end_with_parent() -> None:
    """stdin is a pipe of whoever started us: its end is ours."""

    def wait() -> None:
        sys.stdin.read()
        os._exit(0)

    threading.Thread(target=wait, daemon=True).start()


def main() -> None:
    """``shaper.py PORT RATE ROUND_TRIP``."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("port", type=int, help="where to, on the loopback")
    parser.add_argument("rate", type=float, help="bytes a second")
    parser.add_argument("round_trip", type=float, help="seconds")
    options = parser.parse_args()
    with contextlib.suppress(PermissionError):
        os.nice(-15)  # a link waits for no processor
    _end_with_parent()
    with contextlib.suppress(KeyboardInterrupt):
        asyncio.run(serve(options.port, options.rate, options.round_trip))


if __name__ == "__main__":
    main()
