"""A cache of index entries of whole shards: data that is stored again was mostly stored together
before, so the chunks around one that was found are likely to be looked up next.

This is the locality-preserved cache of Zhu, Li and Patterson, "Avoiding the Disk Bottleneck in the
Data Domain Deduplication File System" (FAST 2008). It is bounded, evicts the least recently used
group first, and holds a shard only because a live segment names it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict

import numpy as np
import numpy.typing as npt

from icecore.store.format.cell import PLACE, Bytes, Records
from icecore.store.format.segment import Mask, leading, search, sort_entries

#: 69 bytes each.
_ENTRIES = 1 << 18
_MANY = 512
_SAMPLE = 64


class Neighbours:
    """Entries by the group in which they were added. Thread-safe."""

    def __init__(self, limit: int = _ENTRIES) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self._groups: OrderedDict[int, tuple[npt.NDArray[np.uint64], Records]] = OrderedDict()
        self._held = self._number = 0

    def add(self, entries: Records) -> None:
        """Keep these entries, in any order; evict what does not fit beside them."""
        entries = sort_entries(entries)
        if not 0 < len(entries) <= self._limit:
            return
        with self._lock:
            self._number += 1
            self._groups[self._number] = leading(entries["chunk"]), entries
            self._held += len(entries)
            while self._held > self._limit:
                self._held -= len(self._groups.popitem(last=False)[1][1])

    @property
    def newest(self) -> int:
        """The number of the group that was added last."""
        return self._number

    def search(self, ids: Bytes, since: int = 0) -> tuple[Mask, Records]:
        """Return which of ``ids`` are here, and their places (zero where not found). Of very many
        ids, a few may be missed.

        Args:
            since: Search only groups added after this one was the newest.
        """
        found = np.zeros(len(ids), np.bool_)
        places = np.zeros(len(ids), PLACE)
        with self._lock:
            groups = [group for group in reversed(self._groups.items()) if group[0] > since]
        left = np.arange(len(ids))
        for number, (keys, entries) in groups:
            # Chunks stored together are looked up together, so a few of many ids tell whether this
            # group has any.
            if (
                len(left) > _MANY
                and not search(entries, keys, ids[left[:: len(left) // _SAMPLE]])[0].any()
            ):
                continue
            hit, at = search(entries, keys, ids[left])
            if not hit.any():
                continue
            places[left[hit]] = np.take(entries, at[hit])["place"]
            found[left[hit]] = True
            left = left[~hit]
            with self._lock:
                if number in self._groups:
                    self._groups.move_to_end(number)
            if not len(left):
                break
        return found, places
