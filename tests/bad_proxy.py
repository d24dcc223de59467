"""An unreliable network in front of an HTTP server: some requests are refused before they are passed on, of others the reply is lost."""

from __future__ import annotations

import http.client
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass
class Toll:
    """What became of the requests so far."""

    passed: int = 0
    refused: int = 0
    lost: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)


@contextmanager
def unreliable(endpoint: str, seed: int, *, refuse: float, lose: float) -> Iterator[tuple[str, Toll]]:
    """A URL on the loopback that leads to ``endpoint``, most of the time.

    Args:
        refuse: Share of the requests that are answered with 503 and go no further.
        lose: Share of those that are passed on, and then get no reply, or half of one.
    """
    host, _, port = endpoint.partition("://")[2].partition(":")
    draw, toll = random.Random(seed), Toll()

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 30
        disable_nagle_algorithm = True

        def _pass_on(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            with toll.lock:
                fate = draw.random()
                toll.refused += fate < refuse
                toll.lost += refuse <= fate < refuse + lose
                toll.passed += fate >= refuse + lose
            if fate < refuse:
                content = b"<Error><Code>SlowDown</Code><Message>Reduce your request rate.</Message></Error>"
                self._answer(503, [], content, len(content))
                return
            connection = http.client.HTTPConnection(host, int(port), timeout=30)
            try:
                connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():  # the host that was signed included
                    connection.putheader(name, value)
                connection.endheaders(body)
                reply = connection.getresponse()
                content = reply.read()
            finally:
                connection.close()
            if fate < refuse + lose:
                self.close_connection = True
                if fate < refuse + lose / 2:
                    return
                self._answer(reply.status, reply.getheaders(), content, len(content) // 2)
                return
            self._answer(reply.status, reply.getheaders(), content, len(content))

        def _answer(self, status: int, headers: list[tuple[str, str]], content: bytes, sent: int) -> None:
            self.send_response(status)
            for name, value in headers:
                if name.lower() not in ("content-length", "connection", "transfer-encoding", "date", "server"):
                    self.send_header(name, value)
            length = {name.lower(): value for name, value in headers}.get("content-length", "0")
            self.send_header("Content-Length", length if self.command == "HEAD" else str(len(content)))
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
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}", toll
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
