"""Checks data directories, and reads what they held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from icecore import units
from icecore.host.criu.program import Criu
from icecore.host.jobs import temporary
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import RunRecord
from icecore.restorer.options import RestoreOptions
from icecore.restorer.requirements.outcome import Requirement
from icecore.store.format.data import (
    MAX_TABLE,
    DataDirectory,
    Entry,
    data_spaces,
    decode_entries,
    overlap,
    read_data,
)
from icecore.store.format.manifest import Manifest, Space

#: Files that are named in a warning each.
_SHOWN = 8
#: The content of a space that has at most so many bytes.
Contents = Callable[[Space, int], bytearray]


def entries(
    manifest: Manifest, directories: Sequence[DataDirectory], read: Contents | None
) -> dict[str, list[Entry]]:
    """Return the entries of each data directory."""
    assert read is not None, "a snapshot with data directories was opened without its reader"
    found = {}
    for one in directories:
        table, content = data_spaces(manifest, one.path)
        found[one.path] = decode_entries(read(table, MAX_TABLE), one.path, content.size)
    return found


def check_left(paths: Sequence[str]) -> Iterator[Requirement]:
    """Warn of files whose capabilities are not restored."""
    for path in paths[:_SHOWN]:
        message = f"{path} had capabilities, which a restore sets only on files of root"
        yield Requirement("data", False, message, hard=False)
    if len(paths) > _SHOWN:
        message = f"{len(paths) - _SHOWN} more files had capabilities"
        yield Requirement("data", False, message, hard=False)


def check_temporary(
    manifest: Manifest, run: RunRecord | None, workdir: str, criu: Criu
) -> Iterator[Requirement]:
    """Report the job's private temporary directories; check that they hide nothing from CRIU."""
    if run is None or not run.tmp:
        return
    for one in read_data(manifest):
        if one.path in run.tmp:
            size = f"{one.entries} entries, {units.size(one.bytes)}"
            yield Requirement("tmp", True, f"the job gets a private {one.path}: {size}")
    hidden = temporary.hidden_from_criu(run.tmp, workdir, criu.path) if run.own_view else None
    if hidden is not None:
        yield Requirement("tmp", False, *hidden)


def check_data(
    directories: Sequence[DataDirectory],
    options: RestoreOptions,
    *,
    active: bool,
    others: Sequence[Job],
) -> Iterator[Requirement]:
    """Check that no running job has the data directories that would be changed."""
    for one in directories if not active else ():
        message = f"the data directory {one.path} stays as it is, with --files {options.files}"
        if options.files in ("auto", "restore"):
            message = f"the data directory {one.path} stays as it is, with --files-to"
        yield Requirement("data", False, message, hard=False)
    for one in directories if active else ():
        users = [
            job.name
            for job in others
            if any(overlap(one.path, path) for path in job.description.data) and job.alive
        ]
        if users:
            yield Requirement(
                "data",
                False,
                f"job {', '.join(users)} runs, and has the data directory {one.path}",
                "end it first, or use --files leave, which leaves files and data as they are",
                hard=options.files == "auto",
            )
