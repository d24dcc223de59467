"""What is read before a restore's first chunk: few requests, whatever is in the repository, and never less than what is true."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from icecore.errors import Damaged, NotFound
from icecore.store.faulty import FaultyBackend
from icecore.store.keychain import change
from icecore.store.keys import new_slot
from icecore.store.memory import MemoryBackend
from icecore.store.names import log_name
from icecore.store.reader import SnapshotReader
from icecore.store.repository import Repository
from icecore.store.slots import add
from icecore.store.watermark import Recollection
from tests.store.miniature import CHEAP, PASSPHRASE, read, state_of, take
from tests.store.test_commit_cost import fill, synthetic


def requests(faulty: FaultyBackend) -> list[str]:
    """What was asked for, in short."""
    return [f"{call.operation} {call.name.split('/')[0]}" for call in faulty.calls]


async def made(encrypted: bool = False) -> tuple[MemoryBackend, str]:
    backend = MemoryBackend()
    secret = (lambda: PASSPHRASE) if encrypted else None
    repository = await Repository.create(backend, passphrase=secret, cost=CHEAP)
    return backend, await take(repository, {1: 1, 2: 2})


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("others", [0, 3000])
def test_opening_takes_few_requests(encrypted: bool, others: int, tmp_path: Path) -> None:
    async def body() -> None:
        backend, snapshot = await made(encrypted)
        repository = await Repository.open(backend, passphrase=lambda: PASSPHRASE)
        await fill(repository, synthetic(others))
        for known in (False, True):
            faulty = FaultyBackend(backend)
            faulty.direct = False
            opened = await Repository.open(faulty, passphrase=lambda: PASSPHRASE, recollection=Recollection(tmp_path / "config"))
            manifest = await opened.manifest(snapshot)
            reader = SnapshotReader(opened, manifest, asyncio.get_running_loop())
            await asyncio.to_thread(reader.records, manifest.spaces[0])
            expected = [] if known else ["get config"]
            expected += ["list keys", "get keys"] if encrypted else ["get keys"]
            expected += ["list log", "get log", *(["get pages"] if others else []), "get snapshots", "get_into nodes"]
            assert requests(faulty) == expected

    asyncio.run(body())


def test_the_newest_of_a_job_is_proven_and_found_without_the_whole_list() -> None:
    async def body() -> None:
        backend, snapshot = await made()
        repository = await Repository.open(backend)
        await fill(repository, synthetic(5000))
        faulty = FaultyBackend(backend)
        opened = await Repository.open(faulty)
        faulty.calls.clear()
        newest = await opened.newest_of("training-job")
        assert newest is not None and newest.snapshot == (await repository.snapshots())[-1].snapshot
        assert requests(faulty).count("get pages") <= 1 and requests(faulty)[:3] == ["list log", "get log", "get log"]
        first = await opened.newest_of("job")
        assert first is not None and first.snapshot == snapshot
        assert await opened.newest_of("nobody") is None

    asyncio.run(body())


def test_an_older_entry_serves_until_it_does_not() -> None:
    """A listing that lags shows an older entry: what it lists is found, what it does not list is looked for in the newest."""

    class Lagging(FaultyBackend):
        hidden = ""

        async def list(self, prefix):  # type: ignore[no-untyped-def]
            async for info in super().list(prefix):
                if info.name != self.hidden:
                    yield info

    async def body() -> None:
        backend, first = await made()
        repository = await Repository.open(backend)
        entry = await state_of(repository)
        second = await take(repository, {3: 3})
        lagging = Lagging(backend)
        lagging.hidden = log_name(entry.generation + 2)  # the entry that lists the second one
        opened = await Repository.open(lagging)
        assert (await opened.log.newest(prove=False)).generation == entry.generation + 1
        assert await read(opened, first) == {1: 1, 2: 2} and await read(opened, second) == {3: 3}
        assert (await opened.find(second)).snapshot == second
        with pytest.raises(NotFound):
            await opened.find("f" * 32)
        # Whoever writes finds out by the entry that he cannot create.
        third = await take(await Repository.open(lagging), {4: 4})
        assert {record.snapshot for record in await repository.snapshots()} == {first, second, third}

    asyncio.run(body())


def test_another_repository_in_the_same_place_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    async def body() -> None:
        memory = Recollection(tmp_path / "folder" / "config")
        assert memory.load() == b""
        backend, _ = await made()
        first = await Repository.open(backend, recollection=memory)
        assert memory.load() == backend.objects["config"]
        for encrypted in (False, True):
            other, snapshot = await made(encrypted)
            opened = await Repository.open(other, passphrase=lambda: PASSPHRASE, recollection=memory)
            assert opened.config.id != first.config.id and memory.load() == other.objects["config"]
            assert await read(opened, snapshot) == {1: 1, 2: 2}
        (tmp_path / "folder" / "config").write_bytes(b"torn")
        assert (await Repository.open(backend, recollection=memory)).config == first.config
        with pytest.raises(NotFound):
            await Repository.open(MemoryBackend(), recollection=memory)

    asyncio.run(body())


def test_key_objects_that_are_not_the_first() -> None:
    """An encrypted repository whose slots were changed has no first key object any more; a planted one does not count."""

    async def body() -> None:
        backend, snapshot = await made(encrypted=True)
        repository = await Repository.open(backend, passphrase=lambda: PASSPHRASE)
        await change(backend, repository.keys, lambda slots: add(slots, repository.keys.secret, b"another one", "two", CHEAP))
        assert "keys/00000000" not in backend.objects
        opened = await Repository.open(backend, passphrase=lambda: b"another one")
        assert await read(opened, snapshot) == {1: 1, 2: 2}
        plain, _ = await made()
        backend.objects["keys/00000000"] = plain.objects["keys/00000000"]
        assert await read(await Repository.open(backend, passphrase=lambda: PASSPHRASE), snapshot) == {1: 1, 2: 2}
        # Of a plain repository the first is the only one.
        assert new_slot().method == "plain"
        for name in ("keys/00000000", "copies/keys/00000000"):
            await Repository.open(plain)
            plain.objects[name] = plain.objects[name][:-1] + b"\0"
        with pytest.raises(Damaged):
            await Repository.open(plain)

    asyncio.run(body())
