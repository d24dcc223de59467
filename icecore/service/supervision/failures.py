"""Decides from which snapshot a job that fails is brought back, and when to give up.

Times of failures are the job's own: a job that was restored goes on at the time at which its
snapshot was taken. A job whose state is bad fails again at about the same time, whatever snapshots
are taken before. So a series of failures ends with the first snapshot or failure of a job that has
got past that time. Until then only those snapshots are restored that existed when the series began.
If none did, the first ones that appear are restored, and the job starts anew when they are used up.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import msgspec

from icecore.host.jobs.description import Description
from icecore.service.record import Measured, Series, Taken
from icecore.store.format.state import SnapshotRecord

#: A job that fails twice from a snapshot is brought back from an older one.
_SAME_SNAPSHOT = 2
#: How far a job must get past its failure: a share of the time from its snapshot to the failure.
_MARGIN = 0.1
_LEAST_MARGIN_SECONDS = 5.0
#: Snapshots whose job time is remembered: a supervisor lives for months.
_MOST_TAKEN = 1000
#: How long to retry a job, at least, before giving up.
_LEAST_TRIED_SECONDS = 30.0


class Failures:
    """The failures of one job since it last got past one.

    Args:
        created: When snapshots were taken whose job time is not known, in Unix time. It stands in
            for the job's time, but the job may have been down between two of them.
        clock: Monotonic, in seconds.
        known: What an earlier supervisor of this node recorded.

    Attributes:
        count: The number of failures in the series. Restores that failed do not count.
    """

    def __init__(
        self,
        created: Mapping[str, float],
        clock: Callable[[], float] = time.monotonic,
        known: Measured | None = None,
    ) -> None:
        self.count = 0
        self._created = created
        self._clock = clock
        #: When snapshots of this node's supervisors were taken, by the job's own time.
        self._taken: dict[str, float] = {}
        self._started: float | None = None
        #: The job's time when the instance began, and the monotonic clock's.
        self._base = self._began = 0.0
        #: The job's time at the snapshot from which it would be brought back if it failed.
        self._from = 0.0
        self._ended = 0.0
        #: Since when the instance is paused, by the monotonic clock; None: it runs.
        self._paused: float | None = None
        #: When the series began, by the monotonic clock.
        self._first = 0.0
        #: The job's time at which it has got past its failures.
        self._past = 0.0
        #: The same for this instance.
        self._past_here = 0.0
        #: The longest that an instance ran until it failed.
        self._ran = 0.0
        #: Snapshot → how often in the series the job failed from it, or it could not be restored.
        self._tried: Counter[str] = Counter()
        #: The snapshot from which the instance was restored; empty: it was started.
        self._origin = ""
        #: The snapshots from before the series; None: not known yet.
        self._candidates: frozenset[str] | None = None
        #: The job is started anew once its candidates are used up: it had none when it failed.
        self._anew = False
        #: The series is of an earlier supervisor, and no instance of this one has begun.
        self._inherited = False
        if known is not None:
            self._restore(known)

    def _restore(self, known: Measured) -> None:
        """Go on where an earlier supervisor ended."""
        self._taken.update((one.snapshot, one.job_time) for one in known.taken if one.job_time)
        series = known.series
        if series is None:
            return
        self.count, self._past, self._started = series.count, series.past, series.started
        self._ran = series.ran
        self._candidates = None if series.candidates is None else frozenset(series.candidates)
        self._anew = series.anew
        self._tried.update(series.tried)
        self._first = self._clock()
        self._inherited = True

    @property
    def lasts(self) -> bool:
        """Whether the job has failed, and has not got past that yet."""
        return self._past > 0.0

    @property
    def series(self) -> Series | None:
        """What the next supervisor needs of a series that lasts; None: none does."""
        if not self.lasts:
            return None
        return Series(
            self._past,
            self.count,
            self._started,
            None if self._candidates is None else sorted(self._candidates),
            self._anew,
            dict(self._tried),
            self._ran,
        )

    def begin(self, job: Description) -> None:
        """Take note of an instance that runs now."""
        known = True
        if self._inherited and self._is_elsewhere(job.restored_from):
            self.get_past()
            self._started = None
        self._inherited = False
        self._origin = job.restored_from
        if job.restored_from:
            at = self._taken.get(job.restored_from)
            known = at is not None
            if at is None:
                at = self._created.get(job.restored_from, job.created)
            self._base = at
        else:
            if self._candidates and not self._anew:  # those of an earlier supervisor are void
                self.get_past()
                self._started = None
            self._base = self._started = job.created if self._started is None else self._started
        self._past_here = self._past if known else self._bound()
        self._from = self._base
        self._paused = None
        adopted = job.owner[0] != os.getpid()
        self._began = self._clock() - (max(0.0, time.time() - job.created) if adopted else 0.0)

    def _is_elsewhere(self, origin: str) -> bool:
        """Return whether an instance has nothing to do with the series of an earlier supervisor: it
        was restored from a snapshot that another node took later, or the candidates are gone.
        """
        if not origin:
            return bool(self._candidates)
        return origin not in self._taken and origin not in (self._candidates or ())

    def pause(self) -> None:
        """Take note that the instance stands still."""
        self._paused = self._clock()

    def go_on(self) -> None:
        """Take note that it runs again."""
        if self._paused is not None:
            self._began += self._clock() - self._paused
            self._paused = None

    def end(self) -> None:
        """Take note of the end of the instance."""
        self._ended = self._at(self._clock())

    def fail(self) -> None:
        """Count the end of the instance as a failure."""
        now = self._ended
        if now > max(self._past, self._past_here):
            self.get_past()
        if self.lasts:
            self._tried[self._origin] += 1
        if not self.count:
            self._first = self._clock()
        self.count += 1
        self._past = max(self._past, now + _margin(now - self._from))
        self._ran = max(self._ran, now - self._base)

    def fail_to_begin(self, tried: Sequence[SnapshotRecord]) -> None:
        """Take note of snapshots that could not be restored."""
        self._tried.update(one.snapshot for one in tried)

    def take(self, taken: Taken, committed: float) -> Taken:
        """Take note of a snapshot of the instance; return it with its ``job_time``.

        Args:
            committed: When it was committed, by the monotonic clock.
        """
        at = self._at(committed) - taken.committing - taken.window
        self._taken[taken.snapshot] = at
        if len(self._taken) > _MOST_TAKEN:  # of the oldest, the time of their creation is known
            del self._taken[next(iter(self._taken))]
        if at > self._past_here:
            self.get_past()
        if not self.lasts:
            self._from = at
        return msgspec.structs.replace(taken, job_time=at)

    def choose(self, found: Sequence[SnapshotRecord]) -> list[SnapshotRecord] | None:
        """Return the snapshots from which to bring the job back, the best first. Empty: start it
        anew. None: give up.

        Args:
            found: Those of the job's lineage, newest first.
        """
        if self._candidates is None:
            self._candidates = frozenset(one.snapshot for one in found)
            self._anew = not found
        elif self._anew and not self._candidates:  # taken since it was started anew
            self._candidates = frozenset(one.snapshot for one in found)
            if found:
                self._tried.pop("", None)
        known = [one for one in found if one.snapshot in self._candidates]
        if self._candidates and not known and not self._anew:  # all were forgotten
            known = list(found)
        if not known:
            self._anew = True
        left = [one for one in known if self._tried[one.snapshot] < _SAME_SNAPSHOT]
        if left:
            return left
        if self._anew and self._tried[""] < _SAME_SNAPSHOT:
            return []
        if self._clock() - self._first >= _LEAST_TRIED_SECONDS:
            return None
        return [] if self._anew else known[-1:]

    def start_anew(self) -> None:
        """Restore only snapshots of the job that starts now."""
        self._candidates = frozenset()
        self._anew = True
        self._tried.clear()
        self._first = self._clock()

    def give_up(self, *, all_failed: bool) -> None:
        """Let the next supervisor begin to count again.

        Args:
            all_failed: Let it begin with the newest candidate again, too.
        """
        self.count = 0
        if all_failed:
            self._tried.clear()

    def get_past(self) -> None:
        """End the series."""
        self.count = 0
        self._tried.clear()
        self._past = self._past_here = self._ran = 0.0
        self._candidates = None
        self._anew = False

    def _at(self, moment: float) -> float:
        """Return the job's time at a moment of the monotonic clock."""
        if self._paused is not None:
            moment = min(moment, self._paused)
        return self._base + moment - self._began

    def _bound(self) -> float:
        """Return the job's time at which this instance has got past the failures, if its snapshot's
        own time is not known: at the latest once it has run longer than those before. By the times
        of commits, that could last as long as the job was down, or be over at once.
        """
        if not self.lasts:
            return 0.0
        bound = self._base + self._ran + _margin(self._ran)
        return min(self._past, bound) if self._base <= self._past else bound


def _margin(ran: float) -> float:
    """Return how far a job must get past a failure that came after ``ran`` seconds."""
    return max(_LEAST_MARGIN_SECONDS, _MARGIN * ran)
