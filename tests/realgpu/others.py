"""Programs of other libraries than PyTorch: arrays that change step by step; a line ``STEP SUM``
for each, the same in every run.

python others.py cupy|jax FILE
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator


def cupy_steps() -> Iterator[int]:
    """Integers modulo 2^64, in memory of CuPy's pool."""
    import cupy

    data = cupy.arange(16 << 20, dtype=cupy.uint64)
    while True:
        data *= cupy.uint64(6364136223846793005)
        data += cupy.uint64(1442695040888963407)
        yield int(data.sum())


def jax_steps() -> Iterator[int]:
    """The same with a compiled function; JAX takes its memory as it needs it."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    import jax
    import jax.numpy as jnp

    jax.config.update("jax_enable_x64", True)

    @jax.jit
    def step(data: jax.Array) -> tuple[jax.Array, jax.Array]:
        data = data * jnp.uint64(6364136223846793005) + jnp.uint64(1442695040888963407)
        return data, data.sum()

    data = jnp.arange(16 << 20, dtype=jnp.uint64)
    while True:
        data, total = step(data)
        yield int(total)


def main() -> None:
    steps = {"cupy": cupy_steps, "jax": jax_steps}[sys.argv[1]]
    with open(sys.argv[2], "a", encoding="ascii") as out:
        for number, value in enumerate(steps(), 1):
            print(number, value, file=out, flush=True)
            time.sleep(0.005)


if __name__ == "__main__":
    main()
