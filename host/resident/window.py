"""Around the driver's checkpoint: memory taken away and given back; rule: left by an exception, the process runs with its memory.

The driver's own lock lets the work on the device come to an end and stops callers at the door, so that no thread is parked in the middle of a call.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from errno import EAGAIN

from icecore.host.resident.client import Agent, ResidentFailed

_PAUSE_SECONDS = 0.003


def take_away(
    agent: Agent, lock: Callable[[], None], unlock: Callable[[], None], *, seconds: float = 20.0, lease: float = 30.0
) -> int:
    """Park a running process and take its resident memory away; bytes. The driver's lock is off before and after.

    Args:
        lock, unlock: The driver's, for this process.
        seconds: After this time it is given up.
        lease: See `Agent.park`.

    Raises:
        ResidentFailed: It could not be done; the process runs on.
    """
    until = time.monotonic() + seconds
    pause = _PAUSE_SECONDS
    while True:
        lock()
        try:
            agent.park(max(0.1, until - time.monotonic()), lease)
        finally:
            unlock()
        try:
            return agent.unmap(max(0.1, until - time.monotonic()))
        except ResidentFailed as error:
            # A thread held the allocator's lock, say: at another moment it does not.
            if error.code != EAGAIN or time.monotonic() + pause > until:
                raise
        time.sleep(pause)
        pause *= 1.5


def give_back(agent: Agent, descriptors: Mapping[int, int] | None = None, *, seconds: float = 60.0) -> None:
    """Map the memory of a process again and let it run; the driver's lock is off.

    Args:
        descriptors: See `Agent.map`.
    """
    agent.map(descriptors, seconds)
    agent.go()
