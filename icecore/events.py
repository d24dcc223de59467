"""What the core says while it works: plain event records handed to a sink, never printed by the core itself."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

Value = str | int | float | bool | None | list[Any] | dict[str, Any]


@dataclass(frozen=True)
class Event:
    """One thing that happened.

    Attributes:
        name: Dotted name, e.g. ``dump.window`` (docs/events.md lists them all).
        fields: JSON-able values; bytes in ``bytes``, durations in ``seconds``.
        at: Unix time in seconds.
    """

    name: str
    fields: dict[str, Value] = field(default_factory=dict)
    at: float = field(default_factory=time.time)

    def as_json(self) -> dict[str, Value]:
        """The event as one flat JSON object: ``event``, ``at`` and the fields."""
        data = asdict(self)
        return {"event": data["name"], "at": data["at"], **data["fields"]}


Sink = Callable[[Event], None]


def discard(event: Event) -> None:
    """A sink that drops everything."""


class Phase:
    """A running phase: add bytes to it while it lasts."""

    def __init__(self) -> None:
        self.bytes = 0
        self.fields: dict[str, Value] = {}


@contextmanager
def phase(sink: Sink, name: str, **fields: Value) -> Iterator[Phase]:
    """Emit ``name`` with ``state`` begin, then end or failed, with ``seconds``, ``bytes`` and ``gb_per_s`` of what lay between."""
    sink(Event(name, {"state": "begin", **fields}))
    running = Phase()
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
