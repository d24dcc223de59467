"""The response to a scrape: the repository's jobs, this node's jobs and storage, and the counters.

Values about all jobs come from the repository, so every node exposes the same; the rules in
``configs/prometheus`` take the maximum over nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import msgspec
from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from icecore.service.facts.jobs import JobFacts
from icecore.service.facts.readings import Known, NodeReading, Reading, Replica, StagingRoom
from icecore.service.metrics import families as known
from icecore.service.metrics.families import FAMILIES, PREFIX, WINDOW_BUCKETS, Family
from icecore.service.metrics.tally import Totals
from icecore.store.maintenance.stats import Stats

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"
_STATES = ("starting", "running", "ended", "failed")


class Sample(msgspec.Struct, frozen=True):
    """All that a scrape shows."""

    version: str
    host: str
    reading: Known[Reading]
    node: NodeReading
    jobs: Sequence[JobFacts]
    totals: Totals
    staging: Sequence[StagingRoom] = ()
    staging_limit: int = 0
    stats: Known[Stats] = msgspec.field(default_factory=Known)
    replicas: Sequence[Replica] = ()
    operations: Mapping[tuple[str, str], int] = msgspec.field(default_factory=dict)
    gpus: int = 0


def exposition(sample: Sample) -> bytes:
    """Return the metrics in the text format of Prometheus."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(_Collector(sample))
    return generate_latest(registry)


class _Collector(Collector):
    def __init__(self, sample: Sample) -> None:
        self._sample = sample

    def collect(self) -> Iterator[Metric]:
        sample = self._sample
        info = InfoMetricFamily(f"{PREFIX}build", "icecore of this node.")
        info.add_metric((), {"version": sample.version, "host": sample.host})
        yield info
        yield from _jobs(sample.jobs)
        yield from _supervised(sample)
        yield from _repository(sample)
        yield from _replicas(sample.replicas)
        yield from _node(sample)
        for family in FAMILIES.values():
            yield _counted(family, sample.totals)


def _gauge(name: str, help: str, *labels: str) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", help, labels=labels)


def _single(name: str, help: str, value: float) -> GaugeMetricFamily:
    return GaugeMetricFamily(f"{PREFIX}{name}", help, value=value)


def _jobs(jobs: Sequence[JobFacts]) -> Iterator[Metric]:
    good = _gauge(
        "last_good_snapshot_timestamp_seconds",
        "Unix time of the job's newest snapshot that is whole.",
        "job",
    )
    runs = _gauge("job_running", "Whether the job runs, on whatever node.", "job")
    count = _gauge("job_snapshots", "Snapshots of the job in the repository.", "job")
    lost = _gauge("job_quarantined_snapshots", "Snapshots of the job that lost data.", "job")
    interval = _gauge(
        "snapshot_interval_seconds",
        "Time between snapshots: planned by the supervisor of this node, else the usual one.",
        "job",
    )
    window = _gauge("last_window_seconds", "Window of the job's newest good snapshot.", "job")
    sizes = _gauge(
        "last_snapshot_bytes",
        "Sizes of the job's newest good snapshot: logical, changed, stored, device.",
        "job",
        "kind",
    )
    for job in jobs[: known.MOST_JOBS]:
        name = (job.name,)
        runs.add_metric(name, job.runs)
        count.add_metric(name, len(job.snapshots))
        lost.add_metric(name, job.quarantined)
        if job.interval:
            interval.add_metric(name, job.interval)
        if job.good is None:
            continue
        good.add_metric(name, job.good_at)
        window.add_metric(name, job.good.window_seconds)
        for kind in ("logical", "changed", "stored", "device"):
            sizes.add_metric((job.name, kind), getattr(job.good, kind))
    yield from (good, runs, count, lost, interval, window, sizes)


def _supervised(sample: Sample) -> Iterator[Metric]:
    """Add the measurements of this node's supervisors; the counters of a job are in its record."""
    stop = _gauge("predicted_stop_seconds", "How long a stop with a snapshot takes.", "job")
    notice = _gauge("notice_seconds", "Time from a notice until the job must be gone.", "job")
    commit = _gauge(
        "commit_seconds", "Time from the window's end to the commit, on average.", "job"
    )
    due = _gauge("next_snapshot_timestamp_seconds", "Unix time of the next snapshot.", "job")
    failures = CounterMetricFamily(
        f"{PREFIX}job_failures", "How often the job failed under supervision.", labels=("job",)
    )
    ran = CounterMetricFamily(
        f"{PREFIX}job_run_seconds", "How long ended runs of the job took.", labels=("job",)
    )
    for job in sample.jobs[: known.MOST_JOBS]:
        name, measured = (job.name,), job.measured
        if job.name not in sample.node.measured:
            continue
        failures.add_metric(name, measured.failures)
        ran.add_metric(name, measured.ran_seconds)
        if measured.taken:
            commit.add_metric(name, measured.commit_seconds)
        if job.stop:
            stop.add_metric(name, job.stop)
        if job.notice:
            notice.add_metric(name, job.notice)
        if job.is_planned and job.due:
            due.add_metric(name, job.due)
    yield from (stop, notice, commit, due, failures, ran)


def _repository(sample: Sample) -> Iterator[Metric]:
    reading, stats = sample.reading, sample.stats
    up = reading.value is not None and not reading.error
    yield _single("repository_up", "Whether this node can read the repository.", up)
    yield _single(
        "repository_read_timestamp_seconds", "Unix time of the newest reading.", reading.at
    )
    if reading.value is not None:
        newest = reading.value
        yield _single("repository_snapshots", "Snapshots in the repository.", len(newest.snapshots))
        yield _single("repository_generation", "Generation of the log.", newest.generation)
        yield _single("repository_sessions", "Open sessions.", len(newest.sessions))
    sizes = _gauge(
        "repository_bytes",
        "Bytes by the newest count: logical (data in all snapshots), distinct (without duplicates),"
        " live (stored and needed), dead (stored and not needed).",
        "kind",
    )
    dedup = _gauge("dedup_ratio", "Bytes in all snapshots per distinct byte.")
    compression = _gauge("compression_ratio", "Distinct bytes per stored byte.")
    if stats.value is not None:
        found = stats.value
        for kind, value in (
            ("logical", found.logical),
            ("distinct", found.chunk_bytes),
            ("live", found.live),
            ("dead", found.dead),
        ):
            sizes.add_metric((kind,), value)
        dedup.add_metric((), found.dedup_ratio)
        compression.add_metric((), found.compression_ratio)
    yield from (sizes, dedup, compression)
    yield _single(
        "repository_counted_timestamp_seconds", "Unix time of the newest count.", stats.at
    )


def _replicas(replicas: Sequence[Replica]) -> Iterator[Metric]:
    up = _gauge("replica_up", "Whether this node can read the replica.", "replica")
    missing = _gauge("replica_missing_snapshots", "Snapshots that the replica lacks.", "replica")
    lag = _gauge("replica_lag_seconds", "Age of the oldest snapshot that it lacks.", "replica")
    for replica in replicas:
        place = (replica.place,)
        up.add_metric(place, replica.missing is not None)
        if replica.missing is not None:
            missing.add_metric(place, replica.missing)
            lag.add_metric(place, replica.lag_seconds)
    yield from (up, missing, lag)


def _node(sample: Sample) -> Iterator[Metric]:
    jobs = _gauge("node_instances", "Instances of jobs on this node.", "state")
    states = [state for _, state in sample.node.instances]
    for state in _STATES:
        jobs.add_metric((state,), states.count(state))
    yield jobs
    yield _single("node_gpus", "GPUs of this node.", sample.gpus)
    total = _gauge("staging_total_bytes", "Size of the file system for staging.", "directory")
    free = _gauge("staging_free_bytes", "Free bytes of the file system for staging.", "directory")
    for one in sample.staging:
        total.add_metric((one.directory,), one.total)
        free.add_metric((one.directory,), one.free)
    yield from (total, free)
    yield _single(
        "staging_limit_bytes",
        "Bytes that one dump may stage (dump.staging_bytes).",
        sample.staging_limit,
    )
    running = _gauge("operations_current", "Operations of the service.", "kind", "state")
    for (kind, state), count in sorted(sample.operations.items()):
        running.add_metric((kind, state), count)
    yield running


def _counted(family: Family, totals: Totals) -> Metric:
    name, values = f"{PREFIX}{family.name}", totals.of(family)
    if family.kind == "histogram":
        return _histogram(name, family, values)
    kind = CounterMetricFamily if family.kind == "counter" else GaugeMetricFamily
    metric: Metric = kind(name, family.help, labels=family.labels)
    assert isinstance(metric, CounterMetricFamily | GaugeMetricFamily)
    if not family.labels and family.kind == "counter":
        values = {(): 0.0, **values}
    for labels, value in sorted(values.items()):
        metric.add_metric(labels, value)
    return metric


def _histogram(name: str, family: Family, values: Mapping[tuple[str, ...], float]) -> Metric:
    metric = HistogramMetricFamily(name, family.help, labels=family.labels)
    bounds = [*(str(bound) for bound in WINDOW_BUCKETS), "+Inf"]
    for job in sorted({labels[0] for labels in values}):
        total, buckets = 0.0, []
        for bound in bounds:
            total += values.get((job, bound), 0.0)
            buckets.append((bound, total))
        metric.add_metric((job,), buckets, sum_value=values.get((job, "sum"), 0.0))
    return metric
