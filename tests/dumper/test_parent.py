"""The choice of the snapshot that the next one builds on."""

from __future__ import annotations

import asyncio

from icecore.dumper.memory.parent import choose_parent
from icecore.store.backend.memory import MemoryBackend
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.repair import Repairer
from tests.store.miniature import take


def test_on_the_one_wanted_or_the_newest_of_the_job_that_is_whole() -> None:
    async def work() -> None:
        backend = MemoryBackend()
        repository = await StoredRepository.create(backend)

        async def chosen(job: str, wanted: str = "") -> str:
            record = await choose_parent(repository, job, wanted)
            return record.snapshot if record is not None else ""

        first = await take(repository, {0: 1}, job="a")
        before = set(backend.objects)
        second = await take(repository, {0: 2}, job="a")
        own = set(backend.objects) - before
        other = await take(repository, {0: 3}, job="b")
        assert [await chosen("a"), await chosen("b"), await chosen("c")] == [second, other, ""]
        assert [
            await chosen("a", first),
            await chosen("a", other),
            await chosen("a", "0" * 32),
        ] == [first, other, second]

        await backend.delete(next(name for name in own if name.startswith("shard")))
        await Repairer(repository).apply()
        assert (await repository.find(second)).quarantined
        assert [await chosen("a"), await chosen("a", second)] == [first, first]

    asyncio.run(work())
