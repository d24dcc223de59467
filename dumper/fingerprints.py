"""Fingerprints of cells, the cheap answer to "did this cell change?": XXH3-128 with a secret seed over page bitmap and bytes, looked up by address."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zstandard

from icecore.errors import Damaged
from icecore.store.cell import CELL

FINGERPRINT = np.dtype("V16")
_MAX_HINTS = 1 << 30  # of the whole object, before compression


@dataclass(frozen=True)
class KnownCells:
    """What is already known of a space's cells, sorted by address; n rows.

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
        """Nothing known."""
        return cls(np.empty(0, np.uint64), np.empty(0, FINGERPRINT), np.empty(0, CELL))

    def find(self, key: npt.NDArray[np.uint64]) -> npt.NDArray[np.int64]:
        """For each address the row that describes it, or -1."""
        if not len(self.key):
            return np.full(len(key), -1, np.int64)
        row = np.searchsorted(self.key, key)
        row = np.minimum(row, len(self.key) - 1)
        return np.where(self.key[row] == key, row, -1)

    def differ(self, key: npt.NDArray[np.uint64], fingerprint: npt.NDArray[np.void]) -> npt.NDArray[np.bool_]:
        """For each address whether its fingerprint is another one than is known, or none is."""
        row = self.find(key)
        if not len(self.key):
            return row < 0
        there = self.fingerprint[np.maximum(row, 0)].view(np.uint64).reshape(-1, 2)
        other: npt.NDArray[np.bool_] = (there != fingerprint.view(np.uint64).reshape(-1, 2)).any(axis=1)
        return (row < 0) | other

    def updated(
        self, key: npt.NDArray[np.uint64], fingerprint: npt.NDArray[np.void], record: npt.NDArray[np.void]
    ) -> KnownCells:
        """These rows laid over the present ones."""
        all_key = np.concatenate([key, self.key])
        unique, first = np.unique(all_key, return_index=True)
        return KnownCells(
            unique, np.concatenate([fingerprint, self.fingerprint])[first], np.concatenate([record, self.record])[first]
        )


class Fingerprints(NamedTuple):
    """What a snapshot remembers of one space's cells.

    Attributes:
        key: u8[n], as in `KnownCells`.
        fingerprint: V16[n].
        restless: u8[m], keys of cells that changed between pre-copy and window: to store them before the window was in vain.
    """

    key: npt.NDArray[np.uint64]
    fingerprint: npt.NDArray[np.void]
    restless: npt.NDArray[np.uint64] = np.empty(0, np.uint64)


NO_FINGERPRINTS = Fingerprints(np.empty(0, np.uint64), np.empty(0, FINGERPRINT))


class _Stored(msgspec.Struct, frozen=True, array_like=True):
    key: bytes
    fingerprint: bytes
    restless: bytes = b""


def encode_fingerprints(spaces: Mapping[str, Fingerprints]) -> bytes:
    """Fingerprints of many spaces (by ``kind:key``) as one hint object."""
    stored = {
        space: _Stored(
            known.key.astype("<u8").tobytes(), known.fingerprint.tobytes(), known.restless.astype("<u8").tobytes()
        )
        for space, known in spaces.items()
    }
    return zstandard.ZstdCompressor(level=1).compress(msgspec.msgpack.encode(stored))


def decode_fingerprints(data: bytes) -> dict[str, Fingerprints]:
    """The reverse of ``encode_fingerprints``.

    Raises:
        Damaged: the bytes are not such an object.
    """
    try:
        size = zstandard.frame_content_size(data)
        if not 0 <= size <= _MAX_HINTS:
            raise ValueError(f"implausible length {size}")
        stored = msgspec.msgpack.decode(
            zstandard.ZstdDecompressor().decompress(data, max_output_size=size), type=dict[str, _Stored]
        )
        out = {}
        for space, item in stored.items():
            keys, restless = (np.frombuffer(part, "<u8").astype(np.uint64) for part in (item.key, item.restless))
            fingerprint = np.frombuffer(item.fingerprint, FINGERPRINT)
            if len(keys) != len(fingerprint):
                raise ValueError(f"{space}: {len(keys)} addresses, {len(fingerprint)} fingerprints")
            out[space] = Fingerprints(keys, fingerprint, restless)
        return out
    except (ValueError, msgspec.MsgspecError, zstandard.ZstdError, RecursionError) as error:
        raise Damaged("hint", "fingerprints", str(error)) from error
