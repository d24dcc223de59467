"""The records of an operation: output and events of its command, one JSON object per line.

The id of a record is the offset of its end in the whole stream, so a reader resumes with one seek.
The stream is stored in segments, ``events.OFFSET.jsonl``; only the newest segments of a long stream
are kept.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_SEGMENT_BYTES = 8 << 20
_SEGMENTS = 2
_PIECE = 1 << 20


def _segments(directory: Path) -> list[tuple[int, Path]]:
    """Return the segments with their offsets, oldest first."""
    found = []
    for path in directory.glob("events.*.jsonl"):
        with suppress(ValueError):
            found.append((int(path.name.split(".")[1]), path))
    return sorted(found)


class Writer:
    """Appends records; one process at a time.

    Args:
        directory: The operation's.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._lock = threading.Lock()
        segments = _segments(directory)
        self._base = segments[-1][0] if segments else 0
        self._file = self._open()
        # A writer that was killed may have left part of a line.
        data = os.pread(self._file, _SEGMENT_BYTES + (64 << 20), 0)
        self._size = data.rfind(b"\n") + 1
        os.ftruncate(self._file, self._size)

    def write(self, line: bytes) -> None:
        """Append one record, a line without its end."""
        with self._lock:
            if self._size > _SEGMENT_BYTES:
                os.close(self._file)
                self._base += self._size
                self._size = 0
                self._file = self._open()
                for _, path in _segments(self._directory)[:-_SEGMENTS]:
                    with suppress(FileNotFoundError):
                        path.unlink()
            rest = memoryview(line + b"\n")
            self._size += len(rest)
            while rest:
                rest = rest[os.write(self._file, rest) :]

    def close(self) -> None:
        """Close the file; records that come later fail with EBADF."""
        with self._lock:
            os.close(self._file)
            self._file = -1

    def _open(self) -> int:
        return os.open(
            self._directory / f"events.{self._base}.jsonl",
            os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )


class Reader:
    """Reads complete records after an offset.

    Args:
        directory: The operation's.
        after: The id of the last record that the reader has; 0: none. An offset within a record
            counts as the end of that record.
    """

    def __init__(self, directory: Path, after: int = 0) -> None:
        self._directory = directory
        self._at = after
        self._synchronised = after == 0

    def read(self) -> Iterator[tuple[int, bytes]]:
        """Yield the ids and the lines of the records written so far, at most some MiB."""
        found = self._find()
        if found is None:
            return
        base, path = found
        if self._at < base:  # older ones are gone
            self._at, self._synchronised = base, True
        start = self._at - base
        try:
            with open(path, "rb") as file:
                if not self._synchronised and start:
                    file.seek(start - 1)
                    if file.read(1) != b"\n":
                        self._at += len(file.readline())
                        start = self._at - base
                self._synchronised = True
                file.seek(start)
                data = file.read(_PIECE)
                if b"\n" not in data:
                    data += file.readline()
        except FileNotFoundError:  # it was removed meanwhile
            return
        for line in data.splitlines(keepends=True):
            if not line.endswith(b"\n"):
                return
            self._at += len(line)
            yield self._at, line[:-1]

    def _find(self) -> tuple[int, Path] | None:
        """Return the segment that holds the next record."""
        segments = _segments(self._directory)
        best = None
        for base, path in segments:
            if best is None or base <= self._at:
                best = (base, path)
        return best
