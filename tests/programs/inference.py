"""An inference-like job: large static weights, a key-value cache rewritten block by block, a
churning heap, requests.

All of it is a function of the seed and of the request's number: a second start has the same
weights, and every block, session and answer can be computed anew at any time.

    python inference.py STATE_DIR [--mib 1300] [--rate 100] [--seed 1]
"""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
import time
from collections import OrderedDict, deque
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

# One BLAS thread: an answer must not depend on how a library divides a sum.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
from numpy.typing import NDArray

if not __package__:  # run as a program
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.programs.arrays import differing_content, differing_pages, page_aligned, page_sums
from tests.programs.report import Report, run

BLOCK = 64 << 10  # bytes of one block of the key-value cache
BLOCKS_A_REQUEST = 8
SESSIONS_A_REQUEST = 4
CHECKED_BYTES = 8 << 20  # weights verified with each request
LAYERS_A_REQUEST = 2
ANSWERS_KEPT = 32


@dataclass(frozen=True)
class Shape:
    """The sizes that determine the program's memory: about 83 % weights, 15 % cache, 2 % Python
    objects.
    """

    seed: int
    width: int
    layers: int
    blocks: int
    sessions: int

    @classmethod
    def of_size(cls, mib: int, seed: int) -> Shape:
        width = 1024 if mib >= 128 else 256
        layers = max(LAYERS_A_REQUEST, int(mib * 0.83 * (1 << 20)) // (12 * width * width))
        return cls(seed, width, layers, max(64, int(mib * 0.15 * (1 << 20)) // BLOCK), mib * 12)


def random(*key: int) -> np.random.Generator:
    return np.random.Generator(np.random.SFC64(list(key)))


def room_for(shape: Shape, which: int) -> NDArray[Any]:
    """An array for weight matrix ``which`` of a layer: 0 and 1 are float32, 2 and 3 the upper
    halves of float32 (bfloat16).
    """
    return page_aligned((shape.width, shape.width), np.float32 if which < 2 else np.uint16)


def make_weight(shape: Shape, layer: int, which: int, out: NDArray[Any]) -> NDArray[Any]:
    """Fill weight matrix ``which`` of a layer and return it."""
    weight = out if which < 2 else page_aligned((shape.width, shape.width), np.float32)
    random(shape.seed, layer, which).standard_normal(dtype=np.float32, out=weight)
    weight *= np.float32(0.02)
    if which >= 2:
        np.copyto(out, (weight.view(np.uint32) >> 16).astype(np.uint16))
    return out


def as_float(weight: NDArray[Any]) -> NDArray[np.float32]:
    if weight.dtype == np.float32:
        return weight
    return (weight.astype(np.uint32) << 16).view(np.float32)


def make_block(shape: Shape, block: int, request: int) -> NDArray[np.uint8]:
    """What a cache block holds after that request wrote it; request 0 stands for what the start
    left there.
    """
    return np.frombuffer(random(shape.seed, 7, block, request).bytes(BLOCK), dtype=np.uint8)


def make_session(shape: Shape, session: int) -> dict[str, Any]:
    """A session's Python objects: nested, of many small sizes, as a server's bookkeeping is."""
    numbers = random(shape.seed, 8, session).integers(0, 1 << 30, size=16).tolist()
    return {
        "id": f"session-{session}-{numbers[0]:x}",
        "tokens": [int(n) % 50000 for n in numbers],
        "times": tuple(n / 7 for n in numbers[:8]),
        "text": "".join(chr(97 + n % 26) for n in numbers) * (numbers[1] % 20),
        "options": {str(n % 1000): [n, str(n)] for n in numbers[:6]},
    }


def blocks_of(shape: Shape, request: int) -> list[int]:
    """The cache blocks that a request rewrites: a run of neighbours and some scattered ones."""
    draw = (
        random(shape.seed, 9, request)
        .integers(0, shape.blocks, size=BLOCKS_A_REQUEST // 2 + 1)
        .tolist()
    )
    run_of = [(draw[0] + n) % shape.blocks for n in range(BLOCKS_A_REQUEST - len(draw) + 1)]
    return list(dict.fromkeys(run_of + draw[1:]))


class Server:
    """Weights, cache and sessions, and what each of them must hold."""

    def __init__(self, shape: Shape, report: Report) -> None:
        self.shape = shape
        self.report = report
        self.request = 0
        self.chain = ""
        self.answers: deque[tuple[int, str]] = deque(maxlen=ANSWERS_KEPT)
        keys = [(layer, which) for layer in range(shape.layers) for which in range(4)]
        # One after the other, as a server loads its weights: threads would scatter them over
        # malloc's arenas, differently in each run.
        rooms = [room_for(shape, which) for _, which in keys]
        with ThreadPoolExecutor(2) as pool:
            made = list(pool.map(lambda key, room: make_weight(shape, *key, room), keys, rooms))
        self.weights = dict(zip(keys, made, strict=True))
        self.sums = {key: page_sums(weight) for key, weight in self.weights.items()}
        self.cache: NDArray[np.uint8] = page_aligned((shape.blocks, BLOCK), np.uint8)
        self.writer = [0] * shape.blocks
        for block in range(shape.blocks):
            self.cache[block] = make_block(shape, block, 0)
        self.sessions: OrderedDict[int, dict[str, Any]] = OrderedDict()
        self.next_session = 0
        self._turn = 0
        while self.next_session < shape.sessions:
            self._new_session()
        for (layer, which), weight in self.weights.items():
            report.region(f"weight{layer}.{which}", weight.ctypes.data, weight.nbytes)
        report.region("cache", self.cache.ctypes.data, self.cache.nbytes)

    def serve(self) -> None:
        """Does one request: verifies what it is about to use or replace, computes an answer,
        rewrites its blocks.
        """
        self.request += 1
        number = self.request
        self._verify_some_weights()
        answer = self.answer(number, self.weights)
        self.answers.append((number, answer))
        self.chain = hashlib.blake2b(
            f"{self.chain} {number} {answer}".encode(), digest_size=16
        ).hexdigest()
        for block in blocks_of(self.shape, number):
            self.verify_block(block)
            self.cache[block] = make_block(self.shape, block, number)
            self.writer[block] = number
        for _ in range(SESSIONS_A_REQUEST):
            old, content = self.sessions.popitem(last=False)
            self._verify_session(old, content)
            self._new_session()

    def answer(self, number: int, weights: dict[tuple[int, int], NDArray[Any]]) -> str:
        shape = self.shape
        draw = random(shape.seed, 10, number)
        x = draw.standard_normal((4, shape.width), dtype=np.float32)
        for layer in draw.choice(shape.layers, size=LAYERS_A_REQUEST, replace=False).tolist():
            for which in range(4):
                x = np.tanh(x @ as_float(weights[layer, which]))
        return hashlib.blake2b(x.tobytes(), digest_size=16).hexdigest()

    def verify_block(self, block: int) -> None:
        writer = self.writer[block]
        expected = make_block(self.shape, block, writer)
        if what := differing_content(
            f"cache block {block} of request {writer}", self.cache[block], expected
        ):
            self.report.violation(f"at request {self.request}: {what}")

    def verify_everything(self) -> None:
        for (layer, which), weight in self.weights.items():
            anew = make_weight(self.shape, layer, which, room_for(self.shape, which))
            if what := differing_content(f"weight {layer}.{which}", weight, anew):
                self.report.violation(f"at request {self.request}: {what}")
        for block in range(self.shape.blocks):
            self.verify_block(block)
        for session, content in self.sessions.items():
            self._verify_session(session, content)
        for number, answer in self.answers:
            if self.answer(number, self.weights) != answer:
                self.report.violation(f"the answer to request {number} is not the one given then")

    def _verify_some_weights(self) -> None:
        keys = list(self.weights)
        size = 0
        while size < CHECKED_BYTES and size < 4 * len(keys) * self.shape.width**2:
            key = keys[self._turn % len(keys)]
            self._turn += 1
            size += self.weights[key].nbytes
            name = f"weight {key[0]}.{key[1]}"
            if what := differing_pages(name, self.weights[key], self.sums[key]):
                self.report.violation(f"at request {self.request}: {what}")

    def _verify_session(self, session: int, content: dict[str, Any]) -> None:
        if content != make_session(self.shape, session):
            self.report.violation(
                f"at request {self.request}: the objects of session {session} have changed"
            )

    def _new_session(self) -> None:
        self.sessions[self.next_session] = make_session(self.shape, self.next_session)
        self.next_session += 1

    def facts(self) -> dict[str, Any]:
        return {"chain": self.chain, "sessions": len(self.sessions), "blocks": self.shape.blocks}


def main(report: Report, shape: Shape, rate: float) -> int:
    server = Server(shape, report)
    while not report.finish_asked():
        server.serve()
        report.write(server.request, **server.facts())
        time.sleep(1 / rate)
    server.verify_everything()
    return report.end(server.request, **server.facts())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state_dir")
    parser.add_argument("--mib", type=int, default=1300)
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second, at most")
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    sized = Shape.of_size(options.mib, options.seed)
    sys.exit(
        run(
            Report(options.state_dir, "inference"), lambda report: main(report, sized, options.rate)
        )
    )
