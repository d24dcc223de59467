"""What a scan reads apart from processes: files and CRIU's page images, addressed like memory. An
address that was planned is read in full.
"""

from __future__ import annotations

import ctypes
import os
from typing import Protocol

import numpy as np
import numpy.typing as npt

from icecore.dumper.memory.cells import EXTENT
from icecore.errors import DumpFailed
from icecore.sizes import CELL_BYTES, PAGE


class Buffer(Protocol):
    """What a source reads into."""

    def view(self, start: int = 0, stop: int | None = None) -> memoryview:
        """Return the bytes from ``start`` to ``stop``."""


def _runs(iovecs: int, count: int) -> list[tuple[int, int]]:
    """Return the ``(address, length)`` pairs of ``count`` C iovecs at address ``iovecs``."""
    words = (ctypes.c_uint64 * (2 * count)).from_address(iovecs)
    return list(zip(words[::2], words[1::2], strict=True))


class FileSource:
    """A regular file as a space whose addresses are file offsets; the last page is padded with
    zeros. Thread-safe.

    Args:
        descriptor: Open for reading; the caller keeps it.
        size: Bytes at the time of the snapshot. A file that is longer now is read up to there.
        first: Where in the file the content begins.

    Attributes:
        file: See `icecore.dumper.memory.scan.Source`. What is read so of the last page, behind the
            size, is of a file that grows, and belongs to no content.
    """

    process = None
    mapped = None

    def __init__(self, descriptor: int, size: int, name: str, first: int = 0) -> None:
        self._descriptor = descriptor
        self.file = None if first else descriptor
        self._first = first
        self._size = size
        self._name = name

    def read_into(self, iovecs: int, count: int, buffer: Buffer, size: int) -> None:
        """See `icecore.dumper.memory.scan.Source`."""
        at = 0
        for offset, length in _runs(iovecs, count):
            wanted = max(0, min(length, self._size - offset))
            read_fully(
                self._descriptor, buffer.view(at, at + wanted), self._first + offset, self._name
            )
            if wanted < length:
                buffer.view(at + wanted, at + length)[:] = bytes(length - wanted)
            at += length

    def extents(self) -> npt.NDArray[np.void]:
        """Return the pages of a whole file that hold data, without holes, as EXTENT records. The file
        may change meanwhile.
        """
        found: list[tuple[int, int]] = []
        position = 0
        while position < self._size:
            try:
                low = os.lseek(self._descriptor, position, os.SEEK_DATA)
                high = min(os.lseek(self._descriptor, low, os.SEEK_HOLE), self._size)
            except OSError:
                break  # ENXIO: only a hole up to the end, or it ends before that now
            if high <= low:  # a hole now, or beyond the size
                position = low + PAGE
                continue
            low, high = low // PAGE * PAGE, -(-high // PAGE) * PAGE
            if found and found[-1][0] + found[-1][1] * PAGE >= low:
                found[-1] = (found[-1][0], (high - found[-1][0]) // PAGE)
            else:
                found.append((low, (high - low) // PAGE))
            position = high
        return np.array(found, EXTENT)


class PagesImage:
    """CRIU's ``pages-N.img``, addressed by the virtual addresses of its pagemap. Thread-safe.

    Args:
        path: The image.
        extents: EXTENT records of the pagemap entries whose pages lie in the image, in the image's
            order.
    """

    process = None
    file = None
    mapped = None

    def __init__(self, path: str, extents: npt.NDArray[np.void]) -> None:
        self.path = path
        self._descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        lengths = extents["pages"] * np.uint64(PAGE)
        order = np.argsort(extents["address"], kind="stable")
        self._start = extents["address"][order]
        self._offset = (np.cumsum(lengths) - lengths)[order]

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)

    def read_into(self, iovecs: int, count: int, buffer: Buffer, size: int) -> None:
        """See `icecore.dumper.memory.scan.Source`."""
        at = 0
        for address, length in _runs(iovecs, count):
            entry = int(np.searchsorted(self._start, np.uint64(address), side="right")) - 1
            offset = int(self._offset[entry]) + address - int(self._start[entry])
            read_fully(self._descriptor, buffer.view(at, at + length), offset, self.path)
            at += length


def read_some(descriptor: int, iovecs: int, count: int, buffer: Buffer) -> None:
    """Read the runs of a file that may be shorter now: what is missing reads as zeros."""
    at = 0
    for offset, length in _runs(iovecs, count):
        view, done = buffer.view(at, at + length), 0
        while done < length and (got := os.preadv(descriptor, [view[done:]], offset + done)):
            done += got
        view[done:] = bytes(length - done)
        at += length


def read_fully(descriptor: int, out: memoryview, offset: int, name: str) -> None:
    """Fill ``out`` from ``offset`` on.

    Raises:
        DumpFailed: The file is too short.
    """
    done = 0
    while done < len(out):
        got = os.preadv(descriptor, [out[done : done + CELL_BYTES]], offset + done)
        if got == 0:
            raise DumpFailed(
                f"{name} ended at {offset + done} while it was read up to {offset + len(out)}"
            )
        done += got
