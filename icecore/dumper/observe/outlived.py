"""Processes whose main thread has ended while other threads run. CRIU cannot dump a tree with one."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress

from icecore.errors import NotFound
from icecore.host.kernel import procfs

#: How many seconds processes without their main threads have to end, and the seconds between two looks.
_SECONDS, _PAUSE = 0.5, 0.01


def outlived(zombies: Iterable[int]) -> list[int]:
    """Return the zombies of which other threads run on. Every process with threads looks so for a
    moment when it ends, so look for half a second.
    """
    left, end = list(zombies), time.monotonic() + _SECONDS
    while (left := [pid for pid in left if not procfs.is_over(pid)]) and time.monotonic() < end:
        time.sleep(_PAUSE)
    return left


def await_ends(root: int) -> None:
    """Wait for half a second for such processes of a tree to end.

    Args:
        root: Host pid of the tree's root.
    """
    zombies = []
    for pid in procfs.tree(root):
        with suppress(NotFound):  # it has been reaped
            if procfs.is_zombie(pid):
                zombies.append(pid)
    outlived(zombies)
