"""The client of the worker: many calls at once to each GPU, each of which returns or raises even if
the worker dies.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import socket
import subprocess
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from icecore.errors import IcecoreError
from icecore.host.gpu.client import Start, program, start_here
from icecore.host.gpu.worker import MOST_DESCRIPTORS, as_memory, from_memory
from icecore.host.resident.digest import BYTES, Digests
from icecore.host.resident.fingerprint import Words
from icecore.host.resident.gpu import SPARE
from icecore.host.rpc.calls import Answer, Call, Client, Refusal
from icecore.sizes import CELL_BYTES as CELL

_START_SECONDS = 60.0
_END_SECONDS = 30.0
_POPULATE_WRITE = 23
_PREFAULT = 64 << 20
_PREFAULT_THREADS = 8
#: Cells of a host region through which copies on a device travel: its first.
RING = 32


class WorkerFailed(IcecoreError):
    """The worker failed, or is gone."""


class HostRegion:
    """Host memory that client and worker have mapped.

    Attributes:
        size: Bytes.
        address: Here.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self.descriptor = os.memfd_create("icecore-host-region", os.MFD_CLOEXEC)
        os.ftruncate(self.descriptor, size)
        self._mapping = mmap.mmap(self.descriptor, size)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self._view = memoryview(self._mapping)

    def prefault(self, stop: threading.Event | None = None) -> None:
        """Fault its memory in now, not in a window. Stop early once ``stop`` is set."""
        libc = ctypes.CDLL(None)

        def some(at: int) -> None:
            if stop is not None and stop.is_set():
                return
            libc.madvise(
                ctypes.c_void_p(self.address + at),
                ctypes.c_size_t(min(_PREFAULT, self.size - at)),
                _POPULATE_WRITE,
            )

        with ThreadPoolExecutor(min(_PREFAULT_THREADS, os.cpu_count() or 1), "prefault") as pool:
            list(pool.map(some, range(0, self.size, _PREFAULT)))

    def cell(self, place: int) -> memoryview:
        """Return a cell's memory."""
        return self._view[place : place + CELL]

    def close(self) -> None:
        """Let go of it. Nothing may use `address` any more."""
        if self.descriptor >= 0:
            os.close(self.descriptor)
            self.descriptor = -1


_OUT_OF_MEMORY = "CUDA_ERROR_OUT_OF_MEMORY"


class Worker(Client):
    """A worker process (a context manager: on exit it ends).

    Args:
        word, gpus: See `icecore.host.gpu.client.program`.
        start: How it is started.
    """

    _patience = 300.0

    def __init__(self, word: str, start: Start = start_here, gpus: Collection[str] = ()) -> None:
        super().__init__(partial(start, program("worker", word, gpus)), "worker")
        self._handles = 0
        self._lingers = False

    @property
    def pid(self) -> int:
        """Return the worker's pid.

        Raises:
            WorkerFailed: It did not come up.
        """
        return int(self._result(self._ready, _START_SECONDS).value)

    def new_handles(self, some: int) -> list[int]:
        """Return numbers for `map` and `allocate`."""
        with self._lock:
            first, self._handles = self._handles, self._handles + some
        return list(range(first, first + some))

    # -- calls; all raise WorkerFailed

    def begin(self, devices: Sequence[str], *, fingerprints: bool = True) -> dict[str, int]:
        """Prepare these GPUs, with `fingerprints` if they will be wanted; return their free bytes."""
        calls = {
            device: self._begin("begin", device, fingerprints=fingerprints) for device in devices
        }
        return {device: int(self._result(call).value) for device, call in calls.items()}

    def take_host(self, region: HostRegion, device: str) -> None:
        """Share and pin a region, through one GPU for all. It must outlive the worker."""
        self._result(self._begin("host", device, [region.descriptor], size=region.size))
        self._result(self._begin("pin", device, size=region.size))

    @contextmanager
    def connect(self, device: str) -> Iterator[socket.socket]:
        """Yield a socket to a GPU's thread for another process, which gets it within the block
        (`icecore.host.resident.gpu_thread`).
        """
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours, theirs:
            self._result(self._begin("connect", device, [theirs.fileno()]))
            yield ours

    def map(
        self,
        device: str,
        handles: Sequence[int],
        sizes: Sequence[int],
        descriptors: Sequence[int],
        seconds: float = _patience,
    ) -> None:
        """Map the memory of descriptors."""
        calls = [
            self._begin(
                "map",
                device,
                descriptors[at:end],
                handles=list(handles[at:end]),
                sizes=list(sizes[at:end]),
            )
            for at, end in _parts(len(handles))
        ]
        for call in calls:
            self._result(call, seconds)

    def allocate(self, device: str, handles: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """Allocate zeroed memory on a GPU; return descriptors, which the caller closes."""
        found: list[int] = []
        calls = [
            self._begin(
                "allocate", device, handles=list(handles[at:end]), sizes=list(sizes[at:end])
            )
            for at, end in _parts(len(handles))
        ]
        failed: WorkerFailed | None = None
        for call in calls:
            try:
                found.extend(self._result(call).descriptors)
            except WorkerFailed as error:
                failed = failed or error
        if failed is not None:
            for descriptor in found:
                os.close(descriptor)
            raise failed
        return found

    def fingerprints(
        self, device: str, handles: Sequence[int], seed: int, seconds: float = _patience
    ) -> Words:
        """Return the fingerprints of all cells of these, one after the other."""
        call = self._begin("fingerprints", device, handles=list(handles), seed=seed)
        return _array(self._result(call, seconds), np.dtype(np.uint64)).reshape(-1, 2)

    def spare_fingerprints(self, device: str, seed: int, seconds: float = _patience) -> Words:
        """Return the fingerprints of all cells of the spare memory that the last `stage` took."""
        return self.fingerprints(device, [SPARE], seed, seconds)

    def stage(
        self,
        device: str,
        handles: Sequence[int],
        mask: npt.NDArray[np.bool_],
        host_at: int,
        host_size: int,
        *,
        spare: int,
        seconds: float = _patience,
    ) -> npt.NDArray[np.int64]:
        """Copy the masked cells of these to so many bytes of spare device memory and to that part
        of the host region; for each such cell where it is now (`icecore.host.resident.gpu.NOWHERE`,
        ``ON_DEVICE``).
        """
        given = as_memory(mask)
        try:
            call = self._begin(
                "stage",
                device,
                [given],
                handles=list(handles),
                host_at=host_at,
                host_size=host_size,
                spare=spare,
            )
        finally:
            os.close(given)
        return _array(self._result(call, seconds), np.dtype(np.int64))

    def fetch(self, device: str, cells: Sequence[tuple[int, int]], places: Sequence[int]) -> Call:
        """Begin to copy cells, (number or `SPARE`, offset) each, to places of the host region;
        `finish` waits for it.
        """
        return self._begin("fetch", device, cells=list(cells), places=list(places))

    def place(self, device: str, cells: Sequence[tuple[int, int]], places: Sequence[int]) -> Call:
        """Begin to copy cells from the host region to their places, the reverse of `fetch`."""
        return self._begin("place", device, cells=list(cells), places=list(places))

    def prepare_digests(self, devices: Sequence[str]) -> list[Call]:
        """Begin to prepare `digests` on GPUs that have begun; `finish` waits for each."""
        return [self._begin("prepare-digests", device) for device in devices]

    def digests(self, device: str, cells: Sequence[tuple[int, int]], key: bytes) -> Digests:
        """Return the digests of cells, (number, offset) each (`icecore.host.resident.digest`): at
        most 1024, while other cells are placed.
        """
        call = self._begin("digests", device, cells=list(cells), key=key.hex())
        value = self._result(call).value
        return np.frombuffer(bytes.fromhex(value), np.uint8).reshape(-1, BYTES)

    def finish(self, call: Call) -> None:
        """Wait for a call that was begun."""
        self._result(call)

    def release(
        self,
        device: str,
        handles: Sequence[int] = (),
        *,
        spare: bool = False,
        seconds: float = _patience,
    ) -> None:
        """Release what was mapped or allocated, and the spare memory."""
        call = self._begin("release", device, handles=list(handles), spare=spare)
        self._result(call, seconds)

    @property
    def gone(self) -> bool:
        """Return whether it has ended and released everything."""
        return self._lost

    def kill(self) -> None:
        """End it at once because it does not respond. It releases what it had mapped."""
        if self._process is not None:
            self._process.kill()

    def linger(self, seconds: float) -> None:
        """Make it end only this long after `close`, which then does not wait for it: the driver
        takes 0.15 s to release its memory, and delays all other processes' calls meanwhile (H200).
        """
        self._result(self._begin("linger", "", seconds=seconds))
        self._lingers = True

    # -- within

    def _await_end(self, process: subprocess.Popen[bytes]) -> None:
        if self._lingers:
            threading.Thread(target=process.wait, name="worker's end", daemon=True).start()
            return
        try:
            process.wait(_END_SECONDS)
        except subprocess.TimeoutExpired:  # the driver hangs in it; nobody depends on it
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_END_SECONDS)

    def _refused(self, call: Call, why: Refusal) -> WorkerFailed:
        if _OUT_OF_MEMORY in why.text:
            return WorkerFailed(
                f"too little free GPU memory for icecore's worker, which requires about 0.5 GB: {why.text}",
                cure="free GPU memory ('nvidia-smi' lists its users), or have the job leave some free",
            )
        return WorkerFailed(
            f"the GPU worker failed: {why.text}",
            cure="look into the kernel's log for what the driver says",
        )

    def _died(self, call: Call) -> WorkerFailed:
        return WorkerFailed(
            "the GPU worker ended", cure="look why it was killed (out of memory?), and try again"
        )

    def _late(self, call: Call, seconds: float) -> WorkerFailed:
        return WorkerFailed(f"the GPU worker did not answer {call.name} within {seconds:.0f} s")


def _parts(some: int) -> list[tuple[int, int]]:
    return [(at, min(some, at + MOST_DESCRIPTORS)) for at in range(0, some, MOST_DESCRIPTORS)]


def _array(answer: Answer, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    try:
        return from_memory(answer.descriptors[0], dtype)
    finally:
        for descriptor in answer.descriptors:
            os.close(descriptor)


def fetch_through(
    worker: Worker,
    region: HostRegion,
    device: str,
    cells: Sequence[tuple[int, int]],
    take: Callable[[int, int], None],
) -> None:
    """Fetch cells, (number or `SPARE`, offset) each, through the region's first `RING` cells.

    Args:
        take: Gets each one's number in ``cells`` and its place in the region, where it stays until
            the next `RING` are fetched.

    Raises:
        WorkerFailed: It cannot be done.
    """
    assert region.size >= RING * CELL
    for at in range(0, len(cells), RING):
        some = cells[at : at + RING]
        places = [number * CELL for number in range(len(some))]
        worker.finish(worker.fetch(device, some, places))
        for number, place in enumerate(places):
            take(at + number, place)


def copy_cell(region: HostRegion, place: int, to: int) -> None:
    """Copy a cell of the region to an address of this process."""
    ctypes.memmove(to, region.address + place, CELL)
