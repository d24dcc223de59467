"""Checks shards and index segments: that maps and index refer only to chunks that are there."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import numpy.typing as npt

from icecore.errors import IcecoreError, ObjectMissing
from icecore.store.format.cell import CELL, Records
from icecore.store.format.cellmap import parse_pack_footer
from icecore.store.format.container import TAIL_BYTES, Container
from icecore.store.format.filters import FILTER_KIND, FilterSet, decode_filter
from icecore.store.format.names import Kind, filter_name, object_name
from icecore.store.format.segment import TITLE as SEGMENT_TITLE
from icecore.store.format.shard import SHARD, parse_footer
from icecore.store.format.state import Condemned, LogState, SegmentRef
from icecore.store.log.index import filtered, read_segment
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check_maps import Maps, Name
from icecore.store.maintenance.findings import Findings


class ShardCheck:
    """Checks the containers of chunks and nodes, and what refers to them.

    Args:
        maps: The maps of all snapshots.
        sizes: The objects that are listed.
        named: Gets what maps and index refer to.
    """

    def __init__(
        self,
        repository: StoredRepository,
        findings: Findings,
        maps: Maps,
        sizes: Mapping[Name, int],
        named: set[Name],
    ) -> None:
        self._repository = repository
        self._backend = repository.backend
        self._keys = repository.keys
        self._findings = findings
        self._maps = maps
        self._sizes = sizes
        self._named = named
        self._footers: dict[bytes, Records | None] = {}

    async def footer(self, container: Container, kind: Kind, name: Name) -> Records | None:
        """Return the table of a shard or pack; None, after reporting it, if it is damaged or
        missing.
        """
        size = self._sizes.get(name)
        if size is None:
            self._findings.damage(kind, object_name(*name), "it is missing")
            return None
        parse: Callable[[bytes, bytes, int, bytes], Records] = (
            parse_footer if kind == "shard" else parse_pack_footer
        )
        try:
            tail = bytearray(min(size, TAIL_BYTES))
            await self._backend.get_into(object_name(*name), size - len(tail), memoryview(tail))
            where = container.parse_tail(name[1], size, tail)
            footer = bytearray(where.length)
            await self._backend.get_into(object_name(*name), where.offset, memoryview(footer))
            return parse(self._keys.shard, name[1], size, bytes(footer))
        except IcecoreError as error:
            self._findings.note(error, kind, object_name(*name))
            return None

    async def _table(self, shard: bytes) -> Records | None:
        if shard not in self._footers:
            self._footers[shard] = await self.footer(SHARD, "shard", ("shard", shard))
        return self._footers[shard]

    async def cells(self) -> Records:
        """Check every place in a record against its shard's footer; return the records of distinct
        chunks.
        """
        records = np.concatenate(self._maps.nodes) if self._maps.nodes else np.empty(0, CELL)
        records = records[records["place"]["length"] > 0]
        for place, chunk in (("place", "chunk"), ("base_place", "base")):
            held = records[records[place]["length"] > 0]
            for shard, which in _by_shard(held[place]):
                await self._shard(shard, held[which], place, chunk)
        different = _different(records["place"])
        self._findings.report.chunks = len(different)
        return records[different]

    async def _shard(self, shard: bytes, held: Records, place: str, chunk: str) -> None:
        self._named.add(("shard", shard))
        table = await self._table(shard)
        if table is None:
            self._findings.report.doubtful.add(shard)
            self._findings.affect(
                "shard",
                object_name("shard", shard),
                self._maps.snapshots_of(shard, held[place]["offset"], place),
            )
            return
        wrong = held[~_agree(table, held[place], held[chunk])]
        if len(wrong):
            self._findings.report.doubtful.add(shard)
            self._findings.damage(
                "shard",
                object_name("shard", shard),
                f"{len(wrong)} chunks that maps refer to are not in its footer",
                self._maps.snapshots_of(shard, wrong[place]["offset"], place),
            )

    async def segments(self, state: LogState) -> None:
        """Check that index segments are readable and consistent with the shards."""
        condemned = {name for batch in state.condemned for name in await self._names(batch)}
        for ref in state.segments:
            name = object_name("segment", ref.id)
            self._named.add(("segment", ref.id))
            try:
                entries = await read_segment(self._backend, ref, self._keys.segment)
            except IcecoreError as error:
                self._findings.note(error, SEGMENT_TITLE, name)
                continue
            if len(entries) != ref.count:
                self._findings.damage(
                    SEGMENT_TITLE, name, f"it has {len(entries)} entries instead of {ref.count}"
                )
            if filtered(ref):
                await self._filter(ref, entries)
            for shard, which in _by_shard(entries["place"]):
                if ("shard", shard) in condemned:
                    continue  # condemned, so nobody uses what the index says of it
                if ("shard", shard) not in self._sizes:
                    self._findings.damage(
                        SEGMENT_TITLE,
                        name,
                        f"it names {object_name('shard', shard)}, which is missing",
                    )
                    continue
                table = await self._table(shard)
                if (
                    table is not None
                    and not _agree(table, entries["place"][which], entries["chunk"][which]).all()
                ):
                    self._findings.damage(
                        SEGMENT_TITLE,
                        name,
                        f"it names chunks that {object_name('shard', shard)} does not have",
                    )

    async def _filter(self, ref: SegmentRef, entries: Records) -> None:
        """Check a segment's filter, if any: it must be intact and pass what is in the segment."""
        name = filter_name(ref.id)
        try:
            data = await self._backend.get(name, limit=FILTER_KIND.object_limit)
            words = decode_filter(name, data, self._keys.segment, ref)
        except ObjectMissing:
            return
        except IcecoreError as error:
            self._findings.note(error, FILTER_KIND.title, name)
            return
        alone = FilterSet([ref], words.nbytes + FILTER_KIND.limit)
        alone.put(0, words)
        if (alone.candidates(entries["chunk"]) < 0).any():
            self._findings.damage(FILTER_KIND.title, name, "it denies chunks of its segment")

    async def _names(self, batch: Condemned) -> list[Name]:
        try:
            return await self._repository.log.pages.read_names(batch)
        except IcecoreError:
            return []  # reported before


def _agree(table: Records, places: Records, chunks: npt.NDArray[np.uint8]) -> npt.NDArray[np.bool_]:
    """Return which places, with the ids of the chunks expected there, agree with a shard's table."""
    if not len(table):
        return np.zeros(len(places), np.bool_)
    at = np.minimum(np.searchsorted(table["offset"], places["offset"]), len(table) - 1)
    found = table[at]
    agree: npt.NDArray[np.bool_] = (found["chunk"] == chunks).all(axis=1)
    for name in ("offset", "length", "codec"):
        agree &= found[name] == places[name]
    return agree


def _by_shard(places: Records) -> Iterator[tuple[bytes, npt.NDArray[np.int64]]]:
    """Yield each shard in ``places``, and the indices that name it."""
    if not len(places):
        return
    shards, inverse = np.unique(
        np.ascontiguousarray(places["shard"]).view("S16")[:, 0], return_inverse=True
    )
    order = np.argsort(inverse, kind="stable")
    edges = np.searchsorted(inverse[order], np.arange(len(shards) + 1))
    for number, name in enumerate(shards.tolist()):
        yield name.ljust(16, b"\0"), order[edges[number] : edges[number + 1]]


def _different(places: Records) -> npt.NDArray[np.int64]:
    """Return one index for each distinct place, in storage order."""
    keys = np.empty((len(places), 24), np.uint8)
    keys[:, :16] = places["shard"]
    keys[:, 16:] = places["offset"].astype(">u8").view(np.uint8).reshape(-1, 8)
    return np.unique(keys.view("S24")[:, 0], return_index=True)[1]
