"""The clock of leases, for processes that load nothing else of the store."""

from __future__ import annotations

import time


def now() -> float:
    """Return seconds on a clock that also runs in suspend."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)
