"""Store the pages of a dump that CRIU wrote in full: one read a cell, stored by the thread that read
it. Pages that lie back to back are read at once.
"""

from __future__ import annotations

import ctypes
import os
import threading
from bisect import bisect_right
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.pipeline import CellStore, Pipeline, SpaceSink
from icecore.dumper.memory.sources import read_fully
from icecore.dumper.memory.staging import Slot, Staging
from icecore.errors import Damaged
from icecore.sizes import CELL_BYTES, PAGE


class CompactPages:
    """The ``pages-N.img`` of a dump whose pages are in address order: the present pages of a cell lie
    back to back, so one read fetches the cell. Thread-safe.

    Args:
        path: The file that holds the image.
        extents: EXTENT records of all its pages, ascending.
        part: Offset and bytes of the image in the file; None: it is the whole file.

    Raises:
        Damaged: The file has another number of pages.
    """

    process = None
    file = None
    mapped = None

    def __init__(
        self, path: Path, extents: npt.NDArray[np.void], part: tuple[int, int] | None = None
    ) -> None:
        self._path = str(path)
        length = extents["pages"].astype(np.int64) * PAGE
        self._start: list[int] = extents["address"].tolist()
        self._length: list[int] = length.tolist()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        first, size = part or (0, os.fstat(self._descriptor).st_size)
        self._offset: list[int] = (np.cumsum(length) - length + first).tolist()
        if (extents["pages"] > size // PAGE).any() or size != int(length.sum()):
            os.close(self._descriptor)
            raise Damaged(
                "image", path.name, f"it has {size} bytes, its pagemap {int(length.sum())}"
            )

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read(self, address: int, length: int) -> bytes:
        """Return ``length`` bytes at an address; empty if not all of them are in the image."""
        entry = bisect_right(self._start, address) - 1
        if entry < 0 or length <= 0 or address + length > self._start[entry] + self._length[entry]:
            return b""
        return os.pread(
            self._descriptor, length, self._offset[entry] + address - self._start[entry]
        )

    def read_into(self, iovecs: int, count: int, buffer: Slot, size: int) -> None:
        """See `icecore.dumper.memory.scan.Source`."""
        address = ctypes.c_uint64.from_address(iovecs).value
        entry = bisect_right(self._start, address) - 1
        offset = self._offset[entry] + address - self._start[entry]
        read_fully(self._descriptor, buffer.view(0, size), offset, self._path)


class ImmediatePipeline(Pipeline):
    """A pipeline without threads of its own: the thread that read a cell stores it, while its bytes
    are still in that core's cache. No job stands still meanwhile, so nothing is put off.
    """

    def __init__(self, writer: CellStore, staging: Staging) -> None:
        super().__init__(writer, staging, 0)
        self._store_in = writer
        self._give_back = staging.release
        self._local = threading.local()

    def put(self, sink: SpaceSink, row: int, slot: Slot) -> None:
        """Store one cell, now."""
        scratch = getattr(self._local, "scratch", None)
        if scratch is None:
            scratch = self._local.scratch = np.empty(CELL_BYTES, np.uint8)
        try:
            sink.store(row, slot, scratch, self._store_in)
        finally:
            self._give_back(slot)
