"""Index maintenance by the collector: drops entries of deleted shards, merges small segments, then
clears the marks of those shards.

It adds the missing filters of long segments, which an earlier version wrote or an interrupted
session left without one.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import aclosing

import msgspec

from icecore.errors import Damaged, ObjectExists, ObjectMissing
from icecore.events import Event
from icecore.store.format.cell import Records
from icecore.store.format.names import FILTERS, Kind, filter_name, object_name, random_id
from icecore.store.format.segment import in_shards
from icecore.store.format.state import LogState, SegmentRef
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.index import (
    Merge,
    filtered,
    make_filter,
    merge_long,
    plan_merges,
    read_segment,
    replaced,
)
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session
from icecore.store.runtime.parallel import each

_ANY_SIZE = 1 << 62


class Reindexer:
    """Clears marks of ``gone`` objects; that of a shard only once no live segment refers to it.

    Args:
        gone: Condemned objects that have been deleted.
    """

    def __init__(self, repository: StoredRepository, gone: Iterable[tuple[Kind, bytes]]) -> None:
        self._repository = repository
        self._gone = set(gone)
        self._shards = frozenset(identity for kind, identity in self._gone if kind == "shard")
        #: For each inspected segment, the deleted shards that it refers to.
        self._naming: dict[bytes, frozenset[bytes]] = {}
        self._damaged: set[bytes] = set()

    async def plan(self, segments: list[SegmentRef]) -> list[Merge]:
        """Return what to rewrite: small segments where there are many, and segments that refer to a
        deleted shard.
        """
        await self._look(segments)
        sound = [ref for ref in segments if ref.id not in self._damaged]
        merges = plan_merges(sound, entries=_ANY_SIZE)
        planned = {ref.id for merge in merges for ref in merge.inputs}
        return merges + [
            Merge((ref,)) for ref in sound if self._naming.get(ref.id) and ref.id not in planned
        ]

    async def run(self) -> int:
        """Rewrite and clear; safe to stop anywhere.

        Returns:
            How many segments were rewritten.
        """
        repository = self._repository
        segments = (await repository.log.newest()).state.segments
        idle = not self._gone and not plan_merges(segments, entries=_ANY_SIZE)
        if idle and not await self._unfiltered(segments):
            return 0
        # Within a session, so that no other collector deletes the segments while they are read.
        async with await repository.begin(None, "index", load_index=False, leave=0) as session:
            merges = await self.plan(session.state.segments)
            outputs: list[list[SegmentRef]] = []
            for merge in merges:
                outputs.append([])
                made = merge_long(
                    repository.backend, merge, repository.keys.segment, random_id, self._shards
                )
                async with aclosing(made) as segments_:
                    async for segment in segments_:
                        await session.put_segment(segment)
                        outputs[-1].append(segment.ref)

            rewritten = {ref.id for merge in merges for ref in merge.inputs}
            for ref in await self._unfiltered(session.state.segments):
                if ref.id not in rewritten | self._damaged:
                    await self._filter(session, ref)

            async def change(state: LogState, pages: Pages) -> LogState:
                segments = state.segments
                for merge, made in zip(merges, outputs, strict=True):
                    swapped = replaced(segments, merge.inputs, made)
                    if swapped is not None:  # otherwise another process has rewritten them
                        segments = swapped
                        self._naming.update((ref.id, frozenset()) for ref in made)
                return await self._clear(msgspec.structs.replace(state, segments=segments), pages)

            await session.transform(change, "index")
        return sum(len(merge.inputs) for merge in merges)

    async def _unfiltered(self, segments: list[SegmentRef]) -> list[SegmentRef]:
        long = [ref for ref in segments if filtered(ref)]
        if not long:
            return []
        names = {info.name async for info in self._repository.backend.list(FILTERS)}
        return [ref for ref in long if filter_name(ref.id) not in names]

    async def _filter(self, session: Session, ref: SegmentRef) -> None:
        try:
            entries = await self._read(ref)
        except (Damaged, ObjectMissing):
            return  # 'check' reports it
        made = await asyncio.to_thread(make_filter, ref, entries, self._repository.keys.segment)
        try:
            await session.create(filter_name(ref.id), [made])
        except ObjectExists:
            pass  # another collector did it

    async def _clear(self, state: LogState, pages: Pages) -> LogState:
        await self._look(state.segments)  # those added since
        named = {shard for ref in state.segments for shard in self._naming.get(ref.id, ())}
        cleared = {name for name in self._gone if name[0] != "shard" or name[1] not in named}
        return await catalog.pardon(state, cleared, pages)

    async def _look(self, segments: list[SegmentRef]) -> None:
        """Find out which of the deleted shards each segment refers to."""
        if self._shards:
            await each(
                [ref for ref in segments if ref.id not in self._naming], self._look_at, at_once=4
            )

    async def _look_at(self, ref: SegmentRef) -> None:
        try:
            entries = await self._read(ref)
        except (Damaged, ObjectMissing) as error:
            # Whatever it refers to stays marked; writers skip it as well.
            self._naming[ref.id] = self._shards
            self._damaged.add(ref.id)
            name = object_name("segment", ref.id)
            self._repository.emit(Event("index.damaged", {"segment": name, "error": str(error)}))
            return
        dead = entries["place"]["shard"][await asyncio.to_thread(in_shards, entries, self._shards)]
        self._naming[ref.id] = frozenset(shard.tobytes() for shard in dead)

    async def _read(self, ref: SegmentRef) -> Records:
        return await read_segment(self._repository.backend, ref, self._repository.keys.segment)
