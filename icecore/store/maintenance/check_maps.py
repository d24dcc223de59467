"""Reads the maps of all snapshots for a check, each node once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from icecore.errors import Damaged, IcecoreError
from icecore.store.format.cell import Records
from icecore.store.format.cellmap import check_regions
from icecore.store.format.manifest import MANIFEST_KIND, Space
from icecore.store.format.names import Kind, object_name
from icecore.store.format.state import SnapshotRecord
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.findings import Findings
from icecore.store.maintenance.reach import Refs, read_nodes

Name = tuple[Kind, bytes]


class Maps:
    """The distinct map nodes of all snapshots that were read.

    Args:
        sizes: The objects that are listed; may grow until the first `read`.

    Attributes:
        nodes: Records, one array per node.
        of_snapshot: For each snapshot, the numbers of its nodes.
        packs: For each node pack, the snapshots that refer to it.
    """

    def __init__(
        self, repository: StoredRepository, findings: Findings, sizes: Mapping[Name, int]
    ) -> None:
        self._repository = repository
        self._findings = findings
        self._sizes = sizes
        self._numbers: dict[tuple[bytes, bytes, int], int] = {}
        self.nodes: list[Records] = []
        self.of_snapshot: dict[str, list[int]] = {}
        self.packs: dict[bytes, set[str]] = {}

    async def read(self, refs: Refs, snapshots: list[str]) -> dict[int, int]:
        """Read nodes not seen before; return the number of the node of each reference whose node
        can be read.
        """
        keys = [(ref["node"].tobytes(), ref["pack"].tobytes(), int(ref["offset"])) for ref in refs]
        fresh = np.array([at for at, key in enumerate(keys) if key not in self._numbers], np.int64)
        for pack in {key[1] for key in keys}:
            if ("nodes", pack) not in self._sizes:
                self._findings.damage(
                    "nodes", object_name("nodes", pack), "it is missing", snapshots
                )
            self.packs.setdefault(pack, set()).update(snapshots)
        there = np.array([("nodes", keys[at][1]) in self._sizes for at in fresh], np.bool_)
        await self._split(refs, keys, fresh[there], snapshots)
        return {at: self._numbers[key] for at, key in enumerate(keys) if key in self._numbers}

    async def _split(
        self,
        refs: Refs,
        keys: list[tuple[bytes, bytes, int]],
        which: npt.NDArray[np.int64],
        snapshots: list[str],
    ) -> None:
        """Read nodes together; on failure, split them until the damaged ones are isolated."""
        if not len(which):
            return
        try:
            records, counts = await read_nodes(self._repository, refs[which])
        except IcecoreError as error:
            if len(which) == 1:
                pack = object_name("nodes", keys[int(which[0])][1])
                if isinstance(error, Damaged) and error.kind == "node":
                    error = Damaged(error.kind, error.name, f"{error.why} (in {pack})")
                self._findings.note(error, "nodes", pack, snapshots)
                return
            half = len(which) // 2
            await self._split(refs, keys, which[:half], snapshots)
            await self._split(refs, keys, which[half:], snapshots)
            return
        for at, held in zip(which.tolist(), np.split(records, np.cumsum(counts)[:-1]), strict=True):
            self._numbers[keys[at]] = len(self.nodes)
            self.nodes.append(held)

    def check_regions(
        self, record: SnapshotRecord, space: Space, refs: Refs, numbers: dict[int, int]
    ) -> None:
        """Check cells against their regions, as every reader of the map does."""
        nodes = [self.nodes[number] for number in numbers.values()]
        if not nodes:
            return
        regions = refs["region"][list(numbers)].astype(np.int64)
        try:
            check_regions(
                space.regions,
                np.concatenate(nodes),
                np.repeat(regions, [len(node) for node in nodes]),
            )
        except ValueError as error:
            self._findings.damage(
                MANIFEST_KIND.title,
                record.manifest,
                f"{space.kind} {space.key!a}: {error}",
                [record.snapshot],
            )

    def snapshots_of(
        self, shard: bytes, offsets: npt.NDArray[np.uint64], *places: str
    ) -> list[str]:
        """Return the snapshots that have a cell at one of these places."""
        wanted = np.frombuffer(shard, np.uint8)
        nodes = set()
        for number, node in enumerate(self.nodes):
            for place in places:
                here = (node[place]["shard"] == wanted).all(axis=1) & np.isin(
                    node[place]["offset"], offsets
                )
                if (here & (node[place]["length"] > 0)).any():
                    nodes.add(number)
        return [
            snapshot
            for snapshot, numbers in self.of_snapshot.items()
            if not nodes.isdisjoint(numbers)
        ]
