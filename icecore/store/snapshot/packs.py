"""The maps of one snapshot on their way into storage: nodes that the parent has are referred to,
new ones are collected in one pack.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged
from icecore.store.format.cell import Records
from icecore.store.format.cellmap import (
    NodeEncoder,
    group,
    node_ids,
    pack_footer,
    parse_refs,
    place_node,
)
from icecore.store.format.codec import Buffer
from icecore.store.format.keys import Keys
from icecore.store.format.manifest import NODE_REF, Space
from icecore.store.format.names import random_id

#: A snapshot's nodes lie in at most this many packs: a restore reads them all before anything else.
MAX_PACKS = 4

Refs = npt.NDArray[np.void]


class MapWriter:
    """Collects the nodes of one snapshot. Thread-safe.

    Args:
        keys: The repository's keys.

    Attributes:
        name: The random name (16 bytes) of the pack being filled.
    """

    def __init__(self, keys: Keys) -> None:
        self.name = random_id()
        self._keys = keys
        self._lock = threading.Lock()
        self._encoder = NodeEncoder()
        self._nodes: list[bytes] = []
        self._places: dict[bytes, tuple[int, int]] = {}
        self._used = 0
        self._kept_packs: set[bytes] = set()

    @property
    def stored(self) -> int:
        """Stored bytes of the nodes collected so far."""
        return self._used

    def add(self, records: Sequence[Records], parent: Space | None) -> bytes:
        """Store the map of one space.

        Args:
            records: CELL records, an array per region, each ascending by cell.
            parent: The same space in the parent snapshot, which the session pins; its equal nodes
                are reused.

        Returns:
            The NODE_REF records for :attr:`Space.nodes`.
        """
        groups = group(records)
        nodes = groups.node_bytes()
        ids = node_ids(self._keys.node, nodes)
        refs = np.zeros(len(groups), NODE_REF)
        refs["region"], refs["group"] = groups.region, groups.group
        refs["node"] = np.frombuffer(b"".join(ids), np.uint8).reshape(-1, 32)
        with self._lock:
            reused = self._reuse(refs, ids, parent)
            places = [self._place(ids[i], nodes[i]) for i in np.flatnonzero(~reused).tolist()]
        if places:
            fresh = np.flatnonzero(~reused)
            refs["pack"][fresh] = np.frombuffer(self.name, np.uint8)
            refs["offset"][fresh] = [offset for offset, _ in places]
            refs["length"][fresh] = [length for _, length in places]
        return refs.tobytes()

    def finish(self) -> list[Buffer] | None:
        """Return the pack as buffers to write in order; None if no node is new."""
        if not self._nodes:
            return None
        lengths = [len(node) for node in self._nodes]
        return [
            b"".join(self._nodes),
            pack_footer(self._keys.shard, self.name, list(self._places), lengths),
        ]

    def _place(self, identity: bytes, node: memoryview) -> tuple[int, int]:
        place = self._places.get(identity)
        if place is None:
            stored = place_node(
                self._keys.node, self.name, self._used, identity, self._encoder.encode(node)
            )
            place = self._places[identity] = self._used, len(stored)
            self._nodes.append(stored)
            self._used += len(stored)
        return place

    def _reuse(
        self, refs: Refs, ids: Sequence[bytes], parent: Space | None
    ) -> npt.NDArray[np.bool_]:
        """Fill in the places of nodes that a pack worth keeping has; return which these are."""
        reused = np.zeros(len(refs), np.bool_)
        if parent is None or not parent.nodes:
            return reused
        try:
            theirs = parse_refs(parent.nodes, len(parent.regions))
        except ValueError as error:
            raise Damaged("manifest", f"(of {parent.kind} {parent.key})", str(error)) from error
        names = theirs["node"].tobytes()
        known = {names[at : at + 32]: at // 32 for at in range(0, len(names), 32)}
        match = np.fromiter((known.get(identity, -1) for identity in ids), np.int64, len(ids))
        found = np.flatnonzero(match >= 0)
        packs = theirs["pack"].tobytes()
        pack_of = [packs[16 * at : 16 * at + 16] for at in match[found].tolist()]
        kept = self._keep(Counter(pack_of))
        good = np.fromiter((pack in kept for pack in pack_of), np.bool_, len(found))
        target, source = found[good], match[found[good]]
        for field in ("pack", "offset", "length"):
            refs[field][target] = theirs[field][source]
        reused[target] = True
        return reused

    def _keep(self, use: Counter[bytes]) -> set[bytes]:
        """Choose those of the parent's packs that have most of the nodes, so that this snapshot,
        with the new one, has at most MAX_PACKS.
        """
        for pack, _ in use.most_common():
            if len(self._kept_packs) < MAX_PACKS - 1:
                self._kept_packs.add(pack)
        return self._kept_packs
