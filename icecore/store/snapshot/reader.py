"""Reads one snapshot: maps from few ranges, cells from at most two chunks. Nothing unverified is
handed out.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable, Coroutine
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged, ObjectMissing, StoreError
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.backend.base import Backend
from icecore.store.format import codec
from icecore.store.format.cell import Records
from icecore.store.format.cellmap import NodeDecoder, check_regions, parse_refs
from icecore.store.format.chunk import chunk_id, pages_of
from icecore.store.format.keys import Keys
from icecore.store.format.manifest import Manifest, Space
from icecore.store.format.names import object_name
from icecore.store.format.rows import Place, Row, unpack
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.pool import Scratch, ScratchPerThread
from icecore.store.snapshot.ahead import ReadAhead
from icecore.store.snapshot.decoder import ChunkDecoder, damaged_chunk

T = TypeVar("T")

#: Nodes of a pack that are closer than this are read together, up to ``_READ_BYTES`` at a time.
_GAP_BYTES = 256 << 10
_READ_BYTES = 16 << 20
#: Records of a snapshot's cells take at most an eighth of the memory; they take a 5000th of what
#: they describe.
_MAP_BYTES = max(256 << 20, os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 8)


class Read(NamedTuple):
    """A range of a pack, and which references (by index) lie in it."""

    pack: bytes
    offset: int
    length: int
    refs: npt.NDArray[np.int64]


def plan_nodes(refs: npt.NDArray[np.void], *, gap: int, read_size: int) -> list[Read]:
    """Return ranges of packs that cover all ``refs`` (NODE_REF records).

    Args:
        gap: Unneeded bytes to read rather than send another request.
        read_size: Longest range, except for a single node.
    """
    if not len(refs):
        return []
    packs = refs["pack"].tobytes()
    rank = {
        pack: at
        for at, pack in enumerate(sorted({packs[at : at + 16] for at in range(0, len(packs), 16)}))
    }
    pack = np.fromiter(
        (rank[packs[at : at + 16]] for at in range(0, len(packs), 16)), np.int64, len(refs)
    )
    offset, length = refs["offset"].astype(np.int64), refs["length"].astype(np.int64)
    order = np.lexsort((offset, pack))
    names = list(rank)
    reads: list[Read] = []
    breaks = (
        np.flatnonzero(
            (np.diff(pack[order]) != 0) | (np.diff(offset[order]) > gap + length[order][:-1])
        )
        + 1
    )
    for run in np.split(order, breaks):
        first = 0
        while first < len(run):
            # Equal nodes are stored once, so offsets may repeat; ends ascend nevertheless.
            ends = offset[run[first:]] + length[run[first:]]
            count = max(1, int(np.searchsorted(ends, offset[run[first]] + read_size, side="right")))
            part = run[first : first + count]
            start = int(offset[part[0]])
            reads.append(Read(names[pack[part[0]]], start, int(ends[:count].max()) - start, part))
            first += count
    return reads


class _MapBudget:
    """The memory for the records of all spaces of a snapshot; several threads take from it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._taken: dict[tuple[str, str], int] = {}
        self._left = _MAP_BYTES

    def of(self, kind: str, key: str) -> Callable[[int], bool]:
        """Return what takes bytes for a space: false if the budget does not have them. What an
        earlier read of the space took is given back.
        """
        space = (kind, key)
        with self._lock:
            self._left += self._taken.pop(space, 0)

        def take(count: int) -> bool:
            with self._lock:
                self._taken[space] = self._taken.get(space, 0) + count
                self._left -= count
                return self._left >= 0

        return take


class SnapshotReader:
    """One snapshot of a repository. Synchronous and thread-safe.

    Args:
        repository: The repository.
        manifest: The snapshot's manifest (``StoredRepository.manifest``).
        loop: The repository's event loop, in another thread than the callers'. Needed unless the
            back end has direct reads.

    Attributes:
        manifest: The snapshot's manifest.
    """

    def __init__(
        self,
        repository: StoredRepository,
        manifest: Manifest,
        loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.manifest = manifest
        self._backend = repository.backend
        self._keys: Keys = repository.keys
        self._loop = loop
        self._decoder = ChunkDecoder(repository.keys.chunk)
        self._scratch = ScratchPerThread()
        self._map_budget = _MapBudget()
        self._ahead = (
            None
            if loop is None or repository.backend.direct
            else ReadAhead(repository.backend, loop)
        )

    @classmethod
    def open(
        cls,
        repository: StoredRepository,
        snapshot: str | SnapshotRecord,
        loop: asyncio.AbstractEventLoop,
    ) -> SnapshotReader:
        """Return the reader of a snapshot given by id or record.

        Raises:
            NotFound: It is not listed.
            Damaged: Its manifest is not what was written.
        """
        return cls(
            repository,
            asyncio.run_coroutine_threadsafe(repository.manifest(snapshot), loop).result(),
            loop,
        )

    def records(self, space: Space) -> list[Records]:
        """Return the CELL records of a space: one array per region, ascending by cell. Nodes are
        read in few large ranges and verified.

        Raises:
            Damaged: The message names the node, or the manifest if its references are invalid.
            ObjectMissing: A pack is gone.
        """
        return self._sound(lambda backend: self._records(space, backend))

    def _records(self, space: Space, backend: Backend) -> list[Records]:
        try:
            refs = parse_refs(space.nodes, len(space.regions))
        except ValueError as error:
            raise Damaged(
                "manifest", self.manifest.snapshot, f"{space.kind} {space.key}: {error}"
            ) from error
        stored: list[memoryview] = [memoryview(b"")] * len(refs)
        for read in plan_nodes(refs, gap=_GAP_BYTES, read_size=_READ_BYTES):
            data = memoryview(bytearray(read.length))
            self._read(backend, object_name("nodes", read.pack), read.offset, data)
            starts = (refs["offset"][read.refs].astype(np.int64) - read.offset).tolist()
            lengths = refs["length"][read.refs].tolist()
            for at, start, length in zip(read.refs.tolist(), starts, lengths, strict=True):
                stored[at] = data[start : start + length]
        records, counts = NodeDecoder(self._keys.node).decode(
            stored, refs, self._map_budget.of(space.kind, space.key)
        )
        try:
            check_regions(
                space.regions, records, np.repeat(refs["region"].astype(np.int64), counts)
            )
        except ValueError as error:
            raise Damaged(
                "map",
                f"of snapshot {self.manifest.snapshot}",
                f"{space.kind} {space.key!a}: {error}",
            ) from error
        per_region = np.bincount(
            refs["region"], weights=counts, minlength=len(space.regions)
        ).astype(np.int64)
        edges = np.concatenate(([0], np.cumsum(per_region))).tolist()
        return [records[a:b] for a, b in pairwise(edges)]

    def content(self, space: Space, most: int) -> bytearray:
        """Return the bytes of a table: a space of kind ``file`` of which no page is absent and no
        cell holds only zeros. Memory is allocated as bytes are read, not by the claimed size.

        Args:
            most: Bytes that it may have.

        Raises:
            Damaged: It has more, or is not what was written.
            ObjectMissing: Part of it is gone.
        """
        if space.size > most:
            raise Damaged(
                "manifest",
                self.manifest.snapshot,
                f"{space.kind} {space.key!a} has {space.size} bytes, more than {most}",
            )
        out = bytearray()
        room = memoryview(bytearray(CELL_BYTES))
        for record in self.records(space)[0] if space.regions else ():
            length = min(CELL_BYTES, space.size - len(out))
            if not _continues(record, len(out), length):
                raise self._incomplete(space)
            out += self.read_cell(record, room)[:length]
        if len(out) != space.size:
            raise self._incomplete(space)
        return out

    def _incomplete(self, space: Space) -> Damaged:
        return Damaged(
            "map",
            f"of snapshot {self.manifest.snapshot}",
            f"{space.kind} {space.key!a} has {space.size} bytes, but its cells do not hold exactly these",
        )

    def decode(
        self,
        record: np.void | Row,
        stored: memoryview,
        base_stored: memoryview | None,
        out: memoryview,
        scratch: Scratch,
    ) -> memoryview:
        """Do as :meth:`ChunkDecoder.decode`."""
        return self._decoder.decode(record, stored, base_stored, out, scratch)

    def read_cell(self, record: np.void, out: memoryview) -> memoryview:
        """Fetch, decode and verify one cell: at most two reads.

        Args:
            record: Its CELL record.
            out: Room for a cell (1 MiB).

        Returns:
            Its data pages' bytes: the beginning of ``out``.

        Raises:
            Damaged: The message names the chunk and its shard.
            ObjectMissing: A shard is gone.
        """
        return self._sound(lambda backend: self._cell(record, out, backend))

    def _sound(self, read: Callable[[Backend], T]) -> T:
        """Return the result of ``read``, from another replica if the first one's is damaged."""
        try:
            return read(self._backend)
        except (Damaged, ObjectMissing) as error:
            self._backend.suspect(error)
            for replica in self._backend.replicas:
                try:
                    return read(replica)
                except (Damaged, StoreError):
                    continue
            raise

    def _cell(self, record: np.void, out: memoryview, backend: Backend) -> memoryview:
        row = unpack(record)
        size = pages_of(row.data) * PAGE
        place, _, base_place = row.stored
        if size > len(out):
            raise ValueError(f"{len(out)} bytes of room for {size}")
        scratch = self._scratch.get()
        if place.codec == codec.RAW and place.length == size:
            content = out[:size]
            self._fetch(backend, row.chunk, place, content)
            if chunk_id(self._keys.chunk, row.data, content) != row.chunk:
                raise damaged_chunk(row.chunk, place, "its bytes do not match its id")
            return content
        stored = self._fetch(backend, row.chunk, place, scratch.stored)
        base_stored = None
        if place.codec & codec.DELTA:
            base_stored = self._fetch(backend, row.stored.base, base_place, scratch.base_stored)
        return self._decoder.decode(row, stored, base_stored, out, scratch)

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        """Fill ``out`` from an object, without an event loop if the back end allows it."""
        self._read(self._backend, name, offset, out)

    def _read(self, backend: Backend, name: str, offset: int, out: memoryview) -> None:
        if backend.direct:
            backend.read_into(name, offset, out)
        else:
            self._wait(backend.get_into(name, offset, out))

    def _fetch(self, backend: Backend, chunk: bytes, place: Place, room: memoryview) -> memoryview:
        if place.length > len(room):
            raise damaged_chunk(
                chunk, place, f"its record says that it has {place.length} stored bytes"
            )
        out = room[: place.length]
        if place.codec != codec.ZERO:
            name = object_name("shard", place.shard)
            if self._ahead is None or backend is not self._backend:
                self._read(backend, name, place.offset, out)
            else:
                self._ahead.fetch(name, place.offset, out)
        return out

    def _wait(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop is None:
            work.close()
            raise ValueError("this back end needs an event loop to read")
        return asyncio.run_coroutine_threadsafe(work, self._loop).result()


def _continues(record: np.void, done: int, length: int) -> bool:
    """Return whether a cell holds the ``length`` bytes of a table after the first ``done``."""
    pages = -(-length // PAGE)
    return bool(
        int(record["cell"]) * CELL_BYTES == done
        and int.from_bytes(record["data"].tobytes(), "little") == (1 << pages) - 1
        and int(record["place"]["codec"]) != codec.ZERO
    )
