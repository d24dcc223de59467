"""Real processes over one real directory: writers, a collector and kills with SIGKILL at any moment; nothing committed is lost, nothing is left over."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import time
from ast import literal_eval
from pathlib import Path

import pytest

from icecore.errors import NotFound, ObjectMissing, SessionFenced
from icecore.store.keys import Parameters
from icecore.store.local import LocalBackend
from icecore.store.repository import Repository
from tests.store.miniature import collect, files, listed, read, sound, take

SECONDS = 4.0


def write(root: str, seed: int, log: str) -> None:
    """Takes snapshots and forgets its oldest, and notes what it knows to be committed."""

    def note(line: str) -> None:
        with open(log, "a") as notes:
            notes.write(line)

    async def body() -> None:
        dice = random.Random(seed)
        repository = await Repository.open(LocalBackend(root))
        mine: list[str] = []
        while True:
            content = {dice.randrange(8): dice.randrange(12) for _ in range(4)}
            snapshot = await take(repository, content, mine[-1] if mine else None)
            note(f"+ {snapshot} {sorted(content.items())!r}\n")
            mine.append(snapshot)
            if len(mine) > 3:
                note(f"- {mine[0]}\n")
                await repository.forget([mine.pop(0)])

    asyncio.run(body())


def clean(root: str) -> None:
    """Collects again and again."""

    async def body() -> None:
        repository = await Repository.open(LocalBackend(root))
        while True:
            try:
                await collect(repository, fence_seconds=3600.0)
            except (ObjectMissing, SessionFenced):
                continue  # another collector was faster
            await asyncio.sleep(0.05)

    asyncio.run(body())


def test_processes_are_killed_at_random(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # What is spawned finds this module by its name; last on the path, so that the installed package comes first.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    root = tmp_path / "repository"
    backend = LocalBackend(root, create=True)
    asyncio.run(Repository.create(backend, Parameters(shard_bytes=1 << 16)))
    asyncio.run(backend.close())
    context = multiprocessing.get_context("spawn")
    dice = random.Random(5)

    def start(number: int) -> multiprocessing.process.BaseProcess:
        if number < 2:
            process = context.Process(target=clean, args=(str(root),), daemon=True)
        else:
            process = context.Process(
                target=write, args=(str(root), dice.randrange(1 << 30), str(tmp_path / f"notes-{number}")), daemon=True
            )
        process.start()
        return process

    processes = [start(number) for number in range(4)]
    try:
        end = time.monotonic() + SECONDS
        killed = 0
        while time.monotonic() < end or killed < 2:
            time.sleep(dice.uniform(0.8, 1.4))
            number = dice.randrange(4)
            assert processes[number].is_alive(), "a process failed by itself"
            pid = processes[number].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            processes[number].join(30)
            killed += 1
            processes[number] = start(number)
    finally:
        for process in processes:
            process.kill()
            process.join(30)

    known: dict[str, dict[int, int]] = {}
    forgotten = set()
    for notes in tmp_path.glob("notes-*"):
        for line in notes.read_text().splitlines():
            sign, snapshot, *rest = line.split(" ", 2)
            if sign == "+":
                known[snapshot] = dict(literal_eval(rest[0]))
            else:
                forgotten.add(snapshot)

    async def look() -> None:
        here = LocalBackend(root)
        repository = await Repository.open(here)
        there = set(await listed(repository))
        assert known.keys() - forgotten <= there, "a committed snapshot is gone"
        assert len(known) > 3
        await sound(repository)
        for snapshot in there:
            try:
                content = await read(repository, snapshot)
            except NotFound:
                continue
            assert content == known.get(snapshot, content)
        await collect(repository, fence_seconds=0)
        await here.sweep(0)
        report = await sound(repository, unreached=0)
        assert report.snapshots == len(there)
        assert not [name for name in files(root) if name.startswith("sessions/") or "/." in name]
        await repository.forget(sorted(there))
        await collect(repository)
        assert {name.split("/")[0] for name in files(root)} == {"config", "keys", "log"}
        await here.close()

    asyncio.run(asyncio.wait_for(look(), 60))
