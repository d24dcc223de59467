"""The operations that a service knows: how each of them stands, and how many there may be."""

from __future__ import annotations

import asyncio
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import msgspec

from icecore.errors import NotFound
from icecore.service.api import operation_files as files
from icecore.service.api.models import Error, Operation, State
from icecore.service.api.operation_files import Process, Result, Stored
from icecore.service.api.problems import Busy, Conflict, problem_of_fields

_KEPT_SECONDS = 7 * 86400.0
_KEPT_PER_CALLER = 1000
_QUEUED_PER_CALLER = 100
KEY_SECONDS = 86400.0


class Bounds(msgspec.Struct, frozen=True):
    """Most operations at a time: of the node and of one caller; most supervised jobs of one caller."""

    node: int = 8
    caller: int = 4
    supervised: int = 64


class Entry(msgspec.Struct):
    """One operation as this service knows it."""

    stored: Stored
    directory: Path
    process: Process | None = None
    result: Result | None = None
    state: State = "queued"
    attempt: int = 0
    began: float = 0.0  # the attempt, on the monotonic clock
    quick: int = 0  # supervisors in a row that did not last
    not_before: float = 0.0  # when the next attempt may start, on the monotonic clock
    stops: int = 0  # supervisors that were started to stop the job
    asked: int = (
        0  # by which signal to end; the file "cancel" says it to the worker and the next service
    )
    written: bool = False  # the result is on disk
    changed: asyncio.Event = msgspec.field(default_factory=asyncio.Event)

    @property
    def cancelled(self) -> int:
        """The signal that asked it to end; 0: none did."""
        if self.asked:
            return self.asked
        try:
            return files.cancelled_by(self.directory)
        except OSError:  # no descriptor is left; its worker looks, too
            return 0

    def settle(self, result: Result) -> None:
        """Note how it ended."""
        self.result = result
        if result.exit_status == 0:
            self.state = "succeeded"
        else:
            self.state = "cancelled" if self.cancelled else "failed"

    def as_model(self) -> Operation:
        """Return it as the API's resource."""
        stored, result = self.stored, self.result
        if self.process is None:
            self.process = files.read_process(self.directory)
        error: Error | None = None
        if result is not None and result.error is not None:
            error = problem_of_fields(result.error)
        return Operation(
            id=stored.id,
            kind=stored.kind,
            state=self.state,
            caller=stored.caller,
            owner=stored.owner,
            job=stored.job,
            snapshot=stored.snapshot,
            created=stored.created,
            started=self.process.started if self.process else None,
            ended=result.ended if result else None,
            supervised=stored.supervised,
            attempt=max(1, self.attempt),
            exit_status=result.exit_status if result else None,
            error=error,
            result=result.result if result else {},
        )


class Table:
    """The operations that a service knows, with the limits on their number."""

    def __init__(self, bounds: Bounds) -> None:
        self._bounds = bounds
        self._entries: dict[str, Entry] = {}
        self._keys: dict[tuple[str, str], str] = {}

    def __iter__(self) -> Iterator[Entry]:
        """Iterate over a copy, oldest first."""
        return iter(
            sorted(self._entries.values(), key=lambda one: (one.stored.created, one.stored.id))
        )

    def get(self, id: str) -> Entry:
        """Return an operation.

        Raises:
            NotFound: There is none.
        """
        try:
            return self._entries[id]
        except KeyError:
            raise unknown(id) from None

    def add(self, entry: Entry) -> None:
        """Add an operation."""
        self._entries[entry.stored.id] = entry
        if entry.stored.key:
            self._keys[entry.stored.caller_key, entry.stored.key] = entry.stored.id

    def by_key(self, wanted: Stored) -> Entry | None:
        """Return the operation of an earlier request with the same key, if there is one.

        Raises:
            Conflict: The key belongs to another request.
        """
        id = self._keys.get((wanted.caller_key, wanted.key)) if wanted.key else None
        if id is None:
            return None
        entry = self._entries[id]
        if entry.stored.created + KEY_SECONDS < time.time():
            return None
        if entry.stored.digest != wanted.digest:
            raise Conflict("this Idempotency-Key belongs to another request", cure="use a new key")
        return entry

    def require_room(self, wanted: Stored) -> None:
        """Require that the caller has not too many operations that have not ended.

        Raises:
            Busy: It has.
        """
        own = [
            one
            for one in self._entries.values()
            if one.result is None
            and one.stored.caller_key == wanted.caller_key
            and one.stored.supervised == wanted.supervised
        ]
        most = self._bounds.supervised if wanted.supervised else _QUEUED_PER_CALLER
        if len(own) >= most:
            raise Busy(
                f"{wanted.caller} has {len(own)} operations that have not ended",
                cure="wait for some, or cancel them",
            )

    def has_turn(self, caller: str) -> bool:
        """Return whether a waiting operation of a caller may start now."""
        busy = [
            one
            for one in self._entries.values()
            if one.state == "running" and not one.stored.supervised
        ]
        of_caller = sum(one.stored.caller_key == caller for one in busy)
        return len(busy) < self._bounds.node and of_caller < self._bounds.caller

    def forget_old(self) -> list[str]:
        """Remove the directories of operations that ended long ago, and of a caller's oldest of many.

        Returns:
            Their ids.
        """
        gone = []
        ended = [one for one in self._entries.values() if one.result is not None]
        ended.sort(key=lambda one: one.result.ended if one.result else 0.0, reverse=True)
        oldest = time.time() - _KEPT_SECONDS
        newer: Counter[str] = Counter()
        for entry in ended:
            assert entry.result is not None
            newer[entry.stored.caller_key] += 1
            kept = newer[entry.stored.caller_key] <= _KEPT_PER_CALLER
            if kept and entry.result.ended >= oldest:
                continue
            shutil.rmtree(entry.directory, ignore_errors=True)
            del self._entries[entry.stored.id]
            gone.append(entry.stored.id)
            if self._keys.get((entry.stored.caller_key, entry.stored.key)) == entry.stored.id:
                del self._keys[entry.stored.caller_key, entry.stored.key]
        return gone


def unknown(id: str) -> NotFound:
    """Return the error for an operation that does not exist, or that the caller may not see."""
    return NotFound(f"there is no operation {id}", cure="GET /v1/operations lists them")
