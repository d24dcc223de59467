"""Differences between two snapshots, computed from invented maps with a known answer."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from icecore.sizes import PAGE
from icecore.snapshots.difference import compare
from icecore.store.format.cell import CELL, Records
from icecore.store.format.manifest import (
    Manifest,
    Namespaces,
    OpenFile,
    Process,
    Region,
    Requirements,
    Space,
)


def cells(*rows: tuple[int, int, int]) -> Records:
    """Return CELL records of ``(cell, content, data pages)``; equal content has equal chunks,
    stored with 100 bytes per page.
    """
    records = np.zeros(len(rows), CELL)
    for record, (cell, content, pages) in zip(records, rows, strict=True):
        record["cell"] = cell
        record["data"] = np.packbits(np.arange(256) < pages, bitorder="little")
        record["chunk"] = content
        record["place"]["length"] = 100 * pages
    return records


@dataclass(frozen=True)
class Fake:
    """A reader of invented maps, by space key."""

    manifest: Manifest
    maps: dict[str, list[Records]]

    def records(self, space: Space) -> list[Records]:
        """See `icecore.snapshots.difference.Reader`."""
        return self.maps[space.key]


def fake(
    name: str,
    spaces: list[Space],
    maps: dict[str, list[Records]],
    *,
    pids: tuple[int, ...] = (1,),
    files: tuple[tuple[str, int], ...] = (),
) -> Fake:
    """Return a snapshot of processes ``pids`` that have ``files`` (path, size) open."""
    manifest = Manifest(
        1,
        name,
        "job",
        "lineage",
        "",
        0,
        "host",
        "test",
        1,
        [Process(pid, pid, 0, 1, 1, 1, ["run"], "/bin/run", 0) for pid in pids],
        spaces,
        [OpenFile(path, size, 7, 1, 1, 0o600, 0, 0, True, "content") for path, size in files],
        Requirements("x86_64", "6.1", "4.1"),
        Namespaces(),
        [],
    )
    return Fake(manifest, maps)


def region(start: int, length: int, name: str = "") -> Region:
    """Return an anonymous region."""
    return Region(start, length, start, kind="anonymous", name=name)


def process(*regions: Region, nodes: bytes = b"") -> Space:
    """Return the space of process 1."""
    return Space("process", "1", 0, list(regions), nodes)


MIB = 1 << 20


def test_cells_are_compared_by_place() -> None:
    older = fake(
        "a",
        [process(region(0x1000, 4 * MIB), region(0x900000, MIB))],
        {"1": [cells((0, 1, 256), (1, 2, 256), (2, 3, 10)), cells((0, 8, 1))]},
    )
    newer = fake(
        "b",
        [process(region(0x1000, 4 * MIB), region(0xA00000, MIB))],
        # The second cell is new, the third has moved content that is known, the fourth is as large
        # and equal to the second.
        {"1": [cells((0, 1, 256), (1, 9, 256), (2, 2, 256), (3, 9, 256)), cells((0, 7, 2))]},
    )
    found = compare(older, newer)
    states = {(one.state, one.start): (one.cells, one.changed, one.stored) for one in found.regions}
    assert states == {
        ("changed", 0x1000): (3, 3 * MIB, 25600),
        ("added", 0xA00000): (1, 2 * PAGE, 200),
        ("removed", 0x900000): (1, PAGE, 0),
    }
    total = found.totals["process"]
    assert (total.logical, total.changed, total.stored) == (
        4 * MIB + 2 * PAGE,
        3 * MIB + 2 * PAGE,
        25800,
    )


def test_cells_that_are_gone_count() -> None:
    older = fake("a", [process(region(0, 4 * MIB))], {"1": [cells((0, 1, 5), (1, 2, 5))]})
    newer = fake("b", [process(region(0, 4 * MIB), nodes=b"other")], {"1": [cells((0, 1, 5))]})
    (change,) = compare(older, newer).regions
    assert (change.state, change.cells, change.changed) == ("changed", 1, 0)


def test_equal_maps_are_not_read_twice() -> None:
    space = process(region(0, MIB), nodes=b"refs")
    older = fake("a", [space], {"1": [cells((0, 1, 5))]})
    newer = fake("b", [space], {})  # reading it raises
    found = compare(older, newer)
    assert found.regions == [] and found.totals["process"].changed == 0
    assert found.totals["process"].logical == 5 * PAGE


def test_processes_and_files() -> None:
    older = fake("a", [], {}, pids=(1, 2), files=(("/log", 5), ("/gone", 1)))
    newer = fake("b", [], {}, pids=(1, 3), files=(("/log", 9), ("/new", 2)))
    found = compare(older, newer)
    assert [(state, one.image_id) for state, one in found.processes] == [
        ("added", 3),
        ("removed", 2),
    ]
    assert [(state, one.path) for state, one in found.files] == [
        ("changed", "/log"),
        ("added", "/new"),
        ("removed", "/gone"),
    ]
    assert (found.older, found.newer) == ("a", "b")
