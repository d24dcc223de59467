"""Commands on repositories: init and stats here; forget, mark and gc in `retention`, check and repair
in `integrity`.
"""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack

from icecore import units
from icecore.access import passphrase
from icecore.commands import integrity, retention
from icecore.commands.context import Context
from icecore.commands.parsing import PLACE, READ_ONLY, Commands
from icecore.config.kinds import SIZE
from icecore.errors import UsageError
from icecore.events import Value


def add(commands: Commands) -> None:
    """Add the commands."""
    retention.add_forget(commands.of_group("snapshots"))
    retention.add_mark(commands.of_group("snapshots"))
    _add_init(commands)
    retention.add_gc(commands)
    integrity.add(commands)
    parser = commands.add(
        "stats",
        stats,
        "Show sizes by job, lineage and codec.",
        "icecore stats",
        more="Also shows live and dead bytes, deduplication and compression.",
    )
    parser.add_argument("--read-only", action="store_true", help=READ_ONLY)


def _add_init(commands: Commands) -> None:
    parser = commands.add(
        "init",
        init,
        "Make a repository.",
        "icecore init /srv/snapshots",
        "icecore init --encrypt s3://backup/jobs",
        more="First tests whether the place creates objects atomically.",
    )
    parser.add_argument("location", nargs="?", default="", metavar="PLACE", help=PLACE)
    parser.add_argument(
        "--encrypt",
        action="store_true",
        help="encrypt the repository, with the configured passphrase or one that is asked for",
    )
    parser.add_argument(
        "--plain",
        action="store_true",
        help="make a plain repository even if the place held an encrypted one",
    )
    parser.add_argument(
        "--replica-of",
        metavar="PLACE",
        default="",
        help="make a replica of this repository: it shares the master secret, so that 'icecore sync' moves objects unchanged;"
        " it is encrypted if this repository is, with a passphrase of its own if ICECORE_NEW_PASSPHRASE is set",
    )
    parser.add_argument(
        "--shard",
        type=SIZE,
        default=64 << 20,
        metavar="SIZE",
        help="target size of the objects that hold chunks (default: 64 MiB)",
    )


def init(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore init."""
    from icecore.repository import Repository

    location = arguments.location or context.location
    if arguments.replica_of and arguments.encrypt:
        raise UsageError("a replica is encrypted if its repository is", cure="leave out --encrypt")
    if arguments.plain and arguments.encrypt:
        raise UsageError("--plain and --encrypt exclude each other", cure="leave one out")
    config = context.config
    given = passphrase.new(
        config.passphrase_file, config.passphrase_command, variable="ICECORE_PASSPHRASE"
    )
    with ExitStack() as stack:
        if arguments.replica_of:
            opened = Repository.open(
                arguments.replica_of,
                passphrase=passphrase.current(config),
                state=config.state,
                config=config,
                emit=context.output.event,
            )
            own = (
                passphrase.new()
                if os.environ.get("ICECORE_NEW_PASSPHRASE")
                else passphrase.current(config)
            )
            made = stack.enter_context(opened).create_replica(
                location, passphrase=own, plain=arguments.plain, emit=context.output.event
            )
        else:
            made = Repository.create(
                location,
                shard_bytes=arguments.shard,
                passphrase=given if arguments.encrypt else None,
                plain=arguments.plain,
                state=config.state,
                config=config,
                emit=context.output.event,
            )
        repository = stack.enter_context(made)
        context.output.result(
            "repository",
            {
                "location": repository.location,
                "id": repository.id,
                "shard_bytes": repository.core.config.parameters.shard_bytes,
                "encrypted": repository.encrypted,
            },
            f"made {'encrypted ' if repository.encrypted else ''}repository {repository.id[:12]} in {repository.location}",
        )
    if arguments.encrypt:
        context.output.note(
            "without the passphrase the repository is unreadable: keep the passphrase apart, or add another with 'icecore key add'"
        )
        return 0
    if passphrase.current(config).configured and not repository.encrypted and not arguments.plain:
        context.output.note(
            "the repository is not encrypted, although a passphrase is configured: 'icecore init --encrypt' makes an encrypted one"
        )
    context.output.note(
        "snapshots contain everything that jobs have in memory, including secrets: only you have access to the repository"
    )
    return 0


def stats(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore stats."""
    found, output = context.repository().stats(register=not arguments.read_only), context.output
    for by, groups in (("job", found.jobs), ("lineage", found.lineages)):
        rows = []
        for group in groups:
            fields: dict[str, Value] = {
                "by": by,
                "name": group.name,
                "snapshots": group.snapshots,
                "logical": group.logical,
                "reached": group.reached,
                "own": group.own,
            }
            output.result("stats.group", fields)
            rows.append(
                [
                    group.name,
                    str(group.snapshots),
                    units.size(group.logical),
                    units.size(group.reached),
                    units.size(group.own),
                ]
            )
        columns = [by.upper(), "SNAPSHOTS", "LOGICAL", "REACHED", "ONLY ITS OWN"]
        output.table(columns, rows, right=columns[1:])
        output.line("")
    rows = []
    for form in found.forms:
        output.result(
            "stats.codec",
            {
                "codec": form.codec,
                "chunks": form.chunks,
                "stored": form.stored,
                "logical": form.logical,
            },
        )
        rows.append(
            [form.codec, str(form.chunks), units.size(form.stored), units.size(form.logical)]
        )
    columns = ["CODEC", "CHUNKS", "STORED", "LOGICAL"]
    output.table(columns, rows, right=columns[1:])
    output.line("")
    output.result(
        "stats.done",
        {
            "snapshots": found.snapshots,
            "quarantined": found.quarantined,
            "logical": found.logical,
            "chunks": found.chunks,
            "chunk_bytes": found.chunk_bytes,
            "live": found.live,
            "dead": found.dead,
            "object_bytes": sum(found.object_bytes.values()),
            "dedup_ratio": found.dedup_ratio,
            "compression_ratio": found.compression_ratio,
        },
        f"{found.snapshots} snapshots of {units.size(found.logical)}: {units.size(found.live)} live in {found.chunks} chunks, {units.size(found.dead)} dead; "
        f"deduplication {found.dedup_ratio:.1f}, compression {found.compression_ratio:.1f}",
    )
    return 0
