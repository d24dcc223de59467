"""Copies between unrelated repositories: the content is the same, everything else is the target's
own, and an interrupted copy resumes.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from icecore.errors import Damaged, StoreError, UsageError
from icecore.store.backend.faulty import Call, Crashed, FaultyBackend, Outcome, stop_at
from icecore.store.backend.local import LocalBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format import codec
from icecore.store.format.keys import Parameters
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check import check
from icecore.store.maintenance.gc import Collector, Options
from icecore.store.maintenance.repair import Repairer
from icecore.store.replication.transfer import copy
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.trial import Objective
from tests.store.images import Image, Place, image, place, touch
from tests.store.miniature import CHEAP, PASSPHRASE, collect, listed, read, sound, take

THRIFTY = Objective(0.05e9, 2)
A = {cell: cell for cell in range(8)}
B = {**A, **{cell: 100 + cell for cell in range(3)}}


@contextmanager
def two(
    here: LocalBackend | MemoryBackend, there: LocalBackend | MemoryBackend, encrypted: bool
) -> Iterator[tuple[Place, Place]]:
    """A source and an empty target, which is encrypted if the source is not, in one event loop."""
    with place(here, encrypted=not encrypted) as source:
        passphrase = (lambda: PASSPHRASE) if encrypted else None
        target = source.loop.run(
            StoredRepository.create(there, Parameters(1 << 20), passphrase=passphrase, cost=CHEAP)
        )
        yield source, Place(source.loop, target)
        source.loop.run(target.close())


@pytest.mark.parametrize("encrypted", [False, True], ids=["to plain", "to encrypted"])
@pytest.mark.parametrize("remote", [False, True], ids=["local", "remote"])
def test_a_lineage_is_copied_with_its_deltas(encrypted: bool, remote: bool, tmp_path: Path) -> None:
    there = MemoryBackend() if remote else LocalBackend(tmp_path / "there", create=True)
    there.direct = not remote
    with two(LocalBackend(tmp_path / "here", create=True), there, encrypted) as (source, target):
        contents: list[Image] = [
            image(8, "heap", 1) | {20: image(1, "zero")[0], 21: image(1, "float32", 3)[0]}
        ]
        taken = [source.take(contents[0], objective=THRIFTY)]
        for step in range(3):
            contents.append(touch(contents[-1], [step, step + 1], 9, step))
            taken.append(source.take(contents[-1], taken[-1], objective=THRIFTY))
        records = source.loop.run(source.repository.snapshots())
        done = copy(source.repository, target.repository, source.loop, records, objective=THRIFTY)
        assert done.snapshots == [one.snapshot for one in taken] and not done.lost
        for one, content in zip(taken, contents, strict=True):
            assert target.content(one.snapshot) == content
        # The first is read whole; of the others only what differs from the parent, and that is
        # stored as deltas.
        whole = sum(len(data) for _, data in contents[0].values())
        assert done.read == whole + 3 * 2 * (1 << 20)
        (copied,) = target.reader(taken[-1].snapshot).records(
            target.reader(taken[-1].snapshot).manifest.spaces[0]
        )
        assert (copied["place"]["codec"] & codec.DELTA != 0).any()
        assert not np.isin(
            copied["chunk"][:, :8].view("u8"), taken[-1].records["chunk"][:, :8].view("u8")
        ).any()
        assert source.loop.run(check(target.repository, read_data=1.0)).sound
        manifest = target.loop.run(target.repository.manifest(taken[-1].snapshot))
        assert (
            manifest.parent == taken[-2].snapshot and manifest.job == "job" and not manifest.hints
        )
        again = copy(source.repository, target.repository, source.loop, records)
        assert not again.snapshots and not again.read
        # It goes on there, and the source's sessions are over.
        assert not source.loop.run(source.repository.log.newest()).state.sessions


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_thinned_lineage_is_copied_with_its_deltas(side: str) -> None:
    """If the parent has been forgotten, the newest earlier snapshot that both have serves as well."""
    with two(MemoryBackend(), MemoryBackend(), True) as (source, target):
        first = image(8, "heap", 1)
        second = touch(first, [0, 1], 9, 1)
        third = touch(second, [2], 9, 2)
        taken = [source.take(first, objective=THRIFTY)]
        for content in (second, third):
            taken.append(source.take(content, taken[-1], objective=THRIFTY))
        records = source.loop.run(source.repository.snapshots())
        copy(source.repository, target.repository, source.loop, records[:2], objective=THRIFTY)
        one = {"source": source, "target": target}[side]
        one.loop.run(one.repository.forget([taken[1].snapshot]))
        done = copy(
            source.repository, target.repository, source.loop, records[2:], objective=THRIFTY
        )
        assert done.read == (2 + 1) << 20  # what differs from the first
        assert target.content(taken[2].snapshot) == third
        (cells,) = target.reader(taken[2].snapshot).records(
            target.reader(taken[2].snapshot).manifest.spaces[0]
        )
        assert (cells["place"]["codec"] & codec.DELTA != 0).sum() == 3
        assert source.loop.run(check(target.repository, read_data=1.0)).sound


def test_what_is_damaged_is_left_out_and_said(tmp_path: Path) -> None:
    here = MemoryBackend()
    with two(here, MemoryBackend(), True) as (source, target):
        good = source.take(image(3, "random", 1))
        bad = source.take(image(3, "random", 2))
        shard = bad.records[1]["place"]["shard"].tobytes().hex()
        name = f"shards/{shard[:2]}/{shard}"
        data = here.objects[name]
        here.objects[name] = data[:5000] + bytes([data[5000] ^ 1]) + data[5001:]
        records = source.loop.run(source.repository.snapshots())
        done = copy(source.repository, target.repository, source.loop, records)
        assert done.snapshots == [good.snapshot]
        assert [lost.snapshot for lost in done.lost] == [bad.snapshot] and isinstance(
            done.lost[0].error, Damaged
        )
        source.loop.run(Collector(target.repository, Options(fence_seconds=0)).collect())
        report = source.loop.run(check(target.repository, read_data=1.0))
        assert report.sound and report.unreached == 0 and report.snapshots == 1
        with pytest.raises(UsageError, match="into itself"):
            copy(source.repository, source.repository, source.loop, records)


def test_nothing_is_built_on_what_lost_data() -> None:
    there = MemoryBackend()
    with two(MemoryBackend(), there, True) as (source, target):
        first = image(3, "random", 1)
        parent = source.take(first)

        def copied() -> list[str]:
            records = source.loop.run(source.repository.snapshots())
            return copy(source.repository, target.repository, source.loop, records).snapshots

        assert copied() == [parent.snapshot]
        for name in [name for name in there.objects if name.startswith("shards/")]:
            there.objects[name] = b""
        assert source.loop.run(Repairer(target.repository).apply()).quarantine.keys() == {
            parent.snapshot
        }
        content = touch(first, [0], 9, 5)
        child = source.take(content, parent)
        assert copied() == [child.snapshot]
        assert target.content(child.snapshot) == content
        assert source.loop.run(check(target.repository, read_data=1.0)).sound


@pytest.mark.parametrize("effect", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("side", ["source", "target"])
def test_crash_at_every_call_of_a_copy(side: str, effect: bool) -> None:
    """Another process cleans up and copies again: everything is there, once, and nothing is left
    over.
    """
    contents: dict[str, dict[int, int]] = {}

    async def build() -> tuple[MemoryBackend, MemoryBackend]:
        here, there = MemoryBackend(), MemoryBackend()
        source = await StoredRepository.create(here, Parameters(shard_bytes=1 << 18))
        await StoredRepository.create(
            there, Parameters(shard_bytes=1 << 18), passphrase=lambda: PASSPHRASE, cost=CHEAP
        )
        old = await take(source, A)
        contents.update({old: A, await take(source, B, old): B})
        return here, there

    async def opened(backend: MemoryBackend | FaultyBackend) -> StoredRepository:
        return await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE)

    async def aftermath(there: MemoryBackend, before: bool) -> None:
        repository = await opened(there)
        for snapshot in await listed(repository):
            assert await read(repository, snapshot) == contents[snapshot]
        if before:
            await collect(repository, fence_seconds=0)
            await sound(repository, unreached=0)

    whole = asyncio.run(build())
    with LoopThread() as loop:

        def run(here: MemoryBackend | FaultyBackend, there: MemoryBackend | FaultyBackend) -> None:
            source, target = loop.run(opened(here)), loop.run(opened(there))
            copy(source, target, loop, loop.run(source.snapshots()), threads=1)

        number = 0
        while True:
            number += 1
            here, there = (MemoryBackend(dict(one.objects)) for one in whole)
            faulty = FaultyBackend(
                here if side == "source" else there, stop_at(number, effect=effect)
            )
            try:
                run(*((faulty, there) if side == "source" else (here, faulty)))
            except Crashed:
                asyncio.run(aftermath(there, bool(number % 2)))
                run(here, there)
                asyncio.run(aftermath(there, True))
                assert set(asyncio.run(listed_in(there))) == set(contents)
                continue
            break
        assert number > 15


async def listed_in(backend: MemoryBackend) -> list[str]:
    return await listed(await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE))


def test_a_store_that_fails_ends_the_copy_and_loses_nothing() -> None:
    here, there = MemoryBackend(), MemoryBackend()
    with two(here, there, True) as (source, target):
        source.take(image(6, "random", 1))
        calls: list[Call] = []

        def plan(call: Call) -> Outcome:
            calls.append(call)
            return (
                Outcome.FAIL
                if call.operation == "create" and call.name.startswith("shards/")
                else Outcome.PASS
            )

        failing = source.loop.run(
            StoredRepository.open(FaultyBackend(there, plan), passphrase=lambda: PASSPHRASE)
        )
        records = source.loop.run(source.repository.snapshots())
        with pytest.raises(StoreError, match="injected"):
            copy(source.repository, failing, source.loop, records)
        assert not source.loop.run(target.repository.log.newest()).state.sessions
        assert copy(source.repository, target.repository, source.loop, records).snapshots
