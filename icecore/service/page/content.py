"""Content of the views: only the jobs, snapshots and operations that the caller may access."""

from __future__ import annotations

import itertools
import time
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import msgspec
from msgspec.structs import replace

from icecore.errors import IcecoreError, NotFound
from icecore.service import record
from icecore.service.api.caller import Caller
from icecore.service.api.journal import Reader
from icecore.service.api.service import Service, Where
from icecore.service.facts.jobs import JobFacts, jobs_of
from icecore.service.facts.readings import NodeReading, Reading
from icecore.service.record import Taken
from icecore.store.format.state import SessionRecord, SnapshotRecord
from icecore.store.log.lease import lease_of

#: Phases within the window, in the order in which charts stack them; the rest of the window is
#: "other".
WINDOW_PHASES = (
    ("freeze", "CRIU"),
    ("dump.gpu.checkpoint", "device memory out"),
    ("dump.gpu.restore", "device memory back"),
    ("dump.resident.unmap", "resident: unmap"),
    ("dump.resident.map", "resident: map"),
)
#: Snapshots in a chart.
CHARTED = 120


class Content(msgspec.Struct, frozen=True):
    """What a caller sees of its repository and of this node.

    Attributes:
        error: Why the repository cannot be read; then only this node's jobs are known.
    """

    where: Where
    reading: Reading
    node: NodeReading
    jobs: list[JobFacts]
    at: float
    error: str = ""

    def job(self, name: str) -> JobFacts:
        """Return a job.

        Raises:
            NotFound: The caller may see no job of this name.
        """
        found = next((job for job in self.jobs if job.name == name), None)
        if found is None:
            raise NotFound(f"there is no job {name}")
        return found


def content_for(service: Service, caller: Caller) -> Content:
    """Return what a caller may see; blocks."""
    where = service.where(caller)
    error = ""
    try:
        reading = visible(service, caller, where)
    except IcecoreError as failure:
        reading, error = Reading(0.0), f"{failure.message}. {failure.cure}".rstrip(". ") + "."
    node = node_of(service, caller)
    now = time.time()
    own = {job.name for job, _ in node.instances} | {one.job for one in reading.snapshots}
    leases = [one for one in reading.leases if _is_of(caller, own, one)]
    reading = replace(reading, leases=leases)
    return Content(where, reading, node, jobs_of(reading, node, now), now, error)


def _is_of(caller: Caller, own: Collection[str], lease: SessionRecord) -> bool:
    """Return whether a caller may see a lease: of its jobs, by itself or an administrator."""
    name, user = lease_of(lease.purpose)
    return caller.whole_node or (name in own and (caller.sees_all or user in ("", str(caller.uid))))


def visible(service: Service, caller: Caller, where: Where) -> Reading:
    """Return the lists of a repository, with the snapshots that a caller may see.

    Raises:
        IcecoreError: The repository cannot be read.
    """
    reading = service.backing.reading(where)
    if caller.whole_node:
        return reading
    allowed = {one.snapshot for one in service.snapshots(caller, where)}
    snapshots = [one for one in reading.snapshots if one.snapshot in allowed]
    return replace(reading, snapshots=snapshots, sessions=[])


def node_of(service: Service, caller: Caller) -> NodeReading:
    """Return the jobs of this node that a caller may see."""
    instances: list[tuple[Any, str]] = [(job, job.state) for job in service.jobs(caller)]
    names = {job.name for job, _ in instances}
    state = service.registry.state
    return NodeReading(instances, {name: record.read(state, name) for name in sorted(names)})


# -- snapshots over time


class Bar(msgspec.Struct, frozen=True):
    """A snapshot in the charts. Times in seconds, sizes in bytes.

    Attributes:
        phases: Seconds of `WINDOW_PHASES`, and of the rest of the window.
        committing, stopping: None: not measured on this node.
    """

    record: SnapshotRecord
    at: float
    phases: tuple[float, ...]
    committing: float | None
    stopping: float | None


def bars_of(job: JobFacts) -> list[Bar]:
    """Return the newest snapshots of a job's newest lineage, oldest first."""
    newest = job.snapshots[-1] if job.snapshots else None
    lineage = [one for one in job.snapshots if newest and one.lineage == newest.lineage]
    measured = {one.snapshot: one for one in job.measured.taken}
    return [_bar(one, measured.get(one.snapshot)) for one in lineage[-CHARTED:]]


def _bar(snapshot: SnapshotRecord, taken: Taken | None) -> Bar:
    known = taken.phases if taken is not None else {}
    window = snapshot.window_seconds
    phases = [min(known.get(name, 0.0), window) for name, _ in WINDOW_PHASES]
    # CRIU works while the driver moves memory: its share is the remaining time.
    if phases[0]:
        phases[0] = max(0.0, phases[0] - sum(phases[1:]))
    rest = max(0.0, window - sum(phases))
    return Bar(
        snapshot,
        snapshot.created_ns / 1e9,
        (*phases, rest),
        taken.committing if taken is not None else None,
        taken.seconds if taken is not None else None,
    )


class Growth(msgspec.Struct, frozen=True):
    """A repository after a snapshot: bytes of all snapshots so far."""

    at: float
    logical: int
    changed: int
    stored: int


def growth_of(snapshots: Sequence[SnapshotRecord], most: int = 240) -> list[Growth]:
    """Return how a repository grew, with a bounded number of points."""
    logical = changed = stored = 0
    points = []
    for one in sorted(snapshots, key=lambda snapshot: snapshot.created_ns):
        logical += one.logical
        changed += one.changed
        stored += one.stored
        points.append(Growth(one.created_ns / 1e9, logical, changed, stored))
    step = max(1, -(-len(points) // most))
    return points[::-1][::step][::-1]


# -- operations


class Phase(msgspec.Struct):
    """A phase of an operation; ``ended`` is None while it runs."""

    name: str
    began: float
    ended: float | None = None
    bytes: int = 0
    total: int = 0
    failed: bool = False


class Course(msgspec.Struct):
    """The progress of an operation.

    Attributes:
        lines: Its log: the kind of each line (line, note, error, event), and its text.
        tables: The tables that it printed.
        findings: The findings of ``doctor``.
        last: The offset of its last record.
    """

    phases: list[Phase] = msgspec.field(default_factory=list)
    lines: list[tuple[str, str]] = msgspec.field(default_factory=list)
    tables: list[dict[str, Any]] = msgspec.field(default_factory=list)
    findings: list[dict[str, Any]] = msgspec.field(default_factory=list)
    last: int = 0


_MOST_LINES = 400
_MOST_PHASES = 60
#: Events that say more than their phases do.
_TOLD = (
    "run.",
    "dump.warning",
    "dump.fallback",
    "restore.warning",
    "store.retry",
    "store.failover",
)


def course_of(reader: Reader, course: Course) -> Course:
    """Read all that is new of an operation's records into its course."""
    while records := list(reader.read()):  # at most some MiB at a time
        for offset, line in records:
            course.last = offset
            with_record(course, msgspec.json.decode(line))
    return course


def with_record(course: Course, told: dict[str, Any]) -> None:
    """Add a record to a course."""
    match told.get("do"):
        case "line" | "note":
            course.lines.append((told["do"], told["text"]))
        case "result" if told["event"]["event"] == "doctor.finding":
            course.findings.append(told["event"])
        case "result" if told.get("text"):
            course.lines.append(("line", told["text"]))
        case "error":
            error = told["error"]
            course.lines.append(("error", f"{error['message']}  {error['cure']}".strip()))
            for reason in error.get("reasons", []):
                course.lines.append(("error", f"{reason['name']}: {reason['message']}"))
        case "table":
            course.tables.append(told)
        case "event":
            _event(course, told["event"])
    del course.lines[:-_MOST_LINES]
    del course.phases[:-_MOST_PHASES]


def _event(course: Course, event: dict[str, Any]) -> None:
    name, state, at = event["event"], event.get("state"), event["at"]
    if state == "begin":
        course.phases.append(Phase(name, at))
        return
    if state in ("progress", "end", "failed"):
        phase = next((one for one in reversed(course.phases) if one.name == name), None)
        if phase is None:
            return
        phase.bytes = event.get("bytes") or phase.bytes
        phase.total = event.get("total") or phase.total
        if state != "progress":
            phase.ended, phase.failed = at, state == "failed"
    elif name.startswith(_TOLD):
        shown = ", ".join(
            f"{key} {value}" for key, value in event.items() if key not in ("event", "at", "job")
        )
        course.lines.append(
            ("event", f"{time.strftime('%H:%M:%S', time.localtime(at))} {name} {shown}")
        )


# -- the audit log


def audit_of(service: Service, most: int) -> Iterator[dict[str, Any]]:
    """Yield the newest entries of the audit log, newest first."""
    yield from itertools.islice(service.audit.newest_first(), most)
