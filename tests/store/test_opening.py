"""What is read before the first chunk of a restore: few requests, whatever is in the repository,
and never a stale state.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
import pytest

from icecore.errors import Damaged, IcecoreError, NotFound, RepositoryReplaced, WrongPassphrase
from icecore.events import Event
from icecore.store.backend.faulty import FaultyBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.keys import new_slot
from icecore.store.format.names import log_name
from icecore.store.format.slots import add, decode_slots, encode_slots, rotate
from icecore.store.log.keychain import change, newest
from icecore.store.log.repository import StoredRepository
from icecore.store.log.watermark import Recollection
from icecore.store.maintenance.repair import Repairer
from icecore.store.snapshot.reader import SnapshotReader
from tests.store.miniature import CHEAP, PASSPHRASE, read, state_of, take
from tests.store.test_commit_cost import fill, synthetic


def requests(faulty: FaultyBackend) -> list[str]:
    """Return a summary of the requests."""
    return [f"{call.operation} {call.name.split('/')[0]}" for call in faulty.calls]


async def made(encrypted: bool = False) -> tuple[MemoryBackend, str]:
    backend = MemoryBackend()
    secret = (lambda: PASSPHRASE) if encrypted else None
    repository = await StoredRepository.create(backend, passphrase=secret, cost=CHEAP)
    return backend, await take(repository, {1: 1, 2: 2})


@pytest.mark.parametrize("encrypted", [False, True])
@pytest.mark.parametrize("others", [0, 3000])
def test_opening_takes_few_requests(encrypted: bool, others: int, tmp_path: Path) -> None:
    async def body() -> None:
        backend, snapshot = await made(encrypted)
        repository = await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE)
        await fill(repository, synthetic(others))
        for known in (False, True):
            faulty = FaultyBackend(backend)
            faulty.direct = False
            opened = await StoredRepository.open(
                faulty,
                passphrase=lambda: PASSPHRASE,
                recollection=Recollection(tmp_path / "config"),
            )
            manifest = await opened.manifest(snapshot)
            reader = SnapshotReader(opened, manifest, asyncio.get_running_loop())
            await asyncio.to_thread(reader.records, manifest.spaces[0])
            expected = [] if known else ["get config"]
            expected += ["list keys", "get keys"] if encrypted else ["get keys"]
            expected += [
                "list log",
                "get log",
                *(["get pages"] if others else []),
                "get snapshots",
                "get_into nodes",
            ]
            assert requests(faulty) == expected

    asyncio.run(body())


def test_the_newest_of_a_job_is_proven_and_found_without_the_whole_list() -> None:
    async def body() -> None:
        backend, snapshot = await made()
        repository = await StoredRepository.open(backend)
        await fill(repository, synthetic(5000))
        faulty = FaultyBackend(backend)
        opened = await StoredRepository.open(faulty)
        faulty.calls.clear()
        newest = await opened.newest_of("training-job")
        assert newest is not None and newest.snapshot == (await repository.snapshots())[-1].snapshot
        assert requests(faulty).count("get pages") <= 1 and requests(faulty)[:3] == [
            "list log",
            "get log",
            "get log",
        ]
        first = await opened.newest_of("job")
        assert first is not None and first.snapshot == snapshot
        assert await opened.newest_of("nobody") is None

    asyncio.run(body())


def test_an_older_entry_serves_until_it_does_not() -> None:
    """A stale listing shows an older entry: what that lists is found, and what it does not list is
    looked up in the newest.
    """

    class Lagging(FaultyBackend):
        hidden = ""

        async def list(self, prefix):  # type: ignore[no-untyped-def]
            async for info in super().list(prefix):
                if info.name != self.hidden:
                    yield info

    async def body() -> None:
        backend, first = await made()
        repository = await StoredRepository.open(backend)
        entry = await state_of(repository)
        second = await take(repository, {3: 3})
        lagging = Lagging(backend)
        lagging.hidden = log_name(entry.generation + 2)  # the entry that lists the second one
        opened = await StoredRepository.open(lagging)
        assert (await opened.log.newest(prove=False)).generation == entry.generation + 1
        assert await read(opened, first) == {1: 1, 2: 2} and await read(opened, second) == {3: 3}
        assert (await opened.find(second)).snapshot == second
        with pytest.raises(NotFound):
            await opened.find("f" * 32)
        # Whoever writes finds out by the entry that he cannot create.
        third = await take(await StoredRepository.open(lagging), {4: 4})
        assert {record.snapshot for record in await repository.snapshots()} == {
            first,
            second,
            third,
        }

    asyncio.run(body())


def test_another_repository_in_the_same_place_is_not_taken_for_the_old_one(tmp_path: Path) -> None:
    async def body() -> None:
        memory = Recollection(tmp_path / "folder" / "config")
        assert memory.load() == b""
        backend, _ = await made()
        first = await StoredRepository.open(backend, recollection=memory)
        assert memory.load() == backend.objects["config"]
        for encrypted in (False, True):
            other, snapshot = await made(encrypted)
            opened = await StoredRepository.open(
                other, passphrase=lambda: PASSPHRASE, recollection=memory
            )
            assert opened.config.id != first.config.id and memory.load() == other.objects["config"]
            assert await read(opened, snapshot) == {1: 1, 2: 2}
        (tmp_path / "folder" / "config").write_bytes(b"torn")
        assert (await StoredRepository.open(backend, recollection=memory)).config == first.config
        with pytest.raises(NotFound):
            await StoredRepository.open(MemoryBackend(), recollection=memory)

    asyncio.run(body())


def test_key_objects_that_are_not_the_first() -> None:
    """An encrypted repository with changed slots has no first key object any more; a planted one
    does not count.
    """

    async def body() -> None:
        backend, snapshot = await made(encrypted=True)
        repository = await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE)
        await change(
            backend,
            repository.keys,
            lambda slots: add(slots, repository.keys.secret, b"another one", "two", CHEAP),
        )
        assert "keys/00000000" not in backend.objects
        opened = await StoredRepository.open(backend, passphrase=lambda: b"another one")
        assert await read(opened, snapshot) == {1: 1, 2: 2}
        plain, _ = await made()
        backend.objects["keys/00000000"] = plain.objects["keys/00000000"]
        assert await read(
            await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE), snapshot
        ) == {1: 1, 2: 2}
        # Of a plain repository the first is the only one.
        assert new_slot().method == "plain"
        for name in ("keys/00000000", "copies/keys/00000000"):
            await StoredRepository.open(plain)
            plain.objects[name] = plain.objects[name][:-1] + b"\0"
        with pytest.raises(Damaged):
            await StoredRepository.open(plain)

    asyncio.run(body())


NEW = b"the passphrase of today"
PLANTS = [
    "plain slot",
    "slot of another repository",
    "forged slot",
    "later version",
    "garbage",
    "garbage, and the copy",
]
#: A client that knows nothing takes the pair for a repository.
PAIR = "plain slot and configuration"
OLDER = "older one"


async def planted_at(how: str) -> tuple[MemoryBackend, str, str, bytes]:
    """Return an encrypted repository with a changed passphrase and one planted key object: its id,
    the object's name, and the older key object.
    """
    backend, _ = await made(encrypted=True)
    repository = await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE)
    older = backend.objects["keys/00000000"]
    await change(
        backend,
        repository.keys,
        lambda slots: rotate(slots, repository.keys.secret, "first", NEW, CHEAP),
    )
    plain, _ = await made()
    other, _ = await made(encrypted=True)
    name = "keys/ffffffff" if how.startswith("garbage") else "keys/00000009"
    real = decode_slots(name, backend.objects["keys/00000001"])
    assert real is not None
    data = {
        "plain": plain.objects["keys/00000000"],
        "slot": other.objects["keys/00000000"],
        "forged": encode_slots(msgspec.structs.replace(real, changes=[bytes(16)])).data,
        "later": encode_slots(msgspec.structs.replace(real, format=3)).data,
        "garbage": b"garbage",
        "older": older,
    }[how.replace(",", "").split()[0]]
    backend.objects[name] = data
    if how == "garbage, and the copy":
        backend.objects[f"copies/{name}"] = data
    if how == PAIR:
        backend.objects["config"] = plain.objects["config"]
    return backend, repository.config.id, name, older


@pytest.mark.parametrize(
    ("how", "known"),
    [*((how, known) for how in [*PLANTS, OLDER] for known in (False, True)), (PAIR, True)],
)
def test_one_planted_key_object_locks_nobody_out(how: str, known: bool, tmp_path: Path) -> None:
    async def body() -> None:
        backend, identity, name, _ = await planted_at(how)

        def admit(found: str, encrypted: bool) -> None:
            if (found, encrypted) != (identity, True):
                raise RepositoryReplaced(f"{found} is not {identity}")

        told: list[Event] = []

        async def opened() -> StoredRepository:
            return await StoredRepository.open(
                backend,
                passphrase=lambda: NEW,
                admit=admit if known else None,
                recollection=Recollection(tmp_path / "config"),
                emit=told.append,
            )

        for _ in range(2):
            repository = await opened()
            assert repository.config.id == identity and repository.keys.encrypted
            assert any(
                event.name == "store.copy_read" and "keys/00000001" in str(event.fields["object"])
                for event in told
            )
            told.clear()
        # The cure: repair removes what opens nothing. Then slots can be changed, under names that
        # count.
        done = await Repairer(repository).apply()
        if how == OLDER:
            return
        if how == "later version":
            assert [damage.name for damage in done.beyond] == [
                name
            ]  # a person has to say that it is none
            del backend.objects[name]
        assert name not in backend.objects and f"copies/{name}" not in backend.objects
        told.clear()
        repository = await opened()
        assert not told
        await change(
            backend,
            repository.keys,
            lambda slots: add(slots, repository.keys.secret, b"one more of them", "more", CHEAP),
        )
        assert [key for key in backend.objects if key.startswith("keys/")] == ["keys/00000002"]

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("how", ["garbage", "garbage, and the copy"])
def test_a_key_change_beside_garbage_takes_a_name_that_counts(how: str) -> None:
    async def body() -> None:
        backend, _, _, _ = await planted_at(how)
        backend.objects["keys/00000002"] = b"garbage"
        repository = await StoredRepository.open(backend, passphrase=lambda: NEW)
        await change(
            backend,
            repository.keys,
            lambda slots: add(slots, repository.keys.secret, b"one more of them", "more", CHEAP),
        )
        assert (await newest(backend)).name == "keys/00000003"
        assert all(
            len(key) == len("keys/00000000") for key in backend.objects if key.startswith("keys/")
        )
        assert (
            await StoredRepository.open(backend, passphrase=lambda: b"one more of them")
        ).config == repository.config
        backend.objects = {
            key: data for key, data in backend.objects.items() if "keys/" not in key
        } | {"keys/ffffffff": backend.objects["keys/00000003"]}
        before = dict(backend.objects)
        with pytest.raises(Damaged, match="the last one"):
            await change(
                backend,
                repository.keys,
                lambda slots: rotate(slots, repository.keys.secret, "more", NEW, CHEAP),
            )
        assert backend.objects == before

    asyncio.run(asyncio.wait_for(body(), 60))


@pytest.mark.parametrize("how", PLANTS)
def test_a_replaced_key_object_opens_nothing_beside_the_one_that_counts(how: str) -> None:
    """Its passphrase was retired: whatever is planted above it, the object that replaced it can be
    read and proves that.
    """

    async def body() -> None:
        backend, _, name, older = await planted_at(how)
        for copy in ("keys/00000000", "copies/keys/00000000"):
            backend.objects[copy] = older
        assert (await StoredRepository.open(backend, passphrase=lambda: NEW)).keys.encrypted
        with pytest.raises(IcecoreError):
            await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE)
        del backend.objects[name]
        with pytest.raises(WrongPassphrase):
            await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE)

    asyncio.run(asyncio.wait_for(body(), 60))
