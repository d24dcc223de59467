"""Delivers cells from the store to a sink by several threads, urgent ones first.

A sink gets verified bytes only, and a buffer belongs to one worker at a time. Storage with direct
reads is read by the workers themselves, each into a buffer that it reuses; all other storage is
fetched ahead (`icecore.restorer.fetch.ahead`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence

import msgspec

from icecore.errors import IcecoreError, RestoreFailed
from icecore.events import Progress
from icecore.host.kernel.memory import HugeBuffer
from icecore.restorer.fetch.ahead import Ahead
from icecore.restorer.fetch.limits import Buffers, Limits, Spent
from icecore.restorer.fetch.schedule import Schedule, Work
from icecore.restorer.fetch.sink import CellSink
from icecore.restorer.fetch.source import Decoder, Source
from icecore.restorer.place.placers import Placer, PlacerLost
from icecore.restorer.place.placing import PLACER_BYTES, ROOM_CELLS
from icecore.restorer.plan.memory import MAX_CELLS, Batch, gap_for, plan_batches
from icecore.sizes import PAGE
from icecore.store.backend.base import Backend
from icecore.store.format.cell import Records, data_pages
from icecore.store.runtime.loop import LoopThread

#: Threads at most, unless the options ask for more: with more it takes longer (measured on 16
#: cores).
PLACE_THREADS = 6
#: Threads for page faults alone, at most.
_FAULT_THREADS = 4

#: Has a placer deliver the cells of batches, and returns the rows that it could not deliver.
Through = Callable[[Placer, Sequence[Batch]], Sequence[int]]


class _HandedOut(msgspec.Struct, frozen=True):
    """Placers that do the workers' work; see `Fetcher.hand_out`."""

    placers: Sequence[Placer]
    through: Through
    cells: int
    batches: int


class Fetcher:
    """Delivers rows of a record table to a sink.

    Args:
        backend: Holds the shards.
        decoder: Decodes and verifies.
        records: CELL records; every row asked for has data pages.
        sink: Gets the bytes; an exception from it ends everything.
        limits: Threads, memory, patience.
        loop: Runs what waits, for storage without direct reads.

    Attributes:
        spent: What the workers have done; complete once they have ended.
        progress: Called, now and then, with the bytes that were delivered, of all.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        records: Records,
        sink: CellSink,
        limits: Limits,
        loop: LoopThread,
    ) -> None:
        self._sink = sink
        self._limits = limits
        self._source = Source(
            backend, decoder, records, limits, loop, lambda: self._schedule.stopped
        )
        self._schedule = Schedule(self._source.one)
        self._ahead: Ahead | None = None
        if not self._source.direct:
            self._ahead = Ahead(
                self._source,
                self._schedule,
                limits.budget,
                loop,
                lambda error: self.fail(_named(error)),
            )
        self._handed: _HandedOut | None = None
        self._counting = threading.Lock()
        self._bytes = int(data_pages(records).sum()) * PAGE
        self.spent = Spent()
        self.progress: Progress = lambda done, total: None

    def hand_out(
        self,
        placers: Sequence[Placer],
        through: Through,
        *,
        cells: int = ROOM_CELLS,
        batches: int = 1,
    ) -> None:
        """Have processes do the work, one for each worker; for storage with direct reads, before
        `start`.

        While its placer loads, a worker does the work itself, if more threads help.

        Args:
            cells: Of a batch at most.
            batches: That a placer gets at once.
        """
        self._handed = _HandedOut(placers, through, cells, batches) if placers else None

    def start(self, order: Sequence[int], *, opened: bool = True, faulting: int = 1) -> None:
        """Begin. Until `open` only urgent rows are delivered (and ranges fetched ahead, as far as
        the budget permits).

        Args:
            faulting: Processes that wait for urgent rows.
        """
        handed, read_size = self._handed, self._source.read_size
        planned = plan_batches(
            self._source.records,
            order,
            gap=gap_for(read_size),
            read_size=PLACER_BYTES if handed is not None else read_size,
            cells=handed.cells if handed is not None else MAX_CELLS,
        )
        each = handed.batches if handed is not None else 1
        self._schedule.begin(planned if self._ahead is None else None, opened=opened, each=each)
        if self._ahead is not None:
            self._ahead.begin(planned, len(order))
        count = len(handed.placers) if handed is not None else self._limits.threads
        count = min(count, max(1, len(order)))
        placers = handed.placers[:count] if handed is not None else [None] * count
        workers = [
            (f"place-{number}", False, placer, number < PLACE_THREADS)
            for number, placer in enumerate(placers)
        ]
        if not opened:
            # A fault must not wait until a worker has placed its batch, nor for the fault of
            # another process.
            workers += [
                (f"faults-{number}", True, None, True)
                for number in range(min(faulting, _FAULT_THREADS))
            ]
        for name, *arguments in workers:
            thread = threading.Thread(target=self._work, args=arguments, name=name, daemon=True)
            if not self._schedule.start(thread):
                return

    def open(self) -> None:
        """Let the planned rows be delivered."""
        self._schedule.open()

    def urgent(self, row: int) -> None:
        """Deliver this row before all others; the plan may deliver it again."""
        fresh = self._schedule.ask(row, fetched=self._ahead is not None)
        if fresh and self._ahead is not None:
            self._ahead.urgent(row)

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all planned rows are delivered.

        Returns:
            Whether they are; False: ``seconds`` have passed.

        Raises:
            Whatever went wrong first.
        """
        return self._schedule.wait(seconds)

    def fail(self, error: BaseException) -> None:
        """End everything with this error, unless another came first."""
        if self._schedule.fail(error):
            self._sink.failed(error)

    def stop(self) -> None:
        """Let the workers end, and wait for them; rows that were not delivered never will be."""
        self._schedule.stop()
        if self._ahead is not None:
            self._ahead.cancel()
        self._schedule.join()

    # -- workers

    def _work(self, only_urgent: bool, placer: Placer | None, meanwhile: bool) -> None:
        """Deliver until there is no more.

        Args:
            placer: Does it, if work was handed out to placers.
            meanwhile: Deliver from this process while the placer loads.
        """
        spent = Spent()
        try:
            buffers = self._source.take_buffers()
            while (work := self._schedule.take(only_urgent=only_urgent)) is not None:
                before = spent.produced
                try:
                    if self._handed is None or work.urgent:
                        self._deliver(work.batches[0], work.buffer, buffers, spent)
                    else:
                        loading = placer is not None and meanwhile and not placer.ready
                        lives = self._deliver_through(
                            self._handed.through,
                            None if loading else placer,
                            work.batches,
                            buffers,
                            spent,
                        )
                        if not lives and not loading:
                            placer = None
                except BaseException as error:
                    # Before it counts as done: who waits must not find all of it delivered.
                    self.fail(_named(error))
                    raise
                finally:
                    self._finished(work, spent.produced - before)
            self._limits.shelf.give(buffers)
        except BaseException as error:  # noqa: BLE001 - raised by who waits for the rows
            self.fail(_named(error))
        finally:
            with self._counting:
                self.spent.add(spent)

    def _finished(self, work: Work, delivered: int) -> None:
        if isinstance(work.buffer, HugeBuffer) and self._ahead is not None:
            self._ahead.give_back(work.buffer)
        self.progress(self._schedule.finished(work, delivered), self._bytes)

    def _deliver(
        self, batch: Batch, buffer: HugeBuffer | memoryview | None, buffers: Buffers, spent: Spent
    ) -> None:
        """Deliver the cells of a batch from this process."""
        clock = time.perf_counter
        began = clock()
        if buffer is None:
            stored = buffers.stored.view(0, batch.size)
            self._source.read(batch, stored)
        else:
            stored = buffer.view(0, batch.size) if isinstance(buffer, HugeBuffer) else buffer
        spent.read += clock() - began
        spent.stored += batch.size
        for cell in batch.cells:
            if self._schedule.stopped:
                return
            if not self._sink.needs(cell.row):
                continue
            began = clock()
            data = self._source.decode(cell, stored, buffers)
            decoded = clock()
            self._sink.place(cell.row, data)
            spent.decode += decoded - began
            spent.sink += clock() - decoded
            spent.produced += len(data)
            spent.cells += 1

    def _deliver_through(
        self,
        through: Through,
        placer: Placer | None,
        batches: Sequence[Batch],
        buffers: Buffers,
        spent: Spent,
    ) -> bool:
        """Have a placer deliver batches. This process delivers what the placer could not: it has
        other replicas, and errors with a name.

        Returns:
            Whether the placer lives.
        """
        wanted = [
            batch._replace(cells=tuple(cell for cell in batch.cells if self._sink.needs(cell.row)))
            for batch in batches
        ]
        wanted = [batch for batch in wanted if batch.cells]
        if not wanted or self._schedule.stopped:
            return placer is not None
        rows = [cell.row for batch in wanted for cell in batch.cells]
        missing: Sequence[int] = rows
        if placer is not None:
            began = time.perf_counter()
            try:
                missing = through(placer, wanted)
            except PlacerLost:
                placer = None
                spent.redone += len(missing)
            else:
                left = set(missing)
                spent.redone += len(left)
                had = [row for row in rows if row not in left]
                spent.sink += time.perf_counter() - began
                spent.stored += sum(batch.size for batch in wanted)
                spent.cells += len(had)
                spent.produced += int(data_pages(self._source.records[had]).sum()) * PAGE
        for row in missing:
            self._deliver(self._source.one(row), None, buffers, spent)
        return placer is not None


def _named(error: BaseException) -> BaseException:
    """Return an error of icecore as it is, and wrap any other to say what failed."""
    if isinstance(error, IcecoreError):
        return error
    wrapped = RestoreFailed(f"restoring memory failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
