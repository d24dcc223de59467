"""The manifest, the root object of one snapshot: what was running, where its memory and files are, and what a restore needs. Pure: bytes to structs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal

import msgspec
import numpy as np

from icecore.errors import Damaged, FormatTooNew
from icecore.store.envelope import ObjectKind, Sealed, seal, unseal
from icecore.text import loaded, stored

#: Reference to one map node: the group of 64 cells of one region that it holds, its id, and where its stored bytes lie.
NODE_REF = np.dtype(
    [("region", "<u4"), ("group", "<u4"), ("node", "u1", 32), ("pack", "u1", 16), ("offset", "<u8"), ("length", "<u4")]
)

SpaceKind = Literal["process", "shared", "file", "image", "device"]
FilePolicy = Literal["content", "checked", "absent"]


class Region(msgspec.Struct, frozen=True, array_like=True):
    """A VMA of a process, or the whole of a file, image file or shared memory object.

    ``start`` and ``length`` are bytes; ``origin`` is where cell 0 begins (``origin <= start``, inherited from the parent snapshot so that a region
    that grows downwards keeps its cells; equal to ``start`` otherwise). ``protection`` and ``flags`` are the mmap bits. ``lazy`` is whether the
    region's pages can be filled through userfaultfd after CRIU brought the process up. Of kind "device" are those of a process into which the driver moved
    device memory.
    """

    start: int
    length: int
    origin: int
    protection: int = 0
    flags: int = 0
    kind: str = "anonymous"
    name: str = ""
    lazy: bool = False


class Space(msgspec.Struct, frozen=True):
    """One address space or object: its regions in address order and the references to its map nodes.

    ``key`` is the process's image id (process), the shmem id (shared), the path (file), the file name (image), the allocation (device).
    ``size`` is the exact length in bytes for files and images (the last page of the last cell is padded with zeros). ``nodes`` is an array of
    ``NODE_REF`` records, sorted by (region, group).
    """

    kind: SpaceKind
    key: str
    size: int
    regions: list[Region]
    nodes: bytes = b""


class Process(msgspec.Struct, frozen=True):
    """One process of the tree, as it was in the window. ``image_id`` is CRIU's id in its image names (the pid in the dumped pid namespace)."""

    image_id: int
    pid: int
    parent: int
    group: int
    session: int
    threads: int
    command: list[str]
    executable: str
    user: int
    alive: bool = True


class OpenFile(msgspec.Struct, frozen=True):
    """A regular file that was open or mapped. Times in ns since the epoch. ``policy``: content stored as a space, or only its size and mtime checked.

    ``links`` are other names of the same inode, where ``path`` is one that only CRIU uses (a file that lost the name it was opened under).
    ``mapped``: shared and writable, so that it may have been written to since without a trace; also where nobody noted it (before 2026-11-23).
    """

    path: str
    size: int
    mtime_ns: int
    inode: int
    device: int
    mode: int
    user: int
    group: int
    writable: bool
    policy: FilePolicy
    digest: str = ""
    links: list[str] = []
    mapped: bool = True


class Requirements(msgspec.Struct, frozen=True):
    """What the restoring machine must offer.

    ``pids`` are process and thread ids that must be free, ``devices`` the GPUs that the tree had, one map each (docs/format.md).
    """

    architecture: str
    kernel: str
    criu: str
    page_size: int = 4096
    cpu: list[str] = []
    pids: list[int] = []
    ports: list[str] = []
    devices: list[dict[str, str]] = []


class Namespaces(msgspec.Struct, frozen=True):
    """Which namespaces were the job's own, and what CRIU was told was external. ``network``: "host" or "external"."""

    pid: bool = False
    ipc: bool = False
    mount: bool = False
    network: str = "host"
    uts: bool = False


class Sizes(msgspec.Struct, frozen=True):
    """Bytes of this snapshot: ``logical`` data pages, ``changed`` against the parent, ``stored`` new bytes in shards, by codec name."""

    logical: int = 0
    zero: int = 0
    changed: int = 0
    stored: int = 0
    device: int = 0
    by_codec: dict[str, int] = {}


class Manifest(msgspec.Struct, frozen=True):
    """One snapshot. ``format`` is this structure's version. Ids are lower-case hexadecimal; times ns since the epoch; durations seconds.

    Texts from the kernel (paths, arguments) may hold surrogate escapes (PEP 383): they are bytes.
    """

    format: int
    snapshot: str
    job: str
    lineage: str
    parent: str
    created_ns: int
    host: str
    writer: str
    root_pid: int
    processes: list[Process]
    spaces: list[Space]
    files: list[OpenFile]
    requirements: Requirements
    namespaces: Namespaces
    criu_options: list[str]
    tags: list[str] = []
    pinned: bool = False
    sizes: Sizes = Sizes()
    window_seconds: float = 0.0
    hints: str = ""
    hints_digest: str = ""
    extra: dict[str, str] = {}


MANIFEST_KIND = ObjectKind("manifest", b"ICEMANI", 1, 256 << 20)
#: The newest manifest structure that this code writes and reads: the one in which texts may be escaped.
MANIFEST_FORMAT = 2
_PLAIN_FORMAT = 1

_DECODER = msgspec.msgpack.Decoder(Manifest)


def encode_manifest(manifest: Manifest, key: bytes, name: str = "") -> Sealed:
    """Return the object of ``manifest``, in the oldest format that can hold it.

    Args:
        key: The repository's manifest key.
        name: The object that it will be (which only encryption needs).
    """
    try:
        body = msgspec.msgpack.encode(msgspec.structs.replace(manifest, format=_PLAIN_FORMAT))
    except UnicodeEncodeError:  # readers of format 1 would take an escaped path for the path
        whole = msgspec.to_builtins(msgspec.structs.replace(manifest, format=MANIFEST_FORMAT), builtin_types=(bytes,))
        body = msgspec.msgpack.encode(_each_text(whole, stored))
    return seal(MANIFEST_KIND, body, key, name)


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """Return a copy of a value of built-in types with every text changed; names of fields stay, as none needs an escape."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {_each_text(key, change): _each_text(inner, change) for key, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_each_text(inner, change) for inner in value]
    return value


def decode_manifest(data: bytes, key: bytes, *, name: str, digest: bytes | None = None) -> Manifest:
    """The manifest in object ``name``.

    Args:
        digest: The digest by which the snapshot list refers to it.

    Raises:
        Damaged: It is not what was written, or another one than was meant.
        FormatTooNew: It was written by a later version.
    """
    body = unseal(MANIFEST_KIND, name, data, key, digest)
    try:
        manifest = _DECODER.decode(body)
        if manifest.format == MANIFEST_FORMAT:
            manifest = msgspec.convert(_each_text(msgspec.msgpack.decode(body), loaded), Manifest)
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        raise Damaged(MANIFEST_KIND.title, name, str(error)) from error
    if manifest.format > MANIFEST_FORMAT:
        raise FormatTooNew(
            f"manifest {name} has format {manifest.format}, this icecore reads up to {MANIFEST_FORMAT}",
            cure="use a newer icecore",
        )
    if any("\0" in path for file in manifest.files for path in (file.path, *file.links)):
        raise Damaged(MANIFEST_KIND.title, name, "the path of an open file holds a NUL")
    for space in manifest.spaces:
        if len(space.nodes) % NODE_REF.itemsize:
            raise Damaged(MANIFEST_KIND.title, name, f"the node references of {space.kind} {space.key} are cut off")
        if len(space.nodes) and int(np.frombuffer(space.nodes, NODE_REF)["region"].max()) >= len(space.regions):
            raise Damaged(MANIFEST_KIND.title, name, f"a node of {space.kind} {space.key} belongs to no region")
    return manifest
