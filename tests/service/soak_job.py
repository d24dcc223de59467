"""The job of the soak: computes on, writes each step to a file, and ends once it has done all steps.

Run as ``soak_job.py STEPS FILE``. It is slow until the file FILE.hurry exists. What it writes
depends on all its memory, so a restore that lost or mixed up anything shows.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time

BLOCK = 64 << 10
BLOCKS = 64


def first_memory() -> bytearray:
    """Return the memory before the first step: 4 MiB."""
    return bytearray(hashlib.shake_128(b"soak").digest(BLOCK * BLOCKS))


def step(memory: bytearray, number: int, word: str) -> str:
    """Do one step: change a block, and return a word that depends on the step before and the block."""
    start = number * 7 % BLOCKS * BLOCK
    block = memory[start : start + BLOCK]
    digest = hashlib.blake2b(word.encode() + block, digest_size=16).hexdigest()
    memory[start : start + 32] = digest.encode()
    return digest


def expected(steps: int) -> list[str]:
    """Return the lines that an undisturbed run writes."""
    memory, word, lines = first_memory(), "", []
    for number in range(steps):
        word = step(memory, number, word)
        lines.append(f"{number} {word}")
    return lines


def main() -> None:
    steps, path = int(sys.argv[1]), sys.argv[2]
    memory, word = first_memory(), ""
    # Started anew, without a snapshot, it has written nothing yet.
    with open(path, "w") as out:
        for number in range(steps):
            word = step(memory, number, word)
            print(number, word, file=out, flush=True)
            if number % 20 == 0:
                print("step", number, flush=True)
            if not os.path.exists(f"{path}.hurry"):
                time.sleep(0.25)


if __name__ == "__main__":
    main()
