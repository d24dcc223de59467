"""A training as people write it: a DataLoader with forked workers, pinned batches, checkpoints in
the background; a line ``STEP LOSS`` for each step.

python loader.py --out FILE [--workers 4] [--persistent] [--no-pin] [--how eager|compile] [--save
thread|process] [--saves FOLDER] [--nvml FILE]
                 [--pause SECONDS] [--steps N]

It knows nothing of icecore. Its losses are the same bit for bit, however fast its workers are.
Where workers do not persist, each epoch of 48 batches forks new ones. ``--save``: every 40 steps
`torch.distributed.checkpoint.async_save`, in a thread or in a process of its own. ``--nvml``: a
process beside it, which is started before CUDA is, reads the GPU's memory through NVML ten times a
second, and appends a line for each reading.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

WIDTH, BATCH, BATCHES = 1024, 256, 48


def log_nvml(path: str) -> None:
    """Be the logger: an error is a line too, and NVML is begun anew."""
    import pynvml

    handle = None
    with open(path, "a", encoding="ascii") as out:
        while True:
            try:
                if handle is None:
                    pynvml.nvmlInit()
                    handle = pynvml.nvmlDeviceGetHandleByIndex(0)
                line = f"ok {pynvml.nvmlDeviceGetMemoryInfo(handle).total}"
            except pynvml.NVMLError as error:
                line, handle = f"error {error}", None
                try:
                    pynvml.nvmlShutdown()
                except pynvml.NVMLError:
                    pass
            print(line, file=out, flush=True)
            time.sleep(0.1)


def train(arguments: argparse.Namespace) -> None:
    import torch
    from torch import nn
    from torch.utils.data import DataLoader, Dataset

    class Samples(Dataset[Any]):
        """Made in the worker, from nothing but their number."""

        def __len__(self) -> int:
            return BATCH * BATCHES

        def __getitem__(self, index: int) -> Any:
            return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index % 16

    torch.use_deterministic_algorithms(True)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.manual_seed(1)
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
    ]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, 16)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    run: Any = torch.compile(model) if arguments.how == "compile" else model
    loader = DataLoader(
        Samples(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=arguments.workers,
        pin_memory=not arguments.no_pin,
        persistent_workers=arguments.persistent,
        generator=torch.Generator().manual_seed(2),
    )
    saving: Any = None
    if arguments.save:
        import torch.distributed as dist
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, async_save

        dist.init_process_group("cpu:gloo,cuda:nccl", store=dist.HashStore(), rank=0, world_size=1)
        kind = (
            AsyncCheckpointerType.PROCESS
            if arguments.save == "process"
            else AsyncCheckpointerType.THREAD
        )
    step = 0
    with open(arguments.out, "a", encoding="ascii") as out:
        while step < arguments.steps:
            for data, target in loader:
                step += 1
                optimizer.zero_grad()
                loss = nn.functional.cross_entropy(
                    run(data.cuda(non_blocking=True)), target.cuda(non_blocking=True)
                )
                loss.backward()
                optimizer.step()
                print(step, float(loss.item()).hex(), file=out, flush=True)
                if arguments.save and step % 40 == 0:
                    if saving is not None:
                        saving.result()
                    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
                    saving = async_save(
                        state,
                        checkpoint_id=Path(arguments.saves) / str(step),
                        async_checkpointer_type=kind,
                    )
                time.sleep(arguments.pause)
                if step >= arguments.steps:
                    break


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--steps", type=int, default=1_000_000)
    parser.add_argument("--pause", type=float, default=0.0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--persistent", action="store_true")
    parser.add_argument("--no-pin", action="store_true")
    parser.add_argument("--how", choices=("eager", "compile"), default="eager")
    parser.add_argument("--save", choices=("thread", "process"))
    parser.add_argument("--saves", default="saves")
    parser.add_argument("--nvml")
    arguments = parser.parse_args()
    if arguments.nvml and os.fork() == 0:
        log_nvml(arguments.nvml)
    train(arguments)
    return 0


if __name__ == "__main__":
    sys.exit(main())
