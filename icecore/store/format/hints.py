"""Hints: what may help the next snapshot or a restore of a lineage (fingerprints, working sets);
advice, so a damaged one is told of and then done without.
"""

from __future__ import annotations

from dataclasses import replace

from icecore.store.format.envelope import ObjectKind, unseal
from icecore.store.format.names import HINTS

#: The object of a lineage's hints; what its body means is its readers' business.
HINTS_KIND = ObjectKind("hints", b"ICEHINT", 1, 1 << 30)


def limited(limit: int) -> ObjectKind:
    """Return the kind of hints whose body has ``limit`` bytes at most."""
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
        kind: From `limited`, where it is known how long it can be.
        digest: The digest in :attr:`Manifest.hints_digest`.

    Raises:
        Damaged: It is not what was written, or another one than was meant.
        FormatTooNew: It was written by a later version.
    """
    return unseal(kind, name, data, key, digest)


#: How the names of working sets begin within their lineage's folder; they live as long as the
#: lineage has a snapshot, and no manifest names them.
TOUCHED = "touched-"


def touched_lineage(name: str) -> str | None:
    """Return the lineage whose working set object ``name`` is; None if it is something else."""
    lineage, _, last = name.removeprefix(HINTS).rpartition("/")
    return lineage if name.startswith(HINTS) and last.startswith(TOUCHED) else None
