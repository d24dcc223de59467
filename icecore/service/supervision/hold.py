"""Holds the lease of a job's name, with a watchdog beside the instance that runs under it."""

from __future__ import annotations

import queue
from concurrent.futures import wait
from contextlib import suppress

from icecore.errors import IcecoreError
from icecore.host.jobs.job import Job
from icecore.service.record import Record
from icecore.service.supervision.instances import Tell
from icecore.service.supervision.messages import Asked, Messages, Signalled
from icecore.service.supervision.plan import Engine, Plan
from icecore.service.supervision.watchdog import Watchdog, lives
from icecore.store.format.state import SessionRecord
from icecore.store.log.lease import Lease, take
from icecore.text import host_name

_POLL_SECONDS = 0.25


class Hold:
    """The lease of one job's name.

    Args:
        messages: A signal in it ends the wait for the lease.
        record: Remembers which instance is watched.
    """

    def __init__(
        self, plan: Plan, engine: Engine, messages: Messages, record: Record, tell: Tell
    ) -> None:
        self._plan = plan
        self._engine = engine
        self._messages = messages
        self._record = record
        self._tell = tell
        self._lease: Lease | None = None
        self._watchdog: Watchdog | None = None

    @property
    def lease(self) -> Lease:
        """The lease; only once it is taken."""
        assert self._lease is not None
        return self._lease

    @property
    def is_taken(self) -> bool:
        """Whether the lease was taken."""
        return self._lease is not None

    @property
    def is_watched(self) -> bool:
        """Whether a watchdog lives."""
        return self._watchdog is not None and self._watchdog.alive

    def take(self) -> None:
        """Wait until nobody else holds the lease, and take it.

        Raises:
            Asked: A signal came meanwhile.
            StoreError: The storage failed.
        """

        def waits(held: SessionRecord) -> None:
            self._tell("run.lease", host=held.host, since=held.created_ns / 1e9)

        where = f"{host_name()}:{self._engine.registry.state}"
        taking = self._engine.loop.submit(
            take(
                self._engine.core,
                self._plan.name,
                user=self._engine.user,
                where=where,
                told=waits,
            )
        )
        try:
            while not taking.done():
                wait([taking], _POLL_SECONDS)
                self.heed(0.0)
        except Asked:
            taking.cancel()
            raise
        self._lease = taking.result()
        self._lease.renewed = self._renewed

    def heed(self, seconds: float) -> None:
        """Wait for ``seconds`` while there is no job.

        Raises:
            Asked: A signal came meanwhile.
        """
        with suppress(queue.Empty):
            message = (
                self._messages.get(timeout=seconds) if seconds else self._messages.get_nowait()
            )
            assert isinstance(message, Signalled), "there is no job yet"
            raise Asked(message.number)

    def _renewed(self) -> None:
        """The lease was renewed; called in the repository's event loop."""
        if self._watchdog is not None:
            self._watchdog.renewed(self.lease.renewed_at)

    def watch_over(self, job: Job) -> None:
        """Have a watchdog beside an instance."""
        before = self._watchdog
        self._watchdog = Watchdog(self._engine.registry.state, job, self.lease.renewed_at)
        self._record.watches(job.instance)
        if before is not None:
            before.disarm()

    def let_go(self, job: Job | None) -> None:
        """Release the lease, unless the job lives: the lease must not end before it."""
        if job is not None and lives(job):
            if self._watchdog is not None:
                self._watchdog.leave()
            return
        if self._watchdog is not None:
            self._watchdog.disarm()
        self.release()

    def release(self) -> None:
        """Release the lease, if it was taken; if that fails, it ends by itself in time."""
        if self._lease is None:
            return
        with suppress(IcecoreError):
            self._engine.loop.run(self.lease.release())
