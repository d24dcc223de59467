"""The cgroup of a job, which freezes and thaws its whole tree at once (cgroups(7)): of version 2, or
of the freezer of version 1.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from icecore.errors import NotFound
from icecore.host.kernel import cgroups, frozen, procfs
from icecore.host.kernel.frozen import control

_PREFIX = "icecore-job-"
_POLL_SECONDS = 0.01
#: Control file of version 2 that kills all processes of a group, whatever their pid namespaces are.
_KILL = "cgroup.kill"


def make_group(name: str, groups: Mapping[str, str] | None = None) -> Path | None:
    """Make the cgroup of a job below the one in which the job would be without it.

    Version 2 comes first: schedulers that use version 1 find the processes of a job by their group
    of the freezer.

    Args:
        name: The instance's.
        groups: The groups of the job by hierarchy; None: those of this process.

    Returns:
        Its directory; None if no hierarchy permits it.
    """
    for above in _places(cgroups.groups_of() if groups is None else groups):
        group = above / f"{_PREFIX}{name}"
        try:
            group.mkdir()
        except OSError:
            continue
        if control(group) is not None:
            return group
        remove_group(group)
    return None


def group_of(pid: int) -> Path | None:
    """Return the directory of the cgroup that `make_group` made for the job of this process; None:
    it is in no such group, or has ended.
    """
    with suppress(NotFound):
        for place in _places(cgroups.groups_of(pid)):
            if place.name.startswith(_PREFIX) and control(place) is not None:
                return place
    return None


def contains(group: Path, pids: Collection[int]) -> bool:
    """Return whether every process is in the cgroup or in one below it. Those that have ended do not
    count.
    """
    own = [one for one in _hierarchies() if one.point in group.parents]
    if not own:
        return False
    for pid in pids:
        with suppress(NotFound):
            place = _place(own[0], cgroups.groups_of(pid))
            if place is None or (place != group and group not in place.parents):
                return False
    return True


def mark(group: Path, pid: int) -> bool:
    """Note on a cgroup, before a dump freezes it, which process thaws it; return whether that was
    possible.

    Should that process be killed together with all others of the dump, `thaw_left` finds the note.
    """
    try:
        os.setxattr(group, frozen.MARK, f"{pid} {procfs.start_time(pid)}".encode())
    except (OSError, NotFound):
        return False
    return True


def thaw_left(group: Path) -> bool:
    """Thaw a cgroup that a dump left frozen, because all its processes were killed; return whether it
    was such a group. One that somebody else has frozen has no mark.
    """
    if not frozen.is_frozen(group):
        return False
    try:
        pid, start = map(int, os.getxattr(group, frozen.MARK).split())
    except (OSError, ValueError):
        return False
    if procfs.runs(pid, start):
        return False
    frozen.thaw(group)
    return True


def processes(group: Path) -> list[int]:
    """Return the processes in a cgroup and in those below it. One that this process's pid namespace
    does not contain is 0.
    """
    found: list[int] = []
    for folder, _, _ in os.walk(group):
        with suppress(OSError):
            found += map(int, Path(folder, "cgroup.procs").read_text().split())
    return found


def kill_group(group: Path, seconds: float) -> bool:
    """Kill all processes of a cgroup, including those that are frozen or forked meanwhile.

    Args:
        seconds: How long to wait for their end.

    Returns:
        Whether none is left.
    """
    end = time.monotonic() + seconds
    while left := processes(group):
        with suppress(OSError):  # older kernels lack the file
            descriptor = os.open(group / _KILL, os.O_WRONLY | os.O_CLOEXEC)
            try:
                os.write(descriptor, b"1")
            finally:
                os.close(descriptor)
        for pid in left:
            if pid > 0:  # 0 would be this process's own group
                with suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL)
        if frozen.is_frozen(group):
            frozen.thaw(group)  # in version 1, processes end only once thawed
        if time.monotonic() >= end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def remove_group(group: Path, seconds: float = 0.0) -> bool:
    """Remove a cgroup, with those below it, once no process is in it.

    Args:
        seconds: How long to wait for the last process.

    Returns:
        Whether it is gone.
    """
    end = time.monotonic() + seconds
    while True:
        try:
            for folder, _, _ in os.walk(group, topdown=False):
                os.rmdir(folder)
            return True
        except FileNotFoundError:
            return True
        except OSError:
            if time.monotonic() >= end:
                return False
        time.sleep(_POLL_SECONDS)


def _hierarchies() -> list[cgroups.Hierarchy]:
    """Return the hierarchies that can freeze, version 2 first."""
    found = [
        one for one in cgroups.hierarchies() if not one.name or "freezer" in one.name.split(",")
    ]
    return sorted(found, key=lambda one: one.name)


def _places(groups: Mapping[str, str]) -> Iterator[Path]:
    """Yield the directories of groups in the hierarchies that can freeze."""
    for one in _hierarchies():
        place = _place(one, groups)
        if place is not None:
            yield place


def _place(hierarchy: cgroups.Hierarchy, groups: Mapping[str, str]) -> Path | None:
    """Return the directory of a group; None: it is not mounted here, or was removed."""
    group = groups.get(hierarchy.name)
    if group is None or group.endswith(" (deleted)"):
        return None
    below = os.path.relpath(group, hierarchy.root)
    return None if below.startswith("..") else hierarchy.point / below
