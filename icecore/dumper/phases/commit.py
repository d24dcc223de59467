"""The commit phase: store what was read and commit the snapshot. Only then may the job be ended."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import msgspec

from icecore.dumper.capture import Captured
from icecore.dumper.freeze.window import wait_running
from icecore.dumper.observe.deaths import DeathWatch
from icecore.dumper.observe.facts import describe_requirements
from icecore.dumper.phases.capture import CaptureResult
from icecore.dumper.phases.preflight import Accepted
from icecore.dumper.phases.prepare import Ready
from icecore.dumper.phases.request import Request
from icecore.dumper.storing import Stored
from icecore.errors import DumpFailed
from icecore.events import phase
from icecore.host.jobs.job import note_end
from icecore.host.jobs.logs import Stream
from icecore.host.jobs.namespaces import RunRecord
from icecore.store.format.contract import Run, RunFiles, RunIsolation, encode_records
from icecore.store.format.data import encode_data
from icecore.store.format.manifest import MANIFEST_FORMAT, Manifest
from icecore.store.format.names import new_snapshot_id
from icecore.store.format.surroundings import KEY, encode_surroundings
from icecore.text import host_name

_RUNNING_SECONDS = 5.0


class Committed(msgspec.Struct, frozen=True):
    """A committed snapshot.

    Attributes:
        pre_copied: Bytes that were stored before the window.
        spilled: Staging ran full in the window.
    """

    snapshot: str
    manifest: Manifest
    pre_copied: int
    spilled: bool


def commit(
    request: Request, accepted: Accepted, ready: Ready, result: CaptureResult, deaths: DeathWatch
) -> Committed:
    """Store everything and commit it. Then end the job, if the dump is to end it.

    Args:
        deaths: Stops watching the processes, whose end no longer matters.

    Raises:
        DumpFailed: A process does not run again, or does not end although it should.
        StoreError: The snapshot could not be stored.
    """
    options, target, devices = request.options, request.target, ready.devices
    if not result.ends:
        _require_running(result.tree)
    stored = _store(request, ready, result)
    manifest = _manifest(request, accepted, ready, result, stored)
    deaths.forget()
    snapshot = ready.storing.writer.commit(manifest)
    if devices is not None and target.status and not result.ends:
        devices.outlive(target.pid, Path(target.status))
    if result.ends:
        if devices is not None:
            devices.leave()
        if target.directory:
            note_end(Path(target.directory), snapshot)
        ready.window.kill(list(result.tree.standing.pids))
        if devices is not None:
            devices.gone(keep_resident=options.keep_resident)
    copied = [
        *ready.copied.values(),
        *ready.shared.copied.values(),
        *ready.files.copied.values(),
    ]
    pre_copied = sum(c.stored for c in copied) + (devices.pre_copied if devices is not None else 0)
    return Committed(snapshot, manifest, pre_copied, ready.storing.pipeline.spilled)


def _require_running(tree: Captured) -> None:
    """Require that every process runs; CRIU's word for it is not enough."""
    stuck = wait_running(list(tree.standing.pids), _RUNNING_SECONDS)
    if stuck:
        raise DumpFailed(
            f"{len(stuck)} processes still stand still after the window: {stuck[:5]}",
            cure="find what traces them ('grep TracerPid /proc/PID/status')",
        )


def _store(request: Request, ready: Ready, result: CaptureResult) -> Stored:
    """Store what was read in the window, then what CRIU wrote."""
    storing, devices, tree = ready.storing, ready.devices, result.tree
    if devices is not None:
        devices.let_go()
        devices.warn()
    storing.budget.resume()
    with phase(request.emit, "dump.store") as running:
        storing.pipeline.open_gate(running.counter(sum(space.queued for space in tree.spaces)))
        result.capture.after_window(tree)
        if devices is not None:
            tree.spaces += devices.store()
        if ready.data is not None:
            tree.spaces += ready.data.after_window()
        stored = storing.finish(tree.spaces, tree.reused)
        running.bytes = stored.sizes.logical
        running.fields |= {
            "stored": stored.sizes.stored,
            "chunks": stored.chunks,
            "deltas": stored.deltas,
            "by_codec": dict(stored.sizes.by_codec),
            "encoders": storing.encoders.begun if storing.encoders else 0,
        }
    return stored


def _manifest(
    request: Request, accepted: Accepted, ready: Ready, result: CaptureResult, stored: Stored
) -> Manifest:
    target, options, devices, tree = request.target, request.options, ready.devices, result.tree
    return Manifest(
        format=MANIFEST_FORMAT,
        snapshot=new_snapshot_id(),
        job=target.job,
        lineage=ready.storing.lineage,
        parent=ready.storing.parent_id,
        created_ns=tree.standing.at_ns,
        host=host_name(),
        writer=f"icecore dump, criu {'.'.join(map(str, request.criu.version))}",
        root_pid=tree.standing.pids[target.pid],
        processes=tree.standing.processes,
        spaces=stored.spaces,
        files=tree.files,
        requirements=describe_requirements(
            request.criu.version,
            tree.standing.ids,
            tree.standing.ports,
            devices.requirements() if devices else [],
        ),
        namespaces=tree.standing.namespaces,
        criu_options=_restore_options(request, accepted),
        tags=list(options.tags),
        pinned=options.pinned,
        sizes=stored.sizes,
        window_seconds=result.window_seconds,
        hints=stored.hints,
        hints_digest=stored.hints_digest,
        extra={
            **encode_records(
                run=recorded_run(target.record, result.log_starts) if target.record else None,
                gpus=devices.describe(tree.standing.pids) if devices else None,
                resident=devices.describe_resident(tree.standing.pids) if devices else None,
            ),
            KEY: encode_surroundings(tree.surroundings),
            **encode_data(ready.data.summaries if ready.data is not None else []),
        },
    )


def recorded_run(record: RunRecord, log_starts: Mapping[Stream, int]) -> Run:
    """Return how a job was started, as its snapshot records it.

    Args:
        log_starts: The start offsets of its logs.
    """
    isolation, files = record.isolation, record.files
    return Run(
        name=record.name,
        command=record.command,
        cwd=record.cwd,
        isolation=RunIsolation(
            pid=isolation.pid,
            ipc=isolation.ipc,
            network=isolation.network,
            root=isolation.root,
            tmp=isolation.tmp or msgspec.UNSET,
        ),
        files=RunFiles(
            stdout=files["stdout.log"],
            stderr=files["stderr.log"],
            status=files["status"],
            init=files["icecore-init"],
        ),
        binds=record.binds,
        init=record.init,
        files_to=record.files_to,
        copies=record.copies,
        user=record.user,
        user_name=record.user_name,
        data=record.data,
        log_limit=record.log_limit,
        log_start={**log_starts},
    )


def _restore_options(request: Request, accepted: Accepted) -> list[str]:
    """Return the options that a restore of this dump must give to CRIU."""
    options = ["--shell-job"] if accepted.shell_job else []
    return [*options, "--tcp-close"] if request.options.connections == "close" else options
