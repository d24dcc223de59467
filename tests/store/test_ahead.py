"""Reading ahead returns the right bytes to threads in any order, with fewer and larger requests
where reads follow each other, and without extra requests where they do not.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from icecore.errors import Damaged, ObjectMissing
from icecore.store.backend.faulty import Call, FaultyBackend, Outcome, far_away
from icecore.store.backend.memory import MemoryBackend
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.ahead import ReadAhead

MIB = 1 << 20
SIZE = 40 * MIB + 4567


@pytest.fixture
def loop() -> Iterator[LoopThread]:
    with LoopThread() as loop:
        yield loop


@pytest.fixture(scope="module")
def data() -> bytes:
    return random.Random(3).randbytes(SIZE)


def store(data: bytes) -> FaultyBackend:
    return FaultyBackend(MemoryBackend({"a": data}), delay=far_away(0.002))


def read(ahead: ReadAhead, offset: int, length: int) -> bytes:
    out = bytearray(length)
    ahead.fetch("a", offset, memoryview(out))
    return bytes(out)


def ranges(draw: random.Random) -> list[tuple[int, int]]:
    """Chunks of up to 1 MiB with small gaps, up to the very end."""
    found, at = [], 0
    while at < SIZE:
        length = min(draw.randrange(1, MIB), SIZE - at)
        found.append((at, length))
        at += length + draw.choice([0, 0, 5000])
    return found


@pytest.mark.parametrize("threads", [1, 4])
def test_a_sequence_takes_few_large_requests(loop: LoopThread, data: bytes, threads: int) -> None:
    there, wanted = store(data), ranges(random.Random(4))
    ahead = ReadAhead(there, loop.loop)
    with ThreadPoolExecutor(threads) as pool:
        got = list(pool.map(lambda one: read(ahead, *one), wanted))
    assert got == [data[at : at + length] for at, length in wanted]
    reads = [call for call in there.calls if call.operation == "get_into"]
    assert len(wanted) > 70 and len(reads) < len(wanted) / 2
    # A thread that is held up reads far behind the others, and what was read ahead is given up.
    assert sum(call.bytes for call in reads) < (1.3 if threads == 1 else 2) * SIZE


def test_scattered_reads_are_left_alone(loop: LoopThread, data: bytes) -> None:
    there, draw = store(data), random.Random(5)
    ahead = ReadAhead(there, loop.loop)
    wanted = [(draw.randrange(2) * 30 * MIB + draw.randrange(MIB), 1000) for _ in range(80)]
    wanted = [
        one
        for one, before in zip(wanted[1:], wanted, strict=False)
        if abs(one[0] - before[0]) > 20 * MIB
    ]
    for at, length in wanted:
        assert read(ahead, at, length) == data[at : at + length]
    assert [call.bytes for call in there.calls] == [1000] * len(wanted)


def test_what_fails_ahead_is_read_by_itself(loop: LoopThread, data: bytes) -> None:
    there = store(data)

    def plan(call: Call) -> Outcome:
        return Outcome.FAIL if call.bytes > MIB or call.operation == "size" else Outcome.PASS

    there.plan = plan
    ahead = ReadAhead(there, loop.loop)
    for at, length in ranges(random.Random(6)):
        assert read(ahead, at, length) == data[at : at + length]
    with pytest.raises(Damaged):
        read(ahead, SIZE - 10, 11)
    with pytest.raises(ObjectMissing):
        ahead.fetch("b", 0, memoryview(bytearray(1)))
    ahead.close()
    assert read(ahead, 0, 10) == data[:10]
