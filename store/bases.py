"""Deltas for the writer: finds a chunk's base in the parent's record, reads and verifies it, and says whether a delta pays."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from icecore.errors import Damaged, ObjectMissing
from icecore.events import Event, Sink
from icecore.store import codec, delta
from icecore.store.cell import BITMAP_BYTES, PAGE
from icecore.store.chunk import align, chunk_id, pages_of
from icecore.store.codec import Buffer
from icecore.store.names import object_name
from icecore.store.pool import Scratch
from icecore.store.rows import Place, Row
from icecore.store.trial import Estimate, Habit, Objective, sample, trial

#: Fills a buffer from a shard (16-byte name) at an offset.
Fetch = Callable[[bytes, int, memoryview], None]

_LONGEST_PAUSE = 16
#: A delta of less than one in this many pages is small.
_SMALL = 4
#: Estimates off by less than this are tried.
_DOUBT = 1.1


@dataclass(frozen=True)
class Delta:
    """A delta to store: codec number, parts and their length, and the base."""

    number: int
    parts: tuple[Buffer, ...]
    length: int
    base: bytes
    base_place: Place


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
    """

    def __init__(
        self, fetch: Fetch, usable: Callable[[bytes], bool], key: bytes, objective: Objective, emit: Sink
    ) -> None:
        self._fetch = fetch
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
        """A delta of ``data`` if it takes less than half of ``full`` bytes, what the best full form is expected to take.

        The base is the parent's chunk, or the parent's base where that chunk is a delta itself.

        Raises:
            StoreError: The base could not be read, for another reason than being damaged or gone.
        """
        luck = self._luck.setdefault(region, _Luck())
        if luck.pause > 0:
            luck.pause -= 1
            return None
        made = self._attempt(region, bitmap, data, previous, full, scratch)
        if made is not None:
            luck.losses = 0
        else:
            luck.losses += 1
            luck.pause = min(2 ** (luck.losses - 1) - 1, _LONGEST_PAUSE)
        return made

    def _attempt(
        self, region: int, bitmap: bytes, data: memoryview, previous: Row, full: float, scratch: Scratch
    ) -> Delta | None:
        base, place = previous.chunk, previous.stored.place
        if place.codec & codec.DELTA:
            base, place = previous.stored.base, previous.stored.base_place
        if place.codec == codec.ZERO or not self._usable(place.shard):
            return None
        try:
            theirs, content = self._base(previous, base, place, scratch)
        except (Damaged, ObjectMissing) as error:
            self._emit(
                Event("store.base_damaged", {"chunk": base.hex(), "shard": place.shard.hex(), "error": str(error)})
            )
            return None
        if theirs != bitmap:
            content = align(theirs, content, bitmap, scratch.aligned[: len(data)])
        found = delta.difference(data, content, scratch.own, scratch.residual)
        number: int = codec.XOR | codec.RAW
        body: Buffer = b""
        if len(found.xor):
            habit, objective = self._small if len(found.xor) * _SMALL <= len(data) else self._large
            estimate = habit.choose(region, found.xor, scratch, partial(_try, found, objective))
            if estimate.ratio * len(found.xor) * 2 > full * _DOUBT:
                return None
            chosen = found.own if estimate.kind == codec.PATCH else found.xor
            plain, (body, *_) = codec.encode(chosen, estimate.choice, scratch.encoder)
            number = plain | estimate.kind
        length = delta.HEADER_BYTES + len(body) + codec.DIGEST_BYTES
        if 2 * length >= full:
            return None
        return Delta(number, delta.parts(number, theirs, found.changed, body), length, base, place)

    def _base(self, previous: Row, base: bytes, place: Place, scratch: Scratch) -> tuple[bytes, memoryview]:
        """The base's data bitmap and bytes, verified."""
        theirs = previous.data
        if previous.stored.place.codec & codec.DELTA:
            own = previous.stored.place
            head = scratch.stored[:BITMAP_BYTES]
            self._fetch(own.shard, own.offset, head)
            theirs = delta.base_bitmap(head)
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
        return theirs, content


def _try(found: delta.Difference, objective: Objective, scratch: Scratch) -> Estimate:
    by_xor = trial(sample(found.xor), scratch, objective, codec.XOR)
    by_patch = trial(sample(found.own), scratch, objective, codec.PATCH)
    return by_xor if by_xor.cost <= by_patch.cost else by_patch
