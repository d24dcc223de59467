"""Makes every write to a job's file: through a checked directory descriptor and the file's own
descriptor, as the file's owner.

Public surface:

- `JobFiles(root)`: a context manager; resolves paths like `JobPaths` and runs every change in a
  thread of its own.
- `JobFiles.locate(path)`, `JobFiles.directory(path)`: where a path lies (`Place`, `Directory`),
  links refused unless root alone could make them.
- `JobFiles.make_directories(path, owner)`: the missing directories of a path, made as the owner;
  returns what it made (`MadeDirectory`).
- `JobFiles.make_directory(path, owner)`: one directory with access for its owner only;
  `JobFiles.settle_directory(made, …)` gives it its mode and time.
- `JobFiles.hand_directory(made, owner, …)`: the same for an export, with another owner.
- `JobFiles.create(place, owner)`: a new, empty file of mode 0600 that belongs to ``owner`` from the
  start; its descriptor.
- `JobFiles.create_fifo(place, owner)`: a FIFO in the same way; `JobFiles.settle_fifo(…)`.
- `JobFiles.create_symlink(place, owner, target)`: a symbolic link in the same way.
- `JobFiles.remove_tree(place, known, owner)`: a file, or a directory with all its content, removed
  with the owner's rights alone.
- `JobFiles.keeping_time(directory)`: what is removed meanwhile leaves the directory's time.
- `JobFiles.open_path(place, known)`: an O_PATH descriptor of the file ``known`` at a place.
- `JobFiles.open_inode(place, known, owner, flags)`: the file at a place, if it is that very regular
  file and belongs to that owner.
- `JobFiles.settle(descriptor, file)`: owner, mode without set-ID bits, and time of a file that was
  created.
- `JobFiles.exchange`, `place_new`, `rename`, `link`, `unlink`, `rmdir`: names, within checked
  directories.

Names are changed with the rights of the file's owner. If these do not suffice, root makes the change,
but only in a directory where only root can make names; in any other directory it is refused. So
users gain nothing from names in their own directories.
"""

from __future__ import annotations

import errno
import os
import pwd
import stat
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import NamedTuple, TypeVar

from icecore.host.kernel.filesystem import (
    RENAME_EXCHANGE,
    RENAME_NOREPLACE,
    acting_as,
    rename,
)
from icecore.host.kernel.listing import attributes_of
from icecore.host.kernel.removal import remove_tree
from icecore.restorer.files.jobpaths import Directory, JobPaths, PathRefused, Place
from icecore.store.format.manifest import OpenFile

Result = TypeVar("Result")
#: Set-ID bits are never put back: the owner could write to the file before it got them.
_MODES = 0o1777
#: Beginnings of names of extended attributes that the owner of a file can set.
_OF_USERS = (b"user.", b"system.posix_acl_")
#: Errors of file systems without an operation.
UNSUPPORTED = (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Owner(NamedTuple):
    """The owner of a file."""

    user: int
    group: int


class Inode(NamedTuple):
    """The identity of a file."""

    device: int
    inode: int


@dataclass(frozen=True)
class MadeDirectory:
    """A directory that was made: its name, in what, and which one it is."""

    place: Place
    inode: Inode


def inode_of(about: os.stat_result) -> Inode:
    """Return which file a stat result describes."""
    return Inode(about.st_dev, about.st_ino)


class JobFiles:
    """Changes the files of one job.

    Args:
        root: Directory that is the root of the job's file system. Empty: this process's.
    """

    def __init__(self, root: str = "") -> None:
        self._paths = JobPaths(root)
        # Python runs signal handlers in the main thread only: none can come between taking a user's
        # identity and giving it back.
        self._thread = ThreadPoolExecutor(1, "job-files")

    def close(self) -> None:
        """End the thread and close the directories."""
        self._thread.shutdown()
        self._paths.close()

    def __enter__(self) -> JobFiles:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    # -- places

    def directory(self, path: str) -> Directory:
        """As `JobPaths.directory`."""
        return self._do(lambda: self._paths.directory(path))

    def locate(self, path: str) -> Place:
        """As `JobPaths.locate`."""
        return self._do(lambda: self._paths.locate(path))

    def make_directories(self, path: str, owner: Owner, mode: int = 0o755) -> list[MadeDirectory]:
        """Make the directory ``path`` and its missing parents, for ``owner``; returns those made,
        outermost first.

        Raises:
            PathRefused: A component is an untrusted link, or another user's directory appeared
                where one was made.
            OSError: The owner may not, or as mkdir(2).
        """
        return self._do(lambda: self._make_directories(path, owner, mode))

    def _make_directories(self, path: str, owner: Owner, mode: int) -> list[MadeDirectory]:
        try:
            self._paths.directory(path)
            return []
        except FileNotFoundError:
            parent, name = os.path.split(path)
            made = self._make_directories(parent, owner, mode)
        place = Place(self._paths.directory(parent), name)
        descriptor = place.directory.descriptor
        try:
            self._as_allowed(
                place.directory, owner, lambda: os.mkdir(name, mode, dir_fd=descriptor)
            )
        except FileExistsError:
            try:
                self._paths.directory(path)  # made meanwhile
            except FileNotFoundError:
                raise PathRefused(
                    f"{path} is a symbolic link that leads nowhere",
                    cure="remove it, or make the directory that it names",
                ) from None
            return made
        if place.directory.root_only:
            os.chown(
                name, *owner, dir_fd=descriptor, follow_symlinks=False
            )  # no other user can have replaced it there
        found = self._paths.directory(path)
        about = os.stat(name, dir_fd=descriptor, follow_symlinks=False)
        if inode_of(about) != (found.device, found.inode) or about.st_uid != owner.user:
            raise PathRefused(
                f"another user replaced the directory {path} during its creation",
                cure="keep others from writing to its parent directory",
            )
        return [*made, MadeDirectory(place, inode_of(about))]

    def settle_directory(
        self,
        made: MadeDirectory,
        owner: Owner,
        mode: int,
        mtime_ns: int | None,
        attributes: Mapping[bytes, bytes] | None = None,
        before: Collection[bytes] = (),
    ) -> None:
        """Give a directory that was made its group, its mode and its time, as its owner.

        Args:
            mtime_ns: ns since the epoch; None: it keeps its time.
            attributes: Its extended attributes; None: it keeps those that it has.
            before: Names of attributes that it had, and loses if they are not among these.

        Raises:
            PathRefused: It was replaced.
            OSError: As fchmod(2).
        """
        self._do(lambda: self._settle_directory(made, owner, mode, mtime_ns, attributes, before))

    @staticmethod
    def _settle_directory(
        made: MadeDirectory,
        owner: Owner,
        mode: int,
        mtime_ns: int | None,
        attributes: Mapping[bytes, bytes] | None,
        before: Collection[bytes],
    ) -> None:
        # The owner need not have access to the directory above. Nothing else is opened than a
        # directory, and it is not read.
        flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
        descriptor = os.open(made.place.name, flags, dir_fd=made.place.directory.descriptor)
        try:
            about = os.fstat(descriptor)
            if inode_of(about) != made.inode or about.st_uid != owner.user:
                path = os.path.join(made.place.directory.path, made.place.name)
                raise PathRefused(
                    f"another user replaced the directory {path} during the restore",
                    cure="keep others from writing to its parent directory",
                )
            _give(descriptor, owner)
            with acting_as(*owner, [owner.group]):
                if attributes is not None:
                    os.fchmod(descriptor, mode | 0o700)  # without it, nobody may set attributes
                    _replace_attributes(descriptor, attributes, before)
                os.fchmod(descriptor, mode)
                if mtime_ns is not None:
                    os.utime(descriptor, ns=(mtime_ns, mtime_ns))
        finally:
            os.close(descriptor)

    def attributes(self, place: Place, known: Inode) -> dict[bytes, bytes]:
        """Return all extended attributes of a directory that a restore may change.

        Raises:
            PathRefused: It is another one.
        """

        def work() -> dict[bytes, bytes]:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(place.name, flags, dir_fd=place.directory.descriptor)
            try:
                if inode_of(os.fstat(descriptor)) != known:
                    raise PathRefused(f"{place.name} was replaced", cure="restore again")
                return attributes_of(descriptor, privileged=True)
            finally:
                os.close(descriptor)

        return self._do(work)

    def hand_directory(
        self,
        made: MadeDirectory,
        owner: Owner,
        mode: int,
        mtime_ns: int,
        attributes: Mapping[bytes, bytes],
    ) -> None:
        """Give a directory that this process made for itself to ``owner``, in a directory that only
        root can change; mode, time and attributes as in `settle_directory`.
        """

        def work() -> None:
            flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
            descriptor = os.open(made.place.name, flags, dir_fd=made.place.directory.descriptor)
            try:
                if inode_of(os.fstat(descriptor)) != made.inode:
                    raise PathRefused(f"{made.place.name} was replaced during the export")
                _give(descriptor, owner)
                _replace_attributes(descriptor, attributes)
                os.fchmod(descriptor, mode)
                os.utime(descriptor, ns=(mtime_ns, mtime_ns))
            finally:
                os.close(descriptor)

        self._do(work)

    # -- files

    def create_fifo(self, place: Place, owner: Owner) -> int:
        """Create a FIFO for ``owner``, with mode 0600; returns an O_PATH descriptor of it.

        Raises:
            PathRefused: Another user replaced it meanwhile.
            OSError: FileExistsError: the name is taken, by whatever. Others as mkfifo(3).
        """
        return self._do(lambda: self._create_fifo(place, owner))

    def _create_fifo(self, place: Place, owner: Owner) -> int:
        directory = place.directory
        self._as_allowed(
            directory,
            owner,
            lambda: os.mkfifo(place.name, 0o600, dir_fd=directory.descriptor),
        )
        try:
            if directory.root_only:
                # No other user can have replaced it there.
                os.chown(place.name, *owner, dir_fd=directory.descriptor, follow_symlinks=False)
            found = os.open(
                place.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory.descriptor
            )
        except BaseException:
            self._unlink(place, None, owner)
            raise
        about = os.fstat(found)
        if not stat.S_ISFIFO(about.st_mode) or about.st_uid != owner.user or about.st_nlink != 1:
            os.close(found)
            raise PathRefused(
                f"another user replaced a FIFO in {directory.path} during its creation",
                cure="keep others from writing to that directory",
            )
        return found

    def settle_fifo(
        self, descriptor: int, owner: Owner, mode: int, mtime_ns: int | None = None
    ) -> None:
        """Give a FIFO that was created its group, mode and time, as its owner.

        Args:
            descriptor: From `create_fifo`.
            mtime_ns: ns since the epoch; None: it keeps its time.
        """
        self._do(lambda: self._settle_fifo(descriptor, owner, mode, mtime_ns))

    @staticmethod
    def _settle_fifo(descriptor: int, owner: Owner, mode: int, mtime_ns: int | None) -> None:
        # The descriptor's own link names this inode and no other.
        name = f"/proc/self/fd/{descriptor}"
        about = os.fstat(descriptor)
        if (about.st_uid, about.st_gid) != owner:
            os.chown(name, *owner)
        with acting_as(*owner, [owner.group]):
            with suppress(OSError):  # it inherited no access control list, or there are none
                os.removexattr(name, b"system.posix_acl_access")
            os.chmod(name, mode)
            if mtime_ns is not None:
                os.utime(name, ns=(mtime_ns, mtime_ns))

    def create_symlink(self, place: Place, owner: Owner, target: bytes, mtime_ns: int) -> int:
        """Create a symbolic link for ``owner``; returns an O_PATH descriptor of it.

        Raises:
            PathRefused: Another user replaced it meanwhile.
            OSError: FileExistsError: the name is taken, by whatever. Others as symlink(2).
        """

        def work() -> int:
            directory = place.directory
            name, folder = os.fsencode(place.name), directory.descriptor
            self._as_allowed(directory, owner, lambda: os.symlink(target, name, dir_fd=folder))
            try:
                if directory.root_only:
                    # No other user can have replaced it there.
                    os.chown(name, *owner, dir_fd=folder, follow_symlinks=False)
                with acting_as(*owner, [owner.group]):
                    os.utime(name, ns=(mtime_ns, mtime_ns), dir_fd=folder, follow_symlinks=False)
                found = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
            except BaseException:
                self._unlink(place, None, owner)
                raise
            about = os.fstat(found)
            if not stat.S_ISLNK(about.st_mode) or about.st_uid != owner.user:
                os.close(found)
                raise PathRefused(
                    f"another user replaced a link in {directory.path} during its creation",
                    cure="keep others from writing to that directory",
                )
            return found

        return self._do(work)

    def create(self, place: Place, owner: Owner) -> int:
        """Create an empty file for ``owner``, with mode 0600; returns its descriptor, open for
        reading and writing.

        Raises:
            OSError: FileExistsError: the name is taken, by whatever. Others as open(2).
        """
        return self._do(lambda: self._create(place, owner))

    def _create(self, place: Place, owner: Owner) -> int:
        flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        directory = place.directory
        descriptor = self._as_allowed(
            directory, owner, lambda: os.open(place.name, flags, 0o600, dir_fd=directory.descriptor)
        )
        try:
            _give(descriptor, owner)
        except BaseException:
            os.close(descriptor)
            self._unlink(place, None, owner)
            raise
        return descriptor

    def open_inode(self, place: Place, known: Inode, owner: int, flags: int) -> int:
        """Open the file at a place, if it is the regular file ``known`` and belongs to ``owner``.

        It is examined before it is opened, so a FIFO does not block and a device is not touched.

        Args:
            flags: Of open(2).

        Raises:
            PathRefused: It is another file, or another user's.
            OSError: As open(2).
        """
        return self._do(lambda: _open_inode(place, known, owner, flags))

    def open_path(self, place: Place, known: Inode) -> int:
        """Return an O_PATH descriptor of the file ``known`` at a place, whatever it is: to be
        linked, not to be read or written.

        Raises:
            PathRefused: It is another file.
        """
        return self._do(lambda: _open_path(place, known))

    def settle(
        self,
        descriptor: int,
        file: OpenFile,
        attributes: Mapping[bytes, bytes] | None = None,
    ) -> bool:
        """Give a file that was created its recorded owner, mode and times; returns whether set-ID
        bits were left out.

        Args:
            attributes: Its extended attributes; None: it keeps those that it got when it was
                created.

        Raises:
            OSError: The file system has none, or as setxattr(2).
        """
        return self._do(lambda: self._settle(descriptor, file, attributes))

    @staticmethod
    def _settle(descriptor: int, file: OpenFile, attributes: Mapping[bytes, bytes] | None) -> bool:
        owner = Owner(file.user, file.group)
        _give(descriptor, owner)  # which would remove capabilities

        def rest() -> None:
            if attributes is not None:
                _replace_attributes(descriptor, attributes)
            os.fchmod(descriptor, file.mode & _MODES)
            os.utime(descriptor, ns=(file.mtime_ns, file.mtime_ns))

        try:
            with acting_as(*owner, [owner.group]):
                rest()
        except (
            PermissionError
        ):  # it is the very file that was created: as root nothing else can be meant
            rest()
        return bool(file.mode & ~_MODES)

    # -- names

    def exchange(self, directory: Directory, one: str, other: str, owner: Owner) -> None:
        """Exchange two names of one directory in one step.

        Raises:
            OSError: One of `UNSUPPORTED`: the file system cannot.
        """
        self.rename(directory, one, other, owner, RENAME_EXCHANGE)

    def place_new(self, directory: Directory, old: str, new: str, owner: Owner) -> None:
        """Rename to a name that must not exist.

        Raises:
            FileExistsError: It does.
        """

        def without_flag() -> None:
            os.link(
                old,
                new,
                src_dir_fd=directory.descriptor,
                dst_dir_fd=directory.descriptor,
                follow_symlinks=False,
            )
            os.unlink(old, dir_fd=directory.descriptor)

        try:
            self.rename(directory, old, new, owner, RENAME_NOREPLACE)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self._do(lambda: self._as_allowed(directory, owner, without_flag))

    def rename(
        self, directory: Directory, old: str, new: str, owner: Owner, flags: int = 0
    ) -> None:
        """Rename within a directory, with the flags of renameat2(2)."""
        work = partial(rename, directory.descriptor, old, new, flags)
        self._do(lambda: self._as_allowed(directory, owner, work))

    def link(self, descriptor: int, place: Place, owner: Owner) -> None:
        """Give the file that is open as ``descriptor`` another name, which must not exist."""

        def work() -> None:
            os.link(
                f"/proc/self/fd/{descriptor}",
                place.name,
                dst_dir_fd=place.directory.descriptor,
                follow_symlinks=True,
            )

        self._do(lambda: self._as_allowed(place.directory, owner, work))

    def unlink(self, place: Place, known: Inode | None, owner: Owner) -> bool:
        """Remove a name if it is the file ``known`` (None: whatever has it); returns whether it
        was.
        """
        return self._do(lambda: self._unlink(place, known, owner))

    def _unlink(self, place: Place, known: Inode | None, owner: Owner) -> bool:
        about = place.stat()
        if (
            about is None
            or stat.S_ISDIR(about.st_mode)
            or (known is not None and inode_of(about) != known)
        ):
            return False
        try:
            # A user who replaces the name now only gets a name in the user's own directory removed.
            self._as_allowed(
                place.directory,
                owner,
                lambda: os.unlink(place.name, dir_fd=place.directory.descriptor),
            )
        except FileNotFoundError:
            return False
        return True

    def rmdir(self, made: MadeDirectory, owner: Owner) -> bool:
        """Remove a directory that was made, if it is still that one and empty; returns whether it
        was.
        """

        def work() -> bool:
            about = made.place.stat()
            if about is None or inode_of(about) != made.inode:
                return False
            try:
                self._as_allowed(
                    made.place.directory,
                    owner,
                    lambda: os.rmdir(made.place.name, dir_fd=made.place.directory.descriptor),
                )
            except OSError:
                return False
            return True

        return self._do(work)

    def remove_tree(self, place: Place, known: Inode, owner: Owner) -> bool:
        """Remove a file, or a directory with all its content, if it is ``known``; returns whether
        it was. The owner's rights alone count, whoever the content belongs to; mounts are not
        entered.

        Raises:
            OSError: Not all of it can be removed.
        """

        def work() -> bool:
            about = place.stat()
            if about is None or inode_of(about) != known:
                return False
            groups = _groups(owner) if owner.user else []
            with acting_as(*owner, groups):
                remove_tree(place.directory.descriptor, place.name)
            return True

        return self._do(work)

    @contextmanager
    def keeping_time(self, directory: Directory) -> Iterator[None]:
        """Give a directory the time again that it had when the block began. A change that another
        process makes meanwhile keeps its time only if it comes afterwards.
        """
        # The descriptor's own link names this directory and no other.
        before = os.stat(f"/proc/self/fd/{directory.descriptor}")
        yield
        link = f"/proc/self/fd/{directory.descriptor}"
        os.utime(link, ns=(before.st_atime_ns, before.st_mtime_ns))

    # -- rights

    def _do(self, work: Callable[[], Result]) -> Result:
        return self._thread.submit(work).result()

    @staticmethod
    def _as_allowed(directory: Directory, owner: Owner, work: Callable[[], Result]) -> Result:
        """Change names in a directory as the owner; as root if only root can change it."""
        try:
            with acting_as(*owner, [owner.group]):
                return work()
        except PermissionError as error:
            if directory.root_only:
                return work()
            try:
                with acting_as(*owner, _groups(owner)):
                    return work()
            except PermissionError:
                raise PermissionError(
                    error.errno,
                    f"user {owner.user}, who owns the file, may not change {directory.path}",
                    directory.path,
                ) from error


def _replace_attributes(
    descriptor: int, wanted: Mapping[bytes, bytes], before: Collection[bytes] = ()
) -> None:
    """Give a file or directory extended attributes, and take away others that owners can set: a
    directory hands its access control list on to what is made in it.
    """
    try:
        there = [os.fsencode(name) for name in os.listxattr(descriptor)]
    except OSError as error:
        if wanted or error.errno not in UNSUPPORTED:
            raise
        return
    for name in there:
        if name not in wanted and (name.startswith(_OF_USERS) or name in before):
            os.removexattr(descriptor, name)
    for name, value in wanted.items():
        os.setxattr(descriptor, name, value)


def _groups(owner: Owner) -> list[int]:
    """Return all groups of a user that this machine knows."""
    try:
        return os.getgrouplist(pwd.getpwuid(owner.user).pw_name, owner.group)
    except (KeyError, OSError):
        return [owner.group]


def _give(descriptor: int, owner: Owner) -> None:
    """Set the owner of a file that was created, where the directory or root's rights made it
    another.
    """
    about = os.fstat(descriptor)
    if (about.st_uid, about.st_gid) != owner:
        os.fchown(descriptor, *owner)


def _open_path(place: Place, known: Inode) -> int:
    found = os.open(
        place.name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place.directory.descriptor
    )
    if inode_of(os.fstat(found)) != known:
        os.close(found)
        path = os.path.join(place.directory.path, place.name)
        raise PathRefused(f"{path} is no longer the same file", cure="restore again")
    return found


def _open_inode(place: Place, known: Inode, owner: int, flags: int) -> int:
    found = _open_path(place, known)
    try:
        about = os.fstat(found)
        path = os.path.join(place.directory.path, place.name)
        if not stat.S_ISREG(about.st_mode):
            raise PathRefused(f"{path} is not a regular file", cure="move it away")
        if about.st_uid != owner:
            raise PathRefused(
                f"{path} belongs to user {about.st_uid}, not to user {owner}",
                cure="give the file back to its owner, or move it away",
            )
        # The descriptor's own link names this inode and no other.
        return os.open(f"/proc/self/fd/{found}", flags | os.O_CLOEXEC)
    finally:
        os.close(found)
