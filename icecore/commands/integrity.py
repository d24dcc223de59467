"""Commands that find and repair damage: check, repair."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands.context import Context
from icecore.commands.parsing import DRY_RUN, READ_ONLY, Commands
from icecore.errors import Damaged
from icecore.events import Value

if TYPE_CHECKING:
    pass


def add(commands: Commands) -> None:
    """Add the commands."""
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


def _share(text: str) -> float:
    try:
        percent = float(text.removesuffix("%"))
    except ValueError:
        percent = -1.0
    if not 0 <= percent <= 100:
        raise argparse.ArgumentTypeError(f"{text!r} is not a percentage from 0 to 100")
    return percent / 100


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
