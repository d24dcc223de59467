"""Blocks of objects in files on local disk, shared by all processes of a node. A block read is the
block that was written, and the size limit always holds.

A block is written under a temporary name and renamed, under one lock that the processes share;
readers take no lock. Each file carries a digest over its place and its bytes, so that a torn,
corrupt or foreign file is a miss. The least recently used block is evicted first.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from blake3 import blake3

from icecore.errors import StoreError
from icecore.private import make_parents

#: Magic, size of the whole object, bytes of the block, BLAKE3 of key, number, size and bytes.
_HEADER = struct.Struct("<8sQQ32s")
_MAGIC = b"icblock\x01"
_TEMPORARY = ".new-"
_LOCK = "lock"
_USED = struct.Struct("<Q")
#: Reads closer together than this count as one, which saves inode writes.
_TOUCH_SECONDS = 30.0
_ABANDONED_SECONDS = 3600.0


class Blocks:
    """A bounded folder of blocks. Thread-safe; any number of processes may use one folder.

    Args:
        folder: Created if missing, accessible to its owner only.
        limit: Most bytes of all files together. A larger block is not kept.

    Raises:
        StoreError: The folder cannot be made.
    """

    def __init__(
        self, folder: str | os.PathLike[str], limit: int, *, touch_seconds: float = _TOUCH_SECONDS
    ) -> None:
        self.folder = Path(folder).expanduser().absolute()
        self.limit = limit
        self._touch_seconds = touch_seconds
        try:
            make_parents(self.folder.parent)
            self.folder.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise StoreError(
                f"cannot make the cache {self.folder}: {error.strerror}",
                cure="correct [cache] directory",
            ) from error

    def _path(self, key: str, number: int) -> Path:
        return self.folder / key[:2] / f"{key}-{number:08x}"

    def read(self, key: str, number: int, room: memoryview) -> tuple[int, int] | None:
        """Read and verify a block.

        Args:
            key: The object's key, hexadecimal digits.
            number: The block's number.
            room: Where to put the bytes; a block that does not fit is a miss.

        Returns:
            The block's bytes and the size of the whole object; None if the block is absent or not
            as it was written.
        """
        path = self._path(key, number)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError:
            return None
        try:
            header = bytearray(_HEADER.size)
            count = os.readv(descriptor, [header, room])
            about = os.fstat(descriptor)
            if count >= _HEADER.size:
                magic, whole, length, digest = _HEADER.unpack(header)
                good = (
                    magic == _MAGIC
                    and length == count - _HEADER.size == about.st_size - _HEADER.size
                )
                if good and _digest(key, number, whole, room[:length]) == digest:
                    if time.time() - about.st_mtime >= self._touch_seconds:
                        os.utime(descriptor)
                    return length, whole
        except OSError:
            return None
        finally:
            os.close(descriptor)
        self._remove(path)
        return None

    def write(self, key: str, number: int, data: memoryview, whole: int) -> bool:
        """Keep a block; return whether it was kept. A full disk is not an error.

        Args:
            whole: Size of the whole object.
        """
        size = _HEADER.size + data.nbytes
        if size > self.limit:
            return False
        header = _HEADER.pack(_MAGIC, whole, data.nbytes, _digest(key, number, whole, data))
        path = self._path(key, number)
        temporary = path.with_name(f"{_TEMPORARY}{secrets.token_hex(8)}")
        try:
            with self._locked() as lock:
                if path.exists():
                    return True
                used = self._used(lock)
                if used is None or used + size > self.limit:
                    used = self._evict(self.limit - self.limit // 8 - size)
                # Counted in advance: a process that dies in between leaves too high a count, which
                # the next eviction corrects.
                os.pwrite(lock, _USED.pack(used + size), 0)
                path.parent.mkdir(mode=0o700, exist_ok=True)
                descriptor = os.open(
                    temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600
                )
                try:
                    if os.writev(descriptor, [header, data]) != size:
                        raise OSError("the disk is full")
                finally:
                    os.close(descriptor)
                os.rename(temporary, path)
                return True
        except OSError:
            self._remove(temporary)
            return False

    def forget(self, key: str) -> None:
        """Remove all blocks of an object."""
        try:
            names = os.listdir(self.folder / key[:2])
        except OSError:
            return
        for name in names:
            if name.startswith(f"{key}-"):
                self._remove(self.folder / key[:2] / name)

    def used(self) -> int:
        """Return the bytes of all files, by counting them."""
        return sum(size for _, size, _ in self._files())

    @contextmanager
    def _locked(self) -> Iterator[int]:
        descriptor = os.open(self.folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield descriptor
        finally:
            os.close(descriptor)

    def _used(self, lock: int) -> int | None:
        """Return the used bytes according to the lock's file; None if it does not say."""
        data = os.pread(lock, _USED.size, 0)
        return int(_USED.unpack(data)[0]) if len(data) == _USED.size else None

    def _files(self) -> list[tuple[float, int, str]]:
        """Return time of last use, size and path of every file except the lock."""
        found = []
        for folder, _, names in os.walk(self.folder):
            for name in names:
                path = os.path.join(folder, name)
                try:
                    about = os.stat(path)
                except OSError:
                    continue  # forgotten meanwhile
                if name != _LOCK:
                    found.append((about.st_mtime_ns / 1e9, about.st_size, path))
        return found

    def _evict(self, target: int) -> int:
        """Remove the least recently used blocks until at most ``target`` bytes are left; return how
        many bytes are left. Only under the lock.
        """
        files = sorted(self._files())
        left = sum(size for _, size, _ in files)
        oldest_write = time.time() - _ABANDONED_SECONDS
        for used_at, size, path in files:
            abandoned = os.path.basename(path).startswith(_TEMPORARY) and used_at < oldest_write
            if left > target or abandoned:
                self._remove(path)
                left -= size
        return left

    def _remove(self, path: str | Path) -> None:
        try:
            os.unlink(path)
        except OSError:
            pass  # another process removed it, or it never existed


def _digest(key: str, number: int, whole: int, data: memoryview) -> bytes:
    hashed = blake3(f"{key}-{number}-{whole}\n".encode())
    hashed.update(data)
    return hashed.digest()
