"""Readings of a repository and of this node, and how long they stay valid.

Any node shows all jobs of the repository: their snapshots, and the leases that say where they run.
Only the node on which a job runs knows its schedule.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Generic, TypeVar

import msgspec

from icecore.errors import IcecoreError
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.service import record
from icecore.service.record import Measured
from icecore.store.format.state import LEASE, SessionRecord, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.repository import StoredRepository

T = TypeVar("T")
#: How long the lists of a repository stay valid.
LIST_SECONDS = 2.0


class Reading(msgspec.Struct, frozen=True):
    """A repository's lists at one moment.

    Attributes:
        at: Unix time of the reading.
        generation: The log's.
        snapshots: In commit order.
        leases: The sessions that hold the leases of jobs.
        sessions: The other open sessions.
    """

    at: float
    generation: int = 0
    snapshots: list[SnapshotRecord] = msgspec.field(default_factory=list)
    leases: Sequence[SessionRecord] = ()
    sessions: list[SessionRecord] = msgspec.field(default_factory=list)


async def read_repository(repository: StoredRepository) -> Reading:
    """Read a repository's newest state, in its event loop.

    Raises:
        StoreError: It cannot be read.
        Damaged: An entry or a page of the list is damaged.
    """
    state = (await repository.log.again()).state
    snapshots = await catalog.everything(state, repository.log.pages)
    leases: list[SessionRecord] = []
    others: list[SessionRecord] = []
    for session in state.sessions:
        if session.purpose.startswith(LEASE):
            leases.append(session)
        else:
            others.append(session)
    return Reading(time.time(), state.generation, list(snapshots), leases, others)


class NodeReading(msgspec.Struct, frozen=True):
    """The jobs of this node at one moment.

    Attributes:
        instances: Oldest first, and the state of each.
        measured: Measurements of supervisors, by job.
        damaged: Instances that cannot be read, and why.
    """

    instances: list[tuple[Job, str]] = msgspec.field(default_factory=list)
    measured: Mapping[str, Measured] = msgspec.field(default_factory=dict)
    damaged: Mapping[str, str] = msgspec.field(default_factory=dict)


def read_node(state: Path) -> NodeReading:
    """Read this node's registry of jobs, and the records of their supervisors.

    Raises:
        UsageError: The directory belongs to another user.
    """
    registry = Registry(state)
    instances: list[tuple[Job, str]] = [(job, job.state) for job in registry.instances()]
    names = {path.stem for path in (state / record.FOLDER).glob("*.json")}
    measured = {name: record.read(state, name) for name in sorted(names)}
    damaged = {name: str(error) for name, error in registry.damaged().items()}
    return NodeReading(instances, measured, damaged)


class Replica(msgspec.Struct, frozen=True):
    """A replica compared with the repository.

    Attributes:
        place: Its configured location.
        missing: Snapshots that it lacks; None: it cannot be read.
        lag_seconds: Age of the oldest snapshot that it lacks; 0: it lacks none.
        error: Why it cannot be read.
    """

    place: str
    missing: int | None = None
    lag_seconds: float = 0.0
    error: str = ""


class StagingRoom(msgspec.Struct, frozen=True):
    """A file system for the staging of dumps and restores. Sizes in bytes."""

    directory: str
    total: int
    free: int


def staging_of(directories: Iterable[str]) -> list[StagingRoom]:
    """Return the file systems of the working directories that exist."""
    found = []
    for directory in dict.fromkeys(directories):
        try:
            about = os.statvfs(directory)
        except OSError:
            continue
        unit = about.f_frsize
        found.append(StagingRoom(directory, about.f_blocks * unit, about.f_bavail * unit))
    return found


class Known(msgspec.Struct, Generic[T], frozen=True):
    """A value and its age. If it cannot be read again: the error and the last value.

    Attributes:
        value: None: it was never read.
        at: Unix time at which it was read.
        error: Why the newest attempt failed; empty: it succeeded.
        seconds: How long the newest attempt took.
    """

    value: T | None = None
    at: float = 0.0
    error: str = ""
    seconds: float = 0.0


class Cached(Generic[T]):
    """Read a value again once it is older than ``seconds``. Concurrent callers share one attempt. For
    one event loop.

    Args:
        read: Reads it; raises `IcecoreError` or `OSError`.
        seconds: How long a value or a failure stays valid.
    """

    def __init__(self, read: Callable[[], Awaitable[T]], seconds: float) -> None:
        self._read = read
        self._seconds = seconds
        self._known: Known[T] = Known()
        self._tried = 0.0
        self._task: asyncio.Task[None] | None = None

    @property
    def known(self) -> Known[T]:
        """The last value, of any age."""
        return self._known

    async def get(self) -> Known[T]:
        """Return the value, read again if it is too old."""
        if not self._tried or time.monotonic() - self._tried > self._seconds:
            await asyncio.shield(self._begin())
        return self._known

    def refresh(self) -> Known[T]:
        """Return the last value, and begin to read it again if it is too old."""
        if not self._tried or time.monotonic() - self._tried > self._seconds:
            self._begin()
        return self._known

    @property
    def busy(self) -> bool:
        """Whether it is being read."""
        return self._task is not None

    def forget(self) -> None:
        """Make the next caller read it again."""
        self._tried = 0.0

    async def close(self) -> None:
        """Stop reading."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    def _begin(self) -> asyncio.Task[None]:
        if self._task is None:
            self._task = asyncio.create_task(self._update())
        return self._task

    async def _update(self) -> None:
        began = time.monotonic()
        try:
            value = await self._read()
        except (IcecoreError, OSError) as error:
            text = f"{type(error).__name__}: {error}"
            seconds = time.monotonic() - began
            self._known = Known(self._known.value, self._known.at, text, seconds)
        else:
            self._known = Known(value, time.time(), "", time.monotonic() - began)
        finally:
            self._tried = time.monotonic()
            self._task = None
