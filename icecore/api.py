"""The public functions that act on running jobs: run, dump, restore, check_restore.

The command line calls the same functions.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import msgspec

from icecore.access import passphrase
from icecore.access.places import state_directory
from icecore.config import Config
from icecore.config.loading import load
from icecore.environment import job_environment
from icecore.errors import HookFailed, MissingTool, NotFound, UsageError
from icecore.events import Event, Sink, discard
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry, require_name
from icecore.host.kernel import procfs
from icecore.service.metrics.tally import counted
from icecore.text import harmless

if TYPE_CHECKING:
    from icecore.dumper.dump import DumpResult
    from icecore.dumper.options import DumpOptions
    from icecore.dumper.stopping import StopRequest
    from icecore.host.criu.program import Criu
    from icecore.host.jobs.identity import Identity
    from icecore.repository import Repository
    from icecore.restorer.options import RestoreOptions
    from icecore.restorer.requirements.outcome import Requirements
    from icecore.restorer.restored import Restored
    from icecore.store.format.state import SnapshotRecord

Options = TypeVar("Options", "DumpOptions", "RestoreOptions")
#: A requested namespace; "" if none was requested.
Word = Literal["", "host", "private"]


def with_settings(options: Options, settings: msgspec.Struct) -> Options:
    """Return ``options`` with the values of all settings that have the same name."""
    known = {about.name for about in fields(options)}
    values: dict[str, Any] = msgspec.structs.asdict(settings)
    return replace(options, **{name: value for name, value in values.items() if name in known})


def dump_options(config: Config) -> DumpOptions:
    """Return the configured options of a dump."""
    from icecore.dumper.options import DumpOptions

    return with_settings(DumpOptions(), config.dump)


def restore_options(config: Config) -> RestoreOptions:
    """Return the configured options of a restore."""
    from icecore.restorer.options import RestoreOptions

    return with_settings(RestoreOptions(), config.restore)


def registry(config: Config) -> Registry:
    """Return the registry of this node's jobs."""
    return Registry(state_directory(config.state))


def criu_of(config: Config) -> Criu:
    """Return the configured CRIU.

    Raises:
        MissingTool: There is no such CRIU.
    """
    from icecore.host.criu.program import find_criu

    return find_criu(config.criu or None)


def run(
    command: Sequence[str],
    *,
    name: str = "",
    isolation: Isolation | None = None,
    cwd: str | os.PathLike[str] = "",
    environment: Mapping[str, str] | None = None,
    gpu: bool = False,
    resident: bool | None = None,
    keep_resident: bool | None = None,
    identity: Identity | None = None,
    data: Sequence[str | os.PathLike[str]] = (),
    io_uring: bool | None = None,
    log_limit: int | None = None,
    config: Config | None = None,
    emit: Sink = discard,
) -> Job:
    """Start a command as a job, which can be snapshotted, and restored anywhere and several times.

    The job outlives this process, has no terminal and no standard input, and writes to its own log
    files (`Job.logs`).

    Args:
        command: Program and arguments.
        name: The job's name. Empty: the program's name, with a number if that is taken.
        isolation: The job's namespaces. Default: the configured ones.
        cwd: The working directory. Empty: this process's.
        environment: The environment. Default: this process's, without credentials
            (`icecore.environment.CREDENTIALS`).
        gpu: The job uses NVIDIA GPUs. It gets what CUDA requires in a private pid namespace (unless
            ``isolation`` differs), and variables that make NCCL jobs snapshotable.
        resident: With ``gpu``: keep device memory in place in windows. Default: configured.
        keep_resident: With ``gpu``: if the job crashes after a snapshot, its device memory stays on
            its GPUs, for a restore with `RestoreOptions.from_resident`, until the instance is
            removed. Default: configured.
        identity: The user that the job runs as, with limits, cgroup and scheduling; only root can
            start jobs of others. ``environment`` is taken as it is: see `Identity.environment`.
            Default: this process's.
        data: Directories whose content is part of each snapshot, and comes back with a restore.
        io_uring: Let the job use io_uring; a job that uses it cannot be snapshotted. Default:
            configured.
        log_limit: Size limit of each log, in bytes; 0: none. Default: configured. The node service,
            supervisors and dumps enforce it; other programs call `Registry.trim_logs` now and then.
        config: Default: `icecore.config.loading.load`.
        emit: Gets the events.

    Raises:
        UsageError: The name is invalid or taken, the program is not executable, or
            ``keep_resident`` is set without ``resident``.
        NotFound: There is no such program or directory.
        MissingTool: The preload that ``keep_resident`` requires was not built.
    """
    config = config or load()
    environment = _environment(emit) if environment is None else environment
    own = config.run
    rings = own.io_uring if io_uring is None else io_uring
    limit = own.log_limit if log_limit is None else log_limit
    said = isolation
    isolation = isolation or Isolation(
        pid=own.pid == "private",
        ipc=own.ipc == "private",
        network=own.network == "private",
        root=own.root == "private",
        tmp=own.tmp == "private",
    )
    if gpu:
        pid, root = _word(said.pid if said else None), _word(said.root if said else None)
        return start_gpu(
            registry(config),
            command,
            isolation,
            name=name,
            cwd=cwd,
            environment=environment,
            pid=pid,
            root=root,
            resident=own.resident if resident is None else resident,
            keep_resident=own.keep_resident if keep_resident is None else keep_resident,
            must_keep=bool(keep_resident),
            identity=identity,
            data=data,
            io_uring=rings,
            log_limit=limit,
            emit=emit,
        )
    if keep_resident:
        raise UsageError(
            "only the device memory of GPU jobs can be kept",
            cure="add --gpu, or leave out --keep-resident",
        )
    return registry(config).start(
        command,
        name=name,
        isolation=isolation,
        cwd=cwd,
        environment=environment,
        identity=identity,
        data=data,
        io_uring=rings,
        log_limit=limit,
        emit=emit,
    )


def _environment(emit: Sink) -> dict[str, str]:
    """Return the part of this process's environment that a job inherits."""
    environment, held = job_environment(os.environ)
    if held:
        emit(Event("run.withheld", {"names": list(held)}))
    return environment


def _word(private: bool | None) -> Word:
    return "" if private is None else "private" if private else "host"


def start_gpu(
    jobs: Registry,
    command: Sequence[str],
    isolation: Isolation,
    *,
    name: str = "",
    cwd: str | os.PathLike[str] = "",
    environment: Mapping[str, str] | None = None,
    pid: Word = "",
    root: Word = "",
    resident: bool = True,
    keep_resident: bool = False,
    must_keep: bool = False,
    identity: Identity | None = None,
    data: Sequence[str | os.PathLike[str]] = (),
    io_uring: bool = False,
    log_limit: int = 0,
    emit: Sink = discard,
) -> Job:
    """Start a GPU job in ``jobs``; see `run` and `icecore.host.jobs.gpu.gpu_run`.

    Args:
        must_keep: The caller requested ``keep_resident``: if it is not available, the call fails.
            Without this, a configured ``keep_resident`` is dropped.
    """
    from icecore.host.gpu.backend import find_backend
    from icecore.host.jobs.gpu import gpu_run
    from icecore.host.resident.keeper import preload_path

    if must_keep and not resident:
        raise UsageError(
            "only resident memory can be kept",
            cure="leave out --keep-resident, or --no-resident; or add --resident",
        )
    variables = dict(_environment(emit) if environment is None else environment)
    missing: list[str] = []
    if resident:
        try:
            preload_path()
        except MissingTool as error:
            if must_keep:
                raise
            resident = False
            missing.append(f"{error.message} ({error.cure})")
    how = gpu_run(isolation, variables, pid=pid, root=root, resident=resident)
    driver = find_backend().present
    notes = [
        *how.notes,
        *missing,
        *([] if driver else ["this machine has no NVIDIA driver: the command will find no GPU"]),
    ]
    job = jobs.start(
        command,
        name=name,
        isolation=how.isolation,
        cwd=cwd,
        environment={**variables, **how.added},
        resident=resident,
        keep_resident=keep_resident and resident,
        identity=identity,
        data=data,
        io_uring=io_uring,
        log_limit=log_limit,
        emit=emit,
    )
    emit(
        Event(
            "run.gpu",
            {
                "job": job.name,
                "added": dict(how.added),
                "kept": dict(how.kept),
                "cost": how.cost,
                "root": how.isolation.root,
                "driver": driver,
                "resident": resident,
                "keep_resident": keep_resident and resident,
                "notes": notes,
            },
        )
    )
    return job


def dump(
    target: int | str,
    repository: Repository | str | os.PathLike[str] = "",
    options: DumpOptions | None = None,
    *,
    config: Config | None = None,
    stopping: StopRequest | None = None,
    emit: Sink = discard,
) -> DumpResult:
    """Take a snapshot of a running job or of any process tree. The job continues, unless
    ``options.stop`` is set.

    A snapshot contains everything that the job had in memory, including keys, tokens and random
    state.

    Args:
        target: The name of a job of this node, or the pid of a tree's root. A pid of any of a job's
            processes means the whole job.
        repository: The repository, open or as a location. Empty: the configured one.
        options: Default: the configured options.
        config: Default: `icecore.config.loading.load`.
        stopping: Can ask the dump to end the job, until the dump's window begins. A streamed dump
            ignores it.
        emit: Gets the events (docs/reference/events.md), from several threads.

    Returns:
        The snapshot's id, its sizes in bytes, and the length of the window in seconds.

    Raises:
        NotFound: There is no such job, process or repository.
        UsageError: ``options.job`` is not a valid name.
        PreflightRefused: The dump could lose or hang the job; nothing was stopped.
        WindowExceeded: The window would have exceeded ``options.max_window`` seconds; the job runs.
        DumpFailed: The snapshot was abandoned; the job runs.
        StoreError: The storage failed; the job runs.
        HookFailed: The snapshot is committed, but the hook after it failed.
    """
    from icecore.dumper.dump import dump as _dump
    from icecore.dumper.target import Target

    config = config or load()
    options = options or dump_options(config)
    if options.job:
        require_name(options.job)
    with ExitStack() as stack:
        emit = stack.enter_context(counted(state_directory(config.state), "dump", emit))
        opened = _opened(repository, config, emit, stack)
        job, root = find_target(registry(config), target)
        if job is None:
            aim = Target.of_process(root, options.job)
        else:
            parent = job.description.snapshot or job.description.restored_from
            status = str(job.status_path) if job.description.keep_resident else ""
            aim = Target(
                root, options.job or job.name, parent, job.record(), status, str(job.directory)
            )

        def note(done: DumpResult) -> None:
            if job is not None:
                with suppress(NotFound, FileNotFoundError):  # the job has been removed
                    job.with_snapshot(done.snapshot, done.lineage)

        return _dump(
            opened.core,
            opened.loop,
            aim,
            options,
            criu=criu_of(config),
            workdir=config.dump.workdir,
            committed=note,
            stopping=stopping,
            emit=emit,
        )


def restore(
    snapshot: str,
    repository: Repository | str | os.PathLike[str] = "",
    options: RestoreOptions | None = None,
    *,
    config: Config | None = None,
    emit: Sink = discard,
) -> Restored:
    """Restore a snapshot's process tree, once or several times, beside the original or on another
    machine.

    The restored job has the secrets and the random state of the snapshot: two instances of it draw
    the same random numbers.

    Args:
        snapshot: An id or the beginning of one, ``JOB``, ``JOB~1``, ``JOB@1`` or ``latest``.
        repository: The repository, open or as a location. Empty: the configured one. An open one
            must stay open until `Restored.wait_resident` returns.
        options: Default: the configured options. With ``mode`` lazy, the tree dies with this
            process until all its memory is loaded.
        config: Default: `icecore.config.loading.load`.
        emit: Gets the events (docs/reference/events.md), from several threads.

    Returns:
        The pid of the tree's root and the restored job, as soon as the tree runs.

    Raises:
        NotFound: There is no such snapshot or repository.
        UsageError: ``options.instance`` is invalid or the name of a running job, or the snapshot
            belongs to no job.
        RestoreRefused: This machine does not meet the snapshot's requirements; nothing was started.
        RestoreFailed: The restore failed; no process of the tree runs.
        Damaged: An object is damaged; no process of the tree runs.
        StoreError: The storage failed; no process of the tree runs.
        HookFailed: The hook ``restore.after`` failed; the tree runs with all its memory. Its
            ``result`` is the `Restored`.
    """
    from icecore.restorer.hooks import run_hook
    from icecore.restorer.restore import restore as _restore

    config = config or load()
    options = options or restore_options(config)
    with ExitStack() as stack:
        emit = stack.enter_context(counted(state_directory(config.state), "restore", emit))
        opened, record = _opened(repository, config, emit, stack).locate(snapshot)
        restored = _restore(
            opened.core,
            opened.loop,
            _whole(record),
            options,
            criu=criu_of(config),
            registry=registry(config),
            emit=emit,
        )
        if restored.seconds_to_resident is None:
            # Loading the remaining memory needs the repository, so the thread closes it.
            Thread(
                target=_close_when_resident, args=(restored, stack.pop_all()), daemon=True
            ).start()
        variables = {
            "ICECORE_JOB": restored.job.name
            if restored.job
            else harmless(record.job),  # the repository's writer chose the name
            "ICECORE_SNAPSHOT": record.snapshot,
            "ICECORE_PID": str(restored.pid),
        }
        try:
            run_hook(
                config.restore.after, variables, seconds=config.restore.hook_seconds, emit=emit
            )
        except HookFailed as error:
            # If the caller exits early, the tree dies with it.
            restored.wait_resident()
            error.result = restored
            raise
        return restored


def _whole(record: SnapshotRecord) -> SnapshotRecord:
    """Return the record of an intact snapshot.

    Raises:
        Damaged: The snapshot is in quarantine.
    """
    from icecore.repository import lost

    if record.quarantined:
        raise lost(record)
    return record


def _close_when_resident(restored: Restored, stack: ExitStack) -> None:
    with stack, suppress(Exception):  # wait_resident raises in its caller, too
        restored.wait_resident()


def check_restore(
    snapshot: str,
    repository: Repository,
    options: RestoreOptions | None = None,
    *,
    config: Config | None = None,
) -> Requirements:
    """Compare a snapshot's requirements with this machine, and list what a restore would do to
    files. Starts nothing.

    Args:
        snapshot, options, config: As for `restore`.
        repository: The open repository.

    Raises:
        NotFound: There is no such snapshot.
    """
    from icecore.restorer.restore import check as _check

    config = config or load()
    options = options or restore_options(config)
    repository, record = repository.locate(snapshot)
    return _check(
        repository.core,
        repository.loop,
        _whole(record).snapshot,
        options,
        criu=criu_of(config),
        registry=registry(config),
    )


def find_target(jobs: Registry, target: int | str) -> tuple[Job | None, int]:
    """Return the job that the target names, if any, and the pid of the tree's root.

    Raises:
        NotFound: There is no such job or process, or the job has ended.
    """
    try:
        job = jobs.find(target)
    except NotFound:
        text = str(target)
        if not text.isdecimal():
            raise
        if not procfs.exists(int(text)):
            raise NotFound(
                f"there is no process {text}", cure="'icecore ps' lists the jobs of this node"
            ) from None
        return None, int(text)
    if not job.alive:
        raise NotFound(
            f"job {job.name} is not running: {job.status() or job.state}",
            cure="'icecore ps' lists the running jobs",
        )
    return job, job.pid


def _opened(
    repository: Repository | str | os.PathLike[str], config: Config, emit: Sink, stack: ExitStack
) -> Repository:
    from icecore.repository import Repository

    if isinstance(repository, Repository):
        return repository
    location = os.fspath(repository) or config.repository
    given = passphrase.current(config)
    return stack.enter_context(
        Repository.open(
            location,
            replicas=config.replicas,
            passphrase=given,
            state=config.state,
            config=config,
            emit=emit,
        )
    )
