"""What an application hears of its GPU, a line for each answer: the same with the preload and
without; only "GiB until out of memory" may differ by one.

python answers.py OUT           answer, and end
python answers.py OUT --hold G  allocate G GiB, write what is free, and wait to be killed
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from cuda.bindings import driver as cu

GIB, MIB = 1 << 30, 1 << 20


def gib_until_out_of_memory() -> int:
    """Allocate until there is none left, and let go of it."""
    held: list[torch.Tensor] = []
    try:
        while True:
            held.append(torch.empty(GIB, dtype=torch.uint8, device="cuda"))
    except torch.OutOfMemoryError:
        count = len(held)
    held.clear()
    torch.cuda.empty_cache()
    return count


def more_than_there_is() -> str:
    """The error's name, and whether the GPU still computes."""
    try:
        torch.empty(1 << 45, dtype=torch.uint8, device="cuda")
    except torch.OutOfMemoryError as error:
        return f"{type(error).__name__} {(torch.ones(1 << 20, device='cuda') + 1).sum().item()}"
    return "no error"


def all_free_again() -> bool:
    """Of what was allocated until there was none left, nothing is kept."""
    free, total = torch.cuda.mem_get_info()
    return total - free < 4 * GIB


def pieces() -> str:
    """The driver's own codes: sizes of all kinds, a second release, a pointer into the middle,
    nothing at all.
    """
    codes = []
    for size in (1, MIB, 2 * MIB, 5 * MIB + 1, 64 * MIB, 0):
        code, pointer = cu.cuMemAlloc(size)
        codes.append(int(code))
        if not int(code):
            codes += [
                int(cu.cuMemFree(int(pointer) + (256 if size > MIB else 0))[0]) if size > MIB else 0
            ]
            codes += [int(cu.cuMemFree(pointer)[0]), int(cu.cuMemFree(pointer)[0])]
    return " ".join(map(str, codes))


def captured_graph() -> float:
    """A graph whose capture allocates."""
    graph, start = torch.cuda.CUDAGraph(), torch.zeros(1 << 24, device="cuda")
    with torch.cuda.graph(graph):
        result = (start + 1).repeat(4) * 2
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize()
    return float(result.sum().item())


def relaxed_capture() -> str:
    """In a relaxed capture memory may be released and allocated."""
    graph, start = torch.cuda.CUDAGraph(), torch.ones(1 << 24, device="cuda")
    big = [torch.empty(512 * MIB, dtype=torch.uint8, device="cuda")]
    with torch.cuda.graph(graph, capture_error_mode="relaxed"):
        result = start * 3
        big.clear()
        got = cu.cuMemAlloc(4 * MIB)
        let_go = cu.cuMemFree(got[1])
    graph.replay()
    torch.cuda.synchronize()
    return f"{int(got[0])} {int(let_go[0])} {result.sum().item()}"


def copies() -> str:
    """On the device, from pinned memory, and to another device where there is one."""
    here = torch.arange(1 << 20, device="cuda")
    found = [torch.equal(here.clone(), here), torch.equal(here.cpu().pin_memory().cuda(), here)]
    if torch.cuda.device_count() > 1:
        found += [
            torch.equal(here.to("cuda:1").cpu(), here.cpu()),
            torch.cuda.can_device_access_peer(0, 1),
        ]
    return " ".join(map(str, found))


ANSWERS: dict[str, Callable[[], object]] = {
    "more than there is": more_than_there_is,
    "GiB until out of memory": lambda: f"{gib_until_out_of_memory()} {gib_until_out_of_memory()}",
    "all free again": all_free_again,
    "pieces": pieces,
    "captured graph": captured_graph,
    "relaxed capture": relaxed_capture,
    "copies": copies,
}


def main(out: Path, words: list[str]) -> None:
    """Command line."""
    torch.ones(1, device="cuda")
    if words[:1] == ["--hold"]:
        before = torch.cuda.mem_get_info()[0]
        held = torch.empty(int(float(words[1]) * GIB), dtype=torch.uint8, device="cuda")
        free, total = torch.cuda.mem_get_info()
        out.write_text(f"{before - free} {total}\n")
        while held is not None:
            time.sleep(1)
    out.write_text("".join(f"{name}: {answer()}\n" for name, answer in ANSWERS.items()))


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
