"""Synthetic memory for the tests of the store: data of several kinds, images that change from
generation to generation, and a repository for them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from icecore.events import Event
from icecore.sizes import BITMAP_BYTES, CELL_BYTES, CELL_PAGES, PAGE
from icecore.store.backend.base import Backend
from icecore.store.backend.local import LocalBackend
from icecore.store.format.cell import CELL, Records
from icecore.store.format.keys import Parameters
from icecore.store.format.manifest import Manifest, Namespaces, Region, Requirements, Sizes, Space
from icecore.store.format.names import new_snapshot_id
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader
from icecore.store.snapshot.trial import Objective
from icecore.store.snapshot.writer import SnapshotWriter, Statistics
from tests.store.miniature import CHEAP, PASSPHRASE

FULL = b"\xff" * BITMAP_BYTES
NONE = bytes(BITMAP_BYTES)


def bitmap(pages: list[int]) -> bytes:
    """Return the page bitmap with exactly these pages."""
    mask = np.zeros(CELL_PAGES, np.bool_)
    mask[pages] = True
    return np.packbits(mask, bitorder="little").tobytes()


def make_data(kind: str, pages: int, seed: int = 0) -> bytes:
    """Return ``pages`` pages of random bytes, float32 weights, bfloat16 weights, text, heap-like
    words, or zeros.
    """
    random = np.random.default_rng(seed)
    length = pages * PAGE
    if kind == "random":
        return random.bytes(length)
    if kind == "float32":
        return (random.standard_normal(length // 4, np.float32) * np.float32(0.02)).tobytes()
    if kind == "bfloat16":
        wide = (random.standard_normal(length // 2, np.float32) * np.float32(0.02)).view(
            np.uint32
        ) >> 16
        return wide.astype(np.uint16).tobytes()
    if kind == "text":
        words = [
            b"cell ",
            b"chunk ",
            b"shard ",
            b"map\n",
            b"window ",
            b"job ",
            b"snapshot ",
            b"lineage\n",
        ]
        return b"".join(words[i] for i in random.integers(0, len(words), length // 4))[
            :length
        ].ljust(length, b".")
    if kind == "heap":
        heap = 0x7F0000000000 + random.integers(0, 1 << 20, length // 8) * 16
        heap[random.random(len(heap)) < 0.5] = 0
        return heap.astype(np.uint64).tobytes()
    assert kind == "zero"
    return bytes(length)


KINDS = ("random", "float32", "bfloat16", "text", "heap", "zero")

#: One cell: its data bitmap and the data pages' bytes.
Image = Mapping[int, tuple[bytes, bytes]]


def image(cells: int, kind: str = "heap", seed: int = 0) -> dict[int, tuple[bytes, bytes]]:
    """Return ``cells`` distinct full cells of one kind."""
    return {
        cell: (FULL, make_data(kind, CELL_PAGES, seed * 10_000 + cell)) for cell in range(cells)
    }


def touch(before: Image, cells: list[int], pages: int, seed: int) -> dict[int, tuple[bytes, bytes]]:
    """Return ``before`` with a few bytes changed in ``pages`` pages of each of ``cells``."""
    random = np.random.default_rng(seed)
    after = dict(before)
    for cell in cells:
        bits, data = before[cell]
        changed = np.frombuffer(data, np.uint8).reshape(-1, PAGE).copy()
        for page in random.choice(len(changed), min(pages, len(changed)), replace=False):
            at = int(random.integers(0, PAGE - 64))
            changed[page, at : at + 64] = random.integers(0, 256, 64)
        after[cell] = bits, changed.tobytes()
    return after


@dataclass
class Taken:
    """A committed snapshot."""

    snapshot: str
    space: Space
    records: Records
    statistics: Statistics


@dataclass
class Place:
    """A repository to experiment with, and the thread of its event loop."""

    loop: LoopThread
    repository: StoredRepository
    events: list[Event] = field(default_factory=list)

    def manifest(
        self, spaces: list[Space], parent: str = "", lineage: str = "lineage", **more: object
    ) -> Manifest:
        """Return a manifest with nothing but ``spaces``."""
        return Manifest(
            format=1,
            snapshot=new_snapshot_id(),
            job="job",
            lineage=lineage,
            parent=parent,
            created_ns=time.time_ns(),
            host="host",
            writer="test",
            root_pid=1,
            processes=[],
            spaces=spaces,
            files=[],
            requirements=Requirements("x86_64", "6", "4"),
            namespaces=Namespaces(),
            criu_options=[],
            sizes=Sizes(),
        )

    @contextmanager
    def writer(self, base: str | None = None, **options: object) -> Iterator[SnapshotWriter]:
        """A writer in a new session."""
        session = self.loop.run(self.repository.begin(base, "test"))
        with SnapshotWriter(
            self.repository, session, self.loop.loop, emit=self.events.append, **options
        ) as writer:  # type: ignore[arg-type]
            yield writer

    def store(
        self, writer: SnapshotWriter, content: Image, before: Taken | None = None, threads: int = 1
    ) -> Records:
        """Store the cells of ``content`` with ``threads`` threads; return their records."""
        known = {} if before is None else {int(record["cell"]): record for record in before.records}
        records = np.zeros(len(content), CELL)
        work = list(enumerate(sorted(content.items())))
        failures: list[BaseException] = []

        def run(first: int) -> None:
            try:
                for row, (cell, (bits, data)) in work[first::threads]:
                    records[row] = writer.store_cell(
                        0, cell, bits, NONE, memoryview(data), known.get(cell)
                    )
            except BaseException as error:  # noqa: BLE001 - handed to the test below
                failures.append(error)

        running = [threading.Thread(target=run, args=(first,)) for first in range(threads)]
        for thread in running:
            thread.start()
        for thread in running:
            thread.join(60)
            assert not thread.is_alive()
        if failures:
            raise failures[0]
        return records

    def take(
        self,
        content: Image,
        before: Taken | None = None,
        *,
        threads: int = 1,
        objective: Objective | None = None,
        lineage: str = "lineage",
    ) -> Taken:
        """Return a committed snapshot of ``content``, with ``before`` as its parent."""
        parent = before.snapshot if before else None
        with self.writer(parent, objective=objective) as writer:
            records = self.store(writer, content, before, threads)
            length = (max(content, default=0) + 1) * CELL_BYTES
            space = writer.put_map(
                "process",
                "1",
                length,
                [Region(0, length, 0)],
                [records],
                before.space if before else None,
            )
            snapshot = writer.commit(self.manifest([space], parent or "", lineage))
            return Taken(snapshot, space, records, writer.statistics)

    def reader(self, snapshot: str) -> SnapshotReader:
        """Return a reader of a committed snapshot."""
        return SnapshotReader.open(self.repository, snapshot, self.loop.loop)

    def content(self, snapshot: str) -> dict[int, tuple[bytes, bytes]]:
        """Return the content of the snapshot's first space, read cell by cell."""
        reader = self.reader(snapshot)
        room = memoryview(bytearray(CELL_BYTES))
        return {
            int(record["cell"]): (record["data"].tobytes(), bytes(reader.read_cell(record, room)))
            for records in reader.records(reader.manifest.spaces[0])
            for record in records
        }


@contextmanager
def place(
    backend: Backend, shard_bytes: int = 64 << 20, *, encrypted: bool = False
) -> Iterator[Place]:
    """A new repository in ``backend``."""
    passphrase = (lambda: PASSPHRASE) if encrypted else None
    with LoopThread() as loop:
        repository = loop.run(
            StoredRepository.create(
                backend, Parameters(shard_bytes=shard_bytes), passphrase=passphrase, cost=CHEAP
            )
        )
        try:
            yield Place(loop, repository)
        finally:
            loop.run(repository.close())


@contextmanager
def local_place(root: Path, *, encrypted: bool = False) -> Iterator[Place]:
    """A new repository in a directory."""
    with place(LocalBackend(root, create=True), encrypted=encrypted) as made:
        yield made
