"""Readings of an open repository, its replicas and this node, for the service."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping

from icecore.access import passphrase
from icecore.access.places import state_directory
from icecore.config import Config
from icecore.errors import IcecoreError
from icecore.repository import Repository
from icecore.service.facts.readings import Replica, staging_of
from icecore.service.facts.watch import Watch
from icecore.service.metrics import tally
from icecore.service.metrics.exposition import Sample, exposition
from icecore.service.metrics.tally import WAIT_SECONDS, Tally
from icecore.store.backend.metrics import meters_of
from icecore.text import host_name


def watch(repository: Repository, config: Config) -> Watch:
    """Return the readings of a repository, for one event loop; close them before the repository."""
    return Watch(
        repository.core,
        repository.loop,
        state_directory(config.state),
        lambda: compare_replicas(repository, config),
    )


def compare_replicas(repository: Repository, config: Config) -> list[Replica]:
    """Compare the configured replicas with a repository; a replica that fails has an error."""
    places = [place for place in config.replicas if place != repository.location]
    return [_compared(repository, place) for place in places]


def _compared(repository: Repository, place: str) -> Replica:
    try:
        missing = repository.plan_sync(place).bring
    except (IcecoreError, OSError) as error:
        return Replica(place, error=str(error))
    oldest = min((record.created_ns for record in missing), default=0)
    lag = max(0.0, time.time() - oldest / 1e9) if oldest else 0.0
    return Replica(place, len(missing), lag)


async def scraped(
    known: Watch, config: Config, operations: Mapping[tuple[str, str], int] | None = None
) -> bytes:
    """Return the metrics of a repository and this node in the text format of Prometheus.

    Args:
        operations: How many operations the service has, by kind and state.
    """
    from importlib.metadata import version

    jobs = await known.jobs()
    inventory = (await known.gpus()).value
    return exposition(
        Sample(
            version=version("icecore"),
            host=host_name(),
            reading=await known.reading(),
            node=await known.node(),
            jobs=jobs,
            totals=tally.read(known.state),
            staging=staging_of((config.dump.workdir, config.restore.workdir or "/dev/shm")),
            staging_limit=config.dump.staging_bytes,
            stats=known.stats(),
            replicas=known.replicas().value or [],
            operations=operations or {},
            gpus=len(inventory.gpus) if inventory else 0,
        )
    )


class Scraper:
    """Answer scrapes with the metrics of the configured repository, which is opened on first use and
    stays open. For one event loop.

    Args:
        config: The service's.
        location: The repository; empty: none is configured.
    """

    def __init__(self, config: Config, location: str) -> None:
        self._config = config
        self._location = location
        self._repository: Repository | None = None
        self._watch: Watch | None = None
        self._opening = asyncio.Lock()
        self._tally = Tally(state_directory(config.state))

    async def scrape(self, operations: Mapping[tuple[str, str], int]) -> bytes:
        """Return the metrics.

        Args:
            operations: How many operations the service has, by kind and state.

        Raises:
            IcecoreError: The repository was never opened, and cannot be now.
        """
        async with self._opening:
            if self._watch is None:
                self._repository = await asyncio.to_thread(self._open)
                self._watch = watch(self._repository, self._config)
        await asyncio.to_thread(self._tally.flush)
        return await scraped(self._watch, self._config, operations)

    async def close(self) -> None:
        """Close the repository."""
        if self._watch is not None:
            await self._watch.close()
        if self._repository is not None:
            await asyncio.to_thread(self._repository.close)
        await asyncio.to_thread(self._tally.flush, WAIT_SECONDS)

    def _open(self) -> Repository:
        opened = Repository.open(
            self._location,
            replicas=self._config.replicas,
            passphrase=passphrase.current(self._config),
            state=self._config.state,
            config=self._config,
            emit=self._tally.event,
        )
        for meter in meters_of(opened.core.backend):
            self._tally.watch(meter.counts)
        return opened
