"""The commands that the node service runs as operations; this client prints their output."""

from __future__ import annotations

import argparse
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any

import msgspec

from icecore.commands.context import Context
from icecore.commands.parsing import gpu_map, overridden
from icecore.commands.replay import Record, cancel, follow
from icecore.config import DumpSettings, ForgetSettings, RestoreSettings
from icecore.environment import job_environment
from icecore.errors import IcecoreError, UsageError
from icecore.events import Event
from icecore.host.jobs.job import Job
from icecore.host.jobs.logs import LogPiece, Stream
from icecore.remote.connection import Service, at
from icecore.remote.jobs import RemoteJob, RemoteRegistry
from icecore.service.api import options
from icecore.text import is_utf8

Writer = Callable[[LogPiece], None]
_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT, signal.SIGHUP)


def dump(arguments: argparse.Namespace, context: Context, service: Service) -> int:
    """Run icecore dump."""
    _refuse(arguments, [*_others(DumpSettings, options.DUMP), "job", "repository"])
    body = {
        "stop": arguments.stop,
        "keep_resident": arguments.keep_resident,
        "tags": arguments.tag,
        "pinned": arguments.pin,
        **_given(arguments, options.DUMP),
    }
    begun = service.post(at("jobs", arguments.target, "dump"), body)
    return int(follow(service, begun, context)["exit_status"])


def restore(
    arguments: argparse.Namespace,
    context: Context,
    service: Service,
    followed: Callable[[Job, dict[Stream, int]], int],
) -> int:
    """Run icecore restore.

    Args:
        followed: Follows a job's output until it ends; returns its exit status.
    """
    others = _others(RestoreSettings, options.RESTORE)
    _refuse(arguments, [*others, "root", "files_to", "read_only", "repository"])
    body = {
        "dry_run": arguments.dry_run,
        "name": arguments.name,
        "from_resident": arguments.from_resident,
        "gpu_map": gpu_map(arguments.gpu_map),
        **_given(arguments, options.RESTORE),
    }
    running: Record = {}

    def told(record: Record) -> bool:
        if record["do"] == "event" and record["event"]["event"] == "restore.running":
            running.update(record["event"])
        return True

    begun = service.post(at("snapshots", arguments.snapshot, "restore"), body)
    status = int(follow(service, begun, context, told=told)["exit_status"])
    if not arguments.attach or status or not running.get("instance"):
        return status
    job = RemoteRegistry(service).find(running["instance"])
    return followed(job, {"stdout": 0, "stderr": 0, **running["log_bytes"]})


def show(arguments: argparse.Namespace, context: Context, service: Service) -> int:
    """Run icecore show."""
    begun = service.post(at("snapshots", arguments.snapshot, "show"), {"all": arguments.all})
    return int(follow(service, begun, context)["exit_status"])


def diff(arguments: argparse.Namespace, context: Context, service: Service) -> int:
    """Run icecore diff."""
    newer, older = arguments.newer or arguments.older, ""
    if arguments.newer:
        older = service.get(at("snapshots", arguments.older))["snapshot"]["snapshot"]
    body = {"older": older, "all": arguments.all}
    begun = service.post(at("snapshots", newer, "diff"), body)
    return int(follow(service, begun, context)["exit_status"])


def mark(arguments: argparse.Namespace, context: Context, service: Service) -> int:
    """Run icecore mark."""
    body = {"pin": arguments.pin, "add_tags": arguments.tag, "remove_tags": arguments.untag}
    begun = service.post(at("snapshots", arguments.snapshot, "mark"), body)
    return int(follow(service, begun, context)["exit_status"])


def run(
    arguments: argparse.Namespace,
    context: Context,
    service: Service,
    *,
    supervised: bool,
    writer: Callable[[Job], Writer],
    followed: Callable[[Job], int],
) -> int:
    """Run icecore run.

    Args:
        writer: Returns the function that writes the output of a job.
        followed: Follows a job's output until it ends; returns its exit status.
    """
    _refuse(arguments, ["user", "like_process", "repository"])
    body = _run_body(arguments, context)
    if supervised:
        body["supervise"] = _supervise_body(arguments)
    begun = service.post("/v1/jobs", body)
    if supervised and arguments.detach:
        return _detached(service, begun, context)
    if supervised:
        return _supervised(service, begun, context, writer)
    started: Record = {}

    def told(record: Record) -> bool:
        if record["do"] == "event" and record["event"]["event"] == "run.started":
            started.update(record["event"])
        return bool(arguments.detach or record["do"] != "line")

    status = int(follow(service, begun, context, told=told)["exit_status"])
    if status or arguments.detach:
        return status
    jobs = RemoteRegistry(service)
    status = followed(jobs.find(started["instance"]))
    if arguments.rm:
        jobs.remove(jobs.find(started["instance"]))
    return status


def _detached(service: Service, begun: Record, context: Context) -> int:
    """Wait until a supervised job runs, print its name, and leave it to the service."""

    def told(record: Record) -> bool:
        if record.get("event", {}).get("event") == "run.following":
            raise _Runs
        return True

    try:
        return int(follow(service, begun, context, told=told)["exit_status"])
    except _Runs:
        context.output.line(begun["job"])
        return 0


class _Runs(Exception):
    """The job runs."""


def _supervised(
    service: Service, begun: Record, context: Context, writer: Callable[[Job], Writer]
) -> int:
    """Show a supervised job until its supervisor ends; forward signals to the supervisor."""
    readers: list[threading.Thread] = []

    def told(record: Record) -> bool:
        event = record.get("event", {})
        if event.get("event") == "run.following":
            job = RemoteRegistry(service).find(event["instance"])
            thread = threading.Thread(target=_show, args=(job, event["seen"], writer(job)))
            thread.daemon = True
            thread.start()
            readers.append(thread)
        return True

    with _passing_signals(service, begun["id"]):
        try:
            return int(follow(service, begun, context, told=told)["exit_status"])
        finally:
            for thread in readers:
                thread.join(30)


def _show(job: RemoteJob, seen: dict[Stream, int], write: Writer) -> None:
    with suppress(IcecoreError, OSError):  # the job was removed, or nobody reads
        for piece in job.logs_after(seen, follow=True):
            write(piece)


@contextmanager
def _passing_signals(service: Service, id: str) -> Iterator[None]:
    def told(number: int, frame: FrameType | None) -> None:
        with suppress(IcecoreError, OSError):
            cancel(service, id, number)

    before = {number: signal.signal(number, told) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _run_body(arguments: argparse.Namespace, context: Context) -> dict[str, Any]:
    environment, held = job_environment(os.environ)
    for pair in arguments.env:
        name, separator, value = pair.partition("=")
        if not name:
            raise UsageError(
                f"--env {pair!r} is wrong", cure="write NAME=VALUE, or NAME to pass a variable on"
            )
        if not separator and name not in os.environ:
            raise UsageError(
                f"--env {name}: the environment has no variable of this name",
                cure=f"write {name}=VALUE",
            )
        environment[name] = value if separator else os.environ[name]
    held = [name for name in held if name not in environment]
    if held:
        context.output.event(Event("run.withheld", {"names": list(held)}))
    words = [*arguments.job_command, *environment, *environment.values()]
    if not all(map(is_utf8, words)):
        raise UsageError(
            "the command or the environment is not UTF-8, and the service accepts only UTF-8",
            cure="unset the variable, or run as root",
        )
    return {
        "command": arguments.job_command,
        "cwd": os.path.abspath(arguments.cwd or os.getcwd()),
        "name": arguments.name,
        "environment": environment,
        "gpu": arguments.gpu,
        # A service of an earlier version refuses the field.
        **({"data": list(map(os.path.abspath, arguments.data))} if arguments.data else {}),
        **_given(arguments, options.RUN),
    }


def _supervise_body(arguments: argparse.Namespace) -> dict[str, Any]:
    own = _given(arguments, options.SUPERVISE)
    keep = _given(arguments, ForgetSettings.__struct_fields__)
    return {
        "resume": arguments.resume,
        "or_start": arguments.or_start,
        "fall_back": arguments.fall_back,
        "restarts": arguments.restart,
        **own,
        **({"keep": keep} if keep else {}),
    }


def forget(arguments: argparse.Namespace, context: Context, service: Service) -> int:
    """Run icecore forget."""
    _refuse(arguments, ["gc"])
    given = {
        key: getattr(arguments, key)
        for key in ForgetSettings.__struct_fields__
        if getattr(arguments, key) is not None
    }
    body: dict[str, Any] = {"dry_run": arguments.dry_run}
    if arguments.snapshot:
        if given or arguments.keep_tag or arguments.job:
            raise UsageError(
                "named snapshots and a policy exclude each other",
                cure="run forget twice: with names, then with the policy",
            )
        body["snapshots"] = [
            service.get(at("snapshots", name))["snapshot"]["snapshot"]
            for name in arguments.snapshot
        ]
    else:
        if not arguments.job:
            raise UsageError(
                "through the service, a policy applies to one job", cure="add --job JOB"
            )
        keep = overridden(context.config.forget, arguments)
        policy = msgspec.structs.asdict(keep)
        body |= {"job": arguments.job, "keep": policy, "keep_tags": arguments.keep_tag}
    begun = service.post("/v1/snapshots/forget", body)
    return int(follow(service, begun, context)["exit_status"])


def _given(arguments: argparse.Namespace, names: Sequence[str]) -> dict[str, Any]:
    """Return the options that the command line gives."""
    values = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in values.items() if value is not None}


def _others(settings: type[msgspec.Struct], names: Sequence[str]) -> list[str]:
    return [key for key in settings.__struct_fields__ if key not in names]


def _refuse(arguments: argparse.Namespace, names: Sequence[str]) -> None:
    """Refuse options that the service accepts from no caller."""
    for name in names:
        if getattr(arguments, name, None) not in (None, "", False, []):
            option = name.replace("_", "-")
            raise UsageError(
                f"the service refuses --{option}, because it runs as root",
                cure="leave it out, ask an administrator to configure it, or run as root",
            )
