"""Commands for the jobs of this node: run, ps, logs, attach, wait, kill, rm.

A job continues to run whatever happens to the command line.
"""

from __future__ import annotations

import argparse
import codecs
import os
import shlex
import signal
import stat
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands import supervise
from icecore.commands.context import JOB, Commands, Context, Interrupted, add_setting, overridden
from icecore.config import SECONDS, RunSettings, job_environment
from icecore.errors import Damaged, IcecoreError, NotFound, UsageError
from icecore.events import Event, Value
from icecore.text import printable_command

if TYPE_CHECKING:
    from icecore.host.jobs.identity import Identity
    from icecore.host.jobs.job import Job, LogPiece, Stream
    from icecore.host.jobs.registry import Registry
    from icecore.remote.connection import Service


def add(commands: Commands) -> None:
    """Add the commands."""
    command = partial(commands.add, numpy=False)
    parser = command(
        "run",
        run,
        "Start a command as a job.",
        "icecore run -d --name train -- python3 train.py",
        "icecore run --gpu --env HF_TOKEN -- torchrun --nproc-per-node 8 train.py",
        more="A job can be snapshotted and restored. In the foreground this command prints the job's output and returns the job's exit status; Ctrl-C"
        " leaves the job running. The job's standard input is /dev/null.",
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
        "--gpu",
        action="store_true",
        help="prepare a job that uses NVIDIA GPUs, and NCCL, for snapshots",
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
            "file system: private binds the host's mounts into a root with its own /proc and /dev/shm",
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

    supervise.add_options(parser)

    parser = command("ps", ps, "List the jobs of this node.", "icecore ps -a")
    parser.add_argument("-a", "--all", action="store_true", help="include jobs that have ended")

    parser = command("logs", logs, "Print a job's output.", "icecore logs -f train")
    parser.add_argument("job", metavar="JOB", help=JOB)
    parser.add_argument(
        "-f", "--follow", action="store_true", help="continue with new output until the job ends"
    )
    parser.add_argument(
        "--stream",
        choices=("both", "stdout", "stderr"),
        default="both",
        metavar="both|stdout|stderr",
        help="print only this stream (default: both)",
    )

    parser = command(
        "attach",
        attach,
        "Follow a job's output.",
        "icecore attach train",
        more="Prints new output until the job ends and returns the job's exit status; Ctrl-C leaves the job running.",
    )
    parser.add_argument("job", metavar="JOB", help=JOB)

    parser = command(
        "wait",
        wait,
        "Wait until a job ends.",
        "icecore wait --timeout 10min train",
        more="Returns the job's exit status, also for restored jobs.",
    )
    parser.add_argument("job", metavar="JOB", help=JOB)
    parser.add_argument(
        "--timeout",
        type=SECONDS,
        metavar="DURATION",
        help="give up after this time, with exit status 124 (default: none)",
    )

    parser = command(
        "kill",
        kill,
        "Send a signal to a job.",
        "icecore kill -s KILL train",
        more="The signal goes to the job's command; KILL ends all processes of the job.",
    )
    parser.add_argument("job", metavar="JOB", help=JOB)
    parser.add_argument(
        "-s",
        "--signal",
        default="TERM",
        metavar="SIGNAL",
        help="name or number of the signal (default: TERM)",
    )

    parser = command(
        "rm",
        remove,
        "Forget jobs that have ended, and their logs.",
        "icecore rm train",
        "icecore rm --ended 7d",
        more="Snapshots are unaffected.",
    )
    parser.add_argument("job", nargs="*", metavar="JOB", help="a job's name or instance id")
    parser.add_argument(
        "--ended",
        type=SECONDS,
        metavar="DURATION",
        help="all ended jobs that were started longer ago than this",
    )


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
    )
    identity = _identity(arguments, context)
    environment = _environment(arguments, context, identity)
    registry = context.registry()

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
                emit=context.output.event,
            )
        return registry.start(
            arguments.job_command,
            name=arguments.name,
            isolation=isolation,
            cwd=arguments.cwd,
            environment=environment,
            identity=identity,
            emit=context.output.event,
        )

    if supervise.is_wanted(arguments):
        return supervise.run(
            arguments,
            context,
            start,
            lambda job, again: _Writer(job, context, "both", again).write,
        )
    job = start()
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
        writer=lambda job: _Writer(job, context, "both").write,
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


def ps(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore ps."""
    rows, keeps, users = [], [], []
    registry = context.registry()
    _say_damaged(registry, context)
    for job in registry.instances():
        state = job.state
        if not arguments.all and state not in ("running", "starting"):
            continue
        kept = registry.kept(job)
        keeps.append(units.size(kept) if kept else "–")
        context.output.result("job", {**_fields(job), "kept_bytes": kept})
        known = job.description
        users.append(known.user_name)
        ended = job.status()
        rows.append(
            [
                job.name,
                job.instance,
                str(job.pid or ""),
                str(ended) if ended is not None and state == "ended" else state,
                units.moment(known.created),
                known.restored_from[:12],
                known.snapshot[:12],
                printable_command(known.command),
            ]
        )
    columns = [
        "JOB",
        "INSTANCE",
        "PID",
        "STATE",
        "SINCE",
        "RESTORED FROM",
        "LAST SNAPSHOT",
        "COMMAND",
    ]
    if any(keep != "–" for keep in keeps):
        columns.insert(4, "KEPT ON GPUS")
        for row, keep in zip(rows, keeps, strict=True):
            row.insert(4, keep)
    if any(user != "root" for user in users):
        columns.insert(1, "USER")
        for row, user in zip(rows, users, strict=True):
            row.insert(1, user)
    context.output.table(columns, rows, right=["PID", "KEPT ON GPUS"])
    return 0


def _say_damaged(registry: Registry, context: Context) -> None:
    """Report instances that cannot be listed."""
    for instance, error in registry.damaged().items():
        context.output.event(Event("job.damaged", {"instance": instance, "error": str(error)}))


def _fields(job: Job) -> dict[str, Value]:
    known, status = job.description, job.status()
    return {
        "job": job.name,
        "instance": job.instance,
        "pid": job.pid,
        "state": job.state,
        "created": known.created,
        "command": list(known.command),
        "restored_from": known.restored_from,
        "snapshot": known.snapshot,
        "lineage": known.lineage,
        "user": known.user,
        "user_name": known.user_name,
        "exit_code": None if status is None else status.exit_code,
    }


def logs(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore logs."""
    job = context.registry().find(arguments.job)
    writer = _Writer(job, context, arguments.stream)
    for piece in job.logs(follow=arguments.follow):
        writer.write(piece)
    return 0


def attach(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore attach."""
    job = context.registry().find(arguments.job)
    return follow(job, context, seen=job.log_sizes())


def follow(job: Job, context: Context, *, seen: Mapping[Stream, int] | None = None) -> int:
    """Print a job's output until it ends; return its exit status.

    Args:
        seen: Bytes at the beginning of each log to skip. None: skip nothing, and do not announce
            that the job is followed.
    """
    writer = _Writer(job, context, "both")
    skip = dict(seen or {})
    if seen is not None:
        context.output.result("job.attached", {"job": job.name, "instance": job.instance})
        context.output.note(f"following job {job.name}; Ctrl-C detaches and leaves it running")
    try:
        for piece in job.logs(follow=True):
            skipped = min(skip.get(piece.stream, 0), len(piece.data))
            if skipped:
                skip[piece.stream] -= skipped
            writer.write(replace(piece, data=piece.data[skipped:]) if skipped else piece)
        status = job.wait()
    except Interrupted:
        context.output.note("")
        context.output.note(
            f"job {job.name} continues; 'icecore attach {job.name}' follows it again, 'icecore kill {job.name}' ends it"
        )
        raise
    context.output.result(
        "job.ended",
        {
            "job": job.name,
            "instance": job.instance,
            "how": str(status),
            "exit_code": status.exit_code,
        },
    )
    if status.code is None:
        context.output.note(f"job {job.name}: {status}")
    return status.exit_code


class _Writer:
    """Writes a job's output unchanged, or as ``job.output`` events."""

    def __init__(
        self,
        job: Job,
        context: Context,
        stream: str,
        again: Callable[[OSError], bool] = lambda error: False,
    ) -> None:
        self._job = job
        self._again = again
        self._output = context.output
        self._stream = stream
        make = codecs.getincrementaldecoder("utf-8")
        self._decoders = {name: make("surrogateescape") for name in ("stdout", "stderr")}

    def write(self, piece: LogPiece) -> None:
        """Write one piece."""
        if not piece.data or self._stream not in ("both", piece.stream):
            return
        if self._output.as_json:
            text = self._decoders[piece.stream].decode(piece.data)
            self._output.result(
                "job.output", {"job": self._job.name, "stream": piece.stream, "text": text}
            )
        else:
            self._output.raw(piece.data, error=piece.stream == "stderr", again=self._again)


def wait(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore wait."""
    job = context.registry().find(arguments.job)
    try:
        status = job.wait(arguments.timeout)
    except TimeoutError as error:
        context.output.note(f"icecore: {error}")
        return 124
    fields: dict[str, Value] = {
        "job": job.name,
        "instance": job.instance,
        "how": str(status),
        "exit_code": status.exit_code,
    }
    context.output.result("job.ended", fields, f"{job.name}: {status}")
    return status.exit_code


def kill(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore kill."""
    job = context.registry().find(arguments.job)
    number = _signal_number(arguments.signal)
    job.kill(number)
    if number == signal.SIGKILL:
        job.wait(timeout=30)
    context.output.result(
        "job.signalled",
        {"job": job.name, "instance": job.instance, "signal": signal.Signals(number).name},
    )
    return 0


def _signal_number(text: str) -> int:
    word = text.upper().removeprefix("SIG")
    named = {one.name.removeprefix("SIG"): int(one) for one in signal.Signals}
    if word in named:
        return named[word]
    if word.isdecimal() and int(word) in named.values():
        return int(word)
    raise UsageError(
        f"there is no signal {text!r}", cure="use a name such as TERM, KILL, USR1, or its number"
    )


def remove(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore rm."""
    registry = context.registry()
    if not arguments.job and arguments.ended is None:
        raise UsageError("no job is named", cure="name jobs, or give --ended 7d")
    found: list[Job] = []
    damaged: list[str] = []
    failures: list[IcecoreError] = []
    for name in arguments.job:
        try:
            found.append(registry.find(name))
        except Damaged:
            damaged.append(name)
        except NotFound as error:
            failures.append(error)
    if arguments.ended is not None:
        named = {job.instance for job in found}
        found += [job for job in registry.ended(arguments.ended) if job.instance not in named]
        _say_damaged(registry, context)
    wanted = [(job.name, job.instance, partial(registry.remove, job)) for job in found]
    wanted += [("", instance, partial(registry.remove_damaged, instance)) for instance in damaged]
    for name, instance, forget in wanted:  # a failure does not keep the others
        try:
            forget()
        except IcecoreError as error:
            failures.append(error)
        else:
            context.output.result(
                "job.removed",
                {"job": name, "instance": instance},
                f"{name} ({instance}) forgotten".lstrip(),
            )
    for failure in failures[:-1]:
        context.output.error(failure)
    if failures:
        raise failures[-1]
    return 0
