"""The jobs of benchmarks/gpu_steady.py; each prints one line of JSON, figure → value, at its end.

python gpu_steady_job.py steps: a training step, launches, copies, scattered reads, matrix products.
python gpu_steady_job.py collectives: NCCL's all-reduce between two ranks, which it starts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from typing import Any

MIB = 1 << 20
#: MiB of an all-reduce → how often.
SIZES = {1: 400, 16: 100, 256: 30}
_WIDTH, _LAYERS, _BATCH = 4096, 6, 256
_WARM, _STEPS, _LAUNCHES = 30, 200, 1000


def steps() -> dict[str, float]:
    """Milliseconds of each, in the middle."""
    import torch as installed

    torch: Any = installed
    torch.manual_seed(7)

    def timed(work: Callable[[], object], times: int) -> float:
        return statistics.median(on_gpu(work)[1] for _ in range(times))

    def on_gpu(work: Callable[[], object]) -> tuple[object, float]:
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        made = work()
        end.record()
        end.synchronize()
        return made, begin.elapsed_time(end)

    layers = (
        layer
        for _ in range(_LAYERS)
        for layer in (torch.nn.Linear(_WIDTH, _WIDTH), torch.nn.GELU())
    )
    model = torch.nn.Sequential(*layers).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)

    def step() -> object:
        drawn = torch.randn(_BATCH, _WIDTH, device="cuda")
        loss = (model(drawn) - drawn.roll(1, 1)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        return loss

    walls, gpus = [], []
    for number in range(_WARM + _STEPS):
        torch.cuda.synchronize()
        began = time.perf_counter()
        loss, taken = on_gpu(step)
        loss.item()  # type: ignore[attr-defined]
        if number >= _WARM:
            walls.append(1e3 * (time.perf_counter() - began))
            gpus.append(taken)
    small = torch.ones(64, device="cuda")

    def launch() -> float:
        began = time.perf_counter()
        for _ in range(_LAUNCHES):
            small.add_(1)
        torch.cuda.synchronize()
        return 1e3 * (time.perf_counter() - began)

    launch()
    launches = statistics.median(launch() for _ in range(20))
    blocks = [torch.ones(128 * MIB, dtype=torch.float32, device="cuda") for _ in range(8)]
    index = torch.randint(0, 128 * MIB, (32 * MIB,), device="cuda")
    square = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    return {
        "a training step": statistics.median(walls),
        "its time on the GPU": statistics.median(gpus),
        f"{_LAUNCHES} launches": launches,
        "copies of 2 GiB on the device": timed(
            lambda: [blocks[at].copy_(blocks[at + 1]) for at in range(0, 8, 2)], 30
        ),
        "scattered reads": timed(
            lambda: [torch.index_select(block, 0, index) for block in blocks[:4]], 15
        ),
        "a matrix product": timed(lambda: square @ square, 60),
    }


def collectives() -> dict[str, float]:
    """Bytes a second (size / time), from the first of two ranks."""
    with tempfile.TemporaryDirectory() as folder:
        ranks = [
            subprocess.Popen(
                [sys.executable, __file__, "rank", str(rank), f"{folder}/ranks"],
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            said = [rank.communicate(timeout=120)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
                rank.wait(20)
    if any(rank.returncode for rank in ranks):
        raise RuntimeError("a rank failed")
    found: dict[str, float] = json.loads(said[0].splitlines()[-1])
    return found


def one_rank(rank: int, place: str) -> dict[str, float]:
    """A rank's figures."""
    import torch as installed

    torch: Any = installed
    distributed = torch.distributed
    torch.cuda.set_device(rank)
    distributed.init_process_group("nccl", init_method=f"file://{place}", rank=rank, world_size=2)
    found = {}
    for size, times in SIZES.items():
        data = torch.ones(size * MIB // 4, device="cuda")
        for _ in range(10):
            distributed.all_reduce(data)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for _ in range(times):
            distributed.all_reduce(data)
        torch.cuda.synchronize()
        found[f"all-reduce of {size} MiB"] = times * size * MIB / (time.perf_counter() - began)
    distributed.destroy_process_group()
    return found


def main() -> None:
    """Run one."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("job", choices=("steps", "collectives", "rank"))
    parser.add_argument("rest", nargs="*")
    options = parser.parse_args()
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    if options.job == "rank":
        found = one_rank(int(options.rest[0]), options.rest[1])
    else:
        found = {"steps": steps, "collectives": collectives}[options.job]()
    print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()
