"""Harmful objects written by a holder of the key: every reader ends soon, in bounded memory, with
an error that names the object.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import msgspec
import numpy as np
import pytest
import zstandard

from icecore.errors import Damaged, StoreError
from icecore.restorer.files.images import image_targets
from icecore.sizes import CELL_BYTES, PAGE
from icecore.store.backend.local import LocalBackend
from icecore.store.format import codec
from icecore.store.format.cell import CELL, PLACE, Records
from icecore.store.format.cellmap import check_regions
from icecore.store.format.hints import HINTS_KIND
from icecore.store.format.keys import Config, Keys, Parameters, decode_config, encode_config
from icecore.store.format.manifest import NODE_REF, Region, Space, decode_manifest, encode_manifest
from icecore.store.format.names import object_name
from icecore.store.format.segment import encode_segment, parse_segment
from icecore.store.format.slots import Cost, Slot, Slots, decode_slots, encode_slots
from icecore.store.format.state import LogState, SnapshotRecord, encode_entry, encode_page
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check import check
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader
from icecore.store.snapshot.writer import SnapshotWriter
from tests.store.hostile import World, bound, consume, make_world

ROOT = Path(__file__).resolve().parents[2]
_RUN = "import sys; sys.path.append({root!r})\nfrom tests.store import hostile\n{work}"


def apart(work: str, seconds: float) -> str:
    """Run something in a separate process with bounded memory; return its output."""
    done = subprocess.run(
        [sys.executable, "-P", "-c", _RUN.format(root=str(ROOT), work=work)],
        stdin=subprocess.DEVNULL,
        text=True,
        timeout=seconds,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "seeds",
    [
        range(30),
        range(30, 60),
        pytest.param(range(1000, 6000), marks=[pytest.mark.torture, pytest.mark.timeout(7200)]),
    ],
)
def test_sealed_mutations_of_every_object(seeds: range) -> None:
    assert "worlds in" in apart(f"hostile.run({seeds!r})", 500 if len(seeds) < 100 else 7100)


def _set(world: World, **fields: object) -> None:
    world.put_manifest({**world.manifest(), **fields})


def _spaces(world: World, change: Callable[[list[dict[str, object]]], object]) -> None:
    manifest = world.manifest()
    change(manifest["spaces"])
    world.put_manifest(manifest)


def _header(count: int) -> bytes:
    return b"\xdd" + count.to_bytes(4, "big")


def _spliced(world: World, field: str, value: bytes) -> None:
    """Put raw msgpack into a field of the manifest."""
    manifest = world.manifest()
    manifest[field] = "MARK"
    body = msgspec.msgpack.encode(manifest)
    world.put_manifest(body.replace(msgspec.msgpack.encode("MARK"), value, 1))


def _many_regions(world: World) -> None:
    """60 million regions, in spaces of a million each."""
    region = msgspec.msgpack.encode([0, 4096, 0])
    space = (
        b"\x84"
        + b"".join(
            map(msgspec.msgpack.encode, ["kind", "process", "key", "1", "size", 0, "regions"])
        )
        + _header(1 << 20)
        + region * (1 << 20)
    )
    _spliced(world, "spaces", _header(30) + space * 30)


def _nodes(count: int) -> bytes:
    refs = np.zeros(count, NODE_REF)
    refs["group"], refs["length"] = np.arange(count), 60
    return refs.tobytes()


def _fingerprint_bomb(world: World) -> None:
    manifest = world.manifest()
    body = zstandard.ZstdCompressor().compress(bytes(1 << 29))
    manifest["hints_digest"] = world.put(
        HINTS_KIND, world.keys.hints, manifest["hints"], body
    ).hex()
    world.put_manifest(manifest)


def _cells(
    change: Callable[[Records], None], space: int = 0, at: int = 0
) -> Callable[[World], None]:
    def made(world: World) -> None:
        def work(records: Records) -> Records:
            change(records)
            return records

        world.put_node(work, space, at)

    return made


def _beyond(records: Records) -> None:
    records["data"], records["zero"] = 0, 0
    records["data"][:, 5] = 1  # page 40, of a region of 20
    records["place"]["length"], records["place"]["codec"] = PAGE, codec.RAW
    records["base"], records["base_place"] = 0, np.zeros(1, PLACE)[0]


def _own_base(records: Records) -> None:
    """A delta whose base is itself."""
    records["base"], records["base_place"] = records["chunk"], records["place"]
    records["place"]["codec"] = codec.XOR | codec.ZSTD
    records["base_place"]["codec"] = codec.XOR | codec.ZSTD


def _circle(records: Records) -> None:
    """A delta whose own bytes claim to be its full base."""
    records["base"], records["base_place"] = records["chunk"], records["place"]
    records["place"]["codec"], records["base_place"]["codec"] = codec.XOR | codec.ZSTD, codec.ZSTD


def _far(records: Records) -> None:
    records["place"]["offset"] = (1 << 63) + 5


def _past(records: Records) -> None:
    records["place"]["offset"] = 1 << 39


def _image(**more: object) -> Callable[[World], None]:
    return lambda world: _spaces(world, lambda spaces: spaces[1].update(more))


def _overlap(spaces: list[dict[str, object]]) -> None:
    spaces[0]["regions"] = [
        [0x10000, 20 * PAGE, 0x10000],
        [0x10000 + PAGE, 20 * PAGE, 0x10000 + PAGE],
    ]


def _table(world: World) -> None:
    """A data directory whose table claims 1 GiB, of which a few pages are there."""
    manifest = world.manifest()
    file = manifest["spaces"][2]
    region = [0, 1 << 30, *file["regions"][0][2:]]
    table = {**file, "key": "/d/./entries", "size": 1 << 30, "regions": [region]}
    manifest["spaces"] += [table, {**file, "key": "/d/./content"}]
    about = {"path": "/d", "entries": 1, "files": 0, "bytes": 0}
    manifest["extra"]["data"] = json.dumps([about])
    world.put_manifest(manifest)


def _twice(world: World) -> None:
    world.state["tail"] = world.state["tail"] * 2
    world.put_state()


def _pages(count: int) -> Callable[[World], None]:
    def made(world: World) -> None:
        world.state["pages"] = [[b"\xdd" * 16, bytes(32), 10, 1 << 30, 0, (1 << 48) - 1]] * count
        world.put_state()

    return made


def _circular_parents(world: World) -> None:
    older, newer = world.state["tail"]
    older[3], newer[3] = newer[0], older[0]
    _set(world, parent=world.snapshots[1])


def _record(at: int, value: object) -> Callable[[World], None]:
    def made(world: World) -> None:
        world.state["tail"][-1][at] = value
        world.put_state()

    return made


def _extra(name: str, text: str) -> Callable[[World], None]:
    return lambda world: _set(world, extra={name: text})


#: What was made, and of whom a word has to be in what readers say. None: they may read it well.
CASES: dict[str, tuple[Callable[[World], object], str | None]] = {
    "regions without number": (_many_regions, "manifest"),
    "a list that claims 2^32 spaces": (
        lambda world: _spliced(world, "spaces", _header((1 << 32) - 1)),
        "manifest",
    ),
    "a list that claims 2^32 files": (
        lambda world: _spliced(world, "files", _header((1 << 32) - 1)),
        "manifest",
    ),
    "200 million options": (
        lambda world: _spliced(world, "criu_options", _header(200_000_000) + b"\xa0" * 200_000_000),
        "manifest",
    ),
    "10 million processes": (
        lambda world: _spliced(world, "processes", _header(10_000_000) + b"\x80" * 10_000_000),
        "manifest",
    ),
    "deep nesting": (lambda world: _spliced(world, "tags", b"\x91" * 1_000_000), "manifest"),
    "three million nodes": (
        lambda world: _spaces(world, lambda spaces: spaces[0].update(nodes=_nodes(3_000_000))),
        "nodes than",
    ),
    "a region of 2^63": (
        lambda world: _spaces(world, lambda s: s[0].update(regions=[[0, 1 << 63, 0]] * 2)),
        "manifest",
    ),
    "a region beyond user space": (
        lambda world: _spaces(
            world, lambda s: s[0].update(regions=[[at, PAGE, at] for at in (1 << 57, 1 << 58)])
        ),
        "beyond all addresses",
    ),
    "regions that overlap": (lambda world: _spaces(world, _overlap), "overlap"),
    "a region before its grid": (
        lambda world: _spaces(
            world, lambda s: s[0].update(regions=[[0, PAGE, 1 << 20], [1 << 30, PAGE, 1 << 30]])
        ),
        "grid",
    ),
    "a file of 8 EiB": (
        lambda world: _spaces(world, lambda s: s[2].update(size=(1 << 63) - 1)),
        "region is not that of",
    ),
    "a sparse image of 8 EiB": (
        _image(size=(1 << 62) - PAGE, regions=[[0, (1 << 62) - PAGE, 0]]),
        "grid",
    ),
    "a sparse image of 4 PiB": (_image(size=1 << 52, regions=[[0, 1 << 52, 0]]), "pagemap-1.img"),
    "an image that goes up": (_image(key="../x"), "name is invalid for its kind"),
    "an image with a slash": (_image(key="a/b"), "name is invalid for its kind"),
    "an image with a NUL": (_image(key="a\0b"), "name is invalid for its kind"),
    "an image like page images": (_image(key="pages-1.img"), "pages-1.img"),
    "a file that goes up": (
        lambda world: _spaces(world, lambda s: s[2].update(key="/tmp/../etc/shadow")),
        "name is invalid for its kind",
    ),
    "one space twice": (lambda world: _spaces(world, lambda s: s.append(s[1])), "two spaces"),
    "a process that is no number": (
        lambda world: _spaces(world, lambda s: s[0].update(key="one")),
        "name is invalid for its kind",
    ),
    "a lineage that is a path": (lambda world: _set(world, lineage="../../x"), "lineage"),
    "hints that are the configuration": (lambda world: _set(world, hints="config"), "hints"),
    "a digest that is none": (lambda world: _set(world, hints_digest="xyz"), "hints"),
    "an option for CRIU": (
        lambda world: _set(world, criu_options=["--action-script", "/tmp/x"]),
        "--action-script",
    ),
    "a port that is none": (
        lambda world: _set(
            world, requirements={**world.manifest()["requirements"], "ports": ["example.org:80"]}
        ),
        "port",
    ),
    "a device without a name": (
        lambda world: _set(
            world, requirements={**world.manifest()["requirements"], "devices": [{"kind": "cuda"}]}
        ),
        "device",
    ),
    "a parent of one's own": (lambda world: _set(world, parent=world.snapshots[1]), None),
    "parents in a circle": (_circular_parents, None),
    "a table of 1 GiB": (_table, "do not hold exactly these"),
    "a page outside its region": (_cells(_beyond), "outside its region"),
    "a delta on itself": (_cells(_own_base), "contradicts itself"),
    "a delta that is its base": (_cells(_circle), "chunk"),
    "a chunk at 2^63": (_cells(_far), "contradicts itself"),
    "a chunk behind its shard": (_cells(_past), "shards/"),
    "a run that is none": (_extra("run", "{}"), "record of a run"),
    "a run in depth": (_extra("run", "[" * 200_000), "record of a run"),
    "a run whose files are elsewhere": (
        _extra("run", json.dumps({"name": 1, "files": []})),
        "record of a run",
    ),
    "GPUs in depth": (_extra("cuda", "[" * 200_000), None),
    "resident memory that is none": (_extra("resident", '{"directory": 5, "processes": []}'), None),
    "fingerprints of 512 MiB": (_fingerprint_bomb, None),
    "a snapshot twice": (_twice, None),
    "a million pages": (_pages(900_000), "log entry"),
    "one page twice": (_pages(2), "log entry"),
    "more snapshots than there can be": (_pages(1), "log entry"),
    "a manifest elsewhere": (_record(5, "../../etc/shadow"), "manifest"),
    "a manifest that is the configuration": (_record(5, "config"), "manifest"),
    "a time that is none": (_record(4, (1 << 64) - 1), "log entry"),
    "a window that is none": (_record(11, float("nan")), "log entry"),
    "tags without number": (_record(12, ["x"] * 100_000), "log entry"),
}


_PARTS = 6


@pytest.mark.parametrize("part", range(_PARTS))
@pytest.mark.timeout(600)
def test_what_a_holder_of_the_key_wrote(part: int) -> None:
    """In a separate process, as memory is measured and bounded."""
    said = apart(f"from tests.store import test_hostile\ntest_hostile.consume_part({part})", 550)
    assert len(json.loads(said.splitlines()[-1])) == len(list(CASES)[part::_PARTS])


def consume_part(part: int) -> None:
    """Let every consumer read every sixth case; print what was done."""
    sound, done = make_world(), []
    bound()
    for title in list(CASES)[part::_PARTS]:
        change, wanted = CASES[title]
        world = sound.copy()
        change(world)
        said = consume(world, title)
        assert wanted is None or any(wanted in words for words in said.values()), (title, said)
        done.append(title)
    print(json.dumps(done))


# -- what is refused is not written either


def test_what_no_reader_takes_is_not_written() -> None:
    world = make_world()
    record = world.state["tail"][-1]
    sound = decode_manifest(world.objects[record[5]], world.keys.manifest, name="n")
    with pytest.raises(StoreError, match=r"cannot be stored: .*overlap"):
        twice = msgspec.structs.replace(sound.spaces[0], regions=[sound.spaces[0].regions[0]] * 2)
        encode_manifest(msgspec.structs.replace(sound, spaces=[twice]), world.keys.manifest)
    one = SnapshotRecord(
        "ab" * 16, "job", "lineage", "", 9, "snapshots/x", 10, bytes(32), tags=["x"] * 5000
    )
    for work in (
        lambda: encode_page([one], world.keys.log),
        lambda: encode_entry(LogState(1, b"", 7, tail=[one]), world.keys.log),
    ):
        with pytest.raises(StoreError, match="cannot be written"):
            work()


def test_pages_of_a_space_are_in_one_cell() -> None:
    regions = [Region(0, 4 * PAGE, 0), Region(4 * PAGE, CELL_BYTES, 0)]
    cells = np.zeros(2, CELL)
    cells["data"][0, 0], cells["data"][1, 0] = 0x0F, 0xF0
    check_regions(regions, cells, np.array([0, 1]))
    cells["data"][1, 0] = 0xF8  # page 3 is the first region's
    with pytest.raises(ValueError, match="outside its region"):
        check_regions(regions, cells, np.array([0, 1]))
    with pytest.raises(ValueError, match="outside its region"):
        check_regions(regions[:1], cells[1:], np.array([0]))


def test_a_configuration_is_bounded() -> None:
    keys = Keys.derive(bytes(32))
    for config in (
        Config(1, "../../x", 1, Parameters()),
        Config(1, "c" * 32, 1, Parameters(1 << 50)),
        Config(1, "c" * 32, -1, Parameters()),
    ):
        with pytest.raises(Damaged):
            decode_config("config", encode_config(config, keys).data, keys)


@pytest.mark.parametrize(
    ("count", "cost"),
    [
        (1, Cost(4 << 20, 1, 4)),
        (1, Cost(64 << 10, 64, 4)),
        (1, Cost(64 << 10, 3, 64)),
        (64, Cost(1 << 20, 16, 4)),
        (65, Cost()),
    ],
)
def test_key_slots_ask_for_little(count: int, cost: Cost) -> None:
    """Anyone who can write to the place can plant them, so they are refused before any is tried."""
    slot = Slot(
        "a" * 16, "label", 1, bytes(16), cost.memory_kib, cost.passes, cost.lanes, bytes(48)
    )
    with pytest.raises(Damaged, match="keys/00000000"):
        decode_slots(
            "keys/00000000",
            encode_slots(Slots(2, "argon2id", "a" * 32, [slot] * count, [], bytes(32))).data,
        )


def test_an_image_that_is_made_from_cells_is_not_stored(tmp_path: Path) -> None:
    for name in ("pages-1.img", "icecore-device-memory", ".x", "a/b"):
        with pytest.raises(Damaged, match="image file named"):
            image_targets(tmp_path, [Space("image", name, 0, [])], [None])  # type: ignore[list-item]


_LIES: dict[str, Callable[[Records], None]] = {
    "nowhere": lambda places: places["shard"].fill(7),
    "beyond": lambda places: places["offset"].fill((1 << 64) - 1),
    "long": lambda places: places["length"].fill((1 << 32) - 1),
    "empty": lambda places: places["length"].fill(0),
    "unknown": lambda places: places["codec"].fill(99),
    "zero": lambda places: places["codec"].fill(codec.ZERO),
    "elsewhere": lambda places: places["offset"].fill(1),
}


@pytest.mark.parametrize("title", _LIES)
def test_an_index_that_lies(tmp_path: Path, title: str) -> None:
    """Dedup believes the index about where a chunk lies, if that place is possible. A lie costs the
    cells that count as stored: check names them.
    """
    world = make_world()
    segments = world.state["segments"]
    for ref in segments:
        name = object_name("segment", ref[0])
        entries = parse_segment(name, world.objects[name], world.keys.segment)[1].copy()
        _LIES[title](entries["place"])
        parts, digest = encode_segment(entries, world.keys.segment, name=name)
        world.objects[name] = b"".join(bytes(part) for part in parts)
        ref[1], ref[2] = digest, len(world.objects[name])
    world.put_state()
    world.write(tmp_path)
    old = np.random.default_rng(7).bytes(PAGE * 256)  # of the world's pages
    room = memoryview(bytearray(CELL_BYTES))
    with LoopThread() as loop:
        repository = loop.run(StoredRepository.open(LocalBackend(tmp_path)))
        session = loop.run(repository.begin(None, "test"))
        with SnapshotWriter(repository, session, loop.loop) as writer:
            few, one = b"\xff\xff\x0f" + bytes(29), b"\1" + bytes(31)
            rows = [
                writer.store_cell(
                    0, 0, few, bytes(32), memoryview(old[20 * PAGE : 40 * PAGE]), None
                ),
                writer.store_cell(0, 1, one, bytes(32), memoryview(os.urandom(PAGE)), None),
            ]
            space = writer.put_map(
                "process", "1", 0, [Region(0, 2 * CELL_BYTES, 0)], [np.array(rows, CELL)], None
            )
            made = decode_manifest(
                world.objects[world.state["tail"][-1][5]], world.keys.manifest, name="n"
            )
            fresh = msgspec.structs.replace(
                made, snapshot="ab" * 16, spaces=[space], hints="", hints_digest="", parent=""
            )
            writer.commit(fresh)
        reader = SnapshotReader.open(repository, "ab" * 16, loop.loop)
        first, second = reader.records(reader.manifest.spaces[0])[
            0
        ]  # the map itself is never refused
        assert len(reader.read_cell(second, room)) == PAGE
        report = loop.run(check(repository, read_data=1.0))
        believed = title in ("nowhere", "elsewhere")
        assert (writer.statistics.reused_from["index"] > 0) == believed
        if believed:
            with pytest.raises((Damaged, StoreError)):
                reader.read_cell(first, room)
            assert any("ab" * 16 in damage.snapshots for damage in report.damages)
        else:
            assert reader.read_cell(first, room) == old[20 * PAGE : 40 * PAGE]
            assert not any("ab" * 16 in damage.snapshots for damage in report.damages)
        loop.run(repository.close())
