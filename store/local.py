"""A back end in a directory: an object is a file, synced under a temporary name and then linked to its own, which only one creator can do."""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import stat
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TypeVar

from icecore.errors import Damaged, NotFound, ObjectExists, ObjectMissing, StoreDenied, StoreError, StoreFull
from icecore.private import make_parents
from icecore.store.backend import (
    RESERVE_PIECE,
    RESERVE_PIECES,
    Backend,
    Buffer,
    Draft,
    ObjectInfo,
    check_name,
    check_prefix,
)

T = TypeVar("T")

#: Temporary files; object names never begin with a dot.
_TEMPORARY = ".new-"
#: A folder of files whose bytes mean nothing: deleted where there is no room to say what else may be.
_RESERVE = ".reserve"
#: Bytes that must be free before any are set aside.
_PLENTY = 4 * RESERVE_PIECES * RESERVE_PIECE
_VECTORS = 512
_READING = ("read", "list")
_READ_CURE = "run as who may read what lies there"
_WRITE_CURE = "make it writable for who runs this, or only read it: restore, export, copy, sync, check and stats have --read-only for that"
_ABSENT = (FileNotFoundError, NotADirectoryError, IsADirectoryError)
_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_FORBIDDEN = {errno.EROFS, errno.EACCES}
_UNLINKABLE = {errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK}


class _OpenFile:
    """A file held open for reading, closed when the last reader has let go of it after it left the cache."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self.users = 0
        self.evicted = False
        #: Closes it, once; at the latest when nobody refers to it any more (a back end that was dropped without being closed).
        self.close = weakref.finalize(self, os.close, descriptor)


class LocalBackend(Backend):
    """Objects as files under ``root``.

    Args:
        root: The directory; it must exist unless ``create`` is true.
        create: Make the directory (and its parents).
        open_files: How many files stay open for reads.
        threads: How many file operations run at once.

    Raises:
        NotFound: ``root`` is no directory.
    """

    read_size = 1 << 20
    direct = True
    drafts = True

    def __init__(
        self, root: str | os.PathLike[str], *, create: bool = False, open_files: int = 64, threads: int = 8
    ) -> None:
        self.root = Path(root).absolute()
        self.where = self.folder = str(self.root)
        if create:
            try:
                make_parents(self.root.parent)
                self.root.mkdir(mode=0o700, exist_ok=True)
                _sync_directory(self.root.parent)
            except OSError as error:
                raise _translate(error, "create", self.where) from error
        if not self.root.is_dir():
            raise NotFound(f"{self.where} is no directory", cure="'icecore init' makes a repository")
        self._limit = open_files
        self._files: OrderedDict[str, _OpenFile] = OrderedDict()
        self._lock = threading.Lock()
        self._made: set[Path] = {self.root}
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="icecore-local")

    async def run(self, function: Callable[..., T], *arguments: object) -> T:
        """``function`` in one of the threads of this back end."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, function, *arguments)

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        check_name(name)
        await self.run(self._create, name, [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes])

    def _create(self, name: str, parts: Sequence[memoryview]) -> None:
        draft = LocalDraft(self, name)
        try:
            draft.append(parts)
            draft.publish_now()
        finally:
            draft.discard()

    def draft(self, name: str) -> LocalDraft:
        return LocalDraft(self, name)

    def open_temporary(self, folder: Path) -> tuple[Path, int]:
        """A new file in ``folder`` that is no object, and its descriptor."""
        temporary = folder / f"{_TEMPORARY}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._make_folder(folder)
        try:
            return temporary, os.open(temporary, flags, 0o600)
        except FileNotFoundError:
            self._made = {self.root}  # somebody removed empty folders
            self._make_folder(folder)
            return temporary, os.open(temporary, flags, 0o600)

    def _make_folder(self, folder: Path) -> None:
        """Make ``folder`` durable with its parents; remembers what is done."""
        if folder in self._made:
            return
        self._make_folder(folder.parent)
        try:
            folder.mkdir(mode=0o700)
        except FileExistsError:
            pass
        _sync_directory(folder.parent)
        self._made.add(folder)

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        return await self.run(self._get, name, limit)

    def _get(self, name: str, limit: int) -> bytes:
        path = self.root / check_name(name)
        try:
            with open(path, "rb", buffering=0) as file:
                size = os.fstat(file.fileno()).st_size
                if size > limit:
                    raise Damaged("object", name, f"it has {size} bytes, more than the {limit} that it can have")
                data = file.read(size)
                while len(data) < size:
                    more = file.read(size - len(data))
                    if not more:
                        raise Damaged("object", name, f"it ends after {len(data)} of {size} bytes")
                    data += more
                return data
        except _ABSENT as error:
            raise ObjectMissing(f"there is no object {name} in {self.where}") from error
        except OSError as error:
            raise _translate(error, f"read object {name} in", self.where) from error

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        await self.run(self.read_into, name, offset, out)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        view = out.cast("B")
        file = self._acquire(name)
        try:
            done = 0
            while done < view.nbytes:
                count = os.preadv(file.descriptor, [view[done:]], offset + done)
                if count == 0:
                    raise Damaged(
                        "object", name, f"it ends {view.nbytes - done} bytes before offset {offset + view.nbytes}"
                    )
                done += count
        except OSError as error:
            raise _translate(error, f"read object {name} in", self.where) from error
        finally:
            self._release(file)

    def _acquire(self, name: str) -> _OpenFile:
        with self._lock:
            file = self._files.get(name)
            if file is not None:
                self._files.move_to_end(name)
                file.users += 1
                return file
        try:
            descriptor = os.open(os.path.join(self.root, check_name(name)), os.O_RDONLY | os.O_CLOEXEC)
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.close(descriptor)
                raise IsADirectoryError(errno.EISDIR, "is a folder", name)
        except _ABSENT as error:
            raise ObjectMissing(f"there is no object {name} in {self.where}") from error
        except OSError as error:
            raise _translate(error, f"read object {name} in", self.where) from error
        with self._lock:
            file = self._files.get(name)
            if file is not None:  # another thread was faster
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
        path = self.root / check_name(name)
        try:
            found = await self.run(os.stat, path)
            if not stat.S_ISREG(found.st_mode):
                raise IsADirectoryError(errno.EISDIR, "is a folder", name)
            return found.st_size
        except _ABSENT as error:
            raise ObjectMissing(f"there is no object {name} in {self.where}") from error
        except OSError as error:
            raise _translate(error, f"read object {name} in", self.where) from error

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        check_prefix(prefix)
        pending: list[str] = [prefix]
        while pending:
            folder = pending.pop()
            if folder and not folder.endswith("/"):
                try:
                    size = (await self.run(os.stat, self.root / folder)).st_size
                except FileNotFoundError:
                    continue  # deleted while we were listing
                yield ObjectInfo(folder, size)
                continue
            files, folders = await self.run(_scan, self.root, folder)
            if not folders:
                for info in files:
                    yield info
            else:
                # Object order is that of whole names: "a/" sorts by its own slash, so folders and files are merged by it.
                pending.extend(sorted([info.name for info in files] + folders, reverse=True))

    async def delete(self, name: str) -> None:
        await self.run(self._delete, name)

    async def delete_many(self, names: Sequence[str]) -> None:
        await self.run(self._delete_many, names)

    def _delete_many(self, names: Sequence[str]) -> None:
        for name in names:
            self._delete(name)

    def _delete(self, name: str) -> None:
        path = self.root / check_name(name)
        with self._lock:
            file = self._files.pop(name, None)
            if file is not None:
                self._evict(file)
        try:
            os.unlink(path)
        except _ABSENT:
            return
        except OSError as error:
            raise _translate(error, f"delete object {name} in", self.where) from error

    async def sweep(self, age_seconds: float) -> int:
        return await self.run(self._sweep, age_seconds)

    def _sweep(self, age_seconds: float) -> int:
        oldest = time.time() - age_seconds
        removed = 0
        for folder, _, files in os.walk(self.root):
            for file in files:
                if file.startswith(_TEMPORARY):
                    path = os.path.join(folder, file)
                    try:
                        if os.stat(path).st_mtime <= oldest:
                            os.unlink(path)
                            removed += 1
                    except FileNotFoundError:
                        continue  # its writer finished
        return removed

    async def keep_reserve(self) -> None:
        await self.run(self._keep_reserve)

    def _keep_reserve(self) -> None:
        folder = self.root / _RESERVE
        with suppress(OSError):  # no room after all, or nothing may be written: then there is none
            missing = [folder / str(number) for number in range(RESERVE_PIECES) if _size(folder / str(number)) != RESERVE_PIECE]
            found = os.statvfs(self.root)
            if not missing or found.f_bavail * found.f_frsize < _PLENTY:
                return
            folder.mkdir(mode=0o700, exist_ok=True)
            for path in missing:
                _write_piece(path)

    async def give_up_reserve(self, leave: int) -> bool:
        return await self.run(self._give_up_reserve, leave)

    def _give_up_reserve(self, leave: int) -> bool:
        folder = self.root / _RESERVE
        try:
            held = sorted(os.listdir(folder))
            if len(held) <= leave:
                return False
            os.unlink(folder / held[-1])
        except FileNotFoundError:
            return folder.is_dir()  # somebody else has just given it up
        except OSError:
            return False
        return True

    async def close(self) -> None:
        self._pool.shutdown(wait=True)
        with self._lock:
            while self._files:
                self._evict(self._files.popitem()[1])


def _scan(root: Path, folder: str) -> tuple[list[ObjectInfo], list[str]]:
    files: list[ObjectInfo] = []
    folders: list[str] = []
    try:
        with os.scandir(root / folder) as entries:
            for entry in entries:
                if entry.name.startswith("."):
                    continue
                if entry.is_dir(follow_symlinks=False):
                    folders.append(f"{folder}{entry.name}/")
                else:
                    try:
                        files.append(ObjectInfo(folder + entry.name, entry.stat(follow_symlinks=False).st_size))
                    except FileNotFoundError:
                        continue  # deleted while we were listing
    except _ABSENT:
        return [], []
    except OSError as error:
        raise _translate(error, f"list {folder or 'objects'} in", root) from error
    files.sort()
    return files, folders


class LocalDraft(Draft):
    """A temporary file that becomes the object ``name``."""

    def __init__(self, backend: LocalBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        self._path = backend.root / check_name(name)
        self._descriptor = -1
        self._doing = f"create object {name} in"
        try:
            self._temporary, self._descriptor = backend.open_temporary(self._path.parent)
        except OSError as error:
            raise _translate(error, self._doing, backend.where) from error

    def append(self, parts: Sequence[Buffer]) -> None:
        try:
            _write_all(self._descriptor, [memoryview(part).cast("B") for part in parts if memoryview(part).nbytes])
        except OSError as error:
            raise _translate(error, self._doing, self._backend.where) from error

    async def publish(self) -> None:
        await self._backend.run(self.publish_now)

    def publish_now(self) -> None:
        """``publish`` in this thread."""
        try:
            os.fsync(self._descriptor)
            os.link(self._temporary, self._path)
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
            _sync_directory(self._path.parent)
        except OSError as error:
            # The object is there, whatever the reason; to say that there is no room, or no permission, would deny it.
            raise StoreError(f"cannot {self._doing} {self._backend.where} for good: {error.strerror}") from error

    def discard(self) -> None:
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
            try:
                os.unlink(self._temporary)
            except FileNotFoundError:
                pass  # a sweep took it for a broken-off one


def _write_all(descriptor: int, parts: Sequence[memoryview]) -> None:
    pending = list(parts)
    while pending:
        written = os.writev(descriptor, pending[:_VECTORS])
        whole = 0
        while whole < len(pending) and written >= pending[whole].nbytes:
            written -= pending[whole].nbytes
            whole += 1
        del pending[:whole]
        if written:
            pending[0] = pending[0][written:]


def _size(path: Path) -> int:
    """Bytes of the file at ``path``; -1 where there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return -1


def _write_piece(path: Path) -> None:
    """A file of random bytes, which no file system stores in fewer; all of it or nothing."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _write_all(descriptor, [memoryview(os.urandom(RESERVE_PIECE))])
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(descriptor)


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _translate(error: OSError, doing: str, where: str | Path) -> StoreError:
    reason = error.strerror or str(error)
    if error.errno in _FULL:
        return StoreFull(
            f"cannot {doing} {where}: {reason}", cure="free space there, or 'icecore forget' and 'icecore gc'"
        )
    if error.errno in _FORBIDDEN:
        return StoreDenied(f"cannot {doing} {where}: {reason}", cure=_READ_CURE if doing.startswith(_READING) else _WRITE_CURE)
    if error.errno in _UNLINKABLE:
        return StoreDenied(
            f"cannot {doing} {where}: {reason}", cure="the file system must support hard links and must be writable"
        )
    return StoreError(f"cannot {doing} {where}: {reason}")
