"""Statistics agree with what was written: every byte of a shard counts once, as live or dead."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from icecore.sizes import PAGE
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.cipher import overhead
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.stats import stats
from icecore.store.snapshot.trial import Objective
from tests.store.images import image, local_place, touch
from tests.store.miniature import CHEAP, PASSPHRASE, collect, take


@pytest.mark.parametrize("encrypted", [False, True], ids=["plain", "encrypted"])
def test_shared_and_own_bytes(encrypted: bool) -> None:
    async def body() -> None:
        backend = MemoryBackend()
        given = (lambda: PASSPHRASE) if encrypted else None
        repository = await StoredRepository.create(backend, passphrase=given, cost=CHEAP)
        stored = PAGE + overhead(repository.keys.chunk)
        first = await take(repository, {cell: cell for cell in range(8)}, job="one")
        await take(repository, {**{cell: cell for cell in range(8)}, 1: 50}, first, job="one")
        await take(repository, {0: 3, 1: 4, 2: 60, 5: 61, 6: 62}, job="two")
        found = await stats(repository)
        assert (found.snapshots, found.logical, found.chunks) == (3, (8 + 8 + 5) * PAGE, 12)
        assert (found.chunk_bytes, found.live) == (12 * PAGE, 12 * stored)
        assert found.dedup_ratio == 21 / 12 and found.compression_ratio == PAGE / stored
        assert [(one.name, one.snapshots, one.reached, one.own) for one in found.jobs] == [
            ("one", 2, 9 * stored, 7 * stored),
            ("two", 1, 5 * stored, 3 * stored),
        ]
        assert found.jobs == found.lineages and [
            (form.codec, form.chunks) for form in found.forms
        ] == [("raw", 12)]
        footers = found.object_bytes["shard"] - 12 * stored
        assert found.dead == footers > 0
        await repository.forget([first])
        after = await stats(repository, register=False)
        assert after.dead == footers + stored and after.live == 11 * stored
        await collect(repository)
        # Maps that cannot be read are left out.
        manifest = (await repository.snapshots())[1].manifest
        del backend.objects[manifest]
        assert [one.name for one in (await stats(repository)).jobs if one.reached] == ["one"]

    asyncio.run(body())


def test_deltas_count_their_bases(tmp_path: Path) -> None:
    with local_place(tmp_path / "repository") as here:
        objective = Objective(0.05e9, 2)
        content = image(4, "heap", seed=1)
        first = here.take(content, objective=objective)
        second = here.take(touch(content, [1, 2], 10, 5), first, objective=objective)
        assert second.statistics.deltas == 2
        before = here.loop.run(stats(here.repository))
        assert before.chunks == 6 and before.chunk_bytes == 6 << 20
        here.loop.run(here.repository.forget([first.snapshot]))
        after = here.loop.run(stats(here.repository))
        # The bases of the two deltas are live, but no cell's.
        assert after.live == before.live and after.chunk_bytes == 4 << 20
        deltas = [form for form in after.forms if form.codec.startswith(("xor/", "patch/"))]
        assert (
            sum(form.chunks for form in deltas) == 2
            and sum(form.logical for form in deltas) == 2 << 20
        )


def test_nothing_is_there() -> None:
    async def body() -> None:
        found = await stats(await StoredRepository.create(MemoryBackend()))
        assert (found.snapshots, found.live, found.dead, found.dedup_ratio, found.jobs) == (
            0,
            0,
            0,
            1.0,
            [],
        )

    asyncio.run(body())
