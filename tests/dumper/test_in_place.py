"""Shared memory that is hashed in place: the results are the same as through a descriptor, and
nothing that happens to the object ends this process.
"""

from __future__ import annotations

import faulthandler
import mmap
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from icecore.dumper.memory import shared
from icecore.dumper.memory.cells import EXTENT, CellPlan, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.scan import ScanResult, scan
from icecore.dumper.memory.shared import SharedMemory, SharedObject, shared_regions
from icecore.dumper.memory.staging import Slot, Staging
from icecore.host.kernel import libc, scanning
from icecore.host.kernel.scanning import data_ranges, native_scan_lacks
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.cell import CELL
from icecore.store.format.fingerprints import FINGERPRINT
from icecore.store.format.manifest import Region

pytestmark = pytest.mark.skipif(bool(native_scan_lacks()), reason="there is no native scan")

_CELLS = 24
_SIZE = _CELLS * CELL_BYTES


class Object:
    """A memfd with random pages and holes: ``mapped``, as the dumper has it, and ``plain``, without
    the mapping.
    """

    def __init__(self, seed: int, stack: ExitStack, size: int = _SIZE) -> None:
        self.random = np.random.default_rng(seed)
        self.file = os.memfd_create("object")
        stack.callback(os.close, self.file)
        os.ftruncate(self.file, size)
        for cell in range(size // CELL_BYTES):
            kind = int(self.random.integers(0, 4))
            pages = [
                range(256),
                range(0),
                range(0, 256, 2),
                self.random.integers(0, 256, 9).tolist(),
            ]
            self.write([cell * 256 + page for page in pages[kind]])
        about = os.fstat(self.file)
        self.plain = SharedObject(
            self.file, "1", about.st_dev, about.st_ino, False, size, about.st_blocks * 512
        )
        self.mapped = SharedMemory({"1": self.plain}).map(stack).objects["1"]
        assert self.mapped.mapped is not None

    def write(self, pages: list[int]) -> None:
        for page in pages:
            os.pwrite(self.file, self.random.bytes(PAGE), page * PAGE)

    def plan(self) -> CellPlan:
        extents = self.plain.extents(1)
        return plan_cells(shared_regions("1", extents), extents)


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def _scan(
    source: SharedObject, plan: CellPlan, known: KnownCells, kept: dict[int, bytes]
) -> ScanResult:
    with Staging(64 << 20) as staging:

        def keep(row: int, slot: Slot) -> None:
            kept[row] = bytes(slot.view(0, int(plan.length[row])))
            staging.release(slot)

        return scan(
            plan,
            source,
            known,
            seed=9,
            staging=staging,
            threads=4,
            keep=keep,
            stop=threading.Event(),
        )


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record a read for each cell that Python read because C could not."""
    found: list[int] = []
    read_some = shared.read_some

    def counted(descriptor: int, iovecs: int, count: int, buffer: Slot) -> None:
        found.append(count)
        read_some(descriptor, iovecs, count, buffer)

    monkeypatch.setattr(shared, "read_some", counted)
    return found


@pytest.mark.parametrize("seed", range(4))
def test_the_same_is_found(seed: int, stack: ExitStack, reads: list[int]) -> None:
    one, known = Object(seed, stack), KnownCells.none()
    for change in ([], [0, 5 * 256, _SIZE // PAGE - 1], [], [*range(700, 1500, 3)]):
        one.write(change)
        plan, here, there = one.plan(), dict[int, bytes](), dict[int, bytes]()
        found, expected = _scan(one.mapped, plan, known, here), _scan(one.plain, plan, known, there)
        assert (found.fingerprint == expected.fingerprint).all()
        assert (found.row == expected.row).all() and here == there
        assert not change or 0 < len(here) < len(plan) or not len(known.key)
        known = KnownCells(plan.key, found.fingerprint, np.zeros(len(plan), CELL))
    assert not reads


def _extents(one: SharedObject) -> npt.NDArray[np.void]:
    return one.extents(3)


@pytest.mark.parametrize("seed", range(4))
def test_pages_that_were_read_are_found_in_the_page_table(
    seed: int, stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same pages are found, whatever was read, added, punched out or truncated."""
    monkeypatch.setattr(shared, "_PIECE", 3 * CELL_BYTES)
    monkeypatch.setattr(shared, "_MOST_PIECES", 1 << 20)
    one = Object(seed, stack)
    looked: list[int] = []

    def counted(file: int, ranges: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64] | None:
        looked.append(int((ranges[:, 1] - ranges[:, 0]).sum()))
        return data_ranges(file, ranges)

    def same() -> int:
        """Compare, and return how many bytes were searched for data."""
        expected = _extents(one.plain)
        monkeypatch.setattr(shared, "data_ranges", counted)
        looked.clear()
        found = _extents(one.mapped)
        monkeypatch.setattr(shared, "data_ranges", data_ranges)
        assert found.tolist() == expected.tolist()
        return sum(looked)

    assert same() == _SIZE
    _scan(one.mapped, one.plan(), KnownCells.none(), {})
    used = int(one.plan().length.sum())
    assert same() == _SIZE - used
    one.write(one.random.integers(0, _SIZE // PAGE, 50).tolist())
    assert same() <= _SIZE - used
    for page in one.random.integers(0, _SIZE // PAGE, 300).tolist():
        libc.punch(one.file, page * PAGE, PAGE)
    same()
    os.ftruncate(one.file, _SIZE + 5 * PAGE + 17)
    os.pwrite(one.file, b"end", _SIZE + 5 * PAGE + 3)
    same()
    os.ftruncate(one.file, _SIZE // 2 + 17)
    same()
    os.ftruncate(one.file, 0)
    assert not same() and not len(_extents(one.mapped))


def test_holes_that_were_filled_are_found_at_once(stack: ExitStack) -> None:
    """SEEK_HOLE searches to the end of the data. For each of many gaps, it would take minutes."""
    took = {}
    for cells in (16, 64):
        one = Object(5, stack, cells * CELL_BYTES)
        pages = range(cells * 256)
        libc.punch(one.file, 0, cells * CELL_BYTES)
        one.write([page for page in pages if page % 8 < 4])
        _scan(one.mapped, one.plan(), KnownCells.none(), {})
        one.write([page for page in pages if page % 8 >= 4])
        began = time.process_time()
        assert _extents(one.mapped).tolist() == [(0, len(pages))]
        took[cells] = time.process_time() - began
    assert took[64] < 10 * took[16] + 0.05


@pytest.mark.parametrize("how", ["punched", "cut off and extended"])
def test_no_hole_is_filled(how: str, stack: ExitStack, reads: list[int]) -> None:
    """A read through a mapping would allocate a page that the file lacks. Here the job has freed
    memory since its pages were found.
    """
    one = Object(6, stack)
    plan = one.plan()
    _scan(one.mapped, plan, KnownCells.none(), {})
    assert os.fstat(one.file).st_blocks
    if how == "punched":
        libc.punch(one.file, 0, _SIZE)
    else:
        os.ftruncate(one.file, 0)
        os.ftruncate(one.file, _SIZE)
    kept = dict[int, bytes]()
    _scan(one.mapped, plan, KnownCells.none(), kept)
    assert not os.fstat(one.file).st_blocks
    assert len(kept) == len(plan) and not any(data.strip(b"\0") for data in kept.values())
    assert not reads


@pytest.mark.parametrize("left", [0, 3 * CELL_BYTES + 2 * PAGE + 11])
def test_what_is_cut_off_meanwhile_reads_as_zeros(
    left: int, stack: ExitStack, reads: list[int]
) -> None:
    one = Object(1, stack)
    one.write([*range(3 * 256, 5 * 256)])
    plan = one.plan()
    known = _scan(one.mapped, plan, KnownCells.none(), {}).fingerprint
    os.ftruncate(one.file, left)
    kept, expected = dict[int, bytes](), dict[int, bytes]()
    before = KnownCells(plan.key, known, np.zeros(len(plan), CELL))
    found = _scan(one.mapped, plan, before, kept)
    assert reads
    assert (found.fingerprint == _scan(one.plain, plan, before, expected).fingerprint).all()
    assert kept == expected and kept
    assert b"".join(kept[row] for row in sorted(kept))[-PAGE:] == bytes(PAGE)


def test_what_is_kept_is_what_was_hashed(stack: ExitStack) -> None:
    """Another process writes to the object all the time, so what is hashed in place differs from
    what is copied afterwards.
    """
    one = Object(2, stack)
    code = f"""
import mmap
m, n = mmap.mmap({one.file}, {_SIZE}), 0
print(flush=True)
while True:
    for at in range(0, {_SIZE}, 70000):
        m[at] = n & 255
    n += 1
"""
    writer = subprocess.Popen(
        [sys.executable, "-c", code], pass_fds=[one.file], stdout=subprocess.PIPE
    )
    try:
        assert writer.stdout is not None and writer.stdout.readline()
        plan, known, changed = one.plan(), KnownCells.none(), 0
        end = time.monotonic() + 20
        while changed <= len(plan) and time.monotonic() < end:  # the writer may have to wait
            kept = dict[int, bytes]()
            found = _scan(one.mapped, plan, known, kept)
            for row, data in kept.items():
                digest = xxhash.xxh3_128_digest(plan.bitmap[row].tobytes() + data, 9)
                assert found.fingerprint[row].tobytes() == digest
            changed += len(kept)
            known = KnownCells(plan.key, found.fingerprint, np.zeros(len(plan), CELL))
        assert changed > len(plan)
    finally:
        writer.kill()
        writer.wait(30)


def test_without_streaming_functions_it_is_copied(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, kept = Object(3, stack), dict[int, bytes]()
    scanning._streaming.cache_clear()
    monkeypatch.setattr(scanning, "_STREAMING", (("no_such_function",),))
    try:
        found = _scan(one.mapped, one.plan(), KnownCells.none(), kept)
    finally:
        scanning._streaming.cache_clear()
    assert len(kept) == len(found.row)


_GUARDED = """
#define _GNU_SOURCE
#include "in_place.c"
#include <assert.h>
#include <stdlib.h>
#include <unistd.h>
static int update(void *state, const void *data, size_t size)
{
    for (size_t at = 0; at < size; at++)
        *(uint64_t *)state += ((const uint8_t *)data)[at];
    return 0;
}
static struct hash digest(const void *state) { return (struct hash){*(const uint64_t *)state, 0}; }
int main(void)
{
    struct streaming streaming = {.update = update, .digest = digest};
    struct iovec runs[] = {{0, 4096}, {(void *)8192, 4096}};
    static uint8_t slot[8192], ones[4096];
    struct hash hash;
    uint64_t state = 0;
    int file = memfd_create("x", 0);
    memset(ones, 1, sizeof ones);
    assert(!ftruncate(file, 3 * 4096) && !guard_reads());
    for (int i = 0; i < 3; i++)
        assert(pwrite(file, ones, 4096, i * 4096) == 4096);
    uint8_t *map = mmap(NULL, 3 * 4096, PROT_READ, MAP_SHARED, file, 0);
    assert(is_there(map, 3 * 4096, runs, 2) && !is_there(map, 3 * 4096 - 1, runs, 2));
    assert(hash_in_place(&streaming, &state, map, runs, 2, &hash) && hash.low == 8192);
    assert(copy_in_place(slot, map, runs, 2) && slot[0] == 1 && slot[8191] == 1);
    assert(!ftruncate(file, 8192) && !is_there(map, 3 * 4096, runs, 2));
    for (int i = 0; i < 1000; i++)
        assert(!hash_in_place(&streaming, &state, map, runs, 2, &hash) &&
            !copy_in_place(slot, map, runs, 2) && copy_in_place(slot, map, runs, 1));
    return 0;
}
"""


@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
def test_a_guarded_read_of_what_is_gone_fails(tmp_path: Path) -> None:
    (tmp_path / "main.c").write_text(_GUARDED)
    sources = Path(scanning.__file__).parent
    command = ["cc", "-std=gnu11", "-O2", "-Wall", "-Werror", f"-I{sources}", "-o", "run", "main.c"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    subprocess.run([tmp_path / "run"], check=True, timeout=20)


def scan_beside_a_cutter() -> None:
    """Scan an object, in this process, while another process truncates and extends it."""
    with ExitStack() as stack:
        one = Object(7, stack)
        plan, known = one.plan(), KnownCells.none()
        code = f"""
import os
while True:
    for size in (0, {_SIZE}, {_SIZE // 3}):
        os.ftruncate({one.file}, size)
        os.pwrite({one.file}, bytes(70000), 0)
"""
        cutter = subprocess.Popen([sys.executable, "-c", code], pass_fds=[one.file])
        try:
            until = time.monotonic() + 1.0
            while time.monotonic() < until:
                found = _scan(one.mapped, plan, known, {})
                known = KnownCells(plan.key, found.fingerprint, np.zeros(len(plan), CELL))
        finally:
            cutter.kill()
            cutter.wait(20)
    print("scanned", flush=True)


def _in_a_process_of_its_own(call: str) -> subprocess.CompletedProcess[str]:
    root = str(Path(__file__).parents[2])  # last: an installed icecore comes before the sources
    code = f"import sys; sys.path.append({root!r}); import tests.dumper.test_in_place as test; test.{call}"
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )


def test_an_object_that_is_cut_off_all_the_time() -> None:
    done = _in_a_process_of_its_own("scan_beside_a_cutter()")
    assert (done.returncode, done.stdout) == (0, "scanned\n"), done.stderr


def _touch_what_is_gone() -> None:
    """Read a mapping of a file that has become empty."""
    file = os.memfd_create("gone")
    os.ftruncate(file, PAGE)
    there = mmap.mmap(file, PAGE)
    os.ftruncate(file, 0)
    assert not there[0]


def _send() -> None:
    os.kill(os.getpid(), signal.SIGBUS)


_CAUSES = {"fault": _touch_what_is_gone, "sent": _send}


def scan_and_die(before: str, cause: str) -> None:
    """Scan an object that has been truncated, and then get a SIGBUS, in this process."""
    if before == "faulthandler":
        faulthandler.enable()
    elif before == "handler":
        signal.signal(signal.SIGBUS, lambda *_: os._exit(77))
    elif before == "ignored":
        signal.signal(signal.SIGBUS, signal.SIG_IGN)
    with ExitStack() as stack:
        one = Object(4, stack, CELL_BYTES)
        os.ftruncate(one.file, 0)
        plan = plan_cells(
            [Region(0, CELL_BYTES, 0, kind="shared", name="1")], np.array([(0, 256)], EXTENT)
        )
        known = KnownCells(plan.key, np.zeros(1, FINGERPRINT), np.zeros(1, CELL))
        assert _scan(one.mapped, plan, known, {}).changed.tolist() == [0]
        print("scanned", flush=True)
        _CAUSES[cause]()
        time.sleep(0.1)  # a Python handler runs between two instructions
        # The process survived. Its reads are guarded as before.
        one = Object(4, stack, CELL_BYTES)
        os.ftruncate(one.file, 0)
        assert _scan(one.mapped, plan, known, {}).changed.tolist() == [0]


@pytest.mark.parametrize(
    ("before", "cause"),
    [
        *(("default", cause) for cause in _CAUSES),
        *(("faulthandler", cause) for cause in _CAUSES),
        # After a fault, a Python handler returns first, so the fault would repeat forever.
        ("handler", "sent"),
        *(("ignored", cause) for cause in _CAUSES),
    ],
)
def test_any_other_bus_error_is_treated_as_before(before: str, cause: str) -> None:
    done = _in_a_process_of_its_own(f"scan_and_die({before!r}, {cause!r})")
    assert done.stdout == "scanned\n", done.stderr
    assert ("Bus error" in done.stderr) == (before == "faulthandler")
    survives = (before, cause) == ("ignored", "sent")
    assert done.returncode == (77 if before == "handler" else 0 if survives else -signal.SIGBUS)
