"""The scan of a live process: it reads what is there, hands on no cell that is known, and
recognises zero pages.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import shutil
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import msgspec
import numpy as np
import numpy.typing as npt
import pytest
import xxhash
import zstandard

from icecore.dumper.encode.zero_pages import without_zero_pages
from icecore.dumper.memory.cells import EXTENT, plan_cells
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.pipeline import Pipeline
from icecore.dumper.memory.precopy import RunningReader
from icecore.dumper.memory.scan import ScanResult, _batches, scan
from icecore.dumper.memory.sources import FileSource, PagesImage
from icecore.dumper.memory.staging import Slot, Staging
from icecore.errors import Damaged, DumpFailed
from icecore.host.kernel import scanning
from icecore.host.kernel.memory import RemoteReader
from icecore.host.kernel.scanning import Columns, NativeScan, native_scan_lacks
from icecore.node.doctor import _scanning
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format.cell import CELL
from icecore.store.format.fingerprints import Fingerprints, decode_fingerprints, encode_fingerprints
from icecore.store.format.manifest import Region

_SIZE = 9 * CELL_BYTES + 5 * PAGE


class Memory:
    """Anonymous memory of this process with random pages; one page in three is untouched."""

    def __init__(self) -> None:
        self.map = mmap.mmap(-1, _SIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.touched = [p for p in range(_SIZE // PAGE) if p % 3]
        for page in self.touched:
            self.map[page * PAGE : (page + 1) * PAGE] = os.urandom(PAGE)
        self.regions = [Region(self.address, _SIZE, self.address)]
        self.plan = plan_cells(
            self.regions, np.array([(self.address + p * PAGE, 1) for p in self.touched], EXTENT)
        )

    def scan(
        self, known: KnownCells, staging: Staging, kept: dict[int, bytes], threads: int = 2
    ) -> ScanResult:
        def keep(row: int, slot: Slot) -> None:
            kept[row] = bytes(slot.view(0, int(self.plan.length[row])))
            staging.release(slot)

        with RemoteReader(os.getpid()) as reader:
            return scan(
                self.plan,
                reader,
                known,
                seed=7,
                staging=staging,
                threads=threads,
                keep=keep,
                stop=threading.Event(),
            )


@pytest.fixture(params=["native", "interpreted"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Select how cells of a process are scanned."""
    if request.param == "interpreted":
        monkeypatch.setattr(
            "icecore.dumper.memory.scan.native_scan_lacks", lambda: "the test wants it"
        )
    elif native_scan_lacks():
        pytest.skip(native_scan_lacks())
    return str(request.param)


@pytest.mark.usefixtures("way")
def test_scan_hands_on_what_changed_and_nothing_else() -> None:
    memory, kept = Memory(), dict[int, bytes]()
    with Staging(64 << 20) as staging:
        first = memory.scan(KnownCells.none(), staging, kept)
        assert sorted(kept) == list(range(len(memory.plan)))
        for row, data in kept.items():
            runs = memory.plan.runs[memory.plan.first_run[row] : memory.plan.first_run[row + 1]]
            assert data == b"".join(
                ctypes.string_at(int(r["address"]), int(r["length"])) for r in runs
            )
            assert first.fingerprint[row].tobytes() == xxhash.xxh3_128_digest(
                memory.plan.bitmap[row].tobytes() + data, 7
            )
        known = KnownCells(memory.plan.key, first.fingerprint, np.zeros(len(memory.plan), CELL))

        kept.clear()
        second = memory.scan(known, staging, kept)
        assert not kept and (second.row == np.arange(len(memory.plan))).all()

        page = memory.touched[700]
        memory.map[page * PAGE + 17] ^= 1
        third = memory.scan(known, staging, kept)
        assert list(kept) == third.changed.tolist() == [page // 256]


class Layout:
    """Memory in which cells are whole, small or scattered, some pages cannot be read but through
    /proc/PID/mem, and single bytes change.
    """

    def __init__(self, seed: int) -> None:
        self.random = np.random.default_rng(seed)
        self.map = mmap.mmap(-1, 40 * CELL_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.bytes = np.frombuffer(self.map, np.uint8)
        self.bytes[:] = self.random.integers(0, 256, len(self.bytes), np.uint8)
        there = np.zeros(40 * 256, np.bool_)
        for cell, kind in enumerate(self.random.integers(0, 5, 40).tolist()):
            own = there[cell * 256 : cell * 256 + 256]
            if kind == 0:
                own[:] = True
            elif kind == 1:
                own[self.random.integers(0, 256)] = True
            elif kind == 2:
                own[::2] = True
            elif kind == 3:
                own[:] = self.random.random(256) < 0.5
        edges = np.flatnonzero(np.diff(there, prepend=False, append=False)).reshape(-1, 2)
        self.extents = np.array(
            [(self.address + low * PAGE, high - low) for low, high in edges], EXTENT
        )
        self.regions = [Region(self.address, len(self.bytes), self.address + 3 * PAGE - CELL_BYTES)]
        self.plan = plan_cells(self.regions, self.extents)
        self.there = np.flatnonzero(there)

    def change(self, bytes_: int) -> None:
        """Change this many bytes anywhere, readable or not."""
        with open("/proc/self/mem", "r+b", buffering=0) as memory:
            for at in (self.address + self.random.integers(0, len(self.bytes), bytes_)).tolist():
                value = os.pread(memory.fileno(), 1, at)
                os.pwrite(memory.fileno(), bytes([value[0] ^ 1]), at)

    def protect(self, pages: int) -> None:
        """Make this many pages unreadable."""
        for page in self.random.choice(self.there, pages).tolist():
            assert not _mprotect(self.address + page * PAGE, PAGE, 0)

    def expected(self) -> list[bytes]:
        """Return the bytes of each cell."""
        with open("/proc/self/mem", "rb", buffering=0) as memory:
            return [
                b"".join(
                    os.pread(memory.fileno(), int(run["length"]), int(run["address"]))
                    for run in self.plan.runs[low:high]
                )
                for low, high in zip(
                    self.plan.first_run[:-1].tolist(), self.plan.first_run[1:].tolist(), strict=True
                )
            ]


_mprotect, _munmap = ctypes.CDLL(None).mprotect, ctypes.CDLL(None).munmap
_mprotect.argtypes, _munmap.argtypes = (
    [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int],
    [ctypes.c_void_p, ctypes.c_size_t],
)


@pytest.mark.parametrize("seed", range(6))
def test_a_scan_finds_what_is_there(seed: int, way: str) -> None:
    layout = Layout(seed)
    known, kept = KnownCells.none(), dict[int, bytes]()
    layout.protect([0, 40][seed % 2])
    with Staging(64 << 20) as staging, RemoteReader(os.getpid()) as reader:

        def keep(row: int, slot: Slot) -> None:
            assert row not in kept
            kept[row] = bytes(slot.view(0, int(layout.plan.length[row])))
            staging.release(slot)

        advanced: list[int] = []
        stop = threading.Event()
        for changes in (0, 0, 3, 100, 0):
            layout.change(changes)
            kept.clear()
            advanced.clear()
            before = [
                known.fingerprint[row].tobytes() if row >= 0 else b""
                for row in known.find(layout.plan.key)
            ]
            found = scan(
                layout.plan,
                reader,
                known,
                seed=seed,
                staging=staging,
                threads=8,
                keep=keep,
                stop=stop,
                advance=advanced.append,
            )
            expected = layout.expected()
            fingerprints = [
                xxhash.xxh3_128_digest(layout.plan.bitmap[row].tobytes() + data, seed)
                for row, data in enumerate(expected)
            ]
            assert [one.tobytes() for one in found.fingerprint] == fingerprints
            changed = [
                row
                for row, pair in enumerate(zip(before, fingerprints, strict=True))
                if pair[0] != pair[1]
            ]
            assert found.changed.tolist() == sorted(kept) == changed
            assert all(kept[row] == expected[row] for row in kept)
            assert (
                found.row[found.row >= 0] == np.setdiff1d(np.arange(len(layout.plan)), changed)
            ).all()
            assert sum(advanced) == layout.plan.bytes
            known = KnownCells(layout.plan.key, found.fingerprint, np.zeros(len(layout.plan), CELL))


@pytest.mark.usefixtures("way")
def test_a_page_that_is_gone_ends_the_scan() -> None:
    layout = Layout(1)
    plan = plan_cells(
        [Region(0, 1 << 40, 0)], np.array([(layout.address, 2), (1 << 30, 3)], EXTENT)[::-1]
    )
    with (
        Staging(64 << 20) as staging,
        RemoteReader(os.getpid()) as reader,
        pytest.raises(DumpFailed, match="cannot be read"),
    ):
        scan(
            plan,
            reader,
            KnownCells.none(),
            seed=1,
            staging=staging,
            threads=2,
            keep=lambda row, slot: staging.release(slot),
            stop=threading.Event(),
        )


@pytest.fixture
def fresh() -> Iterator[None]:
    """The answer is not cached: it follows what exists before and after."""
    cached = (
        native_scan_lacks,
        scanning._library,
        scanning._hash_address,
        scanning._streaming,
    )
    for one in cached:
        one.cache_clear()
    yield
    for one in cached:
        one.cache_clear()


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(not scanning.LIBRARY.exists(), reason="there is no native scan")
def test_without_a_hash_function_it_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scanning, "_NAMES", ("no_such_function",))
    assert "XXH3" in native_scan_lacks()
    with pytest.raises(RuntimeError, match="XXH3"):
        NativeScan(1, Columns(*(np.empty(0, np.uint8) for _ in range(8))), 1)
    assert _scanning().state == "warning" and "xxhash" in _scanning().cure


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("content", "words"),
    [(None, "compiler"), (b"no library", "cannot be used"), (b"", "cannot be used")],
)
def test_without_its_library_it_is_said(
    content: bytes | None, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    if content is not None:
        (tmp_path / "library").write_bytes(content)
    monkeypatch.setattr(scanning, "LIBRARY", tmp_path / "library")
    assert words in native_scan_lacks()
    assert _scanning().state == "warning" and "gcc" in _scanning().cure


@pytest.mark.usefixtures("fresh")
@pytest.mark.skipif(not shutil.which("cc"), reason="needs a C compiler")
@pytest.mark.parametrize(("size", "words"), [("8", "another version"), ("", "cannot be used")])
def test_a_library_of_another_version_is_not_used(
    size: str, words: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    text = f"unsigned long scan_cells_size = {size};" if size else ""
    (tmp_path / "old.c").write_text(f"long scan_cells(void) {{ return 0; }} {text}")
    subprocess.run(
        ["cc", "-shared", "-o", "library", "old.c"], cwd=tmp_path, check=True, timeout=60
    )
    monkeypatch.setattr(scanning, "LIBRARY", tmp_path / "library")
    assert words in native_scan_lacks()


@pytest.mark.skipif(bool(native_scan_lacks()), reason="there is no native scan")
def test_arrays_that_c_would_misread_are_refused() -> None:
    good = {
        "runs": np.zeros(9, "V16"),
        "first_run": np.zeros(5, "<u4"),
        "length": np.zeros(4, "<u8"),
        "bitmap": np.zeros((4, 32), "u1"),
        "candidate": np.zeros(4, "<i8"),
        "known": np.zeros(0, "V16"),
        "fingerprint": np.zeros(4, "V16"),
        "row": np.zeros(4, "<i8"),
    }
    NativeScan(1, Columns(**good), 1)
    bad = [
        (name, array.astype("<u2") if array.dtype.kind != "V" else array.view("u1"))
        for name, array in good.items()
    ]
    bad += [
        (name, np.zeros((2 * len(array), *array.shape[1:]), array.dtype)[::2])
        for name, array in good.items()
        if len(array)
    ]
    bad += [(name, array[1:]) for name, array in good.items() if name not in ("runs", "known")]
    bad += [
        ("length", np.zeros(4, "<f8")),
        ("row", np.zeros(4, "<u8")),
        ("bitmap", np.zeros(4, "u1")),
    ]
    for name in ("fingerprint", "row"):
        fixed = good[name].copy()
        fixed.flags.writeable = False
        bad.append((name, fixed))
    for name, array in bad:
        with pytest.raises(ValueError, match="not what the scan takes"):
            NativeScan(1, Columns(**{**good, name: array}), 1)


@pytest.mark.parametrize("seed", range(8))
def test_batches_are_about_as_much_work_each(seed: int) -> None:
    random = np.random.default_rng(seed)
    small, whole = int(random.integers(0, 30000)), int(random.integers(1, 300))
    length = np.concatenate([np.full(small, PAGE), np.full(whole, CELL_BYTES)]).astype(np.uint64)
    for threads in (1, 12):
        ends = _batches(length, threads, True)
        assert ends[-1] == len(length) and all(
            low < high for low, high in zip([0, *ends], ends, strict=False)
        )
        work = [
            int((length[low:high] + np.uint64(PAGE)).sum())
            for low, high in zip([0, *ends], ends, strict=False)
        ]
        total = sum(work)
        assert max(work) <= min(16 << 20, total // (4 * threads)) + CELL_BYTES + 2 * PAGE
        assert len(ends) >= min(3 * threads, len(length) // 2)
    assert _batches(length, 4, False) == [*range(16, len(length), 16), len(length)]


@pytest.mark.usefixtures("way")
def test_a_scan_that_is_stopped_ends_soon() -> None:
    layout, stop, seen = Layout(3), threading.Event(), []

    def keep(row: int, slot: Slot) -> None:
        staging.release(slot)
        seen.append(row)
        stop.set()

    with (
        Staging(64 << 20) as staging,
        RemoteReader(os.getpid()) as reader,
        pytest.raises(DumpFailed, match="stopped"),
    ):
        scan(
            layout.plan,
            reader,
            KnownCells.none(),
            seed=1,
            staging=staging,
            threads=1,
            keep=keep,
            stop=stop,
        )
    assert len(seen) <= 16


@pytest.mark.usefixtures("way")
def test_what_changes_and_vanishes_while_it_is_scanned() -> None:
    """Pre-copy scans a running process: memory that the process unmapped counts as zeros."""
    layout = Layout(5)
    gone = int(np.argmax(layout.plan.length))
    with Staging(64 << 20) as staging, RemoteReader(os.getpid()) as reader:
        keep = lambda row, slot: staging.release(slot)  # noqa: E731
        more = {
            "seed": 1,
            "staging": staging,
            "threads": 3,
            "keep": keep,
            "stop": threading.Event(),
        }
        before = scan(layout.plan, RunningReader(reader), KnownCells.none(), **more)
        known = KnownCells(layout.plan.key, before.fingerprint, np.zeros(len(layout.plan), CELL))
        run = layout.plan.runs[layout.plan.first_run[gone]]
        assert not _munmap(int(run["address"]), int(run["length"]))
        after = scan(layout.plan, RunningReader(reader), known, **more)
    assert after.changed.tolist() == [gone]
    nothing = layout.plan.bitmap[gone].tobytes() + bytes(int(layout.plan.length[gone]))
    assert after.fingerprint[gone].tobytes() == xxhash.xxh3_128_digest(nothing, 1)


def test_threads_that_take_all_slots_for_themselves_make_it_spill() -> None:
    """Each thread takes a slot before it hands anything on, and with many threads none is left for
    the next cells.
    """
    layout, stored = Layout(2), []

    class Store:
        def store_cell(
            self, stream: int, cell: int, *rest: object, **more: object
        ) -> npt.NDArray[np.void]:
            stored.append(cell)
            return np.zeros((), CELL)

    with Staging(1, 12) as staging, Pipeline(Store(), staging, 2) as pipeline:
        pipeline.close_gate()
        sink = pipeline.space(0, layout.plan, layout.regions, KnownCells.none())
        queued = staging.capacity - 12
        for row in range(queued):
            pipeline.put(sink, row % len(layout.plan), staging.acquire())
        held = [staging.acquire() for _ in range(staging.available)]
        assert len(held) == 12 and not pipeline.spilled and not stored
        thread = threading.Thread(target=lambda: held.append(staging.acquire()), daemon=True)
        thread.start()
        thread.join(10)
        assert len(held) == 13 and pipeline.spilled
        pipeline.drain()
        assert len(stored) == queued


def test_a_bounded_staging_makes_the_scan_wait_and_an_abandoned_one_ends_it() -> None:
    memory = Memory()
    with Staging(1) as staging:
        held: list[Slot] = []
        started = threading.Event()

        def keep(row: int, slot: Slot) -> None:
            held.append(slot)
            started.set()

        failure: list[BaseException] = []

        def run() -> None:
            try:
                with RemoteReader(os.getpid()) as reader:
                    scan(
                        memory.plan,
                        reader,
                        KnownCells.none(),
                        seed=1,
                        staging=staging,
                        threads=1,
                        keep=keep,
                        stop=threading.Event(),
                    )
            except DumpFailed as error:
                failure.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        assert started.wait(10)
        thread.join(0.5)
        assert thread.is_alive() and len(held) == staging.capacity - 1  # one is being packed
        assert staging.bytes <= 8 * (CELL_BYTES + PAGE)
        staging.abandon(DumpFailed("no space"))
        thread.join(10)
        assert not thread.is_alive()
        assert "no space" in str(failure[0])


@pytest.mark.parametrize("zeros", [[], [0], [5, 6, 7, 100], list(range(200))])
def test_zero_pages_are_told_apart(zeros: list[int]) -> None:
    rng = np.random.default_rng(3)
    present = np.sort(rng.choice(256, 200, replace=False))
    mask = np.zeros(256, np.bool_)
    mask[present] = True
    data = rng.integers(0, 256, (200, PAGE), np.uint8)
    data[:, 0] = rng.integers(0, 2, 200)  # a page that merely begins with zeros is data
    data[zeros] = 0
    bitmap, zero, kept = without_zero_pages(
        np.packbits(mask, bitorder="little"),
        memoryview(data.tobytes()),
        np.empty(CELL_BYTES, np.uint8),
    )
    is_zero = ~data.any(axis=1)
    assert set(
        np.flatnonzero(np.unpackbits(np.frombuffer(zero, np.uint8), bitorder="little"))
    ) == set(present[is_zero])
    assert set(
        np.flatnonzero(np.unpackbits(np.frombuffer(bitmap, np.uint8), bitorder="little"))
    ) == set(present[~is_zero])
    assert bytes(kept) == data[~is_zero].tobytes()


def test_a_file_reads_as_a_space_with_its_holes_and_its_tail(tmp_path: object) -> None:
    path = f"{tmp_path}/file"
    tail = os.urandom(3 * PAGE + 123)
    with open(path, "wb") as file:
        file.write(b"head" * 1000)
        file.seek(5 * CELL_BYTES)
        file.write(tail)
    size = os.path.getsize(path)
    descriptor = os.open(path, os.O_RDONLY)
    try:
        source = FileSource(descriptor, size, path)
        plan = plan_cells([Region(0, -(-size // PAGE) * PAGE, 0, kind="file")], source.extents())
        got: dict[int, bytes] = {}
        with Staging(1) as staging:

            def keep(row: int, slot: Slot) -> None:
                got[int(plan.cell[row])] = bytes(slot.view(0, int(plan.length[row])))
                staging.release(slot)

            scan(
                plan,
                source,
                KnownCells.none(),
                seed=0,
                staging=staging,
                threads=1,
                keep=keep,
                stop=threading.Event(),
            )
        assert got[5] == tail + bytes(-len(tail) % PAGE)
        assert got[0].startswith(b"head" * 1000) and not got[0][4000:].strip(b"\0")
        assert set(got) == {0, 5}
    finally:
        os.close(descriptor)


def test_a_pages_image_reads_by_address(tmp_path: object) -> None:
    pages = [os.urandom(PAGE) for _ in range(6)]
    path = f"{tmp_path}/pages-1.img"
    with open(path, "wb") as file:
        file.write(b"".join(pages))
    extents = np.array(
        [(0x7000, 2), (0x1000, 1), (0x20000, 3)], EXTENT
    )  # in the image's order, which need not be the addresses'
    image = PagesImage(path, extents)
    addresses = [0x7000, 0x8000, 0x1000, 0x20000, 0x21000, 0x22000]
    iovecs = np.array([(a, PAGE) for a in addresses], [("address", "<u8"), ("length", "<u8")])
    with Staging(1) as staging:
        slot = staging.acquire()
        image.read_into(iovecs.ctypes.data, len(iovecs), slot, 6 * PAGE)
        assert bytes(slot.view(0, 6 * PAGE)) == b"".join(pages)
    image.close()


def test_fingerprints_survive_storing_and_name_damage() -> None:
    keys, fingerprints = np.arange(5, dtype=np.uint64) * 4096, np.frombuffer(os.urandom(80), "V16")
    data = encode_fingerprints(
        {
            "process:1": Fingerprints(keys, fingerprints, keys[1:3]),
            "file:a": Fingerprints(keys, fingerprints),
        }
    )
    back = decode_fingerprints(data)
    assert back["process:1"].key.tolist() == keys.tolist()
    assert back["process:1"].fingerprint.tobytes() == fingerprints.tobytes()
    assert back["process:1"].restless.tolist() == keys[1:3].tolist() and not len(
        back["file:a"].restless
    )
    # As they were written before the format had a third part.
    old = zstandard.compress(
        msgspec.msgpack.encode({"process:1": [keys.tobytes(), fingerprints.tobytes()]})
    )
    assert decode_fingerprints(old)["process:1"].key.tolist() == keys.tolist()
    with pytest.raises(Damaged):
        decode_fingerprints(data[:-3])
    with pytest.raises(Damaged):
        decode_fingerprints(os.urandom(100))


def test_staging_that_grows_while_something_is_waited_for() -> None:
    with Staging(64 << 20) as staging:
        with staging.growing(40):
            end = time.monotonic() + 20
            while staging.bytes < 40 << 20:
                assert time.monotonic() < end
                time.sleep(0.001)
        slots = [staging.acquire() for _ in range(staging.capacity)]
        assert staging.available == 0 and staging.bytes <= 64 << 20
        with staging.growing(1 << 20):
            pass
        for slot in slots:
            staging.release(slot)
        assert staging.available == staging.capacity
