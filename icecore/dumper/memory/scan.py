"""The scan: threads read every cell of a plan in place, fingerprint it, and hand on the cells that
are not known yet. The bytes that are hashed are the bytes that are kept.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Protocol

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

from icecore.dumper.memory.cells import RUN, UNKNOWN, CellPlan
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.staging import SMALL_BYTES, Packer, Slot, Staging
from icecore.errors import DumpFailed
from icecore.events import Advance, unwatched
from icecore.host.kernel.mapped import MappedFile
from icecore.host.kernel.scanning import CHANGED, NOT_READ, Columns, NativeScan, native_scan_lacks
from icecore.sizes import CELL_BYTES
from icecore.store.format.fingerprints import FINGERPRINT

_BATCH = 16
#: The cost of a row apart from its bytes (a system call), in bytes that could be read meanwhile.
_ROW_COST = 4096


class Source(Protocol):
    """Where a scan reads: a process's memory, or a file that is addressed like memory.

    Attributes:
        process: Pid of the process whose memory it is; None: not a process.
        file: Descriptor of a file whose offsets are the addresses; None: it cannot be read so. If
            both are there, the file is read, but for what `scan` is told to read from the process.
        mapped: The file's mapping in this process; None: it is not mapped.
    """

    @property
    def process(self) -> int | None: ...

    @property
    def file(self) -> int | None: ...

    @property
    def mapped(self) -> MappedFile | None: ...

    def read_into(self, iovecs: int, count: int, buffer: Slot, size: int) -> None:
        """Read ``count`` iovecs (at address ``iovecs``; ``size`` bytes in all) into the start of the
        slot, or raise.
        """


class ScanResult(msgspec.Struct, frozen=True):
    """What a scan found, by rows of its plan.

    Attributes:
        fingerprint: V16[n].
        row: i8[n], the row of the known cell that is still true, `UNKNOWN` if the cell was handed
            on, or `ZERO`.
    """

    fingerprint: npt.NDArray[np.void]
    row: npt.NDArray[np.int64]

    @property
    def changed(self) -> npt.NDArray[np.int64]:
        """Rows of the plan that were handed on."""
        return np.flatnonzero(self.row == UNKNOWN)


class ReadElsewhere(msgspec.Struct, frozen=True):
    """Cells whose content was read in another process.

    Attributes:
        row: i8[n], their rows in the plan, ascending.
        fingerprint: V16[n].
    """

    row: npt.NDArray[np.int64]
    fingerprint: npt.NDArray[np.void]


class _Shared(msgspec.Struct, frozen=True):
    """What the threads of one scan share."""

    plan: CellPlan
    known: KnownCells
    candidates: npt.NDArray[np.int64]
    fingerprint: npt.NDArray[np.void]
    row: npt.NDArray[np.int64]
    source: Source
    seed: int
    staging: Staging
    keep: Callable[[int, Slot], None]
    stop: threading.Event
    failures: list[BaseException]
    advance: Advance
    pause: Callable[[], None]
    native: NativeScan | None

    @property
    def over(self) -> bool:
        """Whether the scan must end early."""
        return self.stop.is_set() or bool(self.failures)


class _Cursor:
    """Hands out batches of rows; ``ends`` is where each batch ends."""

    def __init__(self, ends: list[int]) -> None:
        self._ends = ends
        self._next = 0
        self._lock = threading.Lock()

    def take(self) -> range:
        with self._lock:
            number = self._next
            self._next += 1
        if number >= len(self._ends):
            return range(0)
        return range(self._ends[number - 1] if number else 0, self._ends[number])


def _batches(length: npt.NDArray[np.uint64], threads: int, native: bool) -> list[int]:
    """Return where batches of rows end: a fixed number of rows each, or, if the scan is native, about
    the same amount of work each.
    """
    if not native:
        return [*range(_BATCH, len(length), _BATCH), len(length)]
    work = np.cumsum(length.astype(np.int64) + _ROW_COST)
    share = min(_BATCH * CELL_BYTES, int(work[-1]) // (4 * threads) + 1)
    ends = np.searchsorted(work, np.arange(share, int(work[-1]) + share, share)) + 1
    ends = np.minimum(ends, len(length))
    return ends[np.concatenate(([True], ends[1:] > ends[:-1]))].tolist()  # type: ignore[no-any-return]


def scan(
    plan: CellPlan,
    source: Source,
    known: KnownCells,
    *,
    seed: int,
    staging: Staging,
    threads: int,
    keep: Callable[[int, Slot], None],
    stop: threading.Event,
    advance: Advance = unwatched,
    pause: Callable[[], None] = lambda: None,
    read: ReadElsewhere | None = None,
    by_file: npt.NDArray[np.uint8] | None = None,
) -> ScanResult:
    """Read all cells of ``plan`` and hand those whose fingerprint differs from the known one to
    ``keep``.

    Args:
        known: What the parent and pre-copy know, looked up by cell key.
        read: Cells that were read elsewhere. They are read here only if they are not known.
        by_file: u1[n], not 0 for the cells that are to be read from the source's file; None: all if
            there is a file.
        seed: The lineage's secret 64-bit seed.
        staging: Where the slots come from. ``keep(row, slot)`` takes over the slot.
        threads: Number of threads that read.
        stop: When set, the scan ends at once.
        advance: Told of bytes that were read.
        pause: Called by each thread after a batch (`CpuBudget.pause`).

    Raises:
        DumpFailed: A page could not be read, or ``stop`` was set.
    """
    candidates, fingerprint, row = (
        known.find(plan.key),
        np.empty(len(plan), FINGERPRINT),
        np.full(len(plan), UNKNOWN, np.int64),
    )
    length = plan.length
    if read is not None:
        same = ~known.differ(plan.key[read.row], read.fingerprint)
        decided = read.row[same]
        fingerprint[decided], row[decided] = read.fingerprint[same], candidates[decided]
        length = length.copy()
        length[decided] = 0
    native = None
    if (source.process is not None or source.file is not None) and not native_scan_lacks():
        columns = Columns(
            plan.runs,
            plan.first_run,
            plan.length,
            np.ascontiguousarray(plan.bitmap),
            candidates,
            known.fingerprint,
            fingerprint,
            row,
        )
        process = source.process if source.file is None or by_file is not None else None
        native = NativeScan(
            process, columns, seed, file=source.file, by_file=by_file, mapped=source.mapped
        )
    shared = _Shared(
        plan,
        known,
        candidates,
        fingerprint,
        row,
        source,
        seed,
        staging,
        keep,
        stop,
        [],
        advance,
        pause,
        native,
    )
    cursor = _Cursor(_batches(length, threads, native is not None) if len(plan) else [])
    workers = [
        threading.Thread(target=_work, args=(shared, cursor), name=f"scan-{i}")
        for i in range(max(1, min(threads, len(plan) // 4)) - 1)
    ]
    for worker in workers:
        worker.start()
    try:
        _work(shared, cursor)
        for worker in workers:
            worker.join()
    except BaseException as error:
        # An interrupt: no thread may go on reading a process that is about to run again.
        shared.failures.append(error)
        for worker in workers:
            worker.join()
        raise
    if shared.failures:
        raise shared.failures[0]
    if stop.is_set():
        raise DumpFailed("the scan was stopped")
    return ScanResult(shared.fingerprint, shared.row)


def _work(shared: _Shared, cursor: _Cursor) -> None:
    try:
        slot, packer = shared.staging.acquire(), Packer(shared.staging)
        try:
            scan_batch = _scan_batch if shared.native is None else _scan_natively
            while (batch := cursor.take()) and not shared.over:
                slot = scan_batch(shared, batch, slot, packer)
                shared.advance(int(shared.plan.length[batch.start : batch.stop].sum()))
                shared.pause()
        finally:
            packer.close()
            shared.staging.release(slot)
    except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
        shared.failures.append(error)


def _scan_batch(shared: _Shared, batch: range, slot: Slot, packer: Packer) -> Slot:
    """Scan some rows in Python and return the slot that the thread now owns. Numpy values are turned
    into plain ints once a batch.
    """
    plan, known = shared.plan, shared.known
    low, high = batch.start, batch.stop
    first = plan.first_run[low : high + 1].tolist()
    sizes = plan.length[low:high].tolist()
    candidates = shared.candidates[low:high]
    rows = candidates.tolist()
    expected = (
        known.fingerprint[np.maximum(candidates, 0)].tobytes()
        if len(known.fingerprint)
        else bytes(16 * len(batch))
    )
    bitmaps = np.ascontiguousarray(plan.bitmap[low:high]).data.cast("B")
    runs = plan.runs.ctypes.data
    read, seed, digest = shared.source.read_into, shared.seed, xxhash.xxh3_128_digest
    found = bytearray(16 * len(batch))
    for i in range(high - low):
        if shared.row[low + i] >= 0:
            found[16 * i : 16 * i + 16] = shared.fingerprint[low + i].tobytes()
            continue
        size = sizes[i]
        read(runs + first[i] * RUN.itemsize, first[i + 1] - first[i], slot, size)
        slot.set_bitmap(bitmaps[32 * i : 32 * i + 32])
        value = digest(slot.hashed(size), seed)
        found[16 * i : 16 * i + 16] = value
        if rows[i] >= 0 and expected[16 * i : 16 * i + 16] == value:
            shared.row[low + i] = rows[i]
        else:
            slot = _hand_on(shared, low + i, size, slot, packer)
    shared.fingerprint[low:high] = np.frombuffer(found, FINGERPRINT)
    return slot


def _scan_natively(shared: _Shared, batch: range, slot: Slot, packer: Packer) -> Slot:
    """Scan some rows natively, without the interpreter except for cells that must be handed on."""
    assert shared.native is not None
    at = batch.start
    while at < batch.stop and not shared.over:
        at, why = shared.native.until(at, batch.stop, slot.address)
        if why == NOT_READ:
            # The memory cannot be read at once, or not at all; the source has other ways to read it.
            slot = _scan_batch(shared, range(at, at + 1), slot, packer)
        elif why == CHANGED:
            slot = _hand_on(shared, at, int(shared.plan.length[at]), slot, packer)
        at += 1
    return slot


def _hand_on(shared: _Shared, row: int, size: int, slot: Slot, packer: Packer) -> Slot:
    """Hand on the cell in the slot and return the slot that the thread now owns."""
    if size <= SMALL_BYTES:
        shared.keep(row, packer.take(slot, size))
        return slot
    fresh = shared.staging.acquire()
    shared.keep(row, slot)
    return fresh
