"""The cgroup of a job pays for its restored shared memory."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import RestoreFailed
from icecore.restorer.fill import charging
from icecore.restorer.fill.charging import Allocator, full_group, paying_group, ranges_of
from icecore.restorer.plan.cells import space_cells
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import Region
from tests.host.memory_group import USAGE, frozen_group, memory_group, used
from tests.host.target import eventually

MIB = 1 << 20


@pytest.fixture
def group() -> Iterator[Path]:
    with memory_group() as (made, _):
        yield made


@pytest.fixture
def member(group: Path) -> Iterator[int]:
    """A process in the group."""
    process = subprocess.Popen(["sleep", "600"])
    try:
        (group / "cgroup.procs").write_text(str(process.pid))
        yield process.pid
    finally:
        process.kill()
        process.wait(30)


@pytest.fixture
def memory() -> Iterator[int]:
    descriptor = os.memfd_create("charged")
    os.ftruncate(descriptor, 64 * MIB)
    yield descriptor
    os.close(descriptor)


RANGES = np.array([(0, 16 * MIB), (32 * MIB, 16 * MIB)], np.uint64)


def test_the_group_pays_and_holes_stay_holes(group: Path, member: int, memory: int) -> None:
    paying = paying_group(member)
    assert paying == group
    before = used(group)
    assert Allocator().allocate(paying, [(memory, RANGES)])
    assert used(group) - before >= 32 * MIB
    content = os.urandom(MIB) * 16
    assert os.pwrite(memory, content, 0) == os.pwrite(memory, content, 32 * MIB) == len(content)
    assert used(group) - before >= 32 * MIB  # who writes does not pay
    assert os.fstat(memory).st_blocks * 512 == 32 * MIB
    assert os.pread(memory, 16 * MIB, 32 * MIB) == content
    assert os.pread(memory, MIB, 16 * MIB) == bytes(MIB)


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW])
def test_an_object_keeps_its_size(seals: int, group: Path, member: int) -> None:
    """Its last page ends behind it."""
    descriptor = os.memfd_create("odd", os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(descriptor, 2 * MIB + 777)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
        ranges = np.array([(0, 4096), (MIB, MIB + 4096)], np.uint64)
        assert Allocator().allocate(group, [(descriptor, ranges)])
        about = os.fstat(descriptor)
        assert (about.st_size, about.st_blocks * 512) == (2 * MIB + 777, MIB + 8192)
    finally:
        os.close(descriptor)


def test_what_cannot_be_allocated_is_not_blamed_on_the_group(
    group: Path, member: int, memory: int
) -> None:
    descriptor = os.open(f"/proc/self/fd/{memory}", os.O_RDONLY)
    try:
        with pytest.raises(RestoreFailed, match="cannot be allocated") as caught:
            Allocator().allocate(group, [(descriptor, np.array([(0, 4096)], np.uint64))])
        assert "no room" not in str(caught.value)
    finally:
        os.close(descriptor)


def test_a_process_of_the_same_group_pays_anyway() -> None:
    assert paying_group(os.getpid()) is None
    assert paying_group(os.getppid() if os.getppid() > 1 else os.getpid()) is None
    assert paying_group(1 << 22) is None


def test_a_group_without_room(group: Path, member: int, memory: int) -> None:
    limit = next(limit for name, limit in USAGE.items() if (group / name).exists())
    (group / limit).write_text(str(16 * MIB))
    with pytest.raises(RestoreFailed, match="has no room"):
        Allocator().allocate(group, [(memory, RANGES)])


@pytest.mark.parametrize("below", ["", "below"])
def test_the_jobs_processes_survive_if_the_group_has_no_room(
    group: Path, memory: int, below: str
) -> None:
    """They are larger than the process that allocates. The limit may be that of a group above."""
    inner = group / below
    inner.mkdir(exist_ok=True)
    hold = "held = bytearray(b'x' * (64 << 20)); print(len(held), flush=True); input()"
    with subprocess.Popen(
        [sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as job:
        try:
            assert job.stdout is not None
            (inner / "cgroup.procs").write_text(str(job.pid))
            assert job.stdout.readline()
            limit = next(limit for name, limit in USAGE.items() if (group / name).exists())
            (group / limit).write_text(str(used(group) + 16 * MIB))
            assert full_group(inner, MIB) is None
            with pytest.raises(RestoreFailed, match=f"{group} has no room"):
                Allocator().allocate(inner, [(memory, RANGES)])
            assert job.poll() is None
            assert (inner / "cgroup.procs").read_text().split() == [str(job.pid)]
        finally:
            job.kill()
            job.wait(30)
            if below:
                inner.rmdir()


def test_an_allocation_ends_when_the_restore_is_given_up(memory: int) -> None:
    allocator, found = Allocator(), []

    def allocate(group: Path) -> None:
        with pytest.raises(RestoreFailed) as caught:
            allocator.allocate(group, [(memory, RANGES)])
        found.append(caught.value.message)

    with frozen_group() as group:
        thread = threading.Thread(target=allocate, args=(group,), daemon=True)
        thread.start()
        assert eventually(lambda: (group / "cgroup.procs").read_text())
        pid = (group / "cgroup.procs").read_text().strip()
        assert Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
        allocator.end()
        thread.join(60)
        assert found == ["the restore was given up"]
        assert eventually(lambda: not (group / "cgroup.procs").read_text())
        with pytest.raises(RestoreFailed, match="given up"):
            allocator.allocate(group, [(memory, RANGES)])


def test_a_frozen_group_fails_the_restore(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(charging, "_SECONDS", 2.0)
    with frozen_group() as group:
        with pytest.raises(RestoreFailed, match="longer than 2 s") as caught:
            Allocator().allocate(group, [(memory, RANGES)])
        assert "thaw the cgroup" in caught.value.cure
        assert eventually(lambda: not (group / "cgroup.procs").read_text())


def test_a_group_that_cannot_be_joined(tmp_path: Path, memory: int) -> None:
    assert not Allocator().allocate(tmp_path / "gone", [(memory, RANGES)])
    assert os.fstat(memory).st_blocks == 0


def test_runs_of_pages() -> None:
    rows = np.zeros(3, CELL)
    rows["cell"] = [0, 1, 4]
    rows["data"][0, -1] = 0x80  # the last page of a cell
    rows["data"][1, 0] = 0x0B  # pages 0, 1 and 3
    rows["data"][2] = 0xFF
    cells = space_cells([Region(0, 5 * CELL_BYTES, 0)], [rows])
    assert ranges_of(cells).tolist() == [
        [CELL_BYTES - PAGE, 3 * PAGE],
        [CELL_BYTES + 3 * PAGE, PAGE],
        [4 * CELL_BYTES, CELL_BYTES],
    ]
    assert ranges_of(space_cells([], [])).shape == (0, 2)
