"""A job whose every step reads and writes resident device memory, and the lines that it writes;
rule: the same lines whatever happens to it in between.

    python job.py '{"out": FILE, "gpus": [0, 1], "mib": 4, "buffers": 3, "children": 1}'

Each process appends ``STEP DIGEST`` to its output (children to ``FILE.1``, …) and has, beside what
is resident, a small allocation that the driver moves. Once there is the file ``"end"``, it ends
with status 0. With ``"late"`` the buffers are in the host's memory until there is that file, and
with ``"freed"`` a resident one was allocated and released before. With ``"pool"`` it has an
allocation of so many MiB, of which it uses the first. With ``"unseen"`` the preload does not see
its contexts. With ``"left"`` it has this many small allocations, which the driver moves. The first
quarter of them have random content, the others are zeros, and steps write to the first third. A
step that finds other content in one than it expects writes the line ``wrong``.
"""

from __future__ import annotations

import ctypes
import hashlib
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any

MIB = 1 << 20


def fresh(buffer: int, mib: int) -> bytes:
    """What a buffer holds at first; a quarter of each even cell is zeros."""
    noise = hashlib.shake_128(b"buffer %d" % buffer).digest(MIB)
    return b"".join(
        noise if number % 2 else noise[: 3 * MIB // 4] + bytes(MIB // 4) for number in range(mib)
    )


def steps(buffers: Sequence[Any]) -> Iterator[str]:
    """Lines, each after its step was done."""
    step = 0
    while True:
        step += 1
        memory, at = (
            buffers[step % len(buffers)],
            step * 40507 % (MIB - 64),
        )  # only its first cell changes
        digest = hashlib.blake2b(
            b"%d" % step + bytes(memory[at : at + 64]), digest_size=16
        ).digest()
        memory[at : at + 16] = digest
        yield f"{step} {digest.hex()}"


#: For who asks for lines again and again; the job itself keeps no copy.
_known = lru_cache(16)(fresh)


def foreseen(mib: int, buffers: int) -> Iterator[str]:
    """The lines of an undisturbed process."""
    return steps([bytearray(_known(number, mib)) for number in range(buffers)])


def expected(some: int, mib: int, buffers: int) -> list[str]:
    """The lines of the first steps."""
    return list(islice(foreseen(mib, buffers), some))


def checked(lines: Iterator[str], left: Sequence[memoryview]) -> Iterator[str]:
    """Yield the same lines, but ``wrong`` where a step finds other content than it expects."""
    wanted = [bytearray(one) for one in left]
    for step, line in enumerate(lines):
        if left:
            at = step % (len(left) // 3)
            if left[at] != wanted[at]:
                line = "wrong"
            place = step * 40507 % (MIB - 64)
            left[at][place : place + 8] = wanted[at][place : place + 8] = step.to_bytes(8)
        yield line


def main(order: dict[str, Any]) -> None:
    """Entry."""
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from target import alloc, free, start, start_unseen

    out, gpus = order["out"], order["gpus"]
    begin = start_unseen if order.get("unseen") else start
    for number in range(1, order.get("children", 0) + 1):
        if os.fork() == 0:
            out, gpus = f"{out}.{number}", [order["gpus"][number % len(order["gpus"])]]
            break
    size = order["mib"] * MIB

    def placed(content: bytes) -> memoryview:
        code, address = alloc(len(content))
        assert code == 0, code
        ctypes.memmove(address, content, len(content))
        return memoryview((ctypes.c_char * len(content)).from_address(address)).cast("B")

    def on_gpu(number: int, content: bytes) -> memoryview:
        begin(gpus[number % len(gpus)])
        return placed(content)

    late = order.get("late", "")
    buffers: list[Any] = [fresh(number, order["mib"]) for number in range(order["buffers"])]
    buffers = [
        bytearray(one) if late else on_gpu(number, one) for number, one in enumerate(buffers)
    ]
    begin(gpus[0])
    if order.get("pool"):
        code, address = alloc(order["pool"] * MIB)
        assert code == 0, code
        ctypes.memmove(address, fresh(99, 1), MIB)
    if order.get("freed"):
        assert free(alloc(size)[1]) == 0
    assert alloc(MIB // 2)[0] == 0
    left = [
        placed(fresh(number, 1) if number < order["left"] // 4 else bytes(MIB))
        for number in range(order.get("left", 0))
    ]
    with open(out, "a", encoding="ascii") as lines:
        for line in checked(steps(buffers), left):
            print(line, file=lines, flush=True)
            time.sleep(0.005)
            if late and os.path.exists(late):
                late, buffers[:] = (
                    "",
                    [on_gpu(number, bytes(one)) for number, one in enumerate(buffers)],
                )
            if "end" in order and os.path.exists(order["end"]):
                break


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
