"""The snapshot list: immutable pages and a short tail in the log entry, so that the cost of a
commit does not depend on the number of snapshots.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Collection, Sequence

import msgspec

from icecore.errors import UsageError
from icecore.store.backend.base import Backend
from icecore.store.format.envelope import Sealed, digest_of
from icecore.store.format.names import Kind, object_name, random_id
from icecore.store.format.state import (
    NAMES_KIND,
    PAGE_KIND,
    Condemned,
    LogState,
    NameListRef,
    PageRef,
    SnapshotRecord,
    decode_names,
    decode_page,
    encode_names,
    encode_page,
    join_names,
    leading,
    page_ref,
    split_names,
)

#: Records in a full page, the length of the tail at which it becomes a page, and how many pages of
#: one size class are merged. A record is rewritten a few times in its life, and the entry refers to
#: one page for every 2048 records and a dozen smaller ones.
PAGE_RECORDS = 2048
TAIL_RECORDS = 32
FAN_IN = 8
#: Under contention, a longer tail is cheaper than pages that a lost race makes useless.
TAIL_LIMIT = 4 * TAIL_RECORDS
#: Most names of condemned objects that the entry holds itself.
INLINE_NAMES = 64

#: Pages whose bytes are cached.
_REMEMBERED = 64
_PARSED_RECORDS = 2 * PAGE_RECORDS


class Pages:
    """Reads and writes the objects that a log entry refers to, and caches the last ones.

    What a change writes here may be referred to only by the entry that directly follows the state
    given to the change. A collector that lists an object which no state refers to condemns it with
    an entry of its own, so it can interfere only by taking that generation.
    """

    def __init__(self, backend: Backend, key: bytes) -> None:
        self.attempt = 0
        self._backend = backend
        self._key = key
        self._cache: OrderedDict[bytes, bytes] = OrderedDict()
        #: Pages parsed last, so that finding a base does not depend on the length of its page.
        self._parsed: OrderedDict[bytes, list[SnapshotRecord]] = OrderedDict()

    async def _fetch(self, identity: bytes, digest: bytes, limit: int, cached: bool) -> bytes:
        data = self._cache.get(digest) if cached else None
        if data is None:
            data = await self._backend.get(object_name("page", identity), limit=limit)
            if digest_of(data) == digest:
                self._remember(digest, data)
        else:
            self._cache.move_to_end(digest)
        return data

    def _remember(self, digest: bytes, data: bytes) -> None:
        self._cache[digest] = data
        while len(self._cache) > _REMEMBERED:
            self._cache.popitem(last=False)

    def keep(self, state: LogState) -> None:
        """Drop from the cache what a state, the newest, does not refer to: forgetting and merging
        replace pages all the time.
        """
        live = {ref.digest for ref in state.pages}
        live |= {batch.ref.digest for batch in state.condemned if batch.ref is not None}
        for digest in self._cache.keys() - live:
            del self._cache[digest]
        for digest in self._parsed.keys() - live:
            del self._parsed[digest]

    async def _store(self, identity: bytes, sealed: Sealed) -> None:
        await self._backend.create(object_name("page", identity), [sealed.data])
        self._remember(sealed.digest, sealed.data)

    async def read(self, ref: PageRef, *, cached: bool = True) -> list[SnapshotRecord]:
        """Return the records of a page; read them from storage unless ``cached``."""
        parsed = self._parsed.get(ref.digest) if cached else None
        if parsed is not None:
            self._parsed.move_to_end(ref.digest)
            return list(parsed)
        data = await self._fetch(ref.id, ref.digest, PAGE_KIND.object_limit, cached)
        try:
            records = decode_page(object_name("page", ref.id), data, self._key, ref)
        except BaseException:
            self._cache.pop(ref.digest, None)
            self._parsed.pop(ref.digest, None)
            raise
        if cached:
            self._parsed[ref.digest] = records
            while len(self._parsed) > 1 and sum(map(len, self._parsed.values())) > _PARSED_RECORDS:
                self._parsed.popitem(last=False)
        return list(records)

    async def write(self, records: list[SnapshotRecord]) -> PageRef:
        """Store a new page."""
        identity = random_id()
        sealed = encode_page(records, self._key, object_name("page", identity))
        await self._store(identity, sealed)
        return page_ref(identity, sealed, records)

    async def read_names(
        self, batch: Condemned, *, cached: bool = True
    ) -> list[tuple[Kind, bytes]]:
        """Return the objects of a condemned batch."""
        if batch.ref is None:
            return split_names(batch.names)
        data = await self._fetch(batch.ref.id, batch.ref.digest, NAMES_KIND.object_limit, cached)
        return decode_names(object_name("page", batch.ref.id), data, self._key, batch.ref)

    async def condemned(self, generation: int, names: list[tuple[Kind, bytes]]) -> Condemned:
        """Return a batch of ``names``; a long one is stored as a separate object."""
        if len(names) <= INLINE_NAMES:
            return Condemned(generation, names=join_names(names))
        identity = random_id()
        sealed = encode_names(names, self._key, object_name("page", identity))
        await self._store(identity, sealed)
        return Condemned(
            generation, ref=NameListRef(identity, sealed.digest, len(sealed.data), len(names))
        )


async def add(state: LogState, records: Sequence[SnapshotRecord], pages: Pages) -> LogState:
    """Return ``state`` with ``records`` appended to its snapshot list.

    Raises:
        UsageError: A snapshot with that id is listed already.
    """
    for record in records:
        if await find(state, record.snapshot, pages) is not None:
            raise UsageError(f"snapshot {record.snapshot} is already in the repository")
    tail = [*state.tail, *records]
    refs = list(state.pages)
    if len(tail) >= (TAIL_LIMIT if pages.attempt else TAIL_RECORDS):
        while tail:
            refs.append(await pages.write(tail[:PAGE_RECORDS]))
            del tail[:PAGE_RECORDS]
        for size in range(_size_class(PAGE_RECORDS)):
            last = refs[-FAN_IN:]
            if len(last) == FAN_IN and all(_size_class(ref.count) == size for ref in last):
                joined = [record for ref in last for record in await pages.read(ref)]
                refs[-FAN_IN:] = [await pages.write(joined)]
    return msgspec.structs.replace(state, pages=refs, tail=tail)


def _size_class(count: int) -> int:
    """Return 0 for a page of less than 256 records, 1 for less than 2048, 2 for full ones."""
    size = 0
    while count >= TAIL_RECORDS * FAN_IN:
        count //= FAN_IN
        size += 1
    return size


async def edit(
    state: LogState,
    snapshots: Collection[str],
    change: Callable[[SnapshotRecord], SnapshotRecord | None],
    pages: Pages,
) -> LogState:
    """Return ``state`` with ``change`` applied to the records of ``snapshots`` (None removes one);
    only pages that hold one of them are rewritten.

    Snapshots that are not listed are skipped.
    """
    wanted = set(snapshots)
    prefixes = sorted(leading(snapshot) for snapshot in wanted)

    def apply(records: Sequence[SnapshotRecord]) -> list[SnapshotRecord]:
        changed = (change(record) if record.snapshot in wanted else record for record in records)
        return [record for record in changed if record is not None]

    # Runs of neighbouring pages, each untouched (a reference) or rewritten (its records), and
    # merged where they have become small.
    parts: list[PageRef | list[SnapshotRecord]] = []
    for ref in state.pages:
        if any(ref.first <= prefix <= ref.last for prefix in prefixes):
            before = await pages.read(ref)
            after = apply(before)
            if after != before:
                previous = parts[-1] if parts else None
                if isinstance(previous, list) and len(previous) + len(after) <= PAGE_RECORDS:
                    previous.extend(after)
                elif (
                    isinstance(previous, PageRef)
                    and previous.count + len(after) <= PAGE_RECORDS // 2
                ):
                    parts[-1] = [*await pages.read(previous), *after]
                else:
                    parts.append(after)
                continue
        parts.append(ref)
    refs = [
        part if isinstance(part, PageRef) else await pages.write(part)
        for part in parts
        if not isinstance(part, list) or part
    ]
    return msgspec.structs.replace(state, pages=refs, tail=apply(state.tail))


async def find(state: LogState, snapshot: str, pages: Pages) -> SnapshotRecord | None:
    """Return the record of ``snapshot``; reads only pages whose range covers it."""
    for record in state.tail:
        if record.snapshot == snapshot:
            return record
    if len(snapshot) != 32:
        return None
    prefix = leading(snapshot)
    for ref in reversed(state.pages):
        if ref.first <= prefix <= ref.last:
            for record in await pages.read(ref):
                if record.snapshot == snapshot:
                    return record
    return None


async def newest_of(state: LogState, job: str, pages: Pages) -> SnapshotRecord | None:
    """Return the last listed snapshot of ``job``; reads pages from the newest on."""
    records: Sequence[SnapshotRecord] = state.tail
    for ref in [*reversed(state.pages), None]:
        for record in reversed(records):
            if record.job == job:
                return record
        records = await pages.read(ref) if ref is not None else []
    return None


async def everything(state: LogState, pages: Pages) -> list[SnapshotRecord]:
    """Return all listed snapshots in order of their commits."""
    records: list[SnapshotRecord] = []
    for ref in state.pages:
        records.extend(await pages.read(ref))
    return [*records, *state.tail]


async def condemned_names(state: LogState, pages: Pages) -> set[tuple[Kind, bytes]]:
    """Return every object that ``state`` marks for deletion."""
    names: set[tuple[Kind, bytes]] = set()
    for batch in state.condemned:
        names.update(await pages.read_names(batch))
    return names


async def pardon(
    state: LogState, cleared: Collection[tuple[Kind, bytes]], pages: Pages
) -> LogState:
    """Return ``state`` without the marks of ``cleared``; the others keep their generation."""
    batches: list[Condemned] = []
    for batch in state.condemned:
        names = await pages.read_names(batch)
        left = [name for name in names if name not in cleared]
        if len(left) == len(names):
            batches.append(batch)
        elif left:
            batches.append(await pages.condemned(batch.generation, left))
    return (
        state if batches == state.condemned else msgspec.structs.replace(state, condemned=batches)
    )
