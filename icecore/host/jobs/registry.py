"""The jobs of this node: recorded, started and found again. A job is recorded before it runs, and
no daemon is needed.

``STATE/jobs/INSTANCE/`` is one instance each (job.py). STATE is `state_directory`. Names are handed
out under a lock on ``STATE/lock``.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from icecore.environment import job_environment
from icecore.errors import Damaged, IcecoreError, NotFound, RestoreRefused, UsageError
from icecore.events import Event, Sink, discard
from icecore.host.jobs.job import Description, Job, boot_id, init_of
from icecore.host.jobs.namespaces import (
    INSTANCE_MOUNT,
    RESTORABLE_ENVIRONMENT,
    Isolation,
    RestoreNamespaces,
    RunRecord,
    bindable_mounts,
    init_program,
)
from icecore.host.kernel import freezer, procfs
from icecore.private import private_state, require_own, state_directory
from icecore.text import job_name

if TYPE_CHECKING:
    from icecore.host.jobs.identity import Identity

#: Where the keepers of jobs on the host's root have their directories.
_RESIDENT = Path("/run/icecore/resident")
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


def require_name(name: str) -> None:
    """Require a name that a job may have.

    Raises:
        UsageError: None may.
    """
    if not _NAME.fullmatch(name):
        raise UsageError(
            f"{name!r} is no name for a job", cure="letters, digits, '.', '_', '-'; at most 63"
        )


class Registry:
    """The jobs under one state directory.

    Args:
        state: The directory; made where it is missing. Default: `state_directory`.
        emit: Gets ``state.tightened``, and ``job.thawed`` (`thaw_left`).
    """

    def __init__(self, state: Path | None = None, *, emit: Sink = discard) -> None:
        self._emit = emit
        self.state = (state or state_directory()).absolute()
        self._jobs = self.state / "jobs"

    # -- finding

    def instances(self) -> list[Job]:
        """Return all instances, oldest first: running, ended, failed. Those of `damaged` are not
        included.
        """
        return self._look()[0]

    def damaged(self) -> dict[str, Damaged]:
        """Return the instances whose job.json cannot be read (after a crash of the machine, for
        example), and why.
        """
        return self._look()[1]

    def _look(self) -> tuple[list[Job], dict[str, Damaged]]:
        found: list[Job] = []
        damaged: dict[str, Damaged] = {}
        try:
            for own in (self.state, self._jobs):
                require_own(own)  # nobody else's notes say which processes are to be signalled
            entries = sorted(self._jobs.iterdir())
        except FileNotFoundError:
            return [], {}
        for entry in entries:
            try:
                found.append(Job.load(entry))
            except NotFound:
                continue  # being made, or being removed
            except Damaged as error:  # no reason to do nothing for the others
                damaged[entry.name] = error
        return sorted(found, key=lambda job: job.description.created), damaged

    def find(self, which: str | int) -> Job:
        """Return the job with this name or instance id, or with a process of this pid in its tree.

        Of several instances of one name it is the living one, else the newest.

        Raises:
            NotFound: There is none.
            Damaged: Nothing is known of the instance but its id.
        """
        jobs, damaged = self._look()
        named = [job for job in jobs if which in (job.name, job.instance)]
        named.sort(key=lambda job: job.state in ("running", "starting"))
        if named:
            return named[-1]
        if isinstance(which, int) or which.isdecimal():
            inits = {job.pid: job for job in jobs if job.alive}
            pid = int(which)
            try:
                while pid > 1:
                    if pid in inits:
                        return inits[pid]
                    pid = procfs.status(pid).parent
            except NotFound:
                pass
        if which in damaged:
            raise damaged[str(which)]
        raise NotFound(f"there is no job {which}", cure="'icecore ps' lists the jobs of this node")

    # -- starting

    def start(
        self,
        command: Sequence[str],
        *,
        name: str = "",
        isolation: Isolation | None = None,
        cwd: str | os.PathLike[str] = "",
        environment: Mapping[str, str] | None = None,
        umask: int | None = None,
        resident: bool = False,
        keep_resident: bool = False,
        identity: Identity | None = None,
        data: Sequence[str | os.PathLike[str]] = (),
        emit: Sink = discard,
    ) -> Job:
        """Start a command so that it can be snapshotted and restored; it survives this process.

        It gets no descriptors but /dev/null and its two logs, no terminal, a session of its own,
        default signal handling, and this process's resource limits, or those of ``identity``.

        Args:
            command: Program (looked up in the environment's PATH) and arguments.
            name: Empty: the program's, with a number where that is taken.
            isolation: Its namespaces; default pid and ipc.
            cwd: Empty: this process's.
            environment: Default: this process's, without credentials. Both get
                `RESTORABLE_ENVIRONMENT` where they do not set it themselves.
            umask: Default: this process's.
            resident: Its device memory shall stay where it is in windows (`icecore.host.resident`):
                with the preload, and a keeper of its own.
            keep_resident: With ``resident``: from its first snapshot on that memory shall outlive
                the job, unless it ends with status 0, for a restore from there
                (`icecore.restorer.options.RestoreOptions.from_resident`). `remove` lets go of it.
            identity: The user that it runs as. Its program and directory are looked up with that
                user's rights. Default: this process's.
            data: Directories whose content shall be part of each snapshot. A user other than root
                must own them.
            emit: Gets ``run.started``, ``run.environment``, and ``run.limits`` if this process
                cannot raise a limit as far as ``identity`` has it.

        Raises:
            UsageError: A bad name, or one that a living job has; a program that cannot be executed;
                a data directory that cannot be one (`icecore.host.jobs.data`);
                ``keep_resident`` without ``resident``; an ``identity`` that only root can take.
            NotFound: No such program or directory.
            MissingTool: The init was not built, or (with ``resident``) the preload.
            StartFailed: The kernel refused a step.
        """
        from icecore.host.jobs.start import Launch, Starting  # most commands start no job

        if not command or not command[0]:
            raise UsageError("no command was given")
        if keep_resident and not resident:
            raise UsageError(
                "only resident memory can be kept",
                cure="leave out --keep-resident, or --no-resident",
            )
        if identity is not None and os.geteuid() != 0:
            raise UsageError("only root can start jobs of other users", cure="run icecore as root")
        isolation = isolation or Isolation()
        own = dict(job_environment(os.environ)[0] if environment is None else environment)
        added = {key: value for key, value in RESTORABLE_ENVIRONMENT.items() if key not in own}
        own.update(added)
        directory = os.path.abspath(cwd or os.getcwd())
        path = command[0] if identity is not None else _program(command[0], directory, own)
        binds = bindable_mounts() if isolation.root else []
        described = _describe(name or os.path.basename(path), command, directory, isolation, binds)
        if identity is not None:
            described = replace(described, user=identity.user, user_name=identity.name)
        if data:
            from icecore.host.jobs.data import data_directories  # most jobs have none

            paths = [os.path.join(directory, path) for path in data]
            chosen = data_directories(paths, described.user, self.state)
            described = replace(described, data=chosen)
        job = self._note_down(described, exact=bool(name), init=init_program().read_bytes())
        try:
            job = job.with_group(None if identity is None else identity.cgroups)
            if resident:
                seen = (
                    Path(INSTANCE_MOUNT) / "resident"
                    if isolation.root
                    else _RESIDENT / job.instance
                )
                job = job.with_resident(_keeper_place(job), keep=keep_resident)
                user = job.description.user
                own.update(_with_keeper(_keeper_place(job), seen, own, user))
                if isolation.root and user:
                    # The way to the keeper leads through it; it shows nothing else.
                    job.directory.chmod(0o711)
        except BaseException:
            _discard(job)
            raise
        wanted = Launch(
            directory=job.directory,
            command=[path, *command],
            cwd=directory,
            environment=own,
            umask=_chosen_umask(umask, identity),
            isolation=isolation,
            binds=binds,
            identity=identity,
            group=job.group,
        )
        try:
            with Starting(wanted) as starting:
                job = job.with_pid(starting.pid)
                starting.go()
        except BaseException:
            _discard(job)
            raise
        if added:
            emit(
                Event(
                    "run.environment",
                    {
                        "job": job.name,
                        "added": dict(added),
                        "why": "keeps libraries off io_uring, which CRIU cannot dump",
                    },
                )
            )
        short = [] if identity is None else identity.reachable_limits()[1]
        if short:
            emit(Event("run.limits", {"job": job.name, "short": short}))
        emit(
            Event(
                "run.started",
                {
                    "job": job.name,
                    "instance": job.instance,
                    "pid": job.pid,
                    "command": list(command),
                },
            )
        )
        return job

    def restoring(
        self,
        record: RunRecord,
        *,
        snapshot: str,
        lineage: str = "",
        name: str = "",
        dumped: Sequence[str] = (),
    ) -> Restoring:
        """Make the place for a new instance of a run from a snapshot: see `Restoring`.

        Args:
            record: From the snapshot's manifest, with the copies of files that this instance gets.
            snapshot: Its id.
            lineage: Its lineage.
            name: Name of the instance. Empty: the job's, with a number where a living one has it.
            dumped: The copies of files that the snapshot's instance had.

        Raises:
            UsageError: A bad name, or one that a living job has.
            RestoreRefused: This machine lacks a mount that the job had.
        """
        described = _describe(
            name or record.name,
            record.command,
            record.cwd,
            record.isolation,
            record.binds,
            snapshot=snapshot,
            lineage=lineage,
        )
        described = replace(
            described,
            files_to=record.files_to,
            copies=record.copies,
            user=record.user,
            user_name=record.user_name,
            data=record.data,
        )
        job = self._note_down(described, exact=bool(name), init=record.init)
        try:
            return Restoring(job, record, RestoreNamespaces(record, job.directory, dumped))
        except BaseException:
            shutil.rmtree(job.directory, ignore_errors=True)
            raise

    def thaw_left(self) -> None:
        """Let jobs run that a dump left frozen because all its processes were killed."""
        for job in self.instances():
            if job.group is not None and job.alive and freezer.thaw_left(job.group):
                self._emit(Event("job.thawed", {"job": job.name, "instance": job.instance}))

    def keepers(self, snapshot: str = "", name: str = "") -> list[Path]:
        """Return where the keepers of instances are: first of those last dumped to or restored from
        a snapshot, then of those with a name, newer ones first.
        """
        jobs = self.instances()[::-1]
        jobs.sort(key=lambda job: (job.description.snapshot != snapshot, job.name != name))
        places = dict.fromkeys(_keeper_place(job) for job in jobs)
        return [place for place in places if (place / "keeper").is_socket()]

    def left_keepers(self, lineage: str, besides: str = "") -> set[Path]:
        """Return where the keepers are, or were, whose instances have all ended, if one of a
        lineage is among them.

        Args:
            lineage: Its id.
            besides: An instance that does not count.
        """
        jobs = [job for job in self.instances() if job.instance != besides]
        busy = {_keeper_place(job) for job in jobs if job.state in ("running", "starting")}
        return {_keeper_place(job) for job in jobs if job.description.lineage == lineage} - busy

    def kept(self, job: Job) -> int:
        """Return the bytes of GPU memory that are kept of an instance although it has ended: for
        ``restore --from-resident``, until `remove`.
        """
        with suppress(IcecoreError, OSError):
            place = _keeper_place(job)
            if (
                job.state in ("running", "starting")
                or not (place / "keeper").is_socket()
                or not self._has_last(job)
            ):
                return 0
            from icecore.host.resident.client import Keeper  # starts slowly; few commands need it

            keeper = Keeper(place)
            tokens = [process.token for process in keeper.processes() if not process.alive]
            return sum(
                one.size
                for token in tokens
                for one in keeper.allocations(token)
                if not one.imported
            )
        return 0

    def _has_last(self, job: Job) -> bool:
        """Return whether no later instance has the same keeper, as instances of one snapshot do
        without a root of their own: the memory that is kept is the last one's.
        """
        same = [other for other in self.instances() if _keeper_place(other) == _keeper_place(job)]
        return not same or same[-1].instance == job.instance

    # -- removing

    def remove(self, job: Job) -> None:
        """Forget an instance that has ended, with its logs.

        Raises:
            UsageError: It runs or is being started, or a restore takes the device memory that it
                left.
            ResidentFailed: The keeper of its device memory does not answer; nothing is forgotten,
                and it can be tried again.
        """
        with self._lock():
            if Job.load(job.directory).state in ("running", "starting"):
                raise UsageError(
                    f"job {job.name} ({job.instance}) runs", cure=f"'icecore kill {job.name}' first"
                )
            place = _keeper_place(job)
            if place.exists() and self._has_last(job):
                _let_go_claimed(place, f"job {job.name} ({job.instance})")
            job.remove_group()
            shutil.rmtree(job.directory)

    def remove_damaged(self, instance: str) -> None:
        """Forget one of `damaged`, with its logs.

        Raises:
            NotFound: It is none.
            UsageError, ResidentFailed: As `remove`.
        """
        with self._lock():
            if instance not in self.damaged():
                raise NotFound(f"there is no damaged job {instance}")
            directory = self._jobs / instance
            if pid := init_of(directory):
                raise UsageError(
                    f"job {instance} runs, as process {pid}", cure=f"'kill -KILL {pid}' first"
                )
            for place in (directory / "resident", _RESIDENT / instance):
                if place.exists():
                    _let_go_claimed(place, f"job {instance}")
            shutil.rmtree(directory)

    def ended(self, older_than: float = 0.0) -> list[Job]:
        """Return the instances that have ended and were created more than ``older_than`` seconds
        ago.
        """
        return [
            job
            for job in self.instances()
            if job.state in ("ended", "failed")
            and time.time() - job.description.created >= older_than
        ]

    # -- within

    @contextmanager
    def _lock(self) -> Iterator[None]:
        private_state(self.state, "jobs", emit=self._emit)
        fd = os.open(
            self.state / "lock", os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600
        )
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
            yield
        finally:
            os.close(fd)

    def _note_down(self, wanted: Description, *, exact: bool, init: bytes) -> Job:
        """Record a new instance that does not run yet. ``exact``: the name was requested and gets
        no number.
        """
        name = wanted.name
        if exact:
            require_name(name)
        if not exact:
            name = job_name(name) or "job"
        with self._lock():
            instances = self.instances()
            for ended in instances:
                ended.remove_group(0.0)
            taken = {job.name for job in instances if job.state in ("running", "starting")}
            if exact and name in taken:
                raise UsageError(
                    f"a job named {name} runs", cure="choose another name, or end that one first"
                )
            base, number = name, 2
            while name in taken:
                name, number = f"{base}-{number}", number + 1
            directory = self._jobs / wanted.instance
            directory.mkdir(mode=0o700)
            job = Job(directory, replace(wanted, name=name))
            try:
                program = os.open(
                    directory / "icecore-init",
                    os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC,
                    0o700,
                )
                with open(program, "wb") as file:
                    file.write(init)
                _make_logs(directory, wanted.user)
                job.save()
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        return job


def _let_go(place: Path) -> None:
    """Have a keeper let go of what it kept of processes that have ended, keep nothing of those that
    live (an init that is killed may leave some), and remove its directory, unless somebody uses it.

    Raises:
        ResidentFailed: It does not answer. Without its directory nobody could ask it any more.
    """
    from icecore.host.resident.client import Keeper

    with suppress(NotFound):  # it has ended, and let go of everything
        keeper = Keeper(place)
        for process in keeper.processes():
            if process.alive:
                keeper.unkeep(process.token)
        held = keeper.processes()  # one may have ended before
        for process in held:
            if not process.alive:
                keeper.forget(process.token)
        if any(process.alive for process in held):
            return
    shutil.rmtree(place, ignore_errors=True)


def _make_logs(directory: Path, user: int) -> None:
    """Make the files that an instance writes, before anybody knows of it."""
    for own in ("stdout.log", "stderr.log", "status"):
        made = os.open(directory / own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if user and own != "status":
                os.fchown(made, user, -1)
        finally:
            os.close(made)


def _discard(job: Job) -> None:
    """Discard an instance that was never started, and its keeper, which nobody could find any more."""
    if job.description.resident:
        with suppress(IcecoreError, OSError):  # it ends by itself
            _let_go(_keeper_place(job))
    _forget(job)


def _forget(job: Job) -> None:
    """Remove the directory and the cgroup of an instance that does not run."""
    if job.group is not None:
        freezer.remove_group(job.group)
    shutil.rmtree(job.directory, ignore_errors=True)


def _let_go_claimed(place: Path, whose: str) -> None:
    """Release what a keeper has kept, as `_let_go` does, unless a restore takes it.

    Raises:
        UsageError: One does.
        ResidentFailed: The keeper does not answer.
    """
    from icecore.host.resident.keeper import claimed

    with claimed(place) as ours:
        if not ours:
            raise UsageError(
                f"{whose} is being restored from", cure="wait until that restore is done"
            )
        _let_go(place)


def _keeper_place(job: Job) -> Path:
    """Return where an instance's keeper is, if it has one. Instances without a root of their own
    share one short path, which a restore finds again.
    """
    known = job.description
    return Path(
        known.resident
        or (job.directory / "resident" if known.isolation.root else _RESIDENT / job.instance)
    )


def _with_keeper(
    place: Path, seen: Path, environment: Mapping[str, str], user: int
) -> dict[str, str]:
    """Start a keeper; what its job's environment needs, which sees it there.

    Args:
        user: Whose job it is.
    """
    from icecore.host.resident import keeper

    keeper.make_place(place, user)
    keeper.start_keeper(place)
    return keeper.environment(str(seen), environment)


def _describe(
    name: str,
    command: Sequence[str],
    cwd: str,
    isolation: Isolation,
    binds: Sequence[str],
    *,
    snapshot: str = "",
    lineage: str = "",
) -> Description:
    """Describe a new instance that this process starts."""
    import secrets

    return Description(
        name=name,
        instance=f"i{secrets.token_hex(4)}",
        command=[*command],
        cwd=cwd,
        isolation=isolation,
        binds=[*binds],
        created=time.time(),
        boot=boot_id(),
        owner=(os.getpid(), procfs.start_time(os.getpid())),
        restored_from=snapshot,
        snapshot=snapshot,
        lineage=lineage,
    )


class Restoring:
    """An instance that CRIU is about to restore (a context manager: on exit before `started`, the
    instance is forgotten).

    The caller puts back what the logs held (`redirected`), runs ``[*prefix, criu, "restore", …,
    *options]`` with ``pass_fds``, and calls `started` once CRIU has made the tree. From then on the
    job is found, waited for and killed as any other.

    Attributes:
        job: The instance; it has no pid yet.
    """

    def __init__(self, job: Job, record: RunRecord, namespaces: RestoreNamespaces) -> None:
        self.job = job
        self._record = record
        self._namespaces = namespaces
        self._started = False

    @property
    def prefix(self) -> list[str]:
        """Return the command line before ``criu``; often empty."""
        return self._namespaces.prefix

    @property
    def options(self) -> list[str]:
        """Return the options of ``criu restore``."""
        return self._namespaces.options

    @property
    def pass_fds(self) -> tuple[int, ...]:
        """Return the descriptors that CRIU must inherit."""
        return self._namespaces.pass_fds

    @property
    def redirected(self) -> dict[str, Path]:
        """Map the paths in the images that are the instance's own to the new instance's files.
        Nothing else may be put at those paths.
        """
        return {path: self.job.directory / name for name, path in self._record.files.items()}

    def bind_copies(self, images: Path) -> None:
        """Mount the instance's copies over the originals, or make CRIU do so; they are written, and
        CRIU does not run yet.

        Args:
            images: CRIU's images.

        Raises:
            RestoreRefused: It cannot be done.
        """
        try:
            self._namespaces.bind_copies(images)
        except OSError as error:
            raise RestoreRefused(
                f"cannot bind a copy of a file: {error.strerror}",
                cure="check the file and the directory of --files-to, or use --files instead",
            ) from error

    def make_group(self, groups: Mapping[str, str] | None) -> Path | None:
        """Make a cgroup of the instance's own, into which CRIU goes before it restores.

        Args:
            groups: The groups that it joins, by hierarchy; None: those of this process.

        Returns:
            Its directory; None: the instance gets none.
        """
        self.job = self.job.with_group(groups)
        return self.job.group

    def has_keeper(self, place: Path, *, keep: bool) -> None:
        """Record where the keeper of its GPU memory is, and whether that memory outlives it."""
        self.job = self.job.with_resident(place, keep=keep)

    def started(self, pid: int) -> Job:
        """Record the restored init, which CRIU has released; it may have ended since, and is then
        known as an ended job.

        Args:
            pid: As this machine sees it (CRIU's ``--pidfile``).
        """
        self._started = True
        try:
            self.job = self.job.with_pid(pid)
        except NotFound:
            self.job = self.job.with_lost(pid)
        return self.job

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._namespaces.close()
        if not self._started:
            _forget(self.job)


def _program(name: str, directory: str, environment: Mapping[str, str]) -> str:
    """Return the absolute path of a program that this process's user may execute.

    Raises:
        NotFound: There is none, or no such directory.
    """
    if not os.path.isdir(directory):
        raise NotFound(f"there is no directory {directory}")
    path = shutil.which(name, path=environment.get("PATH", os.defpath))
    if path is None:
        path = os.path.join(directory, name)
        if "/" not in name or not os.path.exists(path):
            raise NotFound(
                f"there is no program {name}", cure="give its path, or add its directory to PATH"
            )
    return os.path.abspath(os.path.join(directory, path))


def _chosen_umask(wanted: int | None, identity: Identity | None) -> int:
    if wanted is not None:
        return wanted
    return _umask() if identity is None or identity.umask is None else identity.umask


def _umask() -> int:
    """Return this process's umask from /proc, without changing it for other threads."""
    found = re.search(r"^Umask:\s*(\d+)$", Path("/proc/self/status").read_text(), re.MULTILINE)
    assert found is not None  # there since Linux 4.7
    return int(found[1], 8)
