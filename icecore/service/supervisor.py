"""Runs one job so that it survives: restored where it was, snapshotted in time, stopped in order.

One thread decides: `Supervisor.run` takes messages from a queue (signals, the job's end, the
outcome of a snapshot) and acts on them one by one. All other threads only wait and report.
"""

from __future__ import annotations

import errno
import fcntl
import os
import queue
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from types import FrameType
from typing import Literal, Protocol

import msgspec

from icecore.config import without_secrets
from icecore.dumper.dump import DumpResult
from icecore.errors import (
    Damaged,
    HookFailed,
    IcecoreError,
    JobHeld,
    NotFound,
    ObjectMissing,
    RestoreFailed,
    RestoreRefused,
    ResumeFailed,
    StoreError,
    UsageError,
)
from icecore.events import Event, Sink, Value
from icecore.host.jobs.job import ExitStatus, Job, LogPiece, Stream
from icecore.host.jobs.registry import Registry
from icecore.host.jobs.shell import run_shell
from icecore.restorer.restored import Restored
from icecore.service.interval import Bounds, choose
from icecore.service.metrics.tally import WAIT_SECONDS, Tally
from icecore.service.notice import Notices
from icecore.service.record import FOLDER, Record, Taken
from icecore.service.watchdog import Watchdog, end, resume_all
from icecore.store.format.state import SessionRecord, SnapshotRecord
from icecore.store.log import lease
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.forget import Policy
from icecore.store.runtime.loop import LoopThread
from icecore.text import host_name

#: Signals on which the job is stopped with a snapshot, or to which it is told.
SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)
_TICK_SECONDS = 1.0
#: The first snapshot of a job whose cost is not known comes soon, so that it is.
_FIRST_SECONDS = 30.0
_JITTER = 0.05
_BACK_OFF_SECONDS = (1.0, 60.0)
#: A job that fails twice without a new snapshot in between is brought back from an older one.
_SAME_SNAPSHOT = 2
_REQUEUE_SECONDS = 60.0
_DRAIN_SECONDS = 30.0
_MOST_DOUBLINGS = 10
#: Signals within this time of the first have the same cause: TERM and HUP of a service manager.
_REPEATED_SECONDS = 2.0
_OUTPUT_SECONDS = 0.5
_READER_SECONDS = 0.02
#: Nobody will ever read what is written.
_GONE = frozenset({errno.EPIPE, errno.EBADF})
#: Ended instances of the job that are remembered.
_REMEMBERED = 8
#: Errors after which an older snapshot may still be restored.
_NOT_THIS_ONE = (RestoreRefused, RestoreFailed, Damaged, ObjectMissing, NotFound, UsageError)
#: Snapshots take part of the notice; the rest is for what was not measured.
_OF_NOTICE = 0.7


@dataclass(frozen=True)
class Plan:
    """What was asked for. Times in seconds.

    Attributes:
        name: The job's name.
        start: Starts the job anew.
        resume: Bring it back from its newest snapshot if there is one.
        or_start: Start anew if no snapshot can be restored.
        fall_back: So many older snapshots are tried if the newest cannot be restored.
        every: Interval between snapshots; None: none; ``auto``: `icecore.service.interval`.
        on_term: What a signal does: stop the job with a snapshot, or pass it to the job.
        preempted_exit: Exit status once the job was stopped with a snapshot.
        restarts: How often a job that fails is brought back without a new snapshot in between; 0:
            never; -1: without a bound.
        requeue: Shell command once the job was stopped with a snapshot.
        notice: Time from a signal until the machine is gone; 0: not known.
        notice_command, notice_url: What says that the job has to leave (`Notices`).
        bounds: For ``auto``.
        failure_seconds: For ``auto``: mean time between failures that is assumed at first.
        slow_down: For ``auto``: share of its speed that the job loses while a snapshot is stored.
        keep: Applied to the job's snapshots after each commit; None: all are kept.
    """

    name: str
    start: Callable[[], Job]
    resume: bool = True
    or_start: bool = False
    fall_back: int = 0
    every: float | Literal["auto"] | None = None
    on_term: Literal["snapshot", "pass"] = "snapshot"
    preempted_exit: int = 85
    restarts: int = 0
    requeue: str = ""
    notice: float = 0.0
    notice_command: str = ""
    notice_url: str = ""
    bounds: Bounds = field(default_factory=Bounds)
    failure_seconds: float = 86400.0
    slow_down: float = 0.02
    keep: Policy | None = None


@dataclass(frozen=True)
class _Signalled:
    number: int
    at: float


@dataclass(frozen=True)
class _Noticed:
    why: str


@dataclass(frozen=True)
class _Ended:
    instance: str
    status: ExitStatus


@dataclass(frozen=True)
class _Dumped:
    stop: bool
    taken: Taken | None
    error: IcecoreError | None


_Message = _Signalled | _Noticed | _Ended | _Dumped


class Engine(Protocol):
    """What a supervisor needs of the rest of icecore; `icecore.node.engine` is the one.

    Attributes:
        registry: The jobs of this node.
        core: The repository of their snapshots.
        loop: The event loop in which ``core`` lives.
        user: The uid for which it acts; None: for administrators, who have the jobs of all users.
    """

    registry: Registry
    core: StoredRepository
    loop: LoopThread
    user: int | None

    def owns(self, job: Job) -> bool:
        """Return whether a job is of the user for whom it acts."""

    def find(self, name: str) -> Job:
        """Return the newest instance of a job; raise NotFound, or JobHeld if it is another user's."""

    def snapshots(self, job: str) -> list[SnapshotRecord]:
        """Return the snapshots of a job in order of their commits."""

    def dump(self, instance: str, *, stop: bool, under: str, emit: Sink) -> DumpResult:
        """Take a snapshot of an instance, and end it if ``stop``. It is not committed once the
        session ``under`` has ended.
        """

    def restore(self, snapshot: str, name: str, *, emit: Sink) -> Restored:
        """Restore a snapshot as the job of a name, with all its memory."""

    def forget(self, policy: Policy, job: str) -> None:
        """Forget what a policy does not keep of a job's snapshots."""


class _Asked(Exception):
    """A signal came before there was a job."""

    def __init__(self, number: int) -> None:
        self.number = number


class Supervisor:
    """Supervises one job; use `run` once.

    Args:
        plan: What was asked for.
        engine: Takes and restores its snapshots.
        write: Gets the job's output.
        emit: Gets the events (docs/reference/events.md).
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        *,
        write: Callable[[Job, LogPiece], None],
        emit: Sink,
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._write = write
        self._sink = emit
        self._registry = engine.registry
        self._record = Record(self._registry.state, plan.name)
        self._tally = Tally(self._registry.state)
        self._messages: queue.SimpleQueue[_Message] = queue.SimpleQueue()
        self._job: Job | None = None
        self._follower: threading.Thread | None = None
        self._watchdog: Watchdog | None = None
        self._lease: lease.Lease | None = None
        self._dumping = False
        self._stopping = ""
        self._asked = 0
        self._stopped: Taken | None = None
        self._passed = 0
        self._asked_at = 0.0
        self._ended: ExitStatus | None = None
        self._paused = False
        self._began = 0.0
        self._due = 0.0
        self._retries = 0
        self._since_snapshot = 0
        self._blocked = False

    def run(self) -> int:
        """Run the job until it ends, or until it has to leave; return the exit status.

        Raises:
            JobHeld: Another process runs the job of this name.
            ResumeFailed: No snapshot could be restored.
            IcecoreError: The job could not be started.
        """
        if not self._record.lock():
            raise JobHeld(
                f"job {self._plan.name} is supervised by another process of this node",
                cure=f"'icecore attach {self._plan.name}' follows it",
            )
        try:
            with self._signals(), self._holding():
                self._begin(self._first())
                with self._notices():
                    return self._watch()
        except _Asked as asked:
            return 128 + asked.number
        finally:
            self._tally.flush(WAIT_SECONDS)
            self._record.close()

    def _emit(self, event: Event) -> None:
        """Pass an event on. What shows it may be gone (a terminal, a pipe); the job is not."""
        with suppress(Exception):
            self._sink(event)

    # -- what is held meanwhile

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Turn signals into messages."""

        def told(number: int, frame: FrameType | None) -> None:
            self._messages.put(_Signalled(number, time.monotonic()))

        heeded = [
            number
            for number in SIGNALS
            # nohup(1) ignores it for what it starts.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN
        ]
        before = {number: signal.signal(number, told) for number in heeded}
        # The service starts it with them blocked.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Hold the lease of the job's name."""

        def waits(held: SessionRecord) -> None:
            self._tell("run.lease", host=held.host, since=held.created_ns / 1e9)

        where = f"{host_name()}:{self._registry.state}"
        taking = self._engine.loop.submit(
            lease.take(
                self._engine.core,
                self._plan.name,
                user=self._engine.user,
                where=where,
                told=waits,
            )
        )
        while not taking.done():
            self._heed(taking)
        self._lease = taking.result()
        self._lease.renewed = self._renewed
        try:
            yield
        except BaseException:
            self._end_job()  # nobody looks after it any more
            raise
        finally:
            job = self._found()
            if job is not None and job.alive:  # it did not end: the lease must not outlive that
                if self._watchdog is not None:
                    self._watchdog.leave()
            else:
                if self._watchdog is not None:
                    self._watchdog.disarm()
                with suppress(IcecoreError):
                    self._engine.loop.run(self._lease.release())

    def _heed(self, taking: Future[lease.Lease]) -> None:
        """Wait a moment for the lease, or for a signal, after which nobody needs it.

        Raises:
            _Asked: A signal came.
        """
        wait([taking], _TICK_SECONDS / 4)
        with suppress(queue.Empty):
            message = self._messages.get_nowait()
            assert isinstance(message, _Signalled), "there is no job yet"
            taking.cancel()
            raise _Asked(message.number)

    def _renewed(self) -> None:
        """The lease was renewed; called in the repository's event loop."""
        if self._watchdog is not None:
            assert self._lease is not None
            self._watchdog.renewed(self._lease.renewed_at)

    @contextmanager
    def _notices(self) -> Iterator[None]:
        asking = Notices(
            self._plan.notice_command,
            self._plan.notice_url,
            without_secrets(os.environ),
            lambda why: self._messages.put(_Noticed(why)),
        )
        try:
            yield
        finally:
            asking.close()

    # -- the job begins

    def _first(self) -> tuple[Job, Mapping[Stream, int]]:
        """Take over the job if it runs, else restore it, else start it."""
        with suppress(NotFound):
            job = self._engine.find(self._plan.name)
            if job.state == "running" and job.name == self._plan.name:
                self._tell("run.adopted", instance=job.instance, pid=job.pid)
                shown = self._record.shown(job.instance)
                return job, job.log_sizes() if shown is None else shown
        candidates = self._candidates() if self._plan.resume else []
        if not candidates:
            return self._plan.start(), {}
        try:
            return self._restore(candidates[: 1 + self._plan.fall_back])
        except ResumeFailed:
            if not self._plan.or_start:
                raise
            return self._plan.start(), {}

    def _candidates(self, lineage: str = "") -> list[SnapshotRecord]:
        """Return the snapshots of a lineage, newest first. Empty: of this name's newest."""
        found = self._engine.snapshots(self._plan.name)[::-1]
        lineage = lineage or (found[0].lineage if found else "")
        return [one for one in found if one.lineage == lineage]

    def _restore(self, candidates: list[SnapshotRecord]) -> tuple[Job, Mapping[Stream, int]]:
        """Bring the job back from the first of some snapshots that can be restored.

        Raises:
            ResumeFailed: None can.
        """
        last: IcecoreError | None = None
        for record in candidates:
            try:
                restored = self._engine.restore(record.snapshot, self._plan.name, emit=self._emit)
                if restored.job is None:
                    raise ResumeFailed(
                        f"snapshot {record.snapshot[:12]} is of a job that 'icecore run' did not start",
                        cure="restore it without supervision: icecore restore",
                    )
            except HookFailed as error:
                self._tell("run.resume_failed", snapshot=record.snapshot, error=str(error))
                job = self._engine.find(self._plan.name)  # it runs
                return job, job.log_sizes()
            except _NOT_THIS_ONE as error:
                last = error
                self._tell("run.resume_failed", snapshot=record.snapshot, error=str(error))
                continue
            job = restored.job
            resume_all(job)  # it may have been paused when it was taken
            self._tell("run.resumed", instance=job.instance, pid=job.pid, snapshot=record.snapshot)
            return job, restored.log_sizes
        raise ResumeFailed(
            f"none of {len(candidates)} snapshots of job {self._plan.name} can be restored: {last}",
            cure=f"'icecore restore -n {self._plan.name}' says what stands in the way;"
            " --fall-back N tries older ones, --or-start starts it anew",
        )

    def _begin(self, begun: tuple[Job, Mapping[Stream, int]]) -> None:
        """Follow an instance that runs now."""
        self._job, seen = begun
        self._tell(
            "run.following",
            instance=self._job.instance,
            seen={stream: seen.get(stream, 0) for stream in ("stdout", "stderr")},
        )
        self._ended = None
        self._began = time.monotonic()
        self._schedule(self._first_delay())
        self._paused = False
        self._watch_over(self._job)
        job = self._job
        self._follower = threading.Thread(
            target=self._follow, args=(job, dict(seen)), name="follow", daemon=True
        )
        self._follower.start()
        threading.Thread(target=self._await_end, args=(job,), name="wait", daemon=True).start()
        self._tidy()

    def _tidy(self) -> None:
        """Forget the oldest ended instances of this name."""
        with suppress(IcecoreError, OSError):
            own = [
                one
                for one in self._registry.instances()
                if one.name == self._plan.name and not one.alive and self._engine.owns(one)
            ]
            for job in own[:-_REMEMBERED]:
                with suppress(IcecoreError):
                    self._registry.remove(job)

    def _watch_over(self, job: Job) -> None:
        """Have a watchdog beside an instance."""
        before = self._watchdog
        assert self._lease is not None
        self._watchdog = Watchdog(self._registry.state, job, self._lease.renewed_at)
        self._record.watches(job.instance)
        if before is not None:
            before.disarm()

    def _follow(self, job: Job, skip: dict[Stream, int]) -> None:
        shown: dict[Stream, int] = {"stdout": 0, "stderr": 0}
        for piece in job.logs(follow=True):
            skipped = min(skip.get(piece.stream, 0), len(piece.data))
            if skipped:
                skip[piece.stream] -= skipped
            if piece.data[skipped:]:
                with suppress(OSError):  # nobody reads it; it is in the job's logs
                    self._write(job, replace(piece, data=piece.data[skipped:]))
            shown[piece.stream] += len(piece.data)
            self._record.show(job.instance, shown)

    def is_patient(self, error: OSError) -> bool:
        """Wait before output that could not be written is tried again; False: nobody reads it."""
        if error.errno in _GONE:
            return False
        if isinstance(error, BlockingIOError):  # the reader is slow
            time.sleep(_READER_SECONDS)
            return True
        if not self._blocked:
            self._blocked = True
            self._tell("run.output_failed", error=str(error))
        time.sleep(_OUTPUT_SECONDS)
        return True

    def _await_end(self, job: Job) -> None:
        self._messages.put(_Ended(job.instance, job.wait()))

    # -- while it runs

    def _watch(self) -> int:
        """Act on messages until there is an exit status."""
        while True:
            status = self._tick()
            if status is not None:
                return status
            try:
                message = self._messages.get(timeout=_TICK_SECONDS)
            except queue.Empty:
                continue
            match message:
                case _Signalled(number, at):
                    status = self._on_signal(number, at)
                case _Noticed(why):
                    self._stop(why)
                case _Ended(instance, ended) if self._job and instance == self._job.instance:
                    self._ended = ended
                case _Dumped():
                    self._on_dumped(message)
            if status is None and self._ended is not None and not self._dumping:
                status = self._on_end(self._ended)
            if status is not None:
                return status

    def _tick(self) -> int | None:
        """Do what is due by time."""
        self._require_lease()
        assert self._lease is not None
        if self._lease.certain == self._paused:  # the watchdog stops and continues it
            self._paused = not self._paused
            if self._paused:
                self._tell("run.paused")
            else:
                self._tell("run.unpaused")
        if self._job is not None and self._ended is None:
            if not self._job.alive:
                self._messages.put(_Ended(self._job.instance, self._job.wait()))
            elif self._watchdog is not None and not self._watchdog.alive:
                self._watch_over(self._job)
        now = time.monotonic()
        if (
            self._plan.every is not None
            and now >= self._due
            and not (self._dumping or self._stopping or self._paused)
            and self._ended is None
        ):
            self._dump(stop=False)
        return None

    def _require_lease(self) -> None:
        """End the job if another process has its name.

        Raises:
            JobHeld: Another process has.
        """
        assert self._lease is not None
        if not self._lease.lost:
            return
        self._tell("run.lease_lost", error=self._lease.lost)
        self._end_job()
        raise JobHeld(
            f"job {self._plan.name}: {self._lease.lost}; it was ended here",
            cure="another instance runs; 'icecore ls' lists its snapshots",
        )

    def _on_signal(self, number: int, at: float) -> int | None:
        if self._plan.on_term == "pass":
            self._passed = number
            if self._job is not None:
                with suppress(NotFound):
                    self._job.kill(number)
            return None
        if self._asked and at - self._asked_at < _REPEATED_SECONDS:
            return None  # one cause may send several signals
        self._asked += 1
        self._asked_at = at
        if self._asked > 1:
            self._end_job()
            return 128 + number
        self._stop(signal.Signals(number).name)
        return None

    def _stop(self, why: str) -> None:
        if self._stopping or self._ended is not None:
            return
        self._stopping = why
        self._tell("run.stopping", why=why)
        if not self._dumping:
            self._dump(stop=True)

    # -- snapshots

    def _dump(self, *, stop: bool) -> None:
        self._dumping = True
        threading.Thread(
            target=self._take, args=(self._job, stop), name="snapshot", daemon=True
        ).start()

    def _take(self, job: Job, stop: bool) -> None:
        """Take one snapshot, in a thread of its own."""
        ended_window = 0.0
        phases: dict[str, float] = {}

        def heard(event: Event) -> None:
            nonlocal ended_window
            if event.fields.get("state") == "end":
                if event.name == "dump.window":
                    ended_window = time.monotonic()
                phases.update(_phases(event))
            self._emit(event)

        taken: Taken | None = None
        failed: IcecoreError | None = None
        began = time.monotonic()

        def made(snapshot: str, window: float, stored: int) -> Taken:
            ended = time.monotonic()
            committing = ended - ended_window if ended_window else 0.0
            return Taken(
                time.time(), window, ended - began, committing, stored, snapshot, phases.copy()
            )

        try:
            with self._turn(stop) as mine:
                if mine:
                    assert self._lease is not None
                    done = self._engine.dump(
                        job.instance, stop=stop, under=self._lease.session, emit=heard
                    )
                    taken = made(done.snapshot, done.window_seconds, done.sizes.stored)
                    if not stop:
                        self._forget()
        except HookFailed as error:  # the snapshot is committed
            newest = self._engine.snapshots(self._plan.name)[-1]
            taken = made(newest.snapshot, newest.window_seconds, newest.stored)
            self._tell("run.snapshot_failed", error=str(error), next_seconds=0.0)
        except IcecoreError as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - the job runs on whatever a snapshot meets
            failed = IcecoreError(f"{type(error).__name__}: {error}")
        self._messages.put(_Dumped(stop, taken, failed))

    @contextmanager
    def _turn(self, stop: bool) -> Iterator[bool]:
        """Let the jobs of a node take their periodic snapshots one after the other; False: there is
        no need any more.
        """
        path = self._registry.state / FOLDER / ".turn"
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            while not stop:
                try:
                    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if self._stopping or self._ended is not None:
                        yield False
                        return
                    time.sleep(0.1)
            yield True
        finally:
            os.close(descriptor)

    def _on_dumped(self, done: _Dumped) -> None:
        self._dumping = False
        taken = done.taken
        if taken is None:
            self._on_failed_snapshot(done)
            return
        self._since_snapshot = self._retries = 0
        if done.stop:
            self._stopped = taken
        self._record.save(self._record.measured.after(taken))
        if done.stop:
            return
        delay = self._delay()
        self._schedule(delay)
        self._tell(
            "run.snapshot",
            snapshot=taken.snapshot,
            window_seconds=taken.window,
            seconds=taken.seconds,
            next_seconds=delay,
            stop_seconds=self._record.measured.stop_seconds,
        )
        needed = self._record.measured.stop_seconds
        if self._plan.notice and needed > _OF_NOTICE * self._plan.notice:
            self._tell("run.notice_short", stop_seconds=needed, notice_seconds=self._plan.notice)
        if self._stopping:
            self._dump(stop=True)

    def _on_failed_snapshot(self, done: _Dumped) -> None:
        """Try again, later and later; a job that has to leave, at once."""
        least, most = _BACK_OFF_SECONDS
        pause = min(most, least * 2 ** min(self._retries, _MOST_DOUBLINGS))
        self._retries += 1
        if self._ended is not None:
            return  # it ended meanwhile
        if done.error is not None:
            self._tell("run.snapshot_failed", error=str(done.error), next_seconds=pause)
        if self._stopping:
            time.sleep(min(pause, 2.0))
            self._dump(stop=True)
        else:
            self._schedule(pause)

    def _schedule(self, delay: float) -> None:
        """Take the next periodic snapshot in ``delay`` seconds, and let the record say so."""
        self._due = time.monotonic() + delay
        if self._plan.every is None:
            interval = due = 0.0
        else:
            interval, due = self._interval(), time.time() + delay
        self._record.save(
            msgspec.structs.replace(
                self._record.measured,
                interval_seconds=interval,
                due=due,
                notice_seconds=self._plan.notice,
            )
        )

    def _forget(self) -> None:
        """Apply the retention policy to this job's snapshots."""
        if self._plan.keep is None:
            return
        try:
            self._engine.forget(self._plan.keep, self._plan.name)
        except (IcecoreError, OSError) as error:
            self._tell("run.forget_failed", error=str(error))

    def _first_delay(self) -> float:
        """Return seconds until the first snapshot of an instance; jobs of a node differ."""
        delay = self._delay()
        if self._plan.every == "auto" and not self._record.measured.taken:
            delay = min(delay, _FIRST_SECONDS)
        return delay * random.uniform(0.5, 1.0)

    def _delay(self) -> float:
        """Return seconds until the next snapshot."""
        if self._plan.every == "auto":
            if not self._record.measured.taken:
                return _FIRST_SECONDS
            return self._interval() * random.uniform(1 - _JITTER, 1 + _JITTER)
        return self._interval() * random.uniform(1 - _JITTER, 1.0)

    def _interval(self) -> float:
        """Return seconds from one snapshot to the next, without jitter."""
        if self._plan.every != "auto":
            return self._plan.every or 0.0
        cost = self._record.measured.cost(self._plan.slow_down)
        if cost is None:
            return _FIRST_SECONDS
        rate = self._record.measured.rate(self._plan.failure_seconds)
        return choose(cost, rate, self._plan.bounds).seconds

    # -- the job ends

    def _on_end(self, status: ExitStatus) -> int | None:
        """Return the exit status, or None once the job was brought back."""
        self._drain()
        measured = self._record.measured
        ran = time.monotonic() - self._began
        if self._stopped is not None:
            self._add(ran, failed=False)
            return self._leave(self._stopped)
        if status.exit_code == 0 or self._stopping or self._passed:
            self._add(ran, failed=False)
            return status.exit_code
        self._add(ran, failed=True)
        self._since_snapshot += 1
        self._tell(
            "run.failed",
            how=str(status),
            exit_code=status.exit_code,
            failures=measured.failures + 1,
        )
        if self._plan.restarts >= 0 and self._since_snapshot > self._plan.restarts:
            return status.exit_code
        assert self._job is not None
        lineage = self._lineage(self._job)
        least, most = _BACK_OFF_SECONDS
        waits = min(most, least * 2 ** min(self._since_snapshot - 1, _MOST_DOUBLINGS))
        while True:
            asked = self._wait(waits)
            if asked:
                return 128 + asked
            try:
                candidates = self._candidates(lineage) if lineage else []
                back = max(0, self._since_snapshot - 1) // _SAME_SNAPSHOT
                if candidates and back >= len(candidates):
                    self._tell("run.gave_up", how=str(status), failures=self._since_snapshot)
                    return status.exit_code
                if candidates:
                    begun = self._restore(candidates[back : back + 1 + self._plan.fall_back])
                else:
                    begun = (self._plan.start(), {})
            except StoreError as error:  # the repository cannot be reached
                self._tell("run.resume_failed", snapshot="", error=str(error))
                waits = most
                continue
            self._begin(begun)
            return None

    def _lineage(self, job: Job) -> str:
        """Return the lineage of an instance; empty: it was never snapshotted."""
        with suppress(IcecoreError):
            return Job.load(job.directory).description.lineage
        return ""

    def _wait(self, seconds: float) -> int:
        """Wait, and until nobody else can have the lease; return the signal that came meanwhile."""
        assert self._lease is not None
        end = time.monotonic() + seconds
        while time.monotonic() < end or not self._lease.certain:
            self._require_lease()
            with suppress(queue.Empty):
                message = self._messages.get(timeout=_TICK_SECONDS / 4)
                if isinstance(message, _Signalled):
                    return message.number
                if isinstance(message, _Noticed):
                    return signal.SIGTERM
        return 0

    def _add(self, ran: float, *, failed: bool) -> None:
        """Count a run."""
        known = self._record.measured
        self._record.save(
            msgspec.structs.replace(
                known, ran_seconds=known.ran_seconds + ran, failures=known.failures + failed
            )
        )

    def _leave(self, stopped: Taken) -> int:
        """The job was stopped with a snapshot."""
        self._tell("run.preempted", snapshot=stopped.snapshot, seconds=stopped.seconds)
        if self._plan.requeue:
            variables = {"ICECORE_JOB": self._plan.name, "ICECORE_SNAPSHOT": stopped.snapshot}
            environment = {**without_secrets(os.environ), **variables}
            assert self._lease is not None
            with suppress(IcecoreError):
                self._engine.loop.run(self._lease.release())  # whoever comes next need not wait
            self._record.close()
            try:
                status = run_shell(
                    self._plan.requeue, environment, seconds=_REQUEUE_SECONDS, output=2
                )
            except OSError as error:  # also TimeoutError
                self._tell("run.requeue_failed", error=str(error))
            else:
                if status:
                    self._tell("run.requeue_failed", error=f"it ended with status {status}")
        return self._plan.preempted_exit

    def _found(self) -> Job | None:
        """Return the instance; also one that was started, but is not followed yet."""
        if self._job is not None:
            return self._job
        with suppress(IcecoreError):
            job = self._engine.find(self._plan.name)
            return job if job.name == self._plan.name else None
        return None

    def _end_job(self) -> None:
        job = self._found()
        if job is None:
            return
        end(job)
        with suppress(TimeoutError):
            job.wait(_DRAIN_SECONDS)
        self._drain()

    def _drain(self) -> None:
        """Wait until all that the job has written is shown."""
        if self._follower is not None:
            self._follower.join(_DRAIN_SECONDS)

    def _tell(self, name: str, **fields: Value) -> None:
        event = Event(name, {"job": self._plan.name, **fields})
        self._tally.event(event)
        self._emit(event)


def _phases(event: Event) -> Iterator[tuple[str, float]]:
    """Yield the seconds of a phase that ended, for the record of a snapshot."""
    for name, key in ((event.name, "seconds"), ("freeze", "freeze_seconds")):
        value = event.fields.get(key)
        if isinstance(value, int | float):
            yield name, float(value)
