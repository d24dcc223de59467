"""The stored forms of chunks: in full or as a delta, in the codec that suits.

This is the part of the writer that needs a chunk's bytes, and it takes nearly all of the writer's
CPU time. A program can have other processes do it (`Appender`). They write the forms to a shard or,
if shards are in memory, to a separate file. These processes need the key, a way to read shards,
and the file to which they write.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from icecore.events import Sink
from icecore.store.format import codec
from icecore.store.format.chunk import chunk_id
from icecore.store.format.codec import Buffer
from icecore.store.runtime.pool import Scratch, ScratchPerThread
from icecore.store.snapshot.bases import Candidate, Deltas, Fetch
from icecore.store.snapshot.trial import Estimate, Habit, Objective, sample, surprising, trial

_ZEROS = bytes(64)


class Form(NamedTuple):
    """A chunk in its stored form, before encryption.

    Attributes:
        number: The number of its codec.
        parts: Its bytes; valid until the same thread makes another form.
        length: The sum of the lengths of the parts.
        base: The base, if the form is a delta; its bitmap is never empty.
    """

    number: int
    parts: Sequence[Buffer]
    length: int
    base: Candidate | None = None


class Room(NamedTuple):
    """Where another process may write forms: the end of a shard, or a file from which they are
    copied to a shard.

    Attributes:
        name: The file's name, 16 bytes; if the file is a shard, the shard's.
        descriptor: Its descriptor.
        offset: Where to write the first form.
        sealed: Whether the file is a shard, so that forms are encrypted if the repository is.
        spare: Offset at which this process puts the stored bytes of a chunk that it reads for the
            other one; -1: the other process reads chunks itself.
    """

    name: bytes
    descriptor: int
    offset: int
    sealed: bool
    spare: int = -1


class Wanted(NamedTuple):
    """A chunk of an `Appender` that has to be stored.

    Attributes:
        number: The chunk's number in the appender.
        region: The region that it belongs to, whose chunks are assumed to be similar.
        base: The chunk that it may become a delta of; None: make no delta.
    """

    number: int
    region: int
    base: Candidate | None


class Written(NamedTuple):
    """A chunk that was written to a `Room`.

    Attributes:
        number: The number of its codec.
        length: Its bytes there, including those of the encryption if the room is a shard.
        base: The base, if its form is a delta; its bitmap is never empty.
    """

    number: int
    length: int
    base: Candidate | None


class AppenderLost(Exception):
    """The other process did not carry out a request, and can no longer write."""


class Appender(ABC):
    """Another process that holds the bytes of chunks, and writes their forms."""

    @abstractmethod
    def append(
        self, stream: int, place: Room, wanted: Sequence[Wanted], emit: Sink, fetch: Fetch
    ) -> list[Written]:
        """Have the process write the forms of chunks one after the other; return what it wrote.

        Args:
            stream: The shard stream that the chunks belong to.
            place: Where to write them.
            wanted: The chunks, which must not be zero.
            emit: Gets ``store.base_damaged`` events.
            fetch: Reads shards, for a process that cannot read them itself.

        Raises:
            AppenderLost: It did not write all of them.
            StoreError: A shard could not be read, for a reason other than damage or absence.
        """


class Forms:
    """Makes the forms of one snapshot's chunks. Threads may share it.

    Args:
        streams: Number of shard streams.
        fetch: Reads shards.
        key: The repository's chunk key.
        objective: What to save, bytes or time.
        emit: Gets ``store.base_damaged`` events.
        peek: Whether small reads are cheap.
    """

    def __init__(
        self,
        streams: int,
        fetch: Fetch,
        key: bytes,
        objective: Objective,
        emit: Sink,
        *,
        peek: bool,
    ) -> None:
        self._key = key
        self._objective = objective
        self._habits = [Habit() for _ in range(streams)]
        self._deltas = [Deltas(fetch, key, objective, emit, peek=peek) for _ in range(streams)]
        self._scratch = ScratchPerThread()

    def chunk(self, bitmap: bytes, data: memoryview) -> Chunk:
        """Return the chunk of these bytes."""
        return Chunk(self, chunk_id(self._key, bitmap, data), bitmap, data)

    def make(
        self, stream: int, region: int, bitmap: bytes, data: memoryview, base: Candidate | None
    ) -> Form:
        """Return a chunk's form; see `Chunk.form`."""
        scratch = self._scratch.get()
        habit = self._habits[stream]

        def measure(scratch: Scratch) -> Estimate:
            return trial(sample(data), scratch, self._objective)

        estimate = habit.choose(region, data, scratch, measure)
        if base is not None:
            full = estimate.ratio * len(data)
            made = self._deltas[stream].make(region, bitmap, data, base, full, scratch)
            if made is not None:
                return Form(made.number, made.parts, made.length, made.base)
        number, parts = codec.encode(data, estimate.choice, scratch.encoder)
        length = sum(len(part) for part in parts)
        if surprising(estimate, len(data), length):
            habit.surprised(region)
        return Form(number, parts, length)


class Chunk:
    """The data pages of a cell, at least one.

    Attributes:
        id: 32 bytes (`icecore.store.format.chunk.chunk_id`).
        bitmap: The cell's data bitmap, 32 bytes.
        length: Bytes in the data pages.
        data: The bytes of the data pages.
    """

    def __init__(self, forms: Forms, id: bytes, bitmap: bytes, data: memoryview) -> None:
        self.id = id
        self.bitmap = bitmap
        self.length = len(data)
        self.data = data
        self._forms = forms

    @property
    def zero(self) -> bool:
        """Whether all bytes are zero."""
        begins = self.data[: len(_ZEROS)] == _ZEROS
        return begins and not np.frombuffer(self.data, np.uint64).any()

    def form(self, stream: int, region: int, base: Candidate | None) -> Form:
        """Return the form in which to store the chunk, which must not be zero.

        Args:
            stream: The shard stream that the chunk belongs to.
            region, base: As in `Wanted`.

        Raises:
            StoreError: The base could not be read, for a reason other than damage or absence.
        """
        return self._forms.make(stream, region, self.bitmap, self.data, base)
