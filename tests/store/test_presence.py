"""Sessions of ended processes are fenced at once; those of living ones, or of processes of which
nothing certain is known, only after a long silence.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec
import pytest

from icecore.store.backend.local import LocalBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.keys import Parameters
from icecore.store.format.state import LogState, Process
from icecore.store.log.catalog import Pages
from icecore.store.log.presence import has_ended, this_process
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.gc import COLLECT
from tests.store.miniature import collect, files, put, read, sound, state_of, take


def write_and_wait(root: str, told: Connection) -> None:
    """Store all of a snapshot except its commit, report that, and wait to be killed."""

    async def body() -> None:
        repository = await StoredRepository.open(LocalBackend(root))
        session = await repository.begin(None, "test", beat_seconds=None)
        await session.heartbeat()
        await put(repository, session, {cell: 100 + cell for cell in range(8)})
        told.send(session.id)
        await asyncio.sleep(60)

    asyncio.run(body())


@pytest.mark.parametrize("reaped", [True, False])
def test_a_killed_writers_session_ends_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reaped: bool
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    root = tmp_path / "repository"
    context = multiprocessing.get_context("spawn")
    hears, told = context.Pipe(duplex=False)

    async def body() -> None:
        backend = LocalBackend(root, create=True)
        repository = await StoredRepository.create(backend, Parameters(shard_bytes=1 << 16))
        kept = await take(repository, {1: 1})
        ours = await repository.begin(kept, "test", beat_seconds=None)
        process = context.Process(target=write_and_wait, args=(str(root), told), daemon=True)
        process.start()
        try:
            assert await asyncio.to_thread(hears.poll, 60)
            theirs = hears.recv()
            result = await collect(repository)
            assert result.fenced == 0 and result.waiting > 0
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            if reaped:
                process.join(30)
            else:
                await asyncio.to_thread(os.waitid, os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        finally:
            if reaped:
                process.kill()
                process.join(30)
        result = await collect(repository)
        assert (
            result.fenced == 1 and result.deleted == 0
        )  # our own session began before its objects were condemned
        state = (await state_of(repository)).state
        assert state.session(theirs) is None and state.session(ours.id) is not None
        await ours.abort()
        assert (await collect(repository)).deleted > 0
        await sound(repository, unreached=0)
        assert await read(repository, kept) == {1: 1}
        assert not [name for name in files(root) if name.startswith("sessions/")]
        process.join(30)
        await backend.close()

    asyncio.run(asyncio.wait_for(body(), 100))


def test_only_what_is_certain_counts() -> None:
    ours = this_process()
    assert ours is not None and ours.pid == os.getpid()
    assert not has_ended(ours) and not has_ended(None)
    assert has_ended(msgspec.structs.replace(ours, started=ours.started - 1))
    gone = (1 << 22) + 1  # above the kernel's largest pid
    assert has_ended(msgspec.structs.replace(ours, pid=gone))
    assert not has_ended(msgspec.structs.replace(ours, pid=gone, boot="of another machine"))
    assert not has_ended(msgspec.structs.replace(ours, pid=gone, namespaces="pid:[1] time:[2]"))
    assert not has_ended(msgspec.structs.replace(ours, pid=1 << 70))


@pytest.mark.parametrize("process", [None, Process("elsewhere", "", 1, 1)])
def test_sessions_from_elsewhere_live_until_they_are_silent(process: Process | None) -> None:
    async def body() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        session = await repository.begin(None, "test", beat_seconds=None)

        async def change(state: LogState, pages: Pages) -> LogState:
            sessions = [
                msgspec.structs.replace(record, process=process) for record in state.sessions
            ]
            return msgspec.structs.replace(state, sessions=sessions)

        await repository.log.transact(change, "move it")
        assert (await collect(repository)).fenced == 0
        assert (await state_of(repository)).state.session(session.id) is not None
        assert (await collect(repository, fence_seconds=0)).fenced == 1

    asyncio.run(body())


@pytest.mark.parametrize("ended", [True, False])
def test_a_dead_collector_is_waited_for(ended: bool) -> None:
    """Syncs rely on its session until its last deletion has taken place, which may be slow."""

    async def body() -> None:
        repository = await StoredRepository.create(MemoryBackend())
        session = await repository.begin(None, COLLECT, beat_seconds=None)
        ours = this_process()
        assert ours is not None
        process = msgspec.structs.replace(ours, pid=(1 << 22) + 1) if ended else None

        for hours, fenced in ((0, False), (1, ended), (25, True)):
            heard = time.time_ns() - hours * 3600 * 10**9

            async def change(state: LogState, pages: Pages, heard: int = heard) -> LogState:
                sessions = [
                    msgspec.structs.replace(one, process=process, created_ns=heard)
                    for one in state.sessions
                ]
                return msgspec.structs.replace(state, sessions=sessions)

            await repository.log.transact(change, "let time pass")
            await collect(repository)
            assert ((await state_of(repository)).state.session(session.id) is None) == fenced

    asyncio.run(body())
