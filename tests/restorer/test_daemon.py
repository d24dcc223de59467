"""Guard, daemon and members with a process that faults, forks, moves and drops its memory; no CRIU."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np
import pytest

from icecore.host.kernel import procfs
from icecore.restorer.fill.daemon import Daemon
from icecore.restorer.guard.client import Message, RestoreGuard
from icecore.restorer.guard.guard_process import descendants
from icecore.restorer.place.locks import SharedLock
from icecore.restorer.place.members import Family, Member
from icecore.restorer.plan.cells import SpaceCells, space_cells
from icecore.sizes import PAGE
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import Region
from tests.restorer import lazy_process
from tests.restorer.lazy_process import word_of

pytestmark = pytest.mark.skipif(
    os.geteuid() != 0, reason="userfaultfd over another process needs root"
)

START = 0x10_0000_0000
MIB = 16


def content_of(cell: int) -> np.ndarray[tuple[int, int], np.dtype[np.uint64]]:
    words = np.zeros((256, PAGE // 8), np.uint64)
    words[:, 0] = [word_of(256 * cell + i) for i in range(256)]
    words[:, 1:] = np.uint64(cell + 1)
    return words


def address_of(data: memoryview) -> int:
    address: int = np.frombuffer(data, np.uint8).__array_interface__["data"][0]
    return address


class Rig:
    """A guard with a daemon that serves one process from memory, one cell at a time, as the test
    says.
    """

    def __init__(self, folder: Path, holes: tuple[int, ...] = ()) -> None:
        self.folder = folder
        self.output = folder.parent / "said"
        records = np.zeros(MIB, CELL)
        records["cell"] = np.arange(MIB)
        records["data"] = 255
        for page in holes:
            records["data"][page // 256][page % 256 // 8] &= ~np.uint8(1 << page % 8)
        cells = space_cells([Region(START, MIB << 20, START)], [records])
        self.content: list[memoryview] = []
        for cell in range(MIB):
            mask = np.unpackbits(records["data"][cell], bitorder="little").view(np.bool_)
            self.content.append(
                memoryview(np.ascontiguousarray(content_of(cell)[mask]).view(np.uint8).reshape(-1))
            )
        self.failures: list[BaseException] = []
        self.guard = RestoreGuard(str(folder), str(folder))
        self.family: Family | None = None
        self.rows = records
        self.cells = cells
        self.asked: list[int] = []
        self.delay = 0.0
        self.hold = threading.Event()
        self.hold.set()
        self.wiped: list[tuple[int, int]] = []

    def run(self, script: str) -> None:
        families: dict[int, Family] = {}
        self.daemon = Daemon(self.guard, families, self.urgent, self.failures.append)

        class ByPid(dict[int, Family]):
            """The process is its own image: its pid is not known before it runs."""

            def get(inner, key: int, default: object = None) -> Family | None:  # type: ignore[override]
                self.family = inner[key] = Family(
                    key, self.cells, self.rows["data"], self.daemon.check_unmapped, self.wiped
                )
                return self.family

        self.daemon._families = ByPid()
        self.daemon.start()
        arguments = [f"{START:x}", str(MIB), textwrap.dedent(script), str(self.output)]
        self.guard.run([sys.executable, lazy_process.__file__, *arguments])
        assert self.daemon.wait_for(lambda d: d.restored, 20)
        assert self.family is not None
        self.family.registered = True

    def urgent(self, family: Family, row: int) -> None:
        self.asked.append(row)
        threading.Thread(target=self.fill, args=(row,), daemon=True).start()

    def fill(self, row: int) -> None:
        self.hold.wait(20)
        time.sleep(self.delay)
        assert self.family is not None
        self.family.fill(row, address_of(self.content[row]))

    def fill_all(self) -> None:
        for row in range(MIB):
            self.fill(row)

    def said(self, count: int, seconds: float = 20) -> list[str]:
        end = time.monotonic() + seconds
        lines: list[str] = []
        while time.monotonic() < end:
            if self.failures:
                raise self.failures[0]
            lines = self.output.read_text().splitlines() if self.output.exists() else []
            if len(lines) >= count:
                return lines
            time.sleep(0.005)
        raise AssertionError(f"it said only {lines}")

    def go(self) -> None:
        """Let the process go on that waits for it."""
        self.output.with_name("said.go").touch()

    def until_members(self, count: int) -> None:
        end = time.monotonic() + 20
        while len(self.members()) < count:
            assert time.monotonic() < end, self.members()
            time.sleep(0.005)

    def complete(self) -> None:
        self.fill_all()
        self.daemon.finish()
        assert self.daemon.wait_for(lambda d: d.complete, 20)

    def members(self) -> tuple[Member, ...]:
        assert self.family is not None
        return self.family.members

    def close(self) -> None:
        self.guard.kill()
        assert self.daemon.wait_for(lambda d: d.killed, 20)
        self.daemon.stop()
        self.guard.end(20)
        assert not [pid for pid in descendants(os.getpid()) if pid == self.guard.pid]


@contextmanager
def rig(
    script: str, holes: tuple[int, ...] = (), wiped: tuple[int, int] | None = None
) -> Iterator[Rig]:
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="icecore-test-") as top:
        folder = Path(top, "work")
        folder.mkdir()
        it = Rig(folder, holes)
        if wiped is not None:
            it.wiped = [(START + wiped[0] * PAGE, START + wiped[1] * PAGE)]
        try:
            it.run(script)
            yield it
            assert not it.failures
        finally:
            it.close()


def test_faults_bring_their_cells() -> None:
    with rig("m.say(m.check(300, 1)); m.say(m.check(0, m.pages))") as it:
        assert it.said(2) == ["0", "0"]
        assert it.asked[0] == 1
        assert it.daemon.touched[0][1] == 1
        assert sorted(row for _, row in it.daemon.touched) == list(range(MIB))


def test_filling_without_faults_completes_and_closes() -> None:
    with rig(
        "m.wait_for_go(); m.say(m.check(0, m.pages)); m.discard(0, 10); m.say(m.zeros(0, 10))"
    ) as it:
        it.complete()
        it.go()
        assert it.said(2) == ["0", "0"]
        assert it.asked == [] and it.members()[0].left == 0


def test_absent_pages_are_zeros_at_once() -> None:
    holes = (5, 6, 7, 600)
    script = "m.say(m.zeros(5, 3), m.zeros(600, 1)); m.say(m.check(0, 5), m.check(8, 592), m.check(601, 100))"
    with rig(script, holes) as it:
        assert it.said(2) == ["0 0", "0 0 0"]
        it.complete()


def test_a_discarded_range_stays_zero() -> None:
    script = """
    m.discard(256, 300)
    m.discard(1000, 3)
    m.say(m.zeros(256, 300), m.zeros(1000, 3))
    m.say(m.check(0, 256), m.check(556, 444), m.check(1003, m.pages - 1003))
    time.sleep(1)
    m.say(m.zeros(256, 300), m.zeros(1000, 3))
    """
    with rig(script) as it:
        assert it.said(2) == ["0 0", "0 0 0"]
        it.complete()
        assert it.said(3)[2] == "0 0"


def test_moved_memory_is_filled_where_it_went() -> None:
    script = """
    moved = m.move(100, 1000)
    m.say(m.check(100, 1000, moved))
    again = m.move(2000, 600)
    time.sleep(0.5)
    m.say(m.check(2000, 600, again), m.check(0, 100), m.check(1100, 900))
    """
    with rig(script) as it:
        assert it.said(1) == ["0"]
        it.complete()
        assert it.said(2)[1] == "0 0 0"


def test_unmapped_memory_is_let_go() -> None:
    script = """
    m.unmap(300, 1000)
    time.sleep(0.5)
    m.say(m.check(0, 300), m.check(1300, m.pages - 1300))
    """
    with rig(script) as it:
        time.sleep(0.2)
        it.complete()
        assert it.said(1) == ["0 0"]


def test_a_child_finds_what_its_parent_was_still_missing() -> None:
    script = """
    m.check(0, 256)
    child = os.fork()
    if child == 0:
        m.say("child", m.check(0, m.pages))
        os._exit(0)
    os.waitpid(child, 0)
    m.discard(0, 512)
    m.say("parent", m.zeros(0, 512), m.check(512, m.pages - 512))
    """
    with rig(script) as it:
        assert it.said(2) == ["child 0", "parent 0 0"]
        assert len(it.members()) == 2
        it.complete()


def test_a_child_that_outlives_its_parents_restore_is_filled_too() -> None:
    script = """
    for n in range(3):
        if os.fork() == 0:
            m.wait_for_go()
            if n == 2 and os.fork() == 0:
                m.say("grandchild", m.check(0, m.pages))
                os._exit(0)
            m.say("child", m.check(0, m.pages))
            os._exit(0)
    m.wait_for_go()
    m.say("parent", m.check(0, m.pages))
    """
    with rig(script) as it:
        it.until_members(4)
        it.complete()
        it.go()
        assert sorted(it.said(5)) == ["child 0", "child 0", "child 0", "grandchild 0", "parent 0"]
        assert it.asked == []


def test_forks_while_everything_is_being_placed() -> None:
    script = """
    for n in range(60):
        if os.fork() == 0:
            m.say(m.check(0, m.pages))
            os._exit(0)
    for n in range(60):
        os.wait()
    m.say(m.check(0, m.pages))
    """
    with rig(script) as it:
        it.complete()
        assert it.said(61) == ["0"] * 61


def test_children_that_have_ended_cost_no_descriptors() -> None:
    """A job that forks all the time, restored lazily from far away, would come to any limit."""
    script = """
    for n in range(400):
        child = os.fork()
        if child == 0:
            os._exit(0)
        os.waitpid(child, 0)
    m.say("forked", m.check(0, 256))
    m.wait_for_go()
    child = os.fork()
    if child == 0:
        m.say(m.check(0, m.pages))
        os._exit(0)
    os.waitpid(child, 0)
    m.say(m.check(0, m.pages))
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    limit = (
        max(int(name) for name in os.listdir("/proc/self/fd")) + 150
    )  # other tests' files may still be open
    with rig(script) as it:
        resource.setrlimit(resource.RLIMIT_NOFILE, (limit, hard))
        resource.prlimit(it.guard.pid, resource.RLIMIT_NOFILE, (200, 200))
        try:
            assert it.said(1, 60) == ["forked 0"]
            assert len(it.members()) < 140 and len(os.listdir(f"/proc/{it.guard.pid}/fd")) < 160
            assert not it.members()[0].forked
            it.complete()
            it.go()
            assert it.said(3) == ["forked 0", "0", "0"]
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_child_does_not_find_what_its_parent_keeps_from_it() -> None:
    script = """
    assert libc.madvise(m.at(0), 512 * PAGE, 10) == 0  # MADV_DONTFORK
    if os.fork() == 0:
        time.sleep(0.5)
        m.say(m.check(512, 1000))
        os._exit(0)
    os.wait()
    m.say(m.check(0, m.pages))
    """
    with rig(script) as it:
        time.sleep(0.2)
        it.complete()
        assert it.said(2) == ["0", "0"]


def wipes(pages: int) -> str:
    """So many pages from the 256th on are a child's to find empty."""
    return f"""
assert libc.madvise(m.at(256), {pages} * PAGE, 18) == 0  # MADV_WIPEONFORK
m.check(260, 1)
if os.fork() == 0:
    m.say(m.zeros(256, {pages}), m.check(0, 256), m.check({256 + pages}, 1000))
    os._exit(0)
os.wait()
m.say(m.check(0, m.pages))
"""


def test_a_child_finds_empty_what_the_snapshot_says_is_wiped() -> None:
    with rig(wipes(256), wiped=(256, 512)) as it:
        assert it.said(2) == ["0 0 0", "0"]
        it.complete()


def test_a_child_finds_empty_what_was_there_and_is_wiped_as_only_the_kernel_knows() -> None:
    """The memory was resident before; without the snapshot's word the child asks again and again,
    and is then believed.
    """
    with rig("m.check(0, m.pages)\n" + wipes(16)) as it:
        assert it.said(2) == ["0 0 0", "0"]
        it.complete()


def test_a_process_that_ends_is_no_failure() -> None:
    with rig("m.say(m.check(0, 256)); os._exit(7)") as it:
        it.said(1)
        assert it.daemon.wait_for(lambda d: d.criu_status is not None, 20)
        assert it.daemon.criu_status == 7
        it.complete()


def test_memory_that_nobody_registered_is_a_failure() -> None:
    from icecore.errors import RestoreFailed

    with rig("time.sleep(5)") as it:
        assert it.family is not None
        # The process has a mapping of its own there, which its userfaultfd does not know.
        maps = [m for m in procfs.read_maps(it.family.process) if m.path == "" and m.start != START]
        it.members()[0].map.remap(START, maps[-1].start, 1 << 20)
        with pytest.raises(RestoreFailed, match="did not register"):
            it.fill(0)


def test_what_is_asked_of_the_guard_after_its_death_fails_and_is_told() -> None:
    with rig("m.check(0, m.pages)") as it:
        it.hold.clear()
        children = descendants(it.guard.pid)
        os.kill(it.guard.pid, signal.SIGKILL)
        end = time.monotonic() + 10
        while not it.failures and time.monotonic() < end:
            time.sleep(0.01)
        assert it.failures
        it.failures.clear()
        for pid in children:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        it.close = lambda: (it.daemon.stop(), it.guard._socket.close())[-1]  # type: ignore[method-assign,func-returns-value]


RESTORER = """
import sys, time
sys.path.append({root!r})  # last: an installed icecore goes before the sources'
from pathlib import Path
from tests.restorer.test_daemon import Rig
it = Rig(Path(sys.argv[1]))
it.run(sys.argv[2])
print("serving", flush=True)
{then}
time.sleep(60)
"""


@pytest.mark.parametrize("then", ["it.hold.clear()", "it.delay = 0.05"])
def test_a_restorer_that_is_killed_takes_the_tree_with_it_and_nothing_sees_zeros(then: str) -> None:
    """Children fork and look at memory all the time; the restorer dies by SIGKILL in the middle."""
    script = """
    for n in range(1000):
        if os.fork() == 0:
            page = (n * 37) % m.pages
            m.say(m.check(page, 1))
            time.sleep(0.02)
            m.say(m.check((n * 91) % m.pages, 1))
            os._exit(0)
        time.sleep(0.003)
    """
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="icecore-test-") as top:
        folder = Path(top, "work")
        folder.mkdir()
        restorer = subprocess.Popen(
            [
                sys.executable,
                "-c",
                RESTORER.format(then=then, root=str(Path(__file__).parents[2])),
                str(folder),
                script,
            ],
            stdout=subprocess.PIPE,
            text=True,
        )
        try:
            assert restorer.stdout is not None and restorer.stdout.readline() == "serving\n"
            time.sleep(0.3)
            tree = descendants(restorer.pid)
            assert len(tree) >= 2
        finally:
            restorer.kill()
            restorer.wait(10)
        end = time.monotonic() + 10
        while any(procfs.exists(pid) for pid in tree) and time.monotonic() < end:
            time.sleep(0.01)
        assert not [pid for pid in tree if procfs.exists(pid)]
        said = (
            (folder.parent / "said").read_text().split()
            if (folder.parent / "said").exists()
            else []
        )
        assert set(said) <= {"0"}, "somebody saw other bytes than the snapshot's"
        assert not folder.exists(), "the working directory was left behind"


#: Pages without bytes: the first, a run across cells, a single one, and the end of the region.
HOLES = (0, *range(200, 1800), 2000, *range(3840, 4096))


def test_where_there_is_no_page_to_place() -> None:
    records = np.zeros(3, CELL)
    records["cell"] = [0, 1, 4]
    records["data"] = 255
    records["data"][1, 2:5] = 0
    cells = space_cells([Region(START + 5 * PAGE, (6 << 20) - 9 * PAGE, START)], [records])
    family = Family(1, cells, records["data"], lambda *_: None)

    def pages(start: int, end: int) -> list[tuple[int, int]]:
        found = family.gaps(START + start * PAGE, START + end * PAGE)
        return [((low - START) // PAGE, (high - START) // PAGE) for low, high in found]

    assert pages(5, 6 * 256 - 4) == [(272, 296), (512, 1024), (1280, 1532)]
    assert pages(280, 284) == [(280, 284)] and pages(280, 300) == [(280, 296)]
    assert pages(300, 400) == [] and pages(600, 700) == [(600, 700)] and pages(1500, 1500) == []


@pytest.mark.parametrize(
    ("before", "most"),
    [
        ("pass", 0),
        # Two more mappings: a call cannot span them.
        ("assert libc.mprotect(m.at(1000), 100 * PAGE, 1) == 0", 0),
        # A page fault brings 64 pages in the middle of a call; a few behind them are skipped.
        ("m.say(m.zeros(700, 1))", 1),
        # The gap is left to page faults if a part of it has moved, 64 pages at a time.
        ("m.move(1024, 256)", 13),
        ("m.discard(1024, 256)", 13),
    ],
    ids=["whole", "mappings", "present", "moved", "discarded"],
)
def test_zero_pages_that_are_placed_ahead_cause_no_page_faults(before: str, most: int) -> None:
    script = f"""
    {before}
    m.say("began")
    m.wait_for_go()
    m.say(m.zeros(200, 824), m.zeros(3840, 256))
    time.sleep(1)
    m.say(m.check(1, 100), m.check(1801, 100))
    """
    with rig(script, HOLES) as it:
        first = 1 + ("say" in before)
        assert it.said(first)[-1] == "began"
        assert it.family is not None
        it.family.place_zeros(START, START + (MIB << 20), lambda: False)
        faults = it.daemon.faults
        it.go()
        assert it.said(first + 1)[-1] == "0 0"
        assert (most if most > 1 else 0) <= it.daemon.faults - faults <= most
        assert it.said(first + 2)[-1] == "0 0"
        it.complete()


def test_zero_pages_are_not_placed_after_a_stop() -> None:
    script = "m.say('began'); m.wait_for_go(); m.say(m.zeros(200, 824))"
    with rig(script, HOLES) as it:
        it.said(1)
        assert it.family is not None
        it.family.place_zeros(START, START + (MIB << 20), lambda: True)
        it.go()
        assert it.said(2)[1] == "0" and it.daemon.faults == 13
        it.complete()


def test_memory_where_a_file_was_is_other_memory() -> None:
    """A mapping below may grow into the gap that the driver leaves: who touches that waits for
    nobody.
    """
    base = np.array([START], np.uint64)
    cells = SpaceCells(np.zeros(1, CELL), base, base, base + np.uint64(1 << 20))
    filed = [(START + (2 << 20), START + (70 << 20))]
    family = Family(1, cells, np.full((1, 32), 255, np.uint8), lambda *_: None, filed=filed)
    member = Member(-1, 1, 1)
    family.add(member)
    assert family.filed_at(filed[0][0]) and not family.filed_at(filed[0][1])
    family.file_unmapped()
    assert not family.filed_at(filed[0][0])
    assert (
        member.map.original(filed[0][0] - 1) == filed[0][0] - 1
        and member.map.original(filed[0][1]) == filed[0][1]
    )
    assert member.map.original(filed[0][0]) is None and member.map.original(filed[0][1] - 1) is None


def test_a_process_all_of_whose_memory_is_filed_keeps_what_is_known_of_it() -> None:
    """It has no cell that is placed, and is its family all the same."""
    nothing = np.empty(0, np.uint64)
    filed, wiped = [(START, START + (2 << 20))], [(START + (4 << 20), START + (5 << 20))]
    family = Family(
        7,
        SpaceCells(np.empty(0, CELL), nothing, nothing, nothing),
        np.empty((0, 32), np.uint8),
        lambda *_: None,
        wiped,
        filed,
    )
    ours, theirs = os.pipe()
    with (
        open(ours, "rb"),
        open(theirs, "wb"),
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="icecore-test-") as folder,
    ):
        guard = RestoreGuard(folder, folder)
        daemon = Daemon(guard, {7: family}, lambda *_: None, lambda _: None)
        try:
            daemon._add_task(
                Message("task", {"say": "task", "process": 7, "keep": 1}, b"", [os.dup(ours)])
            )
            assert [member.keep for member in family.members] == [1]
            assert family.filed_at(START)
        finally:
            daemon.stop()
            guard.end(20)


class Everyone(dict[int, int]):
    """The number of the first flag, whoever the process is."""

    def get(self, key: int, default: object = None) -> int:  # type: ignore[override]
        return 3


@pytest.mark.parametrize(
    ("change", "cells"),
    [
        pytest.param("m.check(256, 1)", [], id="fault"),
        pytest.param("m.unmap(300, 1000)", [1, 2, 3, 4, 5], id="unmap"),
        pytest.param("m.discard(512, 1)", [2], id="discard"),
        pytest.param("m.discard(511, 2)", [1, 2], id="discard across cells"),
        pytest.param("m.move(256, 256)", [1], id="move"),
        pytest.param("m.move(256, 256, m.at(1030))", [1, 4, 5], id="move over other memory"),
        pytest.param("os.fork() or os._exit(0)", list(range(MIB)), id="fork"),
    ],
)
def test_placers_are_kept_from_what_the_process_changes(
    change: str, cells: list[int], tmp_path: Path
) -> None:
    """And from nothing else: the driver unmaps memory while a GPU job's other memory is placed."""
    with rig(f"m.wait_for_go(); {change}; m.say('done')") as it:
        shared = SharedLock(str(tmp_path), 3 + MIB + 2)
        it.daemon.share(shared, Everyone())
        it.go()
        it.said(1)
        placers = SharedLock(str(tmp_path))  # flock(2) excludes other open files only
        with placers.reading():
            assert [n for n in range(3 + MIB + 2) if placers.changed(n)] == [3 + n for n in cells]
        placers.close()
        it.complete()
