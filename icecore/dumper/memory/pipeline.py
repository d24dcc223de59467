"""The background pipeline: threads that drop zero pages and store the rest. If there is much to
store, each thread has an encoder (`icecore.dumper.encode`). During the window, the threads wait
behind a gate, because the window comes first.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Protocol

import numpy as np
import numpy.typing as npt

from icecore.dumper.encode.encoders import (
    EXPECTED_BYTES,
    PAYS_BYTES,
    Encoder,
    EncoderLost,
    Encoders,
)
from icecore.dumper.encode.protocol import ROOM_CELLS, Cell, Named
from icecore.dumper.encode.zero_pages import NO_PAGES, without_zero_pages
from icecore.dumper.memory.background import lower_priority
from icecore.dumper.memory.budget import CpuBudget
from icecore.dumper.memory.cells import ZERO, CellPlan
from icecore.dumper.memory.known import KnownCells
from icecore.dumper.memory.staging import Slot, Staging
from icecore.events import Advance, Event, Sink, discard, unwatched
from icecore.sizes import CELL_BYTES
from icecore.store.format.cell import CELL
from icecore.store.format.manifest import Region
from icecore.store.snapshot.forms import Appender, AppenderLost, Chunk
from icecore.store.snapshot.writer import ReadCell

_SPILL_SLOTS = 64
#: A thread encodes smaller cells itself: asking an encoder takes about as long.
_LEAST_CELL = 64 << 10


class CellStore(Protocol):
    """The part of the store's writer that the pipeline needs."""

    def store_cell(
        self,
        stream: int,
        cell: int,
        data_bitmap: bytes,
        zero_bitmap: bytes,
        data: memoryview,
        previous: np.void | None,
        *,
        region: int = 0,
    ) -> np.void:
        """Store one cell and return its CELL record."""

    def store_read(
        self, stream: int, cells: Sequence[ReadCell], appender: Appender
    ) -> tuple[list[np.void], AppenderLost | None]:
        """Store cells that an appender has read. Return their CELL records, and the appender's error
        if it was lost; this process then stored the rest.
        """

    def chunk(self, bitmap: bytes, data: memoryview) -> Chunk:
        """Return the chunk of these data pages."""


class SpaceSink:
    """Collects the records of one space while its cells go through the pipeline.

    Attributes:
        records: CELL[n], by rows of the plan; complete once the pipeline is drained.
        stream: The shard stream of the space.
    """

    def __init__(
        self,
        pipeline: Pipeline,
        stream: int,
        plan: CellPlan,
        regions: list[Region],
        known: KnownCells,
    ) -> None:
        self.records = np.zeros(len(plan), CELL)
        self.stream = stream
        self._pipeline = pipeline
        self._plan = plan
        self._known = known
        self._candidates = known.find(plan.key)
        # A restore clears resident device memory first, so its zeros need not be stored.
        self._sparse = np.array(
            [
                (r.kind in ("anonymous", "heap") and r.lazy) or (r.kind == "device" and not r.lazy)
                for r in regions
            ],
            np.bool_,
        )

    def keep(self, row: int, slot: Slot) -> None:
        """Take over a slot that holds the cell of ``row``, and queue the cell."""
        self._pipeline.put(self, row, slot)

    def length(self, row: int) -> int:
        """Return the bytes of the cell of ``row``."""
        return int(self._plan.length[row])

    def cell(self, row: int, slot: Slot) -> Cell | None:
        """Return what an encoder has to read; None: too little to be worth a request."""
        size = int(self._plan.length[row])
        if size < _LEAST_CELL:
            return None
        sparse = bool(self._sparse[self._plan.region[row]])
        return Cell(slot.address, size, self._plan.bitmap[row].tobytes(), sparse)

    def store(
        self,
        row: int,
        slot: Slot,
        scratch: npt.NDArray[np.uint8],
        writer: CellStore,
        read: Named | None = None,
    ) -> None:
        """Encode and store one cell. The pipeline's threads call this.

        Args:
            read: The cell, if an encoder has read it and found no data pages.
        """
        if read is None:
            bitmap, zero, data = self._split(row, slot, scratch)
        else:
            bitmap, zero, data = read.data, read.zero, memoryview(b"")
        self.records[row] = writer.store_cell(
            self.stream,
            int(self._plan.cell[row]),
            bitmap,
            zero,
            data,
            self._previous(row),
            region=int(self._plan.region[row]),
        )

    def read_cell(
        self,
        row: int,
        slot: Slot,
        scratch: npt.NDArray[np.uint8],
        writer: CellStore,
        number: int,
        read: Named,
    ) -> ReadCell:
        """Return a cell with data pages that an encoder has read; ``number`` is its number there."""

        def own() -> Chunk:
            bitmap, _, data = self._split(row, slot, scratch)
            return writer.chunk(bitmap, data)

        return ReadCell(
            number,
            int(self._plan.cell[row]),
            int(self._plan.region[row]),
            self._previous(row),
            read.data,
            read.zero,
            read.chunk,
            read.length,
            read.zeros,
            own,
        )

    def _split(
        self, row: int, slot: Slot, scratch: npt.NDArray[np.uint8]
    ) -> tuple[bytes, bytes, memoryview]:
        """Return the bitmaps of a cell's data pages and of its pages of zeros, and its data."""
        bitmap, whole = self._plan.bitmap[row], slot.view(0, int(self._plan.length[row]))
        if self._sparse[self._plan.region[row]]:
            return without_zero_pages(bitmap, whole, scratch)
        return bitmap.tobytes(), NO_PAGES, whole

    def _previous(self, row: int) -> np.void | None:
        candidate = int(self._candidates[row])
        return self._known.record[candidate] if candidate >= 0 else None

    def zeros(self, rows: npt.NDArray[np.int64]) -> None:
        """Record cells that hold only zeros. ``rows`` i8[n]: as for `unchanged`."""
        zero = np.flatnonzero(rows == ZERO)
        self.records[zero] = np.zeros(1, CELL)
        self.records["cell"][zero] = self._plan.cell[zero]
        self.records["zero"][zero] = self._plan.bitmap[zero]

    def unchanged(self, rows: npt.NDArray[np.int64]) -> None:
        """Take over the known records of cells that did not change. ``rows`` i8[n]: the known row,
        or -1.
        """
        same = np.flatnonzero(rows >= 0)
        self.records[same] = self._known.record[rows[same]]
        self.records["cell"][same] = self._plan.cell[same]


#: A cell in a slot, and where its record goes.
Item = tuple[SpaceSink, int, Slot]


class Pipeline:
    """Threads between staging and the store.

    While the gate is closed (the window), cells wait in staging. When staging runs low, the gate
    opens: the spill goes straight into the repository.

    Args:
        writer: Stores the cells.
        staging: Where slots are given back.
        threads: Number of encoding threads.
        budget: Bounds the CPU time of these threads while the job runs; None: no bound.
        encoders: Processes that encode in place of these threads once much is stored; None: there
            are none.
        emit: Gets ``store.base_damaged`` and ``dump.encoder_lost`` events.
    """

    def __init__(
        self,
        writer: CellStore,
        staging: Staging,
        threads: int,
        budget: CpuBudget | None = None,
        encoders: Encoders | None = None,
        emit: Sink = discard,
    ) -> None:
        self.emit = emit
        self._encoders = encoders
        self._budget = budget or CpuBudget()
        self._writer = writer
        self._staging = staging
        self._queue: queue.SimpleQueue[Item | None] = queue.SimpleQueue()
        #: Cells that are queued or being stored.
        self._pending = 0
        self._change = threading.Condition()
        self._stored = 0
        self._over = False
        self._gate = threading.Event()
        self._gate.set()
        # The scan outruns the store many times over, so a wider margin would only open the gate when
        # staging would have sufficed.
        self._low = max(4, min(_SPILL_SLOTS, staging.capacity // 8))
        staging.when_empty = self._spill
        self._failure: BaseException | None = None
        self._advance: Advance = unwatched
        self._starter: threading.Thread | None = None
        self.spilled = False
        self._threads = [
            threading.Thread(target=self._run, name=f"encode-{i}", daemon=True)
            for i in range(threads)
        ]
        for thread in self._threads:
            thread.start()

    def space(
        self, stream: int, plan: CellPlan, regions: list[Region], known: KnownCells
    ) -> SpaceSink:
        """Return a sink for the cells of one space, which go to shard stream ``stream``."""
        return SpaceSink(self, stream, plan, regions, known)

    def expect(self, size: int) -> None:
        """Start the encoders in the background if it pays off for ``size`` bytes, which will
        probably be stored, or if they are eager.
        """
        encoders = self._encoders
        if encoders is None or self._starter is not None:
            return
        if size < EXPECTED_BYTES and not encoders.eager:
            return
        starter = threading.Thread(target=self._start_ahead, name="encoders", daemon=True)
        try:
            starter.start()
        except RuntimeError as error:
            self._lose(EncoderLost(f"no thread to start encoders: {error}"))
        else:
            self._starter = starter

    def _start_ahead(self) -> None:
        lower_priority()  # encoders and their threads inherit it
        try:
            self._start_encoders()
        except EncoderLost as error:
            self._lose(error)
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._fail(error)

    def put(self, sink: SpaceSink, row: int, slot: Slot) -> None:
        """Queue one cell.

        Raises:
            Whatever the store raised first.
        """
        if self._failure is not None:
            self._staging.release(slot)
            raise self._failure
        with self._change:
            self._pending += 1
        self._queue.put((sink, row, slot))
        if self._staging.available < self._low:
            self._spill()

    def _spill(self) -> None:
        """Open the gate if anything waits behind it, in the queue or with a thread. If nothing does,
        the scan threads hold the remaining slots and have not handed any on.
        """
        if not self._gate.is_set() and self._pending:
            self.spilled = True
            self._gate.set()

    def close_gate(self) -> None:
        """Begin the window: leave the cores to the scan, and lift the bound on CPU time."""
        self._gate.clear()
        self._budget.lift()

    def open_gate(self, advance: Advance = unwatched) -> None:
        """End the window. ``advance`` is told of bytes as they are stored."""
        self._advance = advance
        self._gate.set()

    def drain(self) -> None:
        """Wait until everything queued is stored.

        Raises:
            Whatever the store raised first.
        """
        self._gate.set()
        with self._change:
            self._change.wait_for(lambda: not self._pending or self._failure is not None)
        if self._failure is not None:
            raise self._failure

    def _run(self, encoder: Encoder | None = None) -> None:
        if encoder is None:  # else the thread that started this one has lowered it
            lower_priority()  # the job runs whenever the gate is open
        scratch = np.empty(CELL_BYTES, np.uint8)
        usable = True
        while (item := self._queue.get()) is not None:
            self._gate.wait()
            items: list[Item] = [item]
            try:
                if encoder is None and usable:
                    encoder = self._find_encoder()
                if encoder is not None:
                    items += self._more()
            except EncoderLost as error:
                usable = self._lose(error)
            except BaseException as error:  # noqa: BLE001 - the items are released below
                self._fail(error)
            if encoder is not None and usable:
                usable = self._store_with(encoder, items, scratch)
            else:
                self._store_each(items, scratch)
            if not usable:
                encoder = None

    def _more(self) -> list[Item]:
        """Return some more items for one encoder, if many are queued."""
        more: list[Item] = []
        if self._budget.small:
            return more
        while len(more) < ROOM_CELLS - 1 and self._queue.qsize() > 2 * len(self._threads):
            try:
                item = self._queue.get_nowait()
            except queue.Empty:
                break
            if item is None:
                self._queue.put(None)  # for another thread, or for this one
                break
            more.append(item)
        return more

    def _store_with(
        self, encoder: Encoder, items: Sequence[Item], scratch: npt.NDArray[np.uint8]
    ) -> bool:
        """Store cells with an encoder; return whether it is still usable."""
        try:
            found = self._read(items, encoder)
        except EncoderLost as error:
            self._lose(error)
            self._store_each(items, scratch)
            return False
        except BaseException as error:  # noqa: BLE001 - the items are released below
            self._fail(error)
            self._store_each(items, scratch)
            return True
        usable, streams = True, dict[int, list[tuple[Item, int, Named]]]()
        for item, one in zip(items, found, strict=True):
            if one is None or not one[1].length:
                self._store_each([item], scratch, one[1] if one is not None else None)
            else:
                streams.setdefault(item[0].stream, []).append((item, *one))
        for stream, cells in streams.items():
            some = [item for item, _, _ in cells]
            if not usable:
                self._store_each(some, scratch)
                continue
            self._gate.wait()
            with self._storing(some):
                if self._failure is None:
                    usable = self._store_read(stream, cells, encoder, scratch)
        return usable

    def _store_read(
        self,
        stream: int,
        cells: Sequence[tuple[Item, int, Named]],
        encoder: Encoder,
        scratch: npt.NDArray[np.uint8],
    ) -> bool:
        """Store cells that an encoder has read; return whether it is still usable."""
        read = [
            sink.read_cell(row, slot, scratch, self._writer, number, named)
            for (sink, row, slot), number, named in cells
        ]
        records, lost = self._writer.store_read(stream, read, encoder)
        for ((sink, row, _), _, _), record in zip(cells, records, strict=True):
            sink.records[row] = record
        return lost is None or self._lose(lost)

    def _read(self, items: Sequence[Item], encoder: Encoder) -> list[tuple[int, Named] | None]:
        """Have an encoder read cells; return each with its number in the encoder, or None if the encoder
        did not read it.
        """
        cells = [sink.cell(row, slot) for sink, row, slot in items]
        wanted = [cell for cell in cells if cell is not None]
        if not wanted or self._failure is not None:
            return [None] * len(items)
        named = iter(enumerate(encoder.load(wanted)))
        return [next(named) if cell is not None else None for cell in cells]

    def _lose(self, error: AppenderLost) -> bool:
        """Report that a thread has lost its encoder and continues without it. Return False."""
        try:
            self.emit(Event("dump.encoder_lost", {"error": str(error)}))
        except BaseException as failure:  # noqa: BLE001 - the thread still has cells
            self._fail(failure)
        return False

    def _store_each(
        self,
        items: Sequence[Item],
        scratch: npt.NDArray[np.uint8],
        read: Named | None = None,
    ) -> None:
        """Store cells in this thread, unless an earlier cell failed.

        Args:
            read: As in `SpaceSink.store`.
        """
        for item in items:
            self._gate.wait()
            with self._storing([item]):
                if self._failure is None:
                    sink, row, slot = item
                    sink.store(row, slot, scratch, self._writer, read)

    @contextmanager
    def _storing(self, items: Sequence[Item]) -> Iterator[None]:
        """Release the cells when the context, which stores them, ends. Hand an error in the context to
        the thread that waits.
        """
        try:
            try:
                yield
                self._stored += sum(sink.length(row) for sink, row, _ in items)
            finally:
                for _, _, slot in items:
                    self._staging.release(slot)
                for sink, row, _ in items:
                    self._advance(sink.length(row))
            self._budget.pause()
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            self._fail(error)
        finally:
            with self._change:
                self._pending -= len(items)
                if not self._pending or self._failure is not None:
                    self._change.notify_all()

    def check(self) -> None:
        """Raise whatever the store raised first, if anything."""
        if self._failure is not None:
            raise self._failure

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._staging.abandon(error)

    def _find_encoder(self) -> Encoder | None:
        """Return an encoder if there is one for this thread. Once the threads have stored much and
        more cells are waiting, start the encoders, and threads for those that have none.

        Raises:
            EncoderLost: Encoders, or threads for them, cannot be started.
        """
        encoders = self._encoders
        if encoders is None:
            return None
        if not encoders.started:
            much = self._stored >= PAYS_BYTES and self._queue.qsize() >= len(self._threads)
            if not (much or encoders.eager) or not self._start_encoders():
                return None
        return encoders.take()

    def _start_encoders(self) -> bool:
        """Start the encoders, and threads for those that have none; return whether this call did.

        Raises:
            EncoderLost: Encoders, or threads for them, cannot be started.
        """
        encoders = self._encoders
        if encoders is None or not encoders.start():
            return False
        self._add_threads(encoders.count)
        return True

    def _add_threads(self, count: int) -> None:
        """Start threads until there is one for each encoder.

        Raises:
            EncoderLost: No more threads can be started. Those that run use encoders.
        """
        with self._change:
            while len(self._threads) < count and not self._over:
                name = f"encode-{len(self._threads)}"
                thread = threading.Thread(target=self._run_encoder, name=name, daemon=True)
                try:
                    thread.start()
                except RuntimeError as error:
                    raise EncoderLost(f"no thread for an encoder: {error}") from error
                self._threads.append(thread)

    def _run_encoder(self) -> None:
        assert self._encoders is not None
        encoder = self._encoders.wait()
        if encoder is not None:
            self._run(encoder)

    def __enter__(self) -> Pipeline:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is not None:
            self._failure = self._failure or error
        self._gate.set()
        self._budget.lift()
        if self._encoders is not None:
            self._encoders.stop_waiting()
            if error is not None:
                self._encoders.kill()  # one that hangs would delay the end
        if self._starter is not None:
            self._starter.join()
        with self._change:
            self._over = True
            threads = list(self._threads)
        for _ in threads:
            self._queue.put(None)
        for thread in threads:
            thread.join()
