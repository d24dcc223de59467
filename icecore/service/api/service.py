"""The parts of the service, and the interface that it requires from the rest of icecore."""

from __future__ import annotations

import asyncio
import grp
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary, ref

import msgspec
from aiohttp import web

from icecore.config import Config
from icecore.errors import Denied, IcecoreError, NotFound, UsageError
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.service.api import models
from icecore.service.api.audit import Audit
from icecore.service.api.caller import Caller, Role
from icecore.service.api.connections import Connections
from icecore.service.api.limits import Rate
from icecore.service.api.operation_table import Bounds
from icecore.service.api.operations import Operations
from icecore.service.api.problems import Slow
from icecore.service.api.tokens import Tokens
from icecore.service.facts.readings import Reading, Replica
from icecore.service.record import Records

T = TypeVar("T")
_THREADS = 16
_LOCAL_PER_CALLER = 4
_REMOVAL_THREADS = 16
_REMOVED_PER_CALLER = 2
_STORAGE_THREADS = 64
_STORED_PER_CALLER = 4
_STORED_SECONDS = 30.0
#: Who sends the request that the current task handles.
CALLER: ContextVar[str] = ContextVar("CALLER", default="")


class Where(msgspec.Struct, frozen=True):
    """A repository of an operation: its location, and whether users share it."""

    location: str
    shared: bool


class Backing(Protocol):
    """Access to repositories and to this machine; `icecore.node.backing` implements it.

    All methods block, so they run in threads.
    """

    def where(self, uid: int | None) -> Where:
        """Return the repository of a user; None: that of the administrators."""

    def snapshots(self, where: Where) -> list[models.Snapshot]:
        """Return the snapshots in commit order, with their owners."""

    def find(self, snapshots: Sequence[models.Snapshot], name: str) -> models.Snapshot:
        """Return the snapshot that a name refers to (`icecore.snapshots.addressing.resolve`)."""

    def details(self, where: Where, snapshot: str) -> models.SnapshotDetails:
        """Return what a snapshot contains."""

    def statistics(self, where: Where) -> models.Repository:
        """Return a repository's statistics."""

    def reading(self, where: Where) -> Reading:
        """Return a repository's lists, at most a few seconds old."""

    def replicas(self, where: Where) -> list[Replica]:
        """Compare the replicas of a repository with it."""

    def prepare(self, where: Where) -> None:
        """Make a user's own repository if it does not exist."""

    def staging(self) -> list[models.Staging]:
        """Return the file systems for staging."""


class Threads:
    """Threads for blocking calls. Each caller has a share of them.

    Args:
        most: How many there are.
        per_caller: How many of them run calls of one caller at a time.
    """

    def __init__(self, most: int, per_caller: int) -> None:
        self._pool = ThreadPoolExecutor(most)
        self._per_caller = per_caller
        self._turns: WeakValueDictionary[str, asyncio.Semaphore] = WeakValueDictionary()

    async def run(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run a function in a thread, once the share of the current request's caller has one left.
        If this is cancelled, the thread still counts against the share until the function returns.
        """
        loop = asyncio.get_running_loop()
        turns = self._turns.setdefault(CALLER.get(), asyncio.Semaphore(self._per_caller))

        def done(work: Future[T]) -> None:
            with suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(turns.release)

        await turns.acquire()
        try:
            work = self._pool.submit(call, *arguments)
        except BaseException:
            turns.release()
            raise
        work.add_done_callback(done)
        return await asyncio.wrap_future(work)

    def close(self) -> None:
        """Drop the calls that wait for a thread."""
        self._pool.shutdown(wait=False, cancel_futures=True)


@dataclass
class Service:
    """A running service."""

    config: Config
    registry: Registry
    backing: Backing
    operations: Operations
    tokens: Tokens
    audit: Audit
    rate: Rate
    connections: Connections
    version: str
    words: list[str] = field(default_factory=list)
    started: float = field(default_factory=time.time)
    stopping: bool = False
    admin_gid: int | None = None
    schedules: Records = field(init=False)
    #: Instance → its object and resource, of those that have ended, as long as the registry knows
    #: the object. Threads share it.
    ended: dict[str, tuple[ref[Job], models.Job]] = field(default_factory=dict)
    _local: Threads = field(default_factory=lambda: Threads(_THREADS, _LOCAL_PER_CALLER))
    _removal: Threads = field(
        default_factory=lambda: Threads(_REMOVAL_THREADS, _REMOVED_PER_CALLER)
    )
    _storage: Threads = field(default_factory=lambda: Threads(_STORAGE_THREADS, _STORED_PER_CALLER))

    def __post_init__(self) -> None:
        self.schedules = Records(self.registry.state)
        self.operations.after_lost = self.thaw_left

    @classmethod
    def made(
        cls,
        config: Config,
        registry: Registry,
        backing: Backing,
        *,
        version: str,
        words: Sequence[str] = (),
        worker: str = "",
    ) -> Service:
        """Make a service.

        Args:
            words: Options for the command line of every operation.
            worker: As for `Operations`.

        Raises:
            UsageError: A setting is wrong.
        """
        own = config.service
        bounds = Bounds(
            max(1, own.operations), max(1, own.operations_per_user), own.supervised_per_user
        )
        return cls(
            config=config,
            registry=registry,
            backing=backing,
            operations=Operations(registry.state, worker, bounds),
            tokens=Tokens(registry.state),
            audit=Audit(registry.state, max(1 << 16, own.audit_bytes)),
            rate=Rate(max(1, own.requests), 2.0 * max(1, own.requests)),
            connections=Connections(max(8, own.connections)),
            version=version,
            words=list(words),
            admin_gid=_group(own.admin_group),
        )

    async def locally(self, call: Callable[..., T], *arguments: Any) -> T:
        """In a thread, run a function that reads the state of this machine; a few at a time for
        each caller.
        """
        return await self._local.run(call, *arguments)

    async def removing(self, call: Callable[..., T], *arguments: Any) -> T:
        """In a thread, run a function that removes what a job leaves. It may take a minute, so it
        does not use a thread of `locally`.
        """
        return await self._removal.run(call, *arguments)

    async def thaw_left(self) -> None:
        """Thaw jobs that killed dumps left frozen."""
        with suppress(IcecoreError, OSError):  # requests for jobs report what is wrong with them
            await self.removing(self.registry.thaw_left)

    async def trim_logs(self) -> None:
        """Trim the logs of all jobs to their limits."""
        with suppress(IcecoreError, OSError):  # as in `thaw_left`
            await self.locally(self.registry.trim_logs, lambda: self.stopping)

    async def stored(self, call: Callable[..., T], *arguments: Any) -> T:
        """Run what may wait for a repository in a thread, some calls of one caller at a time.

        Raises:
            Slow: It does not end in time; the thread is the caller's until it does.
        """
        deadline = asyncio.timeout(_STORED_SECONDS)
        try:
            async with deadline:
                return await self._storage.run(call, *arguments)
        except TimeoutError:
            if not deadline.expired():  # it is the call's own
                raise
            raise Slow(
                f"the repository did not answer in {_STORED_SECONDS:g} s",
                cure="try again later",
                after=_STORED_SECONDS,
            ) from None

    def close(self) -> None:
        """Release the threads and the audit log."""
        for threads in (self._local, self._removal, self._storage):
            threads.close()
        self.audit.close()

    @property
    def others(self) -> Role:
        """The role of users who are not administrators."""
        return {"none": Role.PUBLIC, "read": Role.READ, "operate": Role.OPERATE}[
            self.config.service.others
        ]

    # -- what callers may access

    def jobs(self, caller: Caller) -> list[Job]:
        """Return the instances that a caller may see, oldest first."""
        return [
            job for job in self.registry.instances() if caller.may_touch(job.name, owner_of(job))
        ]

    def job(self, caller: Caller, which: str) -> Job:
        """Return the job with a name, an instance id or a pid, among those that a caller may access.

        Raises:
            NotFound: There is no such job.
        """
        jobs = self.jobs(caller)
        named = [job for job in jobs if which in (job.name, job.instance)]
        named.sort(key=lambda job: job.state in ("running", "starting"))
        if named:
            return named[-1]
        if which.isdecimal() and len(which) < 11:
            found = self.registry.find(int(which))
            if found.instance in {job.instance for job in jobs}:
                return found
        raise NotFound(f"there is no job {which}", cure="'icecore ps' lists the jobs of this node")

    def where(self, caller: Caller, user: str = "") -> Where:
        """Return the repository of the caller, or of ``user`` for a caller that sees all."""
        if user and not caller.sees_all:
            raise Denied("only administrators may give 'user'", cure="leave it out")
        if user:
            return self.backing.where(_uid(user))
        return self.backing.where(caller.uid or None)

    def snapshots(self, caller: Caller, where: Where) -> list[models.Snapshot]:
        """Return the snapshots of a repository that a caller may see, in commit order."""
        found = self.backing.snapshots(where)
        if not where.shared and not caller.sees_all:
            # It is the user's own repository; older snapshots have no owner.
            owners = {caller.uid, None}
            return [
                one
                for one in found
                if one.owner in owners and caller.may_touch(one.job, caller.uid)
            ]
        return [one for one in found if caller.may_touch(one.job, one.owner)]

    def remember(self, job: Job, shown: models.Job) -> None:
        """Cache the resource of an instance that has ended, until the instance is removed."""
        instance = job.instance

        def forget(gone: ref[Job]) -> None:
            kept = self.ended.get(instance)
            if kept is not None and kept[0] is gone:
                self.ended.pop(instance, None)

        self.ended[instance] = ref(job, forget), shown

    def own_repository(self, caller: Caller) -> Where:
        """Return the repository that the caller may manage as a whole.

        Raises:
            Denied: The caller shares it with other users.
        """
        where = self.where(caller)
        if caller.whole_node or (not where.shared and "*" in caller.jobs):
            return where
        raise Denied(
            "users share this repository, so only administrators may manage it as a whole",
            cure="ask an administrator",
        )


SERVICE: web.AppKey[Service] = web.AppKey("service", Service)


def owner_of(job: Job) -> int:
    """Return the uid that a job runs as."""
    return job.description.user


def _group(name: str) -> int | None:
    if not name:
        return None
    try:
        return grp.getgrnam(name).gr_gid
    except KeyError:
        raise UsageError(
            f"service.admin_group: there is no group {name}", cure="create it, or set another"
        ) from None


def _uid(user: str) -> int:
    import pwd

    try:
        return pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):  # a text with a NUL is no name
        if user.isdecimal() and len(user) < 11:
            return int(user)
        raise NotFound(f"there is no user {user}") from None
