"""Commands that bring snapshots to other repositories: sync to a replica, copy to any other."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING

from icecore import units
from icecore.access import passphrase
from icecore.commands.context import Context
from icecore.commands.parsing import DRY_RUN, READ_ONLY_ALL, SNAPSHOT, Commands
from icecore.errors import Damaged

if TYPE_CHECKING:
    from icecore.store.format.state import SnapshotRecord
    from icecore.store.replication.reconcile import Plan
    from icecore.store.replication.replicas import Lost

_READ_ONLY = READ_ONLY_ALL.replace("the repository", "the source repository", 1)


def add(commands: Commands) -> None:
    """Add the commands."""
    parser = commands.add(
        "sync",
        sync,
        "Bring snapshots, pins and tags to a replica.",
        "icecore sync s3://backup/jobs",
        "icecore sync --forget --dry-run /mnt/replica",
        more="Transfers only what the replica lacks, and resumes where an interrupted sync stopped."
        " 'icecore init --replica-of' makes a replica.",
    )
    _which(parser, "the replica")
    parser.add_argument(
        "--forget",
        action="store_true",
        help="also forget in the replica the snapshots that this repository sent and has forgotten, unless they are pinned in the replica",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help=DRY_RUN)
    parser.add_argument("--read-only", action="store_true", help=_READ_ONLY)
    parser = commands.add(
        "copy",
        copy,
        "Copy snapshots to any other repository.",
        "icecore copy /srv/other train",
        more="The data is encoded again, under the keys of the other repository. If that is encrypted,"
        " ICECORE_TARGET_PASSPHRASE, ICECORE_TARGET_PASSPHRASE_FILE or ICECORE_TARGET_PASSPHRASE_COMMAND gives its"
        " passphrase; without them, this repository's passphrase is used.",
    )
    _which(parser, "the other repository")
    parser.add_argument("--read-only", action="store_true", help=_READ_ONLY)


def _which(parser: argparse.ArgumentParser, what: str) -> None:
    parser.add_argument("place", metavar="PLACE", help=what)
    parser.add_argument(
        "snapshot",
        nargs="*",
        metavar="SNAPSHOT",
        help=f"{SNAPSHOT} (default: all that are missing there)",
    )
    parser.add_argument("--job", metavar="JOB", default="", help="only this job's snapshots")


def _chosen(arguments: argparse.Namespace, context: Context) -> list[SnapshotRecord] | None:
    repository = context.repository()
    if arguments.snapshot:
        wanted = {repository.find(text).snapshot for text in arguments.snapshot}
        return [
            record
            for record in repository.snapshots(job=arguments.job)
            if record.snapshot in wanted
        ]
    return repository.snapshots(job=arguments.job) if arguments.job else None


def sync(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore sync."""
    repository, job, forget = context.repository(), arguments.job, arguments.forget
    named = _chosen(arguments, context) if arguments.snapshot else None
    if arguments.dry_run:
        return _would_sync(
            repository.plan_sync(arguments.place, named, job=job, forget=forget), forget, context
        )
    done = repository.sync_to(
        arguments.place, named, job=job, forget=forget, register=not arguments.read_only
    )
    context.output.result(
        "sync.done",
        {
            "snapshots": done.snapshots,
            "objects": done.objects,
            "bytes": done.bytes,
            "present": done.present,
            "marked": done.marked,
            "forgotten": done.forgotten,
            "kept": done.kept,
            "lost": [lost.snapshot for lost in done.lost],
        },
        f"brought {len(done.snapshots)} snapshots, {units.size(done.bytes)} in {done.objects} objects; {done.present} were present"
        + (f"; pins and tags of {len(done.marked)}" if done.marked else "")
        + (f"; forgot {len(done.forgotten)}" if forget else ""),
    )
    for snapshot in done.kept:
        context.output.note(f"KEPT {snapshot}: it is pinned there")
    if forget and done.lost:
        context.output.note("nothing was forgotten there, because snapshots were left out")
    return _lost(done.lost, context)


def _would_sync(plan: Plan, forget: bool, context: Context) -> int:
    """Print the plan of a dry run."""
    keep = {record.snapshot for record in plan.keep}
    parts = {
        "bring": [record.snapshot for record in plan.bring],
        "mark": [record.snapshot for record in plan.mark],
        "forget": [record.snapshot for record in plan.forget if record.snapshot not in keep],
        "keep": sorted(keep),
    }
    words = (
        f"would bring {len(parts['bring'])} snapshots, and pins and tags of {len(parts['mark'])}"
    )
    if forget:
        words += (
            f"; would forget {len(parts['forget'])}, and keep {len(keep)} that are pinned there"
        )
    context.output.result("sync.plan", {name: list(ids) for name, ids in parts.items()}, words)
    for name, ids in parts.items():
        for snapshot in ids:
            context.output.line(f"{name:<6}  {snapshot}")
    return 0


def copy(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore copy."""
    environment = os.environ
    file, command = (
        environment.get(f"ICECORE_TARGET_PASSPHRASE_{name}", "") for name in ("FILE", "COMMAND")
    )
    apart = bool(file or command or environment.get("ICECORE_TARGET_PASSPHRASE"))
    given = passphrase.given(file, command) if apart else passphrase.current(context.config)
    done = context.repository().copy_to(
        arguments.place,
        _chosen(arguments, context),
        passphrase=given,
        register=not arguments.read_only,
    )
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
