"""A training job that logs each step and saves a checkpoint on request; the job of
benchmarks/checkpoint_cost.py.

Usage: checkpoint_cost_job.py FOLDER WAY [--gib GIB] [--device cuda|cpu]

It appends to FOLDER/steps one line "BEGIN END" (nanoseconds of CLOCK_MONOTONIC) for each step. When
FOLDER/order holds a new number, it saves model and optimizer to FOLDER/checkpoint-NUMBER after the
step, and writes FOLDER/saved-NUMBER: the times at which the save began and became durable. A job
whose WAY is "none" saves nothing, and does not know that its snapshots are taken.
"""

from __future__ import annotations

import argparse
import json
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from pathlib import Path
from typing import Any

WAYS = ("none", "torch.save", "dcp", "dcp-best")
_WIDTH = 8192
_BATCH = 256
#: The parameters, their gradients, and the two moments of AdamW.
_COPIES = 4


class Saver:
    """Saves in one way.

    Attributes:
        staged: Set while the state must not change: until the result is there.
    """

    def __init__(self, way: str, folder: Path, state: Callable[[], dict[str, Any]]) -> None:
        self._way, self._folder, self._state = way, folder, state
        self.staged: Future[Any] | None = None
        self._stager: Any = None
        self._saving: list[threading.Thread] = []
        if way.startswith("dcp"):
            import torch.distributed as dist

            dist.init_process_group(
                "cpu:gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1
            )

    def save(self, number: str) -> None:
        """Start a save; where the way is asynchronous, return before it is done."""
        import torch

        began = time.monotonic_ns()
        path = self._folder / f"checkpoint-{number}"
        if self._way == "torch.save":
            torch.save(self._state(), path)
            self._durable(number, began, time.monotonic_ns())
            return
        for thread in self._saving:  # one save at a time is what async_save is made for
            thread.join()
        import torch.distributed.checkpoint as dcp

        if self._way == "dcp":
            upload = dcp.async_save(self._state(), checkpoint_id=str(path))
        else:
            from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
            from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

            if self._stager is None:
                pinned = torch.cuda.is_available()
                self._stager = DefaultStager(StagingOptions(pinned, True, pinned, pinned))
            response: Any = dcp.async_save(
                self._state(),
                checkpoint_id=str(path),
                async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                async_stager=self._stager,
            )
            self.staged, upload = (
                (response.staging_completion, response.upload_completion)
                if hasattr(response, "upload_completion")
                else (None, response)
            )

        def wait() -> None:
            upload.result()
            self._durable(number, began, time.monotonic_ns())

        self._saving = [threading.Thread(target=wait, daemon=True)]
        self._saving[0].start()

    def _durable(self, number: str, began: int, durable: int) -> None:
        done = self._folder / f"saved-{number}"
        done.with_suffix(".part").write_text(json.dumps({"began": began, "durable": durable}))
        done.with_suffix(".part").rename(done)


def train(folder: Path, way: str, gib: float, device: str) -> None:
    """Train until killed."""
    import torch

    torch.manual_seed(7)
    torch.backends.cuda.matmul.allow_tf32 = True
    width = _WIDTH if device == "cuda" else 512
    layers = max(1, round(gib * 1024 / _COPIES / (width * width * 4 / (1 << 20))))
    with torch.device(device):  # initialised there: on the CPU that takes a minute
        model = torch.nn.Sequential(
            *(
                layer
                for _ in range(layers)
                for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
            )
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    saver = Saver(
        way, folder, lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    )
    steps = os.open(folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    seen, order = "", folder / "order"
    while True:
        begin = time.monotonic_ns()
        loss = model(torch.randn(_BATCH, width, device=device)).square().mean()
        loss.backward()
        if saver.staged is not None:
            saver.staged.result()
            saver.staged = None
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
        loss.item()
        if way != "none" and order.exists() and (number := order.read_text()) != seen:
            seen = number
            saver.save(number)
        os.write(steps, b"%d %d\n" % (begin, time.monotonic_ns()))


def main() -> None:
    """Parse the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("way", choices=WAYS)
    parser.add_argument(
        "--gib", type=float, default=20.0, help="device state: parameters, gradients, and moments"
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    options = parser.parse_args()
    train(options.folder, options.way, options.gib, options.device)


if __name__ == "__main__":
    main()
