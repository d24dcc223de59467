"""The page over the service of `tests.service.api`, and the command line of `tests.cli`."""

from __future__ import annotations

import asyncio
import signal
import socket
import time
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
from aiohttp import ClientSession

from icecore.node.backing import as_record
from icecore.service.api import models
from icecore.service.api.app import build
from icecore.service.api.service import Where
from icecore.service.facts.readings import Reading, Replica
from icecore.service.page import routes
from tests.cli.conftest import SECONDS, Cli, cli, needs_criu, until, zygote
from tests.service.api import conftest as api
from tests.service.api.conftest import Node, listening, process, state

__all__ = ["cli", "needs_criu", "process", "state", "zygote"]


@dataclass
class Backing(api.FakeBacking):
    """Repositories without any, as the page reads them."""

    def reading(self, where: Where) -> Reading:
        records = [as_record(one) for one in self.snapshots(where)]
        return Reading(time.time(), 1, records)

    def details(self, where: Where, snapshot: str) -> models.SnapshotDetails:
        one = next(one for one in self.known if one.snapshot == snapshot)
        hostile = "<script>alert(1)</script>"
        return models.SnapshotDetails(
            snapshot=one,
            details={
                **dict.fromkeys(("host", "architecture", "kernel", "criu"), hostile),
                "by_codec": {"lz4": 3},
                "own_namespaces": ["pid"],
                "gpus": [{"name": hostile, "uuid": "GPU-1"}],
                "resident_bytes": 1,
                "moved_bytes": 2,
            },
            processes=[{"pid": 1, "parent": 0, "threads": 1, "command": [hostile]}],
            regions=[{"space": "process", "key": "1", "kind": "heap", "regions": 1, "bytes": 4096}],
            files=[{"path": hostile, "policy": "checked", "bytes": 1}],
        )

    def replicas(self, where: Where) -> list[Replica]:
        return [Replica("/replica", 2, 90.0), Replica("/gone", error="it is not there")]


node = pytest.fixture(name="node")(api.node.__wrapped__)  # with the backing of the page


@pytest.fixture(autouse=True)
def _backing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(api, "FakeBacking", Backing)


Go = Callable[[Callable[[ClientSession], Coroutine[Any, Any, None]]], None]


@pytest.fixture
def go(node: Node) -> Go:
    """Run a test against a service with the page."""

    def run(test: Callable[[ClientSession], Coroutine[Any, Any, None]]) -> None:
        async def whole() -> None:
            app = build(node.service, routes.routes(), [routes.errors_as_pages])
            routes.prepare(app)
            async with listening(node, app) as session:
                await asyncio.wait_for(test(session), 60)

        asyncio.run(whole())

    return run


@pytest.fixture
def service(cli: Cli) -> Iterator[str]:
    """A service on loopback, for administrators with tokens; the socket is ``run/s``."""
    cli.run("init")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    (cli.folder / "run").mkdir(mode=0o755)
    process = cli.start(
        *("serve", "--socket", str(cli.folder / "run" / "s"), "--plain-loopback"),
        *("--listen", f"127.0.0.1:{port}"),
    )
    try:

        def answers() -> bool:
            assert process.poll() is None, process.communicate(timeout=5)
            with socket.socket() as client:
                return client.connect_ex(("127.0.0.1", port)) == 0

        until(answers, "the service listens")
        yield f"http://127.0.0.1:{port}"
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=SECONDS)
