#!/usr/bin/env python3
"""S3 clients side by side against SeaweedFS on the loopback: MB/s and the client's CPU seconds per
GB, by requests in flight; rule: same bytes, same buffers.

Each client runs in a process of its own, all write the same random bytes and read into buffers that
each request owns, and none signs the payload (where it says "signed", it does). The server runs on
the same cores: MB/s say more of it than of the client, CPU s/GB are the client's alone. The rounds
of all clients alternate; the table has medians. ``make bench-store``.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from benchmarks.common import MIB, progress
from tests.seaweedfs import ACCESS_KEY, REGION, SECRET_KEY, running

CLIENTS = ("boto3", "aiobotocore", "obstore", "obstore signed")
IN_FLIGHT = (16, 32, 64)
BUCKET = "clients"
_CHILD_SECONDS = 300


class Cell(NamedTuple):
    """One measurement: ``put`` or ``get`` of whole objects, or ``range``s of them; ``size`` bytes a
    request.
    """

    operation: str
    size: int
    in_flight: int
    requests: int

    @property
    def title(self) -> str:
        """Its row."""
        what = {"put": "PUT", "get": "GET", "range": "ranged GET"}[self.operation]
        return f"{what} {self.size // MIB} MiB"


def cells(quick: bool) -> list[Cell]:
    """What is measured. 64 MiB objects with 16 in flight only: more would be gigabytes of buffers."""
    found = []
    for in_flight in IN_FLIGHT:
        found.append(Cell("put", 8 * MIB, in_flight, 16 if quick else 64))
        found.append(Cell("get", 8 * MIB, in_flight, 16 if quick else 128))
        found.append(Cell("range", MIB, in_flight, 64 if quick else 768))
        if in_flight == IN_FLIGHT[0] and not quick:
            found.append(Cell("put", 64 * MIB, in_flight, in_flight))
            found.append(Cell("get", 64 * MIB, in_flight, in_flight))
    return found


def key_of(size: int, number: int) -> str:
    """An object that is there to be read."""
    return f"source/{size}/{number % (64 if size == 8 * MIB else 16)}"


# -- one client, in a process of its own


class Client:
    """Reads and writes objects; each method is one request."""

    async def put(self, key: str, data: memoryview) -> None:
        """Create an object that is absent."""
        raise NotImplementedError

    async def get(self, key: str, start: int, out: memoryview, whole: bool) -> None:
        """Fill ``out`` from an object, the whole of it or a range."""
        raise NotImplementedError


def _config(in_flight: int) -> dict[str, Any]:
    return {
        "max_pool_connections": in_flight,
        "request_checksum_calculation": "when_required",
        "response_checksum_validation": "when_required",
        "retries": {"total_max_attempts": 1},
        "s3": {"addressing_style": "path", "payload_signing_enabled": False},
    }


class Boto3(Client):
    """boto3 in as many threads as requests in flight."""

    def __init__(self, endpoint: str, in_flight: int) -> None:
        import boto3
        from botocore.config import Config

        self._client = boto3.client("s3", **_login(endpoint), config=Config(**_config(in_flight)))
        self._pool = ThreadPoolExecutor(in_flight)

    async def put(self, key: str, data: memoryview) -> None:
        def work() -> None:
            self._client.put_object(Bucket=BUCKET, Key=key, Body=data.obj, IfNoneMatch="*")

        await asyncio.get_running_loop().run_in_executor(self._pool, work)

    async def get(self, key: str, start: int, out: memoryview, whole: bool) -> None:
        def work() -> None:
            wanted = {} if whole else {"Range": f"bytes={start}-{start + len(out) - 1}"}
            body = self._client.get_object(Bucket=BUCKET, Key=key, **wanted)["Body"]
            at = 0
            while at < len(out):
                at += body.readinto(out[at:])

        await asyncio.get_running_loop().run_in_executor(self._pool, work)


class Aiobotocore(Client):
    """aiobotocore in one event loop."""

    def __init__(self, client: Any) -> None:
        self._client = client

    async def put(self, key: str, data: memoryview) -> None:
        await self._client.put_object(Bucket=BUCKET, Key=key, Body=bytes(data), IfNoneMatch="*")

    async def get(self, key: str, start: int, out: memoryview, whole: bool) -> None:
        wanted = {} if whole else {"Range": f"bytes={start}-{start + len(out) - 1}"}
        reply = await self._client.get_object(Bucket=BUCKET, Key=key, **wanted)
        at = 0
        async with reply["Body"] as body:
            async for piece in body.raw_stream.content.iter_any():
                out[at : at + len(piece)] = piece
                at += len(piece)


class Obstore(Client):
    """obstore: object_store in Rust, with a thread pool of its own."""

    def __init__(self, endpoint: str, signed: bool) -> None:
        from obstore.store import S3Store

        self._store = S3Store(
            BUCKET,
            access_key_id=ACCESS_KEY,
            secret_access_key=SECRET_KEY,
            region=REGION,
            endpoint=endpoint,
            unsigned_payload=not signed,
            client_options={"allow_http": True, "timeout": "5min"},
            retry_config={"max_retries": 0},
        )

    async def put(self, key: str, data: memoryview) -> None:
        await self._store.put_async(key, data, mode="create", use_multipart=False)

    async def get(self, key: str, start: int, out: memoryview, whole: bool) -> None:
        reply = await self._store.get_async(
            key, options={} if whole else {"range": (start, start + len(out))}
        )
        at = 0
        async for piece in reply.stream(min_chunk_size=MIB):
            data = memoryview(piece)
            out[at : at + len(data)] = data
            at += len(data)


def _login(endpoint: str) -> dict[str, Any]:
    return {
        "endpoint_url": endpoint,
        "region_name": REGION,
        "aws_access_key_id": ACCESS_KEY,
        "aws_secret_access_key": SECRET_KEY,
    }


async def _client(name: str, endpoint: str, in_flight: int, stack: AsyncExitStack) -> Client:
    if name == "boto3":
        return Boto3(endpoint, in_flight)
    if name == "aiobotocore":
        from aiobotocore.config import AioConfig
        from aiobotocore.session import get_session

        made = get_session().create_client(
            "s3", **_login(endpoint), config=AioConfig(**_config(in_flight))
        )
        return Aiobotocore(await stack.enter_async_context(made))
    return Obstore(endpoint, signed=name.endswith("signed"))


async def _measure(name: str, endpoint: str, cell: Cell, run: str) -> dict[str, float]:
    loop = asyncio.get_running_loop()
    data = memoryview(os.urandom(cell.size)) if cell.operation == "put" else memoryview(b"")
    buffers = (
        [memoryview(bytearray(cell.size)) for _ in range(cell.in_flight)]
        if cell.operation != "put"
        else []
    )
    numbers = iter(range(cell.requests))
    async with AsyncExitStack() as stack:
        client = await _client(name, endpoint, cell.in_flight, stack)
        await client.get(
            key_of(8 * MIB, 0), 0, memoryview(bytearray(1024)), False
        )  # connects, logs in

        async def worker(who: int) -> None:
            for number in numbers:
                if cell.operation == "put":
                    await client.put(f"{run}/{cell.size}-{cell.in_flight}-{number}", data)
                elif cell.operation == "get":
                    await client.get(key_of(cell.size, number), 0, buffers[who], True)
                else:
                    offset = number * 5 % 8 * MIB
                    await client.get(key_of(8 * MIB, number), offset, buffers[who], False)

        before, began = resource.getrusage(resource.RUSAGE_SELF), loop.time()
        await asyncio.gather(*(worker(who) for who in range(cell.in_flight)))
        seconds, after = loop.time() - began, resource.getrusage(resource.RUSAGE_SELF)
    total = cell.size * cell.requests
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"mb_per_s": total / seconds / 1e6, "cpu_per_gb": cpu / total * 1e9}


def child(name: str, endpoint: str, cell: Cell, run: str) -> None:
    """One cell of one client; prints the figures."""
    print(
        json.dumps(
            asyncio.run(asyncio.wait_for(_measure(name, endpoint, cell, run), _CHILD_SECONDS))
        ),
        flush=True,
    )
    time.sleep(
        0.05
    )  # obstore's threads have to leave Python before it ends: see icecore.store.backend.s3


# -- all clients


async def _fill(endpoint: str, quick: bool) -> None:
    client = Obstore(endpoint, signed=False)
    for size, count in ((8 * MIB, 64), (64 * MIB, 0 if quick else 16)):
        for number in range(count):
            await client.put(key_of(size, number), memoryview(os.urandom(size)))


Figures = dict[tuple[str, int], dict[str, list[dict[str, float]]]]


def measure(names: list[str], rounds: int, quick: bool) -> Figures:
    """All figures: by row title and requests in flight, by client, one for each round."""
    found: Figures = defaultdict(lambda: defaultdict(list))
    for operations in (
        ("get", "range"),
        ("put",),
    ):  # what was put fills the disk: a server of its own
        wanted = [cell for cell in cells(quick) if cell.operation in operations]
        for number in range(rounds):
            with (
                tempfile.TemporaryDirectory(prefix="icecore-bench-s3-") as folder,
                running(Path(folder)) as server,
            ):
                server.make_bucket(BUCKET)
                asyncio.run(_fill(server.endpoint, quick))
                for cell in wanted:
                    for name in names:
                        run = f"{name.replace(' ', '-')}-{number}"
                        words = [json.dumps([name, server.endpoint, list(cell), run])]
                        done = subprocess.run(
                            [sys.executable, __file__, "--child", *words],
                            capture_output=True,
                            text=True,
                            timeout=_CHILD_SECONDS + 30,
                        )
                        if done.returncode:
                            raise RuntimeError(f"{name} {cell}: {done.stderr[-2000:]}")
                        figures = json.loads(done.stdout)
                        progress(f"{cell.title} ×{cell.in_flight} {name}: {figures}")
                        found[cell.title, cell.in_flight][name].append(figures)
    return found


def table(found: Figures, names: list[str]) -> str:
    """The figures as Markdown."""
    lines = [
        "| MB/s · CPU s/GB | in flight | " + " | ".join(names) + " |",
        "| --- | --- |" + " --- |" * len(names),
    ]
    for (title, in_flight), by_client in sorted(
        found.items(), key=lambda row: (row[0][0], row[0][1])
    ):
        row = []
        for name in names:
            figures = by_client[name]
            rate, cpu = (
                statistics.median(one[key] for one in figures) for key in ("mb_per_s", "cpu_per_gb")
            )
            row.append(f"{rate:.0f} · {cpu:.2f}")
        lines.append(f"| {title} | {in_flight} | " + " | ".join(row) + " |")
    return "\n".join(lines)


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true", help="whether it works, not how fast it is")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--client", action="append", choices=CLIENTS, help="default: all")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        name, endpoint, cell, run = json.loads(options.child)
        child(name, endpoint, Cell(*cell), run)
        return 0
    names = options.client or list(CLIENTS)
    print(table(measure(names, 1 if options.quick else options.rounds, options.quick), names))
    return 0


if __name__ == "__main__":
    sys.exit(main())
