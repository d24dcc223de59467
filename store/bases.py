"""Deltas for the writer: finds a chunk's base in the parent's record, reads and verifies it, and says whether a delta pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from icecore.errors import Damaged, ObjectMissing
from icecore.events import Event, Sink
from icecore.store import codec, delta
from icecore.store.cell import BITMAP_BYTES, PAGE
from icecore.store.chunk import align, changed_pages, chunk_id, pages_of
from icecore.store.codec import Buffer
from icecore.store.names import object_name
from icecore.store.pool import Scratch
from icecore.store.rows import Place, Row
from icecore.store.trial import Estimate, Habit, Objective, sample, trial

#: Fills a buffer from a shard (16-byte name) at an offset.
Fetch = Callable[[bytes, int, memoryview], None]

#: A delta is taken when it is shorter than this share of the best full form. A half would cost a restore no more bytes than the full form does; above
#: that the repository still grows less, and measured on a key-value cache by a third.
WORTH = 0.75
#: A delta of less than one in this many pages is small.
_SMALL = 4
#: Estimates off by less than this are tried.
_DOUBT = 1.1
_LONGEST_PAUSE = 16
_PEEKS = 8
_PEEK_PAGES = 2


@dataclass(frozen=True)
class Delta:
    """A delta to store: codec number, parts and their length, and the base."""

    number: int
    parts: tuple[Buffer, ...]
    length: int
    base: bytes
    base_place: Place


@dataclass(frozen=True)
class Base:
    """A verified base: its id, place, data bitmap and bytes."""

    chunk: bytes
    place: Place
    bitmap: bytes
    content: memoryview


@dataclass
class _Luck:
    """How deltas fared in one region: after losses some chunks are not even compared, for reading the base costs as much as storing."""

    losses: int = 0
    pause: int = 0


class Deltas:
    """Makes the deltas of one stream. Threads may share it: a lost update costs one needless or one missed delta.

    Args:
        fetch: Reads shards.
        usable: Whether a shard may be referred to.
        key: The repository's chunk key.
        objective: As for full forms.
        emit: Told when a base turns out damaged (``store.base_damaged``); the chunk is then stored in full.
        peek: Whether small reads are cheap, so that a look at some pages pays.
    """

    def __init__(
        self,
        fetch: Fetch,
        usable: Callable[[bytes], bool],
        key: bytes,
        objective: Objective,
        emit: Sink,
        *,
        peek: bool,
    ) -> None:
        self._fetch = fetch
        self._peek = peek
        self._usable = usable
        self._key = key
        self._emit = emit
        # Small deltas are made at every snapshot and cost little time whatever is done to them: there bytes are dearer.
        self._small = Habit(), objective.for_small_deltas()
        self._large = Habit(), objective
        self._luck: dict[int, _Luck] = {}

    def make(
        self, region: int, bitmap: bytes, data: memoryview, previous: Row, full: float, scratch: Scratch
    ) -> Delta | None:
        """A delta of ``data`` if that is worth it, given that the best full form is expected to take ``full`` bytes.

        The base is the parent's chunk, or the parent's base where that chunk is a delta itself.

        Raises:
            StoreError: The base could not be read, for another reason than being damaged or gone.
        """
        base, place = previous.chunk, previous.stored.place
        if place.codec & codec.DELTA:
            base, place = previous.stored.base, previous.stored.base_place
        if place.codec == codec.ZERO or not self._usable(place.shard):
            return None
        luck = self._luck.setdefault(region, _Luck())
        try:
            theirs = self._bitmap(previous, scratch)
            if luck.pause > 0 and not self._alike(theirs, bitmap, data, place, full, scratch):
                luck.pause -= 1
                return None
            content = self._content(base, place, theirs, scratch)
        except (Damaged, ObjectMissing) as error:
            self._emit(
                Event("store.base_damaged", {"chunk": base.hex(), "shard": place.shard.hex(), "error": str(error)})
            )
            return None
        made = self._encode(region, bitmap, data, Base(base, place, theirs, content), full, scratch)
        if made is not None:
            luck.losses = 0
        else:
            luck.losses += 1
            luck.pause = min(2 ** (luck.losses - 1) - 1, _LONGEST_PAUSE)
        return made

    def _encode(
        self, region: int, bitmap: bytes, data: memoryview, base: Base, full: float, scratch: Scratch
    ) -> Delta | None:
        content = base.content
        if base.bitmap != bitmap:
            content = align(base.bitmap, content, bitmap, scratch.aligned[: len(data)])
        found = delta.difference(data, content, scratch.own, scratch.residual)
        number: int = codec.XOR | codec.RAW
        body: Buffer = b""
        if len(found.xor):
            habit, objective = self._small if len(found.xor) * _SMALL <= len(data) else self._large
            estimate = habit.choose(region, found.xor, scratch, partial(_try, found, objective))
            if estimate.ratio * len(found.xor) > WORTH * full * _DOUBT:
                return None
            chosen = found.own if estimate.kind == codec.PATCH else found.xor
            plain, (body, *_) = codec.encode(chosen, estimate.choice, scratch.encoder)
            number = plain | estimate.kind
        length = delta.HEADER_BYTES + len(body) + codec.DIGEST_BYTES
        if length >= WORTH * full:
            return None
        return Delta(number, delta.parts(number, base.bitmap, found.changed, body), length, base.chunk, base.place)

    def _bitmap(self, previous: Row, scratch: Scratch) -> bytes:
        """The base's data bitmap: the record's own, or from the header of the delta that it says."""
        own = previous.stored.place
        if not own.codec & codec.DELTA:
            return previous.data
        head = scratch.stored[:BITMAP_BYTES]
        self._fetch(own.shard, own.offset, head)
        return delta.base_bitmap(head)

    def _alike(
        self, theirs: bytes, bitmap: bytes, data: memoryview, place: Place, full: float, scratch: Scratch
    ) -> bool:
        """Whether a look at a few pages of the base (unverified: nothing is made of them) promises a delta in spite of earlier losses."""
        pages = len(data) // PAGE
        if not self._peek or place.codec != codec.RAW or theirs != bitmap or pages < _PEEKS * _PEEK_PAGES:
            return False
        length = _PEEK_PAGES * PAGE
        changed = 0
        for at in range(_PEEKS):
            start = at * (pages - _PEEK_PAGES) // (_PEEKS - 1) * PAGE
            room = scratch.base[:length]
            self._fetch(place.shard, place.offset + start, room)
            changed += pages_of(changed_pages(data[start : start + length], room).tobytes())
        return changed * len(data) < WORTH * full * _PEEKS * _PEEK_PAGES

    def _content(self, base: bytes, place: Place, theirs: bytes, scratch: Scratch) -> memoryview:
        """The base's bytes, verified."""
        content = scratch.base[: pages_of(theirs) * PAGE]
        try:
            if place.codec == codec.RAW and place.length == len(content):
                self._fetch(place.shard, place.offset, content)
            else:
                stored = scratch.stored[: place.length]
                self._fetch(place.shard, place.offset, stored)
                codec.decode(place.codec, stored, content)
        except ValueError as error:
            raise Damaged("chunk", base.hex(), f"{error} (in {object_name('shard', place.shard)})") from error
        if chunk_id(self._key, theirs, content) != base:
            raise Damaged("chunk", base.hex(), f"its bytes do not have its id (in {object_name('shard', place.shard)})")
        return content


def _try(found: delta.Difference, objective: Objective, scratch: Scratch) -> Estimate:
    by_xor = trial(sample(found.xor), scratch, objective, codec.XOR)
    by_patch = trial(sample(found.own), scratch, objective, codec.PATCH)
    return by_patch if by_patch.cost <= by_xor.cost else by_xor
