"""Repositories for the restorer's tests, in a directory, with the two ways to read them."""

from __future__ import annotations

import asyncio
import secrets
import tempfile
import time
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from icecore.store.backend.base import Backend
from icecore.store.backend.local import LocalBackend
from icecore.store.format.cell import CELL, Records
from icecore.store.format.manifest import Manifest, Namespaces, Region, Requirements
from icecore.store.format.names import new_snapshot_id
from icecore.store.format.slots import Cost
from icecore.store.log.repository import StoredRepository
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader
from icecore.store.snapshot.writer import SnapshotWriter

T = TypeVar("T")


class SlowBackend(LocalBackend):
    """A directory that can only be read through the event loop, like object storage; fails reads on
    demand.
    """

    read_size = 16 << 20
    direct = False

    def __init__(self, root: str | Path) -> None:
        super().__init__(root)
        self.failures: list[BaseException] = []
        self.delay = 0.0
        #: Bytes that are being read.
        self.in_flight = 0
        self.most_in_flight = 0

    async def get_into(self, name: str, offset: int, out: memoryview) -> None:
        self.in_flight += len(out)
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            if self.delay:
                await asyncio.sleep(self.delay)
            if self.failures:
                raise self.failures.pop(0)
            await super().get_into(name, offset, out)
        finally:
            self.in_flight -= len(out)


@dataclass
class Place:
    """A repository, and the loop that it lives in."""

    repository: StoredRepository
    loop: LoopThread
    root: Path

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        return self.loop.run(work)

    def reopened(self, backend: Backend) -> StoredRepository:
        """The same repository through another back end."""
        return self.run(StoredRepository.open(backend))


@contextmanager
def repository_place(folder: str | None = None, *, encrypted: bool = False) -> Iterator[Place]:
    """A fresh repository in a temporary directory (on tmpfs unless told otherwise)."""
    with (
        tempfile.TemporaryDirectory(dir=folder or "/dev/shm", prefix="icecore-test-") as root,
        LoopThread() as loop,
    ):
        path = Path(root, "repository")
        given = (lambda: b"a passphrase for tests") if encrypted else None
        backend = LocalBackend(path, create=True)
        repository = loop.run(
            StoredRepository.create(backend, passphrase=given, cost=Cost(64, 1, 1))
        )
        try:
            yield Place(repository, loop, path)
        finally:
            loop.run(repository.close())


def empty_manifest(snapshot: str = "") -> Manifest:
    """A manifest of nothing."""
    return Manifest(
        format=1,
        snapshot=snapshot or new_snapshot_id(),
        job="test",
        lineage=secrets.token_hex(16),
        parent="",
        created_ns=time.time_ns(),
        host="here",
        writer="test",
        root_pid=1,
        processes=[],
        spaces=[],
        files=[],
        requirements=Requirements("x86_64", "6.1", "4.1.1"),
        namespaces=Namespaces(),
        criu_options=[],
    )


def store_cells(place: Place, cells: list[tuple[bytes, bytes]]) -> tuple[SnapshotReader, Records]:
    """Store (data bitmap, bytes) cells of one space; returns a reader of the snapshot and the
    records.
    """
    import msgspec

    session = place.run(place.repository.begin(None, "test"))
    records = np.empty(len(cells), CELL)
    with SnapshotWriter(place.repository, session, place.loop.loop) as writer:
        for number, (bitmap, data) in enumerate(cells):
            records[number] = writer.store_cell(
                0, number, bitmap, bytes(32), memoryview(data), None
            )
        region = Region(0, len(cells) << 20, 0)
        space = writer.put_map("process", "1", 0, [region], [records], None)
        manifest = msgspec.structs.replace(empty_manifest(), spaces=[space])
        writer.commit(manifest)
    return SnapshotReader(place.repository, manifest, place.loop.loop), records
