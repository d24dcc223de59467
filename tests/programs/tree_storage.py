"""Files, locks and shared memory of `tree.py`, most of them without a name by which they could be
opened again.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
from pathlib import Path

from tests.programs import kernel
from tests.programs.tree_kept import Broken, content, same

F_OFD_GETLK, F_OFD_SETLK = 36, 37


class DeletedFile:
    """A file without a name, used through its descriptor; ``mapped`` adds a private mapping with
    pages of its own.
    """

    BLOCK = 4096

    def __init__(self, path: Path, size: int, *, mapped: bool = False) -> None:
        self.size = size
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        whole = content(size, 5, size)
        os.write(self.file, whole)
        self.blocks = [bytearray(whole[n : n + self.BLOCK]) for n in range(0, size, self.BLOCK)]
        self.offset = os.lseek(self.file, 12345, os.SEEK_SET)
        self.round = 0
        self.mapping: mmap.mmap | None = None
        if mapped:
            self.mapping = mmap.mmap(self.file, size, flags=mmap.MAP_PRIVATE)
            for n in range(0, len(self.blocks), 2):
                self.mapping[n * self.BLOCK : n * self.BLOCK + 8] = struct.pack("<Q", n)
        os.unlink(path)

    def check(self) -> None:
        facts = os.fstat(self.file)
        same("links of a deleted file", facts.st_nlink, 0)
        same("size of a deleted file", facts.st_size, self.size)
        same("offset in a deleted file", os.lseek(self.file, 0, os.SEEK_CUR), self.offset)
        self.round += 1
        n = self.round % len(self.blocks)
        self._check_block(n)
        if self.mapping is None:
            self.blocks[n][:8] = struct.pack("<Q", self.round)
            os.pwrite(self.file, self.blocks[n], n * self.BLOCK)

    def last(self) -> None:
        self.check()
        for n in range(len(self.blocks)):
            self._check_block(n)

    def _check_block(self, n: int) -> None:
        block = bytes(self.blocks[n])
        same(f"block {n} of a deleted file", os.pread(self.file, self.BLOCK, n * self.BLOCK), block)
        if self.mapping is not None:
            own = struct.pack("<Q", n) + block[8:] if n % 2 == 0 else block
            found = self.mapping[n * self.BLOCK : (n + 1) * self.BLOCK]
            same(f"block {n} of a private mapping of a deleted file", found, own)


class LinkedFile:
    """A file whose name is gone while another hard link to it is left."""

    def __init__(self, path: Path, link: Path) -> None:
        self.link = link
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        os.write(self.file, content(9000, 6))
        os.link(path, link)
        os.unlink(path)
        self.inode = os.fstat(self.file).st_ino

    def check(self) -> None:
        facts = os.fstat(self.file)
        same("size of a file with another link", facts.st_size, 9000)
        same("inode of the other link", os.stat(self.link).st_ino, facts.st_ino)
        same("offset in a file with another link", os.lseek(self.file, 0, os.SEEK_CUR), 9000)

    def last(self) -> None:
        self.check()
        same("content through the descriptor", os.pread(self.file, 10_000, 0), content(9000, 6))
        same("content through the other link", self.link.read_bytes(), content(9000, 6))


class Locks:
    """flock, POSIX and open-file-description locks of this process; ``Probe`` sees from another one
    that they hold.
    """

    def __init__(self, directory: Path) -> None:
        self.flocked = os.open(directory / "flock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(self.flocked, fcntl.LOCK_EX)
        self.posix = os.open(directory / "posix-lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.lockf(self.posix, fcntl.LOCK_EX, 10, 10)
        self.description = os.open(directory / "ofd-lock", os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.fcntl(
            self.description,
            F_OFD_SETLK,
            struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 5, 5, 0),
        )

    def check(self) -> None:
        for descriptor in (self.flocked, self.posix, self.description):
            same("size of a lock file", os.fstat(descriptor).st_size, 0)

    def last(self) -> None:
        self.check()


class Probe:
    """Tries to take another process's locks, and must not get them."""

    def __init__(self, directory: Path, owner: int) -> None:
        self.owner = owner
        self.flocked = os.open(directory / "flock", os.O_RDWR)
        self.posix = os.open(directory / "posix-lock", os.O_RDWR)
        self.description = os.open(directory / "ofd-lock", os.O_RDWR)

    def check(self) -> None:
        try:
            fcntl.flock(self.flocked, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pass
        else:
            fcntl.flock(self.flocked, fcntl.LOCK_UN)
            raise Broken("the flock was lost")
        wanted = struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, 0, 100, 0)
        for what, descriptor, command, expected in (
            ("POSIX lock", self.posix, fcntl.F_GETLK, (fcntl.F_WRLCK, 10, 10, self.owner)),
            ("description lock", self.description, F_OFD_GETLK, (fcntl.F_WRLCK, 5, 5, -1)),
        ):
            kind, _, start, size, pid = struct.unpack(
                "hhqqi4x", fcntl.fcntl(descriptor, command, wanted)
            )
            same(what, (kind, start, size, pid), expected)

    def last(self) -> None:
        self.check()


class SealedMemory:
    """A memfd that can neither be written nor change its size any more, and its mapping."""

    SEALS = fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK

    def __init__(self, size: int = 200_000) -> None:
        self.size = size
        self.file = os.memfd_create("icecore-sealed", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.write(self.file, content(size, 8))
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, self.SEALS)
        self.mapping = mmap.mmap(self.file, size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)

    def check(self) -> None:
        same("seals", fcntl.fcntl(self.file, fcntl.F_GET_SEALS), self.SEALS)
        same("size of a sealed memfd", os.fstat(self.file).st_size, self.size)
        try:
            os.pwrite(self.file, b"x", 0)
        except PermissionError:
            pass
        else:
            raise Broken("a sealed memfd could be written")
        same(
            "name of a memfd",
            os.readlink(f"/proc/self/fd/{self.file}"),
            "/memfd:icecore-sealed (deleted)",
        )

    def last(self) -> None:
        self.check()
        same(
            "content of a sealed memfd",
            os.pread(self.file, self.size + 1, 0),
            content(self.size, 8),
        )
        same("mapping of a sealed memfd", self.mapping[:], content(self.size, 8))


class SystemV:
    """System V shared memory, a semaphore and a message queue; restorable only in an ipc namespace
    of one's own.
    """

    def __init__(self) -> None:
        self.memory = kernel.SharedMemory(300_000)
        self.memory.write(content(300_000, 9))
        self.semaphore = kernel.Semaphore(42)
        self.queue = kernel.MessageQueue()
        for n in range(3):
            self.queue.send(n + 1, content(500, 10, n))

    def check(self) -> None:
        same("System V semaphore", self.semaphore.value(), 42)
        same("System V memory", self.memory.read()[:4096], content(300_000, 9)[:4096])

    def last(self) -> None:
        self.check()
        same("all of the System V memory", self.memory.read(), content(300_000, 9))
        for n in range(3):
            same("System V message", self.queue.receive(), (n + 1, content(500, 10, n)))
        self.semaphore.remove()
        self.queue.remove()


class Blackboard:
    """Several kinds of shared memory that two processes rewrite by turns: all must always hold the
    same version.
    """

    SIZE = 128 << 10

    def __init__(self, directory: Path, shm_names: tuple[str, str]) -> None:
        self.maps: dict[str, mmap.mmap] = {"anonymous": mmap.mmap(-1, self.SIZE)}
        self.memfd = os.memfd_create("icecore-shared", os.MFD_CLOEXEC)
        self.descriptors = {
            "memfd": self.memfd,
            "POSIX shm": os.open(
                f"/dev/shm/{shm_names[0]}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600
            ),
            "unlinked POSIX shm": os.open(
                f"/dev/shm/{shm_names[1]}", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600
            ),
            "mapped file": os.open(directory / "mapped", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600),
        }
        for name, descriptor in self.descriptors.items():
            os.ftruncate(descriptor, self.SIZE)
            self.maps[name] = mmap.mmap(descriptor, self.SIZE)
        os.unlink(f"/dev/shm/{shm_names[1]}")
        os.close(self.descriptors.pop("POSIX shm"))
        self.write(0)

    def page(self, name: str, version: int, at: int) -> bytes:
        return content(4096, 11, sum(name.encode()), version, at)

    def write(self, version: int) -> None:
        """Rewrites three pages of each kind for this version; the others keep what an earlier
        version wrote.
        """
        for name, memory in self.maps.items():
            for at in pages_of(version):
                memory[at * 4096 : (at + 1) * 4096] = self.page(name, version, at)

    def verify(self, version: int, pages: range | tuple[int, ...]) -> None:
        for name, memory in self.maps.items():
            for at in pages:
                writer = last_writer(version, at)
                expected = bytes(4096) if writer is None else self.page(name, writer, at)
                same(
                    f"{name}, page {at}, version {version}",
                    memory[at * 4096 : (at + 1) * 4096],
                    expected,
                )

    def verify_some(self, version: int) -> None:
        """What this version wrote, and what the next one will replace."""
        self.verify(version, (*pages_of(version), *pages_of(version + 1)))

    def verify_all(self, version: int) -> None:
        self.verify(version, range(self.SIZE // 4096))
        for name, descriptor in self.descriptors.items():
            same(f"size of the {name}", os.fstat(descriptor).st_size, self.SIZE)
            same(f"{name} read as a file", os.pread(descriptor, self.SIZE, 0), self.maps[name][:])

    def address(self) -> int:
        return kernel.address_of(self.maps["anonymous"])


PAGES = Blackboard.SIZE // 4096


def pages_of(version: int) -> tuple[int, ...]:
    """The three pages that a version rewrites: the first, one in order, and one further on."""
    return tuple(dict.fromkeys((0, version % PAGES, (version * 7 + 3) % PAGES)))


def last_writer(version: int, page: int) -> int | None:
    """The newest version up to this one that rewrote the page; any page is rewritten within PAGES
    versions.
    """
    return next(
        (v for v in range(version, max(-1, version - PAGES), -1) if page in pages_of(v)), None
    )
