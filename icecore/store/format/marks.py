"""A snapshot's marks (its pin and its tags) in several replicas: which are newer, and the outcome
where both replicas changed them. Pure.

No clock decides. A record remembers the random ids of its last changes: marks that know the other
record's newest change are newer. Where neither does, whatever keeps a snapshot wins.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import msgspec
from blake3 import blake3

from icecore.store.format.state import SnapshotRecord

#: Changes that a record remembers. Marks that are further apart count as changed in both replicas.
REMEMBERED = 16
_ID_BYTES = 8


def marked(
    record: SnapshotRecord, *, pinned: bool | None = None, tags: Sequence[str] | None = None
) -> SnapshotRecord:
    """Return the record with another pin or other tags (None leaves them); the same record if
    nothing changes.
    """
    changed = msgspec.structs.replace(
        record,
        pinned=record.pinned if pinned is None else pinned,
        tags=record.tags if tags is None else list(tags),
    )
    if changed == record:
        return record
    return msgspec.structs.replace(
        changed, marks=[*record.marks, secrets.token_bytes(_ID_BYTES)][-REMEMBERED:]
    )


def joined(ours: SnapshotRecord, theirs: SnapshotRecord) -> SnapshotRecord:
    """Return our record of a snapshot with the newer of both replicas' marks, or with the union if
    neither is newer; ``ours`` itself if nothing changes.

    Any replica that joins the same two marks gets the same result, so replicas that sync in both
    directions converge.
    """
    mine, other = _newest(ours), _newest(theirs)
    alike = (ours.pinned, ours.tags) == (theirs.pinned, theirs.tags)
    if mine == other:
        # Without recorded changes they differ only where an earlier version, which recorded none,
        # changed one.
        if mine or alike:
            return ours
    elif not other or other in ours.marks:
        return ours
    elif not mine or mine in theirs.marks:
        return msgspec.structs.replace(
            ours, pinned=theirs.pinned, tags=theirs.tags, marks=theirs.marks
        )
    pair = sorted((mine, other))
    older = [one for one in dict.fromkeys([*ours.marks, *theirs.marks]) if one not in pair]
    newest = blake3(b"".join(pair)).digest(_ID_BYTES)
    return msgspec.structs.replace(
        ours,
        pinned=ours.pinned or theirs.pinned,
        tags=sorted({*ours.tags, *theirs.tags}),
        marks=[*older, *(one for one in pair if one), newest][-REMEMBERED:],
    )


def _newest(record: SnapshotRecord) -> bytes:
    """Return the id of the last change; empty if none since the commit."""
    return record.marks[-1] if record.marks else b""
