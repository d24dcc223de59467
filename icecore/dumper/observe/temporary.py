"""Find temporary files: those that a tree has made itself, in shared memory or in a directory for
temporary files. They may disappear when the tree ends, so a snapshot needs their content.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import cached_property

from icecore.errors import NotFound
from icecore.host.kernel import procfs
from icecore.host.kernel.filesystem import birth_ns

#: Directories for temporary files.
_PLACES = ("/tmp", "/var/tmp")
#: Where libraries keep files in memory, POSIX shared memory among them.
_SHARED_MEMORY = "/dev/shm"
#: Most bytes of temporary files together. More count as data: each window would have to read those
#: that are in memory.
MOST_TEMPORARY = 256 << 20
#: Precision of the time at which a process began.
_CLOCK_TICK_NS = 10_000_000


def temporary_folders(pids: Iterable[int]) -> list[str]:
    """Return /tmp, /var/tmp and the temporary directories that the environments of processes name."""
    found = set(_PLACES)
    for pid in pids:
        with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
            for word in file.read().split(b"\0"):
                name, _, value = word.partition(b"=")
                if name in (b"TMPDIR", b"TMP", b"TEMP") and value.startswith(b"/"):
                    found.add(os.path.normpath(os.fsdecode(value)))
    return sorted(found)


def began_ns(root: int) -> int:
    """Return a time just before a tree's root began, ns since the epoch.

    Raises:
        NotFound: The root has ended.
    """
    return int(procfs.began(root) * 1e9) - _CLOCK_TICK_NS


class TemporaryFiles:
    """Tell which files of a tree are temporary.

    Args:
        pids: The tree's processes, root first.
    """

    def __init__(self, pids: Sequence[int]) -> None:
        self._pids = pids

    @cached_property
    def _places(self) -> tuple[str, ...]:
        folders = (*temporary_folders(self._pids), _SHARED_MEMORY)
        return tuple(f"{folder}/" for folder in folders if folder != "/")

    @cached_property
    def _began_ns(self) -> float:
        try:
            return began_ns(self._pids[0])
        except NotFound:
            return math.inf  # no file counts as temporary

    @cached_property
    def _users(self) -> set[int]:
        found = set()
        for pid in self._pids:
            with suppress(OSError):
                found.add(os.stat(f"/proc/{pid}").st_uid)
        return found

    def contain(self, path: str, about: os.stat_result) -> bool:
        """Return whether a regular file is temporary, and not too large. Return False if the
        file system does not record when files are made, or is the tree's own (then the snapshot
        contains it anyway).

        Args:
            path: The file's path as a process of the tree sees it.
            about: The file that the process has open.
        """
        # Files that did not change since the tree began are older: no further system call is needed.
        if (
            about.st_ctime_ns < self._began_ns
            or about.st_size > MOST_TEMPORARY
            or not path.startswith(self._places)
            or about.st_uid not in self._users
        ):
            return False
        with suppress(OSError):
            now = os.lstat(path)
            same = (now.st_dev, now.st_ino) == (about.st_dev, about.st_ino)
            return same and birth_ns(path) >= self._began_ns
        return False
