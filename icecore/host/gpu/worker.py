"""The worker: a process that maps the resident memory of others, fingerprints it and copies it. If
it dies, the snapshot fails and the job runs on.

It holds no process and no lock, and what it has mapped its owners have too. It ends with its
socket. Each GPU has a thread, which makes all calls for it in their order, and one for digests;
GPUs go at the same time.

It answers calls (`icecore.host.rpc.calls`); arrays travel in memfds. The *host region* is a memfd of
its client's: both have it mapped, and it is pinned here.

Its client can connect others to a GPU's thread (`icecore.host.resident.gpu_thread`), which has
cells of theirs placed until they are gone.

Arguments: as of `icecore.host.gpu.helper`.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import queue
import socket
import sys
import threading
import time
from contextlib import suppress
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from icecore.host.gpu import backend
from icecore.host.resident.gpu import Gpu
from icecore.host.resident.gpu_thread import GpuThread
from icecore.host.rpc import packets, peer
from icecore.host.rpc.calls import Refusal, Request, begun, requests
from icecore.text import harmless

#: Descriptors of one call.
MOST_DESCRIPTORS = 200
#: Bytes of a request from which on a faster parser pays.
_LARGE = 1 << 18
#: Calls of a GPU's second thread; `begin` comes first.
_DIGESTS = ("prepare-digests", "digests")


def _decoded(data: bytes) -> Any:
    """Parse a request. msgspec takes longer to import than a small one takes to parse."""
    if len(data) < _LARGE:
        return json.loads(data)
    import msgspec

    return msgspec.json.decode(data)


class _Server:
    def __init__(self, control: socket.socket) -> None:
        self._control = control
        self._backend = backend.find_backend()
        self._threads: dict[str, tuple[GpuThread, queue.SimpleQueue[Request]]] = {}
        self._host: mmap.mmap | None = None
        self._host_address = 0
        self._linger = 0.0

    def serve(self) -> None:
        begun(self._control).answer(os.getpid())
        for request in requests(self._control, _decoded):
            self._take(request)
        time.sleep(self._linger)
        # What is mapped and pinned goes with the process: the driver takes as long as it needs.
        os._exit(0)

    def _take(self, request: Request) -> None:
        match request.call:
            case "host":
                self._take_host(request)
            case "linger":
                self._linger = float(request.about["seconds"])
                request.answer()
            case call:
                calls, digests = self._threads_of(request.of)
                (digests if call in _DIGESTS else calls).put(request)

    def _take_host(self, request: Request) -> None:
        self._host = mmap.mmap(request.descriptors[0], request.about["size"])
        self._host_address = ctypes.addressof(ctypes.c_char.from_buffer(self._host))
        os.close(request.descriptors[0])
        request.answer()

    def _threads_of(self, device: str) -> tuple[GpuThread, queue.SimpleQueue[Request]]:
        if device not in self._threads:
            gpu = Gpu(lambda: self._backend.memory(device), lambda: self._host_address)
            calls = GpuThread(gpu, partial(_answer, gpu))
            digests: queue.SimpleQueue[Request] = queue.SimpleQueue()
            calls.start()
            threading.Thread(
                target=_answer_all, args=(gpu, digests), name="digests", daemon=True
            ).start()
            self._threads[device] = (calls, digests)
        return self._threads[device]


def _answer_all(gpu: Gpu, requests: queue.SimpleQueue[Request]) -> None:
    """Run a GPU's second thread, for digests, which are computed while cells are placed."""
    while True:
        _answer(gpu, requests.get())


def _answer(gpu: Gpu, request: Request) -> None:
    given: list[int] = []
    try:
        value = _make(gpu, request.call, request.about, request.descriptors, given)
        request.answer(value, given)
    except Exception as error:  # noqa: BLE001 - told to the client, which waits for an answer
        request.refuse(Refusal(harmless(f"{type(error).__name__}: {error}")))
    finally:
        for descriptor in (*request.descriptors, *given):
            os.close(descriptor)


def _make(
    gpu: Gpu, call: str, about: dict[str, Any], descriptors: list[int], given: list[int]
) -> object:
    """Carry out a request; descriptors for the answer go into ``given``."""
    match call:
        case "begin":
            return gpu.begin(about["fingerprints"])
        case "pin":
            gpu.pin(about["size"])
        case "map":
            gpu.map(about["handles"], about["sizes"], descriptors)
        case "allocate":
            given.extend(gpu.allocate(about["handles"], about["sizes"]))
        case "fingerprints":
            given.append(as_memory(gpu.fingerprints(about["handles"], about["seed"])))
        case "stage":
            mask = from_memory(descriptors[0], np.dtype(np.bool_))
            given.append(
                as_memory(
                    gpu.stage(
                        about["handles"],
                        mask,
                        about["host_at"],
                        about["host_size"],
                        about["spare"],
                    )
                )
            )
        case "fetch":
            gpu.fetch(about["cells"], about["places"])
        case "release":
            gpu.release(about["handles"], about["spare"])
        case "prepare-digests":
            gpu.memory.prepare_digests()
        case "digests":
            return gpu.digests(about["cells"], bytes.fromhex(about["key"]))
        case unknown:
            raise ValueError(f"there is no call {unknown}")
    return None


def as_memory(array: npt.NDArray[Any]) -> int:
    """Return a memfd with an array's bytes, which the caller closes."""
    return packets.to_memory(array.tobytes())


def from_memory(descriptor: int, dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """Return the array in a memfd, which the caller still owns."""
    return np.frombuffer(packets.from_memory(descriptor), dtype)


def main() -> None:
    """Run the worker: ``worker CONTROL_FD LIFE_FD WORD [GPUS]``."""
    peer.ignore_signals()
    control = peer.take_over(int(sys.argv[1]))
    backend.see_gpus(sys.argv[4:])
    # It is not to be the one that keeps a job from its memory.
    with suppress(OSError), open("/proc/self/oom_score_adj", "w", encoding="ascii") as file:
        file.write("500")
    _Server(control).serve()


if __name__ == "__main__":
    main()
