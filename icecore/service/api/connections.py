"""Bound the number of connections, and close those of slow clients.

A `Guard` stands between the transport and aiohttp's protocol.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections import Counter
from collections.abc import Callable
from typing import cast

from aiohttp import web

from icecore.errors import Denied
from icecore.host.kernel.peer import Peer
from icecore.service.api.peers import refusal_of

#: Time for a request's headers, and for a client that does not read what it asked for.
SLOW_SECONDS = 30.0
_MOST_EARLY = 1 << 20
_ROOT = "uid 0"
#: All processes that the service refuses have one share.
_REFUSED = "refused processes"


class Connections:
    """The open connections of a service.

    Args:
        most: Maximum number of connections. One peer may have a quarter of them. The last quarter
            is for root on the unix socket.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._open: Counter[str] = Counter()
        self._guards: set[Guard] = set()

    def admit(self, guard: Guard) -> bool:
        """Count a connection; False: there are too many."""
        own = max(1, self._most // 4)
        if self._open[guard.who] >= own:
            return False
        others = self._open.total() - self._open[_ROOT]
        if guard.who != _ROOT and others >= self._most - own:
            return False
        self._open[guard.who] += 1
        self._guards.add(guard)
        return True

    def left(self, guard: Guard) -> None:
        """Count a connection that was closed."""
        if guard in self._guards:
            self._guards.discard(guard)
            self._open[guard.who] -= 1
            self._open += Counter()

    def __len__(self) -> int:
        return self._open.total()


class Guard(asyncio.Protocol):
    """The protocol of one connection.

    Args:
        make: Makes aiohttp's protocol.
        connections: Counts it.

    Attributes:
        peer: The process at the other end of the unix socket; None: a client on TCP.
        refusal: Why the service refuses this process; empty: it does not.
        who: Whose share the connection counts against.
    """

    def __init__(self, make: Callable[[], asyncio.Protocol], connections: Connections) -> None:
        self._make = make
        self._connections = connections
        self._inner: asyncio.Protocol | None = None
        self._transport: asyncio.Transport | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._reading: asyncio.TimerHandle | None = None
        self._busy = False
        #: Data that arrived after the TLS handshake and before the inner protocol existed.
        self._early = bytearray()
        self.peer: Peer | None = None
        self.refusal = ""
        self.who = ""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Start the inner protocol if the connection is admitted; with TLS, after the handshake."""
        if self._transport is None and not self.admit(transport):
            return
        self._transport = cast(asyncio.Transport, transport)
        self._inner = self._make()
        self._inner.connection_made(transport)
        self._await_request()
        if self._early:
            self._inner.data_received(bytes(self._early))
            self._early.clear()

    def admit(self, transport: asyncio.BaseTransport) -> bool:
        """Count a connection, or abort it if there are too many."""
        self._transport = cast(asyncio.Transport, transport)
        connection = transport.get_extra_info("socket")
        try:
            if connection.family == socket.AF_UNIX:
                self.peer = Peer.of(connection)
                self.refusal = refusal_of(self.peer)
                self.who = _REFUSED if self.refusal else f"uid {self.peer.uid}"
            else:
                self.who = str(transport.get_extra_info("peername")[0])
        except (OSError, TypeError, Denied):  # it has gone, or has too many groups
            self._transport.abort()
            return False
        if not self._connections.admit(self):
            self._transport.abort()
            return False
        return True

    def data_received(self, data: bytes) -> None:
        """The client has sent something."""
        if self._timer is None and not self._busy:
            self._await_request()
        if self._inner is not None:
            self._inner.data_received(data)
            return
        self._early += data
        if len(self._early) > _MOST_EARLY:
            self._abort()

    def eof_received(self) -> bool | None:
        """The client sends no more."""
        return self._inner.eof_received() if self._inner is not None else None

    def pause_writing(self) -> None:
        """The client does not read."""
        self._reading = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._abort)
        if self._inner is not None:
            self._inner.pause_writing()

    def resume_writing(self) -> None:
        """The client has read."""
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if self._inner is not None:
            self._inner.resume_writing()

    def connection_lost(self, error: Exception | None) -> None:
        """The connection is closed."""
        for timer in (self._timer, self._reading):
            if timer is not None:
                timer.cancel()
        self._timer = self._reading = None
        self._connections.left(self)
        if self._inner is not None:
            self._inner.connection_lost(error)
        if self.peer is not None:
            self.peer.close()

    def begins(self) -> None:
        """A request has been read up to its body."""
        self._busy = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def ends(self) -> None:
        """A request was answered."""
        self._busy = False

    def _await_request(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(SLOW_SECONDS, self._abort)

    def _abort(self) -> None:
        if self._transport is not None:
            self._transport.abort()


class Door(asyncio.Protocol):
    """The first protocol of a TLS connection. It counts the connection before the handshake, which
    takes memory, and passes it to the guard after the handshake.

    Args:
        guard: The protocol of the connection.
        context: Settings of TLS.
        seconds: Maximum duration of the handshake.
    """

    def __init__(self, guard: Guard, context: ssl.SSLContext, seconds: float) -> None:
        self._guard = guard
        self._context = context
        self._seconds = seconds
        self._shaking: asyncio.Task[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        plain = cast(asyncio.Transport, transport)
        plain.pause_reading()  # the first bytes are the handshake's
        if self._guard.admit(plain):
            self._shaking = asyncio.get_running_loop().create_task(self._shake(plain))

    async def _shake(self, plain: asyncio.Transport) -> None:
        try:
            secure = await asyncio.get_running_loop().start_tls(
                plain,
                self._guard,
                self._context,
                server_side=True,
                ssl_handshake_timeout=self._seconds,
            )
        except OSError:  # also ssl.SSLError and TimeoutError
            secure = None
        if secure is None:
            plain.abort()
            self._guard.connection_lost(None)
        else:
            self._guard.connection_made(secure)


def guard_of(request: web.Request) -> Guard | None:
    """Return the guard of a request's connection; None: it has none."""
    transport = request.transport
    protocol = transport.get_protocol() if transport is not None else None
    return protocol if isinstance(protocol, Guard) else None
