"""The worker: a process that maps the resident memory of others, fingerprints it and copies it. If
it dies, the snapshot fails and the job runs on.

It holds no process and no lock, and what it has mapped its owners have too. It ends with its
socket. Each GPU has a thread, which makes all calls for it in their order, and one for digests;
GPUs go at the same time.

Over a SOCK_SEQPACKET socket it gets one JSON object a message, ``{"id": 1, "call": "map", "device":
"GPU-…", …}``, with descriptors where the call needs them, and answers ``{"id": 1, "value": …}``,
with descriptors where there are some, or ``{"id": 1, "error": TEXT}``. What is long travels in a
memfd, a long request (`LONG`) too. The *host region* is a memfd of its client's: both have it
mapped, and it is pinned here.

Its client can connect others to a GPU's thread (`icecore.host.resident.gpu_thread`), which has
cells of theirs placed until they are gone.

Arguments: as of `icecore.host.gpu.helper`.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import queue
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from icecore.host.gpu.backend import find_backend
from icecore.host.resident.gpu import Gpu
from icecore.host.resident.gpu_thread import GpuThread, Item
from icecore.text import harmless

MESSAGE = 1 << 18
#: A request that is longer: it lies in a memfd, the last descriptor (a job can have hundreds of
#: thousands of allocations).
LONG = b"long"
#: Descriptors in one message; the kernel's bound is 253.
MOST_DESCRIPTORS = 200
#: Calls of a GPU's second thread; `begin` comes first.
_DIGESTS = ("prepare-digests", "digests")


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._backend = find_backend()
        self._threads: dict[str, tuple[GpuThread, queue.SimpleQueue[Item]]] = {}
        self._host: mmap.mmap | None = None
        self._host_address = 0
        self._linger = 0.0

    def serve(self) -> None:
        _say(self._control, {"id": 0, "value": os.getpid()})
        while self._receive():
            pass
        time.sleep(self._linger)
        # What is mapped and pinned goes with the process: the driver takes as long as it needs.
        os._exit(0)

    def _receive(self) -> bool:
        """Take a request; return False if the client is gone."""
        try:
            data, descriptors, _, _ = socket.recv_fds(self._control, MESSAGE, MOST_DESCRIPTORS + 1)
        except OSError:
            data, descriptors = b"", []
        if not data:
            return False
        if data == LONG:
            body = descriptors.pop()
            data = from_memory(body, np.dtype(np.uint8)).tobytes()
            os.close(body)
        item = Item(msgspec.json.decode(data), descriptors, self._control)
        match item.request["call"]:
            case "host":
                self._take_host(item)
            case "linger":
                self._linger = float(item.request["seconds"])
                _done(item)
            case call:
                calls, digests = self._threads_of(item.request["device"])
                (digests if call in _DIGESTS else calls).put(item)
        return True

    def _take_host(self, item: Item) -> None:
        self._host = mmap.mmap(item.descriptors[0], item.request["size"])
        self._host_address = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
        os.close(item.descriptors[0])
        _done(item)

    def _threads_of(self, device: str) -> tuple[GpuThread, queue.SimpleQueue[Item]]:
        if device not in self._threads:
            gpu = Gpu(lambda: self._backend.memory(device), lambda: self._host_address)
            calls = GpuThread(gpu, partial(_answer, gpu), _done)
            digests: queue.SimpleQueue[Item] = queue.SimpleQueue()
            calls.start()
            threading.Thread(
                target=_answer_all, args=(gpu, digests), name="digests", daemon=True
            ).start()
            self._threads[device] = (calls, digests)
        return self._threads[device]


def _say(control: socket.socket, message: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    with suppress(OSError):  # nobody is there any more
        socket.send_fds(control, [msgspec.json.encode(message)], list(descriptors))


def _answer_all(gpu: Gpu, requests: queue.SimpleQueue[Item]) -> None:
    """Run a GPU's second thread, for digests, which are computed while cells are placed."""
    while True:
        _answer(gpu, requests.get())


def _answer(gpu: Gpu, item: Item) -> None:
    given: list[int] = []
    try:
        value = _make(gpu, item.request, item.descriptors, given)
        _say(item.control, {"id": item.request["id"], "value": value}, given)
    except Exception as error:  # noqa: BLE001 - told to the client, which waits for an answer
        _done(item, harmless(f"{type(error).__name__}: {error}"))
    finally:
        for descriptor in (*item.descriptors, *given):
            os.close(descriptor)


def _done(item: Item, error: str = "") -> None:
    """Answer a request that returns no value."""
    _say(
        item.control, {"id": item.request["id"], **({"error": error} if error else {"value": None})}
    )


def _make(gpu: Gpu, request: dict[str, Any], descriptors: list[int], given: list[int]) -> object:
    """Carry out a request; descriptors for the answer go into ``given``."""
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
            given.append(
                as_memory(
                    gpu.stage(
                        request["handles"],
                        mask,
                        request["host_at"],
                        request["host_size"],
                        request["spare"],
                    )
                )
            )
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
    """Return a memfd with an array's bytes, which the caller closes."""
    made = os.memfd_create("icecore-worker", os.MFD_CLOEXEC)
    with open(made, "wb", closefd=False, buffering=0) as file:
        left = memoryview(array.tobytes())
        while left:
            left = left[file.write(left) :]
    return made


def from_memory(descriptor: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the array in a memfd, which the caller still owns."""
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
    """Run the worker: ``worker CONTROL_FD LIFE_FD WORD``."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_IGN)
    control = socket.socket(fileno=int(sys.argv[1]))
    os.set_inheritable(control.fileno(), False)
    os.environ.pop(
        "CUDA_VISIBLE_DEVICES", None
    )  # its client may use any GPU, whatever its starter sees
    # It is not to be the one that keeps a job from its memory.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")
    _Server(control).serve()


if __name__ == "__main__":
    main()
