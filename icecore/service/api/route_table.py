"""Every route of the API. Routing, authorisation and the OpenAPI document are made from this table."""

from __future__ import annotations

from icecore.service.api import job_handlers, models, node_handlers, operation_handlers, requests
from icecore.service.api import snapshot_handlers as snapshots
from icecore.service.api.caller import Role
from icecore.service.api.documents import openapi_document
from icecore.service.api.routing import Route
from icecore.service.explained import Explained

_READ, _OPERATE, _ADMIN = Role.READ, Role.OPERATE, Role.ADMIN
_JOB, _SNAPSHOT, _OPERATION = (
    "/v1/jobs/{job}",
    "/v1/snapshots/{snapshot}",
    "/v1/operations/{operation}",
)


def _starts(
    path: str,
    scope: str,
    what: str,
    handle: object,
    body: object,
    query: object = None,
    role: Role = _OPERATE,
) -> Route:
    """Return a route that starts an operation."""
    return Route(
        "POST",
        path,
        role,
        scope,  # type: ignore[arg-type]
        what,
        handle,  # type: ignore[arg-type]
        models.Operation,
        body=body,
        query=query,
        status=202,
        starts=True,
    )


ROUTES: tuple[Route, ...] = (
    Route(
        "GET",
        "/v1/healthz",
        Role.PUBLIC,
        "none",
        "Tell whether the service works.",
        node_handlers.health,
        models.Health,
    ),
    Route(
        "GET",
        "/v1/openapi.json",
        Role.PUBLIC,
        "none",
        "Return this document.",
        openapi_document,
        "application/json",
    ),
    Route(
        "GET",
        "/v1/self",
        _READ,
        "none",
        "Show the caller as the service knows it.",
        node_handlers.show_self,
        models.Self,
    ),
    Route(
        "GET",
        "/v1/jobs",
        _READ,
        "own",
        "List jobs, oldest first.",
        job_handlers.list_jobs,
        models.Items[models.Job],
        query=requests.JobsQuery,
    ),
    _starts(
        "/v1/jobs",
        "own",
        "Start a command as a job of the caller.",
        job_handlers.run_job,
        requests.RunRequest,
    ),
    Route("GET", _JOB, _READ, "job", "Show a job.", job_handlers.show_job, models.Job),
    Route(
        "DELETE",
        _JOB,
        _OPERATE,
        "job",
        "Forget a job that has ended, and its logs.",
        job_handlers.remove_job,
        None,
        status=204,
    ),
    Route(
        "GET",
        f"{_JOB}/logs",
        _READ,
        "job",
        "Return a job's output.",
        job_handlers.job_logs,
        "application/x-ndjson",
        query=requests.LogsQuery,
    ),
    Route(
        "GET",
        f"{_JOB}/schedule",
        _READ,
        "job",
        "Explain how often snapshots of a supervised job are taken, and what they cost.",
        job_handlers.explain_schedule,
        Explained,
    ),
    Route(
        "POST",
        f"{_JOB}/signal",
        _OPERATE,
        "job",
        "Send a signal to a job.",
        job_handlers.signal_job,
        models.Job,
        body=requests.SignalRequest,
    ),
    _starts(
        f"{_JOB}/dump",
        "job",
        "Take a snapshot of a job, and end it if asked.",
        job_handlers.dump_job,
        requests.DumpRequest,
    ),
    Route(
        "GET",
        "/v1/snapshots",
        _READ,
        "own",
        "List snapshots, oldest first.",
        snapshots.list_snapshots,
        models.Items[models.Snapshot],
        query=requests.SnapshotsQuery,
    ),
    _starts(
        "/v1/snapshots/forget",
        "own",
        "Forget snapshots.",
        snapshots.forget_snapshots,
        requests.ForgetRequest,
        requests.SnapshotQuery,
    ),
    Route(
        "GET",
        _SNAPSHOT,
        _READ,
        "snapshot",
        "Show what a snapshot contains.",
        snapshots.show_snapshot,
        models.SnapshotDetails,
        query=requests.SnapshotQuery,
    ),
    _starts(
        f"{_SNAPSHOT}/restore",
        "snapshot",
        "Restore a snapshot's processes.",
        snapshots.restore_snapshot,
        requests.RestoreRequest,
        requests.SnapshotQuery,
    ),
    _starts(
        f"{_SNAPSHOT}/show",
        "snapshot",
        "Print what a snapshot contains.",
        snapshots.print_snapshot,
        requests.ShowRequest,
        requests.SnapshotQuery,
        _READ,
    ),
    _starts(
        f"{_SNAPSHOT}/diff",
        "snapshot",
        "Compare a snapshot with an older one.",
        snapshots.compare_snapshot,
        requests.DiffRequest,
        requests.SnapshotQuery,
        _READ,
    ),
    _starts(
        f"{_SNAPSHOT}/mark",
        "snapshot",
        "Pin or tag a snapshot.",
        snapshots.mark_snapshot,
        requests.MarkRequest,
        requests.SnapshotQuery,
    ),
    Route(
        "GET",
        "/v1/operations",
        _READ,
        "own",
        "List operations, oldest first.",
        operation_handlers.list_operations,
        models.Items[models.Operation],
        query=requests.OperationsQuery,
    ),
    Route(
        "GET",
        _OPERATION,
        _READ,
        "operation",
        "Show an operation.",
        operation_handlers.show_operation,
        models.Operation,
    ),
    Route(
        "POST",
        f"{_OPERATION}/cancel",
        _OPERATE,
        "operation",
        "Ask an operation to end.",
        operation_handlers.cancel_operation,
        models.Operation,
        body=requests.CancelRequest,
    ),
    Route(
        "GET",
        f"{_OPERATION}/events",
        _READ,
        "operation",
        "Follow an operation's events.",
        operation_handlers.operation_events,
        "text/event-stream",
        query=requests.EventsQuery,
    ),
    Route(
        "GET",
        "/v1/repository",
        _READ,
        "repository",
        "Show the repository's sizes.",
        snapshots.show_repository,
        models.Repository,
    ),
    _starts(
        "/v1/repository/gc",
        "repository",
        "Free the space of forgotten snapshots.",
        snapshots.collect_repository,
        requests.GcRequest,
    ),
    _starts(
        "/v1/repository/check",
        "repository",
        "Verify the objects that snapshots need.",
        snapshots.check_repository,
        requests.CheckRequest,
    ),
    Route(
        "GET", "/v1/node", _ADMIN, "node", "Show this node.", node_handlers.show_node, models.Node
    ),
    _starts(
        "/v1/node/doctor",
        "node",
        "Examine this machine.",
        node_handlers.examine_node,
        requests.Nothing,
        role=_ADMIN,
    ),
)
