"""Access of the node service to repositories and to this machine.

Repositories stay open between requests, because opening one takes as long as many requests.
"""

from __future__ import annotations

import shlex
import stat
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import msgspec

from icecore.access import passphrase
from icecore.access.places import state_directory
from icecore.config import Config
from icecore.errors import IcecoreError, NotFound, UsageError
from icecore.host.jobs.identity import user_name
from icecore.node.watching import compare_replicas
from icecore.private import components, is_own
from icecore.repository import Repository
from icecore.service.api import models
from icecore.service.api.service import Where
from icecore.service.facts.readings import (
    LIST_SECONDS,
    Reading,
    Replica,
    read_repository,
    staging_of,
)
from icecore.service.metrics.tally import WAIT_SECONDS, Tally
from icecore.snapshots import addressing, contents
from icecore.store.format.contract import snapshot_owner
from icecore.store.format.state import SnapshotRecord
from icecore.store.maintenance.stats import Group
from icecore.text import jsonable

_KEPT_SECONDS = 300.0
_STATISTICS_SECONDS = 30.0
_MOST_OWNERS = 100_000


class Repositories:
    """The repositories of the users of a node; all methods may be called from any thread.

    Args:
        config: The service's.
        location: The administrators' repository, shared by all users if none is configured for
            them.
    """

    def __init__(self, config: Config, location: str) -> None:
        self._config = config
        self._location = location
        self._lock = threading.Lock()
        self._open: dict[str, _Opened] = {}
        self._owners: dict[str, int] = {}
        self._tally = Tally(state_directory(config.state))

    def where(self, uid: int | None) -> Where:
        """Return the repository of a user; None: that of the administrators."""
        template = self._config.service.repository
        if uid is None or not template:
            return Where(self._location, shared=True)
        own = "{user}" in template or "{uid}" in template
        name = user_name(uid)
        if "/" in name or name.startswith("."):
            name = str(uid)
        where = template.replace("{user}", name).replace("{uid}", str(uid))
        return Where(where, shared=not own)

    def snapshots(self, where: Where) -> list[models.Snapshot]:
        """Return the snapshots in commit order, with their owners."""
        with self._opened(where) as opened:
            return opened.shown(lambda record: self._owner(opened.repository, record))

    def find(self, snapshots: Sequence[models.Snapshot], name: str) -> models.Snapshot:
        """Return the snapshot that a name refers to."""
        found = addressing.resolve([as_record(one) for one in snapshots], name)
        return next(one for one in snapshots if one.snapshot == found.snapshot)

    def details(self, where: Where, snapshot: str) -> models.SnapshotDetails:
        """Return what a snapshot contains."""
        with self._opened(where) as opened:
            record = opened.repository.find(snapshot)
            manifest = opened.repository.manifest(record)
            listed = as_snapshot(record, self._owner(opened.repository, record))
        return models.SnapshotDetails(
            snapshot=listed,
            details=jsonable(contents.details(manifest)),
            processes=[jsonable(one) for one in contents.processes(manifest)],
            regions=[jsonable(one) for one in contents.regions(manifest)],
            files=[jsonable(one) for one in contents.files(manifest)],
            data=[jsonable(one) for one in contents.data(manifest)],
        )

    def statistics(self, where: Where) -> models.Repository:
        """Return a repository's statistics, at most a few seconds old."""
        with self._opened(where) as opened:
            return opened.statistics()

    def reading(self, where: Where) -> Reading:
        """Return a repository's lists, at most a few seconds old."""
        with self._opened(where) as opened:
            return opened.reading()

    def replicas(self, where: Where) -> list[Replica]:
        """Compare the replicas of a repository with it."""
        if where.location != self._location:
            return []
        with self._opened(where) as opened:
            return compare_replicas(opened.repository, self._config)

    def staging(self) -> list[models.Staging]:
        """Return the file systems for staging whose directories exist."""
        own = {self._config.dump.workdir, self._config.restore.workdir or "/dev/shm"}
        return [
            models.Staging(directory=one.directory, total_bytes=one.total, free_bytes=one.free)
            for one in staging_of(sorted(own))
        ]

    def prepare(self, where: Where) -> None:
        """Make a user's own repository if it does not exist."""
        if where.shared:
            return
        try:
            with self._opened(where):
                return
        except NotFound:
            pass
        given = passphrase.current(self._config)
        Repository.create(
            where.location,
            passphrase=given if given.configured else None,
            state=self._config.state,
            config=self._config,
        ).close()

    def close(self) -> None:
        """Close all repositories."""
        with self._lock:
            for one in self._open.values():
                for repository in one.opened:
                    repository.close()
            self._open.clear()
        self._tally.flush(WAIT_SECONDS)

    def _owner(self, repository: Repository, record: SnapshotRecord) -> int | None:
        """Return the uid of a snapshot's job, which never changes; None: it cannot be read."""
        if record.owner is not None:
            return record.owner
        key = f"{repository.id}/{record.manifest}"  # of an earlier version
        owner = self._owners.get(key)
        if owner is None:
            try:
                owner = snapshot_owner(repository.manifest(record))
            except IcecoreError:  # damaged, or only on a replica; may become readable
                return None
            if len(self._owners) >= _MOST_OWNERS:
                self._owners.clear()
            self._owners[key] = owner
        return owner

    @contextmanager
    def _opened(self, where: Where) -> Iterator[_Opened]:
        """Lend an open repository; open it on first use."""
        with self._lock:
            self._close_unused()
            found = self._open.setdefault(where.location, _Opened())
            found.users += 1
        try:
            with found.opening:  # only callers of this repository wait
                if not found.opened:
                    found.opened.append(self._repository(where))
            yield found
        finally:
            with self._lock:
                found.users -= 1
                found.used = time.monotonic()

    def _close_unused(self) -> None:
        now = time.monotonic()
        for location, one in list(self._open.items()):
            if not one.users and (not one.opened or now - one.used > _KEPT_SECONDS):
                del self._open[location]
                for repository in one.opened:
                    repository.close()

    def _repository(self, where: Where) -> Repository:
        if not where.location:
            raise UsageError(
                "no repository is configured for the service",
                cure="set repository, or service.repository, in icecore.toml",
            )
        _require_roots(where.location)
        return Repository.open(
            where.location,
            replicas=self._config.replicas if where.location == self._location else (),
            passphrase=passphrase.current(self._config),
            state=self._config.state,
            config=self._config,
            emit=self._tally.event,
        )


class _Opened:
    """A repository that is opened on first use, with its cached readings."""

    def __init__(self) -> None:
        self.opened: list[Repository] = []
        self.opening = threading.Lock()
        self.users = 0
        self.used = time.monotonic()
        self._counting = threading.Lock()
        self._counted: tuple[float, models.Repository] | None = None
        self._reading_lock = threading.Lock()
        self._reading: Reading | None = None
        self._shown: dict[bytes, models.Snapshot] = {}

    @property
    def repository(self) -> Repository:
        """The repository, once it is open."""
        return self.opened[0]

    def reading(self) -> Reading:
        """Return the lists; one reader at a time."""
        with self._reading_lock:
            if self._reading is None or time.time() - self._reading.at > LIST_SECONDS:
                self._reading = self.repository.loop.run(read_repository(self.repository.core))
            return self._reading

    def shown(self, owner: Callable[[SnapshotRecord], int | None]) -> list[models.Snapshot]:
        """Return the snapshots as resources. Those that the last list had are not made again, and
        those that are gone are dropped.
        """
        before, now = self._shown, dict[bytes, models.Snapshot]()
        for record in self.repository.snapshots():
            user = owner(record)
            key = msgspec.msgpack.encode((record, user))
            now[key] = before.get(key) or as_snapshot(record, user)
        self._shown = now
        return list(now.values())

    def statistics(self) -> models.Repository:
        """Return the statistics; one count at a time."""
        with self._counting:
            now = time.monotonic()
            if self._counted is None or now - self._counted[0] > _STATISTICS_SECONDS:
                self._counted = (now, self._count())
            return self._counted[1]

    def _count(self) -> models.Repository:
        found, opened = self.repository.stats(), self.repository
        return models.Repository(
            location=opened.location,
            id=opened.id,
            encrypted=opened.encrypted,
            snapshots=found.snapshots,
            quarantined=found.quarantined,
            logical=found.logical,
            chunks=found.chunks,
            chunk_bytes=found.chunk_bytes,
            live=found.live,
            dead=found.dead,
            dedup_ratio=found.dedup_ratio,
            compression_ratio=found.compression_ratio,
            objects=dict(found.objects),
            object_bytes=dict(found.object_bytes),
            jobs=[_group(one) for one in found.jobs],
            lineages=[_group(one) for one in found.lineages],
            codecs=[
                models.Codec(
                    codec=one.codec, chunks=one.chunks, stored=one.stored, logical=one.logical
                )
                for one in found.forms
            ],
        )


def _require_roots(location: str) -> None:
    """Require that users cannot write to a repository in a directory, because root restores from it.

    Raises:
        UsageError: A user can.
    """
    scheme, separator, rest = location.partition("://")
    if separator and scheme != "file":
        return  # a bucket: the administrator controls its permissions
    path = Path(rest if separator else location).expanduser().absolute()
    with suppress(FileNotFoundError):  # opening it raises the error
        for one, found in components(path):
            if not is_own(found) or (
                found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
                and not stat.S_ISLNK(found.st_mode)
                and not found.st_mode & stat.S_ISVTX
            ):
                raise UsageError(
                    f"{location}: other users can replace {one}, and root restores from this repository",
                    cure=f"chown root {shlex.quote(one)}; chmod go-w {shlex.quote(one)}",
                )


def _group(found: Group) -> models.Group:
    return models.Group(
        name=found.name,
        snapshots=found.snapshots,
        logical=found.logical,
        reached=found.reached,
        own=found.own,
    )


def as_snapshot(record: SnapshotRecord, owner: int | None) -> models.Snapshot:
    """Return a snapshot's record as a resource."""
    fields = jsonable(contents.snapshot_fields(record))
    return models.Snapshot(owner=owner, **{key: fields[key] for key in _FIELDS})


def as_record(one: models.Snapshot) -> SnapshotRecord:
    """Return a resource as a record, for functions that take records."""
    return SnapshotRecord(
        snapshot=one.snapshot,
        job=one.job,
        lineage=one.lineage,
        parent=one.parent,
        created_ns=round(one.created * 1e9),
        manifest="",
        manifest_length=0,
        manifest_digest=b"",
        logical=one.logical,
        stored=one.stored,
        changed=one.changed,
        window_seconds=one.window_seconds,
        tags=one.tags,
        pinned=one.pinned,
        device=one.device,
        data=one.data,
        quarantined=one.quarantined,
        owner=one.owner,
    )


_FIELDS = tuple(name for name in models.Snapshot.__struct_fields__ if name != "owner")
