"""The mapping into which the driver moves device memory, made by all cores and of huge pages; its rule: an optimisation, which never fails a checkpoint nor
outlives it.

The driver makes one large private anonymous mapping with MAP_POPULATE, in its own thread of the process: one core then makes and clears all of it, in pages of
4 KiB, before a byte is copied, which is more than half of a checkpoint's time. So that thread is traced while the driver checkpoints: its mmap(2) loses the
flag, and before it returns the thread asks for huge pages (madvise(2), which nobody can do for another process) and all cores touch the memory from here.
On x86-64 only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import re
import signal
import struct
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from icecore.errors import NotFound
from icecore.host import libc, limits, procfs, ptrace

#: From how many bytes on a mapping counts as the driver's.
SMALLEST = 64 << 20
_BUDDYINFO, _MEMINFO = Path("/proc/buddyinfo"), Path("/proc/meminfo")
_SIZE = Path("/sys/kernel/mm/transparent_hugepage/hpage_pmd_size")
_MMAP, _MADVISE, _MADV_HUGEPAGE = 9, 28, 14
_MAP_POPULATE, _KIND, _PRIVATE_ANONYMOUS = 0x8000, 0x3F, 0x22
#: struct user_regs_struct, in words.
_WORDS = struct.Struct("<27Q")
_R10, _RAX, _RDX, _RSI, _RDI, _RIP = 7, 10, 12, 13, 14, 16
_SYSCALL_INSTRUCTION = b"\x0f\x05"
_ALL_SIGNALS = (1 << 64) - 1
_STOP_SECONDS, _READY_SECONDS = 0.05, 1.0
_SPIN_SECONDS, _POLL_SECONDS = 0.001, 0.0002
_THREADS = 16
#: Pages touched by one call.
_HUGE_AT_ONCE, _SMALL_AT_ONCE = 32, 1024


def huge_page_bytes() -> int:
    """Size of a transparent huge page; 0: there are none."""
    try:
        return int(_SIZE.read_text()) if limits.huge_pages() != "never" else 0
    except OSError:
        return 0


def free_huge_bytes() -> int:
    """Free memory in pieces of at least a huge page: for more, the kernel would have to compact, which takes longer than it gains (proc(5), buddyinfo).

    What a confidential machine has not accepted yet counts, too: the kernel does that in such pieces.
    """
    order = (huge_page_bytes() // mmap.PAGESIZE).bit_length() - 1
    found = 0
    for line in _BUDDYINFO.read_text().splitlines():
        counts = [int(word) for word in line.partition("zone")[2].split()[1:]]
        found += sum(count << at for at, count in enumerate(counts) if at >= order) * mmap.PAGESIZE
    unaccepted = re.search(r"^Unaccepted:\s*(\d+) kB$", _MEMINFO.read_text(), re.MULTILINE)
    return found + (int(unaccepted[1]) << 10 if unaccepted else 0)


def touch(pid: int, start: int, length: int, page: int) -> int:
    """Have a process's fresh anonymous memory there, by writing a zero into each page; nobody else may write to it meanwhile.

    Returns:
        Bytes that are there; less than ``length`` where the kernel has no more.
    """
    pages = np.zeros((length // page, 2), np.uint64)
    pages[:, 0] = start + page * np.arange(len(pages), dtype=np.uint64)
    pages[:, 1] = 1
    at_once = _HUGE_AT_ONCE if page > mmap.PAGESIZE else _SMALL_AT_ONCE
    zeros = ctypes.create_string_buffer(at_once)
    enough = threading.Event()

    def some(first: int) -> int:
        if enough.is_set():
            return 0
        count = min(at_once, len(pages) - first)
        own = np.array([ctypes.addressof(zeros), count], np.uint64)
        done = int(libc.process_vm_writev(pid, own.ctypes.data, 1, pages[first:].ctypes.data, count, 0))
        if done < count:
            enough.set()
        return max(0, done)

    with ThreadPoolExecutor(limits.threads_for(_THREADS), "touch") as pool:
        return sum(pool.map(some, range(0, len(pages), at_once))) * page


class Populating:
    """Watches over the driver's thread while it checkpoints a process (a context manager: left, the thread is no longer traced).

    Args:
        thread: In which the driver works there; 0: it is not known.

    Attributes:
        bytes: That were made from here.
        huge: Of these, for which huge pages were asked for, or are there always.
        why: Why nothing was; empty: nothing was wrong (but the mapping may be too small).
    """

    def __init__(self, pid: int, thread: int) -> None:
        self.bytes = 0
        self.huge = 0
        self.why = ""
        self._pid, self._tracee = pid, thread
        self._ready, self._over = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._trace, name="populate")

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait(_READY_SECONDS)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join()

    # -- the tracer: ptrace's is a thread

    def _trace(self) -> None:
        try:
            self.why = self._unfit()
            if not self.why:
                with ptrace.standing(self._tracee, _STOP_SECONDS) as stopped_by:
                    if stopped_by == signal.SIGTRAP:
                        self._watch()
                    else:
                        self.why = "the driver's thread does not stop"
        except (NotFound, ProcessLookupError):
            self.why = "the driver's thread has ended"
        except OSError as error:
            self.why = str(error)
        finally:
            self._ready.set()

    def _unfit(self) -> str:
        if os.uname().machine != "x86_64":
            return "on x86-64 only"
        if not self._tracee:
            return "the driver does not say in which thread it works"
        status = procfs.status(self._tracee)
        if status.tracer or status.seccomp:
            return "the driver's thread is traced, or filtered by seccomp"
        return ""

    def _watch(self) -> None:
        """Until the mapping is made, or it is over; the thread stands then."""
        passed_on = 0
        while True:
            stop = self._go(passed_on)
            if stop.trap and self._over.is_set():
                return
            passed_on = 0 if stop.trap or stop.at_call else stop.signal
            if stop.at_call and (call := ptrace.system_call(self._tracee)) is not None and _wanted(call):
                self._made(call)
                return

    def _go(self, passed_on: int = 0) -> ptrace.Stop:
        """Let the thread go on until it stops again."""
        if not ptrace.request(ptrace.SYSCALL, self._tracee, 0, passed_on):
            raise ProcessLookupError(self._tracee)
        self._ready.set()
        began, interrupted = time.monotonic(), False
        while (stop := ptrace.wait(self._tracee, block=False)) is None:
            if self._over.is_set() and not interrupted:
                interrupted = ptrace.interrupt(self._tracee)
            time.sleep(0 if time.monotonic() - began < _SPIN_SECONDS else _POLL_SECONDS)
        return stop

    def _end_of_call(self) -> int:
        """Of the system call that the thread is about to make, all signals being blocked: what it returns."""
        while not self._go().at_call:
            pass
        return int(ptrace.system_call(self._tracee).result)  # type: ignore[union-attr]

    def _made(self, call: ptrace.SystemCall) -> None:
        """The thread is about to make the mapping."""
        mask = ptrace.mask_of(self._tracee)
        if mask is None or not ptrace.set_mask(self._tracee, _ALL_SIGNALS):
            raise ProcessLookupError(self._tracee)
        try:
            self._set({_R10: call.arguments[3] & ~_MAP_POPULATE})
            start = self._end_of_call()
            if start < 0:
                return  # the driver is told
            length, page = call.arguments[1], self._huge_page(start, call.arguments[1])
            first = -(-start // page) * page
            self.bytes = touch(self._pid, first, start + length - first, page)
            self.huge = self.bytes if page > mmap.PAGESIZE else 0
        finally:
            ptrace.set_mask(self._tracee, mask)

    def _huge_page(self, start: int, length: int) -> int:
        """The size of the pages that the new mapping will be of."""
        size = huge_page_bytes()
        if not size or free_huge_bytes() < length:
            return mmap.PAGESIZE
        if limits.huge_pages() == "madvise" and self._advise(start, length) < 0:
            return mmap.PAGESIZE
        return size

    def _advise(self, start: int, length: int) -> int:
        """Have the thread, which has just made a system call, make another one."""
        before = ptrace.registers(self._tracee)
        words = _WORDS.unpack(before[: _WORDS.size])
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            if os.pread(memory.fileno(), 2, words[_RIP] - 2) != _SYSCALL_INSTRUCTION:
                return -1
        self._set({_RIP: words[_RIP] - 2, _RAX: _MADVISE, _RDI: start, _RSI: length, _RDX: _MADV_HUGEPAGE})
        self._go()
        answer = self._end_of_call()
        if not ptrace.set_registers(self._tracee, before):
            raise ProcessLookupError(self._tracee)
        return answer

    def _set(self, values: dict[int, int]) -> None:
        words = list(_WORDS.unpack(ptrace.registers(self._tracee)[: _WORDS.size]))
        for register, value in values.items():
            words[register] = value
        if not ptrace.set_registers(self._tracee, _WORDS.pack(*words)):
            raise ProcessLookupError(self._tracee)


def _wanted(call: ptrace.SystemCall) -> bool:
    """Whether a thread is about to make the driver's mapping."""
    if not call.entered or call.number != _MMAP:
        return False
    _, length, protection, flags, _, _ = call.arguments
    return length >= SMALLEST and flags & _KIND == _PRIVATE_ANONYMOUS and bool(protection & mmap.PROT_WRITE)
