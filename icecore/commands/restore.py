"""The command restore, and its report of what the restore requires and would change."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from msgspec import structs

from icecore import units
from icecore.commands.context import Context
from icecore.commands.parsing import (
    READ_ONLY_ALL,
    SNAPSHOT,
    Commands,
    add_setting,
    gpu_map,
    overridden,
)
from icecore.config import RestoreSettings
from icecore.events import Value

if TYPE_CHECKING:
    from icecore.restorer.files.plan import FilePlan
    from icecore.restorer.requirements.outcome import Requirements


def add(commands: Commands) -> None:
    """Add the command."""
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


def restore(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore restore."""
    from icecore.commands.job_output import follow

    if context.service is not None:
        from icecore.commands import remote

        return remote.restore(
            arguments,
            context,
            context.service,
            lambda job, seen: follow(job, context, seen=seen),
        )
    from dataclasses import replace

    from icecore import api

    settings = structs.replace(
        context.config, restore=overridden(context.config.restore, arguments)
    )
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
