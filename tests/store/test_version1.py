"""Repositories of past format versions, committed when the version was current, can still be read."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from icecore.sizes import CELL_BYTES
from icecore.store.backend.local import LocalBackend
from icecore.store.log.repository import StoredRepository
from icecore.store.maintenance.check import check
from icecore.store.runtime.loop import LoopThread
from icecore.store.snapshot.reader import SnapshotReader
from tests.store.version1 import CELLS, PASSPHRASE, SNAPSHOTS, content

DATA = Path(__file__).resolve().parent.parent / "data"


@pytest.mark.parametrize("kept", ["repository-v1", "repository-v2-encrypted"])
def test_the_kept_repository_reads_back(kept: str, tmp_path: Path) -> None:
    copy = tmp_path / "repository"
    shutil.copytree(DATA / kept, copy)
    with LoopThread() as loop:

        async def opened() -> StoredRepository:
            return await StoredRepository.open(LocalBackend(copy), passphrase=lambda: PASSPHRASE)

        repository = loop.run(opened())
        assert repository.keys.encrypted == kept.endswith("encrypted")
        listed = loop.run(repository.snapshots())
        assert [record.snapshot for record in listed] == list(SNAPSHOTS)
        assert [record.parent for record in listed] == ["", SNAPSHOTS[0]]
        deltas = 0
        for number, snapshot in enumerate(SNAPSHOTS):
            reader = SnapshotReader.open(repository, snapshot, loop.loop)
            assert reader.manifest.processes[0].command == ["program", "argument"]
            assert reader.manifest.tags == ["kept"]
            (records,) = reader.records(reader.manifest.spaces[0])
            assert records["cell"].tolist() == list(range(CELLS))
            for record in records:
                data, zero, pages = content(number, int(record["cell"]))
                assert record["data"].tobytes() == np.packbits(data, bitorder="little").tobytes()
                assert record["zero"].tobytes() == np.packbits(zero, bitorder="little").tobytes()
                assert bytes(reader.read_cell(record, memoryview(bytearray(CELL_BYTES)))) == pages
                deltas += bool(record["base_place"]["length"])
        assert deltas >= 3, "the kept repository holds deltas"
        report = loop.run(check(repository, read_data=1.0))
        assert report.sound, report.damages
        loop.run(repository.close())
