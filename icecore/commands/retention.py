"""Commands that decide what a repository retains: forget, mark, gc."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands.context import Context
from icecore.commands.parsing import DRY_RUN, PIN, SNAPSHOT, Commands, add_setting, overridden
from icecore.config import ForgetSettings, GcSettings
from icecore.config.kinds import TAG_KIND, TEXT
from icecore.errors import UsageError
from icecore.events import Value

if TYPE_CHECKING:
    from icecore.store.maintenance.gc import Options


def add_forget(commands: Commands) -> None:
    """Add forget."""
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
        type=TAG_KIND,
        action="append",
        default=[],
        metavar="TAG",
        help="keep all snapshots with this tag; repeatable",
    )


def add_mark(commands: Commands) -> None:
    """Add mark."""
    parser = commands.add(
        "mark",
        mark,
        "Pin or tag a snapshot.",
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
        type=TAG_KIND,
        action="append",
        default=[],
        metavar="TAG",
        help="add a tag; repeatable",
    )
    parser.add_argument(
        "--untag",
        type=TEXT,
        action="append",
        default=[],
        metavar="TAG",
        help="remove a tag; repeatable",
    )


def add_gc(commands: Commands) -> None:
    """Add gc."""
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


def forget(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore forget."""
    if context.service is not None:
        from icecore.commands import remote

        return remote.forget(arguments, context, context.service)
    from icecore.snapshots.addressing import shortest
    from icecore.store.maintenance.forget import Policy
    from icecore.store.maintenance.gc import Options

    settings = overridden(context.config.forget, arguments)
    given = [key for key in settings.__struct_fields__ if getattr(arguments, key) is not None]
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
            context.output.note(f"{record.snapshot} has no tag {tag!r}")
    kept = [tag for tag in record.tags if tag not in arguments.untag]
    tags = kept + [tag for tag in arguments.tag if tag not in kept]
    record = repository.update(record, pinned=arguments.pin, tags=tags)
    labels = " ".join([*(["pinned"] if record.pinned else []), *record.tags]) or "no tags"
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
