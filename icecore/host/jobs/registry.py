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
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace

from icecore.errors import Damaged, NameTaken, NotFound, UsageError
from icecore.events import Event, Sink, discard
from icecore.host.jobs import keepers
from icecore.host.jobs.description import Description, describe
from icecore.host.jobs.job import Inits, Job
from icecore.host.jobs.namespaces import Isolation, RestoreNamespaces, RunRecord, init_program
from icecore.host.kernel import freezer, procfs
from icecore.private import private_state, require_own, state_directory
from icecore.text import job_name

if TYPE_CHECKING:
    from icecore.host.jobs.identity import Identity
    from icecore.host.jobs.logs import Stream
    from icecore.host.jobs.restoring import Restoring

#: Seconds after which a failed instance without an init is certain to get none.
_SETTLED_SECONDS = 60.0
#: How long a command removes ever deeper private directories of jobs that have ended.
_TIDY_SECONDS = 5.0
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}")


#: A file's device, inode, size, and times of the last change of its inode and of its content.
_FileId = tuple[int, int, int, int, int]


def _identity(path: str) -> _FileId:
    """Identify the current content of a file that is only ever replaced as a whole.

    Raises:
        NotFound: There is none.
    """
    try:
        about = os.stat(path)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"there is no {path}") from error
    return about.st_dev, about.st_ino, about.st_size, about.st_ctime_ns, about.st_mtime_ns


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
        emit: Gets ``state.tightened``, ``job.thawed`` (`thaw_left`), and ``job.trim_failed``
            (`trim_logs`).
    """

    def __init__(self, state: Path | None = None, *, emit: Sink = discard) -> None:
        self._emit = emit
        self.state = (state or state_directory()).absolute()
        self._jobs = self.state / "jobs"
        #: Instance → the identity of its job.json and what was read from it. Replaced as a whole,
        #: because threads share it.
        self._read: dict[str, tuple[_FileId, Job]] = {}
        #: Instance → when it was first seen without an init, by the monotonic clock.
        self._failed: dict[str, float] = {}

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
            names = sorted(os.listdir(self._jobs))
        except FileNotFoundError:
            return [], {}
        before, read = self._read, dict[str, tuple[_FileId, Job]]()
        failed, inits, now = dict[str, float](), Inits(), time.monotonic()
        for name in names:  # a Path for each of thousands of instances is slow
            try:
                identity = _identity(f"{self._jobs}/{name}/job.json")
                known = before.get(name)
                same = known is not None and known[0] == identity
                job = known[1] if known and same else Job.load(self._jobs / name, inits)
            except NotFound:
                continue  # being made, or being removed
            except Damaged as error:  # no reason to do nothing for the others
                damaged[name] = error
                continue
            found.append(job)
            # Without a pid, its init may still be found without a change of the file.
            if not job.description.pid and job.state == "failed":
                failed[name] = self._failed.get(name, now)
            if job.description.pid or now - failed.get(name, now) > _SETTLED_SECONDS:
                read[name] = identity, job
        self._read, self._failed = read, failed
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
        io_uring: bool = False,
        log_limit: int = 0,
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
            environment: Default: this process's, without credentials.
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
            io_uring: It may use io_uring; a job that does cannot be snapshotted. Otherwise
                io_uring_setup(2) fails with EPERM, as in containers.
            log_limit: Size limit of each log, in bytes; 0: none. The node service and supervisors
                enforce it; other programs call `trim_logs`.
            emit: Gets ``run.started``, ``run.io_uring`` if io_uring could not be denied, and
                ``run.limits`` if this process cannot raise a limit as far as ``identity`` has it.

        Raises:
            NameTaken: A living job has the name, or another process supervises it.
            UsageError: A bad name; a program that cannot be executed; logs that cannot be limited;
                a data directory that cannot be one (`icecore.host.jobs.data`); a directory that a
                private /tmp would hide from the job; ``keep_resident`` without ``resident``; an
                ``identity`` that only root can take.
            NotFound: No such program or directory.
            MissingTool: The init was not built, or (with ``resident``) the preload.
            StartFailed: The kernel refused a step.
        """
        from icecore.host.jobs.new_job import NewJob  # most commands start no job

        wanted = NewJob.planned(
            command,
            name=name,
            isolation=isolation or Isolation(),
            cwd=cwd,
            environment=environment,
            umask=umask,
            resident=resident,
            keep_resident=keep_resident,
            identity=identity,
            data=data,
            io_uring=io_uring,
            log_limit=log_limit,
            state=self.state,
        )
        init = init_program().read_bytes()
        job = wanted.start(self._note_down(wanted.described, exact=bool(name), init=init), emit)
        wanted.tell(job, emit)
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
            NameTaken: A living job has the name, or another process supervises it.
            UsageError: A bad name.
            RestoreRefused: This machine lacks a mount that the job had, or a directory that was
                private to it.
        """
        described = describe(
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
            log_limit=record.log_limit,
        )
        from icecore.host.jobs import temporary
        from icecore.host.jobs.restoring import Restoring  # most commands restore nothing

        if record.tmp:
            temporary.require_here(record.tmp, self.state)
        job = self._note_down(
            described, exact=bool(name), init=record.init, starts=record.log_start
        )
        try:
            temporary.make(job.directory, record.tmp)
            return Restoring(job, record, RestoreNamespaces(record, job.directory, dumped))
        except OSError as error:
            job.discard()
            if record.tmp:
                raise temporary.refusal(record.tmp, error) from error
            raise
        except BaseException:
            job.discard()
            raise

    def thaw_left(self) -> None:
        """Thaw jobs that a dump left frozen because all its processes were killed, and remove the
        private temporary directories of jobs that ended while no command waited for them.
        """
        jobs = self.instances()
        _tidy([job for job in jobs if job.description.isolation.tmp and not job.alive])
        for job in jobs:
            if job.group is not None and job.alive and freezer.thaw_left(job.group):
                self._emit(Event("job.thawed", {"job": job.name, "instance": job.instance}))

    def trim_logs(self, over: Callable[[], bool] = lambda: False) -> None:
        """Trim the logs of all instances (`Job.trim_logs`).

        Args:
            over: Whether to leave the rest, asked before each.
        """
        for job in self.instances():
            if over():
                return
            job.trim_logs(self._emit)

    def keepers(self, snapshot: str = "", name: str = "") -> list[Path]:
        """Return where the keepers of instances are: first of those last dumped to or restored from
        a snapshot, then of those with a name, newer ones first.
        """
        return keepers.living(self.instances(), snapshot, name)

    def left_keepers(self, lineage: str, besides: str = "") -> set[Path]:
        """Return where the keepers are, or were, whose instances have all ended, if one of a
        lineage is among them.

        Args:
            lineage: Its id.
            besides: An instance that does not count.
        """
        jobs = [job for job in self.instances() if job.instance != besides]
        return keepers.left(jobs, lineage)

    def kept(self, job: Job) -> int:
        """Return the bytes of GPU memory that are kept of an instance although it has ended: for
        ``restore --from-resident``, until `remove`.
        """
        return keepers.kept_bytes(job, self.instances)

    # -- removing

    def remove(self, job: Job) -> None:
        """Forget an instance that has ended, with its logs.

        Raises:
            UsageError: It runs or is being started, processes of it or of its user still use its
                private temporary directories, or a restore takes the device memory that it left.
            ResidentFailed: The keeper of its device memory does not answer; nothing is forgotten,
                and it can be tried again.
        """
        job.tidy()  # without the lock: it can take a while
        with self._lock():
            if Job.load(job.directory).state in ("running", "starting"):
                raise UsageError(
                    f"job {job.name} ({job.instance}) runs", cure=f"'icecore kill {job.name}' first"
                )
            if job.description.isolation.tmp:
                _require_no_temporary(job.directory, job.instance)
            place = keepers.keeper_place(job)
            if place.exists() and keepers.has_last(job, self.instances()):
                keepers.let_go_unless_claimed(place, f"job {job.name} ({job.instance})")
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
            if pid := Inits().of(directory):
                raise UsageError(
                    f"job {instance} runs, as process {pid}", cure=f"'kill -KILL {pid}' first"
                )
            for place in keepers.places_of_unknown(directory):
                if place.exists():
                    keepers.let_go_unless_claimed(place, f"job {instance}")
            from icecore.host.jobs import temporary  # few commands need it

            with suppress(OSError):
                temporary.remove(directory, _TIDY_SECONDS)
            _require_no_temporary(directory, instance)
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

    def _note_down(
        self,
        wanted: Description,
        *,
        exact: bool,
        init: bytes,
        starts: Mapping[Stream, int] | None = None,
    ) -> Job:
        """Record a new instance that does not run yet.

        Args:
            exact: The name was requested and gets no number.
            init: The init's program.
            starts: The start offsets of the logs that are restored; None: the job is new.

        Raises:
            UsageError: The logs of a new job cannot have a limit here.
        """
        from icecore.host.jobs.reserved import is_reserved  # 'ps' does not need it

        name = wanted.name
        if exact:
            require_name(name)
        if not exact:
            name = job_name(name) or "job"
        _tidy(self.instances())
        with self._lock():
            instances = self.instances()
            taken = {job.name for job in instances if job.state in ("running", "starting")}
            if exact and name in taken:
                raise NameTaken(
                    f"a job named {name} runs", cure="choose another name, or end that one first"
                )
            if exact and is_reserved(self.state, name):
                raise NameTaken(
                    f"job {name} is supervised by another process of this node",
                    cure="choose another name, or end that process first",
                )
            base, number = name, 2
            while name in taken or is_reserved(self.state, name):
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
                if wanted.log_limit:
                    _limit_logs(directory, starts)
                job.save()
            except BaseException:
                shutil.rmtree(directory, ignore_errors=True)
                raise
        return job


def _tidy(jobs: Sequence[Job]) -> None:
    """Tidy up after those that have ended, without waiting long for processes that keep others
    from it.
    """
    until = time.monotonic() + _TIDY_SECONDS
    for job in jobs:
        job.tidy(0.0, max(0.0, until - time.monotonic()))


def _require_no_temporary(directory: Path, instance: str) -> None:
    """Require that the private temporary directories of a job that has ended are gone.

    Raises:
        UsageError: They are not.
    """
    from icecore.host.jobs import temporary  # few jobs have them

    if temporary.is_left(directory):
        raise UsageError(
            f"the private /tmp of job {instance} is still in use",
            cure=f"end the processes of its user that use it, then 'icecore rm {instance}' again",
        )


def _limit_logs(directory: Path, starts: Mapping[Stream, int] | None) -> None:
    """Make what the limit of an instance's logs needs; for the arguments, see `_note_down`."""
    from icecore.host.jobs import log_trimming  # few jobs have a limit

    if starts is None:
        try:
            log_trimming.require_holes(directory)
        except OSError as error:
            raise UsageError(
                f"cannot limit logs below {directory.parent}: {error.strerror}",
                cure="set ICECORE_STATE to a directory on ext4, XFS, btrfs or tmpfs, or use --log-limit 0",
            ) from error
    log_trimming.write_starts(directory, starts or {})


def _make_logs(directory: Path, user: int) -> None:
    """Make the files that an instance writes, before anybody knows of it."""
    for own in ("stdout.log", "stderr.log", "status"):
        made = os.open(directory / own, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        try:
            if user and own != "status":
                os.fchown(made, user, -1)
        finally:
            os.close(made)
