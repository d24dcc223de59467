"""Everything that changes a repository, for the tests that break it off at every store call. What is new (copy, key change, …) is added to OPERATIONS."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from unittest import mock

from icecore.errors import IcecoreError
from icecore.store import index
from icecore.store.keys import Parameters
from icecore.store.memory import MemoryBackend
from icecore.store.names import filtered_segment, parse_name
from icecore.store.repair import Repairer
from icecore.store.repository import Repository
from tests.store.miniature import collect, listed, read, sound, take

A = {cell: cell for cell in range(12)}
B = {**A, **{cell: 100 + cell for cell in range(10)}}
C = {cell: 50 + cell for cell in range(5)}


class Scene:
    """A repository with some history: a sparse shard, a forgotten snapshot, two that stay, hints of a lineage that is gone.

    Attributes:
        objects: The repository's.
        contents: What snapshots that must stay hold.
        forgettable: One that may go.
        whole: The objects before ``harm``.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.contents: dict[str, dict[int, int]] = {}
        self.forgettable = ""
        self.whole: dict[str, bytes] = {}

    async def build(self) -> None:
        """Make it."""
        backend = MemoryBackend(self.objects)
        repository = await Repository.create(backend, Parameters(shard_bytes=1 << 18))
        old = await take(repository, A)
        self.contents[await take(repository, B, old)] = dict(B)
        self.contents[await take(repository, C)] = dict(C)
        self.forgettable = await take(repository, {1: 240, 2: 241, **C})
        await repository.forget([old])
        await backend.create("hints/gone/touched-1-2", [b"advice"])
        self.whole = dict(self.objects)

    @property
    def parent(self) -> str:
        """A snapshot to build on."""
        return next(iter(self.contents))

    async def replica(self) -> Repository:
        """The repository as it was before harm."""
        return await Repository.open(MemoryBackend(dict(self.whole)))

    async def readable(self, backend: MemoryBackend) -> set[str]:
        """Snapshots that must stay and read back."""
        repository, good = await Repository.open(backend), set()
        for snapshot, content in self.contents.items():
            try:
                if await read(repository, snapshot) == content:
                    good.add(snapshot)
            except IcecoreError:
                pass
        return good


async def harm(scene: Scene) -> None:
    """Damage a chunk, a manifest and an index segment."""
    repository = await scene.replica()
    records = {record.snapshot: record for record in await repository.snapshots()}
    last = records[list(scene.contents)[-1]]
    shards = sorted((name for name in scene.objects if name.startswith("shards/")), key=lambda name: len(scene.objects[name]))
    for name in (shards[-1], last.manifest, next(name for name in scene.objects if name.startswith("index/"))):
        data = bytearray(scene.objects[name])
        data[min(5000, len(data) // 2)] ^= 1
        scene.objects[name] = bytes(data)


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        run: Does it.
        harm: Done to the scene's objects before; then only what still reads afterwards has to go on reading.
        finish: What another process does after a crash, before all has to be sound.
        heals: Whether ``finish`` brings back everything that was harmed.
    """

    run: Callable[[Repository, Scene], Awaitable[object]]
    harm: Callable[[Scene], Awaitable[None]] | None = None
    finish: Callable[[Repository, Scene], Awaitable[object]] | None = None
    heals: bool = False


async def repair(repository: Repository, scene: Scene) -> object:
    """From what there is."""
    return await Repairer(repository).apply()


async def repair_from_replica(repository: Repository, scene: Scene) -> object:
    """From a replica."""
    return await Repairer(repository, await scene.replica()).apply()


def with_filters(
    run: Callable[[Repository, Scene], Awaitable[object]],
) -> Callable[[Repository, Scene], Awaitable[object]]:
    """The same where every index segment is long enough to have a filter."""

    async def filtered(repository: Repository, scene: Scene) -> object:
        with mock.patch.object(index, "FILTER_ENTRIES", 1):
            return await run(repository, scene)

    return filtered


def commit(repository: Repository, scene: Scene) -> Awaitable[object]:
    """A snapshot with a parent."""
    return take(repository, {**B, 20: 60, 21: 61}, scene.parent)


OPERATIONS: dict[str, Operation] = {
    "commit": Operation(commit),
    "commit with filters": Operation(with_filters(commit)),
    "forget": Operation(lambda repository, scene: repository.forget([scene.forgettable])),
    "pin": Operation(lambda repository, scene: repository.update(scene.parent, pinned=True)),
    "gc": Operation(lambda repository, scene: collect(repository)),
    "gc with filters": Operation(with_filters(lambda repository, scene: collect(repository))),
    "gc without compaction": Operation(lambda repository, scene: collect(repository, compact_below=0)),
    "repair": Operation(repair, harm, repair),
    "repair from a replica": Operation(repair_from_replica, harm, repair_from_replica, heals=True),
}


async def quarantined(backend: MemoryBackend) -> set[str]:
    """Snapshots that are said to have lost data."""
    return {record.snapshot for record in await (await Repository.open(backend)).snapshots() if record.quarantined}


async def prepared(name: str) -> Scene:
    """A scene, ready for the operation."""
    scene = Scene()
    await scene.build()
    wanted = OPERATIONS[name].harm
    if wanted is not None:
        await wanted(scene)
    return scene


async def aftermath(backend: MemoryBackend, scene: Scene, operation: Operation, before: set[str]) -> None:
    """Another process comes and cleans up; all that was committed reads back, and nothing is left over.

    Args:
        before: Snapshots that read back before the operation.
    """
    assert before <= await scene.readable(backend)
    assert not before & await quarantined(backend), "what reads was given up"
    repository = await Repository.open(backend)
    assert set(scene.contents) <= set(await listed(repository))
    if operation.finish is not None:
        await operation.finish(repository, scene)
    await sound(repository)
    good = await scene.readable(backend)
    assert before <= good and (not operation.heals or good == set(scene.contents))
    lost = await quarantined(backend)
    assert not good & lost and set(scene.contents) == good | lost
    await collect(repository, fence_seconds=0)
    report = await sound(repository, unreached=0)
    assert report.snapshots >= 2 and await scene.readable(backend) == good
    for snapshot in set(await listed(repository)) - lost:
        content = await read(repository, snapshot)
        assert content == scene.contents.get(snapshot, content)
    assert not [name for name in backend.objects if name.startswith(("hints/", "sessions/"))]
    filters = {filtered_segment(name) for name in backend.objects if name.startswith("filters/")}
    assert filters <= {named[1] for named in map(parse_name, backend.objects) if named is not None and named[0] == "segment"}
    # And it can be worked with.
    await take(repository, {1: 1}, next(iter(good), None))
