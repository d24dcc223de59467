"""Index segments that this process read or wrote last. They never change, so a verified one need
not be read again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from icecore.store.format.state import SegmentRef

if TYPE_CHECKING:
    from icecore.store.format.cell import Records


class RecentSegments:
    """Entries of short segments, for all sessions of one repository. For one event loop.

    A commit merges small segments, most of which the same process has just written, or read for its
    session's index.

    Args:
        budget: Bytes of entries to hold.
    """

    def __init__(self, budget: int = 4 << 20) -> None:
        self._budget = budget
        self._bytes = 0
        self._held: OrderedDict[tuple[bytes, bytes], Records] = OrderedDict()

    def get(self, ref: SegmentRef) -> Records | None:
        """Return the entries of a segment if they are cached."""
        entries = self._held.get((ref.id, ref.digest))
        if entries is not None:
            self._held.move_to_end((ref.id, ref.digest))
        return entries

    def keep(self, refs: Iterable[SegmentRef]) -> None:
        """Drop all segments but these, the live ones of the newest state: merged segments are not
        read again.
        """
        live = {(ref.id, ref.digest) for ref in refs}
        for key in self._held.keys() - live:
            self._bytes -= self._held.pop(key).nbytes

    def add(self, ref: SegmentRef, entries: Records) -> None:
        """Cache the entries of a segment, verified or just written, if they are few; the array must
        not change any more.
        """
        if entries.nbytes > self._budget // 4 or (ref.id, ref.digest) in self._held:
            return
        # A view would keep the whole array that it is a part of.
        self._held[ref.id, ref.digest] = entries if entries.base is None else entries.copy()
        self._bytes += entries.nbytes
        while self._bytes > self._budget:
            self._bytes -= self._held.popitem(last=False)[1].nbytes
