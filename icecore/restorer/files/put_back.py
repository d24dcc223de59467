"""Puts open files back as they were when the snapshot was taken. A file is replaced as a whole,
under its name, so that a process with the old one open keeps it; until the job runs everything can
be undone.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import msgspec
from msgspec.structs import replace

from icecore.errors import RestoreFailed
from icecore.host.kernel.limits import soft_descriptor_limit
from icecore.restorer.files.file_changes import Located, apply, finish, leave_originals, undo
from icecore.restorer.files.file_journal import Change, FileJournal, Made, record_of
from icecore.restorer.files.filewriter import FileTarget
from icecore.restorer.files.job_directories import MadeDirectory
from icecore.restorer.files.jobfiles import JobFiles
from icecore.restorer.files.jobpaths import Place
from icecore.restorer.files.plan import Action, can_keep, same_inode
from icecore.restorer.files.rights import Inode, Owner, inode_of
from icecore.restorer.plan.cells import SpaceCells
from icecore.store.format.surroundings import Folder, SocketName

#: Most files that are open together while they are written.
_MOST_OPEN = 1024


@contextmanager
def _failing(what: str, cure: str = "") -> Iterator[None]:
    """Turn an error of the system into one that says what could not be done."""
    try:
        yield
    except OSError as error:
        raise RestoreFailed(f"cannot {what}: {error.strerror or error}", cure=cure) from error


class _Prepared(msgspec.Struct, frozen=True):
    """One action: its change, and the place.

    Attributes:
        made: Whether a file or FIFO was made that has yet to get its owner, mode and time.
        descriptor: The open file; None: it is opened again, because too many others are open.
    """

    action: Action
    located: Located
    made: bool = False
    descriptor: int | None = None


class PutBack:
    """Carries out a file plan: `prepare`, write the `targets`, `exchange`, then `hand_over` and
    `finish`, or `abandon`.

    The job's files do not change before `exchange`. `abandon` undoes all changes until the job is
    let go. If the restorer dies before `hand_over`, its guard or the next command undoes them
    (`icecore.restorer.files.file_recovery`); between `hand_over` and `finish` they leave the new
    files and keep what those replaced. No journal is made if there is nothing to do.

    Args:
        actions: From `plan_files`.
        cells: Gives the cells of a file's space, by path.
        state: icecore's state directory, for the journal.
        root: As for `plan_files`.
        snapshot: Its id, for the journal.
        folders: Directories that are missing, parents first.
        sockets: Names that CRIU will make in them.
        settled: Directories that are there and get their recorded mode and time.
        attributes: Path → extended attributes of directories among these.
    """

    def __init__(
        self,
        actions: Sequence[Action],
        cells: Callable[[str], SpaceCells],
        state: Path,
        root: str = "",
        snapshot: str = "",
        folders: Sequence[Folder] = (),
        sockets: Sequence[SocketName] = (),
        settled: Sequence[Folder] = (),
        attributes: Mapping[str, Mapping[bytes, bytes]] | None = None,
    ) -> None:
        self._settled = list(settled)
        self._attributes = attributes or {}
        self._settles: list[Located] = []
        #: Places and inodes of the prepared files, to which links are made, by path.
        self._new: dict[str, tuple[Place, Inode]] = {}
        self._actions = list(actions)
        self._folders = {folder.path: folder for folder in folders}
        self._sockets = list(sockets)
        self._cells = cells
        self._state = state
        self._root = root
        self._snapshot = snapshot
        self._files: JobFiles | None = None
        #: Files that may stay open; others are opened again when they are written.
        self._may_open = 0
        self._prepared: list[_Prepared] = []
        self._links: list[Located] = []
        self._made: list[tuple[Made, Place]] = []
        self._sealing: Future[None] | None = None
        self._handed_over = False
        self.journal: FileJournal | None = None
        #: What a fetcher is to write before `exchange`.
        self.targets: list[FileTarget] = []

    def __bool__(self) -> bool:
        """Whether there is anything to do."""
        return bool(self._actions or self._folders or self._settled)

    # -- before

    def prepare(self) -> None:
        """Record the changes, make missing directories, and create an empty file beside each one
        that will be written.

        Raises:
            RestoreFailed: A directory or file cannot be made.
            PathRefused: A path leads through a link that others can make.
        """
        if not self:
            return
        with _failing(f"use {self._root or '/'} as the job's root"):
            files = self._files = JobFiles(self._root)
        self._may_open = min(_MOST_OPEN, soft_descriptor_limit() // 4)
        self.journal = FileJournal.begin(self._state)
        missing = self._missing_directories(files)
        self._settles = [
            _settling(files, folder, self._attributes.get(folder.path)) for folder in self._settled
        ]
        settles = [located.change for located in self._settles]
        planned = [self._planned(number, action) for number, action in enumerate(self._actions)]
        with _failing(f"write {self.journal.folder}", "free space there"):
            self.journal.write(
                record_of(self._snapshot, self._root, [*planned, *settles], missing),
                durable=False,
            )
        self._make_directories(files, missing)
        for action, change in zip(self._actions, planned, strict=True):
            self._prepare_one(files, action, change)
        with _failing("read this machine's boot id"):
            record = record_of(
                self._snapshot,
                self._root,
                [one.change for one in self._located],
                [made for made, _ in self._made],
            )
        pool = ThreadPoolExecutor(1, "file-journal")  # the disk works while content is fetched
        self._sealing = pool.submit(self.journal.write, record, durable=True)
        pool.shutdown(wait=False)

    @property
    def _located(self) -> list[Located]:
        prepared = (prepared.located for prepared in self._prepared)
        return [*prepared, *self._links, *self._settles]

    def _missing_directories(self, files: JobFiles) -> list[Made]:
        """Return the directories to make, outermost first."""
        missing: dict[str, Made] = {}
        above_files = [os.path.dirname(action.file.path) for action in self._actions]
        owners = [Owner(action.file.user, action.file.group) for action in self._actions]
        for wanted, owner in zip(
            [*self._folders, *above_files],
            [*(Owner(one.user, one.group) for one in self._folders.values()), *owners],
            strict=True,
        ):
            folder, above = wanted, []
            while folder not in missing:
                try:
                    files.directory(folder)
                    break
                except FileNotFoundError:
                    above.append(self._missing(folder, owner))
                    folder = os.path.dirname(folder)
                except OSError as error:
                    raise RestoreFailed(f"cannot use {folder}: {error.strerror}") from error
            missing |= {os.fsdecode(made.path): made for made in reversed(above)}
        return list(missing.values())

    def _missing(self, folder: str, owner: Owner) -> Made:
        """Return the record of a directory: as it was, if the snapshot recorded that."""
        known = self._folders.get(folder)
        if known is None:
            return Made(os.fsencode(folder), *owner)
        return Made(
            os.fsencode(folder), known.user, known.group, mode=known.mode, mtime_ns=known.mtime_ns
        )

    def _make_directories(self, files: JobFiles, missing: Sequence[Made]) -> None:
        for made in missing:
            folder = os.fsdecode(made.path)
            mode = 0o755 if made.mode is None else 0o700  # for now
            with _failing(f"make {folder}", "make it, or let the files' owner make it"):
                owner = Owner(made.user, made.group)
                for one in files.make_directories(folder, owner, mode):
                    self._made.append((msgspec.structs.replace(made, inode=one.inode), one.place))
                    if made.mode is not None:  # whoever could make something in it can do so
                        files.settle_directory(one, owner, made.mode | 0o700, None)
        for socket in self._sockets:
            parent, name = os.path.split(socket.path)
            record = Made(os.fsencode(socket.path), socket.user, socket.group, kind="socket")
            self._made.append((record, Place(files.directory(parent), name)))

    def _planned(self, number: int, action: Action) -> Change:
        """Return the record that is written before anything is made."""
        file = action.file
        temporary = f".{os.path.basename(file.path)[:100]}.icecore-{secrets.token_hex(6)}"
        return Change(
            kind="rewrite"
            if action.keep
            else action.kind
            if action.kind in ("rewrite", "truncate", "remove")
            else "put",
            path=os.fsencode(file.path),
            user=file.user,
            group=file.group,
            directory=None,
            temporary=b"" if action.kind == "truncate" else os.fsencode(temporary),
            saved=f"{number}.saved"
            if action.keep or action.kind in ("rewrite", "truncate")
            else "",
            size=file.size if action.kind == "truncate" else 0,
            data=action.data,
        )

    def _prepare_one(self, files: JobFiles, action: Action, change: Change) -> None:
        """Find where the file lies, and create the one that will be written."""
        if action.data:
            self._prepare_data(files, action, change)
            return
        file = action.file
        with _failing(f"prepare {file.path}", "let its owner write there, or use --files leave"):
            name = same_inode(files.locate, file) if action.kind == "rewrite" else file.path
            if not name:
                raise RestoreFailed(
                    f"the other names of {file.path} disappeared while it was being restored",
                    cure="restore again",
                )
            place = files.locate(name)
            about = place.stat()
            if about is not None and not stat.S_ISREG(about.st_mode):
                raise RestoreFailed(
                    f"{file.path} is not a regular file any more", cure="move it away"
                )
            if about is not None and (action.kind == "fifo" or action.content is not None):
                raise RestoreFailed(
                    f"{file.path} appeared while it was being restored", cure="restore again"
                )
            if about is None and change.saved:  # changed in place
                raise RestoreFailed(
                    f"{name} disappeared while it was being restored", cure="restore again"
                )
            if action.keep and (about is None or not can_keep(file, about)):
                raise RestoreFailed(
                    f"{file.path} changed while it was being restored", cure="restore again"
                )
            where = Inode(place.directory.device, place.directory.inode)
            old = inode_of(about) if about is not None else None
            change = msgspec.structs.replace(
                change, path=os.fsencode(name), directory=where, old=old
            )
            if about is not None and not file.inode:  # imported images do not record the owner
                if about.st_nlink > 1 and not place.directory.root_only:
                    raise RestoreFailed(
                        f"{name} has other names, and may be another user's file",
                        cure="replace it with a copy of itself",
                    )
                change = msgspec.structs.replace(change, user=about.st_uid, group=about.st_gid)
            located = Located(change, place)
            if change.temporary:
                descriptor = self._create(files, action, located)
                new = inode_of(os.fstat(descriptor))
                located = replace(located, change=msgspec.structs.replace(change, new=new))
                self._prepared.append(self._held(action, located, descriptor))
                self._new[file.path] = (
                    (place, old)
                    if change.saved and old is not None  # its content is changed in place
                    else (located.temporary, new)
                )
            else:
                self._prepared.append(_Prepared(action, located))
            if action.kind == "rewrite":
                link = Change(
                    "link",
                    os.fsencode(file.path),
                    file.user,
                    file.group,
                    where,
                    new=old,
                    source=os.fsencode(name),
                )
                self._links.append(Located(link, files.locate(file.path)))

    def _prepare_data(self, files: JobFiles, action: Action, change: Change) -> None:
        """Prepare, as `_prepare_one` does, a file in a data directory or another name of a file. The
        action applies to the name itself, whatever is there.
        """
        path = action.file.path
        with _failing(f"prepare {path}", "let its owner write there, or use --files leave"):
            parent, name = os.path.split(path)
            place = Place(files.directory(parent), name)
            about = None if action.cleared else place.stat()
            expected = action.kind == "remove" or action.size is not None
            if (about is None) is expected or (
                about is not None and action.kind != "remove" and stat.S_ISDIR(about.st_mode)
            ):
                raise RestoreFailed(
                    f"{path} changed while it was being restored", cure="restore again"
                )
            change = msgspec.structs.replace(
                change,
                directory=Inode(place.directory.device, place.directory.inode),
                old=inode_of(about) if about is not None else None,
            )
            located = Located(change, place)
            if action.kind == "remove":
                self._prepared.append(_Prepared(action, located))
                return
            descriptor = self._create(files, action, located)
            new = inode_of(os.fstat(descriptor))
            located = replace(located, change=msgspec.structs.replace(change, new=new))
            if change.kind == "put":
                self._new[path] = (located.temporary, new)
            if action.kind in ("symlink", "link"):  # it is complete
                os.close(descriptor)
                self._prepared.append(_Prepared(action, located))
            else:
                self._prepared.append(self._held(action, located, descriptor))

    def _held(self, action: Action, located: Located, descriptor: int) -> _Prepared:
        """Keep a file open that was made, or close it if too many are open."""
        if self._may_open:
            self._may_open -= 1
            return _Prepared(action, located, made=True, descriptor=descriptor)
        os.close(descriptor)
        return _Prepared(action, located, made=True)

    @contextmanager
    def _opened(self, files: JobFiles, prepared: _Prepared) -> Iterator[int]:
        """Give the descriptor of a file that was made."""
        located = prepared.located
        if prepared.descriptor is not None:
            yield prepared.descriptor
            return
        assert located.change.new is not None
        if prepared.action.kind == "fifo":
            descriptor = files.open_path(located.temporary, located.change.new)
        else:
            descriptor = _reopen(files, located, located.change.new)
        try:
            yield descriptor
        finally:
            os.close(descriptor)

    def _link(self, files: JobFiles, action: Action, located: Located) -> int:
        """Give the file that an action names another name, the temporary one."""
        path = os.fsdecode(action.target)
        prepared = self._new.get(path)
        if prepared is not None:
            source, known = prepared
        else:
            parent, name = os.path.split(path)
            source = Place(files.directory(parent), name)
            about = source.stat()
            if about is None or not stat.S_ISREG(about.st_mode):
                raise RestoreFailed(
                    f"{path} changed while it was being restored", cure="restore again"
                )
            known = inode_of(about)
        descriptor = files.open_path(source, known)
        try:
            files.link(descriptor, located.temporary, located.owner)
        except BaseException:
            os.close(descriptor)
            raise
        return descriptor

    def _create(self, files: JobFiles, action: Action, located: Located) -> int:
        """Create the new file beside the old one; return its descriptor. What is known already is
        written, the rest becomes a target.
        """
        if action.kind == "fifo":
            return files.create_fifo(located.temporary, located.owner)
        if action.kind == "link":
            return self._link(files, action, located)
        if action.kind == "symlink":
            about = (action.target, action.file.mtime_ns)
            return files.create_symlink(located.temporary, located.owner, *about)
        cells = self._cells(action.file.path) if action.content is None else None
        descriptor = files.create(located.temporary, located.owner)
        if cells is None:
            os.pwrite(descriptor, action.content or b"", 0)
        else:
            shown = os.path.join(located.place.directory.path, located.temporary.name)
            target = FileTarget(shown, action.file.size, cells, descriptor=descriptor)
            if not self._may_open:
                opened = partial(_reopen, files, located, inode_of(os.fstat(descriptor)))
                target = replace(target, descriptor=None, opened=opened)
            self.targets.append(target)
        return descriptor

    # -- during

    def exchange(self) -> list[str]:
        """Give the written files their owner, mode, times and place; cut those that only grew.

        Returns:
            The files that had a set-ID bit, which is not put back.

        Raises:
            RestoreFailed: A file was replaced meanwhile, or cannot be put back; `abandon` undoes
                the others.
        """
        if self._files is None or self.journal is None or self._sealing is None:
            return []
        without_bits = []
        for prepared in self._prepared:
            file = prepared.action.file
            with _failing(f"give {file.path} its owner and mode"):
                if prepared.made and self._settle(self._files, prepared):
                    without_bits.append(file.path)
        self._close_descriptors()
        with _failing(f"write {self.journal.folder}", "free space there"):
            self._sealing.result()
        for located in self._located:
            apply(self._files, self.journal, located)
        for made, place in reversed(self._made):
            if made.mode is not None and made.inode is not None:
                owner = Owner(made.user, made.group)
                with _failing(f"give {os.fsdecode(made.path)} its mode"):
                    self._files.settle_directory(
                        MadeDirectory(place, made.inode),
                        owner,
                        made.mode,
                        made.mtime_ns,
                        self._attributes.get(os.fsdecode(made.path)),
                    )
        return without_bits

    def _settle(self, files: JobFiles, prepared: _Prepared) -> bool:
        """Give a written file its owner, mode, attributes and time; return whether set-ID bits were
        left out.
        """
        action, file = prepared.action, prepared.action.file
        owner = Owner(file.user, file.group)
        with self._opened(files, prepared) as descriptor:
            if action.kind == "fifo":
                time = file.mtime_ns if action.data else None
                files.settle_fifo(descriptor, owner, file.mode, time)
                return False
            return files.settle(descriptor, file, action.attributes)

    def hand_over(self) -> None:
        """Record that the job is about to run: its files are its own, and nothing is undone."""
        if self.journal is not None and not self._handed_over:
            with _failing(f"write {self.journal.folder}", "free space there"):
                self.journal.keep()
            self._handed_over = True

    def note_ran(self) -> None:
        """Record that the job runs: from now on what its files replaced may be removed."""
        if self.journal is not None and self._handed_over:
            with suppress(OSError):  # then it is kept
                self.journal.note_ran()

    @property
    def inodes(self) -> frozenset[Inode]:
        """Return the restored files and directories that the job must have open."""
        changes = [located.change for located in self._located]
        found = [change.old if change.saved else change.new for change in changes]
        found += [made.inode for made, _ in self._made]
        return frozenset(known for known in found if known is not None)

    # -- after

    def finish(self) -> list[str]:
        """Remove what was replaced; returns what could not be removed, a sentence each. May be
        called twice.
        """
        if self._files is None or self.journal is None:
            return []
        left = finish(self._files, self.journal, self._located)
        if left:
            self.journal.close()  # the next command tries again
        else:
            self.journal.remove()
        self._end()
        return left

    def abandon(self, *, went: bool = False, ran: bool = False) -> list[str]:
        """The restore failed: undo everything, unless the job may have run. May be called twice.

        Args:
            went: The job was let go: it may have run and written to its files. What they were
                before is left and named.
            ran: It certainly ran: as `finish`.

        Returns:
            What could not be undone or removed, and where what was replaced is left, a sentence
            each.
        """
        if self._handed_over and ran:
            return self.finish()
        left: list[str] = []
        if self._files is not None and self.journal is not None:
            if self._sealing is not None:
                with suppress(OSError):
                    self._sealing.result()
            if self._handed_over and went:
                left = leave_originals(self._files, self.journal, self._located)
            else:
                with suppress(OSError):  # the journal goes with it
                    self.journal.unkeep()
                left = undo(self._files, self.journal, self._located, self._made)
            if left:
                left.append(f"what was saved is in {self.journal.put_aside(left)}")
            else:
                self.journal.remove()
        self._handed_over = False
        self._end()
        return left

    def _close_descriptors(self) -> None:
        for number, prepared in enumerate(self._prepared):
            if prepared.descriptor is not None:
                os.close(prepared.descriptor)
                self._prepared[number] = replace(prepared, descriptor=None)

    def _end(self) -> None:
        self._close_descriptors()
        if self._files is not None:
            self._files.close()
        self._files = self.journal = None


def _reopen(files: JobFiles, located: Located, known: Inode) -> int:
    """Open a file that was made, for reading and writing."""
    return files.open_inode(located.temporary, known, located.change.user, os.O_RDWR)


def _settling(files: JobFiles, folder: Folder, attributes: Mapping[bytes, bytes] | None) -> Located:
    """Return the change of a directory that is there, before anything is made in it."""
    parent, name = os.path.split(folder.path)
    with _failing(f"prepare {folder.path}"):
        place = Place(files.directory(parent), name)
        about = place.stat()
        if about is None or not stat.S_ISDIR(about.st_mode) or about.st_uid != folder.user:
            raise RestoreFailed(
                f"{folder.path} changed while it was being restored", cure="restore again"
            )
        change = Change(
            kind="settle",
            path=os.fsencode(folder.path),
            user=folder.user,
            group=folder.group,
            directory=Inode(place.directory.device, place.directory.inode),
            old=inode_of(about),
            was=(stat.S_IMODE(about.st_mode), about.st_mtime_ns),
            then=(folder.mode, folder.mtime_ns),
            was_group=about.st_gid,
            data=True,
            had=None if attributes is None else files.attributes(place, inode_of(about)),
            gets=None if attributes is None else dict(attributes),
        )
        return Located(change, place)
