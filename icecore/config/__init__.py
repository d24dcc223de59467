"""The settings: sections, keys, types and defaults. `icecore.config.loading` reads them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

import msgspec

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

#: Prefix of the environment variables that override keys: ICECORE_<SECTION>_<KEY>, or ICECORE_<KEY>
#: for top-level keys.
PREFIX = "ICECORE_"


class DumpSettings(msgspec.Struct, frozen=True):
    """[dump]: defaults of ``icecore dump``, explained in `icecore.dumper.options.DumpOptions`."""

    max_window: Annotated[float, SECONDS] = 30.0
    pre_copy: Literal["auto", "on", "off"] = "auto"
    memory: Literal["in-place", "streamed"] = "in-place"
    staging_bytes: Annotated[int, SIZE] = 2 << 30
    scan_threads: Annotated[int, THREADS] = 0
    encoders: Annotated[int, THREADS] = 0
    background_cpu: Annotated[float, SHARE_OR_AUTO] = 0.0
    files: Literal["content", "check"] = "content"
    with_files: Annotated[bool, SWITCH] = False
    verify_files: Annotated[bool, SWITCH] = False
    file_budget: Annotated[int, SIZE] = 4 << 30
    data_budget: Annotated[int, SIZE] = 1 << 30
    ghost_limit: Annotated[int, SIZE] = 1 << 30
    connections: Literal["keep", "close"] = "keep"
    link_rate: Annotated[int, SIZE] = 0
    workdir: Annotated[str, DIRECTORY] = "/dev/shm"
    gpu_lock: Annotated[float, SECONDS] = 10.0
    gpu_shared: Annotated[bool, SWITCH] = False
    populate: Annotated[bool, SWITCH] = True
    criu_plugins: Annotated[str, DIRECTORY] = ""
    before: Annotated[str, COMMAND] = ""
    after: Annotated[str, COMMAND] = ""
    hook_seconds: Annotated[float, SECONDS] = 300.0


class RestoreSettings(msgspec.Struct, frozen=True):
    """[restore]: defaults of ``icecore restore``, explained in
    `icecore.restorer.options.RestoreOptions`.

    ``after`` is a shell command that runs once the restored job runs; ``hook_seconds`` limits its
    run time.
    """

    mode: Literal["full", "lazy"] = "full"
    files: Literal["auto", "restore", "truncate", "leave"] = "auto"
    verify_files: Annotated[bool, SWITCH] = False
    connections: Literal["keep", "close"] = "keep"
    budget_bytes: Annotated[int, SIZE] = 0
    threads: Annotated[int, THREADS] = 0
    placers: Annotated[int, THREADS] = 0
    workdir: Annotated[str, DIRECTORY] = ""
    criu_seconds: Annotated[float, SECONDS] = 120.0
    criu_plugins: Annotated[str, DIRECTORY] = ""
    stall_seconds: Annotated[float, SECONDS] = 60.0
    attempts: Annotated[int, COUNT] = 4
    after: Annotated[str, COMMAND] = ""
    hook_seconds: Annotated[float, SECONDS] = 300.0


class RunSettings(msgspec.Struct, frozen=True):
    """[run]: defaults of ``icecore run``: which namespaces a job shares with the host, whether a
    GPU job's device memory is resident, whether that outlives a crash, whether the job may use
    io_uring, which cannot be snapshotted, and the size limit of its logs (0: none).
    """

    pid: Literal["host", "private"] = "private"
    ipc: Literal["host", "private"] = "private"
    network: Literal["host", "private"] = "host"
    root: Literal["host", "private"] = "host"
    tmp: Literal["host", "private"] = "host"
    resident: Annotated[bool, SWITCH] = True
    keep_resident: Annotated[bool, SWITCH] = False
    io_uring: Annotated[bool, SWITCH] = False
    log_limit: Annotated[int, SIZE] = 0


class ScheduleSettings(msgspec.Struct, frozen=True):
    """[schedule]: how ``icecore run`` looks after a job with ``--every auto``, and how it meets a
    notice. The meaning of each is in `icecore.service.supervision.plan.Plan`.
    """

    max_overhead: Annotated[float, SHARE] = 0.01
    max_loss: Annotated[float, SECONDS] = 1800.0
    failure_seconds: Annotated[float, SECONDS] = 86400.0
    slow_down: Annotated[float, SHARE] = 0.02
    notice: Annotated[float, SECONDS] = 0.0
    notice_command: Annotated[str, COMMAND] = ""
    notice_url: Annotated[str, URL] = ""
    requeue_command: Annotated[str, COMMAND] = ""
    preempted_exit: Annotated[int, COUNT] = 85


class ForgetSettings(msgspec.Struct, frozen=True):
    """[forget]: the retention policy of ``icecore forget`` for each job, unless ``--keep-…`` options
    override it. 0 disables a rule; -1 ("all") removes its bound.
    """

    keep_last: Annotated[int, KEEP] = 0
    keep_hourly: Annotated[int, KEEP] = 0
    keep_daily: Annotated[int, KEEP] = 0
    keep_weekly: Annotated[int, KEEP] = 0
    keep_monthly: Annotated[int, KEEP] = 0
    keep_yearly: Annotated[int, KEEP] = 0
    keep_within: Annotated[float, SECONDS] = 0.0


class GcSettings(msgspec.Struct, frozen=True):
    """[gc]: settings of ``icecore gc``.

    ``fence_seconds`` is the silence after which a session counts as dead; its work is then void.
    """

    fence_seconds: Annotated[float, SECONDS] = 1800.0


class S3Settings(msgspec.Struct, frozen=True):
    """[s3]: access to buckets. boto3 resolves empty settings from the environment, ~/.aws and the
    machine's role.

    Attributes:
        endpoint, region, profile, addressing: See `icecore.store.backend.s3.S3Place`.
        requests: Maximum number of concurrent requests.
        budget_bytes: Maximum bytes of concurrent requests.
        patience: Seconds without a response after which a request fails.
        attempts: How often a request is sent before its failure is final.
    """

    endpoint: Annotated[str, TEXT] = ""
    region: Annotated[str, TEXT] = ""
    profile: Annotated[str, TEXT] = ""
    addressing: Literal["auto", "path", "virtual"] = "auto"
    requests: Annotated[int, COUNT] = 64
    budget_bytes: Annotated[int, SIZE] = 512 << 20
    patience: Annotated[float, SECONDS] = 60.0
    attempts: Annotated[int, COUNT] = 10


class CacheSettings(msgspec.Struct, frozen=True):
    """[cache]: a local cache of what was read from buckets, in ``directory``, of at most ``bytes``
    bytes. Without a directory there is no cache.
    """

    directory: Annotated[str, DIRECTORY] = ""
    bytes: Annotated[int, SIZE] = 20 << 30


class ServiceSettings(msgspec.Struct, frozen=True):
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

    socket: Annotated[str, FILE] = "/run/icecore/service.sock"
    admin_group: Annotated[str, GROUP] = ""
    others: Literal["operate", "read", "none"] = "operate"
    repository: Annotated[str, PLACE] = ""
    listen: Annotated[str, ADDRESS] = ""
    certificate: Annotated[str, FILE] = ""
    key: Annotated[str, FILE] = ""
    plain_loopback: Annotated[bool, SWITCH] = False
    connections: Annotated[int, COUNT] = 512
    requests: Annotated[int, COUNT] = 100
    operations: Annotated[int, COUNT] = 8
    operations_per_user: Annotated[int, COUNT] = 4
    supervised_per_user: Annotated[int, COUNT] = 64
    audit_bytes: Annotated[int, SIZE] = 16 << 20


class Config(msgspec.Struct, frozen=True):
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

    repository: Annotated[str, PLACE] = ""
    replicas: Annotated[tuple[str, ...], PLACES] = ()
    passphrase_file: Annotated[str, FILE] = ""
    passphrase_command: Annotated[str, COMMAND] = ""
    plain_places: Annotated[tuple[str, ...], PLACES] = ()
    criu: Annotated[str, FILE] = ""
    state: Annotated[str, DIRECTORY] = ""
    dump: DumpSettings = DumpSettings()
    restore: RestoreSettings = RestoreSettings()
    run: RunSettings = RunSettings()
    schedule: ScheduleSettings = ScheduleSettings()
    forget: ForgetSettings = ForgetSettings()
    gc: GcSettings = GcSettings()
    s3: S3Settings = S3Settings()
    cache: CacheSettings = CacheSettings()
    service: ServiceSettings = ServiceSettings()


@cache
def kinds_of(section: type[msgspec.Struct]) -> Mapping[str, Kind[Any]]:
    """Return the type of each setting of a section, from its annotation: Annotated or Literal."""
    found = {}
    for key, hint in get_type_hints(section, include_extras=True).items():
        if get_origin(hint) is Annotated:
            (found[key],) = hint.__metadata__
        elif get_origin(hint) is Literal:
            found[key] = choice(*get_args(hint))
    return found


def every_setting(config: Config | None = None) -> Iterator[tuple[str, str, Kind[Any], Any]]:
    """Yield section ("" for top-level keys), key, type and value of every setting.

    Args:
        config: Default: the built-in defaults.
    """
    config = config or Config()
    for key, kind in kinds_of(Config).items():
        yield "", key, kind, getattr(config, key)
    for name in Config.__struct_fields__:
        section = getattr(config, name)
        if isinstance(section, msgspec.Struct):
            for key, kind in kinds_of(type(section)).items():
                yield name, key, kind, getattr(section, key)


def variable(section: str, key: str) -> str:
    """Return the environment variable that overrides a key."""
    return PREFIX + (f"{section}_{key}" if section else key).upper()
