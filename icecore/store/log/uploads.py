"""A session's objects on their way into storage, several at once in the background. The first
failure is kept and raised by every later call.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from icecore.errors import IcecoreError, StoreError
from icecore.events import Event, Sink
from icecore.store.backend.base import Buffer, Draft, length_of
from icecore.store.format.names import Kind, object_name
from icecore.store.log.session import Session


class Uploads:
    """Stores objects for threads. Thread-safe.

    Args:
        session: Stores them, retries, and deletes them if it is aborted.
        loop: The session's event loop, not that of a calling thread.
        emit: Gets one ``store.upload`` event per object.
    """

    def __init__(self, session: Session, loop: asyncio.AbstractEventLoop, emit: Sink) -> None:
        self._session = session
        self._loop = loop
        self._emit = emit
        self._change = threading.Condition()
        self._running = 0
        self._failure: BaseException | None = None
        self._stored: set[bytes] = set()

    def start(
        self,
        kind: Kind,
        identity: bytes,
        parts: Sequence[Buffer],
        finished: Callable[[], None] | None = None,
    ) -> None:
        """Store an object from ``parts``, which must not change until ``finished`` is called (once,
        whatever the outcome).
        """
        self._run(
            self._session.put_named(kind, identity, parts),
            kind,
            identity,
            length_of(parts),
            finished,
        )

    def draft(self, kind: Kind, identity: bytes) -> Draft:
        """Return a draft of an object.

        Raises:
            StoreError: It could not be started.
        """
        with self._noting():
            return self._session.draft(kind, identity)

    def append(self, draft: Draft, parts: Sequence[Buffer]) -> None:
        """Append ``parts`` to the draft.

        Raises:
            StoreError: They could not be written; every later call raises the same error.
        """
        with self._noting():
            draft.append(parts)

    def grow(self, draft: Draft, count: int) -> None:
        """Have the draft take over ``count`` bytes that another process has written.

        Raises:
            StoreError: As from :meth:`append`.
        """
        with self._noting():
            draft.grow(count)

    def cut(self, draft: Draft) -> None:
        """Remove what another process has written and the draft has not taken over.

        Raises:
            StoreError: As from :meth:`append`.
        """
        with self._noting():
            draft.cut()

    def publish(self, kind: Kind, identity: bytes, draft: Draft, size: int) -> None:
        """Publish a draft of ``size`` bytes in the background."""
        self._run(draft.publish(), kind, identity, size, None)

    def fail(self, error: BaseException) -> None:
        """Note an error that makes a commit impossible; every later call raises the first one."""
        with self._change:
            self._failure = self._failure or error

    @contextmanager
    def _noting(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.fail(error)
            raise

    def _run(
        self,
        work: Coroutine[Any, Any, object],
        kind: Kind,
        identity: bytes,
        size: int,
        finished: Callable[[], None] | None,
    ) -> None:
        with self._change:
            self._running += 1
        started = time.perf_counter()
        future = asyncio.run_coroutine_threadsafe(work, self._loop)

        def ended(result: concurrent.futures.Future[object]) -> None:
            error = (
                concurrent.futures.CancelledError() if result.cancelled() else result.exception()
            )
            with self._change:
                self._running -= 1
                if error is None:
                    self._stored.add(identity)
                elif self._failure is None:
                    self._failure = error
                self._change.notify_all()
            if finished is not None:
                finished()
            if error is None:
                seconds = time.perf_counter() - started
                rate = size / seconds / 1e9
                name = object_name(kind, identity)
                self._emit(
                    Event(
                        "store.upload",
                        {"object": name, "bytes": size, "seconds": seconds, "gb_per_s": rate},
                    )
                )

        future.add_done_callback(ended)

    @property
    def idle(self) -> bool:
        """Whether nothing is being stored."""
        return self._running == 0

    def stored(self, identity: bytes) -> bool:
        """Return whether the object with that random name is certainly stored."""
        return identity in self._stored

    def check(self) -> None:
        """Raise the first failure, if there was one.

        Raises:
            StoreError: An upload failed.
        """
        error = self._failure
        if error is None:
            return
        if isinstance(error, IcecoreError):
            raise error
        raise StoreError(f"an upload failed: {type(error).__name__}: {error}") from error

    def wait(self) -> None:
        """Wait until no upload is running.

        Raises:
            StoreError: One failed.
        """
        self.settle()
        self.check()

    def settle(self) -> None:
        """Wait until no upload is running, whatever their outcome."""
        with self._change:
            self._change.wait_for(lambda: self._running == 0)
