"""Makes, undoes and finishes changes of a job's files. Replaced files are kept until `finish`, and
each step checks the actual files.

Undoing and finishing may be repeated, and begun again by another process
(`icecore.restorer.files.file_recovery`): which of two files has which name says how far a change
got. Files that another process put there meanwhile stay unchanged and are reported.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress

import msgspec

from icecore.errors import IcecoreError, RestoreFailed
from icecore.restorer.files.file_journal import Change, FileJournal, Made
from icecore.restorer.files.job_directories import MadeDirectory
from icecore.restorer.files.jobfiles import JobFiles
from icecore.restorer.files.jobpaths import UNSUPPORTED, Place
from icecore.restorer.files.rights import Inode, Owner, inode_of

_COPY_BYTES = 1 << 20
#: Added to the temporary name, where two names cannot be exchanged in one step.
_ASIDE = "-old"


class Located(msgspec.Struct, frozen=True):
    """A change, and the place that it is made at."""

    change: Change
    place: Place

    @property
    def owner(self) -> Owner:
        """The owner of the file."""
        return Owner(self.change.user, self.change.group)

    @property
    def path(self) -> str:
        """The job's path, for messages."""
        return os.fsdecode(self.change.path)

    @property
    def temporary(self) -> Place:
        """Where the prepared file is, then the replaced one."""
        return Place(self.place.directory, os.fsdecode(self.change.temporary))

    @property
    def aside(self) -> Place:
        """Where the replaced file is in between, without an exchange in one step."""
        return Place(self.place.directory, os.fsdecode(self.change.temporary) + _ASIDE)


def has(place: Place) -> Inode | None:
    """Return which file has a name; None: none."""
    about = place.stat()
    return None if about is None else inode_of(about)


def apply(files: JobFiles, journal: FileJournal, located: Located) -> None:
    """Make one change.

    Raises:
        RestoreFailed: It cannot be made; `undo` undoes the part that was made.
    """
    change = located.change
    try:
        if change.kind == "put":
            _put(files, located)
        elif change.kind == "link":
            assert change.new is not None
            source = files.locate(os.fsdecode(change.source))
            descriptor = files.open_inode(source, change.new, change.user, os.O_RDONLY)
            try:
                files.link(descriptor, located.place, located.owner)
            finally:
                os.close(descriptor)
        elif change.kind == "remove":
            _remove(files, located)
        elif change.kind == "settle":
            _settle(files, located, change.then, change.group, change.gets, ())
        else:
            _change_in_place(files, journal, located)
    except FileExistsError as error:
        raise RestoreFailed(
            f"cannot put {located.path} back: another file appeared there meanwhile",
            cure="restore again",
        ) from error
    except OSError as error:
        raise RestoreFailed(f"cannot put {located.path} back: {error.strerror}") from error


def _put(files: JobFiles, located: Located) -> None:
    """Give the prepared file its name, and the file that had the name the temporary one."""
    change, place, temporary = located.change, located.place, located.temporary
    if change.old is None:
        files.place_new(place.directory, temporary.name, place.name, located.owner)
        return
    try:
        files.exchange(place.directory, temporary.name, place.name, located.owner)
    except OSError as error:
        if error.errno not in UNSUPPORTED:
            raise
        _put_in_steps(files, located)
    if has(temporary) != change.old:
        raise RestoreFailed(
            f"{located.path} was replaced while it was being restored", cure="restore again"
        )


def _remove(files: JobFiles, located: Located) -> None:
    """Give what has the name the temporary one: it is removed once the job runs."""
    place, temporary = located.place, located.temporary
    files.place_new(place.directory, place.name, temporary.name, located.owner)
    if has(temporary) != located.change.old:
        raise RestoreFailed(
            f"{located.path} was replaced while it was being restored", cure="restore again"
        )


def _settle(
    files: JobFiles,
    located: Located,
    to: tuple[int, int],
    group: int,
    attributes: Mapping[bytes, bytes] | None,
    before: Collection[bytes],
) -> None:
    """Give a directory that is there a group, a mode, a time and attributes."""
    change = located.change
    assert change.old is not None
    made = MadeDirectory(located.place, change.old)
    files.settle_directory(made, Owner(change.user, group), *to, attributes, before)


def _put_in_steps(files: JobFiles, located: Located) -> None:
    """As `_put`, for file systems that cannot exchange names: the old file has a second name
    meanwhile.
    """
    change, place = located.change, located.place
    assert change.old is not None
    descriptor = files.open_path(place, change.old)
    try:
        files.link(descriptor, located.aside, located.owner)
    finally:
        os.close(descriptor)
    files.rename(place.directory, located.temporary.name, place.name, located.owner)
    files.rename(place.directory, located.aside.name, located.temporary.name, located.owner)


def _change_in_place(files: JobFiles, journal: FileJournal, located: Located) -> None:
    """Rewrite or cut a file that must remain the same inode; its old content is saved first."""
    change = located.change
    assert change.old is not None
    descriptor = files.open_inode(located.place, change.old, change.user, os.O_RDWR)
    try:
        about = os.fstat(descriptor)
        if change.kind == "truncate" and about.st_size < change.size:
            raise RestoreFailed(
                f"{located.path} became shorter while it was being restored", cure="restore again"
            )
        if change.kind == "truncate":
            _save(journal, change, descriptor, about)
            os.ftruncate(descriptor, change.size)
            return
        assert change.new is not None
        prepared = files.open_inode(located.temporary, change.new, change.user, os.O_RDONLY)
        try:
            content = os.fstat(prepared)
            if _are_alike(descriptor, about, prepared, content):
                return
            _save(journal, change, descriptor, about)
            _copy(prepared, 0, descriptor, 0)
            os.ftruncate(descriptor, content.st_size)
            os.utime(descriptor, ns=(content.st_mtime_ns, content.st_mtime_ns))
        finally:
            os.close(prepared)
    finally:
        os.close(descriptor)


def _are_alike(one: int, about: os.stat_result, other: int, about_other: os.stat_result) -> bool:
    """Return whether two files have the same content and time."""
    if (about.st_size, about.st_mtime_ns) != (about_other.st_size, about_other.st_mtime_ns):
        return False
    position = 0
    while piece := os.pread(one, _COPY_BYTES, position):
        if os.pread(other, len(piece), position) != piece:
            return False
        position += len(piece)
    return True


def _save(journal: FileJournal, change: Change, descriptor: int, about: os.stat_result) -> None:
    """Save a file's content from byte ``change.size`` on, with its time. It has its name once it is
    complete.
    """
    whole = journal.saved(change.saved)
    part = whole.with_name(f"{whole.name}.part")
    out = os.open(part, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
    try:
        _copy(descriptor, change.size, out, 0)
        os.ftruncate(out, max(0, about.st_size - change.size))
        os.utime(out, ns=(about.st_mtime_ns, about.st_mtime_ns))
        os.fsync(out)  # it is the only copy once the file is cut
    finally:
        os.close(out)
    part.rename(whole)
    journal.sync()  # without its name it would not be found


def _copy(source: int, start: int, target: int, position: int) -> None:
    """Copy all bytes from ``start`` on; the caller sets the size of the target. Zeros take no room
    where the target has none.
    """
    while piece := os.pread(source, _COPY_BYTES, start):
        view = memoryview(piece)
        start += len(piece)
        if not any(piece) and not any(os.pread(target, len(piece), position)):
            position += len(piece)
            continue
        while view:
            written = os.pwrite(target, view, position)
            position, view = position + written, view[written:]


# -- undoing


def undo(
    files: JobFiles,
    journal: FileJournal,
    changes: Sequence[Located],
    made: Sequence[tuple[Made, Place]],
) -> list[str]:
    """Undo the changes that were made, the last first, and remove temporary files.

    Returns:
        What could not be undone, a sentence each: the named files were not touched.
    """
    left: list[str] = []
    _open_up(files, made)
    settled = [located for located in changes if located.change.kind == "settle"]
    for located in [*reversed(changes), *settled]:  # each change in a directory changes its time
        with _told(left, located.path):
            if located.change.kind == "settle":
                if has(located.place) == located.change.old:
                    was, group = located.change.was, located.change.was_group
                    had, got = located.change.had, located.change.gets or ()
                    _settle(files, located, was, group, had, got)
            elif located.change.kind == "remove":
                _bring_back(files, located, left)
            elif located.change.kind == "put":
                _take_back(files, located, left)
            elif located.change.kind == "link":
                if located.change.new is not None:
                    files.unlink(located.place, located.change.new, located.owner)
            else:
                _write_back(files, journal, located, left)
    for one, place in reversed(made):
        with suppress(OSError):
            _unmake(files, one, place)
    return left


def _open_up(files: JobFiles, made: Sequence[tuple[Made, Place]]) -> None:
    """Let the owner change directories again that were made without that right."""
    for one, place in made:
        if one.mode is not None and one.inode is not None and one.mode & 0o300 != 0o300:
            with suppress(OSError, RestoreFailed):
                owner = Owner(one.user, one.group)
                files.settle_directory(MadeDirectory(place, one.inode), owner, 0o700, None)


def _unmake(files: JobFiles, one: Made, place: Place) -> None:
    """Remove a directory that was made, or the socket that CRIU made in one."""
    owner, about = Owner(one.user, one.group), place.stat()
    if about is None:
        return
    if one.kind == "directory":
        files.rmdir(MadeDirectory(place, one.inode or inode_of(about)), owner)
    elif stat.S_ISSOCK(about.st_mode):
        files.unlink(place, inode_of(about), owner)


def _take_back(files: JobFiles, located: Located, left: list[str]) -> None:
    change, place, temporary, aside, owner = (
        located.change,
        located.place,
        located.temporary,
        located.aside,
        located.owner,
    )
    if change.old is not None and has(aside) == change.old:  # interrupted between two steps
        if has(temporary) is None:
            files.rename(place.directory, aside.name, temporary.name, owner)
        else:
            files.unlink(aside, change.old, owner)
    now, replaced = has(place), has(temporary)
    if change.old is None:
        if now is not None and now == change.new:
            files.unlink(place, change.new, owner)
    elif change.new is not None and replaced not in (
        None,
        change.new,
    ):  # also if it is not the file that was expected there
        if now == change.new:
            try:
                files.exchange(place.directory, temporary.name, place.name, owner)
                if has(temporary) != change.new:  # replaced since the check: that replacement stays
                    files.exchange(place.directory, temporary.name, place.name, owner)
            except OSError as error:
                if error.errno not in UNSUPPORTED:
                    raise
                files.rename(place.directory, temporary.name, place.name, owner)
        elif now is None:
            files.place_new(place.directory, temporary.name, place.name, owner)
        if has(place) != replaced:
            kept = os.path.join(place.directory.path, temporary.name)
            left.append(
                f"another process replaced {located.path} during the restore; the earlier file is {kept}"
            )
            return
    elif now is not None and now == change.new:
        left.append(f"another process removed the earlier file of {located.path}")
        return
    files.unlink(temporary, change.new, owner)


def _bring_back(files: JobFiles, located: Located, left: list[str]) -> None:
    """Give what was removed its name again."""
    change, place, temporary = located.change, located.place, located.temporary
    if change.old is None or has(temporary) is None:
        return
    try:
        files.place_new(place.directory, temporary.name, place.name, located.owner)
    except FileExistsError:
        kept = os.path.join(place.directory.path, temporary.name)
        left.append(f"another process made {located.path} anew; what it was before is {kept}")


def _write_back(files: JobFiles, journal: FileJournal, located: Located, left: list[str]) -> None:
    change = located.change
    if change.kind == "rewrite":
        files.unlink(located.temporary, change.new, located.owner)
    saved = journal.saved(change.saved)
    if not saved.exists():  # nothing was changed before it was saved
        return
    assert change.old is not None
    descriptor = files.open_inode(located.place, change.old, change.user, os.O_RDWR)
    try:
        source = os.open(saved, os.O_RDONLY | os.O_CLOEXEC)
        try:
            about = os.fstat(source)
            if change.kind == "truncate" and not _begins_alike(descriptor, change.size, source):
                left.append(
                    f"{located.path} was written to after it was cut; the part that was cut off is in the file {saved.name}"
                )
                return
            _copy(source, 0, descriptor, change.size)
            os.ftruncate(descriptor, change.size + about.st_size)
            os.utime(descriptor, ns=(about.st_mtime_ns, about.st_mtime_ns))
            os.fsync(descriptor)  # then what was saved may go
        finally:
            os.close(source)
    finally:
        os.close(descriptor)
    saved.unlink()


def _begins_alike(descriptor: int, start: int, saved: int) -> bool:
    """Return whether all bytes from ``start`` on match the beginning of the saved content: then an
    undo was interrupted, or none was begun.
    """
    position = 0
    while piece := os.pread(descriptor, _COPY_BYTES, start + position):
        if os.pread(saved, len(piece), position) != piece:
            return False
        position += len(piece)
    return True


# -- finishing


def finish(files: JobFiles, journal: FileJournal, changes: Sequence[Located]) -> list[str]:
    """Remove what was replaced: the job runs, and the files are its own. Return what could not be
    removed, a sentence each.
    """
    left: list[str] = []
    try:
        journal.note_ran()
        journal.settle()
    except OSError as error:
        # Without it a crash of the machine could bring back the journal without its files.
        return [
            f"replaced files stay beside the new ones: cannot write {journal.folder}: {error.strerror}"
        ]
    for located in changes:
        change = located.change
        keeping = files.keeping_time(located.place.directory) if change.data else nullcontext()
        with _told(left, located.path), keeping:
            if change.kind == "put" and change.old is not None:
                files.unlink(located.temporary, change.old, located.owner)
                files.unlink(located.aside, change.old, located.owner)
            elif change.kind == "remove" and change.old is not None:
                files.remove_tree(located.temporary, change.old, located.owner)
            elif change.kind == "rewrite":
                files.unlink(located.temporary, change.new, located.owner)
    return left


def leave_originals(files: JobFiles, journal: FileJournal, changes: Sequence[Located]) -> list[str]:
    """Leave what was replaced where it is: it is unknown whether the job ran. Return a sentence for
    each file whose original is left.
    """
    left: list[str] = []
    for located in changes:
        change = located.change
        with _told(left, located.path):
            if change.kind in ("put", "remove") and change.old is not None:
                for place in (located.temporary, located.aside):
                    if has(place) == change.old:
                        left.append(
                            f"what {located.path} was before the restore is {os.path.join(place.directory.path, place.name)}"
                        )
            elif change.kind == "rewrite":
                files.unlink(located.temporary, change.new, located.owner)
            if change.saved and journal.saved(change.saved).exists():
                whole = (
                    "what"
                    if change.kind == "rewrite"
                    else f"what followed byte {change.size} of what"
                )
                left.append(
                    f"{whole} {located.path} was before the restore is in the file {change.saved}"
                )
    return left


@contextmanager
def _told(left: list[str], path: str) -> Iterator[None]:
    """Report the failure of one file, and continue with the others."""
    try:
        yield
    except OSError as error:
        left.append(f"{path}: {error.strerror or error}")
    except IcecoreError as error:
        left.append(error.message)
