"""What the core says while it works: plain event records handed to a sink, never printed by the
core itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from icecore.text import jsonable

Value = str | int | float | bool | None | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        name: Dotted name, e.g. ``dump.window`` (docs/events.md lists them all).
        fields: JSON-able values; bytes in ``bytes``, durations in ``seconds``. Paths and arguments
            are as `os.fsdecode` gives them.
        at: Unix time in seconds.
    """

    name: str
    fields: dict[str, Value] = field(default_factory=dict)
    at: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Value]:
        """Return the event as one flat JSON object: ``event``, ``at`` and the fields, as
        `icecore.text.jsonable` gives them.
        """
        data: dict[str, Value] = jsonable({"event": self.name, "at": self.at, **self.fields})
        return data


_PROGRESS_SECONDS = 0.2

Sink = Callable[[Event], None]
#: Is told of bytes as they are done, and of how many are done of how many; both thread-safe.
Advance = Callable[[int], None]
Progress = Callable[[int, int], None]


def discard(event: Event) -> None:
    """A sink that drops everything."""


def unwatched(count: int) -> None:
    """An ``Advance`` that nobody listens to."""


class Phase:
    """A running phase: add bytes to it while it lasts; any thread may say how far it is."""

    def __init__(self, sink: Sink, name: str, about: Mapping[str, Value]) -> None:
        self.bytes = 0
        self.fields: dict[str, Value] = {}
        self._sink = sink
        self._name, self._about = name, about
        self._lock = threading.Lock()
        self._told, self._furthest = time.monotonic(), 0

    def progress(self, done: int, total: int) -> None:
        """``done`` of ``total`` bytes are done: an event with ``state`` progress, five a second at
        most, and never less than before.
        """
        now = time.monotonic()
        with self._lock:
            if now - self._told < _PROGRESS_SECONDS or done < self._furthest:
                return
            self._told, self._furthest = now, done
            self._sink(
                Event(
                    self._name,
                    {"state": "progress", **self._about, "bytes": min(done, total), "total": total},
                )
            )

    def counter(self, total: int) -> Advance:
        """A function that is told of bytes as they are done, of ``total`` in all."""
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
    """Emit ``name`` with ``state`` begin, then end or failed, with ``seconds``, ``bytes`` and
    ``gb_per_s`` of what lay between.
    """
    sink(Event(name, {"state": "begin", **fields}))
    running = Phase(sink, name, fields)
    started = time.perf_counter()
    try:
        yield running
    except BaseException as error:
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
    seconds = time.perf_counter() - started
    rate = running.bytes / seconds / 1e9 if seconds else 0.0
    done: dict[str, Value] = {"state": "end", "seconds": seconds}
    if running.bytes:
        done |= {"bytes": running.bytes, "gb_per_s": rate}
    sink(Event(name, {**done, **fields, **running.fields}))
