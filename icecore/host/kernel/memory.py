"""Another process's memory, read in place into reused buffers; rule: a read gives all the bytes
that were asked for, or raises.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from icecore.errors import DumpFailed, NotFound
from icecore.host.kernel import libc
from icecore.sizes import CELL_BYTES, CELL_PAGES, HUGE_PAGE, PAGE

#: Most iovecs that one process_vm_readv takes (limits.h).
IOV_MAX = 1024

MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23

Addresses = npt.NDArray[np.uint64]

#: struct iovec.
IOVEC = np.dtype([("base", "<u8"), ("length", "<u8")])


@dataclass(frozen=True)
class CellTable:
    """The iovecs of many cells, and which of them make up each cell; made by `cell_table`.

    Attributes:
        iovecs: IOVEC records in address order, none of which crosses a cell's bounds.
        origin: For each cell, where its region's cell 0 begins.
        cell: For each cell, its number counted from there.
        first: For each cell, its first iovec.
        count: For each cell, how many iovecs it has (at most 128 after merging, so always one
            call).
        size: For each cell, its bytes.
    """

    iovecs: npt.NDArray[np.void]
    origin: Addresses
    cell: npt.NDArray[np.int64]
    first: npt.NDArray[np.int64]
    count: npt.NDArray[np.int64]
    size: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.cell)

    def addresses(self) -> npt.NDArray[np.int64]:
        """The address of each cell's first iovec in this process, for `RemoteReader.read_into`."""
        return self.iovecs.ctypes.data + self.first * IOVEC.itemsize

    def bitmaps(self, start: int = 0, stop: int | None = None) -> npt.NDArray[np.uint8]:
        """Page bitmaps (n × 32 bytes, least significant bit first) of cells ``start`` to ``stop``:
        which pages the iovecs cover.
        """
        stop = len(self) if stop is None else stop
        if stop <= start:
            return np.empty((0, CELL_PAGES // 8), np.uint8)
        low, high = int(self.first[start]), int(self.first[stop - 1] + self.count[stop - 1])
        cells = np.repeat(np.arange(stop - start), self.count[start:stop])
        page = (
            self.iovecs["base"][low:high]
            - np.repeat(self.origin[start:stop], self.count[start:stop])
        ) // PAGE
        position = cells * CELL_PAGES + page.astype(np.int64) % CELL_PAGES
        pages = self.iovecs["length"][low:high].astype(np.int64) // PAGE
        edges = np.zeros((stop - start) * CELL_PAGES + 1, np.int8)
        # Two runs may touch at a cell's bound, so ends and starts meet at one place: add.at adds
        # both.
        np.add.at(edges, position, 1)
        np.add.at(edges, position + pages, -1)
        covered = np.cumsum(edges[:-1], dtype=np.int8).view(np.bool_)
        return np.packbits(covered.reshape(-1, CELL_PAGES), axis=1, bitorder="little")


def cell_table(start: Addresses, length: Addresses, origin: Addresses) -> CellTable:
    """Cut extents at cell bounds and group them by cell, for any number of cells at once.

    Args:
        start: First byte of each extent, ascending, page-aligned.
        length: Bytes of each extent, whole pages; extents do not overlap.
        origin: Where cell 0 of the extent's region begins; an extent lies in one region.

    Returns:
        The table. Extents that touch within a cell become one iovec.
    """
    start, length, origin = (np.ascontiguousarray(a, np.uint64) for a in (start, length, origin))
    kept = length > 0
    start, length, origin = start[kept], length[kept], origin[kept]
    if len(start) == 0:
        nothing = np.empty(0, np.int64)
        return CellTable(
            np.empty(0, IOVEC), np.empty(0, np.uint64), nothing, nothing, nothing, nothing
        )
    merged = np.ones(len(start), np.bool_)
    merged[1:] = (start[1:] != start[:-1] + length[:-1]) | (origin[1:] != origin[:-1])
    heads = np.flatnonzero(merged)
    length = np.add.reduceat(length, heads)
    start, origin = start[heads], origin[heads]

    offset = (start - origin).astype(np.int64)
    lowest = offset // CELL_BYTES
    pieces = (offset + length.astype(np.int64) - 1) // CELL_BYTES - lowest + 1
    owner = np.repeat(np.arange(len(start)), pieces)
    nth = np.arange(len(owner)) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    cell = lowest[owner] + nth
    begin = np.maximum(offset[owner], cell * CELL_BYTES)
    end = np.minimum(offset[owner] + length.astype(np.int64)[owner], (cell + 1) * CELL_BYTES)

    iovecs = np.empty(len(owner), IOVEC)
    iovecs["base"] = origin[owner] + begin.astype(np.uint64)
    iovecs["length"] = (end - begin).astype(np.uint64)
    changes = np.ones(len(owner), np.bool_)
    changes[1:] = (cell[1:] != cell[:-1]) | (origin[owner][1:] != origin[owner][:-1])
    first = np.flatnonzero(changes)
    count = np.diff(first, append=len(owner))
    return CellTable(
        iovecs,
        origin[owner][first],
        cell[first],
        first,
        count,
        np.add.reduceat(end - begin, first).astype(np.int64),
    )


def address_of(data: memoryview) -> int:
    """Where a buffer lies."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


class HugeBuffer:
    """Anonymous memory on huge pages, faulted in once and then reused: first touch of small pages
    runs at an eighth of that speed.

    Args:
        size: Bytes; rounded up to whole huge pages inside, exposed as asked.
        prefault: Whether to fault it in now.
    """

    def __init__(self, size: int, *, prefault: bool = True) -> None:
        if size <= 0:
            raise ValueError(f"a buffer needs a positive size, not {size}")
        whole = -(-size // HUGE_PAGE) * HUGE_PAGE
        self._map = mmap.mmap(-1, whole + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        base = np.frombuffer(self._map, np.uint8)
        skip = -base.ctypes.data % HUGE_PAGE
        self._array = base[skip : skip + size]
        #: Bytes.
        self.size = size
        #: Address of the first byte, a multiple of 2 MiB.
        self.address: int = base.ctypes.data + skip
        self._iovec = (ctypes.c_uint64 * 2)(self.address, size)
        #: Address of a struct iovec that describes the whole buffer.
        self.iovec: int = ctypes.addressof(self._iovec)
        libc.madvise(self.address, whole, MADV_DONTDUMP)
        try:
            libc.madvise(self.address, whole, MADV_HUGEPAGE)
        except OSError as error:
            if (
                error.errno != errno.EINVAL
            ):  # a kernel without transparent huge pages: small ones serve
                raise
        if prefault:
            self.prefault()

    def prefault(self) -> None:
        """Fault all pages in."""
        whole = -(-self.size // HUGE_PAGE) * HUGE_PAGE
        try:
            libc.madvise(self.address, whole, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # before Linux 5.14
                raise
            self._array[::PAGE] = 0

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """The bytes as a numpy array."""
        return self._array

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """The bytes from ``start`` to ``stop`` as a writable memoryview."""
        return self._array[start:stop].data


class BufferPool:
    """At most ``count`` equal buffers, made when first needed and reused; whoever finds none waits.
    Thread-safe.

    Args:
        size: Bytes of each buffer.
        count: How many there may be at a time.
    """

    def __init__(self, size: int, count: int, *, prefault: bool = True) -> None:
        if count <= 0:
            raise ValueError(f"a pool needs at least one buffer, not {count}")
        self.size = size
        self.count = count
        self._prefault = prefault
        self._free: list[HugeBuffer] = []
        self._made = 0
        self._closed = False
        self._change = threading.Condition()

    def acquire(self, seconds: float | None = None) -> HugeBuffer:
        """A buffer, with whatever bytes it last held.

        Args:
            seconds: How long to wait for one; None: as long as it takes.

        Raises:
            TimeoutError: None came free in that time.
            ValueError: The pool is closed.
        """
        with self._change:
            if not self._change.wait_for(
                lambda: self._closed or self._free or self._made < self.count, seconds
            ):
                raise TimeoutError(f"none of {self.count} buffers came free within {seconds} s")
            if self._closed:
                raise ValueError("the buffer pool is closed")
            if self._free:
                return self._free.pop()
            self._made += 1
        try:
            return HugeBuffer(self.size, prefault=self._prefault)
        except BaseException:
            with self._change:
                self._made -= 1
                self._change.notify()
            raise

    def release(self, buffer: HugeBuffer) -> None:
        """Give a buffer back; the giver must not touch it any more."""
        with self._change:
            if self._closed:
                return
            self._free.append(buffer)
            self._change.notify()

    @contextmanager
    def borrow(self, seconds: float | None = None) -> Iterator[HugeBuffer]:
        """`acquire`, and `release` at the end of the block."""
        buffer = self.acquire(seconds)
        try:
            yield buffer
        finally:
            self.release(buffer)

    def close(self) -> None:
        """Drop the free buffers and refuse new ones; a buffer in use goes when its user drops it."""
        with self._change:
            self._closed = True
            self._free.clear()
            self._change.notify_all()


class Destination(Protocol):
    """Memory of this process to read into: a `HugeBuffer`, or a part of one."""

    @property
    def address(self) -> int:
        """Address of the first byte."""

    @property
    def size(self) -> int:
        """Bytes of room."""

    @property
    def iovec(self) -> int:
        """Address of a struct iovec that describes it."""


class RemoteReader:
    """Reads the memory of one process by process_vm_readv, PROT_NONE pages through /proc/PID/mem.
    Thread-safe: no state changes but the open file.

    Args:
        pid: The process; it may run or stand still. Needs CAP_SYS_PTRACE or the same user.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        #: Whose memory it is, for who reads it by process_vm_readv himself.
        self.process = pid
        self._memory: int | None = None
        self._opening = threading.Lock()

    def __enter__(self) -> RemoteReader:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close /proc/PID/mem if it was needed."""
        with self._opening:
            if self._memory is not None:
                os.close(self._memory)
                self._memory = None

    def read_into(self, iovecs: int, count: int, buffer: Destination, size: int) -> None:
        """Read remote extents one after the other into the start of a buffer: one system call.

        Args:
            iovecs: Address in this process of the first IOVEC (`CellTable.addresses`).
            count: How many, at most IOV_MAX.
            buffer: Where to; at least ``size`` bytes.
            size: Sum of the extents' lengths.

        Raises:
            NotFound: The process is gone.
            DumpFailed: A page could not be read.
        """
        if libc.process_vm_readv(self.pid, buffer.iovec, 1, iovecs, count, 0) != size:
            self._read_slowly(iovecs, count, buffer, size)

    def read(self, start: int, length: int) -> bytearray:
        """``length`` bytes at ``start``. For small things; `read_into` is the fast way. Raises as
        that does.
        """
        if length <= 0:
            return bytearray()
        data = bytearray(length)
        here = (ctypes.c_char * length).from_buffer(data)
        local = (ctypes.c_uint64 * 2)(ctypes.addressof(here), length)
        remote = (ctypes.c_uint64 * 2)(start, length)
        if (
            libc.process_vm_readv(
                self.pid, ctypes.addressof(local), 1, ctypes.addressof(remote), 1, 0
            )
            != length
        ):
            self._check_failure()
            self._read_file(memoryview(data), start)
        return data

    def _read_slowly(self, iovecs: int, count: int, buffer: Destination, size: int) -> None:
        """The extents again, each through process_vm_readv if that can read it, else through
        /proc/PID/mem.
        """
        if size > buffer.size:
            raise ValueError(f"{size} bytes do not fit into a buffer of {buffer.size}")
        self._check_failure()
        raw = (ctypes.c_char * (count * IOVEC.itemsize)).from_address(iovecs)
        extents = np.frombuffer(memoryview(raw), IOVEC)
        if int(extents["length"].sum()) != size:
            raise ValueError(f"the extents have {int(extents['length'].sum())} bytes, not {size}")
        at = 0
        local = (ctypes.c_uint64 * 2)()
        for number in range(count):
            base, length = int(extents["base"][number]), int(extents["length"][number])
            local[0], local[1] = buffer.address + at, length
            remote = iovecs + number * IOVEC.itemsize
            got = libc.process_vm_readv(self.pid, ctypes.addressof(local), 1, remote, 1, 0)
            if got != length:
                room = (ctypes.c_char * length).from_address(buffer.address + at)
                self._read_file(memoryview(room).cast("B"), base)
            at += length

    def _check_failure(self) -> None:
        """Raise unless the process is there and may be read: then a page kept process_vm_readv from
        going on.
        """
        probe = libc.process_vm_readv(self.pid, 0, 0, 0, 0, 0)
        if probe == 0 and os.path.exists(f"/proc/{self.pid}/mem"):
            return
        error = ctypes.get_errno()
        if probe == 0 or error == errno.ESRCH:
            raise NotFound(f"process {self.pid} is gone")
        raise DumpFailed(
            f"the memory of process {self.pid} cannot be read: {os.strerror(error)}",
            cure="run as root, with CAP_SYS_PTRACE" if error == errno.EPERM else "",
        )

    def _read_file(self, out: memoryview, start: int) -> None:
        done = 0
        try:
            while done < len(out):
                got = os.preadv(self._file(), [out[done:]], start + done)
                if got == 0:
                    raise NotFound(f"process {self.pid} is gone")
                done += got
        except OSError as error:
            where = f"{len(out)} bytes at {start:#x} of process {self.pid}"
            raise DumpFailed(
                f"{where} cannot be read: {error.strerror} at {start + done:#x}"
            ) from error

    def _file(self) -> int:
        with self._opening:
            if self._memory is None:
                self._memory = os.open(f"/proc/{self.pid}/mem", os.O_RDONLY | os.O_CLOEXEC)
            return self._memory


def write(pid: int, start: int, data: bytes | bytearray | memoryview) -> None:
    """Write into another process's memory (process_vm_writev).

    Raises:
        OSError: Not all of it could be written.
    """
    source = np.frombuffer(data, np.uint8)
    local = (ctypes.c_uint64 * 2)(source.ctypes.data, len(source))
    remote = (ctypes.c_uint64 * 2)(start, len(source))
    done = libc.process_vm_writev(pid, ctypes.addressof(local), 1, ctypes.addressof(remote), 1, 0)
    if done < 0:
        raise libc.last_error(
            f"process_vm_writev of {len(source)} bytes at {start:#x} of process {pid}"
        )
    if done != len(source):
        raise OSError(
            errno.EFAULT,
            f"only {done} of {len(source)} bytes could be written at {start:#x} of process {pid}",
        )
