"""Small real snapshots for the tests of the control plane: cells of one page, written through
shards, maps, manifest and session like large ones.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.backend.base import Backend
from icecore.store.backend.faulty import FaultyBackend, Plan, always
from icecore.store.format import codec
from icecore.store.format.cell import CELL, PLACE, Records
from icecore.store.format.chunk import NO_CHUNK, chunk_id
from icecore.store.format.cipher import overhead
from icecore.store.format.manifest import (
    Manifest,
    Namespaces,
    Region,
    Requirements,
    Sizes,
    encode_manifest,
)
from icecore.store.format.names import new_snapshot_id, object_name, random_id
from icecore.store.format.rows import Place, Row, Stored, pack
from icecore.store.format.segment import make_entries
from icecore.store.format.shard import ShardBuilder, place_chunk
from icecore.store.format.slots import Cost
from icecore.store.format.state import SnapshotRecord
from icecore.store.log import catalog
from icecore.store.log.entries import Entry
from icecore.store.log.repository import StoredRepository
from icecore.store.log.session import Session
from icecore.store.maintenance.check import check
from icecore.store.maintenance.findings import Report
from icecore.store.maintenance.gc import Collector, Options, Result
from icecore.store.snapshot.packs import MapWriter
from icecore.store.snapshot.reader import SnapshotReader

T = TypeVar("T")

#: Cell number -> one byte that fills its only data page; None for no page at all.
Content = Mapping[int, int]
_BITMAP = b"\1" + bytes(31)
#: Opens the encrypted repositories of the tests, which are quick to open.
PASSPHRASE = b"correct horse battery staple"
CHEAP = Cost(64, 1, 1)


def page(value: int) -> bytes:
    """Return the data page of a cell whose content is ``value``: incompressible, so that shards
    have a size.
    """
    return np.random.default_rng(value).bytes(PAGE)


async def put(
    repository: StoredRepository,
    session: Session,
    content: Content,
    *,
    job: str = "job",
    tags: list[str] | None = None,
    created_ns: int | None = None,
) -> tuple[SnapshotRecord, Records | None]:
    """Store all of a snapshot except its commit; what neither the index nor the base has goes into
    one new shard.
    """
    size = PAGE + overhead(repository.keys.chunk)
    builder = ShardBuilder(random_id(), memoryview(bytearray(max(1, len(content)) * size)))
    ids = {
        cell: chunk_id(repository.keys.chunk, _BITMAP, page(value))
        for cell, value in content.items()
    }
    held: dict[bytes, Place] = {}
    base = await repository.manifest(session.base) if session.base else None
    parent = base.spaces[0] if base else None
    if base is not None and parent is not None:
        reader = SnapshotReader(repository, base, asyncio.get_running_loop())
        for records in await _waiting(repository, lambda: reader.records(parent)):
            for record in records:
                place = Place(
                    record["place"]["shard"].tobytes(),
                    *(int(record["place"][name]) for name in ("offset", "length", "codec")),
                )
                if session.usable(place.shard):
                    held[record["chunk"].tobytes()] = place
    if ids:
        found, places = session.index.lookup(
            np.frombuffer(b"".join(ids.values()), np.uint8).reshape(-1, 32)
        )
        for chunk, hit, place_ in zip(ids.values(), found, places, strict=True):
            shard = place_["shard"].tobytes()
            if hit and session.usable(shard):
                held.setdefault(
                    chunk,
                    Place(
                        shard, int(place_["offset"]), int(place_["length"]), int(place_["codec"])
                    ),
                )
    rows = []
    for cell, value in sorted(content.items()):
        chunk = ids[cell]
        if chunk not in held:
            offset, room = builder.reserve(chunk, _BITMAP, NO_CHUNK, codec.RAW, size)
            place_chunk(repository.keys.chunk, builder.name, offset, chunk, [page(value)], room)
            held[chunk] = Place(builder.name, offset, size, codec.RAW)
        rows.append(pack(Row(cell, _BITMAP, bytes(32), chunk, Stored(held[chunk]))))
    records = np.array(rows, CELL) if rows else np.empty(0, CELL)
    entries = None
    if len(builder):
        await session.put_named("shard", builder.name, builder.finish(repository.keys.shard))
        table = builder.entries()
        places = np.zeros(len(table), PLACE)
        places["shard"] = np.frombuffer(builder.name, np.uint8)
        for name in ("offset", "length", "codec"):
            places[name] = table[name]
        entries = make_entries(table["chunk"], places)
    maps = MapWriter(repository.keys)
    region = Region(0, 64 * CELL_BYTES, 0)
    nodes = maps.add([records], parent)
    packed = maps.finish()
    if packed is not None:
        await session.put_named("nodes", maps.name, packed)
    from icecore.store.format.manifest import Space

    manifest = Manifest(
        format=1,
        snapshot=new_snapshot_id(),
        job=job,
        lineage=job,
        parent=session.base.snapshot if session.base else "",
        created_ns=created_ns or time.time_ns(),
        host="host",
        writer="test",
        root_pid=1,
        processes=[],
        spaces=[Space("process", "1", 0, [region], nodes)],
        files=[],
        requirements=Requirements("x86_64", "6", "4"),
        namespaces=Namespaces(),
        criu_options=[],
        tags=tags or [],
        sizes=Sizes(),
    )
    identity = random_id()
    name = object_name("manifest", identity)
    sealed = encode_manifest(manifest, repository.keys.manifest, name)
    await session.put_named("manifest", identity, [sealed.data])
    record = SnapshotRecord(
        manifest.snapshot,
        job,
        job,
        manifest.parent,
        manifest.created_ns,
        name,
        len(sealed.data),
        sealed.digest,
        len(content) * PAGE,
        tags=tags or [],
    )
    return record, entries


async def take(
    repository: StoredRepository, content: Content, base: str | None = None, **more: object
) -> str:
    """Take a whole snapshot; return its id."""
    async with await repository.begin(base, "test", beat_seconds=None, prove=False) as session:
        record, entries = await put(repository, session, content, **more)  # type: ignore[arg-type]
        await session.commit(record, entries)
    return record.snapshot


async def read(repository: StoredRepository, snapshot: str | SnapshotRecord) -> dict[int, int]:
    """Return the content of a snapshot, every byte verified; raise as a restore would."""
    manifest = await repository.manifest(snapshot)
    reader = SnapshotReader(repository, manifest, asyncio.get_running_loop())

    def whole() -> dict[int, int]:
        content = {}
        out = memoryview(bytearray(CELL_BYTES))
        for records in reader.records(manifest.spaces[0]):
            for record in records:
                data = bytes(reader.read_cell(record, out))
                content[int(record["cell"])] = _value(data)
        return content

    return await _waiting(repository, whole)


async def _waiting(repository: StoredRepository, work: Callable[[], T]) -> T:
    """Do ``work``, which reads. If reads go through this loop, another thread has to wait for them."""
    return work() if repository.backend.direct else await asyncio.to_thread(work)


_VALUES: dict[bytes, int] = {}


def _value(data: bytes) -> int:
    if not _VALUES:
        _VALUES.update((page(value)[:16], value) for value in range(256))
    value = _VALUES[data[:16]]
    assert data == page(value)
    return value


async def collect(repository: StoredRepository, **options: float) -> Result:
    """Run the collector once."""
    return await Collector(repository, Options(**options)).collect()  # type: ignore[arg-type]


async def sound(repository: StoredRepository, *, unreached: int | None = None) -> Report:
    """Check everything, including data."""
    report = await check(repository, read_data=1.0)
    assert report.sound, [str(damage) for damage in report.damages]
    if unreached is not None:
        assert report.unreached == unreached, f"{report.unreached} objects are left over"
    return report


async def reopened(backend: Backend, plan: Plan = always) -> tuple[StoredRepository, FaultyBackend]:
    """Return the repository, reopened through a back end that injects faults."""
    faulty = FaultyBackend(backend, plan)
    return await StoredRepository.open(faulty, passphrase=lambda: PASSPHRASE), faulty


async def state_of(repository: StoredRepository) -> Entry:
    """Return the newest entry."""
    return await repository.log.newest()


async def listed(repository: StoredRepository) -> list[str]:
    """Return the ids of all snapshots."""
    return [
        record.snapshot
        for record in await catalog.everything(
            (await state_of(repository)).state, repository.log.pages
        )
    ]


def files(root: Path) -> list[str]:
    """Return the names of all files under a directory."""
    return sorted(str(path.relative_to(root)) for path in root.rglob("*") if path.is_file())
