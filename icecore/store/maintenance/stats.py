"""What a repository holds: live and dead bytes by job, lineage and codec, from the maps alone.
Every place counts once, regardless of how many snapshots share it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged, ObjectMissing
from icecore.events import phase
from icecore.sizes import PAGE
from icecore.store.backend.base import READERS_LEAVE
from icecore.store.format import codec
from icecore.store.format.cell import Records, data_pages
from icecore.store.format.names import KINDS, PREFIX, parse_name
from icecore.store.format.state import LogState, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.reach import readable_nodes, space_refs

#: A reached piece of a shard. ``key`` is shard number << 40 | offset; ``pages`` is 0 for a base
#: that no map refers to as a chunk of its own.
_PIECE = np.dtype([("key", "<u8"), ("length", "<u4"), ("codec", "u1"), ("pages", "<u2")])
_OFFSET_BITS = 40

Pieces = npt.NDArray[np.void]


class Group(msgspec.Struct, frozen=True):
    """The snapshots of one job or lineage.

    Attributes:
        name: The name of the job or lineage.
        snapshots: Number of snapshots.
        logical: Bytes of data pages in all of them together.
        reached: Stored bytes that they reach.
        own: Stored bytes that only they reach.
    """

    name: str
    snapshots: int
    logical: int
    reached: int
    own: int


class Form(msgspec.Struct, frozen=True):
    """The chunks stored with one codec: their number, stored bytes, and uncompressed bytes."""

    codec: str
    chunks: int
    stored: int
    logical: int


class Stats(msgspec.Struct, frozen=True):
    """The statistics of a repository.

    Attributes:
        snapshots: Number of snapshots; ``quarantined``: how many of them lost data.
        logical: Bytes of data pages in all snapshots together.
        chunks: Distinct chunks that they reach.
        chunk_bytes: Uncompressed bytes of those chunks.
        live: Stored bytes of those chunks.
        dead: Bytes of chunks that nothing reaches, in shards that are partly reached or that wait
            for the collector.
        objects: Number of objects by kind; ``object_bytes``: their bytes.
        jobs, lineages: Largest first.
        forms: By codec, largest first.
    """

    snapshots: int
    quarantined: int
    logical: int
    chunks: int
    chunk_bytes: int
    live: int
    dead: int
    objects: Counter[str]
    object_bytes: Counter[str]
    jobs: list[Group] = msgspec.field(default_factory=list)
    lineages: list[Group] = msgspec.field(default_factory=list)
    forms: list[Form] = msgspec.field(default_factory=list)

    @property
    def dedup_ratio(self) -> float:
        """Bytes in all snapshots per byte of distinct chunks."""
        return self.logical / self.chunk_bytes if self.chunk_bytes else 1.0

    @property
    def compression_ratio(self) -> float:
        """Bytes of distinct chunks per stored byte."""
        return self.chunk_bytes / self.live if self.live else 1.0


async def stats(repository: StoredRepository, *, register: bool = True) -> Stats:
    """Count everything; unreadable parts of maps are left out ('check' names them).

    Args:
        register: Open a session meanwhile, so that no collector deletes what is being read; not for
            a place that cannot be written to.

    Raises:
        Damaged: The snapshot list cannot be read.
    """
    with phase(repository.emit, "stats"):
        if not register:
            return await _Counter(repository).run((await repository.log.newest()).state)
        async with await repository.begin(
            None, "stats", load_index=False, leave=READERS_LEAVE
        ) as session:
            return await _Counter(repository).run(session.state)


class _Counter:
    def __init__(self, repository: StoredRepository) -> None:
        self._repository = repository
        self._numbers: dict[bytes, int] = {}

    async def run(self, state: LogState) -> Stats:
        """Count everything."""
        objects: Counter[str] = Counter()
        object_bytes: Counter[str] = Counter()
        for kind in KINDS:
            async for info in self._repository.backend.list(PREFIX[kind]):
                if parse_name(info.name) is not None:
                    objects[kind] += 1
                    object_bytes[kind] += info.size
        records = await catalog.everything(state, self._repository.log.pages)
        pairs: dict[tuple[str, str], list[SnapshotRecord]] = {}
        for record in records:
            pairs.setdefault((record.job, record.lineage), []).append(record)
        pieces = {pair: await self._reached(members) for pair, members in pairs.items()}
        every = _different(pieces.values())
        live = int(every["length"].sum(dtype=np.int64))
        chunks = every[every["pages"] > 0]
        return Stats(
            snapshots=len(records),
            quarantined=sum(record.quarantined != "" for record in records),
            logical=sum(record.logical for record in records),
            chunks=len(every),
            chunk_bytes=int(chunks["pages"].sum(dtype=np.int64)) * PAGE,
            live=live,
            dead=max(0, object_bytes["shard"] - live),
            objects=objects,
            object_bytes=object_bytes,
            jobs=_groups(pairs, pieces, lambda pair: pair[0]),
            lineages=_groups(pairs, pieces, lambda pair: pair[1]),
            forms=_forms(every),
        )

    async def _reached(self, records: Iterable[SnapshotRecord]) -> Pieces:
        """Return the distinct pieces that some snapshots reach."""
        seen: set[bytes] = set()
        gathered: list[Pieces] = []
        for record in records:
            try:
                manifest = await self._repository.manifest(record)
                spaces = space_refs(manifest, record.manifest)
            except (Damaged, ObjectMissing):
                continue
            for refs in spaces:
                fresh = (
                    refs[[node.tobytes() not in seen for node in refs["node"]]]
                    if len(refs)
                    else refs
                )
                seen.update(node.tobytes() for node in fresh["node"])
                for _, cells in await readable_nodes(self._repository, fresh):
                    gathered += [self._pieces(cells, "base_place"), self._pieces(cells, "place")]
            gathered = [_different(gathered)]
        return _different(gathered)

    def _pieces(self, cells: Records, field_: str) -> Pieces:
        cells = cells[cells[field_]["length"] > 0]
        places = cells[field_]
        pieces = np.zeros(len(cells), _PIECE)
        shards, inverse = np.unique(
            np.ascontiguousarray(places["shard"]).view("S16"), return_inverse=True
        )
        numbers = [
            self._numbers.setdefault(bytes(shard).ljust(16, b"\0"), len(self._numbers))
            for shard in shards.tolist()
        ]
        pieces["key"] = (
            np.array(numbers, np.uint64)[inverse.reshape(-1)] << np.uint64(_OFFSET_BITS)
            | places["offset"]
        )
        pieces["length"], pieces["codec"] = places["length"], places["codec"]
        if field_ == "place":
            pieces["pages"] = data_pages(cells)
        return pieces


def _different(parts: Iterable[Pieces]) -> Pieces:
    """Return each place once, preferring an item that has the pages."""
    every = np.concatenate([np.zeros(0, _PIECE), *parts])
    order = np.lexsort((-every["pages"].astype(np.int32), every["key"]))
    every = every[order]
    first = np.ones(len(every), np.bool_)
    first[1:] = every["key"][1:] != every["key"][:-1]
    return every[first]


def _groups(
    pairs: dict[tuple[str, str], list[SnapshotRecord]],
    pieces: dict[tuple[str, str], Pieces],
    name: Callable[[tuple[str, str]], str],
) -> list[Group]:
    members: dict[str, list[tuple[str, str]]] = {}
    for pair in pairs:
        members.setdefault(name(pair), []).append(pair)
    reached = {group: _different(pieces[pair] for pair in own) for group, own in members.items()}
    keys, times = np.unique(
        np.concatenate([np.zeros(0, np.uint64), *(one["key"] for one in reached.values())]),
        return_counts=True,
    )
    single = keys[times == 1]
    groups = []
    for group, own in members.items():
        records = [record for pair in own for record in pairs[pair]]
        here = reached[group]
        groups.append(
            Group(
                group,
                len(records),
                sum(record.logical for record in records),
                int(here["length"].sum(dtype=np.int64)),
                int(here["length"][np.isin(here["key"], single)].sum(dtype=np.int64)),
            )
        )
    return sorted(groups, key=lambda one: (-one.reached, one.name))


def _forms(pieces: Pieces) -> list[Form]:
    forms = []
    for number in np.unique(pieces["codec"]).tolist():
        these = pieces[pieces["codec"] == number]
        stored, pages = (int(these[name].sum(dtype=np.int64)) for name in ("length", "pages"))
        forms.append(Form(codec.name(number), len(these), stored, pages * PAGE))
    return sorted(forms, key=lambda one: (-one.stored, one.codec))
