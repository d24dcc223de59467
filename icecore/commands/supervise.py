"""Supervised jobs: ``icecore run`` with ``--resume``, ``--every``, ``--on-term`` or ``--restart``, and
the command ``schedule``. A job is supervised until it ends or is preempted.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Literal

from icecore import units
from icecore.commands.context import Context, Origin
from icecore.commands.parsing import Commands, add_setting, overridden
from icecore.config import DumpSettings, ForgetSettings, ScheduleSettings
from icecore.config.kinds import COUNT, SECONDS
from icecore.errors import NotFound, UsageError
from icecore.events import Event, Value

if TYPE_CHECKING:
    from icecore.host.jobs.job import Job, LogPiece
    from icecore.store.maintenance.forget import Policy

_BARS = 40


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
        help="restore the job when it fails, at most N times without a new snapshot in between",
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
    for about in fields(ForgetSettings):
        rule = about.name.removeprefix("keep_")
        add_setting(
            group,  # type: ignore[arg-type]
            ForgetSettings,
            about.name,
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
) -> int:
    """Run a supervised job.

    Args:
        start: Starts the job anew.
        writer: Returns the function that writes the output of an instance. Its second argument decides
            whether to retry a failed write.
    """
    from icecore.host.kernel.libc import keep_few_arenas
    from icecore.node.engine import RepositoryEngine
    from icecore.service.interval import Bounds
    from icecore.service.supervision.grace import find_grace
    from icecore.service.supervision.plan import Plan
    from icecore.service.supervision.supervisor import Supervisor

    require(arguments)
    keep_few_arenas()
    own = overridden(context.config.schedule, arguments)
    origin = context.origin or Origin()
    grace = None
    if not own.notice and context.origin is None and arguments.on_term != "pass":
        grace = find_grace(os.environ)
    plan = Plan(
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
        notice=grace.seconds if grace is not None else own.notice,
        notice_command=own.notice_command,
        notice_url=own.notice_url,
        bounds=Bounds(own.max_overhead, own.max_loss),
        failure_seconds=own.failure_seconds,
        slow_down=own.slow_down,
        keep=_policy(arguments, context),
        data=arguments.data,
    )
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

    if grace is not None:
        emit(
            Event(
                "run.notice",
                {"job": plan.name, "notice_seconds": grace.seconds, "setting": grace.setting},
            )
        )
    config = replace(context.config, dump=overridden(context.config.dump, arguments))
    engine = RepositoryEngine(context.repository(), config, origin.identity)
    supervisor = Supervisor(plan, engine, write=write, emit=emit)
    return supervisor.run()


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
        case "run.adopted":
            return [f"job {job} already runs, as process {known['pid']}; taking over"]
        case "run.data_ignored":
            paths = known["paths"]
            named = ", ".join(map(str, paths)) if isinstance(paths, list) else ""
            return [
                f"warning: job {job} keeps the data directories with which it was started;"
                f" not among them: {named}"
            ]
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
            return [f"job {job} failed {known['failures']} times without a new snapshot; giving up"]
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
        about.name.removeprefix("keep_"): getattr(settings, about.name)
        for about in fields(settings)
    }
    if not any(values.values()):
        return None
    within = values.pop("within")
    return Policy(**values, within_seconds=within)


def schedule(arguments: argparse.Namespace, context: Context) -> int:
    """Run icecore schedule."""
    from icecore.api import registry
    from icecore.host.jobs.registry import require_name
    from icecore.service.interval import Bounds, choose, curve
    from icecore.service.record import Basis, read

    settings = context.config.schedule
    require_name(arguments.job)
    known = read(registry(context.config).state, arguments.job)
    own = known.basis or Basis(
        every=0.0,
        max_overhead=settings.max_overhead,
        max_loss=settings.max_loss,
        slow_down=settings.slow_down,
        failure_seconds=settings.failure_seconds,
    )
    cost = known.cost(own.slow_down)
    if cost is None:
        raise NotFound(
            f"no supervised job {arguments.job} has taken a snapshot on this node",
            cure="'icecore run --name NAME --every auto -- COMMAND' starts one",
        )
    rate = known.rate(own.failure_seconds)
    chosen = choose(cost, rate, Bounds(own.max_overhead, own.max_loss))
    output = context.output
    fields_: dict[str, Value] = {
        "job": arguments.job,
        "interval_seconds": own.every or chosen.seconds,
        "auto_seconds": chosen.seconds,
        "optimum_seconds": chosen.optimum_seconds,
        "bound": chosen.bound,
        "overhead": chosen.overhead,
        "expected_loss": chosen.expected_loss,
        "window_seconds": cost.window_seconds,
        "background_seconds": cost.background_seconds,
        "commit_seconds": cost.commit_seconds,
        "stop_seconds": known.stop_seconds,
        "mean_seconds": rate.mean_seconds,
        "failures": rate.failures,
        "ran_seconds": rate.seconds,
        "snapshots": len(known.taken),
    }
    output.result("schedule", fields_)
    why = {
        "optimum": "Daly's optimum",
        "overhead": f"snapshots may cost {own.max_overhead:.1%} of its time",
        "commit": "a snapshot takes so long",
        "loss": f"a failure may cost {units.seconds(own.max_loss)}",
    }[chosen.bound]
    auto = f"every {units.seconds(chosen.seconds)} ({why})"
    given = f"every {units.seconds(own.every)}, as requested; 'auto' would choose "
    for line in (
        f"{arguments.job}: a snapshot {given if own.every else ''}{auto}",
        f"  a snapshot costs {units.seconds(cost.seconds)}: the job stands still"
        f" {units.seconds(cost.window_seconds)}, and is slower for"
        f" {units.seconds(cost.background_seconds)}",
        f"  committed {units.seconds(cost.commit_seconds)} after its window;"
        f" stopping it takes about {units.seconds(known.stop_seconds)}",
        f"  fails about every {units.seconds(rate.mean_seconds)} ({rate.failures} failures in"
        f" {units.seconds(rate.seconds)}, after an assumption of"
        f" {units.seconds(rate.prior_seconds)})",
        "",
    ):
        output.line(line)
    points = [chosen.seconds * 2.0**step for step in range(-4, 5)]
    rows = curve(cost, rate, points)
    most = max(overhead + loss for _, overhead, loss in rows)
    output.table(
        ["EVERY", "SNAPSHOTS", "FAILURES", "TOGETHER", ""],
        [
            [
                units.seconds(each),
                f"{overhead:.2%}",
                f"{loss:.2%}",
                f"{overhead + loss:.2%}",
                "█" * max(1, round(_BARS * (overhead + loss) / most)),
            ]
            for each, overhead, loss in rows
        ],
        title="what the job loses, by interval",
        right=["SNAPSHOTS", "FAILURES", "TOGETHER"],
    )
    return 0
