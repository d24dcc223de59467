"""The manifest, the root object of one snapshot: what was running, where its memory and files are, and what a restore needs. Pure: bytes to structs."""

from __future__ import annotations

from typing import Literal

import msgspec
import numpy as np

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
    region's pages can be filled through userfaultfd after CRIU brought the process up.
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
    """A regular file that was open or mapped. Times in ns since the epoch. ``policy``: content stored as a space, or only its size and mtime checked."""

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


class Requirements(msgspec.Struct, frozen=True):
    """What the restoring machine must offer."""

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
    """One snapshot. ``format`` is this structure's version. Ids are lower-case hexadecimal; times ns since the epoch; durations seconds."""

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
