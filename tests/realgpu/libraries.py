"""Trainings by libraries' own loops: ``python libraries.py NAME --out FILE``; a line ``STEP LOSS``
for each step. They know nothing of icecore, and their losses are the same bit for bit in each run.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

WIDTH, CLASSES, BATCH = 512, 16, 64
Report = Callable[[Any], None]


def _samples() -> Any:
    """A torch data set whose samples are made in the worker, from nothing but their number."""
    import torch
    from torch.utils.data import Dataset

    class Samples(Dataset[Any]):
        def __len__(self) -> int:
            return BATCH * 64

        def __getitem__(self, index: int) -> Any:
            return torch.randn(WIDTH, generator=torch.Generator().manual_seed(index)), index % 16

    return Samples()


def _model() -> Any:
    import torch
    from torch import nn

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    layers = [
        layer
        for _ in range(4)
        for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH))
    ]
    return nn.Sequential(*layers, nn.Linear(WIDTH, CLASSES))


def _loader() -> Any:
    import torch
    from torch.utils.data import DataLoader

    return DataLoader(
        _samples(),
        batch_size=BATCH,
        shuffle=True,
        num_workers=2,
        pin_memory=True,
        persistent_workers=True,
        generator=torch.Generator().manual_seed(2),
    )


def _losses(model: Any, capturable: bool = False) -> Iterator[Any]:
    """Train a model on the GPU without end; yield the loss of each step."""
    import torch

    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=capturable)
    while True:
        for data, target in _loader():
            loss = torch.nn.functional.cross_entropy(model(data.cuda()), target.cuda())
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            yield loss.detach()


def trainer(report: Report) -> None:
    """The Trainer of transformers, with workers and a linear schedule."""
    import torch
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        Trainer,
        TrainerCallback,
        TrainingArguments,
        set_seed,
    )

    class Texts(torch.utils.data.Dataset[Any]):
        def __len__(self) -> int:
            return 100_000

        def __getitem__(self, index: int) -> Any:
            generator = torch.Generator().manual_seed(index)
            tokens = torch.randint(0, 1000, (64,), generator=generator)
            return {"input_ids": tokens, "labels": tokens}

    class Losses(TrainerCallback):  # type: ignore[misc,unused-ignore]
        def on_log(self, *_: Any, logs: dict[str, Any], **__: Any) -> None:
            if "loss" in logs:
                report(logs["loss"])

    set_seed(1)
    config = GPT2Config(n_layer=4, n_head=4, n_embd=256, vocab_size=1000, n_positions=64)
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=32,
        max_steps=100_000,
        logging_steps=1,
        dataloader_num_workers=2,
        dataloader_persistent_workers=True,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        full_determinism=True,
        seed=1,
    )
    Trainer(GPT2LMHeadModel(config), arguments, train_dataset=Texts(), callbacks=[Losses()]).train()


def lightning(report: Report) -> None:
    """PyTorch Lightning in mixed precision, with checkpoints of its own."""
    import pytorch_lightning
    import torch

    class Module(pytorch_lightning.LightningModule):  # type: ignore[misc,unused-ignore]
        def __init__(self) -> None:
            super().__init__()
            self.model = _model()

        def training_step(self, batch: Any, _: int) -> Any:
            loss = torch.nn.functional.cross_entropy(self.model(batch[0]), batch[1])
            report(loss.item())
            return loss

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters(), lr=1e-3)

    pytorch_lightning.Trainer(
        max_epochs=1000,
        accelerator="gpu",
        devices=1,
        precision="bf16-mixed",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        default_root_dir=tempfile.mkdtemp(),
        deterministic=True,
    ).fit(Module(), _loader())


def accelerate(report: Report) -> None:
    """Accelerate with gradient accumulation."""
    import torch
    from accelerate import Accelerator

    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="fp16")
    model = _model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, loader = accelerator.prepare(model, optimizer, _loader())
    while True:
        for data, target in loader:
            with accelerator.accumulate(model):
                loss = torch.nn.functional.cross_entropy(model(data), target)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            report(loss.item())


def autotune(report: Report) -> None:
    """A Triton kernel that is tuned anew for each size, while the program runs."""
    import torch
    import triton
    import triton.language as tl

    configs = [triton.Config({"BLOCK": block}, num_warps=4) for block in (128, 256, 512, 1024)]

    @triton.autotune(configs=configs, key=["size"])  # type: ignore[untyped-decorator,misc,unused-ignore]
    @triton.jit  # type: ignore[untyped-decorator,misc,unused-ignore]
    def scaled(data, out, size, factor, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
        at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
        inside = at < size
        tl.store(out + at, tl.load(data + at, mask=inside) * factor + 1.0, mask=inside)

    step = 0
    while True:
        step += 1
        size = 1 << (10 + step // 20 % 12)
        data = torch.arange(size, device="cuda", dtype=torch.float32)
        out = torch.empty_like(data)
        scaled[lambda meta, size=size: (triton.cdiv(size, meta["BLOCK"]),)](
            data, out, size, 1.0 / step
        )
        report(out.double().sum().item())


def onnx(report: Report) -> None:
    """The model is exported to ONNX every 40 steps."""
    import torch

    model = _model().cuda()
    sample, folder = torch.randn(BATCH, WIDTH, device="cuda"), Path(tempfile.mkdtemp())
    for step, loss in enumerate(_losses(model), 1):
        if step % 40 == 0:
            torch.onnx.export(model, (sample,), folder / "model.onnx", dynamo=True)
        report(loss)


def pool(report: Report) -> None:
    """CuPy, whose pool keeps what is freed."""
    import cupy

    state = cupy.arange(1 << 22, dtype=cupy.float32) / (1 << 22)
    step = 0
    while True:
        step += 1
        other = cupy.empty((step % 32 + 1) << 20, dtype=cupy.uint8)  # sizes come and go
        other.fill(step % 251)
        state = cupy.sin(state * 1.7 + 0.1)
        report(float(cupy.sort(state)[:: 1 << 10].sum()) + int(other[-1]))


def optax(report: Report) -> None:
    """JAX with Optax; Orbax saves in the background every 40 steps, if it is installed."""
    # Otherwise XLA measures which algorithms are fastest, and two runs may choose different ones.
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"
    import jax
    import optax as library
    from jax import numpy as jnp

    try:
        import orbax.checkpoint as orbax
    except ImportError:
        orbax = None
    keys = jax.random.split(jax.random.key(1), 4)
    state = [jax.random.normal(key, (WIDTH, WIDTH)) / WIDTH**0.5 for key in keys]
    optimizer = library.adamw(1e-3)
    moments = optimizer.init(state)

    def loss_of(state: Any, data: Any) -> Any:
        found = data
        for weights in state:
            found = jnp.tanh(found @ weights)
        return jnp.mean((found - data[:, ::-1]) ** 2)

    @jax.jit
    def update(state: Any, moments: Any, data: Any) -> Any:
        loss, gradients = jax.value_and_grad(loss_of)(state, data)
        changes, moments = optimizer.update(gradients, moments, state)
        return library.apply_updates(state, changes), moments, loss

    saver = None if orbax is None else orbax.AsyncCheckpointer(orbax.StandardCheckpointHandler())
    folder = Path(tempfile.mkdtemp())
    step = 0
    while True:
        step += 1
        data = jax.random.normal(jax.random.key(step), (BATCH, WIDTH))
        state, moments, loss = update(state, moments, data)
        if saver is not None and step % 40 == 0:
            # Forced: after a restore it saves these steps again.
            saver.save(folder / str(step), args=orbax.args.StandardSave(state), force=True)
        report(float(loss))


def fsdp(report: Report) -> None:
    """FSDP with one rank under torchrun: an agent, its stores, and NCCL."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard

    torch.cuda.set_device(0)
    dist.init_process_group("nccl")
    model = _model().cuda()
    for layer in model:
        if isinstance(layer, torch.nn.Linear):
            fully_shard(layer)
    fully_shard(model)
    for loss in _losses(model):
        dist.all_reduce(loss)
        report(loss)


def profile(report: Report) -> None:
    """PyTorch's profiler, which records every second step on the GPU."""
    from torch.profiler import ProfilerActivity, schedule
    from torch.profiler import profile as profiler

    order = schedule(wait=0, warmup=1, active=1)
    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], schedule=order) as made:
        for loss in _losses(_model().cuda()):
            made.step()
            report(loss)


def replayed(report: Report) -> None:
    """torch.compile with CUDA graphs ("reduce-overhead")."""
    import torch

    fast = torch.compile(_model().cuda(), mode="reduce-overhead")
    for loss in _losses(fast, capturable=True):
        report(loss)
        torch.compiler.cudagraph_mark_step_begin()


def _double(tensors: Any, answers: Any) -> None:
    while True:
        tensor = tensors.get()
        answers.put(float((tensor * 2).double().sum()))


def queue(report: Report) -> None:
    """A process that gets tensors on the GPU through a queue, as in asynchronous samplers."""
    import torch

    context = torch.multiprocessing.get_context("spawn")
    tensors, answers = context.Queue(4), context.Queue()
    context.Process(target=_double, args=(tensors, answers), daemon=True).start()
    step, kept = 0, torch.arange(1 << 20, device="cuda", dtype=torch.float32)
    while True:
        step += 1
        tensors.put(torch.sin(kept * step))
        report(answers.get())


def svi(report: Report) -> None:
    """Stochastic variational inference in NumPyro."""
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"
    import jax
    import numpyro
    from jax import numpy as jnp
    from numpyro import distributions
    from numpyro.infer import SVI, Trace_ELBO
    from numpyro.infer.autoguide import AutoNormal

    inputs = jax.random.normal(jax.random.key(1), (4096, 64))
    targets = inputs @ jnp.arange(64.0) / 64

    def model(inputs: Any, targets: Any) -> None:
        weights = numpyro.sample("weights", distributions.Normal(jnp.zeros(64), 1).to_event(1))
        with numpyro.plate("data", len(inputs)):
            numpyro.sample("target", distributions.Normal(inputs @ weights, 0.1), obs=targets)

    inference = SVI(model, AutoNormal(model), numpyro.optim.Adam(1e-2), Trace_ELBO())
    state = inference.init(jax.random.key(2), inputs, targets)
    update = jax.jit(inference.update)
    while True:
        state, loss = update(state, inputs, targets)
        report(loss)


def lora(report: Report) -> None:
    """LoRA (PEFT) in bfloat16 with activation checkpointing, and a TensorBoard log."""
    import torch
    from peft import LoraConfig, get_peft_model
    from torch.utils.tensorboard import SummaryWriter
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.use_deterministic_algorithms(True)
    torch.manual_seed(1)
    config = GPT2Config(n_layer=4, n_head=4, n_embd=256, vocab_size=1000, n_positions=64)
    model = GPT2LMHeadModel(config).cuda()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    tuned = get_peft_model(
        model, LoraConfig(r=8, target_modules=["c_attn"], fan_in_fan_out=True, lora_dropout=0.1)
    )
    some = [one for one in tuned.parameters() if one.requires_grad]
    optimizer, log, step = torch.optim.AdamW(some, lr=1e-3), SummaryWriter(tempfile.mkdtemp()), 0
    while True:
        step += 1
        tokens = torch.randint(0, 1000, (32, 64), device="cuda")
        with torch.autocast("cuda", torch.bfloat16):
            loss = tuned(input_ids=tokens, labels=tokens).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        log.add_scalar("loss", loss.item(), step)
        report(loss.item())


def offload(report: Report) -> None:
    """An optimizer with its state in pinned host memory; gradients have a stream of their own."""
    import torch

    model = _model().cuda()
    some = list(model.parameters())
    host = [torch.zeros_like(one, device="cpu").pin_memory() for one in some]
    gradients = [torch.empty_like(one, device="cpu").pin_memory() for one in some]
    aside = torch.cuda.Stream()
    while True:
        for data, target in _loader():
            loss = torch.nn.functional.cross_entropy(model(data.cuda()), target.cuda())
            loss.backward()
            aside.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(aside):
                for one, gradient in zip(some, gradients, strict=True):
                    gradient.copy_(one.grad, non_blocking=True)
            aside.synchronize()
            with torch.no_grad():
                for one, moment, gradient in zip(some, host, gradients, strict=True):
                    moment.mul_(0.9).add_(gradient)
                    one.sub_(moment.to("cuda", non_blocking=True), alpha=1e-3)
                    one.grad = None
            report(loss.item())


def vision(report: Report) -> None:
    """A timm model in channels-last format, with loss scaling and an average of its weights."""
    import timm
    import torch
    from timm.utils import ModelEmaV3

    torch.manual_seed(1)
    torch.backends.cudnn.deterministic = True
    model = timm.create_model("resnet18", num_classes=16).cuda()
    model = model.to(memory_format=torch.channels_last)  # type: ignore[call-overload,unused-ignore]
    average, scaler = ModelEmaV3(model), torch.amp.GradScaler("cuda")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    while True:
        images = torch.randn(16, 3, 96, 96, device="cuda")
        images = images.contiguous(memory_format=torch.channels_last)
        with torch.autocast("cuda", torch.float16):
            loss = model(images).square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        average.update(model)
        report(loss.item())


def maths(report: Report) -> None:
    """Libraries behind PyTorch that keep plans, workspaces and states on the GPU: cuFFT, cuSOLVER,
    cuSPARSE, and cuDNN's recurrent layers with dropout.
    """
    import torch

    torch.manual_seed(1)
    recurrent = torch.nn.LSTM(64, 64, num_layers=2, dropout=0.2).cuda()
    rows = torch.arange(256, device="cuda").repeat_interleave(4)
    columns = (rows * 7 + torch.arange(1024, device="cuda")) % 256
    values = torch.linspace(0, 1, 1024, device="cuda")
    sparse = torch.sparse_coo_tensor(torch.stack([rows, columns]), values, (256, 256))
    sparse = sparse.coalesce().to_sparse_csr()
    state, step = torch.randn(256, 256, device="cuda"), 0
    with torch.no_grad():
        while True:
            step += 1
            size = 128 << step % 3  # plans come and go
            spectrum = torch.fft.rfft2(state[:size, :size]).abs().sum()
            factor = torch.linalg.cholesky(state @ state.T + 300 * torch.eye(256, device="cuda"))
            seen, _ = recurrent(factor.reshape(-1, 16, 64))
            state = torch.tanh(sparse @ (state + seen.reshape(256, 256))) + torch.randn_like(state)
            report((state.double().sum() + torch.linalg.svdvals(factor)[0] + spectrum).item())


def driver_pool(report: Report) -> None:
    """PyTorch with the driver's allocator (cudaMallocAsync), whose pool stays with the driver."""
    os.environ["PYTORCH_ALLOC_CONF"] = os.environ["PYTORCH_CUDA_ALLOC_CONF"] = (
        "backend:cudaMallocAsync"
    )
    import torch

    assert torch.cuda.get_allocator_backend() == "cudaMallocAsync"
    for loss in _losses(_model().cuda()):
        report(loss)


def ahead(report: Report) -> None:
    """Graphed callables, and a thread that copies batches to the GPU on a stream of its own."""
    import threading
    from queue import Queue

    import torch

    model = _model().cuda()
    sample = torch.randn(BATCH, WIDTH, device="cuda")
    graphed = torch.cuda.make_graphed_callables(model, (sample,))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, capturable=True)
    batches: Queue[Any] = Queue(3)

    def bring() -> None:
        aside = torch.cuda.Stream(priority=-1)
        number = 0
        while True:
            number += 1
            generator = torch.Generator().manual_seed(number)
            data = torch.randn(BATCH, WIDTH, generator=generator).pin_memory()
            with torch.cuda.stream(aside):
                there = data.to("cuda", non_blocking=True)
                done = torch.cuda.Event()
                done.record()
            batches.put((data, there, done))

    threading.Thread(target=bring, daemon=True).start()
    target = torch.arange(BATCH, device="cuda") % CLASSES
    while True:
        _, data, done = batches.get()
        done.wait()
        data.record_stream(torch.cuda.current_stream())
        loss = torch.nn.functional.cross_entropy(graphed(data), target)
        optimizer.zero_grad(set_to_none=False)
        loss.backward()
        optimizer.step()
        report(loss.item())


def exchange(report: Report) -> None:
    """PyTorch, CuPy and JAX in one process, which pass arrays to each other by DLPack."""
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"
    import cupy
    import jax
    import torch
    from jax import numpy as jnp

    turn = jax.jit(lambda data: jnp.roll(jnp.tanh(data), 1))
    state = torch.linspace(-1, 1, 1 << 20, device="cuda")
    while True:
        turned = turn(jax.dlpack.from_dlpack(state)).block_until_ready()
        there = cupy.from_dlpack(turned) * cupy.float32(1.01)
        cupy.cuda.get_current_stream().synchronize()
        state = torch.from_dlpack(there).clone()
        report(state.double().sum().item())


def gloo(report: Report) -> None:
    """Two ranks under torchrun that share a GPU and average their gradients over Gloo."""
    import torch
    import torch.distributed as dist

    dist.init_process_group("gloo")
    model = torch.nn.parallel.DistributedDataParallel(_model().cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    step = 0
    while True:
        step += 1
        generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
        data = torch.randn(BATCH, WIDTH, generator=generator).cuda()
        loss = model(data).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        dist.all_reduce(loss.detach())
        if dist.get_rank() == 0:
            report(loss.item())


def callback(report: Report) -> None:
    """JAX with host callbacks in the middle of a computation, and a Pallas kernel."""
    os.environ["XLA_FLAGS"] = "--xla_gpu_autotune_level=0 --xla_gpu_deterministic_ops=true"
    import jax
    import numpy as np
    from jax import numpy as jnp
    from jax.experimental import io_callback, pallas

    seen: list[float] = []

    def note(value: Any) -> Any:
        seen.append(float(value))
        return np.float32(len(seen) % 7)

    def scale(data: Any, out: Any) -> None:
        out[...] = jnp.sin(data[...] * 1.5)

    @jax.jit
    def step(data: Any) -> Any:
        kind = jax.ShapeDtypeStruct(data.shape, data.dtype)
        data = pallas.pallas_call(scale, out_shape=kind)(data)
        answer = io_callback(note, jax.ShapeDtypeStruct((), jnp.float32), data.sum(), ordered=True)
        return jnp.tanh(data[::-1] + answer)

    state = jnp.linspace(0, 1, 1 << 12)
    while True:
        state = step(state)
        report(float(state.sum()) + seen[-1])


def watch(report: Report) -> None:
    """A thread runs nvidia-smi repeatedly, as utilisation loggers do."""
    import subprocess
    import threading

    def ask() -> None:
        while True:
            words = ["nvidia-smi", "--query-gpu=utilization.gpu,memory.used", "--format=csv"]
            subprocess.run(words, capture_output=True, timeout=60)

    threading.Thread(target=ask, daemon=True).start()
    for loss in _losses(_model().cuda()):
        report(loss)


#: Name → the function, and the modules that it needs.
LIBRARIES: dict[str, tuple[Callable[[Report], None], tuple[str, ...]]] = {
    "trainer": (trainer, ("torch", "transformers", "accelerate")),
    "lightning": (lightning, ("torch", "pytorch_lightning")),
    "accelerate": (accelerate, ("torch", "accelerate")),
    "autotune": (autotune, ("torch", "triton")),
    "onnx": (onnx, ("torch", "onnx", "onnxscript")),
    "pool": (pool, ("cupy",)),
    "optax": (optax, ("jax", "optax")),
    "replayed": (replayed, ("torch",)),
    "queue": (queue, ("torch",)),
    "svi": (svi, ("jax", "numpyro")),
    "lora": (lora, ("torch", "transformers", "peft", "tensorboard")),
    "offload": (offload, ("torch",)),
    "vision": (vision, ("torch", "timm")),
    "maths": (maths, ("torch",)),
    "driver_pool": (driver_pool, ("torch",)),
    "ahead": (ahead, ("torch",)),
    "exchange": (exchange, ("torch", "cupy", "jax")),
    "callback": (callback, ("jax",)),
    "watch": (watch, ("torch",)),
}
#: The same for those with tests of their own.
OTHERS: dict[str, tuple[Callable[[Report], None], tuple[str, ...]]] = {
    "fsdp": (fsdp, ("torch",)),
    "gloo": (gloo, ("torch",)),
    "profile": (profile, ("torch",)),
}


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("library", choices=[*LIBRARIES, *OTHERS])
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    step = 0
    with open(arguments.out, "a", encoding="ascii") as out:

        def report(loss: Any) -> None:
            nonlocal step
            step += 1
            print(step, float(loss).hex(), file=out, flush=True)
            time.sleep(0.03)

        {**LIBRARIES, **OTHERS}[arguments.library][0](report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
