"""Plans what is read in which order: cells in restore order, in batches of coalesced ranges of
shards.

Pure: the plan follows from the snapshot's own records, without an index. A batch is what one worker
or one fetch handles: the ranges to read, and for each cell where its stored bytes (and its base's)
lie in them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from typing import NamedTuple

from icecore.sizes import CELL_BYTES
from icecore.store.format.cell import Records

#: Stored bytes are never longer than the cell plus this (icecore.store.format.codec.MAX_OVERHEAD,
#: and room for encryption).
STORED_LIMIT = CELL_BYTES + 1024
MAX_CELLS = 64
#: Unwanted bytes between two chunks that are read too: at most, and as a share of the storage's
#: preferred read.
_MAX_GAP = 1 << 20
_GAP_SHARE = 16
_ROWS = 256


class Read(NamedTuple):
    """A range of a shard, and where in the batch's buffer it goes."""

    shard: bytes
    offset: int
    length: int
    at: int


class Cell(NamedTuple):
    """One cell of a batch: its row, and in the batch's buffer the bounds of its stored bytes and of
    its base's (0, 0 without one).
    """

    row: int
    start: int
    stop: int
    base_start: int
    base_stop: int


class Batch(NamedTuple):
    """Ranges that are read together into a buffer of ``size`` bytes, and the cells in them."""

    reads: tuple[Read, ...]
    cells: tuple[Cell, ...]
    size: int


class _Stored(NamedTuple):
    shard: bytes
    offset: int
    length: int


def room_for(read_size: int) -> int:
    """Return the bytes of buffer that the largest batch for ``read_size`` needs."""
    return read_size + 2 * STORED_LIMIT


def gap_for(read_size: int) -> int:
    """Return how many unwanted bytes cost less than another read, for storage with this preferred
    read.
    """
    return min(_MAX_GAP, read_size // _GAP_SHARE)


def plan_batches(
    records: Records, order: Iterable[int], *, gap: int, read_size: int, cells: int = MAX_CELLS
) -> Iterator[Batch]:
    """Yield batches that cover the rows of ``order`` in that order.

    Args:
        records: CELL records of all spaces.
        order: Rows that have data pages.
        gap: Unwanted bytes between two chunks up to which both are read in one range.
        read_size: Bytes of one batch; a single cell may take more.
        cells: Cells of one batch at most.

    Yields:
        Batches of at most `room_for` (read_size) bytes. Their ranges are ascending, disjoint, and
        at most ``read_size`` long unless they hold a single chunk.
    """
    rows: list[int] = []
    places: list[tuple[_Stored, _Stored]] = []
    size = 0
    for row, own, base in _all_stored(records, order):
        more = own.length + base.length
        if rows and (size + more > read_size or len(rows) >= cells):
            yield _batch(rows, places, gap, read_size)
            rows, places, size = [], [], 0
        rows.append(row)
        places.append((own, base))
        size += more
    if rows:
        yield _batch(rows, places, gap, read_size)


def plan_one(records: Records, row: int) -> Batch:
    """Return the batch of one cell, for a page fault."""
    ((_, own, base),) = _all_stored(records, [row])
    return _batch([row], [(own, base)], 0, 0)


def interleave(parts: Sequence[Sequence[int]]) -> list[int]:
    """Merge the rows of several processes so that all progress in proportion to their size, in runs
    of a few cells: neighbours in a shard stay together.
    """
    if len(parts) == 1:
        return list(parts[0])
    run = 16
    keyed: list[tuple[float, int, int]] = []
    for number, part in enumerate(parts):
        keyed.extend(((start + 1) / len(part), number, start) for start in range(0, len(part), run))
    keyed.sort()
    return [row for _, number, start in keyed for row in parts[number][start : start + run]]


def _all_stored(records: Records, order: Iterable[int]) -> Iterator[tuple[int, _Stored, _Stored]]:
    """Yield each row, and where its chunk and its base lie. Many rows are read from the table at
    once: a field of one record costs a microsecond.
    """
    rows = iter(order)
    while some := list(islice(rows, _ROWS)):
        table = records[some]
        yield from zip(some, _stored(table["place"]), _stored(table["base_place"]), strict=True)


def _stored(places: Records) -> list[_Stored]:
    lengths = places["length"].tolist()
    if max(lengths) > STORED_LIMIT:
        raise ValueError(f"a chunk of {max(lengths)} stored bytes is longer than a cell")
    shards = places["shard"].tobytes()
    width = len(shards) // len(places)
    names = [shards[at : at + width] for at in range(0, len(shards), width)]
    return list(map(_Stored, names, places["offset"].tolist(), lengths))


def _batch(
    rows: list[int], places: list[tuple[_Stored, _Stored]], gap: int, read_size: int
) -> Batch:
    wanted = sorted({place for pair in places for place in pair if place.length})
    room = max(room_for(read_size), sum(place.length for place in wanted))
    spare = room - sum(place.length for place in wanted)
    reads: list[Read] = []
    at: dict[_Stored, int] = {}
    size = 0
    for place in wanted:
        last = reads[-1] if reads else None
        if last is not None and last.shard == place.shard:
            end = last.offset + last.length
            between = place.offset - end
            longer = max(end, place.offset + place.length) - last.offset
            if between <= min(gap, spare) and longer <= max(read_size, last.length):
                spare -= max(0, between)
                reads[-1] = last._replace(length=longer)
                at[place] = last.at + place.offset - last.offset
                size = last.at + longer
                continue
        reads.append(Read(place.shard, place.offset, place.length, size))
        at[place] = size
        size += place.length
    cells = []
    for row, (own, base) in zip(rows, places, strict=True):
        start = at.get(own, 0)
        base_start = at.get(base, 0)
        cells.append(Cell(row, start, start + own.length, base_start, base_start + base.length))
    return Batch(tuple(reads), tuple(cells), size)
