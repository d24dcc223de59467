"""Explains the interval between a job's snapshots: the numbers behind it, for the command line and
the API.
"""

from __future__ import annotations

import msgspec

from icecore.config import ScheduleSettings
from icecore.errors import NotFound
from icecore.service.interval import Bounds, choose, curve
from icecore.service.record import Basis, Measured

#: Intervals of the curve, as powers of 2 of the chosen one.
_STEPS = range(-4, 5)


class Point(msgspec.Struct, frozen=True, kw_only=True):
    """The shares of a job's time that snapshots and failures cost at an interval of ``seconds``."""

    seconds: float
    overhead: float
    expected_loss: float


class Explained(msgspec.Struct, frozen=True, kw_only=True):
    """The interval between a supervised job's snapshots, and the numbers behind it.

    Times are in seconds. ``interval_seconds`` is used; ``auto_seconds`` is what ``--every auto``
    chooses, and ``bound`` says what decided that: ``optimum``, ``overhead``, ``commit`` or
    ``loss``. ``overhead`` and ``expected_loss`` are shares of the job's time at ``auto_seconds``.
    ``stop_seconds`` is the longest time that stopping the job with a snapshot takes.
    ``mean_seconds`` is the estimated time between failures, ``prior_seconds`` the one assumed at
    first.
    """

    job: str
    interval_seconds: float
    auto_seconds: float
    optimum_seconds: float
    bound: str
    overhead: float
    expected_loss: float
    cost_seconds: float
    window_seconds: float
    background_seconds: float
    commit_seconds: float
    stop_seconds: float
    mean_seconds: float
    prior_seconds: float
    failures: int
    ran_seconds: float
    snapshots: int
    every_seconds: float
    max_overhead: float
    max_loss_seconds: float
    curve: list[Point]


def explain(job: str, known: Measured, settings: ScheduleSettings) -> Explained:
    """Explain a job's interval.

    Args:
        known: What was measured of it.
        settings: What applies if its supervisor did not record what it was given.

    Raises:
        NotFound: No snapshot of it was taken under supervision on this node.
    """
    own = known.basis or Basis(
        every=0.0,
        max_overhead=settings.max_overhead,
        max_loss=settings.max_loss,
        slow_down=settings.slow_down,
        failure_seconds=settings.failure_seconds,
    )
    cost = known.cost(own.slow_down)
    if cost is None:
        raise NotFound(
            f"no supervised job {job} has taken a snapshot on this node",
            cure="'icecore run --name NAME --every auto -- COMMAND' starts one",
        )
    rate = known.rate(own.failure_seconds)
    chosen = choose(cost, rate, Bounds(own.max_overhead, own.max_loss))
    points = [chosen.seconds * 2.0**step for step in _STEPS]
    return Explained(
        job=job,
        interval_seconds=own.every or chosen.seconds,
        auto_seconds=chosen.seconds,
        optimum_seconds=chosen.optimum_seconds,
        bound=chosen.bound,
        overhead=chosen.overhead,
        expected_loss=chosen.expected_loss,
        cost_seconds=cost.seconds,
        window_seconds=cost.window_seconds,
        background_seconds=cost.background_seconds,
        commit_seconds=cost.commit_seconds,
        stop_seconds=known.stop_seconds,
        mean_seconds=rate.mean_seconds,
        prior_seconds=rate.prior_seconds,
        failures=rate.failures,
        ran_seconds=rate.seconds,
        snapshots=known.snapshots,
        every_seconds=own.every,
        max_overhead=own.max_overhead,
        max_loss_seconds=own.max_loss,
        curve=[
            Point(seconds=each, overhead=overhead, expected_loss=loss)
            for each, overhead, loss in curve(cost, rate, points)
        ],
    )
