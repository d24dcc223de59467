"""The demo's job: processes that work on memory together, with a hash chain in which every byte of
it counts; it knows nothing of icecore.

A coordinator and three workers, over pipes and shared memory. In each step a worker rewrites a
small part of its memory and sums up all of it; the coordinator hashes the sums into a chain and
appends ``STEP CHAIN`` to a log file that it keeps open. The chain is a function of the number of
steps alone, so that whoever knows the number knows what must stand there.

    python demo_job.py DIR              works until DIR/finish exists, then verifies all memory and
    exits with 0 or 1 python demo_job.py --reference N    prints the chain of N steps, computed in
    one process from the definition
"""

from __future__ import annotations

import hashlib
import mmap
import os
import struct
import sys
import time
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

WORKERS = 3
WORDS = 4 << 20  # of 8 bytes: 32 MiB a worker
BLOCK = 4096  # words that a step rewrites
SHARED_WORDS = 1 << 20  # 8 MiB
PAUSE_SECONDS = 0.004

State = NDArray[np.uint64]


def first_state(worker: int) -> State:
    """What a worker's memory holds at step 0: half random, half structured, as programs' memory is."""
    generator = np.random.Generator(np.random.Philox(key=worker + 1))
    state = np.arange(WORDS, dtype=np.uint64) // np.uint64(64)
    state[: WORDS // 2] = generator.integers(0, 1 << 63, WORDS // 2, dtype=np.uint64)
    return state


def place(worker: int, step: int) -> int:
    """Where the block begins that a worker rewrites in a step; most steps stay in a small part of
    the memory.
    """
    value = (step * 2654435761 + worker * 40503) & 0xFFFFFFFF
    room = WORDS - BLOCK if step % 16 == 0 else WORDS // 16
    return value % room


def rewrite(state: State, worker: int, step: int) -> State:
    """Do a worker's step in place; returns the block that changed."""
    at = place(worker, step)
    block = state[at : at + BLOCK]
    np.multiply(block, np.uint64(6364136223846793005), out=block)
    np.add(block, np.uint64(step), out=block)
    return block


def digest_of(total: int, block: State) -> bytes:
    """What a worker says of its step: the sum of all its memory and the hash of what changed."""
    return hashlib.blake2b(
        struct.pack("<Q", total & (1 << 64) - 1) + block.tobytes(), digest_size=32
    ).digest()


def link(chain: bytes, step: int, digests: list[bytes], shared: bytes) -> bytes:
    """The chain after a step."""
    return hashlib.blake2b(
        chain + struct.pack("<Q", step) + b"".join(digests) + shared, digest_size=32
    ).digest()


def shared_part(step: int) -> slice:
    """Which words of the shared memory a step writes."""
    at = step * 512 % SHARED_WORDS
    return slice(at, at + 512)


def reference(steps: int) -> list[str]:
    """The chain after each of so many steps, by definition: sums are kept up instead of taken anew."""
    states = [first_state(worker) for worker in range(WORKERS)]
    totals = [int(state.sum(dtype=np.uint64)) for state in states]
    chain = bytes(32)
    chains = []
    for step in range(1, steps + 1):
        digests = []
        for worker, state in enumerate(states):
            at = place(worker, step)
            totals[worker] -= int(state[at : at + BLOCK].sum(dtype=np.uint64))
            block = rewrite(state, worker, step)
            totals[worker] += int(block.sum(dtype=np.uint64))
            digests.append(digest_of(totals[worker], block))
        chain = link(chain, step, digests, np.full(512, step, np.uint64).tobytes())
        chains.append(chain.hex())
    return chains


def read_fully(descriptor: int, size: int) -> bytes:
    """Exactly ``size`` bytes of a pipe, or fewer at its end."""
    data = b""
    while len(data) < size and (piece := os.read(descriptor, size - len(data))):
        data += piece
    return data


def work(worker: int, requests: int, answers: int, shared: State) -> int:
    """A worker: steps until the pipe ends; then all its memory is computed anew and compared."""
    state = first_state(worker)
    done = 0
    while request := read_fully(requests, 8):
        done = struct.unpack("<Q", request)[0]
        block = rewrite(state, worker, done)
        if worker == 0:
            shared[shared_part(done)] = done
        os.write(answers, digest_of(int(state.sum(dtype=np.uint64)), block))
    again = first_state(worker)
    for step in range(1, done + 1):
        rewrite(again, worker, step)
    return 0 if np.array_equal(state, again) else 1


def coordinate(folder: Path) -> int:
    """The coordinator."""
    memory = mmap.mmap(-1, SHARED_WORDS * 8)  # anonymous and shared with the workers
    shared = np.frombuffer(memory, np.uint64)
    pipes: list[tuple[int, int]] = []
    children: list[int] = []
    for worker in range(WORKERS):
        (request_out, request_in), (answer_out, answer_in) = os.pipe(), os.pipe()
        child = os.fork()
        if child == 0:
            for earlier in pipes:
                os.close(earlier[0])
                os.close(earlier[1])
            os.close(request_in)
            os.close(answer_out)
            os._exit(work(worker, request_out, answer_in, shared))
        os.close(request_out)
        os.close(answer_in)
        pipes.append((request_in, answer_out))
        children.append(child)
    log = os.open(folder / "chain.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    chain, step = bytes(32), 0
    while not (folder / "finish").exists():
        step += 1
        for request, _ in pipes:
            os.write(request, struct.pack("<Q", step))
        digests = [read_fully(answer, 32) for _, answer in pipes]
        chain = link(chain, step, digests, shared[shared_part(step)].tobytes())
        os.write(log, f"{step} {chain.hex()}\n".encode())
        if step % 100 == 0:
            print(f"step {step}", flush=True)
        time.sleep(PAUSE_SECONDS)
    for request, _ in pipes:
        os.close(request)
    wrong = sum(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) != 0 for child in children)
    print(
        f"verified {step} steps: {'all memory is right' if not wrong else f'{wrong} workers hold wrong memory'}",
        flush=True,
    )
    return 1 if wrong else 0


if __name__ == "__main__":
    if sys.argv[1] == "--reference":
        print(reference(int(sys.argv[2]))[-1])
        sys.exit(0)
    sys.exit(coordinate(Path(sys.argv[1])))
