"""Makes every write to a job's file: through a checked directory descriptor and the file's own
descriptor, as the file's owner. `job_directories` and `job_inodes` hold the steps.

Names are changed with the rights of the file's owner. If these do not suffice, root makes the change,
but only in a directory where only root can make names; in any other directory it is refused. So
users gain nothing from names in their own directories.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import TypeVar

from icecore.host.kernel.filesystem import RENAME_EXCHANGE, RENAME_NOREPLACE, rename
from icecore.restorer.files import job_directories, job_inodes
from icecore.restorer.files.job_directories import MadeDirectory
from icecore.restorer.files.jobpaths import UNSUPPORTED, Directory, JobPaths, Place
from icecore.restorer.files.rights import Inode, Owner, as_allowed
from icecore.store.format.manifest import OpenFile

Result = TypeVar("Result")


class JobFiles:
    """Changes the files of one job, in a thread of its own.

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
        return self._do(lambda: job_directories.make_directories(self._paths, path, owner, mode))

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
        self._do(
            lambda: job_directories.settle_directory(
                made, owner, mode, mtime_ns, attributes, before
            )
        )

    def attributes(self, place: Place, known: Inode) -> dict[bytes, bytes]:
        """Return all extended attributes of a directory that a restore may change.

        Raises:
            PathRefused: It was replaced.
        """
        return self._do(lambda: job_directories.attributes(place, known))

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
        self._do(lambda: job_directories.hand_directory(made, owner, mode, mtime_ns, attributes))

    # -- files

    def create_fifo(self, place: Place, owner: Owner) -> int:
        """Create a FIFO for ``owner``, with mode 0600; returns an O_PATH descriptor of it.

        Raises:
            PathRefused: Another user replaced it meanwhile.
            OSError: FileExistsError: the name is taken, by whatever. Others as mkfifo(3).
        """
        return self._do(lambda: job_inodes.create_fifo(place, owner))

    def settle_fifo(
        self, descriptor: int, owner: Owner, mode: int, mtime_ns: int | None = None
    ) -> None:
        """Give a FIFO that was created its group, mode and time, as its owner.

        Args:
            descriptor: From `create_fifo`.
            mtime_ns: ns since the epoch; None: it keeps its time.
        """
        self._do(lambda: job_inodes.settle_fifo(descriptor, owner, mode, mtime_ns))

    def create_symlink(self, place: Place, owner: Owner, target: bytes, mtime_ns: int) -> int:
        """Create a symbolic link for ``owner``; returns an O_PATH descriptor of it.

        Raises:
            PathRefused: Another user replaced it meanwhile.
            OSError: FileExistsError: the name is taken, by whatever. Others as symlink(2).
        """
        return self._do(lambda: job_inodes.create_symlink(place, owner, target, mtime_ns))

    def create(self, place: Place, owner: Owner) -> int:
        """Create an empty file for ``owner``, with mode 0600; returns its descriptor, open for
        reading and writing.

        Raises:
            OSError: FileExistsError: the name is taken, by whatever. Others as open(2).
        """
        return self._do(lambda: job_inodes.create(place, owner))

    def open_inode(self, place: Place, known: Inode, owner: int, flags: int) -> int:
        """Open the file at a place, if it is the regular file ``known`` and belongs to ``owner``.

        It is examined before it is opened, so a FIFO does not block and a device is not touched.

        Args:
            flags: Of open(2).

        Raises:
            PathRefused: It is another file, or another user's.
            OSError: As open(2).
        """
        return self._do(lambda: job_inodes.open_inode(place, known, owner, flags))

    def open_path(self, place: Place, known: Inode) -> int:
        """Return an O_PATH descriptor of the file ``known`` at a place, whatever it is: to be
        linked, not to be read or written.

        Raises:
            PathRefused: It is another file.
        """
        return self._do(lambda: job_inodes.open_path(place, known))

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
        return self._do(lambda: job_inodes.settle(descriptor, file, attributes))

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
            self._do(lambda: as_allowed(directory, owner, without_flag))

    def rename(
        self, directory: Directory, old: str, new: str, owner: Owner, flags: int = 0
    ) -> None:
        """Rename within a directory, with the flags of renameat2(2)."""
        work = partial(rename, directory.descriptor, old, new, flags)
        self._do(lambda: as_allowed(directory, owner, work))

    def link(self, descriptor: int, place: Place, owner: Owner) -> None:
        """Give the file that is open as ``descriptor`` another name, which must not exist."""

        def work() -> None:
            os.link(
                f"/proc/self/fd/{descriptor}",
                place.name,
                dst_dir_fd=place.directory.descriptor,
                follow_symlinks=True,
            )

        self._do(lambda: as_allowed(place.directory, owner, work))

    def unlink(self, place: Place, known: Inode | None, owner: Owner) -> bool:
        """Remove a name if it is the file ``known`` (None: whatever has it); returns whether it
        was.
        """
        return self._do(lambda: job_inodes.unlink(place, known, owner))

    def rmdir(self, made: MadeDirectory, owner: Owner) -> bool:
        """Remove a directory that was made, if it is still that one and empty; returns whether it
        was.
        """
        return self._do(lambda: job_directories.remove_directory(made, owner))

    def remove_tree(self, place: Place, known: Inode, owner: Owner) -> bool:
        """Remove a file, or a directory with all its content, if it is ``known``; returns whether
        it was. The owner's rights alone count, whoever the content belongs to; mounts are not
        entered.

        Raises:
            OSError: Not all of it can be removed.
        """
        return self._do(lambda: job_directories.remove_tree(place, known, owner))

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
