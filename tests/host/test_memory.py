"""Reading another process's memory: every byte compared, what cannot be read raises."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from icecore.errors import DumpFailed, NotFound
from icecore.host.kernel import memory
from icecore.host.kernel.memory import IOVEC, HugeBuffer, RemoteReader
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


def extents(*pairs):
    """Return struct iovecs of (start, bytes)."""
    return np.array(list(pairs), IOVEC)


def test_many_extents_are_read_by_one_call():
    pages = 900
    with (
        target(FILLED.format(pages=pages) + "say(a); hear()") as it,
        RemoteReader(it.pid) as reader,
    ):
        (a,) = map(int, it.hear())
        chosen = np.random.default_rng(3).random(pages) < 0.7
        numbers = np.flatnonzero(chosen)
        buffer = HugeBuffer(3 * CELL_BYTES)
        assert len(numbers) <= 1024  # IOV_MAX
        iovecs = extents(*((a + int(n) * PAGE, PAGE) for n in numbers))
        size = len(numbers) * PAGE
        reader.read_into(iovecs.ctypes.data, len(iovecs), buffer, size)
        got = buffer.array[:size].reshape(-1, PAGE)
        assert (got == filled(pages).reshape(-1, PAGE)[numbers]).all()


def test_pages_without_access_are_read_through_the_file():
    pages = 300
    code = (
        FILLED.format(pages=pages) + "libc.mprotect(a + 100 * 4096, 50 * 4096, 0)\nsay(a); hear()"
    )
    with target(code) as it, RemoteReader(it.pid) as reader:
        (a,) = map(int, it.hear())
        expected = filled(pages)
        assert reader.read(a, pages * PAGE) == expected.tobytes()
        buffer = HugeBuffer(CELL_BYTES)
        for at in range(0, pages * PAGE, CELL_BYTES):
            size = min(CELL_BYTES, pages * PAGE - at)
            iovecs = extents((a + at, size))
            reader.read_into(iovecs.ctypes.data, 1, buffer, size)
            assert (buffer.array[:size] == expected[at : at + size]).all()


def test_unmapped_memory_raises_and_the_process_being_gone_too():
    code = FILLED.format(pages=64) + "libc.munmap(a + 32 * 4096, 4096)\nsay(a); hear()"
    with target(code) as it:
        (a,) = map(int, it.hear())
        buffer = HugeBuffer(CELL_BYTES)
        iovecs = extents((a, 64 * PAGE))
        reader = RemoteReader(it.pid)
        with pytest.raises(DumpFailed, match="cannot be read"):
            reader.read_into(iovecs.ctypes.data, 1, buffer, 64 * PAGE)
        with pytest.raises(DumpFailed):
            reader.read(a + 32 * PAGE, 1)
        it.process.kill()
        assert eventually(lambda: it.process.poll() is not None)
        with pytest.raises(NotFound):
            reader.read_into(iovecs.ctypes.data, 1, buffer, 64 * PAGE)
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
