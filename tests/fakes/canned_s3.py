"""An S3 endpoint that answers as it is told: for replies that a real server gives only when it, or
its network, is in trouble.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


@dataclass(frozen=True)
class Reply:
    """A reply; ``cut``: how many bytes of the body are kept back before the connection is closed."""

    status: int = 200
    code: str = ""
    more: str = ""
    body: bytes = b""
    cut: int = 0
    headers: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> bytes:
        """The body: an S3 error document where there is a code."""
        if not self.code:
            return self.body
        return f"<Error><Code>{self.code}</Code><Message>so it was told</Message>{self.more}</Error>".encode()


#: Method and path to what is answered.
Answer = Callable[[str, str], Reply]


@contextmanager
def canned(answer: Answer) -> Iterator[str]:
    """The URL of an endpoint that gives ``answer``, on the loopback."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        timeout = 20
        disable_nagle_algorithm = True

        def _reply(self) -> None:
            self.rfile.read(int(self.headers.get("Content-Length") or 0))
            reply = answer(self.command, self.path)
            content = reply.content
            self.send_response(reply.status)
            for name, value in {
                "ETag": '"0"',
                "Last-Modified": "Sat, 21 Nov 2026 00:00:00 GMT",
                **reply.headers,
            }.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if self.command != "HEAD":
                self.wfile.write(content[: len(content) - reply.cut])
            self.close_connection = self.close_connection or reply.cut > 0

        do_GET = do_PUT = do_DELETE = do_HEAD = do_POST = _reply

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(
        target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True
    )
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)
