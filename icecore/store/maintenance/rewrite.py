"""Writes new nodes and manifests that refer to the new places of moved chunks (`shard_writer`), for
compaction and repair.

Nothing old is changed or deleted: the session that wrote the new objects replaces the manifests,
and the collector deletes what is then unreached.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Mapping

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.store.format.cell import Records
from icecore.store.format.cellmap import NodeEncoder, node_ids, pack_footer, place_node
from icecore.store.format.cipher import overhead
from icecore.store.format.manifest import Manifest, encode_manifest
from icecore.store.format.names import object_name, random_id
from icecore.store.format.rows import Place, Stored
from icecore.store.format.segment import of_shards
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session
from icecore.store.maintenance.reach import Refs, read_nodes, space_refs

_PACK_BYTES = 64 << 20

#: Old place of a stored chunk (shard, offset) → its new place, or the other form in which it is now
#: stored, including its base.
Moved = Mapping[tuple[bytes, int], Place | Stored]
ReadNodes = Callable[[Refs], Awaitable[tuple[Records, npt.NDArray[np.int64]]]]


class NewManifest(msgspec.Struct, frozen=True):
    """The changes in a snapshot's record."""

    name: str
    length: int
    digest: bytes

    def __call__(self, record: SnapshotRecord) -> SnapshotRecord:
        return msgspec.structs.replace(
            record, manifest=self.name, manifest_length=self.length, manifest_digest=self.digest
        )


class MapRewriter:
    """Writes nodes and manifests in which moved chunks have their new places.

    Args:
        moved: The moved chunks.
        read: Reads nodes.
        again: Ids of nodes to store again although they do not change.
        skip: Ids of nodes that cannot be read; references to them do not change.
    """

    def __init__(
        self,
        repository: StoredRepository,
        session: Session,
        moved: Moved,
        *,
        read: ReadNodes | None = None,
        again: Collection[bytes] = (),
        skip: Collection[bytes] = (),
    ) -> None:
        self._repository = repository
        self._session = session
        self._moved = moved
        self._shards = frozenset(shard for shard, _ in moved)
        self._read = read or (lambda refs: read_nodes(repository, refs))
        self._again = frozenset(again)
        self._encoder = NodeEncoder()
        self._untouched: set[bytes] = set(skip)
        self._rewritten: dict[bytes, tuple[bytes, bytes, int, int]] = {}
        self._pack = random_id()
        self._nodes: list[bytes] = []
        self._ids: list[bytes] = []
        self._used = 0

    async def manifest(
        self, manifest: Manifest, name: str, *, store: bool = False
    ) -> NewManifest | None:
        """Rewrite one snapshot; return None if nothing changes.

        Args:
            name: The manifest's object, for errors.
            store: Store the manifest again in any case.
        """
        changed = await self._changed(manifest, name)
        if changed is None and not store:
            return None
        identity = random_id()
        stored = object_name("manifest", identity)
        sealed = encode_manifest(changed or manifest, self._repository.keys.manifest, stored)
        await self._session.put_named("manifest", identity, [sealed.data])
        return NewManifest(stored, len(sealed.data), sealed.digest)

    async def _changed(self, manifest: Manifest, name: str) -> Manifest | None:
        spaces, touched = [], False
        for space, refs in zip(manifest.spaces, space_refs(manifest, name), strict=True):
            await self._look(refs)
            identities = np.ascontiguousarray(refs["node"]).tobytes()
            new = refs.copy()
            for at in range(len(refs)):
                found = self._rewritten.get(identities[32 * at : 32 * at + 32])
                if found is not None:
                    node, pack, offset, length = found
                    new["node"][at] = np.frombuffer(node, np.uint8)
                    new["pack"][at] = np.frombuffer(pack, np.uint8)
                    new["offset"][at], new["length"][at] = offset, length
                    touched = True
            spaces.append(msgspec.structs.replace(space, nodes=new.tobytes()))
        return msgspec.structs.replace(manifest, spaces=spaces) if touched else None

    async def _look(self, refs: Refs) -> None:
        """Read nodes not seen before, and rewrite those with a moved chunk."""
        identities = np.ascontiguousarray(refs["node"]).tobytes()
        names = [identities[32 * at : 32 * at + 32] for at in range(len(refs))]
        fresh = [
            at
            for at, name in enumerate(names)
            if name not in self._untouched and name not in self._rewritten
        ]
        if not fresh:
            return
        records, counts = await self._read(refs[fresh])
        records = records.copy()
        edges = np.concatenate(([0], np.cumsum(counts)))
        touched = self._move(records)
        for number, at in enumerate(fresh):
            first, last = int(edges[number]), int(edges[number + 1])
            if touched[first:last].any() or names[at] in self._again:
                await self._add(names[at], memoryview(records[first:last].tobytes()))
            else:
                self._untouched.add(names[at])

    def _move(self, records: Records) -> npt.NDArray[np.bool_]:
        """Give records their chunks' new places; return which of them changed."""
        touched = np.zeros(len(records), np.bool_)
        for field in ("place", "base_place"):
            places = records[field]
            for at in np.flatnonzero(
                (places["length"] > 0) & of_shards(places["shard"], self._shards)
            ).tolist():
                found = self._moved.get((places["shard"][at].tobytes(), int(places["offset"][at])))
                if found is None:
                    continue
                touched[at] = True
                _set(places, at, found if isinstance(found, Place) else found.place)
                if isinstance(found, Stored) and field == "place":
                    records["base"][at] = np.frombuffer(found.base, np.uint8)
                    _set(records["base_place"], at, found.base_place)
        return touched

    async def _add(self, old: bytes, node: memoryview) -> None:
        key = self._repository.keys.node
        plain = self._encoder.encode(node)
        if self._used + len(plain) + overhead(key) > _PACK_BYTES:
            await self.flush()
        identity = node_ids(key, [node])[0]
        stored = place_node(key, self._pack, self._used, identity, plain)
        self._rewritten[old] = identity, self._pack, self._used, len(stored)
        self._nodes.append(stored)
        self._ids.append(identity)
        self._used += len(stored)

    async def flush(self) -> None:
        """Store the collected nodes; call it at the end."""
        if self._nodes:
            lengths = [len(node) for node in self._nodes]
            footer = pack_footer(self._repository.keys.shard, self._pack, self._ids, lengths)
            await self._session.put_named("nodes", self._pack, [*self._nodes, footer])
        self._pack, self._nodes, self._ids, self._used = random_id(), [], [], 0


def _set(places: Records, at: int, place: Place) -> None:
    places["shard"][at] = np.frombuffer(place.shard, np.uint8)
    places["offset"][at], places["length"][at], places["codec"][at] = (
        place.offset,
        place.length,
        place.codec,
    )
