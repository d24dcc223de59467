"""When the next snapshot of a supervised job is due."""

from __future__ import annotations

import random
import time

import msgspec

from icecore.service.interval import choose
from icecore.service.record import Basis, Record
from icecore.service.supervision.plan import Plan

#: The first snapshot of a job whose cost is not known comes soon, so that it is.
_FIRST_SECONDS = 30.0
_JITTER = 0.05
#: Maximum number of times that the interval doubles while windows are too long.
_MOST_WIDENINGS = 6


class Timetable:
    """The plan's interval, with jitter: jobs of a node differ. Times in seconds."""

    def __init__(self, plan: Plan, record: Record) -> None:
        self._plan = plan
        self._record = record
        self._due = 0.0

    @property
    def due(self) -> bool:
        """Whether a periodic snapshot is due."""
        return self._plan.every is not None and time.monotonic() >= self._due

    def schedule(self, delay: float) -> None:
        """Take the next periodic snapshot in ``delay`` seconds, and let the record say so."""
        self._due = time.monotonic() + delay
        basis = None
        if self._plan.every is None:
            interval = due = 0.0
        else:
            interval, due = self._interval(), time.time() + delay
            basis = Basis(
                every=0.0 if self._plan.every == "auto" else self._plan.every,
                max_overhead=self._plan.bounds.max_overhead,
                max_loss=self._plan.bounds.max_loss_seconds,
                slow_down=self._plan.slow_down,
                failure_seconds=self._plan.failure_seconds,
            )
        self._record.save(
            msgspec.structs.replace(
                self._record.measured,
                interval_seconds=interval,
                due=due,
                notice_seconds=self._plan.notice,
                basis=basis,
            )
        )

    def first_delay(self) -> float:
        """Return the time until the first snapshot of an instance."""
        delay = self.delay()
        if self._plan.every == "auto" and not self._record.measured.taken:
            delay = min(delay, _FIRST_SECONDS)
        return delay * random.uniform(0.5, 1.0)

    def delay(self) -> float:
        """Return the time until the next snapshot."""
        if self._plan.every == "auto":
            if not self._record.measured.taken:
                return _FIRST_SECONDS
            return self._interval() * random.uniform(1 - _JITTER, 1 + _JITTER)
        return self._interval() * random.uniform(1 - _JITTER, 1.0)

    def after_long_windows(self, before: int, least: float) -> float:
        """Return the time until the next snapshot after one whose window was too long. The job
        stood still for nothing, and might again, so this time grows with each: up to twice the
        interval, or up to the maximum loss if that is longer.

        Args:
            before: The number of such snapshots in a row before this one.
            least: The pause after any failed snapshot, within that bound.
        """
        most = max(self._plan.bounds.max_loss_seconds, 2.0 * self._interval())
        return min(most, max(least, self.delay() * 2.0 ** min(before, _MOST_WIDENINGS)))

    def _interval(self) -> float:
        """Return the time from one snapshot to the next, without jitter."""
        if self._plan.every != "auto":
            return self._plan.every or 0.0
        cost = self._record.measured.cost(self._plan.slow_down)
        if cost is None:
            return _FIRST_SECONDS
        rate = self._record.measured.rate(self._plan.failure_seconds)
        return choose(cost, rate, self._plan.bounds).seconds
