"""The thread that decides: `Supervisor.run` takes messages from a queue (signals, the job's end, the
outcome of a snapshot) and acts on them one by one. All other threads only wait and report.
"""

from __future__ import annotations

import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from typing import TypeVar

import msgspec

from icecore.environment import without_secrets
from icecore.errors import (
    IcecoreError,
    JobHeld,
    NameTaken,
    NotFound,
    ResumeFailed,
    StoreError,
    WindowExceeded,
)
from icecore.events import Event, Sink, Value
from icecore.host.jobs.job import ASKED_SECONDS, ExitStatus, Job, stopped_with
from icecore.host.jobs.logs import LogPiece
from icecore.service.metrics.tally import WAIT_SECONDS, Tally
from icecore.service.record import Record, Taken
from icecore.service.supervision.failures import Failures
from icecore.service.supervision.hold import Hold
from icecore.service.supervision.instances import Begun, Instances, lineage_of
from icecore.service.supervision.leaving import leave, leave_before
from icecore.service.supervision.messages import (
    Asked,
    Dumped,
    Ended,
    Messages,
    Noticed,
    Signalled,
    signals,
)
from icecore.service.supervision.notice import Notices
from icecore.service.supervision.output import DRAIN_SECONDS, Output
from icecore.service.supervision.patience import back_off, patiently
from icecore.service.supervision.plan import Engine, Plan
from icecore.service.supervision.snapshots import Snapshots
from icecore.service.supervision.timetable import Timetable
from icecore.service.supervision.watchdog import end, lives
from icecore.store.format.state import SnapshotRecord

#: Snapshots take part of the notice; the rest is for what was not measured.
OF_NOTICE = 0.7
_TICK_SECONDS = 1.0
#: Maximum delay before a failed snapshot is repeated while the job is being stopped.
_STOP_RETRY_SECONDS = 2.0
#: Signals within this time of the first have the same cause: TERM and HUP of a service manager.
_REPEATED_SECONDS = 2.0
#: Number of the signal that ends the job at once: a scheduler sends one as the notice, and TERM at
#: the end of the notice.
_MOST_SIGNALS = 3
#: The second SIGINT of a person does so, too.
_MOST_INTERRUPTS = 2
#: Signals that ask a job to end.
_ENDING = (signal.SIGINT, signal.SIGTERM)
#: Signals by which service managers and schedulers end processes. Some also send them to the job.
_FROM_OUTSIDE = (signal.SIGHUP, signal.SIGINT, signal.SIGKILL, signal.SIGUSR1, signal.SIGTERM)

T = TypeVar("T")


class Supervisor:
    """Supervises one job; use `run` once.

    Args:
        plan: What was asked for.
        engine: Takes and restores its snapshots.
        write: Gets the job's output.
        emit: Gets the events (docs/reference/events.md).
        messages: Holds the signals that came before; None: none did.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        *,
        write: Callable[[Job, LogPiece], None],
        emit: Sink,
        messages: Messages | None = None,
    ) -> None:
        self._plan = plan
        self._sink = emit
        self._registry = engine.registry
        self._record = Record(self._registry.state, plan.name)
        self._tally = Tally(self._registry.state)
        self._messages: Messages = queue.SimpleQueue() if messages is None else messages
        self._instances = Instances(plan, engine, self._record, self._tell, self._emit)
        known = self._record.measured if plan.resume else None
        self._failures = Failures(self._instances.created, known=known)
        self._timetable = Timetable(plan, self._record)
        self._output = Output(write, self._record, self._tell)
        self._hold = Hold(plan, engine, self._messages, self._record, self._tell)
        self._snapshots = Snapshots(
            plan,
            engine,
            self._messages,
            self._tell,
            self._emit,
            session=lambda: self._hold.lease.session,
            needless=lambda: bool(self._stopping) or self._ended is not None,
            # A bad state must not push out the good ones before it.
            forgets=lambda: not self._failures.lasts,
        )
        self._job: Job | None = None
        self._dumping = False
        self._stopping = ""
        self._asked: list[Signalled] = []
        self._passed: ExitStatus | None = None
        self._passed_at = -math.inf
        self._stop_again = 0.0
        self._stopped: Taken | None = None
        self._ended: ExitStatus | None = None
        self._unwanted = False
        self._stopped_with = ""
        self._paused = False
        self._began = 0.0
        self._retries = self._too_long = 0

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
            if self._plan.stopped:
                self._tell("run.preempted", snapshot=self._plan.stopped, seconds=0.0)
                return self._leave(self._plan.stopped)
            with signals(self._messages), self._holding():
                self._begin(self._patiently(self._instances.first))
                if self._plan.stop:
                    self._messages.put(Signalled(self._plan.stop, time.monotonic()))
                with self._notices():
                    return self._watch()
        except Asked as asked:
            self._record.close()
            return leave_before(self._plan, asked.number, self._record.measured, self._tell)
        finally:
            self._tally.flush(WAIT_SECONDS)
            self._record.close()

    def is_patient(self, error: OSError) -> bool:
        """Wait before output that could not be written is tried again; False: nobody reads it."""
        return self._output.is_patient(error)

    def _emit(self, event: Event) -> None:
        """Pass an event on. What shows it may be gone (a terminal, a pipe); the job is not."""
        with suppress(Exception):
            self._sink(event)

    def _tell(self, name: str, **fields: Value) -> None:
        event = Event(name, {"job": self._plan.name, **fields})
        self._tally.event(event)
        self._emit(event)

    # -- what is held meanwhile

    @contextmanager
    def _holding(self) -> Iterator[None]:
        """Hold the lease of the job's name."""
        self._patiently(self._hold.take)
        try:
            yield
        except BaseException:
            self._end_job()  # nobody looks after it any more
            raise
        finally:
            self._hold.let_go(self._found())

    def _patiently(self, call: Callable[[], T]) -> T:
        """Return what a call returns. If the job is to be resumed, retry until the repository can
        be reached.

        Raises:
            Asked: A signal came meanwhile.
        """
        if not self._plan.resume:
            return call()

        def told(error: StoreError, pause: float) -> None:
            self._tell("run.waiting", error=str(error), next_seconds=pause)

        return patiently(call, told=told, wait=self._wait_to_begin)

    def _wait_to_begin(self, seconds: float) -> None:
        """Wait while there is no job.

        Raises:
            Asked: A signal came meanwhile.
        """
        if self._hold.is_taken:
            asked = self._wait(seconds)
            if asked:
                raise Asked(asked)
        else:
            self._hold.heed(seconds)

    def _require_lease(self) -> None:
        """End the job if another process has its name.

        Raises:
            JobHeld: Another process has.
        """
        if not self._hold.lease.lost:
            return
        self._tell("run.lease_lost", error=self._hold.lease.lost)
        self._end_job()
        raise JobHeld(
            f"job {self._plan.name}: {self._hold.lease.lost}; it was ended here",
            cure="another instance runs; 'icecore ls' lists its snapshots",
        )

    @contextmanager
    def _notices(self) -> Iterator[None]:
        asking = Notices(
            self._plan.notice_command,
            self._plan.notice_url,
            without_secrets(os.environ),
            lambda why: self._messages.put(Noticed(why)),
        )
        try:
            yield
        finally:
            asking.close()

    # -- while it runs

    def _begin(self, begun: Begun) -> None:
        """Look after an instance that runs now."""
        self._job = job = begun[0]
        self._ended = self._passed = None
        self._passed_at = -math.inf
        self._began = time.monotonic()
        self._failures.begin(job.description)
        self._keep_series()
        self._timetable.schedule(self._timetable.first_delay())
        self._paused = False
        self._hold.watch_over(job)
        self._output.follow(begun)
        threading.Thread(target=self._await_end, args=(job,), name="wait", daemon=True).start()
        self._instances.tidy()

    def _await_end(self, job: Job) -> None:
        self._messages.put(Ended(job.instance, job.wait()))

    def _watch(self) -> int:
        """Act on messages until there is an exit status."""
        while True:
            self._tick()
            wait = _TICK_SECONDS
            if self._is_to_stop:
                wait = min(wait, max(0.0, self._stop_again - time.monotonic()))
            try:
                message = self._messages.get(timeout=wait)
            except queue.Empty:
                continue
            status = None
            match message:
                case Signalled(number, at):
                    status = self._on_signal(number, at)
                case Noticed(why):
                    self._stop(why)
                case Ended(instance, ended) if self._job and instance == self._job.instance:
                    self._ended = ended
                    self._failures.end()
                    self._unwanted = self._job.end_requested()
                    self._stopped_with = stopped_with(self._job)
                case Dumped():
                    self._on_dumped(message)
            if status is None and self._ended is not None and not self._dumping:
                status = self._on_end(self._ended)
            if status is not None:
                return status

    def _tick(self) -> None:
        """Do what is due by time."""
        self._require_lease()
        self._trim_logs()
        if self._hold.lease.certain == self._paused:  # the watchdog stops and continues it
            self._paused = not self._paused
            if self._paused:
                self._failures.pause()
                self._tell("run.paused")
            else:
                self._failures.go_on()
                self._tell("run.unpaused")
        if self._job is not None and self._ended is None:
            if not self._job.alive:
                self._messages.put(Ended(self._job.instance, self._job.wait()))
            elif not self._hold.is_watched:
                self._hold.watch_over(self._job)
        if self._is_to_stop:
            if time.monotonic() >= self._stop_again:
                self._dump(stop=True)
        elif (
            self._timetable.due
            and not (self._dumping or self._stopping or self._paused)
            and self._ended is None
        ):
            self._dump(stop=False)

    def _trim_logs(self) -> None:
        if self._job is not None and not self._dumping:  # a dump does it before its window
            self._job.trim_logs(self._emit)

    @property
    def _is_to_stop(self) -> bool:
        """Return whether the job must still be stopped with a snapshot and no dump is under way."""
        over = self._stopped is not None or self._ended is not None
        return bool(self._stopping) and not (self._dumping or over)

    def _on_signal(self, number: int, at: float) -> int | None:
        """Return the exit status if the supervisor has to leave at once."""
        if self._plan.on_term == "pass":
            if number in _ENDING:  # the others may ask for anything
                self._passed_at = at
            self._passed = ExitStatus(signal=number)
            if self._job is not None:
                with suppress(NotFound):
                    self._job.kill(number)
            return None
        if self._asked and at - self._asked[-1].at < _REPEATED_SECONDS:
            return None  # one cause may send several signals
        self._asked.append(Signalled(number, at))
        by_person = sum(one.number == signal.SIGINT for one in self._asked)
        if by_person < _MOST_INTERRUPTS and len(self._asked) < _MOST_SIGNALS:
            self._stop(signal.Signals(number).name)
            return None
        return self._leave_at_once(number)

    def _stop(self, why: str) -> None:
        if self._stopping:
            return
        self._stopping = why
        if self._dumping:
            self._snapshots.end_with_this()
        elif self._ended is None:
            self._dump(stop=True)
        self._tell("run.stopping", why=why)

    # -- snapshots

    def _dump(self, *, stop: bool) -> None:
        assert self._job is not None
        self._dumping = True
        self._snapshots.begin(self._job, stop=stop)

    def _on_dumped(self, done: Dumped) -> None:
        self._dumping = False
        taken = done.taken
        if taken is None:
            self._on_failed_snapshot(done)
            return
        taken = self._failures.take(taken, done.committed)
        self._retries = self._too_long = 0
        self._record.save(self._record.measured.after(taken))
        self._keep_series()
        if done.stop:
            self._stopped = taken
            return
        delay = self._timetable.delay()
        self._timetable.schedule(delay)
        needed = self._record.measured.stop_seconds
        self._tell(
            "run.snapshot",
            snapshot=taken.snapshot,
            window_seconds=taken.window,
            seconds=taken.seconds,
            next_seconds=delay,
            stop_seconds=needed,
        )
        if self._plan.notice and needed > OF_NOTICE * self._plan.notice:
            self._tell("run.notice_short", stop_seconds=needed, notice_seconds=self._plan.notice)
        if self._stopping and self._ended is None:
            self._dump(stop=True)

    def _on_failed_snapshot(self, done: Dumped) -> None:
        """Try again, later and later; a job that has to leave, soon."""
        pause = back_off(self._retries)
        self._retries += 1
        if self._ended is not None:
            return  # it ended meanwhile
        if isinstance(done.error, WindowExceeded):
            pause = self._timetable.after_long_windows(self._too_long, pause)
            self._too_long += 1
        elif done.error is not None:
            self._too_long = 0
        if self._stopping:
            pause = min(pause, _STOP_RETRY_SECONDS) if done.error is not None else 0.0
        if done.error is not None:
            self._tell("run.snapshot_failed", error=str(done.error), next_seconds=pause)
        if self._stopping:
            self._stop_again = time.monotonic() + pause
        else:
            self._timetable.schedule(pause)

    # -- the job ends

    def _on_end(self, status: ExitStatus) -> int | None:
        """Return the exit status, or None once the job was brought back."""
        self._output.drain(hurried=bool(self._stopping))
        self._trim_logs()
        self._end_rest()
        passed = self._passed is not None and (
            status == self._passed or time.monotonic() - self._passed_at < ASKED_SECONDS
        )
        stopped = self._stopped is not None or bool(self._stopped_with)
        over = stopped or self._stopping or passed or self._unwanted
        failed = status.exit_code != 0 and (not over or self._fails_by_itself(status))
        self._count(time.monotonic() - self._began, failed=failed)
        if self._stopped is not None:
            taken = self._stopped
            self._tell("run.preempted", snapshot=taken.snapshot, seconds=taken.seconds)
            return self._leave(taken.snapshot)
        if self._stopped_with:  # by 'icecore dump --stop'
            self._tell("run.preempted", snapshot=self._stopped_with, seconds=0.0)
            return self._leave(self._stopped_with)
        if self._unwanted and status.exit_code:
            self._tell("run.ended_on_request", how=str(status))
            return status.exit_code
        if self._stopping and not passed and self._is_to_return(status):
            return self._leave_early(status)
        if over or not failed:
            if not status.exit_code:
                self._failures.get_past()
                self._keep_series()
            return status.exit_code
        self._failures.fail()
        self._keep_series()
        self._tell(
            "run.failed",
            how=str(status),
            exit_code=status.exit_code,
            failures=self._record.measured.failures,
        )
        if self._has_failed_too_often:
            self._failures.give_up(all_failed=False)
            self._keep_series()
            return status.exit_code
        return self._bring_back(status)

    def _is_to_return(self, status: ExitStatus) -> bool:
        """Return whether the job is to be restored although the stop took no snapshot. It is if
        ``--restart`` would restore it, or if a signal from outside ended it and it has a snapshot.
        """
        if status.exit_code == 0:
            return False
        restarts = self._plan.restarts
        return (
            restarts < 0
            or self._failures.count < restarts
            or (not self._fails_by_itself(status) and bool(self._last_snapshot()))
        )

    def _fails_by_itself(self, status: ExitStatus) -> bool:
        """Return whether a job that ended during a stop failed, and was not ended from outside."""
        return bool(self._stopping) and status.exit_code - 128 not in _FROM_OUTSIDE

    def _last_snapshot(self) -> str:
        """Return the newest snapshot of the instance, or an empty string."""
        assert self._job is not None
        with suppress(IcecoreError):
            return Job.load(self._job.directory).description.snapshot
        return ""

    def _bring_back(self, status: ExitStatus) -> int | None:
        """Restore the job, from an older snapshot if it keeps failing, or start it anew. Return the
        exit status if that is given up, or if the job has to leave. Restores that fail are no
        failures of the job: they only use up its snapshots.

        Raises:
            ResumeFailed: It is given up because the snapshots cannot be restored.
        """
        assert self._job is not None
        lineage = lineage_of(self._job)
        pause = back_off(self._failures.count - 1)
        failed: ResumeFailed | None = None
        hindered = unrestored = 0
        while True:
            asked = self._wait(pause)
            if asked:
                if self._plan.on_term == "pass":
                    return 128 + asked
                return self._leave_early(status)
            if self._job.end_requested():
                self._tell("run.ended_on_request", how=str(status))
                return status.exit_code
            if not self._end_rest():  # it must not run twice
                error = f"processes of instance {self._job.instance} cannot be killed"
                self._tell("run.resume_failed", snapshot="", error=error)
                hindered += 1
                pause = back_off(hindered)
                continue
            try:
                try:
                    chosen = self._choose(lineage)
                except ResumeFailed as error:  # there are some, all of them in quarantine
                    failed, chosen = error, None
                tried = (chosen or [])[: 1 + self._plan.fall_back]
                begun = None if chosen is None else self._begin_again(tried)
            except (StoreError, NameTaken) as error:  # may pass
                self._tell("run.resume_failed", snapshot="", error=str(error))
                hindered += 1
                pause = back_off(hindered)
                continue
            except ResumeFailed as error:
                failed = error
                self._failures.fail_to_begin(tried)
                self._keep_series()
                unrestored += 1
                pause = back_off(self._failures.count - 1 + unrestored)
                continue
            if begun is None and failed is not None and self._plan.or_start:
                self._failures.start_anew()
                lineage, failed, pause = "", None, 0.0
                continue
            if begun is None:
                self._tell("run.gave_up", how=str(status), failures=self._failures.count)
                self._failures.give_up(all_failed=True)
                self._keep_series()
                if failed is not None:
                    raise failed
                return ResumeFailed.exit_code  # a service manager must not begin again
            self._begin(begun)
            return None

    def _choose(self, lineage: str) -> list[SnapshotRecord] | None:
        """Return the snapshots from which to bring the job back, the best first. Empty: start it
        anew. None: it fails from every snapshot.

        Raises:
            ResumeFailed: It has snapshots, all of them in quarantine.
            StoreError: The repository cannot be reached.
        """
        chosen = self._failures.choose(self._instances.candidates(lineage) if lineage else [])
        self._keep_series()
        return chosen

    def _begin_again(self, tried: list[SnapshotRecord]) -> Begun:
        """Restore the job from the first of some snapshots that can be restored; start it anew if
        there are none.

        Raises:
            ResumeFailed: The snapshots that were tried cannot be restored.
            StoreError: The repository cannot be reached.
            NameTaken: Another job has the name.
        """
        return self._instances.restore(tried) if tried else self._instances.start()

    @property
    def _has_failed_too_often(self) -> bool:
        return 0 <= self._plan.restarts < self._failures.count

    def _wait(self, seconds: float) -> int:
        """Wait for ``seconds``, and until no other process can hold the lease. Return the signal
        that arrived meanwhile; 0: none. Return early if 'icecore kill' asked the job to end.
        """
        until = time.monotonic() + seconds
        while time.monotonic() < until or not self._hold.lease.certain:
            self._require_lease()
            if self._job is not None and self._job.end_requested():
                return 0
            with suppress(queue.Empty):
                message = self._messages.get(timeout=_TICK_SECONDS / 4)
                if isinstance(message, Signalled):
                    return message.number
                if isinstance(message, Noticed):
                    return signal.SIGTERM
        return 0

    def _count(self, ran: float, *, failed: bool) -> None:
        """Count a run of ``ran`` seconds."""
        known = self._record.measured
        self._record.save(
            msgspec.structs.replace(
                known, ran_seconds=known.ran_seconds + ran, failures=known.failures + failed
            )
        )

    def _keep_series(self) -> None:
        """Have the record say what the next supervisor needs of the failures."""
        known, series = self._record.measured, self._failures.series
        if series != known.series:
            self._record.save(msgspec.structs.replace(known, series=series))

    def _leave_early(self, status: ExitStatus) -> int:
        """Leave a job that ended before it could be stopped with a snapshot, and is to be restored."""
        last = self._last_snapshot()
        self._tell("run.ended_early", how=str(status), snapshot=last)
        return self._leave(last)

    def _leave_at_once(self, number: int) -> int:
        """End the job without its last snapshot; return the exit status after a signal."""
        self._end_job()
        last = self._last_snapshot()
        if number == signal.SIGINT or not last:
            return 128 + number
        how = f"ended by a further {signal.Signals(number).name}"
        self._tell("run.ended_early", how=how, snapshot=last)
        return self._leave(last)

    def _leave(self, snapshot: str) -> int:
        """Run the requeue command and return the preempted status.

        Args:
            snapshot: The one to restore; empty: the job starts anew.
        """
        if self._plan.requeue:
            if self._job is None or not lives(self._job):
                self._hold.release()  # whoever comes next need not wait
            self._record.close()
        return leave(self._plan, snapshot, self._record.measured, self._tell)

    def _found(self) -> Job | None:
        """Return the instance; also one that was started, but is not followed yet."""
        return self._job if self._job is not None else self._instances.newest()

    def _end_rest(self) -> bool:
        """End processes that go on without their init, as without a pid namespace of their own;
        return whether none is left.
        """
        assert self._job is not None
        if lives(self._job):
            end(self._job)
        return not lives(self._job)

    def _end_job(self) -> None:
        job = self._found()
        if job is None:
            return
        end(job)
        with suppress(TimeoutError):
            job.wait(DRAIN_SECONDS)
        self._output.drain(hurried=True)
