"""An inference server: a transformer of random weights that continues a sequence token by token,
with a KV cache on the GPU; a line ``STEP TOKEN`` for each.

python serve.py --socket PATH [--layers N] [--width N] [--load FILE]

A client connects, sends lines ``N``, and is answered with the next N tokens. With --load a child is
such a client, which asks for one token after the other, and writes a line ``NUMBER TOKEN`` for
each.
"""

from __future__ import annotations

import argparse
import os
import socket
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")


def ask(path: str, out: str) -> None:
    """Without end, and without a pause."""
    with socket.socket(socket.AF_UNIX) as connection, open(out, "a", encoding="ascii") as file:
        while connection.connect_ex(path):
            time.sleep(0.05)
        with connection.makefile("rw") as stream:
            number = 0
            while True:
                number += 1
                print(1, file=stream, flush=True)
                answer = stream.readline()
                if not answer.endswith("\n"):
                    return  # the server is gone
                print(number, answer.strip(), file=file, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--socket", required=True)
    parser.add_argument("--layers", type=int, default=20)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--load", default="")
    arguments = parser.parse_args()
    if arguments.load and os.fork() == 0:  # before there is CUDA
        ask(arguments.socket, arguments.load)
    import torch
    from torch.nn import functional

    torch.use_deterministic_algorithms(True)
    torch.set_grad_enabled(False)
    random = torch.Generator("cuda").manual_seed(3)
    width, heads, vocabulary = arguments.width, 16, 32000

    def weights(*shape: int) -> torch.Tensor:
        return (
            torch.randn(*shape, device="cuda", generator=random, dtype=torch.float32)
            .mul_(shape[-1] ** -0.5)
            .bfloat16()
        )

    blocks = [
        (
            weights(3 * width, width),
            weights(width, width),
            weights(4 * width, width),
            weights(width, 4 * width),
        )
        for _ in range(arguments.layers)
    ]
    embedding = weights(vocabulary, width)
    cache = torch.zeros(
        arguments.layers,
        2,
        heads,
        arguments.length,
        width // heads,
        device="cuda",
        dtype=torch.bfloat16,
    )
    print(
        f"{sum(w.numel() for block in blocks for w in block) + embedding.numel()} parameters",
        flush=True,
    )
    token, step = 1, 0

    def following() -> int:
        nonlocal token, step
        at = step % arguments.length
        x = embedding[token]
        for layer, (qkv, out, up, down) in enumerate(blocks):
            normed = functional.layer_norm(x, (width,))
            q, k, v = (qkv @ normed).view(3, heads, width // heads)
            cache[layer, 0, :, at], cache[layer, 1, :, at] = k, v
            keys, values = cache[layer, :, :, : min(step + 1, arguments.length)]
            scores = torch.einsum("hd,hld->hl", q.float(), keys.float()) * (width // heads) ** -0.5
            x = x + out @ torch.einsum(
                "hl,hld->hd", scores.softmax(-1), values.float()
            ).bfloat16().reshape(width)
            x = x + down @ functional.gelu(up @ functional.layer_norm(x, (width,)))
        token = int((embedding @ functional.layer_norm(x, (width,))).float().argmax())
        step += 1
        return token

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(arguments.socket)
        listener.listen()
        while True:
            connection, _ = listener.accept()
            with connection, connection.makefile("rw") as stream:
                for line in stream:
                    print(*(following() for _ in range(int(line))), file=stream, flush=True)


if __name__ == "__main__":
    main()
