"""The settings: sections, keys, types and defaults. `icecore.config.loading` reads them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import Field, dataclass, field, fields
from typing import Any, Literal, TypeVar

from icecore.config.kinds import (
    ADDRESS,
    COMMAND,
    COUNT,
    DIRECTORY,
    FILE,
    GROUP,
    KEEP,
    PLACE,
    PLACES,
    SECONDS,
    SHARE,
    SHARE_OR_AUTO,
    SIZE,
    SWITCH,
    TEXT,
    THREADS,
    URL,
    Kind,
    choice,
)

T = TypeVar("T")

#: Prefix of the environment variables that override keys: ICECORE_<SECTION>_<KEY>, or ICECORE_<KEY>
#: for top-level keys.
PREFIX = "ICECORE_"


def _setting(default: T, kind: Kind[T]) -> T:
    made: T = field(default=default, metadata={"kind": kind})
    return made


@dataclass(frozen=True)
class DumpSettings:
    """[dump]: defaults of ``icecore dump``, explained in `icecore.dumper.options.DumpOptions`."""

    max_window: float = _setting(30.0, SECONDS)
    pre_copy: Literal["auto", "on", "off"] = _setting("auto", choice("auto", "on", "off"))
    memory: Literal["in-place", "streamed"] = _setting("in-place", choice("in-place", "streamed"))
    staging_bytes: int = _setting(2 << 30, SIZE)
    scan_threads: int = _setting(0, THREADS)
    encoders: int = _setting(0, THREADS)
    background_cpu: float = _setting(0.0, SHARE_OR_AUTO)
    files: Literal["content", "check"] = _setting("content", choice("content", "check"))
    with_files: bool = _setting(False, SWITCH)
    verify_files: bool = _setting(False, SWITCH)
    file_budget: int = _setting(4 << 30, SIZE)
    data_budget: int = _setting(1 << 30, SIZE)
    ghost_limit: int = _setting(1 << 30, SIZE)
    connections: Literal["keep", "close"] = _setting("keep", choice("keep", "close"))
    link_rate: int = _setting(0, SIZE)
    workdir: str = _setting("/dev/shm", DIRECTORY)
    gpu_lock: float = _setting(10.0, SECONDS)
    gpu_shared: bool = _setting(False, SWITCH)
    populate: bool = _setting(True, SWITCH)
    criu_plugins: str = _setting("", DIRECTORY)
    before: str = _setting("", COMMAND)
    after: str = _setting("", COMMAND)
    hook_seconds: float = _setting(300.0, SECONDS)


@dataclass(frozen=True)
class RestoreSettings:
    """[restore]: defaults of ``icecore restore``, explained in
    `icecore.restorer.options.RestoreOptions`.

    ``after`` is a shell command that runs once the restored job runs; ``hook_seconds`` limits its
    run time.
    """

    mode: Literal["full", "lazy"] = _setting("full", choice("full", "lazy"))
    files: Literal["auto", "restore", "truncate", "leave"] = _setting(
        "auto", choice("auto", "restore", "truncate", "leave")
    )
    verify_files: bool = _setting(False, SWITCH)
    connections: Literal["keep", "close"] = _setting("keep", choice("keep", "close"))
    budget_bytes: int = _setting(0, SIZE)
    threads: int = _setting(0, THREADS)
    placers: int = _setting(0, THREADS)
    workdir: str = _setting("", DIRECTORY)
    criu_seconds: float = _setting(120.0, SECONDS)
    criu_plugins: str = _setting("", DIRECTORY)
    stall_seconds: float = _setting(60.0, SECONDS)
    attempts: int = _setting(4, COUNT)
    after: str = _setting("", COMMAND)
    hook_seconds: float = _setting(300.0, SECONDS)


@dataclass(frozen=True)
class RunSettings:
    """[run]: defaults of ``icecore run``: which namespaces a job shares with the host, whether a
    GPU job's device memory is resident, whether that outlives a crash, whether the job may use
    io_uring, which cannot be snapshotted, and the size limit of its logs (0: none).
    """

    pid: Literal["host", "private"] = _setting("private", choice("host", "private"))
    ipc: Literal["host", "private"] = _setting("private", choice("host", "private"))
    network: Literal["host", "private"] = _setting("host", choice("host", "private"))
    root: Literal["host", "private"] = _setting("host", choice("host", "private"))
    tmp: Literal["host", "private"] = _setting("host", choice("host", "private"))
    resident: bool = _setting(True, SWITCH)
    keep_resident: bool = _setting(False, SWITCH)
    io_uring: bool = _setting(False, SWITCH)
    log_limit: int = _setting(0, SIZE)


@dataclass(frozen=True)
class ScheduleSettings:
    """[schedule]: how ``icecore run`` looks after a job with ``--every auto``, and how it meets a
    notice. The meaning of each is in `icecore.service.supervision.plan.Plan`.
    """

    max_overhead: float = _setting(0.01, SHARE)
    max_loss: float = _setting(1800.0, SECONDS)
    failure_seconds: float = _setting(86400.0, SECONDS)
    slow_down: float = _setting(0.02, SHARE)
    notice: float = _setting(0.0, SECONDS)
    notice_command: str = _setting("", COMMAND)
    notice_url: str = _setting("", URL)
    requeue_command: str = _setting("", COMMAND)
    preempted_exit: int = _setting(85, COUNT)


@dataclass(frozen=True)
class ForgetSettings:
    """[forget]: the retention policy of ``icecore forget`` for each job, unless ``--keep-…`` options
    override it. 0 disables a rule; -1 ("all") removes its bound.
    """

    keep_last: int = _setting(0, KEEP)
    keep_hourly: int = _setting(0, KEEP)
    keep_daily: int = _setting(0, KEEP)
    keep_weekly: int = _setting(0, KEEP)
    keep_monthly: int = _setting(0, KEEP)
    keep_yearly: int = _setting(0, KEEP)
    keep_within: float = _setting(0.0, SECONDS)


@dataclass(frozen=True)
class GcSettings:
    """[gc]: settings of ``icecore gc``.

    ``fence_seconds`` is the silence after which a session counts as dead; its work is then void.
    """

    fence_seconds: float = _setting(1800.0, SECONDS)


@dataclass(frozen=True)
class S3Settings:
    """[s3]: access to buckets. boto3 resolves empty settings from the environment, ~/.aws and the
    machine's role.

    Attributes:
        endpoint, region, profile, addressing: See `icecore.store.backend.s3.S3Place`.
        requests: Maximum number of concurrent requests.
        budget_bytes: Maximum bytes of concurrent requests.
        patience: Seconds without a response after which a request fails.
        attempts: How often a request is sent before its failure is final.
    """

    endpoint: str = _setting("", TEXT)
    region: str = _setting("", TEXT)
    profile: str = _setting("", TEXT)
    addressing: Literal["auto", "path", "virtual"] = _setting(
        "auto", choice("auto", "path", "virtual")
    )
    requests: int = _setting(64, COUNT)
    budget_bytes: int = _setting(512 << 20, SIZE)
    patience: float = _setting(60.0, SECONDS)
    attempts: int = _setting(10, COUNT)


@dataclass(frozen=True)
class CacheSettings:
    """[cache]: a local cache of what was read from buckets, in ``directory``, of at most ``bytes``
    bytes. Without a directory there is no cache.
    """

    directory: str = _setting("", DIRECTORY)
    bytes: int = _setting(20 << 30, SIZE)


@dataclass(frozen=True)
class ServiceSettings:
    """[service]: the node service, ``icecore serve``.

    Attributes:
        socket: Its unix socket; clients use it where it exists.
        admin_group: Members of this group see and touch the jobs of all users, as root does.
        others: What other users may do with their own jobs.
        repository: Where the snapshots of a user's jobs are; ``{user}`` and ``{uid}`` are replaced.
            Empty: in the repository of all.
        listen: ``HOST:PORT`` for clients with tokens; empty: only the socket.
        certificate, key: PEM files for TLS.
        plain_loopback: Listen without TLS, on a loopback address only.
        connections: Maximum number of connections.
        requests: Requests a second of one caller in the long run.
        operations: Maximum number of operations at a time, besides supervised jobs.
        operations_per_user: The same for one user.
        supervised_per_user: Maximum number of supervised jobs of one user.
        audit_bytes: Size at which each file of the audit log is rotated.
    """

    socket: str = _setting("/run/icecore/service.sock", FILE)
    admin_group: str = _setting("", GROUP)
    others: Literal["operate", "read", "none"] = _setting(
        "operate", choice("operate", "read", "none")
    )
    repository: str = _setting("", PLACE)
    listen: str = _setting("", ADDRESS)
    certificate: str = _setting("", FILE)
    key: str = _setting("", FILE)
    plain_loopback: bool = _setting(False, SWITCH)
    connections: int = _setting(512, COUNT)
    requests: int = _setting(100, COUNT)
    operations: int = _setting(8, COUNT)
    operations_per_user: int = _setting(4, COUNT)
    supervised_per_user: int = _setting(64, COUNT)
    audit_bytes: int = _setting(16 << 20, SIZE)


@dataclass(frozen=True)
class Config:
    """All settings.

    Attributes:
        repository: The default repository; if empty, commands require ``--repository``.
        criu: The CRIU program; if empty, the one that tools/install-criu installed, else the one in
            PATH.
        replicas: Locations of the repository's replicas, nearest first.
        passphrase_file: A file that holds the passphrase of an encrypted repository.
        passphrase_command: A shell command that prints the passphrase.
        plain_places: Places whose repositories are plain on purpose, although a passphrase is
            configured.
        state: Directory for the jobs of this node and for the records of known repositories; if
            empty, /var/lib/icecore, or a directory below ~/.local/state for users other than root.
    """

    repository: str = _setting("", PLACE)
    replicas: tuple[str, ...] = _setting((), PLACES)
    passphrase_file: str = _setting("", FILE)
    passphrase_command: str = _setting("", COMMAND)
    plain_places: tuple[str, ...] = _setting((), PLACES)
    criu: str = _setting("", FILE)
    state: str = _setting("", DIRECTORY)
    dump: DumpSettings = DumpSettings()
    restore: RestoreSettings = RestoreSettings()
    run: RunSettings = RunSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    forget: ForgetSettings = ForgetSettings()
    gc: GcSettings = GcSettings()
    s3: S3Settings = S3Settings()
    cache: CacheSettings = CacheSettings()
    service: ServiceSettings = ServiceSettings()


def _kind(about: Field[Any]) -> Kind[Any] | None:
    kind = about.metadata.get("kind")
    return kind if isinstance(kind, Kind) else None


def every_setting(config: Config | None = None) -> Iterator[tuple[str, str, Kind[Any], Any]]:
    """Yield section ("" for top-level keys), key, type and value of every setting.

    Args:
        config: Default: the built-in defaults.
    """
    config = config or Config()
    for about in fields(config):
        value = getattr(config, about.name)
        kind = _kind(about)
        if kind is not None:
            yield "", about.name, kind, value
        else:
            for inner in fields(value):
                kind = _kind(inner)
                assert kind is not None
                yield about.name, inner.name, kind, getattr(value, inner.name)


def variable(section: str, key: str) -> str:
    """Return the environment variable that overrides a key."""
    return PREFIX + (f"{section}_{key}" if section else key).upper()
