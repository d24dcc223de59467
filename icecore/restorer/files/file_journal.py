"""Records what a restore changes among a job's files before it does. The record on disk decides
whether to undo or to finish.

``STATE/restores/ID/`` is one restore: ``lock`` (held while the restore lives), ``journal``,
contents that were saved before a file is changed in place, ``keep`` from just before the job is let
go, and ``ran`` once it runs. Without ``keep`` the changes are undone, with ``ran`` they are
finished; between the two it is unknown whether the job wrote to its files, so the new files stay
and what they replaced is kept. The directory belongs to root, and no other user may write there.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Literal

import msgspec

from icecore.errors import Damaged, RestoreFailed
from icecore.host.jobs.description import boot_id
from icecore.restorer.files.rights import Inode

FOLDER = "restores"
_JOURNAL, _LOCK, _KEEP, _RAN, _KEPT, _LEFT = "journal", "lock", "keep", "ran", ".kept", "left.txt"
_FORMAT = 1


class Change(msgspec.Struct, frozen=True):
    """One change of one name. Paths are bytes, as the kernel has them.

    ``put``: ``temporary`` gets the place ``path`` (``old`` None: where there was nothing).
    ``rewrite``: ``path`` keeps its inode ``old`` and gets the content of ``temporary``.
    ``truncate``: ``path`` is cut to ``size`` bytes. ``link``: ``path`` becomes another name of
    ``new``, which is found at ``source``. ``remove``: ``path``, which may be a directory with all
    its content, gets the name ``temporary``. ``settle``: the directory ``path`` gets another mode
    and time.

    Attributes:
        user, group: Whom the file belongs to.
        directory: Which directory ``path`` and ``temporary`` lie in.
        new: The file that was prepared; None: it was not created yet.
        saved: Name in the journal's directory of the old content from byte ``size`` on, for changes
            in place.
        was, then: For ``settle``: mode and mtime_ns before and after.
        was_group: For ``settle``: the directory's group before.
        had, gets: For ``settle``: extended attributes before and after; None: they stay.
        data: It is in a data directory: removing what was replaced leaves the time of the directory
            as it is.
    """

    kind: Literal["put", "rewrite", "truncate", "link", "remove", "settle"]
    path: bytes
    user: int
    group: int
    directory: Inode | None
    temporary: bytes = b""
    old: Inode | None = None
    new: Inode | None = None
    saved: str = ""
    size: int = 0
    source: bytes = b""
    was: tuple[int, int] = (0, 0)
    then: tuple[int, int] = (0, 0)
    was_group: int = 0
    data: bool = False
    had: dict[bytes, bytes] | None = None
    gets: dict[bytes, bytes] | None = None


class Made(msgspec.Struct, frozen=True):
    """A directory that was missing, or the name of a socket that CRIU makes in one.

    Attributes:
        inode: Which directory it is; None: it was not made yet, or its maker ended before recording
            it.
        mode, mtime_ns: What a directory gets once all that belongs into it is there; None: it keeps
            what it was made with.
    """

    path: bytes
    user: int
    group: int
    inode: Inode | None = None
    mode: int | None = None
    mtime_ns: int | None = None
    kind: Literal["directory", "socket"] = "directory"


class Record(msgspec.Struct, frozen=True):
    """All that a restore changes. ``boot`` is the machine's boot id: device numbers are compared
    within one boot only.
    """

    format: int
    snapshot: str
    root: bytes
    boot: str
    changes: list[Change]
    made: list[Made]


_DECODER = msgspec.msgpack.Decoder(Record)


class FileJournal:
    """The journal of one restore, locked by this process until `close`.

    Attributes:
        folder: ``STATE/restores/ID``.
    """

    def __init__(self, folder: Path, lock: int) -> None:
        self.folder = folder
        self._lock = lock

    @classmethod
    def begin(cls, state: Path) -> FileJournal:
        """Make the directory of a new restore.

        Raises:
            RestoreFailed: It cannot be made, or others may write to it.
        """
        above = state / FOLDER
        try:
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            with suppress(FileExistsError):
                above.mkdir(mode=0o700)
            with _listing(above):
                folder = above / secrets.token_hex(8)
                folder.mkdir(mode=0o700)
                try:
                    return cls(folder, _open_lock(folder))
                except OSError:
                    shutil.rmtree(folder, ignore_errors=True)
                    raise
        except OSError as error:
            raise RestoreFailed(
                f"cannot record in {above} which files the restore changes: {error.strerror}",
                cure="name another directory in ICECORE_STATE, or free space there",
            ) from error

    def write(self, record: Record, *, durable: bool) -> None:
        """Replace the journal; with ``durable`` it survives a crash of the machine."""
        temporary = self.folder / f"{_JOURNAL}.new"
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with open(descriptor, "wb") as file:
            file.write(msgspec.msgpack.encode(record))
            file.flush()
            if durable:
                os.fsync(descriptor)
        temporary.replace(self.folder / _JOURNAL)
        if durable:
            _sync(self.folder)
            _sync(self.folder.parent)

    def sync(self) -> None:
        """Have the names of the files in its folder survive a crash of the machine."""
        _sync(self.folder)

    def read(self) -> Record | None:
        """Return the recorded changes; None: none, so nothing was changed.

        Raises:
            Damaged: It is not what was written.
        """
        try:
            data = (self.folder / _JOURNAL).read_bytes()
        except FileNotFoundError:
            return None
        try:
            record = _DECODER.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise Damaged("journal", str(self.folder), str(error)) from error
        if record.format != _FORMAT:
            raise Damaged(
                "journal",
                str(self.folder),
                f"it has format {record.format}, this icecore reads {_FORMAT}",
            )
        return record

    def keep(self) -> None:
        """Record that the job is about to run, so that its files are kept. One system call."""
        self._mark(_KEEP)

    def note_ran(self) -> None:
        """Record that the job runs, so that what its files replaced can be removed."""
        self._mark(_RAN)

    def _mark(self, name: str) -> None:
        os.close(os.open(self.folder / name, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600))

    def unkeep(self) -> None:
        """Take `keep` back: the job never ran."""
        (self.folder / _KEEP).unlink(missing_ok=True)

    @property
    def kept(self) -> bool:
        """Whether the job may have run."""
        return (self.folder / _KEEP).exists()

    @property
    def ran(self) -> bool:
        """Whether the job ran."""
        return (self.folder / _RAN).exists()

    def settle(self) -> None:
        """Make `keep` and `note_ran` survive a crash of the machine."""
        _sync(self.folder)

    def saved(self, name: str) -> Path:
        """Return where old content is saved."""
        return self.folder / name

    def remove(self) -> None:
        """Forget the restore: nothing is left to undo or to finish. If that fails, the next command
        tries again.
        """
        with suppress(OSError):
            (self.folder / _JOURNAL).unlink(
                missing_ok=True
            )  # first: the other files are useless without it
            shutil.rmtree(self.folder, ignore_errors=True)
        self.close()

    def put_aside(self, left: Sequence[str]) -> Path:
        """Keep the saved content for the user, but not the journal; return where it is.

        Args:
            left: What was left, a sentence each. They are written there: the guard of a killed
                restore cannot report it.
        """
        place = self.folder.with_name(self.folder.name + _KEPT)
        try:
            with suppress(OSError):
                (self.folder / _LEFT).write_bytes(
                    os.fsencode("".join(f"{sentence}\n" for sentence in left))
                )
            (self.folder / _JOURNAL).unlink(missing_ok=True)
            self.folder.rename(place)
        except OSError:
            return self.folder
        finally:
            self.close()
        return place

    def close(self) -> None:
        """Release the journal to other processes."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def record_of(snapshot: str, root: str, changes: Sequence[Change], made: Sequence[Made]) -> Record:
    """Return the record of a restore on this machine, now."""
    return Record(_FORMAT, snapshot, os.fsencode(root), boot_id(), list(changes), list(made))


def abandoned(state: Path) -> list[FileJournal]:
    """Return the journals of restores that have ended without removing them, locked.

    Raises:
        RestoreFailed: Others than root may write where they lie.
    """
    above = state / FOLDER
    found: list[FileJournal] = []
    try:
        with _listing(above):
            for name in sorted(os.listdir(above)):
                folder = above / name
                if name.endswith(_KEPT) or not folder.is_dir():
                    continue
                with suppress(BlockingIOError, FileNotFoundError):
                    found.append(FileJournal(folder, _open_lock(folder)))
    except (FileNotFoundError, PermissionError):
        pass  # no restore ever changed a file, or this user may not read the directory
    return found


@contextmanager
def _listing(above: Path) -> Iterator[None]:
    """Lock the directory of all journals: no journal can begin meanwhile.

    Raises:
        RestoreFailed: Others than this user may write there.
    """
    descriptor = os.open(above, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        about = os.fstat(descriptor)
        if about.st_uid != os.geteuid() or about.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
            raise RestoreFailed(
                f"users other than {os.geteuid()} may write to {above}",
                cure=f"check who made it, then 'rm -r {above}'",
            )
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _open_lock(folder: Path) -> int:
    lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(lock)
        raise
    return lock


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
