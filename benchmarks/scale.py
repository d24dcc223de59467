#!/usr/bin/env python3
"""How a repository's control plane grows: memory and time of the collector's marking, opening for a
restore, dedup lookups, by the number of chunks.

Synthetic: maps and index segments as dumps write them, of chunks that do not exist (chunks of 64
KiB in shards of 64 MiB; lineages of 16 snapshots, each of 16 384 chunks, 64 of them its own). Each
measurement runs in a process of its own, so that the peak of its memory is its own. ``--chunks``
names the largest repository; the default takes a minute, 10^8 chunks 11 GB below ``TMPDIR`` and ten
minutes.
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
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import msgspec
import numpy as np
from rich.console import Console

from benchmarks.common import ROOT, Result, progress, show
from icecore.sizes import CELL_BYTES
from icecore.store.backend.faulty import FaultyBackend
from icecore.store.backend.local import LocalBackend
from icecore.store.format.cell import CELL, PLACE
from icecore.store.format.cellmap import NODE_CELLS
from icecore.store.format.codec import RAW
from icecore.store.format.manifest import (
    NODE_REF,
    Manifest,
    Namespaces,
    Region,
    Requirements,
    Sizes,
    Space,
    encode_manifest,
)
from icecore.store.format.names import new_snapshot_id, object_name, random_id
from icecore.store.format.segment import make_entries, sort_entries
from icecore.store.format.shard import ShardTable
from icecore.store.format.state import LogState, SegmentRef, SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.catalog import Pages
from icecore.store.log.index import build
from icecore.store.log.lookup import Index
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session
from icecore.store.log.watermark import Recollection
from icecore.store.maintenance.gc import Collector, Options
from icecore.store.maintenance.pieces import Pieces
from icecore.store.snapshot.packs import MapWriter
from icecore.store.snapshot.reader import SnapshotReader

PART = "scale"
SIZES = (10_000, 100_000, 1_000_000)
#: Places that are only marked, not read: as many as the sizes above cannot have in a minute.
MARKED = 100_000_000
_CHUNK = 64 << 10
_PER_SHARD = 1024
_SHARD_BYTES = _PER_SHARD * _CHUNK
#: Of a lineage: chunks of its first snapshot, further snapshots, and chunks that are new in each of
#: them (one map node).
_FIRST, _LATER, _CHANGED = 16_384, 15, NODE_CELLS
_LINEAGE = _FIRST + _LATER * _CHANGED
#: How an index of many commits and collections looks: each range of ids has segments of about these
#: shares of its entries.
_SEGMENTS = (0.8, 0.15, 0.05)
_BITMAP = b"\xff\xff" + bytes(30)


def _mixed(numbers: np.ndarray, salt: int) -> np.ndarray:
    """Numbers that look random, the same for the same (splitmix64; Steele, Lea and Flood, OOPSLA
    2014).
    """
    mixed = numbers.astype(np.uint64) + np.uint64(salt * 0x9E3779B97F4A7C15 & (1 << 64) - 1)
    mixed = (mixed ^ mixed >> np.uint64(30)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ mixed >> np.uint64(27)) * np.uint64(0x94D049BB133111EB)
    return mixed ^ mixed >> np.uint64(31)


def _ids(chunks: np.ndarray) -> np.ndarray:
    """The ids of chunks by their numbers; the lowest byte of a number is the first of its id, so
    that the chunks of a range of ids are known.
    """
    words = np.stack([_mixed(chunks, salt) for salt in range(1, 5)], axis=1)
    ids = words.view(np.uint8).reshape(-1, 32).copy()
    ids[:, 0] = chunks & 0xFF
    return ids


def _places(chunks: np.ndarray) -> np.ndarray:
    """Where chunks lie: one after the other in shards."""
    places = np.zeros(len(chunks), PLACE)
    shards = chunks // _PER_SHARD
    places["shard"] = (
        np.stack([_mixed(shards, 8), _mixed(shards, 9)], axis=1).view(np.uint8).reshape(-1, 16)
    )
    places["offset"] = chunks % _PER_SHARD * _CHUNK
    places["length"], places["codec"] = _CHUNK, RAW
    return places


def _cells(first: int, count: int, at: int = 0) -> np.ndarray:
    """Records of ``count`` cells from cell ``at`` on, whose chunks are those from number ``first``
    on.
    """
    cells = np.zeros(count, CELL)
    cells["cell"] = np.arange(at, at + count)
    cells["data"][:, :2] = 255
    numbers = np.arange(first, first + count)
    cells["chunk"], cells["place"] = _ids(numbers), _places(numbers)
    return cells


async def _build(root: Path, chunks: int) -> list[str]:
    """A repository of as many chunks (a multiple of a lineage's), sixteen snapshots a lineage; the
    first and the last of its snapshots.
    """
    os.fsync = lambda descriptor: None  # nothing here has to outlive a power cut
    repository = await StoredRepository.create(LocalBackend(root, create=True))
    records: list[SnapshotRecord] = []
    async with await repository.begin(
        None, "benchmark", load_index=False, beat_seconds=None
    ) as session:
        for lineage in range(chunks // _LINEAGE):
            await _lineage(repository, session, lineage, records)

        async def change(state: LogState, pages: Pages) -> LogState:
            for first in range(0, len(records), 1000):
                state = await catalog.add(state, records[first : first + 1000], pages)
            return msgspec.structs.replace(state, segments=segments)

        segments = await _index(repository, session, chunks)
        await session.transform(change, "fill")
    await repository.close()
    return [records[0].snapshot, records[-1].snapshot]


async def _lineage(
    repository: StoredRepository, session: Session, number: int, records: list[SnapshotRecord]
) -> None:
    """The snapshots of one lineage: the first, and each further one with one node of its own."""
    length = _FIRST * CELL_BYTES
    first = number * _LINEAGE
    nodes = base = np.empty(0, NODE_REF)
    for turn in range(1 + _LATER):
        maps = MapWriter(repository.keys)
        if turn == 0:
            nodes = base = np.frombuffer(maps.add([_cells(first, _FIRST)], None), NODE_REF)
        else:
            start = first + _FIRST + (turn - 1) * _CHANGED
            own = np.frombuffer(
                maps.add([_cells(start, _CHANGED, turn * _CHANGED)], None), NODE_REF
            )[0]
            nodes, before = base.copy(), nodes[turn - 1]
            nodes[turn - 1], nodes[turn] = (
                before,
                own,
            )  # in three packs: the first snapshot's, the one before's, and its own
        pack = maps.finish()
        assert pack is not None
        await session.put_named("nodes", maps.name, pack)
        manifest = Manifest(
            format=1,
            snapshot=new_snapshot_id(),
            job=f"job-{number}",
            lineage=f"{number:032x}",
            parent="",
            created_ns=time.time_ns(),
            host="host",
            writer="benchmark",
            root_pid=1,
            processes=[],
            spaces=[Space("process", "1", length, [Region(0, length, 0)], nodes.tobytes())],
            files=[],
            requirements=Requirements("x86_64", "6", "4"),
            namespaces=Namespaces(),
            criu_options=[],
            sizes=Sizes(),
        )
        sealed = encode_manifest(manifest, repository.keys.manifest)
        name = await session.put("manifest", [sealed.data])
        records.append(
            SnapshotRecord(
                manifest.snapshot,
                manifest.job,
                manifest.lineage,
                "",
                manifest.created_ns,
                name,
                len(sealed.data),
                sealed.digest,
            )
        )


async def _index(repository: StoredRepository, session: Session, chunks: int) -> list[SegmentRef]:
    """Segments as commits and collections leave them, the large ones first."""
    refs = []
    bits = 0 if chunks <= 1 << 20 else 6 if chunks < 1 << 26 else 8
    for share, least in zip(_SEGMENTS, np.cumsum([0, *_SEGMENTS[:-1]]), strict=True):
        for prefix in range(1 << bits):
            leading = range(prefix << 8 - bits, (prefix + 1) << 8 - bits) if bits else range(256)
            numbers = np.concatenate([np.arange(byte, chunks, 256) for byte in leading])
            numbers = numbers[np.argsort(_mixed(numbers, 7))]
            numbers = numbers[int(least * len(numbers)) : int((least + share) * len(numbers))]
            entries = sort_entries(make_entries(_ids(numbers), _places(numbers)))
            for segment in build(
                entries, repository.keys.segment, random_id, bits=bits, prefix=prefix
            ):
                await session.put_segment(segment)
                refs.append(segment.ref)
    return refs


async def _gc(root: Path) -> dict[str, float]:
    """Survey, mark and plan, as every collection begins."""
    repository = await StoredRepository.open(LocalBackend(root))
    before, started, cpu = _peak(), time.monotonic(), time.process_time()
    plan = await Collector(repository, Options(compact_below=0.5)).plan()
    assert all(item.name.startswith("pages/") for item in plan.delete)
    return {
        "seconds": time.monotonic() - started,
        "cpu": time.process_time() - cpu,
        "bytes": _peak() - before,
    }


async def _open(root: Path, snapshot: str) -> dict[str, float]:
    """All that a restore reads before its first chunk, on a node that has not opened the repository
    before and on one that has.
    """
    calls = []
    with tempfile.TemporaryDirectory(prefix="icecore-scale-state-") as state:
        for _ in range(2):
            back = FaultyBackend(LocalBackend(root))
            back.direct = False
            started = time.monotonic()
            repository = await StoredRepository.open(
                back, recollection=Recollection(Path(state) / "config")
            )
            manifest = await repository.manifest(snapshot)
            reader = SnapshotReader(repository, manifest, asyncio.get_running_loop())
            await asyncio.to_thread(reader.records, manifest.spaces[0])
            calls.append(back.calls)
    read = sum(call.bytes for call in calls[0])
    packs = sum(call.name.startswith("nodes/") for call in calls[0])
    return {
        "first": len(calls[0]),
        "requests": len(calls[1]),
        "bytes": read,
        "packs": packs,
        "seconds": time.monotonic() - started,
    }


#: How a dump asks: for cells that lie together in shards, as those of a job that is stored again;
#: for cells of which one in ten was stored, each in another shard; and for what is all new.
_ASKED = ("together", "scattered", "new")


async def _lookups(root: Path, words: list[str]) -> dict[str, float]:
    """Chunk ids asked for in the batches of a dump; half of those that lie together are stored, a
    tenth of those that are scattered.
    """
    chunks, asked = int(words[0]), words[1]
    repository = await StoredRepository.open(LocalBackend(root))
    state = (await repository.log.newest()).state
    keys = repository.keys
    dice, count = np.random.default_rng(2), 200_000
    hits = {"together": count // 2, "scattered": count // 10, "new": 0}[asked]
    if asked == "together":
        runs = dice.integers(0, chunks // _PER_SHARD, -(-hits // _PER_SHARD))
        known = (runs[:, None] * _PER_SHARD + np.arange(_PER_SHARD)).ravel()[:hits]
        for shard in np.unique(runs).tolist():
            _footer(root, keys.shard, shard)
    else:
        known = dice.integers(0, chunks, hits)
    ids = np.concatenate([_ids(known), dice.integers(0, 256, (count - hits, 32), np.uint8)])
    # New and known ones in between, the known ones in their order.
    ids = ids[np.argsort(np.concatenate([np.sort(dice.random(hits)), dice.random(count - hits)]))]
    faulty, before = FaultyBackend(repository.backend), _peak()
    index = Index(faulty, state.segments, keys.segment, shard_key=keys.shard)
    started = time.monotonic()
    await index.load()
    loaded = time.monotonic() - started
    # The filters and heads are read once a dump, whatever it asks: their time is told by itself.
    for _ in range(10):
        await asyncio.to_thread(index.lookup, dice.integers(0, 256, (10_000, 32), np.uint8))
    first, calls = time.monotonic() - started - loaded, len(faulty.calls)
    started, cpu, found = time.monotonic(), time.process_time(), 0
    for at in range(0, count, 10_000):
        hit, _ = await asyncio.to_thread(index.lookup, ids[at : at + 10_000])
        found += int(hit.sum())
    seconds, cpu = time.monotonic() - started, time.process_time() - cpu
    assert found == hits, f"{found} of {hits}"
    return {
        "rate": count / seconds,
        "cpu_rate": count / cpu,
        "load_seconds": loaded + first,
        "segments": len(state.segments),
        "bytes": _peak() - before,
        "load_requests": calls,
        "requests": (len(faulty.calls) - calls) / count,
    }


def _footer(root: Path, key: bytes, shard: int) -> None:
    """A shard of which only the footer is there: the rest is a hole in its file."""
    numbers = np.arange(shard * _PER_SHARD, (shard + 1) * _PER_SHARD)
    name, ids = _places(numbers[:1])["shard"][0].tobytes(), _ids(numbers)
    table = ShardTable(name, _SHARD_BYTES)
    for at in range(_PER_SHARD):
        table.add(ids[at].tobytes(), _BITMAP, bytes(32), RAW, _CHUNK)
    path = root / object_name("shard", name)
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        file.seek(table.used)
        file.write(table.footer(key))


def _marked(chunks: int) -> dict[str, float]:
    """The set of reached places alone, half of them met twice, in the pieces that maps have."""
    before, started = _peak(), time.monotonic()
    pieces, step = Pieces(), 65_536
    for first in [*range(0, chunks, step), *range(0, chunks // 2, step)]:
        numbers = np.arange(first, first + step, dtype=np.uint64)
        pieces.add(
            numbers // np.uint64(_PER_SHARD),
            numbers % np.uint64(_PER_SHARD) * np.uint64(_CHUNK),
            np.full(step, _CHUNK, np.uint32),
        )
    total = sum(length for _, length, _ in pieces.shards())
    assert total == -(-chunks // step) * step * _CHUNK
    return {"seconds": time.monotonic() - started, "bytes": _peak() - before}


def _peak() -> float:
    # Not by getrusage, whose maximum a child inherits from its parent.
    status = Path("/proc/self/status").read_text()
    return 1024.0 * next(
        int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM")
    )


def _child(what: str, *words: str) -> dict[str, Any]:
    """Run one measurement in a process of its own."""
    done = subprocess.run(
        [sys.executable, str(Path(__file__).resolve()), "--child", what, *words],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        timeout=3600,
        check=True,
        cwd=ROOT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def _run_child(what: str, words: list[str]) -> None:
    match what:
        case "build":
            oldest, newest = asyncio.run(_build(Path(words[0]), int(words[1])))
            print(json.dumps({"oldest": oldest, "newest": newest}))
            return
        case "gc":
            found = asyncio.run(_gc(Path(words[0])))
        case "open":
            found = asyncio.run(_open(Path(words[0]), words[1]))
        case "lookups":
            found = asyncio.run(_lookups(Path(words[0]), words[1:]))
        case _:
            found = _marked(int(words[0]))
    print(json.dumps(found))


def measure(sizes: tuple[int, ...] = SIZES, marked: int = MARKED) -> list[Result]:
    """All figures of this part."""
    found: dict[int, dict[str, dict[str, float]]] = {}
    sizes = tuple(max(1, size // _LINEAGE) * _LINEAGE for size in sizes)
    for chunks in sizes:
        progress(f"scale: {chunks} chunks")
        with tempfile.TemporaryDirectory(prefix="icecore-scale-") as folder:
            root = str(Path(folder) / "repository")
            built = _child("build", root, str(chunks))
            found[chunks] = {"gc": _child("gc", root)}
            found[chunks] |= {
                what: _child("open", root, built[what]) for what in ("oldest", "newest")
            }
            found[chunks] |= {what: _child("lookups", root, str(chunks), what) for what in _ASKED}
            progress(f"scale: {json.dumps(found[chunks])}")
    progress(f"scale: {marked} places marked")
    places = _child("marked", str(marked))

    def curve(what: str, field: str, unit: str, scale: float = 1.0) -> str:
        return f"{unit}: " + ", ".join(
            f"{chunks:.0e}: {found[chunks][what][field] / scale:.3g}" for chunks in sizes
        )

    before, last = sizes[-2:] if len(sizes) > 1 else sizes * 2
    growth = (found[last]["gc"]["cpu"] / found[before]["gc"]["cpu"]) / (last / before)
    gib = 1 << 30
    lookups = {
        "together": "half of them stored, and together",
        "new": "all new",
        "scattered": "a tenth of them stored, each in another shard",
    }
    return [
        Result(
            PART,
            "gc: CPU time per chunk, largest repository / the one before",
            (growth,),
            1.5,
            note=curve("gc", "cpu", "CPU seconds of plan")
            + "; "
            + curve("gc", "seconds", "seconds"),
        ),
        Result(
            PART,
            "gc: memory, GiB",
            (found[last]["gc"]["bytes"] / gib,),
            1.0,
            unit="",
            note=curve("gc", "bytes", "MiB more than at the start", 1 << 20),
        ),
        Result(
            PART,
            f"gc: memory of {marked:.0e} reached places, GiB",
            (places["bytes"] / gib,),
            1.0,
            unit="",
            note=f"{places['seconds']:.1f} s",
        ),
        *(
            Result(
                PART,
                f"opening the {what} snapshot, with maps in {found[last][what]['packs']} packs, for a restore: requests",
                (found[last][what]["requests"],),
                6.0,
                unit="",
                note="; ".join(
                    (
                        curve(what, "requests", "requests"),
                        curve(what, "first", "first on a node"),
                        curve(what, "bytes", "MB", 1e6),
                    )
                ),
            )
            for what in ("newest", "oldest")
        ),
        *(
            Result(
                PART,
                f"dedup: 10^6 lookups/s, {words}",
                (found[last][what]["rate"] / 1e6,),
                1.0 if what != "scattered" else None,
                better="higher",
                unit="",
                note="; ".join(
                    (
                        curve(what, "rate", "10^6/s", 1e6),
                        curve(what, "cpu_rate", "a CPU second", 1e6),
                        curve(what, "requests", "reads each"),
                    )
                ),
            )
            for what, words in lookups.items()
        ),
        Result(
            PART,
            "dedup: memory of the index, MB",
            (found[last]["together"]["bytes"] / 1e6,),
            200.0,
            unit="",
            note="; ".join(
                (
                    curve("together", "bytes", "MB", 1e6),
                    curve("new", "load_seconds", "s to load"),
                    curve("new", "load_requests", "reads"),
                )
            ),
        ),
    ]


def main() -> None:
    """This part alone."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--chunks",
        type=int,
        default=SIZES[-1],
        help="in the largest repository; two more are a tenth and a hundredth of it",
    )
    parser.add_argument(
        "--marked", type=int, default=MARKED, help="reached places in the collector's set"
    )
    parser.add_argument("--only", action="store_true", help="the largest repository alone")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _run_child(options.child[0], options.child[1:])
        return
    sizes = (options.chunks // 100, options.chunks // 10, options.chunks)
    show(measure(sizes[2:] if options.only else sizes, options.marked), Console(width=200))


if __name__ == "__main__":
    main()
