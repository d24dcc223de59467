"""Commands that take, list, compare and restore snapshots: dump, restore, ls, show, diff."""

from __future__ import annotations

import argparse
import os
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands.context import READ_ONLY_ALL, Commands, Context, add_setting, overridden
from icecore.config import LABEL, DumpSettings, RestoreSettings
from icecore.errors import UsageError
from icecore.events import Value
from icecore.text import printable, printable_command

if TYPE_CHECKING:
    from icecore.difference import Difference
    from icecore.restorer.files.plan import Action
    from icecore.restorer.requirements import Requirements
    from icecore.store.format.manifest import Manifest, Region
    from icecore.store.format.state import SnapshotRecord

WHICH = "id or its beginning, JOB, JOB~1, JOB@1 (the oldest kept), or latest"
_LARGEST = 20


def add(commands: Commands) -> None:
    """Add the commands."""
    parser = commands.add(
        "dump",
        dump,
        "Take a snapshot of a running job or process tree.",
        more="It goes on running; nothing is stopped if something would lose or hang it.",
    )
    parser.add_argument("target", help="a job's name, or the pid of a tree's root")
    parser.add_argument(
        "--job",
        default="",
        help="name under which the snapshot is kept (default: the job's or program's)",
    )
    parser.add_argument(
        "--stop", action="store_true", help="end the job once the snapshot is committed"
    )
    parser.add_argument(
        "--keep-resident",
        action="store_true",
        help="with --stop: leave resident device memory on its GPUs, for restore --from-resident",
    )
    parser.add_argument(
        "--tag",
        type=LABEL,
        action="append",
        default=[],
        metavar="TEXT",
        help="label the snapshot; may be repeated",
    )
    parser.add_argument("--pin", action="store_true", help="never forget it by policy")
    for key, what, *flags in (
        (
            "max_window",
            "longest time that the job may stand still; past it the snapshot is given up",
        ),
        ("pre_copy", "scan the running job first, so that less is left for the window"),
        (
            "memory",
            "read memory in place, or have CRIU send it all: slower, for where it has too few descriptors",
        ),
        ("staging_bytes", "bound on the memory for changed cells in the window", "--staging"),
        ("scan_threads", "threads that scan and encode; 0: one a core", "--threads"),
        ("files", "content of files open for writing: store it, or record size and time only"),
        ("with_files", "store the content of files open for reading, too"),
        ("verify_files", "hash files open for reading, so that a restore can compare"),
        ("file_budget", "bytes of open files that are read at most"),
        ("ghost_limit", "largest deleted file that is still open"),
        ("tcp", "connections that leave the tree: keep them, or have them closed at restore"),
        ("gpu_lock", "time that a process's work on its GPU may take to end, before another try"),
        ("gpu_shared", "processes of the tree share no device memory by CUDA IPC"),
        (
            "populate",
            "make the memory into which the driver moves device memory with all cores, of huge pages",
        ),
        ("criu_plugins", "directory of CRIU's plugins, for AMD GPUs"),
        (
            "link_rate",
            "bytes a second at which the snapshot will be read; decides how much to compress",
        ),
        ("workdir", "directory on tmpfs for CRIU's images"),
        (
            "before",
            "shell command run before anything is stopped; if it fails there is no snapshot",
        ),
        ("after", "shell command run once the job runs again"),
    ):
        add_setting(parser, DumpSettings, key, what, *flags)

    parser = commands.add(
        "restore",
        restore,
        "Bring a snapshot's processes back, once or several times.",
        more="The whole tree runs with all its memory, or none of it runs.",
    )
    parser.add_argument("snapshot", help=WHICH)
    parser.add_argument(
        "-n",
        "--dry-run",
        action="store_true",
        help="compare this machine with what it requires, start nothing",
    )
    parser.add_argument(
        "--name",
        default="",
        help="name of the restored job (default: the job's, with a number if that one runs)",
    )
    parser.add_argument(
        "-a", "--attach", action="store_true", help="follow its output and return its exit status"
    )
    about = "device memory is still on its GPUs (run --keep-resident, dump --stop --keep-resident): compare it, fetch what differs"
    parser.add_argument("--from-resident", action="store_true", help=about)
    parser.add_argument(
        "--root", default="", metavar="DIR", help="directory that is the root of its file system"
    )
    parser.add_argument(
        "--files-to",
        default="",
        metavar="DIR",
        help="give it its own copies, below DIR, of the files that would be written; it sees them at their old paths; /: use no copies",
    )
    parser.add_argument(
        "--gpu-map",
        action="append",
        default=[],
        metavar="OLD=NEW",
        help="GPU it had = GPU it gets: UUIDs or numbers; may be repeated",
    )
    for key, what, *flags in (
        (
            "mode",
            "full: let it run once all its memory is there; lazy: at once, memory follows as it is touched",
        ),
        (
            "files",
            "files it had open for writing: put content back, cut to length, or leave; auto: the first, but refuses if a running process writes to one",
        ),
        ("verify_files", "compare the content of files it reads, where a hash was recorded"),
        ("tcp", "its connections: keep them, or let it find them closed"),
        ("budget_bytes", "bound on the memory for what was fetched and not yet placed", "--budget"),
        ("threads", "threads that decode and place; 0: one a core, or placers"),
        (
            "placers",
            "processes that do so instead; 0: one a core if there are many, and much memory",
        ),
        ("workdir", "directory on tmpfs for CRIU's images"),
        ("criu_plugins", "directory of CRIU's plugins, for AMD GPUs"),
        ("after", "shell command run once the job runs"),
    ):
        add_setting(parser, RestoreSettings, key, what, *flags)
    parser.add_argument(
        "--read-only",
        action="store_true",
        help=f"{READ_ONLY_ALL}, with --mode lazy after the job ran",
    )

    parser = commands.add("ls", ls, "List snapshots.")
    parser.add_argument("job", nargs="?", default="", help="only this job's")
    parser.add_argument(
        "--tag",
        type=LABEL,
        action="append",
        default=[],
        metavar="TEXT",
        help="only those with this label; may be repeated",
    )

    parser = commands.add("show", show, "Show what a snapshot holds.")
    parser.add_argument("snapshot", help=WHICH)
    parser.add_argument(
        "--all", action="store_true", help=f"all regions and files, not only the {_LARGEST} largest"
    )

    parser = commands.add(
        "diff", diff, "Show what differs between two snapshots, by cells of 1 MiB."
    )
    parser.add_argument("older", help=WHICH)
    parser.add_argument(
        "newer",
        nargs="?",
        default="",
        help="default: the first one is the newer, and its parent the older",
    )
    parser.add_argument(
        "--all", action="store_true", help=f"all regions, not only the {_LARGEST} that changed most"
    )


def dump(arguments: argparse.Namespace, context: Context) -> int:
    """icecore dump."""
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
    """icecore restore."""
    from icecore import api
    from icecore.commands.jobs import follow

    settings = replace(context.config, restore=overridden(context.config.restore, arguments))
    options = replace(
        api.restore_options(settings),
        instance=arguments.name,
        root=arguments.root,
        files_to=os.path.abspath(arguments.files_to) if arguments.files_to else "",
        from_resident=arguments.from_resident,
        detach=not arguments.attach,
        register=not arguments.read_only,
        gpu_map=_gpu_map(arguments.gpu_map),
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
        context.output.line(f"all its memory is there after {units.seconds(seconds)}")
    if not arguments.attach:
        return 0
    if restored.job is not None:
        return follow(restored.job, context, seen=restored.log_sizes)
    status = restored.wait()
    context.output.result(
        "job.ended", {"job": "", "instance": "", "how": str(status), "exit_code": status.exit_code}
    )
    return status.exit_code


def _gpu_map(pairs: list[str]) -> dict[str, str]:
    out: dict[str, str] = {}
    for pair in pairs:
        old, separator, new = pair.partition("=")
        if not separator or not old or not new or old in out:
            raise UsageError(f"--gpu-map {pair!r} is wrong", cure="write OLD=NEW, each GPU once")
        out[old] = new
    return out


def _report_requirements(found: Requirements, context: Context) -> None:
    """What stands in the way, and what would be done to files."""
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
    _report_files(found.files.actions, context)
    found.require()
    context.output.line("nothing stands in the way")


def _report_files(actions: Sequence[Action], context: Context) -> None:
    """Every file that the restore would change: what it is now, and what it would be."""
    rows = []
    for action in actions:
        then = action.file
        now = None if action.mtime_ns is None else action.mtime_ns / 1e9
        # A file that is cut keeps the time of the cut; imported snapshots have no times.
        later = None if action.kind == "truncate" or not then.mtime_ns else then.mtime_ns / 1e9
        fields: dict[str, Value] = {
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
            columns, rows, title="files that it would change", right=["SIZE NOW", "SIZE THEN"]
        )
        context.output.line("")


def ls(arguments: argparse.Namespace, context: Context) -> int:
    """icecore ls."""
    from icecore.addressing import shortest

    everything = context.repository().snapshots()
    if arguments.job:
        context.require_job(arguments.job)
    digits = shortest(everything)
    rows = []
    for record in everything:
        if arguments.job not in ("", record.job) or not set(arguments.tag) <= set(record.tags):
            continue
        context.output.result("snapshot", snapshot_fields(record))
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


def snapshot_fields(record: SnapshotRecord) -> dict[str, Value]:
    """A snapshot as the fields of an event."""
    return {
        "snapshot": record.snapshot,
        "job": record.job,
        "lineage": record.lineage,
        "parent": record.parent,
        "created": record.created_ns / 1e9,
        "logical": record.logical,
        "changed": record.changed,
        "stored": record.stored,
        "device": record.device,
        "window_seconds": record.window_seconds,
        "tags": list(record.tags),
        "pinned": record.pinned,
        "quarantined": record.quarantined,
    }


def show(arguments: argparse.Namespace, context: Context) -> int:
    """icecore show."""
    from icecore.output import left_words
    from icecore.restorer.gpu.resident_record import left_to_driver

    repository, record = context.repository().locate(arguments.snapshot)
    manifest = repository.manifest(record)
    output, sizes = context.output, manifest.sizes
    output.result("snapshot", snapshot_fields(record))
    host = sizes.logical - sizes.device
    device = [
        (space.kind == "device", region.length)
        for space in manifest.spaces
        for region in space.regions
        if region.kind == "device"
    ]
    resident, moved = (
        sum(length for stays, length in device if stays is which) for which in (True, False)
    )
    left = left_to_driver(manifest)
    details: dict[str, Value] = {
        "snapshot": manifest.snapshot,
        "host": manifest.host,
        "writer": manifest.writer,
        "root_pid": manifest.root_pid,
        "host_bytes": host,
        "device_bytes": sizes.device,
        "zero_bytes": sizes.zero,
        "by_codec": dict(sizes.by_codec),
        "architecture": manifest.requirements.architecture,
        "kernel": manifest.requirements.kernel,
        "criu": manifest.requirements.criu,
        "own_namespaces": _namespaces(manifest),
        "gpus": [dict(gpu) for gpu in manifest.requirements.devices],
        "resident_bytes": resident,
        "moved_bytes": moved,
        "left": dict(left),
    }
    output.result("snapshot.details", details)
    if not output.as_json:
        lines = [
            ("snapshot", manifest.snapshot),
            ("job", manifest.job),
            ("lineage", manifest.lineage),
            ("parent", manifest.parent or "none"),
            ("taken", f"{units.moment(manifest.created_ns / 1e9)} on {manifest.host}"),
            ("window", units.seconds(manifest.window_seconds)),
            ("host memory", f"{units.size(host)} of data"),
            (
                "device memory",
                f"{units.size(sizes.device)} of data; {units.size(resident + moved)} with its zeros"
                if device
                else "none",
            ),
            *(
                [
                    (
                        "of it resident",
                        f"{units.size(resident)} with its zeros; windows leave it where it is",
                    )
                ]
                if resident
                else []
            ),
            *(
                [("of it moved", f"{units.size(moved)} with its zeros, by the driver")]
                if moved
                else []
            ),
            *([("allocated", words)] if (words := left_words(left)) else []),
            ("zeros", f"{units.size(sizes.zero)} in all memory, which take no room"),
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
                f"own {' '.join(_namespaces(manifest)) or 'none'}, network {manifest.namespaces.network}",
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
    _show_regions(manifest, context, arguments.all)
    _show_files(manifest, context, arguments.all)
    return 0


def _namespaces(manifest: Manifest) -> list[str]:
    own = manifest.namespaces
    flags = (("pid", own.pid), ("ipc", own.ipc), ("mount", own.mount), ("uts", own.uts))
    return [name for name, mine in flags if mine]


def _codecs(by_codec: dict[str, int]) -> str:
    parts = sorted(by_codec.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {units.size(size)}" for name, size in parts if size) or "nothing"


def _show_processes(manifest: Manifest, context: Context) -> None:
    rows = []
    for process in manifest.processes:
        fields: dict[str, Value] = {
            "pid": process.image_id,
            "host_pid": process.pid,
            "parent": process.parent,
            "threads": process.threads,
            "command": list(process.command),
            "alive": process.alive,
        }
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


def _show_regions(manifest: Manifest, context: Context, everything: bool) -> None:
    """Regions summed up by kind within each space: their number and the addresses that they span,
    present or not.
    """
    spans: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for space in manifest.spaces:
        for region in space.regions:
            key: tuple[str, str, str] = (
                space.kind,
                space.key if space.kind in ("process", "device") else "",
                _kind(region),
            )
            spans[key] += region.length
            counts[key] += 1
    rows = []
    for key, span in sorted(
        spans.items(), key=lambda item: (item[0][0] != "process", item[0][0], item[0][1], -item[1])
    ):
        space_kind, space_key, kind = key
        fields: dict[str, Value] = {
            "space": space_kind,
            "key": space_key,
            "kind": kind,
            "regions": counts[key],
            "bytes": span,
        }
        context.output.result("snapshot.regions", fields)
        rows.append(
            [
                f"{space_kind} {printable(space_key)}".strip(),
                kind,
                str(counts[key]),
                units.size(span),
            ]
        )
    context.output.line("")
    context.output.table(
        ["SPACE", "KIND", "REGIONS", "SPAN"], rows, title="regions", right=["REGIONS", "SPAN"]
    )


def _kind(region: Region) -> str:
    return region.kind or "anonymous"


def _show_files(manifest: Manifest, context: Context, everything: bool) -> None:
    files = sorted(manifest.files, key=lambda file: -file.size)
    rows = []
    for file in files:
        fields: dict[str, Value] = {
            "path": file.path,
            "bytes": file.size,
            "writable": file.writable,
            "policy": file.policy,
            "mtime": file.mtime_ns / 1e9,
        }
        context.output.result("snapshot.file", fields)
        rows.append(
            [
                units.size(file.size),
                "rw" if file.writable else "r",
                file.policy,
                printable(file.path),
            ]
        )
    shown = rows if everything else rows[:_LARGEST]
    context.output.line("")
    context.output.table(["SIZE", "OPEN", "POLICY", "PATH"], shown, title="files", right=["SIZE"])
    if len(shown) < len(rows):
        context.output.line(f"and {len(rows) - len(shown)} smaller ones (--all shows them)")


def diff(arguments: argparse.Namespace, context: Context) -> int:
    """icecore diff."""
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
