"""The job of benchmarks/gpu.py: device memory that cannot be compressed, changes only on request, and a clock that ticks with every step on the GPU.

python gpu_job.py STATE GIB DEVICE. STATE/progress: two 64-bit numbers, steps and the time of the last (ns since the epoch). STATE/order holds
"NUMBER SHARE": that share of the memory, in each block, is drawn anew, and NUMBER is then written to STATE/done.
"""

from __future__ import annotations

import mmap
import struct
import sys
import time
from pathlib import Path

import torch

_BLOCK = 256 << 20


def main() -> None:
    """Work until it is killed."""
    state, gib, device = Path(sys.argv[1]), float(sys.argv[2]), int(sys.argv[3])
    torch.cuda.set_device(device)
    generator = torch.Generator("cuda").manual_seed(7)
    blocks = [torch.empty(_BLOCK // 8, dtype=torch.int64, device="cuda") for _ in range(int(gib * (1 << 30)) // _BLOCK)]
    for block in blocks:
        block.random_(generator=generator)
    small = torch.ones(64, 64, device="cuda")
    (state / "progress").write_bytes(bytes(4096))
    with open(state / "progress", "r+b") as file:
        page = mmap.mmap(file.fileno(), 4096)
    number, count = "", 0
    while True:
        small = (small @ small).clamp(0, 1)
        small[0, 0].item()
        count += 1
        struct.pack_into("<QQ", page, 0, count, time.time_ns())
        words = (state / "order").read_text().split() if (state / "order").exists() else []
        if len(words) == 2 and words[0] != number:
            number, share = words[0], float(words[1])
            for block in blocks:
                block[: int(len(block) * share)].random_(generator=generator)
            torch.cuda.synchronize()
            (state / "done").write_text(number)
        time.sleep(0.002)


if __name__ == "__main__":
    main()
