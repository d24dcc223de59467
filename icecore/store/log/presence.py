"""Which process a session belongs to, and whether it has ended, which is certain only on the kernel
and in the namespaces in which it ran.

This is advice, like heartbeats: it decides when a session is fenced, never what is safe to delete.
"""

from __future__ import annotations

import os
from pathlib import Path

from icecore.store.format.state import Process

_BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_process() -> Process | None:
    """Return the calling process; None if the system does not identify it."""
    pid = os.getpid()
    try:
        if int(os.readlink("/proc/self")) != pid:
            return None  # /proc of another namespace
        return Process(*_here(), pid, _stat(pid)[1])
    except (OSError, ValueError, IndexError):
        return None


def has_ended(process: Process | None) -> bool:
    """Return whether ``process`` ran on this kernel, in this process's namespaces, and has ended;
    False whenever that is not certain.
    """
    ours = this_process()
    if (
        process is None
        or ours is None
        or (process.boot, process.namespaces) != (ours.boot, ours.namespaces)
    ):
        return False
    try:
        # Not by /proc alone: a mount with hidepid does not show other users' processes.
        os.kill(process.pid, 0)
    except ProcessLookupError:
        return True
    except (PermissionError, OverflowError):
        pass
    try:
        state, started, threads = _stat(process.pid)
    except (OSError, ValueError, IndexError):
        return False
    # The first thread of a process may end before the others do.
    return started != process.started or (state in "ZX" and threads <= 1)


def _here() -> tuple[str, str]:
    names = " ".join(os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time"))
    return _BOOT.read_text().strip(), names


def _stat(pid: int) -> tuple[str, int, int]:
    """Return state, start time and number of threads (proc_pid_stat(5): fields 3, 22, 20)."""
    fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return fields[0], int(fields[19]), int(fields[17])
