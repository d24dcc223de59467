"""Rewrites shards of which little is reached: copies the live chunks as they are stored, then
replaces nodes and manifests, under the same snapshot ids.

Deltas whose base has gone with its snapshots are stored again in another form (``rebase``).

It is an ordinary session. Everything that the state at its BEGIN reaches stays while it is open, so
it needs no pins. A snapshot that was forgotten, or replaced by another process, in the meantime is
skipped.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import aclosing

import msgspec
import numpy as np

from icecore.errors import Damaged, ObjectMissing
from icecore.events import Event
from icecore.store.format import codec
from icecore.store.format.cell import Records
from icecore.store.format.chunk import chunk_id
from icecore.store.format.cipher import opened_piece
from icecore.store.format.names import Kind, object_name
from icecore.store.format.rows import Place, Stored
from icecore.store.format.state import LogState, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.repository import StoredRepository
from icecore.store.log.tables import read_table
from icecore.store.maintenance.pieces import Seen
from icecore.store.maintenance.reach import NODES_AT_ONCE, Live, Reach, read_nodes, space_refs
from icecore.store.maintenance.rebase import Orphans, Rebaser
from icecore.store.maintenance.rewrite import MapRewriter, NewManifest
from icecore.store.runtime.parallel import in_order
from icecore.store.snapshot.shard_writer import ShardWriter

_GAP_BYTES = 256 << 10
_READ_BYTES = 16 << 20
#: Reads that are started before the chunks of the previous one are stored; other threads verify
#: them.
_AHEAD = 3


class Sparse(msgspec.Struct, frozen=True):
    """A shard of which little is reached: its size and its live bytes."""

    shard: bytes
    bytes: int
    live: Live


class Compacted(msgspec.Struct, frozen=True):
    """What was rewritten."""

    shards: int = 0
    copied_bytes: int = 0
    freed_bytes: int = 0
    snapshots: int = 0
    rebased: int = 0


def find_sparse(
    reach: Reach, sizes: Mapping[tuple[Kind, bytes], int], below: float
) -> list[Sparse]:
    """Return shards of which less than the share ``below`` is reached, in order of their names.

    Args:
        sizes: Sizes of the existing objects in bytes.
    """
    sparse = []
    for shard, live in reach.shards():
        size = sizes.get(("shard", shard), 0)
        if live.bytes < size * below and shard not in reach.held:
            sparse.append(Sparse(shard, size, live))
    return sorted(sparse, key=lambda item: item.shard)


async def compact(
    repository: StoredRepository, sizes: Mapping[tuple[Kind, bytes], int], below: float
) -> Compacted:
    """Rewrite sparse shards; the collector then deletes the old ones.

    Args:
        sizes: Sizes of objects according to a listing.
        below: Share of live bytes below which a shard is rewritten.

    Raises:
        Damaged, ObjectMissing: A snapshot cannot be read, so what it reaches is unknown.
    """
    async with (
        await repository.begin(None, "compact", load_index=False, leave=0) as session,
        ShardWriter(repository, session) as writer,
    ):
        records = await catalog.everything(session.state, repository.log.pages)
        reach = Reach(repository)
        await reach.add(records)
        sparse = find_sparse(reach, sizes, below)
        if not sparse:
            return Compacted()
        copier = _Copier(repository, writer)
        rebaser = await _rebase(repository, records, sparse, writer)
        copied = []
        for item in (_left(item, rebaser) for item in sparse):
            try:
                await copier.copy(item)
                copied.append(item)
            except (Damaged, ObjectMissing) as error:
                # It stays as it is, for 'check' and 'repair'; the others need not wait for that.
                repository.emit(
                    Event(
                        "gc.damaged",
                        {"object": object_name("shard", item.shard), "error": str(error)},
                    )
                )
        await writer.flush()
        rewriter = MapRewriter(repository, session, {**copier.moved, **rebaser.moved})
        swaps: dict[str, tuple[str, NewManifest]] = {}
        for record in records:
            if not record.quarantined:  # shards that a quarantined snapshot reaches are not sparse
                changed = await rewriter.manifest(
                    await repository.manifest(record), record.manifest
                )
                if changed is not None:
                    swaps[record.snapshot] = record.manifest, changed
        await rewriter.flush()

        def swap(record: SnapshotRecord) -> SnapshotRecord:
            old, new = swaps[record.snapshot]
            return new(record) if record.manifest == old else record

        async def change(state: LogState, pages: Pages) -> LogState:
            return await catalog.edit(state, swaps.keys(), swap, pages)

        await session.transform(change, f"compact {len(copied)} shards", writer.entries())
        return Compacted(
            len(copied),
            writer.bytes,
            sum(item.bytes - item.live.bytes for item in copied),
            len(swaps),
            len(rebaser.moved),
        )


async def _rebase(
    repository: StoredRepository,
    records: list[SnapshotRecord],
    sparse: list[Sparse],
    writer: ShardWriter,
) -> Rebaser:
    """Store deltas again in another form whose bases only they still need."""
    orphans, seen = Orphans(item.shard for item in sparse), Seen()
    for record in records:
        if record.quarantined:
            continue  # it reaches none of these shards
        for refs in space_refs(await repository.manifest(record), record.manifest):
            fresh = refs[seen.missing(refs["node"])]
            for first in range(0, len(fresh), NODES_AT_ONCE):
                orphans.add((await read_nodes(repository, fresh[first : first + NODES_AT_ONCE]))[0])
            seen.add(fresh["node"])
    rebaser = Rebaser(repository, writer)
    for orphan in orphans.found():
        await rebaser.run(orphan)
    return rebaser


def _left(item: Sparse, rebaser: Rebaser) -> Sparse:
    """Return what to copy of a shard: not what was stored in another form, nor what nothing needs
    any more.
    """
    done = {offset for shard, offset in rebaser.gone | rebaser.moved.keys() if shard == item.shard}
    offsets = (
        item.live.offsets[~np.isin(item.live.offsets, list(done))] if done else item.live.offsets
    )
    return Sparse(item.shard, item.bytes, Live(item.live.bytes, offsets))


class _Copier:
    """Copies live chunks into new shards, and remembers their new places."""

    def __init__(self, repository: StoredRepository, writer: ShardWriter) -> None:
        self.moved: dict[tuple[bytes, int], Place | Stored] = {}
        self._repository = repository
        self._writer = writer

    async def copy(self, item: Sparse) -> None:
        """Copy one shard's live chunks.

        Raises:
            Damaged: One of them is not what was written; then none of the shard's is remembered.
        """
        backend, name = self._repository.backend, object_name("shard", item.shard)
        table = await read_table(backend, self._repository.keys.shard, item.shard, item.bytes)
        wanted = table[np.isin(table["offset"].astype(np.int64), item.live.offsets)]
        if len(wanted) != len(item.live.offsets):
            raise Damaged("shard", name, "a chunk that a snapshot refers to is not in its footer")

        async def read(run: tuple[int, int]) -> list[tuple[np.void, memoryview]]:
            entries = wanted[slice(*run)]
            start = int(entries["offset"][0])
            data = np.empty(
                int(entries["offset"][-1] + entries["length"][-1]) - start, np.uint8
            ).data
            await backend.get_into(name, start, data)
            return await asyncio.to_thread(self._verified, name, entries, start, data)

        moved: dict[tuple[bytes, int], Place | Stored] = {}
        # Chunks that follow each other are restored together, and stay together.
        async with aclosing(in_order(_ranges(wanted), read, ahead=_AHEAD)) as runs:
            async for pieces in runs:
                for entry, plain in pieces:
                    chunk, bitmap, base = (
                        entry[field].tobytes() for field in ("chunk", "data", "base")
                    )
                    place = await self._writer.put(
                        chunk, bitmap, base, int(entry["codec"]), [plain]
                    )
                    moved[item.shard, int(entry["offset"])] = place
        self.moved.update(moved)

    def _verified(
        self, name: str, entries: Records, start: int, data: memoryview
    ) -> list[tuple[np.void, memoryview]]:
        """Return the chunks in ``data``, which begins at offset ``start``, each with its stored
        form.
        """
        found = []
        for entry in entries:
            at = int(entry["offset"]) - start
            found.append((entry, self._verify(name, entry, data[at : at + int(entry["length"])])))
        return found

    def _verify(self, name: str, entry: np.void, stored: memoryview) -> memoryview:
        """Return the chunk's stored form, decrypted."""
        key, chunk = self._repository.keys.chunk, entry["chunk"].tobytes()
        try:
            plain = memoryview(opened_piece(key, name, int(entry["offset"]), chunk, stored))
            if entry["codec"] == codec.RAW:
                if chunk_id(key, entry["data"].tobytes(), plain) != chunk:
                    raise ValueError("its bytes do not match its id")
            else:
                codec.unseal(plain)
            return plain
        except ValueError as error:
            raise Damaged(
                "chunk", entry["chunk"].tobytes().hex(), f"{error} (at {entry['offset']} of {name})"
            ) from error


def _ranges(wanted: Records) -> list[tuple[int, int]]:
    """Return runs of pieces (ascending by offset) to read together, as ``(first, last + 1)``."""
    runs: list[tuple[int, int]] = []
    first = 0
    offsets, lengths = (
        wanted["offset"].astype(np.int64).tolist(),
        wanted["length"].astype(np.int64).tolist(),
    )
    for at in range(1, len(wanted) + 1):
        if (
            at == len(wanted)
            or offsets[at] - offsets[at - 1] - lengths[at - 1] > _GAP_BYTES
            or offsets[at] + lengths[at] - offsets[first] > _READ_BYTES
        ):
            runs.append((first, at))
            first = at
    return runs
