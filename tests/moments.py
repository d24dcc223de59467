"""Matrices of failures whose cases run in turn on one job, because the job outlives each of them.

The job and the witness to its snapshots are made once, and each moment meets what the earlier ones
left. A failure names its moment.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol, TypeVar

Moment = TypeVar("Moment")


class Due(Protocol):
    """Chooses the moments that a run takes, in their order (the fixture ``due``)."""

    def __call__(self, moments: Sequence[Moment]) -> list[Moment]: ...


@contextmanager
def at(*moment: object) -> Iterator[None]:
    """Name the moment in the report of what fails in the block."""
    try:
        yield
    except BaseException as error:
        error.add_note(f"at the moment: {' '.join(map(str, moment))}")
        raise
