"""Commands on snapshots: ls and show here; dump, restore and diff in modules of their own."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands import diff, dump, restore
from icecore.commands.context import Context
from icecore.commands.parsing import ROWS, SNAPSHOT, Commands
from icecore.config.kinds import TAG_KIND
from icecore.events import Value
from icecore.text import printable, printable_command

if TYPE_CHECKING:
    from icecore.store.format.manifest import Manifest


def add(commands: Commands) -> None:
    """Add the commands."""
    dump.add(commands)
    restore.add(commands)
    parser = commands.add(
        "ls", ls, "List snapshots.", "icecore ls train --tag nightly", numpy=False
    )
    parser.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="list only this job's snapshots"
    )
    parser.add_argument(
        "--tag",
        type=TAG_KIND,
        action="append",
        default=[],
        metavar="TAG",
        help="list only snapshots with this tag; repeatable",
    )

    parser = commands.add(
        "show",
        show,
        "Show what a snapshot contains.",
        "icecore show train",
        more="Lists processes, memory regions, open files and sizes.",
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", help=SNAPSHOT)
    parser.add_argument(
        "--all", action="store_true", help=f"list all files, not only the {ROWS} largest"
    )
    diff.add(commands)


def ls(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore ls."""
    from icecore.snapshots import contents
    from icecore.snapshots.addressing import shortest

    if context.output.as_json:  # the owner costs a request for each snapshot
        owned = context.owned_snapshots()
        owners = {record.snapshot: owner for record, owner in owned}
        everything = [record for record, _ in owned]
    else:
        owners, everything = {}, context.snapshots()
    if arguments.job:
        context.require_job(arguments.job)
    digits = shortest(everything)
    rows = []
    for record in everything:
        if arguments.job not in ("", record.job) or not set(arguments.tag) <= set(record.tags):
            continue
        owner = contents.owner_fields(owners.get(record.snapshot))
        context.output.result("snapshot", {**contents.snapshot_fields(record), **owner})
        rows.append(
            [
                record.snapshot[:digits],
                record.job,
                units.moment(record.created_ns / 1e9),
                units.size(record.logical),
                units.size(record.device) if record.device else "–",
                units.size(record.data) if record.data else "–",
                units.size(record.changed),
                units.size(record.stored),
                units.seconds(record.window_seconds) if record.window_seconds else "–",
                record.parent[:digits] or "–",
                " ".join(
                    [
                        *(["QUARANTINED"] if record.quarantined else []),
                        *(["pinned"] if record.pinned else []),
                        *record.tags,
                    ]
                ),
            ]
        )
    columns = [
        "SNAPSHOT",
        "JOB",
        "TAKEN",
        "LOGICAL",
        "ON GPUS",
        "DATA",
        "CHANGED",
        "STORED",
        "WINDOW",
        "PARENT",
        "TAGS",
    ]
    right = ["LOGICAL", "ON GPUS", "DATA", "CHANGED", "STORED", "WINDOW"]
    if not any(record.data for record in everything):
        at = columns.index("DATA")
        del columns[at]
        right.remove("DATA")
        rows = [[*row[:at], *row[at + 1 :]] for row in rows]
    context.output.table(columns, rows, right=right)
    return 0


def show(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore show."""
    if context.service is not None:
        from icecore.commands import remote

        return remote.show(arguments, context, context.service)
    from icecore.commands.event_text import left_words
    from icecore.host.jobs.identity import user_name
    from icecore.snapshots import contents
    from icecore.store.format.archive import container_title
    from icecore.store.format.contract import left_to_driver, snapshot_owner

    repository, record = context.repository().locate(arguments.snapshot)
    manifest = repository.manifest(record)
    output, sizes = context.output, manifest.sizes
    output.result("snapshot", contents.snapshot_fields(record))
    resident, moved = contents.device_bytes(manifest)
    left = left_to_driver(manifest)
    owner = snapshot_owner(manifest)
    host = sizes.logical - sizes.device
    output.result("snapshot.details", contents.details(manifest))
    if not output.as_json:
        lines = [
            ("snapshot", manifest.snapshot),
            ("job", manifest.job),
            *([("container", printable(title))] if (title := container_title(manifest)) else []),
            ("lineage", manifest.lineage),
            ("parent", manifest.parent or "none"),
            ("user", user_name(owner)),
            ("taken", f"{units.moment(manifest.created_ns / 1e9)} on {manifest.host}"),
            ("window", units.seconds(manifest.window_seconds)),
            ("host memory", f"{units.size(host)} of data"),
            (
                "device memory",
                f"{units.size(sizes.device)} of data; {units.size(resident + moved)} including zeros"
                if resident + moved
                else "none",
            ),
            *(
                [
                    (
                        "of it resident",
                        f"{units.size(resident)} including zeros; stays in place in windows",
                    )
                ]
                if resident
                else []
            ),
            *(
                [("of it moved", f"{units.size(moved)} including zeros, by the driver")]
                if moved
                else []
            ),
            *([("allocated", words)] if (words := left_words(left)) else []),
            *([("data", f"{units.size(record.data)} in files")] if record.data else []),
            ("zeros", f"{units.size(sizes.zero)} in all memory, not stored"),
            (
                "changed",
                f"{units.size(sizes.changed)} against the parent"
                if manifest.parent
                else units.size(sizes.changed),
            ),
            ("stored", f"{units.size(sizes.stored)} new: {_codecs(sizes.by_codec)}"),
            (
                "needs",
                f"{manifest.requirements.architecture}, kernel like {manifest.requirements.kernel}, CRIU {manifest.requirements.criu}",
            ),
            (
                "namespaces",
                f"own {' '.join(contents.namespaces(manifest)) or 'none'}, network {manifest.namespaces.network}",
            ),
            (
                "GPUs",
                ", ".join(f"{gpu['name']} {gpu['uuid']}" for gpu in manifest.requirements.devices)
                or "none",
            ),
            (
                "tags",
                " ".join([*(["pinned"] if manifest.pinned else []), *manifest.tags]) or "none",
            ),
        ]
        output.table(["", ""], [[name, text] for name, text in lines])
        output.line("")
    _show_processes(manifest, context)
    _show_regions(manifest, context)
    _show_files(manifest, context, arguments.all)
    _show_data(manifest, context)
    return 0


def _codecs(by_codec: dict[str, int]) -> str:
    parts = sorted(by_codec.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {units.size(size)}" for name, size in parts if size) or "nothing"


def _count(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _show_processes(manifest: Manifest, context: Context) -> None:
    from icecore.snapshots import contents

    rows = []
    for process, fields in zip(manifest.processes, contents.processes(manifest), strict=True):
        context.output.result("snapshot.process", fields)
        threads = str(process.threads) if process.alive else "zombie"
        rows.append(
            [
                str(process.image_id),
                str(process.parent),
                threads,
                printable_command(process.command),
            ]
        )
    context.output.table(
        ["PID", "PARENT", "THREADS", "COMMAND"],
        rows,
        title="processes",
        right=["PID", "PARENT", "THREADS"],
    )


def _show_regions(manifest: Manifest, context: Context) -> None:
    """Print the regions by kind within each space."""
    from icecore.snapshots import contents

    rows = []
    for fields in contents.regions(manifest):
        context.output.result("snapshot.regions", fields)
        rows.append(
            [
                f"{fields['space']} {printable(str(fields['key']))}".strip(),
                str(fields["kind"]),
                str(fields["regions"]),
                units.size(_count(fields["bytes"])),
            ]
        )
    context.output.line("")
    context.output.table(
        ["SPACE", "KIND", "REGIONS", "SPAN"], rows, title="regions", right=["REGIONS", "SPAN"]
    )


def _show_files(manifest: Manifest, context: Context, everything: bool) -> None:
    from icecore.snapshots import contents

    rows = []
    for fields in contents.files(manifest):
        context.output.result("snapshot.file", fields)
        rows.append(
            [
                units.size(_count(fields["bytes"])),
                "rw" if fields["writable"] else "r",
                str(fields["policy"]),
                printable(str(fields["path"])),
            ]
        )
    shown = rows if everything else rows[:ROWS]
    context.output.line("")
    context.output.table(["SIZE", "OPEN", "POLICY", "PATH"], shown, title="files", right=["SIZE"])
    if len(shown) < len(rows):
        context.output.line(f"and {len(rows) - len(shown)} smaller ones (--all shows them)")


def _show_data(manifest: Manifest, context: Context) -> None:
    from icecore.snapshots import contents

    rows = []
    for fields in contents.data(manifest):
        context.output.result("snapshot.data", fields)
        rows.append(
            [
                str(fields["entries"]),
                str(fields["files"]),
                units.size(_count(fields["bytes"])),
                printable(str(fields["path"])) + (" (private to the job)" if fields["own"] else ""),
            ]
        )
    if rows:
        context.output.line("")
        columns = ["ENTRIES", "FILES", "SIZE", "PATH"]
        context.output.table(columns, rows, title="data", right=columns[:3])
