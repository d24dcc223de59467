"""Processes whose main thread has ended while other threads run. CRIU cannot dump a tree with one."""

from __future__ import annotations

import time

from icecore.errors import NotFound
from icecore.host.kernel import procfs

#: How often to look whether a process without its main thread has ended, and the seconds between
#: two looks.
_ENDING_LOOKS, _ENDING_PAUSE = 50, 0.01


def outlived(zombie: int) -> bool:
    """Return whether other threads of a zombie still run after half a second. Every process with
    several threads is in this state for a moment when it ends.
    """
    for _ in range(_ENDING_LOOKS):
        if procfs.is_over(zombie):
            return False
        time.sleep(_ENDING_PAUSE)
    return True


def await_ends(root: int) -> None:
    """Wait up to half a second for each such process to end.

    Args:
        root: Host pid of the tree's root.
    """
    for pid in procfs.tree(root):
        try:
            if procfs.is_zombie(pid):
                outlived(pid)
        except NotFound:
            continue  # it has been reaped
