"""Cgroups whose names a user chose."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from unittest import mock

import pytest

from icecore.errors import UsageError
from icecore.host.criu.libraries import RESTORE_LIBRARY, restore_environment
from icecore.host.jobs.launch import StepFailed, join_cgroups
from icecore.host.kernel import cgroups, freezer, frozen

needs_library = pytest.mark.skipif(not RESTORE_LIBRARY.exists(), reason="needs a compiler")


@pytest.fixture
def group() -> Iterator[tuple[str, Path, str]]:
    """A hierarchy's name, the directory of a group of its own in it, and the group's name."""
    own = cgroups.groups_of()
    for one in cgroups.hierarchies():
        # A group of cpuset takes no process until it has processors.
        if one.name == "cpuset" or own[one.name] != one.root:
            continue
        place = one.point / f"icecore-test-{os.getpid()}"
        try:
            place.mkdir()
        except OSError:
            continue
        try:
            yield one.name, place, f"{one.root.rstrip('/')}/{place.name}"
        finally:
            for folder, _, _ in os.walk(place, topdown=False):
                os.rmdir(folder)
        return
    pytest.skip("no hierarchy of cgroups can be written to")


def _joined(files: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["cat", "/proc/self/cgroup"],
        env={**os.environ, **restore_environment(files)},
        capture_output=True,
        text=True,
        timeout=20,
    )


@needs_library
@pytest.mark.parametrize(
    "name", ["a:b", "a\\012b", "cgroup.procs:{victim}:", "x/cgroup.procs:{top}"]
)
def test_a_name_is_no_list_of_paths(
    name: str, group: tuple[str, Path, str], tmp_path: Path
) -> None:
    hierarchy, place, path = group
    victim = tmp_path / "victim"
    victim.write_text("mine")
    name = name.format(victim=victim, top=place.parent)
    (place / name.lstrip("/")).mkdir(parents=True)
    wanted = f"{path}/{name}"
    files = cgroups.files_to_join({hierarchy: wanted})
    assert files == [f"{place}/{name}/cgroup.procs"]
    done = _joined(files)
    assert done.returncode == 0, done.stderr
    assert any(line.endswith(f":{hierarchy}:{wanted}") for line in done.stdout.splitlines())
    assert victim.read_text() == "mine"
    child = os.fork()
    if not child:
        with ExitStack() as leaving:
            leaving.callback(os._exit, 1)
            join_cgroups(files)
            os._exit(0 if cgroups.groups_of()[hierarchy] == wanted else 2)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert victim.read_text() == "mine"


@needs_library
def test_only_files_of_groups_are_written_to(group: tuple[str, Path, str], tmp_path: Path) -> None:
    real = tmp_path / "cgroup.procs"
    real.write_text("mine")
    (tmp_path / "x").mkdir()
    link = tmp_path / "x" / "cgroup.procs"
    link.symlink_to(group[1] / "cgroup.procs")
    other = group[1] / "notify_on_release"
    for path in (real, link, other):
        done = _joined([str(path)])
        assert done.returncode == 1 and str(path) in done.stderr
        with pytest.raises(StepFailed) as failed:
            join_cgroups([str(path)])
        assert failed.value.error.errno in (errno.EINVAL, errno.ELOOP)
    assert real.read_text() == "mine"
    assert not (group[1] / "cgroup.procs").read_text()


@needs_library
def test_a_path_of_several_lines_is_refused() -> None:
    with pytest.raises(UsageError):
        restore_environment(["/a\n/etc/shadow"])


def test_a_removed_group_is_refused(group: tuple[str, Path, str]) -> None:
    hierarchy, place, path = group
    (place / "x (deleted)").mkdir()
    with pytest.raises(UsageError, match="has been removed"):
        cgroups.files_to_join({hierarchy: f"{path}/x (deleted)"})
    with pytest.raises(UsageError, match="no cgroup"):
        cgroups.files_to_join({hierarchy: f"{path}/x"})


def test_a_group_that_goes_while_it_is_thawed() -> None:
    """The kernel answers ENODEV then, and its processes have ended."""
    group = freezer.make_group(f"thawed-{os.getpid()}")
    if group is None:
        pytest.skip("no hierarchy of cgroups can be written to")
    over = threading.Event()

    def come_and_go() -> None:
        while not over.is_set():
            group.rmdir()
            group.mkdir()

    with ThreadPoolExecutor(1) as pool:
        going = pool.submit(come_and_go)
        try:
            for _ in range(5000):
                frozen.thaw(group)
        finally:
            over.set()
            going.result(10)
    group.rmdir()


def test_a_process_of_another_pid_namespace_is_not_taken_for_this_one(tmp_path: Path) -> None:
    """The kernel lists it as 0, which kill(2) takes for the caller's process group."""
    (tmp_path / "cgroup.procs").write_text("0\n4194999\n")
    killed: list[tuple[int, int]] = []
    with mock.patch.object(os, "kill", lambda pid, number: killed.append((pid, number))):
        assert not freezer.kill_group(tmp_path, 0.0)
        assert killed == [(4194999, signal.SIGKILL)]
        assert not (tmp_path / "cgroup.kill").exists()
        (tmp_path / "cgroup.kill").write_text("")
        assert not freezer.kill_group(tmp_path, 0.0)
    assert (tmp_path / "cgroup.kill").read_text() == "1"
    assert freezer.processes(tmp_path) == [0, 4194999]
