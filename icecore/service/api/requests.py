"""The requests of the service's API (bodies and parameters), as msgspec structs; the OpenAPI document
is made from them.

Durations are in seconds.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

from icecore.config.kinds import LEAST_CPU_SHARE, check_cpu_share
from icecore.service.api.models import State

MaybeName = Annotated[str, msgspec.Meta(pattern=r"^([A-Za-z0-9][A-Za-z0-9._-]{0,62})?$")]
MaybeId = Annotated[str, msgspec.Meta(pattern=r"^([0-9a-f]{32})?$")]
Text = Annotated[str, msgspec.Meta(max_length=4096, pattern=r"^[^\x00]*$")]
Label = Annotated[str, msgspec.Meta(min_length=1, max_length=256, pattern=r"^[^\x00-\x1f\x7f]+$")]
Labels = Annotated[list[Label], msgspec.Meta(max_length=64)]
Seconds = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
Share = Annotated[float, msgspec.Meta(gt=0, le=1)]
#: 0 (auto), or at least `LEAST_CPU_SHARE`; msgspec has no such type, so requests check it.
CpuShare = Annotated[
    float,
    msgspec.Meta(
        ge=0,
        le=1,
        extra_json_schema={"anyOf": [{"const": 0}, {"minimum": LEAST_CPU_SHARE}]},
    ),
]
Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 31) - 1)]
Keep = Annotated[int, msgspec.Meta(ge=-1, le=(1 << 31) - 1)]
Id = Annotated[str, msgspec.Meta(pattern=r"^[0-9a-f]{32}$")]
#: The most bytes of a command and its environment (ARG_MAX, execve(2)).
ARGUMENT_BYTES = 2 << 20
Word = Annotated[str, msgspec.Meta(max_length=1 << 17, pattern=r"^[^\x00]*$")]
Variable = Annotated[str, msgspec.Meta(pattern=r"^[^=\x00]+$", max_length=1 << 12)]
Host = Literal["host", "private"]
Folder = Annotated[str, msgspec.Meta(pattern=r"^/[^\x00]*$", max_length=4096)]


class Request(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of the requests; an unknown field is an error."""


class ListQuery(Request, frozen=True, kw_only=True):
    """Parameters of lists."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 1000
    after: Annotated[str, msgspec.Meta(max_length=128)] = ""


class JobsQuery(ListQuery, frozen=True, kw_only=True):
    """Parameters of the list of jobs."""

    all: bool = False


class SnapshotsQuery(ListQuery, frozen=True, kw_only=True):
    """Parameters of the list of snapshots. ``user`` is for callers that see all."""

    job: Annotated[str, msgspec.Meta(max_length=256)] = ""
    tag: Annotated[str, msgspec.Meta(max_length=256)] = ""
    user: Annotated[str, msgspec.Meta(max_length=256)] = ""


class SnapshotQuery(Request, frozen=True, kw_only=True):
    """Parameters of routes to one snapshot. ``user`` is for callers that see all."""

    user: Annotated[str, msgspec.Meta(max_length=256)] = ""


class OperationsQuery(ListQuery, frozen=True, kw_only=True):
    """Parameters of the list of operations."""

    state: State | None = None


class LogsQuery(Request, frozen=True, kw_only=True):
    """Parameters of a job's logs. ``stdout`` and ``stderr`` are offsets in bytes.

    If output at an offset was removed (``log_limit`` of a job), the next line has ``removed``: the
    number of bytes skipped before ``data``. Offsets include them. A response with one stream does
    not show what was skipped; use ``both`` to continue from an offset later.
    """

    stream: Literal["both", "stdout", "stderr"] = "both"
    follow: bool = False
    stdout: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    stderr: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0


class EventsQuery(Request, frozen=True, kw_only=True):
    """Parameters of an operation's events. ``text`` includes the command's human-readable output."""

    after: Annotated[int, msgspec.Meta(ge=0, le=1 << 62)] = 0
    text: bool = False


class Nothing(Request, frozen=True, kw_only=True):
    """A request without fields."""


class Retention(Request, frozen=True, kw_only=True):
    """A retention policy; -1 keeps all snapshots."""

    keep_last: Keep = 0
    keep_hourly: Keep = 0
    keep_daily: Keep = 0
    keep_weekly: Keep = 0
    keep_monthly: Keep = 0
    keep_yearly: Keep = 0
    keep_within: Seconds = 0


class Supervise(Request, frozen=True, kw_only=True):
    """How a job is supervised: the options of ``icecore run`` with the same names.

    The commands run as root, so only administrators who are not restricted to a user or to some
    jobs may give them.
    """

    resume: bool = False
    or_start: bool = False
    fall_back: Count = 0
    every: Annotated[float, msgspec.Meta(gt=0, le=1e9)] | Literal["auto"] | None = None
    on_term: Literal["snapshot", "pass"] | None = None
    restarts: Annotated[int, msgspec.Meta(ge=-1, le=1 << 20)] = 0
    preempted_exit: Annotated[int, msgspec.Meta(ge=0, le=255)] | None = None
    notice: Seconds | None = None
    max_overhead: Share | None = None
    max_loss: Seconds | None = None
    keep: Retention | None = None
    requeue_command: Text | None = None
    notice_command: Text | None = None
    notice_url: Text | None = None
    background_cpu: CpuShare | None = None

    def __post_init__(self) -> None:
        """Refuse too small a share of the cores.

        Raises:
            ValueError: See `check_cpu_share`.
        """
        check_cpu_share(self.background_cpu or 0.0)


class RunRequest(Request, frozen=True, kw_only=True):
    """Start a command as a job of the caller.

    The job gets this environment and no other; with a token, also variables that name its user. Its
    user, groups, limits, scheduling and cgroup are the caller's (on the unix socket), or those of
    the token's user. ``umask``: default: the caller's. ``data``: directories of that user whose
    content is part of each snapshot. ``log_limit``: size limit of each log, in
    bytes; 0: none.
    """

    command: Annotated[list[Word], msgspec.Meta(min_length=1, max_length=1 << 16)]
    cwd: Folder
    name: MaybeName = ""
    environment: Annotated[dict[Variable, Word], msgspec.Meta(max_length=1 << 14)] = {}
    umask: Annotated[int, msgspec.Meta(ge=0, le=0o777)] | None = None
    gpu: bool = False
    pid: Host | None = None
    ipc: Host | None = None
    network: Host | None = None
    root: Host | None = None
    tmp: Host | None = None
    resident: bool | None = None
    keep_resident: bool | None = None
    io_uring: bool | None = None
    log_limit: Annotated[int, msgspec.Meta(ge=0, lt=1 << 56)] | None = None
    data: Annotated[list[Folder], msgspec.Meta(max_length=64)] = []
    supervise: Supervise | None = None

    def __post_init__(self) -> None:
        """Refuse a command that no kernel starts.

        Raises:
            ValueError: Command and environment have more than `ARGUMENT_BYTES`.
        """
        size = sum(len(word.encode()) + 1 for word in self.command)
        size += sum(
            len(name.encode()) + len(value.encode()) + 2 for name, value in self.environment.items()
        )
        if size > ARGUMENT_BYTES:
            raise ValueError(
                f"command and environment have {size} bytes; at most {ARGUMENT_BYTES} can be started"
            )


class DumpRequest(Request, frozen=True, kw_only=True):
    """Take a snapshot of a job; the options of ``icecore dump`` with the same names."""

    stop: bool = False
    keep_resident: bool = False
    tags: Labels = []
    pinned: bool = False
    max_window: Seconds | None = None
    pre_copy: Literal["auto", "on", "off"] | None = None
    background_cpu: CpuShare | None = None
    memory: Literal["in-place", "streamed"] | None = None
    files: Literal["content", "check"] | None = None
    with_files: bool | None = None
    verify_files: bool | None = None
    connections: Literal["keep", "close"] | None = None
    gpu_shared: bool | None = None

    def __post_init__(self) -> None:
        """Refuse too small a share of the cores.

        Raises:
            ValueError: See `check_cpu_share`.
        """
        check_cpu_share(self.background_cpu or 0.0)


class RestoreRequest(Request, frozen=True, kw_only=True):
    """Restore a snapshot; the options of ``icecore restore`` with the same names."""

    dry_run: bool = False
    name: MaybeName = ""
    mode: Literal["full", "lazy"] | None = None
    files: Literal["auto", "restore", "truncate", "leave"] | None = None
    verify_files: bool | None = None
    connections: Literal["keep", "close"] | None = None
    from_resident: bool = False
    gpu_map: Annotated[dict[Label, Label], msgspec.Meta(max_length=64)] = {}


class ShowRequest(Request, frozen=True, kw_only=True):
    """Print what a snapshot contains."""

    all: bool = False


class DiffRequest(Request, frozen=True, kw_only=True):
    """Compare a snapshot with an older one; empty: with its parent."""

    older: MaybeId = ""
    all: bool = False


class MarkRequest(Request, frozen=True, kw_only=True):
    """Pin or tag a snapshot."""

    pin: bool | None = None
    add_tags: Labels = []
    remove_tags: Labels = []


class ForgetRequest(Request, frozen=True, kw_only=True):
    """Forget snapshots: the named ones, or those of one job that a policy does not keep."""

    dry_run: bool = True
    snapshots: Annotated[list[Id], msgspec.Meta(max_length=1000)] = []
    job: Annotated[str, msgspec.Meta(max_length=256)] = ""
    keep: Retention | None = None
    keep_tags: Labels = []


class SignalRequest(Request, frozen=True, kw_only=True):
    """Send a signal: a name without SIG, or a number."""

    signal: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9+]{1,16}$")] = "TERM"


class GcRequest(Request, frozen=True, kw_only=True):
    """Free the space of forgotten snapshots."""

    dry_run: bool = True
    fence: Seconds | None = None


class CheckRequest(Request, frozen=True, kw_only=True):
    """Verify the objects that snapshots need; ``read_data`` is the share of data to read."""

    read_data: Annotated[float, msgspec.Meta(ge=0, le=1)] = 0.0


class CancelRequest(Request, frozen=True, kw_only=True):
    """Cancel an operation: INT acts like Ctrl-C; TERM, HUP and USR1 are for supervised jobs."""

    signal: Literal["INT", "TERM", "HUP", "USR1"] = "INT"
