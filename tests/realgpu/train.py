"""A training that is deterministic bit for bit: a line ``STEP LOSS`` for each step, the loss as a
hexadecimal float.

python train.py --out FILE [--steps N] [--pause SECONDS] [--width N] [--ballast GIB] [--world N]
[--how eager|graph|compile]

--world: that many ranks, DDP over NCCL, one GPU each. --how: step by step, each step the replay of
one captured CUDA graph, or through torch.compile.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def captured(step: Callable[[], object], optimizer: torch.optim.Optimizer) -> Callable[[], object]:
    """One CUDA graph that does what a step does."""
    import torch

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    optimizer.zero_grad()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


def train(arguments: argparse.Namespace) -> None:
    import torch
    from torch import nn

    rank, world = arguments.rank, arguments.world
    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.cuda.set_device(rank)
    torch.manual_seed(1)
    width = arguments.width
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(width, width), nn.GELU(), nn.LayerNorm(width))
    ]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(width, 16)).cuda()
    if world > 1:
        import torch.distributed as dist

        dist.init_process_group(
            "nccl",
            init_method=f"tcp://127.0.0.1:{arguments.port}?use_libuv=0",
            rank=rank,
            world_size=world,
        )
        model = nn.parallel.DistributedDataParallel(model, device_ids=[rank])
    # Memory that nothing changes, and that cannot be compressed.
    ballast = [
        torch.randint(0, 255, (256 << 20,), dtype=torch.uint8, device="cuda")
        for _ in range(int(arguments.ballast * 4))
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=arguments.how == "graph")
    run: Callable[[torch.Tensor], torch.Tensor] = (
        torch.compile(model) if arguments.how == "compile" else model
    )
    # Its state is on the GPU and in the process: it must come back too.
    random = torch.Generator("cuda").manual_seed(100 + rank)
    data, loss = torch.empty(64, width, device="cuda"), torch.zeros((), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        found = nn.functional.mse_loss(run(data), data[:, :16].sin())
        found.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        loss.copy_(found.detach())

    work: Callable[[], object] = step
    if arguments.how == "graph":
        data.normal_(generator=random)
        work = captured(step, optimizer)
    with open(arguments.out if rank == 0 else os.devnull, "a", encoding="ascii") as out:
        for number in range(1, arguments.steps + 1):
            data.normal_(generator=random)
            work()
            if world > 1:
                dist.all_reduce(loss)
            print(number, float(loss.item()).hex(), file=out, flush=True)
            time.sleep(arguments.pause)
    assert len(ballast) == int(arguments.ballast * 4)


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--width", type=int, default=1024)
    parser.add_argument("--ballast", type=float, default=0.0, help="GiB")
    parser.add_argument("--how", choices=("eager", "graph", "compile"), default="eager")
    parser.add_argument("--world", type=int, default=1)
    parser.add_argument("--port", type=int, default=29511)
    parser.add_argument("--rank", type=int, default=-1)
    arguments = parser.parse_args()
    if arguments.world > 1 and arguments.rank < 0:
        ranks = [
            subprocess.Popen([sys.executable, *sys.argv, "--rank", str(rank)])
            for rank in range(arguments.world)
        ]
        return max(rank.wait() for rank in ranks)
    arguments.rank = max(0, arguments.rank)
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
