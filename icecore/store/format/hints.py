"""Hints: objects that may speed up the next snapshot or a restore of a lineage (fingerprints,
working sets). They are advice: a damaged hint is reported and then ignored.
"""

from __future__ import annotations

from msgspec.structs import replace

from icecore.store.format.envelope import ObjectKind, unseal
from icecore.store.format.names import HINTS

#: The object of a lineage's hints. Its readers define the body.
HINTS_KIND = ObjectKind("hints", b"ICEHINT", 1, 1 << 30)


def limited(limit: int) -> ObjectKind:
    """Return the kind of hints whose body has at most ``limit`` bytes."""
    return replace(HINTS_KIND, limit=min(limit, HINTS_KIND.limit))


def decode_hints(
    name: str,
    data: bytes,
    key: bytes,
    digest: bytes | None = None,
    *,
    kind: ObjectKind = HINTS_KIND,
) -> bytes:
    """Return the body of hints object ``name``; ``key`` is the repository's hints key.

    Args:
        kind: From `limited`, if the possible length is known.
        digest: The digest in :attr:`Manifest.hints_digest`.

    Raises:
        Damaged: It is not what was written, or another hints object.
        FormatTooNew: It was written by a later version.
    """
    return unseal(kind, name, data, key, digest)


#: The names of working sets begin with this within their lineage's folder. A working set lives as
#: long as the lineage has a snapshot, and no manifest names it.
TOUCHED = "touched-"


def touched_lineage(name: str) -> str | None:
    """Return the lineage whose working set is object ``name``; None if it is something else."""
    lineage, _, last = name.removeprefix(HINTS).rpartition("/")
    return lineage if name.startswith(HINTS) and last.startswith(TOUCHED) else None
