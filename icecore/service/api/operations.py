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
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

from icecore.errors import IcecoreError, UsageError
from icecore.private import private_state
from icecore.service.api import operation_files as files
from icecore.service.api import workers
from icecore.service.api.journal import Reader
from icecore.service.api.models import Operation
from icecore.service.api.operation_files import Result, Stored
from icecore.service.api.operation_table import Bounds, Entry, Table
from icecore.service.api.tokens import FOLDER

_POLL_SECONDS = 0.1
#: Until the zygote is started, if no operation needs it earlier.
_WARM_SECONDS = 1.0
_LOOK_AGAIN_SECONDS = 1.0
#: For what is being started when the service ends.
_CLOSE_SECONDS = 5.0
#: Shortest and longest delay before a supervisor is replaced. The longest delay and the start of
#: the supervisor together take less time than a watchdog waits before it ends an abandoned job.
_BACK_OFF = (1.0, 30.0)
#: After a supervisor that ran for longer than this, the delay starts again at the shortest.
_LONG_SECONDS = 600.0
#: Attempts before an operation is given up: supervisors that are killed while they stop the job, or
#: processes that end before they record themselves.
_TRIES = 5
_WRITE_AGAIN_SECONDS = 10.0


class Operations:
    """The operations of a node.

    Args:
        state: icecore's state directory.
        worker: The module, or the file, whose ``main`` an operation's process runs.
        bounds: How many run at a time.

    Attributes:
        descriptors: Soft and hard limit on descriptors of workers and their jobs; None: the
            zygote's.
        priority: The nice value of workers and their jobs; None: the zygote's.
        after_lost: Runs when a worker has ended without a result.
    """

    def __init__(self, state: Path, worker: str = "", bounds: Bounds | None = None) -> None:
        self._folder = private_state(state, FOLDER, files.FOLDER)
        self._starter = workers.Starter(worker or "icecore.worker")
        #: A thread of its own: the zygote answers one request after the other.
        self._starting = ThreadPoolExecutor(1, "zygote")
        self._table = Table(bounds or Bounds())
        self.descriptors: tuple[int, int] | None = None
        self.priority: int | None = None
        self.after_lost: Callable[[], Coroutine[Any, Any, None]] | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._unwritten: dict[str, Entry] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._held = False  # nothing is started or forgotten now
        self._warming: asyncio.TimerHandle | None = None

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
            self._table.add(Entry(stored, directory))
        # An entry is "queued" until it is recovered, so that nothing may be started before that: an
        # operation that has ended would run again.
        self._held = True
        try:
            for entry in self._table:
                self._recover(entry)
        finally:
            self._held = False
        self._forget_old()
        self._pump()
        loop = asyncio.get_running_loop()
        self._warming = loop.call_later(_WARM_SECONDS, self._warm)

    def _warm(self) -> None:
        """Have the first operation find everything imported."""

        def warm() -> None:
            with suppress(workers.StartFailed):  # who starts an operation hears of it
                self._starter.warm()

        self._starting.submit(warm)

    def _recover(self, entry: Entry) -> None:
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
        if self._warming is not None:
            self._warming.cancel()
        self._write()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        # Queued after pending starts. The next service starts operations that have no process.
        closed = self._starting.submit(self._starter.close)
        with suppress(TimeoutError):
            async with asyncio.timeout(_CLOSE_SECONDS):
                await asyncio.shield(asyncio.wrap_future(closed))
        if not closed.done():
            self._starter.kill()
            await asyncio.wrap_future(closed)
        self._starting.shutdown()

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
        known = self._table.by_key(wanted)
        if known is not None:
            return known.as_model(), False
        self._table.require_room(wanted)
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
        entry = Entry(wanted, directory)
        self._table.add(entry)
        self._pump()
        return entry.as_model(), True

    def get(self, id: str) -> Operation:
        """Return an operation.

        Raises:
            NotFound: There is none.
        """
        return self._table.get(id).as_model()

    def directory(self, id: str) -> Path:
        """Return the directory of an operation, for readers of its records.

        Raises:
            NotFound: There is none.
        """
        return self._table.get(id).directory

    def all(self) -> list[Operation]:
        """Return all operations, oldest first."""
        return [entry.as_model() for entry in self._table]

    def supervising(self) -> Mapping[str, str]:
        """Return the ids of the operations that supervise jobs now, by the jobs' names."""
        return {
            entry.stored.job: entry.stored.id
            for entry in self._table
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
        entry = self._table.get(id)
        number = workers.SIGNALS.get(name.upper())
        if number is None:
            raise UsageError(f"signal {name}", cure=f"one of {', '.join(workers.SIGNALS)}")
        if not entry.stored.supervised:
            number = signal.SIGINT
        if entry.result is None:
            entry.asked = number
            with suppress(OSError):  # a full disk; the signal comes all the same
                files.note_cancel(entry.directory, number)
            if entry.state == "queued":
                self._lost(entry)
            elif entry.state == "running":
                workers.send(entry.directory, number)
        return entry.as_model()

    async def wait(self, id: str, seconds: float) -> Operation:
        """Return an operation once it has ended, or after a time."""
        entry = self._table.get(id)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while entry.result is None:
                    await entry.changed.wait()
        return entry.as_model()

    async def records(self, id: str, after: int = 0) -> AsyncIterator[tuple[int, bytes] | None]:
        """Yield the records of an operation after an offset until it ends; None: nothing new."""
        entry = self._table.get(id)
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
        self._held = True  # one that cannot start ends at once, and would begin the others here
        try:
            now = time.monotonic()
            for entry in [
                one for one in self._table if one.state == "queued" and one.not_before <= now
            ]:
                if entry.stored.supervised or self._table.has_turn(entry.stored.caller_key):
                    self._start(entry)
        finally:
            self._held = False

    def _start(self, entry: Entry) -> None:
        try:
            descriptor = files.lock(entry.directory)
        except OSError as error:
            why = f"cannot start a process: {error.strerror}"
            if entry.stored.supervised and entry.attempt:  # its job may run
                self._do(self._again(entry))
            else:
                self._fail(entry, why)
            return
        if descriptor < 0:  # somebody else's worker has it; it writes the result
            self._watch(entry)
            return
        entry.attempt += 1
        entry.began = time.monotonic()
        # Outside the task, so that cancelling the task does not cancel a requested start.
        starting = self._starting.submit(self._begin, entry.directory, descriptor, entry.attempt)
        self._watch(entry, starting)

    def _begin(self, directory: Path, lock: int, attempt: int) -> int:
        """Start a worker; return its pidfd, or -1."""
        try:
            return self._starter.start(directory, lock, attempt, self.descriptors, self.priority)
        finally:
            os.close(lock)

    def _watch(self, entry: Entry, starting: Future[int] | None = None) -> None:
        entry.state = "running"
        self._do(self._until_end(entry, starting))

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _until_end(self, entry: Entry, starting: Future[int] | None) -> None:
        """Wait until the worker has ended; record the result."""
        pidfd = -1
        if starting is not None:
            try:
                pidfd = await asyncio.shield(asyncio.wrap_future(starting))
            except asyncio.CancelledError:
                starting.add_done_callback(_close)
                raise
            except (workers.StartFailed, OSError, ValueError, msgspec.MsgspecError) as error:
                await self._not_started(entry, str(error))
                return
        result = await self._outcome(entry, pidfd)
        if result is None and self.after_lost is not None:
            self._do(self.after_lost())
        if result is not None:
            self._finish(entry, result, written=True)
        elif entry.stored.supervised and (not entry.cancelled or entry.stops < _TRIES):
            await self._again(entry)
        else:
            self._lost(entry)
            self._pump()

    async def _outcome(self, entry: Entry, pidfd: int) -> Result | None:
        """Wait until the worker has ended; return its result if it left one.

        Args:
            pidfd: Of the worker; it is closed. -1: it has to be found first.
        """
        while True:
            try:
                if pidfd < 0:
                    pidfd = await workers.open_worker(entry.directory)
                if pidfd >= 0:
                    await workers.readable(pidfd)
                entry.process = files.read_process(entry.directory)
                if entry.process is not None:  # of a service before this one, perhaps
                    entry.attempt = max(entry.attempt, entry.process.attempt)
                return files.read_result(entry.directory)
            except OSError:  # no descriptor is left, or the disk does not answer: look again later
                await asyncio.sleep(_LOOK_AGAIN_SECONDS)
            finally:
                if pidfd >= 0:
                    os.close(pidfd)
                    pidfd = -1

    async def _not_started(self, entry: Entry, why: str) -> None:
        """Handle a worker that could not be started."""
        if entry.stored.supervised and entry.attempt > 1:  # its job may run
            await self._again(entry)
        else:
            self._fail(entry, why)

    async def _again(self, entry: Entry) -> None:
        """Restart the supervisor of a job, after a delay that grows while supervisors end early."""
        entry.state = "queued"
        least, most = _BACK_OFF
        ran = time.monotonic() - entry.began
        entry.quick = 1 if ran > _LONG_SECONDS else entry.quick + 1
        entry.stops += bool(entry.cancelled)
        pause = min(most, least * 2 ** min(entry.quick - 1, 10))
        entry.not_before = time.monotonic() + pause
        await asyncio.sleep(pause)
        if entry.state == "queued":
            self._start(entry)

    def _lost(self, entry: Entry) -> None:
        """Handle a worker that ended without a result, or never began."""
        if entry.stored.supervised and entry.attempt and entry.stops < _TRIES:
            entry.state = "queued"  # the next worker looks whether the job runs, and stops it
            return
        if number := entry.cancelled:
            self._finish(entry, Result(exit_status=128 + number, ended=time.time()))
            return
        if entry.stored.supervised:
            entry.state = "queued"
            return
        if entry.process is None and entry.attempt < _TRIES:
            # A worker records itself before it does anything else, so this one did nothing. The
            # previous service may have been killed while it started the worker.
            entry.state = "queued"
            return
        self._fail(
            entry, f"the process of operation {entry.stored.id} was killed", cure="try again"
        )

    def _fail(self, entry: Entry, message: str, *, cure: str = "") -> None:
        error = {"class": "IcecoreError", "message": message, "cure": cure, "exit_code": 1}
        self._finish(entry, Result(exit_status=1, ended=time.time(), error=error))

    def _finish(self, entry: Entry, result: Result, *, written: bool = False) -> None:
        self._settle(entry, result, written=written)
        entry.changed.set()
        self._forget_old()
        self._pump()

    def _settle(self, entry: Entry, result: Result, *, written: bool) -> None:
        """Note how an operation ended: in memory at once, on disk as soon as it can be written."""
        entry.settle(result)
        given = entry.stored
        shorter = bool(given.environment is not None or given.command or given.identity)
        if shorter:  # they may be large and hold secrets, and nobody needs them now
            entry.stored = msgspec.structs.replace(
                given, environment=None, command=[], identity=None
            )
        entry.written = written
        if shorter or not written:
            self._unwritten[entry.stored.id] = entry
            self._write()

    def _forget_old(self) -> None:
        if not self._held:
            for id in self._table.forget_old():
                self._unwritten.pop(id, None)

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


def _close(started: Future[int]) -> None:
    """Close the pidfd of a worker that is not watched any more."""
    if started.exception() is None and started.result() >= 0:
        os.close(started.result())


def new_id() -> str:
    """Return the id of a new operation."""
    return secrets.token_hex(16)


def digest_of(*parts: bytes) -> str:
    """Return the digest of a request."""
    return hashlib.sha256(msgspec.msgpack.encode(parts)).hexdigest()
