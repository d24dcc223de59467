"""A repository on a full file system (a tmpfs): its reserve lets readers read, and lets others free
space.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from unittest.mock import patch

import pytest

from icecore.errors import StoreFull
from icecore.events import Event
from icecore.store.backend.base import READERS_LEAVE, RESERVE_PIECE, RESERVE_PIECES
from icecore.store.backend.local import LocalBackend
from icecore.store.log import lease
from icecore.store.log.lease import take as take_lease
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check import check
from icecore.store.maintenance.gc import Collector
from icecore.store.maintenance.stats import stats
from tests.store.miniature import collect, listed, read, sound, take

RESERVE = [str(number) for number in range(RESERVE_PIECES)]
A, B = {0: 1, 1: 2, 2: 3, 3: 4}, {0: 1, 7: 9}


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Path]:
    """Mount a tmpfs of 24 MiB."""
    place = tmp_path / "small"
    place.mkdir()
    if subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", place], capture_output=True, timeout=20
    ).returncode:
        pytest.skip("no right to mount a tmpfs")
    try:
        yield place
    finally:
        subprocess.run(["umount", "-l", place], check=True, timeout=20)


def fill(place: Path) -> None:
    """Use up all free bytes."""
    descriptor = os.open(place / "filler", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        while True:
            os.write(descriptor, bytes(os.statvfs(place).f_bsize))
    except OSError:
        assert os.statvfs(place).f_bavail == 0
    finally:
        os.close(descriptor)


def forget_and_collect(root: Path, several: list[list[str]]) -> list[subprocess.Popen[bytes]]:
    """Run several processes at once, each with its snapshots."""
    script = """if True:
        import asyncio, sys
        from pathlib import Path
        from icecore.store.backend.local import LocalBackend
        from icecore.store.log.repository import StoredRepository

        sys.path.append(sys.argv[1])  # last: the package is the installed one
        from tests.store.miniature import collect

        async def body():
            repository = await StoredRepository.open(LocalBackend(Path(sys.argv[2])))
            assert len(await repository.forget(sys.argv[3:])) == len(sys.argv[3:])
            await collect(repository)

        asyncio.run(body())
    """
    ours = str(Path(__file__).parents[2])
    return [
        subprocess.Popen([sys.executable, "-P", "-c", script, ours, str(root), *mine])
        for mine in several
    ]


def reserve(place: Path) -> list[str]:
    folder = place / "repository" / ".reserve"
    held = sorted(os.listdir(folder)) if folder.exists() else []
    assert all((folder / name).stat().st_size == RESERVE_PIECE for name in held)
    return held


@asynccontextmanager
async def made(place: Path, told: list[Event] | None = None) -> AsyncIterator[StoredRepository]:
    backend = LocalBackend(place / "repository", create=True)
    try:
        yield await StoredRepository.create(
            backend, emit=[].append if told is None else told.append
        )
    finally:
        await backend.close()


def test_it_is_no_object(place: Path) -> None:
    async def body() -> None:
        async with made(place) as repository:
            assert reserve(place) == RESERVE
            assert {info.name.split("/")[0] async for info in repository.backend.list("")} == {
                "config",
                "copies",
                "keys",
                "log",
            }
            await take(repository, A)
            await collect(repository, sweep_seconds=0)
            assert reserve(place) == RESERVE
            await sound(repository, unreached=0)

    asyncio.run(body())


def test_readers_are_registered_where_nothing_else_can_be_written(place: Path) -> None:
    """Readers may use some of the reserve, so that what they read stays; the rest is not for them."""

    async def body() -> None:
        async with made(place) as repository:
            snapshot = await take(repository, A)
            fill(place)
            with pytest.raises(StoreFull, match="No space"):
                await take(repository, B)
            assert reserve(place) == RESERVE
            session = await repository.read_session(snapshot)
            assert len(reserve(place)) == RESERVE_PIECES - 1
            assert [record.id for record in (await repository.log.newest()).state.sessions] == [
                session.id
            ]
            # Others forget it and collect: it stays while it is read.
            await repository.forget([snapshot])
            await collect(repository)
            assert session.base is not None
            assert await read(repository, session.base) == A
            fill(place)
            await session.heartbeat()
            await session.abort()
            (place / "filler").unlink()
            assert (await collect(repository)).deleted
            await sound(repository, unreached=0)

    asyncio.run(body())


def test_readers_leave_some_of_it(place: Path) -> None:
    async def body() -> None:
        async with made(place) as repository:
            snapshot = await take(repository, A)
            while True:
                fill(place)
                try:
                    await (await repository.read_session(snapshot, beat_seconds=None)).abort()
                except StoreFull as error:
                    assert "--read-only" in error.cure and "reserve" in error.cure
                    break
            assert reserve(place) == RESERVE[:READERS_LEAVE]
            for look in (check, stats):
                with pytest.raises(StoreFull):
                    await look(repository)
                await look(repository, register=False)
            assert await repository.forget([snapshot])
            assert (await collect(repository)).deleted

    asyncio.run(body())


def test_writers_leave_what_was_released(place: Path) -> None:
    """However often jobs try to store snapshots, some of the reserve stays for who frees space."""

    async def body() -> None:
        async with made(place) as repository:
            snapshot = await take(repository, A)
            fill(place)
            await (await repository.read_session(snapshot, beat_seconds=None)).abort()
            left = reserve(place)
            assert len(left) < RESERVE_PIECES
            for _ in range(30):
                with pytest.raises(StoreFull, match="nearly full"):
                    await take(repository, B)
            assert reserve(place) == left
            assert await repository.forget([snapshot])
            assert (await collect(repository)).deleted
            (place / "filler").unlink()
            await take(repository, B)
            assert reserve(place) == RESERVE

    asyncio.run(body())


def test_a_lease_is_taken_from_who_has_ended(place: Path) -> None:
    """A supervised job goes on: to be restored it writes little."""

    async def body() -> None:
        async with made(place) as repository:
            held = await take_lease(repository, "job", where="here")
            fill(place)
            with patch.object(lease, "has_ended", lambda _: True):
                again = await take_lease(repository, "job", where="here")
            assert again._session.id != held._session.id
            assert RESERVE_PIECES > len(reserve(place)) >= READERS_LEAVE

    asyncio.run(body())


def test_a_job_that_is_stopped_tries_to_store_what_fits(place: Path) -> None:
    async def body() -> None:
        async with made(place) as repository:
            snapshot = await take(repository, A)
            fill(place)
            await (await repository.read_session(snapshot, beat_seconds=None)).abort()
            with pytest.raises(StoreFull, match="nearly full"):
                await repository.begin(None, "dump")
            await (await repository.begin(None, "dump", insist=True)).abort()

    asyncio.run(body())


def test_a_file_system_that_does_not_say_how_full_it_is(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or whose free blocks are root's alone."""

    async def body() -> None:
        async with made(place) as repository:
            (place / "repository" / ".reserve" / "3").unlink()
            silent = os.statvfs_result((4096, 4096, 0, 0, 0, 0, 0, 0, 0, 255))
            own = os.statvfs_result((4096, 4096, 1 << 20, 1 << 20, 0, 0, 0, 0, 0, 255))
            full = os.statvfs_result((4096, 4096, 1 << 20, 0, 0, 0, 0, 0, 0, 255))
            for found, room in ((silent, True), (full, False), (own, True)):
                monkeypatch.setattr(os, "statvfs", lambda _, found=found: found)
                assert await repository.backend.keep_reserve() is room
            assert reserve(place) == RESERVE

    asyncio.run(body())


def test_what_is_forgotten_is_freed(place: Path) -> None:
    """Forget and collect, with shards that would be rewritten if there were room; afterwards
    everything is as before.
    """

    async def body() -> None:
        told: list[Event] = []
        async with made(place, told) as repository:
            doomed = await take(repository, {cell: cell for cell in range(64)})
            kept = await take(repository, {0: 0, 5: 5})
            more = [
                await take(repository, dict.fromkeys(range(3), 100 + step)) for step in range(5)
            ]
            fill(place)
            assert [record.snapshot for record in await repository.forget([doomed, *more])] == [
                doomed,
                *more,
            ]
            fill(place)
            assert (await collect(repository)).deleted
            assert await listed(repository) == [kept]
            (place / "filler").unlink()
            await collect(repository)
            assert reserve(place) == RESERVE
            assert await read(repository, kept) == {0: 0, 5: 5}
            await sound(repository, unreached=0)

    asyncio.run(body())


def test_rewriting_waits_for_room(place: Path) -> None:
    """What can be deleted is deleted, although a mostly dead shard cannot be rewritten."""

    async def body() -> None:
        told: list[Event] = []
        async with made(place, told) as repository:
            doomed = await take(repository, {cell: cell for cell in range(40)})
            kept = await take(repository, {cell: cell for cell in range(12)}, doomed)
            other = await take(repository, {60: 200})
            await repository.forget([doomed, other])
            assert (await Collector(repository).plan()).compact
            folder = place / "repository" / ".reserve"
            for piece in folder.iterdir():
                piece.write_bytes(bytes(1 << 14))  # room for entries of the log, for no shard
            fill(place)
            result = await collect(repository)
            assert result.deleted and not result.compacted.shards
            assert [event.fields["what"] for event in told if event.name == "gc.no_room"][:1] == [
                "shards"
            ]
            assert await read(repository, kept) == {cell: cell for cell in range(12)}
            (place / "filler").unlink()
            assert (await collect(repository)).compacted.shards == 1
            assert await read(repository, kept) == {cell: cell for cell in range(12)}
            await sound(repository, unreached=0)

    asyncio.run(body())


def test_a_repository_of_an_earlier_version_gets_one(place: Path) -> None:
    async def body() -> None:
        async with made(place) as repository:
            snapshot = await take(repository, A)
            for name in reserve(place):
                (place / "repository" / ".reserve" / name).unlink()
            (place / "repository" / ".reserve").rmdir()
            fill(place)
            with pytest.raises(StoreFull) as caught:
                await repository.forget([snapshot])
            assert "used up" in caught.value.cure
            assert await listed(repository) == [snapshot]
            (place / "filler").unlink()
            await take(repository, B)
            assert reserve(place) == RESERVE
            (place / "repository" / ".reserve" / "3").unlink()
            (place / "repository" / ".reserve" / "4").write_bytes(b"")
            await take(repository, {9: 9})
            assert reserve(place) == RESERVE

    asyncio.run(body())


def test_many_free_at_once(place: Path) -> None:
    """Separate processes: each forgets snapshots, then collects."""

    async def body() -> None:
        async with made(place) as repository:
            several = [
                [
                    await take(repository, {cell: 10 * who + cell for cell in range(3)})
                    for _ in range(2)
                ]
                for who in range(3)
            ]
            fill(place)
            running = forget_and_collect(place / "repository", several)
            assert [await asyncio.to_thread(process.wait, 60) for process in running] == [0, 0, 0]
            assert await listed(repository) == []
            (place / "filler").unlink()
            await collect(repository)
            await sound(repository, unreached=0)

    asyncio.run(body())
