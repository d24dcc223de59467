"""Events: what the core reports while it works, as records that it hands to a sink.

The core never prints.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec

from icecore.text import jsonable

Value = str | int | float | bool | None | list[Any] | dict[str, Any]


class Event(msgspec.Struct, frozen=True):
    """One event.

    Attributes:
        name: Dotted name, such as ``dump.window`` (docs/reference/events.md lists all).
        fields: Values for JSON; bytes in ``bytes``, durations in ``seconds``. Paths and arguments
            are as `os.fsdecode` returns them.
        at: Unix time in seconds.
    """

    name: str
    fields: dict[str, Value] = msgspec.field(default_factory=dict)
    at: float = msgspec.field(default_factory=time.time)

    def as_json(self) -> dict[str, Value]:
        """Return the event as one flat JSON object: ``event``, ``at`` and the fields, converted by
        `icecore.text.jsonable`.
        """
        data: dict[str, Value] = jsonable({"event": self.name, "at": self.at, **self.fields})
        return data


_PROGRESS_SECONDS = 0.2

Sink = Callable[[Event], None]
#: Callbacks for bytes as they are done, and for bytes done of a total; both must be thread-safe.
Advance = Callable[[int], None]
Progress = Callable[[int, int], None]


def discard(event: Event) -> None:
    """Drop the event."""


def unwatched(count: int) -> None:
    """Ignore progress."""


class Phase:
    """A running phase. The caller adds to ``bytes`` and ``fields``; any thread may report progress."""

    def __init__(self, sink: Sink, name: str, about: Mapping[str, Value]) -> None:
        self.bytes = 0
        self.fields: dict[str, Value] = {}
        self._sink = sink
        self._name, self._about = name, about
        self._lock = threading.Lock()
        self._told, self._furthest = time.monotonic(), 0
        self._over = False

    def progress(self, done: int, total: int) -> None:
        """Report that ``done`` of ``total`` bytes are done.

        Emits an event with ``state`` progress, at most five per second, and never with fewer bytes
        than before.
        """
        now = time.monotonic()
        # A thread does not wait for another one that reports.
        if now - self._told < _PROGRESS_SECONDS or not self._lock.acquire(blocking=False):
            return
        try:
            if self._over or now - self._told < _PROGRESS_SECONDS or done < self._furthest:
                return
            self._told, self._furthest = now, done
            self._sink(
                Event(
                    self._name,
                    {"state": "progress", **self._about, "bytes": min(done, total), "total": total},
                )
            )
        finally:
            self._lock.release()

    def close(self) -> None:
        """Report no more progress: the event of the end is the last one."""
        with self._lock:
            self._over = True

    def counter(self, total: int) -> Advance:
        """Return a callback that adds bytes and reports progress towards ``total``."""
        done, lock = 0, threading.Lock()

        def advance(count: int) -> None:
            nonlocal done
            with lock:
                done += count
                now = done
            self.progress(now, total)

        return advance


@contextmanager
def phase(sink: Sink, name: str, **fields: Value) -> Iterator[Phase]:
    """Emit ``name`` with ``state`` begin and, at the end of the block, with ``state`` end or failed,
    ``seconds``, ``bytes`` and ``gb_per_s``.
    """
    sink(Event(name, {"state": "begin", **fields}))
    running = Phase(sink, name, fields)
    started = time.perf_counter()
    try:
        yield running
    except BaseException as error:
        running.close()
        seconds = time.perf_counter() - started
        sink(
            Event(
                name,
                {
                    "state": "failed",
                    "seconds": seconds,
                    "error": f"{type(error).__name__}: {error}",
                    **fields,
                    **running.fields,
                },
            )
        )
        raise
    running.close()
    seconds = time.perf_counter() - started
    rate = running.bytes / seconds / 1e9 if seconds else 0.0
    done: dict[str, Value] = {"state": "end", "seconds": seconds}
    if running.bytes:
        done |= {"bytes": running.bytes, "gb_per_s": rate}
    sink(Event(name, {**done, **fields, **running.fields}))
