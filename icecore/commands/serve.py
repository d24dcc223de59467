"""Commands of the node service: serve, and token for its clients on TCP."""

from __future__ import annotations

import argparse
import pwd
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands.context import Context
from icecore.commands.parsing import Commands, add_setting, overridden
from icecore.config import ServiceSettings
from icecore.config.kinds import SECONDS
from icecore.errors import NotFound, UsageError

if TYPE_CHECKING:
    from icecore.service.api.tokens import Token

_ROLES = ("read", "operate", "admin")
#: Lists in answers, which live for a moment, are often longer.
_MAPPED_BYTES = 32 << 10


def add(commands: Commands) -> None:
    """Add the commands."""
    parser = commands.add(
        "serve",
        serve,
        "Run the service of this node.",
        "icecore serve",
        "icecore serve --socket /run/icecore/service.sock --listen 0.0.0.0:7443 --certificate FILE --key FILE",
        more="Lets users who are not root run, snapshot and restore their own jobs. Serves a REST API"
        " (/v1/openapi.json describes it), a web page and metrics until SIGTERM. Operations and jobs then"
        " continue, and the next service adopts them.",
    )
    for key, what in (
        ("socket", "unix socket of the service"),
        ("admin_group", "group whose members see and control the jobs of all users, as root does"),
        ("others", "what other users may do with their own jobs"),
        ("listen", "TCP address for clients with tokens"),
        ("certificate", "PEM file with the certificate for TLS"),
        ("key", "PEM file with the key of the certificate"),
        ("plain_loopback", "listen without TLS, only on a loopback address"),
    ):
        add_setting(parser, ServiceSettings, key, what)

    parser = commands.add(
        "token",
        token,
        "Add, list or remove tokens for clients of the service on TCP.",
        "icecore token add ci --role operate --user alice --jobs 'train*' --expires 30d",
        "icecore token list",
        "icecore token remove ci",
        more="'add' prints the token once. A token with --user starts jobs as this user and controls only this"
        " user's jobs. A token without --user controls the jobs of all users.",
        numpy=False,
    )
    parser.add_argument(
        "action", choices=("add", "list", "remove"), metavar="add|list|remove", help="what to do"
    )
    parser.add_argument("name", nargs="?", default="", metavar="NAME", help="name of the token")
    parser.add_argument(
        "--role",
        choices=_ROLES,
        default="read",
        metavar="read|operate|admin",
        help="what clients with the token may do (default: read)",
    )
    parser.add_argument(
        "--jobs",
        action="append",
        default=[],
        metavar="PATTERN",
        help="only jobs whose name matches, such as 'train*'; repeatable (default: all)",
    )
    parser.add_argument(
        "--user", default="", metavar="USER", help="only this user's jobs (default: all users')"
    )
    parser.add_argument(
        "--expires",
        type=SECONDS,
        default=0.0,
        metavar="DURATION",
        help="how long the token is valid (default: until it is removed)",
    )


def serve(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore serve."""
    import asyncio
    from importlib.metadata import version

    from msgspec.structs import replace

    try:
        from icecore.service.api.app import build
        from icecore.service.api.server import serve as run
        from icecore.service.api.service import Service
    except ModuleNotFoundError as error:
        raise UsageError(
            f"the service requires the module {error.name}", cure="pip install 'icecore[service]'"
        ) from error
    from icecore.host.kernel import libc
    from icecore.node.backing import Repositories
    from icecore.node.watching import Scraper
    from icecore.service import scrape
    from icecore.service.page import routes as page

    libc.keep_few_arenas()
    libc.map_pieces_from(_MAPPED_BYTES)
    own = overridden(context.config.service, arguments)
    own = replace(own, repository=context.config.service.repository)  # -r is the administrators'
    config = replace(context.config, service=own)
    backing = Repositories(config, context.location)
    words = [f"--config={arguments.config}"] if arguments.config else []
    service = Service.made(
        config, context.registry(), backing, version=version("icecore"), words=words
    )
    scraper = Scraper(config, context.location)

    async def until_stopped() -> None:
        more = [*page.routes(), scrape.route(scraper.scrape)]
        app = build(service, more, [page.errors_as_pages])
        page.prepare(app)
        try:
            await run(service, app, context.output.event)
        finally:
            await scraper.close()

    try:
        asyncio.run(until_stopped())
    finally:
        backing.close()
    return 0


def token(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore token."""
    from icecore.service.api.tokens import Tokens

    tokens = Tokens(context.registry().state)
    if arguments.action == "list":
        return _list(tokens.all(), context)
    if not arguments.name:
        raise UsageError(
            "the name of the token is missing", cure=f"icecore token {arguments.action} NAME"
        )
    if arguments.action == "remove":
        tokens.remove(arguments.name)
        context.output.result(
            "token.removed", {"name": arguments.name}, f"token {arguments.name} removed"
        )
        return 0
    uid = _uid(arguments.user) if arguments.user else None
    secret = tokens.add(
        arguments.name,
        arguments.role,
        jobs=arguments.jobs,
        uid=uid,
        seconds=arguments.expires,
    )
    context.output.result("token.added", {"name": arguments.name, "token": secret}, secret)
    context.output.note("the token is shown only once; keep it like a password")
    return 0


def _list(tokens: list[Token], context: Context) -> int:
    from icecore.host.jobs.identity import user_name

    rows = []
    for one in tokens:
        context.output.result(
            "token",
            {
                "name": one.name,
                "role": one.role,
                "jobs": list(one.jobs),
                "uid": one.uid,
                "created": one.created,
                "expires": one.expires or None,
            },
        )
        rows.append(
            [
                one.name,
                one.role,
                "all" if one.uid is None else user_name(one.uid),
                " ".join(one.jobs),
                units.moment(one.created),
                units.moment(one.expires) if one.expires else "never",
            ]
        )
    context.output.table(["TOKEN", "ROLE", "USER", "JOBS", "ADDED", "EXPIRES"], rows)
    return 0


def _uid(user: str) -> int:
    try:
        return pwd.getpwnam(user).pw_uid
    except KeyError:
        if user.isdecimal() and int(user) < 2**32 - 1:
            return int(user)
        raise NotFound(f"there is no user {user}", cure="'getent passwd' lists them") from None
