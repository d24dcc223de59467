"""The command dump."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from msgspec import structs

from icecore import units
from icecore.commands.context import Context
from icecore.commands.parsing import PIN, TAG, Commands, add_setting, overridden
from icecore.config import DumpSettings
from icecore.config.kinds import TAG_KIND

if TYPE_CHECKING:
    pass


def add(commands: Commands) -> None:
    """Add the command."""
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
    parser.add_argument(
        "--tag", type=TAG_KIND, action="append", default=[], metavar="TAG", help=TAG
    )
    parser.add_argument("--pin", action="store_true", help=PIN)

    def setting(key: str, what: str, *flags: str, default: str = "") -> None:
        add_setting(parser, DumpSettings, key, what, *flags, default=default)

    setting(
        "max_window",
        "abandon the snapshot if the job would stand still for longer; does not apply with --stop",
    )
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
    setting(
        "encoders",
        "processes that encode in place of threads",
        "--encoders",
        default="seven for every eight cores, at most 16; none with fewer than five cores or for small dumps",
    )
    setting(
        "background_cpu",
        "share of the cores that scanning and storing may use while the job runs",
        default="auto: as many as are idle, at least an eighth",
    )
    setting(
        "files",
        "for files open for writing, and temporary ones: store the content, or record only size and"
        " time",
    )
    setting("with_files", "also store the content of files open for reading")
    setting("verify_files", "hash files open for reading, so that a restore can compare them")
    setting("file_budget", "maximum bytes of open files that are read")
    setting("data_budget", "maximum bytes of --data files that are read in the window")
    setting("ghost_limit", "maximum size of a deleted file that is still open")
    setting(
        "connections",
        "TCP connections that leave the process tree: keep them, or close them at restore; a restored"
        " job always finds connections of unix sockets closed",
        "--connections",
        "--tcp",
    )
    setting("gpu_lock", "time that submitted GPU work of a process may take before a retry")
    setting("gpu_shared", "assert that the processes share no device memory by CUDA IPC")
    setting(
        "populate",
        "use all cores and huge pages to allocate the host memory to which the driver moves device memory",
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


def dump(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore dump."""
    if context.service is not None:
        from icecore.commands import remote

        return remote.dump(arguments, context, context.service)
    from dataclasses import replace

    from icecore import api

    settings = structs.replace(context.config, dump=overridden(context.config.dump, arguments))
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
