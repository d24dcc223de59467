"""The service raises its own limit on descriptors and its own priority, and not those of jobs."""

from __future__ import annotations

import asyncio
import os
import resource
from typing import Any

import pytest

from icecore.service.api import server
from icecore.service.api.caller import Caller, Role
from icecore.service.api.routing import Call
from icecore.service.api.starting import identity_of
from tests.service.api.conftest import Node


def test_jobs_of_tokens_do_not_get_what_was_raised(node: Node) -> None:
    node.service.operations.descriptors = (300, 400)
    node.service.operations.priority = 7
    for uid in (None, os.getuid()):
        caller = Caller("token a", "token", Role.ADMIN, uid, sees_all=True, jobs=("*",))
        call = Call(node.service, None, caller)  # type: ignore[arg-type]
        identity = asyncio.run(identity_of(call))
        assert (identity.limits[resource.RLIMIT_NOFILE], identity.nice) == ((300, 400), 7)


def test_the_service_raises_its_limit_and_its_priority(
    node: Node, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    room = len(os.listdir("/proc/self/fd")) + 100  # earlier tests may have left some open
    own = (min(max(256, room), before[1]), before[1])
    nice = os.getpriority(os.PRIO_PROCESS, 0)
    seen = []

    async def serve_on(*about: Any) -> None:
        await asyncio.to_thread(look)

    def look() -> None:
        seen.append(resource.getrlimit(resource.RLIMIT_NOFILE))
        seen.append(os.getpriority(os.PRIO_PROCESS, 0))

    monkeypatch.setattr(server, "_serve_on", serve_on)
    monkeypatch.setattr(server, "_unix_socket", lambda path: None)
    resource.setrlimit(resource.RLIMIT_NOFILE, own)
    try:
        asyncio.run(server.serve(node.service, Any, lambda event: None))  # type: ignore[arg-type]
        assert node.service.operations.descriptors == own
        raised = node.service.operations.priority is not None  # only root may
        assert raised == (os.geteuid() == 0)
        assert seen == [(own[1], own[1]), max(-20, nice - 10) if raised else nice]
        assert os.getpriority(os.PRIO_PROCESS, 0) == nice
        assert resource.getrlimit(resource.RLIMIT_NOFILE) == own
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)
