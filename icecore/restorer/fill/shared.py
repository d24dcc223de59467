"""Fills shared memory that CRIU has made empty: each object once, straight from the repository, while
CRIU holds the tree.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress

from icecore.errors import NotFound, RestoreFailed
from icecore.events import Progress
from icecore.host.criu.shared_images import Reach
from icecore.host.kernel import procfs
from icecore.host.kernel.memory import shared_memory_device
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.fetch.source import Decoder
from icecore.restorer.files.filewriter import FileTarget, write_files
from icecore.restorer.files.images import PlacedMemory
from icecore.restorer.guard.guard_process import descendants
from icecore.store.backend.base import Backend
from icecore.store.runtime.loop import LoopThread


def fill_shared(
    root: int,
    memory: Sequence[PlacedMemory],
    backend: Backend,
    decoder: Decoder,
    limits: Limits,
    loop: LoopThread,
    progress: Progress | None = None,
) -> int:
    """Fill the shared memory of a tree that CRIU has built and holds.

    Args:
        root: Pid of the tree's root.
        memory: What goes into it.

    Returns:
        Bytes of the objects.

    Raises:
        RestoreFailed: An object is not where the images say, or cannot be written to.
        Damaged, StoreError: Its content could not be read.
    """
    pids = _host_pids(root)
    with ExitStack() as stack:
        targets = []
        for part in memory:
            descriptor = stack.enter_context(_opened(part, pids))
            size = os.fstat(descriptor).st_size
            name = f"shared memory {part.number}"
            targets.append(FileTarget(name, size, part.cells, descriptor=descriptor, offset=0))
        try:
            return write_files(backend, decoder, targets, limits, loop, progress)
        except OSError as error:
            raise RestoreFailed(f"cannot fill {error.filename}: {error.strerror}") from error


def _host_pids(root: int) -> dict[int, int]:
    """Return image id → pid here."""
    found: dict[int, int] = {}
    for pid in (root, *descendants(root)):
        with suppress(NotFound):
            found[procfs.status(pid).own_pid] = pid
    return found


@contextmanager
def _opened(part: PlacedMemory, pids: Mapping[int, int]) -> Iterator[int]:
    reach = part.reach
    try:
        path = _path(pids[reach.process], reach)
        descriptor = _open(path, part.number)
    except (KeyError, NotFound) as error:
        raise RestoreFailed(
            f"shared memory {part.number} of process {reach.process} is missing after CRIU restored it"
        ) from error
    except OSError as error:
        raise RestoreFailed(
            f"cannot open shared memory {part.number} of process {reach.process}: {error.strerror}"
        ) from error
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _open(path: str, number: int) -> int:
    """Open shared memory for writing, and nothing else that forged images could lead to.

    Raises:
        RestoreFailed: Something else is there.
    """
    seen = os.open(path, os.O_PATH | os.O_CLOEXEC)
    try:
        about = os.fstat(seen)
        if not stat.S_ISREG(about.st_mode) or about.st_dev != shared_memory_device():
            raise RestoreFailed(f"CRIU restored something else in place of shared memory {number}")
        return os.open(f"/proc/self/fd/{seen}", os.O_RDWR | os.O_CLOEXEC)
    finally:
        os.close(seen)


def _path(pid: int, reach: Reach) -> str:
    """Return the path under which an object can be opened.

    Raises:
        NotFound: The process does not map it there.
    """
    if reach.address is None:
        return f"/proc/{pid}/fd/{reach.descriptor}"
    for mapping in procfs.read_maps(pid):
        if mapping.start <= reach.address < mapping.end and mapping.inode:
            return f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}"
    raise NotFound(f"process {pid} maps nothing at {reach.address:#x}")
