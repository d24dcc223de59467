"""Writers, readers and collectors over one repository, interleaved at every store call, against a
plain model: what is reachable can always be read. And clients whose storage lies about the log:
each sees a continuation of what it saw, or an error.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from icecore.errors import Damaged, NotFound, RollbackDetected, SessionFenced, StoreError
from icecore.store.backend.base import Backend, Buffer, ObjectInfo
from icecore.store.backend.faulty import Outcome
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.keys import Parameters
from icecore.store.format.names import log_name
from icecore.store.format.state import LogState, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.chain import Log
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session
from icecore.store.log.watermark import Watermark
from icecore.store.maintenance.check import check
from icecore.store.maintenance.findings import Report
from tests.store.adversary import Archive, Shown
from tests.store.miniature import collect, put, read, sound, take

T = TypeVar("T")
Content = dict[int, int]


class GatedBackend(Backend):
    """Holds every call back until the test lets it through, which so decides who makes the next
    store call.
    """

    direct = True
    where = "behind a gate"

    def __init__(self, inner: MemoryBackend) -> None:
        self.inner = inner
        self.open = False
        self.arrivals = 0
        #: What becomes of the next call that is let through.
        self.next = Outcome.PASS
        self.waiting: list[asyncio.Future[None]] = []

    async def _pass(self) -> bool:
        """Wait at the gate; return whether the reply to this call will be lost.

        Raises:
            StoreError: The call fails.
        """
        self.arrivals += 1
        if self.open:
            return False
        gate: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.waiting.append(gate)
        await gate
        outcome, self.next = self.next, Outcome.PASS
        if outcome is Outcome.FAIL:
            raise StoreError("injected failure")
        return outcome is Outcome.LOSE

    async def _reply(self, work: Awaitable[T]) -> T:
        """Pass a call on."""
        try:
            lost = await self._pass()
        except BaseException:
            work.close()  # type: ignore[attr-defined]
            raise
        try:
            return await work
        finally:
            if lost:
                raise StoreError("injected loss of a reply")

    def admit(self) -> None:
        """Let the call through that has waited longest."""
        while self.waiting:
            gate = self.waiting.pop(0)
            if not gate.done():
                gate.set_result(None)
                return

    async def create(self, name: str, parts: Sequence[Buffer]) -> None:
        await self._reply(self.inner.create(name, parts))

    async def get(self, name: str, *, limit: int = 1 << 30) -> bytes:
        return await self._reply(self.inner.get(name, limit=limit))

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        await self._reply(self.inner.get_into(name, offset, out))

    def read_into(self, name: str, offset: int, out: memoryview) -> None:
        self.inner.read_into(name, offset, out)

    async def size(self, name: str) -> int:
        return await self._reply(self.inner.size(name))

    async def list(self, prefix: str) -> AsyncIterator[ObjectInfo]:
        if await self._pass():
            raise StoreError("injected loss of a listing")
        async for info in self.inner.list(prefix):
            yield info

    async def delete(self, name: str) -> None:
        await self._reply(self.inner.delete(name))

    async def delete_many(self, names: Sequence[str]) -> None:
        await self._reply(self.inner.delete_many(names))


@dataclass
class Actor:
    """A process: a client with a view of its own, doing one thing, stopped before each store call."""

    kind: str
    backend: GatedBackend
    task: asyncio.Task[object]
    content: Content = field(default_factory=dict)
    session: Session | None = None
    record: SnapshotRecord | None = None
    troubled: bool = False
    fencing: bool = False
    fences: int = 0


class World:
    """A repository, its actors, and what the model knows of them."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.inner = MemoryBackend()
        self.repository = self.run(
            StoredRepository.create(self.inner, Parameters(shard_bytes=1 << 16))
        )
        self.snapshots: dict[str, Content] = {}
        self.actors: list[Actor] = []
        self.readers: list[tuple[Session, Content]] = []
        #: Snapshots of writers that vanished: each may have been committed, or not.
        self.orphaned: set[str] = set()
        #: How often sessions may have been fenced although they are alive.
        self.fences = 0
        self.jumped = 0
        self.clock = time.time_ns
        self._graves: list[asyncio.Future[None]] = []

    def jump(self, seconds: int) -> None:
        """All clocks jump, forwards or back: an imagined silence, or an unnoticed one."""
        self.jumped += seconds * 10**9
        self.fences += 1
        time.time_ns = lambda: self.clock() + self.jumped

    def trouble(self, actor: Actor, outcome: Outcome) -> None:
        """The actor's next call fails, or its reply is lost; its work may then fail."""
        actor.backend.next = outcome
        actor.troubled = True

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def act(self, kind: str, what: Callable[[StoredRepository, Actor], Awaitable[object]]) -> Actor:
        """Start an actor; it stops before its first store call."""
        backend = GatedBackend(self.inner)
        known = asyncio.Event()

        async def body() -> object:
            # What opening reads never changes: it is not worth a step.
            backend.open = True
            repository = await StoredRepository.open(backend)
            backend.open = False
            await known.wait()
            return await what(repository, actor)

        async def start() -> asyncio.Task[object]:
            return asyncio.ensure_future(body())

        # A collector that fences everybody may be at work already, and come to it only later.
        fences = self.fences - any(other.fencing for other in self.actors)
        actor = Actor(kind, backend, self.run(start()), fences=fences)
        self.actors.append(actor)
        known.set()
        self.run(self._settle(actor, backend.arrivals))
        return actor

    def step(self, actor: Actor, calls: int) -> None:
        """Let an actor make some store calls."""
        for _ in range(calls):
            if actor.task.done():
                break
            before = actor.backend.arrivals
            actor.backend.admit()
            self.run(self._settle(actor, before))
        if actor.task.done():
            self.finish(actor)

    async def _settle(self, actor: Actor, arrivals: int) -> None:
        """Wait until the actor stands before its next call, or has none."""
        for turn in itertools.count():
            await asyncio.sleep(0 if turn < 20 else 0.001)
            if actor.task.done() or actor.backend.arrivals > arrivals:
                return
            if turn >= 25 and actor.backend.waiting:
                return  # others of its calls wait; the one that was let through was the last of its kind

    def finish(self, actor: Actor) -> None:
        """An actor has finished: record what it achieved."""
        if actor not in self.actors:
            return
        self.actors.remove(actor)
        try:
            result = actor.task.result()
        except (SessionFenced, NotFound):
            return  # fenced while it worked, or its base was forgotten before it began
        except StoreError:
            # A store that fails, or an object that a collector deleted because it was told that
            # this session was dead.
            assert actor.troubled or actor.kind == "collector" or self.fences > actor.fences
            if actor.record is not None:
                self.orphaned.add(actor.record.snapshot)
            return
        if actor.kind == "writer":
            assert isinstance(result, str)
            self.snapshots[result] = actor.content
        elif actor.kind == "checker":
            assert isinstance(result, Report)
            fenced = actor.troubled or self.fences > actor.fences
            assert result.sound or fenced, [str(damage) for damage in result.damages]
        elif actor.kind == "reader":
            assert isinstance(result, Session)
            self.readers.append((result, actor.content))

    def write(self, content: Content, base: str | None) -> None:
        async def body(repository: StoredRepository, actor: Actor) -> object:
            async with await repository.begin(base, "writer", beat_seconds=None) as session:
                record, entries = await put(repository, session, content)
                actor.record = record
                await session.commit(record, entries)
                return record.snapshot

        self.act("writer", body).content = content

    def start_reader(self, snapshot: str) -> None:
        async def body(repository: StoredRepository, actor: Actor) -> object:
            return await repository.read_session(snapshot, beat_seconds=None)

        self.act("reader", body).content = self.snapshots[snapshot]

    def end_reader(self, number: int) -> None:
        session, _ = self.readers.pop(number % len(self.readers))
        session._backend.open = True  # type: ignore[attr-defined]
        self.run(session.abort())

    def collect(self, *, compact_below: float, fence_seconds: float) -> None:
        async def body(repository: StoredRepository, actor: Actor) -> object:
            return await collect(
                repository, compact_below=compact_below, fence_seconds=fence_seconds
            )

        if fence_seconds == 0:
            self.fences += 1
        self.act("collector", body).fencing = fence_seconds == 0

    def look(self) -> None:
        async def body(repository: StoredRepository, actor: Actor) -> object:
            return await check(repository)

        self.act("checker", body)

    def forget(self, snapshots: list[str]) -> None:
        for record in self.run(self.repository.forget(snapshots)):
            del self.snapshots[record.snapshot]

    def crash(self, actor: Actor) -> None:
        """An actor vanishes where it stands."""
        self.actors.remove(actor)
        # Its calls never return; whoever waits for them must not be collected as garbage before the
        # end.
        self._graves += actor.backend.waiting
        actor.backend.waiting.clear()
        actor.task.cancel()

        async def gone() -> None:
            for _ in range(5):
                await asyncio.sleep(
                    0
                )  # its clean-up handlers stop before their first store call, as if they had never run

        self.run(gone())

    def check(self) -> None:
        """The invariant: what a listed snapshot or a live reader reaches can be read; what was
        committed is listed.
        """

        async def body() -> None:
            state = (await self.repository.log.newest()).state
            listed = {
                record.snapshot: record
                for record in await catalog.everything(state, self.repository.log.pages)
            }
            # A writer that has not been told yet may have committed.
            pending = {
                actor.record.snapshot: actor.content
                for actor in self.actors
                if actor.record is not None
            }
            assert (
                set(self.snapshots)
                <= set(listed)
                <= set(self.snapshots) | set(pending) | self.orphaned
            )
            for snapshot, record in listed.items():
                content = await read(self.repository, record)
                assert content == self.snapshots.get(snapshot, pending.get(snapshot, content))
            for session, content in self.readers:
                if state.session(session.id) is not None:
                    assert session.base is not None
                    assert await read(self.repository, session.base) == content

        self.run(body())

    def end(self) -> None:
        """Let all actors finish, then collect: exactly what the model says is left."""
        dice = random.Random(1)
        while self.actors:
            self.step(dice.choice(self.actors), 3)
        self.check()
        while self.readers:
            self.end_reader(0)
        # A dead session that seems to be of the future, as clocks went back, is fenced once its
        # time has passed.
        self.jump(10**9)
        self.run(collect(self.repository, fence_seconds=0))
        self.run(sound(self.repository, unreached=0))
        self.check()
        pending = asyncio.all_tasks(self.loop)
        for task in pending:
            task.cancel()
        if pending:
            self.loop.run_until_complete(asyncio.wait(pending, timeout=1))
        self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        self.loop.run_until_complete(self.loop.shutdown_default_executor())
        self.loop.close()


contents = st.dictionaries(st.integers(0, 4), st.integers(0, 5), min_size=1, max_size=4)


class Sessions(RuleBasedStateMachine):
    """Random interleavings."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World()

    @rule(content=contents, based=st.booleans(), number=st.integers(0, 100))
    def write(self, content: Content, based: bool, number: int) -> None:
        if len(self.world.actors) < 6:
            ids = list(self.world.snapshots)
            self.world.write(content, ids[number % len(ids)] if based and ids else None)

    @rule(content=contents)
    def snapshot(self, content: Content) -> None:
        """Take a whole snapshot at once, in another process."""
        self.world.snapshots[self.world.run(take(self.world.repository, content))] = content

    @rule(number=st.integers(0, 100))
    def open_reader(self, number: int) -> None:
        if self.world.snapshots and len(self.world.actors) < 6:
            self.world.start_reader(list(self.world.snapshots)[number % len(self.world.snapshots)])

    @rule(number=st.integers(0, 100))
    def close_reader(self, number: int) -> None:
        if self.world.readers:
            self.world.end_reader(number)

    @rule(compact=st.sampled_from([0.0, 0.6]), fence=st.sampled_from([0.0, 3600.0, 3600.0]))
    def collector(self, compact: float, fence: float) -> None:
        if sum(actor.kind == "collector" for actor in self.world.actors) < 2:
            self.world.collect(compact_below=compact, fence_seconds=fence)

    @rule(number=st.integers(0, 100), outcome=st.sampled_from([Outcome.FAIL, Outcome.LOSE]))
    def trouble(self, number: int, outcome: Outcome) -> None:
        if self.world.actors:
            self.world.trouble(self.world.actors[number % len(self.world.actors)], outcome)

    @rule(seconds=st.sampled_from([-86_400, -60, 60, 7200, 10**7]))
    def jump(self, seconds: int) -> None:
        self.world.jump(seconds)

    @rule()
    def checker(self) -> None:
        if len(self.world.actors) < 6:
            self.world.look()

    @rule(keep=st.integers(0, 3), number=st.integers(0, 100))
    def forget(self, keep: int, number: int) -> None:
        ids = list(self.world.snapshots)
        random.Random(number).shuffle(ids)
        self.world.forget(ids[keep:])

    @rule(number=st.integers(0, 100), calls=st.sampled_from([1, 1, 2, 3, 5, 8, 20]))
    def step(self, number: int, calls: int) -> None:
        if self.world.actors:
            self.world.step(self.world.actors[number % len(self.world.actors)], calls)

    @rule(number=st.integers(0, 100))
    def crash(self, number: int) -> None:
        if self.world.actors and number % 4 == 0:
            actor = self.world.actors[number % len(self.world.actors)]
            if actor.record is not None:
                self.world.orphaned.add(actor.record.snapshot)
            self.world.crash(actor)

    @invariant()
    def reachable_reads_back(self) -> None:
        self.world.check()

    def teardown(self) -> None:
        try:
            self.world.end()
        finally:
            time.time_ns = self.world.clock


TestSessions = Sessions.TestCase
TestSessions.settings = settings(
    max_examples=25, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.torture
@pytest.mark.timeout(3600)
class TestSessionsLong(Sessions.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=1500,
        stateful_step_count=60,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


#: How many entries the log keeps in the world of the adversary, so that its forks soon leave that
#: range.
KEPT = 16


class Client:
    """A client in the adversary's world: what it is shown, and what it remembers across restarts."""

    def __init__(self, world: Deceit) -> None:
        self._world = world
        self.shown = Shown(world.inner, world.archive)
        self.watermark = Watermark()
        #: The newest entry that it has taken for true, and what that listed.
        self.believed = b""
        self.listed: set[str] = set()
        self.restart()

    def restart(self) -> None:
        """Start the next process of the same client."""
        first = self._world.first
        log = Log(self.shown, first.keys.log, watermark=self.watermark)
        self.repository = StoredRepository(self.shown, first.config, first.keys, log, first.emit)

    async def believe(self) -> None:
        """Record what it now believes. It continues what it believed before, unless all evidence
        has been trimmed since.

        It continues what it took for true before, unless all that tells has been trimmed since.
        """
        seen = self.watermark.load()
        digest = bytes.fromhex(seen.digest)
        if digest == self.believed:
            return
        archive = self._world.archive
        entry = archive.entries[digest]
        listed = {
            record.snapshot
            for record in await catalog.everything(entry.state, self.repository.log.pages)
        }
        if self.believed:
            before = archive.entries[self.believed]
            assert seen.generation > before.generation
            if not archive.continues(digest, self.believed):
                assert seen.generation >= before.generation + KEPT
            else:
                assert listed >= self.listed  # nobody forgets anything here
        self.believed, self.listed = digest, listed


class Deceit:
    """A repository whose storage lies, and its clients."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.inner = MemoryBackend()
        self.first = self.run(StoredRepository.create(self.inner, Parameters(shard_bytes=1 << 16)))
        self.archive = Archive(self.first.keys.log)
        self.root = self.archive.add(log_name(1), self.inner.objects.pop(log_name(1)))
        self.clients = [Client(self) for _ in range(3)]
        for client in self.clients:
            client.shown.show(self.root, KEPT)

    def run(self, work: Awaitable[T]) -> T:
        return self.loop.run_until_complete(asyncio.wait_for(work, 60))

    def attempt(self, client: Client, work: Awaitable[object]) -> bool:
        """Let a client do something that may fail, but not silently; return whether it succeeded."""
        succeeded = False
        try:
            self.run(work)
            succeeded = True
        except (RollbackDetected, Damaged, SessionFenced, StoreError):
            pass
        self.run(client.believe())
        return succeeded

    def look(self, client: Client, *, prove: bool) -> bool:
        return self.attempt(client, client.repository.log.newest(prove=prove))

    def advance(self, client: Client, entries: int) -> None:
        async def step(state: LogState, pages: Pages) -> LogState:
            return msgspec.structs.replace(state)

        async def body() -> None:
            for _ in range(entries):
                await client.repository.log.transact(step, "step")

        self.attempt(client, body())

    def take(self, client: Client, content: Content) -> None:
        async def body() -> None:
            snapshot = await take(client.repository, content)
            await client.believe()
            assert snapshot in client.listed

        self.attempt(client, body())

    def continuation(self, client: Client, number: int) -> bytes:
        """Return an entry that continues what a client believes."""
        tips = [
            digest
            for digest in self.archive.data
            if not client.believed or self.archive.continues(digest, client.believed)
        ]
        return tips[number % len(tips)]


class Deceits(RuleBasedStateMachine):
    """An adversary that shows each client anything."""

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        for name, value in {
            "entries.KEPT_ENTRIES": KEPT,
            "chain._TRIM_EVERY": 8,
            "entries.ANCHOR_EVERY": 8,
            "entries.REMEMBERED": 4,
            "reading.REMEMBERED": 4,
            "chain.REMEMBERED": 4,
        }.items():
            self.patch.setattr(f"icecore.store.log.{name}", value)
        self.world = Deceit()

    def _client(self, number: int) -> Client:
        return self.world.clients[number % len(self.world.clients)]

    @rule(number=st.integers(0, 2), content=contents)
    def take(self, number: int, content: Content) -> None:
        self.world.take(self._client(number), content)

    @rule(number=st.integers(0, 2), entries=st.sampled_from([1, 2, 5, 12, 20]))
    def advance(self, number: int, entries: int) -> None:
        self.world.advance(self._client(number), entries)

    @rule(number=st.integers(0, 2), prove=st.booleans())
    def look(self, number: int, prove: bool) -> None:
        self.world.look(self._client(number), prove=prove)

    @rule(number=st.integers(0, 2))
    def restart(self, number: int) -> None:
        self._client(number).restart()

    @rule(
        number=st.integers(0, 2),
        seed=st.integers(0, 1000),
        how=st.sampled_from(["withhold", "withhold_newest", "hide", "mix"]),
    )
    def lie(self, number: int, seed: int, how: str) -> None:
        getattr(self._client(number).shown, how)(random.Random(seed))

    @rule(
        number=st.integers(0, 2),
        tip=st.integers(0, 10_000),
        keep=st.sampled_from([1, 5, KEPT, 1000]),
    )
    def show_any(self, number: int, tip: int, keep: int) -> None:
        """Show another fork, or an older state, trimmed more or less than a client may."""
        known = list(self.world.archive.data)
        self._client(number).shown.show(known[tip % len(known)], keep)

    @rule(
        number=st.integers(0, 2),
        tip=st.integers(0, 10_000),
        more=st.integers(0, 20),
        prove=st.booleans(),
    )
    def show_the_truth(self, number: int, tip: int, more: int, prove: bool) -> None:
        """A log that continues what a client believes, and is not trimmed too far, is accepted."""
        client = self._client(number)
        client.restart()
        newest = self.world.continuation(client, tip)
        client.shown.show(newest, KEPT + more)
        assert self.world.look(client, prove=prove)
        assert client.believed == newest

    @rule(number=st.integers(0, 2), tip=st.integers(0, 10_000), prove=st.booleans())
    def show_another(self, number: int, tip: int, prove: bool) -> None:
        """A log that does not continue what a client believes is refused, unless all evidence may
        have been trimmed.
        """
        client = self._client(number)
        archive = self.world.archive
        if not client.believed:
            return
        seen = archive.entries[client.believed].generation
        others = [
            digest
            for digest, entry in archive.entries.items()
            if entry.generation < seen + KEPT and not archive.continues(digest, client.believed)
        ]
        if others:
            client.restart()
            client.shown.show(others[tip % len(others)], 1000)
            assert not self.world.look(client, prove=prove)

    def teardown(self) -> None:
        self.patch.undo()
        self.world.loop.run_until_complete(self.world.loop.shutdown_asyncgens())
        self.world.loop.run_until_complete(self.world.loop.shutdown_default_executor())
        self.world.loop.close()


TestDeceits = Deceits.TestCase
TestDeceits.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)


@pytest.mark.torture
@pytest.mark.timeout(3600)
class TestDeceitsLong(Deceits.TestCase):  # type: ignore[name-defined, misc]
    settings = settings(
        max_examples=2000,
        stateful_step_count=80,
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )
