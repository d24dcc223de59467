"""Where the content of each file lies in the space of its data directory. A file keeps its place
from snapshot to snapshot, so that unchanged files keep their cells and maps. Pure.
"""

from __future__ import annotations

from collections.abc import Mapping

from icecore.errors import DumpFailed
from icecore.sizes import CELL_BYTES

#: Cells are numbered with 32 bits.
_MOST_CELLS = 1 << 32
#: Gaps that are tried before a file is put behind all others.
_TRIES = 64


class Layout:
    """Places files at whole cells.

    Args:
        placed: Path → (first cell, number of cells), as in the parent.
    """

    def __init__(self, placed: Mapping[str, tuple[int, int]]) -> None:
        self._of = dict(placed)
        self._end = max((first + count for first, count in placed.values()), default=0)
        self._gaps: list[tuple[int, int]] = []

    def release(self, kept: Mapping[str, object]) -> None:
        """Free the cells of all files that are not in ``kept``."""
        self._of = {path: place for path, place in self._of.items() if path in kept}
        self._gaps, end = [], 0
        for first, count in sorted(self._of.values()):
            if first > end:
                self._gaps.append((end, first - end))
            end = first + count
        self._end = end

    def place(self, path: str, size: int) -> int:
        """Return the address for a file of ``size`` bytes.

        Raises:
            DumpFailed: The space is full.
        """
        cells = -(-size // CELL_BYTES)
        first, room = self._of.get(path, (0, -1))
        if cells > room:
            first = self._take(cells)
            self._of[path] = first, cells
        return first * CELL_BYTES

    def _take(self, cells: int) -> int:
        for number, (first, count) in enumerate(self._gaps[:_TRIES]):
            if count >= cells:
                if count > cells:
                    self._gaps[number] = first + cells, count - cells
                else:
                    del self._gaps[number]
                return first
        first = self._end
        self._end += cells
        if self._end > _MOST_CELLS:
            raise DumpFailed("a data directory holds more than 4 PiB")
        return first
