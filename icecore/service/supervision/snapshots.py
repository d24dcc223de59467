"""Takes the snapshots of a supervised job, one at a time."""

from __future__ import annotations

import fcntl
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from icecore.dumper.stopping import StopRequest
from icecore.errors import HookFailed, IcecoreError
from icecore.events import Event, Sink
from icecore.host.jobs.job import Job
from icecore.host.kernel.libc import return_free_memory
from icecore.service.record import FOLDER, Taken
from icecore.service.supervision.instances import Tell
from icecore.service.supervision.messages import Dumped, Messages
from icecore.service.supervision.plan import Engine, Plan

_POLL_SECONDS = 0.1
#: Maximum time that a snapshot waits for those of other jobs.
_MOST_WAIT_SECONDS = 300.0


class Snapshots:
    """Takes a snapshot in a thread of its own, and reports it as a message.

    Args:
        messages: Gets the outcome.
        session: Returns the session that must still be held when a snapshot is committed.
        needless: Returns whether a periodic snapshot that waits for its turn is no longer needed.
        forgets: Returns whether the retention policy is applied now.
    """

    def __init__(
        self,
        plan: Plan,
        engine: Engine,
        messages: Messages,
        tell: Tell,
        emit: Sink,
        *,
        session: Callable[[], str],
        needless: Callable[[], bool],
        forgets: Callable[[], bool],
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._messages = messages
        self._tell = tell
        self._emit = emit
        self._session = session
        self._needless = needless
        self._forgets = forgets
        self._stopping = StopRequest()

    def begin(self, job: Job, *, stop: bool) -> None:
        """Begin to take a snapshot of an instance, which ends with it if ``stop``."""
        self._stopping = StopRequest(asked=stop)
        threading.Thread(
            target=self._take, args=(job, self._stopping), name="snapshot", daemon=True
        ).start()

    def end_with_this(self) -> None:
        """Have the instance end with the snapshot under way, if its window has not begun."""
        self._stopping.ask()

    def _take(self, job: Job, stopping: StopRequest) -> None:
        stop = stopping.asked
        stopwatch = _Stopwatch()

        def heard(event: Event) -> None:
            stopwatch.hear(event)
            self._emit(event)

        taken: Taken | None = None
        failed: IcecoreError | None = None
        try:
            with self._turn(stop) as mine:
                if mine:
                    stopwatch.start()
                    done = self._engine.dump(
                        job.instance, stopping=stopping, under=self._session(), emit=heard
                    )
                    taken = stopwatch.taken(done.snapshot, done.window_seconds, done.sizes.stored)
                    if not stopping.ends:
                        self._forget()
        except HookFailed as error:  # the snapshot is committed
            done = error.result
            taken = stopwatch.taken(done.snapshot, done.window_seconds, done.sizes.stored)
            self._tell("run.snapshot_failed", error=str(error), next_seconds=0.0)
        except IcecoreError as error:
            failed = error
        except Exception as error:  # noqa: BLE001 - the job runs on whatever a snapshot meets
            failed = IcecoreError(f"{type(error).__name__}: {error}")
        finally:
            self._messages.put(Dumped(stopping.ends, taken, failed, stopwatch.ended))
        return_free_memory()

    @contextmanager
    def _turn(self, stop: bool) -> Iterator[bool]:
        """Wait for this job's turn, since the jobs of a node take periodic snapshots one after the
        other. Yield False if the snapshot is no longer needed. After `_MOST_WAIT_SECONDS`, go
        ahead anyway, because another job may hang.
        """
        folder = self._engine.registry.state / FOLDER
        give_up = time.monotonic() + _MOST_WAIT_SECONDS
        with ExitStack() as held:
            # The job that is next holds the first lock while it waits for the second, so that a
            # job that has just had its turn cannot overtake it.
            with ExitStack() as next_one:
                for name, stack in ((".next", next_one), (".turn", held)):
                    if stop:
                        break
                    descriptor = os.open(
                        folder / name, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600
                    )
                    stack.callback(os.close, descriptor)
                    while not _locked(descriptor) and time.monotonic() < give_up:
                        if self._needless():
                            yield False
                            return
                        time.sleep(_POLL_SECONDS)
            yield True

    def _forget(self) -> None:
        """Apply the retention policy to this job's snapshots."""
        if self._plan.keep is None or not self._forgets():
            return
        try:
            self._engine.forget(self._plan.keep, self._plan.name)
        except (IcecoreError, OSError) as error:
            self._tell("run.forget_failed", error=str(error))


def _locked(descriptor: int) -> bool:
    """Lock a file if nobody else has; return whether it is locked."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


class _Stopwatch:
    """Times one snapshot by its events.

    Attributes:
        ended: When the snapshot was committed, by ``time.monotonic``.
    """

    def __init__(self) -> None:
        self.ended = 0.0
        self._began = time.monotonic()
        self._window_ended = 0.0
        self._phases: dict[str, float] = {}

    def start(self) -> None:
        """Start again from zero, to leave out the wait for other jobs."""
        self._began = time.monotonic()

    def hear(self, event: Event) -> None:
        """Take note of a phase that ended."""
        if event.fields.get("state") != "end":
            return
        if event.name == "dump.window":
            self._window_ended = time.monotonic()
        for name, key in ((event.name, "seconds"), ("freeze", "freeze_seconds")):
            value = event.fields.get(key)
            if isinstance(value, int | float):
                self._phases[name] = float(value)

    def taken(self, snapshot: str, window: float, stored: int) -> Taken:
        """Return what the snapshot cost that was committed now."""
        self.ended = ended = time.monotonic()
        committing = ended - self._window_ended if self._window_ended else 0.0
        return Taken(
            time.time(),
            window,
            ended - self._began,
            committing,
            stored,
            snapshot,
            self._phases.copy(),
        )
