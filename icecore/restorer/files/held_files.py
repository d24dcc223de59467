"""Checks the files that CRIU opened for a held tree, which runs only if all of them pass.

CRIU opens files by their paths, as root. A user who controls a directory of such a path can
redirect it between the check and CRIU's opening; the job would get another user's file. Each file
that the images have CRIU open for a process, as a descriptor or for a mapping, is compared by its
inode. What a path looks like now exempts nothing: a link can lead to /proc/PID/mem, and to a file
without a name through /proc/PID/fd.
"""

from __future__ import annotations

import bisect
import os
import stat
from collections.abc import Set
from contextlib import suppress
from pathlib import Path

from icecore.errors import NotFound, RestoreFailed
from icecore.host.criu.opened_images import OpenedFile, OpenedImages
from icecore.host.cuda.holder import replaced_mappings
from icecore.host.kernel import procfs
from icecore.restorer.files.rights import Inode, inode_of

#: File systems of the kernel, in which no user makes names.
_PSEUDO = ("/proc/", "/sys/", "/dev/")
_SHARED_MEMORY = "/dev/shm/"
_DELETED = " (deleted)"


def require_files(
    root: int,
    images: Path,
    expected: Set[Inode],
    own: tuple[str, ...] = (),
    given: Set[str] = frozenset(),
    recorded: Set[str] = frozenset(),
    *,
    surroundings: bool = False,
) -> None:
    """Return if every regular file that CRIU opened for the processes is one of ``expected``.

    Files without a name must be those that CRIU made from its images.

    Args:
        root: Pid of the tree's root.
        images: CRIU's images.
        own: Beginnings of paths where the instance has file systems of its own.
        given: Recorded paths whose files CRIU inherits instead of opening them. Those that its
            plugin replaces are added.
        recorded: Paths of files in the snapshot. Other files below /proc, /sys and /dev are the
            kernel's.
        surroundings: Check directories and FIFOs, too: ``expected`` contains them.

    Raises:
        RestoreFailed: One is not.
    """
    opened = OpenedImages(images)
    given = given | replaced_mappings(images)
    for pid in procfs.tree(root):
        with suppress(NotFound):  # it ended meanwhile
            _require_of_process(pid, opened, expected, own, given, recorded, surroundings)


def _require_of_process(
    pid: int,
    opened: OpenedImages,
    expected: Set[Inode],
    own: tuple[str, ...],
    given: Set[str],
    recorded: Set[str],
    surroundings: bool,
) -> None:
    own_pid = procfs.status(pid).own_pid
    links = [
        (f"/proc/{pid}/fd/{number}", file) for number, file in opened.descriptors(own_pid).items()
    ]
    if surroundings:
        links += [
            (f"/proc/{pid}/{name}", file) for name, file in opened.directories(own_pid).items()
        ]
    mapped = list(opened.mappings(own_pid))
    if mapped:
        starts = [start for start, _, _ in mapped]
        for mapping in procfs.read_maps(pid):
            at = bisect.bisect_right(starts, mapping.start) - 1
            if mapping.inode and at >= 0 and mapping.start < mapped[at][1]:
                links.append(
                    (f"/proc/{pid}/map_files/{mapping.start:x}-{mapping.end:x}", mapped[at][2])
                )
    for link, file in links:
        if file.file.path in given:
            continue
        try:
            target, about = os.readlink(link), os.stat(link)
        except (FileNotFoundError, ProcessLookupError):
            continue
        if surroundings and _is_around(about):
            right = _is_right_place(file, target, about, expected, own)
        else:
            right = _is_right(file, target, about, expected, own, recorded)
        if not right:
            raise RestoreFailed(
                f"CRIU opened {target} for process {pid}, which is not the file that was checked: it was replaced during the restore",
                cure="keep others from changing the directories of the job's files, then restore again",
            )


def _is_around(about: os.stat_result) -> bool:
    return stat.S_ISDIR(about.st_mode) or stat.S_ISFIFO(about.st_mode)


def _is_right_place(
    opened: OpenedFile,
    target: str,
    about: os.stat_result,
    expected: Set[Inode],
    own: tuple[str, ...],
) -> bool:
    """Return whether CRIU opened the directory or FIFO that the images mean."""
    path, mode = opened.file.path, opened.file.mode
    if mode and stat.S_IFMT(mode) != stat.S_IFMT(about.st_mode):
        return False
    if path == "/" or opened.ghost_user is not None:
        return opened.ghost_user is None or about.st_uid == opened.ghost_user
    if inode_of(about) in expected:
        return True
    if path.startswith(_PSEUDO) and not path.startswith(_SHARED_MEMORY):
        return target.removesuffix(_DELETED) == path
    return any(
        f"{path}/".startswith(beginning) and f"{target}/".startswith(beginning) for beginning in own
    )


def _is_right(
    opened: OpenedFile,
    target: str,
    about: os.stat_result,
    expected: Set[Inode],
    own: tuple[str, ...],
    recorded: Set[str],
) -> bool:
    """Return whether CRIU opened the file that the images mean."""
    path, mode = opened.file.path, opened.file.mode
    if not stat.S_ISREG(about.st_mode):
        return not mode or not stat.S_ISREG(
            mode
        )  # directories and devices are no part of a snapshot
    if inode_of(about) in expected:
        return True
    if any(path.startswith(beginning) and target.startswith(beginning) for beginning in own):
        return True
    if opened.ghost_user is not None:
        return not about.st_nlink and about.st_uid == opened.ghost_user
    pseudo = path.startswith(_PSEUDO) and not path.startswith(_SHARED_MEMORY)
    if pseudo and path not in recorded:
        return target.removesuffix(_DELETED) == path
    return False
