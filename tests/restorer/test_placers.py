"""Restores whose cells are placed by processes: the same memory, the same errors, and nothing left
whoever dies.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import Damaged, IcecoreError, ObjectMissing, RestoreFailed
from icecore.events import Event
from icecore.host.kernel import userfaultfd
from icecore.restorer.fetch.fetcher import Fetcher
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.fetch.sink import CellSink
from icecore.restorer.guard.guard_process import descendants
from icecore.restorer.options import RestoreOptions
from icecore.restorer.place.locks import SharedLock
from icecore.restorer.place.members import Family, Member
from icecore.restorer.place.placers import Placer, PlacerLost, Placers, placers_for
from icecore.restorer.place.placing import CellState, WantedCell
from icecore.restorer.plan.cells import space_cells
from icecore.restorer.plan.memory import Batch, plan_batches
from icecore.store.backend.local import LocalBackend
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import Region
from tests import zygote
from tests.programs import driving
from tests.restorer.criu_place import Dumped, await_gone, dumped
from tests.restorer.places import repository_place, store_cells
from tests.restorer.test_restore import differing_pages, flip, remove, truncate

pytestmark = pytest.mark.criu

FULL = RestoreOptions(mode="full", placers=3)
LAZY = RestoreOptions(mode="lazy", placers=3)
both = pytest.mark.parametrize("options", [FULL, LAZY], ids=["full", "lazy"])
_WHOLE = bytes([255]) * 32


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("programs")


def memory_phase(it: Dumped) -> dict[str, object]:
    (ended,) = [e for e in it.events if e.name == "restore.memory" and e.fields["state"] == "end"]
    return dict(ended.fields)


def processes(word: str) -> list[int]:
    """Placers of a restore that works in the directory ``word``."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdecimal():
            try:
                words = Path("/proc", name, "cmdline").read_bytes()
            except (FileNotFoundError, ProcessLookupError):
                continue
            if b"placer_process" in words and word.encode() in words:
                found.append(int(name))
    return found


@both
def test_every_page_comes_back(tmp_path: Path, cache: Path, options: RestoreOptions) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "200")) as it:
        driving.forget(tmp_path)
        restored = it.restore(options)
        os.kill(restored.pid, signal.SIGSTOP)
        restored.wait_resident(60)
        assert (
            differing_pages(it, restored.pid) <= 32
        )  # the program counts on a few pages while it runs
        os.kill(restored.pid, signal.SIGCONT)
        driving.wait_progress(tmp_path)
        assert it.verdict().errors == ()
        phase = memory_phase(it)
        assert (phase["placers"], phase["redone"]) == (3, 0)
        assert int(str(phase["cells"])) >= 200
        it.kill(restored.pid)
        assert it.remains() == []
        assert processes(str(it.workdir)) == []


@both
@pytest.mark.parametrize("name", ["training", "tree", "many-vmas"])
def test_programs_go_on_and_find_their_data_intact(
    tmp_path: Path, cache: Path, name: str, options: RestoreOptions
) -> None:
    with dumped(name, tmp_path, cache) as it:
        driving.forget(tmp_path)
        restored = it.restore(options)
        driving.wait_progress(tmp_path)
        restored.wait_resident(60)
        verdict = it.verdict()
        assert verdict.passed, verdict.errors
        assert memory_phase(it)["redone"] == 0


def test_a_process_that_forks_moves_unmaps_and_discards_while_it_is_filled(
    tmp_path: Path, cache: Path
) -> None:
    with dumped("mutator", tmp_path, cache, ("--mib", "300", "--burst", "20000")) as it:
        driving.forget(tmp_path)
        driving.go(tmp_path)
        restored = it.restore(LAZY)
        driving.wait_progress(tmp_path)
        restored.wait_resident(120)
        verdict = it.verdict()
        assert verdict.passed, verdict.errors


@both
@pytest.mark.parametrize(
    ("harm", "error"),
    [(flip, Damaged), (truncate, Damaged), (remove, ObjectMissing)],
    ids=["flip", "truncate", "remove"],
)
def test_damage_is_named_and_nothing_runs_on(
    tmp_path: Path,
    cache: Path,
    harm: Callable[[Dumped], str],
    error: type[IcecoreError],
    options: RestoreOptions,
) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it:
        driving.forget(tmp_path)
        name = harm(it)
        with pytest.raises(error) as caught:
            it.restore(options).wait_resident(60)
        assert name in str(caught.value)
        assert it.remains() == []
        assert processes(str(it.workdir)) == []


@both
@pytest.mark.parametrize("who", ["one", "all"])
def test_placers_that_are_killed(
    tmp_path: Path, cache: Path, who: str, options: RestoreOptions
) -> None:
    """What they had is given to the others, or done by threads."""
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "200")) as it:
        driving.forget(tmp_path)
        killed: list[int] = []

        def emit(event: Event) -> None:
            it.events.append(event)
            if event.name == "restore.criu" and event.fields["state"] == "begin":
                while len(found := sorted(processes(str(it.workdir)))) < 4:
                    time.sleep(0.01)
                for pid in found[:1] if who == "all" else found[-1:]:
                    os.kill(pid, signal.SIGKILL)
                    killed.append(pid)

        restored = it.restore(options, emit=emit)
        driving.wait_progress(tmp_path)
        restored.wait_resident(60)
        verdict = it.verdict()
        assert verdict.passed, verdict.errors
        assert killed and int(str(memory_phase(it)["redone"])) > 0
        assert processes(str(it.workdir)) == []


def test_a_placer_that_hangs_ends_the_restore_and_is_killed(tmp_path: Path, cache: Path) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it:
        driving.forget(tmp_path)

        def emit(event: Event) -> None:
            if event.name == "restore.criu" and event.fields["state"] == "begin":
                while len(found := sorted(processes(str(it.workdir)))) < 4:
                    time.sleep(0.01)
                os.kill(found[-1], signal.SIGSTOP)

        with pytest.raises(RestoreFailed, match="placer process"):
            it.restore(replace(FULL, stall_seconds=2.0), emit=emit).wait_resident(60)
        assert it.remains() == []
        end = time.monotonic() + 5
        while processes(str(it.workdir)):  # the kernel kills them once their parent is gone
            assert time.monotonic() < end
            time.sleep(0.01)


def holding(pid: int) -> bool:
    """Whether a placer holds the shared lock."""
    return any(
        f" FLOCK  ADVISORY  READ {pid} " in f"{line} "
        for line in Path("/proc/locks").read_text().splitlines()
    )


def test_a_placer_that_hangs_while_it_places_does_not_hold_up_the_end(
    tmp_path: Path, cache: Path
) -> None:
    """It holds the lock that whoever hears of faults and events waits for."""
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "700")) as it:
        driving.forget(tmp_path)
        restored = it.restore(replace(LAZY, stall_seconds=2.0))
        hung, end = 0, time.monotonic() + 20
        while not hung:
            assert time.monotonic() < end
            for pid in sorted(processes(str(it.workdir)))[1:]:
                os.kill(pid, signal.SIGSTOP)
                if holding(pid):
                    hung = pid
                    break
                os.kill(pid, signal.SIGCONT)
        with pytest.raises(RestoreFailed, match="placer process"):
            restored.wait_resident(30)
        await_gone([restored.pid])
        assert it.remains() == [] and processes(str(it.workdir)) == []


def test_beside_a_thousand_open_descriptors(tmp_path: Path, cache: Path) -> None:
    """As many as somebody has who holds device memory, or calls us: select(2) takes no number from
    1024 on.
    """
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it, ExitStack() as stack:
        before = resource.getrlimit(resource.RLIMIT_NOFILE)
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(before[0], 4096), before[1]))
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, before)
        for _ in range(1100):
            stack.enter_context(open(os.devnull, "rb"))
        driving.forget(tmp_path)
        restored = it.restore(FULL)
        restored.wait_resident(60)
        driving.wait_progress(tmp_path)
        assert it.verdict().passed and memory_phase(it)["redone"] == 0


def test_a_restorer_that_is_killed_takes_them_along(tmp_path: Path, cache: Path) -> None:
    with dumped("memory-pattern", tmp_path, cache, ("--mib", "64")) as it:
        driving.forget(tmp_path)
        it.workdir.mkdir()
        script = f"""
import time
from icecore.restorer.restore import restore
from icecore.restorer.place.locks import SharedLock
from icecore.restorer.place.members import Member
from icecore.restorer.options import RestoreOptions
from icecore.store.backend.local import LocalBackend
from icecore.store.runtime.loop import LoopThread
from icecore.store.log.repository import StoredRepository
with LoopThread() as loop:
    repository = loop.run(StoredRepository.open(LocalBackend({str(it.place.root)!r})))
    def emit(event):
        if event.name == "restore.memory":
            print("placing", flush=True)
            time.sleep(60)
    options = RestoreOptions(mode="full", placers=2, workdir={str(it.workdir)!r})
    restore(repository, loop, {it.result.snapshot!r}, options, emit=emit)
"""
        restorer = zygote.program(script, stderr=False)
        try:
            assert restorer.stdout is not None and restorer.stdout.readline() == b"placing\n"
            tree = descendants(restorer.pid)
            end = time.monotonic() + 20
            while len(placers := processes(str(it.workdir))) < 3:
                assert time.monotonic() < end
                time.sleep(0.01)
        finally:
            restorer.kill()
            restorer.wait(10)
        await_gone([*tree, *placers])
        assert it.remains() == []


@pytest.fixture(params=[False, True], ids=["plain", "encrypted"])
def encrypted(request: pytest.FixtureRequest) -> Iterator[bool]:
    yield request.param


def test_cells_of_all_kinds(encrypted: bool, tmp_path: Path) -> None:
    """Whole and partial cells, compressible ones and others; what lies at the addresses is read
    from the placer's memory.
    """
    folder = tmp_path / "lock"
    folder.mkdir()
    with repository_place(encrypted=encrypted) as place:
        half = bytes([15]) * 32
        cells = [
            (_WHOLE, os.urandom(1 << 20)),
            (_WHOLE, b"icecore!" * (1 << 17)),
            (half, os.urandom(1 << 19)),
        ]
        _, records = store_cells(place, cells)
        keys = place.repository.keys
        with Placers(
            1,
            str(place.root),
            keys.chunk,
            room=16 << 20,
            patience=20,
            word="test",
            lock=str(folder),
        ) as placers:
            (placer,) = placers.all
            (batch,) = plan_batches(records, range(3), gap=0, read_size=8 << 20)
            shared = SharedLock(str(folder), 3)
            with shared.writing():
                shared.set_changed(range(3))  # nothing is placed then
            placers.begin()
            target = Member(os.open("/dev/null", os.O_RDWR | os.O_CLOEXEC), 7, 3)
            wanted = [
                WantedCell(
                    c.start,
                    c.stop,
                    c.base_start,
                    c.base_stop,
                    c.row << 20,
                    c.row,
                    placer.target(target),
                )
                for c in batch.cells
            ]
            done = placer.deliver(batch, wanted, records, records["data"].tobytes())
            assert done.why == "" and done.states == [CellState.HELD] * 3
            (pid,) = descendants(placers._family.pid)
            with open(f"/proc/{pid}/mem", "rb", buffering=0) as memory:
                for address, (_, data) in zip(done.addresses, cells, strict=True):
                    memory.seek(address)
                    assert memory.read(len(data)) == data
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(PlacerLost):
                placer.deliver(batch, wanted, records, records["data"].tobytes())
            os.close(target.descriptor)
            shared.close()


def test_a_flag_keeps_one_cell_from_being_placed(tmp_path: Path) -> None:
    """And no other."""
    cells = [(_WHOLE, os.urandom(1 << 20)) for _ in range(3)]
    with (
        repository_place() as place,
        mmap.mmap(-1, 3 << 20, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory,
    ):
        _, records = store_cells(place, cells)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        uffd = userfaultfd.create()
        userfaultfd.register(uffd, start, 3 << 20)
        where, key = str(place.root), place.repository.keys.chunk
        room, lock = 16 << 20, str(tmp_path)
        with Placers(1, where, key, room=room, patience=20, word="test", lock=lock) as placers:
            (placer,) = placers.all
            (batch,) = plan_batches(records, range(3), gap=0, read_size=8 << 20)
            shared = SharedLock(str(tmp_path), 5)
            with shared.writing():
                shared.set_changed(range(3, 4))  # the second cell's: the first has number 2
            placers.begin()
            target = placer.target(Member(uffd, 7, 3))
            wanted = [
                WantedCell(c.start, c.stop, 0, 0, start + (c.row << 20), 2 + c.row, target)
                for c in batch.cells
            ]
            done = placer.deliver(batch, wanted, records, records["data"].tobytes())
            assert done.states == [CellState.PLACED, CellState.HELD, CellState.PLACED], done.why
            assert userfaultfd.zero(uffd, start + (1 << 20), 1 << 20) == (1 << 20, 0), "it is there"
            there = [memory[row << 20 : (row + 1) << 20] for row in range(3)]
            assert there == [cells[0][1], bytes(1 << 20), cells[2][1]]
            shared.close()
        os.close(uffd)
        gc.collect()  # the pointer into the mapping


def test_flags_without_cells(tmp_path: Path) -> None:
    """All memory of a process may come in other ways."""
    made, other = SharedLock(str(tmp_path), 0), SharedLock(str(tmp_path))
    with made.writing():
        made.set_changed(range(0))
    with other.reading():
        assert not other.changed(0)
    made.close()
    other.close()


def test_which_cells_lie_in_a_range() -> None:
    """The windows of two regions may overlap; then only a part of each belongs to its cell."""
    records = [np.zeros(2, CELL), np.zeros(1, CELL)]
    records[0]["cell"] = [0, 1]
    mib, page = 1 << 20, 4096
    regions = [Region(0, mib + 2 * page, 0), Region(mib + 8 * page, 9 * page, mib)]
    cells = space_cells(regions, records)
    family = Family(1, cells, np.zeros((3, 32), np.uint8), lambda *about: None)
    bounds = [
        ((0, mib), [0]),
        ((0, mib + 1), [0, 1]),
        ((mib, mib + 2 * page), [1]),
        ((mib + 2 * page, mib + 8 * page), []),
        ((mib + 7 * page, mib + 9 * page), [2]),
        ((mib + page, mib + 9 * page), [1, 2]),
        ((mib + 17 * page, 9 * mib), []),
    ]
    for (start, end), rows in bounds:
        assert list(family.rows_in(start, end)) == rows, (start, end)


def test_how_many_pay() -> None:
    assert placers_for(8 << 30, 512 << 20, cores=2) == 0
    assert placers_for(64 << 20, 512 << 20, cores=16) == 0
    assert placers_for(8 << 30, 512 << 20, cores=16) == 16
    assert placers_for(8 << 30, 128 << 20, cores=16) == 4
    assert placers_for(8 << 30, 512 << 20, cores=128) == 16
    assert placers_for(32 << 30, 2 << 30, cores=48, processes=4) == 48
    assert placers_for(16 << 30, 1 << 30, cores=48, processes=2) == 32
    filed = [
        placers_for(size << 20, 512 << 20, cores=16, beside="file") for size in (64, 400, 4096)
    ]
    assert filed == [0, 6, 8]
    assert placers_for(400 << 20, 512 << 20, cores=4, beside="file") == 0
    assert placers_for(4 << 30, 2 << 30, cores=64, processes=4, beside="file") == 32
    sizes = (64, 160, 400, 4096)
    driver = [placers_for(size << 20, 512 << 20, cores=32, beside="driver") for size in sizes]
    assert driver == [0, 5, 12, 16]


def test_who_works_while_placers_load() -> None:
    """So many threads as are as fast as more."""
    with repository_place() as place:
        reader, records = store_cells(place, [(_WHOLE, os.urandom(1 << 20))] * 24)
        keys = place.repository.keys
        with Placers(
            8, str(place.root), keys.chunk, room=16 << 20, patience=0.5, word="test", lock=""
        ) as placers:
            os.kill(placers._family.pid, signal.SIGSTOP)
            themselves, through, enough = set[int](), [], threading.Event()

            class Slow(CellSink):
                def place(self, row: int, data: memoryview) -> None:
                    themselves.add(threading.get_ident())
                    enough.wait(10)

            def ask(placer: Placer, batches: Sequence[Batch]) -> list[int]:
                through.append(placer)
                enough.wait(10)
                placer.wait_ready()
                raise AssertionError("it is stopped")

            fetcher = Fetcher(
                LocalBackend(place.root),
                reader,
                records,
                Slow(),
                Limits(2, 64 << 20, 2, 5.0),
                place.loop,
            )
            fetcher.hand_out(placers.all, ask, cells=1)
            fetcher.start(range(24))
            end = time.monotonic() + 10
            while len(themselves) + len(through) < 8:
                assert time.monotonic() < end
                time.sleep(0.01)
            assert (len(themselves), len(set(through))) == (6, 2)
            enough.set()
            assert fetcher.wait(
                20
            )  # who does not begin is lost, and what it was to do is done here
            fetcher.stop()
            assert fetcher.spent.cells == 24 and fetcher.spent.redone >= len(through)


def test_placers_that_still_load_are_ended_at_once() -> None:
    with repository_place() as place:
        placers = Placers(
            2,
            str(place.root),
            place.repository.keys.chunk,
            room=16 << 20,
            patience=20,
            word="test",
            lock="",
        )
        os.kill(placers._family.pid, signal.SIGSTOP)
        began = time.monotonic()
        placers.close()
        placers.close()
        assert (
            time.monotonic() - began < 4 and placers._family._process.returncode == -signal.SIGKILL
        )
