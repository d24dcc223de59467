"""The audit log: one JSON object per line for each requested change and each refusal.

``STATE/service/audit.jsonl`` is append-only. At its size limit it becomes ``audit.jsonl.1``; older
files are renumbered, and the oldest is removed.
"""

from __future__ import annotations

import os
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from icecore.private import private_state
from icecore.service.api.tokens import FOLDER
from icecore.text import jsonable

_KEPT = 4
#: Refusals in full, of one caller and of all that nobody knows, in `_SPAN` seconds.
_REFUSALS = 60
_REFUSALS_OF_UNKNOWN = 1
_SPAN = 60.0


class Audit:
    """The audit log of a node.

    Args:
        state: icecore's state directory.
        limit: Bytes of one file.
        clock: Seconds.
    """

    def __init__(
        self,
        state: Path,
        limit: int = 16 << 20,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path = private_state(state, FOLDER) / "audit.jsonl"
        self._limit = limit
        self._lock = threading.Lock()
        self._file = -1
        self._clock = clock
        self._began = clock()
        self._refused: Counter[str] = Counter()

    def refuse(self, **fields: Any) -> None:
        """Append a refusal; beyond a caller's share, only their number is written, once a minute.

        So nobody rotates the entries of others out by being refused.

        Args:
            fields: ``who`` is the caller; empty: all whom nobody knows, who have one share.

        Raises:
            OSError: It cannot be written.
        """
        self._count_refusals()
        who = str(fields["who"])
        self._refused[who] += 1
        if self._refused[who] <= (_REFUSALS if who else _REFUSALS_OF_UNKNOWN):
            self.write(state="refused", **fields)

    def _count_refusals(self) -> None:
        """Write how many refusals were left out, once their minute is over."""
        if self._clock() - self._began < _SPAN:
            return
        refused, self._refused = self._refused, Counter()
        self._began = self._clock()
        for who, number in refused.items():
            more = number - (_REFUSALS if who else _REFUSALS_OF_UNKNOWN)
            if more > 0:
                self.write(state="refused", who=who, more=more)

    def write(self, **fields: Any) -> None:
        """Append one entry.

        Raises:
            OSError: It cannot be written; the caller must not make the change.
        """
        line = msgspec.json.encode(jsonable({"at": time.time(), **fields})) + b"\n"
        with self._lock:
            if self._file < 0:
                self._open()
            size = os.fstat(self._file).st_size
            if size and size + len(line) > self._limit:
                self._rotate()
            os.write(self._file, line)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            if self._file >= 0:
                os.close(self._file)
                self._file = -1

    def _open(self) -> None:
        self._file = os.open(
            self.path,
            os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC,
            0o600,
        )

    def _rotate(self) -> None:
        os.close(self._file)
        self._file = -1
        for number in range(_KEPT - 1, 0, -1):
            older = self.path.with_name(f"audit.jsonl.{number}")
            if older.exists():
                os.replace(older, self.path.with_name(f"audit.jsonl.{number + 1}"))
        os.replace(self.path, self.path.with_name("audit.jsonl.1"))
        self._open()
