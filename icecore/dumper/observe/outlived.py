"""Processes whose main thread has ended while others run. CRIU cannot dump a tree with one."""

from __future__ import annotations

import time

from icecore.errors import NotFound
from icecore.host.kernel import procfs

#: How often to look whether a process with a dead main thread is about to end, and the seconds
#: between two looks.
_ENDING_LOOKS, _ENDING_PAUSE = 50, 0.01


def outlived(zombie: int) -> bool:
    """Return whether other threads of a zombie run on. Every process that ends with threads looks so
    for a moment, so look for a while.
    """
    for _ in range(_ENDING_LOOKS):
        if procfs.is_over(zombie):
            return False
        time.sleep(_ENDING_PAUSE)
    return True


def await_ends(root: int) -> None:
    """Wait a moment for the ends of such processes.

    Args:
        root: Host pid of the tree's root.
    """
    for pid in procfs.tree(root):
        try:
            if procfs.is_zombie(pid):
                outlived(pid)
        except NotFound:
            continue  # it has been reaped
