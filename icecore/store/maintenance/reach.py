"""What snapshots reach: from records through manifests and map nodes to packs, shards and the
chunks in them. Every node is read once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged, IcecoreError, ObjectMissing
from icecore.store.format.cell import Records
from icecore.store.format.cellmap import NodeDecoder, parse_refs
from icecore.store.format.manifest import MANIFEST_KIND, Manifest
from icecore.store.format.names import Kind, object_name, parse_name
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.pieces import Pieces, Seen
from icecore.store.runtime.parallel import each
from icecore.store.snapshot.reader import plan_nodes

_AT_ONCE = 8  # manifests
_GAP_BYTES = 256 << 10
_READ_BYTES = 16 << 20
#: Nodes read at once; their records take 12 MiB.
NODES_AT_ONCE = 1024

#: Fewer nodes are decoded on the event loop: handing them to a thread and waiting for the
#: interpreter takes longer.
_INLINE_NODES = 16

Refs = npt.NDArray[np.void]


class Live(msgspec.Struct, frozen=True):
    """What is reached of a shard: bytes, and the offsets of the pieces."""

    bytes: int
    offsets: npt.NDArray[np.int64]


class Reach:
    """Collects what is reached, snapshot by snapshot.

    Attributes:
        names: Manifests, packs and shards.
        hints: Names of hint objects.
        lineages: Lineages of the snapshots.
        held: Shards that quarantined snapshots reach.
    """

    def __init__(self, repository: StoredRepository) -> None:
        self.names: set[tuple[Kind, bytes]] = set()
        self.hints: set[str] = set()
        self.lineages: set[str] = set()
        self.held: set[bytes] = set()
        self._repository = repository
        self._manifests: set[str] = set()
        self._nodes = Seen()
        self._claimed: set[bytes] = set()
        self._numbers: dict[bytes, int] = {}
        self._pieces = Pieces()

    async def add(self, records: Iterable[SnapshotRecord]) -> None:
        """Mark what these snapshots reach. Those whose manifest was marked before cost nothing.

        Raises:
            Damaged, ObjectMissing: Part of a snapshot cannot be read, so what it reaches is
                unknown.
        """
        new = {
            record.manifest: record for record in records if record.manifest not in self._manifests
        }
        await each(new.values(), self._snapshot, at_once=_AT_ONCE)
        self._manifests.update(new)

    async def _snapshot(self, record: SnapshotRecord) -> None:
        parsed = parse_name(record.manifest)
        if parsed is None or parsed[0] != "manifest":
            raise Damaged(
                "log entry", record.snapshot, f"its manifest has the name {record.manifest!r}"
            )
        self.lineages.add(record.lineage)
        try:
            manifest = await self._repository.manifest(record)
            spaces = space_refs(manifest, record.manifest)
        except (Damaged, ObjectMissing):
            # Pass over only a manifest that a repair recorded as lost. If a manifest is missing
            # for a moment only, the collector must not delete what the manifest reaches.
            if record.manifest not in record.quarantined:
                raise
            self.names.add(parsed)
            return
        for refs in spaces:
            await self._space(refs, record)
        if manifest.hints:
            self.hints.add(manifest.hints)
        self.names.add(parsed)

    async def _space(self, refs: Refs, record: SnapshotRecord) -> None:
        packs = refs["pack"].tobytes()
        self.names.update(
            ("nodes", pack) for pack in {packs[at : at + 16] for at in range(0, len(packs), 16)}
        )
        if record.quarantined:
            for _, cells in await readable_nodes(self._repository, refs):
                self._cells(cells)
                for field in ("place", "base_place"):
                    self.held.update(_shards(cells[field]))
            return
        fresh = self._claim(refs[self._nodes.missing(refs["node"])])
        try:
            for first in range(0, len(fresh), NODES_AT_ONCE):
                some = fresh[first : first + NODES_AT_ONCE]
                cells, _ = await read_nodes(self._repository, some)
                self._cells(cells)
                self._nodes.add(some["node"])
        finally:
            self._claimed.difference_update(_ids(fresh))

    def _claim(self, refs: Refs) -> Refs:
        """Return those of ``refs`` that no other task is reading.

        Snapshots of a lineage are read concurrently, and have most nodes in common. A task that
        leaves a node to another relies on it, so what both reach counts as marked only when both
        have finished: see ``add``.
        """
        ids = _ids(refs)
        mine = [at for at, node in enumerate(ids) if node not in self._claimed]
        self._claimed.update(ids)
        return refs[mine]

    def _cells(self, cells: Records) -> None:
        for field in ("place", "base_place"):
            places = cells[field]
            stored = places["length"] > 0
            if not stored.any():
                continue
            if not stored.all():
                places = places[stored]
            shards = np.ascontiguousarray(places["shard"])
            halves = shards.view(np.uint64)
            # Chunks of one shard mostly follow each other, so its name is looked up only where a
            # run begins.
            starts = np.flatnonzero(
                np.concatenate(([True], (halves[1:] != halves[:-1]).any(axis=1)))
            )
            names = shards[starts].tobytes()
            numbers = np.fromiter(
                (self._number(names[at : at + 16]) for at in range(0, len(names), 16)), np.uint64
            )
            runs = np.diff(starts, append=len(places))
            self._pieces.add(np.repeat(numbers, runs), places["offset"], places["length"])

    def _number(self, shard: bytes) -> int:
        number = self._numbers.get(shard)
        if number is None:
            number = self._numbers[shard] = len(self._numbers)
            self.names.add(("shard", shard))
        return number

    def shards(self) -> Iterator[tuple[bytes, Live]]:
        """Yield every reached shard, and what of it is reached."""
        names = list(self._numbers)
        for number, length, offsets in self._pieces.shards():
            yield names[number], Live(length, offsets)


def _ids(refs: Refs) -> list[bytes]:
    names = np.ascontiguousarray(refs["node"]).tobytes()
    return [names[at : at + 32] for at in range(0, len(names), 32)]


def space_refs(manifest: Manifest, name: str) -> list[Refs]:
    """Return the node references of every space of a manifest.

    Raises:
        Damaged: They are invalid.
    """
    try:
        return [parse_refs(space.nodes, len(space.regions)) for space in manifest.spaces]
    except ValueError as error:
        raise Damaged(MANIFEST_KIND.title, name, str(error)) from error


def _shards(places: Records) -> Iterator[bytes]:
    shards = np.unique(np.ascontiguousarray(places["shard"][places["length"] > 0]).view("S16"))
    return (bytes(shard).ljust(16, b"\0") for shard in shards.tolist())


async def readable_nodes(
    repository: StoredRepository,
    refs: Refs,
    fail: Callable[[int, IcecoreError], None] | None = None,
) -> list[tuple[int, Records]]:
    """Return the CELL records of all nodes that can be read, with the number of each in ``refs``.

    Args:
        fail: Gets the others.

    Raises:
        StoreError: The store could not be reached.
    """

    async def read(which: npt.NDArray[np.int64]) -> list[tuple[int, Records]]:
        if not len(which):
            return []
        try:
            records, counts = await read_nodes(repository, refs[which])
        except (Damaged, ObjectMissing) as error:
            if len(which) == 1:
                if fail is not None:
                    fail(int(which[0]), error)
                return []
            half = len(which) // 2
            return [*await read(which[:half]), *await read(which[half:])]
        return list(zip(which.tolist(), np.split(records, np.cumsum(counts)[:-1]), strict=True))

    return await read(np.arange(len(refs)))


async def read_nodes(
    repository: StoredRepository, refs: Refs
) -> tuple[Records, npt.NDArray[np.int64]]:
    """Return the CELL records of nodes in the order of ``refs``, verified, and the number of
    records of each node.

    Raises:
        Damaged, ObjectMissing: Names the node, or the pack.
    """
    stored: list[memoryview] = [memoryview(b"")] * len(refs)
    reads = plan_nodes(refs, gap=_GAP_BYTES, read_size=_READ_BYTES)
    for read in reads:
        data = memoryview(bytearray(read.length))
        await repository.backend.get_into(object_name("nodes", read.pack), read.offset, data)
        starts = (refs["offset"][read.refs].astype(np.int64) - read.offset).tolist()
        for at, start, length in zip(
            read.refs.tolist(), starts, refs["length"][read.refs].tolist(), strict=True
        ):
            stored[at] = data[start : start + length]
    decoder = NodeDecoder(repository.keys.node)
    if len(refs) < _INLINE_NODES:
        return decoder.decode(stored, refs)
    return await asyncio.to_thread(decoder.decode, stored, refs)
