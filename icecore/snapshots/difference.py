"""Differences between two snapshots, computed from their maps alone.

No memory is read, so bytes count by whole cells (1 MiB).
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Literal, NamedTuple, Protocol

import msgspec
import numpy as np

from icecore.sizes import PAGE
from icecore.store.format.archive import container_title
from icecore.store.format.cell import CELL, Records, data_pages
from icecore.store.format.contract import read_run
from icecore.store.format.data import (
    MAX_TABLE,
    Entry,
    data_spaces,
    decode_entries,
    read_data,
)
from icecore.store.format.manifest import Manifest, OpenFile, Process, Region, Space

State = Literal["added", "removed", "changed"]


class Reader(Protocol):
    """The part of a snapshot's reader that a comparison needs."""

    @property
    def manifest(self) -> Manifest:
        """Return the snapshot's manifest."""

    def records(self, space: Space) -> list[Records]:
        """Return the CELL records of a space, one array per region."""

    def content(self, space: Space, most: int) -> bytearray:
        """Return the bytes of a small space of a file."""


class RegionChange(msgspec.Struct, frozen=True):
    """A region that differs.

    Attributes:
        space: Kind of its space: process, shared, file, image, device.
        key: The key of its space: the process's id, the file's path, …
        kind: Kind of the region: anonymous, heap, stack, …
        name: What the region maps; empty for anonymous memory.
        start: Its start address, or 0.
        length: Its length in bytes.
        cells: Cells (1 MiB) that differ.
        changed: Data bytes of those cells in the newer snapshot (for a removed region, in the
            older).
        stored: Bytes in the repository of those cells' chunks that the older snapshot does not use.
    """

    state: State
    space: str
    key: str
    kind: str
    name: str
    start: int
    length: int
    cells: int
    changed: int
    stored: int


class Total(msgspec.Struct, frozen=True):
    """Bytes of one kind of space: all data of the newer snapshot, data that differs, and the size of
    the latter in the repository.
    """

    logical: int
    changed: int
    stored: int


class Difference(msgspec.Struct, frozen=True):
    """What differs between two snapshots.

    Attributes:
        older, newer: Their ids.
        processes: Processes that were added, removed, or run another program.
        files: Open files that were added, removed, or have another size or mtime.
        regions: Regions that differ.
        totals: Bytes by kind of space.
        data: Paths in data directories that were added, removed, or changed; and their sizes in
            bytes in the newer snapshot (for a removed one, in the older).
        containers: Which container the older and the newer were imported from; empty: from none.
    """

    older: str
    newer: str
    processes: list[tuple[State, Process]]
    files: list[tuple[State, OpenFile]]
    regions: list[RegionChange]
    totals: dict[str, Total]
    containers: tuple[str, str] = ("", "")
    data: list[tuple[State, str, int]] = msgspec.field(default_factory=list)


class _Folders(NamedTuple):
    """The directories of the instances of two snapshots."""

    older: str
    newer: str


def compare(older: Reader, newer: Reader) -> Difference:
    """Compare two snapshots.

    Regions match by their origin: snapshots of one lineage share addresses, others match only
    where regions happen to start at the same address.

    Raises:
        Damaged: A map is damaged.
        ObjectMissing: A map is missing.
    """
    own = _Folders(_own_folder(older.manifest), _own_folder(newer.manifest))
    before = {
        (space.kind, _known_as(space.key, own.older)): space for space in older.manifest.spaces
    }
    after = {
        (space.kind, _known_as(space.key, own.newer)): space for space in newer.manifest.spaces
    }
    known: set[bytes] = set()
    pairs: list[tuple[Space, list[Records], Space, list[Records]]] = []
    for key in [*after, *(key for key in before if key not in after)]:
        some = after.get(key) or before[key]
        nothing = Space(some.kind, some.key, 0, [])
        old, new = before.get(key, nothing), after.get(key, nothing)
        old_records = older.records(old) if old.regions else []
        # Equal references mean equal content, so the same map is not read twice.
        same = old.regions == new.regions and old.nodes == new.nodes
        new_records = old_records if same else newer.records(new) if new.regions else []
        pairs.append((old, old_records, new, new_records))
        known.update(_chunks(old_records))
    regions: list[RegionChange] = []
    totals: dict[str, Total] = {}
    for old, old_records, new, new_records in pairs:
        found = list(_regions(old, old_records, new, new_records, known))
        regions.extend(found)
        total = totals.get(new.kind, Total(0, 0, 0))
        totals[new.kind] = Total(
            total.logical + sum(int(data_pages(records).sum()) * PAGE for records in new_records),
            total.changed + sum(region.changed for region in found if region.state != "removed"),
            total.stored + sum(region.stored for region in found),
        )
    return Difference(
        older.manifest.snapshot,
        newer.manifest.snapshot,
        _processes(older.manifest, newer.manifest, own),
        _files(older.manifest, newer.manifest, own),
        regions,
        totals,
        (container_title(older.manifest), container_title(newer.manifest)),
        _data(older, newer),
    )


def _data(older: Reader, newer: Reader) -> list[tuple[State, str, int]]:
    """Compare the tables of the data directories."""
    before, after = _entries(older), _entries(newer)
    found: list[tuple[State, str, int]] = []
    for path, entry in after.items():
        earlier = before.pop(path, None)
        if earlier is None:
            found.append(("added", path, entry.size))
        elif _looks(earlier) != _looks(entry):
            found.append(("changed", path, entry.size))
    return found + [("removed", path, entry.size) for path, entry in before.items()]


def _looks(entry: Entry) -> tuple[object, ...]:
    """Return what of an entry must be equal: of a directory not its time, which is its entries'."""
    time = entry.mtime_ns if entry.kind in ("file", "symlink") else 0
    about = (entry.kind, entry.mode, entry.user, entry.group, entry.size, entry.target)
    return (*about, time, entry.attributes)


def _entries(reader: Reader) -> dict[str, Entry]:
    found: dict[str, Entry] = {}
    for one in read_data(reader.manifest):
        table, content = data_spaces(reader.manifest, one.path)
        for entry in decode_entries(reader.content(table, MAX_TABLE), one.path, content.size):
            if entry.path:
                found[f"{one.path}/{os.fsdecode(entry.path)}"] = entry
    return found


def _own_folder(manifest: Manifest) -> str:
    """Return the directory of the instance, in which its own files have a different path in each
    instance; empty if `icecore run` did not start the job.

    Raises:
        Damaged: The record of the run is damaged.
    """
    run = read_run(manifest)
    return os.path.dirname(run.files.status) if run is not None else ""


def _known_as(path: str, folder: str) -> str:
    """Return a path that names the same file in both snapshots.

    Args:
        folder: The directory of the snapshot's instance.
    """
    return f"INSTANCE{path[len(folder) :]}" if folder and path.startswith(f"{folder}/") else path


def _chunks(records: Iterable[Records]) -> Iterable[bytes]:
    for array in records:
        ids = np.ascontiguousarray(array["chunk"]).tobytes()
        yield from (ids[at : at + 32] for at in range(0, len(ids), 32))


def _regions(
    old: Space,
    old_records: list[Records],
    new: Space,
    new_records: list[Records],
    known: set[bytes],
) -> Iterable[RegionChange]:
    before = {
        region.origin: (region, records)
        for region, records in zip(old.regions, old_records, strict=True)
    }
    counted: set[bytes] = set()
    for region, records in zip(new.regions, new_records, strict=True):
        earlier, had = before.pop(region.origin, (None, np.empty(0, CELL)))
        differs = records[~_equal(records, had)]
        gone = had[~np.isin(had["cell"], records["cell"])]
        if earlier is not None and not len(differs) and not len(gone):
            continue
        stored = 0
        lengths = differs["place"]["length"].tolist()
        for chunk, length in zip(_chunks([differs]), lengths, strict=True):
            if chunk not in known and chunk not in counted:
                counted.add(chunk)
                stored += length
        changed = int(data_pages(differs).sum()) * PAGE
        yield _change(
            "added" if earlier is None else "changed",
            new,
            region,
            len(differs) + len(gone),
            changed,
            stored,
        )
    for region, records in before.values():
        yield _change(
            "removed", old, region, len(records), int(data_pages(records).sum()) * PAGE, 0
        )


def _change(
    state: State, space: Space, region: Region, cells: int, changed: int, stored: int
) -> RegionChange:
    return RegionChange(
        state,
        space.kind,
        space.key,
        region.kind,
        region.name,
        region.start,
        region.length,
        cells,
        changed,
        stored,
    )


def _equal(records: Records, others: Records) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
    """Return which of ``records`` (ascending by cell) equal the record of the same cell in
    ``others``.
    """
    if not len(others):
        return np.zeros(len(records), np.bool_)
    at = np.minimum(np.searchsorted(others["cell"], records["cell"]), len(others) - 1)
    there = others[at]
    same: np.ndarray[tuple[int], np.dtype[np.bool_]] = (
        (there["cell"] == records["cell"])
        & (there["chunk"] == records["chunk"]).all(axis=1)
        & (there["data"] == records["data"]).all(axis=1)
        & (there["zero"] == records["zero"]).all(axis=1)
    )
    return same


def _processes(older: Manifest, newer: Manifest, own: _Folders) -> list[tuple[State, Process]]:
    before = {process.image_id: process for process in older.processes}
    found: list[tuple[State, Process]] = []
    for process in newer.processes:
        earlier = before.pop(process.image_id, None)
        if earlier is None:
            found.append(("added", process))
        elif (earlier.command, earlier.threads) != (process.command, process.threads) or (
            _known_as(earlier.executable, own.older) != _known_as(process.executable, own.newer)
        ):
            found.append(("changed", process))
    return found + [("removed", process) for process in before.values()]


def _files(older: Manifest, newer: Manifest, own: _Folders) -> list[tuple[State, OpenFile]]:
    before = {_known_as(file.path, own.older): file for file in older.files}
    found: list[tuple[State, OpenFile]] = []
    for file in newer.files:
        earlier = before.pop(_known_as(file.path, own.newer), None)
        if earlier is None:
            found.append(("added", file))
        elif (earlier.size, earlier.mtime_ns) != (file.size, file.mtime_ns):
            found.append(("changed", file))
    return found + [("removed", file) for file in before.values()]
