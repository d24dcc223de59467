"""Reading another process's memory: every byte compared, what cannot be read raises."""

from __future__ import annotations

import hashlib
import threading
import time

import numpy as np
import pytest

from icecore.errors import DumpFailed, NotFound
from icecore.host.kernel import memory
from icecore.host.kernel.memory import BufferPool, HugeBuffer, RemoteReader, cell_table
from icecore.sizes import CELL_BYTES, PAGE
from tests.host.target import dead_pid, eventually, target

FILLED = """
import random
a = anonymous({pages} * 4096)
libc.madvise(a, {pages} * 4096, 15)
noise = random.Random(7).randbytes({pages} * 4096)
ctypes.memmove(a, noise, len(noise))
"""


def filled(pages):
    import random

    return np.frombuffer(random.Random(7).randbytes(pages * PAGE), np.uint8)


def test_cells_are_read_whole_each_in_one_call():
    pages = 900
    with (
        target(FILLED.format(pages=pages) + "say(a); hear()") as it,
        RemoteReader(it.pid) as reader,
    ):
        (a,) = map(int, it.hear())
        expected = filled(pages)
        rng = np.random.default_rng(3)
        chosen = rng.random(pages) < 0.7
        first = np.flatnonzero(chosen)
        origin = a - 5 * PAGE  # cells counted from elsewhere than the mapping's start
        table = cell_table(
            np.uint64(a) + np.uint64(PAGE) * first.astype(np.uint64),
            np.full(len(first), PAGE, np.uint64),
            np.full(len(first), origin, np.uint64),
        )
        assert (
            table.size.sum() == len(first) * PAGE and (table.count <= 128).all() and len(table) == 4
        )
        bitmaps = table.bitmaps()
        buffer = HugeBuffer(CELL_BYTES)
        addresses = table.addresses()
        for i in range(len(table)):
            mask = np.unpackbits(bitmaps[i], bitorder="little").astype(bool)
            numbers = np.flatnonzero(mask) + int(table.cell[i]) * 256 - 5
            assert chosen[numbers].all() and mask.sum() * PAGE == table.size[i]
            reader.read_into(int(addresses[i]), int(table.count[i]), buffer, int(table.size[i]))
            got = buffer.array[: table.size[i]].reshape(-1, PAGE)
            assert (got == expected.reshape(-1, PAGE)[numbers]).all()
        assert sum(np.unpackbits(b).sum() for b in bitmaps) == chosen.sum()
        assert (table.bitmaps(1, 3) == bitmaps[1:3]).all()


def test_cell_table_cuts_merges_and_keeps_regions_apart():
    def table(*extents):
        return cell_table(*(np.array(column, np.uint64) for column in zip(*extents, strict=True)))

    base = 0x7F0000000000
    # one extent over three cells, beginning and ending inside one
    t = table((base + PAGE, 2 * CELL_BYTES, base))
    assert t.cell.tolist() == [0, 1, 2] and t.size.tolist() == [CELL_BYTES - PAGE, CELL_BYTES, PAGE]
    assert (
        t.bitmaps()[0].tolist() == [0xFE] + [0xFF] * 31
        and t.bitmaps()[2].tolist() == [1] + [0] * 31
    )
    # touching extents become one iovec
    t = table((base, PAGE, base), (base + PAGE, PAGE, base), (base + 3 * PAGE, PAGE, base))
    assert t.count.tolist() == [2] and t.iovecs["length"].tolist() == [2 * PAGE, PAGE]
    assert t.bitmaps()[0][0] == 0b1011
    # touching extents of two regions stay two cells, though both are cell 0
    t = table((base, PAGE, base), (base + PAGE, PAGE, base + PAGE))
    assert t.cell.tolist() == [0, 0] and t.origin.tolist() == [base, base + PAGE]
    # the last page of one cell and the first of the next
    t = table((base + CELL_BYTES - PAGE, 2 * PAGE, base))
    assert (
        t.bitmaps()[0].tolist() == [0] * 31 + [0x80] and t.bitmaps()[1].tolist() == [1] + [0] * 31
    )
    assert len(table((base, 0, base))) == 0 and table((base, 0, base)).bitmaps().shape == (0, 32)


def test_a_million_extents_are_planned_quickly():
    count = 1_000_000
    start = 0x7F0000000000 + np.arange(count, dtype=np.uint64) * (2 * PAGE)
    begun = time.perf_counter()
    table = cell_table(start, np.full(count, PAGE, np.uint64), np.full(count, start[0], np.uint64))
    table.bitmaps()
    assert len(table) == -(-count // 128) and (table.count <= 128).all()
    assert time.perf_counter() - begun < 5  # vectorised: far below; a Python loop would take longer


def test_pages_without_access_are_read_through_the_file():
    pages = 300
    code = (
        FILLED.format(pages=pages) + "libc.mprotect(a + 100 * 4096, 50 * 4096, 0)\nsay(a); hear()"
    )
    with target(code) as it, RemoteReader(it.pid) as reader:
        (a,) = map(int, it.hear())
        expected = filled(pages)
        assert reader.read(a, pages * PAGE) == expected.tobytes()
        table = cell_table(*(np.array([v], np.uint64) for v in (a, pages * PAGE, a)))
        buffer = HugeBuffer(CELL_BYTES)
        for i, address in enumerate(table.addresses()):
            size = int(table.size[i])
            reader.read_into(int(address), int(table.count[i]), buffer, size)
            at = int(table.cell[i]) * CELL_BYTES
            assert (buffer.array[:size] == expected[at : at + size]).all()


def test_unmapped_memory_raises_and_the_process_being_gone_too():
    code = FILLED.format(pages=64) + "libc.munmap(a + 32 * 4096, 4096)\nsay(a); hear()"
    with target(code) as it:
        (a,) = map(int, it.hear())
        buffer = HugeBuffer(CELL_BYTES)
        table = cell_table(*(np.array([v], np.uint64) for v in (a, 64 * PAGE, a)))
        reader = RemoteReader(it.pid)
        with pytest.raises(DumpFailed, match="cannot be read"):
            reader.read_into(int(table.addresses()[0]), 1, buffer, 64 * PAGE)
        with pytest.raises(DumpFailed):
            reader.read(a + 32 * PAGE, 1)
        it.process.kill()
        assert eventually(lambda: it.process.poll() is not None)
        with pytest.raises(NotFound):
            reader.read_into(int(table.addresses()[0]), 1, buffer, 64 * PAGE)
        reader.close()
    with pytest.raises(NotFound):
        RemoteReader(dead_pid()).read(4096, 1)


def test_write_reaches_the_process():
    code = (
        FILLED.format(pages=4)
        + "say(a); hear(); import hashlib; say(hashlib.sha256(ctypes.string_at(a, 4 * 4096)).hexdigest())"
    )
    with target(code) as it:
        (a,) = map(int, it.hear())
        memory.write(it.pid, a + 100, b"icecore" * 100)
        it.tell("go")
        data = bytearray(filled(4).tobytes())
        data[100:800] = b"icecore" * 100
        assert it.hear() == [hashlib.sha256(data).hexdigest()]
        with pytest.raises(OSError):
            memory.write(it.pid, a + (1 << 40), b"x")


def test_buffers_are_on_huge_pages_and_aligned():
    buffer = HugeBuffer(3 << 20)
    assert (
        buffer.address % memory.HUGE_PAGE == 0
        and len(buffer.array) == 3 << 20 == buffer.view().nbytes
    )
    buffer.view(5, 10)[:] = b"hello"
    assert bytes(buffer.array[5:10]) == b"hello"
    with pytest.raises(ValueError, match="positive"):
        HugeBuffer(0)


def test_a_pool_is_bounded_and_reuses():
    pool = BufferPool(1 << 20, 2)
    with pool.borrow() as one, pool.borrow() as two:
        assert one.address != two.address
        with pytest.raises(TimeoutError):
            pool.acquire(0.01)
        addresses = {one.address, two.address}
        waiter: list[int] = []
        thread = threading.Thread(target=lambda: waiter.append(pool.acquire(10).address))
        thread.start()
        assert not waiter
    thread.join(10)
    assert waiter and waiter[0] in addresses
    with pool.borrow() as again:
        assert again.address in addresses
    pool.close()
    with pytest.raises(ValueError, match="closed"):
        pool.acquire(0.01)
