"""Large sets in little memory, for the collector: reached pieces of shards, spilled to a temporary
file beyond a budget, and ids of seen nodes.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from itertools import pairwise
from typing import IO

import numpy as np
import numpy.typing as npt

_OFFSET_BITS = 40
_PIECE = np.dtype([("key", "<u8"), ("length", "<u4")])
#: Groups of shards in the spill file, so that one group at a time is deduplicated.
_GROUPS = 64

Numbers = npt.NDArray[np.uint64]


class Pieces:
    """A set of pieces (shard number, offset, length).

    Args:
        budget: Bytes held in memory; a few times as much while sorting.
    """

    def __init__(self, *, budget: int = 32 << 20) -> None:
        self._budget = budget
        self._held: list[npt.NDArray[np.void]] = []
        self._bytes = 0
        self._file: IO[bytes] | None = None
        #: For each group, where its pieces lie in the file: offset in bytes, and number.
        self._extents: list[list[tuple[int, int]]] = [[] for _ in range(_GROUPS)]

    def add(self, shards: Numbers, offsets: Numbers, lengths: npt.NDArray[np.uint32]) -> None:
        """Add pieces; shards are numbered from 0, offsets are below 2^40."""
        pieces = np.empty(len(shards), _PIECE)
        pieces["key"] = shards << np.uint64(_OFFSET_BITS) | offsets
        pieces["length"] = lengths
        self._held.append(pieces)
        self._bytes += pieces.nbytes
        if self._bytes > self._budget:
            self._held = [_unique(self._held)]
            self._bytes = self._held[0].nbytes
            if self._bytes > self._budget // 2:
                self._spill()

    def _spill(self) -> None:
        if self._file is None:
            self._file = tempfile.TemporaryFile(prefix="icecore-gc-")  # noqa: SIM115 - has no name, and goes with this object
        pieces = self._held[0]
        groups = pieces["key"] >> np.uint64(_OFFSET_BITS) & np.uint64(_GROUPS - 1)
        order = np.argsort(groups, kind="stable")
        edges = np.searchsorted(groups[order], np.arange(_GROUPS + 1))
        for group in range(_GROUPS):
            part = pieces[order[edges[group] : edges[group + 1]]]
            if len(part):
                self._extents[group].append((self._file.tell(), len(part)))
                self._file.write(part.data)
        self._held, self._bytes = [], 0

    def shards(self) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
        """Yield every shard that has pieces: its number, their bytes, and their offsets, ascending."""
        if self._file is None:
            yield from _by_shard(_unique(self._held))
            return
        if self._held:
            self._held = [_unique(self._held)]
            self._spill()
        for extents in self._extents:
            parts = []
            for at, count in extents:
                self._file.seek(at)
                parts.append(np.frombuffer(self._file.read(count * _PIECE.itemsize), _PIECE))
            yield from _by_shard(_unique(parts))
        self._file.seek(0, 2)


def _unique(parts: list[npt.NDArray[np.void]]) -> npt.NDArray[np.void]:
    """Return each piece once, ascending."""
    pieces = np.concatenate([np.empty(0, _PIECE), *parts])
    order = np.argsort(pieces["key"], kind="stable")
    keys = pieces["key"][order]
    first = np.ones(len(keys), np.bool_)
    first[1:] = keys[1:] != keys[:-1]
    return pieces[order[first]]


def _by_shard(pieces: npt.NDArray[np.void]) -> Iterator[tuple[int, int, npt.NDArray[np.int64]]]:
    numbers = (pieces["key"] >> np.uint64(_OFFSET_BITS)).astype(np.int64)
    edges = (
        [0, *(np.flatnonzero(np.diff(numbers)) + 1).tolist(), len(numbers)] if len(numbers) else []
    )
    for start, end in pairwise(edges):
        here = pieces[start:end]
        offsets = (here["key"] & np.uint64((1 << _OFFSET_BITS) - 1)).astype(np.int64)
        yield int(numbers[start]), int(here["length"].sum(dtype=np.int64)), offsets


class Seen:
    """A set of random ids of at least 16 bytes, of which it holds 16. Once in 2^64, `missing`
    returns an id that was added.
    """

    _PENDING = 1 << 16

    def __init__(self) -> None:
        self._keys: Numbers = np.empty(0, np.uint64)
        self._more: Numbers = np.empty(0, np.uint64)
        self._pending: set[bytes] = set()

    def __len__(self) -> int:
        return len(self._keys) + len(self._pending)

    def missing(self, ids: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
        """Return the indices of ``ids`` (n x 16 bytes or more) that are not in the set."""
        halves = np.ascontiguousarray(ids[:, :16]).view(np.uint64).reshape(-1, 2)
        found = np.zeros(len(ids), np.bool_)
        if len(self._keys):
            at = np.minimum(np.searchsorted(self._keys, halves[:, 0]), len(self._keys) - 1)
            found = (self._keys[at] == halves[:, 0]) & (self._more[at] == halves[:, 1])
        left = np.flatnonzero(~found)
        if not self._pending:
            return left
        return np.array(
            [i for i in left.tolist() if halves[i].tobytes() not in self._pending], np.int64
        )

    def add(self, ids: npt.NDArray[np.uint8]) -> None:
        """Add ids that are not in the set."""
        data = np.ascontiguousarray(ids[:, :16]).tobytes()
        self._pending.update(data[at : at + 16] for at in range(0, len(data), 16))
        if len(self._pending) > self._PENDING:
            new = np.frombuffer(b"".join(self._pending), np.uint64).reshape(-1, 2)
            keys = np.concatenate([self._keys, new[:, 0]])
            order = np.argsort(keys, kind="stable")
            self._keys, self._more = keys[order], np.concatenate([self._more, new[:, 1]])[order]
            self._pending.clear()
