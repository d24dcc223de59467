"""The two logs of an instance, and how they are read.

The front of a log that has a limit may be missing (`icecore.host.jobs.log_trimming`): a hole takes
its place, so that offsets stay valid.
"""

from __future__ import annotations

import errno
import os
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

import msgspec

Stream = Literal["stdout", "stderr"]
STREAMS: tuple[Stream, ...] = ("stdout", "stderr")


class LogPiece(msgspec.Struct, frozen=True):
    """Bytes that a command wrote, in the order of one stream (two streams have no common order).

    Attributes:
        removed: Bytes skipped before ``data``, because they were removed.
    """

    stream: Stream
    data: bytes
    removed: int = 0


class LogReader:
    """Reads a log from an offset on (a context manager). It needs no lock.

    Args:
        directory: The instance's.
        at: Offset in bytes.

    Raises:
        FileNotFoundError: The instance has no such log, or was removed.
    """

    def __init__(self, directory: Path, stream: Stream, at: int = 0) -> None:
        self._stream = stream
        self._at = at
        self._start = -1
        self._log = os.open(directory / f"{stream}.log", os.O_RDONLY | os.O_CLOEXEC)
        try:
            with suppress(FileNotFoundError):  # the log has no limit
                self._start = os.open(directory / f"{stream}.start", os.O_RDONLY | os.O_CLOEXEC)
        except BaseException:
            self.close()
            raise

    def read(self, most: int) -> LogPiece | None:
        """Return up to ``most`` bytes that follow; None at the end.

        Before the recorded start, holes and zeros are skipped. Other data there are the job's: it
        has truncated its log, or written into the hole.
        """
        at = self._at
        while True:
            data = os.pread(self._log, most, at)
            # Look after the read: the start is raised before the hole is punched.
            start = os.fstat(self._start).st_size if self._start >= 0 else 0
            if start <= at:
                break
            first, hole = self._extent(at)
            if first > at:
                size = os.fstat(self._log).st_size
                if size <= at:  # nothing has been written here yet
                    data = b""
                    break
                at = min(first, start, size)
                continue
            # What is no hole now was none when it was read.
            data = data[: min(hole, start) - at]
            at += len(data)
            data = data.lstrip(b"\0")
            if data:
                at -= len(data)
                break
        removed, self._at = at - self._at, at + len(data)
        return LogPiece(self._stream, data, removed) if removed or data else None

    def _extent(self, at: int) -> tuple[int, int]:
        """Return where the first data from an offset on begin and end. If there are none, both are
        beyond every offset.
        """
        try:
            first = os.lseek(self._log, at, os.SEEK_DATA)
            return first, os.lseek(self._log, first, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # a hole up to the end, or the job truncates the log
                raise
            return 1 << 63, 1 << 63

    def close(self) -> None:
        """Close the files."""
        for descriptor in (self._log, self._start):
            if descriptor >= 0:
                os.close(descriptor)
        self._log = self._start = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
