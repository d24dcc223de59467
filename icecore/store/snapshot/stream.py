"""Streams of shards: the chunks of one process, in the order in which they arrive, go into one open
shard after the other; full shards are stored.

If threads can write to the storage, each chunk is written directly from where it was encoded
(:class:`DraftStream`). Otherwise, whole shards are stored from a bounded number of buffers
(:class:`BufferedStream`).
"""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager

from icecore.sizes import CELL_BYTES
from icecore.store.backend.base import Draft
from icecore.store.format.chunk import NO_CHUNK
from icecore.store.format.cipher import overhead
from icecore.store.format.codec import MAX_OVERHEAD, Buffer
from icecore.store.format.keys import Keys
from icecore.store.format.names import random_id
from icecore.store.format.shard import EncodedChunk, ShardBuilder, ShardTable, place_chunk
from icecore.store.log.uploads import Uploads
from icecore.store.runtime.pool import BufferPool, huge_buffer
from icecore.store.snapshot.forms import AppenderLost, Room, Written

#: Bytes of a shard that are worth a request while none is in flight.
_WORTH_SENDING = 4 << 20

#: What :meth:`ShardStream.put` returns.
Stored = tuple[bytes, int, int]
#: Called with every shard once no chunk is added to it any more.
Closed = Callable[[ShardTable], None]


class ShardStream(ABC):
    """Thread-safe; the threads of one process share one stream."""

    @abstractmethod
    def put(self, one: EncodedChunk) -> tuple[bytes, int, int]:
        """Store one chunk. Its ``parts`` are not used after the call.

        Returns:
            The name of its shard, its offset, and its bytes there: more than ``length`` if it is
            encrypted.

        Raises:
            StoreError: It, or an earlier one, could not be stored.
        """

    @abstractmethod
    def lend(self, most: int, count: int) -> AbstractContextManager[Lent]:
        """Let another process write up to ``count`` chunks, of at most ``most`` bytes in total
        including the encryption's. An error in the context makes the snapshot fail.

        Raises:
            AppenderLost: There is no room to lend.
        """

    @abstractmethod
    def flush(self) -> None:
        """Close the open shard; no other thread may call ``put`` meanwhile."""

    @abstractmethod
    def abandon(self) -> None:
        """Drop the open shard."""


class Lent(ABC):
    """What another process may write to, until the context ends.

    Attributes:
        room: The place to write to.
        taken_back: Whether `take_back` was called.
    """

    room: Room
    taken_back: bool = False

    @abstractmethod
    def add(self, chunk: bytes, bitmap: bytes, one: Written) -> tuple[bytes, int, int]:
        """Store the chunk that was written next. Returns and raises as `ShardStream.put`."""

    def take_back(self) -> None:
        """Have the stream drop what was written but not added. The other process must have stopped
        writing.
        """
        self.taken_back = True


class _LentShard(Lent):
    """The end of a shard."""

    def __init__(self, table: ShardTable, descriptor: int) -> None:
        self.room = Room(table.name, descriptor, table.used, sealed=True)
        self._table = table

    def add(self, chunk: bytes, bitmap: bytes, one: Written) -> tuple[bytes, int, int]:
        own = NO_CHUNK if one.base is None else one.base.chunk
        offset = self._table.add(chunk, bitmap, own, one.number, one.length)
        return self._table.name, offset, one.length


class SharedFile:
    """A file in memory that another process can write to; freed with the object.

    Attributes:
        name: 16 random bytes.
        size: Its size in bytes.
        descriptor: Its descriptor.
    """

    def __init__(self, size: int) -> None:
        self.name = random_id()
        self.size = size
        self.descriptor = os.memfd_create("icecore-forms", os.MFD_CLOEXEC)
        weakref.finalize(self, os.close, self.descriptor)
        os.ftruncate(self.descriptor, size)
        self.view = memoryview(mmap.mmap(self.descriptor, size))


class SharedFiles:
    """Gives each thread a :class:`SharedFile` of its own."""

    def __init__(self) -> None:
        self._local = threading.local()

    def get(self, size: int) -> SharedFile:
        """Return this thread's file, with at least ``size`` bytes.

        Raises:
            OSError: It cannot be created.
        """
        file: SharedFile | None = getattr(self._local, "file", None)
        if file is None or file.size < size:
            file = self._local.file = SharedFile(size)
        return file


class _LentFile(Lent):
    """A file from which forms are copied to a shard."""

    def __init__(self, file: SharedFile, most: int, put: Callable[[EncodedChunk], Stored]) -> None:
        self.room = Room(file.name, file.descriptor, 0, sealed=False, spare=most)
        self._file = file
        self._put = put
        self._at = 0

    def add(self, chunk: bytes, bitmap: bytes, one: Written) -> tuple[bytes, int, int]:
        own = NO_CHUNK if one.base is None else one.base.chunk
        part = self._file.view[self._at : self._at + one.length]
        self._at += one.length
        if self._at > self.room.spare:
            raise ValueError("more was written than there was room for")
        return self._put(EncodedChunk(chunk, bitmap, own, one.number, [part], one.length))


class _Lane:
    """A shard being written; ``taken`` while a thread writes."""

    def __init__(self) -> None:
        self.taken = threading.Lock()
        self.table: ShardTable | None = None
        self.draft: Draft | None = None
        #: Where its chunks are encrypted.
        self.room: memoryview | None = None


class DraftStream(ShardStream):
    """Writes each chunk into a draft as it arrives.

    Two threads that write to one file wait for each other, so there are several lanes, each with a
    shard of its own. A later lane is used only while the earlier ones are taken, so that little
    data makes one shard.

    Args:
        uploads: Creates and publishes the drafts.
        keys: The repository's keys.
        closed: Called once for each shard.
        shard_bytes: Size at which a shard is closed.
    """

    def __init__(self, uploads: Uploads, keys: Keys, closed: Closed, shard_bytes: int) -> None:
        self._uploads = uploads
        self._keys = keys
        self._closed = closed
        self._shard_bytes = shard_bytes
        self._lanes = [_Lane() for _ in range(os.cpu_count() or 1)]

    def put(self, one: EncodedChunk) -> tuple[bytes, int, int]:
        stored = one.length + overhead(self._keys.chunk)
        with self._lane() as lane:
            table, draft = self._open(lane, stored)
            parts = one.parts
            if stored != one.length:
                parts = self._encrypted(lane, table, one, stored)
            self._uploads.append(draft, parts)
            offset = table.add(one.chunk, one.bitmap, one.base, one.number, stored)
            return table.name, offset, stored

    @contextmanager
    def lend(self, most: int, count: int) -> Iterator[Lent]:
        with self._lane() as lane:
            table, draft = self._open(lane, most, count)
            before = table.used
            lent = _LentShard(table, draft.descriptor)
            yield lent
            self._uploads.grow(draft, table.used - before)
            if lent.taken_back:
                # A chunk may be partly written here. Another chunk at this offset would reuse its
                # key and nonce.
                self._uploads.cut(draft)
                self._close(lane)

    @contextmanager
    def _lane(self) -> Iterator[_Lane]:
        """Take a lane; an error in the context discards its shard."""
        lane = self._take()
        try:
            yield lane
        except BaseException as error:
            # A chunk may be partly written; another at its offset would reuse its key and nonce. The
            # shard's other chunks count as stored, so the snapshot fails.
            self._uploads.fail(error)
            if lane.draft is not None:
                lane.draft.discard()
            lane.table = lane.draft = None
            raise
        finally:
            lane.taken.release()

    def _open(self, lane: _Lane, stored: int, count: int = 1) -> tuple[ShardTable, Draft]:
        """Return the lane's shard, or a new one, with room for ``count`` chunks of ``stored`` bytes
        in total.
        """
        table, draft = lane.table, lane.draft
        if table is not None and not table.fits(stored, count):
            self._close(lane)
            table = draft = None
        if table is None or draft is None:
            table = lane.table = ShardTable(random_id(), max(stored, self._shard_bytes))
            draft = lane.draft = self._uploads.draft("shard", table.name)
        return table, draft

    def _encrypted(
        self, lane: _Lane, table: ShardTable, one: EncodedChunk, stored: int
    ) -> Sequence[Buffer]:
        """Return a chunk encrypted for the end of the lane's shard, in the lane's own memory."""
        if lane.room is None:
            lane.room = huge_buffer(CELL_BYTES + MAX_OVERHEAD)
        room = lane.room[:stored]
        place_chunk(self._keys.chunk, table.name, table.used, one.chunk, one.parts, room)
        return [room]

    def flush(self) -> None:
        for lane in self._lanes:
            with lane.taken:
                self._close(lane)

    def abandon(self) -> None:
        for lane in self._lanes:
            with lane.taken:
                if lane.draft is not None:
                    lane.draft.discard()
                lane.table = lane.draft = None

    def _take(self) -> _Lane:
        for lane in self._lanes:
            if lane.taken.acquire(blocking=False):
                return lane
        lane = self._lanes[threading.get_ident() % len(self._lanes)]
        lane.taken.acquire()
        return lane

    def _close(self, lane: _Lane) -> None:
        table, draft = lane.table, lane.draft
        lane.table = lane.draft = None
        if table is not None and draft is not None and not len(table):
            draft.discard()  # an appender was lost before the shard had a chunk
        elif table is not None and draft is not None:
            self._closed(table)
            footer = table.footer(self._keys.shard)
            try:
                self._uploads.append(draft, [footer])
            except BaseException:
                draft.discard()
                raise
            self._uploads.publish("shard", table.name, draft, table.used + len(footer))


class _OpenShard:
    """A shard being filled: ``filling`` threads are copying into it. It may be uploaded once it is
    closed and no thread copies.
    """

    def __init__(self, builder: ShardBuilder) -> None:
        self.builder = builder
        self.filling = 0
        self.closed = False


class BufferedStream(ShardStream):
    """Collects shards in memory.

    Args:
        pool: Source of shard buffers; its bound slows the threads down to the storage's pace.
        uploads: Stores the closed shards.
        keys: The repository's keys.
        closed: Called once for each shard.
        patience: Seconds to wait for a buffer.
        files: The files that `lend` lends.
    """

    def __init__(
        self,
        pool: BufferPool,
        uploads: Uploads,
        keys: Keys,
        closed: Closed,
        patience: float,
        files: SharedFiles,
    ) -> None:
        self._pool = pool
        self._files = files
        self._uploads = uploads
        self._keys = keys
        self._closed = closed
        self._patience = patience
        self._order = threading.Lock()
        # Separate from the lock above, under which a thread may wait for a buffer: a thread that
        # finishes copying must never wait for that.
        self._count = threading.Lock()
        self._open: _OpenShard | None = None
        self._begun = False

    def put(self, one: EncodedChunk) -> tuple[bytes, int, int]:
        stored = one.length + overhead(self._keys.chunk)
        with self._order:
            shard = self._open
            if shard is not None and (not shard.builder.fits(stored) or self._due(shard)):
                self._open = None
                self._close(shard)
                shard = None
            if shard is None:
                buffer = self._pool.acquire(self._uploads.check, self._patience)
                shard = self._open = _OpenShard(ShardBuilder(random_id(), buffer))
            offset, room = shard.builder.reserve(
                one.chunk, one.bitmap, one.base, one.number, stored
            )
            with self._count:
                shard.filling += 1
        try:
            place_chunk(self._keys.chunk, shard.builder.name, offset, one.chunk, one.parts, room)
        finally:
            with self._count:
                shard.filling -= 1
                ready = shard.closed and shard.filling == 0
        if ready:
            self._upload(shard)
        return shard.builder.name, offset, stored

    @contextmanager
    def lend(self, most: int, count: int) -> Iterator[Lent]:
        try:
            file = self._files.get(most + CELL_BYTES + MAX_OVERHEAD)
        except OSError as error:
            raise AppenderLost(f"cannot create a file for an encoder's chunks: {error}") from error
        try:
            yield _LentFile(file, most, self.put)
        except BaseException as error:
            self._uploads.fail(error)
            raise

    def _due(self, shard: _OpenShard) -> bool:
        """Return whether to close a shard early: the first one, while no upload is in flight,
        because the link would otherwise idle until a shard is full.
        """
        return not self._begun and shard.builder.used >= _WORTH_SENDING and self._uploads.idle

    def flush(self) -> None:
        with self._order:
            shard, self._open = self._open, None
            if shard is not None:
                self._close(shard)

    def abandon(self) -> None:
        self._open = None

    def _close(self, shard: _OpenShard) -> None:
        self._begun = True
        with self._count:
            shard.closed = True
            ready = shard.filling == 0
        if ready:
            self._upload(shard)

    def _upload(self, shard: _OpenShard) -> None:
        builder = shard.builder
        self._closed(builder)
        parts = builder.finish(self._keys.shard)
        self._uploads.start(
            "shard", builder.name, parts, lambda: self._pool.release(builder.buffer)
        )
