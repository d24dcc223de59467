"""What a snapshot contains, as the records of ``icecore show --json`` and of the node service."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import TYPE_CHECKING

from icecore.events import Value

if TYPE_CHECKING:
    from icecore.store.format.manifest import Manifest
    from icecore.store.format.state import SnapshotRecord

Fields = dict[str, Value]


def snapshot_fields(record: SnapshotRecord) -> Fields:
    """Return a snapshot's record."""
    return {
        "snapshot": record.snapshot,
        "job": record.job,
        "lineage": record.lineage,
        "parent": record.parent,
        "created": record.created_ns / 1e9,
        "logical": record.logical,
        "changed": record.changed,
        "stored": record.stored,
        "device": record.device,
        "data": record.data,
        "window_seconds": record.window_seconds,
        "tags": list(record.tags),
        "pinned": record.pinned,
        "quarantined": record.quarantined,
    }


def owner_fields(owner: int | None) -> Fields:
    """Return the owner of a snapshot. None: it cannot be read, or is not recorded."""
    from icecore.host.jobs.identity import user_name

    return {"user": owner, "user_name": "" if owner is None else user_name(owner)}


def details(manifest: Manifest) -> Fields:
    """Return where a snapshot was taken, its sizes, and what it requires."""
    from icecore.host.jobs.identity import user_name
    from icecore.store.format.archive import container_title
    from icecore.store.format.contract import left_to_driver, snapshot_owner
    from icecore.store.format.data import data_bytes

    sizes = manifest.sizes
    resident, moved = device_bytes(manifest)
    owner = snapshot_owner(manifest)
    return {
        "snapshot": manifest.snapshot,
        "host": manifest.host,
        "writer": manifest.writer,
        "root_pid": manifest.root_pid,
        "host_bytes": sizes.logical - sizes.device,
        "device_bytes": sizes.device,
        "zero_bytes": sizes.zero,
        "by_codec": dict(sizes.by_codec),
        "architecture": manifest.requirements.architecture,
        "kernel": manifest.requirements.kernel,
        "criu": manifest.requirements.criu,
        "own_namespaces": namespaces(manifest),
        "gpus": [dict(gpu) for gpu in manifest.requirements.devices],
        "resident_bytes": resident,
        "moved_bytes": moved,
        "data_bytes": data_bytes(manifest),
        "left": dict(left_to_driver(manifest)),
        "user": owner,
        "user_name": user_name(owner),
        "container": container_title(manifest),
    }


def device_bytes(manifest: Manifest) -> tuple[int, int]:
    """Return the bytes of device memory, zeros included, that are resident, and that the driver
    moves.
    """
    device = [
        (space.kind == "device", region.length)
        for space in manifest.spaces
        for region in space.regions
        if region.kind == "device"
    ]
    resident, moved = (
        sum(length for stays, length in device if stays is which) for which in (True, False)
    )
    return resident, moved


def namespaces(manifest: Manifest) -> list[str]:
    """Return the namespaces that the tree has of its own."""
    own = manifest.namespaces
    flags = (("pid", own.pid), ("ipc", own.ipc), ("mount", own.mount), ("uts", own.uts))
    return [name for name, mine in flags if mine]


def processes(manifest: Manifest) -> Iterator[Fields]:
    """Yield the processes of the tree."""
    for process in manifest.processes:
        yield {
            "pid": process.image_id,
            "host_pid": process.pid,
            "parent": process.parent,
            "threads": process.threads,
            "command": list(process.command),
            "alive": process.alive,
        }


def regions(manifest: Manifest) -> Iterator[Fields]:
    """Yield the regions by kind within each space: their number, and the size of their address
    ranges, including absent pages.
    """
    spans: Counter[tuple[str, str, str]] = Counter()
    counts: Counter[tuple[str, str, str]] = Counter()
    for space in manifest.spaces:
        for region in space.regions:
            key: tuple[str, str, str] = (
                space.kind,
                space.key if space.kind in ("process", "device") else "",
                region.kind or "anonymous",
            )
            spans[key] += region.length
            counts[key] += 1
    for key, span in sorted(
        spans.items(), key=lambda item: (item[0][0] != "process", item[0][0], item[0][1], -item[1])
    ):
        space_kind, space_key, kind = key
        yield {
            "space": space_kind,
            "key": space_key,
            "kind": kind,
            "regions": counts[key],
            "bytes": span,
        }


def data(manifest: Manifest) -> Iterator[Fields]:
    """Yield the data directories. ``own``: the job has it for itself, as a private /tmp."""
    from icecore.host.jobs.temporary import private_points
    from icecore.store.format.contract import read_run
    from icecore.store.format.data import read_data

    run = read_run(manifest)
    own = private_points(run.data) if run is not None and run.isolation.tmp is True else []
    for one in read_data(manifest):
        yield {
            "path": one.path,
            "entries": one.entries,
            "files": one.files,
            "bytes": one.bytes,
            "own": one.path in own,
        }


def files(manifest: Manifest) -> Iterator[Fields]:
    """Yield the open files, the largest first."""
    for file in sorted(manifest.files, key=lambda file: -file.size):
        yield {
            "path": file.path,
            "bytes": file.size,
            "writable": file.writable,
            "policy": file.policy,
            "mtime": file.mtime_ns / 1e9,
        }
