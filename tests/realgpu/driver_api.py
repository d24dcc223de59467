"""CUDA through the driver API alone, without PyTorch: memory of its own context that changes step
by step; a line ``STEP DIGEST`` for each.

python driver_api.py --out FILE [--mib N] [--managed] [--device N]
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any


def checked(result: tuple[Any, ...]) -> Any:
    if int(result[0]):
        raise RuntimeError(result[0])
    return result[1] if len(result) > 1 else None


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", required=True)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--device", type=int, default=0)
    parser.add_argument("--managed", action="store_true")
    arguments = parser.parse_args()
    from cuda.bindings import driver as cuda

    checked(cuda.cuInit(0))
    device = checked(cuda.cuDeviceGet(arguments.device))
    checked(cuda.cuCtxSetCurrent(checked(cuda.cuDevicePrimaryCtxRetain(device))))
    size = arguments.mib << 20
    if arguments.managed:
        memory = int(checked(cuda.cuMemAllocManaged(size, 1)))  # CU_MEM_ATTACH_GLOBAL
    else:
        memory = int(checked(cuda.cuMemAlloc(size)))
    checked(cuda.cuMemsetD32(memory, 7, size // 4))
    piece = bytearray(4096)
    with open(arguments.out, "a", encoding="ascii") as out:
        step = 0
        while True:
            step += 1
            at = step * 40961 % (size // 4096) * 4096
            checked(cuda.cuMemsetD32(memory + at, step, 512))
            checked(cuda.cuMemcpyDtoH(piece, memory + at, 4096))
            print(step, hashlib.blake2b(piece, digest_size=8).hexdigest(), file=out, flush=True)
            time.sleep(0.005)


def expected(steps: int, mib: int) -> list[str]:
    """The lines of the first steps."""
    pages: dict[int, int] = {}
    lines = []
    for step in range(1, steps + 1):
        at = step * 40961 % (mib << 8)
        pages[at] = step
        content = step.to_bytes(4, "little") * 512 + (7).to_bytes(4, "little") * 512
        lines.append(f"{step} {hashlib.blake2b(content, digest_size=8).hexdigest()}")
    return lines


if __name__ == "__main__":
    main()
