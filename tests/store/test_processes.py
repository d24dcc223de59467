"""Real processes over one real repository: writers, collectors and a restorer, killed with SIGKILL
at any moment. Nothing committed is lost, and nothing is left over.

``ICECORE_TORTURE_SECONDS`` is the length of the long run. A place is where the repository lies; add
new ones to PLACES.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import random
import signal
import sys
import time
from ast import literal_eval
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path

import pytest

from icecore.access.places import backend_at
from icecore.config import Config
from icecore.errors import NotFound, ObjectMissing, SessionFenced
from icecore.store.backend.base import Backend
from icecore.store.backend.local import LocalBackend
from icecore.store.format.keys import Parameters
from icecore.store.log.repository import StoredRepository
from tests.seaweedfs import running
from tests.store.miniature import collect, listed, read, sound, take


@dataclass(frozen=True)
class Location:
    """Where a repository lies, in a form that other processes can be given."""

    kind: str
    where: str
    environment: dict[str, str] = field(default_factory=dict)

    def open(self) -> Backend:
        """Return a separate client."""
        os.environ.update(self.environment)
        return OPENERS[self.kind](self.where)


@contextmanager
def local(folder: Path) -> Iterator[Location]:
    """A directory."""
    root = folder / "repository"
    asyncio.run(LocalBackend(root, create=True).close())
    yield Location("local", str(root))


@contextmanager
def bucket(folder: Path) -> Iterator[Location]:
    """A bucket of a separate SeaweedFS; the processes find it through their environment."""
    with running(folder / "server") as server, pytest.MonkeyPatch.context() as patch:
        for name, value in server.environment().items():
            patch.setenv(name, value)
        where = f"s3://{server.make_bucket('icecore-processes')}/repository"
        yield Location("bucket", where, server.environment())


def open_bucket(where: str) -> Backend:
    """Open it like the commands: with retries, limits, counts."""
    return backend_at(where, config=Config())


OPENERS: dict[str, Callable[[str], Backend]] = {"local": LocalBackend, "bucket": open_bucket}
PLACES = {"local": local, "bucket": bucket}


def note(log: str, line: str) -> None:
    """Record something that must outlive this process."""
    with open(log, "a") as notes:
        notes.write(line)


def write(location: Location, seed: int, log: str) -> None:
    """Take snapshots, forget the oldest, and record what is known to be committed."""

    async def body() -> None:
        dice = random.Random(seed)
        repository = await StoredRepository.open(location.open())
        mine: list[str] = []
        while True:
            content = {dice.randrange(8): dice.randrange(12) for _ in range(4)}
            snapshot = await take(repository, content, mine[-1] if mine else None)
            note(log, f"+ {snapshot} {sorted(content.items())!r}\n")
            mine.append(snapshot)
            if len(mine) > 3:
                note(log, f"- {mine[0]}\n")
                await repository.forget([mine.pop(0)])

    asyncio.run(body())


def clean(location: Location, seed: int, log: str) -> None:
    """Collects again and again."""

    async def body() -> None:
        repository = await StoredRepository.open(location.open())
        while True:
            try:
                # Sessions of processes that were killed end all the same: they are of this machine.
                await collect(repository, fence_seconds=3600.0)
            except (ObjectMissing, SessionFenced):
                continue  # another collector was faster
            await asyncio.sleep(0.05)

    asyncio.run(body())


def restore(location: Location, seed: int, log: str) -> None:
    """Read snapshots slowly within a session, while they are forgotten and collected; record what
    was read.
    """

    async def body() -> None:
        dice = random.Random(seed)
        repository = await StoredRepository.open(location.open())
        while True:
            ids = await listed(repository)
            if not ids:
                await asyncio.sleep(0.05)
                continue
            try:
                session = await repository.read_session(dice.choice(ids), beat_seconds=None)
            except NotFound:
                continue  # forgotten since
            assert session.base is not None
            await asyncio.sleep(dice.uniform(0, 0.5))
            content = await read(repository, session.base)
            note(log, f"= {session.base.snapshot} {sorted(content.items())!r}\n")
            assert await session.abort(), "it was ended although it lives"

    asyncio.run(body())


ROLES = (clean, clean, write, write, write, write, restore)
_COMMITS = 4
_START_SECONDS = 180.0


class Crew:
    """The processes; each is restarted when it is killed."""

    def __init__(self, location: Location, folder: Path, seed: int) -> None:
        self.killed: Counter[str] = Counter()
        self._location = location
        self._folder = folder
        self._dice = random.Random(seed)
        # Each has nothing of this process, and is spared the imports.
        self._context: ForkServerContext = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload([__name__])
        self._processes: list[BaseProcess] = [self._start(number) for number in range(len(ROLES))]

    def _start(self, number: int) -> BaseProcess:
        arguments = (
            self._location,
            self._dice.randrange(1 << 30),
            str(self._folder / f"notes-{number}"),
        )
        process = self._context.Process(target=ROLES[number], args=arguments, daemon=True)
        process.start()
        return process

    def wait_for_commits(self, count: int) -> None:
        """Wait until ``count`` snapshots were committed: on a busy machine, that takes longer than
        the processes would otherwise live.
        """
        limit = time.monotonic() + _START_SECONDS
        while len(notes(self._folder)[0]) < count:
            assert time.monotonic() < limit, f"no {count} commits within {_START_SECONDS:.0f} s"
            time.sleep(0.1)

    def work(self, seconds: float, pause: tuple[float, float]) -> None:
        """Kill one after the other for some time."""
        end = time.monotonic() + seconds
        while time.monotonic() < end or len(self.killed) < 2:
            time.sleep(self._dice.uniform(*pause))
            failed = [
                ROLES[number].__name__
                for number, one in enumerate(self._processes)
                if not one.is_alive()
            ]
            assert not failed, f"failed by itself: {failed}"
            number = self._dice.randrange(len(ROLES))
            pid = self._processes[number].pid
            assert pid is not None
            os.kill(pid, signal.SIGKILL)
            self._processes[number].join(30)
            self.killed[ROLES[number].__name__] += 1
            self._processes[number] = self._start(number)

    def end(self) -> None:
        """Kill all."""
        for process in self._processes:
            process.kill()
            process.join(30)


def notes(
    folder: Path,
) -> tuple[dict[str, dict[int, int]], set[str], list[tuple[str, dict[int, int]]]]:
    """Return what was committed, what may have been forgotten, and what was read."""
    known: dict[str, dict[int, int]] = {}
    forgotten, restored = set(), []
    for path in folder.glob("notes-*"):
        for line in path.read_text().splitlines():
            sign, snapshot, *rest = line.split(" ", 2)
            if sign == "-":
                forgotten.add(snapshot)
            elif sign == "+":
                known[snapshot] = dict(literal_eval(rest[0]))
            else:
                restored.append((snapshot, dict(literal_eval(rest[0]))))
    return known, forgotten, restored


async def look(location: Location, folder: Path) -> tuple[int, int]:
    """Nothing is lost, and after a final collection there are no unreached objects. Return the
    numbers of snapshots and reads.
    """
    known, forgotten, restored = notes(folder)
    here = location.open()
    repository = await StoredRepository.open(here)
    there = set(await listed(repository))
    assert known.keys() - forgotten <= there, "a committed snapshot is gone"
    assert len(known) >= _COMMITS
    assert all(content == known.get(snapshot, content) for snapshot, content in restored)
    await sound(repository)
    for snapshot in there:
        content = await read(repository, snapshot)
        assert content == known.get(snapshot, content)
    # Every process was killed: its sessions need not be waited for.
    await collect(repository, fence_seconds=3600.0)
    await here.sweep(0)
    report = await sound(repository, unreached=0)
    assert report.snapshots == len(there)
    left = [info.name async for info in here.list("")]
    assert not [name for name in left if name.startswith("sessions/") or "/." in name]
    await repository.forget(sorted(there))
    await collect(repository)
    assert {info.name.split("/")[0] async for info in here.list("")} == {
        "config",
        "copies",
        "keys",
        "log",
    }
    await here.close()
    return len(known), len(restored)


@pytest.mark.parametrize(
    "seconds",
    [
        pytest.param(5.0, id="short"),
        pytest.param(
            float(os.environ.get("ICECORE_TORTURE_SECONDS", "300")),
            id="long",
            marks=[pytest.mark.torture, pytest.mark.timeout(7200)],
        ),
    ],
)
@pytest.mark.parametrize("place", PLACES)
def test_processes_are_killed_at_random(
    place: str, seconds: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is spawned finds this module by its name; last on the path, so that the installed package
    # comes first.
    monkeypatch.setattr(sys, "path", [*sys.path, str(Path(__file__).parents[2])])
    with PLACES[place](tmp_path) as location:

        async def make() -> None:
            backend = location.open()
            await StoredRepository.create(backend, Parameters(shard_bytes=1 << 16))
            await backend.close()

        asyncio.run(make())
        crew = Crew(location, tmp_path, seed=5)
        try:
            crew.wait_for_commits(_COMMITS)
            crew.work(seconds, (0.8, 1.4) if seconds < 60 else (0.3, 2.5))
        finally:
            crew.end()
        committed, read_ = asyncio.run(asyncio.wait_for(look(location, tmp_path), 240))
        print(
            f"{place}, {seconds:.0f} s: {committed} snapshots committed, {read_} restored, killed {dict(crew.killed)}"
        )
