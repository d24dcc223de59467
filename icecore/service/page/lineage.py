"""The lineages of a job as a drawing: snapshots on a time axis, one row for each branch. Pure."""

from __future__ import annotations

import time
from collections.abc import Sequence

import msgspec

from icecore.store.format.state import SnapshotRecord

WIDTH, ROW, TOP, LEFT, RIGHT, BOTTOM = 1280, 28, 10, 18, 22, 26
#: Snapshots that are drawn; older ones are in the table.
MOST = 200
_MOST_ROWS = 24
_STEPS = (60, 300, 900, 3600, 10800, 21600, 43200, 86400, 7 * 86400, 30 * 86400, 365 * 86400)
_TICKS = 9


class Node(msgspec.Struct, frozen=True):
    """One snapshot. ``x`` and ``y`` are its centre, in the units of the drawing."""

    record: SnapshotRecord
    x: float
    y: float
    is_newest: bool


class Edge(msgspec.Struct, frozen=True):
    """From a snapshot to one that is based on it: a horizontal line, or a curve to another row."""

    path: str


class Tick(msgspec.Struct, frozen=True):
    """A mark on the time axis."""

    x: float
    text: str


class Drawing(msgspec.Struct, frozen=True):
    """The drawing; ``hidden`` snapshots are older than what it shows."""

    nodes: list[Node]
    edges: list[Edge]
    ticks: list[Tick]
    height: float
    hidden: int
    width: float = WIDTH


def draw(records: Sequence[SnapshotRecord]) -> Drawing:
    """Return the drawing of a job's snapshots, which are in commit order.

    A snapshot continues the row of its parent. If another snapshot already does, it begins a new row,
    like the first of a lineage.
    """
    shown = records[-MOST:]
    rows: dict[str, int] = {}
    tips: dict[str, int] = {}
    used = 0
    for record in shown:
        row = tips.pop(record.parent, None)
        if row is None:
            row, used = used, used + 1
        rows[record.snapshot] = row
        tips[record.snapshot] = row
    row_of = {name: min(row, _MOST_ROWS - 1) for name, row in rows.items()}
    count = min(max(used, 1), _MOST_ROWS)
    first = shown[0].created_ns / 1e9 if shown else 0.0
    last = shown[-1].created_ns / 1e9 if shown else 0.0
    span = max(last - first, 1.0)

    def place(at: float) -> float:
        return round(LEFT + (at - first) / span * (WIDTH - LEFT - RIGHT), 1)

    nodes = [
        Node(
            record,
            place(record.created_ns / 1e9),
            TOP + ROW * row_of[record.snapshot] + ROW / 2,
            record is shown[-1],
        )
        for record in shown
    ]
    at = {node.record.snapshot: node for node in nodes}
    edges = [
        Edge(_path(at[node.record.parent], node)) for node in nodes if node.record.parent in at
    ]
    height = TOP + ROW * count + BOTTOM
    return Drawing(nodes, edges, _ticks(first, last, place), height, len(records) - len(shown))


def _path(old: Node, new: Node) -> str:
    if old.y == new.y:
        return f"M{old.x} {old.y}H{new.x}"
    bend = min(old.x + 24, (old.x + new.x) / 2)
    return f"M{old.x} {old.y}C{bend} {old.y} {old.x} {new.y} {bend} {new.y}H{new.x}"


def _ticks(first: float, last: float, place: object) -> list[Tick]:
    assert callable(place)
    if last <= first:
        return [Tick(LEFT, time.strftime("%H:%M:%S", time.localtime(first)))] if first else []
    step = next((one for one in _STEPS if (last - first) / one <= _TICKS), _STEPS[-1])
    if last - first < _STEPS[0]:
        step = max(1, int((last - first) / 4))
    form = "%H:%M:%S" if step < 60 else "%H:%M" if step < 86400 else "%m-%d"
    local = time.localtime(first)
    offset = local.tm_gmtoff or 0
    mark = (int(first + offset) // step + 1) * step - offset
    ticks = []
    while mark <= last:
        ticks.append(Tick(place(mark), time.strftime(form, time.localtime(mark))))
        mark += step
    return ticks or [Tick(place(last), time.strftime("%H:%M:%S", time.localtime(last)))]
