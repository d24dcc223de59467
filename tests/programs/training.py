"""A multi-threaded training loop (numpy, AdamW) whose every bit is a function of seed and step: it
can be replayed.

Each thread trains a network of its own on private arrays; the threads meet after each step, and
their losses go into a hash chain. The final verification trains anew from step 0 to the step
reached and compares losses, weights, both Adam moments and gradients bit by bit; it needs the
memory and the time of the run once more.

    python training.py STATE_DIR [--threads 2] [--mib 64] [--seed 1]
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import struct
import subprocess
import sys
import threading
import time
import traceback
from dataclasses import dataclass, replace
from typing import Any

# One BLAS thread: the threads are ours, and sums must not depend on how a library divides them.
os.environ.update(OPENBLAS_NUM_THREADS="1", OMP_NUM_THREADS="1", MKL_NUM_THREADS="1")

import numpy as np
from numpy.typing import NDArray

if not __package__:  # run as a program
    sys.path.insert(0, os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))

from tests.programs.arrays import Sums, differing_content, differing_pages, page_aligned, page_sums
from tests.programs.report import Report, run

Float = NDArray[np.float32]

LEARNING_RATE, BETA1, BETA2, EPSILON, DECAY = 1e-3, 0.9, 0.999, 1e-8, 0.01
CHECKED_BYTES = (
    16 << 20
)  # a thread verifies at most this much between two steps; larger states take turns


@dataclass(frozen=True)
class Config:
    """What determines a training run completely."""

    seed: int = 1
    threads: int = 2
    width: int = 832
    layers: int = 3
    batch: int = 16

    @classmethod
    def of_size(cls, mib: int, *, threads: int, seed: int) -> Config:
        """The configuration whose weights, moments and gradients together take at most ``mib`` MiB."""
        shape = cls()
        width = math.isqrt((mib << 20) // (threads * shape.layers * 4 * 4)) // 32 * 32
        return cls(seed=seed, threads=threads, width=max(32, width))


class Learner:
    """One thread's network and optimiser; all its arrays are private to it."""

    def __init__(self, config: Config, thread: int) -> None:
        self.config = config
        self.thread = thread
        shape = (config.width, config.width)
        names = ("weight", "moment1", "moment2", "gradient")
        self.arrays: dict[str, Float] = {
            f"{name}{layer}": page_aligned(shape, np.float32)
            for layer in range(config.layers)
            for name in names
        }
        self.scratch: Float = page_aligned(shape, np.float32)
        generator = np.random.Generator(np.random.Philox(key=config.seed * 1000 + thread))
        for layer in range(config.layers):
            weight = self.arrays[f"weight{layer}"]
            generator.standard_normal(dtype=np.float32, out=weight)
            weight *= 1.0 / math.sqrt(config.width)

    def step(self, number: int) -> float:
        """Does training step ``number`` (counted from 1) and returns its loss, a float32 value."""
        config = self.config
        key = (config.seed << 32) + self.thread
        generator = np.random.Generator(np.random.Philox(key=key, counter=number << 64))
        x = generator.standard_normal((config.batch, config.width), dtype=np.float32)
        target = np.roll(x, 1, axis=1)
        inputs = [x]
        for layer in range(config.layers):
            y = inputs[-1] @ self.arrays[f"weight{layer}"]
            inputs.append(np.maximum(y, 0) if layer + 1 < config.layers else y)
        error = inputs[-1] - target
        delta: Float = error * np.float32(2.0 / error.size)
        for layer in reversed(range(config.layers)):
            np.matmul(inputs[layer].T, delta, out=self.arrays[f"gradient{layer}"])
            delta = (delta @ self.arrays[f"weight{layer}"].T) * (inputs[layer] > 0)
        for layer in range(config.layers):
            self._adamw(number, layer)
        return float(np.mean(error * error, dtype=np.float32))

    def _adamw(self, number: int, layer: int) -> None:
        w, m, v, g = (
            self.arrays[f"{name}{layer}"] for name in ("weight", "moment1", "moment2", "gradient")
        )
        s = self.scratch
        np.multiply(g, np.float32(1 - BETA1), out=s)
        m *= np.float32(BETA1)
        m += s
        np.multiply(g, g, out=s)
        s *= np.float32(1 - BETA2)
        v *= np.float32(BETA2)
        v += s
        np.sqrt(v, out=s)
        s *= np.float32(1 / math.sqrt(1 - BETA2**number))
        s += np.float32(EPSILON)
        np.divide(m, s, out=s)
        s *= np.float32(LEARNING_RATE / (1 - BETA1**number))
        w *= np.float32(1 - LEARNING_RATE * DECAY)
        w -= s


def chain(previous: str, number: int, losses: list[float]) -> str:
    """The hash over all losses up to step ``number``."""
    digest = hashlib.blake2b(bytes.fromhex(previous), digest_size=16)
    digest.update(struct.pack(f"<Q{len(losses)}f", number, *losses))
    return digest.hexdigest()


class Team:
    """One learner for each thread, driven step by step; the threads live as long as the team."""

    def __init__(self, config: Config, *, report: Report | None = None) -> None:
        self.config = config
        self.learners = [Learner(config, thread) for thread in range(config.threads)]
        self.number = 0
        self.chain = ""
        self.losses = [0.0] * config.threads
        self.crash = ""
        self._report = report
        self._stopping = False
        # No time-outs here: a frozen program's clock runs on, and a late thread is no fault of its
        # own.
        self._begin = threading.Barrier(config.threads + 1)
        self._end = threading.Barrier(config.threads + 1)
        self._threads = [
            threading.Thread(target=self._work, args=(n,), daemon=True)
            for n in range(config.threads)
        ]
        for thread in self._threads:
            thread.start()

    def step(self) -> None:
        """Does the next step on all threads. Raises RuntimeError with the trace of a thread that
        failed.
        """
        self.number += 1
        try:
            self._begin.wait()
            self._end.wait()
        except threading.BrokenBarrierError as broken:
            raise RuntimeError(self.crash) from broken
        self.chain = chain(self.chain, self.number, self.losses)

    def stop(self) -> None:
        self._stopping = True
        self._begin.wait()
        for thread in self._threads:
            thread.join()

    def _work(self, number: int) -> None:
        try:
            self._loop(self.learners[number], number)
        except Exception:  # noqa: BLE001 - handed to the main thread, which records it
            self.crash = traceback.format_exc()
            self._begin.abort()
            self._end.abort()

    def _loop(self, learner: Learner, number: int) -> None:
        watched = Watch(learner)
        while True:
            self._begin.wait()
            if self._stopping:
                return
            if self._report is not None and (what := watched.differs()):
                self._report.violation(f"thread {number}, before step {self.number}: {what}")
            self.losses[number] = learner.step(self.number)
            if self._report is not None:
                watched.seal(self.number)
            self._end.wait()


class Watch:
    """Sums of some of a learner's pages, taken when a step ends and compared when the next begins."""

    def __init__(self, learner: Learner) -> None:
        self._pieces: list[tuple[str, NDArray[Any]]] = []
        for name, array in learner.arrays.items():
            flat = array.reshape(-1)
            for start in range(0, flat.size, CHECKED_BYTES // 4):
                self._pieces.append((name, flat[start : start + CHECKED_BYTES // 4]))
        self._sealed: list[tuple[str, NDArray[Any], Sums]] = []

    def seal(self, number: int) -> None:
        self._sealed, size, at = [], 0, number * 5
        for turn in range(len(self._pieces)):
            name, piece = self._pieces[(at + turn) % len(self._pieces)]
            size += piece.nbytes
            if self._sealed and size > CHECKED_BYTES:
                break
            self._sealed.append((name, piece, page_sums(piece)))

    def differs(self) -> str:
        return next(
            (
                what
                for name, piece, sums in self._sealed
                if (what := differing_pages(name, piece, sums))
            ),
            "",
        )


def replay(config: Config, steps: int) -> Team:
    """Trains from the beginning to step ``steps``; the returned team has stopped and holds the
    expected state.
    """
    team = Team(config)
    for _ in range(steps):
        team.step()
    team.stop()
    return team


def expected(config: Config, steps: int, timeout_s: float = 300.0) -> tuple[list[str], str]:
    """The losses of step ``steps`` (as float.hex) and the hash of all losses up to it: a function
    of its arguments alone.

    Computed in a process of its own, with as bare an environment as the program gets: results come
    out differently where numpy was first loaded with several BLAS threads, and with the kernels
    that OPENBLAS_CORETYPE names.
    """
    argv = [
        sys.executable,
        os.path.abspath(__file__),
        "--replay",
        str(steps),
        "--width",
        str(config.width),
    ]
    argv += ["--threads", str(config.threads), "--seed", str(config.seed), os.curdir]
    bare = {name: os.environ[name] for name in ("PATH", "LD_LIBRARY_PATH") if name in os.environ}
    done = subprocess.run(argv, check=True, capture_output=True, timeout=timeout_s, env=bare)
    answer = json.loads(done.stdout)
    return answer["losses"], answer["chain"]


def facts(team: Team) -> dict[str, Any]:
    config = team.config
    return {
        "losses": [loss.hex() for loss in team.losses],
        "chain": team.chain,
        "config": {"seed": config.seed, "threads": config.threads, "width": config.width},
    }


def main(report: Report, config: Config) -> int:
    team = Team(config, report=report)
    for learner in team.learners:
        for name, array in learner.arrays.items():
            report.region(f"{learner.thread}.{name}", array.ctypes.data, array.nbytes)
    while not report.finish_asked():
        team.step()
        report.write(team.number, **facts(team))
        time.sleep(0.004)  # others need the processor, too; the threads wait at their barrier
    team.stop()
    anew = replay(config, team.number)
    if anew.chain != team.chain:
        report.violation(
            f"the losses up to step {team.number} are not those of an uninterrupted run"
        )
    for learner, other in zip(team.learners, anew.learners, strict=True):
        for name, array in learner.arrays.items():
            if what := differing_content(
                f"thread {learner.thread} {name}", array, other.arrays[name]
            ):
                report.violation(f"after step {team.number}: {what}")
    return report.end(team.number, **facts(team))


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("state_dir")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--mib", type=int, default=64)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--width", type=int, help="instead of --mib")
    parser.add_argument(
        "--replay", type=int, metavar="STEPS", help="only train so far and print what came out"
    )
    options = parser.parse_args()
    chosen = Config.of_size(options.mib, threads=options.threads, seed=options.seed)
    if options.width is not None:
        chosen = replace(chosen, width=options.width)
    if options.replay is not None:
        print(json.dumps(facts(replay(chosen, options.replay))))
        sys.exit(0)
    sys.exit(run(Report(options.state_dir, "training"), lambda report: main(report, chosen)))
