"""What a supervisor was asked for, and what it needs of the rest of icecore."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, Protocol

import msgspec

from icecore.dumper.dump import DumpResult
from icecore.dumper.stopping import StopRequest
from icecore.events import Sink
from icecore.host.jobs.job import Job
from icecore.host.jobs.registry import Registry
from icecore.restorer.restored import Restored
from icecore.service.interval import Bounds
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.forget import Policy
from icecore.store.runtime.loop import LoopThread


class Plan(msgspec.Struct, frozen=True):
    """What was asked for. Times in seconds.

    Attributes:
        name: The job's name.
        start: Starts the job anew.
        data: The data directories with which ``start`` starts it, as the user named them.
        log_limit: The limit of its logs, if the user gave one.
        resume: Bring it back from its newest snapshot if there is one.
        lineage: The lineage to resume; empty: that of the newest snapshot of the name.
        stop: A signal that came before: stop the job that runs. 0: none.
        stopped: A snapshot with which the job was stopped before: only leave. Empty: none.
        or_start: Start anew if no snapshot can be restored.
        fall_back: So many older snapshots are tried if the newest cannot be restored.
        every: Interval between snapshots; None: none; ``auto``: `icecore.service.interval`.
        on_term: What a signal does: stop the job with a snapshot, or pass it to the job.
        preempted_exit: Exit status if the job is to be restored elsewhere.
        restarts: How often a job that fails is brought back before it gets past its failure; 0:
            never; -1: without a bound.
        requeue: Shell command that runs before that exit.
        notice: Time from a signal until the machine is gone; 0: not known.
        notice_command, notice_url: What says that the job has to leave (`Notices`).
        bounds: For ``auto``.
        failure_seconds: For ``auto``: mean time between failures that is assumed at first.
        slow_down: For ``auto``: share of its speed that the job loses while a snapshot is stored.
        keep: Applied to the job's snapshots after each commit; None: all are kept.
    """

    name: str
    start: Callable[[], Job]
    resume: bool = True
    lineage: str = ""
    stop: int = 0
    stopped: str = ""
    or_start: bool = False
    fall_back: int = 0
    every: float | Literal["auto"] | None = None
    on_term: Literal["snapshot", "pass"] = "snapshot"
    preempted_exit: int = 85
    restarts: int = 0
    requeue: str = ""
    notice: float = 0.0
    notice_command: str = ""
    notice_url: str = ""
    bounds: Bounds = msgspec.field(default_factory=Bounds)
    failure_seconds: float = 86400.0
    slow_down: float = 0.02
    keep: Policy | None = None
    data: Sequence[str] = ()
    log_limit: int | None = None


class Engine(Protocol):
    """What a supervisor needs of the rest of icecore; `icecore.node.engine` is the one.

    Attributes:
        registry: The jobs of this node.
        core: The repository of their snapshots.
        loop: The event loop in which ``core`` lives.
        user: The uid for which it acts; None: an administrator, whose lease of a name excludes
            those of all users.
    """

    registry: Registry
    core: StoredRepository
    loop: LoopThread
    user: int | None

    def owns(self, job: Job) -> bool:
        """Return whether a job is of the user for whom it acts."""

    def find(self, name: str) -> Job:
        """Return the newest instance of a job; raise NotFound, or JobHeld if it is another user's."""

    def snapshots(self, job: str) -> list[SnapshotRecord]:
        """Return the snapshots of a job in order of their commits."""

    def dump(self, instance: str, *, stopping: StopRequest, under: str, emit: Sink) -> DumpResult:
        """Take a snapshot of an instance, and end it if ``stopping`` asks for it. It is not
        committed once the session ``under`` has ended.
        """

    def restore(self, snapshot: str, name: str, *, emit: Sink) -> Restored:
        """Restore a snapshot as the job of a name, with all its memory."""

    def forget(self, policy: Policy, job: str) -> None:
        """Forget what a policy does not keep of a job's snapshots."""
