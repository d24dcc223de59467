"""Names of supervised jobs, which no other process may give to a job while their supervisor lives.

``STATE/schedules/NAME.lock`` is locked by the supervisor of a name.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path

FOLDER = "schedules"
#: The locks that this process holds.
_OWN: set[Path] = set()


def lock_path(state: Path, name: str) -> Path:
    """Return the file that the supervisor of a name locks."""
    return state / FOLDER / f"{name}.lock"


def hold(path: Path) -> None:
    """Record that this process has locked a file, and so may start jobs of that name."""
    _OWN.add(path)


def release(path: Path) -> None:
    """Record that this process no longer holds a lock."""
    _OWN.discard(path)


def is_reserved(state: Path, name: str) -> bool:
    """Return whether another process supervises the jobs of a name."""
    path = lock_path(state, name)
    if path in _OWN:
        return False
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False
