"""All operations that change a repository, for the tests that interrupt them at every store call.
Add a new operation to OPERATIONS.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from unittest import mock

from icecore.errors import IcecoreError, WrongPassphrase
from icecore.store.backend.base import Backend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format import slots
from icecore.store.format.keys import Parameters
from icecore.store.format.names import filtered_segment, parse_name
from icecore.store.log import index, keychain
from icecore.store.log.chain import Log
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.repair import Repairer
from icecore.store.replication import reconcile
from icecore.store.replication import replicas as replication
from icecore.store.replication.transfer import copy
from icecore.store.runtime.loop import LoopThread
from tests.store.miniature import CHEAP, PASSPHRASE, collect, listed, read, sound, take

A = {cell: cell for cell in range(12)}
B = {**A, **{cell: 100 + cell for cell in range(10)}}
C = {cell: 50 + cell for cell in range(5)}
D = {cell: 150 + cell for cell in range(4)}
#: Opens an encrypted repository after a change of keys.
CHANGED = b"another that is long enough"
TAGS = ["from afar"]


async def unlocked(backend: Backend) -> StoredRepository:
    """Return the repository in ``backend``, whatever its passphrase is by now."""
    try:
        return await StoredRepository.open(backend, passphrase=lambda: PASSPHRASE)
    except WrongPassphrase:
        return await StoredRepository.open(backend, passphrase=lambda: CHANGED)


class Scene:
    """A repository with some history: a sparse shard, a forgotten snapshot, two remaining ones,
    hints of a vanished lineage.

    Attributes:
        objects: The repository's.
        contents: What snapshots that must stay hold.
        forgettable: One that may go.
        whole: The objects before ``harm``.
        far: The objects of a replica (`make_replica`).
        strange: Those of a repository that has nothing in common with it (`make_stranger`).
        arriving: What snapshots hold that only one of these has.
        followed: One that came from the replica, which has forgotten it since.
    """

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.contents: dict[str, dict[int, int]] = {}
        self.forgettable = ""
        self.whole: dict[str, bytes] = {}
        self.far: dict[str, bytes] = {}
        self.strange: dict[str, bytes] = {}
        self.arriving: dict[str, dict[int, int]] = {}
        self.followed = ""

    async def build(self, encrypted: bool = False) -> None:
        """Make it."""
        backend = MemoryBackend(self.objects)
        given = (lambda: PASSPHRASE) if encrypted else None
        repository = await StoredRepository.create(
            backend, Parameters(shard_bytes=1 << 18), passphrase=given, cost=CHEAP
        )
        old = await take(repository, A)
        self.contents[await take(repository, B, old)] = dict(B)
        self.contents[await take(repository, C)] = dict(C)
        self.forgettable = await take(repository, {1: 240, 2: 241, **C})
        await repository.forget([old])
        await backend.create("hints/gone/touched-1-2", [b"advice"])
        self.whole = dict(self.objects)

    def copy(self) -> Scene:
        """Return a copy that may be changed independently."""
        other = Scene()
        for name, value in vars(self).items():
            setattr(other, name, dict(value) if isinstance(value, dict) else value)
        return other

    @property
    def parent(self) -> str:
        """A snapshot to build on."""
        return next(iter(self.contents))

    async def replica(self) -> StoredRepository:
        """Return the repository before the damage."""
        return await unlocked(MemoryBackend(dict(self.whole)))

    async def readable(self, backend: MemoryBackend) -> set[str]:
        """Snapshots that must stay and read back."""
        repository, good = await unlocked(backend), set()
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
    shards = sorted(
        (name for name in scene.objects if name.startswith("shards/")),
        key=lambda name: len(scene.objects[name]),
    )
    for name in (
        shards[-1],
        last.manifest,
        next(name for name in scene.objects if name.startswith("index/")),
    ):
        data = bytearray(scene.objects[name])
        data[min(5000, len(data) // 2)] ^= 1
        scene.objects[name] = bytes(data)


async def make_replica(scene: Scene) -> None:
    """A replica with a snapshot of its own, other marks, and one snapshot less, which it synced
    before and forgot.
    """
    here = await unlocked(MemoryBackend(scene.objects))
    there = await StoredRepository.create(
        MemoryBackend(scene.far),
        here.config.parameters,
        passphrase=(lambda: PASSPHRASE) if here.keys.encrypted else None,
        cost=CHEAP,
        secret=here.keys.secret,
    )
    scene.followed = await take(there, {5: 170, **C})
    for source, target in ((there, here), (here, there)):
        await replication.sync(source, target, await reconcile.plan(source, target))
    await there.forget([scene.followed])
    await collect(there)
    scene.arriving[await take(there, {6: 160, **D}, scene.parent)] = {6: 160, **D}
    await there.update(scene.parent, pinned=True, tags=TAGS)
    scene.whole = dict(scene.objects)


async def make_stranger(scene: Scene) -> None:
    """A repository with other keys: a lineage of two."""
    there = await StoredRepository.create(
        MemoryBackend(scene.strange), Parameters(shard_bytes=1 << 18)
    )
    first = await take(there, A)
    scene.arriving |= {first: dict(A), await take(there, {**A, 3: 130}, first): {**A, 3: 130}}


@dataclass(frozen=True)
class Operation:
    """One operation.

    Attributes:
        run: Does it.
        before: Makes what it needs.
        encrypted: Whether the scene is.
        harm: Done to the scene's objects before; then only what still reads afterwards has to go on
            reading.
        finish: What another process does after a crash, before all has to be sound.
        heals: Whether ``finish`` brings back everything that was harmed.
    """

    run: Callable[[StoredRepository, Scene], Awaitable[object]]
    before: Callable[[Scene], Awaitable[None]] | None = None
    encrypted: bool = False
    harm: Callable[[Scene], Awaitable[None]] | None = None
    finish: Callable[[StoredRepository, Scene], Awaitable[object]] | None = None
    heals: bool = False


async def repair(repository: StoredRepository, scene: Scene) -> object:
    """Repair from what is left."""
    return await Repairer(repository).apply()


async def repair_from_replica(repository: StoredRepository, scene: Scene) -> object:
    """Repair from a replica."""
    return await Repairer(repository, await scene.replica()).apply()


async def sync_from_replica(repository: StoredRepository, scene: Scene) -> object:
    """Sync snapshots, marks and deletions."""
    source = await unlocked(MemoryBackend(scene.far))
    todo = await reconcile.plan(source, repository, forget=True)
    return await replication.sync(source, repository, todo, patience=0.2)


async def synced(repository: StoredRepository, scene: Scene) -> None:
    """Check that the next sync completes the work, once."""
    await sync_from_replica(repository, scene)
    there = await listed(await unlocked(MemoryBackend(scene.far)))
    assert set(there) <= set(await listed(repository)) and scene.followed not in await listed(
        repository
    )
    record = await repository.find(scene.parent)
    assert record.pinned and record.tags == TAGS
    assert (
        await reconcile.plan(await unlocked(MemoryBackend(scene.far)), repository, forget=True)
        == reconcile.Plan()
    )


async def copy_from_stranger(repository: StoredRepository, scene: Scene) -> object:
    """Copy everything, in a separate event loop, as copies do."""

    def body() -> object:
        with LoopThread() as loop:
            source = loop.run(StoredRepository.open(MemoryBackend(scene.strange)))
            log = Log(repository.backend, repository.keys.log)
            target = StoredRepository(
                repository.backend, repository.config, repository.keys, log, repository.emit
            )
            return copy(source, target, loop, loop.run(source.snapshots()), threads=1)

    return await asyncio.to_thread(body)


async def copied(repository: StoredRepository, scene: Scene) -> None:
    """Check that the next copy resumes."""
    await copy_from_stranger(repository, scene)
    source = await StoredRepository.open(MemoryBackend(scene.strange))
    assert set(await listed(source)) <= set(await listed(repository))


async def change_keys(repository: StoredRepository, scene: Scene) -> object:
    """Replace the first passphrase."""
    keys = repository.keys
    edit = partial(slots.rotate, secret=keys.secret, which="first", passphrase=CHANGED, cost=CHEAP)
    return await keychain.change(repository.backend, keys, edit)


async def keys_changed(repository: StoredRepository, scene: Scene) -> None:
    """Check that one of the two passphrases opens it, also after the next change has tidied up."""
    keys, works = repository.keys, []
    edit = partial(
        slots.add, secret=keys.secret, passphrase=b"the third of them", label="third", cost=CHEAP
    )
    for again in (False, True):
        if again:
            await keychain.change(repository.backend, keys, edit)
        for passphrase in (PASSPHRASE, CHANGED):
            try:
                await StoredRepository.open(
                    repository.backend, passphrase=lambda given=passphrase: given
                )  # type: ignore[misc]
                works.append(passphrase)
            except WrongPassphrase:
                pass
    assert len(works) == 2 and works[0] == works[1]
    assert len([info async for info in repository.backend.list("keys/")]) == 1


def with_filters(
    run: Callable[[StoredRepository, Scene], Awaitable[object]],
) -> Callable[[StoredRepository, Scene], Awaitable[object]]:
    """Return the same with every index segment long enough to have a filter."""

    async def filtered(repository: StoredRepository, scene: Scene) -> object:
        with mock.patch.object(index, "FILTER_ENTRIES", 1):
            return await run(repository, scene)

    return filtered


def commit(repository: StoredRepository, scene: Scene) -> Awaitable[object]:
    """Return a snapshot with a parent."""
    return take(repository, {**B, 20: 60, 21: 61}, scene.parent)


OPERATIONS: dict[str, Operation] = {
    "commit": Operation(commit),
    "commit with filters": Operation(with_filters(commit)),
    "forget": Operation(lambda repository, scene: repository.forget([scene.forgettable])),
    "pin": Operation(lambda repository, scene: repository.update(scene.parent, pinned=True)),
    "gc": Operation(lambda repository, scene: collect(repository)),
    "gc with filters": Operation(with_filters(lambda repository, scene: collect(repository))),
    "gc without compaction": Operation(
        lambda repository, scene: collect(repository, compact_below=0)
    ),
    "repair": Operation(repair, harm=harm, finish=repair),
    "repair from a replica": Operation(
        repair_from_replica, harm=harm, finish=repair_from_replica, heals=True
    ),
    "sync": Operation(sync_from_replica, before=make_replica, finish=synced),
    "copy": Operation(copy_from_stranger, before=make_stranger, finish=copied),
    "key change": Operation(change_keys, encrypted=True, finish=keys_changed),
}


async def quarantined(backend: MemoryBackend) -> set[str]:
    """Quarantine snapshots."""
    return {
        record.snapshot
        for record in await (await unlocked(backend)).snapshots()
        if record.quarantined
    }


async def prepared(name: str) -> Scene:
    """Return a scene, ready for the operation."""
    scene, operation = Scene(), OPERATIONS[name]
    await scene.build(operation.encrypted)
    for work in (operation.before, operation.harm):
        if work is not None:
            await work(scene)
    return scene


async def prepared_for_all() -> Scene:
    """Return an intact encrypted scene, ready for every operation."""
    scene = Scene()
    await scene.build(True)
    await make_replica(scene)
    await make_stranger(scene)
    return scene


async def aftermath(
    backend: MemoryBackend, scene: Scene, operation: Operation, before: set[str]
) -> None:
    """Check that another process can clean up: everything committed can be read, and nothing is
    left over.

    Args:
        before: Snapshots that read back before the operation.
    """
    assert before <= await scene.readable(backend)
    assert not before & await quarantined(backend), "what reads was given up"
    repository = await unlocked(backend)
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
        assert content == (scene.contents | scene.arriving).get(snapshot, content)
    assert not [name for name in backend.objects if name.startswith(("hints/", "sessions/"))]
    filters = {filtered_segment(name) for name in backend.objects if name.startswith("filters/")}
    assert filters <= {
        named[1]
        for named in map(parse_name, backend.objects)
        if named is not None and named[0] == "segment"
    }
    # And it can be worked with.
    await take(repository, {1: 1}, next(iter(good), None))
