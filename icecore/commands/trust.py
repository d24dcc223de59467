"""The trust command: compares a repository with this client's record of it, and accepts it."""

from __future__ import annotations

import argparse
import re
from typing import TYPE_CHECKING

from icecore.access import passphrase
from icecore.commands.context import Context
from icecore.commands.parsing import PLACE, Commands
from icecore.errors import Distrusted, UsageError

if TYPE_CHECKING:
    from icecore.access.trust import Finding

_ACCEPTED = re.compile(r"([0-9a-f]{32})(?:@(\d{1,20}))?")


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "trust",
        trust,
        "Compare a repository with this client's record of it.",
        "icecore trust /srv/snapshots",
        "icecore trust /srv/snapshots --accept 0123456789abcdef0123456789abcdef",
        more="--accept records the repository that is there. Exits with status 15 if the repository differs and is not accepted.",
        numpy=False,
    )
    parser.add_argument("location", nargs="?", default="", metavar="PLACE", help=PLACE)
    parser.add_argument(
        "--accept",
        type=_accepted,
        metavar="ID[@GENERATION]",
        default=None,
        help="record the repository with this full id as the one at the place; its newest generation is required"
        " if its log does not continue what this client has seen",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="with --accept: accept a plain repository although a passphrase is configured",
    )


def _accepted(text: str) -> tuple[str, int | None]:
    found = _ACCEPTED.fullmatch(text)
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not the whole id of a repository (32 hexadecimal digits), or ID@GENERATION"
        )
    return found[1], int(found[2]) if found[2] else None


def trust(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore trust."""
    from icecore.access.places import backend_at
    from icecore.access.trust import Client
    from icecore.store.runtime.loop import LoopThread

    if arguments.plain and arguments.accept is None:
        raise UsageError("--plain requires --accept", cure="give --accept ID as well")
    config = context.config
    backend = backend_at(
        arguments.location or context.location, config=config, emit=context.output.event
    )
    client, given = Client(config.state, config), passphrase.current(config)
    loop = LoopThread()
    try:
        if arguments.accept is None:
            finding = loop.run(client.examine(backend, passphrase=given))
        else:
            identity, generation = arguments.accept
            finding = loop.run(
                client.accept(
                    backend, identity, generation, plain=arguments.plain, passphrase=given
                )
            )
    finally:
        loop.run(backend.close())
        loop.close()
    return _show(backend.where, finding, arguments.accept is not None, context)


def _show(place: str, finding: Finding, accepted: bool, context: Context) -> int:
    from icecore.access.trust import command

    known, found, seen = finding.known, finding.found, finding.seen
    how = command(place, finding)
    context.output.result(
        "trust.done",
        {
            "place": place,
            "known": known.id if known else "",
            "known_encrypted": known.encrypted if known else None,
            "seen": seen.generation if seen else None,
            "found": found.id,
            "encrypted": found.encrypted,
            "generation": finding.newest.generation,
            "accepted": accepted,
            "troubles": [error.message for error in finding.troubles],
        },
    )
    line = context.output.line
    line(place)
    line(
        f"  known  {known or 'nothing'}{f', seen up to generation {seen.generation}' if seen is not None and seen.generation else ''}"
    )
    line(f"  there  {found}, at generation {finding.newest.generation}")
    if accepted:
        context.output.note(f"this client now knows {found} in {place}")
        return 0
    for error in finding.troubles:
        context.output.note(f"NOT TRUSTED: {error.message}")
    if finding.troubles:
        context.output.note(f"to accept it: {how}")
        return Distrusted.exit_code
    return 0
