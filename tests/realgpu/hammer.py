"""A job that never rests: threads with a stream each rewrite device buffers, release and allocate some, and check before each time that they hold what was
written last. A line a tenth of a second with each thread's rounds so far; WRONG where a buffer was, or a call failed.

    python hammer.py --out FILE [--threads 6]
"""

from __future__ import annotations

import argparse
import random
import threading
import time

import torch

SIZES = (1 << 12, 3 << 20, 17 << 20, 130 << 20)
BUFFERS = 6


def work(number: int, rounds: list[int], wrong: list[str]) -> None:
    """One thread."""
    try:
        check(number, rounds, wrong)
    except BaseException as error:  # noqa: BLE001 - told
        wrong.append(f"WRONG thread {number}: {type(error).__name__}: {error}".replace("\n", " "))


def check(number: int, rounds: list[int], wrong: list[str]) -> None:
    """Its rounds, until something is wrong."""
    torch.cuda.set_device(number % torch.cuda.device_count())
    rng = random.Random(number)
    with torch.cuda.stream(torch.cuda.Stream()):
        sizes = [rng.choice(SIZES) for _ in range(BUFFERS)]
        values = [rng.randrange(200) for _ in sizes]
        buffers = [torch.full((size,), value, dtype=torch.uint8, device="cuda") for size, value in zip(sizes, values, strict=True)]
        while True:
            k = rng.randrange(BUFFERS)
            if not bool((buffers[k] == values[k]).all()):
                wrong.append(f"WRONG thread {number}, buffer {k} of {sizes[k]} bytes, round {rounds[number]}")
                return
            values[k] = (values[k] + 7) % 251
            if rng.random() < 0.1:
                buffers[k] = torch.empty(0, device="cuda")
                if rng.random() < 0.3:
                    torch.cuda.empty_cache()
                buffers[k] = torch.full((sizes[k],), values[k], dtype=torch.uint8, device="cuda")
            else:
                buffers[k].fill_(values[k])
            rounds[number] += 1


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--threads", type=int, default=6)
    arguments = parser.parse_args()
    rounds, wrong = [0] * arguments.threads, list[str]()
    for number in range(arguments.threads):
        threading.Thread(target=work, args=(number, rounds, wrong), daemon=True).start()
    with open(arguments.out, "w", encoding="ascii") as out:
        while True:
            time.sleep(0.1)
            print(wrong[0] if wrong else " ".join(map(str, rounds)), file=out, flush=True)


if __name__ == "__main__":
    main()
