#!/usr/bin/env python3
"""Throughput to and from a bucket (SeaweedFS on the loopback) against the bare client with the same
requests in flight; rule: same bytes, same round.

Up: shards of ready chunks through the writer's stream, and whole cells (hashed, tried, packed)
through the snapshot writer, against bare PUTs of objects of those sizes. Down: the restorer's
fetcher, decoding and verifying, against bare ranged GETs of the ranges that it planned. The server
runs on the same cores, so that whatever icecore computes is taken from it.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import resource
import secrets
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import msgspec

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from rich.console import Console

from benchmarks.common import MIB, Result, Rounds, progress, show
from icecore.access.places import backend_at
from icecore.config import Config, S3Settings
from icecore.restorer.fetch.fetcher import Fetcher, Limits
from icecore.restorer.plan.memory import plan_batches
from icecore.store.backend.base import Backend
from icecore.store.backend.s3 import S3Backend, S3Place
from icecore.store.format.cell import CELL, Records
from icecore.store.format.chunk import NO_CHUNK
from icecore.store.format.codec import RAW
from icecore.store.format.manifest import Region
from icecore.store.format.names import object_name
from icecore.store.format.shard import EncodedChunk
from icecore.store.log.repository import StoredRepository
from icecore.store.log.uploads import Uploads
from icecore.store.runtime.loop import LoopThread
from icecore.store.runtime.pool import BufferPool
from icecore.store.snapshot import writer as writers
from icecore.store.snapshot.reader import SnapshotReader
from icecore.store.snapshot.stream import BufferedStream
from icecore.store.snapshot.writer import SnapshotWriter
from tests.restorer.places import empty_manifest
from tests.seaweedfs import running

PART = "bucket"
BUCKET = "throughput"
_FULL = b"\xff" * 32
_THREADS = 2


@contextmanager
def timed(rounds: Rounds, name: str, size: int) -> Iterator[None]:
    """Note MB/s, and this process's CPU seconds per GB, of moving ``size`` bytes."""
    before, began = resource.getrusage(resource.RUSAGE_SELF), time.perf_counter()
    yield
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_SELF)
    rounds.add(name, size / seconds / 1e6)
    rounds.add(
        f"{name} cpu",
        (after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime) / size * 1e9,
    )


async def at_once(work: Sequence[Callable[[int], Awaitable[None]]], in_flight: int) -> None:
    """Do all of ``work``, so many at a time; each is told which of them it is."""
    left = iter(work)

    async def worker(who: int) -> None:
        for each in left:
            await each(who)

    await asyncio.gather(*(worker(who) for who in range(in_flight)))


class Bench:
    """One server, one bare client, one repository.

    Args:
        mib: Bytes that are moved each time.
    """

    def __init__(self, endpoint: str, loop: LoopThread, mib: int) -> None:
        self.loop = loop
        self.mib = mib
        self.rounds = Rounds()
        self.bare = S3Backend(S3Place(BUCKET, "bare", endpoint=endpoint))
        config = Config(s3=S3Settings(endpoint=endpoint))
        self.backend: Backend = backend_at(f"s3://{BUCKET}/repository", config=config)
        self.repository = loop.run(StoredRepository.create(self.backend))
        self.cells = [memoryview(os.urandom(MIB)) for _ in range(64)]

    def cell(self, number: int) -> memoryview:
        """Bytes of a cell that no other round has."""
        cell = bytearray(self.cells[number % len(self.cells)])
        cell[:16] = secrets.token_bytes(16)
        return memoryview(cell)

    def up(self) -> tuple[SnapshotReader, Records]:
        """One round up; the snapshot that was written."""
        session = self.loop.run(self.repository.begin(None, "benchmark", beat_seconds=None))
        records = np.empty(self.mib, CELL)
        cells = [self.cell(number) for number in range(self.mib)]
        with (
            SnapshotWriter(self.repository, session, self.loop.loop) as writer,
            timed(self.rounds, "cells", self.mib * MIB),
        ):
            self._in_threads(
                lambda n: records.__setitem__(
                    n, writer.store_cell(0, n, _FULL, bytes(32), cells[n], None)
                )
            )
            space = writer.put_map(
                "process", "1", 0, [Region(0, self.mib * MIB, 0)], [records], None
            )
            manifest = msgspec.structs.replace(empty_manifest(), spaces=[space])
            writer.commit(manifest)
        sizes = self.loop.run(
            self._sizes({records["place"]["shard"][n].tobytes() for n in range(self.mib)})
        )

        session = self.loop.run(self.repository.begin(None, "benchmark", beat_seconds=None))
        uploads = Uploads(session, self.loop.loop, lambda event: None)
        pool = BufferPool(max(sizes) + MIB, 1 + writers.IN_FLIGHT)
        stream = BufferedStream(
            pool, uploads, self.repository.keys.shard, lambda table: None, 600.0
        )
        self._fill(pool)
        with timed(self.rounds, "stream", self.mib * MIB):
            self._in_threads(
                lambda n: stream.put(
                    EncodedChunk(secrets.token_bytes(32), _FULL, NO_CHUNK, RAW, [cells[n]], MIB)
                )
            )
            stream.flush()
            uploads.wait()
        self.loop.run(session.abort())

        whole = memoryview(os.urandom(max(sizes)))
        puts = [
            lambda who, size=size: self.bare.create(f"o/{secrets.token_hex(8)}", [whole[:size]])
            for size in sizes
        ]
        with timed(self.rounds, "put", sum(sizes)):
            self.loop.run(at_once(puts, writers.IN_FLIGHT))
        return SnapshotReader(self.repository, manifest, self.loop.loop), records

    def down(self, reader: SnapshotReader, records: Records) -> None:
        """One round down."""
        ranges = [
            read
            for batch in plan_batches(
                records, range(len(records)), gap=MIB, read_size=self.backend.read_size
            )
            for read in batch.reads
        ]
        limits = Limits(threads=_THREADS, budget=512 * MIB, attempts=4, stall=60.0)
        in_flight = min(32, limits.budget // (self.backend.read_size + 2 * MIB), len(ranges))
        rooms = [
            memoryview(bytearray(max(read.length for read in ranges))) for _ in range(in_flight)
        ]
        there = S3Backend(msgspec.structs.replace(self.bare.place, prefix="repository"))
        gets = [
            lambda who, read=read: there.get_into(
                object_name("shard", read.shard), read.offset, rooms[who][: read.length]
            )
            for read in ranges
        ]
        with timed(self.rounds, "get", sum(read.length for read in ranges)):
            self.loop.run(at_once(gets, in_flight))
        fetcher = Fetcher(self.backend, reader, records, lambda row, data: None, limits, self.loop)
        with timed(self.rounds, "fetch", self.mib * MIB):
            fetcher.start(range(len(records)))
            fetcher.wait(600)
        fetcher.stop()

    async def _sizes(self, shards: set[bytes]) -> list[int]:
        return [await self.backend.size(object_name("shard", shard)) for shard in shards]

    def _fill(self, pool: BufferPool) -> None:
        """Touch the buffers for the first time: not what is measured."""
        buffers = [pool.acquire(lambda: None, 1.0) for _ in range(pool.count)]
        for buffer in buffers:
            np.frombuffer(buffer, np.uint8)[:] = 1
            pool.release(buffer)

    def _in_threads(self, work: Callable[[int], object]) -> None:
        from concurrent.futures import ThreadPoolExecutor

        with ThreadPoolExecutor(_THREADS) as pool:
            list(pool.map(work, range(self.mib)))


def measure(mib: int, rounds: int) -> list[Result]:
    """Ratios, round by round."""
    with (
        tempfile.TemporaryDirectory(prefix="icecore-bench-s3-") as folder,
        running(Path(folder)) as server,
        LoopThread() as loop,
    ):
        server.make_bucket(BUCKET)
        os.environ.update(server.environment())
        bench = Bench(server.endpoint, loop, mib)
        for number in range(rounds + 1):
            reader, records = bench.up()
            bench.down(reader, records)
            if number == 0:
                bench.rounds.figures.clear()  # the server has made its volumes, all buffers are touched
            progress(f"bucket: round {number} of {rounds}")
        got = bench.rounds
        loop.run(bench.repository.close())

    def result(what: str, name: str, base: str, target: float | None) -> Result:
        note = f"{got.median(name):.0f} against {got.median(base):.0f} MB/s, CPU {got.median(f'{name} cpu'):.2f} against {got.median(f'{base} cpu'):.2f} s/GB"
        return Result(PART, what, got.ratio(name, base), target, "higher", note=note)

    return [
        result("ready chunks up, against bare PUTs", "stream", "put", 0.8),
        result("cells up, hashed and packed, against bare PUTs", "cells", "put", None),
        result("cells down, verified, against bare ranged GETs", "fetch", "get", 0.8),
    ]


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mib", type=int, default=384)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    show(measure(options.mib, options.rounds), Console(width=None if sys.stdout.isatty() else 200))
    return 0


if __name__ == "__main__":
    sys.exit(main())
