"""What can be saved of damaged shards: every stored chunk that is reached is read and verified by
itself, then searched elsewhere.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence

import msgspec
import numpy as np

from icecore.errors import Damaged, FormatTooNew, ObjectMissing
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.format import codec, delta
from icecore.store.format.cell import Records
from icecore.store.format.chunk import NO_CHUNK, chunk_id, pages_of
from icecore.store.format.cipher import opened_piece
from icecore.store.format.names import object_name
from icecore.store.format.rows import Place, Row, unpack
from icecore.store.format.segment import of_shards
from icecore.store.log.lookup import Index
from icecore.store.log.repository import StoredRepository

Key = tuple[bytes, int]
_OTHERS = 4


class ShardPiece(msgspec.Struct, frozen=True):
    """A stored chunk that maps refer to.

    Attributes:
        chunk: Its id.
        place: Where it should be.
        bitmap: Its data bitmap; None for a base that no map refers to as a chunk of its own: then
            ``delta``, the row of one of its deltas, has it.
        base: Its base's id, if it is a delta.
    """

    chunk: bytes
    place: Place
    bitmap: bytes | None
    base: bytes = NO_CHUNK
    delta: Row | None = None

    @property
    def key(self) -> Key:
        """What identifies it: shard and offset."""
        return self.place.shard, self.place.offset


class Saved(msgspec.Struct, frozen=True):
    """Verified stored bytes of a piece, and whether they came from the second source."""

    piece: ShardPiece
    bitmap: bytes
    stored: bytes
    elsewhere: bool


class Salvage(msgspec.Struct):
    """The outcome for the pieces of damaged shards.

    Attributes:
        saved: Bytes to store again.
        found: Another place that holds the same chunk.
        twins: Another piece that was saved and is the same chunk.
        lost: Pieces that are nowhere.
        places: Pieces that can stay where they are.
        instead: Deltas whose base is lost → another place that holds the same chunk in full.
    """

    saved: dict[Key, Saved] = msgspec.field(default_factory=dict)
    found: dict[Key, Place] = msgspec.field(default_factory=dict)
    twins: dict[Key, Key] = msgspec.field(default_factory=dict)
    lost: dict[Key, ShardPiece] = msgspec.field(default_factory=dict)
    places: dict[Key, Place] = msgspec.field(default_factory=dict)
    instead: dict[Key, Place] = msgspec.field(default_factory=dict)

    def replaced(self, key: Key) -> bool:
        """Return whether another place holds the chunk in full."""
        return key in self.found or key in self.twins or key in self.instead

    @property
    def harmed(self) -> set[bytes]:
        """Shards in which something cannot be read."""
        away = {key for key, saved in self.saved.items() if saved.elsewhere}
        return {
            shard for shard, _ in away | self.found.keys() | self.twins.keys() | self.lost.keys()
        }


def pieces_in(records: Records, shards: frozenset[bytes]) -> list[ShardPiece]:
    """Return the distinct pieces in ``shards`` that CELL records refer to, including bases."""
    pieces: dict[Key, ShardPiece] = {}
    for row in _rows(records, "place", shards):
        pieces.setdefault((row.stored.place.shard, row.stored.place.offset), _own(row))
    for row in _rows(records, "base_place", shards):
        place = row.stored.base_place
        pieces.setdefault(
            (place.shard, place.offset), ShardPiece(row.stored.base, place, None, NO_CHUNK, row)
        )
    return list(pieces.values())


def _own(row: Row) -> ShardPiece:
    return ShardPiece(row.chunk, row.stored.place, row.data, row.stored.base)


def _rows(records: Records, field: str, shards: frozenset[bytes]) -> Iterable[Row]:
    if not shards:
        return ()
    there = (records[field]["length"] > 0) & of_shards(records[field]["shard"], shards)
    return (unpack(record) for record in records[there])


class Salvager:
    """Looks for pieces in the repository, then in ``source``, then for the same chunk at another
    place.

    Args:
        source: A replica of the repository, with the same keys.
        records: All readable CELL records.
        doubtful: Shards that hold something damaged.
        index: The repository's index, loaded.
    """

    def __init__(
        self,
        repository: StoredRepository,
        source: StoredRepository | None,
        records: Records,
        doubtful: frozenset[bytes],
        index: Index,
    ) -> None:
        self._keys = repository.keys
        self._places = [(repository, False), *([(source, True)] if source is not None else [])]
        self._records = records
        self._doubtful = doubtful
        self._index = index

    async def run(self) -> Salvage:
        """Check everything that is reached in the doubtful shards.

        Raises:
            StoreError: The store could not be reached.
        """
        salvage = Salvage()
        for piece in pieces_in(self._records, self._doubtful):
            saved = await self._look(piece)
            if saved is not None:
                salvage.saved[piece.key] = saved
            else:
                salvage.lost[piece.key] = piece
        whole = {
            saved.piece.chunk: key
            for key, saved in salvage.saved.items()
            if not _is_delta(saved.piece)
        }
        for key, piece in list(salvage.lost.items()):
            if piece.chunk in whole:
                salvage.twins[key] = whole[piece.chunk]
                del salvage.lost[key]
                continue
            found = await self._another(piece)
            if found is not None:
                salvage.found[key] = found
                del salvage.lost[key]
        for piece in self._based(frozenset(salvage.lost)):
            found = None if salvage.replaced(piece.key) else await self._another(piece)
            if found is not None:
                salvage.instead[piece.key] = found
        return salvage

    def _based(self, bases: frozenset[Key]) -> list[ShardPiece]:
        """Return the deltas of lost pieces."""
        rows = _rows(self._records, "base_place", frozenset(shard for shard, _ in bases))
        pieces = (
            _own(row)
            for row in rows
            if (row.stored.base_place.shard, row.stored.base_place.offset) in bases
        )
        return list({piece.key: piece for piece in pieces}.values())

    async def _look(self, piece: ShardPiece) -> Saved | None:
        bitmap = piece.bitmap if piece.bitmap is not None else await self._bitmap(piece)
        if bitmap is None:
            return None
        for repository, elsewhere in self._places:
            stored = await _read(repository, piece.chunk, piece.place)
            if stored is not None and await asyncio.to_thread(self._good, piece, bitmap, stored):
                return Saved(piece, bitmap, stored, elsewhere)
        return None

    async def _bitmap(self, piece: ShardPiece) -> bytes | None:
        """Return a base's data bitmap, with which its deltas begin."""
        assert piece.delta is not None
        for repository, _ in self._places:
            stored = await _read(repository, piece.delta.chunk, piece.delta.stored.place)
            if stored is not None and _sealed(stored):
                return delta.base_bitmap(stored)
        return None

    def _good(self, piece: ShardPiece, bitmap: bytes, stored: bytes) -> bool:
        number, size = piece.place.codec, pages_of(bitmap) * PAGE
        if number & codec.DELTA:
            return _sealed(stored)  # the base is a piece of its own
        content = memoryview(stored)
        if number != codec.RAW:
            content = memoryview(bytearray(size))
            try:
                codec.decode(number, memoryview(stored), content)
            except ValueError:
                return False
        return len(content) == size and chunk_id(self._keys.chunk, bitmap, content) == piece.chunk

    async def _another(self, piece: ShardPiece) -> Place | None:
        """Return another place that holds the same chunk in full, verified."""
        bitmap = piece.bitmap if piece.bitmap is not None else await self._bitmap(piece)
        if bitmap is None:
            return None
        for place in await asyncio.to_thread(self._candidates, piece):
            other = ShardPiece(piece.chunk, place, bitmap)
            stored = await _read(self._places[0][0], piece.chunk, place)
            if stored is not None and await asyncio.to_thread(self._good, other, bitmap, stored):
                return place
        return None

    def _candidates(self, piece: ShardPiece) -> Sequence[Place]:
        wanted = np.frombuffer(piece.chunk, np.uint8)
        places = []
        for chunk, place in (("chunk", "place"), ("base", "base_place")):
            same = self._records[
                (self._records[chunk] == wanted).all(axis=1) & (self._records[place]["length"] > 0)
            ]
            places += [
                Place(
                    one["shard"].tobytes(),
                    int(one["offset"]),
                    int(one["length"]),
                    int(one["codec"]),
                )
                for one in same[place][:_OTHERS]
            ]
        found, held = self._index.lookup(wanted.reshape(1, 32))
        if found[0]:
            one = held[0]
            places.append(
                Place(
                    one["shard"].tobytes(),
                    int(one["offset"]),
                    int(one["length"]),
                    int(one["codec"]),
                )
            )
        return [
            place
            for place in dict.fromkeys(places)
            if not place.codec & codec.DELTA
            and codec.known(place.codec)
            and place.shard not in self._doubtful
        ]


def _is_delta(piece: ShardPiece) -> bool:
    return piece.place.codec & codec.DELTA != 0


def _sealed(stored: bytes) -> bool:
    try:
        return len(codec.unseal(memoryview(stored))) >= delta.HEADER_BYTES
    except ValueError:
        return False


async def _read(repository: StoredRepository, chunk: bytes, place: Place) -> bytes | None:
    """Return what is stored of a chunk at a place, decrypted; None if there is nothing."""
    if not 0 < place.length <= CELL_BYTES + codec.MAX_OVERHEAD:
        return None
    out = bytearray(place.length)
    try:
        name = object_name("shard", place.shard)
        await repository.backend.get_into(name, place.offset, memoryview(out))
        return bytes(opened_piece(repository.keys.chunk, name, place.offset, chunk, out))
    except (ObjectMissing, Damaged, FormatTooNew, ValueError):
        return None
