"""Read another process's memory in place. A read returns all requested bytes or raises."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import threading
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from icecore.errors import DumpFailed, NotFound
from icecore.host.kernel import libc
from icecore.sizes import HUGE_PAGE, PAGE

MADV_HUGEPAGE = 14
MADV_DONTDUMP = 16
MADV_POPULATE_WRITE = 23

#: struct iovec.
IOVEC = np.dtype([("base", "<u8"), ("length", "<u8")])


def address_of(data: memoryview) -> int:
    """Return the address of a buffer."""
    return int(np.frombuffer(data, np.uint8).__array_interface__["data"][0])


def shared_memory_device() -> int:
    """Return the device of the kernel's own tmpfs, on which shared anonymous memory, memfds and
    System V segments lie.
    """
    descriptor = os.memfd_create("icecore", os.MFD_CLOEXEC)
    try:
        return os.fstat(descriptor).st_dev
    finally:
        os.close(descriptor)


class HugeBuffer:
    """Anonymous memory on huge pages, faulted in once and then reused: the first touch of small
    pages is eight times slower.

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
        """Fault in all pages."""
        whole = -(-self.size // HUGE_PAGE) * HUGE_PAGE
        try:
            libc.madvise(self.address, whole, MADV_POPULATE_WRITE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # before Linux 5.14
                raise
            self._array[::PAGE] = 0

    @property
    def array(self) -> npt.NDArray[np.uint8]:
        """Return the bytes as a numpy array."""
        return self._array

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes from ``start`` to ``stop`` as a writable memoryview."""
        return self._array[start:stop].data


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
    """Reads the memory of one process by process_vm_readv, and PROT_NONE pages through
    /proc/PID/mem. Thread-safe.

    Args:
        pid: The process; it may run or stand still. Needs CAP_SYS_PTRACE or the same user.
        shared: It shares pages with other processes since fork(2), so it is read through
            /proc/PID/mem. process_vm_readv is faster, but pins what it reads, and the kernel makes
            a copy of a shared page before it pins it: the tree's memory would grow.

    Attributes:
        process, file, mapped: As in `icecore.dumper.memory.scan.Source`: the first two if it shares
            pages. Then pages that are its alone may be read by process_vm_readv.

    Raises:
        NotFound: There is no such process.
        DumpFailed: Its memory may not be read.
    """

    mapped = None

    def __init__(self, pid: int, *, shared: bool = False) -> None:
        self.pid = pid
        self.process = pid
        self._memory: int | None = None
        self._opening = threading.Lock()
        self.file = self._open_shared() if shared else None

    def _open_shared(self) -> int:
        try:
            return self._file()
        except (FileNotFoundError, ProcessLookupError) as error:
            raise NotFound(f"process {self.pid} is gone") from error
        except PermissionError as error:
            raise DumpFailed(
                f"the memory of process {self.pid} cannot be read: {error.strerror}",
                cure="run as root, with CAP_SYS_PTRACE",
            ) from error

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
        """Read remote extents, one after the other, into the start of a buffer, with one system
        call.

        Args:
            iovecs: Address in this process of the first IOVEC .
            count: How many, at most 1024 (IOV_MAX).
            buffer: Where to; at least ``size`` bytes.
            size: Sum of the extents' lengths.

        Raises:
            NotFound: The process is gone.
            DumpFailed: A page could not be read.
        """
        if (
            self.file is not None
            or libc.process_vm_readv(self.pid, buffer.iovec, 1, iovecs, count, 0) != size
        ):
            self._read_slowly(iovecs, count, buffer, size)

    def read(self, start: int, length: int) -> bytearray:
        """Return ``length`` bytes at ``start``. For small reads; `read_into` is faster. Raises as
        it does.
        """
        if length <= 0:
            return bytearray()
        data = bytearray(length)
        if self.file is not None:
            self._read_file(memoryview(data), start)
            return data
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
        """Read the extents again, each through process_vm_readv if possible, else through
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
            if (
                self.file is not None
                or libc.process_vm_readv(self.pid, ctypes.addressof(local), 1, remote, 1, 0)
                != length
            ):
                room = (ctypes.c_char * length).from_address(buffer.address + at)
                self._read_file(memoryview(room).cast("B"), base)
            at += length

    def _check_failure(self) -> None:
        """Raise unless the process exists and may be read: then one page made process_vm_readv
        stop.
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
