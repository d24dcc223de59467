"""What follows from readings: states, ages, intervals, drawings and charts."""

from __future__ import annotations

from typing import Any

from icecore.service.facts.jobs import jobs_of, usual_interval, windows_of
from icecore.service.facts.readings import NodeReading, Reading
from icecore.service.page.content import Course, bars_of, growth_of, with_record
from icecore.service.page.lineage import MOST, draw
from icecore.service.record import Measured, Taken
from icecore.store.format.state import SessionRecord, SnapshotRecord


def snapshot(number: int, at: float, parent: int = 0, **more: Any) -> SnapshotRecord:
    known = {"job": "train", "lineage": "l", "logical": 100, "changed": 10, "stored": 5, **more}
    return SnapshotRecord(
        snapshot=f"{number:032x}",
        parent=f"{parent:032x}" if parent else "",
        created_ns=round(at * 1e9),
        manifest="",
        manifest_length=0,
        manifest_digest=b"",
        **known,
    )


def lease(job: str) -> SessionRecord:
    return SessionRecord("0" * 32, 1, f"run {job}", "far:/var/lib/icecore", 0)


def test_a_job_of_another_node() -> None:
    records = [snapshot(n, 100.0 * n, n - 1, window_seconds=n / 10) for n in range(1, 6)]
    reading = Reading(0.0, 1, records, [lease("other"), lease("train 1000")])
    job, other = jobs_of(reading, NodeReading(), 620.0)
    assert {job.name, other.name} == {"train", "other"}
    job = job if job.name == "train" else other
    assert (job.state, job.host, job.interval, job.is_planned) == ("elsewhere", "far", 100.0, False)
    assert job.good_at == 500.0 and job.due == 600.0 and job.at_risk == 120.0
    assert job.windows.p50 == 0.3 and job.windows.p95 == 0.5
    assert job.overhead == 0.003
    ages = [job.freshness(at) for at in (520.0, 640.0, 701.0)]
    assert ages == ["fresh", "due", "late"]


def test_a_damaged_snapshot_is_no_good_one() -> None:
    records = [snapshot(1, 100.0), snapshot(2, 200.0, 1, quarantined="a shard")]
    (job,) = jobs_of(Reading(0.0, 1, records), NodeReading(), 300.0)
    assert job.good_at == 100.0 and job.quarantined == 1
    assert job.state == "stopped" and job.freshness(1e9) == "idle" and job.at_risk is None


def test_few_snapshots_have_no_usual_interval() -> None:
    assert usual_interval([snapshot(1, 1.0), snapshot(2, 9.0)]) == 0
    assert windows_of([]).count == 0


def test_a_branch_begins_a_row() -> None:
    records = [snapshot(1, 10.0), snapshot(2, 20.0, 1), snapshot(3, 30.0, 2), snapshot(4, 40.0, 2)]
    drawing = draw([*records, snapshot(5, 50.0, lineage="m")])
    rows = [node.y for node in drawing.nodes]
    assert rows[0] == rows[1] == rows[2] < rows[3] < rows[4]
    assert [node.x for node in drawing.nodes] == sorted(node.x for node in drawing.nodes)
    assert len(drawing.edges) == 3 and drawing.nodes[-1].is_newest
    many = draw([snapshot(n, float(n), n - 1) for n in range(1, MOST + 11)])
    assert len(many.nodes) == MOST and many.hidden == 10
    assert draw([]).nodes == [] and draw(records[:1]).ticks


def test_phases_fill_the_window() -> None:
    records = [snapshot(1, 10.0, window_seconds=1.0), snapshot(2, 20.0, 1, window_seconds=2.0)]
    phases = {"freeze": 1.5, "dump.gpu.checkpoint": 0.5, "dump.store": 9.0}
    taken = Taken(20.0, 2.0, 5.0, 1.0, 5, records[1].snapshot, phases)
    node = NodeReading([], {"train": Measured(taken=[taken])})
    (job,) = jobs_of(Reading(0.0, 1, records), node, 30.0)
    first, second = bars_of(job)
    assert sum(first.phases) == 1.0 and first.committing is None
    assert second.phases[:2] == (1.0, 0.5) and sum(second.phases) == 2.0
    assert second.stopping == 5.0


def test_growth_is_thinned_and_ends_with_the_newest() -> None:
    points = growth_of([snapshot(n, float(n)) for n in range(1, 1001)], most=100)
    assert len(points) <= 100 and points[-1].logical == 100_000 and points[-1].at == 1000.0


def test_the_course_of_an_operation() -> None:
    course = Course()

    def event(name: str, state: str, at: float, **more: Any) -> None:
        with_record(
            course, {"do": "event", "event": {"event": name, "state": state, "at": at, **more}}
        )

    event("dump.window", "begin", 1.0)
    event("dump.store", "begin", 1.5)
    event("dump.store", "progress", 1.6, bytes=5, total=10)
    event("dump.window", "end", 2.0, bytes=7)
    event("dump.store", "failed", 3.0)
    with_record(course, {"do": "error", "error": {"message": "no", "cure": "do", "reasons": []}})
    window, store = course.phases
    assert (window.ended, window.bytes, window.failed) == (2.0, 7, False)
    assert (store.ended, store.bytes, store.total, store.failed) == (3.0, 5, 10, True)
    assert course.lines == [("error", "no  do")]
