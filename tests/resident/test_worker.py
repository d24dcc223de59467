"""The GPU worker: what it maps, fingerprints, copies and lets go of, and that its death is told to
whoever waits.
"""

from __future__ import annotations

import ctypes
import gc
import mmap
import os
import signal
from collections.abc import Iterator

import numpy as np
import pytest

from icecore.host.gpu import working
from icecore.host.gpu.working import HostRegion, Worker, WorkerFailed
from icecore.host.resident.fingerprint import reference
from icecore.host.resident.gpu import NOWHERE, ON_DEVICE
from icecore.sizes import CELL_BYTES as CELL
from icecore.store.format.chunk import chunk_id
from tests.fakes.machine import MIB, Machine, until, uuid_of

from .conftest import NewMachine

GPU = uuid_of(0)
SEED = 0x1234


@pytest.fixture
def worker(joined: Machine) -> Iterator[Worker]:
    with Worker("test") as made:
        yield made


def filled(machine: Machine, some: int, gpu: int = 0, seed: int = 1) -> list[tuple[int, bytes]]:
    """Memory of two cells each on a GPU: descriptor and contents."""
    made = []
    rng = np.random.default_rng(seed)
    for _ in range(some):
        descriptor = os.open(machine.cuda / f"gpu{gpu}", os.O_TMPFILE | os.O_RDWR, 0o600)
        data = rng.bytes(2 * CELL)
        os.pwrite(descriptor, data, 0)
        made.append((descriptor, data))
    return made


def region(worker: Worker, cells: int) -> HostRegion:
    made = HostRegion(cells * CELL)
    made.prefault()
    worker.take_host(made, GPU)
    return made


def at(place: HostRegion, offset: int) -> bytes:
    return ctypes.string_at(place.address + offset, CELL)


def test_fingerprints_and_copies(
    worker: Worker, joined: Machine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(working, "MOST_DESCRIPTORS", 3)  # in several messages
    memory = filled(joined, 8)
    handles = worker.new_handles(8)
    assert worker.begin([GPU])[GPU] == 96 * MIB - joined.used()
    worker.map(GPU, handles, [2 * CELL] * 8, [descriptor for descriptor, _ in memory])
    whole = b"".join(data for _, data in memory)
    assert (worker.fingerprints(GPU, handles, SEED) == reference(whole, SEED)).all()
    mask = np.zeros(16, np.bool_)
    mask[[0, 1, 5, 15]] = True
    host = region(worker, 4 + 2)
    places = worker.stage(GPU, handles, mask, 4 * CELL, 2 * CELL, spare=1 << 40)
    # The device has less than half of itself and 256 MiB free: all that fits goes to the host.
    assert sorted((places == NOWHERE).tolist()) == [False, False, True, True]
    for row, place in zip(np.flatnonzero(mask).tolist(), places.tolist(), strict=True):
        if place != NOWHERE:
            assert (
                4 * CELL <= place < 6 * CELL
                and at(host, place) == whole[row * CELL : (row + 1) * CELL]
            )
    worker.finish(worker.fetch(GPU, [(handles[2], CELL), (handles[7], 0)], [0, 2 * CELL]))
    assert (
        at(host, 0) == whole[5 * CELL : 6 * CELL]
        and at(host, 2 * CELL) == whole[14 * CELL : 15 * CELL]
    )
    [ready] = worker.prepare_digests([GPU])
    worker.finish(ready)
    digests = worker.digests(GPU, [(handles[2], CELL), (handles[7], 0)], b"k" * 32)
    assert [row.tobytes() for row in digests] == [
        chunk_id(b"k" * 32, b"\xff" * 32, whole[n * CELL : (n + 1) * CELL]) for n in (5, 14)
    ]
    # The other way: what is placed is seen by whoever has the descriptor.
    worker.finish(worker.place(GPU, [(handles[1], 0)], [2 * CELL]))
    assert os.pread(memory[1][0], CELL, 0) == whole[14 * CELL : 15 * CELL]
    for descriptor, _ in memory:
        os.close(descriptor)
    assert joined.used() == 8 * 2 * MIB
    worker.release(GPU, handles[:3])
    assert joined.used() == 5 * 2 * MIB
    with pytest.raises(WorkerFailed, match="KeyError"):
        worker.fingerprints(GPU, handles[:1], SEED)
    worker.close()
    until(lambda: joined.used() == 0)
    host.close()


def test_copies_on_the_device(new_machine: NewMachine, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = new_machine(gpus=1, memory=700 * MIB, world=True)
    monkeypatch.setenv("ICECORE_CUDA", f"fake:{machine.cuda}")
    with Worker("test") as worker:
        host = region(worker, 4)
        [(descriptor, data)] = filled(machine, 1)
        handles = worker.new_handles(1)
        worker.map(GPU, handles, [2 * CELL], [descriptor])
        places = worker.stage(GPU, handles, np.ones(2, np.bool_), 0, 0, spare=1 << 40)
        assert (places >= ON_DEVICE).all()
        assert machine.used() == 4 * MIB
        os.pwrite(descriptor, bytes(2 * CELL), 0)  # the job goes on
        worker.finish(
            worker.fetch(GPU, [(-1, int(place) - ON_DEVICE) for place in places], [0, CELL])
        )
        assert at(host, 0) + at(host, CELL) == data
        worker.release(GPU, spare=True)
        assert machine.used() == 2 * MIB
        os.close(descriptor)
    host.close()


def test_new_memory(worker: Worker, joined: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(working, "MOST_DESCRIPTORS", 2)
    handles = worker.new_handles(5)
    descriptors = worker.allocate(GPU, handles, [2 * CELL] * 5)
    assert len(descriptors) == 5
    for descriptor in descriptors:
        with mmap.mmap(descriptor, 2 * CELL) as memory:
            assert memory[:] == bytes(2 * CELL)
        os.close(descriptor)
    gc.collect()  # earlier tests' mappings have descriptors
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(WorkerFailed, match="out of memory"):
        worker.allocate(GPU, worker.new_handles(3), [40 * MIB] * 3)
    assert len(os.listdir("/proc/self/fd")) == before
    assert worker.begin([uuid_of(1)])  # it is there still
    with pytest.raises(WorkerFailed, match="there is no GPU"):
        worker.begin(["GPU-00000000-0000-0000-0000-000000000000"])


def test_a_request_about_very_many_allocations(worker: Worker, joined: Machine) -> None:
    """A process that takes its memory in pieces of 2 MiB has 70 000 on a large GPU; its snapshot
    failed.
    """
    mine = worker.new_handles(1)
    for descriptor in worker.allocate(GPU, mine, [2 * CELL]):
        os.close(descriptor)
    free = worker.begin([GPU])[GPU]
    before = len(os.listdir("/proc/self/fd"))
    worker.release(GPU, [*range(1_000_000, 1_070_000), *mine])
    assert worker.begin([GPU])[GPU] == free + 2 * CELL
    assert len(os.listdir("/proc/self/fd")) == before


def test_its_death(worker: Worker, joined: Machine) -> None:
    pid = worker.pid
    os.kill(pid, signal.SIGSTOP)
    waiting = worker.fetch(GPU, [(0, 0)], [0])
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(WorkerFailed, match="ended"):
        worker.finish(waiting)
    with pytest.raises(WorkerFailed, match="ended"):
        worker.begin([GPU])


def test_it_sees_only_the_gpus_that_it_is_for(joined: Machine) -> None:
    """CUDA takes long to initialise each that it sees."""
    with Worker("test", gpus=[GPU]) as worker:
        assert worker.begin([GPU])
        with pytest.raises(WorkerFailed, match="there is no GPU"):
            worker.begin([uuid_of(1)])
