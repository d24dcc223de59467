"""The preflight phase: inspect the running tree and refuse what would lose or hang the job."""

from __future__ import annotations

import msgspec

from icecore.dumper.freeze.claim import Claim
from icecore.dumper.observe.deaths import DeathWatch
from icecore.dumper.observe.inspection import Inspection, inspect_tree
from icecore.dumper.phases.request import Request
from icecore.dumper.preflight.judge import check_target, require, warn
from icecore.dumper.preflight.prediction import predict
from icecore.errors import PreflightRefused
from icecore.events import Event, phase
from icecore.host.jobs import temporary
from icecore.host.kernel import procfs

#: How long to wait for the window of another dump. That of a GPU job is preceded by copies.
_CLAIM_SECONDS = 300.0


class Accepted(msgspec.Struct, frozen=True):
    """A tree that can be dumped.

    Attributes:
        found: What was read about the tree.
        shell_job: Its session leader is outside the tree, which CRIU must be told.
    """

    found: Inspection
    shell_job: bool


def preflight(request: Request, deaths: DeathWatch) -> Accepted:
    """Inspect the tree and judge it. Nothing is stopped.

    Args:
        deaths: Is told to watch the tree's processes.

    Raises:
        PreflightRefused: Something would lose or hang the job.
        DumpFailed: Another dump holds the tree for minutes.
    """
    with phase(request.emit, "dump.preflight", pid=request.target.pid) as running:
        accepted = _preflight(request, deaths)
        running.fields |= {
            "processes": len(accepted.found.processes),
            "private_bytes": accepted.found.private_bytes,
        }
        running.fields |= predict(accepted.found)
    return accepted


def _preflight(request: Request, deaths: DeathWatch) -> Accepted:
    target = request.target
    refusals = check_target(target.pid)
    if refusals:
        raise PreflightRefused([(r.name, r.message, r.cure) for r in refusals])
    deaths.watch([target.pid])
    found = _inspect(request)
    if found.gpus is not None:
        brief = [one.pid for one in found.gpus.without_context]
        deaths.watch([one.pid for one in found.gpus.processes], brief)
    require(found)
    _require_one_mount_namespace(request, found)
    _require_seen(request)
    for warning in warn(found):
        fields = {"name": warning.name, "message": warning.message, "cure": warning.cure}
        request.emit(Event("dump.warning", {**fields}))
    shell_job = procfs.status(target.pid).session not in {p.status.group for p in found.processes}
    return Accepted(found, shell_job)


def _inspect(request: Request) -> Inspection:
    """Inspect the tree while no other dump has it: it would be frozen, and traced by that dump's
    CRIU.
    """
    target = request.target
    claim = Claim({target.pid}, _CLAIM_SECONDS)
    try:
        return inspect_tree(
            target.pid, request.criu, request.workdir, request.options, target.record
        )
    finally:
        claim.release()


def _require_seen(request: Request) -> None:
    """Refuse a job with a private /tmp that hides CRIU or its working directory: CRIU works in the
    job's mount namespace.
    """
    record = request.target.record
    if record is None or not record.own_view:
        return
    hidden = temporary.hidden_from_criu(record.tmp, request.workdir, request.criu.path)
    if hidden is not None:
        raise PreflightRefused([("workdir", *hidden)])


def _require_one_mount_namespace(request: Request, found: Inspection) -> None:
    """Refuse a job with copies of files or a private /tmp whose processes have mount namespaces of
    their own.

    CRIU then works in the root's mount namespace, and would take any other for one of its own to
    restore.
    """
    record = request.target.record
    if record is None or not record.own_view:
        return
    own = {(process.namespaces or {}).get("mnt") for process in found.living}
    if len(own) > 1:
        what, option = (
            ("copies of files", "--files-to") if record.copies else ("a private /tmp", "--tmp")
        )
        cure = f"snapshot it before it makes them, or leave out {option}"
        raise PreflightRefused(
            [
                (
                    "namespaces",
                    f"the job has {what} ({option}), and processes with mount namespaces of their own",
                    cure,
                )
            ]
        )
