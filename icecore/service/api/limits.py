"""Bound the requests per second of each caller, and the size of the table of callers."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable

_MOST = 4096


class Rate:
    """A token bucket for each caller.

    Args:
        per_second: Sustained requests per second.
        burst: Requests at once after a pause.
        clock: Seconds.
    """

    def __init__(
        self, per_second: float, burst: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._rate = per_second
        self._burst = burst
        self._clock = clock
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()

    def take(self, who: str) -> float:
        """Count one request; return 0, or the seconds to wait before the next attempt."""
        now = self._clock()
        left, at = self._buckets.pop(who, (self._burst, now))
        left = min(self._burst, left + (now - at) * self._rate)
        wait = 0.0 if left >= 1 else (1 - left) / self._rate
        self._buckets[who] = (left - 1 if not wait else left, now)
        while len(self._buckets) > _MOST:  # the one that has been silent for longest
            self._buckets.popitem(last=False)
        return wait
