"""Deltas for the writer: finds a chunk's base in the parent's record, reads and verifies it, and
decides whether a delta pays off.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from icecore.errors import Damaged, ObjectMissing
from icecore.events import Event, Sink
from icecore.sizes import BITMAP_BYTES, PAGE
from icecore.store.format import codec, delta
from icecore.store.format.chunk import align, chunk_id, pages_of
from icecore.store.format.cipher import open_piece, overhead, peek_piece
from icecore.store.format.codec import Buffer
from icecore.store.format.names import object_name
from icecore.store.format.rows import Place, Row
from icecore.store.runtime.pool import SAMPLE_BYTES, Scratch
from icecore.store.snapshot.trial import (
    SAMPLE_PAGES,
    SAMPLE_RUNS,
    Estimate,
    Habit,
    Objective,
    sample,
    sample_starts,
    trial,
)

#: Fills a buffer from a shard (16-byte name) at an offset.
Fetch = Callable[[bytes, int, memoryview], None]

#: A delta is used if it is shorter than this share of the best full form. With a half, a restore
#: would read no more bytes than for the full form; above that, the repository still grows less, by
#: a third for a key-value cache.
WORTH = 0.75
#: A delta of fewer than one in this many pages is small.
_SMALL = 4
#: Estimates that are off by less than this are tried.
_DOUBT = 1.1
#: If a chunk's full form is shorter than one in this many of its bytes, reading a base does not pay
#: off.
_LITTLE = 16
_LONGEST_PAUSE = 16


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
    """A base: its id, place, data bitmap and bytes."""

    chunk: bytes
    place: Place
    bitmap: bytes
    content: memoryview


@dataclass
class _Luck:
    """The success of deltas in one region, for bases that cannot be sampled cheaply: after
    failures, some bases are not even read.
    """

    losses: int = 0
    pause: int = 0


class Deltas:
    """Creates the deltas of one stream. Threads may share it: a lost update costs one needless or
    one missed delta.

    Args:
        fetch: Reads shards.
        usable: Whether a shard may be referred to.
        key: The repository's chunk key.
        objective: The same as for full forms.
        emit: Gets ``store.base_damaged`` if a base proves damaged; the chunk is then stored in
            full.
        peek: Whether small reads are cheap, so that sampling some pages pays off.
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
        # Small deltas are created at every snapshot and take little time in any form, so their
        # bytes weigh more.
        self._small = Habit(), objective.for_small_deltas()
        self._large = Habit(), objective
        self._luck: dict[int, _Luck] = {}
        # The base bitmaps of deltas created here: what pre-copy stored may change again before it
        # can be read back.
        self._made: dict[bytes, bytes] = {}

    def make(
        self,
        region: int,
        chunk: bytes,
        bitmap: bytes,
        data: memoryview,
        previous: Row,
        full: float,
        scratch: Scratch,
    ) -> Delta | None:
        """Return a delta of ``data`` (whose id is ``chunk``) if it pays off, given that the best
        full form is expected to take ``full`` bytes.

        The base is the parent's chunk or, if that chunk is a delta, its base.

        Raises:
            StoreError: The base could not be read, for a reason other than damage or absence.
        """
        base, place = previous.chunk, previous.stored.place
        if place.codec & codec.DELTA:
            # The base's bitmap is at the head of the delta, which cannot be read while it is being
            # uploaded.
            if previous.chunk not in self._made and not self._usable(place.shard):
                return None
            base, place = previous.stored.base, previous.stored.base_place
        if place.codec == codec.ZERO or full * _LITTLE < len(data) or not self._usable(place.shard):
            return None
        luck = self._luck.setdefault(region, _Luck())
        try:
            theirs = self._bitmap(previous, scratch)
            looked = self._look(region, data, place, scratch) if theirs == bitmap else None
            if looked is None and luck.pause > 0:
                luck.pause -= 1
                return None
            if looked is not None and looked > WORTH * full * _DOUBT:
                return None
            content = self._content(base, place, theirs, scratch)
            made = self._encode(
                region, bitmap, data, Base(base, place, theirs, content), full, scratch
            )
            # Only a base that is used has to be verified: most failed attempts end before this.
            if made is not None and chunk_id(self._key, theirs, content) != base:
                raise Damaged("chunk", base.hex(), "its bytes do not match its id")
        except (Damaged, ObjectMissing) as error:
            self._emit(
                Event(
                    "store.base_damaged",
                    {"chunk": base.hex(), "shard": place.shard.hex(), "error": str(error)},
                )
            )
            return None
        if made is not None:
            self._made[chunk] = theirs
            luck.losses = 0
        else:
            luck.losses += 1
            luck.pause = min(2 ** (luck.losses - 1) - 1, _LONGEST_PAUSE)
        return made

    def _encode(
        self,
        region: int,
        bitmap: bytes,
        data: memoryview,
        base: Base,
        full: float,
        scratch: Scratch,
    ) -> Delta | None:
        content = base.content
        if base.bitmap != bitmap:
            content = align(base.bitmap, content, bitmap, scratch.aligned[: len(data)])
        found = delta.difference(data, content, scratch.own, scratch.residual)
        number: int = codec.XOR | codec.RAW
        body: Buffer = b""
        if len(found.xor):
            estimate = self._choose(region, found, len(found.xor) / len(data), scratch)
            if estimate.ratio * len(found.xor) > WORTH * full * _DOUBT:
                return None
            chosen = found.own if estimate.kind == codec.PATCH else found.xor
            plain, (body, *_) = codec.encode(chosen, estimate.choice, scratch.encoder)
            number = plain | estimate.kind
        length = delta.HEADER_BYTES + len(body) + codec.DIGEST_BYTES
        if length >= WORTH * full:
            return None
        return Delta(
            number,
            delta.parts(number, base.bitmap, found.changed, body),
            length,
            base.chunk,
            base.place,
        )

    def _bitmap(self, previous: Row, scratch: Scratch) -> bytes:
        """Return the base's data bitmap: the record's own, or from the header of the delta that the
        record names.
        """
        own = previous.stored.place
        if not own.codec & codec.DELTA:
            return previous.data
        made = self._made.get(previous.chunk)
        if made is not None:
            return made
        head = scratch.stored[:BITMAP_BYTES]
        self._peek_at(own, 0, head)
        return delta.base_bitmap(head)

    def _peek_at(self, place: Place, start: int, out: memoryview) -> None:
        """Read part of a stored chunk, from ``start`` on, unverified."""
        self._fetch(place.shard, place.offset + start, out)
        if overhead(self._key):
            peek_piece(self._key, object_name("shard", place.shard), place.offset, start, out, out)

    def _opened(self, chunk: bytes, place: Place, scratch: Scratch, out: memoryview) -> memoryview:
        """Return an encrypted chunk's stored form, decrypted.

        Raises:
            Damaged: It is not what was encrypted for that place.
        """
        name = object_name("shard", place.shard)
        stored = scratch.stored[: place.length]
        self._fetch(place.shard, place.offset, stored)
        try:
            return open_piece(self._key, name, place.offset, chunk, stored, out)
        except ValueError as error:
            raise Damaged("chunk", chunk.hex(), f"{error} (in {name})") from error

    def _look(self, region: int, data: memoryview, place: Place, scratch: Scratch) -> float | None:
        """Estimate the length of a delta from a few of the base's pages; return None if such a
        sample is impossible or not cheap.
        """
        pages = len(data) // PAGE
        if (
            not self._peek
            or place.codec != codec.RAW
            or place.length != len(data) + overhead(self._key)
            or pages < 2 * SAMPLE_PAGES
        ):
            return None
        mine, theirs = sample(data), scratch.base[:SAMPLE_BYTES]
        length = SAMPLE_BYTES // SAMPLE_RUNS
        for run, start in enumerate(sample_starts(pages)):
            self._peek_at(place, start * PAGE, theirs[run * length : (run + 1) * length])
        found = delta.difference(mine, theirs, scratch.own, scratch.residual)
        if not len(found.xor):
            return 0.0
        share = len(found.xor) / len(mine)
        return self._choose(region, found, share, scratch).ratio * share * len(data)

    def _choose(
        self, region: int, found: delta.Difference, share: float, scratch: Scratch
    ) -> Estimate:
        habit, objective = self._small if share * _SMALL <= 1 else self._large
        return habit.choose(region, found.xor, scratch, partial(best_residual, found, objective))

    def _content(self, base: bytes, place: Place, theirs: bytes, scratch: Scratch) -> memoryview:
        """Return the base's bytes, unverified."""
        content = scratch.base[: pages_of(theirs) * PAGE]
        try:
            if overhead(self._key):
                if place.codec == codec.RAW:
                    return self._whole(base, self._opened(base, place, scratch, content), content)
                codec.decode(
                    place.codec, self._opened(base, place, scratch, scratch.plain), content
                )
            elif place.codec == codec.RAW and place.length == len(content):
                self._fetch(place.shard, place.offset, content)
            else:
                stored = scratch.stored[: place.length]
                self._fetch(place.shard, place.offset, stored)
                codec.decode(place.codec, stored, content)
        except ValueError as error:
            raise Damaged(
                "chunk", base.hex(), f"{error} (in {object_name('shard', place.shard)})"
            ) from error
        return content

    def _whole(self, base: bytes, opened: memoryview, content: memoryview) -> memoryview:
        if len(opened) != len(content):
            raise Damaged(
                "chunk", base.hex(), f"{len(opened)} raw bytes where {len(content)} belong"
            )
        return content


def best_residual(found: delta.Difference, objective: Objective, scratch: Scratch) -> Estimate:
    """Return the best form of the changed pages, tried on a sample: residual or unchanged."""
    by_xor = trial(sample(found.xor), scratch, objective, codec.XOR)
    if found.whole:
        return by_xor  # a patch of all pages is the full form
    by_patch = trial(sample(found.own), scratch, objective, codec.PATCH)
    return by_patch if by_patch.cost <= by_xor.cost else by_xor
