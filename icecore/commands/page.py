"""The web page of the node service, on a loopback port, and a link that signs in."""

from __future__ import annotations

import argparse

from icecore.commands.context import Context
from icecore.commands.parsing import Commands, add_setting, overridden
from icecore.config import ServiceSettings
from icecore.config.kinds import COUNT
from icecore.errors import NotFound, UsageError


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "page",
        page,
        "Serve the web page of this node's service to a browser.",
        "icecore page",
        "icecore page --port 8080",
        more="Prints a link that signs in as the caller. The link works once, within a minute. The page is"
        " reachable only from this machine, until Ctrl-C. From another machine: ssh -L 8080:localhost:8080 NODE"
        " icecore page --port 8080",
        numpy=False,
    )
    parser.add_argument(
        "--port",
        type=COUNT,
        default=0,
        metavar="N",
        help="port on the loopback address (default: any free port)",
    )
    add_setting(parser, ServiceSettings, "socket", "unix socket of the service")


def page(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore page."""
    import asyncio

    from icecore.remote.connection import Service, is_there

    try:
        from icecore.remote.forward import forward
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the page requires the module {error.name}", cure="pip install 'icecore[service]'"
        ) from error
    if arguments.port > 65535:
        raise UsageError(
            f"there is no port {arguments.port}", cure="give --port a number below 65536"
        )
    path = overridden(context.config.service, arguments).socket
    if not is_there(path):
        raise NotFound(f"there is no service at {path}", cure="start it with 'icecore serve'")
    service = Service(path)

    def ready(port: int) -> None:
        link = service.post("/page/links", {})["path"]
        url = f"http://127.0.0.1:{port}{link}"
        context.output.result("page.link", {"url": url}, url)
        context.output.note("the link works once, within a minute; Ctrl-C stops the page")

    asyncio.run(forward(path, arguments.port, ready))
    return 0
