"""Derive facts about each job from the readings: its state, the age of its last good snapshot, the
time of the next, the cost of snapshots and the work at risk. Pure.
"""

from __future__ import annotations

import itertools
import signal
import statistics
from collections.abc import Iterable, Mapping, Sequence
from typing import Literal

import msgspec

from icecore.host.jobs.job import Job
from icecore.service.facts.readings import NodeReading, Reading
from icecore.service.record import Measured
from icecore.store.format.state import SessionRecord, SnapshotRecord
from icecore.store.log.lease import lease_of

#: Where it runs is known from the lease of its name, or from this node's registry.
State = Literal["running", "elsewhere", "starting", "ended", "failed", "stopped"]
Freshness = Literal["fresh", "due", "late", "new", "none", "idle"]

_STOPS = (signal.SIGKILL, signal.SIGTERM)
_NEWEST = 64
_GAPS = 8
_LEAST_GAPS = 2
#: In intervals: above the first a snapshot is due, above the second it is late.
DUE, LATE = 1.25, 2.0
#: A stop may take this share of the notice; the rest is a margin for what is not measured.
OF_NOTICE = 0.7


class Windows(msgspec.Struct, frozen=True):
    """How long a job stood still for its newest snapshots, in seconds."""

    count: int = 0
    p50: float = 0.0
    p95: float = 0.0
    longest: float = 0.0


class JobFacts(msgspec.Struct, frozen=True):
    """One job of the repository or of this node. Times are Unix times or durations in seconds.

    Attributes:
        host: Where it runs; empty: nowhere, or not known.
        here: Its newest instance on this node.
        snapshots: In commit order.
        good: The newest snapshot that is whole.
        interval: Between snapshots: planned, or the median of past ones; 0: not known.
        is_planned: Whether the interval is its supervisor's.
        due: When the next snapshot is due; 0: none is.
        windows: Of the newest snapshots of its newest lineage.
        overhead: Share of its time that snapshots cost; None: not known.
        at_risk: How much work is lost if it fails now; None: it does not run.
        stop, notice: How long a stop takes, and how much notice there is; 0: not known.
        measured: Of its supervisor on this node.
    """

    name: str
    state: State
    host: str = ""
    here: Job | None = None
    snapshots: Sequence[SnapshotRecord] = ()
    good: SnapshotRecord | None = None
    interval: float = 0.0
    is_planned: bool = False
    due: float = 0.0
    windows: Windows = Windows()
    overhead: float | None = None
    at_risk: float | None = None
    stop: float = 0.0
    notice: float = 0.0
    measured: Measured = msgspec.field(default_factory=Measured)

    @property
    def runs(self) -> bool:
        """Whether it runs on this node or elsewhere."""
        return self.state in ("running", "elsewhere", "starting")

    @property
    def good_at(self) -> float:
        """Unix time of the last good snapshot; 0: there is none."""
        return self.good.created_ns / 1e9 if self.good else 0.0

    @property
    def is_notice_short(self) -> bool:
        """Whether a stop takes more of the notice than is safe."""
        return bool(self.notice) and self.stop > OF_NOTICE * self.notice

    @property
    def quarantined(self) -> int:
        """How many of its snapshots lost data."""
        return sum(bool(record.quarantined) for record in self.snapshots)

    def freshness(self, now: float) -> Freshness:
        """Return how good the age of the last good snapshot is, against the interval."""
        if not self.runs:
            return "idle"
        if not self.good:
            return "new" if now <= self.due else "none"
        if not self.interval:
            return "fresh"
        intervals = (now - self.good_at) / self.interval
        return "fresh" if intervals <= DUE else "due" if intervals <= LATE else "late"


def jobs_of(reading: Reading, node: NodeReading, now: float) -> list[JobFacts]:
    """Return all jobs, running ones first."""
    snapshots: dict[str, list[SnapshotRecord]] = {}
    for record in reading.snapshots:
        snapshots.setdefault(record.job, []).append(record)
    here = newest_instances(node.instances)
    leases = {lease_of(one.purpose)[0]: one for one in reading.leases}
    names = {*snapshots, *here, *leases}
    found = [
        _job(name, snapshots.get(name, []), leases.get(name), here.get(name), node.measured, now)
        for name in names
    ]
    return sorted(found, key=lambda job: (not job.runs, job.name))


def newest_instances(instances: Iterable[tuple[Job, str]]) -> dict[str, tuple[Job, str]]:
    """Return the living instance of each job, else the newest."""
    found: dict[str, tuple[Job, str]] = {}
    for job, state in instances:
        before = found.get(job.name)
        if before is None or before[1] not in ("running", "starting") or state == "running":
            found[job.name] = (job, state)
    return found


def _job(
    name: str,
    snapshots: list[SnapshotRecord],
    lease: SessionRecord | None,
    here: tuple[Job, str] | None,
    every: Mapping[str, Measured],
    now: float,
) -> JobFacts:
    measured = every.get(name, Measured())
    state = _state(here, lease is not None)
    good = next((one for one in reversed(snapshots) if not one.quarantined), None)
    lineage = [one for one in snapshots if good is not None and one.lineage == good.lineage]
    local = state in ("running", "starting") and here is not None
    is_planned = local and measured.interval_seconds > 0
    interval = measured.interval_seconds if is_planned else usual_interval(lineage)
    runs = state in ("running", "starting", "elsewhere")
    good_at = good.created_ns / 1e9 if good else 0.0
    due = 0.0
    if runs and interval:
        due = measured.due if is_planned and measured.due else good_at + interval
    windows = windows_of(one.window_seconds for one in lineage)
    since = good_at or (here[0].description.created if here is not None else 0.0)
    return JobFacts(
        name=name,
        state=state,
        host=lease.host.partition(":")[0] if lease is not None else "",
        here=here[0] if here is not None else None,
        snapshots=snapshots,
        good=good,
        interval=interval,
        is_planned=is_planned,
        due=due,
        windows=windows,
        overhead=windows.p50 / interval if windows.count and interval else None,
        at_risk=max(0.0, now - since) if runs and since else None,
        stop=measured.stop_seconds if local else 0.0,
        notice=measured.notice_seconds if local else 0.0,
        measured=measured,
    )


def _state(here: tuple[Job, str] | None, leased: bool) -> State:
    state = here[1] if here is not None else ""
    if state == "running":
        return "running"
    if state == "starting":
        return "starting"
    if leased:
        return "elsewhere"
    if state == "failed" or (here is not None and _failed(here[0])):
        return "failed"
    return "ended" if state == "ended" else "stopped"


def _failed(job: Job) -> bool:
    """Return whether a job failed; a stop with a snapshot ends it with KILL."""
    status = job.status()
    if status is None:
        return False
    return bool(status.code) or status.signal not in (None, *_STOPS)


def usual_interval(snapshots: Sequence[SnapshotRecord]) -> float:
    """Return the median time between the newest snapshots of a lineage; 0: too few snapshots."""
    newest = [one.created_ns / 1e9 for one in snapshots[-1 - _GAPS :]]
    gaps = [after - before for before, after in itertools.pairwise(newest)]
    return max(0.0, statistics.median(gaps)) if len(gaps) >= _LEAST_GAPS else 0.0


def windows_of(seconds: Iterable[float]) -> Windows:
    """Return the distribution of the newest windows."""
    found = sorted(list(seconds)[-_NEWEST:])
    if not found:
        return Windows()
    return Windows(len(found), quantile(found, 0.5), quantile(found, 0.95), found[-1])


def quantile(ascending: Sequence[float], share: float) -> float:
    """Return a quantile of sorted values (nearest rank)."""
    return ascending[min(len(ascending) - 1, int(share * len(ascending)))]
