"""Take the resident memory of a process away for the driver's checkpoint, and give it back. If the
block raises, the process runs with its memory.

The threads are parked first, but only outside of the driver, as far as their stacks tell. Then the
driver's own lock has few calls to wait for, if any, and what was submitted comes to its end; the
other way round it may never be had, because under threads that never rest there is always one
within. With the lock on, the rest is parked. Where it is not had within a short time, somebody is
parked who holds it up: all go on, and another moment is tried.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Callable, Iterator, Mapping
from errno import EAGAIN

import msgspec

from icecore.errors import IcecoreError
from icecore.host.cuda.api import LockTimeout
from icecore.host.resident.client import Agent, ResidentFailed

_PAUSE_SECONDS = 0.003
_FIRST_PATIENCE, _MOST_PATIENCE = 0.05, 1.0
_FIRST_LOCK = 0.25


class Try(msgspec.Struct, frozen=True):
    """The limits of one attempt, in seconds.

    Attributes:
        patience: For threads to leave the driver before its lock is requested, while any of them
            moves; 0: request the lock while all run.
        lock: For the driver's lock.
        left: For all else.
    """

    patience: float
    lock: float
    left: float


def tries(seconds: float) -> Iterator[Try]:
    """Return the attempts, each more patient than the one before, with growing and uneven pauses,
    so that ranks that wait for each other meet at other points.

    In every second one the lock comes first: of threads that hardly ever leave the driver it is had
    sooner in this way.
    """
    until = time.monotonic() + seconds
    patience, lock, pause = _FIRST_PATIENCE, _FIRST_LOCK, _PAUSE_SECONDS
    for number in itertools.count():
        left = max(0.1, until - time.monotonic())
        yield Try(0.0 if number % 2 else min(patience, left), min(lock, left), left)
        if time.monotonic() + pause > until:
            return
        time.sleep(random.uniform(0.5, 1.0) * pause)
        patience, lock, pause = min(1.4 * patience, _MOST_PATIENCE), 1.25 * lock, 1.25 * pause


def may_be_tried_again(error: BaseException) -> bool:
    """Return whether another moment may be better: a thread held the allocator's lock or kept the
    driver waiting, or a stream was being captured.
    """
    return isinstance(error, LockTimeout) or (
        isinstance(error, ResidentFailed) and error.code == EAGAIN
    )


def take_away(
    agent: Agent,
    lock: Callable[[float], None],
    unlock: Callable[[], None],
    *,
    seconds: float = 20.0,
    lease: float = 30.0,
) -> int:
    """Park a running process and take its resident memory away; return bytes. The driver's lock is
    off before and after.

    Args:
        lock, unlock: The driver's, for this process; ``lock`` is told its limit in seconds and
            raises `LockTimeout`.
        seconds: After this time it is given up.
        lease: See `Agent.park`.

    Raises:
        ResidentFailed, LockTimeout: It could not be done; the process runs on.
    """
    last: IcecoreError | None = None
    for one in tries(seconds):
        try:
            if one.patience:
                agent.park(one.left, lease, one.patience)
            try:
                lock(one.lock)
                try:
                    agent.park(one.left, lease)
                finally:
                    unlock()
            except BaseException:
                agent.go()
                raise
            return agent.unmap(one.left).bytes
        except IcecoreError as error:
            if not may_be_tried_again(error):
                raise
            last = error
    assert last is not None
    raise last


def give_back(
    agent: Agent, descriptors: Mapping[int, int] | None = None, *, seconds: float = 60.0
) -> None:
    """Map the memory of a process again and let it run; the driver's lock is off.

    Args:
        descriptors: See `Agent.map`.
    """
    agent.map(descriptors, seconds)
    agent.go()
