"""Cgroups for tests of who pays for memory: one that counts it, and a frozen one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from icecore.host.kernel import cgroups, freezer

#: Files of versions 2 and 1: what a group uses, and its limit.
USAGE = {"memory.current": "memory.max", "memory.usage_in_bytes": "memory.limit_in_bytes"}


@contextmanager
def memory_group() -> Iterator[tuple[Path, dict[str, str]]]:
    """Make a group below this process's; yield its directory, and the groups (`cgroups.groups_of`) of
    a process in it.
    """
    own = cgroups.groups_of()
    for one in cgroups.hierarchies():
        name = f"icecore-test-{os.getpid()}"
        below = os.path.relpath(own[one.name], one.root)
        made = one.point / below / name
        if below.startswith("..") or (one.name and "memory" not in one.name.split(",")):
            continue
        try:
            made.mkdir()
        except OSError:
            continue
        if any((made / file).exists() for file in USAGE):
            try:
                yield made, own | {one.name: os.path.join(own[one.name], name)}
            finally:
                assert freezer.remove_group(made, 30)
            return
        made.rmdir()
    pytest.skip("no cgroup that counts memory can be made here")


@contextmanager
def frozen_group() -> Iterator[Path]:
    """Make a frozen group of version 2; yield its directory."""
    place = next((one.point for one in cgroups.hierarchies() if not one.name), None)
    group = place / f"icecore-frozen-{os.getpid()}" if place else Path()
    try:
        group.mkdir()
        (group / "cgroup.freeze").write_text("1")
    except OSError:
        if place and group.exists():
            group.rmdir()
        pytest.skip("no cgroup that can be frozen can be made here")
    try:
        yield group
    finally:
        assert freezer.remove_group(group, 30)


def used(group: Path) -> int:
    """Return the bytes that a group pays for."""
    return next(int((group / file).read_text()) for file in USAGE if (group / file).exists())
