"""Rewrites shards of which little is reached: copies the live chunks as they are stored, then swaps new nodes and manifests in under the same snapshot ids.

It is an ordinary session. Everything that the state at its BEGIN reaches stays while it is open, so it needs no pins; a snapshot that was
forgotten, or swapped by another, in the meantime is passed over.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Mapping
from dataclasses import dataclass

import msgspec
import numpy as np

from icecore.errors import Damaged, ObjectMissing
from icecore.events import Event
from icecore.store import catalog, codec
from icecore.store.catalog import Pages
from icecore.store.cell import PLACE, Records
from icecore.store.cellmap import NodeEncoder, node_ids, pack_footer, place_node
from icecore.store.chunk import chunk_id
from icecore.store.cipher import opened_piece, overhead
from icecore.store.container import TAIL_BYTES
from icecore.store.manifest import Manifest, encode_manifest
from icecore.store.names import Kind, object_name, random_id
from icecore.store.reach import Live, Reach, Refs, read_nodes, space_refs
from icecore.store.repository import Repository
from icecore.store.segment import make_entries, of_shards
from icecore.store.session import Session
from icecore.store.shard import SHARD, ShardBuilder, parse_footer, place_chunk
from icecore.store.state import SnapshotRecord, State

_PACK_BYTES = 64 << 20
_GAP_BYTES = 256 << 10
_READ_BYTES = 16 << 20


@dataclass(frozen=True)
class Sparse:
    """A shard of which little is reached: its size and what is live, in bytes."""

    shard: bytes
    bytes: int
    live: Live


@dataclass(frozen=True)
class Compacted:
    """What was rewritten."""

    shards: int = 0
    copied_bytes: int = 0
    freed_bytes: int = 0
    snapshots: int = 0


def find_sparse(reach: Reach, sizes: Mapping[tuple[Kind, bytes], int], below: float) -> list[Sparse]:
    """Shards of which less than the share ``below`` is reached, in order of their names.

    Args:
        sizes: Sizes of the objects that there are, in bytes.
    """
    sparse = []
    for shard, live in reach.shards().items():
        size = sizes.get(("shard", shard), 0)
        if live.bytes < size * below:
            sparse.append(Sparse(shard, size, live))
    return sorted(sparse, key=lambda item: item.shard)


async def compact(repository: Repository, sizes: Mapping[tuple[Kind, bytes], int], below: float) -> Compacted:
    """Rewrite what is sparse; the old shards are then the collector's.

    Args:
        sizes: As a listing showed them.
        below: Share of live bytes below which a shard is rewritten.

    Raises:
        Damaged, ObjectMissing: A snapshot cannot be read, so what it reaches is unknown.
    """
    async with await repository.begin(None, "compact", load_index=False) as session:
        records = await catalog.everything(session.state, repository.log.pages)
        reach = Reach(repository)
        await reach.add(records)
        sparse = find_sparse(reach, sizes, below)
        if not sparse:
            return Compacted()
        copier = _Copier(repository, session)
        copied = []
        for item in sparse:
            try:
                await copier.copy(item)
                copied.append(item)
            except (Damaged, ObjectMissing) as error:
                # It stays as it is, for 'check' and 'repair'; the others need not wait for that.
                repository.emit(Event("gc.damaged", {"object": object_name("shard", item.shard), "error": str(error)}))
        await copier.flush()
        swaps = await _Rewriter(repository, session, copier, {item.shard for item in copied}).run(records)

        def swap(record: SnapshotRecord) -> SnapshotRecord:
            old, new = swaps[record.snapshot]
            return new(record) if record.manifest == old else record

        async def change(state: State, pages: Pages) -> State:
            return await catalog.edit(state, swaps.keys(), swap, pages)

        await session.transform(change, f"compact {len(copied)} shards", copier.entries())
        return Compacted(len(copied), copier.bytes, sum(item.bytes - item.live.bytes for item in copied), len(swaps))


class _Copier:
    """Copies live chunks into new shards, and remembers where they went."""

    def __init__(self, repository: Repository, session: Session) -> None:
        self.moved: dict[tuple[bytes, int], tuple[bytes, int]] = {}
        self.bytes = 0
        self._repository = repository
        self._session = session
        self._builder: ShardBuilder | None = None
        self._tables: list[tuple[bytes, Records]] = []

    async def copy(self, item: Sparse) -> None:
        """Copy one shard's live chunks.

        Raises:
            Damaged: One of them is not what was written; none of the shard's is then remembered.
        """
        backend, name = self._repository.backend, object_name("shard", item.shard)
        tail = bytearray(TAIL_BYTES)
        await backend.get_into(name, item.bytes - TAIL_BYTES, memoryview(tail))
        where = SHARD.parse_tail(item.shard, item.bytes, tail)
        footer = bytearray(where.length)
        await backend.get_into(name, where.offset, memoryview(footer))
        table = parse_footer(self._repository.keys.shard, item.shard, item.bytes, footer)
        wanted = table[np.isin(table["offset"].astype(np.int64), item.live.offsets)]
        if len(wanted) != len(item.live.offsets):
            raise Damaged("shard", name, "a chunk that a snapshot refers to is not in its footer")
        moved: dict[tuple[bytes, int], tuple[bytes, int]] = {}
        for first, last in _ranges(wanted):
            start = int(wanted["offset"][first])
            data = memoryview(bytearray(int(wanted["offset"][last - 1] + wanted["length"][last - 1]) - start))
            await backend.get_into(name, start, data)
            for entry in wanted[first:last]:
                offset, length = int(entry["offset"]), int(entry["length"])
                stored = data[offset - start : offset - start + length]
                plain = await asyncio.to_thread(self._verify, name, entry, stored)
                builder = await self._room(length)
                at, room = builder.reserve(
                    entry["chunk"].tobytes(),
                    entry["data"].tobytes(),
                    entry["base"].tobytes(),
                    int(entry["codec"]),
                    length,
                )
                chunks = self._repository.keys.chunk
                await asyncio.to_thread(place_chunk, chunks, builder.name, at, entry["chunk"].tobytes(), [plain], room)
                moved[item.shard, offset] = builder.name, at
                self.bytes += length
        self.moved.update(moved)

    def _verify(self, name: str, entry: np.void, stored: memoryview) -> memoryview:
        """The chunk's stored form, decrypted: in its new place it is another ciphertext."""
        key, chunk = self._repository.keys.chunk, entry["chunk"].tobytes()
        try:
            plain = memoryview(opened_piece(key, name, int(entry["offset"]), chunk, stored))
            if entry["codec"] == codec.RAW:
                if chunk_id(key, entry["data"].tobytes(), plain) != chunk:
                    raise ValueError("its bytes do not have its id")
            else:
                codec.unseal(plain)
            return plain
        except ValueError as error:
            raise Damaged(
                "chunk", entry["chunk"].tobytes().hex(), f"{error} (at {entry['offset']} of {name})"
            ) from error

    async def _room(self, length: int) -> ShardBuilder:
        if self._builder is None or not self._builder.fits(length):
            await self.flush()
            room = max(self._repository.config.parameters.shard_bytes, length)
            self._builder = ShardBuilder(random_id(), memoryview(bytearray(room)))
        return self._builder

    async def flush(self) -> None:
        """Store the shard that is being filled."""
        if self._builder is not None and len(self._builder):
            parts = self._builder.finish(self._repository.keys.shard)
            await self._session.put_named("shard", self._builder.name, parts)
            self._tables.append((self._builder.name, self._builder.entries()))
        self._builder = None

    def entries(self) -> Records | None:
        """Index entries of the full chunks that were copied."""
        made = []
        for shard, table in self._tables:
            full = table[table["codec"] & codec.DELTA == 0]
            places = np.zeros(len(full), PLACE)
            places["shard"] = np.frombuffer(shard, np.uint8)
            for field in ("offset", "length", "codec"):
                places[field] = full[field]
            made.append(make_entries(full["chunk"], places))
        return np.concatenate(made) if made else None


def _ranges(wanted: Records) -> list[tuple[int, int]]:
    """Runs of pieces (ascending by offset) that are read together, as ``(first, last + 1)``."""
    runs: list[tuple[int, int]] = []
    first = 0
    offsets, lengths = wanted["offset"].astype(np.int64).tolist(), wanted["length"].astype(np.int64).tolist()
    for at in range(1, len(wanted) + 1):
        if (
            at == len(wanted)
            or offsets[at] - offsets[at - 1] - lengths[at - 1] > _GAP_BYTES
            or offsets[at] + lengths[at] - offsets[first] > _READ_BYTES
        ):
            runs.append((first, at))
            first = at
    return runs


@dataclass(frozen=True)
class _NewManifest:
    """What changes in a snapshot's record."""

    name: str
    length: int
    digest: bytes

    def __call__(self, record: SnapshotRecord) -> SnapshotRecord:
        return msgspec.structs.replace(
            record, manifest=self.name, manifest_length=self.length, manifest_digest=self.digest
        )


class _Rewriter:
    """Writes nodes and manifests in which moved chunks have their new places."""

    def __init__(self, repository: Repository, session: Session, copier: _Copier, shards: Collection[bytes]) -> None:
        self._repository = repository
        self._session = session
        self._moved = copier.moved
        self._shards = frozenset(shards)
        self._encoder = NodeEncoder()
        self._untouched: set[bytes] = set()
        self._rewritten: dict[bytes, tuple[bytes, bytes, int, int]] = {}
        self._pack = random_id()
        self._nodes: list[bytes] = []
        self._ids: list[bytes] = []
        self._used = 0

    async def run(self, records: list[SnapshotRecord]) -> dict[str, tuple[str, _NewManifest]]:
        """Rewrite every snapshot that has a chunk in the shards: id -> the manifest that it had, and the new one."""
        swaps: dict[str, tuple[str, _NewManifest]] = {}
        for record in records:
            manifest = await self._repository.manifest(record)
            changed = await self._manifest(manifest, record.manifest)
            if changed is not None:
                identity = random_id()
                name = object_name("manifest", identity)
                sealed = encode_manifest(changed, self._repository.keys.manifest, name)
                await self._session.put_named("manifest", identity, [sealed.data])
                swaps[record.snapshot] = record.manifest, _NewManifest(name, len(sealed.data), sealed.digest)
        await self._flush()
        return swaps

    async def _manifest(self, manifest: Manifest, name: str) -> Manifest | None:
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
        """Read the nodes that were not seen before, and rewrite those that have a chunk in the shards."""
        identities = np.ascontiguousarray(refs["node"]).tobytes()
        names = [identities[32 * at : 32 * at + 32] for at in range(len(refs))]
        fresh = [at for at, name in enumerate(names) if name not in self._untouched and name not in self._rewritten]
        if not fresh:
            return
        records, counts = await read_nodes(self._repository, refs[fresh])
        records = records.copy()
        edges = np.concatenate(([0], np.cumsum(counts)))
        touched = np.zeros(len(records), np.bool_)
        for field in ("place", "base_place"):
            places = records[field]
            for at in np.flatnonzero((places["length"] > 0) & of_shards(places["shard"], self._shards)).tolist():
                shard, offset = self._moved[places["shard"][at].tobytes(), int(places["offset"][at])]
                places["shard"][at] = np.frombuffer(shard, np.uint8)
                places["offset"][at] = offset
                touched[at] = True
        for number, at in enumerate(fresh):
            first, last = int(edges[number]), int(edges[number + 1])
            if touched[first:last].any():
                await self._add(names[at], memoryview(records[first:last].tobytes()))
            else:
                self._untouched.add(names[at])

    async def _add(self, old: bytes, node: memoryview) -> None:
        key = self._repository.keys.node
        plain = self._encoder.encode(node)
        if self._used + len(plain) + overhead(key) > _PACK_BYTES:
            await self._flush()
        identity = node_ids(key, [node])[0]
        stored = place_node(key, self._pack, self._used, identity, plain)
        self._rewritten[old] = identity, self._pack, self._used, len(stored)
        self._nodes.append(stored)
        self._ids.append(identity)
        self._used += len(stored)

    async def _flush(self) -> None:
        if self._nodes:
            lengths = [len(node) for node in self._nodes]
            footer = pack_footer(self._repository.keys.shard, self._pack, self._ids, lengths)
            await self._session.put_named("nodes", self._pack, [*self._nodes, footer])
        self._pack, self._nodes, self._ids, self._used = random_id(), [], [], 0
