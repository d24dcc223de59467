"""The cgroup of a job, which freezes and thaws its whole tree at once (cgroups(7)): of version 2, or
of the freezer of version 1.
"""

from __future__ import annotations

import os
import time
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from pathlib import Path

from icecore.errors import NotFound
from icecore.host.kernel import cgroups

_PREFIX = "icecore-"
#: Control file → what thaws the group.
_CONTROLS = {"cgroup.freeze": "0", "freezer.state": "THAWED"}
_POLL_SECONDS = 0.01


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
    for _, above in sorted(_places(cgroups.groups_of() if groups is None else groups).items()):
        group = above / f"{_PREFIX}{name}"
        try:
            group.mkdir()
        except OSError:
            continue
        if _control(group) is not None:
            return group
        remove_group(group)
    return None


def group_of(pid: int) -> Path | None:
    """Return the directory of the cgroup that `make_group` made for the job of this process; None:
    it is in no such group, or has ended.
    """
    with suppress(NotFound):
        for _, place in sorted(_places(cgroups.groups_of(pid)).items()):
            if place.name.startswith(_PREFIX) and _control(place) is not None:
                return place
    return None


def contains(group: Path, pids: Collection[int]) -> bool:
    """Return whether every process is in the cgroup or in one below it. Those that have ended do not
    count.
    """
    for pid in pids:
        with suppress(NotFound):
            places = _places(cgroups.groups_of(pid)).values()
            if not any(place == group or group in place.parents for place in places):
                return False
    return True


def is_frozen(group: Path) -> bool:
    """Return whether the cgroup is frozen, or is about to be."""
    control = _control(group)
    with suppress(OSError):
        return control is not None and control.read_text().strip() not in ("0", "THAWED")
    return False


def thaw(group: Path) -> None:
    """Let the processes of the cgroup run. It may be gone already."""
    control = _control(group)
    if control is not None:
        with suppress(FileNotFoundError):
            control.write_text(_CONTROLS[control.name])


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


def _places(groups: Mapping[str, str]) -> dict[str, Path]:
    """Return the directories of groups in the hierarchies that can freeze, by hierarchy."""
    return dict(_mounted(groups))


def _mounted(groups: Mapping[str, str]) -> Iterator[tuple[str, Path]]:
    for one in cgroups.hierarchies():
        group = groups.get(one.name)
        if group is None or (one.name and "freezer" not in one.name.split(",")):
            continue
        below = os.path.relpath(group, one.root)
        if not below.startswith("..") and not group.endswith(" (deleted)"):
            yield one.name, one.point / below


def _control(group: Path) -> Path | None:
    return next((group / name for name in _CONTROLS if (group / name).exists()), None)
