"""What the service watches: the readings of an open repository, its replicas and this node."""

from __future__ import annotations

import socket
import time

from icecore.config import Config
from icecore.errors import IcecoreError
from icecore.places import state_directory
from icecore.repository import Repository
from icecore.service.facts.readings import Replica, staging_of
from icecore.service.facts.watch import Watch
from icecore.service.metrics import tally
from icecore.service.metrics.exposition import Sample, exposition


def watch(repository: Repository, config: Config) -> Watch:
    """Return the readings of a repository, for one event loop; close them before the repository."""
    others = [place for place in config.replicas if place != repository.location]

    def compare() -> list[Replica]:
        return [_compared(repository, place) for place in others]

    return Watch(repository.core, repository.loop, state_directory(config.state), compare)


def _compared(repository: Repository, place: str) -> Replica:
    try:
        missing = repository.plan_sync(place).bring
    except (IcecoreError, OSError) as error:
        return Replica(place, error=str(error))
    oldest = min((record.created_ns for record in missing), default=0)
    lag = max(0.0, time.time() - oldest / 1e9) if oldest else 0.0
    return Replica(place, len(missing), lag)


async def scraped(
    known: Watch, config: Config, operations: dict[tuple[str, str], int] | None = None
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
            host=socket.gethostname(),
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
