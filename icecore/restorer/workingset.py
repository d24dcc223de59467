"""Records which cells a lazily restored job used first, with its lineage; the next restore fetches
them first. Advice only: if it is missing or wrong, a restore is slower and nothing else.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Annotated

import msgspec

from icecore.errors import Damaged, FormatTooNew, ObjectMissing, StoreError
from icecore.store.format.envelope import seal
from icecore.store.format.hints import HINTS_KIND, TOUCHED, decode_hints, limited
from icecore.store.format.names import HINTS, random_id
from icecore.store.log.repository import StoredRepository

_KEPT = 3
_MAX_CELLS = 1 << 20
#: Bytes of one record: a cell takes 20 bytes at most.
_KIND = limited(32 * _MAX_CELLS)
#: A lineage has `_KEPT` records, and some that are about to be deleted.
_READ = 2 * _KEPT
_LAST_TIME = (1 << 63) - 1


_Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]


class WorkingSet(msgspec.Struct, frozen=True):
    """The cells that a restore used first.

    Attributes:
        snapshot: The snapshot that was restored.
        cells: (CRIU's id of the process, first address of the cell in its region) in the order of
            their first use.
    """

    snapshot: str
    cells: Annotated[list[tuple[_Number, _Number]], msgspec.Meta(max_length=_MAX_CELLS)]


def encode(working_set: WorkingSet) -> bytes:
    """Encode a working set."""
    return msgspec.msgpack.encode(working_set)


def decode(name: str, data: bytes) -> WorkingSet:
    """Decode what `encode` returned.

    Raises:
        Damaged: It is not a working set.
    """
    try:
        found = msgspec.msgpack.decode(data, type=WorkingSet)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged("hints", name, str(error)) from error
    return found


async def remember(
    repository: StoredRepository, lineage: str, snapshot: str, cells: Sequence[tuple[int, int]]
) -> str:
    """Record what a restore of ``snapshot`` observed with its lineage; only a few older records
    stay.

    Returns:
        The object's name.
    """
    folder = f"{HINTS}{lineage}/"
    # The newest is listed first.
    name = f"{folder}{TOUCHED}{_LAST_TIME - time.time_ns():016x}-{random_id().hex()[:8]}"
    data = seal(
        HINTS_KIND,
        encode(WorkingSet(snapshot, list(cells[:_MAX_CELLS]))),
        repository.keys.hints,
        name,
    ).data
    await repository.backend.create(name, [data])
    own = [
        info.name
        async for info in repository.backend.list(folder)
        if info.name.startswith(folder + TOUCHED)
    ]
    for old in own[_KEPT:]:
        await repository.backend.delete(old)
    return name


async def recall(
    repository: StoredRepository, lineage: str, snapshot: str
) -> list[tuple[int, int]]:
    """Return the cells to fetch first: those observed of this snapshot, else of the lineage's
    latest restore; empty if there is no readable record.
    """
    folder = f"{HINTS}{lineage}/{TOUCHED}"
    found: list[WorkingSet] = []
    try:
        async for info in repository.backend.list(f"{HINTS}{lineage}/"):
            if info.name.startswith(folder) and len(found) < _READ:
                data = await repository.backend.get(info.name, limit=_KIND.object_limit)
                found.append(
                    decode(
                        info.name, decode_hints(info.name, data, repository.keys.hints, kind=_KIND)
                    )
                )
    except (Damaged, FormatTooNew, ObjectMissing, StoreError):
        pass  # advice only: what was read so far is enough
    same = [one for one in found if one.snapshot == snapshot]
    return [(process, address) for process, address in (same or found)[0].cells] if found else []
