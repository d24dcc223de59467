"""A lock that many readers or one writer hold; a waiting writer goes before new readers."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class MapLock:
    """Guards an address map: placements read it, whoever reads the kernel's events writes it."""

    def __init__(self) -> None:
        self._change = threading.Condition(threading.Lock())
        self._readers = 0
        self._writing = False
        self._writers_waiting = 0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Hold it with other readers."""
        with self._change:
            while self._writing or self._writers_waiting:
                self._change.wait()
            self._readers += 1
        try:
            yield
        finally:
            with self._change:
                self._readers -= 1
                if self._readers == 0:
                    self._change.notify_all()

    @contextmanager
    def writing(self) -> Iterator[None]:
        """Hold it alone."""
        with self._change:
            self._writers_waiting += 1
            try:
                while self._writing or self._readers:
                    self._change.wait()
            finally:
                self._writers_waiting -= 1
            self._writing = True
        try:
            yield
        finally:
            with self._change:
                self._writing = False
                self._change.notify_all()
