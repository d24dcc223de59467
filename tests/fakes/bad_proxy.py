"""A bad network in front of an HTTP server: some requests are refused before they are passed on, of
others the reply is lost, or never comes.
"""

from __future__ import annotations

import http.client
import random
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Fate(Enum):
    """What becomes of a request."""

    PASS = "pass"
    #: Answered with 503, and goes no further.
    REFUSE = "refuse"
    #: Passed on, and gets no reply, or half of one.
    LOSE = "lose"
    CUT = "cut"
    #: Goes no further and is not answered, as long as the proxy lives.
    HOLD = "hold"


#: Decides about a request by its method and path; called by one thread at a time.
Plan = Callable[[str, str], Fate]


@dataclass
class Toll:
    """What became of the requests so far."""

    passed: int = 0
    refused: int = 0
    lost: int = 0
    held: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)

    def take(self, fate: Fate) -> None:
        """Count one."""
        self.passed += fate is Fate.PASS
        self.refused += fate is Fate.REFUSE
        self.lost += fate in (Fate.LOSE, Fate.CUT)
        self.held += fate is Fate.HOLD


def at_random(seed: int, *, refuse: float, lose: float, in_a_row: int = 3) -> Plan:
    """Each request is refused, or loses its reply, with these probabilities.

    Args:
        in_a_row: How often the same method and path fails at most before it passes: each further
            time costs the client a pause twice as long, and shows nothing that the first ones do
            not.
    """
    draw, failed = random.Random(seed), Counter[tuple[str, str]]()

    def plan(method: str, path: str) -> Fate:
        at = draw.random()
        if at >= refuse + lose or failed[method, path] >= in_a_row:
            failed[method, path] = 0
            return Fate.PASS
        failed[method, path] += 1
        if at < refuse:
            return Fate.REFUSE
        return Fate.LOSE if at < refuse + lose / 2 else Fate.CUT

    return plan


def hold_after(count: int, method: str, part: str) -> Plan:
    """So many requests of a method and with ``part`` in their path pass; then these, and nothing
    else, are held.
    """
    seen = 0

    def plan(asked: str, path: str) -> Fate:
        nonlocal seen
        if asked != method or part not in path:
            return Fate.PASS
        seen += 1
        return Fate.PASS if seen <= count else Fate.HOLD

    return plan


@contextmanager
def unreliable(endpoint: str, plan: Plan) -> Iterator[tuple[str, Toll]]:
    """A URL on the loopback that leads to ``endpoint``, as far as ``plan`` lets it."""
    host, _, port = endpoint.partition("://")[2].partition(":")
    toll, over = Toll(), threading.Event()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30
        disable_nagle_algorithm = True

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with toll.lock:
                fate = plan(self.command, self.path)
                toll.take(fate)
            if fate is Fate.HOLD:
                over.wait(300)
                self.close_connection = True
                return
            if fate is Fate.REFUSE:
                content = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
                self._answer(503, [], content, len(content))
                return
            connection = http.client.HTTPConnection(host, int(port), timeout=30)
            try:
                connection.putrequest(
                    self.command, self.path, skip_host=True, skip_accept_encoding=True
                )
                for name, value in self.headers.items():  # the host that was signed included
                    connection.putheader(name, value)
                connection.endheaders(body)
                reply = connection.getresponse()
                content = reply.read()
            finally:
                connection.close()
            if fate is not Fate.PASS:
                self.close_connection = True
            if fate is not Fate.LOSE:
                sent = len(content) // 2 if fate is Fate.CUT else len(content)
                self._answer(reply.status, reply.getheaders(), content, sent)

        def _answer(
            self, status: int, headers: list[tuple[str, str]], content: bytes, sent: int
        ) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in (
                    "content-length",
                    "connection",
                    "transfer-encoding",
                    "date",
                    "server",
                ):
                    self.send_header(name, value)
            length = {name.lower(): value for name, value in headers}.get("content-length", "0")
            self.send_header(
                "Content-Length", length if self.command == "HEAD" else str(len(content))
            )
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[:sent])

        do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _pass_on

        def log_message(self, format: str, *args: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 64

        def handle_error(self, request: object, client_address: object) -> None:
            pass  # who is cut off may hang up first

    server = Server(("127.0.0.1", 0), Handler)
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", toll
    finally:
        over.set()
        server.shutdown()
        server.server_close()
        thread.join(10)
