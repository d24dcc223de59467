"""Decides which rows are delivered next: urgent ones first, then the plan. Every row that was begun
is pending until it is delivered, so that an incomplete fetch is never taken for a complete one.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from icecore.host.kernel.memory import HugeBuffer
from icecore.restorer.plan.memory import Batch


class Work(NamedTuple):
    """What one worker does next.

    Attributes:
        batches: One, or several for a placer.
        buffer: Holds the stored bytes of the batch; None: they must be read.
        urgent: A process waits for it.
    """

    batches: Sequence[Batch]
    buffer: HugeBuffer | memoryview | None
    urgent: bool


class Schedule:
    """The rows of one fetcher. Thread-safe.

    Args:
        one: Makes the batch of a single row.
    """

    def __init__(self, one: Callable[[int], Batch]) -> None:
        self._one = one
        self._change = threading.Condition()
        self._urgent: deque[tuple[int, memoryview | None]] = deque()
        self._asked: set[int] = set()
        self._planned: Iterator[Batch] | None = None
        self._each = 1
        self._ready: deque[tuple[Batch, HugeBuffer]] = deque()
        self._open = False
        self._exhausted = False
        self._running = 0
        self._delivered = 0
        self._failure: BaseException | None = None
        self._threads: list[threading.Thread] = []
        self.stopped = False

    # -- for who wants rows

    def begin(self, planned: Iterator[Batch] | None, *, opened: bool, each: int = 1) -> None:
        """Set the plan. Until `open` only urgent rows are delivered.

        Args:
            planned: Batches that the workers read; None: they are fetched ahead (`add_ready`).
            each: Batches that a worker takes at once.
        """
        self._planned, self._each = planned, each
        self._open = opened

    def open(self) -> None:
        """Let the planned rows be delivered."""
        with self._change:
            self._open = True
            self._change.notify_all()

    def ask(self, row: int, *, fetched: bool) -> bool:
        """Note that a row is urgent; return whether that is new.

        Args:
            fetched: The row is fetched ahead, and comes with `add_urgent`.
        """
        with self._change:
            if row in self._asked or self.stopped:
                return False
            self._asked.add(row)
            if not fetched:
                self._urgent.append((row, None))
                self._change.notify_all()
            return True

    def wait(self, seconds: float | None) -> bool:
        """Wait until all rows are delivered; return whether they are.

        Raises:
            The error of `fail`.
        """
        with self._change:
            done = self._change.wait_for(self._settled, seconds)
            if self._failure is not None:
                raise self._failure
            return done

    def _settled(self) -> bool:
        return self._failure is not None or (
            self._exhausted
            and not self._running
            and not self._ready
            and not self._urgent
            and not self._asked
        )

    def fail(self, error: BaseException) -> bool:
        """Stop because of an error; return whether it is the first."""
        with self._change:
            first = self._failure is None and not self.stopped
            if first:
                self._failure = error
            self.stopped = True
            self._change.notify_all()
        return first

    def start(self, thread: threading.Thread) -> bool:
        """Start a worker, unless all were stopped; return whether it was started. `stop` joins all
        that have begun, and none begins after it.
        """
        with self._change:
            if self.stopped:
                return False
            thread.start()
            self._threads.append(thread)
            return True

    def stop(self) -> None:
        """Let the workers end; `join` waits for them."""
        with self._change:
            self.stopped = True
            self._change.notify_all()

    def join(self) -> None:
        """Wait for the end of the workers."""
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()

    # -- for who fetches ahead

    def add_ready(self, batch: Batch, buffer: HugeBuffer) -> None:
        """Add a planned batch that was fetched."""
        with self._change:
            self._ready.append((batch, buffer))
            self._change.notify_all()

    def add_urgent(self, row: int, data: memoryview) -> None:
        """Add an urgent row that was fetched."""
        with self._change:
            self._urgent.append((row, data))
            self._change.notify_all()

    def exhaust(self) -> None:
        """Note that no planned batch follows."""
        with self._change:
            self._exhausted = True
            self._change.notify_all()

    # -- for the workers

    def take(self, *, only_urgent: bool) -> Work | None:
        """Wait for the next work; None: there is no more."""
        with self._change:
            while True:
                if self.stopped:
                    return None
                if self._urgent:
                    row, data = self._urgent.popleft()
                    self._running += 1
                    return Work([self._one(row)], data, urgent=True)
                if self._open and not only_urgent:
                    if self._ready:
                        self._running += 1
                        batch, buffer = self._ready.popleft()
                        return Work([batch], buffer, urgent=False)
                    if self._planned is not None and not self._exhausted:
                        planned = list(islice(self._planned, self._each))
                        if planned:
                            self._running += 1
                            return Work(planned, None, urgent=False)
                        self._exhausted = True
                        self._change.notify_all()
                self._change.wait()

    def finished(self, work: Work, delivered: int) -> int:
        """Note that work is done; return how many bytes were delivered by all workers.

        Args:
            delivered: Bytes that this work delivered.
        """
        with self._change:
            self._running -= 1
            self._delivered += delivered
            if work.urgent:
                self._asked.discard(work.batches[0].cells[0].row)
            if not self._running:
                self._change.notify_all()
            return self._delivered
