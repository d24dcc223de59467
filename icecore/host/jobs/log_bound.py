"""The bound on the logs of an instance (``icecore run --log-bytes``): the oldest output beyond it is
removed by a hole at the front of the log, so that offsets stay, and with them the appending job and
all who follow it.

``STREAM.removed`` in the instance's directory is an empty file whose size says how many bytes were
removed. It is changed before the hole is made, needs no space on a full disk, and changes at once.
Only holes within that range were made here; the job may have made others, or truncated its log.

A lock on the directory (flock(2)) keeps those who remove apart from those who must not see it
happen: the windows of dumps, and readers within the range.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from icecore.private import is_own

if TYPE_CHECKING:
    from icecore.host.jobs.job import Stream

STREAMS: tuple[Stream, ...] = ("stdout", "stderr")

#: Less than this, or than an eighth of the bound, is not worth a hole.
_LEAST_BYTES = 64 << 10
_PAGE = 4096
#: Readers hold the lock for moments, windows for longer.
_TRIES, _PAUSE_SECONDS = 5, 0.01
_TOLD = "logs-kept"
_AT_ONCE = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def make_records(directory: Path, removed: Mapping[Stream, int]) -> None:
    """Make the files that say how much was removed, for a new instance.

    Args:
        removed: Bytes that are missing at the front of the logs which a restore brings back.
    """
    for stream in STREAMS:
        made = os.open(
            directory / f"{stream}.removed",
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        try:
            os.ftruncate(made, removed.get(stream, 0))
        finally:
            os.close(made)


def trim(directory: Path, user: int, bound: int) -> str:
    """Remove the oldest output of both logs beyond a bound, if it is enough to be worth it. Do
    nothing in the window of a dump.

    Args:
        directory: The instance's.
        user: Whose job it is: the owner of the logs.
        bound: Bytes of each log to keep.

    Returns:
        Why the file system does not allow it, the first time for this instance; empty: it does, or
        that was said.

    Raises:
        OSError: The files cannot be opened, because the instance is being removed, for example.
    """
    folder = _open_directory(directory)
    try:
        due = [stream for stream in STREAMS if _is_due(folder, stream, bound)]
        if not due or not _lock(folder):
            return ""
        for stream in due:
            try:
                _trim(folder, stream, user, bound)
            except _NoHole as error:
                return str(error) if _is_first(folder) else ""
        return ""
    finally:
        os.close(folder)


class HeldLogs:
    """Keeps all output that is there now, until `release`.

    Args:
        directory: The instance's; None: there is nothing to be kept.

    Attributes:
        removed: Bytes that were removed at the front of each log.
    """

    def __init__(self, directory: Path | None) -> None:
        self.removed: dict[Stream, int] = {}
        self._folder = -1
        if directory is None:
            return
        self._folder = _open_directory(directory)
        try:
            with suppress(OSError):  # without locks nobody removes anything
                fcntl.flock(self._folder, fcntl.LOCK_SH)
            for stream in STREAMS:
                if gone := _removed(self._folder, stream):
                    self.removed[stream] = gone
        except BaseException:
            self.release()
            raise

    def release(self) -> None:
        """Let the output be removed again. May be called twice."""
        if self._folder >= 0:
            with suppress(OSError):  # a process that was forked meanwhile has the descriptor, too
                fcntl.flock(self._folder, fcntl.LOCK_UN)
            os.close(self._folder)
            self._folder = -1


class LogReader:
    """Reads a log on from an offset (a context manager).

    Args:
        directory: The instance's.
        at: Offset in bytes.

    Raises:
        FileNotFoundError: The instance is being made or removed.
    """

    def __init__(self, directory: Path, stream: Stream, at: int = 0) -> None:
        self._at = at
        self._log = self._record = self._folder = -1
        try:
            self._log = os.open(directory / f"{stream}.log", os.O_RDONLY | _AT_ONCE)
            with suppress(FileNotFoundError):  # the log has no bound
                self._record = os.open(directory / f"{stream}.removed", os.O_RDONLY | _AT_ONCE)
                self._folder = _open_directory(directory)
        except BaseException:
            self.close()
            raise

    def read(self, most: int) -> tuple[int, bytes]:
        """Return how many bytes were removed from here on, and at most ``most`` bytes that follow
        them; ``(0, b"")`` at the end.
        """
        data = os.pread(self._log, most, self._at)
        # Afterwards: the record is changed before the hole is made.
        if self._folder < 0 or os.fstat(self._record).st_size <= self._at:
            self._at += len(data)
            return 0, data
        fcntl.flock(self._folder, fcntl.LOCK_SH)
        try:
            until = min(os.fstat(self._record).st_size, os.fstat(self._log).st_size)
            start = max(self._at, min(_data(self._log, self._at, until), until))
            if start < until:  # the job has truncated the log, or written there
                most = min(most, os.lseek(self._log, start, os.SEEK_HOLE) - start)
            data = os.pread(self._log, most, start)
        finally:
            fcntl.flock(self._folder, fcntl.LOCK_UN)
        removed, self._at = start - self._at, start + len(data)
        return removed, data

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._log, self._record, self._folder):
            if descriptor >= 0:
                os.close(descriptor)
        self._log = self._record = self._folder = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class _NoHole(Exception):
    """The file system does not make a hole in a log."""


def _open_directory(directory: Path) -> int:
    """Open an instance's directory, in which nobody but root and this process's user makes names."""
    folder = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not is_own(os.fstat(folder)):
        os.close(folder)
        raise PermissionError(errno.EPERM, "it belongs to another user", str(directory))
    return folder


def _lock(folder: int) -> bool:
    """Exclude readers and dumps until the directory is closed; return False if one does not end."""
    for _ in range(_TRIES):
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return True
        except BlockingIOError:
            time.sleep(_PAUSE_SECONDS)
    return False


def _data(log: int, start: int, end: int) -> int:
    """Return the first offset from ``start`` on that holds data; ``end``: there is none."""
    try:
        return os.lseek(log, start, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return end


def _recorded(folder: int, stream: Stream) -> int:
    """Return how many bytes of a log were removed at most; 0 of a log without a bound."""
    try:
        return os.stat(f"{stream}.removed", dir_fd=folder, follow_symlinks=False).st_size
    except FileNotFoundError:
        return 0


def _removed(folder: int, stream: Stream) -> int:
    """Return how many bytes are missing at the front of a log because they were removed."""
    recorded = _recorded(folder, stream)
    if not recorded:
        return 0
    log = os.open(f"{stream}.log", os.O_RDONLY | _AT_ONCE, dir_fd=folder)
    try:
        return min(recorded, _data(log, 0, os.fstat(log).st_size))
    finally:
        os.close(log)


def _is_due(folder: int, stream: Stream, bound: int) -> bool:
    """Return whether a log seems to have enough beyond its bound. Cheap: asked every second."""
    size = os.stat(f"{stream}.log", dir_fd=folder, follow_symlinks=False).st_size
    # A log that the job has truncated has less than was removed of it.
    recorded = _recorded(folder, stream)
    return size - (recorded if recorded <= size else 0) - bound >= _worth(bound)


def _worth(bound: int) -> int:
    return max(_LEAST_BYTES, bound // 8)


def _trim(folder: int, stream: Stream, user: int, bound: int) -> None:
    """Trim one log, under the lock.

    Raises:
        _NoHole: The file system refuses it.
    """
    log = os.open(f"{stream}.log", os.O_WRONLY | _AT_ONCE, dir_fd=folder)
    try:
        about = os.fstat(log)
        if not stat.S_ISREG(about.st_mode) or about.st_uid != user:
            raise _NoHole("it is not the file that icecore has made")
        gone = _removed(folder, stream)
        block = max(_PAGE, os.fstatvfs(log).f_bsize)
        end = (about.st_size - bound) // block * block
        if about.st_size - gone - bound < _worth(bound) or end <= gone:
            return
        record = os.open(f"{stream}.removed", os.O_WRONLY | _AT_ONCE, dir_fd=folder)
        try:
            os.ftruncate(record, end)
            _punch(log, end, record, gone)
        finally:
            os.close(record)
    finally:
        os.close(log)


def _punch(log: int, end: int, record: int, before: int) -> None:
    from icecore.host.kernel import libc  # many commands only read logs

    try:
        libc.punch(log, 0, end)
    except OSError as error:
        os.ftruncate(record, before)
        raise _NoHole(os.strerror(error.errno or 0)) from error


def _is_first(folder: int) -> bool:
    """Return whether nobody was told yet that the logs of an instance are kept whole, and note that
    somebody is.
    """
    with suppress(OSError):
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        os.close(os.open(_TOLD, flags, 0o600, dir_fd=folder))
        return True
    return False
