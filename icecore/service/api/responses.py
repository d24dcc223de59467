"""The class of responses with a body."""

from __future__ import annotations

from aiohttp import web


class Response(web.Response):
    """A response that forgets its body once it is sent.

    aiohttp keeps the last response of a connection until the next request. Hundreds of clients that
    poll for lists would each occupy as much memory as their list.
    """

    async def write_eof(self, data: bytes = b"") -> None:
        """See `web.StreamResponse.write_eof`."""
        await super().write_eof(data)
        self.body = None
