"""The answers of the service's API, as msgspec structs; the OpenAPI document is made from them.
`requests` has what clients send.

Times are Unix times or durations in seconds, sizes are in bytes.
"""

from __future__ import annotations

from typing import Any, Generic, Literal, TypeVar

import msgspec

T = TypeVar("T")

State = Literal["queued", "running", "succeeded", "failed", "cancelled"]
Kind = Literal[
    "run", "dump", "restore", "show", "diff", "mark", "forget", "gc", "check", "stats", "doctor"
]


class Model(msgspec.Struct, frozen=True, kw_only=True):
    """Base of the responses."""


class Items(Model, Generic[T], frozen=True, kw_only=True):
    """One page of a list. ``next`` continues it (parameter ``after``); empty: this is the last."""

    items: list[T]
    next: str = ""


class Reason(Model, frozen=True, kw_only=True):
    """One failed check."""

    name: str
    message: str
    cure: str = ""


class Error(Model, frozen=True, kw_only=True):
    """A problem (RFC 9457), with icecore's error class, exit status and cure.

    ``type`` is ``about:blank``, or ``urn:icecore:error:CLASS``; ``detail`` is the message.
    """

    type: str
    title: str
    status: int
    detail: str = ""
    error_class: str = ""
    exit_status: int = 1
    cure: str = ""
    reasons: list[Reason] = []


class Schedule(Model, frozen=True, kw_only=True):
    """The snapshot schedule of a supervised job."""

    snapshots: int = 0
    last_snapshot: float | None = None
    window_seconds: float = 0.0
    background_seconds: float = 0.0
    commit_seconds: float = 0.0
    stop_seconds: float = 0.0
    failures: int = 0
    ran_seconds: float = 0.0


JobState = Literal["starting", "running", "ended", "failed"]


class Job(Model, frozen=True, kw_only=True):
    """An instance of a job on this node.

    ``owner`` is the uid that it runs as, ``user`` the name; ``how`` describes how it ended;
    ``log_bytes`` are the sizes of its logs, including what was removed, ``log_limit`` is their
    limit (0: none); ``isolation`` its namespaces; ``data`` its data directories; ``operation`` is
    the operation that supervises it.
    """

    name: str
    instance: str
    owner: int
    user: str
    state: JobState
    pid: int
    created: float
    command: list[str]
    cwd: str
    isolation: dict[str, bool] = {}
    data: list[str] = []
    restored_from: str = ""
    snapshot: str = ""
    lineage: str = ""
    how: str = ""
    code: int | None = None
    signal: int | None = None
    exit_status: int | None = None
    kept_bytes: int = 0
    log_bytes: dict[str, int] = {}
    log_limit: int = 0
    operation: str = ""
    schedule: Schedule | None = None


class Snapshot(Model, frozen=True, kw_only=True):
    """A committed snapshot, as `icecore ls` lists it. ``owner`` is null if it is not recorded;
    ``data`` is the bytes of the files in its data directories.
    """

    snapshot: str
    job: str
    lineage: str
    parent: str
    created: float
    logical: int
    changed: int
    stored: int
    device: int
    data: int = 0
    window_seconds: float
    tags: list[str]
    pinned: bool
    quarantined: str
    owner: int | None = None


class SnapshotDetails(Model, frozen=True, kw_only=True):
    """What a snapshot contains: the records of ``icecore show --json``."""

    snapshot: Snapshot
    details: dict[str, Any]
    processes: list[dict[str, Any]]
    regions: list[dict[str, Any]]
    files: list[dict[str, Any]]
    data: list[dict[str, Any]] = []


class Operation(Model, frozen=True, kw_only=True):
    """Work in a separate process.

    ``caller`` requested it, ``owner`` is the uid of the job that it works on, ``attempt`` counts
    the processes that supervised the job; ``result`` is its last result (the fields of that event).
    ``exit_status`` and ``error`` are those of the command line.
    """

    id: str
    kind: Kind
    state: State
    caller: str
    owner: int
    job: str = ""
    snapshot: str = ""
    created: float
    started: float | None = None
    ended: float | None = None
    supervised: bool = False
    attempt: int = 1
    exit_status: int | None = None
    error: Error | None = None
    result: dict[str, Any] = {}


class Group(Model, frozen=True, kw_only=True):
    """Sizes of one job or lineage."""

    name: str
    snapshots: int
    logical: int
    reached: int
    own: int


class Codec(Model, frozen=True, kw_only=True):
    """Sizes by codec."""

    codec: str
    chunks: int
    stored: int
    logical: int


class Repository(Model, frozen=True, kw_only=True):
    """A repository and its statistics."""

    location: str
    id: str
    encrypted: bool
    snapshots: int
    quarantined: int
    logical: int
    chunks: int
    chunk_bytes: int
    live: int
    dead: int
    dedup_ratio: float
    compression_ratio: float
    objects: dict[str, int]
    object_bytes: dict[str, int]
    jobs: list[Group]
    lineages: list[Group]
    codecs: list[Codec]


class Finding(Model, frozen=True, kw_only=True):
    """One finding of ``icecore doctor``."""

    name: str
    state: Literal["good", "warning", "bad"]
    message: str
    cure: str = ""


class Staging(Model, frozen=True, kw_only=True):
    """A file system for the staging of dumps and restores."""

    directory: str
    total_bytes: int
    free_bytes: int


class Node(Model, frozen=True, kw_only=True):
    """This node and its service."""

    host: str
    version: str
    started: float
    jobs_running: int
    operations: dict[str, int]
    staging: list[Staging]


class Self(Model, frozen=True, kw_only=True):
    """The caller, as the service knows it."""

    name: str
    kind: Literal["socket", "token"]
    role: str
    uid: int | None
    jobs: list[str]
    repository: str


class Health(Model, frozen=True, kw_only=True):
    """The state of the service."""

    status: Literal["ok", "stopping"]
