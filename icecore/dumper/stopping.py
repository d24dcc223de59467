"""Decides whether a dump ends the job. A dump can be asked to end the job while it is under way. So
a job that has to leave during a periodic snapshot need not wait for it and then be dumped again.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class StopRequest:
    """Asks one dump to end the job once the snapshot is committed, as ``DumpOptions.stop`` does.

    Args:
        asked: Ask from the beginning.
    """

    def __init__(self, *, asked: bool = False) -> None:
        self._lock = threading.Lock()
        self._asked = asked
        self._ends = False
        self._hurry: list[Callable[[], None]] = []

    @property
    def asked(self) -> bool:
        """Whether the dump was asked to end the job, in time or not."""
        return self._asked

    @property
    def ends(self) -> bool:
        """Whether the dump ends the job, as decided when the window began; False before that."""
        return self._ends

    def ask(self) -> None:
        """Ask the dump to end the job. Once the window has begun, this has no effect: the job goes
        on.
        """
        with self._lock:
            self._asked = True
            hurry, self._hurry = self._hurry, []
        for call in hurry:
            call()

    def when_asked(self, call: Callable[[], None]) -> None:
        """Call a function once, as soon as the dump is asked, in the thread that asks."""
        with self._lock:
            if not self._asked:
                self._hurry.append(call)
                return
        call()

    def decide(self) -> bool:
        """Decide and return whether the dump ends the job. The dump calls this when its window
        begins.
        """
        with self._lock:
            self._ends = self._asked
            return self._ends
