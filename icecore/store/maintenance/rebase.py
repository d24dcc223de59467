"""Deltas whose base is no snapshot's own chunk any more: one is stored in full, the others as
deltas of that one, if this takes hardly more bytes.

This happens only in shards that are rewritten anyway. A base that deltas of several snapshots share
goes when the newest of them can take its place.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import msgspec

from icecore.errors import Damaged, ObjectMissing
from icecore.sizes import CELL_BYTES
from icecore.store.format import codec, delta
from icecore.store.format.cell import Records
from icecore.store.format.chunk import align
from icecore.store.format.cipher import overhead
from icecore.store.format.codec import Buffer, Choice
from icecore.store.format.names import object_name
from icecore.store.format.rows import Place, Row, Stored, unpack
from icecore.store.format.segment import of_shards
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.pool import Scratch
from icecore.store.snapshot.bases import WORTH, best_residual
from icecore.store.snapshot.decoder import ChunkDecoder
from icecore.store.snapshot.shard_writer import ShardWriter
from icecore.store.snapshot.trial import Objective

Key = tuple[bytes, int]
#: The highest level that writers use; nobody waits for the collector.
_LEVEL = 6
#: One in so many bytes more is a price worth paying for chunks that are read in one piece.
_SLACK = 32


class Orphan(msgspec.Struct, frozen=True):
    """A base, and the deltas that are the only ones to need it, oldest snapshot first."""

    base: Place
    deltas: list[Row]

    @property
    def key(self) -> Key:
        """The base's shard and offset."""
        return self.base.shard, self.base.offset

    @property
    def stored(self) -> int:
        """Stored bytes of base and deltas together."""
        return self.base.length + sum(row.stored.place.length for row in self.deltas)


class Orphans:
    """Finds bases in ``shards`` that are no snapshot's own chunk, from all maps, one after the
    other in the order of the snapshots.
    """

    def __init__(self, shards: Iterable[bytes]) -> None:
        self._shards = frozenset(shards)
        self._own: set[Key] = set()
        self._deltas: dict[Key, dict[Key, Row]] = {}

    def add(self, records: Records) -> None:
        """Take note of the CELL records of some nodes."""
        own = records["place"][
            (records["place"]["length"] > 0) & of_shards(records["place"]["shard"], self._shards)
        ]
        shards = own["shard"].tobytes()
        self._own.update(
            (shards[16 * at : 16 * at + 16], offset)
            for at, offset in enumerate(own["offset"].tolist())
        )
        based = (records["base_place"]["length"] > 0) & of_shards(
            records["base_place"]["shard"], self._shards
        )
        for row in map(unpack, records[based]):
            place, _, base = row.stored
            held = self._deltas.setdefault((base.shard, base.offset), {})
            held.pop((place.shard, place.offset), None)
            held[place.shard, place.offset] = row

    def found(self) -> list[Orphan]:
        """Return the orphans in storage order."""
        return [
            Orphan(next(iter(deltas.values())).stored.base_place, list(deltas.values()))
            for key, deltas in sorted(self._deltas.items())
            if key not in self._own
        ]


class _Form(msgspec.Struct, frozen=True):
    """How to store a chunk: codec and parts; ``based`` if it is a delta of the new full chunk."""

    row: Row
    number: int
    parts: tuple[Buffer, ...]
    based: bool

    @property
    def length(self) -> int:
        """Stored bytes."""
        return sum(len(part) for part in self.parts)


class Rebaser:
    """Stores the deltas of orphans in another form.

    Attributes:
        moved: How each delta is now stored.
        gone: Bases that nothing needs any more.
    """

    def __init__(self, repository: StoredRepository, writer: ShardWriter) -> None:
        self.moved: dict[Key, Place | Stored] = {}
        self.gone: set[Key] = set()
        self._repository = repository
        self._writer = writer
        self._decoder = ChunkDecoder(repository.keys.chunk)
        self._scratch = Scratch()
        self._objective = Objective()

    async def run(self, orphan: Orphan) -> bool:
        """Process one orphan; return whether that paid off. What cannot be read stays as it is, for
        'check' and 'repair'.
        """
        try:
            base = await self._read(orphan.base)
            stored = [await self._read(row.stored.place) for row in orphan.deltas]
            forms = await asyncio.to_thread(self._forms, orphan, base, stored)
        except (Damaged, ObjectMissing):
            return False
        more = len(forms) * overhead(self._repository.keys.chunk)
        if sum(form.length for form in forms) + more > orphan.stored + orphan.stored // _SLACK:
            return False
        full = forms[0]
        place = await self._put(full, bytes(32))
        self._moved(full.row, Stored(place))
        for form in forms[1:]:
            based = full.row.chunk if form.based else bytes(32)
            own = await self._put(form, based)
            self._moved(form.row, Stored(own, full.row.chunk, place) if form.based else Stored(own))
        self.gone.add(orphan.key)
        return True

    def _moved(self, row: Row, stored: Stored) -> None:
        self.moved[row.stored.place.shard, row.stored.place.offset] = stored

    async def _put(self, form: _Form, base: bytes) -> Place:
        return await self._writer.put(
            form.row.chunk, form.row.data, base, form.number, [bytes(part) for part in form.parts]
        )

    async def _read(self, place: Place) -> memoryview:
        out = memoryview(bytearray(place.length))
        await self._repository.backend.get_into(
            object_name("shard", place.shard), place.offset, out
        )
        return out

    def _forms(self, orphan: Orphan, base: memoryview, stored: list[memoryview]) -> list[_Form]:
        """Return the newest chunk in full, then the others; verify all before encoding them."""
        room = memoryview(bytearray(CELL_BYTES))
        contents = [
            bytes(self._decoder.decode(row, own, base, room, self._scratch))
            for row, own in zip(orphan.deltas, stored, strict=True)
        ]
        newest, content = orphan.deltas[-1], memoryview(contents[-1])
        return [
            self._full(newest, content, orphan.base.codec),
            *(
                self._delta(row, memoryview(other), newest.data, content, orphan.base.codec)
                for row, other in zip(orphan.deltas[:-1], contents[:-1], strict=True)
            ),
        ]

    def _full(self, row: Row, content: memoryview, form: int) -> _Form:
        """Store in full, in the base's form, which suits data that differs little from it."""
        number, parts = codec.encode(content, Choice(form, _LEVEL), self._scratch.encoder)
        return _Form(row, number, tuple(bytes(part) for part in parts), False)

    def _delta(
        self, row: Row, content: memoryview, base_bitmap: bytes, base: memoryview, form: int
    ) -> _Form:
        full = self._full(row, content, form)
        scratch = self._scratch
        if base_bitmap != row.data:
            base = align(base_bitmap, base, row.data, scratch.aligned[: len(content)])
        found = delta.difference(content, base, scratch.own, scratch.residual)
        if not len(found.xor):
            number, body = codec.XOR | codec.RAW, b""
        else:
            estimate = best_residual(found, self._objective, scratch)
            chosen = found.own if estimate.kind == codec.PATCH else found.xor
            plain, (data, *_) = codec.encode(chosen, estimate.choice, scratch.encoder)
            number, body = plain | estimate.kind, bytes(data)
        made = _Form(row, number, delta.parts(number, base_bitmap, found.changed, body), True)
        return made if made.length < WORTH * full.length else full
