"""One caller, or one slow repository, does not stop the others."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest

from icecore.service.api import service
from icecore.service.api.service import Where
from tests.service.api.conftest import Go, Node, Session


def test_a_slow_repository_stops_its_own_caller_alone(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(service, "_STORED_PER_CALLER", 2)
    monkeypatch.setattr(service, "_STORED_SECONDS", 0.3)
    answers, began = threading.Event(), []
    known = node.backing.snapshots
    slow = [True]

    def snapshots(where: Where) -> Any:
        if slow[0]:
            began.append(1)
            answers.wait(20)
        return known(where)

    monkeypatch.setattr(node.backing, "snapshots", snapshots)
    one, other = node.token("one", "admin"), node.token("other", "admin")

    async def test(session: Session) -> None:
        async def status(headers: dict[str, str]) -> tuple[int, str]:
            async with session.get(f"{node.url}/v1/snapshots", headers=headers) as answer:
                return answer.status, answer.headers.get("Retry-After", "")

        try:
            found = await asyncio.gather(*(status(one) for _ in range(5)))
            assert {code for code, _ in found} == {503}
            assert all(int(after) >= 1 for _, after in found)
            assert len(began) == 2  # the threads that this caller has
            slow[0] = False
            assert (await status(other))[0] == 200
            assert (await status(one))[0] == 503  # both still wait
        finally:
            answers.set()
        await asyncio.sleep(0.1)
        assert (await status(one))[0] == 200

    go(test)
