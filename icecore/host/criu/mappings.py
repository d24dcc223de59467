"""Copies of the smaps of processes that stand still, made ahead of CRIU, which reads one file after
another (icecore/host/criu/mappings.c).

For that file, the kernel counts the pages of each mapping. CRIU does not need the counts, but the
flags of the mappings have no other source.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path

from icecore.host.kernel.scanning import copy_file

#: Free bytes that copies leave for CRIU's images.
_LEAST_FREE = 64 << 20


def copy_mappings(
    hidden: Path, processes: Iterable[tuple[int, int]], over: Callable[[], bool]
) -> None:
    """Copy the smaps of processes that CRIU holds. Skip processes that CRIU has reached already, or
    that were killed. Stop when CRIU is done, or when the directory has little room left.

    Args:
        hidden: The file that records what CRIU was kept from seeing. It lies in CRIU's image
            directory, and so do the copies.
        processes: Pid and image id of each process, in the order in which CRIU reaches them.
            Threads may share one iterator.
        over: Returns whether CRIU is done.
    """
    for pid, image in processes:
        if over() or _free_bytes(hidden.parent) < _LEAST_FREE:
            return
        # CRIU creates this image only after it has read the mappings.
        if not hidden.with_name(f"mm-{image}.img").exists():
            with suppress(OSError):  # without a copy, CRIU reads the file itself
                _copy(pid, hidden.with_name(f"{hidden.name}.{pid}.smaps.log"))


def remove_copies(hidden: Path) -> None:
    """Remove the copies that CRIU did not use. Call it once CRIU is done."""
    for path in hidden.parent.glob(f"{hidden.name}.*.smaps.log"):
        path.unlink()


def _copy(pid: int, target: Path) -> None:
    unfinished = target.with_name(f"{target.name}.tmp.log")
    source = os.open(f"/proc/{pid}/smaps", os.O_RDONLY | os.O_CLOEXEC)
    try:
        copy = os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            copy_file(source, copy)
            os.rename(unfinished, target)
        except BaseException:
            os.unlink(unfinished)
            raise
        finally:
            os.close(copy)
    finally:
        os.close(source)


def _free_bytes(directory: Path) -> int:
    about = os.statvfs(directory)
    return about.f_bavail * about.f_frsize
