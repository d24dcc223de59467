"""A service in this process whose operations are stubs, with jobs of two users and of root."""

from __future__ import annotations

import asyncio
import subprocess
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import pytest
from aiohttp import ClientSession, UnixConnector, web

from icecore.config import Config, ServiceSettings
from icecore.host.jobs import log_trimming
from icecore.host.jobs.description import Description, boot_id
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.host.kernel import procfs
from icecore.node.backing import as_record
from icecore.service.api import models
from icecore.service.api.app import build
from icecore.service.api.server import guarded
from icecore.service.api.service import Service, Where
from icecore.snapshots import addressing

ALICE, BOB = 4242, 4343
WORKER = str(Path(__file__).with_name("stub_worker.py"))


def snapshot_of(number: int, job: str, owner: int | None, **more: Any) -> models.Snapshot:
    return models.Snapshot(
        snapshot=f"{number:032x}",
        job=job,
        lineage=f"{owner or 0:032x}",
        parent="",
        created=1e9 + number,
        logical=10,
        changed=5,
        stored=3,
        device=0,
        window_seconds=0.1,
        tags=[],
        pinned=False,
        quarantined="",
        owner=owner,
        **more,
    )


@dataclass
class FakeBacking:
    """Repositories without any."""

    known: list[models.Snapshot] = field(default_factory=list)
    own: bool = False
    prepared: list[str] = field(default_factory=list)

    def where(self, uid: int | None) -> Where:
        if uid is None or not self.own:
            return Where("/all", shared=True)
        return Where(f"/of/{uid}", shared=False)

    def snapshots(self, where: Where) -> list[models.Snapshot]:
        if where.shared:
            return self.known
        return [one for one in self.known if where.location == f"/of/{one.owner}"]

    def find(self, snapshots: Sequence[models.Snapshot], name: str) -> models.Snapshot:
        found = addressing.resolve([as_record(one) for one in snapshots], name)
        return next(one for one in snapshots if one.snapshot == found.snapshot)

    def details(self, where: Where, snapshot: str) -> models.SnapshotDetails:
        one = next(one for one in self.known if one.snapshot == snapshot)
        return models.SnapshotDetails(snapshot=one, details={}, processes=[], regions=[], files=[])

    def statistics(self, where: Where) -> models.Repository:
        return models.Repository(
            location=where.location, id="0" * 32, encrypted=False, snapshots=0, quarantined=0,
            logical=0, chunks=0, chunk_bytes=0, live=0, dead=0, dedup_ratio=1.0,
            compression_ratio=1.0, objects={}, object_bytes={}, jobs=[], lineages=[], codecs=[],
        )  # fmt: skip

    def prepare(self, where: Where) -> None:
        self.prepared.append(where.location)

    def staging(self) -> list[models.Staging]:
        return []


def make_job(state: Path, name: str, user: int, *, pid: int = 0, log_limit: int = 0) -> Job:
    """Record an instance with a process, or that has ended."""
    instance = f"i{len(list((state / 'jobs').glob('*'))):08x}"
    directory = state / "jobs" / instance
    directory.mkdir(parents=True, mode=0o700)
    known = Description(
        name=name, instance=instance, command=["sleep", "1"], cwd="/", isolation=Isolation(),
        binds=[], created=time.time(), boot=boot_id(), owner=(1, 1), pid=pid or 1,
        start_time=procfs.start_time(pid) if pid else -1, user=user, user_name=f"user{user}",
        log_limit=log_limit,
    )  # fmt: skip
    job = Job(directory, known)
    job.save()
    (directory / "stdout.log").write_bytes(f"out of {name}\n".encode())
    (directory / "stderr.log").write_bytes(b"err\n")
    if log_limit:
        log_trimming.write_starts(directory, {})
    if not pid:
        (directory / "status").write_text("exited 3\n")
    return job


@dataclass
class Node:
    """A service and what it is made of."""

    state: Path
    backing: FakeBacking
    config: Config
    service: Service
    socket: str = ""
    url: str = ""

    def token(self, name: str, role: Any, **more: Any) -> dict[str, str]:
        """Make a token; return the header that it is sent in."""
        return {"Authorization": f"Bearer {self.service.tokens.add(name, role, **more)}"}


def made(state: Path, backing: FakeBacking, config: Config) -> Service:
    return Service.made(config, Registry(state), backing, version="0", worker=WORKER)


@pytest.fixture
def state(tmp_path: Path) -> Path:
    path = tmp_path / "state"
    (path / "jobs").mkdir(parents=True, mode=0o700)
    path.chmod(0o700)
    return path


@pytest.fixture
def process() -> Iterator[int]:
    """A process that stands for the jobs'; TERM does not end it."""
    with subprocess.Popen(["sh", "-c", "trap '' TERM; exec sleep 600"]) as running:
        try:
            yield running.pid
        finally:
            running.kill()


@pytest.fixture
def node(state: Path, process: int) -> Node:
    """Jobs and snapshots of alice, bob and root; nothing listens yet."""
    for name, user in (("train", ALICE), ("secret", BOB), ("system", 0)):
        make_job(state, name, user, pid=process)
    make_job(state, "old", ALICE)
    make_job(state, "gone", BOB)
    backing = FakeBacking(
        [
            snapshot_of(1, "train", ALICE),
            snapshot_of(2, "secret", BOB),
            snapshot_of(3, "system", 0),
            snapshot_of(4, "ancient", None),
        ]
    )
    config = Config(service=ServiceSettings(requests=100_000))
    return Node(state, backing, config, made(state, backing, config))


class Session:
    """A client on the unix socket; what begins with ``http://127`` goes by TCP.

    Args:
        path: The socket.
    """

    def __init__(self, path: str) -> None:
        self._unix = ClientSession("http://x", connector=UnixConnector(path))
        self._tcp = ClientSession()

    def request(self, method: str, url: str, **more: Any) -> Any:
        own = self._tcp if url.startswith("http://127") else self._unix
        return own.request(method, url, **more)

    def get(self, url: str, **more: Any) -> Any:
        return self.request("GET", url, **more)

    def post(self, url: str, **more: Any) -> Any:
        return self.request("POST", url, **more)

    def put(self, url: str, **more: Any) -> Any:
        return self.request("PUT", url, **more)

    def delete(self, url: str, **more: Any) -> Any:
        return self.request("DELETE", url, **more)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *about: object) -> None:
        await self._tcp.close()
        await self._unix.close()


@asynccontextmanager
async def listening(node: Node, app: web.Application | None = None) -> AsyncIterator[Session]:
    """Serve on a unix socket and a port of loopback; lend a session that uses the socket."""
    service = node.service
    await service.operations.recover()
    runner = web.AppRunner(app or build(service), access_log=None, shutdown_timeout=0.5)
    await runner.setup()
    assert runner.server is not None
    node.socket = str(node.state.parent / "s")
    loop = asyncio.get_running_loop()
    make = guarded(runner.server, service.connections)
    unix = await loop.create_unix_server(make, node.socket)
    tcp = await loop.create_server(make, "127.0.0.1", 0)
    node.url = f"http://127.0.0.1:{tcp.sockets[0].getsockname()[1]}"
    try:
        async with Session(node.socket) as session:
            yield session
    finally:
        service.stopping = True
        unix.close()
        tcp.close()
        await runner.cleanup()
        await service.operations.close()


Go = Callable[[Callable[[Session], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def go(node: Node) -> Go:
    """Run a test against the service."""

    def run(test: Callable[[Session], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            async with listening(node) as session:
                await asyncio.wait_for(test(session), 60)

        asyncio.run(whole())

    return run


async def ended(session: Session, id: str, **headers: Any) -> dict[str, Any]:
    """Return an operation once it has ended."""
    for _ in range(600):
        async with session.get(f"/v1/operations/{id}", **headers) as response:
            found: dict[str, Any] = await response.json()
            assert response.status == 200, found
            if found["ended"]:
                return found
        await asyncio.sleep(0.02)
    raise AssertionError(f"operation {id} does not end")
