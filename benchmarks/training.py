#!/usr/bin/env python3
"""What snapshots of a training job add, by codec, beside the entropy of what changed: three
snapshots some steps apart.

Without --gpu the tests' training program (numpy); with it tests/realgpu/train.py (PyTorch, AdamW),
device memory alone: stored bytes and codecs, too, are those of its new chunks.

The floor is the order-0 entropy of the changed pages' bytes, for each cell the least over planes of
1, 2, 4 and 8 bytes and over the bytes themselves and their xor with the parent's pages: what a
perfect coder of single bytes would need that knows each plane's frequencies. Codecs that find
repetitions can be below it.
"""

from __future__ import annotations

import argparse
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
import numpy.typing as npt
from rich.console import Console
from rich.table import Table

from benchmarks.common import progress, scratch
from benchmarks.jobs import job
from icecore.dumper.dump import dump
from icecore.dumper.memory.spaces import cell_keys
from icecore.dumper.options import DumpOptions
from icecore.dumper.target import Target
from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.backend.local import LocalBackend
from icecore.store.format import codec
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader

_TRAIN = Path(__file__).resolve().parent.parent / "tests" / "realgpu" / "train.py"
_SAMPLE = 128
_WIDTHS = (1, 2, 4, 8)
_SECONDS = 300.0

Bytes = npt.NDArray[np.uint8]


def entropy(data: Bytes) -> float:
    """The least number of bytes that an order-0 coder of byte planes needs."""
    best = float(len(data))
    for width in _WIDTHS:
        planes = data.reshape(-1, width)
        total = 0.0
        for plane in range(width):
            counts = np.bincount(planes[:, plane], minlength=256)
            share = counts[counts > 0] / len(planes)
            total += -float((share * np.log2(share)).sum()) * len(planes) / 8
        best = min(best, total)
    return best


def _pages(reader: SnapshotReader, record: np.void, room: memoryview) -> npt.NDArray[np.uint8]:
    """u1[256, 4096]: a cell's pages; those that are absent are zeros."""
    whole = np.zeros((CELL_PAGES, PAGE), np.uint8)
    data = np.unpackbits(record["data"], bitorder="little").astype(np.bool_)
    whole[data] = np.frombuffer(reader.read_cell(record, room), np.uint8).reshape(-1, PAGE)
    return whole


@dataclass(frozen=True)
class Change:
    """From one snapshot to the next: bytes of cells that changed, of pages in them that did, their
    entropy in bytes (from a sample of the cells), and the bytes that were stored for them, by
    codec.
    """

    cells: int
    pages: int
    entropy: float
    stored: Counter[str]


def change(new: SnapshotReader, old: SnapshotReader, kinds: tuple[str, ...]) -> Change:
    """What changed in regions of these kinds."""
    room, other = memoryview(bytearray(CELL_BYTES)), memoryview(bytearray(CELL_BYTES))
    changed: list[tuple[np.void, np.void | None]] = []
    known = {
        place.tobytes()
        for space in old.manifest.spaces
        for rows in old.records(space)
        for place in rows["place"]
    }
    for space in (s for s in new.manifest.spaces if s.kind == "process"):
        before = next(
            (s for s in old.manifest.spaces if (s.kind, s.key) == ("process", space.key)), None
        )
        theirs: dict[int, np.void] = {}
        if before is not None:
            records = old.records(before)
            theirs = dict(
                zip(
                    cell_keys(before.regions, records).tolist(),
                    np.concatenate(records),
                    strict=True,
                )
            )
        records = new.records(space)
        for region, rows in zip(space.regions, records, strict=True):
            if region.kind not in kinds:
                continue
            for key, record in zip(cell_keys([region], [rows]).tolist(), rows, strict=True):
                parent = theirs.get(key)
                if parent is None or parent["chunk"].tobytes() != record["chunk"].tobytes():
                    changed.append((record, parent))
    sample = random.Random(7).sample(changed, min(_SAMPLE, len(changed)))
    pages_changed, bits = 0, 0.0
    for record, parent in sample:
        mine = _pages(new, record, room)
        base = _pages(old, parent, other) if parent is not None else np.zeros_like(mine)
        differ = np.flatnonzero((mine != base).any(axis=1))
        pages_changed += len(differ) * PAGE
        if len(differ):
            bits += min(
                entropy(mine[differ].reshape(-1)), entropy((mine ^ base)[differ].reshape(-1))
            )
    scale = len(changed) / max(1, len(sample))
    stored: Counter[str] = Counter()
    for place in {
        record["place"].tobytes(): record["place"]
        for record, _ in changed
        if record["place"].tobytes() not in known
    }.values():
        stored[codec.name(int(place["codec"]))] += int(place["length"])
    return Change(len(changed) * CELL_BYTES, int(pages_changed * scale), bits * scale, stored)


@contextmanager
def _running(gpu: bool, folder: Path, mib: int) -> Iterator[int]:
    """The job's pid, once it trains."""
    if not gpu:
        with job("training", folder, ("--threads", "2", "--mib", str(mib))) as running:
            yield running.pid
        return
    out = folder / "losses"
    command = [sys.executable, str(_TRAIN), "--out", str(out), "--width", "4096"]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True) as process:
        try:
            end = time.monotonic() + _SECONDS
            while not out.exists() or out.read_text().count("\n") < 5:
                if process.poll() is not None or time.monotonic() > end:
                    raise RuntimeError("the training does not get under way")
                time.sleep(0.1)
            yield process.pid
        finally:
            process.send_signal(signal.SIGKILL)


def measure(gpu: bool, mib: int, seconds: float) -> Table:
    """Three snapshots, ``seconds`` apart."""
    kinds = ("device",) if gpu else ("anonymous", "heap")
    table = Table(title="what a snapshot of a training job adds")
    for name in (
        "snapshot",
        "changed cells, MB",
        "changed pages, MB",
        "stored, MB",
        "their entropy, MB",
        "stored / entropy",
        "by codec, MB",
    ):
        table.add_column(name, overflow="fold")
    with scratch("training") as folder, LoopThread() as loop, _running(gpu, folder, mib) as pid:

        async def create() -> StoredRepository:
            return await StoredRepository.create(LocalBackend(folder / "repository", create=True))

        repository = loop.run(create())
        readers: list[SnapshotReader] = []
        for number in range(3):
            if number:
                time.sleep(seconds)
            progress(f"training: snapshot {number + 1}")
            done = dump(
                repository, loop, Target.of_process(pid, "training"), DumpOptions(max_window=600.0)
            )
            readers.append(SnapshotReader.open(repository, done.snapshot, loop.loop))
            if not number:
                continue
            found = change(readers[-1], readers[-2], kinds)
            stored = found.stored.total()
            table.add_row(
                str(number + 1),
                *(
                    f"{value / 1e6:.1f}"
                    for value in (found.cells, found.pages, stored, found.entropy)
                ),
                f"{stored / found.entropy:.2f}" if found.entropy else "",
                ", ".join(
                    f"{name} {size / 1e6:.1f}"
                    for name, size in found.stored.most_common()
                    if size >= 100_000
                ),
            )
    return table


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--mib", type=int, default=1000, help="memory of the numpy job")
    parser.add_argument("--seconds", type=float, default=2.0, help="between two snapshots")
    options = parser.parse_args()
    Console(width=200).print(measure(options.gpu, options.mib, options.seconds))


if __name__ == "__main__":
    main()
