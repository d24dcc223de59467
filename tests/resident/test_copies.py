"""Threads of the process make the driver's copies of a window: everything arrives, zeros are not
written to memory that reads as zeros, and no thread or replacement outlives the window.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import random
import resource
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from icecore.dumper.gpu import resident
from icecore.dumper.options import DumpOptions
from icecore.errors import DumpFailed
from icecore.events import Event
from icecore.host.cuda import threads
from icecore.host.kernel import cpu, limits, procfs
from icecore.host.resident import client
from tests.dumper.world import Events, Store
from tests.fakes.joined import Job
from tests.fakes.machine import HERE

from .test_restore import bring_back

MIB = 1 << 20
SOURCES = Path("icecore/host/resident")
ROOT = HERE.parent.parent
#: Sizes in bytes: a mapping that counts as the driver's, a copy that threads share, and its parts.
MAPPING, SHARED, PART = 64 * MIB, 512 << 10, 128 << 10
Launch = Callable[..., Job]


class Copies:
    """copies.c in this process, and a library whose calls it replaces."""

    def __init__(self, folder: Path, *flags: str) -> None:
        def build(name: str, *words: str) -> ctypes.CDLL:
            subprocess.run(
                ["gcc", "-std=gnu11", "-O2", "-fPIC", "-shared", "-o", folder / name, *words],
                check=True,
                timeout=60,
                cwd=ROOT,
            )
            return ctypes.CDLL(str(folder / name))

        self.library = build("copier.so", str(HERE / "copier.c"), *flags)
        self.own = build(
            "copies.so",
            f"-I{SOURCES}",
            str(HERE / "copies_library.c"),
            *(str(SOURCES / name) for name in ("copies.c", "slots.c")),
        )
        self.own.copies_begin.restype = ctypes.c_bool
        self.own.copies_begin.argtypes = [ctypes.c_uint, ctypes.c_size_t]
        for call in ("copier_map", "copier_copy"):
            getattr(self.library, call).restype = ctypes.c_void_p
        self.library.copier_map.argtypes = [ctypes.c_size_t]
        self.library.copier_move.restype = ctypes.c_void_p
        self.library.copier_move.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_size_t,
            ctypes.c_void_p,
        ]
        self.library.copier_unmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
        self.library.copier_copy.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t]
        assert self.own.use_library(ctypes.c_void_p(self.library._handle)) == 0

    def begin(self, some: int = 3, huge: int = 0) -> bool:
        return bool(self.own.copies_begin(some, huge))

    def end(self) -> None:
        self.own.copies_end()

    def copy(self, to: int, content: bytes) -> None:
        """Copy with the library."""
        held = ctypes.create_string_buffer(content, len(content))
        assert self.library.copier_copy(to, ctypes.addressof(held), len(content)) == to


#: How the library's slots are filled: when a function is called first; at once, and then read-only.
both_bindings = pytest.mark.parametrize(
    "copies", [["-Wl,-z,lazy"], ["-Wl,-z,relro,-z,now"]], ids=["lazy", "now"], indirect=True
)


@pytest.fixture
def copies(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Copies]:
    if shutil.which("gcc") is None or os.uname().machine != "x86_64":
        pytest.skip("needs gcc, and x86-64")
    made = Copies(tmp_path, *getattr(request, "param", ["-Wl,-z,relro,-z,now"]))
    yield made
    made.end()


def present(address: int, size: int) -> int:
    """Return how many pages of this memory of the process are allocated."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        entries = os.pread(pagemap.fileno(), size // 512, address // mmap.PAGESIZE * 8)
    return sum(
        int.from_bytes(entries[at : at + 8], "little") >> 62 != 0
        for at in range(0, len(entries), 8)
    )


def copying_threads(pid: int) -> list[int]:
    """Return the threads of a process that copies.c started."""
    found = []
    for one in procfs.threads(pid):
        with suppress(OSError):
            if Path(f"/proc/{pid}/task/{one}/comm").read_text() == "icecore-copy\n":
                found.append(one)
    return found


def own_threads() -> list[int]:
    return copying_threads(os.getpid())


def wait_threads(some: int) -> None:
    end = time.monotonic() + 10
    while len(own_threads()) != some:
        assert time.monotonic() < end
        time.sleep(0.0005)


def begun(copies: Copies, some: int, huge: int = 0) -> None:
    assert copies.begin(min(some, len(os.sched_getaffinity(0)) - 1), huge)


@both_bindings
def test_everything_arrives_and_zeros_are_left_out(copies: Copies) -> None:
    noise, size = random.Random(1).randbytes(2 * MIB), 2 * MIB
    pieces = [
        bytes(size),
        noise,
        noise[:PART] + bytes(size - PART),
        bytes(size - 1) + b"x",
        noise[: size - 5000],
        bytes(size - PART - 100) + noise[:100] + bytes(PART),
    ]
    there = []
    for _ in range(3):
        begun(copies, 3)
        at = copies.library.copier_map(MAPPING)
        for number, piece in enumerate(pieces):
            copies.copy(at + number * size, piece)
        there.append(present(at, MAPPING))
        found = [
            ctypes.string_at(at + number * size, len(piece)) for number, piece in enumerate(pieces)
        ]
        assert found == pieces
        copies.end()
        assert not own_threads()
        assert copies.library.copier_unmap(at, MAPPING) == 0
    # The first window allocates what is written to; later ones populate the huge pages around it.
    assert 2 * size // mmap.PAGESIZE < there[0] <= 40 * PART // mmap.PAGESIZE
    assert there[1] == there[2] == 5 * size // mmap.PAGESIZE


def learnt(copies: Copies, size: int = MAPPING) -> None:
    """Run a window after which no page of a mapping of that size counts as needed."""
    begun(copies, 1)
    copies.library.copier_unmap(copies.library.copier_map(size), size)
    copies.end()


def test_memory_of_zeros_is_not_made(copies: Copies) -> None:
    learnt(copies)
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    assert present(at, MAPPING) == 0
    copies.copy(at, bytes(MAPPING // 2))
    copies.copy(at + MAPPING // 2, bytes(SHARED - 1) + b"x")
    assert 0 < present(at, MAPPING) <= PART // mmap.PAGESIZE
    copies.library.copier_unmap(at, MAPPING)


@pytest.mark.parametrize(
    "unit",
    [
        mmap.PAGESIZE,
        pytest.param(
            2 * MIB,
            marks=pytest.mark.skipif(
                limits.huge_pages() != "madvise", reason="huge pages are not asked for here"
            ),
        ),
    ],
)
def test_pieces_that_share_a_page_allocate_nothing_further_on(copies: Copies, unit: int) -> None:
    learnt(copies, 2 * MAPPING)
    begun(copies, 2, huge=2 * MAPPING if unit > mmap.PAGESIZE else 0)
    mapping = copies.library.copier_map(2 * MAPPING)
    # As in the driver's copies, each piece begins shortly before the end of a page.
    at, piece = -(-mapping // unit) * unit + unit - 1000, 2 * MIB
    copies.copy(at, bytes(piece - 1) + b"x")
    for number in range(1, 30):
        copies.copy(at + number * piece, bytes(piece))
    assert 0 < present(mapping, 2 * MAPPING) <= max(3 * PART, 2 * unit) // mmap.PAGESIZE
    assert ctypes.string_at(at, 30 * piece) == bytes(piece - 1) + b"x" + bytes(29 * piece)
    copies.library.copier_unmap(mapping, 2 * MAPPING)


def test_a_mapping_of_another_size_is_made_as_the_driver_asks(copies: Copies) -> None:
    learnt(copies)
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING + 4096)
    assert present(at, MAPPING + 4096) == MAPPING // mmap.PAGESIZE + 1
    copies.library.copier_unmap(at, MAPPING + 4096)


@pytest.mark.parametrize("size", [1 << 30, (1 << 30) + mmap.PAGESIZE])
def test_a_first_window_makes_all_pages_only_of_what_holds_device_memory(
    copies: Copies, size: int
) -> None:
    begun(copies, 2)
    at = copies.library.copier_map(size)
    assert present(at, size) == (size // mmap.PAGESIZE if size > 1 << 30 else 0)
    assert copies.library.copier_unmap(at, size) == 0


def test_a_window_without_copies_leaves_what_is_known(copies: Copies) -> None:
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    copies.copy(at, b"x" * PART * 4)
    copies.library.copier_unmap(at, MAPPING)
    copies.end()
    begun(copies, 1)  # as in a window that is tried again
    copies.end()
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    assert 0 < present(at, MAPPING) <= 4 * MIB // mmap.PAGESIZE
    copies.library.copier_unmap(at, MAPPING)


def test_pages_that_cannot_be_looked_up(copies: Copies) -> None:
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    ctypes.memset(at, 7, MIB)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, hard))  # /proc/self/pagemap cannot be opened
    try:
        copies.copy(at, bytes(4 * MIB))
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert ctypes.string_at(at, 4 * MIB) == bytes(4 * MIB)
    assert present(at, MAPPING) == 4 * MIB // mmap.PAGESIZE
    copies.library.copier_unmap(at, MAPPING)
    copies.end()
    # What that window needed is not known, so the next one populates all pages.
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    assert present(at, MAPPING) == MAPPING // mmap.PAGESIZE
    copies.library.copier_unmap(at, MAPPING)


def test_zeros_whose_source_and_target_are_not_aligned_alike(copies: Copies) -> None:
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    copies.copy(at + 3, bytes(8 * MIB))
    assert present(at, MAPPING) == 0
    copies.copy(at + 3, bytes(4 * MIB - 1) + b"x")
    assert 0 < present(at, MAPPING) <= PART // mmap.PAGESIZE
    assert ctypes.string_at(at, 8 * MIB) == bytes(4 * MIB + 2) + b"x" + bytes(4 * MIB - 3)
    copies.library.copier_unmap(at, MAPPING)


def test_memory_that_the_driver_moves_or_gives_back_in_parts(copies: Copies) -> None:
    learnt(copies)
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    to = copies.library.copier_map(MAPPING)
    piece = 8 * MIB
    assert copies.library.copier_unmap(to, MAPPING) == 0
    for offset in reversed(range(0, 4 * piece, piece)):
        assert copies.library.copier_move(at + offset, piece, piece, to + offset) == to + offset
    assert copies.library.copier_unmap(at + 5 * piece, piece) == 0
    noise = random.Random(5).randbytes(MIB)
    copies.copy(to, bytes(piece))
    copies.copy(to + piece, noise + bytes(piece - MIB))
    copies.copy(at + 4 * piece, bytes(piece))
    copies.copy(at + 6 * piece, bytes(piece - MIB) + noise)
    assert present(to, 4 * piece) == present(at + 4 * piece, piece) + MIB // mmap.PAGESIZE
    assert present(at + 6 * piece, piece) == MIB // mmap.PAGESIZE
    assert ctypes.string_at(to + piece, piece) == noise + bytes(piece - MIB)
    assert ctypes.string_at(at + 6 * piece, piece) == bytes(piece - MIB) + noise
    for place in (to, at):
        copies.library.copier_unmap(place, MAPPING)


def test_zeros_are_written_where_there_was_something(copies: Copies) -> None:
    learnt(copies)
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    ctypes.memset(at + MIB, 7, MIB)
    copies.copy(at, bytes(4 * MIB))
    assert ctypes.string_at(at, 4 * MIB) == bytes(4 * MIB)
    # Memory that is not the driver's.
    copies.library.copier_unmap(at, MAPPING)
    with mmap.mmap(-1, 4 * MIB) as other:
        other[:] = b"y" * len(other)
        held = ctypes.c_char.from_buffer(other)
        copies.copy(ctypes.addressof(held), bytes(len(other)))
        assert other[:] == bytes(len(other))
        del held


def test_memory_of_a_file_in_the_place_of_the_drivers_gets_its_zeros(
    copies: Copies, tmp_path: Path
) -> None:
    """A restore maps a file there (docs/decisions/011)."""
    (tmp_path / "file").write_bytes(b"z" * MAPPING)
    begun(copies, 2)
    at = copies.library.copier_map(MAPPING)
    held = ctypes.create_string_buffer(SHARED)
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    with open(tmp_path / "file", "rb") as file:
        fixed = mmap.MAP_PRIVATE | 0x10
        assert libc.mmap(at, MAPPING, 3, fixed, file.fileno(), 0) == at
    # The driver's restore reads before anything is written.
    copies.library.copier_copy(ctypes.addressof(held), at + MAPPING - SHARED, SHARED)
    assert held.raw == b"z" * SHARED
    copies.copy(at, bytes(2 * MIB))
    assert ctypes.string_at(at, 2 * MIB + 1) == bytes(2 * MIB) + b"z"
    libc.munmap(ctypes.c_void_p(at), ctypes.c_size_t(MAPPING))


def test_what_overlaps_is_moved(copies: Copies) -> None:
    begun(copies, 3)
    noise = random.Random(2).randbytes(4 * MIB)
    held = ctypes.create_string_buffer(noise, len(noise))
    at = ctypes.addressof(held)
    copies.library.copier_copy(at + 4096, at, 3 * MIB)
    assert held.raw[4096 : 4096 + 3 * MIB] == noise[: 3 * MIB]


def test_copies_of_all_sizes_by_several_threads_at_once(copies: Copies) -> None:
    begun(copies, 3)
    wrong: list[int] = []

    def some(seed: int) -> None:
        draw = random.Random(seed)
        noise = draw.randbytes(3 * MIB)
        held = ctypes.create_string_buffer(3 * MIB)
        for _ in range(60):
            size = draw.choice((1, 4095, SHARED - 1, SHARED, SHARED + 1, draw.randrange(3 * MIB)))
            ctypes.memset(held, 0, len(held))
            copies.copy(ctypes.addressof(held), noise[:size])
            if held.raw != noise[:size] + bytes(3 * MIB - size):
                wrong.append(size)

    running = [threading.Thread(target=some, args=(seed,)) for seed in range(3)]
    for one in running:
        one.start()
    for one in running:
        one.join()
    assert not wrong


@both_bindings
def test_windows_one_after_the_other(copies: Copies) -> None:
    noise = random.Random(3).randbytes(2 * MIB)
    held = ctypes.create_string_buffer(2 * MIB)
    at = ctypes.addressof(held)
    for number in range(6):
        begun(copies, 1 + number % 3)
        ctypes.memset(held, 0, len(held))
        copies.copy(at, noise)
        assert held.raw == noise
        copies.end()
        assert not own_threads()
        mapped = copies.library.copier_map(MAPPING)  # as without copies.c
        assert present(mapped, MAPPING) == MAPPING // mmap.PAGESIZE
        copies.library.copier_unmap(mapped, MAPPING)


def test_an_end_in_the_middle_of_copies(copies: Copies) -> None:
    """The agent may end the copies while the driver's thread, which is not held, still works."""
    noise = random.Random(4).randbytes(2 * MIB)
    held, over, rounds = ctypes.create_string_buffer(2 * MIB), threading.Event(), 0
    wrong: list[int] = []

    def copy() -> None:
        nonlocal rounds
        while not over.is_set():
            ctypes.memset(held, 0, len(held))
            copies.copy(ctypes.addressof(held), noise)
            rounds += 1
            if held.raw != noise:
                wrong.append(rounds)

    running = threading.Thread(target=copy)
    running.start()
    for _ in range(50):
        begun(copies, 2)
        before = rounds
        while rounds == before:
            time.sleep(0)
        copies.end()
        assert not own_threads()
    over.set()
    running.join(20)
    assert not running.is_alive() and not wrong


def test_no_more_threads_than_processors(copies: Copies) -> None:
    allowed = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(allowed)})
    try:
        assert not copies.begin(3)
    finally:
        os.sched_setaffinity(0, allowed)
    assert not own_threads()


@pytest.mark.parametrize(
    ("cores", "processes", "wanted"), [(2, 3, 0), (2, 1, 1), (16, 1, 7), (16, 4, 3), (4, 0, 3)]
)
def test_the_processes_share_the_cores(
    cores: int, processes: int, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: cores)
    monkeypatch.setattr(cpu, "_GROUPS", tmp_path)  # no limits
    assert resident._copies(range(1, processes + 1)).threads == wanted


@pytest.mark.parametrize(
    ("groups", "limit", "wanted"),
    [
        (["a"], "max", 7),
        (["a"], "400000", 3),
        (["a"], "150000", 0),
        (["a", "a"], "400000", 1),
        (["a", "b"], "400000", 3),
    ],
)
def test_threads_keep_to_the_limits_of_cgroups(
    groups: list[str], limit: str, wanted: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    # Not every machine has cgroups of version 2.
    monkeypatch.setattr(cpu, "_GROUPS", tmp_path)
    monkeypatch.setattr(cpu, "_group", lambda pid: f"/jobs/{groups[pid - 1]}")
    for group in set(groups):
        (tmp_path / "jobs" / group).mkdir(parents=True)
        (tmp_path / "jobs" / group / "cpu.max").write_text(f"{limit} 100000\n")
    assert resident._copies(range(1, len(groups) + 1)).threads == wanted


def test_nothing_begins_without_threads_or_a_library(copies: Copies) -> None:
    assert not copies.begin(0)
    assert not own_threads()


def test_threads_end_when_there_is_nothing_to_copy(copies: Copies) -> None:
    begun(copies, 1)
    assert not own_threads()
    held = ctypes.create_string_buffer(2 * MIB)
    for _ in range(3):
        while len(own_threads()) != 1:
            copies.copy(ctypes.addressof(held), bytes(2 * MIB))
        wait_threads(0)


def test_who_waits_for_their_end(copies: Copies, monkeypatch: pytest.MonkeyPatch) -> None:
    before = procfs.threads(os.getpid())
    begun(copies, 1)
    held = ctypes.create_string_buffer(2 * MIB)
    copies.copy(ctypes.addressof(held), bytes(2 * MIB))
    assert threads.wait_ended(os.getpid(), before) == []
    assert not own_threads()
    monkeypatch.setattr(threads, "_END_SECONDS", 0.1)
    more = threading.Thread(target=time.sleep, args=(0.5,))
    more.start()
    assert threads.wait_ended(os.getpid(), before) == [more.native_id]
    more.join()


@pytest.mark.skipif(limits.huge_pages() != "madvise", reason="huge pages are not asked for here")
def test_huge_pages_are_asked_for_as_far_as_they_go(copies: Copies) -> None:
    begun(copies, 2, huge=MAPPING)
    at = copies.library.copier_map(2 * MAPPING)
    found = [
        line.split(":")[1]
        for lines in [Path("/proc/self/smaps").read_text().splitlines()]
        for number, line in enumerate(lines)
        if line.startswith("VmFlags") and _covers(lines[:number], at)
    ]
    assert len(found) == 1 and " hg" in found[0]
    copies.library.copier_unmap(at, 2 * MAPPING)


def _covers(lines: list[str], address: int) -> bool:
    """Return whether the last mapping in these lines of smaps contains an address."""
    for line in reversed(lines):
        bounds = line.split()[0]
        if "-" in bounds and not bounds.endswith(":"):
            start, _, end = bounds.partition("-")
            return int(start, 16) <= address < int(end, 16)
    return False


# -- in a job


def left(job: Job) -> list[int]:
    return [one for pid in job.pids for one in copying_threads(pid)]


@pytest.fixture
def _three(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use three threads, as on a machine with more cores."""
    monkeypatch.setattr(
        resident,
        "_copies",
        lambda pids: client.Copies(3, limits.spare_huge_bytes(len(pids))),
    )


def checkpoint(events: Events) -> dict[str, Any]:
    return events.named("dump.gpu.checkpoint")[-1].fields


@pytest.mark.criu
@pytest.mark.usefixtures("_three")
@pytest.mark.parametrize("joined", [384 << 20], indirect=True)
@pytest.mark.parametrize("mode", ["full", "lazy"])
def test_a_job_with_memory_that_the_driver_moves(launch: Launch, store: Store, mode: str) -> None:
    job = launch(left=96)
    for _ in range(2):
        events = Events()
        store.dump(job.pid, DumpOptions(), events=events)
        done = checkpoint(events)
        assert done["copying"] == 1 and done["populated"] == 0
        assert done["bytes"] >= 96 * MIB
        job.goes_on()
        assert not left(job)
    stopped = store.dump(job.pid, DumpOptions(stop=True)).snapshot
    job.reap()
    bring_back(store, stopped, mode=mode)
    job.goes_on()
    assert not left(job)
    again = store.dump(job.pid, DumpOptions(stop=True)).snapshot  # of what was restored
    job.reap()
    bring_back(store, again, mode=mode)
    job.goes_on()
    assert not left(job)


@pytest.mark.criu
@pytest.mark.usefixtures("_three")
@pytest.mark.parametrize("joined", [384 << 20], indirect=True)
def test_zeros_on_the_gpu_are_no_memory_of_the_process(launch: Launch, store: Store) -> None:
    job = launch(left=96)
    found: dict[bool, int] = {}
    for copies in (True, True, False):
        events = Events()
        seen: list[int] = []
        events.hooks["dump.files", "begin"] = lambda _, seen=seen: seen.append(
            procfs.status(job.pid).resident
        )
        store.dump(job.pid, DumpOptions(populate=copies), events=events)
        assert checkpoint(events)["copying"] == copies
        found[copies] = seen[0]
        job.goes_on()
    # Two of three allocations are zeros.
    assert found[False] - found[True] > 40 * MIB


@pytest.mark.criu
@pytest.mark.usefixtures("_three")
@pytest.mark.parametrize("joined", [384 << 20], indirect=True)
@pytest.mark.parametrize("end", ["dump.gpu.checkpoint", "dump.files", "dump.gpu.restore"])
def test_a_window_that_fails_leaves_no_thread(launch: Launch, store: Store, end: str) -> None:
    job = launch(left=96)

    def fail(_: Event) -> None:
        raise DumpFailed("as ordered")

    with pytest.raises(DumpFailed, match="as ordered"):
        store.dump(job.pid, DumpOptions(), events=Events({(end, "begin"): fail}))
    job.goes_on()
    assert not left(job)
