"""What is already known of a space's cells, looked up by address: a fingerprint that tells cheaply
whether a cell changed, and where the cell is stored.
"""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.store.format.cell import CELL
from icecore.store.format.fingerprints import FINGERPRINT


class KnownCells(msgspec.Struct, frozen=True):
    """What is known of a space's cells, sorted by address; n rows.

    Attributes:
        key: u8[n], address of the cell's first byte in its region (``CellPlan.key``).
        fingerprint: V16[n].
        record: CELL[n], where the cell is stored.
    """

    key: npt.NDArray[np.uint64]
    fingerprint: npt.NDArray[np.void]
    record: npt.NDArray[np.void]

    @classmethod
    def none(cls) -> KnownCells:
        """Return no known cells."""
        return cls(np.empty(0, np.uint64), np.empty(0, FINGERPRINT), np.empty(0, CELL))

    def find(self, key: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """Return for each address the row that describes it, or -1."""
        if not len(self.key):
            return np.full(len(key), -1, np.int64)
        row = np.searchsorted(self.key, key)
        row = np.minimum(row, len(self.key) - 1)
        return np.where(self.key[row] == key, row, -1)

    def differ(
        self, key: npt.NDArray[np.uint64], fingerprint: npt.NDArray[np.void]
    ) -> npt.NDArray[np.bool_]:
        """Return for each address whether its fingerprint differs from the known one, or none is
        known.
        """
        row = self.find(key)
        if not len(self.key):
            return row < 0
        there = self.fingerprint[np.maximum(row, 0)].view(np.uint64).reshape(-1, 2)
        other: npt.NDArray[np.bool_] = (there != fingerprint.view(np.uint64).reshape(-1, 2)).any(
            axis=1
        )
        return (row < 0) | other

    def updated(
        self,
        key: npt.NDArray[np.uint64],
        fingerprint: npt.NDArray[np.void],
        record: npt.NDArray[np.void],
    ) -> KnownCells:
        """Return the cells with these rows added, in place of present rows of the same address."""
        all_key = np.concatenate([key, self.key])
        unique, first = np.unique(all_key, return_index=True)
        return KnownCells(
            unique,
            np.concatenate([fingerprint, self.fingerprint])[first],
            np.concatenate([record, self.record])[first],
        )
