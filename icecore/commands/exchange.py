"""Commands that exchange snapshots with plain CRIU: import, export."""

from __future__ import annotations

import argparse

from icecore import units
from icecore.commands.context import READ_ONLY_ALL, SNAPSHOT, TAG, Commands, Context
from icecore.config import LABEL, SIZE, THREADS
from icecore.errors import Damaged
from icecore.events import Value


def add(commands: Commands) -> None:
    """Add the commands."""
    parser = commands.add(
        "import",
        import_,
        "Store an image directory of 'criu dump' as a snapshot.",
        "icecore import --job train /srv/images",
        more="The directory stays unchanged.",
    )
    parser.add_argument("directory", metavar="DIR", help="the image directory (criu dump -D DIR)")
    parser.add_argument(
        "--job",
        metavar="NAME",
        default="",
        help="job to which the snapshot belongs (default: the name of the first process)",
    )
    parser.add_argument(
        "--parent",
        default="",
        metavar="SNAPSHOT",
        help="snapshot to build on (default: the job's newest)",
    )
    parser.add_argument("--tag", type=LABEL, action="append", default=[], metavar="LABEL", help=TAG)
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
        "Write a snapshot as images for plain 'criu restore'.",
        "icecore export train /srv/images",
        more="Snapshots with resident device memory cannot be exported.",
    )
    parser.add_argument("snapshot", metavar="SNAPSHOT", help=SNAPSHOT)
    parser.add_argument(
        "directory", metavar="DIR", help="the directory to create; an existing one must be empty"
    )
    parser.add_argument(
        "--threads",
        type=THREADS,
        default=0,
        metavar="N",
        help="threads that decode (default: one per core)",
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
        if error.kind == "image":  # in the directory, not in the repository
            raise Damaged(
                error.kind,
                error.name,
                error.why,
                cure="dump the tree with 'criu dump' again, and import that",
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
    words = (
        f"{record.snapshot}: {units.size(done.bytes)} in {done.images} images in {done.directory}"
    )
    context.output.result("export.done", fields, words)
    if done.open_files:
        context.output.note(
            f"{len(done.open_files)} open files of the job are in {done.directory / OPEN_FILES}: copy them to their paths first"
        )
    context.output.note(
        "the directory contains everything that the job had in memory, including secrets"
    )
    return 0
