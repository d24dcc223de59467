"""The node cache is bounded, shared by processes and verified, and never prevents a read."""

from __future__ import annotations

import asyncio
import os
import random
import secrets
import subprocess
import sys
import time
from pathlib import Path

import pytest

from icecore.errors import StoreError
from icecore.store.backend.base import Backend
from icecore.store.backend.blocks import Blocks
from icecore.store.backend.cached import Cached
from icecore.store.backend.faulty import FaultyBackend, Outcome
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.names import log_name, object_name

MIB = 1 << 20


def files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file() and path.name != "lock")


async def read(backend: Backend, name: str, offset: int, length: int) -> bytes:
    out = bytearray(length)
    await backend.get_into(name, offset, memoryview(out))
    return bytes(out)


@pytest.fixture
def shard() -> tuple[FaultyBackend, str, bytes]:
    name, data = (
        object_name("shard", secrets.token_bytes(16)),
        random.Random(1).randbytes(5 * MIB + 12345),
    )
    return FaultyBackend(MemoryBackend({name: data})), name, data


def test_what_was_read_is_not_read_again(
    tmp_path: Path, shard: tuple[FaultyBackend, str, bytes]
) -> None:
    store, name, data = shard

    async def body() -> None:
        cached = Cached(store, Blocks(tmp_path, 64 * MIB))
        assert await read(cached, name, 100, 2 * MIB) == data[100 : 100 + 2 * MIB]
        assert [(call.operation, call.bytes) for call in store.calls] == [
            ("size", 0),
            ("get_into", 3 * MIB),
        ]
        assert await read(cached, name, MIB - 1, 4 * MIB) == data[MIB - 1 :][: 4 * MIB]
        assert [(call.operation, call.bytes) for call in store.calls[2:]] == [("get_into", 2 * MIB)]
        assert (cached.hits, cached.misses) == (2 * MIB + 1, 5 * MIB)
        assert (
            await read(Cached(store, Blocks(tmp_path, 64 * MIB)), name, 5, 4 * MIB)
            == data[5 : 5 + 4 * MIB]
        )
        assert len(store.calls) == 3, "another process finds it, and the object's size with it"
        whole = await cached.get(name)
        assert whole == data and await cached.get(name) == data
        assert [call.operation for call in store.calls[3:]] == ["get"]

    asyncio.run(body())


def test_readers_of_the_same_block_wait_for_one_request(
    tmp_path: Path, shard: tuple[FaultyBackend, str, bytes]
) -> None:
    store, name, data = shard
    store._delay = lambda call: 0.02

    async def body() -> None:
        cached = Cached(store, Blocks(tmp_path, 64 * MIB))
        reads = [asyncio.create_task(read(cached, name, n * 1000, MIB)) for n in range(12)]
        await asyncio.sleep(0.03)
        reads[0].cancel()  # it may be the one that the others wait for
        done = await asyncio.gather(*reads, return_exceptions=True)
        assert all(
            isinstance(one, asyncio.CancelledError) or one == data[n * 1000 :][:MIB]
            for n, one in enumerate(done)
        )
        assert sum(call.operation == "get_into" for call in store.calls) <= 5
        assert not cached._arriving

    asyncio.run(body())


@pytest.mark.parametrize("harm", ["flip", "cut", "grow", "swap", "empty", "header"])
def test_harmed_blocks_are_read_anew(
    tmp_path: Path, shard: tuple[FaultyBackend, str, bytes], harm: str
) -> None:
    store, name, data = shard

    async def body() -> None:
        blocks = Blocks(tmp_path, 64 * MIB)
        await read(Cached(store, blocks), name, 0, len(data))
        paths = files(tmp_path)
        assert len(paths) == 6
        one, other = paths[2].read_bytes(), paths[3].read_bytes()
        harmed = {
            "flip": one[:9999] + bytes([one[9999] ^ 1]) + one[10000:],
            "cut": one[:-1],
            "grow": one + b"x",
            "swap": other,
            "empty": b"",
            "header": one[:8] + b"\xff" * 8 + one[16:],
        }[harm]
        paths[2].write_bytes(harmed)
        store.calls.clear()
        assert await read(Cached(store, blocks), name, 0, len(data)) == data
        assert [(call.operation, call.bytes) for call in store.calls] == [("get_into", MIB)]
        assert files(tmp_path)[2].read_bytes() == one

    asyncio.run(body())


def test_what_changes_is_never_kept(tmp_path: Path) -> None:
    async def body() -> None:
        inner = MemoryBackend(
            {"config": b"1", log_name(1): b"1", "keys/00000000": b"1", "sessions/a/1": b"1"}
        )
        cached = Cached(inner, Blocks(tmp_path, MIB))
        for name in inner.objects:
            assert await cached.get(name) == await read(cached, name, 0, 1) == b"1"
            inner.objects[name] = b"2"
            assert await cached.get(name) == await read(cached, name, 0, 1) == b"2"
        assert files(tmp_path) == []
        assert cached.source is inner

    asyncio.run(body())


def test_the_bound_holds_and_the_longest_unused_go(tmp_path: Path) -> None:
    blocks = Blocks(tmp_path, 10 * MIB, touch_seconds=0.0)
    room = memoryview(bytearray(MIB))
    for number in range(40):
        assert blocks.write("ab" * 20, number, memoryview(bytes([number]) * (MIB - 1000)), 1)
        time.sleep(0.002)
        assert blocks.read("ab" * 20, 0, room), "the first is used all the time"
        assert blocks.used() <= 10 * MIB
    left = [number for number in range(40) if blocks.read("ab" * 20, number, room)]
    assert left[0] == 0 and left[1:] == list(range(40 - len(left) + 1, 40)) and len(left) >= 8
    assert not blocks.write("cd" * 20, 0, memoryview(bytes(11 * MIB)), 1), "larger than all of it"


def test_a_failing_read_keeps_nothing_and_a_full_disk_is_no_error(
    tmp_path: Path, shard: tuple[FaultyBackend, str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    store, name, data = shard

    async def body() -> None:
        store.plan = lambda call: Outcome.LOSE if call.operation == "get_into" else Outcome.PASS
        with pytest.raises(StoreError):
            await read(Cached(store, Blocks(tmp_path, 64 * MIB)), name, 0, MIB)
        assert files(tmp_path) == []
        store.plan = lambda call: Outcome.PASS
        monkeypatch.setattr(os, "writev", lambda descriptor, parts: 7)
        assert await read(Cached(store, Blocks(tmp_path, 64 * MIB)), name, 0, MIB) == data[:MIB]
        assert files(tmp_path) == []

    asyncio.run(body())


WORKER = """
import random, sys
from icecore.store.backend.blocks import Blocks
blocks, draw, hits = Blocks(sys.argv[1], 6 << 20), random.Random(int(sys.argv[2])), 0
room = memoryview(bytearray(1 << 20))
for step in range(600):
    number = draw.randrange(60)
    data = bytes([number, 255 - number]) * (40_000 + 500 * number)
    found = blocks.read("ef" * 20, number, room)
    if found:
        hits += 1
        assert found == (len(data), number) and room[: len(data)] == data, number
    else:
        assert blocks.write("ef" * 20, number, memoryview(data), number)
    if step % 50 == 0:
        assert blocks.used() <= 6 << 20, blocks.used()
print(hits)
"""


def test_processes_share_it_and_some_are_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-P", "-c", WORKER, str(tmp_path)]
    workers = [
        subprocess.Popen(
            [*words, str(seed)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for seed in range(5)
    ]
    time.sleep(0.6)
    workers[0].kill()
    for worker in workers[1:]:
        out, errors = worker.communicate(timeout=60)
        assert worker.returncode == 0, errors
        assert int(out) > 50
    workers[0].communicate(timeout=60)
    assert Blocks(tmp_path, 6 << 20).used() <= 6 << 20
