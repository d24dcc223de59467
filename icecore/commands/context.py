"""What a command runs with: configuration, output, the open repository, and the jobs of this node."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import TYPE_CHECKING, Self

import msgspec

from icecore.access import passphrase
from icecore.commands.output import Output
from icecore.config import Config
from icecore.errors import IcecoreError, NotFound
from icecore.events import Event, Sink

if TYPE_CHECKING:
    from icecore.host.jobs.identity import Identity
    from icecore.host.jobs.registry import Registry
    from icecore.remote.connection import Service
    from icecore.repository import Repository
    from icecore.service.metrics.tally import Tally
    from icecore.store.format.state import SnapshotRecord

#: Names the number of threads of numpy's linear algebra library.
BLAS_THREADS = "OPENBLAS_NUM_THREADS"


def load_numpy() -> None:
    """Load numpy without starting the threads of its linear algebra library.

    Nothing here uses that library, and starting one thread per core takes a third of a command's
    start-up time.
    """
    if BLAS_THREADS in os.environ:
        return
    os.environ[BLAS_THREADS] = "1"
    try:
        import numpy  # noqa: F401
    finally:
        del os.environ[BLAS_THREADS]  # else jobs and hooks inherit it


class Origin(msgspec.Struct, frozen=True):
    """Whose request a command is, where the node service runs it.

    Attributes:
        identity: With which a job runs.
        environment: Of a job.
        supervised: The command supervises a job, and takes signals once it does.
        lineage: The lineage that it resumes, if it replaces a supervisor; empty: that of the newest
            snapshot of the name.
        stopped: A snapshot with which the job has been stopped already, although nobody has drawn
            the conclusions; empty: none.
        stop: A signal that the supervisor before it did not act on any more; 0: none.
    """

    identity: Identity | None = None
    environment: Mapping[str, str] = msgspec.field(default_factory=dict)
    supervised: bool = False
    lineage: str = ""
    stop: int = 0
    stopped: str = ""


class Context(msgspec.Struct):
    """One run of the command line; a context manager that closes what it opened.

    Attributes:
        location: The repository's location; empty if none is configured.
        origin: Whose request this is; None: this process's user's.
        service: The node service that does it for this user; None: this process does it.
    """

    config: Config
    output: Output
    location: str
    origin: Origin | None = None
    service: Service | None = None
    _stack: ExitStack = msgspec.field(default_factory=ExitStack)
    _repository: Repository | None = None
    _tally: Tally | None = None

    @property
    def emit(self) -> Sink:
        """The sink of a repository's events, which are counted."""
        if self._tally is None:
            from icecore.access.places import state_directory
            from icecore.service.metrics.tally import Tally

            self._tally = Tally(state_directory(self.config.state))
            self._stack.callback(self._tally.flush)
        return self._tally.hears(self.output.event)

    def repository(self, *, rebuild: bool = False) -> Repository:
        """Return the repository; open it on first use.

        Args:
            rebuild: Open it for repair even if its configuration is lost.

        Raises:
            UsageError: No repository is named.
            NotFound: There is no repository at the location.
        """
        if self._repository is None:
            from icecore.repository import Repository

            opened = Repository.open(
                self.location,
                replicas=self.config.replicas,
                passphrase=passphrase.current(self.config),
                state=self.config.state,
                config=self.config,
                rebuild=rebuild,
                emit=self.emit,
            )
            self._repository = self._stack.enter_context(opened)
            self._count_requests(opened)
        return self._repository

    def snapshots(self) -> list[SnapshotRecord]:
        """Return the snapshots in commit order; of the service: those of this user."""
        if self.service is None:
            return self.repository().snapshots()
        return [record for record, _ in self.owned_snapshots()]

    def owned_snapshots(self) -> list[tuple[SnapshotRecord, int | None]]:
        """Return the snapshots in commit order, each with the uid of its owner; None: it cannot be
        read. Without the service, this reads the manifests of snapshots that an earlier version took.
        """
        if self.service is None:
            from icecore.restorer.owner import owners

            repository = self.repository()
            records = repository.snapshots()
            known = repository.loop.run(owners(repository.core, records))
            return list(zip(records, known, strict=True))
        from icecore.remote.snapshots import listed

        return listed(self.service)

    def _count_requests(self, opened: Repository) -> None:
        """Count the requests to a bucket while it is open: a supervisor keeps it for weeks."""
        from icecore.store.backend.metrics import meters_of

        if self._tally is not None:
            for meter in meters_of(opened.core.backend):
                self._tally.watch(meter.counts)

    def registry(self) -> Registry:
        """Return the registry of this node's jobs; of the service: those of this user."""
        if self.service is not None:
            from icecore.remote.jobs import RemoteRegistry

            return RemoteRegistry(self.service)
        from icecore.access.places import state_directory
        from icecore.host.jobs.registry import Registry

        return Registry(state_directory(self.config.state), emit=self.output.event)

    def recover(self) -> None:
        """Let jobs run that killed dumps left frozen; roll back or complete the changes that killed
        restores made to jobs' files.
        """
        from icecore.access.places import state_directory
        from icecore.host.jobs.registry import Registry

        registry = Registry(state_directory(self.config.state), emit=self.output.event)
        with suppress(IcecoreError, OSError):  # the command itself says what is wrong with jobs
            registry.thaw_left()
        state = registry.state
        try:
            if not any(os.scandir(state / "restores")):
                return
        except OSError:  # no restore has changed a file yet, or this user has no access
            return
        from icecore.restorer.files.file_recovery import recover

        try:
            recover(state, self.output.event)
        except IcecoreError as error:
            self.output.event(Event("restore.warning", {"name": "files", "message": str(error)}))

    def require_job(self, name: str) -> None:
        """Require a snapshot of a job with this name, or an instance of it on this node.

        Raises:
            NotFound: There is neither.
        """
        if any(record.job == name for record in self.snapshots()) or any(
            job.name == name for job in self.registry().instances()
        ):
            return
        raise NotFound(
            f"there is no job {name!r} and no snapshot of one",
            cure="'icecore ls' lists all snapshots, 'icecore ps -a' the jobs of this node",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._stack.close()


class Interrupted(BaseException):
    """Raised when a signal asks this process to end: unfinished work is rolled back, and jobs
    continue to run.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
