"""Writes cells into files: open files that are put back, CRIU's image files, and the page images
rebuilt from memory cells. A file is as sparse as it was.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import numpy as np

from icecore.events import Progress
from icecore.host.kernel import limits as machine
from icecore.restorer.fetch.fetcher import Fetcher
from icecore.restorer.fetch.limits import Limits
from icecore.restorer.fetch.sink import CellSink
from icecore.restorer.fetch.source import Decoder
from icecore.restorer.plan.cells import FileLayout, SpaceCells, page_pieces
from icecore.restorer.plan.memory import interleave
from icecore.sizes import PAGE
from icecore.store.backend.base import Backend
from icecore.store.format.cell import CELL, Bytes, Records
from icecore.store.runtime.loop import LoopThread


class FileTarget(msgspec.Struct, frozen=True):
    """One file to be written from cells.

    Attributes:
        path: Where; it must not exist, unless ``existing``. With ``descriptor`` only a name for
            messages.
        size: Bytes of the complete file.
        cells: Cells whose data pages go into it.
        layout: Where the pages of a pagemap lie in a page image; None: an address is an offset in
            the file.
        within: u1[n, 32], with a layout: the pages that it covers.
        mode: Permission bits.
        existing: The file exists, empty and perhaps open: it is filled in place.
        descriptor: The file, open for writing; the caller closes it. None: the file is opened by
            ``opened``, or by its path.
        opened: Opens the file for writing, from any thread; each use closes it again.
        offset: Where in the file of ``descriptor`` the content begins; that file has its size
            already. None: the content is the whole file.
    """

    path: str
    size: int
    cells: SpaceCells
    layout: FileLayout | None = None
    within: Bytes | None = None
    mode: int = 0o600
    existing: bool = False
    descriptor: int | None = None
    offset: int | None = None
    opened: Callable[[], int] | None = None


class FileWriter(CellSink):
    """The targets of one run of a `icecore.restorer.fetch.fetcher.Fetcher`.

    Attributes:
        records: CELL records of all rows that have bytes to be written.
    """

    def __init__(self, targets: Sequence[FileTarget]) -> None:
        self._targets = targets
        wanted = []
        rows = []
        for number, target in enumerate(targets):
            pages = target.cells.records["data"] if target.within is None else target.within
            kept = np.flatnonzero(pages.any(axis=1)) if len(pages) else np.empty(0, np.int64)
            wanted.append(np.full(len(kept), number))
            rows.append(kept)
        self._counts = [len(kept) for kept in rows]
        self._target_of: list[int] = np.concatenate(wanted).tolist() if wanted else []
        self._cell_of: list[int] = np.concatenate(rows).tolist() if rows else []
        parts = [target.cells.records[kept] for target, kept in zip(targets, rows, strict=True)]
        self.records: Records = np.concatenate(parts) if parts else np.empty(0, CELL)

    def create(self) -> None:
        """Create the files, empty but with their size.

        Raises:
            FileExistsError: One exists already.
            OSError: No space, no permission.
        """
        for target in self._targets:
            if target.offset is not None:
                continue
            if target.descriptor is not None:
                try:
                    os.ftruncate(target.descriptor, target.size)
                except OSError as error:
                    raise OSError(error.errno, error.strerror, target.path) from error
                continue
            flags = os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW
            if not target.existing:
                flags |= os.O_CREAT | os.O_EXCL
            if target.opened is not None:
                descriptor = target.opened()
            else:
                descriptor = os.open(target.path, flags, target.mode)
            try:
                os.ftruncate(descriptor, target.size)
            finally:
                os.close(descriptor)

    def order(self) -> list[int]:
        """Return all rows, files interleaved: two threads that write into one file block each
        other.
        """
        first = 0
        parts = []
        for count in self._counts:
            parts.append(range(first, first + count))
            first += count
        return interleave([part for part in parts if part])

    def place(self, row: int, data: memoryview) -> None:
        """Write the bytes of one row; see `CellSink.place`."""
        target = self._targets[self._target_of[row]]
        cell = self._cell_of[row]
        base = int(target.cells.base[cell])
        bitmap = target.cells.records["data"][cell]
        if target.layout is None:
            whole = bitmap.tobytes()
            runs = [
                (position, base + offset, length)
                for offset, position, length in page_pieces(whole, whole)
            ]
        else:
            assert target.within is not None
            runs = target.layout.runs(base, bitmap, target.within[cell])
        own, first = target.descriptor, target.offset or 0
        if own is not None:
            descriptor = own
        elif target.opened is not None:
            descriptor = target.opened()
        else:
            descriptor = os.open(target.path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        try:
            for position, offset, length in runs:
                length = min(length, target.size - offset)  # the last page of a file is padded
                done = 0
                while done < length:
                    done += os.pwrite(
                        descriptor,
                        data[position + done : position + length],
                        first + offset + done,
                    )
        except OSError as error:
            raise OSError(error.errno, error.strerror, target.path) from error
        finally:
            if own is None:
                os.close(descriptor)


def write_files(
    backend: Backend,
    decoder: Decoder,
    targets: Sequence[FileTarget],
    limits: Limits,
    loop: LoopThread,
    progress: Progress | None = None,
) -> int:
    """Write all targets from the store.

    Args:
        progress: Called, now and then, with the bytes that were written, of all.

    Returns:
        Bytes of the files.

    Raises:
        OSError: A file could not be made.
        Damaged, StoreError: The content of one could not be read.
    """
    writer = FileWriter(targets)
    writer.create()
    if len(writer.records):
        fetcher = Fetcher(backend, decoder, writer.records, writer, limits, loop)
        if progress is not None:
            fetcher.progress = progress
        fetcher.start(writer.order())
        try:
            fetcher.wait()
        finally:
            fetcher.stop()
    return sum(target.size for target in targets)


def shortage(folder: Path, targets: Sequence[FileTarget]) -> str:
    """Return by how much the targets' bytes exceed what is free in ``folder``; empty if they fit.
    The cells count, not the sizes that a manifest claims.
    """
    pages = sum(
        int(
            np.bitwise_count(
                target.cells.records["data"] if target.within is None else target.within
            ).sum(dtype=np.int64)
        )
        for target in targets
    )
    free = machine.free_space(str(folder))
    if pages * PAGE <= free:
        return ""
    return f"{pages * PAGE >> 20} MiB must be written to {folder}, which has {free >> 20} MiB free"
