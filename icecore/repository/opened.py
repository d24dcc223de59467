"""An open repository: its storage, its event loop and its identity, on which all operations build."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from icecore.access.trust import Client
from icecore.config import Config
from icecore.errors import Damaged, NotFound
from icecore.snapshots import addressing
from icecore.store.backend.base import Backend
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread

if TYPE_CHECKING:
    from collections.abc import Iterable


class Opened:
    """An open repository; a context manager. All methods may be called from any thread.

    Attributes:
        core: The repository of `icecore.store`, which lives in ``loop``.
        loop: The background event loop.
    """

    def __init__(
        self,
        core: StoredRepository,
        loop: LoopThread,
        state: str = "",
        *,
        config: Config | None = None,
        owner: Opened | None = None,
    ) -> None:
        self.core = core
        self.loop = loop
        self._state = state
        self._config = config
        self._owner = owner
        self._siblings: list[Self] | None = None

    @classmethod
    def _make(
        cls,
        backend: Backend,
        state: str,
        config: Config | None,
        make: Callable[[], Coroutine[Any, Any, StoredRepository]],
    ) -> Self:
        """Open or create a repository in a new event loop; on failure close everything."""
        loop = LoopThread()
        try:
            core = loop.run(make())
        except BaseException:
            loop.run(backend.close())
            loop.close()
            raise
        return cls(core, loop, state, config=config)

    @property
    def location(self) -> str:
        """The location, as text for people."""
        return self.core.backend.where

    @property
    def id(self) -> str:
        """The id, 32 hexadecimal digits. A copy that was made by copying files has the same id."""
        return self.core.config.id

    @property
    def encrypted(self) -> bool:
        """Whether opening the repository requires a passphrase."""
        return self.core.keys.encrypted

    def snapshots(self, *, job: str = "", tags: Iterable[str] = ()) -> list[SnapshotRecord]:
        """Return the snapshots in commit order.

        Args:
            job: Only this job's.
            tags: Only those with all of these tags.
        """
        wanted = set(tags)
        found = self.loop.run(self.core.snapshots())
        return [
            record for record in found if job in ("", record.job) and wanted <= set(record.tags)
        ]

    def find(self, snapshot: str) -> SnapshotRecord:
        """Return the snapshot that an id, the beginning of one, ``JOB``, ``JOB~1``, ``JOB@1`` or
        ``latest`` names (`icecore.snapshots.addressing.resolve`).

        Raises:
            NotFound: There is no such snapshot.
            UsageError: Several ids begin so.
        """
        # Ids, job names and 'latest' need at most one page of the list, however long it is.
        if addressing.is_id(snapshot):
            try:
                return self.loop.run(self.core.find(snapshot))
            except NotFound:
                pass  # it may still be a job's name
        found = self.loop.run(self.core.newest_of(snapshot)) if snapshot else None
        return found or addressing.resolve(self.snapshots(), snapshot)

    def close(self) -> None:
        """Close the storage and stop the background loop."""
        if self._owner is None and not self.loop.loop.is_closed():
            self.loop.run(self.core.close())
            self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Repository({self.location!r})"

    @property
    def _client(self) -> Client:
        return Client(self._state, self._config)

    def _record(self, snapshot: str | SnapshotRecord) -> SnapshotRecord:
        return snapshot if isinstance(snapshot, SnapshotRecord) else self.find(snapshot)

    def _without_replicas(self) -> StoredRepository:
        """Return the repository without its replicas, which would hide damage."""
        core = self.core
        return StoredRepository(core.backend.source, core.config, core.keys, core.log, core.emit)

    async def _open_replica(self, backend: Backend) -> StoredRepository:
        """Open a replica of this repository; it is encrypted if this repository is."""
        return await self._client.open(
            backend, secret=self.core.keys.secret, plain=not self.encrypted, emit=self.core.emit
        )


def lost(record: SnapshotRecord) -> Damaged:
    """Return the error for a caller that needs a quarantined snapshot."""
    cure = "'icecore repair --from PLACE' restores it from a replica that has it, 'icecore forget SNAPSHOT' gives it up"
    return Damaged("snapshot", record.snapshot, record.quarantined, cure=cure)
