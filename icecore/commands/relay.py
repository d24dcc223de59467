"""Runs calls that may wait for a reader in a separate thread, so that nobody else waits."""

from __future__ import annotations

import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress

#: Maximum number of waiting calls.
_MOST_WAITING = 2000
#: A call that takes longer than this waits for a reader that does not read.
_STUCK_SECONDS = 1.0
_POLL_SECONDS = 0.1

Call = Callable[[], None]


class Relay:
    """Runs calls one after the other, in a daemon thread. A call that fails counts as done."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: deque[Call] = deque()
        self._put = self._done = 0
        self._began = 0.0
        threading.Thread(target=self._run, name="relay", daemon=True).start()

    def put(self, call: Call) -> None:
        """Run a call in its turn. Drop it if too many calls wait."""
        with self._changed:
            if len(self._waiting) < _MOST_WAITING:
                self._add(call)

    def do(self, call: Call) -> None:
        """Run a call in its turn, and return once it is done."""
        with self._changed:
            mine = self._add(call)
            self._changed.wait_for(lambda: self._done >= mine)

    def settle(self) -> bool:
        """Wait until all calls that were put before are done; return whether they are. Do not wait
        for a call that takes long: what comes next waits for the same reader.
        """
        with self._changed:
            mine = self._put
            while self._done < mine:
                if self._began and time.monotonic() - self._began > _STUCK_SECONDS:
                    return False
                self._changed.wait(_POLL_SECONDS)
            return True

    def finish(self, seconds: float) -> bool:
        """Wait for ``seconds`` until all calls that were put before are done, however long each of
        them takes; return whether they are.
        """
        with self._changed:
            mine = self._put
            return self._changed.wait_for(lambda: self._done >= mine, seconds)

    def _add(self, call: Call) -> int:
        """Add a call, and return its number."""
        self._waiting.append(call)
        self._put += 1
        self._changed.notify_all()
        return self._put

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._waiting))
                call = self._waiting.popleft()
                self._began = time.monotonic()
            with suppress(Exception):  # a terminal or a pipe that is gone
                call()
            with self._changed:
                self._began = 0.0
                self._done += 1
                self._changed.notify_all()


def write_all(descriptor: int, data: bytes) -> None:
    """Write bytes without Python's buffer, whose lock could keep the interpreter from exiting.

    Raises:
        OSError: The rest could not be written.
    """
    left = memoryview(data)
    while left:
        try:
            left = left[os.write(descriptor, left) :]
        except BlockingIOError:
            select.select([], [descriptor], [])
