"""The cost of a commit, in requests and bytes, does not depend on the number of snapshots."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.names import new_snapshot_id
from icecore.store.format.state import LogState, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.repository import StoredRepository
from tests.store.miniature import listed, read, reopened, state_of, take


def synthetic(count: int) -> list[SnapshotRecord]:
    """Return realistic records: they compress only where they are equal."""
    return [
        SnapshotRecord(
            new_snapshot_id(),
            "training-job",
            "ab" * 16,
            secrets.token_hex(16),
            time.time_ns(),
            f"snapshots/{secrets.token_hex(16)}",
            4000 + number,
            secrets.token_bytes(32),
            number << 20,
            number << 16,
            number << 18,
            1.5,
        )
        for number in range(count)
    ]


async def fill(repository: StoredRepository, records: list[SnapshotRecord]) -> None:
    async def change(state: LogState, pages: Pages) -> LogState:
        return await catalog.add(state, records, pages)

    await repository.log.transact(change, "fill")


@asynccontextmanager
async def filled(count: int) -> AsyncIterator[tuple[MemoryBackend, list[SnapshotRecord]]]:
    backend = MemoryBackend()
    repository = await StoredRepository.create(backend)
    records = synthetic(count)
    await fill(repository, records)
    yield backend, records


async def cost(backend: MemoryBackend, commits: int) -> tuple[float, float, int]:
    """Return requests and bytes written per commit (including session and snapshot), and the most
    requests of one.
    """
    repository, faulty = await reopened(backend)
    await take(repository, {1: 1})  # the first reads what an open repository knows
    most = total = 0
    size = 0
    for number in range(commits):
        faulty.calls.clear()
        await take(repository, {1: number % 256, 2: (number + 1) % 256})
        most = max(most, len(faulty.calls))
        total += len(faulty.calls)
        size += sum(call.bytes for call in faulty.calls if call.operation == "create")
    return total / commits, size / commits, most


def test_commit_cost_is_flat() -> None:
    async def body() -> None:
        costs = {}
        for count in (1, 100, 10_000):
            async with filled(count) as (backend, _):
                costs[count] = await cost(backend, 96)
        requests = [cost[0] for cost in costs.values()]
        assert max(requests) <= min(requests) * 1.15, costs
        # BEGIN's entry, manifest, segment, COMMIT's entry, a look at their anchor: five, and the
        # shard and the nodes; pages and merges now and then.
        assert max(requests) <= 7.2, costs
        sizes = [cost[1] for cost in costs.values()]
        assert max(sizes) <= min(sizes) * 1.25, costs

    asyncio.run(body())


@pytest.mark.parametrize("count", [1, 100, 10_000])
def test_an_entry_stays_small(count: int) -> None:
    async def body() -> None:
        async with filled(count) as (backend, _):
            repository = await StoredRepository.open(backend)
            await take(repository, {1: 1})
            newest = min(name for name in backend.objects if name.startswith("log/"))
            assert len(backend.objects[newest]) < 8_000
            assert len((await state_of(repository)).state.pages) <= 12

    asyncio.run(body())


def test_pages_grow_in_steps_and_lose_nothing() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        records = synthetic(5000)
        for at in range(0, 5000, 20):
            await fill(repository, records[at : at + 20])
            if at % 1000 == 0:
                state = (await state_of(repository)).state
                assert state.snapshots == min(at + 20, 5000)
                assert len(state.pages) <= 2 * catalog.FAN_IN + 1 + at // catalog.PAGE_RECORDS
        assert await repository.snapshots() == records
        state = (await state_of(repository)).state
        assert len(state.pages) <= 15 and len(state.tail) < catalog.TAIL_RECORDS
        # A snapshot is found by reading few pages, however many there are.
        opened, faulty = await reopened(backend)
        await opened.log.newest()
        faulty.calls.clear()
        for record in records[::997]:
            assert await opened.find(record.snapshot) == record
        assert len([call for call in faulty.calls if call.name.startswith("pages/")]) <= 12
        # Forgetting rewrites the pages that are concerned only, and leaves no crumbs.
        before = {ref.id for ref in state.pages}
        assert len(await repository.forget([record.snapshot for record in records[10:20]])) == 10
        state = (await state_of(repository)).state
        assert len(before - {ref.id for ref in state.pages}) == 1
        await repository.forget([record.snapshot for record in records[:4900]])
        assert await repository.snapshots() == records[4900:]
        assert len((await state_of(repository)).state.pages) <= 6

    asyncio.run(body())


def test_a_snapshot_is_listed_once() -> None:
    async def body() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)
        snapshot = await take(repository, {1: 1})
        record = await repository.find(snapshot)
        with pytest.raises(Exception, match="already"):
            await fill(repository, [record])
        assert await listed(repository) == [snapshot] and await read(repository, snapshot) == {1: 1}

    asyncio.run(body())


def test_pages_that_were_replaced_are_not_kept() -> None:
    """A supervisor or the service has a repository open for weeks."""

    async def body() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        taken: list[str] = []
        for value in range(200):
            taken.append(await take(repository, {1: value % 8}))
            await repository.forget(taken[:-70])
            del taken[:-70]
            assert len(await repository.snapshots()) == len(taken)
        pages = repository.log.pages
        live = {ref.digest for ref in (await repository.log.newest()).state.pages}
        assert pages._parsed.keys() <= live
        assert len(pages._cache) <= len(live) + 4  # and those of the last change

    asyncio.run(body())
