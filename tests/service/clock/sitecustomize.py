"""Moves the wall clock of a Python process by the seconds in the file that ICECORE_TEST_CLOCK names.
It is read at each call, so the clock jumps while the process runs. Monotonic clocks do not.
"""

import os
import time

_PATH = os.environ.get("ICECORE_TEST_CLOCK", "")
_time, _time_ns = time.time, time.time_ns


def _moved() -> float:
    try:
        with open(_PATH) as file:
            return float(file.read() or 0)
    except (OSError, ValueError):
        return 0.0


if _PATH:
    time.time = lambda: _time() + _moved()
    time.time_ns = lambda: _time_ns() + int(_moved() * 1e9)
