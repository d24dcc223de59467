"""Keeps many ranges in flight, for storage without direct reads: an event loop fetches them into
buffers that the budget bounds, and the workers take what has arrived.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
from collections.abc import Callable, Coroutine, Iterator
from contextlib import suppress

from icecore.errors import RestoreFailed
from icecore.host.kernel.memory import HugeBuffer
from icecore.restorer.fetch.schedule import Schedule
from icecore.restorer.fetch.source import Source
from icecore.restorer.plan.memory import Batch, room_for
from icecore.store.runtime.loop import LoopThread

_MAX_IN_FLIGHT = 32


class Ahead:
    """Fetches for one schedule.

    Args:
        source: Reads.
        schedule: Gets what has arrived.
        budget: Bytes that the buffers may take.
        loop: Runs it.
        fail: Called with what went wrong.
    """

    def __init__(
        self,
        source: Source,
        schedule: Schedule,
        budget: int,
        loop: LoopThread,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._source = source
        self._schedule = schedule
        self._budget = budget
        self._loop = loop
        self._fail = fail
        self._buffers: asyncio.Queue[HugeBuffer] | None = None
        self._fetching: set[concurrent.futures.Future[None]] = set()

    def begin(self, planned: Iterator[Batch], rows: int) -> None:
        """Begin to fetch planned batches, of so many rows."""
        self._submit(self._fetch_planned(planned, rows))

    def urgent(self, row: int) -> None:
        """Begin to fetch an urgent row."""
        self._submit(self._fetch_urgent(row))

    def give_back(self, buffer: HugeBuffer) -> None:
        """Take back a buffer of `Schedule.add_ready`."""
        assert self._buffers is not None
        with suppress(RuntimeError):  # the loop was closed: nothing is fetched any more
            self._loop.loop.call_soon_threadsafe(self._buffers.put_nowait, buffer)

    def cancel(self) -> None:
        """Cancel what is in flight."""
        for fetching in list(self._fetching):
            fetching.cancel()

    def _submit(self, work: Coroutine[None, None, None]) -> None:
        fetching = self._loop.submit(work)
        self._fetching.add(fetching)
        fetching.add_done_callback(self._fetching.discard)

    async def _fetch_planned(self, planned: Iterator[Batch], rows: int) -> None:
        """Keep as many ranges in flight as there are buffers in the budget."""
        try:
            room = room_for(self._source.read_size)
            count = max(2, min(_MAX_IN_FLIGHT, self._budget // room, rows))
            self._buffers = asyncio.Queue()
            for _ in range(count):
                self._buffers.put_nowait(HugeBuffer(room, prefault=False))
            async with asyncio.TaskGroup() as tasks:
                for batch in planned:
                    buffer = await self._buffers.get()
                    if self._schedule.stopped:
                        return
                    tasks.create_task(self._fetch_batch(batch, buffer))
            self._schedule.exhaust()
        except asyncio.CancelledError:
            self._fail(RestoreFailed("the restore was cancelled"))
            raise
        except BaseExceptionGroup as group:
            self._fail(group.exceptions[0])
        except Exception as error:  # noqa: BLE001 - raised by who waits for the rows
            self._fail(error)

    async def _fetch_batch(self, batch: Batch, buffer: HugeBuffer) -> None:
        await self._source.fetch(batch, buffer.view(0, batch.size))
        self._schedule.add_ready(batch, buffer)

    async def _fetch_urgent(self, row: int) -> None:
        try:
            batch = self._source.one(row)
            data = memoryview(bytearray(batch.size))
            await self._source.fetch(batch, data)
            self._schedule.add_urgent(row, data)
        except Exception as error:  # noqa: BLE001 - raised by who waits for the rows
            self._fail(error)
