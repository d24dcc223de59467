"""How often a job is snapshotted: Young's and Daly's optimum, between two bounds. Pure.

The cost of a snapshot is what the job loses by it: the time that it stands still, and the share by
which it is slower while the rest of the snapshot is taken. The loss of a failure is what the job
has done since its newest snapshot. The interval at which both together are least is about
sqrt(2 * cost * M), where M is the mean time between failures.

Sources: J. W. Young, "A first order approximation to the optimum checkpoint interval" (1974);
J. T. Daly, "A higher order estimate of the optimum checkpoint interval" (2006), equation 37.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import msgspec

DAY = 86400.0


class FailureRate(msgspec.Struct, frozen=True):
    """What is known of how often a job fails: a Gamma prior of one failure, updated by what
    happened.

    Attributes:
        prior_seconds: Mean time between failures that is assumed at the beginning.
        failures: How many there were. A preemption that left a snapshot is none.
        seconds: How long the job has run.
    """

    prior_seconds: float = DAY
    failures: int = 0
    seconds: float = 0.0

    @property
    def mean_seconds(self) -> float:
        """Mean time between failures, in seconds."""
        return max(1.0, (self.prior_seconds + self.seconds) / (1 + self.failures))


class Cost(msgspec.Struct, frozen=True):
    """What a snapshot of a job costs it.

    Attributes:
        window_seconds: The job stands still.
        background_seconds: The snapshot is prepared or stored while the job runs.
        commit_seconds: From the window's end until the snapshot is committed.
        slow_down: Share of its speed that the job loses in the background.
    """

    window_seconds: float
    background_seconds: float
    commit_seconds: float
    slow_down: float = 0.02

    @property
    def seconds(self) -> float:
        """Seconds of work that the job loses by one snapshot."""
        return self.window_seconds + self.slow_down * self.background_seconds


class Bounds(msgspec.Struct, frozen=True):
    """What the user allows.

    Attributes:
        max_overhead: Share of the job's time that snapshots may cost.
        max_loss_seconds: Work that a failure may cost; it wins over ``max_overhead``.
    """

    max_overhead: float = 0.01
    max_loss_seconds: float = 1800.0


class Interval(msgspec.Struct, frozen=True):
    """The chosen interval, and why.

    Attributes:
        seconds: From the beginning of a snapshot to that of the next.
        optimum_seconds: Daly's, before the bounds.
        bound: What decided: ``optimum``, ``overhead``, ``commit`` or ``loss``.
        overhead: Share of the job's time that snapshots cost at this interval.
        expected_loss: Share of the job's time that failures are expected to cost.
    """

    seconds: float
    optimum_seconds: float
    bound: str
    overhead: float
    expected_loss: float


def daly(cost: float, mean: float) -> float:
    """Return the optimum interval in seconds for a cost and a mean time between failures."""
    if cost <= 0:
        return 0.0
    if cost >= 2 * mean:
        return mean
    share = cost / (2 * mean)
    return math.sqrt(2 * cost * mean) * (1 + math.sqrt(share) / 3 + share / 9) - cost


def losses(seconds: float, cost: Cost, mean: float) -> tuple[float, float]:
    """Return the shares of the job's time that snapshots and failures cost at an interval.

    A failure costs half an interval on average, and what was not committed yet.
    """
    return cost.seconds / seconds, (seconds / 2 + cost.commit_seconds) / mean


def choose(cost: Cost, rate: FailureRate, bounds: Bounds) -> Interval:
    """Return the interval for a job."""
    best = daly(cost.seconds, rate.mean_seconds)
    seconds, bound = best, "optimum"
    for least, name in (
        (cost.seconds / bounds.max_overhead, "overhead"),
        (cost.window_seconds + cost.background_seconds + cost.commit_seconds, "commit"),
    ):
        if least > seconds:
            seconds, bound = least, name
    if seconds > bounds.max_loss_seconds:
        seconds, bound = bounds.max_loss_seconds, "loss"
    seconds = max(seconds, 1.0)
    return Interval(seconds, best, bound, *losses(seconds, cost, rate.mean_seconds))


def curve(
    cost: Cost, rate: FailureRate, intervals: Sequence[float]
) -> list[tuple[float, float, float]]:
    """Return interval, overhead and expected loss for each of some intervals in seconds."""
    return [(each, *losses(each, cost, rate.mean_seconds)) for each in intervals]
