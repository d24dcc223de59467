#!/usr/bin/env python3
"""How a repository's control plane grows: memory and time of the collector's marking, opening for a restore, dedup lookups, by the number of chunks.

Synthetic: maps and index segments as dumps write them, of chunks that do not exist (chunks of 64 KiB stored in shards of 64 MiB, 64 to a node). Each size
runs in a process of its own, so that the peak of its memory is its own. ``--chunks`` names the largest; the default takes less than a minute.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import numpy as np
from rich.console import Console

from benchmarks.common import ROOT, Result, progress, show
from icecore.store.cell import CELL, CELL_BYTES
from icecore.store.codec import ZSTD
from icecore.store.faulty import FaultyBackend
from icecore.store.gc import Collector, Options
from icecore.store.local import LocalBackend
from icecore.store.lookup import Index
from icecore.store.manifest import Manifest, Namespaces, Region, Requirements, Sizes, Space, encode_manifest
from icecore.store.names import new_snapshot_id
from icecore.store.packs import MapWriter
from icecore.store.pieces import Pieces
from icecore.store.reader import SnapshotReader
from icecore.store.repository import Repository
from icecore.store.segment import make_entries
from icecore.store.state import SnapshotRecord

PART = "scale"
SIZES = (10_000, 100_000, 1_000_000)
#: Places that are only marked, not read: as many as the sizes above cannot have in a minute.
MARKED = 100_000_000
_CHUNK = 64 << 10
_PER_SHARD = 1024
_SNAPSHOT_CHUNKS = 16_384
_KEY = bytes(32)


def _cells(dice: np.random.Generator, first: int, count: int, shards: np.ndarray) -> np.ndarray:
    """Records of ``count`` chunks that lie in a row from chunk ``first`` of the repository on."""
    cells = np.zeros(count, CELL)
    cells["cell"] = np.arange(count)
    cells["data"] = 255
    cells["chunk"] = np.frombuffer(dice.bytes(32 * count), np.uint8).reshape(-1, 32)
    numbers = np.arange(first, first + count)
    place = cells["place"]
    place["shard"] = shards[numbers // _PER_SHARD]
    place["offset"] = numbers % _PER_SHARD * _CHUNK
    place["length"], place["codec"] = _CHUNK, ZSTD
    return cells


async def _build(root: Path, chunks: int) -> str:
    """A repository of as many chunks; one of its snapshots."""
    repository = await Repository.create(LocalBackend(root, create=True))
    dice = np.random.default_rng(1)
    shards = np.frombuffer(dice.bytes(16 * (chunks // _PER_SHARD + 2)), np.uint8).reshape(-1, 16)
    snapshot, entries = "", []
    async with await repository.begin(None, "benchmark", load_index=False, beat_seconds=None) as session:
        records = []
        for first in range(0, chunks, _SNAPSHOT_CHUNKS):
            cells = _cells(dice, first, min(_SNAPSHOT_CHUNKS, chunks - first), shards)
            maps = MapWriter(repository.keys)
            length = len(cells) * CELL_BYTES
            nodes = maps.add([cells], None)
            pack = maps.finish()
            assert pack is not None
            await session.put_named("nodes", maps.name, pack)
            manifest = Manifest(
                format=1, snapshot=new_snapshot_id(), job=f"job-{first}", lineage=f"{first:032x}", parent="", created_ns=time.time_ns(), host="host",
                writer="benchmark", root_pid=1, processes=[], spaces=[Space("process", "1", length, [Region(0, length, 0)], nodes)], files=[],
                requirements=Requirements("x86_64", "6", "4"), namespaces=Namespaces(), criu_options=[], sizes=Sizes(),
            )  # fmt: skip
            sealed = encode_manifest(manifest, repository.keys.manifest)
            name = await session.put("manifest", [sealed.data])
            snapshot = manifest.snapshot
            records.append(
                SnapshotRecord(snapshot, manifest.job, manifest.lineage, "", manifest.created_ns, name, len(sealed.data), sealed.digest)
            )
            entries.append(make_entries(cells["chunk"], cells["place"]))
        await session.commit(records[0], np.concatenate(entries))
    for record in records[1:]:
        async with await repository.begin(None, "benchmark", load_index=False, beat_seconds=None) as session:
            await session.commit(record)
    await repository.close()
    return snapshot


async def _gc(root: Path) -> dict[str, float]:
    """Survey, mark and plan, as every collection begins."""
    repository = await Repository.open(LocalBackend(root))
    before, started = _peak(), time.monotonic()
    plan = await Collector(repository, Options(compact_below=0.5)).plan()
    assert all(item.name.startswith("pages/") for item in plan.delete)
    return {"seconds": time.monotonic() - started, "bytes": _peak() - before}


async def _open(root: Path, snapshot: str) -> dict[str, float]:
    """All that a restore reads before its first chunk."""
    back = FaultyBackend(LocalBackend(root))
    back.direct = False
    started = time.monotonic()
    repository = await Repository.open(back)
    manifest = await repository.manifest(snapshot)
    reader = SnapshotReader(repository, manifest, asyncio.get_running_loop())
    await asyncio.to_thread(reader.records, manifest.spaces[0])
    read = sum(call.bytes for call in back.calls)
    return {"requests": len(back.calls), "bytes": read, "seconds": time.monotonic() - started}


async def _lookups(root: Path) -> dict[str, float]:
    """Chunk ids asked for, half of them stored, in the batches of a dump."""
    repository = await Repository.open(LocalBackend(root))
    state = (await repository.log.newest()).state
    index = Index(repository.backend, state.segments, repository.keys.segment)
    started = time.monotonic()
    await index.load()
    loaded = time.monotonic() - started
    stored = await index.entries_of(max(state.segments, key=lambda ref: ref.count))
    dice = np.random.default_rng(2)
    ids = np.concatenate([stored["chunk"][dice.integers(0, len(stored), 50_000)], dice.integers(0, 256, (50_000, 32), np.uint8)])
    ids = ids[dice.permutation(len(ids))]
    started, found = time.monotonic(), 0
    for first in range(0, len(ids), 10_000):
        hit, _ = await asyncio.to_thread(index.lookup, ids[first : first + 10_000])
        found += int(hit.sum())
    assert found == 50_000
    return {"rate": len(ids) / (time.monotonic() - started), "load_seconds": loaded, "segments": len(state.segments)}


def _marked(chunks: int) -> dict[str, float]:
    """The set of reached places alone, half of them met twice, in the pieces that maps have."""
    before, started = _peak(), time.monotonic()
    pieces, step = Pieces(), 65_536
    for first in [*range(0, chunks, step), *range(0, chunks // 2, step)]:
        numbers = np.arange(first, first + step, dtype=np.uint64)
        pieces.add(numbers // np.uint64(_PER_SHARD), numbers % np.uint64(_PER_SHARD) * np.uint64(_CHUNK), np.full(step, _CHUNK, np.uint32))
    total = sum(length for _, length, _ in pieces.shards())
    assert total == -(-chunks // step) * step * _CHUNK
    return {"seconds": time.monotonic() - started, "bytes": _peak() - before}


def _peak() -> float:
    # Not by getrusage, whose maximum a child inherits from its parent.
    status = Path("/proc/self/status").read_text()
    return 1024.0 * next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))


def _child(what: str, *words: str) -> dict[str, float]:
    """Run one measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--child", what, *words],
        stdout=subprocess.PIPE, stdin=subprocess.DEVNULL, timeout=3600, check=True, cwd=ROOT, env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )  # fmt: skip
    measured: dict[str, float] = json.loads(done.stdout)
    return measured


def _run_child(what: str, words: list[str]) -> None:
    match what:
        case "gc":
            found = asyncio.run(_gc(Path(words[0])))
        case "open":
            found = asyncio.run(_open(Path(words[0]), words[1]))
        case "lookups":
            found = asyncio.run(_lookups(Path(words[0])))
        case _:
            found = _marked(int(words[0]))
    print(json.dumps(found))


def measure(sizes: tuple[int, ...] = SIZES, marked: int = MARKED) -> list[Result]:
    """All figures of this part."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    for chunks in sizes:
        progress(f"scale: {chunks} chunks")
        with tempfile.TemporaryDirectory(prefix="icecore-scale-") as folder:
            root = Path(folder) / "repository"
            snapshot = asyncio.run(_build(root, chunks))
            found[chunks] = {"gc": _child("gc", str(root)), "open": _child("open", str(root), snapshot), "lookups": _child("lookups", str(root))}
    progress(f"scale: {marked} places marked")
    places = _child("marked", str(marked))

    def curve(what: str, field: str, unit: str, scale: float = 1.0) -> str:
        return f"{unit}: " + ", ".join(f"{chunks:.0e}: {found[chunks][what][field] / scale:.3g}" for chunks in sizes)

    first, last = sizes[0], sizes[-1]
    growth = (found[last]["gc"]["seconds"] / found[first]["gc"]["seconds"]) / (last / first)
    gib = 1 << 30
    return [
        Result(PART, "gc: time per chunk, largest / smallest repository", (growth,), 1.5, note=curve("gc", "seconds", "seconds of plan")),
        Result(PART, "gc: memory, GiB", (found[last]["gc"]["bytes"] / gib,), 1.0, unit="", note=curve("gc", "bytes", "MiB more than at the start", 1 << 20)),
        Result(PART, f"gc: memory of {marked:.0e} reached places, GiB", (places["bytes"] / gib,), 1.0, unit="", note=f"{places['seconds']:.1f} s"),
        Result(PART, "opening for a restore: requests", (found[last]["open"]["requests"],), 6.0, unit="", note=curve("open", "requests", "requests")),
        Result(PART, "opening for a restore: MB", (found[last]["open"]["bytes"] / 1e6,), 50.0, unit="", note=curve("open", "bytes", "MB", 1e6)),
        Result(
            PART, "dedup: 10^6 lookups/s, half of them found", (found[last]["lookups"]["rate"] / 1e6,), 1.0, better="higher", unit="",
            note=curve("lookups", "rate", "10^6/s", 1e6) + "; " + curve("lookups", "load_seconds", "seconds to load"),
        ),
    ]  # fmt: skip


def main() -> None:
    """This part alone."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--chunks", type=int, default=SIZES[-1], help="in the largest repository; two more are a tenth and a hundredth of it")
    parser.add_argument("--marked", type=int, default=MARKED, help="reached places in the collector's set")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _run_child(options.child[0], options.child[1:])
        return
    show(measure((options.chunks // 100, options.chunks // 10, options.chunks), options.marked), Console(width=200))


if __name__ == "__main__":
    main()


