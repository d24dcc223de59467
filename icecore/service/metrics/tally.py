"""Count the work of all processes of a node. Each process adds its counts to
``STATE/metrics/totals.json``, under a lock, when its operation ends. So counters survive the
processes, and a scrape sees all of them.

Counters are advisory: counts that cannot be written are dropped, and a damaged file counts as empty.
"""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import msgspec

from icecore.errors import IcecoreError
from icecore.events import Event, Sink, Value
from icecore.private import create_private, private_state
from icecore.service.metrics import families as known
from icecore.service.metrics.families import Family

FOLDER = "metrics"
_FILE = "totals.json"
_SEPARATOR = "\t"
#: For another process that adds at the end of an operation, too.
WAIT_SECONDS = 2.0
#: A long operation adds what it has counted so far at most this often.
_FLUSH_SECONDS = 10.0
_FLUSH_AFTER = frozenset({"restore.resident", "store.requests"})
_LAST = {"gc": known.LAST_GC, "sync": known.LAST_SYNC}
_SUPERVISION = "run."

_REQUESTS = (known.REQUESTS, known.REQUEST_FAILURES, known.REQUEST_BYTES, known.REQUEST_SECONDS)

Labels = tuple[str, ...]
Counts = dict[str, dict[Labels, float]]


#: Calls, failures, bytes and seconds of one operation of a back end.
Requests = tuple[int, int, int, float]


class Counted(Protocol):
    """The counts of one kind of request (`icecore.store.backend.metrics.Counts`)."""

    calls: int
    failures: int
    bytes: int
    seconds: float


Meter = Callable[[], Mapping[str, Counted]]


class Totals(msgspec.Struct, frozen=True):
    """Counters: value by metric and labels (joined by tabs). ``since`` is the Unix time of the first
    count.
    """

    since: float = 0.0
    values: dict[str, dict[str, float]] = {}

    def of(self, family: Family) -> Mapping[Labels, float]:
        """Return the values of a metric by its labels."""
        found = self.values.get(family.name, {})
        return {tuple(key.split(_SEPARATOR)) if key else (): one for key, one in found.items()}


def read(state: Path) -> Totals:
    """Return the counters of this node."""
    try:
        return msgspec.json.decode((state / FOLDER / _FILE).read_bytes(), type=Totals)
    except (OSError, msgspec.DecodeError):
        return Totals()


def add(state: Path, counts: Counts, *, seconds: float = 0.0) -> None:
    """Add to the counters of this node. Gauges replace the old value.

    Args:
        seconds: To wait for another process that adds at the same time, which may be stopped.

    Raises:
        OSError: It cannot be written; BlockingIOError: the other process takes too long.
        UsageError: The directory is not this user's.
    """
    folder = private_state(state, FOLDER)
    lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        _take(lock, seconds)
        before = read(state)
        values = {name: dict(found) for name, found in before.values.items()}
        for name, found in counts.items():
            family, total = known.FAMILIES[name], values.setdefault(name, {})
            for labels, value in found.items():
                key = _SEPARATOR.join(_bounded(family, labels, total))
                earlier = 0.0 if family.kind == "gauge" else total.get(key, 0.0)
                total[key] = earlier + value
        new = folder / f"{_FILE}.new"
        with open(create_private(new), "wb") as file:
            file.write(msgspec.json.encode(Totals(before.since or time.time(), values)))
        os.replace(new, folder / _FILE)
    finally:
        os.close(lock)


def _take(lock: int, seconds: float) -> None:
    end = time.monotonic() + seconds
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.01)
        else:
            return


def _bounded(family: Family, labels: Labels, total: Mapping[str, float]) -> Labels:
    """Return the labels of a value: beyond `families.MOST_JOBS`, a job has no label of its own."""
    if "job" not in family.labels or any(key.startswith(f"{labels[0]}\t") for key in total):
        return labels
    jobs = {key.partition(_SEPARATOR)[0] for key in total}
    return labels if len(jobs) < known.MOST_JOBS else (known.OTHER_JOBS, *labels[1:])


class Tally:
    """Counts the events of one process; every method may be called from any thread.

    Args:
        state: icecore's state directory.
    """

    def __init__(self, state: Path) -> None:
        self._state = state
        self._lock = threading.Lock()
        self._counts: Counts = {}
        self._frozen = False
        self._flushed = time.monotonic()
        self._meters: list[tuple[Meter, dict[str, Requests]]] = []

    def watch(self, meter: Meter) -> None:
        """Count the requests of a back end while it is open. Events that report them when it is
        closed then count no more.
        """
        with self._lock:
            self._meters.append((meter, {}))

    def hears(self, emit: Sink) -> Sink:
        """Return a sink that counts an event and passes it on."""

        def heard(event: Event) -> None:
            self.event(event)
            emit(event)

        return heard

    def forget(self, meter: Meter) -> None:
        """Count the last requests of a back end that was closed."""
        with self._lock:
            self._read_meters()
            self._meters = [one for one in self._meters if one[0] != meter]

    def event(self, event: Event) -> None:
        """Count an event."""
        with self._lock:
            if event.name != "store.requests" or not self._meters:
                for family, labels, value in counts_of(event):
                    self._add(family, labels, value)
            late = time.monotonic() - self._flushed > _FLUSH_SECONDS
            if event.name == "dump.window":
                self._frozen = event.fields.get("state") in ("begin", "progress")
            if self._frozen:  # the job must not wait for a file
                return
        if (
            event.name in _FLUSH_AFTER
            or event.name.startswith(_SUPERVISION)
            or (late and event.fields.get("state") != "progress" and event.name != "store.upload")
        ):
            self.flush()

    def count(self, family: Family, *labels: str, value: float = 1.0) -> None:
        """Count something that is not an event."""
        with self._lock:
            self._add(family, labels, value)

    def flush(self, seconds: float = 0.0) -> None:
        """Add the counts to the totals of the node. While another process does, they are kept for
        the next time.

        Args:
            seconds: To wait for the other process.
        """
        with self._lock:
            self._read_meters()
            counts, self._counts = self._counts, {}
            self._flushed = time.monotonic()
        if not counts:
            return
        try:
            add(self._state, counts, seconds=seconds)
        except BlockingIOError:
            with self._lock:
                for name, found in counts.items():
                    for labels, value in found.items():
                        self._keep(known.FAMILIES[name], labels, value)
        except (OSError, IcecoreError):
            pass  # metrics fail no operation

    def tick(self) -> None:
        """Add the counts to the totals if the last time is long ago."""
        if time.monotonic() - self._flushed > _FLUSH_SECONDS:
            self.flush()

    def _read_meters(self) -> None:
        """Count the requests since the last reading."""
        for meter, before in self._meters:
            for operation, now in meter().items():
                counted = (now.calls, now.failures, now.bytes, now.seconds)
                earlier = before.get(operation, (0, 0, 0, 0.0))
                for family, value, known_value in zip(_REQUESTS, counted, earlier, strict=True):
                    if value != known_value:
                        self._add(family, (operation,), value - known_value)
                before[operation] = counted

    def _add(self, family: Family, labels: Labels, value: float) -> None:
        clean = tuple(label.replace(_SEPARATOR, " ") for label in labels)
        found = self._counts.setdefault(family.name, {})
        found[clean] = value if family.kind == "gauge" else found.get(clean, 0.0) + value

    def _keep(self, family: Family, labels: Labels, value: float) -> None:
        """Put back what could not be added; a newer gauge stands."""
        found = self._counts.setdefault(family.name, {})
        if family.kind != "gauge":
            found[labels] = found.get(labels, 0.0) + value
        else:
            found.setdefault(labels, value)


@contextmanager
def counted(state: Path, operation: str, emit: Sink) -> Iterator[Sink]:
    """Count an operation: its events, how long it takes, and whether and why it fails.

    Yields:
        The sink for its events. Events after the end count as well.
    """
    tally = Tally(state)
    began, failed = time.monotonic(), ""
    try:
        yield tally.hears(emit)
    except Exception as error:
        failed = type(error).__name__ if isinstance(error, IcecoreError | OSError) else "Internal"
        raise
    finally:
        tally.count(known.OPERATIONS, operation, "failed" if failed else "done")
        tally.count(known.OPERATION_SECONDS, operation, value=time.monotonic() - began)
        if failed:
            tally.count(known.FAILURES, operation, failed)
        elif operation in _LAST:
            tally.count(_LAST[operation], value=time.time())
        tally.flush(WAIT_SECONDS)


Count = tuple[Family, Labels, float]


def counts_of(event: Event) -> Iterator[Count]:
    """Yield the counts of an event."""
    fields = event.fields
    if fields.get("state") in ("end", "failed"):
        yield from _phase(event.name, fields)
    match event.name:
        case "dump.done":
            yield from _dumped(fields)
        case "dump.fallback":
            yield known.FALLBACKS, (), 1
        case "store.retry":
            yield known.RETRIES, (_text(fields, "operation"),), 1
        case "store.failover":
            yield known.FAILOVERS, (), 1
        case "store.requests":
            operation = (_text(fields, "operation"),)
            for family, key in zip(
                _REQUESTS, ("calls", "failures", "bytes", "seconds"), strict=True
            ):
                yield family, operation, _number(fields, key)
        case "store.cache":
            for result in ("hit", "missed"):
                yield known.CACHE_BYTES, (result,), _number(fields, f"{result}_bytes")
        case name if name.startswith(_SUPERVISION):
            yield known.SUPERVISION, (name.removeprefix(_SUPERVISION),), 1


def _phase(name: str, fields: Mapping[str, Value]) -> Iterator[Count]:
    result = _text(fields, "state")
    yield known.PHASES, (name, result), 1
    yield known.PHASE_SECONDS, (name,), _number(fields, "seconds")
    yield known.PHASE_BYTES, (name,), _number(fields, "bytes")
    if result != "end":
        return
    codecs = fields.get("by_codec")
    if isinstance(codecs, dict):
        for codec, stored in codecs.items():
            yield known.STORED, (codec,), float(stored)
    if name == "gc.delete":
        yield known.GC_FREED, (), _number(fields, "bytes")


def _dumped(fields: Mapping[str, Value]) -> Iterator[Count]:
    job, window = _text(fields, "job"), _number(fields, "window_seconds")
    least = next((str(bound) for bound in known.WINDOW_BUCKETS if window <= bound), "+Inf")
    yield known.WINDOW, (job, least), 1
    yield known.WINDOW, (job, "sum"), window
    for kind in ("logical", "changed", "stored", "pre_copied"):
        yield known.DUMPED, (kind,), _number(fields, kind)
    if fields.get("spilled"):
        yield known.SPILLS, (), 1


def _text(fields: Mapping[str, Value], name: str) -> str:
    return str(fields.get(name, ""))


def _number(fields: Mapping[str, Value], name: str) -> float:
    value = fields.get(name)
    return float(value) if isinstance(value, int | float) else 0.0
