"""What is left of a response once it is sent."""

from __future__ import annotations

import gc
import shutil
import tracemalloc
from contextlib import AsyncExitStack

from tests.service.api.conftest import Go, Node, Session, make_job

_CLIENTS = 40
_URL = "/v1/openapi.json"


def test_a_connection_keeps_no_answer(node: Node, go: Go) -> None:
    """Hundreds of clients that poll for lists kept one each in the service's memory."""

    async def test(session: Session) -> None:
        async with session.get(_URL) as response:
            size = len(await response.read())
        async with AsyncExitStack() as stack:
            clients = [
                await stack.enter_async_context(Session(node.socket)) for _ in range(_CLIENTS)
            ]
            tracemalloc.start()
            stack.callback(tracemalloc.stop)
            for client in clients:
                async with client.get(_URL) as response:
                    assert len(await response.read()) == size
            gc.collect()
            traces = tracemalloc.take_snapshot().traces
        kept = sum(trace.size for trace in traces if size <= trace.size < 2 * size)
        assert kept < _CLIENTS // 4 * size

    go(test)


def test_nothing_is_kept_of_instances_that_were_removed(node: Node, go: Go) -> None:
    """A supervised job has a new instance whenever it is restored, and keeps the last few."""
    for number in range(3):
        make_job(node.state, f"over-{number}", 0)

    async def test(session: Session) -> None:
        async def listed() -> set[str]:
            async with session.get("/v1/jobs?all=true") as response:
                items = (await response.json())["items"]
            return {item["instance"] for item in items if item["name"].startswith("over-")}

        found = await listed()
        assert len(found) == 3
        assert await listed() == found <= set(node.service.ended)
        for instance in found:
            shutil.rmtree(node.state / "jobs" / instance)
        assert await listed() == set()
        gc.collect()
        assert not found & set(node.service.ended)

    go(test)
