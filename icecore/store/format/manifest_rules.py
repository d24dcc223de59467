"""Checks what a manifest may contain, no matter who wrote it: counts, addresses, names and paths
that later code relies on. Pure; one pass, no loop over pages.

A manifest that breaks a rule is refused both on reading and on writing, so later code does not
check again.
"""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np

from icecore.sizes import CELL_BYTES, PAGE

if TYPE_CHECKING:
    from icecore.store.format.manifest import Manifest, Space

MAX_PROCESSES = 1 << 16
MAX_SPACES = 1 << 18
MAX_FILES = 1 << 18
#: In all spaces together.
MAX_REGIONS = 1 << 20
MAX_NODES = 1 << 20
#: Arguments of all commands, and links of all files.
MAX_WORDS = 1 << 20

#: No user address is higher (five-level page tables). No other space exceeds the second bound, so
#: that sums of two fit 64 bits.
_TOP_ADDRESS = 1 << 56
_TOP = 1 << 62
#: Cells are numbered with 32 bits.
_MAX_SPAN = CELL_BYTES << 32
_NUMBER = re.compile(r"(0|[1-9][0-9]{0,18})\Z")
_IMAGE = re.compile(r"[A-Za-z0-9_+:-][A-Za-z0-9_.+:-]{0,199}\Z")
_SNAPSHOT = re.compile(r"([0-9a-f]{32})?\Z")
_PART = r"[a-z0-9][a-z0-9._-]{0,199}"
_LINEAGE = re.compile(rf"{_PART}\Z")
_HINTS = re.compile(rf"(hints/{_PART}/{_PART})?\Z")
_DIGEST = re.compile(r"([0-9a-f]{64})?\Z")
_OPTIONS = {"--shell-job", "--tcp-close", "--tcp-established"}


def faults(manifest: Manifest) -> Iterator[str]:
    """Yield each broken rule of a manifest, in words. The fields must have their types already."""
    yield from _identity(manifest)
    seen: set[tuple[str, str]] = set()
    nodes = 0
    for space in manifest.spaces:
        if (space.kind, space.key) in seen:
            yield f"two spaces are {space.kind} {_shown(space.key)}"
        seen.add((space.kind, space.key))
        nodes += len(space.nodes) // NODE_REF_BYTES
        why = _space(space)
        if why:
            yield f"{space.kind} {_shown(space.key)}: {why}"
    if nodes > MAX_NODES:
        yield f"it refers to {nodes} map nodes, more than the maximum of {MAX_NODES}"
    images = {process.image_id for process in manifest.processes}
    if len(images) != len(manifest.processes):
        yield "two processes have one id"
    for file in manifest.files:
        for path in (file.path, *file.links):
            if not is_path(path):
                yield f"it has an open file named {_shown(path)}"
    for device in manifest.requirements.devices:
        if not {"kind", "uuid", "name"} <= device.keys():
            yield "a device that it requires has no kind, uuid or name"
    for port in manifest.requirements.ports:
        if not _is_port(port):
            yield f"it requires the port {_shown(port)}"
    if not set(manifest.criu_options) <= _OPTIONS:
        yield f"it names these options of CRIU: {_shown(' '.join(manifest.criu_options))}"


#: Bytes of a NODE_REF record (`icecore.store.format.manifest`).
NODE_REF_BYTES = 68


def _identity(manifest: Manifest) -> Iterator[str]:
    if (
        not manifest.snapshot
        or not _SNAPSHOT.match(manifest.snapshot)
        or not _SNAPSHOT.match(manifest.parent)
    ):
        yield "its id, or its parent's, is not that of a snapshot"
    if not _LINEAGE.match(manifest.lineage):
        yield f"its lineage is called {_shown(manifest.lineage)}"
    if (
        not _HINTS.match(manifest.hints)
        or not _DIGEST.match(manifest.hints_digest)
        or (manifest.hints and not manifest.hints_digest)
    ):
        yield f"its hints are called {_shown(manifest.hints)}"
    if not math.isfinite(manifest.window_seconds):
        yield "its window has no length"


def _space(space: Space) -> str:
    """Return why a space is invalid; empty if it is valid."""
    if space.kind == "file":
        named = is_path(space.key)
    else:
        named = (_IMAGE if space.kind == "image" else _NUMBER).match(space.key) is not None
    if not named:
        return "its name is invalid for its kind"
    if not space.regions:
        if space.nodes:
            return "it has a map and no region"
        return (
            "it has a size and no region" if space.size and space.kind in ("file", "image") else ""
        )
    table = np.array(
        [(region.start, region.length, region.origin) for region in space.regions], np.int64
    )
    start, length, origin = table.T
    end = start + length
    top = _TOP_ADDRESS if space.kind == "process" else _TOP
    if (start > top).any() or (length <= 0).any() or (length > top).any() or (end > top).any():
        return "a region lies beyond all addresses, or is empty"
    if (table & PAGE - 1).any():
        return "a region does not consist of whole pages"
    if (origin > start).any() or (end - origin > _MAX_SPAN).any():
        return "a region does not lie in its own grid of cells"
    if (start[1:] < end[:-1]).any():
        return "its regions overlap, or are not in order"
    if space.kind in ("file", "image") and (
        len(table) > 1 or start[0] or not length[0] - PAGE < space.size <= length[0]
    ):
        return f"its region is not that of {space.size} bytes"
    return ""


def is_path(path: str) -> bool:
    """Return whether a path is absolute, names something, and contains no `..`."""
    return path.startswith("/") and path != "/" and "\0" not in path and ".." not in path.split("/")


def _is_port(text: str) -> bool:
    host, _, port = text.rpartition(":")
    try:
        ipaddress.ip_address(host.strip("[]"))
        # No interface's name follows, which may be any text.
        return "%" not in host and port.isascii() and port.isdecimal() and int(port) < 1 << 16
    except ValueError:
        return False


def _shown(text: str) -> str:
    return ascii(text if len(text) <= 80 else f"{text[:80]}…")
