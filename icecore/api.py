"""The public calls that act on running jobs: run, dump, restore; rule: they do what the command
line does, for they are what it calls.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import fields, replace
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from icecore import passphrase
from icecore.config import Config, job_environment, load
from icecore.dumper.dump import DumpResult
from icecore.dumper.dump import dump as _dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.errors import HookFailed, MissingTool, NotFound, UsageError
from icecore.events import Event, Sink, discard
from icecore.hooks import run_hook
from icecore.host.criu.program import Criu, find_criu
from icecore.host.gpu.backend import find_backend
from icecore.host.jobs.gpu import gpu_run
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry, require_name
from icecore.host.kernel import procfs
from icecore.host.resident.keeper import preload_path
from icecore.places import state_directory
from icecore.repository import Repository, lost
from icecore.restorer.options import RestoreOptions
from icecore.restorer.requirements import Requirements
from icecore.restorer.restore import check as _check
from icecore.restorer.restore import restore as _restore
from icecore.restorer.restored import Restored
from icecore.store.format.state import SnapshotRecord
from icecore.text import harmless

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Options = TypeVar("Options", DumpOptions, RestoreOptions)
#: A namespace as it was asked for; "": it was not.
Word = Literal["", "host", "private"]


def with_settings(options: Options, settings: DataclassInstance) -> Options:
    """``options`` with every setting of the same name."""
    known = {about.name for about in fields(options)}
    values: dict[str, Any] = {
        about.name: getattr(settings, about.name) for about in fields(settings)
    }
    return replace(options, **{name: value for name, value in values.items() if name in known})


def dump_options(config: Config) -> DumpOptions:
    """The options of a dump as the configuration has them."""
    return with_settings(DumpOptions(), config.dump)


def restore_options(config: Config) -> RestoreOptions:
    """The options of a restore as the configuration has them."""
    return with_settings(RestoreOptions(), config.restore)


def registry(config: Config) -> Registry:
    """The jobs of this node."""
    return Registry(state_directory(config.state))


def criu_of(config: Config) -> Criu:
    """The CRIU that the configuration means.

    Raises:
        MissingTool: There is none.
    """
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
    config: Config | None = None,
    emit: Sink = discard,
) -> Job:
    """Start a command as a job: one that can be snapshotted, and restored anywhere and several
    times.

    It survives this process, has no terminal and no standard input, and writes to log files of its
    own (`Job.logs`).

    Args:
        command: Program and arguments.
        name: The job's name. Empty: the program's, with a number where that is taken.
        isolation: Its namespaces; default: what the configuration says.
        cwd: Its directory; empty: this process's.
        environment: Its environment; default: this process's without what opens a repository
            (`icecore.config.CREDENTIALS`).
        gpu: It uses NVIDIA GPUs: it gets what CUDA needs in a pid namespace of its own (unless
            ``isolation`` says otherwise), and NCCL is told what makes its jobs snapshotable
            (docs/gpu.md).
        resident: With ``gpu``: windows leave its device memory where it is (docs/resident.md);
            None: what the configuration says.
        keep_resident: With ``gpu``: where it breaks off after a snapshot, its device memory stays
            on its GPUs, for a restore with `RestoreOptions.from_resident`, until the instance is
            removed. Default: what the configuration says.
        config: Instead of the one that is found (`icecore.config.load`).
        emit: Gets the events.

    Raises:
        UsageError: A bad or taken name, a program that cannot be executed, or ``keep_resident`` of
            memory that is not resident.
        NotFound: There is no such program or directory.
        MissingTool: What ``keep_resident`` needs was not built.
    """
    config = config or load()
    environment = _environment(emit) if environment is None else environment
    own = config.run
    said = isolation
    isolation = isolation or Isolation(
        pid=own.pid == "private",
        ipc=own.ipc == "private",
        network=own.network == "private",
        root=own.root == "private",
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
            emit=emit,
        )
    if keep_resident:
        raise UsageError(
            "only the device memory of GPU jobs can be kept",
            cure="add --gpu, or leave out --keep-resident",
        )
    return registry(config).start(
        command, name=name, isolation=isolation, cwd=cwd, environment=environment, emit=emit
    )


def _environment(emit: Sink) -> dict[str, str]:
    """Return what a job gets of this process's environment."""
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
    emit: Sink = discard,
) -> Job:
    """Start a GPU job in ``jobs``; see `run` and `icecore.host.jobs.gpu.gpu_run`.

    Args:
        must_keep: ``keep_resident`` was asked for, and is not only what the configuration says:
            where it cannot be, nothing is started.
    """
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
        *([] if driver else ["there is no NVIDIA driver here: the command will find no GPU"]),
    ]
    job = jobs.start(
        command,
        name=name,
        isolation=how.isolation,
        cwd=cwd,
        environment={**variables, **how.added},
        resident=resident,
        keep_resident=keep_resident and resident,
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
    emit: Sink = discard,
) -> DumpResult:
    """Take a snapshot of a running job or of any process tree. It goes on running, unless
    ``options.stop`` says otherwise.

    A snapshot holds everything that the job had in memory: its keys, tokens and random state too.

    Args:
        target: Name of a job of this node, or the pid of the root of a tree (of a process of a job:
            the whole job).
        repository: Where to, open or its location. Empty: the configuration's.
        options: Default: what the configuration says.
        config: Instead of the one that is found (`icecore.config.load`).
        emit: Gets the events (docs/events.md), from several threads.

    Returns:
        The snapshot's id, its sizes in bytes, and the seconds that the job stood still.

    Raises:
        NotFound: There is no such job, process or repository.
        UsageError: ``options.job`` is no name for a job.
        PreflightRefused: Something would lose or hang the job; nothing was stopped.
        WindowExceeded: The job would have stood still for longer than ``options.max_window``
            seconds; it runs.
        DumpFailed: The snapshot was abandoned; the job runs.
        StoreError: The storage failed; the job runs.
        HookFailed: The snapshot is committed, but the command after it failed.
    """
    config = config or load()
    options = options or dump_options(config)
    if options.job:
        require_name(options.job)
    with ExitStack() as stack:
        opened = _opened(repository, config, emit, stack)
        job, root = find_target(registry(config), target)
        if job is None:
            aim = Target.of_process(root, options.job)
        else:
            parent = job.description.snapshot or job.description.restored_from
            status = str(job.status_path) if job.description.keep_resident else ""
            aim = Target(root, options.job or job.name, parent, job.record(), status)

        def note(done: DumpResult) -> None:
            if job is not None and job.directory.exists():
                Job.load(job.directory).with_snapshot(done.snapshot, done.lineage)

        return _dump(
            opened.core,
            opened.loop,
            aim,
            options,
            criu=criu_of(config),
            workdir=config.dump.workdir,
            committed=note,
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
    """Bring a snapshot's process tree back, once or several times, beside the original or on
    another machine.

    The restored job has the secrets and the random state of the snapshot: two instances of it draw
    the same random numbers.

    Args:
        snapshot: An id or its beginning, ``JOB``, ``JOB~1``, ``JOB@1`` or ``latest``.
        repository: Where it is, open or its location. Empty: the configuration's. An open one must
            stay open until `Restored.wait_resident` returns.
        options: Default: what the configuration says. With ``mode`` lazy the tree dies with this
            process until all its memory is there.
        config: Instead of the one that is found (`icecore.config.load`).
        emit: Gets the events (docs/events.md), from several threads.

    Returns:
        Once the tree runs: its root's pid, and the job that it is now.

    Raises:
        NotFound: There is no such snapshot or repository.
        UsageError: ``options.instance`` is no name for a job, or one that a living job has, or the
            snapshot is of no job.
        RestoreRefused: This machine does not meet what the snapshot requires; nothing was started.
        RestoreFailed: It broke off; nothing of the tree runs.
        Damaged: An object is not what was written; nothing of the tree runs.
        StoreError: The storage failed; nothing of the tree runs.
        HookFailed: The command of ``restore.after`` failed; the tree runs, with all its memory.
    """
    config = config or load()
    options = options or restore_options(config)
    with ExitStack() as stack:
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
            # What is still to come needs the repository; whoever opened it closes it.
            Thread(
                target=_close_when_resident, args=(restored, stack.pop_all()), daemon=True
            ).start()
        variables = {
            "ICECORE_JOB": restored.job.name
            if restored.job
            else harmless(record.job),  # whoever wrote the repository chose it
            "ICECORE_SNAPSHOT": record.snapshot,
            "ICECORE_PID": str(restored.pid),
        }
        try:
            run_hook(
                config.restore.after, variables, seconds=config.restore.hook_seconds, emit=emit
            )
        except HookFailed:
            restored.wait_resident()  # the caller gets nothing to wait for, may end, and the tree would die with it
            raise
        return restored


def _whole(record: SnapshotRecord) -> SnapshotRecord:
    """The record of a snapshot that has lost nothing.

    Raises:
        Damaged: It is in quarantine.
    """
    if record.quarantined:
        raise lost(record)
    return record


def _close_when_resident(restored: Restored, stack: ExitStack) -> None:
    with stack, suppress(Exception):  # whoever waits for the memory is told
        restored.wait_resident()


def check_restore(
    snapshot: str,
    repository: Repository,
    options: RestoreOptions | None = None,
    *,
    config: Config | None = None,
) -> Requirements:
    """What stands in the way of a restore on this machine, and what would be done to open files;
    nothing is started.

    Args:
        snapshot, options, config: As in `restore`.
        repository: Where it is, open.

    Raises:
        NotFound: There is no such snapshot.
    """
    config = config or load()
    options = options or restore_options(config)
    repository, record = repository.locate(snapshot)
    return _check(
        repository.core, repository.loop, _whole(record).snapshot, options, criu=criu_of(config)
    )


def find_target(jobs: Registry, target: int | str) -> tuple[Job | None, int]:
    """The job that is meant, if it is one, and the pid of the tree's root.

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
            f"job {job.name} does not run: {job.status() or job.state}",
            cure="'icecore ps' lists the jobs that do",
        )
    return job, job.pid


def _opened(
    repository: Repository | str | os.PathLike[str], config: Config, emit: Sink, stack: ExitStack
) -> Repository:
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
