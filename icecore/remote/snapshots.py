"""The snapshots that the node service shows to its caller."""

from __future__ import annotations

from typing import Any

from icecore.remote.connection import Service
from icecore.store.format.state import SnapshotRecord


def listed(service: Service) -> list[tuple[SnapshotRecord, int | None]]:
    """Return the snapshots in commit order, without the places of their objects, each with the uid
    of its owner; None: it is not recorded.
    """
    return [(_record(one), one["owner"]) for one in service.items("/v1/snapshots")]


def _record(one: dict[str, Any]) -> SnapshotRecord:
    return SnapshotRecord(
        snapshot=one["snapshot"],
        job=one["job"],
        lineage=one["lineage"],
        parent=one["parent"],
        created_ns=round(one["created"] * 1e9),
        manifest="",
        manifest_length=0,
        manifest_digest=b"",
        logical=one["logical"],
        stored=one["stored"],
        changed=one["changed"],
        window_seconds=one["window_seconds"],
        tags=one["tags"],
        pinned=one["pinned"],
        device=one["device"],
        data=one.get("data", 0),
        quarantined=one["quarantined"],
        owner=one["owner"],
    )
