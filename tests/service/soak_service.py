"""The node service of the soak, and the clients of its API."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from heapq import nlargest
from pathlib import Path
from statistics import median

from aiohttp import ClientError, ClientSession, ClientTimeout, TCPConnector

from icecore.errors import ServiceFailed
from icecore.remote.connection import Service
from icecore.service.api import operation_files as files
from tests.cli.conftest import Cli

CLIENTS = int(os.environ.get("ICECORE_SOAK_CLIENTS", "200"))
#: Requests per second of all clients.
_RATE = 2.5 * (os.cpu_count() or 1)
_ECHOES = 4.0
_START_SECONDS = 90.0
#: Number of the slowest answers in the report.
_SLOWEST = 60
#: The p99 of reads under load, against the p50 of the idle service.
_SLOWER = 10.0
_READS = ("/v1/jobs", "/v1/jobs?all=true", "/v1/operations", "/v1/snapshots", "/v1/self")
#: Answers at once. What a client waits for it is what this machine adds to every answer.
_ECHO = """
import asyncio, contextlib, os, sys
os.nice(-10)  # this and the next: as the service
with contextlib.suppress(OSError), open("/proc/self/autogroup", "w") as group:
    group.write("-10")
async def answer(reader, writer):
    with contextlib.suppress(asyncio.IncompleteReadError):
        await answers(reader, writer)
async def answers(reader, writer):
    while await reader.readuntil(b"\\r\\n\\r\\n"):
        writer.write(b"HTTP/1.1 200 OK\\r\\nContent-Length: 2\\r\\n\\r\\n{}")
async def main():
    server = await asyncio.start_server(answer, "127.0.0.1", int(sys.argv[1]))
    await server.serve_forever()
asyncio.run(main())
"""


def note_resident(pid: int, noted: list[tuple[float, int]]) -> None:
    """Note how much memory a process has, in KiB."""
    with suppress(OSError, StopIteration):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        size = next(line for line in lines if line.startswith("VmRSS:"))
        noted.append((time.monotonic(), int(size.split()[1])))


def kinds_of_memory(pid: int) -> str:
    """Say what kinds of resident memory a process has."""
    with suppress(OSError):
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        return ", ".join(" ".join(line.split()) for line in lines if line.startswith("Rss"))
    return "it has ended"


@dataclass
class Serving:
    """``icecore serve``, on a socket and on the loopback.

    Attributes:
        starts: How often it was started.
        resident: (monotonic time, KiB) of the present process.
    """

    cli: Cli
    environment: dict[str, str]
    starts: int = 0
    resident: list[tuple[float, int]] = field(default_factory=list)
    process: subprocess.Popen[bytes] | None = None

    def __post_init__(self) -> None:
        self.socket = str(self.cli.folder / "service.sock")
        self.port = free_port()
        self.environment["ICECORE_SERVICE_CONNECTIONS"] = str(5 * CLIENTS)  # a client's share: 1/4

    def start(self) -> None:
        """Start it, and wait until it answers."""
        words = ("serve", "--socket", self.socket, "--listen", f"127.0.0.1:{self.port}")
        with open(self.cli.folder / "service.err", "ab") as err:
            self.process = subprocess.Popen(
                self.cli.command(*words, "--plain-loopback"),
                env=self.environment,
                cwd=self.cli.folder,
                stdin=subprocess.DEVNULL,
                stdout=err,
                stderr=err,
                start_new_session=True,  # as under a service manager
            )
        self.starts += 1
        self.resident.clear()
        end = time.monotonic() + _START_SECONDS
        while True:
            with suppress(ServiceFailed):
                Service(self.socket).get("/v1/healthz")
                return
            log = (self.cli.folder / "service.err").read_text()[-2000:]
            assert self.process.poll() is None and time.monotonic() < end, log
            time.sleep(0.05)

    def kill(self) -> None:
        """Kill it, and nothing else: its operations continue."""
        if self.process is not None:
            self.process.kill()
            self.process.wait(30)

    def look(self) -> None:
        """Note how much memory it has."""
        if self.process is not None:
            note_resident(self.process.pid, self.resident)

    def kill_supervisor(self, job: str) -> None:
        """Kill the process that supervises a job."""
        for directory, stored in self._operations():
            if stored.job == job:
                _kill_worker(directory)

    def end(self) -> None:
        """Kill it and what supervises its jobs."""
        self.kill()
        for directory, _ in self._operations():
            _kill_worker(directory)

    def token(self) -> str:
        """Make a token that may read everything."""
        return self.cli.run("-q", "token", "add", "soak", "--role", "read").stdout.strip()

    def _operations(self) -> Iterator[tuple[Path, files.Stored]]:
        for directory in (self.cli.folder / "state" / "service" / "operations").glob("*"):
            stored = files.read_stored(directory)
            if stored is not None and files.read_result(directory) is None:
                yield directory, stored


def _kill_worker(directory: Path) -> None:
    process = files.read_process(directory)
    if process is not None and not files.is_free(directory):
        with suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)


def free_port() -> int:
    """Return a port of the loopback on which nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as found:
        return int(found.getsockname()[1])


@dataclass
class Clients:
    """Clients that read from the API, each on a connection of its own, in one thread.

    Attributes:
        busy: Jobs run.
        over: The clients shall end.
        waited: Seconds until each answer, of the idle and of the busy service.
        by_path: The same of the busy service, by path.
        echoed: The same of a server that has nothing to do, while the service is busy.
        slowest: (seconds, monotonic time of the request, path) of the slowest answers of the busy
            service.
        others: Numbers of other outcomes.
    """

    service: Serving
    echo: int
    token: str
    busy: bool = False
    over: bool = False
    waited: dict[bool, list[float]] = field(default_factory=lambda: {False: [], True: []})
    by_path: dict[str, list[float]] = field(default_factory=lambda: {path: [] for path in _READS})
    echoed: list[float] = field(default_factory=list)
    slowest: list[tuple[float, float, str]] = field(default_factory=list)
    others: Counter[str] = field(default_factory=Counter)

    @classmethod
    @contextmanager
    def running(cls, service: Serving) -> Iterator[Clients]:
        """Run the clients of a service."""
        found = cls(service, free_port(), service.token())
        with subprocess.Popen(
            [sys.executable, "-c", _ECHO, str(found.echo)], start_new_session=True
        ) as echo:
            thread = threading.Thread(target=lambda: asyncio.run(found._all()), daemon=True)
            thread.start()
            try:
                yield found
            finally:
                found.over = True
                thread.join(60)
                echo.kill()

    def about(self, since: float) -> str:
        """Return a line of what the clients saw, and a line of the slowest answers.

        Args:
            since: Monotonic time from which the times of requests count.
        """
        idle, busy = self.waited[False], self.waited[True]
        paths = "; ".join(
            f"{path} p50 {1e3 * median(one):.1f} ms, p99 {1e3 * p99(one):.1f} ms"
            for path, one in self.by_path.items()
            if one
        )
        return (
            f"clients: idle p50 {1e3 * median(idle):.1f} ms of {len(idle)},"
            f" busy p50 {1e3 * median(busy):.1f} ms, p99 {1e3 * p99(busy):.1f} ms of {len(busy)},"
            f" echo p99 {1e3 * p99(self.echoed):.1f} ms; {dict(self.others)}; {paths}\nslowest: "
            + "; ".join(
                f"{began - since:.1f} {path} {1e3 * waited:.0f} ms"
                for waited, began, path in sorted(self.slowest, key=lambda one: one[1])
            )
        )

    def require_answers(self, report: str) -> None:
        """Require that nearly all reads were answered, and in time. What this machine adds to every
        answer meanwhile is not the service's.
        """
        busy = self.waited[True]
        bound = _SLOWER * median(self.waited[False]) + p99(self.echoed)
        assert p99(busy) <= bound, f"reads are slow: {p99(busy):.3f} s > {bound:.3f} s\n{report}"
        assert self.others["error"] == 0, f"the service failed\n{report}"

    async def _all(self) -> None:
        async with asyncio.TaskGroup() as group:
            for _ in range(CLIENTS):
                group.create_task(self._read())
            group.create_task(self._echo())

    async def _read(self) -> None:
        """Be one client. A service that is down refuses connections, which is no late answer."""
        address = f"http://127.0.0.1:{self.service.port}"
        headers = {"Authorization": f"Bearer {self.token}"}
        async with _session(headers) as session:
            while not self.over:
                await asyncio.sleep(random.uniform(0, 2 * CLIENTS / _RATE))
                busy, began, path = self.busy, time.monotonic(), random.choice(_READS)
                try:
                    async with session.get(address + path) as answer:
                        await answer.read()
                except TimeoutError:
                    self._note(busy, path, began)
                    self.others["late"] += 1
                except (ClientError, OSError):
                    self.others["down"] += 1
                else:
                    if answer.status == 200:
                        self._note(busy, path, began)
                    else:
                        self.others[f"{answer.status}"] += 1
                        self.others["error"] += answer.status not in (429, 503)

    def _note(self, busy: bool, path: str, began: float) -> None:
        waited = time.monotonic() - began
        self.waited[busy].append(waited)
        if busy:
            self.by_path[path].append(waited)
            self.slowest = nlargest(_SLOWEST, [*self.slowest, (waited, began, path)])

    async def _echo(self) -> None:
        async with _session({}) as session:
            while not self.over:
                await asyncio.sleep(random.uniform(0, 2 / _ECHOES))
                began = time.monotonic()
                with suppress(ClientError, OSError):
                    async with session.get(f"http://127.0.0.1:{self.echo}/") as answer:
                        await answer.read()
                    if self.busy:
                        self.echoed.append(time.monotonic() - began)


def _session(headers: dict[str, str]) -> ClientSession:
    connector = TCPConnector(limit=1)
    return ClientSession(headers=headers, connector=connector, timeout=ClientTimeout(total=30))


def p99(values: list[float]) -> float:
    """Return the 99th percentile."""
    return sorted(values)[int(0.99 * (len(values) - 1))]
