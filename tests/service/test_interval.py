"""How often a job is snapshotted: the optimum, its bounds, and what failures teach."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from icecore.service.interval import (
    DAY,
    Bounds,
    Cost,
    FailureRate,
    choose,
    daly,
    losses,
)
from icecore.service.record import Measured, Taken

COST = Cost(window_seconds=0.62, background_seconds=0.0, commit_seconds=2.0)


def test_youngs_example() -> None:
    """A window of 0.62 s and a failure a day: every 5.5 minutes, at 0.2 % beside 0.2 % lost."""
    chosen = choose(COST, FailureRate(DAY), Bounds())
    assert chosen.seconds == pytest.approx(math.sqrt(2 * 0.62 * DAY), rel=0.01)
    assert chosen.bound == "optimum"
    assert chosen.overhead == pytest.approx(0.0019, abs=2e-4)
    assert chosen.expected_loss == pytest.approx(0.0019, abs=2e-4)


@given(st.floats(0.01, 100), st.floats(600, 30 * DAY))
def test_no_interval_near_by_is_better(cost: float, mean: float) -> None:
    best = daly(cost, mean)
    if cost >= mean / 100:
        return  # the two shares are a first-order model; beyond it they say nothing

    def both(seconds: float) -> float:
        return sum(losses(seconds, Cost(cost, 0.0, 0.0), mean))

    assert both(best) <= both(best * 1.3) and both(best) <= both(best / 1.3)


@pytest.mark.parametrize(
    ("cost", "bounds", "bound", "seconds"),
    [
        (Cost(10.0, 0.0, 0.0), Bounds(0.001, 1e6), "overhead", 10_000.0),
        (Cost(0.1, 900.0, 5.0, slow_down=0.0), Bounds(0.5, 1e6), "commit", 905.1),
        (Cost(10.0, 0.0, 0.0), Bounds(0.001, 1800.0), "loss", 1800.0),
    ],
)
def test_bounds(cost: Cost, bounds: Bounds, bound: str, seconds: float) -> None:
    chosen = choose(cost, FailureRate(DAY), bounds)
    assert (chosen.bound, chosen.seconds) == (bound, pytest.approx(seconds))


def test_failures_shorten_the_interval_and_quiet_days_lengthen_it() -> None:
    often = choose(COST, FailureRate(DAY, failures=9, seconds=DAY), Bounds(0.5, 1e9))
    seldom = choose(COST, FailureRate(DAY, failures=0, seconds=99 * DAY), Bounds(0.5, 1e9))
    usual = choose(COST, FailureRate(DAY), Bounds(0.5, 1e9))
    assert often.seconds < usual.seconds / 2 < usual.seconds * 5 < seldom.seconds


def test_what_was_measured() -> None:
    known = Measured()
    assert known.cost(0.02) is None
    for number in range(100):
        known = known.after(Taken(float(number), 0.5, 10.0, 2.0, 1 << 20, f"{number:032x}"))
    assert len(known.taken) == 64 and known.taken[-1].snapshot == f"{99:032x}"
    cost = known.cost(0.02)
    assert cost is not None and cost.seconds == pytest.approx(0.5 + 0.02 * 9.5)
    known = known.after(Taken(100.0, 0.5, 20.0, 2.0, 1 << 20, "f" * 32))
    assert 10.0 < known.stop_seconds < 20.0
    periodic = Measured(interval_seconds=60.0).after(Taken(0.0, 0.5, 10.0, 2.0, 1, "f" * 32))
    assert periodic.stop_seconds == 12.0  # a snapshot whose window is over is stored first
