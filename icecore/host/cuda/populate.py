"""Fault in the mapping into which the driver copies GPU memory, on all cores and with huge pages.
This is an optimisation: it never fails a checkpoint and never outlives it.

The driver makes one large private anonymous mapping with MAP_POPULATE, in its own thread of the
process: one core then makes and clears all of it, in pages of 4 KiB, before a byte is copied, which
is more than half of a checkpoint's time. So that thread is traced while the driver checkpoints: its
mmap(2) loses the flag, and before it returns the thread asks for huge pages (madvise(2), which
nobody can do for another process) and all cores touch the memory from here. On x86-64 only.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import signal
import struct
import threading
import time
from array import array
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import TracebackType
from typing import Self

from icecore.errors import NotFound
from icecore.host.kernel import libc, limits, procfs, ptrace
from icecore.sizes import CELL_BYTES

#: From how many bytes on a mapping counts as the driver's.
SMALLEST = 64 << 20
_MMAP, _MADVISE, _MADV_HUGEPAGE = 9, 28, 14
#: MAP_PRIVATE, MAP_ANONYMOUS and MAP_POPULATE; what it may have beside them: MAP_FIXED_NOREPLACE.
_KIND, _ALSO, _MAP_POPULATE = 0x8022, 0x100000, 0x8000
#: struct user_regs_struct, in words.
_WORDS = struct.Struct("<27Q")
_R10, _RAX, _RDX, _RSI, _RDI, _RIP = 7, 10, 12, 13, 14, 16
_SYSCALL_INSTRUCTION = b"\x0f\x05"
_ALL_SIGNALS = (1 << 64) - 1
_STOP_SECONDS, _READY_SECONDS, _LET_GO_SECONDS = 0.2, 1.0, 1.0
_SPIN_SECONDS, _POLL_SECONDS = 0.001, 0.0002
_THREADS = 16
#: Pages touched by one call.
_HUGE_AT_ONCE, _SMALL_AT_ONCE = 32, 1024


def touch(pid: int, start: int, length: int, page: int) -> int:
    """Fault in a process's fresh anonymous memory by writing a zero to each page; nobody else may
    write to it meanwhile.

    Returns:
        Bytes that are there; less than ``length`` where the kernel has no more.
    """
    pages = length // page
    at_once = _HUGE_AT_ONCE if page > mmap.PAGESIZE else _SMALL_AT_ONCE
    zeros = ctypes.create_string_buffer(at_once)
    enough = threading.Event()

    def some(first: int) -> int:
        if enough.is_set():
            return 0
        count = min(at_once, pages - first)
        # struct iovec: address and length
        own = array("Q", [ctypes.addressof(zeros), count])
        theirs = array("Q", [1]) * (2 * count)
        theirs[::2] = array("Q", range(start + page * first, start + page * (first + count), page))
        done = int(
            libc.process_vm_writev(pid, own.buffer_info()[0], 1, theirs.buffer_info()[0], count, 0)
        )
        if done < count:
            enough.set()
        return max(0, done)

    with ThreadPoolExecutor(limits.threads_for(_THREADS), "touch") as pool:
        return sum(pool.map(some, range(0, pages, at_once))) * page


class Populating:
    """Traces the driver's thread while it checkpoints a process (a context manager: on exit the
    thread is no longer traced).

    Args:
        thread: In which the driver works there, by its number here or in the process's own pid
            namespace; 0: it is not known.

    Attributes:
        bytes: That were made from here.
        huge: Of these, for which huge pages were asked for, or are there always.
        why: Why nothing was; empty: nothing was wrong (but the mapping may be too small).
    """

    def __init__(self, pid: int, thread: int) -> None:
        self.bytes = 0
        self.huge = 0
        self.why = ""
        self._pid, self._said, self._tracee = pid, thread, 0
        self._ready, self._over = threading.Event(), threading.Event()
        self._changed = False  # the thread has other registers: it is not let go
        self._filtered = False  # by seccomp
        self._thread = threading.Thread(target=self._trace, name="populate")

    def __enter__(self) -> Self:
        try:
            self._thread.start()
        except RuntimeError as error:
            self.why = str(error)
        else:
            self._ready.wait(_READY_SECONDS)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._over.set()
        if self._thread.ident is not None:
            self._thread.join()

    # -- the tracer: ptrace's is a thread

    def _trace(self) -> None:
        try:
            self.why = self._unfit()
            if not self.why:
                self._filtered = procfs.status(self._tracee).seccomp != 0
                with ptrace.standing(self._tracee, _STOP_SECONDS) as stopped_by:
                    if stopped_by == signal.SIGTRAP:
                        self._watch()
                    else:
                        self.why = "the driver's thread does not stop"
        except (NotFound, ProcessLookupError):
            self.why = "the driver's thread has ended"
        except Exception as error:  # noqa: BLE001 - it is only an optimisation
            self.why = f"{type(error).__name__}: {error}"
        finally:
            self._ready.set()

    def _unfit(self) -> str:
        if os.uname().machine != "x86_64":
            return "on x86-64 only"
        self._tracee = host_thread(self._pid, self._said)
        if not self._tracee:
            return "the driver does not say in which thread it works"
        if procfs.status(self._tracee).tracer:
            return "the driver's thread is traced"
        return ""

    def _watch(self) -> None:
        """Wait until the mapping is created or the checkpoint is over; the thread is stopped then."""
        passed_on = 0
        while True:
            stop = self._go(passed_on)
            if stop.trap and self._over.is_set():
                return
            passed_on = 0 if stop.trap or stop.at_call else stop.signal
            if (
                stop.at_call
                and (call := ptrace.system_call(self._tracee)) is not None
                and _wanted(call)
            ):
                self._made(call)
                return

    def _go(self, passed_on: int = 0) -> ptrace.Stop:
        """Let the thread run until it stops again.

        Raises:
            TimeoutError: It is over, and it does not stop: the end of this thread lets it go.
        """
        if not ptrace.request(ptrace.SYSCALL, self._tracee, 0, passed_on):
            raise ProcessLookupError(self._tracee)
        self._ready.set()
        began = time.monotonic()
        interrupted = 0.0
        while (stop := ptrace.wait(self._tracee, block=False)) is None:
            at = time.monotonic()
            if self._over.is_set() and not interrupted and not self._changed:
                interrupted = at
                ptrace.interrupt(self._tracee)
            if interrupted and at - interrupted > _LET_GO_SECONDS:
                raise TimeoutError("the driver's thread does not stop")
            time.sleep(0 if at - began < _SPIN_SECONDS else _POLL_SECONDS)
        return stop

    def _to_call(self, number: int = -1) -> ptrace.SystemCall:
        """Until it stands before system call ``number``, or, without one, after the one that it
        stands before; signals go their way.
        """
        passed_on = 0
        while True:
            stop = self._go(passed_on)
            passed_on = 0 if stop.trap or stop.at_call else stop.signal
            call = ptrace.system_call(self._tracee) if stop.at_call else None
            if call is not None and (call.number == number if call.entered else number < 0):
                return call

    def _made(self, call: ptrace.SystemCall) -> None:
        """Handle a thread that is about to create the mapping."""
        flags = call.arguments[3]
        self._set({_R10: flags & ~_MAP_POPULATE})
        start = self._to_call().result
        self._set({_R10: flags})
        if start < 0:
            return  # the driver is told
        end, page = start + call.arguments[1], limits.huge_page_bytes()
        until = self._huge_until(start, end, page)
        rest = start
        if until:
            first, rest = -(-start // page) * page, until // page * page
            self.huge = touch(self._pid, first, rest - first, page)
        self.bytes = self.huge + touch(self._pid, rest, end - rest, mmap.PAGESIZE)

    def _huge_until(self, start: int, end: int, page: int) -> int:
        """Where the huge pages of the new mapping end: as many as are free; 0: it has none."""
        if not page:
            return 0
        # Whole cells: otherwise the cells behind it would be cut differently from the parent, where
        # the huge pages ended elsewhere.
        until = min(end, start + limits.free_huge_bytes() // CELL_BYTES * CELL_BYTES)
        if until - start < SMALLEST - page or (
            limits.huge_pages() == "madvise" and self._advise(start, until - start) < 0
        ):
            return 0
        return until

    def _advise(self, start: int, length: int) -> int:
        """Have the thread, which has just made a system call, make another one; no handler runs on
        registers that are not its own.
        """
        before, mask = ptrace.registers(self._tracee), ptrace.mask_of(self._tracee)
        words = _WORDS.unpack(before[: _WORDS.size])
        with open(f"/proc/{self._pid}/mem", "rb", buffering=0) as memory:
            if os.pread(memory.fileno(), 2, words[_RIP] - 2) != _SYSCALL_INSTRUCTION:
                return -1
        if mask is None or not ptrace.set_mask(self._tracee, _ALL_SIGNALS):
            raise ProcessLookupError(self._tracee)
        self._changed = True
        self._set(
            {_RIP: words[_RIP] - 2, _RAX: _MADVISE, _RDI: start, _RSI: length, _RDX: _MADV_HUGEPAGE}
        )
        with ptrace.unfiltered(self._tracee) if self._filtered else nullcontext():
            self._to_call(_MADVISE)
            answer = self._to_call().result
        if not ptrace.set_registers(self._tracee, before) or not ptrace.set_mask(
            self._tracee, mask
        ):
            raise ProcessLookupError(self._tracee)
        self._changed = False
        return answer

    def _set(self, values: dict[int, int]) -> None:
        words = list(_WORDS.unpack(ptrace.registers(self._tracee)[: _WORDS.size]))
        for register, value in values.items():
            words[register] = value
        if not ptrace.set_registers(self._tracee, _WORDS.pack(*words)):
            raise ProcessLookupError(self._tracee)


def host_thread(pid: int, said: int) -> int:
    """Return the number of a thread in this pid namespace, given that number or the one in its own;
    0: there is no such thread.
    """
    if not said:
        return 0
    threads = procfs.threads(pid)
    if said in threads:
        return said
    for thread in threads:
        try:
            if procfs.status(thread).own_pid == said:
                return thread
        except NotFound:
            continue
    return 0


def _wanted(call: ptrace.SystemCall) -> bool:
    """Return whether a thread is about to create the driver's mapping."""
    if not call.entered or call.number != _MMAP:
        return False
    _, length, protection, flags, _, _ = call.arguments
    return length >= SMALLEST and flags & ~_ALSO == _KIND and bool(protection & mmap.PROT_WRITE)
