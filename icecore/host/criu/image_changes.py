"""Edit CRIU's images before a restore. Fields that an edit does not name stay as they were dumped.

Mounts are in mountpoints-N.img (CRIU's images/mnt.proto), open files in files.img (fdinfo.proto,
regfile.proto), limits in core-N.img (core.proto, rlimit.proto).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Set
from pathlib import Path

from icecore.errors import RestoreRefused
from icecore.host.criu.images import CORE, FILES, REGULAR_FILE, read_image, write_image
from icecore.host.criu.protobuf import Message

MOUNTS = 0x55563928

_ID, _PARENT, _ROOT, _POINT, _SHARED, _MASTER, _KEY = 2, 4, 6, 7, 10, 11, 18
_VARINT, _BYTES = 0, 2
_ENTRY_TYPE, _ENTRY_FILE = 1, 3
_FILE_NAME, _FILE_SIZE = 6, 8
_TASK, _TASK_LIMITS, _LIMITS, _SOFT, _HARD = 3, 8, 1, 1, 2
_UNLIMITED = (1 << 64) - 1


def add_external_mounts(folder: Path, names: Mapping[str, str]) -> None:
    """Add external mounts of single files.

    Args:
        folder: CRIU's images.
        names: Path of a file in the root → the name under which ``criu restore --external`` says
            what is mounted there.

    Raises:
        RestoreRefused: There are several mount namespaces: processes in the others would not see
            the mounts.
    """
    images = sorted(folder.glob("mountpoints-*.img"))
    if len(images) != 1:
        raise RestoreRefused(
            f"the job has {len(images)} mount namespaces: only its first process could get copies of files",
            cure="choose --files restore or leave",
        )
    mounts = read_image(images[0], MOUNTS)
    number = max(mount.integer(_ID) for mount in mounts)
    points = {
        _point(mount): mount for mount in reversed(mounts)
    }  # newest first: of those at one point the newest is on top
    for path, name in names.items():
        number += 1
        parent = points[max((point for point in points if _is_below(path, point)), key=len)]
        mounts.insert(0, _external(parent, number, path, name))
    write_image(images[0], mounts, MOUNTS)


def _point(mount: Message) -> str:
    return os.fsdecode(mount.raw(_POINT))


def _is_below(path: str, point: str) -> bool:
    return point == "/" or path.startswith(f"{point}/")


def _external(parent: Message, number: int, path: str, name: str) -> Message:
    """Return a mount like its parent, but external and without peers."""
    changed = (_ID, _PARENT, _ROOT, _POINT, _SHARED, _MASTER, _KEY)
    fields = [one for one in parent.fields if one[0] not in changed]
    fields += [
        (_ID, _VARINT, number),
        (_PARENT, _VARINT, parent.integer(_ID)),
        (_ROOT, _BYTES, os.fsencode(path)),
        (_POINT, _BYTES, os.fsencode(path)),
        (_KEY, _BYTES, name.encode()),
    ]
    return Message(sorted(fields, key=lambda one: one[0]))


def forget_sizes(folder: Path, paths: Set[str]) -> None:
    """Make CRIU open regular files whatever their size is at the restore.

    Args:
        folder: CRIU's images.
        paths: The files.
    """
    if not paths:
        return
    entries = read_image(folder / "files.img", FILES)
    for entry in entries:
        if (
            entry.integer(_ENTRY_TYPE) == REGULAR_FILE
            and (file := entry.message(_ENTRY_FILE)).text(_FILE_NAME) in paths
        ):
            entry.set(_ENTRY_FILE, Message([one for one in file.fields if one[0] != _FILE_SIZE]))
    (folder / "files.img").unlink()  # it may be shared with the repository
    write_image(folder / "files.img", entries, FILES)


def bound_limits(
    folder: Path, most: Mapping[int, int], unsaid: int = 0
) -> dict[int, tuple[int, int]]:
    """Bound the limits (setrlimit(2)) of all processes.

    CRIU (criu/pie/restorer.c, restore_rlims) ignores that a hard limit cannot be raised, and then
    leaves the soft limit too at what CRIU itself has.

    Args:
        folder: CRIU's images.
        most: Number of a limit → the highest hard limit.
        unsaid: A process whose limits need no mention; 0: none.

    Returns:
        Number of each limit that was lowered → the highest hard limit that a process had, and the
        one that it gets; `_UNLIMITED` is -1 there.
    """
    lowered: dict[int, tuple[int, int]] = {}
    for path in sorted(folder.glob("core-*.img")):
        entries = read_image(path, CORE)
        changed = False
        for entry in entries:
            task = entry.message(_TASK)
            limits = task.message(_TASK_LIMITS)
            values = limits.messages(_LIMITS)
            for number, value in enumerate(values):
                bound = most.get(number)
                if bound is None or value.integer(_HARD) <= bound:
                    continue
                if path.name != f"core-{unsaid}.img":
                    before = max(value.integer(_HARD), lowered.get(number, (0, 0))[0])
                    lowered[number] = (before, bound)
                value.set(_HARD, bound)
                value.set(_SOFT, min(bound, value.integer(_SOFT)))
                changed = True
            if changed:
                packed = [(_LIMITS, _BYTES, value.encode()) for value in values]
                task.set(_TASK_LIMITS, Message([*packed]))
                entry.set(_TASK, task)
        if changed:
            path.unlink()  # it may be shared with the repository
            write_image(path, entries, CORE)
    return {
        number: (-1 if before == _UNLIMITED else before, bound)
        for number, (before, bound) in lowered.items()
    }
