"""A job that never rests: threads with a stream each rewrite device buffers, release and allocate
some, and check before each time that they hold what was written last. A line a tenth of a second
with each thread's rounds so far; WRONG where a buffer was, or a call failed.

    python hammer.py --out FILE [--threads 6] [--resting GIB]

--resting: another thread has so much memory of which it checks a block after the other, and
rewrites one now and then: 64 MiB in some 5 s.
"""

from __future__ import annotations

import argparse
import random
import threading
import time

import torch

BLOCK = 64 << 20
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
        buffers = [
            torch.full((size,), value, dtype=torch.uint8, device="cuda")
            for size, value in zip(sizes, values, strict=True)
        ]
        while True:
            k = rng.randrange(BUFFERS)
            if not bool((buffers[k] == values[k]).all()):
                wrong.append(
                    f"WRONG thread {number}, buffer {k} of {sizes[k]} bytes, round {rounds[number]}"
                )
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


def rest(number: int, gib: float, rounds: list[int], wrong: list[str]) -> None:
    """The thread whose memory rests, mostly. No two blocks are alike."""
    rng = random.Random(number)
    seeds = list(range(int(gib * 1024 * (1 << 20)) // BLOCK))

    def content(seed: int) -> torch.Tensor:
        generator = torch.Generator("cuda").manual_seed(seed)
        return torch.randint(
            0, 255, (BLOCK,), dtype=torch.uint8, device="cuda", generator=generator
        )

    try:
        blocks = [content(seed) for seed in seeds]
        while True:
            k = rng.randrange(len(blocks))
            if not torch.equal(blocks[k], content(seeds[k])):
                wrong.append(f"WRONG block {k} at rest, round {rounds[number]}")
                return
            if rng.random() < 0.01:
                seeds[k] += 10_000
                blocks[k].copy_(content(seeds[k]))
            rounds[number] += 1
            time.sleep(0.05)
    except BaseException as error:  # noqa: BLE001 - told
        wrong.append(f"WRONG thread {number}: {type(error).__name__}: {error}".replace("\n", " "))


def main() -> None:
    """Entry."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", required=True)
    parser.add_argument("--threads", type=int, default=6)
    parser.add_argument("--resting", type=float, default=0.0, help="GiB")
    arguments = parser.parse_args()
    rounds, wrong = [0] * (arguments.threads + bool(arguments.resting)), list[str]()
    for number in range(arguments.threads):
        threading.Thread(target=work, args=(number, rounds, wrong), daemon=True).start()
    if arguments.resting:
        threading.Thread(
            target=rest, args=(arguments.threads, arguments.resting, rounds, wrong), daemon=True
        ).start()
    with open(arguments.out, "w", encoding="ascii") as out:
        while True:
            time.sleep(0.1)
            print(wrong[0] if wrong else " ".join(map(str, rounds)), file=out, flush=True)


if __name__ == "__main__":
    main()
