"""Wait for any number of descriptors: select(2) accepts none above 1023, and a snapshot of GPU
memory may keep thousands open.
"""

from __future__ import annotations

import select
from collections.abc import Collection


def readable(descriptors: Collection[int], seconds: float | None) -> set[int]:
    """Return those that are readable or whose other end is closed.

    Args:
        seconds: To wait for the first of them, at most; None: without limit.
    """
    poll = select.poll()
    for descriptor in descriptors:
        poll.register(descriptor, select.POLLIN)
    return {descriptor for descriptor, _ in poll.poll(None if seconds is None else seconds * 1000)}
