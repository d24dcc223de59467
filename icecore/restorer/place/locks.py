"""Read-write locks, in one process and among processes; a waiting writer precedes new readers."""

from __future__ import annotations

import fcntl
import mmap
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MapLock:
    """Guards an address map: placements read it, the daemon applies the kernel's events to it."""

    def __init__(self) -> None:
        self._change = threading.Condition(threading.Lock())
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock with other readers."""
        with self._change:
            while self._writing or self._writers_waiting:
                self._change.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._change:
                self._readers -= 1
                if self._readers == 0:
                    self._change.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock alone."""
        with self._change:
            self._writers_waiting += 1
            try:
                while self._writing or self._readers:
                    self._change.wait()
            finally:
                self._writers_waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._change:
                self._writing = False
                self._change.notify_all()


class SharedLock:
    """The same among processes, with a flag for each cell of a restore that says whether its process
    ever changed the memory at its place.

    A reader passes a gate that a writer shuts, so that successive readers do not starve the writer.
    The kernel releases the lock of a process that dies.

    Args:
        folder: The directory of its files, which are made if missing.
        cells: How many flags; None: the files exist.

    Raises:
        OSError: The file system has no room for the flags.
    """

    def __init__(self, folder: str, cells: int | None = None) -> None:
        self._gate, self._lock, flags = (
            os.open(os.path.join(folder, name), os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            for name in ("gate", "lock", "flags")
        )
        try:
            if cells is not None:
                # With its memory: there may be none later, and an access would be a SIGBUS.
                os.posix_fallocate(flags, 0, max(1, cells))
            self._flags = mmap.mmap(flags, 0)
        except BaseException:
            os.close(self._gate)
            os.close(self._lock)
            raise
        finally:
            os.close(flags)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold the lock with other readers."""
        fcntl.flock(self._gate, fcntl.LOCK_SH)
        fcntl.flock(self._lock, fcntl.LOCK_SH)
        fcntl.flock(self._gate, fcntl.LOCK_UN)
        try:
            yield
        finally:
            fcntl.flock(self._lock, fcntl.LOCK_UN)

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold the lock alone; one thread of a process at a time."""
        fcntl.flock(self._gate, fcntl.LOCK_EX)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
            try:
                yield
            finally:
                fcntl.flock(self._lock, fcntl.LOCK_UN)
        finally:
            fcntl.flock(self._gate, fcntl.LOCK_UN)

    def changed(self, cell: int) -> bool:
        """Return whether the memory at a cell's place has changed; the lock is held."""
        return bool(self._flags[cell])

    def set_changed(self, cells: range) -> None:
        """Note that it has; the lock is held for writing."""
        self._flags[cells.start : cells.stop] = b"\1" * len(cells)

    def close(self) -> None:
        """Close the files."""
        os.close(self._gate)
        os.close(self._lock)
        self._flags.close()
