"""Objects that a holder of the key wrote to do harm: a small repository, changed in one place and
sealed again, and everything that reads it.

Every reader must end soon, in bounded memory, successfully or with an error of icecore's. A new
command that reads a repository needs a consumer here.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import resource
import shutil
import signal
import struct
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

import msgspec
import numpy as np
import zstandard

from icecore.cli import main
from icecore.dumper.memory.parent import load_parent
from icecore.errors import IcecoreError
from icecore.events import discard
from icecore.host.criu.images import COMMON, MM
from icecore.host.criu.pagemap_image import ENTRY as PAGEMAP_ENTRY
from icecore.host.criu.pagemap_image import PE_PRESENT, encode_pagemap
from icecore.host.criu.program import Criu
from icecore.restorer import workingset
from icecore.restorer.files.exporter import export
from icecore.restorer.options import RestoreOptions
from icecore.restorer.phases.planning import run_record
from icecore.restorer.requirements.check import check_requirements
from icecore.sizes import CELL_BYTES, CELL_PAGES, PAGE
from icecore.snapshots.difference import compare
from icecore.store.backend.local import LocalBackend
from icecore.store.backend.memory import MemoryBackend
from icecore.store.format.cell import CELL, Records
from icecore.store.format.cellmap import NodeEncoder, decode_node, node_ids, pack_footer
from icecore.store.format.container import TAIL_BYTES
from icecore.store.format.contract import (
    left_to_driver,
    read_devices,
    read_gpus,
    read_resident,
    read_run,
)
from icecore.store.format.envelope import ObjectKind, digest_of, seal, unseal
from icecore.store.format.fingerprints import Fingerprints, encode_fingerprints
from icecore.store.format.hints import HINTS_KIND
from icecore.store.format.keys import CONFIG_KIND, Keys
from icecore.store.format.manifest import (
    MANIFEST_KIND,
    NODE_REF,
    Manifest,
    Namespaces,
    Process,
    Region,
    Requirements,
    Space,
)
from icecore.store.format.names import log_name, new_snapshot_id, object_name
from icecore.store.format.segment import encode_segment, parse_segment
from icecore.store.format.shard import SHARD
from icecore.store.format.state import ENTRY_KIND, PAGE_KIND
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check import check
from icecore.store.maintenance.forget import Policy
from icecore.store.maintenance.forget import plan as plan_forget
from icecore.store.maintenance.gc import Collector
from icecore.store.maintenance.stats import stats
from icecore.store.replication.reconcile import plan as plan_sync
from icecore.store.replication.replicas import sync
from icecore.store.replication.transfer import copy
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader
from icecore.store.snapshot.writer import SnapshotWriter

#: What a reader may take beyond what the process had before, and how long.
MEMORY_BYTES = 400 << 20
SECONDS = 60
_RUN = {
    "name": "job",
    "command": ["run"],
    "cwd": "/",
    "isolation": {"pid": True, "ipc": True, "network": False, "root": False},
    "binds": [],
    "files": {
        name: f"/state/job/{name}"
        for name in ("stdout.log", "stderr.log", "status", "icecore-init")
    },
    "init": "",
}
_CUDA = {
    "driver": "580",
    "processes": {"1": {"gpus": ["GPU-1"], "contexts": {"GPU-1": 5}, "temporary": [[4096, 8192]]}},
}
_RESIDENT = {
    "directory": "/d",
    "processes": {
        "1": {
            "token": "00" * 16,
            "allocations": [[1, 1 << 40, CELL_BYTES, 4, "GPU-1", 0]],
            "imports": [[1, 1, 1]],
            "left": {"x": 1},
        }
    },
}


#: An address space without mappings.
_MM = struct.pack("<III", COMMON, MM, 0)


def _pagemap(pages: int) -> bytes:
    entries = np.array([(0x10000, pages, PE_PRESENT), (0x400000, pages, PE_PRESENT)], PAGEMAP_ENTRY)
    return encode_pagemap(1, entries, (4, 1))


@dataclass
class World:
    """An intact repository of two snapshots, as its objects, and the key. ``state`` is its newest
    entry, as plain values.
    """

    objects: dict[str, bytes]
    keys: Keys
    generation: int
    snapshots: tuple[str, str]
    state: dict[str, Any] = field(default_factory=dict)

    def manifest(self) -> dict[str, Any]:
        """Return the newer snapshot's manifest, as plain values."""
        name = self.state["tail"][-1][5]
        made: dict[str, Any] = msgspec.msgpack.decode(
            unseal(MANIFEST_KIND, name, self.objects[name], self.keys.manifest)
        )
        return made

    def put(self, kind: ObjectKind, key: bytes, name: str, body: object) -> bytes:
        """Seal an object under its name; return its digest."""
        packed = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
        self.objects[name] = seal(kind, packed, key, name).data
        return digest_of(self.objects[name])

    def put_manifest(self, manifest: object) -> None:
        """Give the newer snapshot another manifest."""
        record = self.state["tail"][-1]
        record[7] = self.put(MANIFEST_KIND, self.keys.manifest, record[5], manifest)
        record[6] = len(self.objects[record[5]])
        self.put_state()

    def put_state(self) -> None:
        """Replace the newest entry."""
        self.put(ENTRY_KIND, self.keys.log, log_name(self.generation), self.state)

    def put_node(self, change: Callable[[Records], Records], space: int = 0, at: int = 0) -> None:
        """Give the newer snapshot another node, in a separate pack."""
        manifest = self.manifest()
        refs = np.frombuffer(manifest["spaces"][space]["nodes"], NODE_REF).copy()
        ref = refs[at]
        pack = self.objects[object_name("nodes", ref["pack"].tobytes())]
        stored = pack[int(ref["offset"]) : int(ref["offset"]) + int(ref["length"])]
        node = memoryview(
            change(decode_node(stored, ref["node"].tobytes(), self.keys.node).copy()).tobytes()
        )
        identity, name, plain = (
            node_ids(self.keys.node, [node])[0],
            b"\xee" * 16,
            NodeEncoder().encode(node),
        )
        self.objects[object_name("nodes", name)] = plain + pack_footer(
            self.keys.shard, name, [identity], [len(plain)]
        )
        refs["node"][at], refs["pack"][at] = (
            np.frombuffer(identity, np.uint8),
            np.frombuffer(name, np.uint8),
        )
        refs["offset"][at], refs["length"][at] = 0, len(plain)
        manifest["spaces"][space]["nodes"] = refs.tobytes()
        self.put_manifest(manifest)

    def copy(self) -> World:
        """Return a copy that may be changed."""
        made = World(dict(self.objects), self.keys, self.generation, self.snapshots)
        made.state = msgspec.msgpack.decode(
            unseal(ENTRY_KIND, "", made.objects[log_name(made.generation)], made.keys.log)
        )
        return made

    def write(self, folder: Path) -> None:
        """Write the objects as a repository in a directory."""
        for name, data in self.objects.items():
            path = folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)


def make_world(pagemap: bytes = b"") -> World:
    """Return a repository of two slightly different snapshots of a process, a file and three images;
    it can be exported.
    """
    dice = np.random.default_rng(7)
    pages = [dice.bytes(PAGE) for _ in range(CELL_PAGES)]
    bitmap = np.zeros(CELL_PAGES, np.bool_)
    bitmap[:20] = True
    few = np.packbits(bitmap, bitorder="little").tobytes()
    map_bytes = pagemap or _pagemap(20)
    backend = MemoryBackend()
    with LoopThread() as loop:
        repository = loop.run(StoredRepository.create(backend))
        made: list[str] = []
        spaces: list[Space | None] = [None] * 4
        before: dict[tuple[int, int], np.void] = {}
        for turn in range(2):
            session = loop.run(repository.begin(made[-1] if made else None, "test"))
            with SnapshotWriter(repository, session, loop.loop) as writer:

                def stored(number: int, cell: int, data: bytes, bits: bytes) -> np.void:
                    row = writer.store_cell(
                        0, cell, bits, bytes(32), memoryview(data), before.get((number, cell))
                    )
                    before[number, cell] = row
                    return row

                changed = list(pages[:20])
                if turn:
                    changed[3] = b"\5" + changed[3][1:]
                process = [
                    np.array([stored(0, 0, b"".join(changed), few)], CELL),
                    np.array([stored(1, 0, b"".join(pages[20:40]), few)], CELL),
                ]
                regions = [
                    Region(0x10000, 20 * PAGE, 0x10000),
                    Region(0x400000, 20 * PAGE, 0x400000),
                ]
                small = np.zeros(CELL_PAGES, np.bool_)
                small[: -(-len(map_bytes) // PAGE)] = True
                one = np.packbits(small, bitorder="little").tobytes()
                size = int(small.sum()) * PAGE
                image = np.array([stored(2, 0, map_bytes.ljust(size, b"\0"), one)], CELL)
                content = np.array([stored(3, 0, b"".join(pages[40:60]), few)], CELL)
                first = np.packbits(np.arange(CELL_PAGES) == 0, bitorder="little").tobytes()
                mm = np.array([stored(4, 0, _MM.ljust(PAGE, b"\0"), first)], CELL)
                spaces = [
                    writer.put_map("process", "1", 0, regions, process, spaces[0]),
                    writer.put_map(
                        "image",
                        "pagemap-1.img",
                        len(map_bytes),
                        [Region(0, size, 0, kind="image")],
                        [image],
                        spaces[1],
                    ),
                    writer.put_map(
                        "file",
                        "/tmp/file",
                        20 * PAGE,
                        [Region(0, 20 * PAGE, 0, kind="file")],
                        [content],
                        spaces[2],
                    ),
                    writer.put_map(
                        "image",
                        "mm-1.img",
                        len(_MM),
                        [Region(0, PAGE, 0, kind="image")],
                        [mm],
                        spaces[3],
                    ),
                ]
                prints = Fingerprints(
                    np.array([0x10000, 0x400000], np.uint64),
                    np.zeros(2, "V16"),
                    np.array([0x10000], np.uint64),
                )
                hints, digest = writer.put_hints(
                    "lineage", encode_fingerprints({"process:1": prints})
                )
                manifest = Manifest(
                    1,
                    new_snapshot_id(),
                    "job",
                    "lineage",
                    made[-1] if made else "",
                    time.time_ns(),
                    "host",
                    "test",
                    1,
                    [Process(1, 4711, 0, 1, 1, 1, ["run"], "/bin/run", 0)],
                    [space for space in spaces if space is not None],
                    [],
                    Requirements(
                        "x86_64", "6.1", "4.1.1", pids=[], ports=["127.0.0.1:1"], devices=[]
                    ),
                    Namespaces(pid=True),
                    [],
                    hints=hints,
                    hints_digest=digest.hex(),
                    extra={"run": json.dumps(_RUN)},
                )
                made.append(writer.commit(manifest))
                spaces = [*spaces, None]
        loop.run(workingset.remember(repository, "lineage", made[1], [(1, 0x10000)]))
        generation = loop.run(repository.log.newest()).generation
        world = World(dict(backend.objects), repository.keys, generation, (made[0], made[1]))
        loop.run(repository.close())
    return world.copy()


# -- what reads


class Reading:
    """An open copy of a world, and its event loop."""

    def __init__(self, world: World, folder: Path, loop: LoopThread) -> None:
        self.world, self.folder, self.loop = world, folder, loop
        self.repository = loop.run(StoredRepository.open(LocalBackend(folder / "repository")))
        self.record = loop.run(self.repository.find(world.snapshots[1]))
        self.manifest = loop.run(self.repository.manifest(self.record))

    def reader(self, snapshot: str) -> SnapshotReader:
        return SnapshotReader.open(self.repository, snapshot, self.loop.loop)


def _listing(it: Reading) -> None:
    records = it.loop.run(it.repository.snapshots())
    it.loop.run(it.repository.newest_of("job"))
    plan_forget(records, Policy(last=1, daily=2))


def _reading(it: Reading) -> None:
    reader, room = it.reader(it.world.snapshots[1]), memoryview(bytearray(CELL_BYTES))
    for space in reader.manifest.spaces:
        for records in reader.records(space):
            for record in records:
                reader.read_cell(record, room)


def _export(it: Reading) -> None:
    export(
        it.repository,
        it.loop,
        it.world.snapshots[1],
        it.folder / "exported",
        threads=2,
        register=False,
    )


def _restore_plan(it: Reading) -> None:
    run_record(it.manifest)
    reader = it.reader(it.world.snapshots[1])
    check_requirements(
        it.manifest,
        RestoreOptions(),
        Criu(Path("/criu"), (4, 2)),
        str(it.folder),
        records=reader.records,
        read=reader.content,
    )


def _recorded(it: Reading) -> None:
    for read in (read_run, read_gpus, read_resident, read_devices):
        with contextlib.suppress(IcecoreError):
            read(it.manifest)
    left_to_driver(it.manifest)
    it.loop.run(workingset.recall(it.repository, it.manifest.lineage, it.manifest.snapshot))


def _parent(it: Reading) -> None:
    parent = load_parent(it.repository, it.loop, it.record, discard)
    if parent is not None:
        parent.prepare()


def _copy(it: Reading) -> None:
    there = it.loop.run(StoredRepository.create(MemoryBackend()))
    copy(
        it.repository,
        there,
        it.loop,
        it.loop.run(it.repository.snapshots()),
        threads=2,
        register=False,
    )


def _sync(it: Reading) -> None:
    secret = it.repository.keys.secret
    there = it.loop.run(StoredRepository.create(MemoryBackend(), secret=secret))

    async def work() -> None:
        await sync(
            it.repository, there, await plan_sync(it.repository, there, None), register=False
        )

    it.loop.run(work())


CONSUMERS: dict[str, Callable[[Reading], object]] = {
    "ls": _listing,
    "read": _reading,
    "diff": lambda it: compare(it.reader(it.world.snapshots[0]), it.reader(it.world.snapshots[1])),
    "diff back": lambda it: compare(
        it.reader(it.world.snapshots[1]), it.reader(it.world.snapshots[0])
    ),
    "check": lambda it: it.loop.run(check(it.repository, read_data=1.0, register=False)),
    "stats": lambda it: it.loop.run(stats(it.repository, register=False)),
    "gc --dry-run": lambda it: it.loop.run(Collector(it.repository).plan()),
    "forget --dry-run": lambda it: it.loop.run(
        Collector(it.repository).plan_forget([it.world.snapshots[0]])
    ),
    "export": _export,
    "restore --dry-run": _restore_plan,
    "recorded": _recorded,
    "parent of a dump": _parent,
    "copy": _copy,
    "sync": _sync,
}
COMMANDS = [
    ["ls"],
    ["--json", "ls"],
    ["show", "{newer}", "--all"],
    ["--json", "show", "{newer}"],
    ["diff", "{older}", "{newer}"],
]


def _late(number: int, frame: FrameType | None) -> NoReturn:
    raise AssertionError(f"it took more than {SECONDS} s")


def _peak() -> int:
    """Return the peak memory of this process since `_reset`, in bytes."""
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) << 10 for line in file if line.startswith("VmHWM"))


def _reset() -> int:
    """Reset the peak; return the present memory of the process in bytes."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")
    return _peak()


def consume(world: World, what: str = "") -> dict[str, str]:
    """Let every consumer read a world; return what each said: its error, or nothing.

    Raises:
        AssertionError: One ended with an error of its own mistake, took too long, or too much
            memory.
    """
    said: dict[str, str] = {}
    signal.signal(signal.SIGALRM, _late)
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm", prefix="icecore-test-") as top,
        LoopThread() as loop,
    ):
        folder = Path(top)
        world.write(folder / "repository")

        def run(name: str, work: Callable[[], object]) -> object:
            before = _reset()
            signal.alarm(SECONDS)
            try:
                return work()
            except IcecoreError as error:
                said[name] = f"{type(error).__name__}: {error}"
                assert str(error).strip()
            except BaseException as error:
                raise AssertionError(
                    f"{what}: {name} ended with {type(error).__name__}: {error}"
                ) from error
            finally:
                signal.alarm(0)
                taken = _peak() - before
            assert taken <= MEMORY_BYTES, f"{what}: {name} took {taken >> 20} MiB"
            return None

        def opened() -> Reading:
            return Reading(world, folder, loop)

        it = run("open", opened)
        if isinstance(it, Reading):
            for name, consumer in CONSUMERS.items():
                run(name, lambda consumer=consumer: consumer(it))  # type: ignore[misc]
                shutil.rmtree(folder / "exported", ignore_errors=True)
            loop.run(it.repository.close())
        names = {"older": world.snapshots[0], "newer": world.snapshots[1]}
        os.environ["ICECORE_STATE"] = str(folder / "state")
        for words in COMMANDS:
            own = [word.format(**names) for word in words]

            def command(own: list[str] = own) -> None:
                out = io.StringIO()
                with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
                    main(["-r", str(folder / "repository"), *own])
                text = out.getvalue()
                assert (
                    "internal error" not in text
                    and "Traceback" not in text
                    and "too little memory" not in text
                ), text[-3000:]

            run(" ".join(words), command)
    return said


# -- what is changed

_INTS = [
    0,
    1,
    2,
    -1,
    255,
    4095,
    1 << 20,
    (1 << 31) - 1,
    1 << 32,
    1 << 40,
    1 << 56,
    1 << 62,
    (1 << 63) - 1,
    1 << 63,
    (1 << 64) - 1,
    -(1 << 63),
]
_TEXTS = [
    "",
    "/",
    "..",
    "../../etc/shadow",
    "/../x",
    "a\0b",
    "\x1b[31m",
    "pages-1.img",
    "x" * 5000,
    "1e9",
    "-1",
    "9" * 20,
    "\n",
    "config",
    "keys/00000000",
]
_FLOATS = [float("nan"), float("inf"), -1.0, 1e308]


def _places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _places(inner, (*path, key))
    elif isinstance(value, list):
        for at, inner in enumerate(value[:20]):
            yield from _places(inner, (*path, at))


def _odd(value: object, dice: np.random.Generator) -> object:
    if dice.random() < 0.1:  # of another type
        return [None, 5, -7, "text", b"bytes", [], {}, True, 1.5][int(dice.integers(0, 9))]
    if isinstance(value, bool) or value is None:
        return not value
    if isinstance(value, int):
        near = [value + 1, value - 1, value * 2, value + PAGE]
        every = [*_INTS, *(number for number in near if -(1 << 63) <= number < 1 << 64)]
        return every[int(dice.integers(0, len(every)))]
    if isinstance(value, float):
        return _FLOATS[int(dice.integers(0, len(_FLOATS)))]
    if isinstance(value, str):
        if value.startswith("{") and dice.random() < 0.8:
            tree = json.loads(value)
            return json.dumps(mutated(tree, dice), default=str)
        return _TEXTS[int(dice.integers(0, len(_TEXTS)))]
    if isinstance(value, bytes):
        if value and len(value) % NODE_REF.itemsize == 0 and dice.random() < 0.8:
            return _records(np.frombuffer(value, NODE_REF).copy(), dice).tobytes()
        return [
            b"",
            value[:-1],
            value + b"\0",
            value * 2,
            bytes(len(value)),
            b"\xff" * len(value),
            dice.bytes(len(value)),
        ][int(dice.integers(0, 7))]
    if isinstance(value, list):
        return [[], value * 2, value * 500, value[::-1], value[1:], [*value, None]][
            int(dice.integers(0, 6))
        ]
    if isinstance(value, dict):
        return (
            {}
            if dice.random() < 0.3
            else {key: inner for key, inner in value.items() if dice.random() < 0.8}
        )
    return None


def mutated(tree: Any, dice: np.random.Generator) -> Any:
    """Return plain values with one to three of them odd."""
    for _ in range(int(dice.integers(1, 4))):
        every = list(_places(tree))
        if not every:
            return tree
        *path, last = every[int(dice.integers(0, len(every)))]
        at = tree
        for step in path:
            at = at[step]
        at[last] = _odd(at[last], dice)
    return tree


def _records(records: Any, dice: np.random.Generator) -> Any:
    """Return the records with one to three odd fields, or doubled, reversed or cut."""
    for _ in range(int(dice.integers(1, 4))):
        kind = dice.random()
        if kind < 0.1:
            records = np.concatenate([records, records])
        elif kind < 0.2:
            records = records[::-1].copy()
        elif kind < 0.25:
            records = records[1:].copy()
        if not len(records):
            return records
        part, at = records, int(dice.integers(0, len(records)))
        names = part.dtype.names
        while names is not None:
            name = names[int(dice.integers(0, len(names)))]
            part, names = part[name], part.dtype[name].names
        if part.ndim > 1:
            part[at] = [0, 255, np.frombuffer(dice.bytes(part.shape[1]), np.uint8)][
                int(dice.integers(0, 3))
            ]
        else:
            most = np.iinfo(part.dtype).max
            part[at] = [
                0,
                1,
                most,
                most // 2,
                1 << 6,
                int(part[at]) ^ 1,
                min(most, int(part[at]) + PAGE),
            ][int(dice.integers(0, 7))]
    return records


def _entry(world: World, dice: np.random.Generator) -> None:
    world.state = mutated(world.state, dice)
    world.put_state()


def _page(world: World, dice: np.random.Generator) -> None:
    records = mutated({"records": world.state["tail"]}, dice)["records"]
    name = object_name("page", b"\xdd" * 16)
    digest = world.put(PAGE_KIND, world.keys.log, name, records)
    world.state["pages"], world.state["tail"] = (
        [[b"\xdd" * 16, digest, len(world.objects[name]), 2, 0, (1 << 48) - 1]],
        [],
    )
    world.put_state()


def _manifest(world: World, dice: np.random.Generator) -> None:
    world.put_manifest(mutated(world.manifest(), dice))


def _extra(world: World, dice: np.random.Generator) -> None:
    manifest = world.manifest()
    for name, text in (("cuda", _CUDA), ("resident", _RESIDENT), ("run", _RUN)):
        manifest["extra"][name] = json.dumps(
            mutated(json.loads(json.dumps(text)), dice), default=str
        )
    region = [1 << 40, CELL_BYTES, 1 << 40, 0, 0, "device", "GPU-1", False]
    manifest["spaces"].append({"kind": "device", "key": "1", "size": 0, "regions": [region]})
    world.put_manifest(manifest)


def _node(world: World, dice: np.random.Generator) -> None:
    world.put_node(lambda records: _records(records, dice), int(dice.integers(0, 3)))


def _shard(world: World, dice: np.random.Generator) -> None:
    names = [name for name in world.objects if name.startswith("shards/")]
    name = names[int(dice.integers(0, len(names)))]
    data, identity = world.objects[name], bytes.fromhex(name[-32:])
    offset = SHARD.parse_tail(identity, len(data), data[-TAIL_BYTES:]).offset
    table = _records(np.frombuffer(data[offset:-TAIL_BYTES], SHARD.entry).copy(), dice)
    world.objects[name] = data[:offset] + SHARD.footer(
        world.keys.shard, identity, table.tobytes(), offset
    )


def _segment(world: World, dice: np.random.Generator) -> None:
    ref = world.state["segments"][0]
    name = object_name("segment", ref[0])
    _, entries = parse_segment(name, world.objects[name], world.keys.segment)
    changed = entries.copy()
    places = _records(changed["place"].copy(), dice)
    changed["place"] = (
        places[: len(changed)]
        if len(places) >= len(changed)
        else np.zeros(len(changed), places.dtype)
    )
    parts, digest = encode_segment(changed, world.keys.segment, name=name)
    world.objects[name] = b"".join(bytes(part) for part in parts)
    ref[1], ref[2], ref[3] = digest, len(world.objects[name]), len(changed)
    world.put_state()


def _fingerprints(world: World, dice: np.random.Generator) -> None:
    manifest = world.manifest()
    name = manifest["hints"]
    body = unseal(HINTS_KIND, name, world.objects[name], world.keys.hints)
    tree = mutated(msgspec.msgpack.decode(zstandard.ZstdDecompressor().decompress(body)), dice)
    body = zstandard.ZstdCompressor().compress(msgspec.msgpack.encode(tree))
    manifest["hints_digest"] = world.put(HINTS_KIND, world.keys.hints, name, body).hex()
    world.put_manifest(manifest)


def _working_set(world: World, dice: np.random.Generator) -> None:
    name = next(name for name in world.objects if "/touched-" in name)
    tree = mutated(
        msgspec.msgpack.decode(unseal(HINTS_KIND, name, world.objects[name], world.keys.hints)),
        dice,
    )
    world.put(HINTS_KIND, world.keys.hints, name, tree)


def _config(world: World, dice: np.random.Generator) -> None:
    tree = mutated(
        msgspec.msgpack.decode(
            unseal(CONFIG_KIND, "config", world.objects["config"], world.keys.config)
        ),
        dice,
    )
    world.put(CONFIG_KIND, world.keys.config, "config", tree)


MUTATIONS: dict[str, Callable[[World, np.random.Generator], None]] = {
    "log entry": _entry,
    "snapshot page": _page,
    "manifest": _manifest,
    "extra": _extra,
    "node": _node,
    "shard": _shard,
    "index segment": _segment,
    "fingerprints": _fingerprints,
    "working set": _working_set,
    "configuration": _config,
}


def bound() -> None:
    """Bound this process's address space, so that code that allocates far too much meets a
    MemoryError.
    """
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + (3 << 30), now + (3 << 30)))


def run(seeds: range) -> None:
    """Mutate and consume, once for each seed; raise as `consume` does. Run it in a separate
    process.
    """
    world = make_world()
    assert consume(world.copy(), "sound") == {}, consume(world.copy(), "sound")
    bound()
    began, refused, titles = time.monotonic(), 0, list(MUTATIONS)
    for seed in seeds:
        dice, title = np.random.default_rng(seed), titles[seed % len(titles)]
        changed = world.copy()
        MUTATIONS[title](changed, dice)
        refused += bool(consume(changed, f"{title}, seed {seed}"))
    print(
        f"{len(seeds)} worlds in {time.monotonic() - began:.0f} s, {refused} of them refused by somebody"
    )
