"""Commands for the jobs of this node: ps, wait, kill and rm here; run in `run`, logs and attach in
`job_output`.

A job continues to run whatever happens to the command line.
"""

from __future__ import annotations

import argparse
import signal
from functools import partial
from typing import TYPE_CHECKING

from icecore import units
from icecore.commands import job_output, run
from icecore.commands.context import Context
from icecore.commands.parsing import JOB, Commands
from icecore.config.kinds import SECONDS
from icecore.errors import Damaged, IcecoreError, NotFound, UsageError
from icecore.events import Event, Value
from icecore.text import printable_command

if TYPE_CHECKING:
    from icecore.host.jobs.job import Job
    from icecore.host.jobs.registry import Registry


def add(commands: Commands) -> None:
    """Add the commands."""
    command = partial(commands.add, numpy=False)
    run.add(commands)
    parser = command("ps", ps, "List the jobs of this node.", "icecore ps -a")
    parser.add_argument("-a", "--all", action="store_true", help="include jobs that have ended")

    job_output.add(commands)
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
        more="The signal goes to the job's command; KILL ends all processes of the job."
        " A supervised job that this command ends with TERM or KILL is not restored,"
        " whatever --restart says.",
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
    job.end(number)
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
