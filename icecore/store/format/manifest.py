"""The manifest, the root object of a snapshot: what was running, where its memory and files are,
and what a restore requires. Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from icecore.errors import Damaged, FormatTooNew, StoreError
from icecore.store.format.cell import NODE_CELLS
from icecore.store.format.envelope import ObjectKind, Sealed, seal, unseal
from icecore.store.format.manifest_rules import (
    MAX_FILES,
    MAX_NODES,
    MAX_PROCESSES,
    MAX_REGIONS,
    MAX_SPACES,
    MAX_WORDS,
    NODE_REF_BYTES,
    faults,
)
from icecore.text import loaded, stored

#: Reference to a map node: which group of 64 cells of which region it holds, its id, and where its
#: stored bytes lie.
NODE_REF = np.dtype(
    [
        ("region", "<u4"),
        ("group", "<u4"),
        ("node", "u1", 32),
        ("pack", "u1", 16),
        ("offset", "<u8"),
        ("length", "<u4"),
    ]
)

#: Lists are bounded before they are created: a decoder first reads how long a list claims to be.
Number = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Few = msgspec.Meta(max_length=1 << 12)

SpaceKind = Literal["process", "shared", "file", "image", "device"]
FilePolicy = Literal["content", "checked", "absent"]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A VMA of a process, or the whole of a file, image file or shared memory object.

    ``start`` and ``length`` are bytes. ``origin`` is where cell 0 begins: inherited from the parent
    snapshot (``origin <= start``), so that a region that grows downwards keeps its cells; otherwise
    equal to ``start``. ``protection`` and ``flags`` are the mmap bits. ``lazy`` is whether the
    region's pages can be filled through userfaultfd after CRIU has started the process. Regions of
    kind "device" are those of a process into which the driver moved device memory.
    """

    start: Number
    length: Number
    origin: Number
    protection: Number = 0
    flags: Number = 0
    kind: str = "anonymous"
    name: str = ""
    lazy: bool = False


class Space(msgspec.Struct, frozen=True):
    """One address space or object: its regions in address order and the references to its map
    nodes.

    ``key`` is the process's image id (process), the shmem id (shared), the path (file), the file
    name (image) or the allocation (device). ``size`` is the exact length in bytes of a file or
    image (zeros pad the last page of the last cell). ``nodes`` is an array of ``NODE_REF`` records,
    sorted by (region, group).
    """

    kind: SpaceKind
    key: str
    size: Number
    regions: Annotated[list[Region], msgspec.Meta(max_length=MAX_REGIONS)]
    nodes: Annotated[bytes, msgspec.Meta(max_length=MAX_NODES * NODE_REF_BYTES)] = b""


class Process(msgspec.Struct, frozen=True):
    """One process of the tree, as it was in the window. ``image_id`` is CRIU's id in its image
    names (the pid in the dumped pid namespace).
    """

    image_id: Number
    pid: Number
    parent: Number
    group: Number
    session: Number
    threads: Number
    command: Annotated[list[str], msgspec.Meta(max_length=MAX_WORDS)]
    executable: str
    user: Number
    alive: bool = True


class OpenFile(msgspec.Struct, frozen=True):
    """A regular file that was open or mapped. Times are ns since the epoch. ``policy`` is whether
    its content is stored as a space, or only its size and mtime are checked.

    ``links`` are other names of the same inode, where ``path`` is a name that only CRIU uses (for a
    file that lost the name it was opened under). ``mapped`` is whether it was mapped shared and
    writable, so that it may have changed without a trace; also true where that was not recorded.
    ``temporary`` is whether the tree only read it, and its content is stored because the tree had made
    it.
    """

    path: str
    size: Number
    mtime_ns: Annotated[int, msgspec.Meta(ge=-(1 << 63), le=(1 << 63) - 1)]
    inode: int
    device: int
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o7777)]
    user: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    group: Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]
    writable: bool
    policy: FilePolicy
    digest: str = ""
    links: Annotated[list[str], msgspec.Meta(max_length=MAX_WORDS)] = []
    mapped: bool = True
    temporary: bool = False


class Requirements(msgspec.Struct, frozen=True):
    """What a restore requires of the machine.

    ``pids`` are process and thread ids that must be free; ``devices`` are the GPUs that the tree
    had, one map each (`icecore.store.format.contract.Device`).
    """

    architecture: str
    kernel: str
    criu: str
    page_size: Number = 4096
    cpu: Annotated[list[str], Few] = []
    pids: Annotated[list[Number], msgspec.Meta(max_length=1 << 20)] = []
    ports: Annotated[list[str], msgspec.Meta(max_length=1 << 17)] = []
    devices: Annotated[list[Annotated[dict[str, str], msgspec.Meta(max_length=64)]], Few] = []


class Namespaces(msgspec.Struct, frozen=True):
    """Which namespaces were the job's own, and what CRIU treated as external. ``network`` is "host"
    or "external".
    """

    pid: bool = False
    ipc: bool = False
    mount: bool = False
    network: str = "host"
    uts: bool = False


class Sizes(msgspec.Struct, frozen=True):
    """Bytes of this snapshot: ``logical`` data pages, ``changed`` against the parent, ``stored``
    new bytes in shards, by codec name. ``resident_changed`` is the part of ``changed`` that is
    resident device memory, where that was recorded.
    """

    logical: Number = 0
    zero: Number = 0
    changed: Number = 0
    stored: Number = 0
    device: Number = 0
    by_codec: Annotated[dict[str, Number], Few] = {}
    resident_changed: Number | msgspec.UnsetType = msgspec.UNSET


class Manifest(msgspec.Struct, frozen=True):
    """One snapshot. ``format`` is the version of this structure. Ids are lower-case hexadecimal,
    times ns since the epoch, durations seconds.

    Texts from the kernel (paths, arguments) may hold surrogate escapes (PEP 383), so they stand for
    bytes. ``extra`` are the records of `icecore.store.format.contract`.
    """

    format: int
    snapshot: str
    job: str
    lineage: str
    parent: str
    created_ns: Number
    host: str
    writer: str
    root_pid: Number
    processes: Annotated[list[Process], msgspec.Meta(max_length=MAX_PROCESSES)]
    spaces: Annotated[list[Space], msgspec.Meta(max_length=MAX_SPACES)]
    files: Annotated[list[OpenFile], msgspec.Meta(max_length=MAX_FILES)]
    requirements: Requirements
    namespaces: Namespaces
    criu_options: Annotated[list[str], Few]
    tags: Annotated[list[str], Few] = []
    pinned: bool = False
    sizes: Sizes = Sizes()
    window_seconds: float = 0.0
    hints: str = ""
    hints_digest: str = ""
    extra: Annotated[dict[str, str], Few] = {}


def cells_of(manifest: Manifest) -> int:
    """Return how many cells a manifest's maps have room for."""
    return sum(len(space.nodes) // NODE_REF.itemsize for space in manifest.spaces) * NODE_CELLS


MANIFEST_KIND = ObjectKind("manifest", b"ICEMANI", 1, 256 << 20)
#: The newest manifest structure that this code writes and reads: texts may be escaped in it.
MANIFEST_FORMAT = 2
_PLAIN_FORMAT = 1

#: The lists of a manifest. They are decoded piece by piece, so that all pieces together can be
#: bounded while they are created.
_PIECES: dict[str, msgspec.msgpack.Decoder[Any]] = {
    "processes": msgspec.msgpack.Decoder(Process),
    "spaces": msgspec.msgpack.Decoder(Space),
    "files": msgspec.msgpack.Decoder(OpenFile),
}
_MOST = {"processes": MAX_PROCESSES, "spaces": MAX_SPACES, "files": MAX_FILES}
_OUTLINE: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(
    msgspec.defstruct(
        "_Outline",
        [
            (field.name, Annotated[list[msgspec.Raw], msgspec.Meta(max_length=_MOST[field.name])])
            if field.name in _PIECES
            else (field.name, field.type)
            if field.required
            else (
                field.name,
                field.type,
                field.default
                if field.default is not msgspec.NODEFAULT
                else msgspec.field(default_factory=field.default_factory),
            )
            for field in msgspec.structs.fields(Manifest)
        ],
    )
)


def encode_manifest(manifest: Manifest, key: bytes, name: str = "") -> Sealed:
    """Return the object of ``manifest``, in the oldest format that can hold it.

    Args:
        key: The repository's manifest key.
        name: The object's name; only encryption needs it.

    Raises:
        StoreError: No reader would accept it (`icecore.store.format.manifest_rules`).
    """
    try:
        try:
            body = msgspec.msgpack.encode(msgspec.structs.replace(manifest, format=_PLAIN_FORMAT))
        except UnicodeEncodeError:  # readers of format 1 would take an escaped path literally
            body = msgspec.msgpack.encode(
                _with_texts(msgspec.structs.replace(manifest, format=MANIFEST_FORMAT), stored)
            )
        _decode(body)
        return seal(MANIFEST_KIND, body, key, name)
    except ValueError as error:
        raise StoreError(
            f"the manifest of snapshot {manifest.snapshot} cannot be stored: {error}"
        ) from error


class _Long(msgspec.Struct):
    """The fields of a piece that may be long, undecoded."""

    regions: msgspec.Raw = msgspec.Raw(b"\x90")
    nodes: msgspec.Raw = msgspec.Raw(b"\xc4\0")
    command: msgspec.Raw = msgspec.Raw(b"\x90")
    links: msgspec.Raw = msgspec.Raw(b"\x90")


_LONG = msgspec.msgpack.Decoder(_Long)
#: First byte of a long array or byte string in MessagePack → bytes of the length that follows.
_LENGTH_BYTES = {0xC4: 1, 0xC5: 2, 0xC6: 4, 0xDC: 2, 0xDD: 4}


def _lengths(raw: msgspec.Raw) -> Iterator[tuple[str, int]]:
    """Yield the name and the length of each long field, before it is created."""
    long = _LONG.decode(raw)
    for field in _Long.__struct_fields__:
        data = memoryview(getattr(long, field))
        kind = data[0]
        yield (
            field,
            kind & 15
            if kind >> 4 == 9
            else int.from_bytes(data[1 : 1 + _LENGTH_BYTES.get(kind, 0)], "big"),
        )


def _decode(body: bytes) -> Manifest:
    """Return the manifest in an object's body.

    Raises:
        ValueError: It is not a manifest, or breaks a rule. No more is allocated than the rules
            allow.
    """
    try:
        outline = _OUTLINE.decode(body)
        if outline.format > MANIFEST_FORMAT:  # the caller reports it; its rules are unknown here
            known: dict[str, Any] = {
                field: getattr(outline, field)
                for field in Manifest.__struct_fields__
                if field not in _PIECES
            }
            return Manifest(**known, processes=[], spaces=[], files=[])
        left = {
            "regions": MAX_REGIONS,
            "nodes": MAX_NODES * NODE_REF_BYTES,
            "command": MAX_WORDS,
            "links": MAX_WORDS,
        }
        made: dict[str, Any] = {}
        for name, decoder in _PIECES.items():
            made[name] = list[Any]()
            for raw in getattr(outline, name):
                for field, length in _lengths(raw):
                    left[field] -= length
                    if left[field] < 0:
                        raise ValueError(f"its {name} have more {field} than a manifest may have")
                made[name].append(decoder.decode(raw))
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise ValueError(str(error)) from error
    every: dict[str, Any] = {
        field: made[field] if field in made else getattr(outline, field)
        for field in Manifest.__struct_fields__
    }
    manifest = Manifest(**every)
    if manifest.format == MANIFEST_FORMAT:
        manifest = msgspec.convert(_with_texts(manifest, loaded), Manifest)
    for why in faults(manifest):
        raise ValueError(why)
    for space in manifest.spaces:
        if len(space.nodes) % NODE_REF.itemsize:
            raise ValueError(f"the node references of {space.kind} {space.key} are cut off")
        if len(space.nodes) and int(np.frombuffer(space.nodes, NODE_REF)["region"].max()) >= len(
            space.regions
        ):
            raise ValueError(f"a node of {space.kind} {space.key} belongs to no region")
    return manifest


def _with_texts(manifest: Manifest, change: Callable[[str], str]) -> Any:
    """Return a manifest as values of built-in types, with ``change`` applied to every text."""
    return _each_text(msgspec.to_builtins(manifest, builtin_types=(bytes,)), change)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a value of built-in types with ``change`` applied to every text, except
    names of fields, which need no escapes.
    """
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_each_text(key, change): _each_text(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(inner, change) for inner in value]
    return value


def decode_manifest(data: bytes, key: bytes, *, name: str, digest: bytes | None = None) -> Manifest:
    """Return the manifest in object ``name``.

    Args:
        digest: The digest by which the snapshot list refers to it.

    Raises:
        Damaged: It is not what was written, or another manifest.
        FormatTooNew: It was written by a later version.
    """
    body = unseal(MANIFEST_KIND, name, data, key, digest)
    try:
        manifest = _decode(body)
    except ValueError as error:
        raise Damaged(MANIFEST_KIND.title, name, str(error)) from error
    if manifest.format > MANIFEST_FORMAT:
        raise FormatTooNew(
            f"manifest {name} has format {manifest.format}, this icecore reads up to {MANIFEST_FORMAT}",
            cure="use a newer icecore",
        )
    return manifest
