"""A job that is to be started: what is decided before it is recorded, and its start."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from msgspec.structs import replace

from icecore.environment import job_environment
from icecore.errors import IcecoreError, NotFound, UsageError
from icecore.events import Event, Sink
from icecore.host.jobs import keepers, temporary
from icecore.host.jobs.description import Description, describe
from icecore.host.jobs.job import Job
from icecore.host.jobs.log_trimming import MOST
from icecore.host.jobs.namespaces import Isolation, bindable_mounts
from icecore.host.jobs.start import Launch, Starting

if TYPE_CHECKING:
    from icecore.host.jobs.identity import Identity


class NewJob(msgspec.Struct, frozen=True):
    """What is known of a job before it is recorded.

    Attributes:
        described: Its description; the registry may give it another name.
        path: The program that is executed, absolute unless it is looked up with the rights of
            another user.
        environment: The whole, except what its keeper adds.
        umask: The job's.
        resident: Its GPU memory is resident: it has the preload, and a keeper of its own.
        keep_resident: That memory outlives the job.
        identity: The user that it runs as; None: this process's.
        io_uring: It may use io_uring.
    """

    described: Description
    path: str
    environment: Mapping[str, str]
    umask: int
    resident: bool
    keep_resident: bool
    identity: Identity | None
    io_uring: bool

    @classmethod
    def planned(
        cls,
        command: Sequence[str],
        *,
        name: str,
        isolation: Isolation,
        cwd: str | os.PathLike[str],
        environment: Mapping[str, str] | None,
        umask: int | None,
        resident: bool,
        keep_resident: bool,
        identity: Identity | None,
        data: Sequence[str | os.PathLike[str]],
        io_uring: bool,
        log_limit: int,
        state: Path,
    ) -> NewJob:
        """Decide all that can be decided before the job is recorded.

        Args:
            state: The state directory, which no data directory may hold. Others, and errors: as
                for `Registry.start`.
        """
        if not command or not command[0]:
            raise UsageError("no command was given")
        if keep_resident and not resident:
            raise UsageError(
                "only resident memory can be kept",
                cure="leave out --keep-resident, or --no-resident",
            )
        if not 0 <= log_limit < MOST:
            raise UsageError(
                f"invalid log limit: {log_limit}",
                cure="use a size such as '1 GiB', or 0 for no limit",
            )
        if identity is not None and os.geteuid() != 0:
            raise UsageError("only root can start jobs of other users", cure="run icecore as root")
        own = dict(job_environment(os.environ)[0] if environment is None else environment)
        directory = os.path.abspath(cwd or os.getcwd())
        path = command[0] if identity is not None else _program(command[0], directory, own)
        own_tmp = temporary.points_here() if isolation.tmp else []
        binds = bindable_mounts(own_tmp) if isolation.root else []
        described = describe(name or os.path.basename(path), command, directory, isolation, binds)
        described = replace(described, log_limit=log_limit)
        if identity is not None:
            described = replace(described, user=identity.user, user_name=identity.name)
        if data:
            from icecore.host.jobs.data import data_directories  # most jobs have none

            paths = [os.path.join(directory, path) for path in data]
            chosen = data_directories(paths, identity, state)
            described = replace(described, data=chosen)
        if own_tmp:
            temporary.require_visible(own_tmp, state, directory, described.data)
            described = replace(described, data=[*described.data, *own_tmp])
        return cls(
            described,
            path,
            own,
            _chosen_umask(umask, identity),
            resident,
            keep_resident,
            identity,
            io_uring,
        )

    def start(self, job: Job, emit: Sink) -> Job:
        """Start the recorded job; discard its record if that fails.

        Args:
            emit: Gets ``run.io_uring`` if io_uring could not be denied to the job.

        Raises:
            MissingTool: The preload was not built.
            StartFailed: The kernel refused a step.
        """
        environment = dict(self.environment)
        own_tmp = job.record().tmp
        try:
            temporary.make(job.directory, own_tmp)
            job = job.with_group(None if self.identity is None else self.identity.cgroups)
            if self.resident:
                job = job.with_resident(keepers.keeper_place(job), keep=self.keep_resident)
                environment.update(keepers.start_for(job, environment))
            wanted = Launch(
                directory=job.directory,
                command=[self.path, *job.description.command],
                cwd=job.description.cwd,
                environment=environment,
                umask=self.umask,
                isolation=job.description.isolation,
                binds=job.description.binds,
                identity=self.identity,
                group=job.group,
                tmp=own_tmp,
                io_uring=self.io_uring,
            )
            with Starting(wanted) as starting:
                job = job.with_pid(starting.pid)
                if starting.permitted:
                    emit(Event("run.io_uring", {"job": job.name, "why": starting.permitted}))
                starting.go()
        except BaseException:
            _discard(job)
            raise
        return job

    def tell(self, job: Job, emit: Sink) -> None:
        """Emit what `Registry.start` says of a job that was started."""
        short = [] if self.identity is None else self.identity.reachable_limits()[1]
        if short:
            emit(Event("run.limits", {"job": job.name, "short": short}))
        emit(
            Event(
                "run.started",
                {
                    "job": job.name,
                    "instance": job.instance,
                    "pid": job.pid,
                    "command": [*job.description.command],
                },
            )
        )


def _discard(job: Job) -> None:
    """Discard an instance that was never started, and its keeper, which nobody could find any more."""
    if job.description.resident:
        with suppress(IcecoreError, OSError):  # it ends by itself
            keepers.let_go(keepers.keeper_place(job))
    job.discard()


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
