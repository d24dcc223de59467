"""Events and logs as they come: resumed, left by their readers, and followed to the end."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import socket
import subprocess
import sys
import threading
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import msgspec
import pytest

from icecore.errors import Denied
from icecore.host.jobs import log_trimming
from icecore.host.jobs.job import Job
from icecore.host.jobs.logs import LogPiece, Stream
from icecore.host.kernel.peer import Peer
from icecore.remote.connection import Service
from icecore.remote.jobs import RemoteRegistry
from icecore.service.api import connections, job_handlers, peers, routing, server
from tests.service.api.conftest import ALICE, Go, Node, Session, ended, make_job
from tests.service.api.test_operations import pid_of

Event = tuple[str, str, Any]


async def read(response: Any, most: int = 1000) -> list[Event]:
    """Return the server-sent events of a response: id, name, data."""
    found: list[Event] = []
    fields: dict[str, str] = {}
    async for raw in response.content:
        line = raw.decode().rstrip("\n")
        if line.startswith(":"):
            continue
        if line:
            key, _, value = line.partition(": ")
            fields[key] = value
        elif fields:
            found.append((fields.get("id", ""), fields["event"], json.loads(fields["data"])))
            fields = {}
            if len(found) == most:
                break
    return found


async def begin(session: Session, monkeypatch: pytest.MonkeyPatch, stub: str) -> str:
    monkeypatch.setenv("STUB", stub)
    async with session.post("/v1/jobs/train/dump", json={}) as response:
        return str((await response.json())["id"])


def test_events_resume(node: Node, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(session: Session) -> None:
        id = await begin(session, monkeypatch, "echo")
        async with session.get(f"/v1/operations/{id}/events") as response:
            assert response.content_type == "text/event-stream"
            whole = await read(response)
        assert [name for _, name, _ in whole] == ["stub.step"] * 5 + ["end"]
        assert [data["number"] for _, _, data in whole[:5]] == list(range(5))
        assert whole[-1][2]["state"] == "succeeded"
        for place in range(5):
            headers = {"Last-Event-ID": whole[place][0]}
            async with session.get(f"/v1/operations/{id}/events", headers=headers) as response:
                assert await read(response) == whole[place + 1 :]
        async with session.get(f"/v1/operations/{id}/events?text=true") as response:
            records = [data["do"] for _, _, data in (await read(response))[:-1]]
        assert records == ["event", "line"] * 5
        async with session.get(
            f"/v1/operations/{id}/events", headers={"Last-Event-ID": "x"}
        ) as response:
            assert response.status == 400

    go(test)


def test_an_operation_outlives_its_client(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def test(session: Session) -> None:
        id = await begin(session, monkeypatch, "wait")
        async with session.get(f"/v1/operations/{id}/events") as response:
            assert await read(response, 1)
            response.close()  # the client hangs up
        await asyncio.sleep(0.2)
        async with session.get(f"/v1/operations/{id}") as response:
            assert (await response.json())["state"] == "running"
        (node.state / "go").touch()
        assert (await ended(session, id))["state"] == "succeeded"
        assert len(node.service.connections) >= 1

    go(test)


def test_cancel_over_http(node: Node, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(session: Session) -> None:
        id = await begin(session, monkeypatch, "wait")
        await asyncio.to_thread(pid_of, node.state, id)
        async with session.post(f"/v1/operations/{id}/cancel", json={"signal": "KILL"}) as response:
            assert response.status == 400
        async with session.post(f"/v1/operations/{id}/cancel") as response:
            assert response.status == 200
        done = await ended(session, id)
        assert (done["state"], done["exit_status"]) == ("cancelled", 130)

    go(test)


def test_logs(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        async with session.get("/v1/jobs/train/logs?stream=stdout") as response:
            assert response.content_type == "application/octet-stream"
            assert await response.read() == b"out of train\n"
        async with session.get("/v1/jobs/train/logs?stdout=4") as response:
            lines = [json.loads(line) for line in (await response.text()).splitlines()]
        assert [(one["stream"], base64.b64decode(one["data"])) for one in lines] == [
            ("stdout", b"of train\n"),
            ("stderr", b"err\n"),
        ]
        async with session.get("/v1/jobs/old/logs?follow=true") as response:
            lines = [json.loads(line) for line in (await response.text()).splitlines()]
        assert lines[-1] == {"ended": {"how": "exited 3", "code": 3, "signal": None}}

    go(test)


def test_what_was_removed_of_a_log_is_told_and_counts(node: Node, go: Go) -> None:
    """A client that comes again asks for what follows, and misses nothing more."""
    log = min(node.state.glob("jobs/*/stdout.log"))
    log.write_bytes(b"x" * (1 << 20))
    log_trimming.write_starts(log.parent, {})
    log_trimming.trim(log.parent, 1 << 16)
    gone = (1 << 20) - (1 << 16)

    async def test(session: Session) -> None:
        async with session.get("/v1/jobs/train/logs?stream=stdout") as response:
            assert await response.read() == b"x" * (1 << 16)
        for offset in (0, 5000, gone - 1):
            async with session.get(f"/v1/jobs/train/logs?stdout={offset}") as response:
                lines = [json.loads(line) for line in (await response.text()).splitlines()]
            first, *others = lines
            assert first["removed"] == gone - offset
            assert base64.b64decode(first["data"]) == b"x" * (1 << 16)
            assert not any("removed" in line for line in others)
        async with session.get(f"/v1/jobs/train/logs?stdout={gone + 1}") as response:
            first = json.loads(await response.content.readline())
        assert "removed" not in first and len(base64.b64decode(first["data"])) == (1 << 16) - 1

        def remote() -> list[tuple[str, int, int]]:
            job = RemoteRegistry(Service(node.socket)).find("train")
            return [(one.stream, one.removed, len(one.data)) for one in job.logs()]

        assert await asyncio.to_thread(remote) == [("stdout", gone, 1 << 16), ("stderr", 0, 4)]

    go(test)


def test_the_service_trims_logs_in_a_thread(
    node: Node, process: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Now and every few seconds, whatever goes wrong; those of jobs that have ended, too."""
    monkeypatch.setattr(server, "_TRIM_SECONDS", 0.05)
    jobs = [
        make_job(node.state, name, ALICE, pid=pid, log_limit=1 << 16)
        for name, pid in (("long", process), ("over", 0))
    ]
    trim, threads, events = log_trimming.trim, set[threading.Thread](), list[Any]()

    def told(directory: Path, limit: int, most: int) -> None:
        if not threads:
            threads.add(threading.current_thread())
            raise ValueError("as planned")
        threads.add(threading.current_thread())
        trim(directory, limit, most)

    monkeypatch.setattr(log_trimming, "trim", told)

    def starts() -> set[int]:
        return {log_trimming.read_starts(job.directory).get("stdout", 0) for job in jobs}

    async def test() -> None:
        trimming = asyncio.create_task(server._trim(node.service, events.append))
        try:
            for size in (1 << 20, 2 << 20):
                for job in jobs:
                    job.log_path("stdout").open("ab").write(b"x" * (1 << 20))
                    os.truncate(job.log_path("stdout"), size)
                for _ in range(200):
                    if starts() == {size - (1 << 16)}:
                        break
                    await asyncio.sleep(0.05)
                assert starts() == {size - (1 << 16)}
        finally:
            trimming.cancel()

    asyncio.run(test())
    assert threads and threading.main_thread() not in threads
    assert [event.fields for event in events] == [
        {"what": "trim", "error": "ValueError('as planned')"}
    ]


def test_a_log_is_followed(node: Node, go: Go) -> None:
    async def test(session: Session) -> None:
        async with session.get("/v1/jobs/train/logs?follow=true") as response:
            first = json.loads(await response.content.readline())
            await response.content.readline()
            path = min(node.state.glob("jobs/*/stdout.log"))
            path.write_bytes(path.read_bytes() + b"more\n")
            second = json.loads(await asyncio.wait_for(response.content.readline(), 10))
            assert base64.b64decode(second["data"]) == b"more\n"
            assert first["stream"] == "stdout"

    go(test)


def test_nobody_is_served_who_has_hung_up(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks, really = [0], job_handlers._read_log

    def counted(job: Job, stream: Stream, at: int) -> LogPiece | None:
        looks[0] += 1
        return really(job, stream, at)

    monkeypatch.setattr(job_handlers, "_read_log", counted)

    async def test(session: Session) -> None:
        async with session.get("/v1/jobs/train/logs?stream=stdout&follow=true") as response:
            await response.content.readexactly(4)
        before = looks[0]
        for _ in range(20):  # the service learns of it within a moment
            await asyncio.sleep(0.5)
            if looks[0] == before:
                return
            before = looks[0]
        raise AssertionError("the service reads on")

    go(test)


def lose(node: Node, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
    """Make the token ``some`` invalid."""
    if how == "removed":
        node.service.tokens.remove("some")
        return
    (token,) = node.service.tokens.all()
    expired = msgspec.structs.replace(token, expires=1.0)
    monkeypatch.setattr(node.service.tokens, "all", lambda: [expired])


@pytest.mark.parametrize("how", ["removed", "expired"])
@pytest.mark.parametrize("path", ["logs?follow=true", "logs?follow=true&stream=stdout", "events"])
@pytest.mark.parametrize("busy", [False, True])
def test_a_stream_ends_with_its_token(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch, how: str, path: str, busy: bool
) -> None:
    """Whether or not there is always something to send."""
    monkeypatch.setattr(routing, "BEAT_SECONDS", 0.3)

    async def write_on(log: Path) -> None:
        with open(log, "ab") as file:  # noqa: ASYNC230 - it takes no time
            while True:
                file.write(b'{"do":"event","event":{"event":"stub.step","at":1.0}}\n')
                file.flush()
                await asyncio.sleep(0)

    async def test(session: Session) -> None:
        headers = node.token("some", "read", uid=ALICE)
        id = await begin(session, monkeypatch, "wait")
        of = f"operations/{id}" if path == "events" else "jobs/train"
        url, writing = f"{node.url}/v1/{of}/{path}", None
        try:
            async with session.get(url, headers=headers) as response:
                assert await response.content.readline()
                if busy:
                    written = f"service/{of}/events.*" if path == "events" else "jobs/*/stdout.log"
                    writing = asyncio.create_task(write_on(min(node.state.glob(written))))
                lose(node, monkeypatch, how)
                rest = await asyncio.wait_for(response.content.read(), 10)
                assert b"ended" not in rest and b"event: end" not in rest
            async with session.get(url, headers=headers) as response:
                assert response.status == 401
        finally:
            if writing is not None:
                writing.cancel()
            (node.state / "go").touch()

    go(test)


def test_a_stream_goes_on_with_its_token(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(routing, "BEAT_SECONDS", 0.1)

    async def test(session: Session) -> None:
        headers = node.token("some", "read", uid=ALICE)
        url = f"{node.url}/v1/jobs/train/logs?follow=true"
        for more in ({"headers": headers}, {}):
            address = url if more else "/v1/jobs/train/logs?follow=true"
            async with session.get(address, **more) as response:
                with pytest.raises(TimeoutError):
                    await asyncio.wait_for(response.content.read(), 1)

    go(test)


# -- connections


def test_slow_clients_are_let_go(node: Node, go: Go, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "SLOW_SECONDS", 0.3)

    async def test(session: Session) -> None:
        async def ends(first: bytes) -> None:
            reader, writer = await asyncio.open_unix_connection(node.socket)
            writer.write(first)
            try:
                assert await asyncio.wait_for(reader.read(), 10) == b""
            except ConnectionResetError:
                pass
            writer.close()

        await ends(b"")  # says nothing
        await ends(b"GET /v1/self HTTP/1.1\r\nHo")  # never finishes
        async with session.get("/v1/self") as response:  # one that is quiet between requests
            assert response.status == 200

    go(test)


def test_a_reader_that_does_not_read_is_let_go(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "SLOW_SECONDS", 0.5)
    path = min(node.state.glob("jobs/*/stdout.log"))
    path.write_bytes(b"x" * (32 << 20))

    async def test(session: Session) -> None:
        before = len(node.service.connections)
        client = socket.socket(socket.AF_UNIX)
        client.setblocking(False)
        await asyncio.get_running_loop().sock_connect(client, node.socket)
        client.send(b"GET /v1/jobs/train/logs?stream=stdout HTTP/1.1\r\nHost: x\r\n\r\n")
        await asyncio.sleep(0.2)
        assert len(node.service.connections) == before + 1
        for _ in range(100):
            if len(node.service.connections) == before:
                break
            await asyncio.sleep(0.05)
        assert len(node.service.connections) == before
        client.close()

    go(test)


def test_connections_are_bounded(node: Node, go: Go) -> None:
    node.service.connections = connections.Connections(8)

    async def test(session: Session) -> None:
        held = [await asyncio.open_unix_connection(node.socket) for _ in range(5)]
        await asyncio.sleep(0.1)
        assert len(node.service.connections) == 2  # a quarter for one user
        reader, writer = held[-1]
        with pytest.raises(ConnectionError):
            writer.write(b"GET /v1/healthz HTTP/1.1\r\nHost: x\r\n\r\n")
            if await reader.read() == b"":
                raise ConnectionResetError
        for _, writer in held:
            writer.close()
        await asyncio.sleep(0.1)
        async with session.get("/v1/healthz") as response:
            assert response.status == 200

    go(test)


#: Connects as one uid after the other; prints how a request on the first connection ends.
AS_MANY = """
import ctypes, os, socket, sys
base, count, apart = map(int, sys.argv[1:])
if apart:
    assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
    print("apart", flush=True)
    sys.stdin.readline()  # until its ids are mapped
    os.setresuid(0, 0, 0)
    base = 0
held = []
for uid in range(base + 1, base + 1 + count):
    os.seteuid(uid)
    held.append(socket.socket(socket.AF_UNIX))
    held[-1].connect("s")
    os.seteuid(0)
held[0].sendall(b"GET /v1/jobs HTTP/1.1\\r\\nHost: x\\r\\n\\r\\n")
print(held[0].recv(4096), flush=True)
sys.stdin.readline()
"""


def _open_to_all(node: Node) -> None:
    node.state.parent.chmod(0o755)
    Path(node.socket).chmod(0o666)


def _map_ids(pid: int, ids: str) -> None:
    for name in ("uid_map", "gid_map"):
        Path(f"/proc/{pid}/{name}").write_text(ids)


@asynccontextmanager
async def connected_as(
    node: Node, base: int, count: int, *, apart: bool = False
) -> AsyncIterator[str]:
    """Connect as ``count`` users; yield the service's answer to the first.

    Args:
        apart: In a user namespace of its own.
    """
    _open_to_all(node)
    words = [sys.executable, "-c", AS_MANY, str(base), str(count), str(int(apart))]
    process = await asyncio.create_subprocess_exec(
        *words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=node.state.parent
    )
    assert process.stdin is not None and process.stdout is not None
    try:
        if apart:
            assert await process.stdout.readline() == b"apart\n"
            _map_ids(process.pid, f"0 {base} {count + 1}\n")
            process.stdin.write(b"\n")
        yield (await asyncio.wait_for(process.stdout.readline(), 20)).decode()
    finally:
        process.kill()
        await process.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
@pytest.mark.parametrize("apart", [True, False], ids=["in-a-namespace", "by-set-uid-programs"])
def test_subordinate_uids_have_no_shares(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """A user with 65536 of them has connections like any other."""
    node.service.connections = connections.Connections(40)
    ranges = node.state / "subuid"
    ranges.write_text("bob:nonsense\n" + ("" if apart else "alice:100000:65536\n"))
    monkeypatch.setattr(peers, "SUBORDINATE", ranges)

    async def test(session: Session) -> None:
        async with connected_as(node, 100000, 20, apart=apart) as answer:
            assert " 403 " in answer
            assert ("another user namespace" if apart else "subordinate uid of alice") in answer
            assert len(node.service.connections) == 10  # a quarter for all of them

    go(test)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
@pytest.mark.parametrize("apart", [True, False], ids=["in-a-namespace", "outside"])
def test_a_user_of_this_machine_is_served_whatever_subuid_says(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    monkeypatch.setattr(peers, "_asked", deque(maxlen=10))  # by other tests, just now
    ranges = node.state / "subuid"
    ranges.write_text("alice:1:65536\n")  # it contains the uids of others by mistake
    monkeypatch.setattr(peers, "SUBORDINATE", ranges)

    async def test(session: Session) -> None:
        async with connected_as(node, 0, 1, apart=apart) as answer:  # daemon
            assert " 200 " in answer

    go(test)


@pytest.mark.skipif(os.geteuid() != 0, reason="becomes other users")
def test_connections_are_left_for_root(node: Node, go: Go) -> None:
    node.service.connections = connections.Connections(8)

    async def test(session: Session) -> None:
        async with connected_as(node, 5000, 10) as answer:
            assert " 200 " in answer
            assert len(node.service.connections) == 6
            async with session.get("/v1/healthz") as response:
                assert response.status == 200

    go(test)


def test_a_peer_that_cannot_be_identified_has_no_connection(
    node: Node, go: Go, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For example, one with more groups than the kernel reports."""

    def refused(connection: socket.socket) -> Peer:
        raise Denied("the caller has too many groups")

    async def test(session: Session) -> None:
        monkeypatch.setattr(connections.Peer, "of", refused)
        reader, writer = await asyncio.open_unix_connection(node.socket)
        with suppress(ConnectionResetError):
            assert await asyncio.wait_for(reader.read(), 10) == b""
        writer.close()

    go(test)
