"""The small repositories of past versions in tests/data: their contents, and how they were made.

``python -m tests.store.version1 DIRECTORY``, followed by a passphrase for the encrypted one, which
has format version 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import numpy.typing as npt

from icecore.sizes import CELL_PAGES, PAGE
from icecore.store.backend.local import LocalBackend
from icecore.store.format.cell import CELL, Records
from icecore.store.format.keys import Parameters
from icecore.store.format.manifest import (
    MANIFEST_FORMAT,
    Manifest,
    Namespaces,
    OpenFile,
    Process,
    Region,
    Requirements,
    Sizes,
)
from icecore.store.format.slots import Cost
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.writer import SnapshotWriter

#: Pages of each cell: few, so that the repository stays small.
PAGES = 24
CELLS = 6
ORIGIN = 0x7F0000000000
SNAPSHOTS = ("0123456789abcdef0123456789abcd01", "0123456789abcdef0123456789abcd02")


def content(snapshot: int, cell: int) -> tuple[npt.NDArray[np.bool_], npt.NDArray[np.bool_], bytes]:
    """Data pages, zero pages (bool[256] each) and the data pages' bytes of one cell of one snapshot
    (0 or 1).
    """
    rng = np.random.default_rng(1000 + cell)
    data = np.zeros(CELL_PAGES, np.bool_)
    zero = np.zeros(CELL_PAGES, np.bool_)
    data[cell : cell + PAGES] = True
    zero[200 : 200 + cell] = True
    size = PAGES * PAGE
    if cell == 0:
        pages = rng.integers(0, 256, size, np.uint8)
    elif cell == 1:
        pages = np.frombuffer(
            (b"the same words again and again, " * (size // 32 + 1))[:size], np.uint8
        ).copy()
    elif cell == 2:
        pages = (rng.standard_normal(size // 4) * 0.02).astype("<f4").view(np.uint8)
    elif cell == 3:
        pages = (
            ((rng.standard_normal(size // 2) * 0.02).astype("<f4").view("<u4") >> 16)
            .astype("<u2")
            .view(np.uint8)
        )
    elif cell == 4:
        pages = np.arange(size // 8, dtype="<u8").view(np.uint8).copy()
    else:
        data[:] = False
        pages = np.empty(0, np.uint8)
    pages = pages.reshape(-1, PAGE)
    if snapshot and len(pages):
        pages = pages.copy()
        pages[5, 7:19] ^= 0x55
        pages[11, ::64] += 1
    return data, zero, pages.tobytes()


#: Opens the encrypted one.
PASSPHRASE = b"a passphrase that is no secret"


def make(directory: Path, passphrase: bytes | None = None) -> None:
    """Write the repository."""
    with LoopThread() as loop:

        async def create() -> StoredRepository:
            return await StoredRepository.create(
                LocalBackend(directory, create=True),
                Parameters(shard_bytes=1 << 20),
                passphrase=None if passphrase is None else lambda: passphrase,
                cost=Cost(1 << 10, 2, 2),
            )

        repository = loop.run(create())
        region = Region(ORIGIN, CELLS << 20, ORIGIN, 3, 0x22, "anonymous", "", True)
        records: Records = np.zeros(0, CELL)
        parent = None
        for number, snapshot in enumerate(SNAPSHOTS):
            session = loop.run(repository.begin(SNAPSHOTS[number - 1] if number else None, "dump"))
            with SnapshotWriter(repository, session, loop.loop) as writer:
                rows = []
                for cell in range(CELLS):
                    data, zero, pages = content(number, cell)
                    bitmaps = [
                        np.packbits(mask, bitorder="little").tobytes() for mask in (data, zero)
                    ]
                    before = records[cell] if number else None
                    rows.append(
                        writer.store_cell(
                            0, cell, bitmaps[0], bitmaps[1], memoryview(pages), before
                        )
                    )
                records = np.array(rows, CELL)
                parent = writer.put_map("process", "1", 0, [region], [records], parent)
                hints, digest = writer.put_hints("a" * 32, b"advice")
                writer.commit(
                    Manifest(
                        format=MANIFEST_FORMAT,
                        snapshot=snapshot,
                        job="kept",
                        lineage="a" * 32,
                        parent=SNAPSHOTS[number - 1] if number else "",
                        created_ns=1_790_000_000_000_000_000 + number,
                        host="host",
                        writer="tests.store.version1",
                        root_pid=1,
                        processes=[
                            Process(
                                1, 4711, 0, 1, 1, 2, ["program", "argument"], "/usr/bin/program", 0
                            )
                        ],
                        spaces=[parent],
                        files=[OpenFile("/tmp/file", 12, 34, 56, 78, 0o644, 0, 0, True, "checked")],
                        requirements=Requirements("x86_64", "6.18", "4.2.1", pids=[1]),
                        namespaces=Namespaces(pid=True),
                        criu_options=[],
                        tags=["kept"],
                        sizes=Sizes(
                            logical=(CELLS - 1) * PAGES * PAGE, stored=writer.statistics.stored
                        ),
                        window_seconds=0.25,
                        hints=hints,
                        hints_digest=digest.hex(),
                    )
                )
        loop.run(repository.close())


if __name__ == "__main__":
    make(Path(sys.argv[1]), *(text.encode() for text in sys.argv[2:]))
