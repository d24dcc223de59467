"""Lost entries of the log, as the state records them, and how a reader skips them. Pure.

Only a holder of the log key can record a gap, so an absent entry is an error unless it is recorded.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from icecore.store.format.state import Gap


def gap_of(gaps: Sequence[Gap], generation: int) -> Gap | None:
    """Return the gap that holds ``generation``; None if its entry is not recorded as lost."""
    return next((gap for gap in gaps if gap.first <= generation <= gap.last), None)


def step(gaps: Sequence[Gap], start: int, wanted: int) -> int:
    """Return the entry to read next for a reader at entry ``start`` that goes back to ``wanted``.

    Args:
        gaps: The gaps of the newest state.
        start: A generation outside all gaps.
        wanted: A lower generation.

    Returns:
        ``wanted``, or, if that is lost, the entry after its gap. From there, the entry before the
        gap, which may be 0.
    """
    gap = gap_of(gaps, wanted)
    if gap is None:
        return wanted
    return gap.last + 1 if gap.last + 1 < start else gap.first - 1


def ranges(generations: Iterable[int]) -> list[tuple[int, int]]:
    """Return the runs of consecutive numbers, ascending: first and last of each."""
    runs: list[tuple[int, int]] = []
    for generation in sorted(set(generations)):
        if runs and runs[-1][1] + 1 == generation:
            runs[-1] = runs[-1][0], generation
        else:
            runs.append((generation, generation))
    return runs


def joined(gaps: Iterable[Gap]) -> list[Gap]:
    """Return the same gaps, ascending, with adjacent ones merged."""
    made: list[Gap] = []
    for gap in sorted(gaps, key=lambda gap: gap.first):
        if made and gap.first <= made[-1].last + 1:
            made[-1] = Gap(made[-1].first, max(made[-1].last, gap.last), made[-1].base)
        else:
            made.append(gap)
    return made


def kept(gaps: Sequence[Gap], above: int) -> list[Gap]:
    """Return the gaps that reach above a generation. All entries around older gaps have been
    trimmed.
    """
    return [gap for gap in gaps if gap.last > above]


def between(gaps: Sequence[Gap], first: int, last: int) -> list[tuple[int, int]]:
    """Return the generations from ``first`` to ``last`` not recorded as lost, newest first, as
    runs.
    """
    runs, low = [], first
    for gap in sorted(gaps, key=lambda gap: gap.first):
        if gap.last < low or gap.first > last:
            continue
        if gap.first > low:
            runs.append((low, gap.first - 1))
        low = gap.last + 1
    if low <= last:
        runs.append((low, last))
    return runs[::-1]
