"""Supervised jobs: ``icecore run`` with ``--resume``, ``--every``, ``--on-term`` or ``--restart``, and
the command ``schedule``. A job is supervised until it ends or is preempted.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Literal

import msgspec

from icecore import units
from icecore.commands.context import Context, Origin
from icecore.commands.parsing import Commands, add_setting, overridden
from icecore.config import DumpSettings, ForgetSettings, ScheduleSettings
from icecore.config.kinds import COUNT, SECONDS
from icecore.errors import StoreError, UsageError
from icecore.events import Event, Value

if TYPE_CHECKING:
    from icecore.host.jobs.job import Job
    from icecore.host.jobs.logs import LogPiece
    from icecore.repository import Repository
    from icecore.service.explained import Explained
    from icecore.service.supervision.instances import Tell
    from icecore.service.supervision.messages import Early
    from icecore.service.supervision.plan import Plan
    from icecore.store.maintenance.forget import Policy

_BARS = 40
#: The fields of the explanation that the command's result contains.
_OF_RESULT = (
    *("job", "interval_seconds", "auto_seconds", "optimum_seconds", "bound", "overhead"),
    *("expected_loss", "window_seconds", "background_seconds", "commit_seconds", "stop_seconds"),
    *("mean_seconds", "failures", "ran_seconds", "snapshots"),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add the options of a supervised job to ``run``."""
    group = parser.add_argument_group(
        "supervised jobs",
        "With any of --resume, --every, --on-term and --restart, this process supervises the job."
        " That requires --name and a repository.",
    )
    group.add_argument(
        "--resume",
        action="store_true",
        help="restore the job from its newest snapshot if there is one, else start it",
    )
    group.add_argument(
        "--or-start",
        action="store_true",
        help="with --resume: start the job anew if no snapshot can be restored",
    )
    group.add_argument(
        "--fall-back",
        type=COUNT,
        default=0,
        metavar="N",
        help="with --resume: try up to N older snapshots if the newest cannot be restored",
    )
    group.add_argument(
        "--every",
        type=_every,
        metavar="TIME|auto",
        help="interval between snapshots; auto: computed from their measured cost and the failure rate",
    )
    group.add_argument(
        "--on-term",
        choices=("snapshot", "pass"),
        metavar="snapshot|pass",
        help="on TERM, USR1, INT or HUP: stop the job with a snapshot (default), or pass the signal to it",
    )
    group.add_argument(
        "--restart",
        type=_restarts,
        default=0,
        metavar="no|on-failure[:N]",
        help="restore the job when it fails, at most N times before it gets past its failure",
    )
    for key, what in (
        (
            "preempted_exit",
            "exit status if the job was stopped with a snapshot, or ended during the stop and is to be restored",
        ),
        ("requeue_command", "shell command to run before that exit"),
        (
            "notice",
            "time from a signal until this machine is gone; warn if a stop takes longer",
        ),
        ("notice_command", "shell command that ends with status 0 once the job has to stop"),
        ("notice_url", "URL that answers with status 200 once the job has to stop"),
        ("max_overhead", "with --every auto: share of the job's time that snapshots may cost"),
        ("max_loss", "with --every auto: work that a failure may lose"),
    ):
        add_setting(group, ScheduleSettings, key, what)  # type: ignore[arg-type]
    add_setting(
        group,  # type: ignore[arg-type]
        DumpSettings,
        "background_cpu",
        "share of the cores that scanning and storing a snapshot may use while the job runs",
        default="auto: as many as are idle, at least an eighth",
    )
    for key in ForgetSettings.__struct_fields__:
        rule = key.removeprefix("keep_")
        add_setting(
            group,  # type: ignore[arg-type]
            ForgetSettings,
            key,
            f"after each snapshot, forget the job's older ones by this rule of forget: keep {rule}",
        )


def add(commands: Commands) -> None:
    """Add the command ``schedule``."""
    parser = commands.add(
        "schedule",
        schedule,
        "Explain how often icecore takes snapshots of a supervised job, and what they cost.",
        "icecore schedule explain train",
    )
    parser.add_argument("action", choices=("explain",), metavar="explain", help="print the numbers")
    parser.add_argument("job", metavar="JOB", help="name of the job")


def is_wanted(arguments: argparse.Namespace) -> bool:
    """Return whether the options ask for supervision."""
    return bool(arguments.resume or arguments.every or arguments.on_term or arguments.restart)


def require(arguments: argparse.Namespace, *, served: bool = False) -> None:
    """Require the options of a supervised job.

    Args:
        served: The node service supervises the job and outlives this command.

    Raises:
        UsageError: The name is missing, or an option excludes supervision.
    """
    from icecore.host.jobs.registry import require_name

    if not arguments.name:
        raise UsageError(
            "a supervised job requires a name, by which its snapshots are found",
            cure="add --name NAME",
        )
    require_name(arguments.name)
    if (arguments.detach and not served) or arguments.rm:
        raise UsageError(
            "a supervised job runs in the foreground, and its record is kept",
            cure="leave out -d and --rm; for the background, use 'icecore run … &' or a service manager",
        )


def run(
    arguments: argparse.Namespace,
    context: Context,
    start: Callable[[], Job],
    writer: Callable[[Job, Callable[[OSError], bool]], Callable[[LogPiece], None]],
    owner: int,
) -> int:
    """Run a supervised job.

    Args:
        start: Starts the job anew.
        owner: The uid of the jobs that it starts. Other users' jobs of this name are ignored.
        writer: Returns the function that writes the output of an instance. Its second argument decides
            whether to retry a failed write.
    """
    from icecore.service.supervision.messages import Early

    if context.origin is not None or arguments.on_term == "pass":
        return _run(arguments, context, start, writer, owner, None)
    early = Early()
    try:
        return _run(arguments, context, start, writer, owner, early)
    finally:
        early.close()


def _run(
    arguments: argparse.Namespace,
    context: Context,
    start: Callable[[], Job],
    writer: Callable[[Job, Callable[[OSError], bool]], Callable[[LogPiece], None]],
    owner: int,
    early: Early | None,
) -> int:
    from icecore.host.kernel.libc import keep_few_arenas
    from icecore.node.engine import RepositoryEngine
    from icecore.service.record import read
    from icecore.service.supervision.leaving import leave_before
    from icecore.service.supervision.messages import Asked
    from icecore.service.supervision.supervisor import Supervisor

    require(arguments)
    if context.config.dump.memory == "streamed" and arguments.on_term != "pass":
        raise UsageError(
            "a job cannot be stopped with a streamed snapshot",
            cure="choose another value of [dump] memory, or use --on-term pass",
        )
    keep_few_arenas()
    if context.origin is None:
        context.output.relay()
    plan = _plan(arguments, context, start)
    writers: dict[str, Callable[[LogPiece], None]] = {}

    def write(job: Job, piece: LogPiece) -> None:
        if job.instance not in writers:
            writers[job.instance] = writer(job, supervisor.is_patient)
        writers[job.instance](piece)

    def emit(event: Event) -> None:
        context.output.event(event)
        if not context.output.as_json:
            for line in words(event):
                context.output.note(line)

    def tell(name: str, **fields: Value) -> None:
        emit(Event(name, {"job": plan.name, **fields}))

    try:
        with nullcontext() if early is None else early.interrupting():
            if early is not None and not plan.notice:
                plan = _with_grace(plan, tell)
            repository = _repository(context, plan, tell)
    except Asked as asked:
        state = context.registry().state
        return leave_before(plan, asked.number, read(state, plan.name), tell)
    config = msgspec.structs.replace(
        context.config, dump=overridden(context.config.dump, arguments)
    )
    engine = RepositoryEngine(repository, config, (context.origin or Origin()).identity, owner)
    supervisor = Supervisor(
        plan,
        engine,
        write=write,
        emit=emit,
        messages=None if early is None else early.messages,
    )
    return supervisor.run()


def _plan(arguments: argparse.Namespace, context: Context, start: Callable[[], Job]) -> Plan:
    from icecore.service.interval import Bounds
    from icecore.service.supervision.plan import Plan

    own = overridden(context.config.schedule, arguments)
    origin = context.origin or Origin()
    return Plan(
        name=arguments.name,
        start=start,
        resume=arguments.resume,
        lineage=origin.lineage,
        stop=origin.stop,
        stopped=origin.stopped,
        or_start=arguments.or_start,
        fall_back=arguments.fall_back,
        every=arguments.every,
        on_term=arguments.on_term or "snapshot",
        preempted_exit=own.preempted_exit,
        restarts=arguments.restart,
        requeue=own.requeue_command,
        notice=own.notice,
        notice_command=own.notice_command,
        notice_url=own.notice_url,
        bounds=Bounds(own.max_overhead, own.max_loss),
        failure_seconds=own.failure_seconds,
        slow_down=own.slow_down,
        keep=_policy(arguments, context),
        data=arguments.data,
        log_limit=arguments.log_limit,
    )


def _with_grace(plan: Plan, tell: Tell) -> Plan:
    """Return the plan with the notice that Slurm or systemd gives, if it is known."""
    from icecore.service.supervision.grace import find_grace

    grace = find_grace(os.environ)
    if grace is None:
        return plan
    tell("run.notice", notice_seconds=grace.seconds, setting=grace.setting)
    return msgspec.structs.replace(plan, notice=grace.seconds)


def _repository(context: Context, plan: Plan, tell: Tell) -> Repository:
    """Return the repository. If the job is to be resumed, wait until it can be reached."""
    from icecore.service.supervision.patience import patiently

    def told(error: StoreError, pause: float) -> None:
        tell("run.waiting", error=str(error), next_seconds=pause)

    if not plan.resume or context.origin is not None:  # the service retries by itself
        return context.repository()
    return patiently(context.repository, told=told, wait=time.sleep)


def words(event: Event) -> list[str]:
    """Return the lines to print for an event of a supervised job."""
    known = event.fields
    job = known.get("job")

    def seconds(name: str) -> str:
        value = known.get(name)
        return units.seconds(value) if isinstance(value, int | float) else "?"

    match event.name:
        case "run.lease":
            return [
                f"job {job}: host {known['host']} holds its lease; waiting for a heartbeat from there"
            ]
        case "run.waiting":
            return [f"job {job} waits for the repository, retrying in {seconds('next_seconds')}"]
        case "run.adopted":
            return [f"job {job} already runs, as process {known['pid']}; taking over"]
        case "run.data_ignored":
            paths = known["paths"]
            named = ", ".join(map(str, paths)) if isinstance(paths, list) else ""
            return [
                f"warning: job {job} keeps the data directories with which it was started;"
                f" not among them: {named}"
            ]
        case "run.log_limit_ignored":
            limit = known["log_limit"]
            size = units.size(limit) if isinstance(limit, int) and limit else "none"
            return [f"warning: job {job} keeps its log limit ({size}); --log-limit is ignored"]
        case "run.resumed":
            return [f"job {job} was restored from {str(known['snapshot'])[:12]}"]
        case "run.stopping":
            return [f"job {job}: {known['why']}; stopping it with a snapshot"]
        case "run.output_failed":
            return [f"warning: cannot write the output of job {job}, retrying: {known['error']}"]
        case "run.preempted":
            return [f"job {job} was stopped with snapshot {str(known['snapshot'])[:12]}"]
        case "run.ended_early":
            last = str(known["snapshot"])[:12]
            remains = f"; newest snapshot: {last}" if last else "; no snapshot"
            return [f"job {job} ended before it was stopped: {known['how']}{remains}"]
        case "run.ended_on_request":
            return [f"job {job}: {known['how']}, as 'icecore kill' asked; not restored"]
        case "run.failed":
            return [f"job {job}: {known['how']}"]
        case "run.gave_up":
            return [
                f"job {job} failed {known['failures']} times and did not get past its failure;"
                " giving up"
            ]
        case "run.notice":
            return [
                f"job {job}: {seconds('notice_seconds')} from a signal to the kill"
                f" ({known['setting']}); --notice overrides it"
            ]
        case "run.notice_short":
            return [
                f"warning: stopping job {job} takes about {seconds('stop_seconds')}, but the notice is"
                f" {seconds('notice_seconds')}"
            ]
        case "run.paused":
            return [f"job {job} is paused: the repository cannot be reached to renew its lease"]
        case "run.unpaused":
            return [f"job {job} runs again"]
    return []


def _every(text: str) -> float | Literal["auto"]:
    if text == "auto":
        return "auto"
    value = SECONDS(text)
    if value <= 0:
        raise argparse.ArgumentTypeError("a duration greater than 0, or 'auto'")
    return value


def _restarts(text: str) -> int:
    if text == "no":
        return 0
    kind, separator, count = text.partition(":")
    if kind != "on-failure" or (separator and not count.isdecimal()):
        raise argparse.ArgumentTypeError("'no', 'on-failure' or 'on-failure:N'")
    return int(count) if separator else -1


def _policy(arguments: argparse.Namespace, context: Context) -> Policy | None:
    from icecore.store.maintenance.forget import Policy

    settings = overridden(context.config.forget, arguments)
    values = {
        key.removeprefix("keep_"): getattr(settings, key) for key in settings.__struct_fields__
    }
    if not any(values.values()):
        return None
    within = values.pop("within")
    return Policy(**values, within_seconds=within)


def schedule(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore schedule."""
    from icecore.host.jobs.registry import require_name

    require_name(arguments.job)
    found = _explained(arguments.job, context)
    output = context.output
    fields_ = msgspec.to_builtins(found)
    output.result("schedule", {name: fields_[name] for name in _OF_RESULT})
    why = {
        "optimum": "Daly's optimum",
        "overhead": f"snapshots may cost {found.max_overhead:.1%} of its time",
        "commit": "a snapshot takes so long",
        "loss": f"a failure may cost {units.seconds(found.max_loss_seconds)}",
    }[found.bound]
    auto = f"every {units.seconds(found.auto_seconds)} ({why})"
    given = f"every {units.seconds(found.every_seconds)}, as requested; 'auto' would choose "
    for line in (
        f"{arguments.job}: a snapshot {given if found.every_seconds else ''}{auto}",
        f"  a snapshot costs {units.seconds(found.cost_seconds)}: the job stands still"
        f" {units.seconds(found.window_seconds)}, and is slower for"
        f" {units.seconds(found.background_seconds)}",
        f"  committed {units.seconds(found.commit_seconds)} after its window;"
        f" stopping it takes at most about {units.seconds(found.stop_seconds)}",
        f"  fails about every {units.seconds(found.mean_seconds)} ({found.failures} failures in"
        f" {units.seconds(found.ran_seconds)}, after an assumption of"
        f" {units.seconds(found.prior_seconds)})",
        "",
    ):
        output.line(line)
    together = [point.overhead + point.expected_loss for point in found.curve]
    output.table(
        ["EVERY", "SNAPSHOTS", "FAILURES", "TOGETHER", ""],
        [
            [
                units.seconds(point.seconds),
                f"{point.overhead:.2%}",
                f"{point.expected_loss:.2%}",
                f"{total:.2%}",
                "█" * max(1, round(_BARS * total / max(together))),
            ]
            for point, total in zip(found.curve, together, strict=True)
        ],
        title="what the job loses, by interval",
        right=["SNAPSHOTS", "FAILURES", "TOGETHER"],
    )
    return 0


def _explained(job: str, context: Context) -> Explained:
    """Return the numbers behind a job's interval. Ask the service, if it is used.

    Raises:
        NotFound: No snapshot of it was taken under supervision on this node.
    """
    from icecore.service.explained import Explained, explain

    if context.service is not None:
        from icecore.remote.connection import at

        return msgspec.convert(context.service.get(at("jobs", job, "schedule")), Explained)
    from icecore.api import registry
    from icecore.service.record import read

    return explain(job, read(registry(context.config).state, job), context.config.schedule)
