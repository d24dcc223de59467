"""Recovers the files of restores that ended in the middle. Changes are undone if the job never ran,
finished if it did, and nothing is removed if that is unknown.

The guard of a restore runs ``python -m icecore.restorer.files.file_recovery STATE`` if the restorer
dies; if the guard dies too, the next command does it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import msgspec

from icecore.errors import IcecoreError, RestoreFailed
from icecore.events import Event, Sink, Value, discard
from icecore.host.jobs.description import boot_id
from icecore.restorer.files.file_changes import Located, finish, leave_originals, undo
from icecore.restorer.files.file_journal import Change, FileJournal, Made, Record, abandoned
from icecore.restorer.files.jobfiles import JobFiles
from icecore.restorer.files.jobpaths import Place
from icecore.restorer.files.rights import Inode


def command(state: Path) -> list[str]:
    """Return the command line that recovers files after restores on this machine."""
    return [sys.executable, "-P", "-m", "icecore.restorer.files.file_recovery", str(state)]


def recover(state: Path, emit: Sink = discard) -> None:
    """Undo, finish or keep the file changes of all restores that have ended in the middle.

    Args:
        state: icecore's state directory.
        emit: Gets ``restore.recovered`` for each.

    Raises:
        RestoreFailed: Others than root may write to the journals.
    """
    for journal in abandoned(state):
        try:
            _recover(journal, emit)
        finally:
            journal.close()


def _recover(journal: FileJournal, emit: Sink) -> None:
    left: list[str] = []
    snapshot = ""
    how = ("finished" if journal.ran else "kept") if journal.kept else "undone"
    try:
        record = journal.read()
        if record is None:
            journal.remove()
            return
        snapshot = record.snapshot
        with JobFiles(os.fsdecode(record.root)) as files:
            located, left = _locate(files, record)
            made = _locate_directories(files, record.made)
            if how == "undone":
                left += undo(files, journal, located, made)
            else:
                left += (
                    finish(files, journal, located)
                    if how == "finished"
                    else leave_originals(files, journal, located)
                )
    except IcecoreError as error:
        left.append(error.message)
    except OSError as error:
        left.append(f"{error.filename or journal.folder}: {error.strerror or error}")
    except Exception as error:  # noqa: BLE001 - one journal must not stand in the way of all restores
        left.append(f"{type(error).__name__}: {error}")
    if left:
        left.append(f"what was saved is in {journal.put_aside(left)}")
    else:
        journal.remove()
    fields: dict[str, Value] = {"snapshot": snapshot, "how": how, "left": list[object](left)}
    emit(Event("restore.recovered", fields))


def _locate(files: JobFiles, record: Record) -> tuple[list[Located], list[str]]:
    """Find the places of the changes again; leave out those whose directory was replaced."""
    found: list[Located] = []
    left: list[str] = []
    same_boot = record.boot == boot_id()
    for change in record.changes:
        path = os.fsdecode(change.path)
        try:
            place = _place(files, path) if change.data else files.locate(path)
        except FileNotFoundError:
            if change.old is not None:  # else nothing was replaced
                left.append(f"the directory of {path} no longer exists")
            continue
        except (OSError, RestoreFailed) as error:
            left.append(
                f"{path}: {getattr(error, 'message', '') or getattr(error, 'strerror', '')}"
            )
            continue
        if change.directory is not None:
            now = Inode(place.directory.device, place.directory.inode)
            if now != change.directory if same_boot else now.inode != change.directory.inode:
                left.append(f"the directory of {path} is another one now")
                continue
        found.append(Located(change if same_boot else _on_device(change, place), place))
    return found, left


def _place(files: JobFiles, path: str) -> Place:
    """Return the place of a name, whatever it is."""
    parent, name = os.path.split(path)
    return Place(files.directory(parent), name)


def _on_device(change: Change, place: Place) -> Change:
    """After a start of the machine the numbers of its devices are others."""
    device = place.directory.device
    old = change.old and Inode(device, change.old.inode)
    new = change.new and Inode(device, change.new.inode)
    return msgspec.structs.replace(change, old=old, new=new)


def _locate_directories(files: JobFiles, made: Sequence[Made]) -> list[tuple[Made, Place]]:
    found = []
    for one in made:
        with suppress(OSError, RestoreFailed):
            parent, name = os.path.split(os.fsdecode(one.path))
            found.append((one, Place(files.directory(parent), name)))
    return found


def main() -> None:
    """Run for the guard of a restore."""
    recover(Path(sys.argv[1]))


if __name__ == "__main__":
    main()
