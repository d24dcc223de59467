"""The audit log: one JSON object per line for each requested change and each refusal.

It consists of three logs, so that no caller rotates the entries of others out. Each is append-only
and rotated by size: ``audit.jsonl`` becomes ``audit.jsonl.1``, older files are renumbered, and the
oldest is removed.

- ``audit.jsonl``: changes. One caller writes at most an eighth of each file.
- ``audit-more.jsonl``: changes of callers who have used their share of the present file.
- ``audit-refused.jsonl``: refusals. Equal ones of a minute are one entry with a count.
"""

from __future__ import annotations

import errno
import heapq
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from icecore.host.kernel.libc import reserve
from icecore.private import private_state
from icecore.service.api.tokens import FOLDER
from icecore.text import jsonable

#: Older files that are kept of changes, and of each of the two other logs.
_KEPT = 4
_KEPT_OF_OTHERS = 1
#: One caller's share of a file.
_SHARE = 1 / 8
#: Different refusals of one caller in `_SPAN` seconds that are recorded with their subject, and
#: those of all callers without a valid token.
_REFUSALS = 60
_REFUSALS_OF_UNKNOWN = 1
_SPAN = 60.0
#: Bytes of disk space reserved for each log: a few hundred entries.
_RESERVE = 128 << 10


class _Log:
    """One append-only log, which counts how much each caller wrote to the present file.

    Args:
        path: The present file.
        limit: Bytes of one file.
        kept: Older files that are kept.
    """

    def __init__(self, path: Path, limit: int, kept: int) -> None:
        self.path = path
        self._limit = limit
        self._kept = kept
        self._file = -1
        self._reserved = 0  # where the reserve ends
        self._used: Counter[str] = Counter()

    def has_room(self, who: str, line: bytes) -> bool:
        """Return whether an entry is within the caller's share of the present file."""
        self._open()
        return self._used[who] + len(line) <= self._limit * _SHARE

    def append(self, who: str, line: bytes) -> None:
        """Append an entry.

        Raises:
            OSError: It cannot be written.
        """
        self._open()
        size = os.fstat(self._file).st_size
        if size and size + len(line) > self._limit:
            self._rotate()
            size = os.fstat(self._file).st_size
        self._reserve(size + len(line))
        written = os.write(self._file, line)
        if written < len(line):
            os.ftruncate(self._file, size)
            self._reserved = 0
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self._used[who] += len(line)

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """Yield the entries of the present file and the one before it."""
        for place in (self.path, _older(self.path, 1)):
            with suppress(OSError):
                for line in reversed(place.read_bytes().splitlines()):
                    with suppress(msgspec.DecodeError):  # the service was killed while it wrote
                        yield msgspec.json.decode(line, type=dict[str, Any])

    def prepare(self) -> None:
        """Open the file and reserve space for it, if the disk has room."""
        with suppress(OSError):
            self._open()

    def close(self) -> None:
        """Close the file."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open(self) -> None:
        if self._file >= 0:
            return
        self._file = os.open(
            self.path,
            os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )
        self._used.clear()
        self._reserved = 0
        self._reserve(os.fstat(self._file).st_size)
        with open(os.dup(self._file), "rb") as file:  # a restart gives nobody a new share
            for line in file:
                with suppress(msgspec.DecodeError, msgspec.ValidationError):
                    self._used[msgspec.json.decode(line, type=_Entry).who] += len(line)

    def _reserve(self, end: int) -> None:
        """Reserve space for further entries, so that requests that end jobs or free space can be
        recorded on a full disk.
        """
        if end + _RESERVE // 2 > self._reserved:
            with suppress(OSError):
                reserve(self._file, end, _RESERVE)
                self._reserved = end + _RESERVE

    def _rotate(self) -> None:
        # The new file first, or others might take the space that the old one gives up.
        fresh = self.path.with_name(f"{self.path.name}.new")
        try:
            made = os.open(
                fresh,
                os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC,
                0o600,
            )
        except OSError:  # no room for a file: the old one becomes longer than its limit
            return
        with suppress(OSError):
            reserve(made, 0, _RESERVE)
        with suppress(OSError):
            os.ftruncate(self._file, os.fstat(self._file).st_size)
        os.close(made)
        self.close()
        for number in range(self._kept - 1, -1, -1):
            with suppress(FileNotFoundError):
                os.replace(_older(self.path, number), _older(self.path, number + 1))
        os.replace(fresh, self.path)
        self._open()


class _Entry(msgspec.Struct):
    who: str = ""


def _older(path: Path, number: int) -> Path:
    return path.with_name(f"{path.name}.{number}") if number else path


class Audit:
    """The audit log of a node.

    Args:
        state: icecore's state directory.
        limit: Bytes of one file.
        clock: Seconds.

    Attributes:
        path: The present file of changes.
    """

    def __init__(
        self,
        state: Path,
        limit: int = 16 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        folder = private_state(state, FOLDER)
        self.path = folder / "audit.jsonl"
        self._changes = _Log(self.path, limit, _KEPT)
        self._more = _Log(folder / "audit-more.jsonl", limit, _KEPT_OF_OTHERS)
        self._refused = _Log(folder / "audit-refused.jsonl", limit, _KEPT_OF_OTHERS)
        for log in (self._changes, self._more, self._refused):
            log.prepare()
        self._lock = threading.Lock()
        self._clock = clock
        self._began = clock()
        self._recorded: Counter[str] = Counter()
        self._repeated: dict[bytes, tuple[dict[str, Any], int]] = {}

    def write(self, **fields: Any) -> None:
        """Append an entry about a change.

        Args:
            fields: ``who`` is the caller, whose share it uses.

        Raises:
            OSError: It cannot be written; the caller must not make the change.
        """
        who, line = _encoded(fields)
        with self._lock:
            log = self._changes if self._changes.has_room(who, line) else self._more
            log.append(who, line)

    def refuse(self, **fields: Any) -> None:
        """Append a refusal. Of repeated ones, and of those beyond a caller's share, only the number
        is written, once a minute.

        Args:
            fields: ``who`` is the caller; empty: all callers without a valid token, who have one
                share.

        Raises:
            OSError: It cannot be written.
        """
        with self._lock:
            if self._clock() - self._began >= _SPAN:
                self._count_refusals()
            who = str(fields["who"])
            about = msgspec.json.encode(
                jsonable({key: value for key, value in fields.items() if key != "from"})
            )
            if about not in self._repeated:
                if self._is_recorded(who, fields):
                    self._repeated[about] = fields, 0
                    return
                # One entry counts all others of the caller.
                fields = {"who": who}
                about = msgspec.json.encode(jsonable(fields))
            first, number = self._repeated.get(about, (fields, 0))
            self._repeated[about] = first, number + 1

    def newest_first(self) -> Iterator[dict[str, Any]]:
        """Yield the newest entries of all logs. Counts of refusals come up to a minute late."""
        logs = [log.newest_first() for log in (self._changes, self._more, self._refused)]
        yield from heapq.merge(*logs, key=lambda entry: float(entry.get("at", 0)), reverse=True)

    def close(self) -> None:
        """Write the counts of refusals, and close the files."""
        with self._lock:
            with suppress(OSError):
                self._count_refusals()
            for log in (self._changes, self._more, self._refused):
                log.close()

    def _is_recorded(self, who: str, fields: dict[str, Any]) -> bool:
        """Record a refusal with its subject, if the caller's share permits."""
        if self._recorded[who] >= (_REFUSALS if who else _REFUSALS_OF_UNKNOWN):
            return False
        _, line = _encoded({"state": "refused", **fields})
        if not self._refused.has_room(who, line):
            return False
        self._refused.append(who, line)
        self._recorded[who] += 1
        return True

    def _count_refusals(self) -> None:
        """Write the numbers of refusals that the last minute left out. Beyond a caller's share of
        the file, one entry counts all.
        """
        counted, self._repeated = self._repeated, {}
        self._recorded.clear()
        self._began = self._clock()
        left: Counter[str] = Counter()
        for first, number in counted.values():
            who, line = _encoded({"state": "refused", **first, "more": number})
            if not number:
                continue
            if len(first) > 1 and self._refused.has_room(who, line):
                self._refused.append(who, line)
            else:
                left[who] += number
        for who, number in left.items():
            self._refused.append(*_encoded({"state": "refused", "who": who, "more": number}))


def _encoded(fields: dict[str, Any]) -> tuple[str, bytes]:
    """Return the caller of an entry, and its line."""
    line = msgspec.json.encode(jsonable({"at": time.time(), **fields})) + b"\n"
    return str(jsonable(fields.get("who", ""))), line
