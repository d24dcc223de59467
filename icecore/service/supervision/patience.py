"""Retries calls that fail only while the repository cannot be reached."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from icecore.errors import ObjectMissing, StoreDenied, StoreError, StoreFull

T = TypeVar("T")

_BACK_OFF_SECONDS = (1.0, 60.0)
_MOST_DOUBLINGS = 10
#: Failures of the storage that do not pass.
_LASTING = (StoreDenied, StoreFull, ObjectMissing)


def back_off(retries: int) -> float:
    """Return the seconds to wait before one more try."""
    least, most = _BACK_OFF_SECONDS
    return min(most, least * 2.0 ** min(retries, _MOST_DOUBLINGS))


def patiently(
    call: Callable[[], T],
    *,
    told: Callable[[StoreError, float], None],
    wait: Callable[[float], None],
) -> T:
    """Return what a call returns once the repository can be reached.

    Args:
        told: Gets each failure, and the seconds until the next try.
        wait: Waits for so many seconds.

    Raises:
        StoreError: A failure that does not pass: the storage is full, denies access or lacks an
        object.
    """
    retries = 0
    while True:
        try:
            return call()
        except _LASTING:
            raise
        except StoreError as error:
            pause = back_off(retries)
            told(error, pause)
        retries += 1
        wait(pause)
