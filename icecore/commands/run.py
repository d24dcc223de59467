"""The command run."""

from __future__ import annotations

import argparse
import os
import shlex
import stat
from typing import TYPE_CHECKING

from icecore.commands import supervise
from icecore.commands.context import Context
from icecore.commands.job_output import OutputWriter, follow
from icecore.commands.parsing import Commands, add_setting, overridden
from icecore.config import RunSettings
from icecore.environment import job_environment
from icecore.errors import UsageError
from icecore.events import Event

if TYPE_CHECKING:
    from icecore.host.jobs.identity import Identity
    from icecore.host.jobs.job import Job
    from icecore.remote.connection import Service


def add(commands: Commands) -> None:
    """Add the command."""
    parser = commands.add(
        "run",
        run,
        "Start a command as a job.",
        "icecore run -d --name train -- python3 train.py",
        "icecore run --gpu --env HF_TOKEN -- torchrun --nproc-per-node 8 train.py",
        more="A job can be snapshotted and restored. In the foreground this command prints the job's output and returns the job's exit status; Ctrl-C"
        " leaves the job running. The job's standard input is /dev/null. With any of --resume, --every, --on-term and --restart, this command supervises"
        " the job, which requires --name and a repository. Ctrl-C then acts as --on-term says.",
        numpy=False,
        usage="icecore run [options] -- COMMAND [ARGUMENT ...]",
    )
    parser.add_argument(
        "words", nargs=argparse.REMAINDER, help=argparse.SUPPRESS
    )  # a command without '--'
    parser.add_argument(
        "-d", "--detach", action="store_true", help="return at once and print the job's name"
    )
    parser.add_argument(
        "--name", metavar="NAME", default="", help="name of the job (default: the program's name)"
    )
    parser.add_argument(
        "--cwd",
        default="",
        metavar="DIR",
        help="working directory of the job (default: the current directory)",
    )
    parser.add_argument(
        "--user",
        metavar="USER[:GROUP]",
        default="",
        help="run the job as this user, by name or uid (root only)",
    )
    parser.add_argument(
        "--like-process",
        type=int,
        metavar="PID",
        help="run the job with the user, groups, limits, scheduling and cgroup of this process"
        " (root only)",
    )
    parser.add_argument(
        "--env",
        action="append",
        default=[],
        metavar="NAME[=VALUE]",
        help="set a variable, or pass on a variable that jobs do not inherit; repeatable",
    )
    parser.add_argument(
        "--data",
        action="append",
        default=[],
        metavar="DIR",
        help="make this directory's content part of each snapshot; a restore brings it back;"
        " repeatable",
    )
    parser.add_argument(
        "--gpu",
        action="store_true",
        help="prepare a job that uses NVIDIA GPUs, and NCCL, for snapshots; implies --root private where"
        " possible",
    )
    parser.add_argument(
        "--rm",
        action="store_true",
        help="forget the job and its logs once it ends (foreground only)",
    )
    for key, what in (
        (
            "pid",
            "process ids: private allows restores anywhere and several times at once",
        ),
        ("ipc", "System V IPC and POSIX message queues"),
        ("network", "network: private has a loopback device only"),
        (
            "root",
            "file system: private binds the host's mounts into a root with its own /proc and /dev/shm; required by programs that look up processes in /proc",
        ),
        (
            "tmp",
            "/tmp and /var/tmp: private ones are empty at first, are part of each snapshot, and are"
            " removed when the job ends",
        ),
    ):
        add_setting(parser, RunSettings, key, what)
    about = "with --gpu: keep device memory in place during snapshots, which shortens the window"
    add_setting(parser, RunSettings, "resident", about, default="yes, where the preload is built")
    about = (
        "with --gpu: after a snapshot, keep device memory on its GPUs if the job crashes,"
        " for 'restore --from-resident', until 'icecore rm'"
    )
    add_setting(parser, RunSettings, "keep_resident", about)

    about = (
        "allow io_uring; a job that uses it cannot be snapshotted. Otherwise io_uring_setup fails"
        " with EPERM, as in containers, and programs fall back to other calls"
    )
    add_setting(parser, RunSettings, "io_uring", about)
    about = (
        "limit each of the job's two logs to about SIZE by removing the oldest output; 0: no limit."
        " The node service, supervisors and dumps enforce it"
    )
    add_setting(parser, RunSettings, "log_limit", about, default="no limit")

    supervise.add_options(parser)


def run(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore run."""
    from icecore.host.jobs.namespaces import Isolation

    if arguments.words:
        whole = shlex.join([*arguments.words, *arguments.job_command])
        raise UsageError(
            f"unrecognized arguments: {shlex.join(arguments.words)}",
            cure=f"write the command after '--': icecore run -- {whole}",
        )
    if not arguments.job_command:
        raise UsageError(
            "no command to run", cure="write it after '--': icecore run -- python3 train.py"
        )
    if arguments.rm and arguments.detach:
        raise UsageError(
            "--rm needs the foreground, because a detached run does not wait for the job's end",
            cure="leave out -d or --rm",
        )
    if arguments.background_cpu is not None and not supervise.is_wanted(arguments):
        raise UsageError(
            "--background-cpu applies only to the snapshots of a supervised job",
            cure="add --every, or use it with 'icecore dump'",
        )
    if arguments.keep_resident and not arguments.gpu:
        raise UsageError(
            "only the device memory of GPU jobs can be kept",
            cure="add --gpu, or leave out --keep-resident",
        )
    if arguments.keep_resident and arguments.rm:
        raise UsageError("--rm releases what --keep-resident keeps", cure="leave out one of them")
    if _stdin_holds_something():
        context.output.note(
            "note: the job does not get this standard input; let its command read a file: icecore run -- sh -c 'COMMAND < FILE'"
        )
    if context.service is not None:
        return _run_through(context.service, arguments, context)
    own = overridden(context.config.run, arguments)
    isolation = Isolation(
        pid=own.pid == "private",
        ipc=own.ipc == "private",
        network=own.network == "private",
        root=own.root == "private",
        tmp=own.tmp == "private",
    )
    identity = _identity(arguments, context)
    environment = _environment(arguments, context, identity)
    registry = context.registry()
    data = [os.path.abspath(path) for path in arguments.data]

    def start() -> Job:
        if arguments.gpu:
            from icecore.api import start_gpu

            return start_gpu(
                registry,
                arguments.job_command,
                isolation,
                name=arguments.name,
                cwd=arguments.cwd,
                environment=environment,
                pid=arguments.pid or "",
                root=arguments.root or "",
                resident=own.resident,
                keep_resident=own.keep_resident,
                must_keep=bool(arguments.keep_resident),
                identity=identity,
                data=data,
                io_uring=own.io_uring,
                log_limit=own.log_limit,
                emit=context.output.event,
            )
        return registry.start(
            arguments.job_command,
            name=arguments.name,
            isolation=isolation,
            cwd=arguments.cwd,
            environment=environment,
            identity=identity,
            data=data,
            io_uring=own.io_uring,
            log_limit=own.log_limit,
            emit=context.output.event,
        )

    if supervise.is_wanted(arguments):
        return supervise.run(
            arguments,
            context,
            start,
            lambda job, again: OutputWriter(job, context, "both", again).write,
            0 if identity is None else identity.user,
        )
    job = start()
    if own.log_limit and context.origin is None:
        from icecore.remote.connection import is_there  # few jobs have a limit

        if not is_there(context.config.service.socket):
            context.output.event(Event("run.untrimmed", {"job": job.name}))
    if arguments.detach:
        context.output.line(job.name)
        return 0
    status = follow(job, context)
    if arguments.rm:
        registry.remove(job)
    return status


def _run_through(service: Service, arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore run through the node service."""
    from icecore.commands import remote

    supervised = supervise.is_wanted(arguments)
    if supervised:
        supervise.require(arguments, served=True)
    return remote.run(
        arguments,
        context,
        service,
        supervised=supervised,
        writer=lambda job: OutputWriter(job, context, "both").write,
        followed=lambda job: follow(job, context),
    )


def _identity(arguments: argparse.Namespace, context: Context) -> Identity | None:
    """Return the identity of the caller, or the one that ``--user`` or ``--like-process`` name;
    None: this process's.
    """
    from icecore.host.jobs.identity import Identity

    if context.origin is not None:
        return context.origin.identity
    if arguments.user and arguments.like_process is not None:
        raise UsageError("--user and --like-process both say whose job it is", cure="leave out one")
    if (arguments.user or arguments.like_process is not None) and os.geteuid() != 0:
        raise UsageError("only root can start jobs of other users", cure="run icecore as root")
    if arguments.user:
        return Identity.of_user(arguments.user)
    if arguments.like_process is not None:
        return Identity.of_process(arguments.like_process)
    return None


def _environment(
    arguments: argparse.Namespace, context: Context, identity: Identity | None
) -> dict[str, str]:
    """Return the job's environment: this process's without credentials, the variables that name
    another user, plus ``--env``.
    """
    if context.origin is not None:
        return dict(context.origin.environment)
    environment, held = job_environment(os.environ)
    if identity is not None:
        environment.update(identity.environment())
    for pair in arguments.env:
        name, separator, value = pair.partition("=")
        if not name:
            raise UsageError(
                f"--env {pair!r} is wrong", cure="write NAME=VALUE, or NAME to pass a variable on"
            )
        if not separator and name not in os.environ:
            raise UsageError(
                f"--env {name}: this environment has no such variable", cure=f"write {name}=VALUE"
            )
        environment[name] = value if separator else os.environ[name]
    held = [name for name in held if name not in environment]
    if held:
        context.output.event(Event("run.withheld", {"names": list(held)}))
    return environment


def _stdin_holds_something() -> bool:
    """Return whether standard input is a pipe, or a file with unread content."""
    try:
        about = os.fstat(0)
        return stat.S_ISFIFO(about.st_mode) or (
            stat.S_ISREG(about.st_mode) and os.lseek(0, 0, os.SEEK_CUR) < about.st_size
        )
    except OSError:  # closed
        return False
