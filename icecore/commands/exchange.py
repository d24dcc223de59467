"""Commands that exchange snapshots with plain CRIU and container engines: import, export."""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands.context import Context
from icecore.commands.parsing import READ_ONLY_ALL, SNAPSHOT, TAG, Commands
from icecore.config.kinds import SIZE, TAG_KIND, THREADS
from icecore.errors import Damaged
from icecore.events import Value

if TYPE_CHECKING:
    from icecore.repository import Repository


def add(commands: Commands) -> None:
    """Add the commands."""
    parser = commands.add(
        "import",
        import_,
        "Store an image directory of 'criu dump', or a container's checkpoint archive, as a snapshot.",
        "icecore import --job train /srv/images",
        "icecore import checkpoint.tar.gz",
        more="The directory or archive stays unchanged. Archives are those of 'podman container"
        " checkpoint --export', CRI-O, containerd and the kubelet: tar, also compressed with gzip or zstd."
        " A compressed one is unpacked into TMPDIR (/var/tmp) meanwhile.",
    )
    parser.add_argument(
        "directory",
        metavar="DIR|ARCHIVE",
        help="the image directory (criu dump -D DIR), or the archive",
    )
    parser.add_argument(
        "--job",
        metavar="NAME",
        default="",
        help="job to which the snapshot belongs (default: the name of the container, or of the first process)",
    )
    parser.add_argument(
        "--parent",
        default="",
        metavar="SNAPSHOT",
        help="snapshot to build on (default: the job's newest)",
    )
    parser.add_argument(
        "--tag", type=TAG_KIND, action="append", default=[], metavar="TAG", help=TAG
    )
    parser.add_argument(
        "--threads",
        type=THREADS,
        default=0,
        metavar="N",
        help="threads that read and encode (default: one per core)",
    )
    parser.add_argument(
        "--link-rate",
        type=SIZE,
        default=0,
        metavar="SIZE",
        help="bytes per second at which restores will read the snapshot (default: that of the storage)",
    )

    parser = commands.add(
        "export",
        export,
        "Write a snapshot as images for plain 'criu restore', or as the archive it was imported from.",
        "icecore export train /srv/images",
        "icecore export web checkpoint.tar.gz",
        more="Snapshots with resident device memory cannot be exported. An archive is compressed as the"
        " imported one was.",
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", help=SNAPSHOT)
    parser.add_argument(
        "directory",
        metavar="DIR|ARCHIVE",
        help="the directory to create, or an existing empty one; the archive to create",
    )
    parser.add_argument(
        "--threads",
        type=THREADS,
        default=0,
        metavar="N",
        help="threads that decode (default: one per core)",
    )
    parser.add_argument(
        "--data",
        default="",
        metavar="DIR",
        help="write the content of this data directory of the job ('run --data') instead",
    )
    parser.add_argument("--read-only", action="store_true", help=READ_ONLY_ALL)


def import_(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore import."""
    from icecore.dumper.importer import import_images
    from icecore.host.jobs.registry import require_name
    from icecore.store.snapshot.trial import Objective

    if arguments.job:
        require_name(arguments.job)
    repository = context.repository()
    try:
        done = import_images(
            repository.core,
            repository.loop,
            arguments.directory,
            arguments.job,
            parent=repository.find(arguments.parent).snapshot if arguments.parent else "",
            threads=arguments.threads,
            tags=arguments.tag,
            objective=Objective(arguments.link_rate) if arguments.link_rate else None,
            emit=context.output.event,
        )
    except Damaged as error:
        if error.kind in ("image", "archive"):  # what is imported, not the repository
            raise Damaged(
                error.kind,
                error.name,
                error.why,
                cure="dump the tree or checkpoint the container again, and import that",
            ) from error
        raise
    sizes = done.sizes
    context.output.line(
        f"{done.snapshot}  {done.job}: {units.size(sizes.logical)} in memory, {units.size(sizes.changed)} changed, "
        f"{units.size(sizes.stored)} stored in {units.seconds(done.seconds)}"
    )
    return 0


def export(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore export."""
    from icecore.repository import lost
    from icecore.restorer.files.exporter import OPEN_FILES
    from icecore.restorer.files.exporter import export as write

    repository, record = context.repository().locate(arguments.snapshot)
    if record.quarantined:
        raise lost(record)
    if arguments.data:
        return _export_data(arguments, context, repository, record.snapshot)
    done = write(
        repository.core,
        repository.loop,
        record.snapshot,
        arguments.directory,
        threads=arguments.threads,
        register=not arguments.read_only,
        emit=context.output.event,
    )
    fields: dict[str, Value] = {
        "snapshot": record.snapshot,
        "directory": str(done.directory),
        "bytes": done.bytes,
        "images": done.images,
        "open_files": list(done.open_files),
        "seconds": done.seconds,
    }
    parts = "images in" if done.directory.is_dir() else "members of"
    words = f"{record.snapshot}: {units.size(done.bytes)} in {done.images} {parts} {done.directory}"
    context.output.result("export.done", fields, words)
    if done.open_files:
        context.output.note(
            f"{len(done.open_files)} open files of the job are in {done.directory / OPEN_FILES}: copy them to their paths first"
        )
    context.output.note(
        "the directory contains everything that the job had in memory, including secrets"
    )
    return 0


def _export_data(
    arguments: argparse.Namespace, context: Context, repository: Repository, snapshot: str
) -> int:
    """Write the content of a data directory."""
    from icecore.restorer.files.data_export import export_data

    done = export_data(
        repository.core,
        repository.loop,
        snapshot,
        os.path.realpath(arguments.data),
        arguments.directory,
        register=not arguments.read_only,
        emit=context.output.event,
    )
    fields: dict[str, Value] = {
        "snapshot": snapshot,
        "directory": str(done.directory),
        "entries": done.entries,
        "bytes": done.bytes,
        "seconds": done.seconds,
    }
    words = f"{snapshot}: {done.entries} entries, {units.size(done.bytes)} in {done.directory}"
    context.output.result("export.data", fields, words)
    return 0
