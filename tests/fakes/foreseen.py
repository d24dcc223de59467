"""What an undisturbed process writes, computed once and as far as it is asked for: a job that lives
through many dumps is checked again and again.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Generic, TypeVar

Line = TypeVar("Line")


class Foreseen(Generic[Line]):
    """The beginning of an endless sequence of lines."""

    def __init__(self, lines: Iterator[Line]) -> None:
        self._lines = lines
        self._known: list[Line] = []

    def first(self, count: int) -> Sequence[Line]:
        """Return the first ``count`` lines."""
        self._known += islice(self._lines, max(0, count - len(self._known)))
        return self._known[:count]


def size_of(path: str | os.PathLike[str]) -> int:
    """Return the bytes of a file; 0 if there is none."""
    try:
        return os.stat(path).st_size
    except FileNotFoundError:
        return 0


def lines_after(path: str | os.PathLike[str], offset: int) -> int:
    """Return how many lines of a file end after an offset."""
    try:
        with open(path, "rb", buffering=0) as file:
            file.seek(offset)
            return file.read().count(b"\n")
    except FileNotFoundError:
        return 0
