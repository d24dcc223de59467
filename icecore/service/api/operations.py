"""The operations of a node: starting within bounds, watching, cancelling, and recovery after a
restart of the service.

Each operation is a process in its own session (docs/decisions/032-operations-are-processes.md). The
process holds an inherited lock from its creation on, so a new service knows without a race which
operations still run. All methods run in the service's event loop.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from icecore.errors import IcecoreError, NotFound, UsageError
from icecore.private import private_state
from icecore.service.api import operation_files as files
from icecore.service.api import workers
from icecore.service.api.journal import Reader
from icecore.service.api.models import Error, Operation, State
from icecore.service.api.operation_files import Process, Result, Stored
from icecore.service.api.problems import Busy, Conflict, problem_of_fields
from icecore.service.api.tokens import FOLDER

_POLL_SECONDS = 0.1
_KEPT_SECONDS = 7 * 86400.0
_KEPT_PER_CALLER = 1000
_QUEUED_PER_CALLER = 100
KEY_SECONDS = 86400.0
_BACK_OFF = (1.0, 60.0)
_WRITE_AGAIN_SECONDS = 10.0


@dataclass(frozen=True)
class Bounds:
    """Most operations at a time: of the node and of one caller; most supervised jobs of one caller."""

    node: int = 8
    caller: int = 4
    supervised: int = 64


@dataclass
class _Entry:
    """One operation as this service knows it."""

    stored: Stored
    directory: Path
    process: Process | None = None
    result: Result | None = None
    child: subprocess.Popen[bytes] | None = None
    state: State = "queued"
    attempt: int = 0
    asked: bool = False  # to end; the file "cancel" says it to the worker and the next service
    written: bool = False  # the result is on disk
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def cancelled(self) -> bool:
        """Whether it was asked to end."""
        return self.asked or (self.directory / "cancel").exists()


class Operations:
    """The operations of a node.

    Args:
        state: icecore's state directory.
        worker: The command line of a worker, without the operation's directory.
        bounds: How many run at a time.

    Attributes:
        descriptors: Soft and hard limit on descriptors of workers and their jobs; None: this
            process's.
    """

    def __init__(
        self, state: Path, worker: Sequence[str] = (), bounds: Bounds | None = None
    ) -> None:
        self._folder = private_state(state, FOLDER, files.FOLDER)
        self._worker = list(worker) or [sys.executable, "-P", "-m", "icecore.worker"]
        self._bounds = bounds or Bounds()
        self.descriptors: tuple[int, int] | None = None
        self._entries: dict[str, _Entry] = {}
        self._keys: dict[tuple[str, str], str] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._unwritten: dict[str, _Entry] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._held = False  # nothing is started or forgotten now

    # -- the service starts and ends

    async def recover(self) -> None:
        """Adopt running operations, read the results of ended ones, and start waiting ones."""
        for directory in sorted(self._folder.iterdir()):
            if directory.name.endswith(".new"):  # its service was killed before it answered
                shutil.rmtree(directory, ignore_errors=True)
                continue
            stored = files.read_stored(directory)
            if stored is None:
                continue
            self._know(_Entry(stored, directory))
        # An entry is "queued" until it is recovered, so that nothing may be started before that: an
        # operation that has ended would run again.
        self._held = True
        try:
            for entry in sorted(self._entries.values(), key=lambda one: one.stored.created):
                self._recover(entry)
        finally:
            self._held = False
        self._forget_old()
        self._pump()

    def _recover(self, entry: _Entry) -> None:
        entry.process = files.read_process(entry.directory)
        entry.attempt = entry.process.attempt if entry.process else 0
        result = files.read_result(entry.directory)
        if result is not None:
            self._settle(entry, result, written=True)
            return
        if not files.is_free(entry.directory):
            self._watch(entry)
            return
        if entry.process is not None or entry.cancelled:
            self._lost(entry)

    async def close(self) -> None:
        """Stop watching; all operations continue."""
        self._closing = True
        self._write()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    # -- what a client does

    def create(self, wanted: Stored) -> tuple[Operation, bool]:
        """Start an operation, or queue it.

        Returns:
            The operation, and whether it is new: the same key and digest from the same caller
            return the same operation.

        Raises:
            Conflict: The key belongs to another request.
            Busy: The caller has too many operations.
            IcecoreError: It cannot be recorded.
        """
        known = self._by_key(wanted)
        if known is not None:
            return known, False
        self._require_room(wanted)
        directory = self._folder / wanted.id
        making = self._folder / f"{wanted.id}.new"
        try:
            making.mkdir(mode=0o700)
            files.write(making, "request.json", wanted)
            os.rename(making, directory)
        except OSError as error:
            shutil.rmtree(making, ignore_errors=True)
            raise IcecoreError(
                f"the operation cannot be recorded: {error.strerror}",
                cure="free space on the node",
            ) from error
        entry = _Entry(wanted, directory)
        self._know(entry)
        self._pump()
        return self._as_model(entry), True

    def get(self, id: str) -> Operation:
        """Return an operation.

        Raises:
            NotFound: There is none.
        """
        return self._as_model(self._entry(id))

    def directory(self, id: str) -> Path:
        """Return the directory of an operation, for readers of its records.

        Raises:
            NotFound: There is none.
        """
        return self._entry(id).directory

    def all(self) -> list[Operation]:
        """Return all operations, oldest first."""
        entries = sorted(
            self._entries.values(), key=lambda one: (one.stored.created, one.stored.id)
        )
        return [self._as_model(entry) for entry in entries]

    def supervising(self) -> Mapping[str, str]:
        """Return the ids of the operations that supervise jobs now, by the jobs' names."""
        return {
            entry.stored.job: id
            for id, entry in self._entries.items()
            if entry.stored.supervised and entry.result is None
        }

    def cancel(self, id: str, name: str = "INT") -> Operation:
        """Cancel an operation, as Ctrl-C cancels a command; do nothing if it has ended.

        Args:
            name: The signal: INT, TERM, HUP or USR1.

        Raises:
            NotFound: There is none.
            UsageError: The signal is not one of these.
        """
        entry = self._entry(id)
        number = workers.SIGNALS.get(name.upper())
        if number is None:
            raise UsageError(f"signal {name}", cure=f"one of {', '.join(workers.SIGNALS)}")
        if not entry.stored.supervised:
            number = signal.SIGINT
        if entry.result is None:
            entry.asked = True
            with suppress(OSError):  # a full disk; the signal comes all the same
                (entry.directory / "cancel").touch(mode=0o600)
            if entry.state == "queued":
                self._lost(entry)
            else:
                workers.send(entry.directory, entry.child, number)
        return self._as_model(entry)

    async def wait(self, id: str, seconds: float) -> Operation:
        """Return an operation once it has ended, or after a time."""
        entry = self._entry(id)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while entry.result is None:
                    await entry.changed.wait()
        return self._as_model(entry)

    async def records(self, id: str, after: int = 0) -> AsyncIterator[tuple[int, bytes] | None]:
        """Yield the records of an operation after an offset until it ends; None: nothing new."""
        entry = self._entry(id)
        reader = Reader(entry.directory, after)
        while True:
            over = entry.result is not None  # before reading: nothing is written after the result
            empty = True
            for record in reader.read():
                empty = False
                yield record
            if not empty:
                continue
            if over:
                return
            yield None
            with suppress(TimeoutError):
                async with asyncio.timeout(_POLL_SECONDS):
                    await entry.changed.wait()

    # -- processes

    def _pump(self) -> None:
        """Start what waits and has its turn, oldest first."""
        if self._closing or self._held:
            return
        waiting = [entry for entry in self._entries.values() if entry.state == "queued"]
        self._held = True  # one that cannot start ends at once, and would begin the others here
        try:
            for entry in sorted(waiting, key=lambda one: one.stored.created):
                if entry.stored.supervised or self._has_turn(entry.stored.caller_key):
                    self._start(entry)
        finally:
            self._held = False

    def _has_turn(self, caller: str) -> bool:
        busy = [
            one
            for one in self._entries.values()
            if one.state == "running" and not one.stored.supervised
        ]
        of_caller = sum(one.stored.caller_key == caller for one in busy)
        return len(busy) < self._bounds.node and of_caller < self._bounds.caller

    def _start(self, entry: _Entry) -> None:
        try:
            descriptor = files.lock(entry.directory)
        except OSError as error:
            self._fail(entry, f"cannot start a process: {error.strerror}")
            return
        if descriptor < 0:  # somebody else's worker has it; it writes the result
            self._watch(entry)
            return
        entry.attempt += 1
        entry.state = "running"
        try:
            entry.child = workers.spawn(
                self._worker, entry.directory, descriptor, entry.attempt, self.descriptors
            )
        except OSError as error:
            self._fail(entry, f"cannot start a process: {error.strerror}")
            return
        finally:
            os.close(descriptor)
        self._watch(entry)

    def _watch(self, entry: _Entry) -> None:
        entry.state = "running"
        task = asyncio.get_running_loop().create_task(self._until_end(entry))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_end(self, entry: _Entry) -> None:
        """Wait until the worker has ended; record the result."""
        pidfd = await workers.open_worker(entry.directory, entry.child)
        if pidfd >= 0:
            try:
                await workers.readable(pidfd)
            finally:
                os.close(pidfd)
        if entry.child is not None:
            entry.child.wait()  # at once: the pidfd says that it has ended
            entry.child = None
        entry.process = files.read_process(entry.directory)
        result = files.read_result(entry.directory)
        if result is not None:
            self._finish(entry, result, written=True)
        elif entry.stored.supervised and not entry.cancelled:
            await self._again(entry)
        else:
            self._lost(entry)

    async def _again(self, entry: _Entry) -> None:
        """Restart the supervisor of a job, after a growing delay."""
        entry.state = "queued"
        least, most = _BACK_OFF
        await asyncio.sleep(min(most, least * 2 ** min(entry.attempt - 1, 10)))
        if entry.state == "queued":  # it was not cancelled meanwhile
            self._start(entry)

    def _lost(self, entry: _Entry) -> None:
        """Handle a worker that ended without a result, or never began."""
        if entry.cancelled:
            self._finish(entry, Result(exit_status=128 + signal.SIGINT, ended=time.time()))
            return
        if entry.stored.supervised:
            entry.state = "queued"
            return
        self._fail(
            entry, f"the process of operation {entry.stored.id} was killed", cure="try again"
        )

    def _fail(self, entry: _Entry, message: str, *, cure: str = "") -> None:
        error = {"class": "IcecoreError", "message": message, "cure": cure, "exit_code": 1}
        self._finish(entry, Result(exit_status=1, ended=time.time(), error=error))

    def _finish(self, entry: _Entry, result: Result, *, written: bool = False) -> None:
        self._settle(entry, result, written=written)
        entry.changed.set()
        self._forget_old()
        self._pump()

    def _settle(self, entry: _Entry, result: Result, *, written: bool) -> None:
        """Note how an operation ended: in memory at once, on disk as soon as it can be written."""
        entry.result = result
        entry.state = _final_state(result, cancelled=entry.cancelled)
        shorter = entry.stored.environment is not None or bool(entry.stored.command)
        if shorter:  # they may be large and hold secrets, and nobody needs them now
            entry.stored = msgspec.structs.replace(entry.stored, environment=None, command=[])
        entry.written = written
        if shorter or not written:
            self._unwritten[entry.stored.id] = entry
            self._write()

    def _write(self) -> None:
        """Write what is not on disk yet; try again later if it fails, at the latest at the next
        start, which comes to the same conclusions.
        """
        for id, entry in list(self._unwritten.items()):
            assert entry.result is not None
            try:
                # In this order: what is left of the request must not run.
                if not entry.written:
                    files.write(entry.directory, "result.json", entry.result)
                    entry.written = True
                files.write(entry.directory, "request.json", entry.stored)
            except OSError:  # above all a full disk
                continue
            del self._unwritten[id]
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._unwritten and not self._closing:
            loop = asyncio.get_running_loop()
            self._timer = loop.call_later(_WRITE_AGAIN_SECONDS, self._write)

    # -- the table

    def _entry(self, id: str) -> _Entry:
        try:
            return self._entries[id]
        except KeyError:
            raise unknown(id) from None

    def _know(self, entry: _Entry) -> None:
        self._entries[entry.stored.id] = entry
        if entry.stored.key:
            self._keys[entry.stored.caller_key, entry.stored.key] = entry.stored.id

    def _by_key(self, wanted: Stored) -> Operation | None:
        id = self._keys.get((wanted.caller_key, wanted.key)) if wanted.key else None
        if id is None:
            return None
        entry = self._entries[id]
        if entry.stored.created + KEY_SECONDS < time.time():
            return None
        if entry.stored.digest != wanted.digest:
            raise Conflict("this Idempotency-Key belongs to another request", cure="use a new key")
        return self._as_model(entry)

    def _require_room(self, wanted: Stored) -> None:
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

    def _forget_old(self) -> None:
        """Remove the directories of operations that ended long ago, and of a caller's oldest of many."""
        if self._held:
            return
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
            self._unwritten.pop(entry.stored.id, None)
            if self._keys.get((entry.stored.caller_key, entry.stored.key)) == entry.stored.id:
                del self._keys[entry.stored.caller_key, entry.stored.key]

    def _as_model(self, entry: _Entry) -> Operation:
        stored, result = entry.stored, entry.result
        if entry.process is None:
            entry.process = files.read_process(entry.directory)
        error: Error | None = None
        if result is not None and result.error is not None:
            error = problem_of_fields(result.error)
        return Operation(
            id=stored.id,
            kind=stored.kind,
            state=entry.state,
            caller=stored.caller,
            owner=stored.owner,
            job=stored.job,
            snapshot=stored.snapshot,
            created=stored.created,
            started=entry.process.started if entry.process else None,
            ended=result.ended if result else None,
            supervised=stored.supervised,
            attempt=max(1, entry.attempt),
            exit_status=result.exit_status if result else None,
            error=error,
            result=result.result if result else {},
        )


def unknown(id: str) -> NotFound:
    """Return the error for an operation that does not exist, or that the caller may not see."""
    return NotFound(f"there is no operation {id}", cure="GET /v1/operations lists them")


def new_id() -> str:
    """Return the id of a new operation."""
    return secrets.token_hex(16)


def digest_of(*parts: bytes) -> str:
    """Return the digest of a request."""
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()


def _final_state(result: Result, *, cancelled: bool) -> State:
    if result.exit_status == 0:
        return "succeeded"
    return "cancelled" if cancelled else "failed"
