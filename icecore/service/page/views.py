"""Handlers of the views."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from typing import Any

from aiohttp import web

from icecore.errors import IcecoreError, NotFound
from icecore.host.cuda.inventory import Inventory
from icecore.host.gpu.backend import find_backend
from icecore.service.api import command_lines, models, requests
from icecore.service.api.caller import Role
from icecore.service.api.journal import Reader
from icecore.service.api.operation_handlers import may_see
from icecore.service.api.routing import Call
from icecore.service.api.snapshot_handlers import Found
from icecore.service.page import content, lineage, render
from icecore.service.page.content import Course
from icecore.service.page.sessions import session_of
from icecore.text import host_name

_OPERATIONS = 200
_AUDIT = 500
_SHOWN_SNAPSHOTS = 200
_LIVE_SECONDS = 0.5
_BEAT_SECONDS = 15.0
_NAVIGATION = (
    ("jobs", "/page", "Jobs", Role.READ),
    ("operations", "/page/operations", "Operations", Role.READ),
    ("repository", "/page/repository", "Repository", Role.READ),
    ("nodes", "/page/nodes", "Nodes", Role.READ),
    ("audit", "/page/audit", "Audit", Role.ADMIN),
)


def base(call: Call, here: str, title: str) -> dict[str, Any]:
    """Return the values that every page shows."""
    session, caller = session_of(call.request), call.known
    return {
        "here": here,
        "title": title,
        "caller": caller,
        "form_token": session.form_token if session is not None else "",
        "host": host_name(),
        "version": call.service.version,
        "may_operate": caller.role >= Role.OPERATE,
        "navigation": [
            (key, link, text)
            for key, link, text, role in _NAVIGATION
            if caller.role >= role and (key != "audit" or caller.whole_node)
        ],
    }


def may_look_after(call: Call) -> bool:
    """Return whether the caller may manage its repository as a whole."""
    try:
        call.service.own_repository(call.known)
    except IcecoreError:
        return False
    return call.known.role >= Role.OPERATE


async def show_jobs(call: Call) -> web.Response:
    """Show all jobs of the repository and of this node."""
    found = await call.service.stored(content.content_for, call.service, call.known)
    wanted = call.query.q.strip().lower()
    jobs = [job for job in found.jobs if wanted in job.name.lower()]
    fresh = Counter(job.freshness(found.at) for job in found.jobs)
    return render.page(
        "jobs.html",
        **base(call, "jobs", "Jobs"),
        found=found,
        jobs=jobs,
        q=call.query.q,
        fresh=fresh,
        running=sum(job.runs for job in found.jobs),
        short=sum(job.is_notice_short for job in found.jobs),
        most_at_risk=max((job.at_risk or 0.0 for job in found.jobs), default=0.0),
    )


async def show_job_page(call: Call) -> web.Response:
    """Show one job: its schedule, its lineages, and its snapshots over time."""
    name = call.request.match_info["name"]
    found = await call.service.stored(content.content_for, call.service, call.known)
    job = found.job(name)
    local = job.state == "running" and job.here is not None
    return render.page(
        "job.html",
        **base(call, "jobs", job.name),
        job=job,
        at=found.at,
        local=local,
        drawing=lineage.draw(job.snapshots),
        bars=content.bars_of(job),
        phases=[text for _, text in content.WINDOW_PHASES] + ["other"],
        snapshots=job.snapshots[::-1][:_SHOWN_SNAPSHOTS],
        dump_words=command_lines.of_dump(requests.DumpRequest(), job.name),
        stop_words=command_lines.of_dump(requests.DumpRequest(stop=True), job.name),
        operation=call.service.operations.supervising().get(job.name, ""),
        ended=job.here.status() if job.here is not None and not job.runs else None,
    )


async def show_snapshot_page(call: Call) -> web.Response:
    """Show what a snapshot contains."""
    found: Found = call.subject
    id = found.snapshot.snapshot
    try:
        details = await call.service.stored(call.service.backing.details, found.where, id)
        error = ""
    except IcecoreError as failure:
        details, error = None, f"{failure.message}  {failure.cure}"
    pin = requests.MarkRequest(pin=not found.snapshot.pinned)
    return render.page(
        "snapshot.html",
        **base(call, "jobs", f"Snapshot {id[:12]}"),
        snapshot=found.snapshot,
        details=details,
        error=error,
        words={
            "restore": command_lines.of_restore(requests.RestoreRequest(), id),
            "check": command_lines.of_restore(requests.RestoreRequest(dry_run=True), id),
            "diff": command_lines.of_diff(requests.DiffRequest(), id),
            "pin": command_lines.of_mark(pin, id),
        },
    )


# -- operations


async def show_operations(call: Call) -> web.Response:
    """Show the operations of this node, newest first."""
    found = [one for one in call.service.operations.all() if may_see(call, one)]
    shown = [one for one in reversed(found) if call.query.state in ("", one.state)]
    return render.page(
        "operations.html",
        **base(call, "operations", "Operations"),
        operations=shown[:_OPERATIONS],
        counts=Counter(one.state for one in found),
        state=call.query.state,
        at=time.time(),
    )


async def show_operation_page(call: Call) -> web.Response:
    """Show one operation: its phases, its log and its result."""
    operation: models.Operation = call.subject
    reader = Reader(call.service.operations.directory(operation.id), 0)
    course = await call.service.locally(content.course_of, reader, Course())
    return render.page(
        "operation.html",
        **base(call, "operations", f"{operation.kind} {operation.job}".strip()),
        **_operation(operation, course),
        can_apply=operation.kind == "gc"
        and operation.state == "succeeded"
        and operation.result.get("event") == "gc.plan"
        and may_look_after(call),
        apply_words=command_lines.of_gc(requests.GcRequest(dry_run=False)),
    )


def _operation(operation: models.Operation, course: Course) -> dict[str, Any]:
    began = min((phase.began for phase in course.phases), default=operation.created)
    now = operation.ended or time.time()
    latest = max((phase.ended or now for phase in course.phases), default=now)
    return {
        "operation": operation,
        "course": course,
        "began": began,
        "span": max(latest - began, 0.001),
        "at": now,
    }


async def live_operation(call: Call) -> web.StreamResponse:
    """Send an operation's phases and log as they grow, as server-sent events."""
    id = call.subject.id
    service = call.service
    response = web.StreamResponse(headers={**render.HEADERS, "Cache-Control": "no-store"})
    response.content_type = "text/event-stream"
    await response.prepare(call.request)
    reader, course = Reader(service.operations.directory(id), 0), Course()
    template = render.templates().get_template("operation_live.html")
    shown, beat = (-1, ""), time.monotonic()
    while True:
        operation = service.operations.get(id)
        await call.service.locally(content.course_of, reader, course)
        over = operation.state not in ("queued", "running")
        if shown != (course.last, operation.state) or _runs(course):
            shown = course.last, operation.state
            text = template.render(**_operation(operation, course))
            data = "\n".join(f"data: {line}" for line in text.splitlines())
            await response.write(f"{data}\n\n".encode())
            beat = time.monotonic()
        elif time.monotonic() - beat > _BEAT_SECONDS:
            await response.write(b": beat\n\n")
            beat = time.monotonic()
        if over:
            await response.write(b"event: over\ndata: over\n\n")
            return response
        if service.stopping or call.gone or call.revoked():
            return response
        await asyncio.sleep(_LIVE_SECONDS)


def _runs(course: Course) -> bool:
    return any(phase.ended is None for phase in course.phases)


# -- repository, nodes, audit


async def show_repository_page(call: Call) -> web.Response:
    """Show how the repository grows."""
    found = await call.service.stored(content.content_for, call.service, call.known)
    return render.page(
        "repository.html",
        **base(call, "repository", "Repository"),
        found=found,
        growth=content.growth_of(found.reading.snapshots),
        may_look_after=may_look_after(call),
        plan_words=command_lines.of_gc(requests.GcRequest(dry_run=True)),
        check_words=command_lines.of_check(requests.CheckRequest()),
    )


async def show_statistics(call: Call) -> web.Response:
    """Show live and dead bytes of the repository; this reads every map."""
    found = await call.service.stored(call.service.backing.statistics, call.subject)
    return render.page("statistics.html", found=found)


async def show_replicas(call: Call) -> web.Response:
    """Compare the replicas with the repository."""
    found = await call.service.stored(call.service.backing.replicas, call.subject)
    return render.page("replicas.html", replicas=found)


async def show_nodes(call: Call) -> web.Response:
    """Show this node, and where the jobs of the repository run."""
    service = call.service
    found = await call.service.stored(content.content_for, service, call.known)
    hosts: dict[str, list[str]] = {}
    for job in found.jobs:
        if job.runs:
            hosts.setdefault(job.host or host_name(), []).append(job.name)
    return render.page(
        "nodes.html",
        **base(call, "nodes", "Nodes"),
        found=found,
        hosts=sorted(hosts.items()),
        staging=await service.locally(service.backing.staging),
        started=service.started,
        inventory=await service.locally(_inventory),
        whole_node=call.known.whole_node,
        doctor_words=["doctor"],
    )


def _inventory() -> Inventory | str | None:
    """Return the GPUs; a text: the driver's error; None: there is no driver."""
    backend = find_backend()
    if not backend.present:
        return None
    try:
        return backend.inventory()
    except (IcecoreError, OSError) as error:
        return str(error)


async def show_audit(call: Call) -> web.Response:
    """Show the newest entries of the audit log."""
    entries = await call.service.locally(lambda: list(content.audit_of(call.service, _AUDIT)))
    wanted = call.query.q.strip().lower()
    shown = [one for one in entries if wanted in str(sorted(one.items())).lower()]
    return render.page(
        "audit.html",
        **base(call, "audit", "Audit"),
        entries=shown,
        q=call.query.q,
        path=str(call.service.audit.path),
    )


async def show_file(call: Call) -> web.Response:
    """Return a script, a style or a picture of the page."""
    about = call.request.match_info
    if "/" in about["version"]:
        raise NotFound("there is no such file")
    return render.static(about["version"], about["name"])
