"""Names of snapshots: an id or the beginning of one, ``JOB``, ``JOB~1``, ``JOB@3``, ``latest``.

An ambiguous name is an error.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from icecore.errors import NotFound, UsageError
from icecore.store.format.state import SnapshotRecord

LATEST = "latest"
_PART = re.compile(r"(?P<name>.+?)(?:~(?P<back>\d+)|@(?P<number>\d+))?", re.DOTALL)
_ID = re.compile(r"[0-9a-f]{1,32}")
_ID_DIGITS = 32
_CURE = "'icecore ls' lists them"


def is_id(text: str) -> bool:
    """Return whether the text has the form of a full id."""
    return len(text) == _ID_DIGITS and _ID.fullmatch(text) is not None


def resolve(records: Sequence[SnapshotRecord], text: str) -> SnapshotRecord:
    """Return the snapshot that a name means.

    Args:
        records: All snapshots in commit order.
        text: A full id; or a job's name or ``latest`` (its newest snapshot), optionally followed by
            ``~N`` (N snapshots before that one) or ``@N`` (the N-th snapshot, counted from 1,
            oldest first); or an unambiguous beginning of an id. A job's name takes precedence over
            the beginning of an id.

    Raises:
        NotFound: There is no such snapshot.
        UsageError: ``text`` is empty, or several ids begin so.
    """
    if not text:
        raise UsageError(
            "no snapshot is named", cure="give an id, a job's name, JOB~1, JOB@1 or 'latest'"
        )
    for record in records:
        if record.snapshot == text:
            return record
    # A job's name may contain ~ or @, so the whole text is tried first.
    whole = [record for record in records if record.job == text]
    if whole:
        return whole[-1]
    parts = _PART.fullmatch(text)
    assert parts is not None  # the pattern matches any non-empty text
    name = parts["name"]
    if name == LATEST:
        return _counted(records, parts, text)
    named = [record for record in records if record.job == name]
    if named:
        return _counted(named, parts, text)
    if not _ID.fullmatch(text):
        raise NotFound(f"there is no snapshot and no job {text!r}", cure=_CURE)
    found = [record for record in records if record.snapshot.startswith(text)]
    if len(found) > 1:
        digits = next(
            n
            for n in range(len(text), 33)
            if len({record.snapshot[:n] for record in found}) == len(found)
        )
        raise UsageError(
            f"{len(found)} snapshots begin with {text!r}", cure=f"give {digits} digits"
        )
    if not found:
        raise NotFound(f"there is no snapshot {text!r}", cure=_CURE)
    return found[0]


def _counted(records: Sequence[SnapshotRecord], parts: re.Match[str], text: str) -> SnapshotRecord:
    if parts["number"] is not None:
        at = int(parts["number"]) - 1
    else:
        at = len(records) - 1 - int(parts["back"] or 0)
    if not 0 <= at < len(records):
        of = "" if parts["name"] == LATEST else f" of job {parts['name']!r}"
        raise NotFound(f"there is no snapshot {text!r}: there are {len(records)}{of}", cure=_CURE)
    return records[at]


def shortest(records: Sequence[SnapshotRecord], least: int = 8) -> int:
    """Return how many digits distinguish the ids of all ``records``, at least ``least``."""
    for digits in range(least, 32):
        if len({record.snapshot[:digits] for record in records}) == len(records):
            return digits
    return 32
