"""Commands on snapshots: dump, restore, ls, show, diff."""

from __future__ import annotations

import argparse
import os
import time
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands.context import (
    PIN,
    READ_ONLY_ALL,
    SNAPSHOT,
    TAG,
    Commands,
    Context,
    add_setting,
    gpu_map,
    overridden,
)
from icecore.config import LABEL, DumpSettings, RestoreSettings
from icecore.errors import UsageError
from icecore.events import Value
from icecore.text import printable, printable_command

if TYPE_CHECKING:
    from icecore.difference import Difference
    from icecore.restorer.files.plan import FilePlan
    from icecore.restorer.requirements import Requirements
    from icecore.store.format.manifest import Manifest

_LARGEST = 20


def add(commands: Commands) -> None:
    """Add the commands."""
    _add_dump(commands)
    _add_restore(commands)
    parser = commands.add("ls", ls, "List snapshots.", "icecore ls train --tag nightly")
    parser.add_argument(
        "job", nargs="?", default="", metavar="JOB", help="list only this job's snapshots"
    )
    parser.add_argument(
        "--tag",
        type=LABEL,
        action="append",
        default=[],
        metavar="LABEL",
        help="list only snapshots with this label; repeatable",
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
        "--all", action="store_true", help=f"list all files, not only the {_LARGEST} largest"
    )

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
        help=f"list all regions, not only the {_LARGEST} that changed most",
    )


def _add_dump(commands: Commands) -> None:
    parser = commands.add(
        "dump",
        dump,
        "Take a snapshot of a running job or process tree.",
        "icecore dump train",
        "icecore dump --tag nightly --max-window 2s 4711",
        more="The job continues afterwards. Conditions that could lose or hang the job are checked"
        " before anything stops.",
    )
    parser.add_argument(
        "target", metavar="JOB|PID", help="a job's name, or the pid of a process tree's root"
    )
    parser.add_argument(
        "--job",
        metavar="NAME",
        default="",
        help="job to which the snapshot belongs (default: the job's or the program's name)",
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the job once the snapshot is committed"
    )
    parser.add_argument(
        "--keep-resident",
        action="store_true",
        help="with --stop: leave resident device memory on its GPUs, for 'restore --from-resident'",
    )
    parser.add_argument("--tag", type=LABEL, action="append", default=[], metavar="LABEL", help=TAG)
    parser.add_argument("--pin", action="store_true", help=PIN)

    def setting(key: str, what: str, *flags: str, default: str = "") -> None:
        add_setting(parser, DumpSettings, key, what, *flags, default=default)

    setting("max_window", "abandon the snapshot if the job would stand still for longer")
    setting("pre_copy", "scan the running job first, which leaves less for the window")
    setting(
        "memory",
        "read memory in place, or let CRIU send all of it, which is slower but needs fewer descriptors",
    )
    setting("staging_bytes", "maximum memory for changed cells in the window", "--staging")
    setting(
        "scan_threads",
        "threads that scan, and that encode",
        "--threads",
        default="one per core, at most 12",
    )
    setting("files", "for files open for writing: store the content, or record only size and time")
    setting("with_files", "also store the content of files open for reading")
    setting("verify_files", "hash files open for reading, so that a restore can compare them")
    setting("file_budget", "maximum bytes of open files that are read")
    setting("ghost_limit", "maximum size of a deleted file that is still open")
    setting(
        "connections",
        "TCP connections that leave the process tree: keep them, or close them at restore; those of"
        " unix sockets a restored job always finds closed",
        "--connections",
        "--tcp",
    )
    setting("gpu_lock", "time that submitted GPU work of a process may take before a retry")
    setting("gpu_shared", "assert that the processes share no device memory by CUDA IPC")
    setting(
        "populate",
        "allocate the host memory to which the driver moves device memory with all cores and huge pages",
    )
    setting("criu_plugins", "directory of CRIU's plugins, for AMD GPUs")
    setting(
        "link_rate",
        "bytes per second at which restores will read the snapshot; a slow link favors compression",
        default="that of the storage",
    )
    setting("workdir", "directory on tmpfs for CRIU's images")
    setting("before", "shell command to run before anything stops; if it fails, so does the dump")
    setting("after", "shell command to run once the job runs again")


def _add_restore(commands: Commands) -> None:
    parser = commands.add(
        "restore",
        restore,
        "Restore a snapshot's processes, once or several times.",
        "icecore restore train",
        "icecore restore --dry-run train@1",
        "icecore restore --name copy --files-to /srv/copy train~1",
        more="Either the whole process tree runs with all its memory, or none of it.",
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", help=SNAPSHOT)
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="compare this machine with the snapshot's requirements; start nothing",
    )
    parser.add_argument(
        "--name",
        metavar="NAME",
        default="",
        help="name of the restored job (default: the job's name, with a number if that job runs)",
    )
    parser.add_argument(
        "-a",
        "--attach",
        action="store_true",
        help="follow the job's output and return its exit status",
    )
    parser.add_argument(
        "--from-resident",
        action="store_true",
        help="use device memory that is still on its GPUs ('run --keep-resident', 'dump --stop"
        " --keep-resident'): fetch only cells that differ from the snapshot",
    )
    parser.add_argument(
        "--root", default="", metavar="DIR", help="root directory of the job's file system"
    )
    parser.add_argument(
        "--files-to",
        default="",
        metavar="DIR",
        help="give the job its own copies, below DIR, of the files that the restore would write;"
        " it sees them at their old paths; / returns to the original files",
    )
    parser.add_argument(
        "--gpu-map",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="replace a GPU of the job by another; UUIDs or numbers; repeatable",
    )

    def setting(key: str, what: str, *flags: str, default: str = "") -> None:
        add_setting(parser, RestoreSettings, key, what, *flags, default=default)

    setting(
        "mode",
        "full: start the job once all its memory is loaded; lazy: start at once and load memory on demand",
    )
    setting(
        "files",
        "files that the job had open for writing: restore their content, truncate them to their"
        " length, or leave them; auto: restore, but refuse if a running process writes to one",
    )
    setting(
        "verify_files", "compare the content of files that the job reads, where a hash is recorded"
    )
    setting(
        "connections",
        "the job's TCP connections: keep them, or close them",
        "--connections",
        "--tcp",
    )
    setting(
        "budget_bytes",
        "maximum memory for data that is fetched and not yet placed",
        "--budget",
        default="512 MiB, and as much for every further process with device memory",
    )
    setting(
        "threads",
        "threads that decode and place memory",
        default="one per core, at most 6, or --placers",
    )
    setting(
        "placers",
        "processes that decode and place memory in place of threads",
        default="none on small machines and for small jobs",
    )
    setting("workdir", "directory on tmpfs for CRIU's images", default="/dev/shm")
    setting("criu_plugins", "directory of CRIU's plugins, for AMD GPUs")
    setting("after", "shell command to run once the job runs")
    parser.add_argument(
        "--read-only",
        action="store_true",
        help=f"{READ_ONLY_ALL}; with --mode lazy, the job then already runs",
    )


def dump(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore dump."""
    if context.service is not None:
        from icecore.remote import commands as remote

        return remote.dump(arguments, context, context.service)
    from icecore import api

    settings = replace(context.config, dump=overridden(context.config.dump, arguments))
    options = replace(
        api.dump_options(settings),
        job=arguments.job,
        stop=arguments.stop,
        keep_resident=arguments.keep_resident,
        tags=tuple(arguments.tag),
        pinned=arguments.pin,
    )
    done = api.dump(
        arguments.target, context.repository(), options, config=settings, emit=context.output.event
    )
    sizes = done.sizes
    context.output.line(
        f"{done.snapshot}  {done.job}: stood still {units.seconds(done.window_seconds)}, {units.size(sizes.logical)} in memory, "
        f"{units.size(sizes.changed)} changed, {units.size(sizes.stored)} stored in {units.seconds(done.seconds)}"
    )
    return 0


def restore(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore restore."""
    from icecore.commands.jobs import follow

    if context.service is not None:
        from icecore.remote import commands as remote

        return remote.restore(
            arguments,
            context,
            context.service,
            lambda job, seen: follow(job, context, seen=seen),
        )
    from icecore import api

    settings = replace(context.config, restore=overridden(context.config.restore, arguments))
    options = replace(
        api.restore_options(settings),
        instance=arguments.name,
        root=arguments.root,
        files_to=os.path.abspath(arguments.files_to) if arguments.files_to else "",
        from_resident=arguments.from_resident,
        detach=not arguments.attach,
        register=not arguments.read_only,
        gpu_map=gpu_map(arguments.gpu_map),
        identity=context.origin.identity if context.origin is not None else None,
    )
    repository = context.repository()
    if arguments.dry_run:
        _report_requirements(
            api.check_restore(arguments.snapshot, repository, options, config=settings), context
        )
        return 0
    restored = api.restore(
        arguments.snapshot, repository, options, config=settings, emit=context.output.event
    )
    name = restored.job.name if restored.job else "the tree"
    context.output.line(
        f"{name} runs as process {restored.pid}, {units.seconds(restored.seconds_to_running)} after the call"
    )
    seconds = restored.wait_resident()
    if options.mode == "lazy":
        context.output.line(f"all its memory is loaded after {units.seconds(seconds)}")
    if not arguments.attach:
        return 0
    if restored.job is not None:
        return follow(restored.job, context, seen=restored.log_sizes)
    status = restored.wait()
    context.output.result(
        "job.ended", {"job": "", "instance": "", "how": str(status), "exit_code": status.exit_code}
    )
    return status.exit_code


def _report_requirements(found: Requirements, context: Context) -> None:
    """Print the requirements, and what a restore would do to files."""
    for check in found.checks:
        sign = "ok" if check.met else "BAD" if check.hard else "warn"
        fields: dict[str, Value] = {
            "name": check.name,
            "met": check.met,
            "hard": check.hard,
            "message": check.message,
            "cure": check.cure,
        }
        context.output.result(
            "restore.requirement", fields, f"{sign:<5} {check.name}: {check.message}"
        )
        if not check.met and check.cure:
            context.output.line(f"      cure: {check.cure}")
    _report_files(found.files, context)
    found.require()
    context.output.line("this machine meets all requirements")


def _report_files(plan: FilePlan, context: Context) -> None:
    """Print every file and directory that the restore would make or change, with its present and
    its future state.
    """
    rows = []
    for folder in plan.folders:
        fields: dict[str, Value] = {
            "path": folder.path,
            "action": "directory",
            "bytes_now": None,
            "bytes_then": 0,
            "mtime_now": None,
            "mtime_then": folder.mtime_ns / 1e9,
        }
        context.output.result("restore.file", fields)
        rows.append(["directory", "", "", "", units.moment(folder.mtime_ns / 1e9), folder.path])
    for action in plan.actions:
        then = action.file
        now = None if action.mtime_ns is None else action.mtime_ns / 1e9
        # Truncation sets the time itself; imported snapshots record no times.
        later = None if action.kind == "truncate" or not then.mtime_ns else then.mtime_ns / 1e9
        fields = {
            "path": then.path,
            "action": action.kind,
            "bytes_now": action.size,
            "bytes_then": then.size,
            "mtime_now": now,
            "mtime_then": later,
        }
        context.output.result("restore.file", fields)
        sizes = ["" if action.size is None else units.size(action.size), units.size(then.size)]
        times = ["" if moment is None else units.moment(moment) for moment in (now, later)]
        rows.append([action.kind, *sizes, *times, then.path])
    if rows:
        context.output.line("")
        columns = ["ACTION", "SIZE NOW", "SIZE THEN", "MODIFIED NOW", "MODIFIED THEN", "PATH"]
        context.output.table(
            columns, rows, title="files that would change", right=["SIZE NOW", "SIZE THEN"]
        )
        context.output.line("")


def ls(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore ls."""
    from icecore import contained
    from icecore.addressing import shortest

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
        owner = contained.owner_fields(owners.get(record.snapshot))
        context.output.result("snapshot", {**contained.snapshot_fields(record), **owner})
        rows.append(
            [
                record.snapshot[:digits],
                record.job,
                units.moment(record.created_ns / 1e9),
                units.size(record.logical),
                units.size(record.device) if record.device else "–",
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
        "CHANGED",
        "STORED",
        "WINDOW",
        "PARENT",
        "TAGS",
    ]
    context.output.table(columns, rows, right=["LOGICAL", "ON GPUS", "CHANGED", "STORED", "WINDOW"])
    return 0


def show(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore show."""
    if context.service is not None:
        from icecore.remote import commands as remote

        return remote.show(arguments, context, context.service)
    from icecore import contained
    from icecore.host.jobs.identity import user_name
    from icecore.output import left_words
    from icecore.restorer.owner import snapshot_owner
    from icecore.store.format.archive import container_title
    from icecore.store.format.contract import left_to_driver

    repository, record = context.repository().locate(arguments.snapshot)
    manifest = repository.manifest(record)
    output, sizes = context.output, manifest.sizes
    output.result("snapshot", contained.snapshot_fields(record))
    resident, moved = contained.device_bytes(manifest)
    left = left_to_driver(manifest)
    owner = snapshot_owner(manifest)
    host = sizes.logical - sizes.device
    output.result("snapshot.details", contained.details(manifest))
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
                f"own {' '.join(contained.namespaces(manifest)) or 'none'}, network {manifest.namespaces.network}",
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
    return 0


def _codecs(by_codec: dict[str, int]) -> str:
    parts = sorted(by_codec.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {units.size(size)}" for name, size in parts if size) or "nothing"


def _count(value: Value) -> int:
    assert isinstance(value, int)
    return value


def _show_processes(manifest: Manifest, context: Context) -> None:
    from icecore import contained

    rows = []
    for process, fields in zip(manifest.processes, contained.processes(manifest), strict=True):
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
    from icecore import contained

    rows = []
    for fields in contained.regions(manifest):
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
    from icecore import contained

    rows = []
    for fields in contained.files(manifest):
        context.output.result("snapshot.file", fields)
        rows.append(
            [
                units.size(_count(fields["bytes"])),
                "rw" if fields["writable"] else "r",
                str(fields["policy"]),
                printable(str(fields["path"])),
            ]
        )
    shown = rows if everything else rows[:_LARGEST]
    context.output.line("")
    context.output.table(["SIZE", "OPEN", "POLICY", "PATH"], shown, title="files", right=["SIZE"])
    if len(shown) < len(rows):
        context.output.line(f"and {len(rows) - len(shown)} smaller ones (--all shows them)")


def diff(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore diff."""
    if context.service is not None:
        from icecore.remote import commands as remote

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
    regions = sorted(found.regions, key=lambda region: -region.changed)
    for region in regions:
        output.result("diff.region", asdict(region))
    shown = regions if everything else regions[:_LARGEST]
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
