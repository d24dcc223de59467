"""System calls that another process makes for us, in one of its threads; its rule: the thread goes on as if it had only been stopped and continued.

For what the kernel lets only a process itself do, as madvise(2). One thread is interrupted by ptrace(2), makes the call, and gets back all its registers and
the signals that it blocks; a call of its own that was interrupted is restarted, as after SIGSTOP and SIGCONT (signal(7) says which end with EINTR).
Passed over are threads that something watches or filters (a tracer, seccomp, syscall user dispatch), that are stopped, or that stand where they
must not be interrupted without noticing (restartable sequences). On x86-64 only: on aarch64 the kernel prepares the restart before a tracer sees the thread.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
from collections import Counter
from collections.abc import Callable, Sequence

from icecore.errors import NotFound
from icecore.host import procfs, ptrace

_SYSCALL_INSTRUCTION = b"\x0f\x05"
#: struct user_regs_struct, in words.
_R10, _R9, _R8, _RAX, _RDX, _RSI, _RDI, _ORIG_RAX, _RIP, _CS = 7, 8, 9, 10, 12, 13, 14, 15, 16, 17
_ARGUMENTS = (_RDI, _RSI, _RDX, _R10, _R8, _R9)
_WORDS = struct.Struct("<27Q")
_CS_64_BIT = 0x33
_NO_CALL = (1 << 64) - 1
_ALL_SIGNALS = (1 << 64) - 1
_STOP_SECONDS = 0.05
_SLOW_ONES = 5
_CANNOT_STOP = "does not stop"


class NotMade(Exception):
    """No thread of the process could make the call; it goes on unharmed."""


def execute(pid: int, number: int, arguments: Sequence[int], avoid: Callable[[procfs.Status], bool]) -> int:
    """Have process ``pid`` make a system call, once; waits for as long as that takes.

    Args:
        pid: The caller must be allowed to trace it.
        number, arguments: Of x86-64.
        avoid: Tells of a thread whether it is to be left alone.

    Returns:
        What the call returns; negative: an errno.

    Raises:
        NotMade: Says why.
        NotFound: The process is gone.
    """
    if os.uname().machine != "x86_64":
        raise NotMade("on x86-64 only")
    instruction = _find_instruction(pid)
    return ptrace.apart(lambda: _execute(pid, instruction, number, arguments, avoid))


def _execute(pid: int, instruction: int, number: int, arguments: Sequence[int], avoid: Callable[[procfs.Status], bool]) -> int:
    passed: Counter[str] = Counter()
    for thread in sorted(procfs.threads(pid), key=lambda thread: (thread != pid, thread)):
        try:
            why = _unfit(thread, avoid)
            if not why:
                with ptrace.standing(thread, _STOP_SECONDS) as stopped_by:
                    why = _unfit_standing(pid, thread, stopped_by)
                    if not why:
                        return _call(thread, instruction, number, arguments)
        except (NotFound, ProcessLookupError):
            why = "ended"
        passed[why] += 1
        if passed[_CANNOT_STOP] == _SLOW_ONES:
            break
    reasons = ", ".join(f"{count} × {why}" for why, count in passed.items())
    raise NotMade(f"no thread of process {pid} could do it: {reasons}")


def _unfit(thread: int, avoid: Callable[[procfs.Status], bool]) -> str:
    """Why a thread is left alone; empty: it is not."""
    status = procfs.status(thread)
    if avoid(status):
        return "not to be used"
    if status.tracer:
        return "traced"
    if status.seccomp:
        return "seccomp"
    return "stopped or dead" if status.stopped or status.zombie else ""


def _unfit_standing(pid: int, thread: int, stopped_by: int) -> str:
    """The same of one that was to be stopped."""
    if not stopped_by:
        return _CANNOT_STOP
    if stopped_by != signal.SIGTRAP:
        return "stopped or dead"
    words = _WORDS.unpack(_registers(thread))
    if words[_CS] != _CS_64_BIT:
        return "32-bit code"
    dispatch = ctypes.create_string_buffer(32)
    size = len(dispatch)
    if not ptrace.request(ptrace.GET_SYSCALL_USER_DISPATCH, thread, size, ctypes.addressof(dispatch)) or any(dispatch.raw[:8]):
        return "syscall user dispatch"
    return "restartable sequence" if _in_sequence(pid, thread, words[_RIP]) else ""


def _in_sequence(pid: int, thread: int, at: int) -> bool:
    """Whether a thread stands within a critical section (rseq(2)), or it is not known: coming back to it from elsewhere, it would not be restarted."""
    about = ctypes.create_string_buffer(32)
    if not ptrace.request(ptrace.GET_RSEQ_CONFIGURATION, thread, 24, ctypes.addressof(about)):
        return True
    area: int = struct.unpack_from("<Q", about)[0]
    if not area:
        return False
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            (section,) = struct.unpack("<Q", os.pread(memory.fileno(), 8, area + 8))
            if not section:
                return False
            start, length = struct.unpack("<QQ", os.pread(memory.fileno(), 16, section + 8))
    except (OSError, struct.error):
        return True
    return bool(start <= at < start + length)


def _find_instruction(pid: int) -> int:
    """Where the kernel's own code in the process has an instruction for system calls."""
    vdso = next((mapping for mapping in procfs.read_maps(pid) if mapping.path == "[vdso]"), None)
    if vdso is None:
        raise NotMade(f"process {pid} has no vdso")
    try:
        with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
            at = os.pread(memory.fileno(), vdso.length, vdso.start).find(_SYSCALL_INSTRUCTION)
    except OSError as error:
        raise NotMade(f"the memory of process {pid} cannot be read: {error.strerror}") from error
    if at < 0:
        raise NotMade(f"process {pid} has no instruction for system calls in its vdso")
    return vdso.start + at


def _registers(thread: int) -> bytes:
    values = ptrace.registers(thread)
    if len(values) != _WORDS.size:
        raise ProcessLookupError(thread)
    return values


def _call(thread: int, instruction: int, number: int, arguments: Sequence[int]) -> int:
    """Of a thread that was interrupted: it stands where the kernel handles signals, and after that restarts the call that it was in.

    It has to be there again when its registers are put back, or that call would return an error that no program knows. With all signals blocked no handler
    runs on registers that are not its own. Once it makes the call there is no giving up: it could not be let go.
    """
    before, mask = _registers(thread), ptrace.mask_of(thread)
    words = list(_WORDS.unpack(before))
    words[_RIP], words[_RAX], words[_ORIG_RAX] = instruction, number, _NO_CALL
    for register, value in zip(_ARGUMENTS, arguments, strict=False):
        words[register] = value
    if mask is None or not ptrace.set_mask(thread, _ALL_SIGNALS):
        raise ProcessLookupError(thread)
    result = None
    if ptrace.set_registers(thread, _WORDS.pack(*words)):
        if _go_to_call(thread) and _go_to_call(thread):
            (result,) = struct.unpack_from("<q", _registers(thread), 8 * _RAX)
        ptrace.interrupt(thread)
        ptrace.set_registers(thread, before)
        _go_to_trap(thread)
    ptrace.set_mask(thread, mask)
    if result is None:
        raise NotMade(f"thread {thread} could not make the call")
    return int(result)


def _go_to_call(thread: int) -> bool:
    """Until it stands before or after the call; False: it cannot make it."""
    passed_on = 0
    while ptrace.request(ptrace.SYSCALL, thread, 0, passed_on):
        stop = _wait(thread)
        if stop.at_call:
            return True
        # SIGSTOP is not to be blocked: the process stops, but for this thread, which does as soon as it is let go. Other signals here are the call's own fault.
        passed_on = 0 if stop.trap else stop.signal
        if passed_on not in (0, signal.SIGSTOP):
            return False
    raise ProcessLookupError(thread)


def _go_to_trap(thread: int) -> None:
    """Until it stands where it was interrupted at first."""
    passed_on = 0
    while ptrace.request(ptrace.CONT, thread, 0, passed_on):
        stop = _wait(thread)
        if stop.trap:
            return
        passed_on = stop.signal if stop.signal == signal.SIGSTOP else 0
    raise ProcessLookupError(thread)


def _wait(thread: int) -> ptrace.Stop:
    stop = ptrace.wait(thread, block=True)
    assert stop is not None
    return stop
