"""One caller, or one slow repository, does not stop the others."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import pytest
from msgspec.structs import replace

from icecore.host.jobs.job import Job
from icecore.host.kernel import procfs
from icecore.service.api import job_handlers, service
from icecore.service.api.service import Threads, Where
from tests.service.api.conftest import ALICE, BOB, Go, Node, Session, make_job


def test_a_slow_repository_stops_its_own_caller_alone(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node.service, "_storage", Threads(8, 2))
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


#: Prints its child's pid, and keeps it traced: it stays a zombie that nobody else can reap.
TRACE = """
import ctypes, sys, time
libc = ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]
assert libc.ptrace(0x4206, int(sys.argv[1]), None, None) == 0, ctypes.get_errno()  # PTRACE_SEIZE
print("traced", flush=True)
time.sleep(120)
"""


@contextmanager
def job_that_kill_does_not_end(node: Node) -> Iterator[Job]:
    """A job whose init waits in the kernel for a process that another one traces."""
    words = ["unshare", "--pid", "--fork", "sh", "-c", "sleep 600 & wait"]
    with subprocess.Popen(words) as outer:
        try:
            init = _child_of(outer.pid)
            tracing = [sys.executable, "-c", TRACE, str(_child_of(init))]
            with subprocess.Popen(tracing, stdout=subprocess.PIPE) as tracer:
                try:
                    assert tracer.stdout is not None and tracer.stdout.readline() == b"traced\n"
                    yield make_job(node.state, "stubborn", ALICE, pid=init)
                finally:
                    tracer.kill()
        finally:
            for child in procfs.children(outer.pid):
                with suppress(ProcessLookupError):  # it ends with what the tracer held
                    os.kill(child, signal.SIGKILL)


def _child_of(pid: int) -> int:
    until = time.monotonic() + 10
    while not (found := procfs.children(pid)):
        assert time.monotonic() < until
        time.sleep(0.01)
    return found[0]


def test_waiting_for_a_job_that_does_not_end_delays_nobody(node: Node, go: Go) -> None:
    alice = node.token("alice", "operate", uid=ALICE)
    bob = node.token("bob", "operate", uid=BOB)

    async def test(session: Session) -> None:
        async def kill() -> str:
            url = f"{node.url}/v1/jobs/stubborn/signal"
            async with session.post(url, json={"signal": "KILL"}, headers=alice) as response:
                assert response.status == 200
                return str((await response.json())["state"])

        with job_that_kill_does_not_end(node) as job:
            kills = [asyncio.create_task(kill()) for _ in range(20)]
            await asyncio.sleep(1)
            assert job.alive and not any(one.done() for one in kills)
            for headers in (bob, alice):
                began = time.monotonic()
                async with session.get(f"{node.url}/v1/jobs", headers=headers) as response:
                    assert response.status == 200
                assert time.monotonic() - began < 5
        assert set(await asyncio.gather(*kills)) == {"ended"}

    go(test)


def test_a_job_that_kill_does_not_end_is_shown_as_it_is(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_handlers, "_KILL_SECONDS", 0.2)

    async def test(session: Session) -> None:
        with job_that_kill_does_not_end(node):
            async with session.post(
                "/v1/jobs/stubborn/signal", json={"signal": "KILL"}
            ) as response:
                assert response.status == 200
                assert (await response.json())["state"] == "running"

    go(test)


@pytest.mark.parametrize("at_once", [1, 20])
def test_removals_delay_nobody(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch, at_once: int
) -> None:
    goes_on, began = threading.Event(), []

    def remove(job: Job) -> None:
        began.append(job)
        goes_on.wait(20)

    monkeypatch.setattr(node.service.registry, "remove", remove)
    alice = node.token("alice", "operate", uid=ALICE)
    bob = node.token("bob", "operate", uid=BOB)

    async def test(session: Session) -> None:
        async def removed() -> int:
            async with session.delete(f"{node.url}/v1/jobs/old", headers=alice) as response:
                return int(response.status)

        removals = [asyncio.create_task(removed()) for _ in range(at_once)]
        try:
            await asyncio.sleep(0.5)
            for headers in (bob, alice):
                began_at = time.monotonic()
                async with session.get(f"{node.url}/v1/jobs", headers=headers) as response:
                    assert response.status == 200
                assert time.monotonic() - began_at < 5
            assert len(began) == min(at_once, 2)  # the threads that this caller has
        finally:
            goes_on.set()
        assert set(await asyncio.gather(*removals)) == {204}

    go(test)


def test_a_job_that_starts_is_followed_without_a_thread(node: Node, go: Go, process: int) -> None:
    """Its output comes once it runs."""
    pid, began = os.getpid(), procfs.start_time(os.getpid())
    starting = make_job(node.state, "starting", ALICE)
    (starting.directory / "status").unlink()
    known = replace(starting.description, pid=0, start_time=-1, owner=(pid, began))
    Job(starting.directory, known).save()
    alice = node.token("alice", "operate", uid=ALICE)

    async def test(session: Session) -> None:
        url = f"{node.url}/v1/jobs/starting/logs?follow=true"
        async with session.get(url, headers=alice) as response:
            first = json.loads(await asyncio.wait_for(response.content.readline(), 10))
            assert base64.b64decode(first["data"]) == b"out of starting\n"
            await response.content.readline()
            Job(starting.directory, known).with_pid(process)
            log = starting.log_path("stdout")
            log.write_bytes(log.read_bytes() + b"more\n")
            second = json.loads(await asyncio.wait_for(response.content.readline(), 10))
            assert base64.b64decode(second["data"]) == b"more\n"
            os.kill(process, signal.SIGKILL)
            last = json.loads(await asyncio.wait_for(response.content.readline(), 10))
            assert last == {"ended": {"how": "killed by SIGKILL", "code": None, "signal": 9}}

    go(test)
