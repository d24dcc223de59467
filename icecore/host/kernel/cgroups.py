"""Control groups (cgroups(7)) of processes, in every hierarchy of versions 1 and 2."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import msgspec

from icecore.errors import NotFound, UsageError
from icecore.host.kernel import procfs


class Hierarchy(msgspec.Struct, frozen=True):
    """A mounted hierarchy.

    Attributes:
        name: Its controllers, as /proc/PID/cgroup names them: "cpu,cpuacct", "name=systemd"; "" is
            version 2.
        point: Where it is mounted.
        root: The group that the mount shows there.
    """

    name: str
    point: Path
    root: str


def groups_of(pid: int | str = "self") -> dict[str, str]:
    """Return the groups of a process by hierarchy (`Hierarchy.name`).

    Raises:
        NotFound: There is no such process.
    """
    try:
        data = Path(f"/proc/{pid}/cgroup").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise NotFound(f"there is no process {pid}") from error
    found = {}
    for line in data.split(b"\n"):
        words = line.split(b":", 2)
        if len(words) == 3:
            found[os.fsdecode(words[1])] = os.fsdecode(words[2])
    return found


def hierarchies() -> list[Hierarchy]:
    """Return the hierarchies that this process sees mounted."""
    return list(_hierarchies(Path("/proc/self/mountinfo").read_bytes(), set(groups_of())))


def _hierarchies(mountinfo: bytes, names: set[str]) -> Iterator[Hierarchy]:
    seen = set()
    for line in mountinfo.split(b"\n"):
        before, separator, after = line.partition(b" - ")
        words, kind = before.split(b" "), after.split(b" ")
        if not separator or kind[0] not in (b"cgroup", b"cgroup2"):
            continue
        options = set(os.fsdecode(kind[2]).split(","))
        name = next(
            (name for name in names if name and set(name.split(",")) <= options),
            "" if kind[0] == b"cgroup2" else None,
        )
        if name is None or name in seen:
            continue
        seen.add(name)
        yield Hierarchy(name, Path(procfs.unescaped(words[4])), procfs.unescaped(words[3]))


def files_to_join(
    groups: Mapping[str, str], gone: Callable[[str], None] | None = None
) -> list[str]:
    """Return the cgroup.procs files to which a process of this process's groups must write in order
    to join ``groups``. A hierarchy that is not mounted here does not count.

    Args:
        gone: Gets each group that has been removed; a process stays in this process's group
            instead. None: such a group is an error.

    Raises:
        UsageError: A group is outside of what is mounted here, or has been removed.
    """
    own = groups_of()
    found = []
    for one in hierarchies():
        wanted = groups.get(one.name)
        if wanted is None or wanted == own.get(one.name):
            continue
        if wanted.endswith(" (deleted)"):  # no group can be told from one that had that name
            if gone is not None:
                gone(wanted.removesuffix(" (deleted)"))
                continue
            raise UsageError(
                f"the cgroup {wanted} has been removed", cure="start the job from another one"
            )
        below = os.path.relpath(wanted, one.root)
        if below.startswith("..") or re.search(r"(^|/)\.\.(/|$)", wanted):
            raise UsageError(
                f"the cgroup {wanted} is outside of those that icecore sees",
                cure="run icecore outside of a cgroup namespace",
            )
        path = one.point / below / "cgroup.procs"
        if not path.exists():
            if gone is not None:
                gone(wanted)
                continue
            raise UsageError(
                f"there is no cgroup {wanted} any more", cure="start the job from another one"
            )
        found.append(str(path))
    return found
