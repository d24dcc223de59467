"""Fuzzing of every parser: one function from an input to a parse, for random mutation and for
atheris.

Half of the inputs carry valid digests, as from a holder of the keys, to reach the code behind the
digests. A parser may return, or raise its documented error; anything else is a failure. A new type
of object needs a target here.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import blake3
import msgspec
import numpy as np
import zstandard

from icecore.errors import Damaged, FormatTooNew
from icecore.restorer import workingset
from icecore.store.format import codec, delta
from icecore.store.format.cell import CELL, PLACE
from icecore.store.format.cellmap import (
    PACK,
    NodeDecoder,
    decode_node,
    encode_nodes,
    pack_footer,
    parse_pack_footer,
    parse_refs,
)
from icecore.store.format.chunk import pages_of
from icecore.store.format.codec import Choice, Encoder
from icecore.store.format.container import TAIL_BYTES, Container
from icecore.store.format.contract import (
    CUDA,
    RESIDENT,
    RUN,
    GpuProcess,
    Gpus,
    Resident,
    ResidentAllocation,
    ResidentImport,
    ResidentProcess,
    Run,
    RunFiles,
    RunIsolation,
    encode_records,
    read_gpus,
    read_resident,
    read_run,
)
from icecore.store.format.envelope import ObjectKind, seal
from icecore.store.format.filters import FILTER_KIND, decode_filter, encode_filter
from icecore.store.format.fingerprints import Fingerprints, decode_fingerprints, encode_fingerprints
from icecore.store.format.hints import HINTS_KIND, decode_hints
from icecore.store.format.keys import (
    CONFIG_KIND,
    KEY_KIND,
    Config,
    Keys,
    Parameters,
    decode_config,
    encode_config,
    encode_slot,
    new_slot,
    open_slot,
)
from icecore.store.format.manifest import (
    MANIFEST_KIND,
    NODE_REF,
    Manifest,
    Namespaces,
    Region,
    Requirements,
    Space,
    decode_manifest,
    encode_manifest,
)
from icecore.store.format.names import log_generation, parse_name
from icecore.store.format.segment import encode_segment, make_entries, parse_segment, sort_entries
from icecore.store.format.shard import SHARD, ShardTable, parse_footer
from icecore.store.format.state import (
    ENTRY_KIND,
    NAMES_KIND,
    PAGE_KIND,
    Condemned,
    LogState,
    SegmentRef,
    SessionRecord,
    SnapshotRecord,
    Written,
    decode_entry,
    decode_names,
    decode_page,
    encode_entry,
    encode_names,
    encode_page,
)
from icecore.store.log.session import BEAT_KIND, Heartbeat, decode_heartbeat, encode_heartbeat
from icecore.store.maintenance.reach import space_refs

KEY = bytes(range(32))
KEYS = Keys.derive(KEY)
NAME = bytes(range(16))
_PUBLIC = blake3.blake3(b"", derive_key_context="icecore format 1 public integrity").digest()
_PAGES = 3
_BITMAP = b"\7" + bytes(31)
#: Address space that a run may take beyond what it has at its beginning; the longest body of any
#: kind is 1 GiB.
MEMORY_BYTES = 1536 << 20


@dataclass(frozen=True)
class Target:
    """A parser.

    Attributes:
        good: What was written.
        parse: Reads it.
        body: What ``reseal`` makes ``good`` of.
        reseal: Gives other bytes the digests that make them look written.
        errors: What it may raise.
    """

    good: bytes
    parse: Callable[[bytes], object]
    body: bytes = b""
    reseal: Callable[[bytes], bytes] | None = None
    errors: tuple[type[Exception], ...] = (Damaged, FormatTooNew)


def _sealed(
    kind: ObjectKind, good: bytes, body: object, key: bytes, parse: Callable[[bytes], object]
) -> Target:
    plain = ObjectKind(kind.title, kind.magic, kind.version, kind.limit, None)
    packed = body if isinstance(body, bytes) else msgspec.msgpack.encode(body)
    return Target(good, parse, packed, lambda data: seal(plain, data, key).data)


def _container(
    container: Container, good: bytes, parse: Callable[[bytes, bytes, int, bytes], object]
) -> Target:
    def read(data: bytes) -> object:
        where = container.parse_tail(NAME, len(data), data[-TAIL_BYTES:])
        return parse(KEY, NAME, len(data), data[where.offset :])

    def reseal(data: bytes) -> bytes:
        if len(data) < TAIL_BYTES:
            return data
        offset = int.from_bytes(data[-TAIL_BYTES + 16 : -TAIL_BYTES + 24], "little")
        table = data[offset:-TAIL_BYTES] if offset <= len(data) - TAIL_BYTES else b""
        return data[:-32] + blake3.blake3(table + data[-TAIL_BYTES:-32], key=KEY).digest()

    return Target(good, read, good, reseal)


def _manifest() -> Manifest:
    refs = np.zeros(3, NODE_REF)
    refs["group"], refs["length"] = [0, 1, 2], 60
    return Manifest(
        1,
        "a" * 32,
        "job",
        "lineage",
        "",
        1,
        "host",
        "writer",
        1,
        [],
        [Space("process", "1", 0, [Region(0, 1 << 20, 0)], refs.tobytes())],
        [],
        Requirements("x86_64", "6", "4"),
        Namespaces(),
        [],
    )


def _state() -> LogState:
    record = _record()
    session = SessionRecord("d" * 32, 3, "dump", "host", 1, [record])
    return LogState(
        5,
        bytes(32),
        7,
        ["change"],
        [Written(5, bytes(16))],
        tail=[record],
        sessions=[session],
        condemned=[Condemned(3, bytes([1]) + bytes(16))],
        segments=[SegmentRef(NAME, bytes(32), 100, 3)],
    )


def _record() -> SnapshotRecord:
    return SnapshotRecord(
        "ab" * 16, "job", "lineage", "", 9, "snapshots/x", 10, bytes(32), tags=["one"]
    )


def _segment() -> bytes:
    dice = np.random.default_rng(1)
    places = np.frombuffer(dice.bytes(1030 * PLACE.itemsize), PLACE)
    entries = sort_entries(make_entries(dice.integers(0, 256, (1030, 32), np.uint8), places))
    return b"".join(encode_segment(entries, KEY)[0])


def _filter() -> Target:
    ids = np.random.default_rng(2).integers(0, 256, (100, 32), np.uint8)
    ref = SegmentRef(NAME, KEY, 1, len(ids))
    good = encode_filter(ids, ref, KEY, "n")
    return _sealed(
        FILTER_KIND, good, good[56:], KEY, lambda data: decode_filter("n", data, KEY, ref)
    )


def _reseal_segment(data: bytes) -> bytes:
    if len(data) < 56 + 80:
        return data
    blocks = b"".join(
        data[at : at + 8] + blake3.blake3(block, key=KEY).digest()
        for at, block in ((56, data[136 : 136 + 1024 * 61]), (96, data[136 + 1024 * 61 :]))
    )
    return data[:24] + blake3.blake3(data[:24] + blocks, key=KEY).digest() + blocks + data[136:]


def _shard() -> bytes:
    table = ShardTable(NAME, 1 << 20)
    for number in range(4):
        table.add(bytes([number]) * 32, _BITMAP, bytes(32), codec.ZSTD, 40 + number)
    return bytes(table.used) + table.footer(KEY)


def _node() -> bytes:
    cells = np.zeros(5, CELL)
    cells["cell"], cells["data"][:, 0], cells["place"]["length"], cells["place"]["codec"] = (
        range(5),
        1,
        4096,
        codec.RAW,
    )
    cells["chunk"] = 7
    return encode_nodes(KEY, [cells])[0][1]


def _parse_node(data: bytes) -> object:
    """Read like a reader: the id matches the bytes, so that the code behind it is reached."""
    plain = data[1:]
    try:
        if 0 < zstandard.frame_content_size(data[1:-8]) < 1 << 16:
            plain = zstandard.ZstdDecompressor().decompress(data[1:-8])
    except zstandard.ZstdError:
        pass
    identity = blake3.blake3(plain, key=KEY).digest()
    refs = np.zeros(1, NODE_REF)
    refs["node"] = np.frombuffer(identity, np.uint8)
    NodeDecoder(KEY).decode([memoryview(data)], refs)
    return decode_node(data, identity, KEY)


def _chunk(number: int) -> Target:
    data = np.random.default_rng(number).integers(0, 4, _PAGES * 4096, np.uint8).tobytes()
    _, parts = codec.encode(memoryview(data), Choice(number, 1), Encoder())
    stored = b"".join(bytes(part) for part in parts)
    out = memoryview(bytearray(_PAGES * 4096 + 64))

    def parse(data: bytes) -> object:
        out[-64:] = b"\xa5" * 64
        try:
            return codec.decode(number, memoryview(data), out[:-64])
        finally:
            assert out[-64:] == b"\xa5" * 64, "it wrote past its buffer"

    return Target(stored, parse, stored[:-8], lambda data: data + codec.seal(data), (ValueError,))


def _delta(kind: int) -> Target:
    base = memoryview(np.random.default_rng(5).bytes(_PAGES * 4096))
    own = np.random.default_rng(6).bytes(2 * 4096)
    number, parts = codec.encode(memoryview(own), Choice(codec.ZSTD, 1), Encoder())
    body = b"".join(bytes(part) for part in parts[:-1]) if number != codec.RAW else own
    stored = b"".join(
        bytes(part) for part in delta.parts(number | kind, _BITMAP, b"\5" + bytes(31), body)
    )
    out, scratch = memoryview(bytearray(_PAGES * 4096)), memoryview(bytearray(1 << 20))

    def parse(data: bytes) -> object:
        theirs = pages_of(delta.base_bitmap(data))
        room = memoryview(bytes(min(theirs, 256) * 4096)) if theirs != _PAGES else base
        return delta.decode(number | kind, memoryview(data), _BITMAP, room, out, scratch)

    return Target(stored, parse, stored[:-8], lambda data: data + codec.seal(data), (ValueError,))


def _refs(data: bytes) -> object:
    return parse_refs(data, 2)


def _names(data: bytes) -> object:
    text = data.decode("latin-1")
    return parse_name(text), log_generation(text)


def _whole_manifest(data: bytes) -> object:
    return space_refs(decode_manifest(data, KEY, name="n"), "n")


def _working_set(data: bytes) -> object:
    return workingset.decode("n", decode_hints("n", data, KEY))


def _fingerprints(data: bytes) -> object:
    return decode_fingerprints(decode_hints("n", data, KEY))


def _records() -> dict[str, Target]:
    """Return the records in a manifest."""
    spaces = [Space("device", "1", 0, [Region(0, 1 << 20, 0)])]
    records = encode_records(
        run=Run(
            "job",
            ["run"],
            "/",
            RunIsolation(root=True),
            RunFiles(stdout="/a/1", stderr="/a/2", status="/a/3", init="/a/4"),
            ["/sys"],
            b"init",
            "/own",
            ["/data"],
            log_limit=1 << 20,
            log_start={"stdout": 4096},
        ),
        gpus=Gpus("580", {1: GpuProcess(["GPU-1"], {"GPU-1": 5}, [(4096, 8192)])}),
        resident=Resident(
            "/d",
            {
                1: ResidentProcess(
                    "00" * 16,
                    [ResidentAllocation(1, 0, 1 << 20, 9, "GPU-1", 0)],
                    [ResidentImport(2, 1, 1)],
                    {"captured": 1},
                )
            },
            outlives=True,
        ),
    )

    def target(name: str, read: Callable[[Manifest], object]) -> Target:
        def parse(data: bytes) -> object:
            text = data.decode("utf-8", "surrogateescape")
            return read(msgspec.structs.replace(_manifest(), spaces=spaces, extra={name: text}))

        return Target(records[name].encode(), parse)

    return {
        f"record {name}": target(name, read)
        for name, read in ((RUN, read_run), (CUDA, read_gpus), (RESIDENT, read_resident))
    }


def targets() -> dict[str, Target]:
    """Return every parser of objects in a repository."""
    fingerprints = encode_fingerprints(
        {
            "process:1": Fingerprints(
                np.arange(9, dtype=np.uint64), np.zeros(9, "V16"), np.arange(3, dtype=np.uint64)
            )
        }
    )
    working = workingset.encode(workingset.WorkingSet("a" * 32, [(1, 4096), (1, 8192)]))
    slot, config, state, manifest = (
        new_slot(),
        Config(1, "c" * 32, 1, Parameters()),
        _state(),
        _manifest(),
    )
    beat = Heartbeat("d" * 32, 1, 2, "h", 3)
    names = encode_names([("shard", NAME)] * 9, KEY).data
    node = _node()
    footer = bytes(len(node)) + pack_footer(KEY, NAME, [bytes(32)], [len(node)])
    refs = np.frombuffer(manifest.spaces[0].nodes, NODE_REF)
    return {
        "log entry": _sealed(
            ENTRY_KIND,
            encode_entry(state, KEY).data,
            state,
            KEY,
            lambda data: decode_entry("n", 5, data, KEY),
        ),
        "snapshot page": _sealed(
            PAGE_KIND,
            encode_page([_record()] * 3, KEY).data,
            [_record()] * 3,
            KEY,
            lambda data: decode_page("n", data, KEY),
        ),
        "name list": _sealed(
            NAMES_KIND, names, bytes(17 * 9), KEY, lambda data: decode_names("n", data, KEY)
        ),
        "key slot": _sealed(
            KEY_KIND, encode_slot(slot).data, slot, _PUBLIC, partial(open_slot, "n")
        ),
        "configuration": _sealed(
            CONFIG_KIND,
            encode_config(config, KEYS).data,
            config,
            KEYS.config,
            lambda data: decode_config("n", data, KEYS),
        ),
        "heartbeat": _sealed(
            BEAT_KIND,
            encode_heartbeat(beat, KEY),
            beat,
            KEY,
            lambda data: decode_heartbeat("n", data, KEY),
        ),
        "manifest": _sealed(
            MANIFEST_KIND, encode_manifest(manifest, KEY).data, manifest, KEY, _whole_manifest
        ),
        **_records(),
        "fingerprints": _sealed(
            HINTS_KIND, seal(HINTS_KIND, fingerprints, KEY).data, fingerprints, KEY, _fingerprints
        ),
        "working set": _sealed(
            HINTS_KIND, seal(HINTS_KIND, working, KEY).data, working, KEY, _working_set
        ),
        "index segment": Target(
            _segment(), lambda data: parse_segment("n", data, KEY), _segment(), _reseal_segment
        ),
        "index filter": _filter(),
        "shard": _container(SHARD, _shard(), parse_footer),
        "node pack": _container(PACK, footer, parse_pack_footer),
        "node": Target(node, _parse_node, node[:-8], lambda data: data + codec.seal(data)),
        "node references": Target(refs.tobytes(), _refs, errors=(ValueError,)),
        "names": Target(
            b"shards/00/" + b"0" * 32, _names, b"log/" + b"f" * 16, lambda data: data, ()
        ),
        **{codec.name(number): _chunk(number) for number in (codec.LZ4, codec.ZSTD, *codec.BLOSC)},
        "patch": _delta(codec.PATCH),
        "xor": _delta(codec.XOR),
    }


class Fuzzer:
    """Parses inputs; the first two bytes of an input choose the parser, and whether digests are
    corrected.
    """

    def __init__(self) -> None:
        self.targets = targets()
        self._titles = list(self.targets)

    def corpus(self) -> list[bytes]:
        """Return inputs that parse."""
        return [
            bytes([number, sealed]) + (target.body if sealed else target.good)
            for number, target in enumerate(self.targets.values())
            for sealed in (0, 1)
            if not sealed or target.reseal is not None
        ]

    def one(self, data: bytes) -> bool:
        """Parse one input; return whether it was accepted.

        Raises:
            AssertionError: Something happened that may not.
        """
        if len(data) < 2:
            return False
        title = self._titles[data[0] % len(self._titles)]
        target, body = self.targets[title], data[2:]
        if data[1] & 1 and target.reseal is not None:
            body = target.reseal(body)
        try:
            target.parse(body)
        except target.errors as error:
            assert str(error)
            return False
        except Exception as error:
            raise AssertionError(
                f"{title}: {type(error).__name__}: {error}; input {data.hex()}"
            ) from error
        return True


_ODD = [
    0,
    1,
    0x7F,
    0x80,
    0xFF,
    0x7FFF,
    0xFFFF,
    0x7FFFFFFF,
    0xFFFFFFFF,
    (1 << 63) - 1,
    (1 << 64) - 1,
    1 << 30,
    1 << 40,
]


def mutated(data: bytes, dice: np.random.Generator) -> bytes:
    """Return ``data`` with one to four changes behind its first two bytes: flipped bits, odd
    numbers, cuts, copies, noise.
    """
    out = bytearray(data)
    for kind in dice.integers(0, 7, dice.integers(1, 5)).tolist():
        # Half of the changes are near the beginning or the end, where headers and tails are.
        near = min(len(out), 80)
        at, end = dice.integers(0, max(1, len(out) - 2)) + 2, dice.integers(0, 40)
        if near > 2 and dice.random() < 0.5:
            at = int(dice.integers(2, near))
            at = at if dice.random() < 0.5 else max(2, len(out) - at)
        if kind <= 1 and at < len(out):
            out[at] ^= 1 << int(dice.integers(0, 8))
        elif kind == 2:
            odd, size = _ODD[int(dice.integers(0, len(_ODD)))], int(dice.choice([1, 2, 4, 8]))
            out[at : at + size] = (odd & (1 << 8 * size) - 1).to_bytes(
                size, "little" if dice.random() < 0.5 else "big"
            )
        elif kind == 3:
            del out[at : at + end]
        elif kind == 4:
            out[at:at] = out[at : at + end]
        elif kind == 5:
            out[at : at + end] = dice.bytes(end)
        elif kind == 6:
            del out[at:]
    return bytes(out)


def bound_memory() -> None:
    """Limit memory from now on: code that allocates far too much meets a MemoryError, which no
    parser may raise.
    """
    with open("/proc/self/statm") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + MEMORY_BYTES, now + MEMORY_BYTES))


def run(inputs: int, seed: int) -> None:
    """Parse ``count`` mutated inputs; raise as ``Fuzzer.one`` does. Run it in a separate process,
    as it bounds the memory permanently.
    """
    fuzzer, dice = Fuzzer(), np.random.default_rng(seed)
    corpus = fuzzer.corpus()
    for data in corpus:
        assert fuzzer.one(data), f"{list(fuzzer.targets)[data[0]]}: what was written is refused"
    bound_memory()
    started, accepted = time.monotonic(), 0
    for number in range(inputs):
        accepted += fuzzer.one(mutated(corpus[number % len(corpus)], dice))
    seconds = time.monotonic() - started
    print(
        f"{inputs} inputs for {len(fuzzer.targets)} parsers in {seconds:.0f} s, {accepted} of them accepted, seed {seed}"
    )
