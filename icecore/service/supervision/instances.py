"""The instances of a supervised job: taken over, restored or started, and forgotten."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from typing import Protocol

from icecore.errors import (
    Damaged,
    HookFailed,
    IcecoreError,
    JobHeld,
    NameTaken,
    NotFound,
    ObjectMissing,
    RestoreFailed,
    RestoreRefused,
    ResumeFailed,
    UsageError,
)
from icecore.events import Sink, Value
from icecore.host.jobs.job import Job
from icecore.host.jobs.logs import Stream
from icecore.restorer.restored import Restored
from icecore.service.record import Record
from icecore.service.supervision.plan import Engine, Plan
from icecore.service.supervision.watchdog import end, lives, resume_all
from icecore.store.format.state import SnapshotRecord

#: Ended instances of the job that are remembered.
_REMEMBERED = 8
#: Errors after which an older snapshot may still be restored.
_NOT_THIS_ONE = (RestoreRefused, RestoreFailed, Damaged, ObjectMissing, NotFound, UsageError)

#: A running instance, and how many bytes of each of its streams were shown already.
Begun = tuple[Job, Mapping[Stream, int]]


class Tell(Protocol):
    """Emits an event about the job."""

    def __call__(self, name: str, **fields: Value) -> None:
        """Emit the event ``name``."""


class Instances:
    """Finds, restores and starts instances of one job.

    Attributes:
        created: When the snapshots that were found were taken, in Unix time, by id.
    """

    def __init__(self, plan: Plan, engine: Engine, record: Record, tell: Tell, emit: Sink) -> None:
        self._plan = plan
        self._engine = engine
        self._record = record
        self._tell = tell
        self._emit = emit
        self.created: dict[str, float] = {}

    def first(self) -> Begun:
        """Take over the job if it runs, else restore it, else start it.

        Raises:
            ResumeFailed: It has snapshots, and none can be restored.
        """
        with suppress(NotFound):
            job = self._engine.find(self._plan.name)
            if job.state == "running" and job.name == self._plan.name:
                self._tell("run.adopted", instance=job.instance, pid=job.pid)
                self._tell_ignored(job)
                shown = self._record.shown(job.instance)
                return job, job.log_sizes() if shown is None else shown
        self._end_rest()
        try:
            candidates = self.candidates(self._plan.lineage) if self._plan.resume else []
            if not candidates:
                return self.start()
            return self.restore(candidates[: 1 + self._plan.fall_back])
        except ResumeFailed:
            if not self._plan.or_start:
                raise
            return self.start()

    def _end_rest(self) -> None:
        """End the processes of an instance whose init has ended: the job must not run twice.

        Raises:
            JobHeld: They do not end.
        """
        left = self.newest()
        if left is None or left.state not in ("ended", "failed") or not lives(left):
            return
        end(left)
        if lives(left):
            raise JobHeld(
                f"processes of job {left.name} (instance {left.instance}) cannot be killed",
                cure=f"see the processes in {left.group}",
            )

    def start(self) -> Begun:
        """Start the job anew."""
        return self._plan.start(), {}

    def candidates(self, lineage: str = "") -> list[SnapshotRecord]:
        """Return the intact snapshots of a lineage, newest first. Empty: of this name's newest.

        Raises:
            ResumeFailed: There are snapshots, and `repair` found all of them to be incomplete.
        """
        found = self._engine.snapshots(self._plan.name)[::-1]
        lineage = lineage or (found[0].lineage if found else "")
        own = [one for one in found if one.lineage == lineage]
        self.created.clear()  # of those that were forgotten
        self.created.update((one.snapshot, one.created_ns / 1e9) for one in own)
        whole = [one for one in own if not one.quarantined]
        if own and not whole:
            raise ResumeFailed(
                f"all {len(own)} snapshots of job {self._plan.name} are in quarantine",
                cure="'icecore ls' says what they have lost; --or-start starts the job anew",
            )
        return whole

    def restore(self, candidates: list[SnapshotRecord]) -> Begun:
        """Bring the job back from the first of some snapshots that can be restored.

        Raises:
            ResumeFailed: None can.
            NameTaken: Another job has the name.
        """
        last: IcecoreError | None = None
        for record in candidates:
            try:
                restored = self._restored(record)
            except NameTaken:
                raise
            except _NOT_THIS_ONE as error:
                last = error
                self._tell("run.resume_failed", snapshot=record.snapshot, error=str(error))
                continue
            job = restored.job
            if job is None:
                raise ResumeFailed(
                    f"snapshot {record.snapshot[:12]} is of a job that 'icecore run' did not start",
                    cure="restore it without supervision: icecore restore",
                )
            resume_all(job)  # it may have been paused when it was taken
            self._tell_resumed(job, record)
            return job, restored.log_sizes
        raise ResumeFailed(
            f"none of {len(candidates)} snapshots of job {self._plan.name} can be restored: {last}",
            cure=f"'icecore restore -n {self._plan.name}' says what stands in the way;"
            " --fall-back N tries older ones, --or-start starts it anew",
        )

    def _restored(self, record: SnapshotRecord) -> Restored:
        """Restore a snapshot. If only the hook after it fails, report that."""
        try:
            return self._engine.restore(record.snapshot, self._plan.name, emit=self._emit)
        except HookFailed as error:
            self._tell("run.resume_failed", snapshot=record.snapshot, error=str(error))
            restored: Restored = error.result
            return restored

    def _tell_resumed(self, job: Job, record: SnapshotRecord) -> None:
        self._tell("run.resumed", instance=job.instance, pid=job.pid, snapshot=record.snapshot)
        self._tell_ignored(job)

    def _tell_ignored(self, job: Job) -> None:
        """Report the requested data directories and log limit that the job was not started with."""
        has = job.description.data
        ignored = [path for path in self._plan.data if os.path.realpath(path) not in has]
        if ignored:
            self._tell("run.data_ignored", instance=job.instance, paths=list[Value](ignored))
        limit = job.description.log_limit
        if self._plan.log_limit not in (None, limit):
            self._tell("run.log_limit_ignored", instance=job.instance, log_limit=limit)

    def newest(self) -> Job | None:
        """Return the newest instance of this name, if there is one."""
        with suppress(IcecoreError):
            job = self._engine.find(self._plan.name)
            return job if job.name == self._plan.name else None
        return None

    def tidy(self) -> None:
        """Forget the oldest ended instances of this name."""
        registry = self._engine.registry
        with suppress(IcecoreError, OSError):
            own = [
                one
                for one in registry.instances()
                if one.name == self._plan.name and not one.alive and self._engine.owns(one)
            ]
            for job in own[:-_REMEMBERED]:
                with suppress(IcecoreError):
                    registry.remove(job)


def lineage_of(job: Job) -> str:
    """Return the lineage of an instance; empty: it was never snapshotted."""
    with suppress(IcecoreError):
        return Job.load(job.directory).description.lineage
    return ""
