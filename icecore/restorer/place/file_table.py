"""The cells that go into the file of device memory, in the order in which they go: a table in
memory that the restorer and its placers share.

It never changes. So the restorer tells a placer only the rows, and the placer finds out what to
read for them: naming each cell kept the restorer's interpreter busy (0.2 ms for 16 MiB).
"""

from __future__ import annotations

import mmap
import os

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.sizes import BITMAP_BYTES
from icecore.store.format.cell import CELL, Bytes, Records

_EACH = CELL.itemsize + BITMAP_BYTES + np.dtype(np.int64).itemsize


class FileTable(msgspec.Struct, frozen=True):
    """The table.

    Attributes:
        records: CELL[n].
        wanted: u1[n, 32], the pages that go into the file.
        position: i8[n], where in the file each cell's window begins.
    """

    records: Records
    wanted: Bytes
    position: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.records)

    def share(self) -> int:
        """Return a descriptor of the table in memory, for `shared`; the caller closes it."""
        descriptor = os.memfd_create("icecore-file-table", os.MFD_CLOEXEC)
        with open(descriptor, "wb", buffering=0, closefd=False) as file:
            file.truncate(max(1, len(self)) * _EACH)
            for part in (self.records, self.wanted, self.position):
                data = memoryview(part.tobytes())
                while data:
                    data = data[file.write(data) :]
        return descriptor

    @classmethod
    def shared(cls, descriptor: int, rows: int) -> FileTable:
        """Return the table of so many rows behind a descriptor, and close that."""
        try:
            data = mmap.mmap(descriptor, max(1, rows) * _EACH, access=mmap.ACCESS_READ)
        finally:
            os.close(descriptor)
        records = np.frombuffer(data, CELL, rows)
        wanted = np.frombuffer(data, np.uint8, rows * BITMAP_BYTES, records.nbytes).reshape(
            rows, BITMAP_BYTES
        )
        return cls(
            records, wanted, np.frombuffer(data, np.int64, rows, records.nbytes + wanted.nbytes)
        )
