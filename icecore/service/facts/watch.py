"""Cache the readings of one repository and of this node, for all scrapes and all views of the page.

A list is read on request if it is a few seconds old. The statistics, which read every map, and the
replicas, which may be in another region, are read in the background, and views show their age.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from icecore.host.cuda.inventory import Inventory
from icecore.host.gpu.backend import find_backend
from icecore.service.facts.jobs import JobFacts, jobs_of
from icecore.service.facts.readings import (
    LIST_SECONDS,
    Cached,
    Known,
    NodeReading,
    Reading,
    Replica,
    read_node,
    read_repository,
)
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.stats import Stats, stats
from icecore.store.runtime.loop import LoopThread

_NODE_SECONDS = 1.0
_GPUS_SECONDS = 30.0
_REPLICAS_SECONDS = 60.0
_STATS_SECONDS = 600.0
#: A count that took long is repeated less often: it may take this share of the time.
_STATS_SHARE = 0.02


class Watch:
    """The readings of a repository and of this node; for one event loop.

    Args:
        core: The repository.
        loop: The event loop in which it lives.
        state: icecore's state directory.
        compare: Compares the replicas with the repository; it blocks.
    """

    def __init__(
        self,
        core: StoredRepository,
        loop: LoopThread,
        state: Path,
        compare: Callable[[], list[Replica]],
    ) -> None:
        self.core = core
        self.loop = loop
        self.state = state
        self._compare = compare
        self._list = Cached(self._read_list, LIST_SECONDS)
        self._node = Cached(self._read_node, _NODE_SECONDS)
        self._replicas = Cached(self._read_replicas, _REPLICAS_SECONDS)
        self._stats = Cached(self._read_stats, _STATS_SECONDS)
        self._gpus = Cached(self._read_gpus, _GPUS_SECONDS)

    async def reading(self) -> Known[Reading]:
        """Return the repository's lists."""
        return await self._list.get()

    async def node(self) -> NodeReading:
        """Return the jobs of this node."""
        return (await self._node.get()).value or NodeReading()

    async def jobs(self) -> list[JobFacts]:
        """Return all jobs of the repository and of this node, running ones first."""
        reading, node = await asyncio.gather(self.reading(), self.node())
        return jobs_of(reading.value or Reading(0.0), node, time.time())

    async def gpus(self) -> Known[Inventory | None]:
        """Return the GPUs of this node; None: it has no driver for any."""
        return await self._gpus.get()

    def stats(self) -> Known[Stats]:
        """Return the newest statistics, and begin to read them again if they are old."""
        known = self._stats.known
        if known.seconds and time.time() - known.at < known.seconds / _STATS_SHARE:
            return known
        return self._stats.refresh()

    def replicas(self) -> Known[list[Replica]]:
        """Return the newest comparison of the replicas, and begin another if it is old."""
        return self._replicas.refresh()

    async def settled(self) -> tuple[Known[Stats], Known[Sequence[Replica]]]:
        """Return statistics and replicas once they have been read."""
        counted, compared = await asyncio.gather(self._stats.get(), self._replicas.get())
        return counted, Known(compared.value, compared.at, compared.error, compared.seconds)

    def changed(self) -> None:
        """Make the next view read the lists again, after a change made here."""
        self._list.forget()
        self._node.forget()

    async def close(self) -> None:
        """Stop reading."""
        for one in (self._list, self._node, self._replicas, self._stats, self._gpus):
            await one.close()

    async def _read_list(self) -> Reading:
        return await asyncio.wrap_future(self.loop.submit(read_repository(self.core)))

    async def _read_node(self) -> NodeReading:
        return await asyncio.to_thread(read_node, self.state)

    async def _read_gpus(self) -> Inventory | None:
        backend = find_backend()
        return await asyncio.to_thread(backend.inventory) if backend.present else None

    async def _read_replicas(self) -> list[Replica]:
        return await asyncio.to_thread(self._compare)

    async def _read_stats(self) -> Stats:
        return await asyncio.wrap_future(self.loop.submit(stats(self.core, register=False)))
