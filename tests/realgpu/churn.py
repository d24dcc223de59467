"""A job that constantly changes its objects on the GPU, or the processes that use the GPU. It writes
a line ``STEP DIGEST`` for each step, the same in each run.

python churn.py memory|processes|jax OUT

memory: tensors, pinned and registered memory, streams, graphs and kernels of PyTorch come and go,
while another thread allocates and computes, too.
processes: programs that use the driver API start, work for a moment, and end.
jax: arrays come and go, and programs are compiled for new shapes.
"""

from __future__ import annotations

import hashlib
import mmap
import random
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

_SLOTS = 10
_SIZES = (1 << 10, 1 << 16, 1 << 20, 3 << 20, 21 << 20, 96 << 20)
_PAUSE = 0.01
_KERNEL = """
extern "C" __global__ void turn(unsigned char *data, int count)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < count)
        data[at] = data[at] * %d + %d;
}
"""


class Memory:
    """Objects of PyTorch on the GPU, in slots that are refilled constantly."""

    def __init__(self) -> None:
        import torch

        self._torch = torch
        self._random = random.Random(5)
        self._host = torch.Generator().manual_seed(6)
        self._device = torch.Generator("cuda").manual_seed(7)
        self._slots: dict[int, tuple[Callable[[int], None], Callable[[], Any]]] = {}
        self._release: dict[int, Callable[[], None]] = {}
        self._kinds: tuple[Callable[[], tuple[Any, ...]], ...] = (
            *(self._tensor, self._tensor, self._pinned, self._registered),
            *(self._graph, self._compiled, self._streamed),
        )

    def replace(self) -> None:
        """Empty a slot, and usually fill it with another object."""
        slot = self._random.randrange(_SLOTS)
        self._slots.pop(slot, None)
        self._release.pop(slot, lambda: None)()
        chance = self._random.random()
        if chance < 0.15:
            self._torch.cuda.empty_cache()
        if chance < 0.25:
            return
        change, content, *release = self._random.choice(self._kinds)()
        self._slots[slot] = change, content
        if release:
            self._release[slot] = release[0]

    def step(self, number: int) -> str:
        """Change all objects; return a digest of their contents."""
        torch = self._torch
        for change, _ in self._slots.values():
            change(number)
        torch.cuda.synchronize()
        hasher = hashlib.sha256()
        for slot, (_, content) in sorted(self._slots.items()):
            data = content().cuda()
            weights = torch.arange(len(data), device="cuda") % 65521
            hasher.update(f"{slot} {int((data.long() * weights).sum())};".encode())
        return hasher.hexdigest()[:16]

    def _size(self) -> int:
        return self._random.choice(_SIZES)

    def _made(self) -> Any:
        return self._torch.randint(
            0, 256, (self._size(),), dtype=self._torch.uint8, device="cuda", generator=self._device
        )

    def _tensor(self) -> tuple[Any, ...]:
        tensor = self._made()
        return lambda number: tensor.add_(number % 7), lambda: tensor

    def _pinned(self) -> tuple[Any, ...]:
        torch = self._torch
        host = torch.randint(
            0, 256, (self._size(),), dtype=torch.uint8, generator=self._host
        ).pin_memory()
        device = host.cuda(non_blocking=True)

        def change(number: int) -> None:
            device.add_(number % 5)
            if number % 3 == 0:
                host.copy_(device, non_blocking=True)

        return change, lambda: torch.cat([host.cuda(), device])

    def _registered(self) -> tuple[Any, ...]:
        torch = self._torch
        memory = mmap.mmap(-1, 1 << 20)
        host = torch.frombuffer(memory, dtype=torch.uint8)
        at, size = host.data_ptr(), len(host)
        assert int(torch.cuda.cudart().cudaHostRegister(at, size, 0)) == 0

        def change(number: int) -> None:
            host.copy_(host.cuda(non_blocking=True).add_(number % 9), non_blocking=True)

        def release() -> None:
            assert int(torch.cuda.cudart().cudaHostUnregister(at)) == 0

        return change, lambda: host, release

    def _graph(self) -> tuple[Any, ...]:
        torch = self._torch
        tensor = self._made()
        other = torch.zeros_like(tensor)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            other.add_(tensor)
            tensor.mul_(3)
        return lambda number: graph.replay(), lambda: torch.cat([tensor, other])

    def _compiled(self) -> tuple[Any, ...]:
        """A kernel that is compiled and loaded at this moment."""
        tensor = self._made()
        source = _KERNEL % (self._random.choice([3, 5, 7]), self._random.randrange(1000))
        kernel = self._torch.cuda._compile_kernel(source, "turn")
        grid = (len(tensor) + 255) // 256

        def change(number: int) -> None:
            kernel((grid, 1, 1), (256, 1, 1), (tensor, len(tensor)))

        return change, lambda: tensor

    def _streamed(self) -> tuple[Any, ...]:
        """Work on a stream of its own, ordered by events."""
        torch = self._torch
        tensor, stream = self._made(), torch.cuda.Stream()

        def change(number: int) -> None:
            begin = torch.cuda.Event()
            begin.record()
            with torch.cuda.stream(stream):
                stream.wait_event(begin)
                tensor.add_(number % 3)
                end = torch.cuda.Event()
                end.record(stream)
            torch.cuda.current_stream().wait_event(end)

        return change, lambda: tensor


def compute(wrong: list[str]) -> None:
    """Allocate, compute and free without a pause; add wrong results to ``wrong``."""
    import torch

    stream, number = torch.cuda.Stream(), 0
    with torch.cuda.stream(stream):
        while True:
            number += 1
            size = 1 << (10 + number % 14)
            found = int(torch.full((size,), number % 100, device="cuda").sum())
            if found != size * (number % 100):
                wrong.append(f"the sum of {size} times {number % 100} is {found}")
            time.sleep(0.001)


def memory() -> Iterator[str]:
    """Yield a digest for each step, in which two slots change."""
    wrong: list[str] = []
    slots, number = Memory(), 0
    threading.Thread(target=compute, args=(wrong,), daemon=True).start()
    while True:
        number += 1
        for _ in range(2):
            slots.replace()
        yield wrong[0] if wrong else slots.step(number)
        time.sleep(_PAUSE)


#: A program that needs the driver only for a moment.
_PROGRAM = """
import hashlib, sys
from cuda.bindings import driver as cuda
def checked(result):
    if int(result[0]):
        raise RuntimeError(result[0])
    return result[1] if len(result) > 1 else None
number = int(sys.argv[1])
checked(cuda.cuInit(0))
device = checked(cuda.cuDeviceGet(0))
checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(device))))
size = (number % 5 + 1) << 20
memory = checked(cuda.cuMemAlloc(size))
for turn in range(20):
    checked(cuda.cuMemsetD32(int(memory) + turn * 4096, number + turn, 1024))
data = bytearray(20 * 4096)
checked(cuda.cuMemcpyDtoH(data, memory, len(data)))
checked(cuda.cuMemFree(memory))
print(hashlib.sha256(data).hexdigest()[:16], flush=True)
if number % 2:
    checked(cuda.cuDevicePrimaryCtxRelease(device))
"""


def processes() -> Iterator[str]:
    """Yield the output and exit status of programs, two of which run at any time."""
    running: list[subprocess.Popen[str]] = []
    number = 0
    while True:
        while len(running) < 2:
            command = [sys.executable, "-c", _PROGRAM, str(number)]
            running.append(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
            number += 1
        first = running.pop(0)
        text, _ = first.communicate()
        yield f"{text.strip()} {first.returncode}"


def jax_arrays() -> Iterator[str]:
    """Yield a digest for each step; every third step compiles for a new shape."""
    import jax
    from jax import numpy as jnp

    @jax.jit
    def turn(data: Any, number: Any) -> Any:
        return data * 3 + number

    chance, number = random.Random(5), 0
    arrays: dict[int, Any] = {}
    while True:
        number += 1
        size = chance.choice(_SIZES) + (number if number % 3 == 0 else 0)
        key = jax.random.key(number)
        arrays[chance.randrange(_SLOTS)] = jax.random.bits(key, (size,), "uint8")
        arrays.pop(chance.randrange(_SLOTS), None)
        arrays = {slot: turn(data, jnp.uint8(number % 7)) for slot, data in arrays.items()}
        hasher = hashlib.sha256()
        for slot, data in sorted(arrays.items()):
            hasher.update(f"{slot} {int(data.astype('uint32').sum())};".encode())
        yield hasher.hexdigest()[:16]
        time.sleep(_PAUSE)


def main() -> None:
    steps = {"memory": memory, "processes": processes, "jax": jax_arrays}[sys.argv[1]]()
    with open(sys.argv[2], "a", encoding="ascii") as out:
        for number, step in enumerate(steps):
            print(number, step, file=out, flush=True)


if __name__ == "__main__":
    main()
