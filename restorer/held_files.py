"""Checks the files that CRIU opened for a held tree; the rule: the tree runs only if all of them were checked.

CRIU opens files by their paths, as root. A user who controls a directory of such a path can redirect it between the check and CRIU's opening;
the job would get another user's file.
"""

from __future__ import annotations

import stat
from collections.abc import Set

from icecore.errors import NotFound, RestoreFailed
from icecore.host import procfs
from icecore.restorer.jobfiles import Inode

_PSEUDO = ("/proc/", "/sys/", "/dev/", "/memfd:", "/SYSV", "/[aio]")
_SHARED_MEMORY = "/dev/shm/"


def require_files(root: int, expected: Set[Inode], own: tuple[str, ...] = ()) -> None:
    """Return if every regular file that the processes have open is one of ``expected``.

    Files without a name come from CRIU's images.

    Args:
        root: Pid of the tree's root.
        own: Beginnings of paths that are the instance's own.

    Raises:
        RestoreFailed: One is not.
    """
    for pid in procfs.tree(root):
        try:
            descriptors = procfs.descriptors(pid)
        except NotFound:
            continue
        for descriptor in descriptors:
            target = descriptor.target
            if not stat.S_ISREG(descriptor.mode) or not descriptor.links or not target.startswith("/"):
                continue
            if target.startswith(own) or (target.startswith(_PSEUDO) and not target.startswith(_SHARED_MEMORY)):
                continue
            if Inode(descriptor.device, descriptor.inode) not in expected:
                raise RestoreFailed(
                    f"CRIU opened {target} for process {pid}, which is not the file that was checked: somebody replaced it during the restore",
                    cure="keep others from changing the directories of the job's files, then restore again",
                )
