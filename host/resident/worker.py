"""The worker: a process that maps the resident memory of others, fingerprints it and copies it; rule: whatever becomes of it costs a snapshot, never a job.

It holds no process and no lock, and what it has mapped its owners have too. It ends with its socket. Each GPU has a thread, which makes all calls for it in
their order, and one for digests; GPUs go at the same time.

Over a SOCK_SEQPACKET socket it gets one JSON object a message, ``{"id": 1, "call": "map", "device": "GPU-…", …}``, with descriptors where the call needs
them, and answers ``{"id": 1, "value": …}``, with descriptors where there are some, or ``{"id": 1, "error": TEXT}``. What is long travels in a memfd. The
*host region* is a memfd of its client's: both have it mapped, and it is pinned here.

Its client can connect others (`icecore.restorer.stager`), whose requests are answered alike until they are gone.

Arguments: as of `icecore.host.cuda.helper`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import selectors
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.host.cuda.backend import find_backend
from icecore.host.resident.copyplan import To, plan_copies
from icecore.host.resident.fingerprint import CELL
from icecore.host.resident.memory import Addresses, DeviceMemory, MemoryFailed, Piece

MESSAGE = 1 << 18
#: Descriptors in one message; the kernel's bound is 253.
MOST_DESCRIPTORS = 200
#: What `stage` answers for a cell for which there was no room; else the place in the host region, or, from here on, in spare device memory.
NOWHERE, ON_DEVICE = -1, 1 << 62
_STREAMS = 4
#: Calls of a GPU's second thread; `begin` comes first.
_DIGESTS = ("prepare-digests", "digests")
#: Of the device's free memory what copies may take, and what is left in any case.
_SHARE, _LEFT = 0.5, 256 << 20


def spare_room(free: int) -> int:
    """Bytes of device memory that copies may take where so much is free: the job goes on while they are there."""
    return max(0, int(free * _SHARE) - _LEFT) // CELL * CELL


class Gpu:
    """One GPU: its memory, and what is mapped of the jobs'. All but the constructor and digests is called by its thread."""

    def __init__(self, connect: Callable[[], DeviceMemory], host: Callable[[], int]) -> None:
        self._connect = connect
        self._host = host
        self._memory: DeviceMemory | None = None
        self._held: dict[int, tuple[int, int]] = {}
        self._spare: tuple[int, int] | None = None
        self._pinned = False

    @property
    def memory(self) -> DeviceMemory:
        """Connected when first needed."""
        if self._memory is None:
            self._memory = self._connect()
        return self._memory

    def begin(self, fingerprints: bool) -> int:
        """Free bytes."""
        if fingerprints:
            self.memory.prepare()
        return self.memory.room()

    def pin(self, size: int) -> None:
        """Pin the host region, for all GPUs."""
        self.memory.pin(self._host(), size)
        self._pinned = True

    def map(self, handles: Sequence[int], sizes: Sequence[int], descriptors: Sequence[int]) -> None:
        """Map what descriptors hold, under numbers of the client's."""
        for handle, size, descriptor in zip(handles, sizes, descriptors, strict=True):
            self._held[handle] = (self.memory.map(descriptor, size), size)

    def allocate(self, handles: Sequence[int], sizes: Sequence[int]) -> list[int]:
        """New memory; descriptors."""
        made: list[int] = []
        try:
            for handle, size in zip(handles, sizes, strict=True):
                address, descriptor = self.memory.allocate(size)
                self._held[handle] = (address, size)
                made.append(descriptor)
        except BaseException:
            for descriptor in made:
                os.close(descriptor)
            raise
        return made

    def fingerprints(self, handles: Sequence[int], seed: int) -> npt.NDArray[np.uint64]:
        """Of all cells of these, one after the other."""
        cells = [np.arange(at, at + size, CELL, dtype=np.uint64) for at, size in (self._held[h] for h in handles)]
        addresses: Addresses = np.concatenate(cells) if cells else np.empty(0, np.uint64)
        return self.memory.fingerprints(addresses, seed)

    def stage(self, handles: Sequence[int], mask: npt.NDArray[np.bool_], host_at: int, host_size: int) -> npt.NDArray[np.int64]:
        """Copy the masked cells of these to where there is room; for each such cell its place."""
        counts = [self._held[handle][1] // CELL for handle in handles]
        bounds = np.cumsum([0, *counts])
        wanted = int(mask.sum()) * CELL
        room = min(wanted, spare_room(self.memory.room()))
        spare = self._take(room)
        masks = {handle: mask[bounds[i] : bounds[i + 1]] for i, handle in enumerate(handles)}
        plan = plan_copies(masks, device_room=spare[1], host_room=host_size, streams=_STREAMS)
        place = np.full(len(mask), NOWHERE, np.int64)
        first = dict(zip(handles, bounds.tolist(), strict=False))
        pieces = []
        for copy in plan.copies:
            base, code = (spare[0], ON_DEVICE) if copy.to is To.DEVICE else (self._host() + host_at, host_at)
            pieces.append(Piece(base + copy.place, self._held[copy.allocation][0] + copy.offset, copy.size, copy.stream))
            row = first[copy.allocation] + copy.offset // CELL
            cells = copy.size // CELL
            place[row : row + cells] = code + copy.place + CELL * np.arange(cells)
        self.memory.copy(pieces)
        return place[mask]

    def _take(self, room: int) -> tuple[int, int]:
        """Spare device memory; less where the device has it only in pieces, or somebody else was faster."""
        self._give()
        while room:
            try:
                self._spare = (self.memory.take(room), room)
                return self._spare
            except MemoryFailed:
                room = room // 2 // CELL * CELL
        return (0, 0)

    def _give(self) -> None:
        spare, self._spare = self._spare, None
        if spare is not None:
            self.memory.give(spare[0])

    def fetch(self, cells: Sequence[tuple[int, int]], places: Sequence[int]) -> None:
        """Copy cells to places of the host region: (number or -1 for the spare memory, offset) each."""
        host = self._host()
        self.memory.copy(_joined([(host + place, self._base(handle) + offset) for (handle, offset), place in zip(cells, places, strict=True)]))

    def place(self, cells: Sequence[tuple[int, int]], places: Sequence[int], lane: int) -> None:
        """Begin the reverse of `fetch`."""
        host = self._host()
        moves = [(self._base(handle) + offset, host + place) for (handle, offset), place in zip(cells, places, strict=True)]
        self.memory.start(_joined(moves), lane)

    def digests(self, cells: Sequence[tuple[int, int]], key: bytes) -> str:
        """Of cells, (number, offset) each, in hexadecimal digits. Called by a thread of its own."""
        addresses = np.array([self._held[handle][0] + offset for handle, offset in cells], np.uint64)
        return self.memory.digests(addresses, key).tobytes().hex()

    def _base(self, handle: int) -> int:
        if handle >= 0:
            return self._held[handle][0]
        if self._spare is None:
            raise MemoryFailed("there is no spare memory")
        return self._spare[0]

    def release(self, handles: Sequence[int], spare: bool) -> None:
        """Let go of these, and of the spare memory."""
        for handle in handles:
            found = self._held.pop(handle, None)
            if found is not None:
                self.memory.unmap(found[0])
        if spare:
            self._give()


def _joined(cells: Sequence[tuple[int, int]]) -> list[Piece]:
    """Copies of cells, (to, from) each: neighbours in one piece, pieces over the streams."""
    runs: list[tuple[int, int, int]] = []
    for to, source in cells:
        if runs and (runs[-1][0] + runs[-1][2], runs[-1][1] + runs[-1][2]) == (to, source):
            runs[-1] = (*runs[-1][:2], runs[-1][2] + CELL)
        else:
            runs.append((to, source, CELL))
    return [Piece(*run, number % _STREAMS) for number, run in enumerate(runs)]


class _Item(NamedTuple):
    """A request, the descriptors that came with it, and where its answer goes."""

    request: dict[str, Any]
    descriptors: list[int]
    control: socket.socket


_Queue: TypeAlias = "queue.SimpleQueue[_Item]"


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._backend = find_backend()
        self._queues: dict[str, tuple[_Queue, _Queue]] = {}
        self._host: mmap.mmap | None = None
        self._host_address = 0
        self._linger = 0.0

    def serve(self) -> None:
        _say(self._control, {"id": 0, "value": os.getpid()})
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select():
                    assert isinstance(key.fileobj, socket.socket)
                    if not self._receive(key.fileobj, selector):
                        time.sleep(self._linger)
                        # What is mapped and pinned goes with the process: the driver takes as long as it needs.
                        os._exit(0)

    def _receive(self, control: socket.socket, selector: selectors.BaseSelector) -> bool:
        """Take a request; False: the client is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(control, MESSAGE, MOST_DESCRIPTORS)
        except OSError:
            data, descriptors = b"", []
        if not data:
            if control is self._control:
                return False
            selector.unregister(control)
            control.close()
            return True
        item = _Item(msgspec.json.decode(data), descriptors, control)
        match item.request["call"]:
            case "host":
                self._take_host(item)
            case "linger":
                self._linger = float(item.request["seconds"])
                _say(control, {"id": item.request["id"], "value": None})
            case "connect":
                selector.register(socket.socket(fileno=descriptors[0]), selectors.EVENT_READ)
                _say(control, {"id": item.request["id"], "value": None})
            case _:
                self._queue(item.request["device"], item.request["call"]).put(item)
        return True

    def _take_host(self, item: _Item) -> None:
        self._host = mmap.mmap(item.descriptors[0], item.request["size"])
        self._host_address = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
        os.close(item.descriptors[0])
        _say(item.control, {"id": item.request["id"], "value": None})

    def _queue(self, device: str, call: str) -> _Queue:
        if device not in self._queues:
            queues: tuple[_Queue, _Queue] = (queue.SimpleQueue(), queue.SimpleQueue())
            gpu = Gpu(lambda: self._backend.memory(device), lambda: self._host_address)
            for work, own in zip((_work, _answer_all), queues, strict=True):
                threading.Thread(target=work, args=(gpu, own), daemon=True).start()
            self._queues[device] = queues
        return self._queues[device][call in _DIGESTS]


def _say(control: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    with suppress(OSError):  # nobody is there any more
        socket.send_fds(control, [msgspec.json.encode(message)], list(descriptors))


def _work(gpu: Gpu, requests: _Queue) -> None:
    """A GPU's thread. Cells go to their places in two lanes: while those of one are on their way the other's begin, so that the bus does not rest."""
    going: _Going | None = None
    following: _Item | None = None
    while True:
        item = following or _next(requests, wait=going is None)
        following = None
        if item is None or item.request["call"] != "place":
            _arrived(gpu, going)
            going = None
            if item is not None:
                _answer(gpu, item)
            continue
        together = [item]
        while (following := _next(requests, wait=False)) is not None and following.request["call"] == "place":
            together.append(following)
        going = _send_off(gpu, together, 0 if going is None else 1 - going.lane, going)


def _next(requests: _Queue, *, wait: bool) -> _Item | None:
    try:
        return requests.get(block=wait)
    except queue.Empty:
        return None


class _Going(NamedTuple):
    """Requests to place cells that are under way."""

    lane: int
    items: list[_Item]


def _send_off(gpu: Gpu, items: list[_Item], lane: int, before: _Going | None) -> _Going | None:
    """Begin with these, then end those of the other lane."""
    failure = ""
    try:
        cells, places = ([value for one in items for value in one.request[name]] for name in ("cells", "places"))
        gpu.place(cells, places, lane)
    except Exception as error:  # noqa: BLE001 - told to the clients, which wait for an answer
        failure = f"{type(error).__name__}: {error}"
    _arrived(gpu, before)
    if not failure:
        return _Going(lane, items)
    with suppress(Exception):  # some may have begun: nobody writes to their sources before these have ended
        gpu.memory.wait(lane)
    for one in items:
        _say(one.control, {"id": one.request["id"], "error": failure})
    return None


def _arrived(gpu: Gpu, going: _Going | None) -> None:
    """Wait for a lane, and tell whoever asked."""
    if going is None:
        return
    answer: dict[str, Any] = {"value": None}
    try:
        gpu.memory.wait(going.lane)
    except Exception as error:  # noqa: BLE001 - as above
        answer = {"error": f"{type(error).__name__}: {error}"}
    for one in going.items:
        _say(one.control, {"id": one.request["id"], **answer})


def _answer_all(gpu: Gpu, requests: _Queue) -> None:
    """A GPU's second thread, for digests, which are made while cells go to their places."""
    while True:
        _answer(gpu, requests.get())


def _answer(gpu: Gpu, item: _Item) -> None:
    given: list[int] = []
    try:
        value = _make(gpu, item.request, item.descriptors, given)
        _say(item.control, {"id": item.request["id"], "value": value}, given)
    except Exception as error:  # noqa: BLE001 - told to the client, which waits for an answer
        _say(item.control, {"id": item.request["id"], "error": f"{type(error).__name__}: {error}"})
    finally:
        for descriptor in (*item.descriptors, *given):
            os.close(descriptor)


def _make(gpu: Gpu, request: dict[str, Any], descriptors: list[int], given: list[int]) -> object:
    """Carry a request out; descriptors for the answer go into ``given``."""
    match request["call"]:
        case "begin":
            return gpu.begin(request["fingerprints"])
        case "pin":
            gpu.pin(request["size"])
        case "map":
            gpu.map(request["handles"], request["sizes"], descriptors)
        case "allocate":
            given.extend(gpu.allocate(request["handles"], request["sizes"]))
        case "fingerprints":
            given.append(as_memory(gpu.fingerprints(request["handles"], request["seed"])))
        case "stage":
            mask = from_memory(descriptors[0], np.dtype(np.bool_))
            given.append(as_memory(gpu.stage(request["handles"], mask, request["host_at"], request["host_size"])))
        case "fetch":
            gpu.fetch(request["cells"], request["places"])
        case "release":
            gpu.release(request["handles"], request["spare"])
        case "prepare-digests":
            gpu.memory.prepare_digests()
        case "digests":
            return gpu.digests(request["cells"], bytes.fromhex(request["key"]))
        case unknown:
            raise ValueError(f"there is no call {unknown}")
    return None


def as_memory(array: npt.NDArray[Any]) -> int:
    """A memfd with an array's bytes; the caller's to close."""
    made = os.memfd_create("icecore-worker", os.MFD_CLOEXEC)
    with open(made, "wb", closefd=False, buffering=0) as file:
        left = memoryview(array.tobytes())
        while left:
            left = left[file.write(left) :]
    return made


def from_memory(descriptor: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """The array in a memfd, which stays the caller's."""
    size = os.fstat(descriptor).st_size
    data = bytearray(size)
    view, done = memoryview(data), 0
    while done < size:
        got = os.preadv(descriptor, [view[done:]], done)
        if got == 0:
            raise ValueError("a memfd that was cut off")
        done += got
    return np.frombuffer(data, dtype)


def main() -> None:
    """Entry: ``worker CONTROL_FD LIFE_FD WORD``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)  # its client may use any GPU, whatever its starter sees
    # It is not to be the one that keeps a job from its memory.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")
    _Server(control).serve()


if __name__ == "__main__":
    main()
