"""Trims the logs of an instance to their limit (``icecore run --log-limit``). A hole at the front of
a log replaces the oldest output, so that offsets stay valid.

``STREAM.start`` in the instance's directory is an empty file. Its size is the start offset: output
before it may be removed, and holes behind it are the job's own. It grows before the hole is punched.
Changing it is atomic and needs no space on a full disk.

A lock on the directory (flock(2)) excludes other trimmers. Readers and dumps take none, so that they
wait for nobody.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from icecore.host.jobs.logs import STREAMS, Stream
from icecore.private import is_own

#: The limit and the start offset of a log are less than this.
MOST = 1 << 56
#: Trim at least this much, and at least an eighth of the limit, at a time.
_LEAST_BYTES = 64 << 10
#: A hole frees whole blocks. Readers skip the zeros that are left in larger ones.
_ALIGN = 4096
#: No file system has larger blocks: of as many bytes, a part must become a hole.
_LARGEST_BLOCK = 16 << 20
#: One call of fallocate(2) keeps readers waiting for a part of a second.
_STEP_BYTES = 256 << 20
#: In one call of `trim`, of each log.
TRIM_BYTES = 1 << 30
_OPEN = os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC


def trim_to(size: int, start: int, limit: int) -> int:
    """Return the offset up to which a log is to be trimmed.

    Args:
        size: Of the log, with what was removed.
        start: The offset of the first byte that it still holds. Returned if too little exceeds the
            limit.
        limit: Bytes of the newest output to keep.
    """
    end = (size - limit) // _ALIGN * _ALIGN
    return end if end - start >= max(_LEAST_BYTES, limit // 8) else start


def write_starts(directory: Path, starts: Mapping[Stream, int]) -> None:
    """Create the files with the start offsets, for a new instance whose logs have a limit.

    Args:
        starts: The start offsets of the logs that a restore brings back. Default: 0.
    """
    for stream in STREAMS:
        descriptor = os.open(
            directory / f"{stream}.start",
            os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
            0o600,
        )
        try:
            os.ftruncate(descriptor, starts.get(stream, 0))
        except OSError as error:
            if error.errno != errno.EFBIG:  # no log here was ever that long
                raise
        finally:
            os.close(descriptor)


def read_starts(directory: Path) -> dict[Stream, int]:
    """Return the start offset of each log from which output was removed."""
    starts = dict[Stream, int]()
    for stream in STREAMS:
        with suppress(OSError):  # it has no limit, or no log any more
            start = (directory / f"{stream}.start").stat().st_size
            if 0 < start <= (directory / f"{stream}.log").stat().st_size:
                starts[stream] = start
    return starts


def require_holes(directory: Path) -> None:
    """Require that the new, empty logs of an instance can be trimmed.

    Raises:
        OSError: They cannot: the file system lacks holes or locks.
    """
    from icecore.host.kernel import libc

    directory_fd = _open_directory(directory)
    try:
        with _locked(directory_fd):
            pass
        log = os.open("stdout.log", os.O_WRONLY | _OPEN, dir_fd=directory_fd)
        try:
            os.ftruncate(log, _ALIGN)
            libc.punch(log, 0, _ALIGN)
            if _first_data(log, _ALIGN) < _ALIGN:
                raise OSError(errno.EOPNOTSUPP, "lseek(2) finds no holes")
            os.ftruncate(log, 0)
        finally:
            os.close(log)
    finally:
        os.close(directory_fd)


def trim(directory: Path, limit: int, most: int = TRIM_BYTES) -> None:
    """Trim both logs to a limit, if enough exceeds it. Do nothing while another process does.

    Args:
        directory: The instance's.
        limit: Bytes of each log to keep.
        most: Bytes of each log to remove at most; the next call goes on.

    Raises:
        OSError: A log cannot be trimmed. The other one was.
    """
    directory_fd = _open_directory(directory)
    failed: OSError | None = None
    try:
        for stream in STREAMS:
            try:
                _trim(directory_fd, stream, limit, most)
            except FileNotFoundError:  # somebody has removed the log
                pass
            except OSError as error:
                failed = failed or error
    finally:
        os.close(directory_fd)
    if failed is not None:
        raise failed


def _trim(directory_fd: int, stream: Stream, limit: int, most: int) -> None:
    log = os.open(f"{stream}.log", os.O_WRONLY | _OPEN, dir_fd=directory_fd)
    try:
        if not stat.S_ISREG(os.fstat(log).st_mode):
            raise OSError(errno.EINVAL, f"{stream}.log is not a regular file")
        start = os.open(f"{stream}.start", os.O_WRONLY | _OPEN, dir_fd=directory_fd)
        try:
            while most > 0:
                with _locked(directory_fd) as alone:
                    removed = _step(log, start, limit, min(most, _STEP_BYTES)) if alone else 0
                if not removed:
                    return
                most -= removed
        finally:
            os.close(start)
    finally:
        os.close(log)


def _step(log: int, start: int, limit: int, most: int) -> int:
    """Remove up to ``most`` bytes, under the lock; return how many."""
    from icecore.host.kernel import libc  # most commands trim nothing

    size, recorded = os.fstat(log).st_size, os.fstat(start).st_size
    # A log that the job has truncated begins at 0 again, as does one whose hole was not punched
    # because this process was killed before.
    first = min(recorded, _first_data(log, size))
    end = min(trim_to(size, first, limit), first + most)
    if end <= first:
        return 0
    os.ftruncate(start, max(end, recorded))
    try:
        libc.punch(log, first, end - first)
    except OSError as error:
        if error.errno == errno.EOPNOTSUPP:  # after other errors, a part may be removed
            os.ftruncate(start, recorded)
        raise
    left = _first_data(log, size)
    if left >= end:
        return end - first
    if left <= first and end - first >= _LARGEST_BLOCK:
        raise OSError(errno.EOPNOTSUPP, "lseek(2) finds no holes")
    return 0  # the rest of a block, which goes with the next one


def _first_data(log: int, size: int) -> int:
    """Return the offset of the first data; ``size``: there are none."""
    try:
        return os.lseek(log, 0, os.SEEK_DATA)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return size


def _open_directory(directory: Path) -> int:
    """Open an instance's directory.

    Raises:
        PermissionError: It belongs to a user other than root and this process's.
    """
    directory_fd = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    if not is_own(os.fstat(directory_fd)):
        os.close(directory_fd)
        raise PermissionError(
            errno.EPERM, "the instance's directory belongs to another user", str(directory)
        )
    return directory_fd


@contextmanager
def _locked(directory_fd: int) -> Iterator[bool]:
    """Exclude other trimmers; yield False if there is one."""
    try:
        fcntl.flock(directory_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        yield False
        return
    try:
        yield True
    finally:
        # Closing is not enough if another thread has forked meanwhile.
        fcntl.flock(directory_fd, fcntl.LOCK_UN)
