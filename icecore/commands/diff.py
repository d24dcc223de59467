"""The command diff."""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import msgspec

from icecore import units
from icecore.commands.context import Context
from icecore.commands.parsing import ROWS, SNAPSHOT, Commands
from icecore.errors import UsageError
from icecore.events import Value
from icecore.text import printable, printable_command

if TYPE_CHECKING:
    from icecore.snapshots.difference import Difference


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "diff",
        diff,
        "Compare two snapshots.",
        "icecore diff train~1 train",
        more="Memory is compared by cells of 1 MiB.",
    )
    parser.add_argument("older", metavar="OLDER", help=SNAPSHOT)
    parser.add_argument(
        "newer",
        nargs="?",
        default="",
        metavar="NEWER",
        help="the other snapshot (default: OLDER is compared with its parent)",
    )
    parser.add_argument(
        "--all",
        action="store_true",
        help=f"list all regions, not only the {ROWS} that changed most",
    )


def diff(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore diff."""
    if context.service is not None:
        from icecore.commands import remote

        return remote.diff(arguments, context, context.service)
    repository = context.repository()
    older, newer = arguments.older, arguments.newer
    if not newer:
        record = repository.find(older)
        if not record.parent:
            raise UsageError(f"snapshot {record.snapshot} has no parent", cure="name two snapshots")
        older, newer = record.parent, record.snapshot
    started = time.monotonic()
    found = repository.diff(older, newer)
    _report_difference(found, context, arguments.all)
    context.output.note(f"compared in {units.seconds(time.monotonic() - started)}")
    return 0


def _report_difference(found: Difference, context: Context, everything: bool) -> None:
    from icecore.sizes import CELL_BYTES

    output = context.output
    output.line(f"{found.older} → {found.newer}")
    for side, title in (("older", found.containers[0]), ("newer", found.containers[1])):
        if title:
            output.result(
                "diff.container",
                {"side": side, "container": title},
                f"{side}: container {printable(title)}",
            )
    for state, process in found.processes:
        words: dict[str, Value] = {
            "state": state,
            "pid": process.image_id,
            "command": list(process.command),
        }
        output.result(
            "diff.process",
            words,
            f"process {process.image_id} {state}: {printable_command(process.command)}",
        )
    for state, file in found.files:
        output.result(
            "diff.file",
            {"state": state, "path": file.path, "bytes": file.size},
            f"file {printable(file.path)} {state}: {units.size(file.size)}",
        )
    for state, path, size in found.data:
        output.result("diff.data", {"state": state, "path": path, "bytes": size})
    shown_data = found.data if everything else found.data[:ROWS]
    if shown_data:
        rows = [[state, units.size(size), printable(path)] for state, path, size in shown_data]
        output.table(["STATE", "SIZE", "PATH"], rows, title="data", right=["SIZE"])
        if len(shown_data) < len(found.data):
            output.line(f"and {len(found.data) - len(shown_data)} more (--all shows them)")
        output.line("")
    regions = sorted(found.regions, key=lambda region: -region.changed)
    for region in regions:
        output.result("diff.region", msgspec.structs.asdict(region))
    shown = regions if everything else regions[:ROWS]
    rows = [
        [
            f"{region.space} {printable(region.key)}",
            f"{region.start:#x}" if region.space in ("process", "device") else "",
            f"{region.kind} {printable(region.name) if region.name != region.key else ''}".strip(),
            region.state,
            units.size(region.length),
            str(region.cells),
            units.size(region.changed),
            units.size(region.stored),
        ]
        for region in shown
    ]
    columns = ["SPACE", "START", "REGION", "STATE", "LENGTH", "CELLS", "CHANGED", "STORED"]
    output.table(columns, rows, right=["LENGTH", "CELLS", "CHANGED", "STORED"])
    if len(shown) < len(regions):
        output.line(f"and {len(regions) - len(shown)} more (--all shows them)")
    rows = []
    for kind, total in found.totals.items():
        output.result(
            "diff.total",
            {
                "space": kind,
                "logical": total.logical,
                "changed": total.changed,
                "stored": total.stored,
            },
        )
        rows.append(
            [
                kind,
                units.size(total.logical),
                units.size(total.changed),
                units.percent(total.changed, total.logical),
                units.size(total.stored),
            ]
        )
    output.line("")
    output.table(
        ["KIND", "LOGICAL", "CHANGED", "SHARE", "STORED"],
        rows,
        right=["LOGICAL", "CHANGED", "SHARE", "STORED"],
    )
    output.line(f"bytes count by whole cells of {units.size(CELL_BYTES)}")
