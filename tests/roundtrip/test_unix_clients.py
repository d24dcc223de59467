"""Connections of unix sockets that lead out of the tree: the peers of the original notice nothing
of its dumps, and a restored instance finds the connections closed and accepts new ones.
"""

from __future__ import annotations

import shutil
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from icecore.dumper.dump import dump
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.host.criu.program import SOCKETS_PLUGIN
from icecore.host.jobs.job import Job
from icecore.host.jobs.namespaces import Isolation
from icecore.host.jobs.registry import Registry
from icecore.restorer.options import RestoreOptions
from icecore.restorer.restore import restore
from tests.host.target import eventually
from tests.roundtrip.conftest import Trip

pytestmark = [
    pytest.mark.criu,
    pytest.mark.skipif(
        not SOCKETS_PLUGIN.exists(), reason="needs a C compiler when icecore is built"
    ),
]

#: Answers each number with its square, in a thread for each connection, and writes down how each
#: connection ended. Does not accept while there is a file "closed".
SERVER = """
import os, socket, sys, threading, time
home, kind = sys.argv[1], getattr(socket, sys.argv[2])
listener = socket.socket(socket.AF_UNIX, kind)
listener.bind(f"{home}/server"); listener.listen(64)
def serve(one):
    how = "end"
    try:
        while data := one.recv(64):
            one.sendall(b"%d\\n" % int(data) ** 2)
    except OSError as error:
        how = type(error).__name__
    with open(f"{home}/log", "a") as log:  # not open in the window: no restore puts it back
        log.write(how + "\\n")
    one.close()
print("there", flush=True)
while True:
    while os.path.exists(f"{home}/closed"):
        time.sleep(0.01)
    one, _ = listener.accept()
    threading.Thread(target=serve, args=(one,), daemon=True).start()
"""

#: Logs to a daemon as the C library's syslog does: connected, and again once a send fails. Reads
#: from a connection to a service, after a word was sent into it, once a file is there.
CLIENT = """
import os, socket, sys, time
home = sys.argv[1]
def connected():
    one = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        one.connect(f"{home}/daemon")
    except OSError:
        one.close()
        return None
    return one
service = socket.socket(socket.AF_UNIX); service.connect(f"{home}/service")
log, number = connected(), 0
print("there", flush=True)
while not os.path.exists(f"{home}/read"):
    number += 1
    for _ in range(2):
        try:
            if log is not None:
                log.send(b"%d" % number)
                break
            raise OSError
        except OSError:
            log = connected()
    time.sleep(0.01)
heard = b""
while data := service.recv(100):
    heard += data
print("heard", heard.decode(), flush=True)
try:
    service.send(b"x")
except OSError as error:
    print(type(error).__name__, flush=True)
while True:
    time.sleep(1)
"""


@dataclass
class Client(threading.Thread):
    """Asks without a pause, and compares each answer."""

    place: Path
    kind: int
    stop: threading.Event
    #: Questions until it connects anew; 0: never.
    each: int = 0
    answers: int = 0
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__(daemon=True)

    def __hash__(self) -> int:
        return id(self)

    def run(self) -> None:
        try:
            while not self.stop.is_set():
                with socket.socket(socket.AF_UNIX, self.kind) as one:
                    one.settimeout(20)
                    one.connect(str(self.place))
                    self._ask(one)
        except OSError as error:
            self.failures.append(f"{type(error).__name__}: {error}")

    def _ask(self, one: socket.socket) -> None:
        asked = 0
        while not self.stop.is_set() and not (self.each and asked == self.each):
            asked += 1
            number = self.answers + asked
            one.sendall(b"%d" % number)
            if (answer := one.recv(64)) != b"%d\n" % number**2:
                self.failures.append(f"{number}: {answer!r}")
                return
        self.answers += asked


@dataclass
class World:
    """A registry, and a directory for sockets, whose path is short."""

    trip: Trip
    registry: Registry
    home: Path

    def start(self, code: str, *arguments: str, isolation: Isolation | None = None) -> Job:
        words = [sys.executable, "-c", code, str(self.home), *arguments]
        job = self.registry.start(words, name="sockets", cwd="/", isolation=isolation)
        assert eventually(lambda: "there" in job.log_path("stdout").read_text())
        return job

    def dump(self, job: Job, **options: object) -> str:
        target = Target(job.pid, job.name, record=job.record())
        chosen = DumpOptions(**options)  # type: ignore[arg-type]
        return dump(
            self.trip.repository, self.trip.loop, target, chosen, criu=self.trip.criu
        ).snapshot

    def restore(self, snapshot: str, **options: object) -> Job:
        restored = restore(
            self.trip.repository,
            self.trip.loop,
            snapshot,
            RestoreOptions(**options),  # type: ignore[arg-type]
            criu=self.trip.criu,
            registry=self.registry,
        )
        restored.wait_resident(60)
        assert restored.job is not None
        return restored.job


@pytest.fixture
def world(trip: Trip, tmp_path: Path) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="icecore-unix-") as home:
        registry = Registry(tmp_path / "jobs")
        try:
            yield World(trip, registry, Path(home))
        finally:
            for one in registry.instances():
                if one.alive:
                    one.kill(9)
                    one.wait(10)


@pytest.mark.parametrize(
    ("kind", "dumps", "mode"),
    [
        pytest.param("SOCK_STREAM", 3, "full", id="stream"),
        pytest.param("SOCK_SEQPACKET", 2, "lazy", id="seqpacket"),
        pytest.param("SOCK_STREAM", 10, "full", id="ten", marks=pytest.mark.torture),
    ],
)
def test_clients_outside_notice_nothing_and_the_restored_server_serves_new_ones(
    world: World, kind: str, dumps: int, mode: str
) -> None:
    job = world.start(SERVER, kind)
    stop = threading.Event()
    number = getattr(socket, kind)
    # Some connect anew all the time: connections come and go while CRIU lists them.
    clients = [Client(world.home / "server", number, stop, each=50 * (i % 2)) for i in range(8)]
    for client in clients:
        client.start()
    snapshots = []
    for _ in range(dumps):
        before = [client.answers for client in clients]
        snapshots.append(world.dump(job))
        assert eventually(
            lambda before=before: all(
                client.answers > was or not client.each
                for client, was in zip(clients, before, strict=True)
            )
        ), [client.failures for client in clients]
    assert not any(client.failures for client in clients), [c.failures for c in clients]
    stop.set()
    for client in clients:
        client.join(30)
    assert all(client.answers for client in clients)
    assert not any(client.failures for client in clients), [c.failures for c in clients]
    job.kill(9)
    job.wait(20)
    (world.home / "log").write_text("")
    world.restore(snapshots[-1], mode=mode)
    # Those that were open in the window have ended for the server: it reads the end, or cannot
    # answer what it had read. It serves new ones.
    assert eventually(lambda: len((world.home / "log").read_text().split()) >= 4)
    assert set((world.home / "log").read_text().split()) <= {"end", "BrokenPipeError"}
    with ExitStack() as stack:
        for i in range(8):
            one = stack.enter_context(socket.socket(socket.AF_UNIX, number))
            one.settimeout(20)
            one.connect(str(world.home / "server"))
            one.sendall(b"%d" % i)
            assert one.recv(64) == b"%d\n" % i**2


@pytest.mark.parametrize("root", [False, True])
def test_clients_in_another_network_namespace(world: World, root: bool) -> None:
    """What a server has accepted belongs to the namespace of its client."""
    isolation = Isolation(network=True, root=root)
    job = world.start(SERVER, "SOCK_STREAM", isolation=isolation)
    with socket.socket(socket.AF_UNIX) as one:
        one.settimeout(20)
        one.connect(str(world.home / "server"))
        one.sendall(b"7")
        assert one.recv(64) == b"49\n"
        snapshot = world.dump(job)
        one.sendall(b"8")
        assert one.recv(64) == b"64\n"
        job.kill(9)
        job.wait(20)
    shutil.rmtree(world.home)
    world.restore(snapshot)
    with socket.socket(socket.AF_UNIX) as new:
        new.settimeout(20)
        new.connect(str(world.home / "server"))
        new.sendall(b"9")
        assert new.recv(64) == b"81\n"


def test_connections_that_wait_to_be_accepted_stay_with_the_original(world: World) -> None:
    (world.home / "closed").touch()
    job = world.start(SERVER, "SOCK_STREAM")
    place = str(world.home / "server")
    with socket.socket(socket.AF_UNIX) as waiting:
        waiting.settimeout(20)
        waiting.connect(place)
        waiting.sendall(b"7")
        with socket.socket(socket.AF_UNIX) as gone:  # CRIU alone fails on one of these
            gone.connect(place)
        snapshot = world.dump(job)
        (world.home / "closed").unlink()
        assert waiting.recv(64) == b"49\n"
    job.kill(9)
    job.wait(20)
    world.restore(snapshot)
    with socket.socket(socket.AF_UNIX) as new:
        new.settimeout(20)
        new.connect(place)
        new.sendall(b"8")
        assert new.recv(64) == b"64\n"


@pytest.mark.parametrize("daemon_is_there", [True, False], ids=["daemon", "no-daemon"])
def test_a_client_of_services_outside(world: World, daemon_is_there: bool) -> None:
    with ExitStack() as stack:
        daemon = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
        daemon.bind(str(world.home / "daemon"))
        daemon.settimeout(20)
        service = stack.enter_context(socket.socket(socket.AF_UNIX))
        service.bind(str(world.home / "service"))
        service.listen()
        job = world.start(CLIENT)
        accepted, _ = service.accept()
        stack.enter_context(accepted)
        accepted.sendall(b"before the dump")
        snapshot = world.dump(job)
        first = int(daemon.recv(100))
        assert int(daemon.recv(100)) > first, "the original logs on"
        job.kill(9)
        job.wait(20)
        if not daemon_is_there:
            daemon.close()
            (world.home / "daemon").unlink()
        else:
            daemon.setblocking(False)
            with suppress(BlockingIOError):
                while True:
                    daemon.recv(100)
            daemon.settimeout(20)
        restored = world.restore(snapshot)
        if not daemon_is_there:
            time.sleep(0.2)
            daemon = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM))
            daemon.bind(str(world.home / "daemon"))
            daemon.settimeout(20)
        assert int(daemon.recv(100)) > 0, "it logs again"
        (world.home / "read").touch()
        out = restored.log_path("stdout")
        assert eventually(lambda: "BrokenPipeError" in out.read_text()), out.read_text()
        assert "heard before the dump\n" in out.read_text()
