#!/usr/bin/env python3
"""Ratio and speed of every codec on made-up data of several kinds, one core, beside the floor:
copying and hashing the same bytes in the same run.
"""

from __future__ import annotations

import argparse
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from icecore.sizes import BITMAP_BYTES, CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.format import codec, delta
from icecore.store.format.chunk import chunk_id
from icecore.store.format.codec import Choice, Encoder
from icecore.store.runtime.pool import Scratch
from icecore.store.snapshot.trial import Objective, sample, trial

CHOICES = (
    Choice(codec.RAW),
    Choice(codec.LZ4),
    Choice(codec.ZSTD, -5),
    Choice(codec.ZSTD, -1),
    Choice(codec.ZSTD, 1),
    Choice(codec.ZSTD, 3),
    *(Choice(number, 1) for number in codec.BLOSC),
)
FULL = b"\xff" * BITMAP_BYTES
KEY = bytes(32)


def float32(random: np.random.Generator) -> bytes:
    """Weights of a network."""
    weights: bytes = (
        random.standard_normal(CELL_BYTES // 4, np.float32) * np.float32(0.02)
    ).tobytes()
    return weights


def bfloat16(random: np.random.Generator) -> bytes:
    """The same, shorter."""
    wide = (random.standard_normal(CELL_BYTES // 2, np.float32) * np.float32(0.02)).view(
        np.uint32
    ) >> 16
    narrow: bytes = wide.astype(np.uint16).tobytes()
    return narrow


def text(random: np.random.Generator) -> bytes:
    """Source code of the standard library, from a random place on."""
    source = b"".join(
        path.read_bytes() for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    )
    start = int(random.integers(0, len(source) - CELL_BYTES))
    return source[start : start + CELL_BYTES]


def heap(random: np.random.Generator) -> bytes:
    """Pointers, small integers and zeros, as on a heap of small objects."""
    words = (0x7F0000000000 + random.integers(0, 1 << 28, CELL_BYTES // 8) * 16).astype(np.uint64)
    kind: npt.NDArray[np.float64] = random.random(len(words))
    words[np.less(kind, 0.4)] = random.integers(0, 200, int(np.less(kind, 0.4).sum()))
    words[np.less(kind, 0.15)] = 0
    content: bytes = words.tobytes()
    return content


def zero(random: np.random.Generator) -> bytes:
    """Untouched memory that counts as data."""
    return bytes(CELL_BYTES)


KINDS: tuple[Callable[[np.random.Generator], bytes], ...] = (float32, bfloat16, text, heap, zero)


def best(work: Callable[[int], object], count: int, rounds: int) -> float:
    """GB/s of ``work`` over ``count`` cells, the best of ``rounds``."""
    rates: list[float] = []
    for _ in range(rounds):
        started = time.thread_time()
        for at in range(count):
            work(at)
        rates.append(count * CELL_BYTES / (time.thread_time() - started) / 1e9)
    return max(rates)


def by_codec(name: str, words: str, data: list[bytes], objective: Objective, rounds: int) -> Table:
    """Every codec on one kind of data."""
    cells, room, encoder = (
        [memoryview(cell) for cell in data],
        np.zeros(CELL_BYTES, np.uint8),
        Encoder(),
    )
    estimate = trial(sample(cells[0]), Scratch(), objective)
    table = Table(title=f"{name}: {words}", title_justify="left")
    table.caption = f"chosen at {objective.link / 1e9:.2f} GB/s on {objective.cores} cores: {codec.name(estimate.choice.codec)} {estimate.choice.level or ''}"
    for heading in ("codec", "ratio", "encode GB/s", "decode GB/s", "decode + verify GB/s"):
        table.add_column(heading, justify="left" if heading == "codec" else "right")

    def row(choice: Choice) -> tuple[str, ...]:
        stored = [codec.encode(cell, choice, encoder) for cell in cells]
        joined = [memoryview(b"".join(parts)) for _, parts in stored]

        def decode(at: int) -> None:
            codec.decode(stored[at][0], joined[at], room.data)

        def verify(at: int) -> None:
            decode(at)
            chunk_id(KEY, FULL, room.data)

        ratio = sum(len(part) for part in joined) / CELL_BYTES / len(cells)
        label = f"{codec.name(choice.codec)} {choice.level or ''}" + (
            " (stays raw)" if stored[0][0] != choice.codec else ""
        )
        rates = (
            best(work, len(cells), rounds)
            for work in (lambda at: codec.encode(cells[at], choice, encoder), decode, verify)
        )
        return label, f"{ratio:.3f}", *(f"{rate:.2f}" for rate in rates)

    for choice in CHOICES:
        table.add_row(*row(choice))
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cells", type=int, default=24, help="cells of each kind (1 MiB each)")
    parser.add_argument("--rounds", type=int, default=3, help="the best of so many rounds counts")
    parser.add_argument(
        "--link",
        type=float,
        default=Objective().link,
        help="bytes per second for the trial's choice",
    )
    options = parser.parse_args()
    random, scratch = np.random.default_rng(0), Scratch()
    encoder, objective = Encoder(), Objective(options.link)
    console = Console()

    cells = [memoryview(bytearray(float32(random))) for _ in range(options.cells)]
    room = np.zeros(CELL_BYTES, np.uint8)

    def measured(work: Callable[[int], object]) -> float:
        return best(work, options.cells, options.rounds)

    copy = measured(lambda at: np.copyto(room, np.frombuffer(cells[at], np.uint8)))
    hashing = measured(lambda at: chunk_id(KEY, FULL, cells[at]))
    console.print(
        f"floor, one core: copy {copy:.1f} GB/s, chunk id (BLAKE3) {hashing:.1f} GB/s; {options.cells} MiB of each kind"
    )

    for kind in KINDS:
        console.print(
            by_codec(
                kind.__name__,
                kind.__doc__ or "",
                [kind(random) for _ in range(options.cells)],
                objective,
                options.rounds,
            )
        )
    table = Table(
        title="delta: float32, 64 bytes changed in some pages, against the whole residual under zstd 1",
        title_justify="left",
    )
    for heading in (
        "changed pages",
        "delta bytes",
        "delta GB/s",
        "whole residual bytes",
        "whole residual GB/s",
    ):
        table.add_column(heading, justify="right")
    base = memoryview(bytearray(float32(random)))
    for pages in (1, 8, 64, CELL_PAGES):
        mine = np.frombuffer(base, np.uint8).copy().reshape(-1, PAGE)
        mine[random.choice(CELL_PAGES, pages, replace=False), 100:164] ^= 0x35
        data, choice = mine.reshape(-1).data, Choice(codec.ZSTD, 1)

        def sparse(at: int, data: memoryview = data, choice: Choice = choice) -> int:
            found = delta.difference(data, base, scratch.own, scratch.residual)
            number, (body, *_) = codec.encode(found.xor, choice, encoder)
            return sum(
                len(part) for part in delta.parts(number | codec.XOR, FULL, found.changed, body)
            )

        def whole(at: int, data: memoryview = data, choice: Choice = choice) -> int:
            residual = scratch.residual[:CELL_BYTES]
            np.bitwise_xor(
                np.frombuffer(data, np.uint64),
                np.frombuffer(base, np.uint64),
                out=np.frombuffer(residual, np.uint64),
            )
            return sum(len(part) for part in codec.encode(residual, choice, encoder)[1])

        table.add_row(
            f"{pages}",
            f"{sparse(0)}",
            f"{measured(sparse):.2f}",
            f"{whole(0)}",
            f"{measured(whole):.2f}",
        )
    console.print(table)


if __name__ == "__main__":
    main()
