"""The public Repository: opens, lists, compares and cleans, synchronously; everything that waits runs in one background event loop."""

from __future__ import annotations

import os
from collections.abc import Callable, Coroutine, Iterable, Sequence
from types import TracebackType
from typing import Any, Self, TypeVar

from icecore import addressing, difference
from icecore.config import Config
from icecore.difference import Difference
from icecore.errors import UsageError
from icecore.events import Sink, discard
from icecore.places import backend_at, state_directory
from icecore.store import forget
from icecore.store.backend import Backend
from icecore.store.check import Report, check
from icecore.store.forget import Decision, Policy
from icecore.store.gc import Collector
from icecore.store.gc import Options as GcOptions
from icecore.store.gc import Plan as GcPlan
from icecore.store.gc import Result as GcResult
from icecore.store.keys import Parameters
from icecore.store.log import Log
from icecore.store.loop import LoopThread
from icecore.store.manifest import Manifest
from icecore.store.reader import SnapshotReader
from icecore.store.repository import Repository as Core
from icecore.store.state import SnapshotRecord
from icecore.store.watermark import FileWatermark

T = TypeVar("T")


class Repository:
    """An open repository; `open` and `create` make them. A context manager; all methods may be called from any thread.

    Everything raises `icecore.errors.StoreError` when the storage fails and `icecore.errors.Damaged` when what is read is not what was written.

    Attributes:
        core: The repository of `icecore.store`, which lives in ``loop``.
        loop: The background event loop.
    """

    def __init__(self, core: Core, loop: LoopThread) -> None:
        self.core = core
        self.loop = loop

    @classmethod
    def open(
        cls, location: str | os.PathLike[str], *, state: str = "", config: Config | None = None, emit: Sink = discard
    ) -> Repository:
        """Open the repository at a location.

        Args:
            location: Its directory, or ``s3://BUCKET/PREFIX``.
            config: Says how buckets are reached (sections [s3] and [cache]). None: what `icecore.config.load` gives.
            state: Directory in which the newest state seen is remembered, so that an older one shown later is an error. Empty: this node's.
            emit: Gets the events of everything done through it.

        Raises:
            NotFound: There is none.
            RollbackDetected: It shows an older state than this node has seen (raised by whatever reads the state first).
            FormatTooNew: A later version of icecore wrote it.
        """
        backend = backend_at(os.fspath(location), config=config, emit=emit)
        return cls._make(backend, state, lambda: Core.open(backend, emit=emit))

    @classmethod
    def create(
        cls,
        location: str | os.PathLike[str],
        *,
        shard_bytes: int = 64 << 20,
        state: str = "",
        config: Config | None = None,
        emit: Sink = discard,
    ) -> Repository:
        """Make a repository at a location; a directory is made where it is missing, a bucket has to be there.

        Args:
            shard_bytes: Size in bytes at which an object of chunks is closed: 1 MiB to 1 GiB.
            state, config, emit: As in `open`.

        Raises:
            UsageError: There is one already, or the storage does not do what a repository needs (hard links, conditional writes).
        """
        if not 1 << 20 <= shard_bytes <= 1 << 30:
            raise UsageError(f"shards of {shard_bytes} bytes", cure="use 1 MiB to 1 GiB; 64 MiB serves well")
        backend = backend_at(os.fspath(location), create=True, config=config, emit=emit)
        return cls._make(backend, state, lambda: Core.create(backend, Parameters(shard_bytes), emit=emit))

    @classmethod
    def _make(cls, backend: Backend, state: str, make: Callable[[], Coroutine[Any, Any, Core]]) -> Repository:
        loop = LoopThread()
        try:
            core = loop.run(make())
            # By the repository's id, not its path: another one may be made in the same place.
            seen = FileWatermark(state_directory(state) / "seen" / core.config.id)
            core = Core(core.backend, core.config, core.keys, Log(core.backend, core.keys.log, watermark=seen), core.emit)
        except BaseException:
            loop.run(backend.close())
            loop.close()
            raise
        return cls(core, loop)

    @property
    def location(self) -> str:
        """Where it is, in words."""
        return self.core.backend.where

    @property
    def id(self) -> str:
        """Its id, 32 hexadecimal digits; a copy made by copying files has the same."""
        return self.core.config.id

    def snapshots(self, *, job: str = "", tags: Iterable[str] = ()) -> list[SnapshotRecord]:
        """The snapshots in order of their commits.

        Args:
            job: Only this job's.
            tags: Only those with all of these tags.
        """
        wanted = set(tags)
        found = self.loop.run(self.core.snapshots())
        return [record for record in found if job in ("", record.job) and wanted <= set(record.tags)]

    def find(self, snapshot: str) -> SnapshotRecord:
        """The snapshot that is meant by an id, the beginning of one, ``JOB``, ``JOB~1``, ``JOB@1`` or ``latest`` (`icecore.addressing.resolve`).

        Raises:
            NotFound: None is.
            UsageError: Several ids begin so.
        """
        return addressing.resolve(self.snapshots(), snapshot)

    def manifest(self, snapshot: str | SnapshotRecord) -> Manifest:
        """All that is known of a snapshot: processes, regions, files, sizes in bytes, what a restore needs.

        Raises:
            NotFound: There is no such snapshot.
        """
        return self.loop.run(self.core.manifest(self._record(snapshot)))

    def reader(self, snapshot: str | SnapshotRecord) -> SnapshotReader:
        """A reader of a snapshot's memory and files. It pins nothing: what it reads may be collected once the snapshot is forgotten.

        Raises:
            NotFound: There is no such snapshot.
        """
        return SnapshotReader(self.core, self.manifest(snapshot), self.loop.loop)

    def diff(self, older: str | SnapshotRecord, newer: str | SnapshotRecord) -> Difference:
        """What differs between two snapshots, by whole cells (1 MiB), from their maps alone.

        Raises:
            NotFound: There is no such snapshot.
        """
        return difference.compare(self.reader(older), self.reader(newer))

    def plan_forget(self, policy: Policy, *, job: str = "") -> list[Decision]:
        """What a retention policy would keep and why, job by job, oldest first; nothing is changed.

        Args:
            job: Apply it to this job only.

        Raises:
            UsageError: The policy would keep nothing.
        """
        return forget.plan(self.snapshots(job=job), policy)

    def forget(self, snapshots: Iterable[str | SnapshotRecord]) -> list[SnapshotRecord]:
        """Take snapshots off the list, in one transaction; `gc` then frees what only they needed.

        Returns:
            Those that were removed: pinned ones stay.

        Raises:
            NotFound: One of them does not exist.
        """
        names = [self._record(snapshot).snapshot for snapshot in snapshots]
        return self.loop.run(self.core.forget(names))

    def update(
        self, snapshot: str | SnapshotRecord, *, pinned: bool | None = None, tags: Sequence[str] | None = None
    ) -> SnapshotRecord:
        """Pin or unpin a snapshot, or replace its labels; None leaves them as they are.

        Raises:
            NotFound: There is no such snapshot.
        """
        return self.loop.run(self.core.update(self._record(snapshot).snapshot, pinned=pinned, tags=tags))

    def plan_gc(self, options: GcOptions | None = None) -> GcPlan:
        """What a garbage collection would do, bytes included; nothing is changed.

        Raises:
            Damaged: A kept snapshot cannot be read, so what it needs is unknown.
        """
        return self.loop.run(Collector(self.core, options).plan())

    def gc(self, options: GcOptions | None = None) -> GcResult:
        """Delete what no snapshot and no open session needs, and rewrite objects that are mostly dead. Safe beside everything else.

        Raises:
            Damaged: A kept snapshot cannot be read, so what it needs is unknown; nothing was deleted.
        """
        return self.loop.run(Collector(self.core, options).collect())

    def check(self, *, read_data: float = 0.0, register: bool = True) -> Report:
        """Look at every object that the snapshots need, while the repository is in use.

        Args:
            read_data: Share (0 to 1) of the data that is read, decoded and verified as well.
            register: Keep what is looked at from being collected meanwhile; without, for places that cannot be written to.

        Returns:
            What was found; damage is reported, not raised.
        """
        core = self.core
        itself = Core(core.backend.source, core.config, core.keys, core.log, core.emit)  # no copies that are kept elsewhere
        return self.loop.run(check(itself, read_data=read_data, register=register))

    def _record(self, snapshot: str | SnapshotRecord) -> SnapshotRecord:
        return snapshot if isinstance(snapshot, SnapshotRecord) else self.find(snapshot)

    def close(self) -> None:
        """Let go of the storage and end the background loop."""
        if not self.loop.loop.is_closed():
            self.loop.run(self.core.close())
            self.loop.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"Repository({self.location!r})"


