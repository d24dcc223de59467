"""Device memory in a file that processes map: whoever reads it waits for what is not there yet, and
finds what was written.
"""

from __future__ import annotations

import hashlib
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import NamedTuple

import numpy as np
import pytest

from icecore.errors import Damaged, RestoreFailed
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.files.images import FiledMemory, lay_out
from icecore.restorer.fill import device_file
from icecore.restorer.fill.device_file import DeviceFile, FileUnusable, _Process
from icecore.restorer.place.members import Member
from icecore.restorer.place.placers import Placers
from icecore.restorer.plan.cells import EXTENT, SpaceCells, covered
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.backend.local import LocalBackend
from tests.restorer.places import Place, SlowBackend, repository_place, store_cells

_AT = 0x100000000000
#: Two mappings with a page between them, in the middle of a cell; they begin and end within cells
#: and huge pages.
RANGES = [
    (_AT + 5 * PAGE, _AT + 40 * CELL_BYTES + 9 * PAGE),
    (_AT + 40 * CELL_BYTES + 10 * PAGE, _AT + 70 * CELL_BYTES - PAGE),
]
_CELLS = 70

#: Maps a file where it is told, hands over its userfaultfd, and once told to says what it finds,
#: from the lowest address on.
_READER = """
import ctypes, hashlib, json, socket, sys
from icecore.host.kernel import userfaultfd
libc = ctypes.CDLL(None, use_errno=True)
libc.mmap.restype, libc.mmap.argtypes = ctypes.c_void_p, [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
control, file, mappings = socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]), json.loads(sys.argv[3])
for start, end, position in mappings:
    assert libc.mmap(start, end - start, 3, 2 | 0x100000, file, position) == start  # MAP_PRIVATE | MAP_FIXED_NOREPLACE
socket.send_fds(control, [b"here"], [userfaultfd.create()])
control.recv(1)
for start, end, _ in mappings:
    digest = hashlib.sha256()
    for at in range(start, end, 65536):
        digest.update(ctypes.string_at(at, min(65536, end - at)))
    control.send(digest.digest())
control.recv(1)
"""


class Held(NamedTuple):
    """What the mappings are to hold, and how it gets there."""

    content: bytes
    file: DeviceFile
    mappings: list[tuple[int, int, int]]


@contextmanager
def filed(place: Place, kind: str) -> Iterator[Held]:
    """A file for whole cells, cells with a few pages, and cells of zeros, to be filled by ``kind``."""
    draw = random.Random(7)
    content, cells = bytearray(_CELLS * CELL_BYTES), []
    for number in range(_CELLS):
        bits = bytes([255]) * 32 if number % 3 else draw.randbytes(32)
        if number % 7 == 6 or 50 <= number < 64:
            continue  # nothing but zeros
        data = bytearray()
        for page in range(256):
            if bits[page // 8] >> page % 8 & 1:
                one = draw.randbytes(64) * 64 if number % 2 else draw.randbytes(PAGE)
                data += one
                content[
                    number * CELL_BYTES + page * PAGE : number * CELL_BYTES + (page + 1) * PAGE
                ] = one
        cells.append((number, bits, bytes(data)))
    reader, records = store_cells(place, [(bits, data) for _, bits, data in cells])
    base = np.array([_AT + number * CELL_BYTES for number, _, _ in cells], np.uint64)
    space = SpaceCells(records, base, base, base + np.uint64(CELL_BYTES))
    offsets, size = lay_out(RANGES, 2 << 20)
    extents = np.array([(start, (end - start) // PAGE) for start, end in RANGES], EXTENT)
    wanted = covered(records["data"], base, extents)
    position = base.astype(np.int64) + (offsets[RANGES[0][0]] - RANGES[0][0])
    memory = [FiledMemory(1, space, wanted, position, RANGES)]
    backend = SlowBackend(place.root) if kind == "loop" else LocalBackend(place.root)
    keys = place.repository.keys
    placers = (
        Placers(2, str(place.root), keys.chunk, room=16 << 20, patience=20, word="test", lock="")
        if kind == "placers"
        else None
    )
    made = DeviceFile(
        memory, size, backend, reader, Limits(2, 64 << 20, 2, 20.0), place.loop, placers=placers
    )
    try:
        yield Held(bytes(content), made, [(start, end, offsets[start]) for start, end in RANGES])
    finally:
        made.close()


@contextmanager
def reading(held: Held) -> Iterator[tuple[Member, socket.socket, int]]:
    """A process that has the file mapped; its address space, who tells it to read, its pid."""
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours.settimeout(20)
    words = [
        str(theirs.fileno()),
        str(held.file.descriptor),
        str([list(one) for one in held.mappings]),
    ]
    with ours, theirs:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _READER, *words],
            pass_fds=[theirs.fileno(), held.file.descriptor],
            stdin=subprocess.DEVNULL,
        )
        try:
            _, descriptors, _, _ = socket.recv_fds(ours, 16, 1)
            yield Member(descriptors[0], 1, 0), ours, process.pid
        finally:
            process.kill()
            process.wait(20)
            os.close(descriptors[0])


def finds_it(held: Held, control: socket.socket) -> bool:
    wanted = [
        hashlib.sha256(held.content[start - _AT : end - _AT]).digest() for start, end in RANGES
    ]
    return [control.recv(32) for _ in RANGES] == wanted


def unexpected(error: BaseException) -> None:
    raise AssertionError("the tree is to die") from error


@pytest.mark.parametrize("moment", ["before", "meanwhile", "after"])
@pytest.mark.parametrize(
    ("kind", "encrypted"),
    [("threads", False), ("placers", False), ("placers", True), ("loop", False)],
)
def test_a_reader_finds_what_was_written(
    kind: str, encrypted: bool, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It begins before the first cell is there, when some are, or when all are; what it touches too
    early it waits for.
    """
    came, go = threading.Event(), threading.Event()
    count = iter(range(_CELLS))

    def add(self: _Process, rows: Sequence[int]) -> None:
        if 20 in [next(count) for _ in rows] and moment == "meanwhile":
            came.set()
            go.wait(20)
        put(self, rows)

    put = _Process.add
    monkeypatch.setattr(_Process, "add", add)
    monkeypatch.setattr(device_file, "_STEP", 8 << 20)
    with repository_place(encrypted=encrypted) as place, filed(place, kind) as held:
        told: list[tuple[int, int]] = []
        filling = threading.Thread(
            target=held.file.run, args=(lambda done, total: told.append((done, total)),)
        )
        with reading(held) as (member, control, _):
            if moment != "before":
                filling.start()
                came.wait(20) if moment == "meanwhile" else filling.join(20)
            held.file.attach(lambda image: member, unexpected)
            control.send(b"!")
            time.sleep(0.05)
            if moment == "before":
                filling.start()
            go.set()
            assert finds_it(held, control)
            filling.join(20)
            # The many cells of zeros take nothing, read or not; a huge page may begin before them.
            assert os.fstat(held.file.descriptor).st_blocks * 512 <= (_CELLS - 14 + 4) * CELL_BYTES
        assert not filling.is_alive() and held.file.spent.redone == 0
        assert max(told) == (held.file.spent.produced, held.file.spent.produced)


def test_a_process_that_ends_meanwhile_is_left_alone() -> None:
    with (
        repository_place() as place,
        filed(place, "threads") as held,
        reading(held) as (member, _, pid),
    ):
        held.file.attach(lambda image: member, unexpected)
        os.kill(pid, signal.SIGKILL)
        end = time.monotonic() + 20
        while not member.dead():
            assert time.monotonic() < end
        held.file.run(lambda done, total: None)


@pytest.mark.parametrize("attached", [False, True])
def test_a_store_that_fails_is_told_whoever_waits(attached: bool) -> None:
    told: list[BaseException] = []
    with (
        repository_place() as place,
        filed(place, "threads") as held,
        reading(held) as (member, _, _),
    ):
        for shard in place.root.glob("shards/**/*"):
            if shard.is_file():
                os.truncate(shard, 4096)
        if attached:
            held.file.attach(lambda image: member, told.append)
        with pytest.raises(Damaged):
            held.file.run(lambda done, total: None)
        if attached:
            assert [type(error) for error in told] == [Damaged]
        else:
            with pytest.raises(Damaged):
                held.file.attach(lambda image: member, unexpected)
        with pytest.raises(Damaged):
            held.file.wait()


def test_what_fails_elsewhere_ends_it_and_is_not_told_again() -> None:
    with repository_place() as place, filed(place, "threads") as held:
        held.file.fail(RestoreFailed("it is over"))
        with pytest.raises(RestoreFailed, match="it is over"):
            held.file.wait()
        with suppress(RestoreFailed):
            held.file.run(lambda done, total: None)


def test_a_mapping_that_stays_is_found() -> None:
    with repository_place() as place, filed(place, "threads") as held, reading(held) as (_, _, pid):
        held.file.check_unmapped([os.getpid() + (1 << 24)])
        with pytest.raises(FileUnusable, match=str(pid)):
            held.file.check_unmapped([pid])
