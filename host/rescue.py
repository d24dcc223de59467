"""Puts back what a killed CRIU changed in a job's threads; rule: from the kill until then none of these threads runs.

The kernel stops a process that is traced with PTRACE_O_TRACEEXIT before it ends, even if SIGKILL ends it (ptrace(2), PTRACE_EVENT_EXIT). It then still
holds what it traces itself. So a child of the guard traces CRIU, and when CRIU is being killed, sends a SIGSTOP to the processes that it was changing. CRIU
then ends, the kernel lets go of its threads, and each of these stops before it runs any code. A library in CRIU keeps a journal of their registers, masks and
bytes (host/criu_journal.c). Everything is put back, CRIU's code is unmapped, its files are closed, and the processes go on.
"""

from __future__ import annotations

import mmap
import os
import re
import signal
import socket
import stat
import struct
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from icecore.errors import IcecoreError, NotFound
from icecore.host import libc, procfs, ptrace

#: Names the journal's descriptor in CRIU's environment.
VARIABLE = "ICECORE_JOURNAL"

_XSTATE = 0x202
_SLOTS, _POKES = 4, 64
_HEAD, _POKE, _SLOT = struct.Struct("<II"), struct.Struct("<QQII"), struct.Struct("<IIQII512s16384s")
_JOURNAL_BYTES = _HEAD.size + _POKES * _POKE.size + _SLOTS * _SLOT.size
_ALL_SIGNALS = (1 << 64) - 1
_STOP_SECONDS = 5.0
_POLL_SECONDS = 0.0005
#: How CRIU calls the memory that it puts its code into, and its end of the socket through which it talks to that.
_BLOB, _PEER = "/memfd:CRIUMFD", b"\0/crtools-pr-"
_PIDFD_GETFD = 438  # the same on every architecture
_CLOSE, _MUNMAP = 3, 11  # x86_64
_RIP, _RAX, _ORIG_RAX = 16, 10, 15  # words of struct user_regs_struct
_ARGUMENTS = (14, 13, 12)  # rdi, rsi, rdx


def make_journal() -> int:
    """Make an empty journal; return its descriptor, which the caller closes."""
    journal = os.memfd_create("icecore-journal", os.MFD_CLOEXEC)
    os.ftruncate(journal, (_JOURNAL_BYTES + mmap.PAGESIZE - 1) & -mmap.PAGESIZE)
    return journal


@dataclass(frozen=True)
class _Noted:
    """What a thread was."""

    mask: int
    registers: bytes
    extended: bytes


@dataclass(frozen=True)
class Journal:
    """What a CRIU that has ended had not put back.

    Attributes:
        last: The thread that it changed last; 0: none.
        threads: By thread.
        pokes: (thread, address, word) of its program's bytes.
    """

    last: int
    threads: Mapping[int, _Noted]
    pokes: tuple[tuple[int, int, int], ...]

    @classmethod
    def read(cls, descriptor: int) -> Journal:
        """Read it."""
        data = os.pread(descriptor, _JOURNAL_BYTES, 0)
        last, _ = _HEAD.unpack_from(data)
        pokes = [_POKE.unpack_from(data, _HEAD.size + number * _POKE.size) for number in range(_POKES)]
        slots = [_SLOT.unpack_from(data, _HEAD.size + _POKES * _POKE.size + number * _SLOT.size) for number in range(_SLOTS)]
        threads = {
            thread: _Noted(mask, general[:registers], more[:extended])
            for thread, state, mask, registers, extended, general, more in slots
            if state
        }
        return cls(last, threads, tuple((thread, address, word) for address, word, thread, used in pokes if used))

    def held_by(self, criu: int) -> Journal:
        """Return the records of threads that it still holds: it has released the others, and they have run since."""

        def held(thread: int) -> bool:
            try:
                return procfs.status(thread).tracer == criu
            except NotFound:
                return False

        threads = {thread: noted for thread, noted in self.threads.items() if held(thread)}
        return Journal(self.last if held(self.last) else 0, threads, tuple(poke for poke in self.pokes if held(poke[0])))


def watch(criu: int, journal: int, ready: int) -> None:
    """Trace a CRIU until it has ended, and put back what it could not; for a process of its own, with one thread.

    Args:
        criu: Its pid; a sibling, or child, that has executed its program.
        journal: Its journal.
        ready: Is written to and closed once it is traced.
    """
    traced = ptrace.request(ptrace.SEIZE, criu, 0, ptrace.OPTION_TRACE_EXIT)
    os.write(ready, b"\1" if traced else b"\0")
    os.close(ready)
    if not traced:
        return
    with suppress(ProcessLookupError):
        while True:
            stop = ptrace.wait(criu, block=True)
            assert stop is not None
            if stop.event == ptrace.EVENT_EXIT:
                break
            if stop.event == ptrace.EVENT_STOP and stop.signal != signal.SIGTRAP:
                ptrace.request(ptrace.LISTEN, criu)  # it is stopped by a signal, and stays so
            else:
                ptrace.request(ptrace.CONT, criu, 0, stop.signal if not stop.event else 0)
        _end(criu, Journal.read(journal).held_by(criu))


def _end(criu: int, found: Journal) -> None:
    """Release a CRIU that is stopped at its exit, and put back what it changed."""
    stopped: list[int] = []
    try:
        broken = {process: _descriptors_of(process, criu) for process in _touched(found)}
        for process in broken:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGSTOP)
                stopped.append(process)
        own = _children(criu)  # with which it probes the kernel, or its script
        ptrace.request(ptrace.CONT, criu)
        with suppress(ProcessLookupError):
            ptrace.wait(criu, block=True)  # it has ended, and released everything
        for child in own:
            with suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        for process, descriptors in broken.items():
            with suppress(OSError, IcecoreError):  # it has ended
                _put_back(process, found, descriptors)
    finally:
        for process in stopped:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGCONT)


def _children(criu: int) -> list[int]:
    try:
        return procfs.children(criu)
    except NotFound:
        return []


def _touched(found: Journal) -> list[int]:
    """Return the processes in which CRIU had not put back everything."""
    changed = {_process_of(thread) for thread in (*found.threads, *(thread for thread, _, _ in found.pokes))}
    last = _process_of(found.last) if found.last else 0
    if last and (_blobs(last) or _opened(last)):
        changed.add(last)
    return sorted(changed - {0})


def _process_of(thread: int) -> int:
    try:
        text = Path(f"/proc/{thread}/status").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return 0
    tgid = re.search(r"^Tgid:\s*(\d+)$", text, re.MULTILINE)
    return int(tgid[1]) if tgid else 0


def _blobs(process: int) -> list[tuple[int, int]]:
    """(address, bytes) of what CRIU has mapped there."""
    try:
        return [(one.start, one.length) for one in procfs.read_maps(process) if one.path.startswith(_BLOB)]
    except (OSError, NotFound):
        return []


def _opened(process: int) -> list[int]:
    """Descriptors of CRIU's memory."""
    return [number for number, target in _links(process) if target.startswith(_BLOB)]


def _links(process: int) -> Iterator[tuple[int, str]]:
    try:
        names = os.listdir(f"/proc/{process}/fd")
    except OSError:
        return
    for name in names:
        with suppress(OSError):
            yield int(name), os.readlink(f"/proc/{process}/fd/{name}")


def _descriptors_of(process: int, criu: int) -> list[int]:
    """Return what CRIU's code has open in a process: its memory, its log, its socket. Call it while CRIU exists, so that its end of the socket has a name."""
    logs = {(about.st_dev, about.st_ino) for about in _files(criu)}
    found = []
    try:
        pidfd = os.pidfd_open(process)
    except OSError:
        return []
    try:
        for number, target in _links(process):
            with suppress(OSError):
                is_log = target.endswith("dump.log") and _identity(process, number) in logs
                if target.startswith(_BLOB) or is_log or (target.startswith("socket:") and _is_criu_end(pidfd, number)):
                    found.append(number)
    finally:
        os.close(pidfd)
    return found


def _identity(process: int, number: int) -> tuple[int, int]:
    about = os.stat(f"/proc/{process}/fd/{number}")
    return about.st_dev, about.st_ino


def _files(process: int) -> Iterator[os.stat_result]:
    for number, _ in _links(process):
        with suppress(OSError):
            about = os.stat(f"/proc/{process}/fd/{number}")
            if stat.S_ISREG(about.st_mode):
                yield about


def _is_criu_end(pidfd: int, number: int) -> bool:
    """Return whether a socket of the process is connected to a CRIU."""
    copy = int(libc.syscall(_PIDFD_GETFD, pidfd, number, 0))
    if copy < 0:
        return False
    with socket.socket(fileno=copy) as found:
        if found.family != socket.AF_UNIX:
            return False
        peer = found.getpeername()
        return isinstance(peer, bytes) and peer.startswith(_PEER)


def _put_back(process: int, found: Journal, descriptors: list[int]) -> None:
    """Put back what CRIU had changed in a process that is stopped, or is about to be, and let it go on."""
    held: list[int] = []
    try:
        while fresh := [thread for thread in procfs.threads(process) if thread not in held]:
            for thread in fresh:
                if ptrace.request(ptrace.SEIZE, thread, 0, ptrace.OPTION_SYSGOOD):
                    held.append(thread)
                    ptrace.interrupt(thread)
                    _wait_stopped(thread)
        with open(f"/proc/{process}/mem", "r+b", buffering=0) as memory:
            for _, address, word in found.pokes:
                memory.seek(address)
                memory.write(struct.pack("<Q", word))
        for thread in held:
            if noted := found.threads.get(thread):
                ptrace.set_registers(thread, noted.registers)
                if noted.extended:
                    ptrace.set_registers(thread, noted.extended, _XSTATE)
                ptrace.set_mask(thread, noted.mask)
                ptrace.clear_breakpoints(thread)
        if held:
            _clean(process, held[0], descriptors)
    finally:
        with suppress(ProcessLookupError):
            os.kill(process, signal.SIGCONT)
        for thread in held:
            ptrace.request(ptrace.DETACH, thread)


def _wait_stopped(thread: int) -> None:
    """Wait until a thread is stopped in the kernel's handling of signals."""
    until = time.monotonic() + _STOP_SECONDS
    while time.monotonic() < until:
        stop = ptrace.wait(thread, block=False)
        if stop is None:
            time.sleep(_POLL_SECONDS)
        elif stop.trap:
            return
        else:  # a signal is being delivered: it is, once all is as it was
            ptrace.request(ptrace.CONT, thread, 0, stop.signal)


def _clean(process: int, thread: int, descriptors: list[int]) -> None:
    """Make a stopped thread close what CRIU's code opened, and unmap that code."""
    calls = [(_CLOSE, (number, 0)) for number in descriptors] + [(_MUNMAP, one) for one in _blobs(process)]
    place = _system_call_instruction(process) if calls and os.uname().machine == "x86_64" else 0
    if not place:
        return
    registers, mask = ptrace.registers(thread), ptrace.mask_of(thread)
    if not registers or mask is None:
        return
    ptrace.set_mask(thread, _ALL_SIGNALS)
    try:
        for number, arguments in calls:
            words = list(struct.unpack(f"<{len(registers) // 8}Q", registers))
            words[_RIP], words[_RAX], words[_ORIG_RAX] = place, number, _ALL_SIGNALS
            for at, value in zip(_ARGUMENTS, arguments, strict=False):
                words[at] = value
            ptrace.set_registers(thread, struct.pack(f"<{len(words)}Q", *words))
            for _ in range(2):  # its entry and its exit
                if not _step_to_call(thread):
                    return
    finally:
        ptrace.set_registers(thread, registers)
        ptrace.set_mask(thread, mask)


def _step_to_call(thread: int) -> bool:
    """Let a thread run to the next entry to or exit from a system call."""
    until = time.monotonic() + _STOP_SECONDS
    ptrace.request(ptrace.SYSCALL, thread)
    while time.monotonic() < until:
        stop = ptrace.wait(thread, block=False)
        if stop is None:
            time.sleep(_POLL_SECONDS)
        elif stop.at_call:
            return True
        else:
            ptrace.request(ptrace.SYSCALL, thread)
    return False


def _system_call_instruction(process: int) -> int:
    """Return the address of a system call instruction in a process's vdso; 0: there is none."""
    for one in procfs.read_maps(process):
        if one.path == "[vdso]":
            with open(f"/proc/{process}/mem", "rb", buffering=0) as memory:
                memory.seek(one.start)
                at = memory.read(one.length).find(b"\x0f\x05")
            return one.start + at if at >= 0 else 0
    return 0
