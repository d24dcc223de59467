"""A back end in a directory: an object is a file, synced under a temporary name and then linked to
its own name, which only one creator can do.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from icecore.errors import (
    Damaged,
    NotFound,
    ObjectExists,
    ObjectMissing,
    StoreDenied,
    StoreError,
    StoreFull,
)
from icecore.private import make_parents
from icecore.store.backend.base import (
    FOREIGN_AT_MOST,
    MAX_OFFSET,
    RESERVE_PIECE,
    RESERVE_PIECES,
    Backend,
    Buffer,
    Draft,
    Foreign,
    ObjectInfo,
    check_name,
    check_prefix,
    is_part,
)
from icecore.store.backend.beneath import NotRegular, open_regular, opened, scan, size_of

T = TypeVar("T")

#: Prefix of temporary files; object names never begin with a dot.
_TEMPORARY = ".new-"
#: A folder of files with meaningless bytes. They are deleted when there is no room left to record
#: what else may be deleted.
_RESERVE = ".reserve"
_PIECES = [str(number) for number in range(RESERVE_PIECES)]
#: Bytes that must be free before any are reserved.
_PLENTY = 4 * RESERVE_PIECES * RESERVE_PIECE
#: Prefix of objects that are opened for each read: a writer acts on whether such an object exists,
#: and NFS does not report that an open file was deleted.
_FRESH = "log/"
_VECTORS = 512
_THREADS = 8
_READING = ("read", "list")
_READ_CURE = "run as a user who may read the files there"
_WRITE_CURE = "make it writable for the user who runs this, or use --read-only, which restore, export, copy, sync, check and stats have"
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES}
_UNLINKABLE = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class _OpenFile:
    """A file held open for reading. After it leaves the cache, it is closed when its last reader
    releases it.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0
        self.evicted = False
        #: Closes it, once, at the latest when nothing refers to it any more (the back end may be
        #: dropped without being closed).
        self.close = weakref.finalize(self, os.close, descriptor)


def _is_deleted(descriptor: int) -> bool:
    """Return whether an open file was deleted, or can no longer be reached (NFS: ESTALE)."""
    try:
        return not os.fstat(descriptor).st_nlink
    except OSError:
        return True


class LocalBackend(Backend):
    """Objects as files under ``root``.

    Args:
        root: The directory; it must exist unless ``create`` is true.
        create: Make the directory (and its parents).
        open_files: How many files stay open for reads.

    Raises:
        NotFound: ``root`` is not a directory.
    """

    read_size = 1 << 20
    direct = True
    drafts = True

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        create: bool = False,
        open_files: int = 64,
    ) -> None:
        self.root = Path(root).absolute()
        self.where = self.folder = str(self.root)
        if create:
            try:
                make_parents(self.root.parent)
                self.root.mkdir(mode=0o700, exist_ok=True)
                with opened(self.root.parent, ()) as above:
                    _sync_directory(above)
            except OSError as error:
                raise _translate(error, "create", self.where) from error
        if not self.root.is_dir():
            raise NotFound(
                f"{self.where} is not a directory", cure="'icecore init' makes a repository"
            )
        # Whoever can change a link that leads to the place need not be able to write to the place,
        # so both names count.
        self.known_as = tuple(
            dict.fromkeys(f"file://{name}" for name in (self.root, os.path.realpath(self.root)))
        )
        self._limit = open_files
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._made: set[tuple[str, ...]] = {()}
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="icecore-local")

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """Run ``function`` in one of the threads of this back end; return its result."""
        # A placer reads without an event loop, and asyncio would take an eighth of its start.
        from asyncio import get_running_loop

        return await get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        check_name(name)
        await self.run(
            self._create,
            name,
            [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes],
        )

    def _create(self, name: str, parts: Sequence[memoryview]) -> None:
        draft = LocalDraft(self, name)
        try:
            draft.append(parts)
            draft.publish_now()
        finally:
            draft.discard()

    def draft(self, name: str) -> LocalDraft:
        return LocalDraft(self, name)

    def open_folder(self, folders: tuple[str, ...]) -> int:
        """Open a folder of objects for ``dir_fd``; make it and its parents durably if it is absent.

        Raises:
            StoreDenied: Something else has its name.
        """
        self._make_folder(folders)
        try:
            return self._open_folder(folders)
        except FileNotFoundError:
            self._made = {()}  # somebody removed empty folders
            self._make_folder(folders)
            return self._open_folder(folders)

    def _open_folder(self, folders: tuple[str, ...]) -> int:
        try:
            with opened(self.root, folders) as at:
                return os.dup(at)
        except NotADirectoryError:
            raise StoreDenied(
                f"cannot write to {'/'.join(folders)} in {self.where}: a link or a file has the name of that folder",
                cure="remove it; to keep a folder on another disk, bind-mount it",
            ) from None

    def _make_folder(self, folders: tuple[str, ...]) -> None:
        """Make a folder durable with its parents; remember which are."""
        if folders in self._made:
            return
        *above, last = folders
        self._make_folder(tuple(above))
        at = self._open_folder(tuple(above))
        try:
            with suppress(FileExistsError):
                os.mkdir(last, 0o700, dir_fd=at)
            _sync_directory(at)
        finally:
            os.close(at)
        self._made.add(folders)

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        return await self.run(self._get, name, limit)

    def _get(self, name: str, limit: int) -> bytes:
        try:
            with open(self._open(name), "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size > limit:
                    raise Damaged(
                        "object",
                        name,
                        f"it has {size} bytes, more than the {limit} that it can have",
                    )
                data = file.read(size)
                while len(data) < size:
                    more = file.read(size - len(data))
                    if not more:
                        raise Damaged("object", name, f"it ends after {len(data)} of {size} bytes")
                    data += more
                return data
        except OSError as error:
            raise _translate(error, f"read object {name} in", self.where) from error

    def _open(self, name: str) -> int:
        try:
            return open_regular(self.root, check_name(name))
        except _ABSENT as error:
            raise ObjectMissing(f"there is no object {name} in {self.where}") from error
        except NotRegular as error:
            raise Damaged("object", name, str(error.strerror)) from error
        except OSError as error:
            raise _translate(error, f"read object {name} in", self.where) from error

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        await self.run(self.read_into, name, offset, out)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        if not 0 <= offset <= MAX_OFFSET:
            raise Damaged("object", name, f"it has no offset {offset}")
        file = self._acquire(name)
        try:
            done = 0
            while done < view.nbytes:
                count = os.preadv(file.descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise Damaged(
                        "object",
                        name,
                        f"it ends {view.nbytes - done} bytes before offset {offset + view.nbytes}",
                    )
                done += count
        except OSError as error:
            raise _translate(error, f"read object {name} in", self.where) from error
        finally:
            self._release(file)

    def _acquire(self, name: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(name)
            if file is not None and _is_deleted(file.descriptor):
                self._evict(self._files.pop(name))  # deleted, perhaps by another process
                file = None
            if file is not None:
                self._files.move_to_end(name)
                file.users += 1
                return file
        if name.startswith(_FRESH):
            file = _OpenFile(self._open(name))
            file.users, file.evicted = 1, True
            return file
        descriptor = self._open(name)
        with self._lock:
            file = self._files.get(name)
            if file is not None:  # another thread opened it first
                os.close(descriptor)
                file.users += 1
                return file
            file = _OpenFile(descriptor)
            file.users = 1
            self._files[name] = file
            while len(self._files) > self._limit:
                self._evict(self._files.popitem(last=False)[1])
            return file

    def _release(self, file: _OpenFile) -> None:
        with self._lock:
            file.users -= 1
            if file.evicted and file.users == 0:
                file.close()

    def _evict(self, file: _OpenFile) -> None:
        file.evicted = True
        if file.users == 0:
            file.close()

    async def size(self, name: str) -> int:
        try:
            return await self.run(size_of, self.root, check_name(name))
        except _ABSENT as error:
            raise ObjectMissing(f"there is no object {name} in {self.where}") from error
        except NotRegular as error:
            raise Damaged("object", name, str(error.strerror)) from error
        except OSError as error:
            raise _translate(error, f"read object {name} in", self.where) from error

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        pending: list[str] = [prefix]
        while pending:
            folder = pending.pop()
            if folder and not folder.endswith("/"):
                try:
                    yield ObjectInfo(folder, await self.run(size_of, self.root, folder))
                except (*_ABSENT, NotRegular):
                    pass  # deleted, or replaced by something else, while we were listing
                continue
            files, folders = await self.run(_scan, self.root, folder)
            if not folders:
                for info in files:
                    yield info
            else:
                # Objects are ordered by whole names: "a/" sorts by its own slash, so folders and
                # files are merged accordingly.
                pending.extend(sorted([info.name for info in files] + folders, reverse=True))

    async def foreign(self) -> Sequence[Foreign]:
        return await self.run(self._foreign)

    def _foreign(self) -> Sequence[Foreign]:
        found: list[Foreign] = []
        pending: list[tuple[str, ...]] = [()]
        while pending and len(found) < FOREIGN_AT_MOST:
            folders = pending.pop()
            try:
                here = scan(self.root, folders)
            except _ABSENT:
                continue
            except OSError as error:
                raise _translate(
                    error, f"list {'/'.join(folders) or 'objects'} in", self.where
                ) from error
            odd = [(name, "a file") for name, _ in here.files if not is_part(name)]
            odd += [(name, "a directory") for name in here.folders if not is_part(name)]
            found += [
                Foreign(
                    "/".join((*folders, name)),
                    what if is_part(name) else f"{what} with a name that objects do not have",
                )
                for name, what in sorted(odd + here.others)
            ]
            pending += [(*folders, name) for name in here.folders if is_part(name)]
        return sorted(found)[:FOREIGN_AT_MOST]

    async def delete(self, name: str) -> None:
        await self.run(self._delete, name)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self.run(self._delete_many, names)

    def _delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self._delete(name)

    def _delete(self, name: str) -> None:
        *folders, last = check_name(name).split("/")
        with self._lock:
            file = self._files.pop(name, None)
            if file is not None:
                self._evict(file)
        try:
            with opened(self.root, folders) as at:
                os.unlink(last, dir_fd=at)
        except _ABSENT:
            return
        except OSError as error:
            raise _translate(error, f"delete object {name} in", self.where) from error

    async def sweep(self, age_seconds: float) -> int:
        return await self.run(self._sweep, age_seconds)

    def _sweep(self, age_seconds: float) -> int:
        oldest = time.time() - age_seconds
        removed = 0
        for _, _, files, at in os.fwalk(self.root):
            for file in files:
                if file.startswith(_TEMPORARY):
                    try:
                        if os.stat(file, dir_fd=at, follow_symlinks=False).st_mtime <= oldest:
                            os.unlink(file, dir_fd=at)
                            removed += 1
                    except FileNotFoundError:
                        continue  # its writer finished
        return removed

    async def keep_reserve(self) -> bool:
        return await self.run(self._keep_reserve)

    def _keep_reserve(self) -> bool:
        try:
            found = os.statvfs(self.root)
        except OSError:
            return True  # whoever writes is told
        if not found.f_blocks:
            return True  # a file system that does not say
        free = (found.f_bavail if os.geteuid() else found.f_bfree) * found.f_frsize
        roomy, whole = free >= _PLENTY, False
        try:
            with opened(self.root, ()) as at, suppress(FileExistsError):
                if roomy:
                    os.mkdir(_RESERVE, 0o700, dir_fd=at)
            with opened(self.root, (_RESERVE,)) as at:
                missing = [name for name in _PIECES if _size(name, at) != RESERVE_PIECE]
                whole = not missing
                for name in missing if roomy else ():
                    _write_piece(name, at)
        except OSError as error:
            if error.errno in _FULL:
                return False  # a quota: the file system as a whole has room
        return whole or free >= RESERVE_PIECES * RESERVE_PIECE

    async def give_up_reserve(self, leave: int) -> bool:
        return await self.run(self._give_up_reserve, leave)

    def _give_up_reserve(self, leave: int) -> bool:
        try:
            with opened(self.root, (_RESERVE,)) as at:
                held = [name for name in _PIECES if _size(name, at) >= 0]
                if len(held) <= leave:
                    return False
                with suppress(FileNotFoundError):  # another process has just deleted it
                    os.unlink(held[-1], dir_fd=at)
        except OSError:
            return False
        return True

    async def close(self) -> None:
        self._pool.shutdown(wait=True)
        with self._lock:
            while self._files:
                self._evict(self._files.popitem()[1])


def _scan(root: Path, folder: str) -> tuple[list[ObjectInfo], list[str]]:
    """Return the objects in a folder, and its folders. Other names, and anything that is not a
    regular file, are not objects.
    """
    try:
        found = scan(root, folder.split("/")[:-1])
    except _ABSENT:
        return [], []
    except OSError as error:
        raise _translate(error, f"list {folder or 'objects'} in", root) from error
    files = sorted(ObjectInfo(folder + name, size) for name, size in found.files if is_part(name))
    return files, [f"{folder}{name}/" for name in found.folders if is_part(name)]


class LocalDraft(Draft):
    """A temporary file that becomes the object ``name``."""

    def __init__(self, backend: LocalBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        *folders, self._last = check_name(name).split("/")
        self._folder = self.descriptor = -1
        self.length = 0
        self._temporary = f"{_TEMPORARY}{secrets.token_hex(8)}"
        self._doing = f"create object {name} in"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        try:
            self._folder = backend.open_folder(tuple(folders))
            self.descriptor = os.open(self._temporary, flags, 0o600, dir_fd=self._folder)
        except OSError as error:
            self.discard()
            raise _translate(error, self._doing, backend.where) from error

    def append(self, parts: Sequence[Buffer]) -> None:
        try:
            self.length += write_at(self.descriptor, parts, self.length)
        except OSError as error:
            raise _translate(error, self._doing, self._backend.where) from error

    def grow(self, count: int) -> None:
        self.length += count

    def cut(self) -> None:
        try:
            os.ftruncate(self.descriptor, self.length)
        except OSError as error:
            raise _translate(error, self._doing, self._backend.where) from error

    async def publish(self) -> None:
        await self._backend.run(self.publish_now)

    def publish_now(self) -> None:
        """Publish in this thread."""
        try:
            os.fsync(self.descriptor)
            os.link(
                self._temporary,
                self._last,
                src_dir_fd=self._folder,
                dst_dir_fd=self._folder,
                follow_symlinks=False,
            )
        except FileExistsError as error:
            raise ObjectExists(f"object {self._name} exists in {self._backend.where}") from error
        except OSError as error:
            raise _translate(error, self._doing, self._backend.where) from error
        else:
            self._sync_folder()
        finally:
            self.discard()

    def _sync_folder(self) -> None:
        try:
            _sync_directory(self._folder)
        except OSError as error:
            # The object exists, whatever the reason. An error about space or permission would deny
            # that.
            raise StoreError(
                f"cannot {self._doing} {self._backend.where} for good: {error.strerror}"
            ) from error

    def discard(self) -> None:
        (descriptor, self.descriptor), (folder, self._folder) = (
            (self.descriptor, -1),
            (self._folder, -1),
        )
        if descriptor >= 0:
            os.close(descriptor)
            with suppress(FileNotFoundError):  # a sweep removed it as interrupted
                os.unlink(self._temporary, dir_fd=folder)
        if folder >= 0:
            os.close(folder)


def write_at(descriptor: int, parts: Sequence[Buffer], offset: int) -> int:
    """Write ``parts`` one after the other from ``offset`` on; return their total size in bytes."""
    pending = [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes]
    at = offset
    while pending:
        written = os.pwritev(descriptor, pending[:_VECTORS], at)
        at += written
        whole = 0
        while whole < len(pending) and written >= pending[whole].nbytes:
            written -= pending[whole].nbytes
            whole += 1
        del pending[:whole]
        if written:
            pending[0] = pending[0][written:]
    return at - offset


def _size(name: str, folder: int) -> int:
    """Return the bytes of a file in the open ``folder``; -1 if it is absent."""
    try:
        return os.stat(name, dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return -1


def _write_piece(name: str, folder: int) -> None:
    """Write a file of random bytes, which no file system can compress; all of it or nothing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
    descriptor = os.open(name, flags, 0o600, dir_fd=folder)
    try:
        write_at(descriptor, [os.urandom(RESERVE_PIECE)], 0)
    except OSError:
        os.unlink(name, dir_fd=folder)
        raise
    finally:
        os.close(descriptor)


def _sync_directory(folder: int) -> None:
    """Sync an open directory; ``folder`` may be a descriptor that only names it."""
    descriptor = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=folder)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _translate(error: OSError, doing: str, where: str | Path) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFull(
            f"cannot {doing} {where}: {reason}",
            cure="free space there, or 'icecore forget' and 'icecore gc'",
        )
    if error.errno in _FORBIDDEN:
        return StoreDenied(
            f"cannot {doing} {where}: {reason}",
            cure=_READ_CURE if doing.startswith(_READING) else _WRITE_CURE,
        )
    if error.errno in _UNLINKABLE:
        return StoreDenied(
            f"cannot {doing} {where}: {reason}",
            cure="the file system must support hard links and must be writable",
        )
    return StoreError(f"cannot {doing} {where}: {reason}")
