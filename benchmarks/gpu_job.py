"""The job of benchmarks/gpu.py: device memory that cannot be compressed, changes only on request,
and a clock that ticks with every step on the GPU.

python gpu_job.py STATE GIB DEVICE [--distinct GIB] [--memory torch|driver] [--block MIB].
STATE/progress: two 64-bit numbers, steps and the time of the last (ns since the epoch). STATE/order
holds "NUMBER SHARE": that share of the memory, in each block, is drawn anew, and NUMBER is then
written to STATE/done.

With ``--distinct`` only the first blocks are drawn, so much in all, and the others are copies of
them, also when they change: every cell differs from what it was, and has to be read, compared,
fetched and placed as any other, but a repository holds it once.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import struct
import time
from pathlib import Path
from typing import Any

MIB = 1 << 20


class Torch:
    """Blocks of PyTorch's."""

    def __init__(self, device: int, blocks: int, distinct: int, size: int) -> None:
        import torch

        self._torch: Any = torch
        torch.cuda.set_device(device)
        self._generator = torch.Generator("cuda").manual_seed(7)
        self._blocks = [
            torch.empty(size // 8, dtype=torch.int64, device="cuda") for _ in range(blocks)
        ]
        self._distinct = distinct
        self.draw(1.0)
        self._small = torch.ones(64, 64, device="cuda")

    def draw(self, share: float) -> None:
        """Have so much of each block hold something else."""
        for number, block in enumerate(self._blocks):
            part = block[: int(len(block) * share)]
            if number < self._distinct:
                part.random_(generator=self._generator)
            else:
                part.copy_(self._blocks[number % self._distinct][: len(part)])
        self._torch.cuda.synchronize()

    def step(self) -> None:
        """Have the GPU do something, and wait for it."""
        self._small = (self._small @ self._small).clamp(0, 1)
        self._small[0, 0].item()


class Driver:
    """Blocks of the driver's, which the host can write: those of the fake libcuda of
    tests/resident.
    """

    def __init__(self, device: int, blocks: int, distinct: int, size: int) -> None:
        cuda = ctypes.CDLL("libcuda.so.1")
        context = ctypes.c_void_p()
        assert cuda.cuInit(0) == 0
        assert cuda.cuCtxCreate_v2(ctypes.byref(context), 0, device) == 0
        self._blocks: list[int] = []
        for _ in range(blocks):
            address = ctypes.c_ulonglong()
            assert cuda.cuMemAlloc_v2(ctypes.byref(address), ctypes.c_ulonglong(size)) == 0
            self._blocks.append(address.value)
        self._cuda, self._distinct, self._size = cuda, distinct, size
        self.draw(1.0)

    def draw(self, share: float) -> None:
        """See `Torch`, as the next one."""
        size = int(self._size * share)
        for number, block in enumerate(self._blocks):
            source = (
                os.urandom(size)
                if number < self._distinct
                else self._blocks[number % self._distinct]
            )
            ctypes.memmove(block, source, size)

    def step(self) -> None:
        assert self._cuda.cuCtxSynchronize() == 0


def main() -> None:
    """Work until it is killed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("state", type=Path)
    parser.add_argument("gib", type=float)
    parser.add_argument("device", type=int)
    parser.add_argument("--distinct", type=float, default=0.0, help="GiB; 0: all")
    parser.add_argument("--memory", choices=("torch", "driver"), default="torch")
    parser.add_argument("--block", type=int, default=256, help="MiB")
    options = parser.parse_args()
    state, size = options.state, options.block * MIB
    blocks = max(1, int(options.gib * 1024 * MIB) // size)
    distinct = (
        min(blocks, max(1, int(options.distinct * 1024 * MIB) // size))
        if options.distinct
        else blocks
    )
    kind: type[Torch | Driver] = Torch if options.memory == "torch" else Driver
    memory = kind(options.device, blocks, distinct, size)
    (state / "progress").write_bytes(bytes(4096))
    with open(state / "progress", "r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)
    number, count = "", 0
    while True:
        memory.step()
        count += 1
        struct.pack_into("<QQ", page, 0, count, time.time_ns())
        words = (state / "order").read_text().split() if (state / "order").exists() else []
        if len(words) == 2 and words[0] != number:
            number, share = words[0], float(words[1])
            memory.draw(share)
            (state / "done").write_text(number)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
