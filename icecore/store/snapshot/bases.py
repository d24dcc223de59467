"""Deltas: reads a chunk's base, decides whether a delta pays off, and verifies the base of one that
does.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import msgspec

from icecore.errors import Damaged, ObjectMissing
from icecore.events import Event, Sink
from icecore.sizes import BITMAP_BYTES, PAGE
from icecore.store.format import codec, delta
from icecore.store.format.chunk import align, chunk_id, pages_of
from icecore.store.format.cipher import open_piece, overhead, peek_piece
from icecore.store.format.codec import Buffer
from icecore.store.format.names import object_name
from icecore.store.format.rows import NOWHERE, Place
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


class Candidate(NamedTuple):
    """A full chunk that may be the base of a delta.

    Attributes:
        chunk: Its id.
        place: Where it is stored.
        bitmap: Its data bitmap. Empty: unknown, but at the head of the delta at ``delta``.
    """

    chunk: bytes
    place: Place
    bitmap: bytes
    delta: Place = NOWHERE


class Delta(msgspec.Struct, frozen=True):
    """A delta to store: codec number, parts and their length, and the base."""

    number: int
    parts: tuple[Buffer, ...]
    length: int
    base: Candidate


class _Luck(msgspec.Struct):
    """The success of deltas in one region, for bases that cannot be sampled cheaply: after
    failures, some bases are not even read.

    Attributes:
        unlike: The last base whose bitmap was looked up had another bitmap than the chunk to store.
    """

    losses: int = 0
    pause: int = 0
    unlike: bool = False


class Deltas:
    """Creates the deltas of one stream. Threads may share it: a lost update costs one needless or
    one missed delta.

    Args:
        fetch: Reads shards.
        key: The repository's chunk key.
        objective: The same as for full forms.
        emit: Gets ``store.base_damaged`` if a base proves damaged; the chunk is then stored in
            full.
        peek: Whether small reads are cheap, so that sampling some pages pays off.
    """

    def __init__(
        self,
        fetch: Fetch,
        key: bytes,
        objective: Objective,
        emit: Sink,
        *,
        peek: bool,
    ) -> None:
        self._fetch = fetch
        self._peek = peek
        self._key = key
        self._emit = emit
        # Small deltas are created at every snapshot and take little time in any form, so their
        # bytes weigh more.
        self._small = Habit(), objective.for_small_deltas()
        self._large = Habit(), objective
        self._luck: dict[int, _Luck] = {}

    def make(
        self,
        region: int,
        bitmap: bytes,
        data: memoryview,
        base: Candidate,
        full: float,
        scratch: Scratch,
    ) -> Delta | None:
        """Return a delta of ``data`` if it pays off, given that the best full form is expected to
        take ``full`` bytes.

        Raises:
            StoreError: The base could not be read, for a reason other than damage or absence.
        """
        if full * _LITTLE < len(data):
            return None
        luck = self._luck.setdefault(region, _Luck())
        try:
            if self._peek:
                base = base._replace(bitmap=base.bitmap or self._bitmap(base.delta, scratch))
            same = base.bitmap == bitmap
            looked = self._look(region, data, base.place, scratch) if same else None
            if looked is None and luck.pause > 0:
                luck.pause -= 1
                return None
            if looked is not None and looked > WORTH * full * _DOUBT:
                return None
            guessed = None if luck.unlike else self._guess(bitmap, base, scratch)
            if guessed is None:
                if not base.bitmap:
                    base = base._replace(bitmap=self._bitmap(base.delta, scratch))
                    luck.unlike = base.bitmap != bitmap
                content = self._content(base, scratch)
            else:
                base, content = guessed
            made = self._encode(region, bitmap, data, base, content, full, scratch)
            # Only a base that is used has to be verified: most failed attempts end before this.
            # `_guess` has already verified the base that it returned.
            if (
                made is not None
                and guessed is None
                and chunk_id(self._key, base.bitmap, content) != base.chunk
            ):
                raise Damaged("chunk", base.chunk.hex(), "its bytes do not match its id")
        except (Damaged, ObjectMissing) as error:
            self._emit(
                Event(
                    "store.base_damaged",
                    {
                        "chunk": base.chunk.hex(),
                        "shard": base.place.shard.hex(),
                        "error": str(error),
                    },
                )
            )
            return None
        if made is not None:
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
        base: Candidate,
        content: memoryview,
        full: float,
        scratch: Scratch,
    ) -> Delta | None:
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
            base,
        )

    def _guess(
        self, bitmap: bytes, base: Candidate, scratch: Scratch
    ) -> tuple[Candidate, memoryview] | None:
        """Guess that a base of unknown bitmap has the chunk's bitmap; return it and its content, or
        None if the guess is wrong. Most guesses are right, and a lookup takes as long as reading
        the base.
        """
        if base.bitmap:
            return None
        guessed = base._replace(bitmap=bitmap)
        try:
            content = self._content(guessed, scratch)
        except Damaged:  # or the base has another length
            return None
        if chunk_id(self._key, bitmap, content) != base.chunk:
            return None
        return guessed, content

    def _bitmap(self, place: Place, scratch: Scratch) -> bytes:
        """Return a base's data bitmap, from the head of the delta at ``place``."""
        head = scratch.stored[:BITMAP_BYTES]
        self._peek_at(place, 0, head)
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

    def _content(self, candidate: Candidate, scratch: Scratch) -> memoryview:
        """Return the base's bytes, unverified."""
        base, place, bitmap, _ = candidate
        content = scratch.base[: pages_of(bitmap) * PAGE]
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
