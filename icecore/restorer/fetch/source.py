"""Reads stored bytes and decodes them: each read is retried, and a cell that is damaged in one
replica is read from the others. What it returns is verified.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Protocol

import numpy as np

from icecore.errors import Damaged, ObjectMissing, StoreDenied, StoreError
from icecore.restorer.fetch.limits import Buffers, Limits
from icecore.restorer.plan.memory import STORED_LIMIT, Batch, Cell, plan_one, room_for
from icecore.store.backend.base import Backend
from icecore.store.format.cell import Records
from icecore.store.format.names import object_name
from icecore.store.runtime.loop import LoopThread
from icecore.store.runtime.pool import Scratch

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
        """Return the chunk's verified bytes: in ``out``, or in ``stored`` if stored raw."""


class Source:
    """The rows of a record table, as they are stored.

    Args:
        backend: Holds the shards.
        decoder: Decodes and verifies.
        records: CELL records; every row that is read has data pages.
        limits: Attempts and patience.
        loop: Runs what waits.
        stopped: Returns whether the rows are not wanted any more: then nothing is retried.
    """

    def __init__(
        self,
        backend: Backend,
        decoder: Decoder,
        records: Records,
        limits: Limits,
        loop: LoopThread,
        stopped: Callable[[], bool],
    ) -> None:
        self._backend = backend
        self._decoder = decoder
        self.records = records
        self._limits = limits
        self._loop = loop
        self._stopped = stopped
        self.direct = backend.direct
        self.read_size = backend.read_size

    def take_buffers(self) -> Buffers:
        """Return buffers that a worker needs; to be given back to the shelf."""
        room = room_for(self.read_size) if self.direct else 2 * STORED_LIMIT
        return self._limits.shelf.take(room)

    def one(self, row: int) -> Batch:
        """Return the batch of a single row."""
        return plan_one(self.records, row)

    def read(self, batch: Batch, out: memoryview) -> None:
        """Read the ranges of a batch, from storage with direct reads.

        Raises:
            StoreError, Damaged: They cannot be read.
        """
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
                    if attempt == self._limits.attempts or self._stopped():
                        raise
                    time.sleep(pause)
                    pause *= 2

    async def fetch(self, batch: Batch, out: memoryview) -> None:
        """Read the ranges of a batch, all at once. As `read`, in the event loop."""
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
                if attempt == self._limits.attempts or self._stopped():
                    raise self._no_answer(name, self._backend) from error
            except StoreError:
                if attempt == self._limits.attempts or self._stopped():
                    raise
            await asyncio.sleep(pause)
            pause *= 2

    def decode(self, cell: Cell, stored: memoryview, buffers: Buffers) -> memoryview:
        """Return a cell's verified bytes; if what was read is damaged, from the first other replica
        that has them undamaged.

        Args:
            stored: The stored bytes of the cell's batch.

        Raises:
            Damaged: No replica has them undamaged.
        """
        try:
            return self._decode(cell, stored, buffers)
        except Damaged as error:
            self._backend.suspect(error)
            batch = self.one(cell.row)
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
                    return self._decode(batch.cells[0], room, buffers)
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
                raise self._no_answer(name, replica) from error

    def _no_answer(self, name: str, backend: Backend) -> StoreError:
        return StoreError(
            f"no answer for {self._limits.stall:.0f} s while reading {name} from {backend.where}"
        )

    def _decode(self, cell: Cell, stored: memoryview, buffers: Buffers) -> memoryview:
        base = (
            stored[cell.base_start : cell.base_stop] if cell.base_stop > cell.base_start else None
        )
        own = stored[cell.start : cell.stop]
        return self._decoder.decode(
            self.records[cell.row], own, base, buffers.out.view(), buffers.scratch
        )
