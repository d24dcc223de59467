"""Cells from the store to whoever wants their bytes: read, decoded, verified, by several threads,
faults first.

The rule: a sink is handed verified bytes only, and a buffer belongs to one worker at a time. Two
ways to read: storage with direct reads is read by the workers themselves, into a buffer that each
reuses; for all other storage an event loop keeps many ranges in flight, bounded by the budget, and
the workers take what has arrived.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from typing import Protocol

import numpy as np

from icecore.errors import (
    Damaged,
    IcecoreError,
    ObjectMissing,
    RestoreFailed,
    StoreDenied,
    StoreError,
)
from icecore.events import Progress
from icecore.host.kernel.memory import HugeBuffer
from icecore.restorer.place.placers import Placer, PlacerLost
from icecore.restorer.place.placing import PLACER_BYTES, ROOM_CELLS
from icecore.restorer.plan.memory import (
    MAX_CELLS,
    STORED_LIMIT,
    Batch,
    Cell,
    gap_for,
    plan_batches,
    plan_one,
    room_for,
)
from icecore.store.backend.base import Backend
from icecore.store.format.cell import CELL_BYTES, PAGE, Records, data_pages
from icecore.store.format.names import object_name
from icecore.store.runtime.loop import LoopThread
from icecore.store.runtime.pool import Scratch

_MAX_IN_FLIGHT = 32
#: Threads at most, where nothing else is asked for: with more it takes longer (measured on 16
#: cores).
PLACE_THREADS = 6
#: Threads for faults alone, at most.
_FAULT_THREADS = 4
_FIRST_PAUSE = 0.05


class Decoder(Protocol):
    """What the store's reader does with stored bytes."""

    def decode(
        self,
        record: np.void,
        stored: memoryview,
        base_stored: memoryview | None,
        out: memoryview,
        scratch: Scratch,
    ) -> memoryview:
        """The chunk's verified bytes: in ``out``, or ``stored`` itself where it was stored raw."""


#: Takes the verified bytes of a row; they are valid during the call only. Called by the workers.
Sink = Callable[[int, memoryview], None]
#: Has a placer deliver the cells of batches, and returns those that it could not have.
Through = Callable[[Placer, Sequence[Batch]], Sequence[int]]


@dataclass
class Spent:
    """What the workers did so far: bytes read and produced, and their threads' seconds in each
    stage (what placers do counts as placing).

    ``redone``: cells that a placer could not have, and that were therefore read here.
    """

    stored: int = 0
    produced: int = 0
    cells: int = 0
    read: float = 0.0
    decode: float = 0.0
    sink: float = 0.0
    redone: int = 0

    def add(self, other: Spent) -> None:
        """Add another worker's share."""
        for name in ("stored", "produced", "cells", "read", "decode", "sink", "redone"):
            setattr(self, name, getattr(self, name) + getattr(other, name))

    def thread_seconds(self) -> dict[str, float]:
        """Return the seconds of each stage as fields of an event."""
        return {
            f"{name}_thread_seconds": getattr(self, name) for name in ("read", "decode", "sink")
        }


@dataclass(frozen=True)
class Limits:
    """``threads`` that decode; ``budget`` bytes of fetched and not yet used ranges; ``attempts`` a
    read; ``stall`` seconds after which a read that gives nothing has failed. ``shelf``: buffers of
    fetchers that follow each other.
    """

    threads: int
    budget: int
    attempts: int
    stall: float
    shelf: Shelf = field(default_factory=lambda: Shelf())


class _Buffers:
    """A worker's own buffers."""

    def __init__(self, room: int) -> None:
        self.stored = HugeBuffer(room, prefault=False)
        self.out = HugeBuffer(CELL_BYTES, prefault=False)
        self.scratch = Scratch()


class Shelf:
    """Keeps the buffers of workers that have ended for those of the next fetcher: their first touch
    costs more than to read a small file. Thread-safe.
    """

    def __init__(self) -> None:
        self._free: list[_Buffers] = []

    def take(self, room: int) -> _Buffers:
        """Buffers for at least ``room`` stored bytes."""
        try:
            buffers = self._free.pop()
        except IndexError:
            return _Buffers(room)
        return buffers if buffers.stored.size >= room else _Buffers(room)

    def give(self, buffers: _Buffers) -> None:
        """Put them back."""
        self._free.append(buffers)


class Fetcher:
    """Delivers rows of a record table to a sink.

    Args:
        backend: Where the shards are.
        decoder: Decodes and verifies.
        records: CELL records; every row asked for has data pages.
        sink: Gets the bytes; an exception from it ends everything.
        limits: Threads, memory, patience.
        loop: Runs what waits, for storage without direct reads.
        needed: Asked before a row is decoded: whether anybody still wants it.
        failed: Told once, from whatever thread, of the error that ended everything.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        records: Records,
        sink: Sink,
        limits: Limits,
        loop: LoopThread,
        needed: Callable[[int], bool] | None = None,
        failed: Callable[[BaseException], None] | None = None,
    ) -> None:
        self._backend = backend
        self._decoder = decoder
        self._records = records
        self._sink = sink
        self._limits = limits
        self._loop = loop
        self._needed = needed
        self._failed = failed
        self._read_size = backend.read_size
        self._change = threading.Condition()
        self._urgent: deque[tuple[int, memoryview | None]] = deque()
        self._asked: set[int] = set()
        self._planned: Iterator[Batch] = iter(())
        self._ready: deque[tuple[Batch, HugeBuffer]] = deque()
        self._open = False
        self._exhausted = False
        self._running = 0
        self._stopped = False
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self._placers: Sequence[Placer] = ()
        self._through: Through | None = None
        self._batch_cells, self._batches = ROOM_CELLS, 1
        self._buffers: asyncio.Queue[HugeBuffer] | None = None
        self._fetching: set[concurrent.futures.Future[None]] = set()
        self.spent = Spent()
        #: Told, now and then, of the bytes that were delivered, of all.
        self.progress: Progress = lambda done, total: None
        self._bytes = int(data_pages(records).sum()) * PAGE
        self._delivered = 0

    def hand_out(
        self,
        placers: Sequence[Placer],
        through: Through,
        *,
        cells: int = ROOM_CELLS,
        batches: int = 1,
    ) -> None:
        """Have processes do what the workers would, one for each worker; for storage with direct
        reads, before `start`.

        While its placer loads, a worker does its work itself, as far as more threads help.

        Args:
            cells: Of a batch at most.
            batches: That a placer gets at once.
        """
        self._placers, self._through, self._batch_cells, self._batches = (
            placers,
            through,
            cells,
            batches,
        )

    def start(self, order: Sequence[int], *, opened: bool = True, faulting: int = 1) -> None:
        """Begin. Until `open` only urgent rows are delivered (and ranges fetched ahead, as far as
        the budget goes).

        Args:
            faulting: Processes that wait for urgent rows.
        """
        gap = gap_for(self._read_size)
        read_size, cells = (
            (PLACER_BYTES, self._batch_cells) if self._placers else (self._read_size, MAX_CELLS)
        )
        self._planned = plan_batches(
            self._records, order, gap=gap, read_size=read_size, cells=cells
        )
        self._open = opened
        if not self._backend.direct:
            self._submit(self._fetch_planned(len(order)))
        count = min(len(self._placers) or self._limits.threads, max(1, len(order)))
        placers = self._placers[:count] if self._placers else [None] * count
        workers = [
            (f"place-{number}", False, placer, number < PLACE_THREADS)
            for number, placer in enumerate(placers)
        ]
        if not opened:
            # A fault need not wait until a worker has placed what it is at, nor for another
            # process's.
            workers += [
                (f"faults-{number}", True, None, True)
                for number in range(min(faulting, _FAULT_THREADS))
            ]
        for name, *arguments in workers:
            thread = threading.Thread(target=self._work, args=arguments, name=name, daemon=True)
            with self._change:  # who stops it joins those that have begun, and no others begin
                if self._stopped:
                    return
                thread.start()
                self._threads.append(thread)

    def open(self) -> None:
        """Let the planned rows be delivered."""
        with self._change:
            self._open = True
            self._change.notify_all()

    def urgent(self, row: int) -> None:
        """Deliver this row before all others; it may be delivered again by the plan."""
        with self._change:
            if row in self._asked or self._stopped:
                return
            self._asked.add(row)
            if self._backend.direct:
                self._urgent.append((row, None))
                self._change.notify_all()
        if not self._backend.direct:
            self._submit(self._fetch_urgent(row))

    def wait(self, seconds: float | None = None) -> bool:
        """Wait until all planned rows are delivered.

        Returns:
            Whether they are (False: the time was up).

        Raises:
            Whatever went wrong first.
        """
        with self._change:
            done = self._change.wait_for(self._settled, seconds)
            if self._failure is not None:
                raise self._failure
            return done

    def _settled(self) -> bool:
        return self._failure is not None or (
            self._exhausted
            and not self._running
            and not self._ready
            and not self._urgent
            and not self._asked
        )

    def fail(self, error: BaseException) -> None:
        """End everything with this error, unless another came first."""
        with self._change:
            first = self._failure is None and not self._stopped
            if first:
                self._failure = error
            self._stopped = True
            self._change.notify_all()
        if first and self._failed is not None:
            self._failed(error)

    def stop(self) -> None:
        """Let the workers end, and wait for them; rows that were not delivered never will be."""
        with self._change:
            self._stopped = True
            self._change.notify_all()
        for fetching in list(self._fetching):
            fetching.cancel()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    def _submit(self, work: Coroutine[None, None, None]) -> None:
        fetching = self._loop.submit(work)
        self._fetching.add(fetching)
        fetching.add_done_callback(self._fetching.discard)

    # -- workers

    def _work(self, only_urgent: bool, placer: Placer | None, meanwhile: bool) -> None:
        spent = Spent()
        shelf = self._limits.shelf
        try:
            scratch = shelf.take(
                room_for(self._read_size) if self._backend.direct else 2 * STORED_LIMIT
            )
            while (item := self._take(only_urgent)) is not None:
                batches, buffer, urgent = item
                before = spent.produced
                try:
                    if not self._placers or urgent:
                        self._deliver(batches[0], buffer, scratch, spent)
                    else:
                        loading = placer is not None and meanwhile and not placer.ready
                        if (
                            not self._deliver_through(
                                None if loading else placer, batches, scratch, spent
                            )
                            and not loading
                        ):
                            placer = None
                except BaseException as error:
                    self.fail(
                        _named(error)
                    )  # before it counts as done: who waits is not to find all of it delivered
                    raise
                finally:
                    self._finished(batches[0], buffer, urgent, spent.produced - before)
            shelf.give(scratch)
        except BaseException as error:  # noqa: BLE001 - whoever waits for the rows raises it
            self.fail(_named(error))
        finally:
            with self._change:
                self.spent.add(spent)

    def _take(
        self, only_urgent: bool
    ) -> tuple[Sequence[Batch], HugeBuffer | memoryview | None, bool] | None:
        """The next work: urgent rows first; None: no more. Several batches only for placers."""
        with self._change:
            while True:
                if self._stopped:
                    return None
                if self._urgent:
                    row, data = self._urgent.popleft()
                    self._running += 1
                    return [plan_one(self._records, row)], data, True
                if self._open and not only_urgent:
                    if self._ready:
                        self._running += 1
                        batch, buffer = self._ready.popleft()
                        return [batch], buffer, False
                    if self._backend.direct and not self._exhausted:
                        planned = list(islice(self._planned, self._batches if self._placers else 1))
                        if planned:
                            self._running += 1
                            return planned, None, False
                        self._exhausted = True
                        self._change.notify_all()
                self._change.wait()

    def _finished(
        self, batch: Batch, buffer: HugeBuffer | memoryview | None, urgent: bool, delivered: int
    ) -> None:
        if isinstance(buffer, HugeBuffer):
            assert self._buffers is not None
            with suppress(RuntimeError):  # the loop was closed: nobody fetches any more
                self._loop.loop.call_soon_threadsafe(self._buffers.put_nowait, buffer)
        with self._change:
            self._running -= 1
            self._delivered += delivered
            if urgent:
                self._asked.discard(batch.cells[0].row)
            if not self._running:
                self._change.notify_all()
        self.progress(self._delivered, self._bytes)

    def _deliver(
        self, batch: Batch, buffer: HugeBuffer | memoryview | None, scratch: _Buffers, spent: Spent
    ) -> None:
        clock = time.perf_counter
        began = clock()
        if buffer is None:
            stored = scratch.stored.view(0, batch.size)
            self._read_directly(batch, stored)
        else:
            stored = buffer.view(0, batch.size) if isinstance(buffer, HugeBuffer) else buffer
        spent.read += clock() - began
        spent.stored += batch.size
        for cell in batch.cells:
            if self._stopped:
                return
            if self._needed is not None and not self._needed(cell.row):
                continue
            began = clock()
            data = self._sound(cell, stored, scratch)
            decoded = clock()
            self._sink(cell.row, data)
            spent.decode += decoded - began
            spent.sink += clock() - decoded
            spent.produced += len(data)
            spent.cells += 1

    def _deliver_through(
        self, placer: Placer | None, batches: Sequence[Batch], scratch: _Buffers, spent: Spent
    ) -> bool:
        """Have a placer deliver batches. What it cannot have is delivered from here, where there
        are other replicas, and errors with a name.

        Returns:
            Whether the placer lives.
        """
        assert self._through is not None
        wanted = [
            b._replace(
                cells=tuple(c for c in b.cells if self._needed is None or self._needed(c.row))
            )
            for b in batches
        ]
        wanted = [batch for batch in wanted if batch.cells]
        if not wanted or self._stopped:
            return placer is not None
        rows = [cell.row for batch in wanted for cell in batch.cells]
        missing: Sequence[int] = rows
        if placer is not None:
            began = time.perf_counter()
            try:
                missing = self._through(placer, wanted)
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
                spent.produced += int(data_pages(self._records[had]).sum()) * PAGE
        for row in missing:
            self._deliver(plan_one(self._records, row), None, scratch, spent)
        return placer is not None

    def _sound(self, cell: Cell, stored: memoryview, scratch: _Buffers) -> memoryview:
        """The cell's verified bytes; where what was read is damaged, from the first other replica
        that has them sound.
        """
        try:
            return self._decode(cell, stored, scratch)
        except Damaged as error:
            self._backend.suspect(error)
            batch = plan_one(self._records, cell.row)
            room = memoryview(bytearray(batch.size))
            for replica in self._backend.replicas:
                try:
                    for read in batch.reads:
                        self._read_from(
                            replica,
                            object_name("shard", read.shard),
                            read.offset,
                            room[read.at : read.at + read.length],
                        )
                    return self._decode(batch.cells[0], room, scratch)
                except (Damaged, StoreError):
                    continue
            raise

    def _read_from(self, replica: Backend, name: str, offset: int, out: memoryview) -> None:
        if replica.direct:
            replica.read_into(name, offset, out)
        else:
            reading = self._loop.submit(replica.get_into(name, offset, out))
            try:
                reading.result(self._limits.stall)
            except TimeoutError as error:
                reading.cancel()
                raise StoreError(
                    f"no answer for {self._limits.stall:.0f} s while reading {name} from {replica.where}"
                ) from error

    def _decode(self, cell: Cell, stored: memoryview, scratch: _Buffers) -> memoryview:
        base = (
            stored[cell.base_start : cell.base_stop] if cell.base_stop > cell.base_start else None
        )
        own = stored[cell.start : cell.stop]
        return self._decoder.decode(
            self._records[cell.row], own, base, scratch.out.view(), scratch.scratch
        )

    def _read_directly(self, batch: Batch, out: memoryview) -> None:
        for read in batch.reads:
            name = object_name("shard", read.shard)
            pause = _FIRST_PAUSE
            for attempt in range(1, self._limits.attempts + 1):
                try:
                    self._backend.read_into(name, read.offset, out[read.at : read.at + read.length])
                    break
                except (ObjectMissing, StoreDenied, Damaged):
                    raise
                except StoreError:
                    if attempt == self._limits.attempts or self._stopped:
                        raise
                    time.sleep(pause)
                    pause *= 2

    # -- the event loop's side

    async def _fetch_planned(self, rows: int) -> None:
        """Keep ranges in flight: as many as there are buffers in the budget."""
        try:
            room = room_for(self._read_size)
            count = max(2, min(_MAX_IN_FLIGHT, self._limits.budget // room, rows))
            self._buffers = asyncio.Queue()
            for _ in range(count):
                self._buffers.put_nowait(HugeBuffer(room, prefault=False))
            async with asyncio.TaskGroup() as tasks:
                for batch in self._planned:
                    buffer = await self._buffers.get()
                    if self._stopped:
                        return
                    tasks.create_task(self._fetch_batch(batch, buffer))
            with self._change:
                self._exhausted = True
                self._change.notify_all()
        except asyncio.CancelledError:
            self.fail(RestoreFailed("the restore was cancelled"))
            raise
        except BaseExceptionGroup as group:
            self.fail(_named(group.exceptions[0]))
        except Exception as error:  # noqa: BLE001 - whoever waits for the rows raises it
            self.fail(_named(error))

    async def _fetch_batch(self, batch: Batch, buffer: HugeBuffer) -> None:
        await self._fetch(batch, buffer.view(0, batch.size))
        with self._change:
            self._ready.append((batch, buffer))
            self._change.notify_all()

    async def _fetch_urgent(self, row: int) -> None:
        try:
            batch = plan_one(self._records, row)
            data = memoryview(bytearray(batch.size))
            await self._fetch(batch, data)
            with self._change:
                self._urgent.append((row, data))
                self._change.notify_all()
        except Exception as error:  # noqa: BLE001 - whoever waits for the rows raises it
            self.fail(_named(error))

    async def _fetch(self, batch: Batch, out: memoryview) -> None:
        await asyncio.gather(
            *(
                self._fetch_range(read.shard, read.offset, out[read.at : read.at + read.length])
                for read in batch.reads
            )
        )

    async def _fetch_range(self, shard: bytes, offset: int, out: memoryview) -> None:
        name = object_name("shard", shard)
        pause = _FIRST_PAUSE
        for attempt in range(1, self._limits.attempts + 1):
            try:
                async with asyncio.timeout(self._limits.stall):
                    await self._backend.get_into(name, offset, out)
                return
            except (ObjectMissing, StoreDenied, Damaged):
                raise
            except TimeoutError as error:
                if attempt == self._limits.attempts or self._stopped:
                    raise StoreError(
                        f"no answer for {self._limits.stall:.0f} s while reading {name} from {self._backend.where}"
                    ) from error
            except StoreError:
                if attempt == self._limits.attempts or self._stopped:
                    raise
            await asyncio.sleep(pause)
            pause *= 2


def _named(error: BaseException) -> BaseException:
    """The error as it is if it is one of ours, else wrapped so that the caller knows what failed."""
    if isinstance(error, IcecoreError):
        return error
    wrapped = RestoreFailed(f"restoring memory failed: {type(error).__name__}: {error}")
    wrapped.__cause__ = error
    return wrapped
