"""Let a browser on this machine open the page of a service that listens only on a unix socket.

It forwards only the page, never the API: on the socket, the service identifies the user by the
connecting process, and other users of this machine can use the port, too. The page accepts only a
cookie, which the link sets once. If an attacker resolves a name to this address (DNS rebinding), the
Host header is wrong and the request is refused.
"""

from __future__ import annotations

import asyncio
import signal
import socket
from collections.abc import Awaitable, Callable
from urllib.parse import unquote

import aiohttp
from aiohttp import web
from yarl import URL

from icecore.errors import UsageError

_MOST_BODY = 1 << 20
_PIECE = 64 << 10
_ADDRESS = "127.0.0.1"
_PAGE = "/page"
#: Headers that belong to one connection (RFC 9110, section 7.6.1), or that aiohttp sets anew.
_OF_CONNECTION = frozenset(
    {
        *("connection", "keep-alive", "proxy-connection", "te", "trailer", "transfer-encoding"),
        *("upgrade", "content-length", "host"),
    }
)


async def forward(service: str, port: int, ready: Callable[[int], None]) -> None:
    """Forward requests for the page until SIGINT or SIGTERM.

    Args:
        service: The service's unix socket.
        port: On the loopback address; 0: any.
        ready: Gets the port.

    Raises:
        UsageError: The port is taken.
    """
    listening = _listen(port)
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, stop.set)
    connector = aiohttp.UnixConnector(path=service, limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(
        connector=connector,
        timeout=timeout,
        auto_decompress=False,
        cookie_jar=aiohttp.DummyCookieJar(),
    ) as client:
        app = web.Application(client_max_size=_MOST_BODY)
        own = frozenset(f"{name}:{listening.getsockname()[1]}" for name in (_ADDRESS, "localhost"))
        app.router.add_route("*", "/{path:.*}", _forwarding(client, own))
        runner = web.AppRunner(app, access_log=None, shutdown_timeout=1.0)
        await runner.setup()
        await web.SockSite(runner, listening).start()
        try:
            ready(listening.getsockname()[1])
            await stop.wait()
        finally:
            await runner.cleanup()


def _listen(port: int) -> socket.socket:
    found = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((_ADDRESS, port))
    except OSError as error:
        found.close()
        raise UsageError(
            f"cannot listen on {_ADDRESS}:{port}: {error.strerror}", cure="choose another --port"
        ) from error
    found.setblocking(False)
    return found


Handle = Callable[[web.Request], Awaitable[web.StreamResponse]]


def _forwarding(client: aiohttp.ClientSession, own: frozenset[str]) -> Handle:
    async def handle(request: web.Request) -> web.StreamResponse:
        path = request.rel_url.raw_path
        if request.host not in own:
            raise web.HTTPMisdirectedRequest(text="this address has another name\n")
        if path == "/":
            return web.Response(status=303, headers={"Location": _PAGE})
        if not _is_of_page(path):
            raise web.HTTPNotFound(text="only the page is here\n")
        return await _forwarded(client, request)

    return handle


def _is_of_page(path: str) -> bool:
    """Return whether a path belongs to the page. A path with dot segments does not, because clients and
    servers resolve these differently.
    """
    parts = unquote(path).split("/")
    if "." in parts or ".." in parts or not path.startswith(_PAGE):
        return False
    return parts[1] == _PAGE[1:] and parts[2:] != ["links"]


async def _forwarded(client: aiohttp.ClientSession, request: web.Request) -> web.StreamResponse:
    headers = [(k, v) for k, v in request.headers.items() if k.lower() not in _OF_CONNECTION]
    body = await request.read()
    url = URL(f"http://localhost{request.rel_url.raw_path_qs}", encoded=True)
    try:
        async with client.request(
            request.method, url, headers=headers, data=body or None, allow_redirects=False
        ) as answer:
            response = web.StreamResponse(status=answer.status, reason=answer.reason)
            for key, value in answer.headers.items():
                if key.lower() not in _OF_CONNECTION:
                    response.headers.add(key, value)
            await response.prepare(request)
            async for piece in answer.content.iter_chunked(_PIECE):
                await response.write(piece)
            await response.write_eof()
            return response
    except aiohttp.ClientConnectorError as error:
        raise web.HTTPBadGateway(text=f"the service does not answer: {error.os_error}\n") from error
