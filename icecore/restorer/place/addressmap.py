"""Maps the addresses of a snapshot to those of the process, which moves, drops and forks its memory
meanwhile.

Pure. Addresses in the snapshot are called original, those of the process current. Every original
address is at one place at most, and a current address outside all segments holds zeros.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from typing import NamedTuple

#: No user address is higher (five-level page tables).
TOP = 1 << 56
#: Number of unmapped ranges that are remembered: more than other threads unmap between two events
#: of one mremap(2).
_RECENT = 64


class MovedPiece(NamedTuple):
    """``length`` bytes at ``original`` in the snapshot belong at ``current`` in the process."""

    current: int
    original: int
    length: int


class AddressMap:
    """The map of one address space; at first everything is where it was. Not thread-safe.

    The segments are three parallel lists in order of current addresses: start, end, and the
    difference to the original address.
    """

    def __init__(self) -> None:
        self._start = [0]
        self._end = [TOP]
        self._shift = [0]
        self._by_original: tuple[list[int], list[MovedPiece]] | None = None
        self._unmapped: deque[tuple[int, int]] = deque(maxlen=_RECENT)

    def copy(self) -> AddressMap:
        """Return the map of a child that was just forked."""
        other = AddressMap()
        other._start, other._end, other._shift = self._start[:], self._end[:], self._shift[:]
        return other

    def original(self, current: int) -> int | None:
        """Return the original address of what lies at a current address; None: zeros lie there."""
        at = bisect_right(self._start, current) - 1
        if at >= 0 and current < self._end[at]:
            return current + self._shift[at]
        return None

    def next_mapped(self, current: int) -> int:
        """Return the lowest address from ``current`` on that is in a segment; else TOP."""
        at = bisect_right(self._start, current) - 1
        if at >= 0 and current < self._end[at]:
            return current
        return self._start[at + 1] if at + 1 < len(self._start) else TOP

    def locate(self, original: int, length: int) -> list[MovedPiece]:
        """Return where ``length`` bytes at an original address belong now, in order; dropped ones
        are left out.
        """
        if self._by_original is None:
            pieces = sorted(
                (start + shift, MovedPiece(start, start + shift, end - start))
                for start, end, shift in zip(self._start, self._end, self._shift, strict=True)
            )
            self._by_original = [first for first, _ in pieces], [piece for _, piece in pieces]
        starts, segments = self._by_original
        found = []
        stop = original + length
        at = max(0, bisect_right(starts, original) - 1)
        while at < len(starts) and starts[at] < stop:
            segment = segments[at]
            low, high = (
                max(original, segment.original),
                min(stop, segment.original + segment.length),
            )
            if low < high:
                found.append(MovedPiece(segment.current + low - segment.original, low, high - low))
            at += 1
        return found

    def remove(self, start: int, end: int) -> None:
        """Note that the process discarded ``start`` to ``end``."""
        if start < end:
            self._cut(start, end)

    def unmap(self, start: int, end: int) -> None:
        """Note that the process unmapped ``start`` to ``end``."""
        self.remove(start, end)
        self._unmapped.append((start, end))

    def remap(self, source: int, target: int, length: int) -> None:
        """Note that the process moved ``length`` bytes from ``source`` to ``target``; the ranges do
        not overlap.

        Before Linux 6.15, the kernel reports the old length of memory that mremap(2) moves and
        shrinks, after it has reported that it unmapped what is cut off. Nothing moved from there,
        and what lies behind the shorter target is still there.
        """
        if source == target or length <= 0:
            return
        length = self._shrunk(source, length)
        self._unmapped = deque(
            (one for one in self._unmapped if one[1] <= target or target + length <= one[0]),
            _RECENT,
        )
        moved = self._cut(source, source + length)
        self._cut(target, target + length)
        if not moved:
            return
        at = bisect_right(self._start, target)
        self._start[at:at] = [start + target - source for start, _, _ in moved]
        self._end[at:at] = [end + target - source for _, end, _ in moved]
        self._shift[at:at] = [shift + source - target for _, _, shift in moved]

    def _shrunk(self, source: int, length: int) -> int:
        """Return the length that really moved: up to what was unmapped at the end of the range."""
        for start, end in self._unmapped:
            if source < start and end == source + length:
                return start - source
        return length

    def _cut(self, start: int, end: int) -> list[tuple[int, int, int]]:
        """Remove ``start`` to ``end`` from the map; return that part as (start, end, shift)."""
        self._by_original = None
        first = bisect_right(self._start, start) - 1
        if first < 0 or self._end[first] <= start:
            first += 1
        after = first
        taken: list[tuple[int, int, int]] = []
        kept: list[tuple[int, int, int]] = []
        while after < len(self._start) and self._start[after] < end:
            low, high, shift = self._start[after], self._end[after], self._shift[after]
            if low < start:
                kept.append((low, start, shift))
            taken.append((max(low, start), min(high, end), shift))
            if high > end:
                kept.append((end, high, shift))
            after += 1
        self._start[first:after] = [low for low, _, _ in kept]
        self._end[first:after] = [high for _, high, _ in kept]
        self._shift[first:after] = [shift for _, _, shift in kept]
        return taken
