"""Linux's asynchronous I/O (io_setup(2)): processes that may have requests in flight.

The kernel shows completed requests, but not those in flight. For a file without O_DIRECT,
io_submit(2) reads and writes before it returns. Only requests with O_DIRECT continue while a
process stands still, and change its memory and its files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Mapping
from pathlib import Path

from icecore.host.criu.images import VMA_AIORING, load_mm
from icecore.host.criu.opened_images import OpenedImages
from icecore.host.kernel import procfs

#: How /proc names a ring.
_RING = "/[aio]"

CURE = (
    "turn off asynchronous I/O (MySQL: innodb_use_native_aio=0) or direct I/O "
    "(MySQL: innodb_flush_method=fsync) in the program's configuration"
)


def has_ring(mappings: Iterable[procfs.Mapping]) -> bool:
    """Return whether a process has a ring."""
    return any(mapping.path.startswith(_RING) for mapping in mappings)


def direct_file(descriptors: Iterable[procfs.Descriptor]) -> str:
    """Return a file that a process has open for direct I/O; empty: none."""
    return next(
        (one.target for one in descriptors if stat.S_ISREG(one.mode) and one.flags & os.O_DIRECT),
        "",
    )


def unseen(pid: int, path: str) -> str:
    """Return why a process with a ring and this file open for direct I/O cannot be snapshotted."""
    return (
        f"process {pid} uses Linux's asynchronous I/O (io_setup) and has {path} open for direct I/O: "
        "requests in flight cannot be seen, and a restored job would lose their data and completion"
    )


def direct_user(images: Path, pids: Mapping[int, int]) -> tuple[int, str] | None:
    """Return a process that has a ring and a file open for direct I/O, and the file, from CRIU's
    complete images; None: none has.

    Args:
        pids: Host pid → image id.
    """
    opened: OpenedImages | None = None
    for pid, number in pids.items():
        try:
            status = load_mm(images, number).vmas["status"]
        except FileNotFoundError:
            continue  # it has ended
        if not (status & VMA_AIORING).any():
            continue
        opened = opened or OpenedImages(images)
        for one in opened.descriptors(number).values():
            if stat.S_ISREG(one.file.mode) and one.file.flags & os.O_DIRECT:
                return pid, one.file.path
    return None
