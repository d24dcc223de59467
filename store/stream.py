"""One stream of shards: chunks of one process, in the order in which they come, into one open shard after the other; full ones are uploaded."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from icecore.store.codec import Buffer
from icecore.store.names import random_id
from icecore.store.pool import BufferPool
from icecore.store.shard import ShardBuilder, fill
from icecore.store.uploads import Uploads

#: Told of every shard as it is closed.
Closed = Callable[[ShardBuilder], None]


class _OpenShard:
    """A shard being filled: ``filling`` threads are copying into it; it may be uploaded when it is closed and none is."""

    def __init__(self, builder: ShardBuilder) -> None:
        self.builder = builder
        self.filling = 0
        self.closed = False


class ShardStream:
    """Thread-safe; the threads of one process share one.

    Args:
        pool: Where shard buffers come from and go back to; its bound is what slows the threads down to the storage's pace.
        uploads: What stores the closed shards.
        key: The repository's shard key.
        closed: Called once for each shard.
        patience: Seconds to wait for a buffer.
    """

    def __init__(self, pool: BufferPool, uploads: Uploads, key: bytes, closed: Closed, patience: float) -> None:
        self._pool = pool
        self._uploads = uploads
        self._key = key
        self._closed = closed
        self._patience = patience
        self._order = threading.Lock()
        # Apart from the lock above, under which a thread may wait for a buffer: who finishes copying must never wait for that.
        self._count = threading.Lock()
        self._open: _OpenShard | None = None

    def put(
        self, chunk: bytes, data: bytes, base: bytes, number: int, parts: Sequence[Buffer], length: int
    ) -> tuple[bytes, int]:
        """Store one chunk of ``length`` stored bytes; the name of its shard and its offset there."""
        with self._order:
            shard = self._open
            if shard is not None and not shard.builder.fits(length):
                self._open = None
                self._close(shard)
                shard = None
            if shard is None:
                buffer = self._pool.acquire(self._uploads.check, self._patience)
                shard = self._open = _OpenShard(ShardBuilder(random_id(), buffer))
            offset, room = shard.builder.reserve(chunk, data, base, number, length)
            with self._count:
                shard.filling += 1
        try:
            fill(room, parts)
        finally:
            with self._count:
                shard.filling -= 1
                ready = shard.closed and shard.filling == 0
        if ready:
            self._upload(shard)
        return shard.builder.name, offset

    def flush(self) -> None:
        """Close the open shard, if there is one."""
        with self._order:
            shard, self._open = self._open, None
            if shard is not None:
                self._close(shard)

    def _close(self, shard: _OpenShard) -> None:
        with self._count:
            shard.closed = True
            ready = shard.filling == 0
        if ready:
            self._upload(shard)

    def _upload(self, shard: _OpenShard) -> None:
        builder = shard.builder
        self._closed(builder)
        parts = builder.finish(self._key)
        self._uploads.start("shard", builder.name, parts, lambda: self._pool.release(builder.buffer))
