"""The cumulative metrics: their names, labels and help. Pure.

The number of labels is bounded: phases, codecs, operations and error classes are names in the code,
and at most `MOST_JOBS` jobs of a node have their own label.
"""

from __future__ import annotations

from typing import Literal

import msgspec

#: Jobs of a node that get a label of their own; further ones are counted as `OTHER_JOBS`.
MOST_JOBS = 500
#: It begins with a dash, as no job's name does.
OTHER_JOBS = "-other"
PREFIX = "icecore_"
#: Upper bounds of the buckets of a window, in seconds.
WINDOW_BUCKETS = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 30.0, 60.0)


class Family(msgspec.Struct, frozen=True):
    """One metric.

    Attributes:
        name: Without the prefix of all names and without ``_total``.
        labels: Names of its labels.
        help: What it counts, in one sentence.
        kind: A histogram has `WINDOW_BUCKETS`.
    """

    name: str
    labels: tuple[str, ...]
    help: str
    kind: Literal["counter", "histogram", "gauge"] = "counter"


WINDOW = Family(
    "window_seconds",
    ("job",),
    "How long the job stood still for a snapshot.",
    "histogram",
)
PHASE_SECONDS = Family("phase_seconds", ("phase",), "Time spent in a phase that ended.")
PHASE_BYTES = Family("phase_bytes", ("phase",), "Bytes that a phase scanned, stored or moved.")
PHASES = Family("phases", ("phase", "result"), "Phases that ended; result is end or failed.")
OPERATIONS = Family("operations", ("operation", "result"), "Operations; result is done or failed.")
OPERATION_SECONDS = Family("operation_seconds", ("operation",), "Time spent in operations.")
FAILURES = Family("failures", ("operation", "class"), "Operations that failed, by error class.")
DUMPED = Family(
    "dump_bytes",
    ("kind",),
    "Bytes of committed snapshots: logical (their data), changed (against the parent), stored (new"
    " in the repository), pre_copied (stored before the window).",
)
STORED = Family("stored_bytes", ("codec",), "New bytes in the repository, by codec.")
SPILLS = Family("staging_spills", (), "Dumps whose staging memory filled up in the window.")
FALLBACKS = Family("dump_fallbacks", (), "Dumps whose memory could not be read in place.")
REQUESTS = Family("store_requests", ("operation",), "Requests that were sent to buckets.")
REQUEST_FAILURES = Family(
    "store_request_failures", ("operation",), "Requests to buckets that failed."
)
REQUEST_BYTES = Family("store_request_bytes", ("operation",), "Bytes of requests to buckets.")
REQUEST_SECONDS = Family("store_request_seconds", ("operation",), "Time of requests to buckets.")
RETRIES = Family("store_retries", ("operation",), "Requests to buckets that were repeated.")
FAILOVERS = Family("store_failovers", (), "Reads that another replica had to serve.")
CACHE_BYTES = Family(
    "cache_bytes", ("result",), "Bytes read from the node cache (hit), or that it lacked (missed)."
)
SUPERVISION = Family(
    "supervision_events",
    ("event",),
    "Events of supervised jobs: resumed, snapshot, snapshot_failed, preempted, failed, paused, …",
)
GC_FREED = Family("gc_freed_bytes", (), "Bytes that garbage collections deleted.")
LAST_GC = Family(
    "last_gc_timestamp_seconds", (), "Unix time of this node's last garbage collection.", "gauge"
)
LAST_SYNC = Family(
    "last_sync_timestamp_seconds", (), "Unix time of this node's last replication.", "gauge"
)

FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        WINDOW,
        PHASE_SECONDS,
        PHASE_BYTES,
        PHASES,
        OPERATIONS,
        OPERATION_SECONDS,
        FAILURES,
        DUMPED,
        STORED,
        SPILLS,
        FALLBACKS,
        REQUESTS,
        REQUEST_FAILURES,
        REQUEST_BYTES,
        REQUEST_SECONDS,
        RETRIES,
        FAILOVERS,
        CACHE_BYTES,
        SUPERVISION,
        GC_FREED,
        LAST_GC,
        LAST_SYNC,
    )
}
