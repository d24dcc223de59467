"""A training job that logs each step and saves a checkpoint on request; the job of
benchmarks/checkpoint_cost.py.

Usage: checkpoint_cost_job.py FOLDER WAY [--framework torch|jax] [--gib GIB] [--device cuda|cpu]
[--bucket s3://BUCKET/PREFIX]

It appends to FOLDER/steps one line "BEGIN END" (nanoseconds of CLOCK_MONOTONIC) for each step. When
FOLDER/order holds a new number, it saves model and optimizer to FOLDER/checkpoint-NUMBER after the
step, and writes FOLDER/saved-NUMBER: the times at which the save began and became durable, and its
bytes. With --bucket, a thread then uploads the checkpoint, which is durable after the upload. A job
whose WAY is "none" saves nothing, and does not know that its snapshots are taken.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

WAYS = ("none", "torch.save", "dcp", "dcp-best", "orbax")
_WIDTH = 8192
_BATCH = 256
#: The parameters, their gradients, and the two moments of AdamW.
_COPIES = 4
_RATE = 1e-5
#: Files that are uploaded at the same time.
_UPLOADS = 4


class Model(Protocol):
    """A model in training."""

    def step(self) -> None:
        """Take one step, which changes all of the state, and wait for it."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint contains."""


class TorchModel:
    """Linear layers in PyTorch, with AdamW."""

    def __init__(self, layers: int, width: int, device: str) -> None:
        import torch

        torch.manual_seed(7)
        torch.backends.cuda.matmul.allow_tf32 = True
        with torch.device(device):  # initialised there: on the CPU that takes a minute
            self._model = torch.nn.Sequential(
                *(
                    layer
                    for _ in range(layers)
                    for layer in (torch.nn.Linear(width, width), torch.nn.ReLU())
                )
            )
        parameters = self._model.parameters()
        self._optimizer = torch.optim.AdamW(parameters, lr=_RATE, fused=device == "cuda")
        self._batch: Callable[[], Any] = lambda: torch.randn(_BATCH, width, device=device)
        #: A save that still reads the state: the state must not change before its result is there.
        self.staged: Future[Any] | None = None

    def step(self) -> None:
        """See `Model`."""
        loss = self._model(self._batch()).square().mean()
        loss.backward()
        if self.staged is not None:
            self.staged.result()
            self.staged = None
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=False)
        loss.item()

    def state(self) -> dict[str, Any]:
        """See `Model`."""
        return {"model": self._model.state_dict(), "optimizer": self._optimizer.state_dict()}


class JaxModel:
    """Linear layers of the same number and size in JAX, without biases, with Adam."""

    def __init__(self, layers: int, width: int, device: str) -> None:
        import jax
        import jax.numpy as jnp

        def forward(weights: Any, batch: Any) -> Any:
            for weight in weights:
                batch = jax.nn.relu(batch @ weight)
            return jnp.square(batch).mean()

        def step(state: Any) -> Any:
            key, own = jax.random.split(state["key"])
            count = state["count"] + 1
            batch = jax.random.normal(own, (_BATCH, width))
            loss, gradients = jax.value_and_grad(forward)(state["weights"], batch)
            first = [0.9 * m + 0.1 * g for m, g in zip(state["first"], gradients, strict=True)]
            second = [
                0.999 * v + 0.001 * g * g for v, g in zip(state["second"], gradients, strict=True)
            ]
            weights = [
                w - _RATE * (m / (1 - 0.9**count) / (jnp.sqrt(v / (1 - 0.999**count)) + 1e-8))
                for w, m, v in zip(state["weights"], first, second, strict=True)
            ]
            new = {
                "weights": weights,
                "first": first,
                "second": second,
                "key": key,
                "count": count,
            }
            return new, loss

        def begin(key: Any) -> Any:
            keys = jax.random.split(key, layers)
            weights = [jax.random.normal(one, (width, width)) / width**0.5 for one in keys]
            zeros = [jnp.zeros_like(weight) for weight in weights]
            return {
                "weights": weights,
                "first": zeros,
                "second": [jnp.zeros_like(weight) for weight in weights],
                "key": key,
                "count": jnp.zeros((), jnp.float32),
            }

        jax.config.update(
            "jax_default_device", jax.devices("gpu" if device == "cuda" else "cpu")[0]
        )
        jax.config.update("jax_default_matmul_precision", "tensorfloat32")
        self._step = jax.jit(step, donate_argnums=0)
        self._state = jax.jit(begin)(jax.random.key_data(jax.random.key(7)))

    def step(self) -> None:
        """See `Model`."""
        self._state, loss = self._step(self._state)
        loss.block_until_ready()

    def state(self) -> dict[str, Any]:
        """See `Model`."""
        state: dict[str, Any] = self._state
        return state


class Saver:
    """Saves in one way."""

    def __init__(self, way: str, folder: Path, model: Model, bucket: str) -> None:
        self._way, self._folder, self._model, self._bucket = way, folder, model, bucket
        self._stager: Any = None
        self._saving: list[threading.Thread] = []
        self._orbax: Any = None
        if way == "orbax":
            import orbax.checkpoint

            self._orbax = orbax.checkpoint.StandardCheckpointer()
        if way.startswith("dcp"):
            import torch.distributed as dist

            dist.init_process_group(
                "cpu:gloo", store=dist.FileStore(str(folder / "store"), 1), rank=0, world_size=1
            )

    def save(self, number: str) -> None:
        """Start a save; where the way is asynchronous, return before it is done."""
        for thread in self._saving:  # no way is made for two saves at the same time
            thread.join()
        began = time.monotonic_ns()
        path = self._folder / f"checkpoint-{number}"
        wait = self._begin(path)

        def finish() -> None:
            about: dict[str, object] = {"began": began}
            try:
                wait()
                files = list(path.rglob("*")) if path.is_dir() else [path]
                saved = [one for one in files if one.is_file()]
                self._upload(saved)
                about["durable"] = time.monotonic_ns()
                about["bytes"] = sum(one.stat().st_size for one in saved)
                self._remove(path, saved)
            except Exception as error:  # noqa: BLE001 - the benchmark reports it
                about["error"] = f"{type(error).__name__}: {error}"
            done = self._folder / f"saved-{number}"
            done.with_suffix(".part").write_text(json.dumps(about))
            done.with_suffix(".part").rename(done)

        self._saving = [threading.Thread(target=finish, daemon=True)]
        self._saving[0].start()

    def _begin(self, path: Path) -> Callable[[], Any]:
        """Start a save, and return a function that waits until all of it is stored in ``path``."""
        if self._way == "orbax":
            self._orbax.save(path, self._model.state())
            wait: Callable[[], Any] = self._orbax.wait_until_finished
            return wait
        import torch

        state = self._model.state()
        if self._way == "torch.save":
            torch.save(state, path)
            return lambda: None
        import torch.distributed.checkpoint as dcp

        if self._way == "dcp":
            return dcp.async_save(state, checkpoint_id=str(path)).result
        from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
        from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

        if self._stager is None:
            pinned = torch.cuda.is_available()
            self._stager = DefaultStager(StagingOptions(pinned, True, pinned, pinned))
        response: Any = dcp.async_save(
            state,
            checkpoint_id=str(path),
            async_checkpointer_type=AsyncCheckpointerType.PROCESS,
            async_stager=self._stager,
        )
        if not hasattr(response, "upload_completion"):
            return response.result
        assert isinstance(self._model, TorchModel)
        self._model.staged = response.staging_completion
        return response.upload_completion.result

    def _key(self, file: Path) -> str:
        return str(file.relative_to(self._folder))

    def _upload(self, files: Sequence[Path]) -> None:
        if not self._bucket:
            return
        import obstore

        store = obstore.store.from_url(self._bucket)
        with ThreadPoolExecutor(_UPLOADS) as pool:
            list(pool.map(lambda file: obstore.put(store, self._key(file), file), files))

    def _remove(self, path: Path, files: Sequence[Path]) -> None:
        """Remove a checkpoint, so that all have the same room."""
        if self._bucket:
            import obstore

            obstore.delete(obstore.store.from_url(self._bucket), [self._key(one) for one in files])
        shutil.rmtree(path) if path.is_dir() else path.unlink()


def train(options: argparse.Namespace) -> None:
    """Train until killed."""
    width = _WIDTH if options.device == "cuda" else 512
    layers = max(1, round(options.gib * 1024 / _COPIES / (width * width * 4 / (1 << 20))))
    make = JaxModel if options.framework == "jax" else TorchModel
    model: Model = make(layers, width, options.device)
    saver = Saver(options.way, options.folder, model, options.bucket)
    steps = os.open(options.folder / "steps", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    seen, order = "", options.folder / "order"
    while True:
        begin = time.monotonic_ns()
        model.step()
        if options.way != "none" and order.exists() and (number := order.read_text()) != seen:
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
    parser.add_argument("--framework", choices=("torch", "jax"), default="torch")
    parser.add_argument(
        "--gib",
        type=float,
        default=20.0,
        help="device state: parameters, gradients, and moments (JAX keeps no gradients: 3/4 of it)",
    )
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--bucket", default="", help="URL under which checkpoints are uploaded")
    train(parser.parse_args())


if __name__ == "__main__":
    main()
