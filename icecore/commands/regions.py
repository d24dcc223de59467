"""Commands that bring snapshots to other places: sync to a replica, copy to any other repository."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from icecore import passphrase, units
from icecore.commands.context import Commands, Context
from icecore.commands.snapshots import WHICH
from icecore.errors import Damaged
from icecore.store.replication import Lost
from icecore.store.state import SnapshotRecord


def add(commands: Commands) -> None:
    """Add the commands."""
    parser = commands.add(
        "sync",
        sync,
        "Bring snapshots to a replica; only what is missing there travels.",
        more="'icecore init --replica-of' makes one. Goes on where it was when it is called again.",
    )
    _which(parser, "the replica")
    parser = commands.add(
        "copy",
        copy,
        "Copy snapshots to any other repository; all is stored anew, under its keys.",
        more="ICECORE_TARGET_PASSPHRASE, …_FILE or …_COMMAND opens that one if it is encrypted; none of them: what opens this one.",
    )
    _which(parser, "the other repository")


def _which(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("place", metavar="PLACE", help=what)
    parser.add_argument("snapshot", nargs="*", help=f"{WHICH}; none: all that it does not have")
    parser.add_argument("--job", default="", help="this job's snapshots only")


def _chosen(arguments: argparse.Namespace, context: Context) -> list[SnapshotRecord] | None:
    repository = context.repository()
    if arguments.snapshot:
        wanted = {repository.find(text).snapshot for text in arguments.snapshot}
        return [record for record in repository.snapshots(job=arguments.job) if record.snapshot in wanted]
    return repository.snapshots(job=arguments.job) if arguments.job else None


def sync(arguments: argparse.Namespace, context: Context) -> int:
    """icecore sync."""
    done = context.repository().sync_to(arguments.place, _chosen(arguments, context))
    context.output.result(
        "sync.done",
        {
            "snapshots": done.snapshots,
            "objects": done.objects,
            "bytes": done.bytes,
            "present": done.present,
            "lost": [lost.snapshot for lost in done.lost],
        },
        f"brought {len(done.snapshots)} snapshots, {units.size(done.bytes)} in {done.objects} objects; {done.present} were there",
    )
    return _lost(done.lost, context)


def copy(arguments: argparse.Namespace, context: Context) -> int:
    """icecore copy."""
    environment = os.environ
    file, command = (environment.get(f"ICECORE_TARGET_PASSPHRASE_{name}", "") for name in ("FILE", "COMMAND"))
    apart = bool(file or command or environment.get("ICECORE_TARGET_PASSPHRASE"))
    given = passphrase.given(file, command) if apart else passphrase.current(context.config)
    done = context.repository().copy_to(arguments.place, _chosen(arguments, context), passphrase=given)
    context.output.result(
        "copy.done",
        {
            "snapshots": done.snapshots,
            "logical": done.logical,
            "stored": done.stored,
            "lost": [lost.snapshot for lost in done.lost],
        },
        f"copied {len(done.snapshots)} snapshots: read {units.size(done.logical)}, stored {units.size(done.stored)}",
    )
    return _lost(done.lost, context)


def _lost(lost: Sequence[Lost], context: Context) -> int:
    for one in lost:
        context.output.note(f"LEFT OUT {one.snapshot}: {one.error}")
    return Damaged.exit_code if lost else 0
