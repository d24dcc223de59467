"""Commands that make and maintain repositories: init, forget, mark, gc, check, repair, stats."""

from __future__ import annotations

import argparse
import os
from contextlib import ExitStack
from dataclasses import fields
from typing import TYPE_CHECKING

from icecore import units
from icecore.access import passphrase
from icecore.commands.context import (
    DRY_RUN,
    PIN,
    PLACE,
    READ_ONLY,
    SNAPSHOT,
    Commands,
    Context,
    add_setting,
    overridden,
)
from icecore.config import LABEL, SIZE, TEXT, ForgetSettings, GcSettings
from icecore.errors import Damaged, UsageError
from icecore.events import Value

if TYPE_CHECKING:
    from icecore.store.maintenance.gc import Options


def add(commands: Commands) -> None:
    """Add the commands."""
    _add_forget(commands.of_group("snapshots"))
    _add_mark(commands.of_group("snapshots"))
    _add_init(commands)
    parser = commands.add(
        "gc",
        gc,
        "Free the space of forgotten snapshots.",
        "icecore gc --dry-run",
        "icecore gc",
        more="Safe beside running dumps and restores, and safe to interrupt at any time.",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help=DRY_RUN)
    add_setting(
        parser, GcSettings, "fence_seconds", "treat a session as dead after this silence", "--fence"
    )

    parser = commands.add(
        "check",
        check,
        "Verify the objects that snapshots need.",
        "icecore check",
        "icecore check --read-data 5",
        more="Names what is damaged; exits with status 9 if anything is.",
    )
    parser.add_argument(
        "--read-data",
        nargs="?",
        type=_share,
        const=1.0,
        default=0.0,
        metavar="PERCENT",
        help="also read and verify the data: all, or this percentage (default: none)",
    )
    parser.add_argument("--read-only", action="store_true", help=READ_ONLY)

    parser = commands.add(
        "repair",
        repair,
        "Repair damage, from a replica or from what is left.",
        "icecore repair --dry-run",
        "icecore repair --from s3://backup/jobs",
        more="Intact data stays unchanged. Snapshots that lost data stay listed, in quarantine. If the newest"
        " log entries are lost, the log continues from the newest intact entry, and snapshots with intact"
        " manifests are listed again. Exits with status 9 if anything is lost.",
    )
    parser.add_argument("-n", "--dry-run", action="store_true", help=DRY_RUN)
    parser.add_argument(
        "--from",
        dest="source",
        default="",
        metavar="PLACE",
        help="a replica from which damaged objects are fetched first",
    )
    parser.add_argument(
        "--read-data",
        type=_share,
        default=1.0,
        metavar="PERCENT",
        help="read only this percentage of the data; damage to the rest is not found (default: 100)",
    )
    parser.add_argument(
        "--accept-rollback",
        action="store_true",
        help="continue from the existing log even if this node has seen newer or other log entries;"
        " use it only if the storage has lost them",
    )

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
        help="share the master secret of this repository, so that 'icecore sync' moves its objects unchanged;"
        " encrypted if it is, with a passphrase of its own if ICECORE_NEW_PASSPHRASE is set",
    )
    parser.add_argument(
        "--shard",
        type=SIZE,
        default=64 << 20,
        metavar="SIZE",
        help="target size of the objects that hold chunks (default: 64 MiB)",
    )


def _add_forget(commands: Commands) -> None:
    parser = commands.add(
        "forget",
        forget,
        "Remove snapshots from the list, by name or by policy.",
        "icecore forget train~3",
        "icecore forget --job train --keep-last 3 --keep-daily 7 --gc",
        more="A snapshot stays if any rule keeps it, or if it is pinned. 'icecore gc', or --gc, then frees the space.",
    )
    parser.add_argument("snapshot", nargs="*", metavar="SNAPSHOT", help=SNAPSHOT)
    parser.add_argument("-n", "--dry-run", action="store_true", help=DRY_RUN)
    parser.add_argument(
        "--gc", action="store_true", help="free the space at once, as 'icecore gc' does"
    )
    parser.add_argument(
        "--job", metavar="JOB", default="", help="apply the policy to this job only"
    )
    for rule, what in (
        ("last", "the newest N snapshots"),
        ("hourly", "the newest snapshot of each of the last N hours that have any"),
        ("daily", "the newest snapshot of each of the last N days that have any"),
        ("weekly", "the newest snapshot of each of the last N weeks that have any"),
        ("monthly", "the newest snapshot of each of the last N months that have any"),
        ("yearly", "the newest snapshot of each of the last N years that have any"),
        ("within", "all snapshots that are at most this much older than the newest"),
    ):
        add_setting(parser, ForgetSettings, f"keep_{rule}", f"of each job, keep {what}")
    parser.add_argument(
        "--keep-tag",
        type=LABEL,
        action="append",
        default=[],
        metavar="LABEL",
        help="keep all snapshots with this label; repeatable",
    )


def _add_mark(commands: Commands) -> None:
    parser = commands.add(
        "mark",
        mark,
        "Pin or label a snapshot.",
        "icecore mark --pin --tag release train",
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", help=SNAPSHOT)
    parser.add_argument(
        "--pin",
        action=argparse.BooleanOptionalAction,
        default=None,
        help=PIN,
    )
    parser.add_argument(
        "--tag",
        type=LABEL,
        action="append",
        default=[],
        metavar="LABEL",
        help="add a label; repeatable",
    )
    parser.add_argument(
        "--untag",
        type=TEXT,
        action="append",
        default=[],
        metavar="LABEL",
        help="remove a label; repeatable",
    )


def _share(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage from 0 to 100")
    return percent / 100


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


def forget(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore forget."""
    if context.service is not None:
        from icecore.commands import remote

        return remote.forget(arguments, context, context.service)
    from icecore.snapshots.addressing import shortest
    from icecore.store.maintenance.forget import Policy
    from icecore.store.maintenance.gc import Options

    settings = overridden(context.config.forget, arguments)
    given = [about.name for about in fields(settings) if getattr(arguments, about.name) is not None]
    repository = context.repository()
    if arguments.snapshot:
        if given or arguments.keep_tag or arguments.job:
            raise UsageError(
                "named snapshots and a policy exclude each other",
                cure="forget by name, then by policy",
            )
        records = [repository.find(text) for text in arguments.snapshot]
        pinned = [record.snapshot for record in records if record.pinned]
        if pinned:
            raise UsageError(f"pinned: {', '.join(pinned)}", cure="'icecore mark --no-pin' first")
        decisions = [(record, False, ["named"]) for record in records]
    else:
        policy = Policy(
            settings.keep_last,
            settings.keep_hourly,
            settings.keep_daily,
            settings.keep_weekly,
            settings.keep_monthly,
            settings.keep_yearly,
            settings.keep_within,
            frozenset(arguments.keep_tag),
        )
        if arguments.job:
            context.require_job(arguments.job)
        decisions = [
            (one.record, one.keep, one.reasons)
            for one in repository.plan_forget(policy, job=arguments.job)
        ]
    digits = shortest([record for record, *_ in decisions])
    rows = []
    for record, keep, reasons in decisions:
        words: dict[str, Value] = {
            "snapshot": record.snapshot,
            "job": record.job,
            "keep": keep,
            "reasons": list(reasons),
        }
        context.output.result("forget.decision", words)
        verdict = "keep" if keep else "forget"
        rows.append(
            [
                record.snapshot[:digits],
                record.job,
                units.moment(record.created_ns / 1e9),
                verdict,
                ", ".join(reasons),
            ]
        )
    context.output.table(["SNAPSHOT", "JOB", "TAKEN", "VERDICT", "WHY"], rows)
    doomed = [record.snapshot for record, keep, _ in decisions if not keep]
    removed = [] if arguments.dry_run or not doomed else repository.forget(doomed)
    done: dict[str, Value] = {"dry_run": arguments.dry_run, "kept": len(decisions) - len(doomed)}
    if arguments.dry_run:
        freed = repository.plan_free(doomed)
        done |= {
            "forgotten": len(doomed),
            "free_objects": freed.objects,
            "free_bytes": freed.bytes,
            "compact_bytes": freed.compact_bytes,
        }
        said = f"would forget {len(doomed)}, {len(decisions) - len(doomed)} kept; 'icecore gc' would then free {units.size(freed.bytes)}"
        said += (
            f" in {freed.objects} objects and {units.size(freed.compact_bytes)} by rewriting others"
        )
    else:
        done["forgotten"] = len(removed)
        said = f"forgot {len(removed)}, {len(decisions) - len(doomed)} kept" + (
            "" if arguments.gc else "; 'icecore gc' frees the space"
        )
    context.output.result("forget.done", done, said)
    if arguments.gc and not arguments.dry_run:
        _collect(context, Options(fence_seconds=context.config.gc.fence_seconds))
    return 0


def mark(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore mark."""
    if context.service is not None:
        from icecore.commands import remote

        return remote.mark(arguments, context, context.service)
    from icecore.snapshots.contents import snapshot_fields

    if arguments.pin is None and not arguments.tag and not arguments.untag:
        raise UsageError("nothing to change", cure="give --pin, --no-pin, --tag or --untag")
    repository = context.repository()
    record = repository.find(arguments.snapshot)
    for tag in arguments.untag:
        if tag not in record.tags:
            context.output.note(f"{record.snapshot} has no label {tag!r}")
    kept = [tag for tag in record.tags if tag not in arguments.untag]
    tags = kept + [tag for tag in arguments.tag if tag not in kept]
    record = repository.update(record, pinned=arguments.pin, tags=tags)
    labels = " ".join([*(["pinned"] if record.pinned else []), *record.tags]) or "no labels"
    context.output.result("snapshot", snapshot_fields(record), f"{record.snapshot}: {labels}")
    return 0


def gc(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore gc."""
    from icecore.store.maintenance.gc import Options

    repository = context.repository()
    options = Options(fence_seconds=overridden(context.config.gc, arguments).fence_seconds)
    if arguments.dry_run:
        plan = repository.plan_gc(options)
        context.output.result(
            "gc.plan",
            {
                "fence": [session.id for session in plan.fence],
                "condemn": len(plan.condemn),
                "delete": len(plan.delete),
                "delete_bytes": plan.delete_bytes,
                "wait": len(plan.wait),
                "wait_bytes": plan.wait_bytes,
                "compact": len(plan.compact),
                "compact_bytes": plan.compact_bytes,
                "rewrite": plan.rewrite,
                "trim": len(plan.trim),
                "kept_bytes": plan.kept_bytes,
            },
            f"would free {units.size(plan.delete_bytes)} in {len(plan.delete)} objects"
            f" and {units.size(plan.compact_bytes)} by rewriting {len(plan.compact)}; {units.size(plan.kept_bytes)} stay"
            + (f"; {units.size(plan.wait_bytes)} wait for open sessions" if plan.wait else "")
            + (f"; {len(plan.fence)} silent sessions would be ended" if plan.fence else ""),
        )
        return 0
    _collect(context, options)
    return 0


def _collect(context: Context, options: Options) -> None:
    result = context.repository().gc(options)
    context.output.result(
        "gc.done",
        {
            "fenced": result.fenced,
            "compacted": result.compacted.shards,
            "compacted_bytes": result.compacted.freed_bytes,
            "rebased": result.compacted.rebased,
            "condemned": result.condemned,
            "deleted": result.deleted,
            "deleted_bytes": result.deleted_bytes,
            "waiting": result.waiting,
            "rewritten": result.rewritten,
            "trimmed": result.trimmed,
        },
        f"freed {units.size(result.deleted_bytes)} in {result.deleted} objects"
        + (f"; {result.waiting} wait for open sessions" if result.waiting else ""),
    )


def check(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore check."""
    report = context.repository().check(
        read_data=arguments.read_data, register=not arguments.read_only
    )
    output = context.output
    for damage in report.lost:
        output.line(f"lost before {damage} (in quarantine: {', '.join(damage.snapshots)})")
    for damage in report.damages:
        fields: dict[str, Value] = {
            "kind": damage.kind,
            "object": damage.name,
            "why": damage.why,
            "snapshots": list(damage.snapshots),
        }
        lost = f" (cannot be restored: {', '.join(damage.snapshots)})" if damage.snapshots else ""
        output.result("check.finding", fields, f"DAMAGED {damage}{lost}")
    for one in report.foreign:
        name = ascii(one.name)[1:-1]
        output.result(
            "check.foreign", {"object": name, "what": one.what}, f"foreign {name}: {one.what}"
        )
    rows = [
        [kind, str(report.objects[kind]), units.size(report.bytes[kind])]
        for kind in sorted(report.objects)
    ]
    output.table(["OBJECTS", "NUMBER", "SIZE"], rows, right=["NUMBER", "SIZE"])
    output.result(
        "check.done",
        {
            "sound": report.sound,
            "damages": len(report.damages),
            "foreign": len(report.foreign),
            "snapshots": report.snapshots,
            "quarantined": len(report.quarantined),
            "objects": sum(report.objects.values()),
            "object_bytes": sum(report.bytes.values()),
            "unreached": report.unreached,
            "unreached_bytes": report.unreached_bytes,
            "chunks": report.chunks,
            "read_chunks": report.read_chunks,
        },
        f"{report.snapshots} snapshots, {report.chunks} chunks of which {report.read_chunks} read: "
        + ("all is well" if report.sound else f"{len(report.damages)} damages")
        + (f"; {len(report.quarantined)} in quarantine" if report.quarantined else "")
        + (
            f"; {units.size(report.unreached_bytes)} wait for 'icecore gc'"
            if report.unreached
            else ""
        ),
    )
    return 0 if report.sound else Damaged.exit_code


def repair(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore repair."""
    output, repository = context.output, context.repository(rebuild=True)
    work = repository.plan_repair if arguments.dry_run else repository.repair
    plan = work(
        arguments.source or None,
        read_data=arguments.read_data,
        accept_rollback=arguments.accept_rollback,
    )
    for damage in plan.damages:
        if damage.kind == "log entry":
            output.line(f"DAMAGED {damage}")
    for fix in plan.fixes:
        output.result(
            "repair.fix",
            {"kind": fix.kind, "object": fix.name, "how": fix.how},
            f"{fix.kind} {fix.name}: {fix.how}",
        )
    for snapshot, known in plan.recovered.items():
        output.result(
            "repair.recovered",
            {"snapshot": snapshot, "why": known},
            f"RECOVERED {snapshot}: {known}",
        )
    for name, why in plan.unlisted.items():
        output.result(
            "repair.unlisted", {"object": name, "why": why}, f"not listed: manifest {name}: {why}"
        )
    for snapshot, why in plan.quarantine.items():
        output.result(
            "repair.loss", {"snapshot": snapshot, "why": why}, f"QUARANTINED {snapshot}: {why}"
        )
    for snapshot in plan.release:
        output.result("repair.release", {"snapshot": snapshot}, f"{snapshot} is readable again")
    for damage in plan.beyond:
        output.result(
            "repair.beyond",
            {"kind": damage.kind, "object": damage.name, "why": damage.why},
            f"BEYOND REPAIR {damage}",
        )
    output.result(
        "repair.done",
        {
            "dry_run": arguments.dry_run,
            "damages": len(plan.damages),
            "fixes": len(plan.fixes),
            "quarantined": len(plan.quarantine),
            "released": len(plan.release),
            "beyond": len(plan.beyond),
            "recovered": len(plan.recovered),
        },
        f"{len(plan.damages)} damages, {len(plan.fixes)} things {'to repair' if arguments.dry_run else 'repaired'}; "
        f"{len(plan.quarantine)} snapshots lost data, {len(plan.release)} are readable again"
        + (f", {len(plan.recovered)} found again" if plan.recovered else ""),
    )
    return Damaged.exit_code if plan.quarantine or plan.beyond else 0


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
