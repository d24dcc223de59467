"""The service thaws jobs that a dump left frozen because all its processes were killed."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from icecore.events import discard
from icecore.host.jobs.job import Job
from icecore.host.kernel import freezer, frozen
from icecore.service.api import server
from tests.roundtrip.test_restless import freeze
from tests.service.api.conftest import ALICE, Go, Node, Session, ended, make_job

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="only root marks cgroups")


@pytest.fixture
def job(node: Node, process: int) -> Iterator[Job]:
    """A job with a cgroup of its own."""
    made = make_job(node.state, "cold", ALICE, pid=process)
    group = freezer.make_group(made.instance)
    assert group is not None, "this machine has no cgroups that can be written to"
    (group / "cgroup.procs").write_text(f"{process}\n")
    job = Job(made.directory, replace(made.description, group=str(group)))
    job.save()
    try:
        yield job
    finally:
        frozen.thaw(group)
        os.kill(process, signal.SIGKILL)
        assert freezer.remove_group(group, 10)


@pytest.fixture
def guard() -> Iterator[subprocess.Popen[bytes]]:
    """Yield the process that would thaw the job, if it lived."""
    with subprocess.Popen(["sleep", "600"]) as running:
        try:
            yield running
        finally:
            running.kill()


def leave_frozen(group: Path, guard: subprocess.Popen[bytes]) -> None:
    assert freezer.mark(group, guard.pid)
    freeze(group)


async def thawed(group: Path, seconds: float = 10.0) -> bool:
    """Return whether the group is thawed within ``seconds``."""
    for _ in range(int(seconds / 0.05)):
        if not frozen.is_frozen(group):
            return True
        await asyncio.sleep(0.05)
    return False


def test_a_job_is_thawed_when_the_operation_is_lost(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch, job: Job, guard: subprocess.Popen[bytes]
) -> None:
    monkeypatch.setenv("STUB", "crash")
    group = job.group
    assert group is not None

    async def test(session: Session) -> None:
        leave_frozen(group, guard)
        guard.kill()
        await asyncio.to_thread(guard.wait)
        async with session.post("/v1/jobs/cold/dump", json={}) as response:
            id = str((await response.json())["id"])
        assert (await ended(session, id))["state"] == "failed"
        assert await thawed(group)

    go(test)


def test_a_job_is_thawed_in_time_and_not_while_its_guard_lives(
    node: Node, monkeypatch: pytest.MonkeyPatch, job: Job, guard: subprocess.Popen[bytes]
) -> None:
    """At the start of the service, and every minute."""
    monkeypatch.setattr(server, "_TEND_SECONDS", 0.1)
    group = job.group
    assert group is not None

    async def test() -> None:
        leave_frozen(group, guard)
        tending = asyncio.create_task(server._tend(node.service, discard))
        try:
            assert not await thawed(group, 1.0)
            guard.kill()
            await asyncio.to_thread(guard.wait)
            assert await thawed(group)
            freeze(group)  # by somebody else: the mark is gone
            assert not await thawed(group, 1.0)
        finally:
            tending.cancel()

    asyncio.run(test())
