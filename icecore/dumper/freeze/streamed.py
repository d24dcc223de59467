"""The fallback where CRIU cannot hold memory in place: it streams all of it. The tree stays frozen
until the end of the stream is answered.

CRIU sends every page of every process through the page-server connection and writes no page maps.
The pages of processes are discarded: the processes stand still until the end of the stream is
answered, and are read in place as in any window, only later. Shared memory is kept in the form in
which CRIU itself would have written it.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path

import msgspec
import numpy as np

from icecore.errors import DumpFailed
from icecore.host.criu.page_server import PROCESS, SHARED, Connection
from icecore.host.criu.pagemap_image import ENTRY, PE_LAZY, PE_PRESENT, write_pagemap
from icecore.sizes import CELL_BYTES, PAGE


class _Map(msgspec.Struct):
    """The page map of one process or shared object as it arrives."""

    pages: int
    entries: list[tuple[int, int, int]] = msgspec.field(default_factory=list)


def receive(pages: socket.socket, version: tuple[int, ...], images: Path, seconds: float) -> int:
    """Receive CRIU's stream and leave its end unanswered, so that the tree stays frozen.

    Args:
        version: CRIU's version, which decides the layout of stream and images.
        images: The image directory, to which page maps and the pages of shared memory are written.
        seconds: How long to wait for more data.

    Returns:
        Bytes received.

    Raises:
        DumpFailed: The stream broke off, is malformed, or stalled.
    """
    pages.settimeout(seconds)
    connection = Connection(pages, version)
    maps: dict[tuple[int, int], _Map] = {}
    buffer = memoryview(bytearray(CELL_BYTES))
    received = 0
    files: dict[int, int] = {}
    try:
        for extent in connection.extents(answer=False):
            key = (extent.kind, extent.number)
            if extent.kind not in (PROCESS, SHARED):
                raise DumpFailed(
                    f"CRIU's page stream names an unknown kind of memory, {extent.kind}"
                )
            found = maps.setdefault(key, _Map(len(maps) + 1))
            lazy = extent.kind == PROCESS and bool(extent.flags & PE_LAZY)
            found.entries.append((extent.address, extent.pages, PE_LAZY if lazy else PE_PRESENT))
            if not extent.flags & PE_PRESENT:
                continue
            if extent.kind == SHARED and extent.number not in files:
                path = images / f"pages-{found.pages}.img"
                files[extent.number] = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
            left = extent.pages * PAGE
            while left:
                piece = buffer[: min(left, CELL_BYTES)]
                connection.receive_into(piece)
                if extent.kind == SHARED:
                    _write_all(files[extent.number], piece)
                left -= len(piece)
            received += extent.pages * PAGE
    finally:
        for descriptor in files.values():
            os.close(descriptor)
    for (kind, number), found in maps.items():
        entries = np.array(found.entries, ENTRY)
        name = f"pagemap-{number}.img" if kind == PROCESS else f"pagemap-shmem-{number}.img"
        write_pagemap(images / name, found.pages, entries, version)
    return received


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]
